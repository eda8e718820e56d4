"""Encoder towers of vision models: what turns an image's patches into tokens of the prompt.

A vision transformer (arXiv 2010.11929): patches, their positions and `layers` of full bidirectional
attention and a plain feed-forward layer, all with biases and two layer norms, then groups of
`merged` patches become one token each and pass through the products of a projector. In 16 bits
whatever the decoder's format, as published checkpoints leave it.
"""

import equinox as eqx

from perfmodel.formats import Precision
from perfmodel.operators import Attention, Collective, Matmul, Operators, Vector
from perfmodel.relax import Real, divide
from perfmodel.step import Shard

_BYTES = 2


class Encoder(eqx.Module):
    """A vision transformer and its projector.

    Fields: `inputs` are the elements of a patch; `patches` of one image of the size that the
    network was trained for, `extra` rows beside them (a class token); `positions`, rows of learned
    positions; `merged`, patches for one token; `projector`, (columns, inner width) of each product;
    `vectors`, elements of norms and biases beside the layers.
    """

    layers: Real
    hidden: Real
    intermediate: Real
    heads: Real
    inputs: Real
    patches: Real
    positions: Real
    merged: Real
    projector: tuple[tuple[Real, Real], ...]
    vectors: Real
    extra: Real = 0

    @property
    def tokens(self) -> Real:
        """Tokens of the prompt that one image of the network's own size takes."""
        return divide(self.patches, self.merged)


def encoder_parameters(encoder: Encoder) -> Real:
    """Returns the parameters of a tower with its projector.

    Gemma 3: 27 layers of 1152 and 4304, patches of 588, 4096 positions, a product of 1152 × 5376
    = 423,060,336.
    """
    h, inner = encoder.hidden, encoder.intermediate
    layer = 4 * (h * h + h) + 2 * h * inner + inner + h + 4 * h
    products = sum(columns * width for columns, width in encoder.projector)
    ends = (encoder.inputs + encoder.positions) * h + encoder.vectors
    return encoder.layers * layer + ends + products


def encoder_operators(
    encoder: Encoder, images: Real, tokens: Real, shard: Shard, precision: Precision
) -> Operators:
    """Returns the operators of encoding `images` of `tokens` each, on one rank of those in `shard`.

    Heads and the inner width are cut over the ranks; patches and projector are on every rank.
    Attention is over all patches of an image, both ways, without a cache.
    """
    group, h = "prefill/encoder", encoder.hidden
    seen = tokens * encoder.merged + encoder.extra
    rows, count = images * seen, encoder.layers
    heads = divide(encoder.heads, shard.ranks)
    width = divide(h, encoder.heads)
    inner = divide(encoder.intermediate, shard.ranks)
    weights = (_BYTES, _BYTES, precision.head_kernel)

    def product(name: str, rows: Real, columns: Real, inner: Real, count: Real = 1) -> Matmul:
        return Matmul(name, group, rows, columns, inner, *weights, count=count)

    def reduce(name: str) -> Collective:
        return Collective(name, group, "all_reduce", rows, h, shard.ranks, count=count)

    return (
        product("patch_embedding", images * tokens * encoder.merged, h, encoder.inputs),
        Vector("encoder_norms", group, rows, 2 * h, 2 * h, 8 * h, count=2 * count),
        product("encoder_qkv", rows, 3 * heads * width, h, count),
        Attention(
            "encoder_attention", group, "prefill", sequences=images, queries=seen, keys=seen,
            pairs=seen * seen, heads=heads, kv_heads=heads, qk_width=width, v_width=width,
            kv_bytes=_BYTES, count=count,
        ),
        product("encoder_output", rows, h, heads * width, count),
        reduce("encoder_attention_all_reduce"),
        product("encoder_up", rows, inner, h, count),
        Vector("encoder_activation", group, rows, inner, inner, 8 * inner, count=count),
        product("encoder_down", rows, h, inner, count),
        reduce("encoder_ffn_all_reduce"),
        *(
            product(f"projector_{i}", images * tokens, columns, inner)
            for i, (columns, inner) in enumerate(encoder.projector, 1)
        ),
    )  # fmt: skip
