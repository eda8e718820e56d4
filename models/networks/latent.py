"""Latent attention, dense or over the keys that an indexer chooses, as `LatentAttention` sizes it.

One latent vector per token is cached for all heads. Prompts expand it to keys and values per head;
one decoding token multiplies its queries into latent space instead: the same sums in another order.
With an indexer every token attends in latent space, to the latents gathered by its choice.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from perfmodel.errors import InputError
from perfmodel.models.mla import Indexer, LatentAttention
from perfmodel.models.networks.attention import rotate, visible
from perfmodel.models.networks.cache import LatentCache, write_from
from perfmodel.models.networks.norms import Norm, rms_norm
from perfmodel.models.networks.weights import Weights, sum_ranks, whole

_BLOCK = 128
_FP8 = jnp.float8_e4m3fn


def quantise(x: Float[Array, "... width"]) -> tuple[Array, Float[Array, "... blocks"]]:
    """Returns x in 8 bits, in blocks of 128, and the scale of each block."""
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, _BLOCK)
    largest = float(jnp.finfo(_FP8).max)
    scales = jnp.maximum(jnp.max(jnp.abs(blocks), -1), 1e-4) / largest
    return (blocks / scales[..., None]).astype(_FP8), scales


class Choice(nnx.Module):
    """The indexer of sparse attention: which earlier tokens each token attends to.

    Whole on every rank, as the choice must be the same on all (DeepSeek-V3.2-Exp, class Indexer,
    without the Hadamard rotation of queries and keys, which changes no score before rounding).
    """

    def __init__(self, index: Indexer, hidden: int, inner: int, rope: int, weights: Weights):
        heads, width = whole(index.heads, "index heads"), whole(index.width, "index width")
        if width % _BLOCK or width < rope:
            raise InputError(
                f"network: index width {width} must be a multiple of {_BLOCK} of at least {rope}"
            )
        self.top_k = whole(index.top_k, "index top_k")
        self.rope = rope
        self.query = weights.matrix(inner, heads, width, inner=inner)
        self.key = weights.matrix(hidden, width, inner=hidden)
        self.key_norm = Norm(width, 2, weights)
        self.heads = weights.matrix(hidden, heads, inner=hidden)

    def _turn(self, x: Array, places: Array) -> Array:
        turned = rotate(x[..., : self.rope], places)
        return jnp.concatenate([turned, x[..., self.rope :]], -1)

    def keys(self, x: Array, places: Array) -> tuple[Array, Array]:
        """Returns the keys of new tokens as they are cached, with their scales."""
        key = self.key_norm(jnp.einsum("btm,md->btd", x, self.key[...]))
        return quantise(self._turn(key[:, :, None], places)[:, :, 0])

    def __call__(
        self,
        x: Float[Array, "batch tokens hidden"],
        inner: Float[Array, "batch tokens inner"],
        places: Int[Array, " tokens"],
        keys: Array,
        scales: Array,
    ) -> tuple[Int[Array, "batch tokens chosen"], Bool[Array, "batch tokens chosen"]]:
        """Returns the slots of the best keys of each token, and which of them it sees at all."""
        query = self._turn(jnp.einsum("btm,mhd->bthd", inner, self.query[...]), places)
        values, factors = quantise(query)
        query = (values.astype(x.dtype) * factors[..., None].astype(x.dtype)).reshape(query.shape)
        key = (keys.astype(x.dtype) * scales[..., None].astype(x.dtype)).reshape(
            *keys.shape[:2], -1
        )
        each = jnp.einsum("bthd,bsd->bths", query, key, preferred_element_type=jnp.float32)
        share = jnp.einsum("btm,mh->bth", x, self.heads[...])
        scores = jnp.sum(jax.nn.relu(each) * share[..., None], 2)
        seen = visible(places, jnp.arange(key.shape[1]), "full", None)
        best, chosen = lax.top_k(jnp.where(seen, scores, -jnp.inf), min(self.top_k, key.shape[1]))
        return chosen, best > -jnp.inf


class LatentSelfAttention(nnx.Module):
    """Latent attention: products into latent space, out of it per head, scores, output product.

    Heads are what ranks share out; products into latent space and the indexer are on every rank.
    """

    def __init__(self, body: LatentAttention, hidden: int, weights: Weights) -> None:
        heads, rank = whole(body.heads, "heads"), whole(body.kv_rank, "kv_rank")
        self.nope = whole(body.nope_width, "nope_width")
        self.rope = whole(body.rope_width, "rope_width")
        if self.rope % 2:
            raise InputError(f"network: rope_width {self.rope} must be even")
        value, width = whole(body.v_width, "v_width"), self.nope + self.rope
        self.rank = rank
        inner = hidden if body.q_rank is None else whole(body.q_rank, "q_rank")
        compressed = body.q_rank is not None
        self.query_down = weights.matrix(hidden, inner, inner=hidden) if compressed else None
        self.query_norm = weights.scales(inner) if compressed else None
        self.latent = weights.matrix(hidden, rank + self.rope, inner=hidden)
        self.latent_norm = weights.scales(rank)
        self.query = weights.matrix(inner, heads, width, inner=inner, split=1)
        self.expansion = weights.matrix(rank, heads, self.nope + value, inner=rank, split=1)
        self.output = weights.matrix(heads, value, hidden, inner=heads * value, split=0)
        gated = body.gated
        self.gate = weights.matrix(hidden, heads, value, inner=hidden, split=1) if gated else None
        self.chooses = body.top_k is not None
        self.index = (
            None if body.index is None else Choice(body.index, hidden, inner, self.rope, weights)
        )

    def empty_cache(self, batch: int, capacity: int, part: int) -> LatentCache:
        """Returns room for `capacity` tokens; parts of any size fit."""
        kind, shape = self.latent.dtype, (batch, capacity)
        latents = jnp.zeros((*shape, self.rank + self.rope), kind)
        if self.index is None:
            return LatentCache(latents)
        blocks = self.index.key.shape[1] // _BLOCK
        return LatentCache(
            latents, jnp.zeros((*shape, blocks, _BLOCK), _FP8), jnp.zeros((*shape, blocks))
        )

    def __call__(
        self,
        x: Float[Array, "batch tokens hidden"],
        start: Int[Array, ""],
        cache: LatentCache | None = None,
        axis: str | None = None,
    ) -> tuple[Float[Array, "batch tokens hidden"], LatentCache]:
        """Returns the layer's result for tokens from place `start` on, and the cache with them.

        Without a cache they see each other alone. A layer that takes over the choice of an earlier
        one finds it there. `axis` is the mesh axis that heads are split over.
        """
        places = start + jnp.arange(x.shape[1])
        inner = x
        if self.query_down is not None and self.query_norm is not None:
            down = jnp.einsum("btm,mr->btr", x, self.query_down[...])
            inner = rms_norm(down, self.query_norm[...], (-1,), None)
        query = jnp.einsum("btr,rhd->bthd", inner, self.query[...])
        turned = rotate(query[..., self.nope :], places)
        query = jnp.concatenate([query[..., : self.nope], turned], -1)
        latents = self._latents(x, places)
        keys = None if self.index is None else self.index.keys(x, places)
        cached = cache is not None and cache.latents is not None
        if cache is not None and cache.latents is not None:
            latents = write_from(cache.latents, latents, start)
            if keys is not None:
                assert cache.keys is not None and cache.scales is not None
                keys = (
                    write_from(cache.keys, keys[0], start),
                    write_from(cache.scales, keys[1], start),
                )
        choice = None if cache is None else cache.choice
        if self.index is not None and keys is not None:
            choice = self.index(x, inner, places, *keys)
        if self.chooses:
            assert choice is not None
            mixed = self.absorbed(query, latents, choice[1], choice[0])
        else:
            mask = visible(places, jnp.arange(latents.shape[1]), "full", None)
            decoding = cached and x.shape[1] == 1
            mixed = (self.absorbed if decoding else self.expanded)(query, latents, mask)
        if self.gate is not None:
            mixed = mixed * jax.nn.sigmoid(jnp.einsum("btm,mhd->bthd", x, self.gate[...]))
        held = LatentCache(latents, *(keys or (None, None)), choice)
        return sum_ranks(jnp.einsum("bthd,hdm->btm", mixed, self.output[...]), axis), held

    def _latents(self, x: Array, places: Array) -> Float[Array, "batch tokens width"]:
        """Returns what is cached of new tokens: the normalised latent vector and the rotary key."""
        both = jnp.einsum("btm,mr->btr", x, self.latent[...])
        normed = rms_norm(both[..., : self.rank], self.latent_norm[...], (-1,), None)
        key = rotate(both[:, :, None, self.rank :], places)[:, :, 0]
        return jnp.concatenate([normed, key], -1)

    def _shares(self, scores: Array, mask: Array, kind: jnp.dtype) -> Array:
        scaled = scores * (self.nope + self.rope) ** -0.5
        return jax.nn.softmax(jnp.where(mask, scaled, -jnp.inf), -1).astype(kind)

    def expanded(
        self,
        query: Float[Array, "batch tokens heads width"],
        latents: Float[Array, "batch slots latent"],
        mask: Bool[Array, "tokens slots"],
    ) -> Float[Array, "batch tokens heads value"]:
        """Returns attention over keys and values expanded from the latents (naive)."""
        each = jnp.einsum("bsr,rhd->bshd", latents[..., : self.rank], self.expansion[...])
        shared = jnp.broadcast_to(latents[:, :, None, self.rank :], (*each.shape[:3], self.rope))
        keys = jnp.concatenate([each[..., : self.nope], shared], -1)
        scores = jnp.einsum("bthd,bshd->bhts", query, keys, preferred_element_type=jnp.float32)
        shares = self._shares(scores, mask, query.dtype)
        return jnp.einsum("bhts,bshd->bthd", shares, each[..., self.nope :])

    def absorbed(
        self,
        query: Float[Array, "batch tokens heads width"],
        latents: Float[Array, "batch slots latent"],
        mask: Bool[Array, "..."],
        chosen: Int[Array, "batch tokens keys"] | None = None,
    ) -> Float[Array, "batch tokens heads value"]:
        """Returns attention in latent space: to all slots, or to those `chosen` by each token."""
        into, out = self.expansion[..., : self.nope], self.expansion[..., self.nope :]
        pulled = jnp.einsum("bthd,rhd->bthr", query[..., : self.nope], into)
        asking = jnp.concatenate([pulled, query[..., self.nope :]], -1)
        if chosen is None:
            scores = jnp.einsum(
                "bthc,bsc->bths", asking, latents, preferred_element_type=jnp.float32
            )
            shares = self._shares(scores, mask[None, :, None], query.dtype)
            mixed = jnp.einsum("bths,bsr->bthr", shares, latents[..., : self.rank])
        else:
            best = jax.vmap(lambda held, at: held[at])(latents, chosen)
            scores = jnp.einsum("bthc,btsc->bths", asking, best, preferred_element_type=jnp.float32)
            shares = self._shares(scores, mask[:, :, None], query.dtype)
            mixed = jnp.einsum("bths,btsr->bthr", shares, best[..., : self.rank])
        return jnp.einsum("bthr,rhd->bthd", mixed, out)
