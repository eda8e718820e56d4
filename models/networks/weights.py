"""Where parameters come from, and how they are cut over ranks."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from perfmodel.errors import InputError
from perfmodel.relax import Real


def whole(value: Real, name: str, low: int = 1) -> int:
    """Returns a size of a model, which must be a Python integer of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise InputError(f"network: {name} must be a whole number of at least {low}, not {value}")
    return value


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _normal(key: Array, index: int, shape: tuple[int, ...], scale: float, kind: str) -> Array:
    return scale * jax.random.normal(jax.random.fold_in(key, index), shape, kind)


class Weights:
    """A source of parameters of one type, all from one key.

    `split` is the axis that ranks share out under tensor parallelism, kept with the parameter;
    None where every rank holds all of it.
    """

    def __init__(self, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        # One key for all and a program per shape: drawing keys takes most of the time else.
        self._key = rngs.params()
        self._kind = jnp.dtype(dtype).name
        self._drawn = 0

    def _draw(self, shape: tuple[int, ...], scale: float, split: int | None) -> nnx.Param:
        self._drawn += 1
        return nnx.Param(_normal(self._key, self._drawn, shape, scale, self._kind), split=split)

    def matrix(self, *shape: int, inner: int, split: int | None = None) -> nnx.Param:
        """Returns a matrix that keeps the variance of what it multiplies, over `inner`."""
        return self._draw(shape, inner**-0.5, split)

    def vector(self, *shape: int, split: int | None = None) -> nnx.Param:
        """Returns biases; random, since a bias of zero would hide where it is missing."""
        return self._draw(shape, 0.1, split)

    def ones(self, *shape: int, split: int | None = None) -> nnx.Param:
        """Returns scales of a norm."""
        return nnx.Param(jnp.ones(shape, self._kind), split=split)


def sum_ranks(x: Array, axis: str | None) -> Array:
    """Returns the sum over the ranks of a mesh axis; `x` where there is none."""
    return x if axis is None else jax.lax.psum(x, axis)
