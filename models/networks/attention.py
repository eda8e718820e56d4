"""Grouped-query attention over all keys, a window or a chunk, as `GroupedQueryAttention` sizes it.

Scores are computed against every slot of the cache and masked, so their products are those of a
dense kernel: keys read × queries, not the pairs under the mask.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from perfmodel.errors import InputError
from perfmodel.models.attention import GroupedQueryAttention, Span
from perfmodel.models.networks.cache import LayerCache
from perfmodel.models.networks.norms import rms_norm
from perfmodel.models.networks.weights import Weights, sum_ranks, whole

_ROTARY_BASE = 10_000.0


def rotate(
    x: Float[Array, "batch tokens heads width"], places: Int[Array, " tokens"]
) -> Float[Array, "batch tokens heads width"]:
    """Returns x with rotary positions: halves of a head turned by an angle that grows with place.

    Su et al., RoFormer (arXiv:2104.09864), in the order of halves that the published weights use.
    """
    half = x.shape[-1] // 2
    rates = _ROTARY_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = places[:, None, None] * rates
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


def visible(
    queries: Int[Array, " queries"], keys: Int[Array, " keys"], span: Span, window: int | None
) -> Bool[Array, "queries keys"]:
    """Returns which keys each query sees, by their places; a negative place is an empty slot.

    >>> visible(jnp.arange(4), jnp.arange(4), "chunk", 2).sum(1).tolist()
    [1, 2, 1, 2]
    """
    query, key = queries[:, None], keys[None, :]
    mask = (key >= 0) & (key <= query)
    if window is None:
        return mask
    near = key > query - window if span == "window" else key // window == query // window
    return mask & near


class SelfAttention(nnx.Module):
    """Self-attention: products of query, key and value, norms, rotation, scores, output product.

    Where there is a gate, of the hidden state, it weighs each head's result or each element of it.

    Heads are the axis that ranks share out, so every size is read off the weights.
    """

    def __init__(
        self, body: GroupedQueryAttention, hidden: int, rotary: bool, weights: Weights
    ) -> None:
        heads, kv_heads = whole(body.heads, "heads"), whole(body.kv_heads, "kv_heads")
        width = whole(body.head_dim, "head_dim")
        if heads % kv_heads:
            raise InputError(f"network: {heads} heads are no multiple of {kv_heads} kv_heads")
        if rotary and width % 2:
            raise InputError(f"network: head_dim {width} must be even with rotary positions")
        self.window = None if body.window is None else whole(body.window, "window")
        self.span: Span = body.span
        self.rotary = rotary
        self.query = weights.matrix(hidden, heads, width, inner=hidden, split=1)
        self.key = weights.matrix(hidden, kv_heads, width, inner=hidden, split=1)
        self.value = weights.matrix(hidden, kv_heads, width, inner=hidden, split=1)
        self.output = weights.matrix(heads, width, hidden, inner=heads * width, split=0)
        biased = bool(body.qkv_bias)
        self.query_bias = weights.vector(heads, width, split=0) if biased else None
        self.key_bias = weights.vector(kv_heads, width, split=0) if biased else None
        self.value_bias = weights.vector(kv_heads, width, split=0) if biased else None
        self.output_bias = weights.vector(hidden) if body.output_bias else None
        self.sinks = weights.vector(heads, split=0) if body.sinks else None
        gates = width if body.gate_width is None else whole(body.gate_width, "gate_width")
        if gates not in (1, width):
            raise InputError(f"network: gate_width must be 1 or {width}, not {gates}")
        gated = body.gate_width is not None
        self.gate = weights.matrix(hidden, heads, gates, inner=hidden, split=1) if gated else None
        self._norms(body, heads, kv_heads, width, weights)

    def _norms(
        self, body: GroupedQueryAttention, heads: int, kv_heads: int, width: int, weights: Weights
    ) -> None:
        """Norms of query and key: of each head with a head's weights or none, or of all heads."""
        elements = whole(body.qk_weights, "qk_weights", 0)
        per_layer = (heads + kv_heads) * width
        if elements not in (0, 2 * width, per_layer):
            raise InputError(
                f"network: qk_weights {elements} fits no norm (0, {2 * width} or {per_layer})"
            )
        self.normed = bool(body.qk_norm)
        self.jointly = elements == per_layer
        split = 0 if self.jointly else None
        shapes = ((heads, width), (kv_heads, width)) if self.jointly else ((width,), (width,))
        self.query_norm = weights.scales(*shapes[0], split=split) if elements else None
        self.key_norm = weights.scales(*shapes[1], split=split) if elements else None

    def _project(
        self, x: Array, matrix: nnx.Param, bias: nnx.Param | None
    ) -> Float[Array, "batch tokens heads width"]:
        y = jnp.einsum("btm,mhd->bthd", x, matrix[...])
        return y if bias is None else y + bias[...]

    def _place(
        self, x: Array, scale: nnx.Param | None, places: Array, axis: str | None
    ) -> Float[Array, "batch tokens heads width"]:
        if self.normed:
            weight = None if scale is None else scale[...]
            axes = (-2, -1) if self.jointly else (-1,)
            x = rms_norm(x, weight, axes, axis if self.jointly else None)
        return rotate(x, places) if self.rotary else x

    def empty_cache(self, batch: int, capacity: int, part: int) -> LayerCache:
        """Returns room for `capacity` tokens; with a window, for it and a part of `part` tokens."""
        _, kv_heads, width = self.key.shape
        kept = capacity if self.window is None else min(capacity, self.window + part - 1)
        shape, kind = (batch, kept, kv_heads, width), self.key.dtype
        return LayerCache(jnp.zeros(shape, kind), jnp.zeros(shape, kind), self.window, capacity)

    def __call__(
        self,
        x: Float[Array, "batch tokens hidden"],
        start: Int[Array, ""],
        cache: LayerCache | None = None,
        axis: str | None = None,
    ) -> tuple[Float[Array, "batch tokens hidden"], LayerCache | None]:
        """Returns the layer's result for tokens from place `start` on, and the cache with them.

        Without a cache they see each other alone. `axis` is the mesh axis that heads are split
        over.
        """
        places = start + jnp.arange(x.shape[1])
        query = self._place(
            self._project(x, self.query, self.query_bias), self.query_norm, places, axis
        )
        keys = self._place(self._project(x, self.key, self.key_bias), self.key_norm, places, axis)
        values = self._project(x, self.value, self.value_bias)
        seen = places
        if cache is not None:
            cache = cache.write(keys, values, start)
            keys, values = cache.keys, cache.values
            seen = cache.places(start + x.shape[1])
        mask = visible(places, seen, self.span, self.window)
        heads = self._attend(query, keys, values, mask)
        if self.gate is not None:
            heads = heads * jax.nn.sigmoid(self._project(x, self.gate, None))
        y = sum_ranks(jnp.einsum("bthd,hdm->btm", heads, self.output[...]), axis)
        return (y if self.output_bias is None else y + self.output_bias[...]), cache

    def _attend(
        self, query: Array, keys: Array, values: Array, mask: Bool[Array, "tokens keys"]
    ) -> Float[Array, "batch tokens heads width"]:
        batch, tokens, heads, width = query.shape
        kv_heads = keys.shape[2]
        grouped = query.reshape(batch, tokens, kv_heads, heads // kv_heads, width)
        scores = jnp.einsum("btkgd,bskd->bkgts", grouped, keys, preferred_element_type=jnp.float32)
        scores = jnp.where(mask, scores * width**-0.5, -jnp.inf)
        highest = jnp.max(scores, -1, keepdims=True)
        sink = None
        if self.sinks is not None:
            # A learned logit that keys compete with: it takes a share and adds nothing.
            sink = self.sinks[...].astype(jnp.float32).reshape(kv_heads, -1, 1, 1)
            highest = jnp.maximum(highest, sink)
        shares = jnp.exp(scores - lax.stop_gradient(highest))
        whole_sum = jnp.sum(shares, -1, keepdims=True)
        if sink is not None:
            whole_sum = whole_sum + jnp.exp(sink - highest)
        shares = (shares / whole_sum).astype(values.dtype)
        mixed = jnp.einsum("bkgts,bskd->btkgd", shares, values)
        return mixed.reshape(batch, tokens, heads, width)
