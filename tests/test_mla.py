"""Latent attention and its sparse form: counts by hand, absorbed against naive, conservation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perfmodel import deployments, question, serving
from perfmodel.chips import load_chip
from perfmodel.compiled import UNFUSED
from perfmodel.engines import load_engine
from perfmodel.errors import InputError
from perfmodel.formats import precision
from perfmodel.models.catalogue import load_model
from perfmodel.models.config import parse_config
from perfmodel.models.mla import Indexer, LatentAttention
from perfmodel.models.quantization import suggested_precision
from perfmodel.models.transformer import (
    active_parameters,
    kv_bytes,
    kv_bytes_per_token,
    parameters,
    weight_bytes,
)
from perfmodel.operators import Attention, Collective, Matmul, Operators
from perfmodel.plan import Load, Plan
from perfmodel.step import Chunk, Shard, Step, causal_pairs

BF16 = precision("bf16")
V3 = LatentAttention(128, 1536, 512, 128, 64, 128)
V32 = dataclasses.replace(V3, index=Indexer(64, 128, 2048))
HIDDEN = 7168


def chunk(tokens: int, cached: int = 0) -> Chunk:
    pairs = causal_pairs(tokens, cached)
    return Chunk(tokens, pairs, cached + tokens, new=tokens, cached=cached)


def named(ops: Operators) -> dict:
    return {op.name: op for op in ops}


def test_deepseek_v3_is_counted_by_hand():
    # Queries through 1536 to 128 heads of 128 + 64; keys and values through 512, with a rotary key
    # of 64 beside; two norms; 128 heads of 128 back.
    queries = 7168 * 1536 + 1536 + 1536 * 128 * (128 + 64)
    latent = 7168 * (512 + 64) + 512 + 512 * 128 * (128 + 128)
    attention = queries + latent + 128 * 128 * 7168
    assert attention == V3.matrices(HIDDEN) + V3.vectors(HIDDEN) == 187_107_328
    expert = 3 * 7168 * 2048
    router = 256 * 7168 + 256
    rest = 61 * (attention + 2 * 7168) + 3 * 3 * 7168 * 18432 + 58 * (expert + router)
    rest += 2 * 129280 * 7168 + 7168
    model = load_model("deepseek-ai/DeepSeek-V3").model
    assert parameters(model) == rest + 58 * 256 * expert == 671_026_419_200
    assert active_parameters(model) == rest + 58 * 8 * expert == 37_552_297_472
    assert weight_bytes(model, BF16) == 2 * 671_026_419_200
    assert load_model("deepseek-r1").model == model


def test_the_sparse_form_has_an_indexer():
    # Key of 128 with a norm (weight, bias), 64 weights of heads, queries 1536 to 64 x 128.
    index = 7168 * (128 + 64) + 2 * 128 + 1536 * 64 * 128
    model = load_model("deepseek-v3.2").model
    assert parameters(model) == 671_026_419_200 + 61 * index == 671_877_944_064
    # GLM-5: 64 heads of 192 + 64 and 256, queries through 2048, 32 index heads.
    attention = 6144 * (2048 + 576) + 2048 + 512 + 2048 * 64 * 256 + 512 * 64 * (192 + 256)
    attention += 64 * 256 * 6144 + 6144 * (128 + 32) + 256 + 2048 * 32 * 128
    expert = 3 * 6144 * 2048
    count = 78 * (attention + 2 * 6144) + 3 * 3 * 6144 * 12288 + 2 * 154880 * 6144 + 6144
    count += 75 * (257 * expert + 256 * 6144 + 256)
    assert parameters(load_model("zhipuai/GLM-5").model) == count == 743_911_218_432


def test_draft_layers_and_vision_that_checkpoints_include():
    def draft(hidden: int, attention: int) -> int:
        mixture = 257 * 3 * hidden * 2048 + 256 * hidden + 256
        return attention + mixture + 2 * hidden + 2 * hidden * hidden + 3 * hidden

    # DeepSeek's: a layer, a product of 14336 x 7168, three norms, and both tables once more.
    index = 7168 * (128 + 64) + 256 + 1536 * 64 * 128
    tables = 2 * 129280 * 7168
    assert draft(7168, 187_107_328) + tables == 13_463_426_304
    assert draft(7168, 187_107_328 + index) + tables == 13_477_385_728
    assert 671_026_419_200 + 13_463_426_304 + 41_540_496 == 684_531_386_000
    assert 671_877_944_064 + 13_477_385_728 == 685_355_329_792
    # GLM-5's shares its tables.
    glm = load_model("glm-5").model.attention[0].body
    assert draft(6144, glm.matrices(6144) + glm.vectors(6144)) == 9_952_920_576
    # Kimi K2.5's vision layers: 27 of 1152 with 4304 between, patches of 588, 64 x 64 positions,
    # and a projector of four patches to 7168.
    layer = 4 * (1152**2 + 1152) + 2 * 1152 * 4304 + 4304 + 1152 + 4 * 1152
    ends = 588 * 1152 + 1152 + 64 * 64 * 1152 + 2 * 1152
    projector = 2 * 1152 + 4608 * 4608 + 4608 + 4608 * 7168 + 7168
    vision = 27 * layer + ends + projector
    assert vision == 471_143_920
    assert parameters(load_model("kimi-k2.5").model) + vision == 1_026_879_376_368


def test_the_cache_is_stored_once_on_every_rank():
    model = load_model("deepseek-v3").model
    # 61 layers x 576 x 2 B x 4,096 tokens, not twice and not per head.
    for tp in (1, 8, 128):
        assert kv_bytes(model, BF16, 4096, Shard(tp)) == 61 * 576 * 2 * 4096 == 287_834_112
    assert kv_bytes_per_token(model, precision("fp8"), Shard(8, context_ranks=4)) == 61 * 576 / 4
    # Index keys stay in 8 bits with a 4-byte scale: 132 B a token beside 1,152.
    sparse = load_model("deepseek-v3.2").model
    assert kv_bytes_per_token(sparse, BF16) == 61 * (576 * 2 + 132)
    assert kv_bytes_per_token(sparse, precision("fp8")) == 61 * (576 + 132)


def test_decoding_reads_each_latent_vector_once():
    ops = named(V3.operators(HIDDEN, Step(32, 4000), Shard(8), BF16))
    attention = ops["decode_attention"]
    assert attention.cache_traffic() == 32 * 4000 * 576 * 2
    # 16 heads of a rank: 576 for a score, 512 for a value.
    assert attention.flops() == 2 * 32 * 4000 * 16 * (576 + 512)
    absorbed = ops["query_absorption"]
    assert (absorbed.rows, absorbed.inner, absorbed.columns, absorbed.groups) == (32, 128, 512, 16)
    expanded = ops["value_expansion"]
    assert (expanded.rows, expanded.inner, expanded.columns, expanded.groups) == (32, 512, 128, 16)
    assert "latent_expansion" not in ops


def test_prompts_expand_their_latent_vectors():
    ops = named(V3.operators(HIDDEN, Step(0, 1, chunk=chunk(1000, 500)), Shard(8), BF16))
    expansion, attention = ops["latent_expansion"], ops["chunk_attention"]
    # Those of 500 cached tokens too, to 16 heads of 128 and 128.
    assert (expansion.rows, expansion.inner, expansion.columns) == (1500, 512, 16 * 256)
    pairs = 1000 * 500 + 1000 * 1001 // 2
    assert attention.flops() == 2 * pairs * 16 * (192 + 128)
    # Nothing decodes, so nothing is absorbed.
    assert ops["query_absorption"].count == ops["value_expansion"].count == 0


@pytest.mark.parametrize("body", [V3, V32])
def test_weights_are_read_as_they_are_counted(body: LatentAttention):
    # Decoding meets every matrix once; with the absorbed products in place of the expansion.
    ops = body.operators(HIDDEN, Step(1, 10), Shard(), BF16)
    read = sum(op.weight_traffic() for op in ops if isinstance(op, Matmul))
    assert read == 2 * body.matrices(HIDDEN)
    whole = body.weight_bytes(HIDDEN, BF16, Shard())
    assert whole == 2 * (body.matrices(HIDDEN) + body.vectors(HIDDEN))
    # On ranks, only what belongs to heads is cut.
    heads = 2 * 128 * (1536 * 192 + 512 * 256 + 128 * HIDDEN)
    assert body.weight_bytes(HIDDEN, BF16, Shard(8)) == whole - heads + heads // 8


def test_absorbed_attention_is_the_naive_one():
    # q·(W c) = (Wᵀ q)·c, and Σ p (V c) = V Σ p c: small numbers, the two orders of multiplying.
    random = np.random.default_rng(0)
    heads, nope, rope, rank, value, keys = 3, 4, 2, 8, 5, 7
    q, q_rope = random.normal(size=(heads, nope)), random.normal(size=(heads, rope))
    c, k_rope = random.normal(size=(keys, rank)), random.normal(size=(keys, rope))
    up_k, up_v = random.normal(size=(heads, nope, rank)), random.normal(size=(heads, value, rank))

    def softmax(x: np.ndarray) -> np.ndarray:
        return np.exp(x) / np.exp(x).sum(-1, keepdims=True)

    k = np.einsum("hnr,kr->hkn", up_k, c)
    p = softmax(np.einsum("hn,hkn->hk", q, k) + q_rope @ k_rope.T)
    naive = np.einsum("hk,hkv->hv", p, np.einsum("hvr,kr->hkv", up_v, c))
    absorbed = np.concatenate([np.einsum("hn,hnr->hr", q, up_k), q_rope], axis=-1)
    cache = np.concatenate([c, k_rope], axis=-1)
    assert cache.shape[1] == LatentAttention(heads, None, rank, nope, rope, value).cache_width
    p = softmax(absorbed @ cache.T)
    np.testing.assert_allclose(np.einsum("hvr,hr->hv", up_v, p @ c), naive, rtol=1e-12)


def test_sparse_attention_sees_its_best_keys_and_scores_all():
    ops = named(V32.operators(HIDDEN, Step(4, 10_000), Shard(8), BF16))
    assert ops["decode_attention"].keys == 2048
    scores = ops["index_scores"]
    # 64 heads of 128 against every key, on every rank; a key is 132 B.
    assert scores.flops() == 2 * 4 * 10_000 * 64 * 128
    assert scores.cache_traffic() == 4 * 10_000 * 132
    short = named(V32.operators(HIDDEN, Step(4, 1_000), Shard(8), BF16))
    assert short["decode_attention"].keys == 1_000
    # A prompt of 3,000 after 1,000: the queries see min(position, 2,048) keys each.
    part = chunk(3000, 1000)
    seen = named(V32.operators(HIDDEN, Step(0, 1, chunk=part), Shard(8), BF16))
    pairs = sum(min(position, 2048) for position in range(1001, 4001))
    assert seen["chunk_attention"].pairs == pairs
    assert seen["chunk_index_scores"].pairs == part.pairs
    # In the absorbed form, prompts too.
    assert seen["query_absorption"].rows == 3000 and "latent_expansion" not in seen


def test_context_ranks_share_keys_and_conserve_work():
    def flops(cp: int, step: Step) -> float:
        ops = V3.operators(HIDDEN, step, Shard(8, context_ranks=cp), BF16)
        return sum(float(op.flops()) for op in ops if isinstance(op, Attention))

    for step in (Step(32, 4096), Step(0, 1, chunk=chunk(512))):
        assert flops(4, step) == flops(1, step)
    ops = named(V3.operators(HIDDEN, Step(32, 4096), Shard(8, context_ranks=4), BF16))
    assert ops["decode_attention"].keys == 1024 and ops["decode_attention"].heads == 64
    links = [op for op in ops.values() if isinstance(op, Collective)]
    assert {op.name for op in links} >= {"query_all_gather", "partial_reduce_scatter"}


def test_plans_cut_heads_but_no_kv_heads():
    model = load_model("deepseek-v3").model
    assert question.degrees(model) == [1, 2, 4, 8, 16, 32, 64, 128]
    with pytest.raises(InputError, match=r"tp: 6 does not cut the 128 heads of deepseek-v3 \(near"):
        question.check_degrees(load_model("deepseek-v3"), 6, 1)
    found = question.layouts(model, 8, cps=(1, 4))
    assert question.Layout(8, 1, 8, 8, 1) in found and question.Layout(8, 1, 8, 1, 4) in found


def test_attention_groups_share_the_cache_out():
    chip, engine = load_chip("h200_sxm"), load_engine("neutral")
    entry = load_model("deepseek-v3")
    load, formats = Load(isl=4000.0, osl=1000.0), precision("fp8")

    def found(groups: float, batch: float):
        plan = Plan(
            chips=8.0, stages=1.0, batch=batch, chunk=2048.0, attention_dp=groups,
            expert_ranks=8.0,
        )  # fmt: skip
        return serving.estimate(
            chip.machine, question.numbers(entry.model), load, plan, formats, engine.engine
        )

    def with_slope(groups: float, batch: float):
        return jax.jvp(lambda b: found(groups, b), (batch,), (jnp.ones_like(batch),))

    program = jax.jit(with_slope, compiler_options=dict(UNFUSED))
    (one, _), (eight, slope) = program(1.0, 64.0), program(8.0, 64.0)
    # Every rank of one group holds all sequences; each of eight an eighth.
    np.testing.assert_allclose(eight.kv_bytes * 8, one.kv_bytes, rtol=1e-5)
    assert eight.admitted > 5 * one.admitted
    assert np.isfinite(slope.tpot) and slope.tpot > 0


def test_kimi_k2_5_has_experts_of_4_bits():
    entry = load_model("moonshotai/Kimi-K2.5")
    assert str(entry.precision) == "bf16+int4g32/bf16"
    # 4 bits and a 16-bit scale per 32.
    assert precision("int4g32").weight_bytes == (4 + 16 / 32) / 8
    assert any("vision" in note for note in entry.notes)
    b200, h200 = load_chip("b200_sxm"), load_chip("h200_sxm")

    def asked(chip, word: str) -> str:
        return str(deployments.find_precision(entry, chip, entry.name, word, "", ""))

    assert asked(h200, "int4_wo") == "bf16+int4g32/bf16"
    assert asked(b200, "nvfp4") == "bf16+nvfp4" and asked(h200, "nvfp4") == "bf16+nvfp4/bf16"


SMALL = {
    "model_type": "deepseek_v3", "hidden_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 128,
    "vocab_size": 100, "max_position_embeddings": 1000, "q_lora_rank": 32, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 16,
}  # fmt: skip
SPARSE = {
    **SMALL, "model_type": "deepseek_v32", "index_n_heads": 2, "index_head_dim": 128,
    "index_topk": 64,
}  # fmt: skip


def test_queries_may_come_straight_from_the_hidden_state():
    with_rank = parse_config(SMALL).attention[0].body
    direct = parse_config({**SMALL, "q_lora_rank": None}).attention[0].body
    assert with_rank.q_rank == 32 and direct.q_rank is None
    difference = 64 * 32 + 32 * 4 * 12 - 64 * 4 * 12
    assert with_rank.matrices(64) - direct.matrices(64) == difference


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (SMALL, {"attention_bias": True}, "attention_bias true is not understood"),
        (SMALL, {"moe_layer_freq": 2}, "moe_layer_freq 2 is not understood"),
        (SMALL, {"topk_method": "greedy"}, "topk_method 'greedy' is not understood"),
        (SMALL, {"num_key_value_heads": 2}, "num_key_value_heads 2 is not understood"),
        (SMALL, {"index_topk": 64}, "index_topk 64 is not understood: sparse"),
        (SMALL, {"qk_head_dim": 13}, r"qk_head_dim 13 is not understood .*nearest: 12"),
        (SPARSE, {"index_topk_freq": 4}, "index_topk_freq 4 is not understood: sparse"),
        (SPARSE, {"indexer_types": ["full", "shared"]}, "indexer_types a list is not understood"),
        (SPARSE, {"index_head_dim": 96}, r"index_head_dim 96 .*nearest: 128"),
    ],
)
def test_what_changes_latent_attention_is_refused(config: dict, change: dict, message: str):
    parse_config(config)
    with pytest.raises(InputError, match=message):
        parse_config({**config, **change})


@pytest.mark.parametrize("key", ["kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "v_head_dim"])
def test_sizes_are_never_assumed(key: str):
    with pytest.raises(InputError, match=f"{key} is missing"):
        parse_config({k: v for k, v in SMALL.items() if k != key})


def test_a_list_with_a_choice_of_words_covers_the_layers_it_names():
    model = parse_config(SMALL)
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}
    ignore = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"]
    dense = "re:.*mlp\\.(gate|up|down)_proj.*"
    asked = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    whole = {"quantization_config": {**asked, "ignore": [*ignore, dense]}}
    assert str(suggested_precision(whole, "c", model)) == "bf16+int4g32/bf16"
    cut = {"quantization_config": {**asked, "ignore": [*ignore, dense.replace("|up", "")]}}
    with pytest.raises(InputError, match="0 of 1 dense layers are whole"):
        suggested_precision(cut, "c", model)
