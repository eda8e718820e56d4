"""Where parameters come from, and how they are cut over ranks."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
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


class Weights:
    """A source of parameters of one type; of shapes alone where there is no `rngs`.

    `split` is the axis that ranks share out under tensor parallelism, kept with the parameter;
    None where every rank holds all of it.
    """

    def __init__(self, rngs: nnx.Rngs | None, dtype: DTypeLike) -> None:
        self._dtype = jnp.dtype(dtype)
        # Drawn on the host: JAX would compile a program for each shape, a second apiece.
        seed = None if rngs is None else np.asarray(jax.random.key_data(rngs.params()))
        self._random = None if seed is None else np.random.default_rng(seed)

    def in_32_bits(self) -> "Weights":
        """Returns the same source, of parameters in 32 bits whatever the type of the others."""
        other = copy.copy(self)
        other._dtype = jnp.dtype(jnp.float32)
        return other

    def _parameter(
        self, shape: tuple[int, ...], mean: float, scale: float, split: int | None
    ) -> nnx.Param:
        if self._random is None:
            return nnx.Param(jax.ShapeDtypeStruct(shape, self._dtype), split=split)
        values = mean + scale * self._random.standard_normal(shape)
        return nnx.Param(jnp.asarray(values, self._dtype), split=split)

    def matrix(self, *shape: int, inner: int, split: int | None = None) -> nnx.Param:
        """Returns a matrix that keeps the variance of what it multiplies, over `inner`."""
        return self._parameter(shape, 0.0, inner**-0.5, split)

    def vector(self, *shape: int, split: int | None = None) -> nnx.Param:
        """Returns biases; random, since a bias of zero would hide where it is missing."""
        return self._parameter(shape, 0.0, 0.1, split)

    def scales(self, *shape: int, split: int | None = None) -> nnx.Param:
        """Returns scales of a norm, near one."""
        return self._parameter(shape, 1.0, 0.1, split)


def sum_ranks(x: Array, axis: str | None) -> Array:
    """Returns the sum over the ranks of a mesh axis; `x` where there is none."""
    return x if axis is None else jax.lax.psum(x, axis)
