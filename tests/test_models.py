"""Networks counted by hand: parameters, weights, cache, work, and how they divide over ranks."""

import dataclasses
import time

import equinox as eqx
import jax
import pytest

from perfmodel.errors import InputError
from perfmodel.formats import precision, precision_numbers
from perfmodel.models.attention import GroupedQueryAttention
from perfmodel.models.catalogue import aliases, load_model, names
from perfmodel.models.mlp import Mlp
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
from perfmodel.operators import Attention, Matmul, Operators, total
from perfmodel.question import own_precision, parse_precision
from perfmodel.relax import traced
from perfmodel.step import Chunk, Shard, Step, causal_pairs

BF16 = precision("bf16")


def operators(model: Model, step: Step, shard: Shard = Shard(), fmt: str = "bf16") -> Operators:  # noqa: B008
    formats = precision(fmt)
    return layer_operators(model, step, shard, formats) + head_operators(
        model, step, shard, formats
    )


def only(ops: Operators, *kinds: type) -> Operators:
    return tuple(op for op in ops if isinstance(op, kinds))


def tiny(**changes: int) -> Model:
    """Two layers of width 8: 4 heads over 2 kv heads of 4, gated feed-forward of 24."""
    mixer = GroupedQueryAttention(heads=4, kv_heads=2, head_dim=4)
    model = Model(
        hidden=8,
        vocabulary=100,
        tied=0,
        max_context=64,
        layers=2,
        blocks=(Block(2, mixer), Block(2, Mlp(24))),
    )
    return dataclasses.replace(model, **changes)


# ---- Parameters ----


def test_llama_2_70b_is_counted_by_hand():
    # q and o: 8192 x 64 heads x 128; k and v: 8192 x 8 kv heads x 128, not 64.
    attention = 8192 * (2 * 64 + 2 * 8) * 128
    mlp = 3 * 8192 * 28672
    norms = 2 * 8192
    count = 80 * (attention + mlp + norms) + 2 * 32000 * 8192 + 8192
    assert count == 68_976_648_192
    model = load_model("llama-2-70b").model
    assert parameters(model) == count
    # Two bytes each: 137.95 GB.
    assert weight_bytes(model, BF16) == 2 * count == 137_953_296_384


def test_mixtral_8x7b_is_counted_by_hand():
    # Eight experts of three matrices and a router beside attention and two norms; all are stored,
    # two experts are read.
    attention = 4096 * (2 * 32 + 2 * 8) * 128
    expert = 3 * 4096 * 14336
    rest = 32 * (attention + 8 * 4096 + 2 * 4096) + 2 * 32000 * 4096 + 4096
    model = load_model("mixtral-8x7b").model
    assert parameters(model) == rest + 32 * 8 * expert == 46_702_792_704
    assert active_parameters(model) == rest + 32 * 2 * expert == 12_879_925_248
    assert weight_bytes(model, BF16) == 2 * 46_702_792_704
    # Work follows the experts chosen: 2 FLOPs a weight, all but embedding and norms.
    products = only(operators(model, Step(1, 1)), Matmul)
    flops = sum(float(op.count) * float(op.flops()) for op in products)
    norms = 65 * 4096
    assert flops == pytest.approx(2 * (12_879_925_248 - 32000 * 4096 - norms), rel=1e-5)


def test_gpt_oss_120b_is_counted_by_hand():
    # 64 query and 8 kv heads of 64 with biases, a sink a head; 128 experts of 2880 with biases.
    attention = 2880 * 64 * (2 * 64 + 2 * 8) + 64 * (64 + 2 * 8) + 2880 + 64
    expert = 3 * 2880 * 2880 + 3 * 2880
    router = 128 * 2880 + 128
    table = 201088 * 2880
    rest = 36 * (attention + router + 2 * 2880) + 2 * table + 2880
    entry = load_model("gpt-oss-120b")
    assert parameters(entry.model) == rest + 36 * 128 * expert == 116_829_156_672
    assert active_parameters(entry.model) == rest + 36 * 4 * expert
    assert round((active_parameters(entry.model) - table) / 1e9, 2) == 5.13
    # As published: experts of 4.25 bits with 16-bit biases, everything else in 16 bits.
    formats = precision_numbers(entry.precision)
    stored = 36 * 128 * (3 * 2880 * 2880 * 17 / 32 + 2 * 3 * 2880) + 2 * rest
    assert weight_bytes(entry.model, formats) == stored
    # The model card's checkpoint size.
    assert round(stored / 2**30, 1) == 60.8


def test_windows_keep_no_more_than_their_keys():
    model = load_model("gpt-oss-120b").model
    fp8 = precision("bf16", kv="fp8")
    # 2 · 8 kv heads · 64 · 1 B = 1,024 B a token and layer; 18 layers keep all, 18 the last 128.
    assert kv_bytes(model, fp8, 65_536) == 18 * 65_536 * 1_024 + 18 * 128 * 1_024 == 1_210_318_848
    assert kv_bytes(model, fp8, 100) == 36 * 100 * 1_024
    # Mistral 7B v0.1: at most 4,096 of 32 layers, 2 · 8 · 128 · 2 B a token each.
    mistral = load_model("mistral-7b-v0.1").model
    assert kv_bytes(mistral, BF16, 32_768) == 32 * 4_096 * 4_096


@pytest.mark.parametrize("name", names())
def test_published_parameter_counts_are_reproduced(name: str):
    entry = load_model(name)
    count = parameters(entry.model)
    assert isinstance(count, int)
    assert entry.published["parameters"].covers(count)


@pytest.mark.parametrize("name", [n for n in names() if load_model(n).model.is_mixture])
def test_published_active_counts_are_reproduced(name: str):
    entry = load_model(name)
    model = entry.model
    count = active_parameters(model) - entry.active_without * model.vocabulary * model.hidden
    assert isinstance(count, int)
    assert entry.published["active_parameters"].covers(count)


@pytest.mark.parametrize(
    ("name", "published", "beside"),
    [
        # (billions as published, what that counts beside the decoder)
        ("mixtral-8x7b", 46.7, 0),
        ("mixtral-8x22b", 141, 0),
        ("qwen3-30b-a3b", 30.5, 0),
        ("qwen3-235b-a22b", 235, 0),
        ("qwen3-coder-480b-a35b", 480, 0),
        ("gpt-oss-20b", 20.91, 0),
        ("gpt-oss-120b", 116.83, 0),
        ("llama-4-scout", 109, 871_932_416),  # vision layers
        ("gemma-3-27b", 27.4, 423_060_336),  # vision layers
        ("gemma-2-27b", 27.2, 0),
        ("opt-175b", 175, 0),
        ("gpt-3-175b", 174.6, 0),
    ],
)
def test_rounded_counts_are_reproduced(name: str, published: float, beside: int):
    digits = len(str(published).partition(".")[2]) if isinstance(published, float) else 0
    assert round((parameters(load_model(name).model) + beside) / 1e9, digits) == published


def test_vision_layers_that_published_counts_include():
    # Llama 4: 34 layers of 1408 with 5632 between, 577 positions, patches of 588, an adapter of
    # 5632 x 4096 and 4096 x 4096, a projection of 4096 x 5120.
    layer = 4 * (1408**2 + 1408) + 2 * 1408 * 5632 + 5632 + 1408 + 4 * 1408
    ends = 1408 + 588 * 1408 + 577 * 1408 + 4 * 1408 + 5632 * 4096 + 4096**2 + 4096 * 5120
    assert 34 * layer + ends == 871_932_416
    # Gemma 3: 27 layers of 1152 with 4304 between, 4096 positions, patches of 588 with a bias.
    layer = 4 * (1152**2 + 1152) + 2 * 1152 * 4304 + 4304 + 1152 + 4 * 1152
    ends = 588 * 1152 + 1152 + 4096 * 1152 + 2 * 1152 + 1152 * 5376 + 1152
    assert 27 * layer + ends == 423_060_336


def test_draft_layers_that_checkpoints_include():
    # GLM-4.5's: a layer, a product of 10240 x 5120, three norms, and both tables once more.
    attention = 5120 * 128 * (2 * 96 + 2 * 8) + (96 + 2 * 8) * 128 + 2 * 128
    mixture = 161 * 3 * 5120 * 1536 + 160 * 5120 + 160
    layer = attention + mixture + 2 * 5120 + 2 * 5120 * 5120 + 3 * 5120
    assert layer == 3_988_069_792
    assert layer + 2 * 151552 * 5120 == 5_539_962_272


def test_explicit_head_dim_is_used():
    # Qwen3-0.6B: 1024 wide with 16 heads of 128, not of 64.
    model = load_model("qwen3-0.6b").model
    attention = 1024 * (2 * 16 + 2 * 8) * 128
    norms = 2 * 1024 + 2 * 128  # query and key norms of 128 each
    layer = attention + 3 * 1024 * 3072 + norms
    assert parameters(model) == 28 * layer + 151936 * 1024 + 1024 == 596_049_920
    # Keys and values of 128 each, too: 2 x 28 layers x 8 kv heads x 128 x 2 B.
    assert kv_bytes_per_token(model, BF16) == 2 * 28 * 8 * 128 * 2 == 114_688


def test_tied_embedding_is_stored_once():
    # 2 · 800 of embedding and head become 800.
    assert parameters(tiny()) - parameters(tiny(tied=1)) == 100 * 8
    assert weight_bytes(tiny(), BF16) - weight_bytes(tiny(tied=1), BF16) == 2 * 100 * 8


def test_biases_norms_and_learned_positions():
    # A plain two-matrix layer with biases and LayerNorms, as GPT-2: 12·h² + 13·h a layer.
    h, f, v, n = 8, 32, 100, 16
    mixer = GroupedQueryAttention(2, 2, 4, qkv_bias=1, output_bias=1)
    ffn = Mlp(f, gates=1, bias=1)
    model = Model(h, v, 1, n, 3, (Block(3, mixer), Block(3, ffn)), norm_vectors=2, positions=n)
    assert parameters(model) == 3 * (12 * h * h + 13 * h) + (v + n) * h + 2 * h
    assert weight_bytes(model, BF16) == 2 * parameters(model)


# ---- Weights by format ----


@pytest.mark.parametrize(
    ("fmt", "bits"),
    [
        ("fp8", 8),
        ("mxfp4", 4 + 8 / 32),
        ("nvfp4", 4 + 8 / 16),
        ("int4", 4 + 16 / 128),
    ],
)
def test_weights_take_their_scales_along(fmt: str, bits: float):
    model = load_model("llama-2-70b").model
    matrices = 80 * (8192 * 144 * 128 + 3 * 8192 * 28672)
    rest = parameters(model) - matrices  # embedding, head, norms: 16 bits
    assert weight_bytes(model, precision(fmt)) == matrices * bits / 8 + 2 * rest


def test_int8_has_a_scale_per_output_column():
    model = load_model("llama-2-70b").model
    matrices = 80 * (8192 * 144 * 128 + 3 * 8192 * 28672)
    rest = parameters(model) - matrices
    # q, k, v: 80 heads of 128; o: 8192; gate and up: 28672 each; down: 8192. Four bytes each.
    columns = 80 * (80 * 128 + 8192 + 2 * 28672 + 8192)
    assert weight_bytes(model, precision("int8")) == matrices + 4 * columns + 2 * rest


# ---- KV cache ----


def test_70b_cache_by_hand():
    model = load_model("llama-3.3-70b").model
    # K and V x 80 layers x 8 kv heads x 128 x 2 B; with 64 heads it would be 8 times as much.
    per_token = kv_bytes_per_token(model, BF16)
    assert per_token == 2 * 80 * 8 * 128 * 2 == 327_680
    assert 128_000 * per_token == 41_943_040_000  # 41.9 GB
    assert 131_072 * per_token == 42_949_672_960  # 42.95 GB
    assert -(-(10**9) // per_token) == 3052  # tokens to fill a gigabyte
    assert kv_bytes_per_token(model, precision("fp8")) == per_token // 2
    assert kv_bytes_per_token(model, precision("bf16", kv="nvfp4")) == per_token * 4.5 / 16


def test_attention_reads_8_kv_heads_not_64():
    ops = operators(load_model("llama-3.3-70b").model, Step(sequences=1, context=1000))
    (attention,) = only(ops, Attention)
    assert isinstance(attention, Attention)
    assert (attention.heads, attention.kv_heads) == (64, 8)
    assert attention.count * attention.cache_traffic() == 1000 * 327_680
    # Each of 64 heads multiplies 1000 keys and values of 128.
    assert attention.flops() == 2 * 64 * 1000 * (128 + 128)


def test_cache_of_a_rank_stops_shrinking_at_the_kv_heads():
    model = load_model("llama-3.3-70b").model
    per_rank = [kv_bytes_per_token(model, BF16, Shard(tp)) for tp in (1, 2, 4, 8, 16, 32)]
    assert per_rank == [327_680, 163_840, 81_920, 40_960, 40_960, 40_960]


def test_weights_of_a_rank_past_the_kv_heads():
    # At TP 16 each rank has 4 query heads and a copy of one of the 8 kv heads.
    mixer = load_model("llama-3.3-70b").model.attention[0].body
    assert mixer.weight_bytes(8192, BF16, Shard(8)) == 2 * 8192 * (8 + 2 * 1 + 8) * 128
    assert mixer.weight_bytes(8192, BF16, Shard(16)) == 2 * 8192 * (4 + 2 * 1 + 4) * 128


def test_counts_stay_exact_past_two_to_the_53():
    model = load_model("llama-3.1-405b").model
    tokens, batch = 131_072, 128
    # 2 · 126 layers · 8 kv heads · 128 · 2 B = 516,096 B a token.
    assert kv_bytes_per_token(model, BF16) == 516_096
    step = Step(
        sequences=batch, context=tokens, chunk=Chunk(tokens, causal_pairs(tokens, 0), tokens)
    )
    flops = total(only(operators(model, step), Matmul, Attention), "flops")
    matrices = 126 * (16384 * (2 * 128 + 2 * 8) * 128 + 3 * 16384 * 53248)
    head = 128256 * 16384
    pairs = batch * tokens + tokens * (tokens + 1) // 2
    by_hand = 2 * (matrices * (batch + tokens) + head * (batch + 1))
    by_hand += 126 * 2 * 128 * pairs * (128 + 128)
    assert isinstance(flops, int)
    assert flops == by_hand > 2**53
    assert flops + 1 != float(flops)


# ---- Work ----


def test_gated_feed_forward_has_three_matrices_in_work_and_in_bytes():
    model = load_model("llama-2-70b").model
    ops = operators(model, Step(sequences=7, context=100))
    ffn = [op for op in only(ops, Matmul) if op.group.endswith("/ffn")]
    matrix = 8192 * 28672
    assert sum(op.count * op.flops() for op in ffn) == 80 * 3 * 2 * 7 * matrix
    assert sum(op.count * op.weight_traffic() for op in ffn) == 80 * 3 * 2 * matrix
    assert model.feed_forward[0].body.weight_bytes(8192, BF16, Shard()) == 3 * 2 * matrix


def test_plain_feed_forward_has_two_matrices():
    ffn = Mlp(32, gates=1)
    ops = only(ffn.operators(8, Step(1, 1), Shard(), BF16), Matmul)
    assert sum(op.flops() for op in ops) == 2 * (2 * 8 * 32)
    assert ffn.matrices(8) == 2 * 8 * 32


@pytest.mark.parametrize("tied", [0, 1])
def test_work_per_token_is_twice_the_matrices(tied: int):
    # Per token 2 FLOPs a weight, all but the embedding (a lookup) and the norms.
    model = tiny(tied=tied)
    flops = total(only(operators(model, Step(1, 1)), Matmul), "flops")
    norms = (2 * 2 + 1) * 8
    embedding = 0 if tied else 100 * 8  # a tied table is the head's matrix
    assert flops == 2 * (parameters(model) - embedding - norms)
    # By hand: q 8x16, k and v 8x8, o 16x8, three of 8x24, two layers, head 100x8.
    assert flops == 2 * (2 * (128 + 64 + 64 + 128 + 3 * 192) + 800)


def test_70b_work_per_token_is_near_twice_the_parameters():
    model = load_model("llama-3.3-70b").model
    flops = total(only(operators(model, Step(1, 1)), Matmul), "flops")
    # Less the embedding and 161 norms of 8192.
    assert flops == 2 * (70_553_706_496 - 128256 * 8192 - 161 * 8192)


def test_weights_read_in_a_step_are_the_weights_stored():
    model = load_model("llama-3.3-70b").model
    read = total(only(operators(model, Step(1, 1)), Matmul), "weight_traffic")
    assert read == 2 * (parameters(model) - 128256 * 8192 - 161 * 8192)


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("chunk", [None, Chunk(64, causal_pairs(64, 32), 96)])
def test_splitting_conserves_work(tp: int, chunk: Chunk | None):
    model = load_model("llama-3.3-70b").model
    step = Step(sequences=3, context=500, chunk=chunk)
    whole = total(only(operators(model, step), Matmul, Attention), "flops")
    share = total(only(operators(model, step, Shard(tp)), Matmul, Attention), "flops")
    assert tp * share == whole


def test_past_the_kv_heads_only_their_projection_is_repeated():
    model = load_model("llama-3.3-70b").model
    step = Step(sequences=3, context=500)
    whole = total(only(operators(model, step), Matmul, Attention), "flops")
    share = total(only(operators(model, step, Shard(16)), Matmul, Attention), "flops")
    # Eight more copies of a kv head's two projections in each of 80 layers.
    assert 16 * share - whole == 80 * 2 * 3 * 8192 * (8 * 2 * 128)


# ---- The catalogue, and one program for all of it ----


FORMATS = {
    "mimo-v2-flash": "fp8", "gemma-4-31b-nvfp4": "bf16/bf16/fp8+nvfp4",
    "kimi-k3": "bf16+mxfp4/bf16",
    "gpt-oss-20b": "bf16+mxfp4/bf16", "gpt-oss-120b": "bf16+mxfp4/bf16",
    "qwen3-235b-a22b-fp8": "fp8", "minimax-m2": "fp8", "minimax-m2.5": "fp8",
    "deepseek-v3": "fp8", "deepseek-v3.2": "fp8", "kimi-k2": "fp8",
    "kimi-k2.5": "bf16+int4g32/bf16",
    "deepseek-v4-flash": "fp8+mxfp4/fp8", "deepseek-v4-pro": "fp8+mxfp4/fp8",
}  # fmt: skip
# Blocks that are alike share a program, whatever their sizes.
STRUCTURES = [
    ["gemma-2-27b", "gemma-3-27b"],
    ["gpt-oss-20b", "gpt-oss-120b"],
    ["glm-4.5", "glm-4.5-air", "glm-4.6"],
    ["mixtral-8x7b", "mixtral-8x22b", "qwen3-235b-a22b", "minimax-m2.5"],
    ["mistral-7b-v0.1", "phi-3-mini-4k"],
    ["deepseek-v3", "kimi-k2", "kimi-k2.5"],
    ["deepseek-v3.2", "glm-5"],
    ["llama-2-7b", "qwen3-0.6b", "mistral-7b-v0.3", "phi-4", "opt-175b", "gpt-3-175b"],
]


@pytest.mark.parametrize("alike", STRUCTURES, ids=lambda alike: alike[0])
def test_networks_of_one_structure(alike: list[str]):
    structures = {jax.tree.structure(load_model(name).model) for name in alike}
    assert len(structures) == 1


def test_entries_say_where_they_come_from():
    for name in names():
        entry = load_model(name)
        assert entry.name == name
        assert entry.source and entry.confidence and entry.title and entry.path
        assert entry.sources[entry.published["parameters"].source].title
        assert all(isinstance(leaf, int) for leaf in jax.tree.leaves(entry.model))
        assert str(entry.precision) == FORMATS.get(name, "bf16")


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("Llama-3.3-70B", "llama-3.3-70b"),
        ("llama3.3-70b", "llama-3.3-70b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.3-70b"),
        ("meta-llama/Llama-3.1-70B", "llama-3.1-70b"),
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
        ("Llama-4-Maverick-17B-128E-Instruct", "llama-4-maverick"),
    ],
)
def test_names_that_people_type(alias: str, name: str):
    assert load_model(alias).name == name


def test_each_alias_means_its_model_or_is_ambiguous():
    for name, others in aliases().items():
        for alias in others:
            if alias != "llama-70b":
                assert load_model(alias).name == name


def test_loading_is_quick():
    names()
    start = time.perf_counter()
    for name in names():
        load_model(name)
    assert time.perf_counter() - start < 0.05 * len(names())


def test_models_of_one_structure_share_a_program():
    traces = 0

    @eqx.filter_jit
    def counts(model, formats, step, shard):
        nonlocal traces
        traces += 1
        ops = layer_operators(model, step, shard, formats) + head_operators(
            model, step, shard, formats
        )
        return parameters(model), weight_bytes(model, formats, shard), total(ops, "flops")

    step, shard = traced(Step(sequences=4, context=1000)), traced(Shard(2))
    for name in names():
        model = load_model(name).model
        for fmt in ("bf16", "nvfp4"):
            count, *_ = counts(traced(model), traced(precision(fmt)), step, shard)
            assert count == pytest.approx(parameters(model), rel=1e-6)
    assert traces == len({jax.tree.structure(load_model(name).model) for name in names()}) == 26


def test_the_file_s_expert_format_holds_until_weights_are_named():
    entry = load_model("gpt-oss-20b")
    assert str(own_precision(entry, None, None, None)) == "bf16+mxfp4/bf16"
    assert str(own_precision(entry, None, None, "fp8")) == "bf16/bf16/fp8+mxfp4/bf16"
    assert str(own_precision(entry, "fp8", None, None)) == "fp8"
    for text in ("bf16+mxfp4/bf16", "bf16/bf16/fp8+nvfp4", "fp8"):
        assert str(parse_precision(text)) == text
    for text in ("bf16+", "bf16+fp8+fp8", "+fp8", "bf16+mxfp4/bf16/bf16"):
        with pytest.raises(InputError, match="precision: must be a format"):
            parse_precision(text)
