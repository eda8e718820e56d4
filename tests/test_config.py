"""Configurations written by strangers: each is a network or one clear line."""

import json
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perfmodel.errors import InputError
from perfmodel.models.catalogue import load_model
from perfmodel.models.config import ARCHITECTURES, caveats, parse_config
from perfmodel.models.quantization import suggested_precision
from perfmodel.models.transformer import Model, parameters

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
        ("deepseek_v3", {"n_routed_experts": 256, "kv_lora_rank": 512},
         "mixture of experts, latent attention"),
        ("mixtral", {"num_local_experts": 8}, "mixture of experts"),
        ("nemotron_h", {"mamba_num_heads": 64}, "state-space, linear or recurrent layers"),
        ("gpt_oss", {"layer_types": ["sliding_attention"]}, "layers of several kinds"),
        ("llama4", {"text_config": {"num_local_experts": 16}},
         "several modalities, mixture of experts"),
        ("falcon", {"parallel_attn": True}, "attention beside the feed-forward layer"),
    ],
)  # fmt: skip
def test_other_architectures_are_named_with_the_reason(kind: str, keys: dict, reasons: str):
    message = refusal({"model_type": kind, **SIZES, **keys})
    expected = f"config.json: model_type '{kind}' is not understood: {reasons}; known: "
    assert message.startswith(expected)
    assert all(name in message for name in ARCHITECTURES)


def test_the_nearest_architecture_comes_first():
    assert "known: qwen3, " in refusal(having(model_type="qwen3_moe"))
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


def test_active_windows_are_refused_and_idle_ones_are_not():
    mistral = {"model_type": "mistral", **SIZES, "max_position_embeddings": 32768}
    message = refusal({**mistral, "sliding_window": 4096})
    assert "sliding_window 4096 is not understood" in message
    assert "(nearest: full attention, sliding_window null)" in message
    # Left out, it is 4096 in this class; null is full attention.
    assert "sliding_window 4096, its class default, is not understood" in refusal(mistral)
    full = parse_config({**mistral, "sliding_window": None})
    assert parse_config({**mistral, "sliding_window": 4096, "use_sliding_window": False}) == full
    assert parse_config({**mistral, "sliding_window": 32768}) == full  # never acts
    qwen = {"model_type": "qwen2", **SIZES, "sliding_window": 4096}
    parse_config(qwen)  # its class leaves windows off
    assert "sliding_window 4096" in refusal({**qwen, "use_sliding_window": True})
    assert "use_sliding_window true" in refusal(having(use_sliding_window=True))
    assert "sliding_window must be a whole number" in refusal({**mistral, "sliding_window": -1})


def test_layer_types():
    full = ["full_attention"] * 32
    assert parse_config(having(layer_types=full)) == parse_config(LLAMA)
    mixed = ["sliding_attention", *full[1:]]
    assert "layer_types has 'sliding_attention'" in refusal(having(layer_types=mixed))
    assert "names 31 layers, num_hidden_layers says 32" in refusal(having(layer_types=full[1:]))
    assert "layer_types must be a list" in refusal(having(layer_types="full_attention"))


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
    assert note == "num_nextn_predict_layers 1: draft layers are not counted"


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
    assert "(nearest: silu)" in refusal(having(hidden_act="silo"))


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
    config = {"model_type": kind, **SIZES, **changes}
    parses_or_says_why({k: v for k, v in config.items() if k not in dropped})


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
