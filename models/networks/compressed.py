"""Attention over a window and compressed entries, as `CompressedAttention` sizes it (DeepSeek-V4).

One vector a token is key and value of all heads; an entry stands for a group of tokens. Sources:
DeepSeek-V4 (arXiv 2606.19348, section 2.3) and its inference code (classes Attention, Compressor,
Indexer), without the narrow formats of entries and index queries.
"""

import itertools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from perfmodel.errors import InputError
from perfmodel.models.compressed import CompressedAttention
from perfmodel.models.mla import Indexer
from perfmodel.models.networks.attention import rotate, softmax, visible
from perfmodel.models.networks.cache import CompressedCache, Entries, check_room, slot_places
from perfmodel.models.networks.norms import rms_norm
from perfmodel.models.networks.weights import Weights, sum_ranks, whole


def _turn(x: Float[Array, "batch tokens heads width"], places: Array, rope: int) -> Array:
    """Returns x with the last `rope` elements of each head turned."""
    return jnp.concatenate([x[..., :-rope], rotate(x[..., -rope:], places)], -1)


class Compressor(nnx.Module):
    """Entries of groups of `ratio` tokens: sums of values, weighed by softmaxes over the tokens.

    With two series an entry weighs the tokens of the group before, too, with products of their
    own. Of the tokens that entries to come weigh, values and weights are held, in 32 bits.
    """

    def __init__(
        self, width: int, ratio: int, series: int, rope: int, hidden: int, weights: Weights
    ) -> None:
        self.width, self.ratio, self.series, self.rope = width, ratio, series, rope
        self.value = weights.matrix(hidden, series * width, inner=hidden)
        self.weight = weights.matrix(hidden, series * width, inner=hidden)
        self.by_place = weights.vector(ratio, series * width)
        self.norm = weights.scales(width)

    def empty(self, batch: int, capacity: int) -> Entries:
        """Returns room for the entries of `capacity` tokens, and for what is held of the last."""
        held = jnp.zeros((batch, self.series * self.ratio, self.series * self.width))
        entries = jnp.zeros((batch, capacity // self.ratio, self.width), self.value.dtype)
        return Entries(entries, held, held)

    def __call__(
        self, x: Float[Array, "batch tokens hidden"], start: Int[Array, ""], past: Entries
    ) -> Entries:
        """Returns the entries with those that tokens from place `start` on complete."""
        tokens, ratio = x.shape[1], self.ratio
        places = start + jnp.arange(tokens)
        values = jnp.einsum("btm,mw->btw", x, self.value[...]).astype(jnp.float32)
        logits = jnp.einsum("btm,mw->btw", x, self.weight[...]).astype(jnp.float32)
        logits = logits + self.by_place[...].astype(jnp.float32)[places % ratio]
        room = past.values.shape[1]
        # Token p is held at p mod room; put in order, the new tokens follow them.
        order = (start + jnp.arange(room)) % room
        values = jnp.concatenate([past.values[:, order], values], 1)
        logits = jnp.concatenate([past.weights[:, order], logits], 1)
        entries = self._made(values, logits, start, tokens, past.entries)
        last = values.shape[1] - room + jnp.arange(room)
        at = (start - room + last) % room
        return Entries(
            entries,
            past.values.at[:, at].set(values[:, last]),
            past.weights.at[:, at].set(logits[:, last]),
        )

    def _made(
        self, values: Array, logits: Array, start: Array, tokens: int, entries: Array
    ) -> Float[Array, "batch entries width"]:
        """Returns the entries with new ones; values and logits start `room` before `start`."""
        ratio, room = self.ratio, self.series * self.ratio
        which = start // ratio + jnp.arange((tokens + ratio - 1) // ratio)
        group = ratio * (which[:, None] - self.series + 1) + jnp.arange(room)
        found = group - (start - room)
        shape = (values.shape[0], len(which), self.series, ratio, self.series, self.width)

        def parts(each: Array) -> Float[Array, "batch entries series ratio width"]:
            """Returns of each token the columns for the group that it is of: before, or own."""
            taken = each[:, found.clip(0, each.shape[1] - 1)].reshape(shape)
            return jnp.stack([taken[:, :, i, :, i] for i in range(self.series)], 2)

        seen = (group >= 0).reshape(len(which), self.series, ratio, 1)
        weights = jnp.where(seen, parts(logits), -jnp.inf)
        weights = jax.nn.softmax(weights, axis=(2, 3))
        made = jnp.sum(weights * parts(values), (2, 3)).astype(entries.dtype)
        made = rms_norm(made, self.norm[...], (-1,), None)
        made = _turn(made[:, :, None], ratio * which, self.rope)[:, :, 0]
        whole_ones = ratio * (which + 1) <= start + tokens
        at = jnp.where(whole_ones, which, entries.shape[1])
        return entries.at[:, at].set(made, mode="drop")


class EntryChoice(nnx.Module):
    """The indexer: which entries each token attends to, scored against smaller entries.

    Whole on every rank, as the choice must be the same on all.
    """

    def __init__(
        self, index: Indexer, ratio: int, rank: int, rope: int, hidden: int, weights: Weights
    ) -> None:
        heads, width = whole(index.heads, "index heads"), whole(index.width, "index width")
        if width < rope:
            raise InputError(f"network: index width {width} must be at least {rope}")
        self.top_k, self.ratio, self.rope = whole(index.top_k, "index top_k"), ratio, rope
        self.query = weights.matrix(rank, heads, width, inner=rank)
        self.heads = weights.matrix(hidden, heads, inner=hidden)
        self.compressor = Compressor(width, ratio, 2, rope, hidden, weights)

    def __call__(
        self, x: Array, inner: Array, places: Int[Array, " tokens"], keys: Array
    ) -> tuple[Int[Array, "batch tokens chosen"], Bool[Array, "batch tokens chosen"]]:
        """Returns the best entries of each token, and which of them it sees at all."""
        query = _turn(jnp.einsum("btr,rhd->bthd", inner, self.query[...]), places, self.rope)
        each = jnp.einsum("bthd,bsd->bths", query, keys, preferred_element_type=jnp.float32)
        share = jnp.einsum("btm,mh->bth", x, self.heads[...])
        scores = jnp.sum(jax.nn.relu(each) * share[..., None], 2)
        seen = _whole_entries(places, keys.shape[1], self.ratio)
        best, chosen = lax.top_k(jnp.where(seen, scores, -jnp.inf), min(self.top_k, keys.shape[1]))
        return chosen, best > -jnp.inf


def _whole_entries(places: Array, entries: int, ratio: int) -> Bool[Array, "tokens entries"]:
    """Returns which entries lie whole before each token, itself included."""
    return jnp.arange(entries) < (places[:, None] + 1) // ratio


class CompressedSelfAttention(nnx.Module):
    """Attention of many heads to one vector a token: of a window, and entries of groups before.

    Heads and groups of results are what ranks share out; vectors and entries are on every rank.
    """

    def __init__(self, body: CompressedAttention, hidden: int, weights: Weights) -> None:
        heads, width = whole(body.heads, "heads"), whole(body.width, "width")
        rank, groups = whole(body.q_rank, "q_rank"), whole(body.groups, "groups")
        self.rope, out = whole(body.rope_width, "rope_width"), whole(body.o_rank, "o_rank")
        if heads % groups or self.rope % 2 or self.rope > width:
            raise InputError(
                f"network: {heads} heads of {width} must be a multiple of {groups} groups, and "
                f"rope_width {self.rope} even and no wider"
            )
        self.window = whole(body.window, "window")
        self.down = weights.matrix(hidden, rank, inner=hidden)
        self.down_norm = weights.scales(rank)
        self.query = weights.matrix(rank, heads, width, inner=rank, split=1)
        self.key = weights.matrix(hidden, width, inner=hidden)
        self.key_norm = weights.scales(width)
        self.sinks = weights.vector(heads, split=0)
        inner = heads // groups * width
        self.group_output = weights.matrix(groups, inner, out, inner=inner, split=0)
        self.output = weights.matrix(groups, out, hidden, inner=groups * out, split=0)
        ratio = None if body.ratio is None else whole(body.ratio, "ratio")
        series = 1 if body.index is None else 2
        self.compressor = (
            None if ratio is None else Compressor(width, ratio, series, self.rope, hidden, weights)
        )
        self.index = (
            None
            if body.index is None or ratio is None
            else EntryChoice(body.index, ratio, rank, self.rope, hidden, weights)
        )

    def empty_cache(self, batch: int, capacity: int, part: int) -> CompressedCache:
        """Returns room for `capacity` tokens, of vectors for the window and `part` tokens."""
        kept = min(capacity, self.window + part - 1)
        near = jnp.zeros((batch, kept, self.key.shape[1]), self.key.dtype)
        compressors = (self.compressor, None if self.index is None else self.index.compressor)
        entries, keys = (c if c is None else c.empty(batch, capacity) for c in compressors)
        return CompressedCache(near, entries, keys, self.window, capacity)

    def __call__(
        self,
        x: Float[Array, "batch tokens hidden"],
        start: Int[Array, ""],
        cache: CompressedCache | None = None,
        axis: str | None = None,
    ) -> tuple[Float[Array, "batch tokens hidden"], CompressedCache]:
        """Returns the layer's result for tokens from place `start` on, and the cache with them.

        Without a cache they are the first and see each other alone. `axis` is the mesh axis that
        heads are split over.
        """
        tokens = x.shape[1]
        places = start + jnp.arange(tokens)
        past = self.empty_cache(x.shape[0], tokens, tokens) if cache is None else cache
        inner = jnp.einsum("btm,mr->btr", x, self.down[...])
        inner = rms_norm(inner, self.down_norm[...], (-1,), None)
        query = jnp.einsum("btr,rhd->bthd", inner, self.query[...])
        query = _turn(rms_norm(query, None, (-1,), None), places, self.rope)
        near = self._near(x, start, places, past)
        held = slot_places(near.shape[1], start + tokens)
        sources = [(near, visible(places, held, "window", self.window)[None], "bsd")]
        entries, keys = past.entries, past.keys
        if self.compressor is not None and entries is not None:
            entries = self.compressor(x, start, entries)
            if self.index is not None and keys is not None:
                keys = self.index.compressor(x, start, keys)
                chosen, seen = self.index(x, inner, places, keys.entries)
                best = jax.vmap(lambda each, at: each[at])(entries.entries, chosen)
                sources.append((best, seen, "btsd"))
            else:
                seen = _whole_entries(places, entries.entries.shape[1], self.compressor.ratio)
                sources.append((entries.entries, seen[None], "bsd"))
        mixed = _turn(self._attend(query, sources), -places, self.rope)
        grouped = mixed.reshape(*x.shape[:2], self.output.shape[0], -1)
        results = jnp.einsum("btgi,gio->btgo", grouped, self.group_output[...])
        y = sum_ranks(jnp.einsum("btgo,gom->btm", results, self.output[...]), axis)
        return y, CompressedCache(near, entries, keys, past.window, past.capacity)

    def _near(
        self, x: Array, start: Array, places: Array, past: CompressedCache
    ) -> Float[Array, "batch slots width"]:
        """Returns the vectors of the window with those of new tokens."""
        slots = past.near.shape[1]
        check_room(x.shape[1], slots, past.window, past.capacity)
        key = rms_norm(jnp.einsum("btm,md->btd", x, self.key[...]), self.key_norm[...], (-1,), None)
        new = _turn(key[:, :, None], places, self.rope)[:, :, 0]
        return past.near.at[:, places % slots].set(new)

    def _attend(
        self,
        query: Float[Array, "batch tokens heads width"],
        sources: list[tuple[Array, Bool[Array, "..."], str]],
    ) -> Float[Array, "batch tokens heads width"]:
        """Returns attention to vectors of several sources at once: each with its mask and axes."""
        scores = [
            jnp.where(
                mask[:, :, None],
                jnp.einsum(
                    f"bthd,{axes}->bths", query, vectors, preferred_element_type=jnp.float32
                ),
                -jnp.inf,
            )
            for vectors, mask, axes in sources
        ]
        ends = list(itertools.accumulate(each.shape[-1] for each in scores))
        every = jnp.concatenate(scores, -1) * query.shape[-1] ** -0.5
        shares = softmax(every, self.sinks[...][:, None]).astype(query.dtype)
        parts = zip(jnp.split(shares, ends[:-1], -1), sources, strict=True)
        return sum(
            (jnp.einsum(f"bths,{axes}->bthd", part, vectors) for part, (vectors, _, axes) in parts),
            jnp.zeros_like(query),
        )
