"""Draft layers for multi-token prediction: the parts of a checkpoint that guess tokens ahead.

A draft layer norms the embedding of the last token and the network's last hidden state, brings both
to the hidden width by one product of 2·hidden rows, and is a whole decoder layer after that, with a
norm before the network's own output head (DeepSeek-V3, arXiv 2412.19437, section 2.2; GLM-4.5,
MiMo, Qwen3-Next and MiniMax build theirs alike). Embedding and output head are the network's:
checkpoints that store them again (DeepSeek-V3's) hold two tables more than counted here.
"""

import equinox as eqx

from perfmodel.formats import Precision
from perfmodel.models.streams import HyperConnections
from perfmodel.models.transformer import (
    Model,
    decoder_parameters,
    decoder_weight_bytes,
    head_operators,
    layer_operators,
)
from perfmodel.operators import Matmul, Operators, Vector
from perfmodel.relax import Real
from perfmodel.step import Shard, Step


class Draft(eqx.Module):
    """`count` draft layers in a row, each the decoder layer that `layer` has one of.

    `layer` is a `Model` of one layer whose tables are those of the network.
    """

    count: Real
    layer: Model

    @property
    def _streams(self) -> Real:
        streams = self.layer.streams
        return streams.streams if isinstance(streams, HyperConnections) else 1


def _projection(draft: Draft) -> Real:
    """Returns the elements of one layer's product of embedding and hidden state."""
    return 2 * draft.layer.hidden * draft.layer.hidden


def _input_norms(draft: Draft) -> Real:
    """Returns the elements of the norms of embedding and hidden state."""
    return 2 * draft.layer.norm_vectors * draft.layer.hidden


def draft_parameters(draft: Draft) -> Real:
    """Returns the parameters of all draft layers, without the tables that they share.

    DeepSeek-V3: 11,610,068,224, a whole decoder layer, 2 · 7168² and three norms.
    """
    return draft.count * (
        decoder_parameters(draft.layer) + _projection(draft) + _input_norms(draft)
    )


def draft_weight_bytes(draft: Draft, precision: Precision, shard: Shard | None = None) -> Real:
    """Returns bytes of all draft layers on one rank [B]; the first product is on every rank."""
    cut = Shard() if shard is None else shard
    h = draft.layer.hidden
    product = _projection(draft) * precision.weight_bytes + h * precision.column_bytes
    layer = decoder_weight_bytes(draft.layer, precision, cut)
    return draft.count * (layer + product + 2 * _input_norms(draft))


def draft_operators(draft: Draft, step: Step, shard: Shard, precision: Precision) -> Operators:
    """Returns the operators of one draft step on one rank: one layer guesses one token a row.

    A network with several draft layers takes them in turn; so does one that drafts several tokens
    with one layer. Embedding, output head and sampling are part of each.
    """
    h, rows, group = draft.layer.hidden, step.rows, f"{step.phase}/rest"
    weights = (
        precision.weight_bytes, precision.activation_bytes, precision.kernel,
        precision.column_bytes,
    )  # fmt: skip
    inner = 2 * h
    first: tuple = (
        Vector("draft_input_norms", group, rows, inner, inner, 5 * inner, launches=2),
        Matmul("draft_projection", group, rows, h, inner, *weights),
    )
    if draft.layer.streams is not None:
        # Every stream of the hidden state passes through the same product.
        first = (
            Vector(
                "draft_input_norms", group, rows * (1 + draft._streams), h, h, 5 * h, launches=2
            ),
            Matmul("draft_embedding_projection", group, rows, h, h, *weights),
            Matmul("draft_hidden_projection", group, rows * draft._streams, h, h, *weights),
        )
    return (
        *first,
        *layer_operators(draft.layer, step, shard, precision),
        *head_operators(draft.layer, step, shard, precision),
    )
