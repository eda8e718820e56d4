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
from perfmodel.models.networks.cache import Cache, LatentCache, LayerCache, StateCache
from perfmodel.models.networks.latent import LatentSelfAttention
from perfmodel.models.networks.mixture import Mixture
from perfmodel.models.networks.mlp import FeedForward
from perfmodel.models.networks.norms import Norm
from perfmodel.models.networks.recurrent import RecurrentLayer, recurrent_layer
from perfmodel.models.networks.weights import Weights, sum_ranks, whole
from perfmodel.models.recurrent import Recurrent
from perfmodel.models.transformer import Block, Mixer, Model

Held = LayerCache | LatentCache | StateCache
_Attention = SelfAttention | LatentSelfAttention | RecurrentLayer


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
    """Norm, body, a second norm where the model has one, and the residual."""

    def __init__(self, model: Model, body: nnx.Module, weights: Weights) -> None:
        hidden, vectors = (
            whole(model.hidden, "hidden"),
            whole(model.norm_vectors, "norm_vectors", 0),
        )
        if model.norms not in (1, 2):
            raise InputError(f"network: norms must be 1 or 2, not {model.norms}")
        self.before = Norm(hidden, vectors, weights)
        self.body = body
        self.after = Norm(hidden, vectors, weights) if model.norms == 2 else None

    def __call__(
        self, x: Array, start: Array, cache: Held | None, axis: str | None
    ) -> tuple[Float[Array, "batch tokens hidden"], Held | None]:
        y = self.before(x)
        if isinstance(self.body, SelfAttention):
            assert cache is None or isinstance(cache, LayerCache)
            y, cache = self.body(y, start, cache, axis)
        elif isinstance(self.body, LatentSelfAttention):
            assert cache is None or isinstance(cache, LatentCache)
            y, cache = self.body(y, start, cache, axis)
        elif isinstance(self.body, RecurrentLayer):
            assert cache is None or isinstance(cache, StateCache)
            y, cache = self.body(y, start, cache, axis)
        else:
            assert isinstance(self.body, FeedForward | Mixture)
            y = self.body(y, axis)
        return x + (y if self.after is None else self.after(y)), cache


@functools.partial(jax.jit, static_argnums=(0, 5))
def _apply(
    graph: nnx.GraphDef,
    state: nnx.State,
    x: Array,
    start: Array,
    cache: Held | None,
    axis: str | None,
) -> tuple[Array, Held | None]:
    """Applies a sublayer; equal ones are traced once, so that depth costs little."""
    return nnx.merge(graph, state)(x, start, cache, axis)


def _body(model: Model, block: Block, weights: Weights) -> nnx.Module:
    body, hidden = block.body, whole(model.hidden, "hidden")
    if isinstance(body, CompressedAttention | BlockSparseAttention) or model.streams is not None:
        raise InputError(
            "network: attention to chosen or compressed keys, and several residual streams, have "
            "none yet (nearest: grouped-query attention)"
        )
    if isinstance(body, Recurrent):
        return recurrent_layer(body, hidden, weights)
    if isinstance(body, LatentAttention):
        if body.chosen is not None:
            raise InputError(
                "network: keys that an earlier layer chose have none yet (nearest: an indexer)"
            )
        return LatentSelfAttention(body, hidden, weights)
    if isinstance(body, GroupedQueryAttention):
        for odd, what in (
            (body.joined, "attention beside its feed-forward layer"),
            (body.cached != "own", "keys that are values or another layer's"),
            (body.v_width is not None, "values of another width than keys"),
        ):
            if odd:
                raise InputError(f"network: {what} has none yet (nearest: plain attention)")
        # Beside layers that see chunks, those that see all keys have no positions at all.
        spans = [getattr(other.body, "span", "full") for other in model.attention]
        chunked = "chunk" in spans
        rotary = not model.positions and (body.span == "chunk" or not chunked)
        return SelfAttention(body, hidden, rotary, weights)
    if isinstance(body, MixtureOfExperts):
        return Mixture(body, hidden, weights)
    return FeedForward(body, hidden, weights)


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
        if model.extra_norms:
            raise InputError(
                f"network: {model.extra_norms} norms beyond those of each sublayer have none yet "
                "(nearest: 0)"
            )
        positions = whole(model.positions, "positions", 0)
        self.embedding = weights.matrix(vocabulary, hidden, inner=hidden, split=0)
        # A table may start before the first place.
        self.first_place = positions - model.max_context if positions else 0
        self.positions = weights.matrix(positions, hidden, inner=hidden) if positions else None
        self.sublayers = nnx.List(
            [Sublayer(model, _body(model, model.blocks[i], weights), weights) for i in order]
        )
        self.norm = Norm(hidden, whole(model.norm_vectors, "norm_vectors", 0), weights)
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
        if self.positions is None:
            return x
        places = start + self.first_place + jnp.arange(tokens.shape[1])
        return x + self.positions[...][places]

    def features(
        self, tokens: Array, start: Array, layers: Sequence[Held] | None, axis: str | None
    ) -> tuple[Float[Array, "batch tokens hidden"], tuple[Held, ...]]:
        """Returns the last hidden states, before their norm, and the caches with the tokens."""
        x = self.embed(tokens, start, axis)
        left = iter(layers or ())
        written = []
        for sublayer in self.sublayers:
            past = next(left, None) if isinstance(sublayer.body, _Attention) else None
            x, cache = _apply(*nnx.split(sublayer), x, start, past, axis)
            if cache is not None:
                written.append(cache)
        return x, tuple(written)

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
        for sublayer in network.sublayers
        if isinstance(sublayer.body, _Attention)
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
