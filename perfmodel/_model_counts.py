"""What one token costs a network, part by part, from the operators of a decode step."""

import jax

from perfmodel.formats import precision
from perfmodel.models.transformer import Model, head_operators, layer_operators, sequence_bytes
from perfmodel.operators import Attention, Collective, Matmul, Operator, Scan, Vector
from perfmodel.step import Shard, Step

CONTEXT = 8192
"""Keys that the token attends to, itself included; the longest context where that is shorter."""

SEQUENCES = (1024, 8192, 32_768, 131_072)
"""Lengths of sequences whose cache is told [tokens]."""

PARTS: tuple[str, ...] = (
    "attention projections", "attention scores", "indexer", "recurrence", "dense feed-forward",
    "experts", "shared experts", "router", "output head", "other products", "element-wise",
)  # fmt: skip
"""Parts of a network, in the order told."""

_BY_NAME = {"router": "router", "output_head": "output head"}


def part(op: Operator) -> str:
    """Returns which of `PARTS` an operator belongs to.

    >>> part(Attention("index_scores", "decode/attention", "decode", *[1] * 9))
    'indexer'
    """
    if isinstance(op, Vector):
        return "element-wise"
    if "index_" in op.name:
        return "indexer"
    if isinstance(op, Attention):
        return "attention scores"
    if isinstance(op, Scan):
        return "recurrence"
    if op.name in _BY_NAME:
        return _BY_NAME[op.name]
    if isinstance(op, Matmul) and op.experts:
        return "experts"
    if op.name.startswith("shared_"):
        return "shared experts"
    kinds = {"attention": "attention projections", "ffn": "dense feed-forward"}
    return kinds.get(op.group.split("/")[-1], "other products")


def context_of(model: Model) -> int:
    """Returns the keys that the token of `token_flops` attends to."""
    return min(CONTEXT, int(model.max_context))


def token_flops(model: Model) -> dict[str, int]:
    """Returns the FLOPs of decoding one token alone by part, those that a network has [FLOP].

    Exact: rows of experts are a mean, so they are worked out in 64 bits and rounded.
    """
    step, shard, formats = Step(1, context_of(model)), Shard(), precision("bf16")
    found: dict[str, int] = dict.fromkeys(PARTS, 0)
    with jax.enable_x64(True):
        layers = layer_operators(model, step, shard, formats)
        for op in (*layers, *head_operators(model, step, shard, formats)):
            if not isinstance(op, Collective):
                found[part(op)] += round(float(op.count * op.flops()))
    return {name: flops for name, flops in found.items() if flops}


def bytes_by_length(model: Model) -> dict[int, int]:
    """Returns bytes of cache and state of one sequence by its length, in bf16 [B]; of lengths that
    the network takes."""
    lengths = [n for n in SEQUENCES if n <= model.max_context] or [int(model.max_context)]
    formats = precision("bf16")
    return {n: round(float(sequence_bytes(model, formats, n, Shard()))) for n in lengths}
