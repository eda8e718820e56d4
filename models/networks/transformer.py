"""Decoders that run: the sublayers of a `Model` in order, between an embedding and an output head.

network = build(model, nnx.Rngs(0))
cache = empty_cache(network, batch=2, capacity=64)
logits, cache = prefill(network, prompts, cache)
logits, cache = decode(network, jnp.argmax(logits, -1), cache)
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from perfmodel.errors import InputError
from perfmodel.models.attention import GroupedQueryAttention
from perfmodel.models.block_sparse import BlockSparseAttention
from perfmodel.models.compressed import CompressedAttention
from perfmodel.models.mla import LatentAttention
from perfmodel.models.mlp import MixtureOfExperts
from perfmodel.models.networks.attention import SelfAttention
from perfmodel.models.networks.beside import NormedBranches, SideBySide, norm_of
from perfmodel.models.networks.block_sparse import BlockSelfAttention
from perfmodel.models.networks.cache import (
    BlockCache,
    Cache,
    CompressedCache,
    LatentCache,
    LayerCache,
    StateCache,
)
from perfmodel.models.networks.compressed import CompressedSelfAttention
from perfmodel.models.networks.latent import LatentSelfAttention
from perfmodel.models.networks.mixture import Mixture
from perfmodel.models.networks.mlp import FeedForward
from perfmodel.models.networks.recurrent import RecurrentLayer, recurrent_layer
from perfmodel.models.networks.residuals import BlockSums, StreamHead, StreamMixing
from perfmodel.models.networks.weights import Weights, sum_ranks, whole
from perfmodel.models.recurrent import Recurrent
from perfmodel.models.streams import BlockResiduals, HyperConnections
from perfmodel.models.transformer import Block, Mixer, Model

Held = LayerCache | LatentCache | BlockCache | CompressedCache | StateCache
_Attention = (
    SelfAttention
    | LatentSelfAttention
    | BlockSelfAttention
    | CompressedSelfAttention
    | RecurrentLayer
)


def even_order(model: Model) -> tuple[int, ...]:
    """Returns an order of sublayers, as indices into `model.blocks`, where none is known.

    Attention and feed-forward layers alternate, and the blocks of each are spread evenly.

    >>> from perfmodel.models.mlp import Mlp
    >>> attention = GroupedQueryAttention(2, 1, 8)
    >>> blocks = (Block(1, attention), Block(2, attention), Block(3, Mlp(16)))
    >>> even_order(Model(16, 32, 0, 64, 3, blocks))
    (1, 2, 0, 2, 1, 2)
    """

    def spread(sequences: Sequence[Sequence[int]]) -> list[int]:
        places = [
            ((2 * i + 1) / len(sequence), which, item)
            for which, sequence in enumerate(sequences)
            for i, item in enumerate(sequence)
        ]
        return [item for _, _, item in sorted(places)]

    kinds: tuple[list[list[int]], list[list[int]]] = ([], [])
    for index, block in enumerate(model.blocks):
        kind = kinds[0] if isinstance(block.body, Mixer) else kinds[1]
        kind.append([index] * whole(block.count, "count"))
    return tuple(spread([spread(kinds[0]), spread(kinds[1])]))


class Sublayer(nnx.Module):
    """Norm, body, a second norm where the model has one, and how streams are mixed around them."""

    def __init__(self, model: Model, body: nnx.Module, weights: Weights) -> None:
        if model.norms not in (1, 2):
            raise InputError(f"network: norms must be 1 or 2, not {model.norms}")
        self.before = norm_of(model, weights)
        self.body = body
        self.after = norm_of(model, weights) if model.norms == 2 else None
        self.mixing = (
            StreamMixing(model.streams, whole(model.hidden, "hidden"), weights)
            if isinstance(model.streams, HyperConnections)
            else None
        )

    def result(
        self, x: Array, start: Array, cache: Held | None, axis: str | None
    ) -> tuple[Float[Array, "batch tokens hidden"], Held | None]:
        """Returns what the sublayer adds to the residual x, and its cache."""
        y = self.before(x)
        if isinstance(self.body, SelfAttention):
            assert cache is None or isinstance(cache, LayerCache)
            y, cache = self.body(y, start, cache, axis)
        elif isinstance(self.body, LatentSelfAttention):
            assert cache is None or isinstance(cache, LatentCache)
            y, cache = self.body(y, start, cache, axis)
        elif isinstance(self.body, BlockSelfAttention):
            assert cache is None or isinstance(cache, BlockCache)
            y, cache = self.body(y, start, cache, axis)
        elif isinstance(self.body, CompressedSelfAttention):
            assert cache is None or isinstance(cache, CompressedCache)
            y, cache = self.body(y, start, cache, axis)
        elif isinstance(self.body, NormedBranches):
            y = self.body(x, y, axis)
        elif isinstance(self.body, RecurrentLayer):
            assert cache is None or isinstance(cache, StateCache)
            y, cache = self.body(y, start, cache, axis)
        else:
            assert isinstance(self.body, FeedForward | Mixture)
            y = self.body(y, axis)
        return (y if self.after is None else self.after(y)), cache


@functools.partial(jax.jit, static_argnums=(0, 5))
def _result(
    graph: nnx.GraphDef,
    state: nnx.State,
    x: Array,
    start: Array,
    cache: Held | None,
    axis: str | None,
) -> tuple[Array, Held | None]:
    """Returns what a sublayer adds; equal ones are traced once, so that depth costs little."""
    return nnx.merge(graph, state).result(x, start, cache, axis)


@functools.partial(jax.jit, static_argnums=(0, 5))
def _apply(
    graph: nnx.GraphDef,
    state: nnx.State,
    x: Array,
    start: Array,
    cache: Held | None,
    axis: str | None,
) -> tuple[Array, Held | None]:
    """Returns the residual, of one stream or several, after a sublayer."""
    sublayer = nnx.merge(graph, state)
    if not isinstance(sublayer, Sublayer) or sublayer.mixing is None:
        y, cache = sublayer.result(x, start, cache, axis)
        return x + y, cache
    read, how = sublayer.mixing.read(x)
    y, cache = sublayer.result(read, start, cache, axis)
    return sublayer.mixing.write(x, y, how), cache


def _body(model: Model, block: Block, weights: Weights) -> nnx.Module:
    body, hidden = block.body, whole(model.hidden, "hidden")
    if isinstance(body, CompressedAttention):
        return CompressedSelfAttention(body, hidden, weights)
    if isinstance(body, Recurrent):
        return recurrent_layer(body, hidden, weights)
    if isinstance(body, LatentAttention):
        return LatentSelfAttention(body, hidden, weights)
    if isinstance(body, GroupedQueryAttention):
        # Beside layers that see chunks, those that see all keys have no positions at all.
        spans = [getattr(other.body, "span", "full") for other in model.attention]
        chunked = "chunk" in spans
        rotary = not model.positions and (body.span == "chunk" or not chunked)
        if isinstance(body, BlockSparseAttention):
            return BlockSelfAttention(body, hidden, rotary, weights)
        return SelfAttention(body, hidden, rotary, weights)
    if isinstance(body, MixtureOfExperts):
        mixture = Mixture(body, hidden, weights)
        return NormedBranches(model, mixture, weights) if body.normed_apart else mixture
    return FeedForward(body, hidden, weights)


def _embedding_norms(model: Model) -> tuple[int, bool]:
    """Returns how many norms follow the embedding, and whether blocks side by side share theirs.

    Those are what is left of `model.extra_norms` beside the norms within mixtures.
    """
    left = model.extra_norms - sum(
        4 * block.count
        for block in model.feed_forward
        if isinstance(block.body, MixtureOfExperts) and block.body.normed_apart
    )
    joined = sum(block.count for block in model.attention if _is_joined(block))
    for shared in (False, True):
        embedding = left + shared * joined
        if embedding in (0, 1):
            return int(embedding), shared
    raise InputError(
        f"network: {model.extra_norms} norms beyond those of each sublayer have none yet "
        "(nearest: 0)"
    )


def _is_joined(block: Block) -> bool:
    return isinstance(block.body, GroupedQueryAttention) and block.body.joined


def _sublayers(
    model: Model, order: Sequence[int], shared: bool, weights: Weights
) -> list[Sublayer | SideBySide]:
    """Returns the sublayers in order; attention side by side with what follows it is one."""
    made: list[Sublayer | SideBySide] = []
    left = iter(order)
    for i in left:
        body = _body(model, model.blocks[i], weights)
        if _is_joined(model.blocks[i]):
            after = next(left, None)
            if after is None:
                raise InputError("network: nothing follows attention that stands side by side")
            beside = _body(model, model.blocks[after], weights)
            assert isinstance(body, SelfAttention)
            made.append(SideBySide(model, body, beside, shared, weights))
        else:
            made.append(Sublayer(model, body, weights))
    return made


def _lender(sublayers: Sequence[Sublayer | SideBySide], borrower: int) -> int | None:
    """Returns the sublayer whose cache another one reads; None where it has its own or none.

    It is the last earlier one of the same span (transformers, class Gemma4TextAttention).
    """
    body = sublayers[borrower].body
    if not isinstance(body, SelfAttention) or body.key is not None:
        return None
    for i in reversed(range(borrower)):
        other = sublayers[i].body
        if isinstance(other, SelfAttention) and other.key is not None:
            if (other.span, other.window) == (body.span, body.window):
                return i
    raise InputError("network: no earlier layer of its kind has the keys that a layer reads")


def _chooser(sublayers: Sequence[Sublayer | SideBySide], taker: int) -> int | None:
    """Returns the sublayer whose choice of keys another one takes over; None where there is none.

    It is the last earlier one with an indexer (transformers, class GlmMoeDsaAttention).
    """
    body = sublayers[taker].body
    if not isinstance(body, LatentSelfAttention) or not body.chooses or body.index is not None:
        return None
    for i in reversed(range(taker)):
        other = sublayers[i].body
        if isinstance(other, LatentSelfAttention) and other.index is not None:
            return i
    raise InputError("network: no earlier layer has an indexer whose choice a layer takes over")


class Decoder(nnx.Module):
    """A decoder of `model`, its sublayers in `order`: indices into `model.blocks`.

    Ranks share out heads, inner widths and the vocabulary where a mesh axis is named.
    """

    def __init__(self, model: Model, order: Sequence[int], weights: Weights) -> None:
        counts = [list(order).count(i) for i in range(len(model.blocks))]
        if len(order) != sum(counts) or counts != [block.count for block in model.blocks]:
            raise InputError(
                f"network: order names {counts} sublayers of each block, the model has "
                f"{[block.count for block in model.blocks]}"
            )
        hidden, vocabulary = whole(model.hidden, "hidden"), whole(model.vocabulary, "vocabulary")
        embedding_norms, shared = _embedding_norms(model)
        positions = whole(model.positions, "positions", 0)
        self.embedding = weights.matrix(vocabulary, hidden, inner=hidden, split=0)
        # A table may start before the first place.
        self.first_place = positions - model.max_context if positions else 0
        self.positions = weights.matrix(positions, hidden, inner=hidden) if positions else None
        self.embedding_norm = norm_of(model, weights) if embedding_norms else None
        sublayers = _sublayers(model, order, shared, weights)
        self.sublayers = nnx.List(sublayers)
        self.lenders = tuple(_lender(sublayers, i) for i in range(len(sublayers)))
        self.choosers = tuple(_chooser(sublayers, i) for i in range(len(sublayers)))
        several = model.streams if isinstance(model.streams, HyperConnections) else None
        blocks = model.streams if isinstance(model.streams, BlockResiduals) else None
        self.streams = 1 if several is None else whole(several.streams, "streams")
        self.stream_head = None if several is None else StreamHead(several, hidden, weights)
        self.sums = None if blocks is None else BlockSums(blocks, hidden, len(sublayers), weights)
        if model.streams is not None and any(isinstance(each, SideBySide) for each in sublayers):
            raise InputError("network: blocks side by side with several streams have none yet")
        self.norm = norm_of(model, weights)
        self.head = (
            None if model.tied else weights.matrix(vocabulary, hidden, inner=hidden, split=0)
        )

    def embed(
        self, tokens: Int[Array, "batch tokens"], start: Array, axis: str | None
    ) -> Float[Array, "batch tokens hidden"]:
        """Returns the embeddings of tokens from place `start` on."""
        rows = tokens
        if axis is not None:
            rows = tokens - lax.axis_index(axis) * self.embedding.shape[0]
        held = (rows >= 0) & (rows < self.embedding.shape[0])
        found = jnp.take(self.embedding[...], rows, axis=0, mode="clip")
        x = sum_ranks(jnp.where(held[..., None], found, 0), axis)
        if self.positions is not None:
            places = start + self.first_place + jnp.arange(tokens.shape[1])
            x = x + self.positions[...][places]
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def features(
        self, tokens: Array, start: Array, layers: Sequence[Held] | None, axis: str | None
    ) -> tuple[Float[Array, "batch tokens hidden"], tuple[Held, ...]]:
        """Returns the last hidden states, before their norm, and the caches with the tokens."""
        x = self.embed(tokens, start, axis)
        if self.stream_head is not None:
            x = jnp.repeat(x[:, :, None], self.streams, 2)
        sums = (x,)
        left = iter(layers or ())
        written: list[Held | None] = []
        for i, (sublayer, lender) in enumerate(zip(self.sublayers, self.lenders, strict=True)):
            past = None
            if lender is not None:
                past = written[lender]
            elif isinstance(sublayer.body, _Attention):
                past = next(left, None)
            chooser = self.choosers[i]
            if chooser is not None:
                chosen = written[chooser]
                own = LatentCache(None) if past is None else past
                assert isinstance(own, LatentCache) and isinstance(chosen, LatentCache)
                past = own.chosen_by(chosen)
            if self.sums is None:
                x, cache = _apply(*nnx.split(sublayer), x, start, past, axis)
            else:
                read, sums = self.sums.read(i, sums)
                y, cache = _result(*nnx.split(sublayer), read, start, past, axis)
                sums = (*sums[:-1], sums[-1] + y)
            written.append(cache if lender is None else None)
        if self.sums is not None:
            x = self.sums.end(sums)
        elif self.stream_head is not None:
            x = self.stream_head(x)
        kept = (c.chosen_by(None) if isinstance(c, LatentCache) else c for c in written)
        return x, tuple(cache for cache in kept if cache is not None)

    def logits(
        self, x: Float[Array, "*rows hidden"], axis: str | None = None
    ) -> Float[Array, "*rows vocabulary"]:
        """Returns the logits of hidden states, in 32 bits, of the whole vocabulary."""
        head = self.embedding if self.head is None else self.head
        y = jnp.einsum("...m,vm->...v", self.norm(x), head[...])
        # Ranks exchange them as the product writes them.
        y = y if axis is None else lax.all_gather(y, axis, axis=y.ndim - 1, tiled=True)
        return y.astype(jnp.float32)

    def __call__(
        self, tokens: Int[Array, "batch tokens"], axis: str | None = None
    ) -> Float[Array, "batch tokens vocabulary"]:
        """Returns the logits after each token, without a cache."""
        x, _ = self.features(tokens, jnp.zeros((), jnp.int32), None, axis)
        return self.logits(x, axis)


def _decoder(model: Model, weights: Weights, order: Sequence[int] | None) -> Decoder:
    return Decoder(model, even_order(model) if order is None else order, weights)


def build(
    model: Model,
    rngs: nnx.Rngs,
    order: Sequence[int] | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Decoder:
    """Returns a network with random weights.

    Args:
        model: sizes as Python integers, as loaded.
        rngs: where the weights come from.
        order: of sublayers, as indices into `model.blocks` (`ModelEntry.order`); evenly spread
            where None.
        dtype: of weights, activations and cache.

    Sizes that no network can have are an `InputError`.
    """
    return _decoder(model, Weights(rngs, dtype), order)


def abstract(
    model: Model, order: Sequence[int] | None = None, dtype: DTypeLike = jnp.bfloat16
) -> Decoder:
    """Returns a network of shapes alone: any size, no memory. Arguments as in `build`.

    It is traced (`nnx.split`, then `jax.eval_shape` or `jax.make_jaxpr`), never run.

    >>> from perfmodel.models.catalogue import load_model
    >>> abstract(load_model("llama-3.1-405b").model).embedding.shape
    (128256, 16384)
    """
    return _decoder(model, Weights(None, dtype), order)


def empty_cache(network: Decoder, batch: int, capacity: int, part: int = 1) -> Cache:
    """Returns a cache of `batch` sequences with room for `capacity` tokens each.

    Layers with a window keep its keys and those of a `part` of tokens written at once: 1 to
    decode, the chunk of a chunked prefill, the prompt to prefill it whole.
    """
    layers = (
        sublayer.body.empty_cache(batch, capacity, part)
        for sublayer, lender in zip(network.sublayers, network.lenders, strict=True)
        if isinstance(sublayer.body, _Attention) and lender is None
    )
    return Cache(jnp.zeros((), jnp.int32), tuple(layers), capacity)


def prefill(
    network: Decoder, tokens: Int[Array, "batch tokens"], cache: Cache, axis: str | None = None
) -> tuple[Float[Array, "batch vocabulary"], Cache]:
    """Returns the logits after the last of some tokens, and the cache with them.

    Tokens that are in the cache already come before: a part of a prompt is prefilled alike.
    """
    if tokens.shape[1] > cache.capacity:
        raise InputError(f"cache: has room for {cache.capacity} tokens, not {tokens.shape[1]}")
    x, layers = network.features(tokens, cache.tokens, cache.layers, axis)
    after = Cache(cache.tokens + tokens.shape[1], layers, cache.capacity)
    return network.logits(x[:, -1], axis), after


def chunked_prefill(
    network: Decoder, tokens: Int[Array, "batch tokens"], cache: Cache, chunk: int
) -> tuple[Float[Array, "batch vocabulary"], Cache]:
    """Returns what `prefill` does, `chunk` tokens at a time; the last part may be shorter."""
    if chunk < 1 or not tokens.shape[1]:
        raise InputError(f"prefill: needs a chunk and tokens, not {chunk} and {tokens.shape[1]}")
    logits = None
    for first in range(0, tokens.shape[1], chunk):
        logits, cache = prefill(network, tokens[:, first : first + chunk], cache)
    assert logits is not None
    return logits, cache


def decode(
    network: Decoder, tokens: Int[Array, " batch"], cache: Cache, axis: str | None = None
) -> tuple[Float[Array, "batch vocabulary"], Cache]:
    """Returns the logits after one more token of each sequence, and the cache with it."""
    return prefill(network, tokens[:, None], cache, axis)
