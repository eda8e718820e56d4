"""A decoder: blocks of equal sublayers between an embedding and an output head.

Only the structure (which kinds of sublayer there are) is static. Widths, counts and flags are
numbers, exact Python integers as loaded and arrays once traced, so that all dense models share
one compiled program.
"""

from typing import Generic, TypeVar, cast

import equinox as eqx

from perfmodel.formats import Precision
from perfmodel.models.attention import GroupedQueryAttention
from perfmodel.models.block_sparse import BlockSparseAttention
from perfmodel.models.compressed import CompressedAttention
from perfmodel.models.encoder import Encoder, encoder_operators
from perfmodel.models.mla import LatentAttention
from perfmodel.models.mlp import MixtureOfExperts, Mlp
from perfmodel.models.recurrent import Recurrent
from perfmodel.models.streams import BlockResiduals, HyperConnections
from perfmodel.operators import Collective, Matmul, Operators, Vector
from perfmodel.relax import Real, divide, maximum
from perfmodel.step import Shard, Step

Mixer = GroupedQueryAttention | LatentAttention | CompressedAttention | Recurrent
UNSPREAD = (CompressedAttention, BlockSparseAttention, Recurrent)
"""Kinds of attention whose keys cannot be spread over context ranks; a state is not spread."""
Body = Mixer | Mlp | MixtureOfExperts
Kind = TypeVar("Kind", Mixer, Mlp | MixtureOfExperts, Body)


class Block(eqx.Module, Generic[Kind]):
    """`count` equal sublayers, wherever in the network: norm, body, residual.

    A layer of a plain transformer is two sublayers. Their order changes no count, so sublayers
    alike are one block: a network of 80 layers is 80 × attention and 80 × feed-forward.
    """

    count: Real
    body: Kind


class Model(eqx.Module):
    """A decoder-only network.

    Fields: `tied` is 1 where the output head reuses the embedding; `layers`, as the publisher
    counts them; `norm_vectors` is 1 for RMSNorm (a weight), 2 for LayerNorm (weight and bias);
    `norms` of a sublayer (2 where its result is normalised too), and `extra_norms` of all layers
    beyond those, less than none where sublayers beside each other share one; `positions` counts
    learned position embeddings; `max_context` is the longest context the configuration allows;
    `streams` are the connections of a residual of several streams or blocks, None where it is one;
    `encoder`, the tower beside the decoder, None where no images are served: no count of a network
    includes it.
    """

    hidden: Real
    vocabulary: Real
    tied: Real
    max_context: Real
    layers: Real
    blocks: tuple[Block, ...]
    norm_vectors: Real = 1
    norms: Real = 1
    positions: Real = 0
    extra_norms: Real = 0
    streams: HyperConnections | BlockResiduals | None = None
    encoder: Encoder | None = None

    @property
    def sublayers(self) -> Real:
        """Number of sublayers."""
        return sum(block.count for block in self.blocks)

    @property
    def attention(self) -> tuple[Block[Mixer], ...]:
        """Blocks of attention."""
        found = (b for b in self.blocks if isinstance(b.body, Mixer))
        return cast(tuple[Block[Mixer], ...], tuple(found))

    @property
    def feed_forward(self) -> tuple[Block[Mlp | MixtureOfExperts], ...]:
        """Blocks of feed-forward layers, mixtures of experts among them."""
        found = (b for b in self.blocks if not isinstance(b.body, Mixer))
        return cast(tuple[Block[Mlp | MixtureOfExperts], ...], tuple(found))

    @property
    def is_mixture(self) -> bool:
        """Whether any feed-forward layer is a mixture of experts."""
        return any(isinstance(block.body, MixtureOfExperts) for block in self.blocks)


def _norm_count(model: Model) -> Real:
    """Returns how many norms of the hidden width a token passes, without the last."""
    return model.sublayers * model.norms + model.extra_norms


def _norms(model: Model) -> Real:
    """Returns the elements of all norms but the last."""
    return _norm_count(model) * model.norm_vectors * model.hidden


def _tables(model: Model) -> Real:
    return (2 - model.tied) * model.vocabulary * model.hidden


def parameters(model: Model) -> Real:
    """Returns the number of parameters; a Python integer for a model as loaded.

    Llama-2-70B: 80·(8192·(2·64 + 2·8)·128 + 3·8192·28672 + 2·8192) + 2·32000·8192 + 8192
    = 68,976,648,192.
    """
    return decoder_parameters(model) + _tables(model) + model.positions * model.hidden


def decoder_parameters(model: Model) -> Real:
    """Returns the number of parameters without tables: of all layers and the last norm."""
    h = model.hidden
    bodies = sum(b.count * (b.body.matrices(h) + b.body.vectors(h)) for b in model.blocks)
    mixing = 0 if model.streams is None else model.streams.parameters(h, model.sublayers)
    return bodies + _norms(model) + model.norm_vectors * h + mixing


def active_parameters(model: Model) -> Real:
    """Returns the parameters that one token is multiplied by, embeddings counted as above.

    Of a mixture of experts, the chosen ones: for a dense network all of them.
    """
    idle = (
        block.count * block.body.idle(model.hidden)
        for block in model.blocks
        if isinstance(block.body, MixtureOfExperts)
    )
    return parameters(model) - sum(idle)


def weight_bytes(model: Model, precision: Precision, shard: Shard | None = None) -> Real:
    """Returns bytes of weights on one rank [B]; embeddings, norms and biases stay in 16 bits."""
    cut = Shard() if shard is None else shard
    table = model.vocabulary * model.hidden * precision.head_bytes
    embeddings = divide((2 - model.tied) * table, cut.ranks)
    positions = 2 * model.positions * model.hidden
    return decoder_weight_bytes(model, precision, cut) + embeddings + positions


def decoder_weight_bytes(model: Model, precision: Precision, shard: Shard) -> Real:
    """Returns bytes of weights on one rank [B] without tables: of all layers and the last norm."""
    h = model.hidden
    bodies = sum(b.count * b.body.weight_bytes(h, precision, shard) for b in model.blocks)
    mixing = 0 if model.streams is None else model.streams.weight_bytes(h, model.sublayers)
    return bodies + 2 * (_norms(model) + model.norm_vectors * h) + mixing


def kv_bytes_per_token(model: Model, precision: Precision, shard: Shard | None = None) -> Real:
    """Returns bytes of KV cache that one more token takes on one rank [B], over all layers.

    Within every window; past a window its layers keep no more (see `kv_bytes`). Of compressed
    entries, its share of one.
    Llama-3.3-70B in bf16: 2 · 80 layers · 8 kv heads · 128 · 2 B = 327,680 B.
    """
    cut = Shard() if shard is None else shard
    return kv_bytes(model, precision, 1, cut)


def kv_bytes(model: Model, precision: Precision, tokens: Real, shard: Shard | None = None) -> Real:
    """Returns bytes of KV cache of one sequence of `tokens` on one rank [B], over all layers.

    gpt-oss-120b with an fp8 cache, 65,536 tokens: 18 layers keep all, 18 the last 128, at 1,024 B:
    1,210,318,848 B.
    """
    cut = Shard() if shard is None else shard
    return sum(
        b.count * (b.body.cache_bytes_per_token(precision, cut) * b.body.cached_tokens(tokens))
        for b in model.attention
    )


def sequence_bytes(model: Model, precision: Precision, tokens: Real, shard: Shard) -> Real:
    """Returns bytes that one sequence of `tokens` takes on one rank [B]: cache and state.

    DeepSeek-V4-Flash in bf16, 8,192 tokens: 61,997,056 B of cache, and 20 · 524,288 B + 21 · 81,920
    B of what its compressors hold.
    """
    cache = kv_bytes(model, precision, tokens, shard)
    states = [
        block.count * block.body.state_bytes(shard)
        for block in model.attention
        if isinstance(block.body, CompressedAttention | Recurrent)
    ]
    return cache + sum(states) if states else cache


def activation_bytes(model: Model, step: Step, shard: Shard) -> Real:
    """Returns bytes of intermediate results alive at the widest point of a step [B].

    Residual stream and its normalised copy, the widest projection (16 bits each), and the
    logits in 32 bits.
    """
    rows, all_rows = step.rows, step.all_rows
    widest: Real = 0
    for block in model.attention:
        widest = maximum(widest, rows * block.body.activation_width(shard))
    for block in model.feed_forward:
        widest = maximum(widest, all_rows * block.body.activation_width(shard))
    logits = 4 * step.logits * model.vocabulary
    return 2 * (2 * model.hidden * all_rows + widest) + logits


def block_operators(
    model: Model, block: Block, step: Step, shard: Shard, precision: Precision
) -> Operators:
    """Returns the operators of one sublayer of a block on one rank, without its norm."""
    return block.body.operators(model.hidden, step, shard, precision)


def norm_operators(model: Model, step: Step, precision: Precision) -> Operators:
    """Returns the norms and residuals of all sublayers in one step."""
    h = model.hidden
    mixing: Operators = ()
    if model.streams is not None:
        mixing = model.streams.operators(h, model.sublayers, step, precision)
    return (
        *mixing,
        Vector(
            "residual_and_norm", f"{step.phase}/rest", step.rows, 2 * h, 2 * h, 5 * h,
            count=_norm_count(model), reductions=1,
        ),
    )  # fmt: skip


def layer_operators(model: Model, step: Step, shard: Shard, precision: Precision) -> Operators:
    """Returns the operators of all layers in one step on one rank; equal layers are one row."""
    bodies = (
        eqx.tree_at(lambda o: o.count, op, op.count * block.count)
        for block in model.blocks
        for op in block_operators(model, block, step, shard, precision)
    )
    return (*norm_operators(model, step, precision), *bodies)


def tower_operators(model: Model, step: Step, shard: Shard, precision: Precision) -> Operators:
    """Returns the operators that encode the images of a step's chunk; none where there are none.

    Each image once, in the step whose chunk it is part of, as vLLM schedules it (V1 scheduler,
    encoder inputs): all of a step's images together.
    """
    if model.encoder is None or step.chunk is None or step.chunk.images is None:
        return ()
    images, runs = step.chunk.encodings
    return encoder_operators(model.encoder, images, model.encoder.tokens, shard, precision, runs)


def head_operators(model: Model, step: Step, shard: Shard, precision: Precision) -> Operators:
    """Returns the operators before and after the layers: embedding, output head, sampling."""
    group = f"{step.phase}/rest"
    rows, logits = step.all_rows, step.logits
    columns = divide(model.vocabulary, shard.ranks)
    mixing: Operators = ()
    if model.streams is not None:
        mixing = model.streams.head_operators(model.hidden, model.sublayers, step, precision)
    return (
        *mixing,
        Vector("embedding", group, rows, model.hidden, model.hidden, 0),
        Collective(
            "embedding_all_reduce", group, "all_reduce", rows, model.hidden, shard.ranks
        ),
        Vector(
            "final_norm", group, logits, model.hidden, model.hidden, 4 * model.hidden,
            reductions=1,
        ),
        Matmul(
            "output_head", group, logits, columns, model.hidden,
            precision.head_bytes, 2, precision.head_kernel,
        ),
        Collective(
            "logits_all_gather", group, "all_gather", logits, model.vocabulary, shard.ranks
        ),
        # Softmax and a draw: two passes over the logits in 32 bits.
        Vector(
            "sampling", group, logits, model.vocabulary, 0, 4 * model.vocabulary,
            element_bytes=4, launches=2,
        ),
    )  # fmt: skip
