"""Functions and shapes by the names that a command line gives them."""

import importlib
import os
import sys
from collections.abc import Iterable
from typing import Any

import jax

from perfmodel import _jaxpr
from perfmodel.errors import InputError, nearest, shorten

_SHORT = {
    "bf16": "bfloat16", "f16": "float16", "fp16": "float16", "f32": "float32", "fp32": "float32",
    "f64": "float64", "fp8": "float8_e4m3fn", "f8": "float8_e4m3fn", "f8e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64",
    "u8": "uint8", "i4": "int4", "fp4": "float4_e2m1fn",
}  # fmt: skip
"""Short names of data types."""

_LONG = (*sorted(set(_SHORT.values())), "bool", "uint16", "uint32", "uint64", "complex64")


def shape(text: str) -> jax.ShapeDtypeStruct:
    """Returns the shape that `8,4096:bf16` says; bf16 where no data type is named.

    >>> shape("8,4096:i32"), shape("2").dtype.name, shape(":f32").shape
    (ShapeDtypeStruct(shape=(8, 4096), dtype=int32), 'bfloat16', ())
    """
    sizes, _, kind = text.strip().partition(":")
    name = _SHORT.get(kind.strip().lower() or "bf16", kind.strip().lower())
    if name not in _LONG:
        known = (*_SHORT, *_LONG)
        raise InputError(f"--shape: unknown data type {shorten(kind)!r}{nearest(kind, known)}")
    words = [word for word in sizes.replace("x", ",").split(",") if word.strip()]
    if not all(word.strip().isdecimal() for word in words) or (not words and ":" not in text):
        raise InputError(
            f"--shape: sizes and a data type are needed (8,4096:bf16), not {shorten(text)!r}"
        )
    return jax.ShapeDtypeStruct(tuple(map(int, words)), _jaxpr.dtype(name))


def target(text: str) -> Any:
    """Returns what `module:name` names; modules of the working directory are found too.

    Raises InputError where there is no such module or name, or where importing it fails.
    """
    module_name, _, path = text.strip().partition(":")
    if not module_name or not path:
        raise InputError(f"--trace: module:function is needed, not {shorten(text)!r}")
    if module_name.endswith(".py") or os.sep in module_name:
        dotted = module_name.removesuffix(".py").strip(os.sep).replace(os.sep, ".")
        raise InputError(f"--trace: a module is needed, not a file (try {dotted}:{path})")
    module = _import(module_name)
    found = module
    for part in path.split("."):
        if not hasattr(found, part):
            names = [name for name in dir(found) if not name.startswith("_")]
            raise InputError(
                f"--trace: {module_name} has no {shorten(path)!r}{nearest(part, names)}"
            )
        found = getattr(found, part)
    return found


def _import(name: str) -> Any:
    folder = os.getcwd()
    added = folder not in sys.path
    if added:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{name}.".startswith(f"{missing}."):
            raise InputError(
                f"--trace: no module named {shorten(missing)!r} here or installed"
            ) from None
        reason = shorten(" ".join(f"{type(error).__name__}: {error}".split()), 200)
        raise InputError(f"--trace: importing {shorten(name)} raised {reason}") from error
    finally:
        if added:
            sys.path.remove(folder)


def call(text: str, shapes: Iterable[str]) -> tuple[Any, tuple[Any, ...]]:
    """Returns a function and its arguments.

    `text` names a function, whose arguments `shapes` are; or a tuple of a function and arguments,
    as `perfmodel.trace` takes them, where they are more than arrays.
    """
    found, listed = target(text), tuple(map(shape, shapes))
    if isinstance(found, tuple) and found and callable(found[0]):
        if listed:
            raise InputError(f"--shape: {text} holds its arguments already")
        return found[0], found[1:]
    if not callable(found):
        raise InputError(
            f"--trace: {text} is no function, nor a tuple of one and its arguments, but "
            f"{shorten(type(found).__name__)}"
        )
    return found, listed
