"""A decoder: blocks of a mixer and a feed-forward layer between an embedding and a head.

Only the structure (which kinds of layer, in which order) is static. Widths, counts and flags are
numbers, exact Python integers as loaded and arrays once traced, so that all dense models share
one compiled program.
"""

import equinox as eqx

from perfmodel.formats import Precision
from perfmodel.models.attention import GroupedQueryAttention
from perfmodel.models.mlp import Mlp
from perfmodel.operators import Collective, Matmul, Operators, Vector
from perfmodel.relax import Real, divide, maximum
from perfmodel.step import Shard, Step


class Block(eqx.Module):
    """`count` equal layers; each is norm, mixer, residual, norm, feed-forward, residual."""

    count: Real
    mixer: GroupedQueryAttention
    ffn: Mlp


class Model(eqx.Module):
    """A decoder-only network.

    Fields: `tied` is 1 where the output head reuses the embedding; `norm_vectors` is 1 for
    RMSNorm (a weight), 2 for LayerNorm (weight and bias); `positions` counts learned position
    embeddings; `max_context` is the longest context the configuration allows.
    """

    hidden: Real
    vocabulary: Real
    tied: Real
    max_context: Real
    blocks: tuple[Block, ...]
    norm_vectors: Real = 1
    positions: Real = 0

    @property
    def layers(self) -> Real:
        """Number of layers."""
        return sum(block.count for block in self.blocks)


def parameters(model: Model) -> Real:
    """Returns the number of parameters; a Python integer for a model as loaded.

    Llama-2-70B: 80·(8192·(2·64 + 2·8)·128 + 3·8192·28672 + 2·8192) + 2·32000·8192 + 8192
    = 68,976,648,192.
    """
    h = model.hidden
    norm = model.norm_vectors * h
    layers = sum(
        block.count
        * (sum(part.matrices(h) + part.vectors(h) for part in (block.mixer, block.ffn)) + 2 * norm)
        for block in model.blocks
    )
    embeddings = (2 - model.tied) * model.vocabulary * model.hidden
    return layers + embeddings + model.positions * model.hidden + norm


def weight_bytes(model: Model, precision: Precision, shard: Shard | None = None) -> Real:
    """Returns bytes of weights on one rank [B]; embeddings, norms and biases stay in 16 bits."""
    cut = Shard() if shard is None else shard
    h = model.hidden
    norm = 2 * model.norm_vectors * h
    layers = sum(
        block.count
        * (
            sum(part.weight_bytes(h, precision, cut) for part in (block.mixer, block.ffn))
            + 2 * norm
        )
        for block in model.blocks
    )
    table = model.vocabulary * model.hidden * precision.head_bytes
    embeddings = divide((2 - model.tied) * table, cut.ranks)
    return layers + embeddings + 2 * model.positions * model.hidden + norm


def kv_bytes_per_token(model: Model, precision: Precision, shard: Shard | None = None) -> Real:
    """Returns bytes of KV cache per token on one rank [B], over all layers.

    Llama-3.3-70B in bf16: 2 · 80 layers · 8 kv heads · 128 · 2 B = 327,680 B.
    """
    cut = Shard() if shard is None else shard
    return sum(b.count * b.mixer.cache_bytes_per_token(precision, cut) for b in model.blocks)


def activation_bytes(model: Model, step: Step, shard: Shard) -> Real:
    """Returns bytes of intermediate results alive at the widest point of a step [B].

    Residual stream and its normalised copy, the widest projection (16 bits each), and the
    logits in 32 bits.
    """
    widest: Real = 0
    for block in model.blocks:
        widest = maximum(widest, block.mixer.activation_width(shard))
        widest = maximum(widest, block.ffn.activation_width(shard))
    logits = 4 * step.logits * model.vocabulary
    return 2 * step.rows * (2 * model.hidden + widest) + logits


def block_operators(
    model: Model, block: Block, step: Step, shard: Shard, precision: Precision
) -> Operators:
    """Returns the operators of one layer of a block in one step on one rank."""
    h = model.hidden
    norm = Vector(
        "residual_and_norm", f"{step.phase}/rest", step.rows, 2 * h, 2 * h, 5 * h, count=2
    )
    return (
        norm,
        *block.mixer.operators(h, step, shard, precision),
        *block.ffn.operators(h, step, shard, precision),
    )


def layer_operators(model: Model, step: Step, shard: Shard, precision: Precision) -> Operators:
    """Returns the operators of all layers in one step on one rank; equal layers are one row."""
    return tuple(
        eqx.tree_at(lambda o: o.count, op, op.count * block.count)
        for block in model.blocks
        for op in block_operators(model, block, step, shard, precision)
    )


def head_operators(model: Model, step: Step, shard: Shard, precision: Precision) -> Operators:
    """Returns the operators before and after the layers: embedding, output head, sampling."""
    group = f"{step.phase}/rest"
    rows, logits = step.rows, step.logits
    columns = divide(model.vocabulary, shard.ranks)
    return (
        Vector("embedding", group, rows, model.hidden, model.hidden, 0),
        Collective(
            "embedding_all_reduce", group, "all_reduce", rows, model.hidden, shard.ranks
        ),
        Vector(
            "final_norm", group, logits, model.hidden, model.hidden, 4 * model.hidden,
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
