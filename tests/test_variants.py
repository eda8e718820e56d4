"""Layers that differ within a network, counted by hand: widths, shared caches, parallel blocks."""

import copy
import dataclasses
import json
from collections import Counter
from importlib.resources import files
from typing import Any

import pytest

from perfmodel._listings import describe
from perfmodel.errors import InputError
from perfmodel.formats import precision, precision_numbers
from perfmodel.models.attention import GroupedQueryAttention
from perfmodel.models.catalogue import load_model
from perfmodel.models.config import parse_config, sublayer_order
from perfmodel.models.transformer import (
    kv_bytes,
    kv_bytes_per_token,
    layer_operators,
    parameters,
    weight_bytes,
)
from perfmodel.operators import Attention, Collective, Matmul, Operators, Vector
from perfmodel.step import Shard, Step

BF16 = precision("bf16")


def published(stem: str) -> dict[str, Any]:
    file = files("perfmodel.models").joinpath("catalog").joinpath(f"{stem}.json")
    return json.loads(file.read_text())


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(InputError) as caught:
        parse_config(config)
    message = str(caught.value)
    assert "\n" not in message
    return message


def count_of(ops: Operators, name: str) -> int:
    return sum(int(op.count) for op in ops if op.name == name)


# ---- Parallel blocks ----


def test_falcon_7b_is_counted_by_hand():
    # 71 heads of 64 over one kv head; one LayerNorm of two vectors a layer; no other biases.
    attention = 4544 * 64 * (2 * 71 + 2 * 1)
    layer = attention + 2 * 4544 * 18176 + 2 * 4544
    model = load_model("falcon-7b").model
    assert parameters(model) == 32 * layer + 65024 * 4544 + 2 * 4544 == 6_921_720_704
    # Two bytes of a key and a value of 64 in each of 32 layers.
    assert kv_bytes_per_token(model, BF16) == 32 * 2 * 64 * 2 == 8_192


def test_falcon_40b_has_two_norms_and_eight_kv_heads_a_block():
    attention = 8192 * 64 * (2 * 128 + 2 * 8)
    layer = attention + 2 * 8192 * 32768 + 2 * 2 * 8192
    model = load_model("falcon-40b").model
    assert parameters(model) == 60 * layer + 65024 * 8192 + 2 * 8192 == 41_303_293_952
    assert kv_bytes_per_token(model, BF16) == 60 * 2 * 8 * 64 * 2


def test_palm_has_gates_one_kv_head_and_no_biases():
    attention = 18432 * 256 * (2 * 48 + 2 * 1)
    layer = attention + 3 * 18432 * 73728 + 18432
    model = load_model("palm-540b").model
    assert parameters(model) == 118 * layer + 256_000 * 18432 + 18432 == 540_356_474_880


def test_bloom_normalises_embeddings_and_has_biases():
    h = 14336
    layer = 12 * h * h + 13 * h  # two LayerNorms, biases of qkv, output, 4h and h
    model = load_model("bloom-176b").model
    assert parameters(model) == 70 * layer + 250_880 * h + 2 * h + 2 * h == 176_247_271_424


def test_a_parallel_block_is_summed_over_ranks_and_normalised_once():
    step, shard = Step(sequences=4, context=1000), Shard(8)
    palm = load_model("palm-540b").model
    side_by_side = layer_operators(palm, step, shard, BF16)
    assert count_of(side_by_side, "attention_all_reduce") == 0
    assert count_of(side_by_side, "ffn_all_reduce") == 118
    assert count_of(side_by_side, "residual_and_norm") == 118
    config = {**published("palm_540b"), "parallel_attn": False}
    one_after_another = layer_operators(parse_config(config), step, shard, BF16)
    reductions = sum(int(op.count) for op in one_after_another if isinstance(op, Collective))
    assert reductions == 2 * 118
    assert count_of(one_after_another, "residual_and_norm") == 2 * 118
    # The products are the same.
    flops = [
        sum(op.count * op.flops() for op in ops if isinstance(op, Matmul))
        for ops in (side_by_side, one_after_another)
    ]
    assert flops[0] == flops[1]
    # Falcon-40B's blocks normalise the inputs of both.
    falcon = layer_operators(load_model("falcon-40b").model, step, shard, BF16)
    assert count_of(falcon, "residual_and_norm") == 2 * 60


@pytest.mark.parametrize(("groups", "sums"), [(1, 0), (2, 1)])
def test_attention_groups_sum_their_own_attention(groups: int, sums: int):
    # The ranks of a group are then not those that share out the feed-forward layer.
    body = GroupedQueryAttention(8, 8, 16, joined=True)
    ops = body.operators(128, Step(4, 100, groups=groups), Shard(8, attention_groups=groups), BF16)
    assert count_of(ops, "attention_all_reduce") == sums


def test_falcon_s_flags():
    config = {"model_type": "falcon", "vocab_size": 100, "hidden_size": 64,
              "num_hidden_layers": 2, "num_attention_heads": 4}  # fmt: skip
    body, ffn = (block.body for block in parse_config(config).blocks)
    assert (body.kv_heads, body.head_dim, body.joined, ffn.intermediate) == (1, 16, True, 256)
    # (keys, kv heads, norms a layer)
    for keys, kv_heads, norms in (
        ({}, 1, 1),
        ({"multi_query": False}, 4, 1),
        ({"new_decoder_architecture": True, "num_kv_heads": 2}, 2, 2),
        ({"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}, 4, 1),
        ({"parallel_attn": False, "alibi": True}, 1, 2),
    ):
        model = parse_config({**config, **keys})
        assert model.blocks[0].body.kv_heads == kv_heads
        assert model.sublayers * model.norms + model.extra_norms == 2 * norms
    # The names of the first published files.
    old = {k: v for k, v in config.items() if k not in ("num_hidden_layers", "num_attention_heads")}
    assert parse_config({**old, "n_layer": 2, "n_head": 4}) == parse_config(config)
    message = refusal({**config, "n_layer": 3})
    assert message == "config.json: num_hidden_layers 2 and n_layer 3 are the same size"


# ---- Widths of each kind ----


def test_gemma_4_26b_is_counted_by_hand():
    # 25 layers with a window: 16 heads of 256 over 8. 5 that see all keys: 16 of 512 over 2, whose
    # values are keys. Query and key norms of one head each.
    near = 2816 * 256 * (2 * 16 + 2 * 8) + 2 * 256
    full = 2816 * 512 * (2 * 16 + 1 * 2) + 2 * 512
    # 128 experts of 704 beside a layer of 2112; a router with a norm and a scale per expert.
    dense = 3 * 2816 * 2112
    mixture = 128 * 3 * 2816 * 704 + 2816 * 128 + 128 + 2816
    norms = 7 * 2816  # two of attention, two of each branch, one of their sum
    model = load_model("gemma-4-26b-a4b").model
    by_hand = 25 * near + 5 * full + 30 * (dense + mixture + norms) + 262_144 * 2816 + 2816
    assert parameters(model) == by_hand == 25_233_141_760
    assert weight_bytes(model, BF16) == 2 * by_hand
    # Keys and values are cached apart: a key is turned, a value is not.
    tokens = 10_000
    cached = 25 * 1024 * 2 * 8 * 256 + 5 * tokens * 2 * 2 * 512
    assert kv_bytes(model, BF16, tokens) == 2 * cached


def test_gemma_4_31b_keeps_attention_in_16_bits():
    # 50 layers with a window: 32 heads of 256 over 16. 10 that see all keys: 32 of 512 over 4,
    # whose values are keys.
    near = 5376 * 256 * (2 * 32 + 2 * 16) + 2 * 256
    full = 5376 * 512 * (2 * 32 + 4) + 2 * 512
    attention, dense = 50 * near + 10 * full, 60 * 3 * 5376 * 21504
    rest = 60 * 4 * 5376 + 5376 + 262_144 * 5376
    entry = load_model("gemma-4-31b-nvfp4")
    formats = precision_numbers(entry.precision)
    assert parameters(entry.model) == attention + dense + rest == 30_697_345_280
    # 4 bits and a scale of 8 for each 16 of feed-forward weights; 16 bits of all others.
    stored = weight_bytes(entry.model, formats)
    assert stored == 2 * (attention + rest) + dense * 9 / 16
    # Published with vision layers of about 0.57 billion in 16 bits: 32.7 GB.
    assert 32.5e9 < stored + 2 * 0.57e9 < 32.75e9
    # One byte of keys and of values each.
    assert kv_bytes(entry.model, formats, 10_000) == (
        50 * 1024 * 2 * 16 * 256 + 10 * 10_000 * 2 * 4 * 512
    )
    ops = layer_operators(entry.model, Step(1, 100), Shard(), formats)
    assert {op.name: op.weight_bytes for op in ops if isinstance(op, Matmul)} == {
        "qkv_projection": 2, "output_projection": 2,
        "up_projection": 0.5625, "down_projection": 0.5625,
    }  # fmt: skip


def test_mimo_v2_flash_is_counted_by_hand():
    # Keys of 192 and values of 128; 4 kv heads in 9 layers, 8 and a sink a head in 39.
    full = 4096 * (64 * (192 + 128) + 4 * (192 + 128))
    near = 4096 * (64 * (192 + 128) + 8 * (192 + 128)) + 64
    mixture = 256 * 3 * 4096 * 2048 + 256 * 4096 + 256
    norms = 2 * 4096
    rest = 3 * 4096 * 16384 + 2 * 152_576 * 4096 + 4096
    model = load_model("mimo-v2-flash").model
    count = 9 * full + 39 * near + 47 * mixture + 48 * norms + rest
    assert parameters(model) == count == 308_778_780_864
    cached = 9 * 4 * (192 + 128) * 5000 + 39 * 8 * (192 + 128) * 128
    assert kv_bytes(model, BF16, 5000) == 2 * cached
    ops = layer_operators(model, Step(1, 5000), Shard(), BF16)
    kinds = {op.count: op for op in ops if isinstance(op, Attention)}
    assert (kinds[9].kv_heads, kinds[9].keys, kinds[9].qk_width, kinds[9].v_width) == (
        4, 5000, 192, 128,
    )  # fmt: skip
    assert (kinds[39].kv_heads, kinds[39].keys) == (8, 128)
    inner = {int(op.count): op.inner for op in ops if op.name == "output_projection"}  # pyright: ignore[reportAttributeAccessIssue]
    assert inner == {9: 64 * 128, 39: 64 * 128}


def test_step_3_7_has_more_heads_in_windows_and_a_gate_a_head():
    full = 4096 * (128 * (2 * 64 + 2 * 8) + 64) + 2 * 128
    near = 4096 * (128 * (2 * 96 + 2 * 8) + 96) + 2 * 128
    mixture = 289 * 3 * 4096 * 1280 + 288 * 4096 + 288
    rest = 3 * 3 * 4096 * 11264 + 2 * 128_896 * 4096 + 4096 + 45 * 2 * 4096
    model = load_model("step-3.7-flash").model
    assert parameters(model) == 12 * full + 33 * near + 42 * mixture + rest == 196_956_130_368
    # A gate is read with the result that it weighs.
    gate = next(
        op for op in layer_operators(model, Step(1, 100), Shard(2), BF16)
        if op.name == "output_gate" and op.count == 33
    )  # fmt: skip
    assert isinstance(gate, Vector)
    assert (gate.reads, gate.writes) == (48 * 128 + 48, 48 * 128)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("falcon-7b", ["71 heads, 1 kv heads, width 64, beside its feed-forward layer"]),
        ("mimo-v2-flash", ["64 heads, 4 kv heads, width 192, values of 128",
                           "64 heads, 8 kv heads, width 192, values of 128, the last 128 keys"]),
        ("gemma-4-26b-a4b", ["16 heads, 2 kv heads, width 512, values made of keys",
                             "16 heads, 8 kv heads, width 256, the last 1024 keys"]),
    ],
)  # fmt: skip
def test_listings_tell_kinds_of_attention_apart(name: str, words: list[str]):
    found = [describe(block.body)[0] for block in load_model(name).model.attention]
    assert found == [f"attention: {each}" for each in words]
    body = parse_config(sharing(3)).attention[1].body
    assert describe(body)[0] == "attention: 4 heads, 2 kv heads, width 32, an earlier cache"


def test_step_s_published_layout_of_keys():
    config = published("step_3_7_flash")
    outside = ("architectures", "model_type", "torch_dtype")
    inner = {key: value for key, value in config.items() if key not in outside}
    inner["num_attention_groups"] = inner.pop("num_key_value_heads")
    inner["moe_num_experts"], inner["moe_top_k"] = (
        inner.pop("num_experts"), inner.pop("num_experts_per_tok"),
    )  # fmt: skip
    del inner["first_k_dense_replace"]
    inner["moe_layers_enum"] = ",".join(map(str, range(3, 45)))
    # Draft layers are named after the others.
    inner["layer_types"] = [*inner["layer_types"], *["sliding_attention"] * 3]
    nested = {
        "model_type": "step3p7",
        "architectures": ["Step3p7ForConditionalGeneration"],
        "text_config": {"model_type": "step3p5", **inner},
    }
    assert parse_config(nested) == parse_config(config)
    assert sublayer_order(nested) == sublayer_order(config)


# ---- Caches that later layers share ----


def sharing(last: int, **changes: Any) -> dict[str, Any]:
    return {
        "model_type": "gemma4_text", "hidden_size": 64, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32,
        "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 8192,
        "sliding_window": 512, "num_kv_shared_layers": last,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    } | changes  # fmt: skip


def test_borrowed_caches_are_read_but_neither_made_nor_kept():
    own, model = parse_config(sharing(0)), parse_config(sharing(3))
    assert [(b.count, b.body.cached, b.body.window) for b in model.attention] == [
        (1, "own", None), (1, "earlier", None), (2, "own", 512), (2, "earlier", 512),
    ]  # fmt: skip
    # One full layer and two with a window lose keys, values and the norm of keys.
    lost = 64 * (2 * 2 * 32) + 32 + 2 * (64 * (2 * 2 * 16) + 16)
    assert parameters(own) - parameters(model) == lost
    for tokens in (100, 4000):
        assert kv_bytes(own, BF16, tokens) == 2 * kv_bytes(model, BF16, tokens)
    step = Step(sequences=3, context=4000)
    traffic = [
        sum(op.count * op.cache_traffic() for op in ops if isinstance(op, Attention))
        for ops in (layer_operators(m, step, Shard(), BF16) for m in (own, model))
    ]
    # Two full layers of 4000 keys, four of 512, whoever made them.
    each = 2 * 2 * 2 * (2 * 32 * 4000 + 4 * 16 * 512)
    assert traffic == [3 * each, 3 * each]
    assert sublayer_order(sharing(3)) == (2, 4, 2, 4, 0, 4, 3, 4, 3, 4, 1, 4)


def test_caches_without_an_earlier_layer_are_refused():
    message = refusal(sharing(4))
    assert "num_kv_shared_layers 4 leaves layer 2 without an earlier one of its kind" in message
    assert message.endswith("(nearest: 3)")
    assert "num_kv_shared_layers must be a whole number from 0 to 5" in refusal(sharing(6))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden_size_per_layer_input": 256}, "a layer input per embedding"),
        ({"use_double_wide_mlp": True}, "use_double_wide_mlp true is not understood"),
        ({"num_global_key_value_heads": 3, "attention_k_eq_v": True},
         "num_attention_heads 4 is not a multiple of num_global_key_value_heads 3 (nearest: 2)"),
        ({"attention_k_eq": True}, "unknown key 'attention_k_eq' (nearest: attention_k_eq_v)"),
    ],
)  # fmt: skip
def test_what_gemma_4_may_ask_for_and_has_not(changes: dict[str, Any], expected: str):
    assert expected in refusal(sharing(0, **changes))


def test_kv_heads_of_layers_that_see_all_are_theirs_only_where_values_are_keys():
    changes = {"num_global_key_value_heads": 1}
    apart = parse_config(sharing(0, **changes)).attention[0].body
    same = parse_config(sharing(0, **changes, attention_k_eq_v=True)).attention[0].body
    assert (apart.kv_heads, apart.cached) == (2, "own")
    assert (same.kv_heads, same.cached) == (1, "key")


# ---- Layers that a list describes ----

SUPER = "llama_3_3_nemotron_super_49b"


def test_a_pruned_llama_is_counted_by_hand():
    # Inner widths: 2/3 of so many hidden widths, up to the next multiple of 256.
    widths = {0.5: 2816, 1.0: 5632, 1.3125: 7168, 2.625: 14336, 3.28125: 17920, 5.25: 28672}
    config = published(SUPER)
    factors = Counter(block["ffn"]["ffn_mult"] for block in config["block_configs"])
    attention = 8192 * 128 * (2 * 64 + 2 * 8)
    model = load_model("llama-3.3-nemotron-super-49b").model
    by_hand = 49 * (attention + 8192) + 2 * 128_256 * 8192 + 8192
    by_hand += sum(n * (3 * 8192 * widths[factor] + 8192) for factor, n in factors.items())
    assert parameters(model) == by_hand == 49_867_145_216
    # Only 49 of 80 layers keep keys.
    assert kv_bytes_per_token(model, BF16) == 49 * 2 * 8 * 128 * 2
    assert {b.body.intermediate: b.count for b in model.feed_forward} == {  # pyright: ignore[reportAttributeAccessIssue]
        widths[factor]: n for factor, n in factors.items()
    }
    # Up to the first layer without attention the two alternate; then comes a layer of one.
    order = load_model("llama-3.3-nemotron-super-49b").order
    assert (len(order), order.count(0), model.layers) == (80 + 49, 49, 80)
    first = next(i for i, b in enumerate(config["block_configs"]) if b["attention"]["no_op"])
    assert order[: 2 * first : 2] == (0,) * first
    assert order[2 * first - 1] != 0 and order[2 * first] != 0


@pytest.mark.parametrize(
    ("part", "key", "value", "expected"),
    [
        ("attention", "replace_with_linear", True,
         "block_configs[0]: attention: replace_with_linear true is not understood"),
        ("attention", "n_heads_in_group", 7,
         "n_heads_in_group 7 does not divide the 64 heads (nearest: 8)"),
        ("attention", "window_length", 4096, "window_length 4096 is not understood"),
        ("attention", "no_op", 1, "no_op must be true or false"),
        ("ffn", "ffn_mult", -1, "ffn_mult must be a number above 0, not -1"),
        ("ffn", "ffn_mult", None, "ffn_mult must be a number above 0, not null"),
        ("ffn", "ffn_mul", 2, "ffn_mul 2 is not understood (nearest: ffn_mult)"),
    ],
)  # fmt: skip
def test_lists_that_are_not_understood(part: str, key: str, value: Any, expected: str):
    config = copy.deepcopy(published(SUPER))
    config["block_configs"][0][part][key] = value
    assert expected in refusal(config)


def test_lists_of_another_length():
    config = published(SUPER)
    message = refusal({**config, "block_configs": config["block_configs"][:79]})
    assert message == "config.json: block_configs must describe 80 layers, not 79 layers"
    message = refusal({k: v for k, v in config.items() if k != "block_configs"})
    assert message == "config.json: block_configs is missing"
    nothing = [
        {"attention": {"no_op": True}, "ffn": block["ffn"]} for block in config["block_configs"]
    ]
    assert "leaves no attention" in refusal({**config, "block_configs": nothing})


@pytest.mark.parametrize("key", ["hybrid_layer_pattern", "moe_layer_freq"])
@pytest.mark.parametrize("flags", [None, "0101", [0, 1], [2] * 48, [None] * 48])
def test_lists_of_flags(key: str, flags: Any):
    message = refusal({**published("mimo_v2_flash"), key: flags})
    assert message == f"config.json: {key} must have a 0 or 1 for each of 48 layers"


# ---- Ranks ----


@pytest.mark.parametrize(
    "body",
    [
        GroupedQueryAttention(16, 8, 192, v_width=128),
        GroupedQueryAttention(16, 8, 64, cached="key"),
        GroupedQueryAttention(16, 8, 64, cached="earlier"),
        GroupedQueryAttention(16, 8, 64, gate_width=1),
        GroupedQueryAttention(16, 8, 64, gate_width=64),
    ],
)
def test_ranks_share_out_weights_cache_and_work(body: GroupedQueryAttention):
    step = Step(sequences=3, context=100)
    whole = body.operators(256, step, Shard(), BF16)
    part = body.operators(256, step, Shard(4), BF16)
    assert 4 * body.weight_bytes(256, BF16, Shard(4)) == 2 * body.matrices(256)
    assert body.weight_bytes(256, BF16, Shard()) == 2 * body.matrices(256)
    cache = [body.cache_bytes_per_token(BF16, Shard(ranks)) for ranks in (1, 4)]
    assert cache[0] == 4 * cache[1]
    for a, b in zip(whole, part, strict=True):
        if isinstance(a, Matmul | Attention):
            assert a.flops() == 4 * b.flops()
    # Per token twice the matrices.
    products = sum(op.flops() for op in whole if isinstance(op, Matmul))
    assert products == 3 * 2 * body.matrices(256)


def test_new_fields_change_nothing_where_they_are_as_before():
    plain = GroupedQueryAttention(16, 8, 64)
    same = dataclasses.replace(plain, v_width=64)
    step = Step(sequences=3, context=100)
    assert plain.operators(256, step, Shard(2), BF16)[0].columns == (8 + 2 * 4) * 64  # pyright: ignore[reportAttributeAccessIssue]
    for a, b in zip(*(m.operators(256, step, Shard(2), BF16) for m in (plain, same)), strict=True):
        assert (a.flops(), a.memory_bytes()) == (b.flops(), b.memory_bytes())
