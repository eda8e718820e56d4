"""Functions of many designs, compiled so that a CPU computes nothing twice.

XLA's CPU fusion makes one kernel of everything that an output needs, and so copies what several
results share into each of them; an estimate is all sharing, and kernels of a gradient become too
long to be vectorised. Without fusion every single product goes through memory. In between is what
`chained` asks for: a kernel ends where its result is used more than once and is much to compute
again: twice the rate of fused estimates, three times that of unfused gradients
(`benchmarks/RESULTS.md`).

Kernels are also asked to be as wide as a core's registers: LLVM halves them otherwise.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.extend import core

_P = ParamSpec("_P")
_R = TypeVar("_R")

_WIDE = {"xla_cpu_prefer_vector_width": "512"}

CHAINED: Mapping[str, str] = {**_WIDE, "xla_disable_hlo_passes": "cse_barrier_expander"}
"""Compiler options for `chained` functions on a CPU: keeps the barriers until kernels are made."""

UNFUSED: Mapping[str, str] = {"xla_disable_hlo_passes": "fusion,cpu-instruction-fusion"}
"""Compiler options for programs with many results on a CPU that compile fastest: a kernel for each
operation, for searches that evaluate no more than some hundred thousand designs."""

_SHORT = 128
"""Arrays of fewer elements cost nothing to compute again."""

_HEAVY = frozenset(
    "cos div erf erfc exp expm1 integer_pow log log1p pow rsqrt scan sin sqrt tanh".split()
)
"""Operations that cost about as much as eight of the others."""

_WORTH = 32
"""Operations that a value must spare to be worth its way through memory."""

_VIEWS = frozenset({"broadcast_in_dim", "convert_element_type", "reshape", "slice", "squeeze"})
"""Operations that cost nothing to do again."""


@dataclasses.dataclass(frozen=True)
class _Known:
    """A value that is known while tracing: a literal or a constant of an inner function."""

    value: Any


_Value = int | _Known


@dataclasses.dataclass(frozen=True)
class _Operation:
    """One operation of a flat program; values are known by number."""

    primitive: Any
    params: Mapping[str, Any]
    inputs: tuple[_Value, ...]
    outputs: tuple[int, ...]


def _called(params: Mapping[str, Any], name: str) -> Any:
    """Returns the function that an operation only calls, None if it does more than that."""
    match name:
        case "jit" | "pjit" | "closed_call":
            return params["jaxpr"]
        case "custom_jvp_call" | "custom_vjp_call":
            return params["call_jaxpr"]
        case _:
            return None


class _Flat:
    """A function's operations with those of the functions that it calls, in order."""

    def __init__(self, closed: Any) -> None:
        self.operations: list[_Operation] = []
        self._count = 0
        inputs = [self._number() for _ in closed.jaxpr.invars]
        self.inputs = tuple(inputs)
        self.outputs = tuple(self._inline(closed, inputs))

    def _number(self) -> int:
        self._count += 1
        return self._count

    def _inline(self, closed: Any, inputs: Sequence[_Value]) -> list[_Value]:
        jaxpr = closed.jaxpr
        values: dict[Any, _Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        values |= {v: _Known(c) for v, c in zip(jaxpr.constvars, closed.consts, strict=True)}

        def read(atom: Any) -> _Value:
            return _Known(atom.val) if isinstance(atom, core.Literal) else values[atom]

        for eqn in jaxpr.eqns:
            given = [read(atom) for atom in eqn.invars]
            inner = _called(eqn.params, eqn.primitive.name)
            if inner is not None:
                made = self._inline(inner, given)
            else:
                made = [self._number() for _ in eqn.outvars]
                self.operations.append(
                    _Operation(eqn.primitive, eqn.params, tuple(given), tuple(made))
                )
            values.update(zip(eqn.outvars, made, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def needed(self) -> tuple[list[_Operation], collections.Counter[int]]:
        """Returns the operations that outputs depend on, and how often each value is read."""
        uses = collections.Counter(v for v in self.outputs if isinstance(v, int))
        kept = []
        for operation in reversed(self.operations):
            if any(uses[v] for v in operation.outputs):
                kept.append(operation)
                uses.update(v for v in operation.inputs if isinstance(v, int))
        return kept[::-1], uses


def chained(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Returns the function with what several of its results share computed once.

    For functions of whole arrays, `jax.vmap` and `jax.grad` inside, and no keyword arguments; to be
    compiled with `CHAINED`, without effect otherwise. Values are those of the function to within a
    rounding; derivatives taken outside are right, and no faster.

    >>> chained(lambda x: (x * 2, x * 2 + 1))(jnp.asarray(3.0))[1].item()
    7.0
    """

    @jax.custom_jvp
    def barred(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        flat = _Flat(closed)
        values: dict[int, Any] = dict(zip(flat.inputs, jax.tree.leaves(args), strict=True))

        def read(value: _Value) -> Any:
            return value.value if isinstance(value, _Known) else values[value]

        operations, uses = flat.needed()
        # What it would cost to compute a value again from those that are kept.
        costs: dict[int, int] = collections.defaultdict(int)
        for operation in operations:
            primitive = operation.primitive
            made = primitive.bind(*map(read, operation.inputs), **operation.params)
            made = made if primitive.multiple_results else [made]
            cost = sum(costs[v] for v in operation.inputs if isinstance(v, int))
            cost += 8 if primitive.name in _HEAVY else int(primitive.name not in _VIEWS)
            for number, value in zip(operation.outputs, made, strict=True):
                spared = cost * (uses[number] - 1)
                keep = spared > _WORTH and jnp.size(value) >= _SHORT
                costs[number] = 0 if keep else cost
                values[number] = jax.lax.optimization_barrier(value) if keep else value
        return jax.tree.unflatten(jax.tree.structure(shape), map(read, flat.outputs))

    # Rules of derivatives are flattened away, and the barriers are of no use to a derivative.
    barred.defjvp(functools.partial(jax.jvp, function))
    return barred


def options(kind: Mapping[str, str]) -> dict[str, str]:
    """Returns compiler options of this backend: `CHAINED` and `UNFUSED` are for CPUs only."""
    return dict(kind) if jax.default_backend() == "cpu" else {}


def jit(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Returns the function compiled as `chained` wants it; it has no static arguments."""
    return jax.jit(chained(function), compiler_options=options(CHAINED))


def unfused(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Returns the function compiled as fast as can be; it has no static arguments."""
    return jax.jit(function, compiler_options=options(UNFUSED))
