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


def softmax(
    scores: Float[Array, "*rows keys"], sinks: Float[Array, "*rows one"] | None
) -> Float[Array, "*rows keys"]:
    """Returns the softmax over keys; a sink is a learned logit that takes a share and adds nothing.

    >>> softmax(jnp.zeros((1, 3)), jnp.zeros((1, 1))).tolist()
    [[0.25, 0.25, 0.25]]
    """
    highest = jnp.max(scores, -1, keepdims=True)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32)
        highest = jnp.maximum(highest, sinks)
    shares = jnp.exp(scores - lax.stop_gradient(highest))
    whole_sum = jnp.sum(shares, -1, keepdims=True)
    if sinks is not None:
        whole_sum = whole_sum + jnp.exp(sinks - highest)
    return shares / whole_sum


class SelfAttention(nnx.Module):
    """Self-attention: products of query, key and value, norms, rotation, scores, output product.

    Where there is a gate, of the hidden state, it weighs each head's result or each element of it.

    Heads are the axis that ranks share out, so every size is read off the weights.
    """

    def __init__(
        self, body: GroupedQueryAttention, hidden: int, rotary: bool, weights: Weights
    ) -> None:
        heads, kv_heads = whole(body.heads, "heads"), whole(body.kv_heads, "kv_heads")
        width, value = whole(body.head_dim, "head_dim"), whole(body.value_width, "v_width")
        if heads % kv_heads:
            raise InputError(f"network: {heads} heads are no multiple of {kv_heads} kv_heads")
        if rotary and width % 2:
            raise InputError(f"network: head_dim {width} must be even with rotary positions")
        self.window = None if body.window is None else whole(body.window, "window")
        self.span: Span = body.span
        self.rotary = rotary
        self.query = weights.matrix(hidden, heads, width, inner=hidden, split=1)
        # Keys and values may be an earlier layer's, and values may be keys before their place.
        keyed, valued, biased = body.cached != "earlier", body.cached == "own", bool(body.qkv_bias)
        self.key = weights.matrix(hidden, kv_heads, width, inner=hidden, split=1) if keyed else None
        self.value = (
            weights.matrix(hidden, kv_heads, value, inner=hidden, split=1) if valued else None
        )
        self.output = weights.matrix(heads, value, hidden, inner=heads * value, split=0)
        self.query_bias = weights.vector(heads, width, split=0) if biased else None
        self.key_bias = weights.vector(kv_heads, width, split=0) if biased and keyed else None
        self.value_bias = weights.vector(kv_heads, value, split=0) if biased and valued else None
        self.output_bias = weights.vector(hidden) if body.output_bias else None
        self.sinks = weights.vector(heads, split=0) if body.sinks else None
        gates = value if body.gate_width is None else whole(body.gate_width, "gate_width")
        if gates not in (1, value):
            raise InputError(f"network: gate_width must be 1 or {value}, not {gates}")
        gated = body.gate_width is not None
        self.gate = weights.matrix(hidden, heads, gates, inner=hidden, split=1) if gated else None
        self._norms(body, heads, kv_heads, width, weights)

    def _norms(
        self, body: GroupedQueryAttention, heads: int, kv_heads: int, width: int, weights: Weights
    ) -> None:
        """Norms of query and key: of each head with a head's weights or none, or of all heads."""
        elements = whole(body.qk_weights, "qk_weights", 0)
        keyed = self.key is not None
        per_head = (1 + keyed) * width
        per_layer = (heads + keyed * kv_heads) * width
        if elements not in (0, per_head, per_layer):
            raise InputError(
                f"network: qk_weights {elements} fits no norm (0, {per_head} or {per_layer})"
            )
        self.normed = bool(body.qk_norm)
        self.jointly = elements == per_layer
        split = 0 if self.jointly else None
        shapes = ((heads, width), (kv_heads, width)) if self.jointly else ((width,), (width,))
        self.query_norm = weights.scales(*shapes[0], split=split) if elements else None
        self.key_norm = weights.scales(*shapes[1], split=split) if elements and keyed else None

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
        assert self.key is not None
        kept = capacity if self.window is None else min(capacity, self.window + part - 1)
        keys, values = (
            jnp.zeros((batch, kept, *matrix.shape[1:]), matrix.dtype)
            for matrix in (self.key, self.key if self.value is None else self.value)
        )
        return LayerCache(keys, values, self.window, capacity)

    def __call__(
        self,
        x: Float[Array, "batch tokens hidden"],
        start: Int[Array, ""],
        cache: LayerCache | None = None,
        axis: str | None = None,
    ) -> tuple[Float[Array, "batch tokens hidden"], LayerCache]:
        """Returns the layer's result for tokens from place `start` on, and the cache with them.

        Without a cache they are the first and see each other alone; the cache then is of them. A
        layer without keys reads the cache that an earlier layer has written them to. `axis` is the
        mesh axis that heads are split over.
        """
        y, cache = self.partial(x, start, cache, axis)
        y = sum_ranks(y, axis)
        return (y if self.output_bias is None else y + self.output_bias[...]), cache

    def partial(
        self, x: Array, start: Int[Array, ""], cache: LayerCache | None, axis: str | None
    ) -> tuple[Float[Array, "batch tokens hidden"], LayerCache]:
        """Returns what one rank's heads add, without the last bias, and the cache."""
        query, cache = self.projected(x, start, cache, axis)
        places = start + jnp.arange(x.shape[1])
        mask = visible(places, cache.places(start + x.shape[1]), self.span, self.window)
        return self.results(x, self._attend(query, cache.keys, cache.values, mask)), cache

    def results(
        self, x: Array, heads: Float[Array, "batch tokens heads value"]
    ) -> Float[Array, "batch tokens hidden"]:
        """Returns the output product of one rank's heads, weighed by the gate of x."""
        if self.gate is not None:
            heads = heads * jax.nn.sigmoid(self._project(x, self.gate, None))
        return jnp.einsum("bthd,hdm->btm", heads, self.output[...])

    def projected(
        self, x: Array, start: Int[Array, ""], cache: LayerCache | None, axis: str | None
    ) -> tuple[Float[Array, "batch tokens heads width"], LayerCache]:
        """Returns the queries of new tokens, and the cache with their keys and values."""
        places = start + jnp.arange(x.shape[1])
        query = self._place(
            self._project(x, self.query, self.query_bias), self.query_norm, places, axis
        )
        if self.key is None:
            assert cache is not None
            return query, cache
        return query, self._written(x, places, start, cache, axis)

    def _written(
        self,
        x: Array,
        places: Array,
        start: Int[Array, ""],
        cache: LayerCache | None,
        axis: str | None,
    ) -> LayerCache:
        """Returns the cache with keys and values of new tokens."""
        assert self.key is not None
        plain = self._project(x, self.key, self.key_bias)
        values = plain if self.value is None else self._project(x, self.value, self.value_bias)
        keys = self._place(plain, self.key_norm, places, axis)
        if cache is None:
            return LayerCache(keys, values, self.window, x.shape[1])
        return cache.write(keys, values, start)

    def _attend(
        self, query: Array, keys: Array, values: Array, mask: Bool[Array, "tokens keys"]
    ) -> Float[Array, "batch tokens heads value"]:
        batch, tokens, heads, width = query.shape
        kv_heads = keys.shape[2]
        grouped = query.reshape(batch, tokens, kv_heads, heads // kv_heads, width)
        scores = jnp.einsum("btkgd,bskd->bkgts", grouped, keys, preferred_element_type=jnp.float32)
        shares = self.shares(scores * width**-0.5, mask).astype(values.dtype)
        mixed = jnp.einsum("bkgts,bskd->btkgd", shares, values)
        return mixed.reshape(batch, tokens, heads, values.shape[-1])

    def shares(
        self, scores: Float[Array, "batch kv_heads group tokens keys"], mask: Bool[Array, "..."]
    ) -> Float[Array, "batch kv_heads group tokens keys"]:
        """Returns the softmax over the keys under a mask, and a sink where there is one."""
        sinks = None if self.sinks is None else self.sinks[...].reshape(scores.shape[1], -1, 1, 1)
        return softmax(jnp.where(mask, scores, -jnp.inf), sinks)
