"""Encoder towers, and serving prompts with images."""

import json
from importlib.resources import files

import pytest

from perfmodel.formats import precision
from perfmodel.models.beside import read_encoder
from perfmodel.models.catalogue import load_model
from perfmodel.models.encoder import (
    Encoder,
    encoder_operators,
    encoder_parameters,
    encoder_weight_bytes,
)
from perfmodel.models.transformer import parameters
from perfmodel.operators import Matmul, total
from perfmodel.step import Shard

BF16 = precision("bf16")


def tower(name: str) -> Encoder:
    encoder = load_model(name).encoder
    assert encoder is not None
    return encoder


# ---- Towers ----


@pytest.mark.parametrize(
    ("name", "count", "tokens"),
    [
        ("gemma-3-27b", 423_060_336, 256),
        ("llama-4-scout", 871_932_416, 144),
        ("llama-4-maverick", 871_932_416, 144),
        ("kimi-k2.5", 471_143_920, 1024),
        ("kimi-k3", 447_358_976, 1024),
        ("qwen3.5-27b", 460_730_096, 576),
        ("qwen3.5-35b-a3b", 446_571_248, 576),
        ("qwen3.5-397b-a17b", 456_010_480, 576),
    ],
)
def test_towers_that_checkpoints_include(name: str, count: int, tokens: int) -> None:
    assert encoder_parameters(tower(name)) == count
    assert tower(name).tokens == tokens


@pytest.mark.parametrize(
    ("name", "checkpoint", "scalars"),
    [("gemma-4-31b-nvfp4", 31_273_088_876, 60), ("gemma-4-26b-a4b", 25_805_936_206, 30)],
)
def test_gemma_4_fills_its_checkpoint(name: str, checkpoint: int, scalars: int) -> None:
    # safetensors.total of google/gemma-4-31B-it and -26B-A4B-it; a scalar a layer is not counted.
    entry = load_model(name)
    assert parameters(entry.model) + encoder_parameters(tower(name)) + scalars == checkpoint
    assert tower(name).tokens == 280 and tower(name).patches == 280 * 9


def test_a_copy_without_the_sizes_of_its_tower_has_none() -> None:
    text = files("perfmodel.models").joinpath("catalog/kimi_k3.json").read_text()
    config = json.loads(text)
    assert read_encoder(config) is not None
    del config["vision_config"]["vt_hidden_size"]
    assert read_encoder(config) is None


def test_an_image_is_seen_whole() -> None:
    encoder = tower("kimi-k2.5")
    ops = {op.name: op for op in encoder_operators(encoder, 2, 1024, Shard(), BF16)}
    # 4,096 patches of each of two images, all pairs, 16 heads of 72.
    assert ops["encoder_attention"].flops() == 2 * 2 * 16 * 4096**2 * 2 * 72
    matrices = 588 * 1152 + 27 * (4 * 1152**2 + 2 * 1152 * 4304)
    work = sum(op.count * op.flops() for op in ops.values() if isinstance(op, Matmul))
    projector = 4608 * 4608 + 4608 * 7168
    assert work == 2 * 2 * (4096 * matrices + 1024 * projector)


def test_a_gate_and_heads_of_their_own_width() -> None:
    ops = {
        op.name: op for op in encoder_operators(tower("gemma-4-31b-nvfp4"), 1, 280, Shard(), BF16)
    }
    assert ops["encoder_up"].flops() == 2 * 2520 * 2 * 4304 * 1152
    assert ops["encoder_down"].flops() == 2 * 2520 * 4304 * 1152
    wide = {op.name: op for op in encoder_operators(tower("kimi-k3"), 1, 1024, Shard(), BF16)}
    assert wide["encoder_qkv"].flops() == 2 * 4096 * 3 * 1536 * 1024
    assert wide["encoder_attention"].flops() == 2 * 12 * 4096**2 * 2 * 128


def test_ranks_share_heads_and_columns_and_no_more() -> None:
    encoder = tower("kimi-k2.5")

    def attention(shard: Shard) -> float:
        ops = encoder_operators(encoder, 1, 1024, shard, BF16)
        return total(tuple(op for op in ops if op.name == "encoder_attention"), "flops")

    assert 4 * attention(Shard(4)) == attention(Shard())
    # 16 heads over 32 ranks are one on each, and over 12 ranks two on some.
    assert attention(Shard(32)) == attention(Shard(16)) == attention(Shard()) / 16
    assert attention(Shard(12)) == attention(Shard(8))
    # Attention groups encode images of their own.
    assert attention(Shard(8, attention_groups=8)) == attention(Shard())
    layers = 2 * 27 * (4 * 1152**2 + 2 * 1152 * 4304)
    assert encoder_weight_bytes(encoder, Shard()) == 2 * encoder_parameters(encoder)
    saved = encoder_weight_bytes(encoder, Shard()) - encoder_weight_bytes(encoder, Shard(8))
    assert saved == layers * 7 // 8
