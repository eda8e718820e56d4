"""Exact staircases with useful slopes, and arithmetic that works on Python numbers and tracers.

There is one evaluation and it is exact: `ceil` returns the ceiling. Where the derivative of a
staircase would be zero almost everywhere, and so hide a design variable from descent, its
derivative here is the slope of its chord. The same helpers accept Python integers and then return
Python integers, so that counts can be checked exactly beyond 2**53.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

Real = Any
"""A Python number, a NumPy scalar or a traced scalar array."""

# A float32 quotient that should be a whole number can miss it by an ulp or two; a ceiling that
# took 2.0000002 for 3 would charge a whole extra tile.
_SLACK = 5e-7


def _is_python(*values: Real) -> bool:
    return all(isinstance(v, int | float) for v in values)


@jax.custom_jvp
def _ceil(x: Array) -> Array:
    return jnp.ceil(x * (1.0 - _SLACK))


@_ceil.defjvp
def _ceil_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    # The chord through the upper corners of the steps, (n, n) to (n + 1, n + 1), has slope 1.
    return _ceil(primals[0]), tangents[0]


@jax.custom_jvp
def _floor(x: Array) -> Array:
    return jnp.floor(x * (1.0 + _SLACK))


@_floor.defjvp
def _floor_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return _floor(primals[0]), tangents[0]


def floor(x: Real) -> Real:
    """Returns ⌊x⌋ for x ≥ 0; its derivative is 1, as that of `ceil`.

    >>> floor(2.75), float(floor(jnp.asarray(2.75))), float(jax.grad(floor)(2.75))
    (2, 2.0, 1.0)
    """
    return math.floor(x) if _is_python(x) else _floor(x)


def ceil(x: Real) -> Real:
    """Returns ⌈x⌉ for x ≥ 0; its derivative is 1, the slope of the chord over any whole step.

    Quotients within 5e-7 (relative) above a whole number count as that number.

    >>> ceil(2.25), float(ceil(jnp.asarray(2.25))), float(jax.grad(ceil)(2.25))
    (3, 3.0, 1.0)
    """
    return math.ceil(x) if _is_python(x) else _ceil(x)


def ceil_div(a: Real, b: Real) -> Real:
    """Returns ⌈a/b⌉, exactly on Python integers.

    >>> ceil_div(65, 64), float(ceil_div(jnp.asarray(65.0), 64))
    (2, 2.0)
    """
    if isinstance(a, int) and isinstance(b, int):
        return -(-a // b)
    return ceil(a / b)


@jax.custom_jvp
def _inverse(x: Array) -> Array:
    return 1.0 / x


@_inverse.defjvp
def _inverse_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    value = _inverse(primals[0])
    return value, -(value * value) * tangents[0]


def inverse(x: Real) -> Array:
    """Returns 1/x, with a derivative that reuses the value instead of dividing again.

    >>> float(inverse(4.0)), float(jax.grad(inverse)(4.0))
    (0.25, -0.0625)
    """
    return _inverse(as_real(x))


def divide(a: Real, b: Real) -> Real:
    """Returns a/b, as a Python integer where both are and b divides a."""
    if isinstance(a, int) and isinstance(b, int) and a % b == 0:
        return a // b
    return a / b if _is_python(a, b) else a * inverse(b)


# jax.numpy's maximum shares the derivative of a tie between its arguments, at the price of a
# division and four selections wherever it is differentiated. These pass it to one argument: a
# third of a gradient's work, and as much of its compile time.


@jax.custom_jvp
def _maximum(a: Array, b: Array) -> Array:
    return jnp.maximum(a, b)


@_maximum.defjvp
def _maximum_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> Any:
    a, b = primals
    return jnp.maximum(a, b), jnp.where(a > b, *tangents)


@jax.custom_jvp
def _minimum(a: Array, b: Array) -> Array:
    return jnp.minimum(a, b)


@_minimum.defjvp
def _minimum_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> Any:
    a, b = primals
    return jnp.minimum(a, b), jnp.where(a < b, *tangents)


def _same(a: Real, b: Real) -> tuple[Array, Array]:
    """Returns both as floating-point arrays of one type and shape."""
    kind = jnp.result_type(float, a, b)
    shape = jnp.broadcast_shapes(jnp.shape(a), jnp.shape(b))
    return (
        jnp.broadcast_to(jnp.asarray(a, kind), shape),
        jnp.broadcast_to(jnp.asarray(b, kind), shape),
    )


def maximum(a: Real, b: Real) -> Real:
    """Returns the larger of two numbers; at a tie the derivative is that of `b`.

    >>> maximum(2, 3), float(jax.grad(lambda x: maximum(x, 1.0))(2.0))
    (3, 1.0)
    """
    return max(a, b) if _is_python(a, b) else _maximum(*_same(a, b))


def minimum(a: Real, b: Real) -> Real:
    """Returns the smaller of two numbers; at a tie the derivative is that of `b`."""
    return min(a, b) if _is_python(a, b) else _minimum(*_same(a, b))


def overlap(a: Array, b: Array) -> Array:
    """Returns the time of two activities that run side by side, √(a² + b²).

    Between full overlap, max(a, b), and none, a + b. The exponent 2 is measured: fitted freely on
    24 sets of matrix products it improves nothing, and a term 2·x·a·b fits to x = 0.

    >>> float(overlap(jnp.asarray(3.0), jnp.asarray(4.0)))
    5.0
    """
    # The smallest normal numbers keep the derivative of the root finite when both are zero.
    return jnp.sqrt(a * a + b * b + 1e-36)


def as_real(x: Real) -> Array:
    """Returns `x` as a floating-point array (float32, or float64 under x64)."""
    # A machine has a hundred such numbers: by way of NumPy each takes half the time.
    kind = jax.dtypes.canonicalize_dtype(float)
    if isinstance(x, Array) and x.dtype == kind and not x.weak_type:
        return x
    if isinstance(x, int | float):
        x = np.asarray(x, dtype=kind)
    return jnp.asarray(x, dtype=float)


def traced(tree: Any) -> Any:
    """Returns `tree` with every numeric leaf as a floating-point array, ready to be traced.

    Configurations hold exact Python integers; traced as they are they would become int32 and
    overflow, or static values and retrace.
    """
    return jax.tree.map(as_real, tree)
