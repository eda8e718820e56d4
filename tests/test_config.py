"""Configurations written by strangers: each is a network or one clear line."""

import json
import math
import pathlib
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perfmodel.errors import InputError
from perfmodel.models.catalogue import load_model
from perfmodel.models.config import ARCHITECTURES, caveats, parse_config
from perfmodel.models.dense import as_dense
from perfmodel.models.mlp import MixtureOfExperts, Mlp
from perfmodel.models.quantization import suggested_precision
from perfmodel.models.transformer import Model, active_parameters, parameters

SIZES = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    **SIZES,
}


def having(**changes: Any) -> dict[str, Any]:
    return {**LLAMA, **changes}


def without(key: str, **changes: Any) -> dict[str, Any]:
    return {k: v for k, v in having(**changes).items() if k != key}


def refusal(config: Any) -> str:
    with pytest.raises(InputError) as caught:
        parse_config(config, "config.json")
    return line(caught.value)


def line(error: InputError) -> str:
    text = str(error)
    assert text and text.isprintable(), "one printable line"
    assert len(text) < 500
    return text


def attention(config: dict[str, Any]):
    return parse_config(config).attention[0].body


# ---- What each architecture means ----


def test_sizes_are_exact_integers():
    assert parameters(parse_config(LLAMA)) == 8_030_261_248


def test_kv_heads_default_to_heads_only_where_the_class_does():
    assert attention(without("num_key_value_heads")).kv_heads == 32
    assert attention(having(num_key_value_heads=None)).kv_heads == 32
    # Other classes default to 8 or 32 heads, whatever the size: refused.
    for kind in ("mistral", "qwen2", "qwen3"):
        config = without("num_key_value_heads", model_type=kind, sliding_window=None)
        del config["architectures"]
        assert "num_key_value_heads is missing" in refusal(config)


def test_head_dim_given_derived_or_by_class():
    assert attention(LLAMA).head_dim == 4096 // 32
    assert attention(having(head_dim=None)).head_dim == 128
    assert attention(having(head_dim=64)).head_dim == 64
    small = {**SIZES, "model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 16}
    assert attention(small).head_dim == 128
    assert attention({**small, "head_dim": None}).head_dim == 64
    # A width that heads do not divide is fine beside an explicit head_dim.
    assert attention(having(hidden_size=5000, head_dim=128)).head_dim == 128


@pytest.mark.parametrize(
    ("kind", "changes", "qkv", "output", "mlp"),
    [
        ("llama", {}, 0, 0, 0),
        ("llama", {"attention_bias": True, "mlp_bias": True}, 1, 1, 1),
        ("mistral", {"sliding_window": None}, 0, 0, 0),
        ("qwen2", {}, 1, 0, 0),
        ("qwen3", {}, 0, 0, 0),
        ("qwen3", {"attention_bias": True}, 1, 1, 0),
        ("phi3", {}, 0, 0, 0),
    ],
)
def test_biases(kind: str, changes: dict[str, Any], qkv: int, output: int, mlp: int):
    mixer, ffn = (b.body for b in parse_config({"model_type": kind, **SIZES, **changes}).blocks)
    assert (mixer.qkv_bias, mixer.output_bias, ffn.bias) == (qkv, output, mlp)
    assert mixer.qk_norm == (kind == "qwen3")
    assert ffn.gates == 2


def test_tied_embeddings():
    assert parse_config(LLAMA).tied == 0
    assert parse_config(having(tie_word_embeddings=True)).tied == 1


def test_gpt2_is_counted_exactly():
    # GPT-2 small: 12 · (12·768² + 13·768) + (50,257 + 1,024)·768 + 2·768, head tied.
    config = {
        "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
        "n_ctx": 1024, "vocab_size": 50257, "activation_function": "gelu_new",
    }  # fmt: skip
    count = 12 * (12 * 768**2 + 13 * 768) + (50257 + 1024) * 768 + 2 * 768
    assert parameters(parse_config(config)) == count == 124_439_808
    assert parameters(parse_config({**config, "n_inner": None})) == count


def test_opt_is_counted_exactly():
    # OPT-125M: as GPT-2 small with its own vocabulary and two positions more.
    config = {
        "model_type": "opt", "hidden_size": 768, "num_hidden_layers": 12, "vocab_size": 50272,
        "num_attention_heads": 12, "ffn_dim": 3072, "max_position_embeddings": 2048,
        "word_embed_proj_dim": 768, "do_layer_norm_before": True,
    }  # fmt: skip
    count = 12 * (12 * 768**2 + 13 * 768) + (50272 + 2050) * 768 + 2 * 768
    assert parameters(parse_config(config)) == count == 125_239_296
    assert "word_embed_proj_dim 512" in refusal({**config, "word_embed_proj_dim": 512})
    assert "do_layer_norm_before false" in refusal({**config, "do_layer_norm_before": False})


def test_olmo_norms_have_no_weights():
    config = {
        "model_type": "olmo", **SIZES, "num_key_value_heads": 32, "intermediate_size": 11008,
        "vocab_size": 50304,
    }  # fmt: skip
    # OLMo-7B: 32 · (4·4096² + 3·4096·11008) + 2·50304·4096.
    assert parameters(parse_config(config)) == 6_888_095_744


def test_incidental_keys_change_nothing():
    noise = {
        "torch_dtype": "bfloat16", "rope_theta": 5e5, "rope_scaling": {"factor": 8.0},
        "bos_token_id": [1, 2], "initializer_range": 0.02, "use_cache": True, "num_experts": 0,
        "pretraining_tp": 1, "_name_or_path": "x", "attention_dropout": 0.0, "pruned_heads": {},
        "is_encoder_decoder": False, "max_window_layers": 32, "transformers_version": "4.43.0",
    }  # fmt: skip
    assert parse_config(having(**noise)) == parse_config(LLAMA)


# ---- What is refused ----


@pytest.mark.parametrize(
    ("kind", "keys", "reasons"),
    [
        ("deepseek_v2", {"n_routed_experts": 64, "kv_lora_rank": 512},
         "mixture of experts, latent attention"),
        ("zamba2", {"mamba_num_heads": 64}, "state-space, linear or recurrent layers"),
        ("dbrx", {"num_experts": 16}, "mixture of experts"),
        ("kimi_vl", {"text_config": {"n_routed_experts": 384}},
         "several modalities"),
        ("lfm2", {"full_attention_interval": 4, "linear_conv_kernel_dim": 4},
         "layers of several kinds, state-space, linear or recurrent layers"),
        ("gpt_neox", {"use_parallel_residual": True}, "attention beside the feed-forward layer"),
    ],
)  # fmt: skip
def test_other_architectures_are_named_with_the_reason(kind: str, keys: dict, reasons: str):
    message = refusal({"model_type": kind, **SIZES, **keys})
    expected = f"config.json: model_type '{kind}' is not understood: {reasons}; known: "
    assert message.startswith(expected)
    listed = message.split("known: ")[1].split(" and ")[0].split(", ")
    assert len(set(listed) & set(ARCHITECTURES)) == 24


def test_the_nearest_architecture_comes_first():
    assert "known: qwen3_moe, " in refusal(having(model_type="qwen3_mo"))
    assert "known: llama, " in refusal(having(model_type="lama"))


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("num_experts", 64, "mixture of experts"),
        ("num_local_experts", 8, "mixture of experts"),
        ("kv_lora_rank", 512, "latent attention"),
        ("layers_block_type", ["mamba"], "layers of several kinds"),
        ("sliding_window_pattern", 6, "sliding windows"),
        ("block_configs", [{}], "layers of several kinds"),
        ("text_config", {"a": 1}, "several modalities"),
        ("attention_chunk_size", 8192, "sparse or chunked attention"),
        ("use_qk_norm", True, "query and key norms"),
        ("is_encoder_decoder", True, "an encoder"),
    ],
)
def test_keys_that_change_the_network_are_named(key: str, value: Any, reason: str):
    message = refusal(having(**{key: value}))
    assert message.startswith(f"config.json: {key} ") and f"is not understood: {reason}" in message
    parse_config(having(**{key: None}))


def windows(config: dict[str, Any]) -> list[tuple[int, int | None, str]]:
    return [(b.count, b.body.window, b.body.span) for b in parse_config(config).attention]


def test_windows_as_each_class_has_them():
    mistral = {"model_type": "mistral", **SIZES, "max_position_embeddings": 32768}
    assert windows({**mistral, "sliding_window": 4096}) == [(32, 4096, "window")]
    assert windows(mistral) == [(32, 4096, "window")]  # left out, it is 4096 in this class
    full = parse_config({**mistral, "sliding_window": None})
    assert parse_config({**mistral, "sliding_window": 4096, "use_sliding_window": False}) == full
    assert parse_config({**mistral, "sliding_window": 32768}) == full  # never acts
    assert windows({**mistral, "sliding_window": 32767}) == [(32, 32767, "window")]
    qwen = {"model_type": "qwen2", **SIZES, "sliding_window": 4096}
    assert windows(qwen) == [(32, None, "full")]  # its class leaves windows off
    on = {**qwen, "use_sliding_window": True, "max_window_layers": 20}
    assert windows(on) == [(20, None, "full"), (12, 4096, "window")]
    assert windows({**on, "max_window_layers": 0}) == [(32, 4096, "window")]
    del on["max_window_layers"]
    assert windows(on) == [(28, None, "full"), (4, 4096, "window")]
    gemma = {"model_type": "gemma2", **SIZES}
    assert windows(gemma) == [(16, None, "full"), (16, 4096, "window")]
    # Five local layers to a global one: of 32 layers 5 are global.
    gemma = {"model_type": "gemma3_text", **SIZES, "sliding_window": 1024}
    assert windows(gemma) == [(5, None, "full"), (27, 1024, "window")]
    assert windows({**gemma, "sliding_window_pattern": 4})[0] == (8, None, "full")
    assert "sliding_window must be a whole number" in refusal({**mistral, "sliding_window": -1})
    assert "sliding_window_pattern must be" in refusal({**gemma, "sliding_window_pattern": 0})


def test_windows_that_a_class_has_not_are_refused():
    assert "sliding_window 4096 is not understood" in refusal(having(sliding_window=4096))
    assert "use_sliding_window true" in refusal(having(use_sliding_window=True))
    message = refusal({"model_type": "phi3", **SIZES, "use_sliding_window": True})
    assert "use_sliding_window true without a sliding_window" in message


def test_layer_types():
    full = ["full_attention"] * 32
    assert parse_config(having(layer_types=full)) == parse_config(LLAMA)
    mixed = ["sliding_attention", *full[1:]]
    assert "layer_types has 'sliding_attention'" in refusal(having(layer_types=mixed))
    assert "names 31 layers, num_hidden_layers says 32" in refusal(having(layer_types=full[1:]))
    assert "layer_types must be a list" in refusal(having(layer_types="full_attention"))
    # Of a class that reads it, the list decides.
    near = {"model_type": "qwen3", **SIZES, "sliding_window": 512, "use_sliding_window": True}
    assert windows({**near, "layer_types": mixed}) == [(31, None, "full"), (1, 512, "window")]
    assert "layer_types has 'chunked_attention'" in refusal(
        {**near, "layer_types": ["chunked_attention", *mixed[1:]]}
    )
    # Of one that does not, it may only agree.
    mistral = {"model_type": "mistral", **SIZES, "sliding_window": 512}
    assert windows({**mistral, "layer_types": ["sliding_attention"] * 32}) == windows(mistral)
    message = refusal({**mistral, "layer_types": ["sliding_attention"] * 31 + full[:1]})
    assert "layer_types says 'full_attention' of layer 31, its class 'sliding_attention'" in message


# ---- Mixtures of experts ----

QWEN_MOE = {
    "model_type": "qwen3_moe", **SIZES, "num_experts": 64, "num_experts_per_tok": 4,
    "moe_intermediate_size": 1000,
}  # fmt: skip
GLM_MOE = {
    "model_type": "glm4_moe", **SIZES, "n_routed_experts": 64, "num_experts_per_tok": 4,
    "moe_intermediate_size": 1000, "n_shared_experts": 2, "first_k_dense_replace": 3,
}  # fmt: skip
LLAMA4 = {
    "model_type": "llama4",
    "text_config": {
        **SIZES, "model_type": "llama4_text", "intermediate_size": 1000,
        "intermediate_size_mlp": 3000, "num_local_experts": 16, "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
    },
    "vision_config": {"hidden_size": 1408},
}  # fmt: skip


def feed_forward(config: dict[str, Any]) -> list[tuple[int, type]]:
    return [(b.count, type(b.body)) for b in parse_config(config).feed_forward]


def test_which_layers_are_mixtures():
    assert feed_forward(QWEN_MOE) == [(32, MixtureOfExperts)]
    steps = {**QWEN_MOE, "decoder_sparse_step": 3}
    assert feed_forward(steps) == [(22, Mlp), (10, MixtureOfExperts)]
    # Layers 2, 5, 8, … are mixtures; of 2 and 3 one is.
    listed = {**steps, "mlp_only_layers": [2, 3]}
    assert feed_forward(listed) == [(23, Mlp), (9, MixtureOfExperts)]
    assert feed_forward(GLM_MOE) == [(3, Mlp), (29, MixtureOfExperts)]
    assert feed_forward({**GLM_MOE, "first_k_dense_replace": 0}) == [(32, MixtureOfExperts)]
    assert feed_forward(LLAMA4) == [(16, Mlp), (16, MixtureOfExperts)]
    text = {**LLAMA4["text_config"], "moe_layers": [7]}
    assert feed_forward({**LLAMA4, "text_config": text}) == [(31, Mlp), (1, MixtureOfExperts)]


def test_a_mixture_by_hand():
    # Layers 3 to 31: 64 experts and 2 shared of 3·4096·1000, a router of 4096·64 and 64
    # corrections; layers 0 to 2: 3·4096·14336. Attention 4096·(2·32 + 2·8)·128, two norms.
    expert = 3 * 4096 * 1000
    rest = 32 * (4096 * 80 * 128 + 2 * 4096) + 3 * 3 * 4096 * 14336 + 2 * 128256 * 4096 + 4096
    mixtures = 29 * (66 * expert + 4096 * 64 + 64)
    model = parse_config(GLM_MOE)
    assert parameters(model) == rest + mixtures
    assert active_parameters(model) == rest + mixtures - 29 * 60 * expert
    # Query, key and value products with a bias, the output product without; norms of one head.
    more = parse_config({**GLM_MOE, "attention_bias": True, "use_qk_norm": True})
    assert parameters(more) - parameters(model) == 32 * (48 * 128 + 2 * 128)


def test_llama_4_has_chunks_where_positions_are_rotary():
    assert windows(LLAMA4) == [(8, None, "full"), (24, 8192, "chunk")]
    full, near = (b.body for b in parse_config(LLAMA4).attention)
    assert (full.qk_norm, near.qk_norm, near.qk_weights) == (0, 1, 0)
    text = {**LLAMA4["text_config"], "no_rope_layers": [1] * 30 + [0, 0]}
    assert windows({**LLAMA4, "text_config": text}) == [(2, None, "full"), (30, 8192, "chunk")]
    short = {**LLAMA4["text_config"], "max_position_embeddings": 8192, "use_qk_norm": False}
    assert windows({**LLAMA4, "text_config": short}) == [(32, None, "full")]
    dense, mixture = (b.body for b in parse_config(LLAMA4).feed_forward)
    assert (dense.intermediate, mixture.intermediate) == (3000, 1000)
    assert mixture.shared == Mlp(1000)


def test_the_decoder_of_several_modalities():
    flat = {**LLAMA4["text_config"]}
    assert parse_config(LLAMA4) == parse_config(flat)
    assert caveats(LLAMA4) == ("only the decoder is counted, not the vision layers beside it",)
    assert caveats(flat) == ()
    assert parse_config({**LLAMA4, "tie_word_embeddings": True}).tied == 1
    assert "config.json: text_config is missing" in refusal({"model_type": "llama4"})
    assert "text_config: must be an object" in refusal({**LLAMA4, "text_config": [1]})
    assert "audio_config" in refusal({**LLAMA4, "audio_config": {"a": 1}})
    other = {**LLAMA4, "text_config": {**flat, "model_type": "llama"}}
    assert "text_config: model_type 'llama' is not understood (nearest: llama4_text)" in refusal(
        other
    )
    small = {**LLAMA4, "text_config": {**flat, "num_experts_per_tok": 17}}
    assert "text_config: num_experts_per_tok 17 exceeds num_local_experts 16" in refusal(small)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (QWEN_MOE, {"num_experts": None}, "num_experts must be a whole number"),
        (QWEN_MOE, {"num_local_experts": 64}, "num_local_experts 64 is not understood: mixture"),
        (QWEN_MOE, {"n_shared_experts": 1}, "n_shared_experts 1 is not understood: mixture"),
        (QWEN_MOE, {"kv_lora_rank": 512}, "kv_lora_rank 512 is not understood: latent attention"),
        (QWEN_MOE, {"mlp_only_layers": [32]}, "mlp_only_layers must be a list of layers from 0 to"),
        (QWEN_MOE, {"mlp_only_layers": [True]}, "mlp_only_layers must be a list of layers"),
        (QWEN_MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step must be a whole number"),
        (GLM_MOE, {"first_k_dense_replace": -1}, "first_k_dense_replace must be a whole number"),
        (GLM_MOE, {"moe_layer_freq": 2}, "moe_layer_freq 2 is not understood: mixture"),
        (GLM_MOE, {"index_topk": 2048}, "index_topk 2048 is not understood: sparse"),
        (QWEN_MOE, {"decoder_sparse_steps": 2}, "(nearest: decoder_sparse_step)"),
    ],
)  # fmt: skip
def test_mixtures_that_are_refused(config: dict, changes: dict, message: str):
    assert message in refusal({**config, **changes})


@pytest.mark.parametrize(
    ("key", "config"),
    [("num_experts", QWEN_MOE), ("moe_intermediate_size", QWEN_MOE),
     ("num_experts_per_tok", QWEN_MOE), ("first_k_dense_replace", GLM_MOE),
     ("n_shared_experts", GLM_MOE)],
)  # fmt: skip
def test_sizes_of_experts_are_never_guessed(key: str, config: dict):
    assert f"{key} is missing" in refusal({k: v for k, v in config.items() if k != key})


def test_gpt_oss_counts_may_only_agree():
    config = {
        "model_type": "gpt_oss", **SIZES, "num_local_experts": 32, "num_experts_per_tok": 4,
        "experts_per_token": 4,
    }  # fmt: skip
    mixer = parse_config(config).attention[1].body
    assert (mixer.qkv_bias, mixer.output_bias, mixer.sinks, mixer.window) == (1, 1, 1, 128)
    assert "experts_per_token 2" in refusal({**config, "experts_per_token": 2})


def test_remote_code():
    pointer = {"AutoConfig": "configuration_x.XConfig"}
    message = refusal(having(model_type="xmodel", auto_map=pointer))
    assert "model_type 'xmodel' is not understood: points at remote code (auto_map)" in message
    # A known type is read as the library's own class, and says so.
    config = having(auto_map=pointer)
    assert parse_config(config) == parse_config(LLAMA)
    assert caveats(config) == ("auto_map points at remote code: ignored, read as a plain 'llama'",)
    assert parse_config(having(architectures=())) == parse_config(LLAMA)
    assert "architectures 'XForCausalLM'" in refusal(having(architectures=["XForCausalLM"]))


def test_draft_layers_are_mentioned():
    assert caveats(LLAMA) == ()
    (note,) = caveats(having(num_nextn_predict_layers=1))
    assert note == "num_nextn_predict_layers 1: draft layers are counted apart"


def test_missing_and_misspelt_keys():
    misspelt = without("num_hidden_layers", num_hidden_layer=32)
    assert "num_hidden_layers is missing (found num_hidden_layer)" in refusal(misspelt)
    renamed = without("hidden_size", n_embd=4096)
    assert "hidden_size is missing (found n_embd)" in refusal(renamed)
    assert "model_type is missing (found model_typ)" in refusal(
        without("model_type", model_typ="llama")
    )
    # Silently one kv head per head, or an untied head, would be the worst answers.
    for wrong, right in (
        ("num_key_value_head", "num_key_value_heads"),
        ("num_kv_heads", "num_key_value_heads"),
    ):
        message = refusal(without("num_key_value_heads", **{wrong: 8}))
        assert f"unknown key '{wrong}' (nearest: {right})" in message
    assert "(nearest: tie_word_embeddings)" in refusal(having(tie_word_embedding=True))
    assert "(nearest: silu" in refusal(having(hidden_act="silo"))


@pytest.mark.parametrize("key", sorted(SIZES))
@pytest.mark.parametrize(
    "value",
    [0, -1, True, False, 4096.0, "4096", [4096], {}, math.nan, math.inf, 10**10, 10**400, ""],
)
def test_wrong_numbers(key: str, value: Any):
    assert f"{key} must be a whole number from 1 to " in refusal(having(**{key: value}))


@pytest.mark.parametrize("key", sorted(set(SIZES) - {"num_key_value_heads"}))
def test_missing_numbers(key: str):
    assert f"{key} is missing" in refusal(without(key))
    assert f"{key} must be a whole number" in refusal(having(**{key: None}))


def test_contradictions():
    message = refusal(having(num_key_value_heads=7))
    assert "num_attention_heads 32 is not a multiple of num_key_value_heads 7" in message
    assert "(nearest: 8)" in message
    message = refusal(having(hidden_size=4100))
    assert "hidden_size 4100 is not a multiple of num_attention_heads 32" in message
    assert "v_head_dim 64" in refusal(having(v_head_dim=64))
    assert "tie_word_embeddings must be true or false" in refusal(having(tie_word_embeddings="no"))
    assert "attention_bias must be true or false" in refusal(having(attention_bias=1))


# ---- Formats ----


def compressed(weights: Any, inputs: Any = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **more}


@pytest.mark.parametrize(
    ("quantization", "formats"),
    [
        (None, "bf16"),
        ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}, "fp8"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4/bf16/bf16"),
        ({"quant_method": "mxfp4"}, "mxfp4/bf16/bf16"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4/nvfp4/fp8"),
        (compressed({"num_bits": 8, "type": "int"}, {"num_bits": 8, "type": "int"}),
         "int8/int8/fp8"),
        (compressed({"num_bits": 4, "type": "int", "group_size": 128}), "int4/bf16/bf16"),
        (compressed({"num_bits": 8, "type": "float"}, {"num_bits": 8, "type": "float"},
                    kv_cache_scheme={"num_bits": 8, "type": "float"}, ignore=["lm_head"]), "fp8"),
    ],
)  # fmt: skip
def test_formats_are_read(quantization: Any, formats: str):
    config = having(quantization_config=quantization)
    assert str(suggested_precision(config)) == formats
    assert parse_config(config) == parse_config(LLAMA)


@pytest.mark.parametrize(
    ("quantization", "reason"),
    [
        ("fp8", "must be an object"),
        ({}, "quant_method null is not understood"),
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not understood"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "bits 3 is not understood"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "group_size 32"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.self_attn"]},
         "only one format for all layers"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'"),
        (compressed({"num_bits": 3, "type": "int"}), "num_bits 3"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {}, "b": {}}}, "one group"),
    ],
)  # fmt: skip
def test_formats_that_are_refused(quantization: Any, reason: str):
    assert reason in refusal(having(quantization_config=quantization))


def apart(method: str = "mxfp4", *left_out: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": method, "modules_to_not_convert": list(left_out), **more}


ATTENTION = "model.layers.*.self_attn"


@pytest.mark.parametrize(
    ("config", "quantization", "formats"),
    [
        (QWEN_MOE, apart("fp8", "lm_head", "model.layers.0.mlp.gate"), "fp8"),
        (QWEN_MOE, apart("fp8", "model.layers.0.input_layernorm", "...truncated"), "fp8"),
        (QWEN_MOE, apart("fp8", "gate", "e_score_correction_bias"), "fp8"),
        (QWEN_MOE, apart("mxfp4", ATTENTION, "model.layers.*.mlp.router", "lm_head"),
         "bf16+mxfp4/bf16"),
        (QWEN_MOE, apart("modelopt", ATTENTION + "*", quant_algo="NVFP4"), "bf16+nvfp4"),
        (LLAMA, apart("fp8", ATTENTION), "bf16+fp8"),
        (LLAMA, apart("modelopt", ATTENTION, "...truncated", quant_algo="NVFP4"), "bf16+nvfp4"),
        (LLAMA, apart("fp8", *(f"model.layers.{i}.self_attn*" for i in (0, 1, 10, 11)),
                      "...truncated"), "bf16+fp8"),
        (QWEN_MOE, apart("modelopt", ATTENTION, quant_algo="NVFP4", kv_cache_quant_algo="FP8"),
         "bf16/bf16/fp8+nvfp4"),
        (QWEN_MOE, apart("fp8", *(f"model.layers.{i}.self_attn" for i in range(32))),
         "bf16+fp8"),
        (QWEN_MOE, apart("fp8", *(f"model.layers.{i}.self_attn.{p}_proj" for i in range(32)
                                  for p in "qkvo")), "bf16+fp8"),
        (QWEN_MOE, compressed({"num_bits": 8, "type": "float"}, {"num_bits": 8, "type": "float"},
                              ignore=["re:.*lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"]),
         "bf16+fp8"),
        (GLM_MOE, apart("fp8", ATTENTION, "model.layers.*.mlp.shared_experts",
                        *(f"model.layers.{i}.mlp.{p}_proj" for i in range(3)
                          for p in ("gate", "up", "down"))), "bf16+fp8"),
        (LLAMA4, apart("fp8", "language_model.model.layers.*.self_attn",
                       "vision_model.model.layers.0.mlp.fc1", "multi_modal_projector",
                       "language_model.model.layers.*.feed_forward.shared_expert",
                       "language_model.model.layers.*.feed_forward.gate_up_proj",
                       "language_model.model.layers.*.feed_forward.down_proj"), "bf16+fp8"),
    ],
    ids=range(14),
)  # fmt: skip
def test_formats_of_mixtures(config: dict, quantization: dict, formats: str):
    config = {**config, "quantization_config": quantization}
    model = parse_config(config)
    assert str(suggested_precision(config, model=model)) == formats


@pytest.mark.parametrize(
    ("config", "quantization", "reason"),
    [
        (LLAMA, apart("fp8", "model.layers.*.mlp"), "only one format for all layers"),
        (LLAMA, apart("fp8", *(f"model.layers.{i}.self_attn" for i in (0, 2)), "...truncated"),
         "the list is cut"),
        (LLAMA, apart("fp8", "model.layers.0.self_attn.o_proj", "...truncated"), "the list is cut"),
        (LLAMA, apart("fp8", *(f"model.layers.{i}.self_attn" for i in range(31))),
         "31 of 32 attention layers are whole"),
        (QWEN_MOE, apart("fp8", "model.layers.0.self_attn"), "1 of 32 attention layers are whole"),
        (QWEN_MOE, apart("fp8", "model.layers.0.self_attn", "...truncated"), "the list is cut"),
        (QWEN_MOE, apart("fp8", "model.layers.*.self_attn.o_proj"), "0 of 32 attention"),
        (QWEN_MOE, apart("fp8", "model.layers.0.mlp.experts.0"), "experts.0' is left out"),
        (QWEN_MOE, apart("fp8", "model.layers.9.mlp"), "mlp' is left out"),
        (GLM_MOE, apart("fp8", ATTENTION), "0 of 29 shared layers are whole"),
        (GLM_MOE, apart("fp8", "model.layers.*.mlp.shared_experts"), "0 of 32 attention layers"),
    ],
    ids=range(11),
)  # fmt: skip
def test_mixed_formats_that_are_refused(config: dict, quantization: dict, reason: str):
    assert reason in refusal({**config, "quantization_config": quantization})


# ---- Files ----


def test_a_file_a_folder_and_a_catalogue_name(tmp_path):
    folder = tmp_path / "my-network"
    folder.mkdir()
    file = folder / "config.json"
    file.write_text(json.dumps(LLAMA))
    for path in (folder, file, str(folder), str(file), f"{folder}/"):
        entry = load_model(path)
        assert entry.name == "my-network"
        assert entry.model == parse_config(LLAMA)
        assert not entry.published
    same = tmp_path / "other.json"
    same.write_text(json.dumps(LLAMA, indent=1))
    assert load_model(same).name == "other"
    assert load_model(same).digest == entry.digest
    same.write_text(json.dumps(having(vocab_size=128000)))
    assert load_model(same).digest != entry.digest


def test_a_folder_does_not_shadow_the_catalogue(tmp_path, monkeypatch):
    (tmp_path / "llama-3.1-8b").mkdir()
    (tmp_path / "llama-3.1-8b" / "config.json").write_text(json.dumps(having(vocab_size=7)))
    monkeypatch.chdir(tmp_path)
    assert load_model("llama-3.1-8b").model.vocabulary == 128256
    assert load_model("./llama-3.1-8b").model.vocabulary == 7


TEXT = json.dumps(LLAMA)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 100,
        b"[]",
        b"null",
        b"{",
        TEXT[:-10].encode(),
        TEXT.encode("utf-16"),
        TEXT.encode("utf-32"),
        b"\xff\xfe\xfa" + TEXT.encode(),
        TEXT.replace("4096", "NaN").encode(),
        TEXT.replace("4096", "1e999").encode(),
        TEXT.replace("4096", "9" * 5000).encode(),
        TEXT.replace("{", '{"vocab_size": 1, ').encode(),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000),
        b"[" * 100_000,
        b'{"model_type": "\\ud800"}',
        b'{"model_type": "a\\u0000\\nb"}',
        json.dumps({f"k{i}": i for i in range(5000)}).encode(),
        b" " * 5_000_000,
    ],
    ids=range(19),
)
def test_hostile_files(tmp_path, data: bytes):
    file = tmp_path / "config.json"
    file.write_bytes(data)
    with pytest.raises(InputError) as caught:
        load_model(file)
    assert "config.json" in line(caught.value)


def test_a_byte_order_mark_is_no_error(tmp_path):
    file = tmp_path / "config.json"
    file.write_bytes(TEXT.encode("utf-8-sig"))
    assert load_model(file).model == parse_config(LLAMA)


@pytest.mark.parametrize(
    "name",
    ["", " ", "lama", "./none", "none.json", "a\0b", "a\0b.json", "x" * 10_000, "/", "~nobody/x",
     None, 7, b"llama", "\n", "llama-70b"],
    ids=range(15),
)  # fmt: skip
def test_names_that_mean_nothing(tmp_path, monkeypatch, name: Any):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as caught:
        load_model(name)
    line(caught.value)


def test_unknown_names_list_the_nearest():
    with pytest.raises(InputError, match="unknown model 'llama-3.2-70b'.*llama-3.1-70b"):
        load_model("llama-3.2-70b")
    with pytest.raises(InputError, match="ambiguous: llama-2-70b, llama-3.1-70b, llama-3.3-70b"):
        load_model("llama-70b")


# ---- Anything at all ----

KEYS = st.sampled_from(
    [
        *LLAMA, "head_dim", "tie_word_embeddings", "attention_bias", "mlp_bias", "layer_types",
        "sliding_window", "use_sliding_window", "quantization_config", "auto_map", "text_config",
        "num_experts", "n_embd", "v_head_dim", "word_embed_proj_dim", "use_qk_norm",
        "num_local_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size",
        "n_shared_experts", "first_k_dense_replace", "decoder_sparse_step", "mlp_only_layers",
        "moe_layers", "no_rope_layers", "interleave_moe_layer_step", "attention_chunk_size",
        "sliding_window_pattern", "max_window_layers", "intermediate_size_mlp",
    ]
)  # fmt: skip
JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 70)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from([*ARCHITECTURES, "full_attention", "fp8", "awq"])
    | st.just(5000).map(lambda digits: 10**digits),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["quant_method", "bits", "config_groups", "weights", "ignore"])
            | st.text(max_size=10),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
EXPERTS = {
    "num_experts": 64, "num_local_experts": 64, "n_routed_experts": 64, "num_experts_per_tok": 4,
    "moe_intermediate_size": 1000, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "intermediate_size_mlp": 3000,
}  # fmt: skip
quick = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def parses_or_says_why(config: Any) -> None:
    try:
        model = parse_config(config)
    except InputError as error:
        assert line(error).startswith("config.json: ")
        return
    assert isinstance(model, Model)
    assert parameters(model) > 0
    assert isinstance(caveats(config), tuple)
    str(suggested_precision(config))


@quick
@given(
    kind=st.sampled_from(sorted(ARCHITECTURES)),
    changes=st.dictionaries(KEYS | st.text(max_size=12), JUNK, max_size=4),
    dropped=st.sets(KEYS, max_size=2),
)
def test_changed_configurations(kind: str, changes: dict[str, Any], dropped: set[str]):
    config = {"model_type": kind, **SIZES, **EXPERTS, **changes}
    if ARCHITECTURES[kind].routed is None:
        config = {k: v for k, v in config.items() if k not in EXPERTS or k in changes}
    else:
        named = {*ARCHITECTURES[kind].reads(), *changes, "model_type", "text_config"}
        config = {k: v for k, v in config.items() if k in named}
    config = {k: v for k, v in config.items() if k not in dropped}
    if ARCHITECTURES[kind].nested is not None:
        config = {"model_type": kind, "text_config": {**config, "model_type": f"{kind}_text"}}
    parses_or_says_why(config)


@quick
@given(JUNK)
def test_junk_for_a_configuration(config: Any):
    parses_or_says_why(config)


@quick
@given(where=st.integers(0, len(TEXT) - 1), byte=st.integers(0, 255), cut=st.booleans())
def test_damaged_files(tmp_path, where: int, byte: int, cut: bool):
    data = TEXT.encode()
    data = data[:where] if cut else data[:where] + bytes([byte]) + data[where + 1 :]
    file = tmp_path / "config.json"
    file.write_bytes(data)
    try:
        entry = load_model(file)
    except InputError as error:
        assert "config.json" in line(error)
    else:
        assert isinstance(entry.model, Model)


def test_unknown_networks_are_dense_only_where_asked(tmp_path: pathlib.Path):
    odd = {
        "model_type": "odd_hybrid",
        "layer_types": ["linear_attention"],
        "num_experts": 8,
        **SIZES,
    }
    file = tmp_path / "odd.json"
    file.write_text(json.dumps(odd), encoding="utf-8")
    with pytest.raises(InputError, match="'odd_hybrid' is not understood.*; or --assume-dense$"):
        load_model(file)
    found = load_model(file, assume_dense=True)
    assert found.model == parse_config({"model_type": "llama", **SIZES})
    assert found.notes == (
        "model_type 'odd_hybrid' is read as a plain dense decoder, as asked: "
        "ignored are layer_types, num_experts",
    )
    # What is understood is read as it is, asked or not.
    assert load_model("mixtral-8x7b", assume_dense=True).model.is_mixture


def test_keys_that_count_are_named_and_others_are_not():
    more = {
        "qk_rope_head_dim": 64, "attn_output_gate": True, "linear_attn_config": {"heads": 8},
        "num_kv_heads": 8, "rope_theta": 1e6, "bos_token_id": 1, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    plain, note = as_dense({"model_type": "odd", **SIZES, **more}, "config.json")
    assert parse_config(plain) == parse_config({"model_type": "llama", **SIZES})
    names = "qk_rope_head_dim, attn_output_gate, linear_attn_config, num_kv_heads"
    assert note.endswith(f"as asked: ignored are {names}")


def test_a_dense_decoder_beside_an_encoder_keeps_what_the_whole_says():
    whole = {"model_type": "odd", "tie_word_embeddings": True, "vision_config": {"depth": 8}}
    plain, _ = as_dense({**whole, "text_config": {**SIZES, "dtype": "bfloat16"}}, "config.json")
    assert (
        plain == {"model_type": "llama", "tie_word_embeddings": True, "dtype": "bfloat16"} | SIZES
    )


def test_networks_without_sizes_are_not_dense_either(tmp_path: pathlib.Path):
    file = tmp_path / "odd.json"
    sizes = {key: value for key, value in SIZES.items() if key != "intermediate_size"}
    file.write_text(json.dumps({"model_type": "odd", **sizes}), encoding="utf-8")
    with pytest.raises(InputError, match="plain dense decoder: intermediate_size missing"):
        load_model(file, assume_dense=True)
