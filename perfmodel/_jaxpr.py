"""JAX programs as plain records: the one module that knows how JAX writes a program down.

`record` traces a function on abstract values (nothing is allocated or run), leaves out what no
result needs, and writes down every primitive that is left: inputs and outputs by number, shapes
as `perfmodel.symbols` sizes, and the few parameters that counts depend on. Calls (jit, remat,
custom derivatives, shard_map) are written out in place; loops and branches keep their bodies.
"""

import dataclasses
import functools
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import partial_eval

from perfmodel.errors import InputError
from perfmodel.symbols import Size, parse


@dataclasses.dataclass(frozen=True)
class Value:
    """A value of a program: its shape, the name of its data type, and bits per element."""

    shape: tuple[Size, ...]
    dtype: str
    bits: int

    @property
    def elements(self) -> Size:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> Size:
        """Bytes of all elements [B]; whole bytes where the elements fill them."""
        bits = self.elements * self.bits
        return bits // 8 if self.bits % 8 == 0 else (bits + 7) // 8


@dataclasses.dataclass(frozen=True)
class Step:
    """One primitive: numbers of its inputs (None where a literal) and outputs, its parameters.

    `where` names the calls it is in. `bodies` are those of a loop or of branches, `ranks` the
    sizes of the group of a collective.
    """

    primitive: str
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    params: Mapping[str, Any]
    where: str
    bodies: "tuple[Body, ...]" = ()
    ranks: int = 1


@dataclasses.dataclass
class Body:
    """A program: steps in order, and numbers of its inputs, of those inputs that are not carried
    over from step to step of a loop (`given`), and of its results."""

    values: list[Value] = dataclasses.field(default_factory=list)
    steps: list[Step] = dataclasses.field(default_factory=list)
    inputs: tuple[int, ...] = ()
    given: set[int] = dataclasses.field(default_factory=set)
    results: tuple[int | None, ...] = ()
    mesh_ranks: int = 1

    def add(self, value: Value) -> int:
        """Returns the number of a new value."""
        self.values.append(value)
        return len(self.values) - 1


# Calls whose body runs once, in place; by the parameter that holds it.
_CALLS = {
    "jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr",
    "remat": "jaxpr", "remat2": "jaxpr", "checkpoint": "jaxpr", "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr", "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_lin": "call_jaxpr", "shard_map": "jaxpr",
}  # fmt: skip

# Those that are named by what they are, not by what was called.
_SCOPES = {"checkpoint": "remat", "remat2": "remat", "remat": "remat", "shard_map": "shard_map"}

_NARROW = {"int4": 4, "uint4": 4, "float4_e2m1fn": 4, "int2": 2, "uint2": 2}


def value_of(aval: Any) -> Value:
    """Returns the record of an abstract value, or of anything with `shape` and `dtype`."""
    shape = tuple(_size(d) for d in getattr(aval, "shape", ()))
    dtype = getattr(aval, "dtype", None)
    name = str(dtype) if dtype is not None else type(aval).__name__
    return Value(shape, name, _NARROW.get(name, 8 * int(getattr(dtype, "itemsize", 0))))


def _size(dimension: Any) -> Size:
    """Returns a dimension as an integer, or as an expression where it is symbolic."""
    if isinstance(dimension, core.Var):
        raise InputError("trace: a shape depends on data, and cannot be counted")
    if isinstance(dimension, int) or hasattr(dimension, "__index__"):
        return operator.index(dimension)
    # JAX prints symbolic dimensions in the syntax in which it reads them.
    return _parsed(str(dimension))


_parsed = functools.lru_cache(maxsize=4096)(parse)


def record(
    function: Callable[..., Any], arguments: Sequence[Any]
) -> tuple[Body, list[Value], list[Value]]:
    """Returns the program that a function runs on flat abstract arguments, the values of arrays it
    has captured, and its results."""
    closed = jax.make_jaxpr(function)(*arguments)
    jaxpr = closed.jaxpr
    consts, results = len(jaxpr.constvars), [value_of(v.aval) for v in jaxpr.outvars]
    pruned, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    body = Body()
    captured = [value_of(v.aval) for v in jaxpr.constvars]
    _fill(body, pruned, "", {})
    assert len(body.inputs) == consts + len(arguments)
    return body, captured, results


def _fill(body: Body, jaxpr: Any, where: str, axes: Mapping[str, int]) -> None:
    """Writes a whole program into an empty body."""
    variables = (*jaxpr.constvars, *jaxpr.invars)
    known = {v: body.add(value_of(v.aval)) for v in variables}
    body.inputs = tuple(known[v] for v in variables)
    body.given |= set(body.inputs)
    body.results = _steps(body, jaxpr, known, where, axes)


def _steps(
    body: Body, jaxpr: Any, known: dict[Any, int], where: str, axes: Mapping[str, int]
) -> tuple[int | None, ...]:
    def number(atom: Any) -> int | None:
        return None if isinstance(atom, core.Literal) else known.get(atom)

    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        inputs = tuple(number(v) for v in eqn.invars)
        place = _join(where, _named(eqn))
        if name in _CALLS and _CALLS[name] in eqn.params:
            for v, found in zip(eqn.outvars, _inlined(body, eqn, inputs, place, axes), strict=True):
                if found is not None:
                    known[v] = found
            continue
        outputs = tuple(body.add(value_of(v.aval)) for v in eqn.outvars)
        known.update(zip(eqn.outvars, outputs, strict=True))
        bodies = tuple(_bodies(eqn, place, axes))
        for inner in bodies:
            body.mesh_ranks = max(body.mesh_ranks, inner.mesh_ranks)
        body.steps.append(
            Step(name, inputs, outputs, _params(eqn), place, bodies, _ranks(eqn, axes))
        )
    return tuple(number(v) for v in jaxpr.outvars)


def _inlined(
    body: Body, eqn: Any, inputs: Sequence[int | None], where: str, axes: Mapping[str, int]
) -> list[int | None]:
    """Returns the results of a call, written out in place."""
    name = eqn.primitive.name
    inner = _open(eqn.params[_CALLS[name]])
    label = _SCOPES.get(name) or str(eqn.params.get("name", ""))
    place = _join(where, label)
    if name == "shard_map":
        sizes = dict(eqn.params["mesh"].shape)
        manual = eqn.params.get("newly_manual_axes") or eqn.params.get("manual_axes") or sizes
        axes = {**axes, **{a: int(n) for a, n in sizes.items() if a in manual}}
        body.mesh_ranks = max(body.mesh_ranks, math.prod(axes.values()))
    known = {v: body.add(value_of(v.aval)) for v in inner.constvars}
    body.given |= set(known.values())
    for v, outer in zip(inner.invars, inputs, strict=True):
        own = value_of(v.aval)
        if outer is None or own != body.values[outer]:
            # A shard of the outer value, or a literal.
            known[v] = body.add(own)
            body.steps.append(Step("shard", (outer,), (known[v],), {}, place))
        else:
            known[v] = outer
    found = list(_steps(body, inner, known, place, axes))
    for i, v in enumerate(eqn.outvars):
        outer, one = value_of(v.aval), found[i]
        if one is None or outer != body.values[one]:
            found[i] = body.add(outer)
            body.steps.append(Step("shard", (one,), (found[i] or 0,), {}, place))
    return found


def _bodies(eqn: Any, where: str, axes: Mapping[str, int]) -> list[Body]:
    name, params = eqn.primitive.name, eqn.params
    made: list[Body] = []

    def make(program: Any, label: str, carried: range = range(0)) -> None:
        body = Body()
        jaxpr = _open(program)
        _fill(body, jaxpr, _join(where, label), axes)
        first = len(jaxpr.constvars)
        body.given -= {body.inputs[first + i] for i in carried}
        made.append(body)

    if name == "scan":
        start = params["num_consts"]
        make(params["jaxpr"], "scan", range(start, start + params["num_carry"]))
    elif name == "while":
        start = params["body_nconsts"]
        count = len(_open(params["body_jaxpr"]).invars)
        make(params["cond_jaxpr"], "while")
        make(params["body_jaxpr"], "while", range(start, count))
    elif name == "cond":
        for i, branch in enumerate(params["branches"]):
            make(branch, f"branch {i}")
    return made


def _open(program: Any) -> Any:
    return program.jaxpr if isinstance(program, core.ClosedJaxpr) else program


def _ranks(eqn: Any, axes: Mapping[str, int]) -> int:
    """Returns the size of the group that a collective runs over; 1 for anything else."""
    params = eqn.params
    named = params.get("axes", params.get("axis_name", ()))
    listed = named if isinstance(named, tuple | list | frozenset | set) else (named,)
    groups = params.get("axis_index_groups")
    if groups:
        return len(groups[0])
    return math.prod(axes[a] for a in listed if isinstance(a, str) and a in axes)


# Parameters that counts depend on; the others may hold anything, a function among them.
_KEPT = (
    "dimension_numbers", "batch_group_count", "feature_group_count", "axes", "length",
    "ragged_dot_dimension_numbers", "new_dtype", "fft_lengths", "dimension", "perm", "dimensions",
)  # fmt: skip


def _params(eqn: Any) -> dict[str, Any]:
    found = {key: eqn.params[key] for key in _KEPT if key in eqn.params}
    if eqn.primitive.name == "scan":
        found["length"] = _size(found["length"])
    return found


def _named(eqn: Any) -> str:
    """Returns the scopes that a step was named by (`jax.named_scope`, Flax modules)."""
    stack = str(getattr(getattr(eqn, "source_info", None), "name_stack", ""))
    # Transformations wrap a name: transpose(jvp(mlp)) is mlp.
    return "/".join(filter(None, (re.sub(r"\w+\(|\)", "", part) for part in stack.split("/"))))


def _join(where: str, label: str) -> str:
    # A function that calls its like by the same name (relu in JAX) is one place.
    if where == label or where.endswith("/" + label):
        return where
    return f"{where}/{label}" if where and label else where or label


def is_array(leaf: Any) -> bool:
    """Tells whether a leaf stands for an array: it has a shape and a data type."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns the abstract value of an array, of what stands for one."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def dtype(name: str) -> Any:
    """Returns a data type by its name; raises TypeError where there is none."""
    return jnp.dtype(name)
