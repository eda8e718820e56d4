"""What later runs need not do again: compiled programs, and programs traced and lowered.

JAX keeps compiled programs; tracing Python and lowering what it says is done anew in every process,
and takes longer than everything else that is left. `stored` keeps the lowered program beside them.
"""

import functools
import hashlib
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any


def folder() -> pathlib.Path:
    """Returns this user's cache folder for compiled programs."""
    home = pathlib.Path.home()
    if sys.platform == "win32":
        base = pathlib.Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    else:
        base = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return base / "perfmodel"


def enable_cache(path: str | os.PathLike[str] | None = None) -> pathlib.Path:
    """Turns on JAX's compilation cache in `path`, or this user's cache folder, and returns it.

    Programs compiled once are then read back in later runs. Importing perfmodel never does this:
    call it before the first estimate of a script. A folder already chosen through
    JAX_COMPILATION_CACHE_DIR is kept where no path is given.
    """
    import jax

    already = getattr(jax.config, "jax_compilation_cache_dir", None)
    chosen = already if path is None else None
    where = pathlib.Path(chosen or path or folder())
    jax.config.update("jax_compilation_cache_dir", os.fspath(where))
    # Every program, however small and quick to compile.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return where


def program(
    name: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    kind: Mapping[str, str] | None = None,
) -> Callable[..., Any]:
    """Returns `function`, compiled, from its lowered program on disk where a compilation cache is
    on.

    The program is filed under everything it depends on: the source of this package, the versions
    of JAX and Python, and the structure, shapes and types of `arguments`. A file that cannot be
    read is made again.

    Args:
        name: of the file. function: the same object every time.
        arguments: of a call. kind: `compiled.UNFUSED` (the default) or another of that module.
    """
    import jax

    options = _options(kind)
    where = getattr(jax.config, "jax_compilation_cache_dir", None)
    if not where:
        return _in_memory(function, options)
    leaves, structure = jax.tree.flatten(arguments)
    shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in map(_as_array, leaves))
    return _stored(name, function, structure, shapes, options, os.fspath(where))


def compilations(function: Callable[..., Any], kind: Mapping[str, str] | None = None) -> int:
    """Returns how often this process has compiled a function, where no compilation cache is on."""
    return _in_memory(function, _options(kind))._cache_size()


def _options(kind: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    from perfmodel import compiled

    return tuple(compiled.options(compiled.UNFUSED if kind is None else kind).items())


@functools.cache
def _in_memory(function: Callable[..., Any], options: tuple[tuple[str, str], ...]) -> Any:
    import jax

    return jax.jit(function, compiler_options=dict(options))


def _as_array(leaf: Any) -> Any:
    import numpy as np

    return leaf if hasattr(leaf, "dtype") else np.asarray(leaf)


@functools.cache
def _stored(
    name: str,
    function: Callable[..., Any],
    structure: Any,
    shapes: tuple[tuple[tuple[int, ...], str], ...],
    options: tuple[tuple[str, str], ...],
    where: str,
) -> Callable[..., Any]:
    import jax
    import jax.export

    platform = jax.default_backend()
    facts = (_sources(), jax.__version__, sys.version, platform, str(structure), str(shapes))
    key = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]
    path = pathlib.Path(where) / f"{name}-{key}.stablehlo"

    def flat(*leaves: Any) -> Any:
        return function(*jax.tree.unflatten(structure, leaves))

    try:
        exported = jax.export.deserialize(bytearray(path.read_bytes()))
    except Exception:  # whatever is wrong with the file, the program can be made again
        wanted = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
        exported = jax.export.export(jax.jit(flat), platforms=[platform])(*wanted)
        _write(path, bytes(exported.serialize()))
    run = jax.jit(exported.call, compiler_options=dict(options))
    return lambda *arguments: run(*map(_as_array, jax.tree.leaves(arguments)))


@functools.cache
def _sources() -> str:
    """Returns a digest of the source that programs are made from."""
    from perfmodel import models

    digest = hashlib.sha256()
    for folder_ in (pathlib.Path(__file__).parent, pathlib.Path(models.__path__[0])):
        for path in sorted(folder_.glob("*.py")):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _write(path: pathlib.Path, content: bytes) -> None:
    """Writes a file whole, or not at all: a cache that cannot be written is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as part:
            part.write(content)
        os.replace(part.name, path)
    except OSError:
        pass
