"""Encoder towers of vision models: what turns an image's patches into tokens of the prompt.

A vision transformer (arXiv 2010.11929): patches, their positions and `layers` of full bidirectional
attention and a feed-forward layer, then groups of `merged` patches become one token each and pass
through the products of a projector. In 16 bits whatever the decoder's format, as published
checkpoints leave it.

Its heads and inner columns are cut over the ranks that attend to a request together, as engines do
unless told otherwise (vLLM: `mm_encoder_tp_mode` "weights", docs.vllm.ai, vllm.config.multimodal;
SGLang: without `mm-enable-dp-encoder`); patches, positions and projector are on every rank.
"""

import equinox as eqx

from perfmodel.formats import Precision
from perfmodel.operators import Attention, Collective, Matmul, Operators, Vector
from perfmodel.relax import Real, ceil_div, divide, maximum
from perfmodel.step import Shard

_BYTES = 2


class Encoder(eqx.Module):
    """A vision transformer and its projector.

    Fields: `inputs` are the elements of a patch; `patches` of one image of the size that the
    network was trained for, `extra` rows beside them (a class token); `positions`, rows of learned
    positions; `merged`, patches for one token; `projector`, (columns, inner width) of each product;
    `width` of all heads together; `gates` is 2 where a gate multiplies the up projection, else 1;
    `layer_vectors`, elements of the norms and biases of a layer, `norms` of them; `vectors`, those
    beside the layers.
    """

    layers: Real
    hidden: Real
    intermediate: Real
    heads: Real
    width: Real
    layer_vectors: Real
    inputs: Real
    patches: Real
    positions: Real
    merged: Real
    projector: tuple[tuple[Real, Real], ...]
    vectors: Real
    extra: Real = 0
    gates: Real = 1
    norms: Real = 2

    @property
    def tokens(self) -> Real:
        """Tokens of the prompt that one image of the network's own size takes."""
        return divide(self.patches, self.merged)


def encoder_parameters(encoder: Encoder) -> Real:
    """Returns the parameters of a tower with its projector.

    Gemma 3: 27 layers of 1152 and 4304, patches of 588, 4096 positions, a product of 1152 × 5376
    = 423,060,336.
    """
    return _elements(encoder, Shard())


def _cut(encoder: Encoder, shard: Shard) -> tuple[Real, Real, Real]:
    """Returns heads, their width and the inner width on the rank with the most heads.

    Past the number of heads each is on several ranks.
    """
    heads = ceil_div(encoder.heads, shard.attention_ranks)
    inner = divide(encoder.intermediate, shard.attention_ranks)
    return heads, divide(encoder.width, encoder.heads), inner


def _elements(encoder: Encoder, shard: Shard) -> Real:
    """Returns the parameters on one rank; vectors are on every rank."""
    heads, width, inner = _cut(encoder, shard)
    h = encoder.hidden
    layer = 4 * h * heads * width + (encoder.gates + 1) * h * inner + encoder.layer_vectors
    products = sum(columns * rows for columns, rows in encoder.projector)
    ends = (encoder.inputs + encoder.positions) * h + encoder.vectors
    return encoder.layers * layer + ends + products


def encoder_weight_bytes(encoder: Encoder, shard: Shard) -> Real:
    """Returns bytes of a tower's weights on one rank [B]."""
    return _BYTES * _elements(encoder, shard)


def encoder_activation_bytes(encoder: Encoder, images: Real, shard: Shard) -> Real:
    """Returns bytes alive at the widest point of encoding `images` at once, on one rank [B].

    Residual stream, its normalised copy and the widest projection, and the tokens that come out.
    """
    heads, width, inner = _cut(encoder, shard)
    rows = images * (encoder.patches + encoder.extra)
    widest = maximum(3 * heads * width, encoder.gates * inner)
    tokens = images * encoder.tokens * encoder.projector[-1][0]
    return _BYTES * (rows * (2 * encoder.hidden + widest) + tokens)


def encoder_operators(
    encoder: Encoder,
    images: Real,
    tokens: Real,
    shard: Shard,
    precision: Precision,
    runs: Real = 1,
) -> Operators:
    """Returns the operators of encoding `images` of `tokens` each at once, `runs` times.

    On one rank of an attention group. Attention is over all patches of an image, both ways, without
    a cache.
    """
    group, h = "mixed/encoder", encoder.hidden
    seen = tokens * encoder.merged + encoder.extra
    rows, count = images * seen, encoder.layers * runs
    heads, width, inner = _cut(encoder, shard)
    ranks, wide = shard.attention_ranks, encoder.gates * inner
    weights = (_BYTES, _BYTES, precision.head_kernel)

    def product(name: str, rows: Real, columns: Real, inner: Real, count: Real = runs) -> Matmul:
        return Matmul(name, group, rows, columns, inner, *weights, count=count)

    def reduce(name: str) -> Collective:
        return Collective(name, group, "all_reduce", rows, h, ranks, count=count)

    return (
        product("patch_embedding", images * tokens * encoder.merged, h, encoder.inputs),
        Vector("encoder_norms", group, rows, 2 * h, 2 * h, 8 * h, count=encoder.norms * count),
        product("encoder_qkv", rows, 3 * heads * width, h, count),
        Attention(
            "encoder_attention", group, "prefill", sequences=images, queries=seen, keys=seen,
            pairs=seen * seen, heads=heads, kv_heads=heads, qk_width=width, v_width=width,
            kv_bytes=_BYTES, count=count,
        ),
        product("encoder_output", rows, h, heads * width, count),
        reduce("encoder_attention_all_reduce"),
        product("encoder_up", rows, wide, h, count),
        Vector("encoder_activation", group, rows, wide, inner, 8 * inner, count=count),
        product("encoder_down", rows, h, inner, count),
        reduce("encoder_ffn_all_reduce"),
        *(
            product(f"projector_{i}", images * tokens, columns, inner)
            for i, (columns, inner) in enumerate(encoder.projector, 1)
        ),
    )  # fmt: skip
