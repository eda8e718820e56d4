"""Residuals of several streams, and of several blocks' sums, as `models/streams.py` sizes them."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float

from perfmodel.models.networks.norms import rms_norm
from perfmodel.models.networks.weights import Weights, whole
from perfmodel.models.streams import BlockResiduals, HyperConnections

_SINKHORN = 20
"""Rounds of the normalisation of mixing weights (DeepSeek-V4: `hc_sinkhorn_iters`)."""
_LEAST = 1e-6


def _weights_of(
    streams: Float[Array, "batch tokens streams hidden"], matrix: nnx.Param
) -> Float[Array, "batch tokens weights"]:
    """Returns the products that weigh streams, over the root mean square of all of them."""
    flat = streams.astype(jnp.float32).reshape(*streams.shape[:2], -1)
    return jnp.einsum("btw,wn->btn", rms_norm(flat, None, (-1,), None), matrix[...])


def _weighed(weights: Array, streams: Array) -> Float[Array, "batch tokens hidden"]:
    """Returns the sum of streams, each times its weight."""
    return jnp.sum(weights[..., None] * streams.astype(jnp.float32), -2).astype(streams.dtype)


def _normalised(mixing: Float[Array, "*rows into out"]) -> Float[Array, "*rows into out"]:
    """Returns one round of the normalisation: columns, then rows, over their sums."""
    mixing = mixing / (jnp.sum(mixing, -2, keepdims=True) + _LEAST)
    return mixing / (jnp.sum(mixing, -1, keepdims=True) + _LEAST)


class StreamMixing(nnx.Module):
    """Hyper-connections around a sublayer: how streams make its input and take its result.

    One product of all streams gives weights in 32 bits; those between streams are normalised to
    rows and columns of sum 1. Source: inference code of DeepSeek-V4, class Block, hc_pre and
    hc_post.
    """

    def __init__(self, body: HyperConnections, hidden: int, weights: Weights) -> None:
        self.streams = whole(body.streams, "streams")
        columns, wide = (2 + self.streams) * self.streams, self.streams * hidden
        exact = weights.in_32_bits()
        self.matrix = exact.matrix(wide, columns, inner=wide)
        self.offsets = exact.vector(columns)
        self.scales = exact.scales(3)

    def read(
        self, streams: Float[Array, "batch tokens streams hidden"]
    ) -> tuple[Float[Array, "batch tokens hidden"], tuple[Array, Array]]:
        """Returns a sublayer's input, and the weights with which its result is written back."""
        n = self.streams
        columns = jnp.repeat(
            self.scales[...], jnp.asarray([n, n, n * n]), total_repeat_length=n * (n + 2)
        )
        made = _weights_of(streams, self.matrix) * columns + self.offsets[...]
        before, after, between = made[..., :n], made[..., n : 2 * n], made[..., 2 * n :]
        mixing = jax.nn.softmax(between.reshape(*between.shape[:-1], n, n), -1)
        mixing = lax.fori_loop(0, _SINKHORN, lambda _, each: _normalised(each), mixing)
        return _weighed(jax.nn.sigmoid(before), streams), (2 * jax.nn.sigmoid(after), mixing)

    def write(
        self, streams: Array, y: Float[Array, "batch tokens hidden"], how: tuple[Array, Array]
    ) -> Float[Array, "batch tokens streams hidden"]:
        """Returns the streams, mixed, with a sublayer's result added to each."""
        after, mixing = how
        wide = streams.astype(jnp.float32)
        mixed = jnp.sum(mixing[..., None] * wide[..., None, :, :], -2)
        return (mixed + after[..., None] * y[..., None, :].astype(jnp.float32)).astype(y.dtype)


class StreamHead(nnx.Module):
    """The sum of streams before the output head (inference code of DeepSeek-V4, hc_head)."""

    def __init__(self, body: HyperConnections, hidden: int, weights: Weights) -> None:
        streams = whole(body.streams, "streams")
        exact = weights.in_32_bits()
        self.matrix = exact.matrix(streams * hidden, streams, inner=streams * hidden)
        self.offsets = exact.vector(streams)
        self.scale = exact.scales(1)

    def __call__(
        self, streams: Float[Array, "batch tokens streams hidden"]
    ) -> Float[Array, "batch tokens hidden"]:
        made = _weights_of(streams, self.matrix) * self.scale[...] + self.offsets[...]
        return _weighed(jax.nn.sigmoid(made), streams)


class BlockMean(nnx.Module):
    """A weighted mean of blocks' sums, each scored, normed, by one vector.

    Source: attention residuals, Kimi K3 technical report (arXiv 2607.24653), section 2.2.
    """

    def __init__(self, hidden: int, weights: Weights) -> None:
        self.norm = weights.scales(hidden)
        self.scores = weights.matrix(hidden, inner=hidden)

    def __call__(
        self, sums: Float[Array, "batch tokens blocks hidden"]
    ) -> Float[Array, "batch tokens hidden"]:
        normed = rms_norm(sums, self.norm[...], (-1,), None).astype(jnp.float32)
        # Not a matrix product: one column.
        each = jnp.sum(normed * self.scores[...].astype(jnp.float32), -1)
        return _weighed(jax.nn.softmax(each, -1), sums)


class BlockSums(nnx.Module):
    """What all sublayers read in place of one residual: sums of the blocks before, and of theirs.

    A block is `block` layers of two sublayers; the embedding is the first sum.
    """

    def __init__(self, body: BlockResiduals, hidden: int, sublayers: int, weights: Weights) -> None:
        self.block = 2 * whole(body.block, "block")
        self.means = nnx.List([BlockMean(hidden, weights) for _ in range(sublayers)])
        self.last = BlockMean(hidden, weights)

    def read(
        self, at: int, sums: tuple[Array, ...]
    ) -> tuple[Float[Array, "batch tokens hidden"], tuple[Array, ...]]:
        """Returns the input of a sublayer, and the sums as it finds them.

        The last sum is that of its block so far; the first sublayer of a block starts a new one.
        """
        x = self.means[at](jnp.stack(sums, -2))
        return x, ((*sums, jnp.zeros_like(x)) if at % self.block == 0 else sums)

    def end(self, sums: tuple[Array, ...]) -> Float[Array, "batch tokens hidden"]:
        """Returns the mean that goes to the output head."""
        return self.last(jnp.stack(sums, -2))
