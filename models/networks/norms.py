"""RMSNorm and LayerNorm, with or without weights."""

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from perfmodel.errors import InputError
from perfmodel.models.networks.weights import Weights

_EPSILON = 1e-6


def rms_norm(x: Array, scale: Array | None, axes: tuple[int, ...], axis: str | None) -> Array:
    """Returns x over its root mean square over `axes` and the ranks of a mesh axis, in 32 bits."""
    wide = x.astype(jnp.float32)
    square = jnp.mean(wide * wide, axes, keepdims=True)
    if axis is not None:
        square = lax.pmean(square, axis)
    normed = (wide * lax.rsqrt(square + _EPSILON)).astype(x.dtype)
    return normed if scale is None else normed * scale


class Norm(nnx.Module):
    """RMSNorm with a weight (`vectors` 1), LayerNorm with weight and bias (2) or neither (0)."""

    def __init__(self, width: int, vectors: int, weights: Weights) -> None:
        if vectors not in (0, 1, 2):
            raise InputError(f"network: norm_vectors must be 0, 1 or 2, not {vectors}")
        self.centred = vectors != 1
        self.scale = weights.scales(width) if vectors else None
        self.bias = weights.vector(width) if vectors == 2 else None

    def __call__(self, x: Array) -> Array:
        if self.centred:
            x = x - jnp.mean(x.astype(jnp.float32), -1, keepdims=True).astype(x.dtype)
        scale = None if self.scale is None else self.scale[...]
        x = rms_norm(x, scale, (-1,), None)
        return x if self.bias is None else x + self.bias[...]
