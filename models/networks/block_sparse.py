"""Attention to the best blocks of keys, as `BlockSparseAttention` sizes it (MiniMax-M3).

Every kv head's queries gather the keys and values of their own choice of blocks. Semantics as in
vLLM's class for MiniMax-M3: a block's score is its best key's, the block of a query is always among
the chosen.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from perfmodel.errors import InputError
from perfmodel.models.block_sparse import BlockIndexer, BlockSparseAttention
from perfmodel.models.networks.attention import SelfAttention, rotate, visible
from perfmodel.models.networks.cache import BlockCache, write_from
from perfmodel.models.networks.norms import rms_norm
from perfmodel.models.networks.weights import Weights, sum_ranks, whole


class BlockChoice(nnx.Module):
    """The indexer: which blocks of earlier tokens the queries of each kv head attend to.

    Queries are cut as the kv heads are; the key is on every rank.
    """

    def __init__(self, index: BlockIndexer, hidden: int, weights: Weights) -> None:
        heads, width = whole(index.heads, "index heads"), whole(index.width, "index width")
        if width % 2:
            raise InputError(f"network: index width {width} must be even")
        self.blocks = whole(index.blocks, "index blocks")
        self.size = whole(index.size, "index size")
        self.query = weights.matrix(hidden, heads, width, inner=hidden, split=1)
        self.key = weights.matrix(hidden, width, inner=hidden)
        self.query_norm = weights.scales(width)
        self.key_norm = weights.scales(width)

    def keys(self, x: Array, places: Array) -> Float[Array, "batch tokens width"]:
        """Returns the keys of new tokens."""
        key = jnp.einsum("btm,md->btd", x, self.key[...])
        return rotate(rms_norm(key, self.key_norm[...], (-1,), None)[:, :, None], places)[:, :, 0]

    def __call__(
        self,
        x: Float[Array, "batch tokens hidden"],
        places: Int[Array, " tokens"],
        keys: Float[Array, "batch slots width"],
    ) -> tuple[Int[Array, "batch kv_heads tokens chosen"], Bool[Array, "..."]]:
        """Returns the best blocks of each token, and which of them it sees at all."""
        query = jnp.einsum("btm,mhd->bthd", x, self.query[...])
        query = rotate(rms_norm(query, self.query_norm[...], (-1,), None), places)
        scores = jnp.einsum("bthd,bsd->bhts", query, keys, preferred_element_type=jnp.float32)
        seen = visible(places, jnp.arange(keys.shape[1]), "full", None)
        each = in_blocks(jnp.where(seen, scores, -jnp.inf), self.size, 3, -jnp.inf)
        count = each.shape[3]
        own = places[:, None] // self.size == jnp.arange(count)
        highest = jnp.where(own, jnp.inf, jnp.max(each, -1))
        best, chosen = lax.top_k(highest, min(self.blocks, count))
        return chosen, best > -jnp.inf


def in_blocks(x: Array, size: int, axis: int, empty: float = 0.0) -> Array:
    """Returns x with an axis cut into blocks, the last one filled up.

    >>> in_blocks(jnp.arange(1, 6), 2, 0).tolist()
    [[1, 2], [3, 4], [5, 0]]
    """
    short = -x.shape[axis] % size
    if short:
        padding = [(0, short if i == axis else 0) for i in range(x.ndim)]
        x = jnp.pad(x, padding, constant_values=empty)
    return x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])


class BlockSelfAttention(nnx.Module):
    """Grouped-query attention whose queries see the blocks of keys that an indexer chooses."""

    def __init__(
        self, body: BlockSparseAttention, hidden: int, rotary: bool, weights: Weights
    ) -> None:
        if body.index.heads != body.kv_heads or body.cached != "own" or body.joined:
            raise InputError(
                f"network: {body.index.heads} index heads on {body.kv_heads} kv heads, shared keys "
                "or blocks side by side have none yet (nearest: an index head for each kv head)"
            )
        self.attention = SelfAttention(body, hidden, rotary, weights)
        self.index = BlockChoice(body.index, hidden, weights)

    def empty_cache(self, batch: int, capacity: int, part: int) -> BlockCache:
        """Returns room for `capacity` tokens; parts of any size fit."""
        width, kind = self.index.key.shape[1], self.index.key.dtype
        return BlockCache(
            self.attention.empty_cache(batch, capacity, part),
            jnp.zeros((batch, capacity, width), kind),
        )

    def __call__(
        self,
        x: Float[Array, "batch tokens hidden"],
        start: Int[Array, ""],
        cache: BlockCache | None = None,
        axis: str | None = None,
    ) -> tuple[Float[Array, "batch tokens hidden"], BlockCache]:
        """Returns the layer's result for tokens from place `start` on, and the cache with them.

        Without a cache they see each other alone. `axis` is the mesh axis that heads are split
        over.
        """
        places = start + jnp.arange(x.shape[1])
        layer = None if cache is None else cache.layer
        query, held = self.attention.projected(x, start, layer, axis)
        keys = self.index.keys(x, places)
        keys = keys if cache is None else write_from(cache.index, keys, start)
        chosen, seen = self.index(x, places, keys)
        mixed = self._attend(query, held.keys, held.values, chosen, seen, places)
        y = sum_ranks(self.attention.results(x, mixed), axis)
        bias = self.attention.output_bias
        return (y if bias is None else y + bias[...]), BlockCache(held, keys)

    def _attend(
        self,
        query: Float[Array, "batch tokens heads width"],
        keys: Float[Array, "batch slots kv_heads width"],
        values: Float[Array, "batch slots kv_heads value"],
        chosen: Int[Array, "batch kv_heads tokens chosen"],
        seen: Bool[Array, "batch kv_heads tokens chosen"],
        places: Int[Array, " tokens"],
    ) -> Float[Array, "batch tokens heads value"]:
        size, (batch, tokens, heads, width) = self.index.size, query.shape
        kv_heads = keys.shape[2]

        def gathered(held: Array) -> Array:
            """Returns what is held of the chosen blocks: [batch, kv heads, tokens, keys, width]."""
            blocks = jnp.moveaxis(in_blocks(held, size, 1), 3, 1)
            found = jax.vmap(jax.vmap(lambda each, at: each[at]))(blocks, chosen)
            return found.reshape(*chosen.shape[:3], -1, held.shape[-1])

        slots = chosen[..., None] * size + jnp.arange(size)
        mask = (seen[..., None] & (slots <= places[:, None, None])).reshape(*chosen.shape[:3], -1)
        grouped = query.reshape(batch, tokens, kv_heads, heads // kv_heads, width)
        scores = jnp.einsum(
            "btkgd,bktsd->bkgts", grouped, gathered(keys), preferred_element_type=jnp.float32
        )
        shares = self.attention.shares(scores * width**-0.5, mask[:, :, None])
        mixed = jnp.einsum("bkgts,bktsd->btkgd", shares.astype(values.dtype), gathered(values))
        return mixed.reshape(batch, tokens, heads, values.shape[-1])
