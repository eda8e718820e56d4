"""Attention to chosen or compressed keys, residual streams and draft layers, counted by hand."""

import json
from importlib.resources import files
from typing import Any

import pytest

from perfmodel.errors import InputError
from perfmodel.formats import precision, precision_numbers
from perfmodel.models.attention import GroupedQueryAttention
from perfmodel.models.block_sparse import BlockIndexer, BlockSparseAttention
from perfmodel.models.catalogue import load_model
from perfmodel.models.compressed import CompressedAttention
from perfmodel.models.config import parse_config, sublayer_order
from perfmodel.models.draft import (
    Draft,
    draft_operators,
    draft_parameters,
    draft_weight_bytes,
)
from perfmodel.models.mla import Indexer, LatentAttention
from perfmodel.models.mlp import Mlp
from perfmodel.models.streams import HyperConnections
from perfmodel.models.transformer import (
    Block,
    Model,
    active_parameters,
    head_operators,
    kv_bytes,
    kv_bytes_per_token,
    layer_operators,
    parameters,
    weight_bytes,
)
from perfmodel.operators import Attention, Matmul
from perfmodel.question import check_degrees
from perfmodel.step import Chunk, Shard, Step, causal_pairs

BF16 = precision("bf16")
FP8 = precision("fp8")

SPARSE = BlockSparseAttention(8, 4, 16, index=BlockIndexer(4, 32, blocks=3, size=8))
ENTRIES = CompressedAttention(
    heads=8, width=64, rope_width=16, q_rank=32, groups=4, o_rank=24, window=5, ratio=4,
    index=Indexer(4, 128, 3),
)  # fmt: skip
HEAVY = CompressedAttention(8, 64, 16, 32, 4, 24, window=5, ratio=8)
NEAR = CompressedAttention(8, 64, 16, 32, 4, 24, window=5)


def of_catalog(stem: str, **changes: Any) -> dict[str, Any]:
    text = files("perfmodel.models").joinpath(f"catalog/{stem}.json").read_text()
    return json.loads(text) | changes


# ---- Counts ----


def test_glm_5_2_has_21_indexers():
    # GLM-5 has one in each of 78 layers: a key of 128 with its norm, 32 weights of heads, queries.
    index = 6144 * (128 + 32) + 2 * 128 + 2048 * 32 * 128
    model = load_model("glm-5.2").model
    assert parameters(model) == 743_911_218_432 - 57 * index == 743_377_019_904
    assert [block.count for block in model.attention] == [21, 57]
    # 576 elements of 16 bits in each layer, and index keys of 132 B in 21.
    assert kv_bytes_per_token(model, BF16) == 78 * 1152 + 21 * 132 == 92_628
    order = load_model("glm-5.2").order[::2]
    assert order[:11] == (0, 0, 0, 1, 1, 1, 0, 1, 1, 1, 0)


def test_minimax_m3_is_counted_by_hand():
    attention = 6144 * 128 * (2 * 64 + 2 * 4) + 2 * 128
    index = 6144 * (4 + 1) * 128 + 2 * 128
    expert = 3 * 6144 * 3072
    count = 60 * (attention + 2 * 6144) + 57 * index + 3 * 3 * 6144 * 12288
    count += 57 * (129 * expert + 128 * 6144 + 128) + 2 * 200064 * 6144 + 6144
    model = load_model("minimax-m3").model
    assert parameters(model) == count == 426_174_572_928
    assert active_parameters(model) == count - 57 * 124 * expert
    # Keys and values of 4 heads in each layer, an index key of 128 in 57.
    assert kv_bytes_per_token(model, BF16) == 60 * 2 * 4 * 128 * 2 + 57 * 128 * 2 == 137_472


def v4_attention(hidden: int, heads: int, rank: int, groups: int, ratio: int) -> int:
    count = hidden * (rank + 512) + rank * heads * 512 + rank + 512 + heads
    count += heads * 512 * 1024 + groups * 1024 * hidden
    if ratio == 128:
        count += 2 * hidden * 512 + 128 * 512 + 512
    if ratio == 4:
        count += 2 * hidden * 2 * 512 + 4 * 2 * 512 + 512
        count += 2 * hidden * 2 * 128 + 4 * 2 * 128 + 128
        count += rank * 64 * 128 + hidden * 64
    return count


def v4_layer(hidden: int, experts: int, width: int) -> int:
    """Experts with a router and its corrections, norms, and weights of four streams, twice."""
    streams = 24 * 4 * hidden + 24 + 3
    mixture = (experts + 1) * 3 * hidden * width + experts * hidden + experts
    return mixture + 2 * hidden + 2 * streams


def test_deepseek_v4_is_counted_by_hand():
    head = 4 * 4 * 4096 + 4 + 1
    counts = {0: 2, 4: 21, 128: 20}
    count = sum(n * v4_attention(4096, 64, 1024, 8, ratio) for ratio, n in counts.items())
    # The three layers that choose experts by token have no corrections.
    count += 43 * v4_layer(4096, 256, 2048) - 3 * 256 + 2 * 129280 * 4096 + 4096 + head
    model = load_model("deepseek-v4-flash").model
    assert parameters(model) == count == 284_332_240_471
    pro = 31 * v4_attention(7168, 128, 1536, 16, 128) + 30 * v4_attention(7168, 128, 1536, 16, 4)
    pro += 61 * v4_layer(7168, 384, 3072) - 3 * 384 + 2 * 129280 * 7168 + 7168 + 16 * 7168 + 5
    assert parameters(load_model("deepseek-v4-pro").model) == pro == 1_572_997_201_763


def test_compressed_cache_grows_by_the_ratios():
    model = load_model("deepseek-v4-pro").model
    tokens = 2**20
    # 30 layers keep a vector of 512 and a key of 128 for four tokens, 31 a vector for 128, and all
    # the last 128 vectors.
    elements = 30 * tokens // 4 * (512 + 128) + 31 * tokens // 128 * 512 + 61 * 128 * 512
    assert kv_bytes(model, BF16, tokens) == 2 * elements
    # As the press reported it at its release.
    assert round(2 * elements / 2**30, 2) == 9.62
    assert kv_bytes(model, FP8, tokens) == elements
    assert kv_bytes(parse_config(of_catalog("deepseek_v4_pro")), BF16, 64) < 61 * 64 * 1024 * 1.2


# ---- Masks ----


@pytest.mark.parametrize(("new", "cached"), [(1, 0), (5, 0), (29, 0), (7, 30), (40, 13), (1, 63)])
def test_pairs_are_those_of_the_mask(new: int, cached: int):
    chunk = Chunk(new, causal_pairs(new, cached), cached + new, new=new, cached=cached)
    places = range(cached, cached + new)

    def blocks(place: int) -> int:
        own, whole = place % 8 + 1, place // 8
        return own + 8 * min(whole, 2)

    def entries(place: int, ratio: int, most: int) -> int:
        # An entry is seen once all of its tokens are there.
        return min(place + 1, 5) + min(sum((e + 1) * ratio <= place + 1 for e in range(64)), most)

    assert SPARSE.chunk_keys(chunk)[0] == sum(map(blocks, places))
    assert [SPARSE.decode_keys(place + 1) for place in places] == list(map(blocks, places))
    assert NEAR.chunk_pairs(chunk) == sum(min(place + 1, 5) for place in places)
    for body, most in ((ENTRIES, 3), (HEAVY, 64)):
        seen = [entries(place, body.ratio, most) for place in places]  # pyright: ignore
        assert body.chunk_pairs(chunk) == sum(seen)
        assert [body.decode_keys(place + 1) for place in places] == seen


def test_layers_without_an_indexer_see_as_many_keys():
    own = LatentAttention(16, 32, 24, 8, 4, 8, Indexer(4, 128, 64))
    shared = LatentAttention(16, 32, 24, 8, 4, 8, chosen=64)
    step = Step(2, 500, chunk=Chunk(200, causal_pairs(200, 100), 300, new=200, cached=100))
    ops = {op.name: op for op in shared.operators(96, step, Shard(), BF16)}
    assert not any("index" in name for name in ops)
    for op in own.operators(96, step, Shard(), BF16):
        if "index" not in op.name:
            assert ops.pop(op.name) == op
    assert not ops


# ---- Work ----


@pytest.mark.parametrize("body", [SPARSE, ENTRIES, HEAVY, NEAR])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_weights_are_read_as_they_are_counted(body: Any, ranks: int):
    shard = Shard(ranks)
    ops = body.operators(96, Step(4, 40), shard, FP8)
    read = sum(op.weight_traffic() for op in ops if isinstance(op, Matmul))
    # Sinks are cut by heads.
    sinks = body.heads - body.heads / ranks if isinstance(body, CompressedAttention) else 0
    assert body.weight_bytes(96, FP8, shard) == read + 2 * (body.vectors(96) - sinks)
    if ranks == 1:
        elements = sum(o.columns * o.inner * o.groups for o in ops if isinstance(o, Matmul))
        assert elements == body.matrices(96)


def test_indexers_score_all_keys_before():
    step = Step(2, 40, chunk=Chunk(24, causal_pairs(24, 0), 24, new=24))
    scores = {
        op.name: op.flops()
        for op in (*SPARSE.operators(96, step, Shard(), BF16),
                   *ENTRIES.operators(96, step, Shard(), BF16))
        if isinstance(op, Attention)
    }  # fmt: skip
    # Entries: 64 and 4 heads of 128; of 40 tokens there are ten, of 24 queries six at the last.
    pairs = sum(place // 4 for place in range(1, 25))
    assert pairs == 66
    assert scores["index_scores"] == 2 * (2 * 4 * 10 * 128)
    assert scores["chunk_index_scores"] == 2 * 4 * 66 * 128
    blocks = {
        op.name: op.flops()
        for op in SPARSE.operators(96, step, Shard(), BF16)
        if isinstance(op, Attention)
    }
    assert blocks["index_scores"] == 2 * (2 * 4 * 40 * 32)
    assert blocks["chunk_index_scores"] == 2 * 4 * 300 * 32
    # 8 heads attend to the own block's eighth key, and to two whole blocks.
    assert blocks["decode_attention"] == 2 * (2 * 8 * (8 + 16) * 2 * 16)


def test_streams_are_mixed_around_each_sublayer():
    blocks = (Block(2, GroupedQueryAttention(4, 2, 4)), Block(2, Mlp(24)))
    plain = Model(8, 100, 0, 64, 2, blocks)
    model = Model(8, 100, 0, 64, 2, blocks, streams=HyperConnections(4))
    # 24 weights from 32 elements, 24 offsets, 3 scales for each of four; 4 x 32 + 4 + 1 at the end.
    more = 4 * (24 * 32 + 24 + 3) + 133
    assert parameters(model) - parameters(plain) == more
    assert weight_bytes(model, BF16) - weight_bytes(plain, BF16) == 4 * more
    first, second, *rest = layer_operators(model, Step(3, 10), Shard(), BF16)
    assert rest == list(layer_operators(plain, Step(3, 10), Shard(), BF16))
    assert first.count == second.count == 4
    assert first.flops() == 2 * 3 * 24 * 32
    assert second.memory_bytes() == 3 * 2 * (9 + 5) * 8
    # Before the output head four weights of 32 elements sum the streams of all three tokens.
    head, total, *rest = head_operators(model, Step(3, 10), Shard(), BF16)
    assert rest == list(head_operators(plain, Step(3, 10), Shard(), BF16))
    assert head.flops() == 2 * 3 * 4 * 32
    assert total.memory_bytes() == 3 * 2 * (4 + 1) * 8


# ---- Draft layers ----


@pytest.mark.parametrize(
    ("name", "count"),
    [
        # As hubs and papers have them, without the tables that some store again.
        ("deepseek-v3", 13_463_426_304 - 2 * 129280 * 7168),
        ("deepseek-v3.2", 13_477_385_728 - 2 * 129280 * 7168),
        ("glm-4.5", 3_988_069_792),
        ("glm-5", 9_952_920_576),
        ("glm-5.2", 9_952_920_576),
        (
            "deepseek-v4-flash",
            v4_attention(4096, 64, 1024, 8, 0) + v4_layer(4096, 256, 2048)
            + 2 * 4096**2 + 3 * 4096 + 16 * 4096 + 5,
        ),
        # Three modules of a layer of MiniMax-M2.
        (
            "minimax-m2",
            3 * (3072 * 128 * (2 * 48 + 2 * 8) + 56 * 128 + 256 * 3 * 3072 * 1536 + 256 * 3072
                 + 256 + 2 * 3072 + 2 * 3072**2 + 3 * 3072),
        ),
    ],
)  # fmt: skip
def test_draft_layers_are_counted_apart(name: str, count: int):
    draft = load_model(name).draft
    assert draft is not None
    assert draft_parameters(draft) == count
    assert draft_weight_bytes(draft, BF16) >= 2 * count
    if draft.layer.streams is None:
        assert draft_weight_bytes(draft, BF16) == 2 * count


def test_networks_without_draft_layers():
    assert load_model("kimi-k2").draft is None
    assert load_model("llama-3.1-8b").draft is None


def test_a_draft_step_reads_its_weights_and_the_head():
    draft = load_model("deepseek-v3").draft
    assert isinstance(draft, Draft)
    # Enough tokens that every expert is chosen.
    ops = draft_operators(draft, Step(20_000, 100), Shard(), BF16)
    read = sum(float(op.count) * float(op.weight_traffic()) for op in ops if isinstance(op, Matmul))
    head = 2 * 129280 * 7168
    norms = 2 * (5 * 7168 + 1536 + 512 + 256)
    assert read == pytest.approx(draft_weight_bytes(draft, BF16) - norms + head, rel=1e-6)
    (product,) = (op for op in ops if op.name == "draft_projection")
    assert product.flops() == 2 * 20_000 * 2 * 7168**2


def test_what_deepseek_v4_s_file_asks_for():
    entry = load_model("deepseek-v4-flash")
    assert str(entry.precision) == "fp8+mxfp4/fp8"
    # Experts of 4.25 bits, the rest in 8; the checkpoint takes about 160 GB.
    assert 155e9 < weight_bytes(entry.model, precision_numbers(entry.precision)) < 162e9
    assert entry.order[:8] == (0, 4, 0, 4, 1, 4, 2, 3)


# ---- Refusals ----


@pytest.mark.parametrize(
    ("stem", "change", "message"),
    [
        ("glm_5_2", {"indexer_types": ["full"]}, "'full' or 'shared' for each of 78 layers"),
        ("glm_5_2", {"indexer_types": ["shared"] * 78}, "must start with 'full'"),
        ("glm_5_2", {"indexer_types": None}, "index_topk_freq 4 without indexer_types"),
        ("glm_5_2", {"mlp_layer_types": ["sparse"] * 78}, "contradicts first_k_dense_replace"),
        ("minimax_m3", {"sparse_attention_config": 3}, "must be an object"),
        ("minimax_m3", {"moe_layer_freq": [1] * 59}, "a 0 or 1 for each of 60 layers"),
        ("minimax_m3", {"moe_layer_freq": [1] * 60}, "contradicts the list of layers"),
        ("minimax_m3", {"shared_intermediate_size": 7}, "shared_intermediate_size 7"),
        ("deepseek_v4_flash", {"compress_ratios": [0, 4, 128]}, "for each of 43 layers"),
        ("deepseek_v4_flash", {"compress_ratios": [8] * 44}, "must have 0, 4 or 128"),
        ("deepseek_v4_flash", {"o_groups": 7}, "not a multiple of o_groups 7"),
        ("deepseek_v4_flash", {"expert_dtype": "fp6"}, "known: fp4, fp8"),
        ("deepseek_v4_flash", {"num_key_value_heads": 2}, "nearest: 1"),
    ],
)
def test_what_is_not_understood_is_refused(stem: str, change: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message) as caught:
        parse_config(of_catalog(stem, **change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("sparse_score_type", "mean", "nearest: 'max'"),
        ("sparse_num_index_heads", 8, "nearest: 4"),
        ("sparse_disable_index_value", [0] * 60, "index values are not understood"),
        ("sparse_gate", 1, "'sparse_gate' is not understood"),
    ],
)
def test_other_block_choices_are_refused(key: str, value: Any, message: str):
    config = of_catalog("minimax_m3")
    config["sparse_attention_config"] = config["sparse_attention_config"] | {key: value}
    with pytest.raises(InputError, match=message):
        parse_config(config)


def test_dense_attention_of_minimax_m3():
    config = of_catalog("minimax_m3", sparse_attention_config=None)
    model = parse_config(config)
    assert [type(block.body) for block in model.attention] == [GroupedQueryAttention]
    assert sublayer_order(config)[:8] == (0, 1, 0, 1, 0, 1, 0, 2)


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "minimax-m3"])
def test_keys_that_ranks_cannot_share(name: str):
    entry = load_model(name)
    check_degrees(entry, tp=4, pp=1)
    with pytest.raises(InputError, match="cp: 2 ranks cannot share the keys"):
        check_degrees(entry, tp=4, pp=1, cp=2)
