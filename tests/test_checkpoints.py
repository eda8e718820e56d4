"""Counts against whole checkpoints: what their records and headers add up to."""

import pytest

from perfmodel.formats import precision
from perfmodel.models.catalogue import load_model
from perfmodel.models.draft import draft_parameters
from perfmodel.models.transformer import (
    head_operators,
    kv_bytes,
    layer_operators,
    parameters,
    sequence_bytes,
)
from perfmodel.operators import Attention, Matmul
from perfmodel.step import Chunk, Shard, Step, causal_pairs

BF16 = precision("bf16")
HASHED = 3 * 129280 * 6
"""Places in DeepSeek-V4's tables of six experts by token, of three layers."""


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("glm-5.2", 753_329_940_480),
        ("glm-5", 753_864_139_008),
        ("deepseek-v4-pro", 1_598_839_674_782 - HASHED),
        ("deepseek-v4-flash", 284_332_240_471 + 6_610_048_891),
    ],
)
def test_decoder_and_draft_layer_are_all_that_a_checkpoint_holds(name: str, total: int):
    entry = load_model(name)
    assert entry.draft is not None
    assert parameters(entry.model) + draft_parameters(entry.draft) == total


def test_minimax_m3_fills_its_checkpoint_to_the_byte():
    entry = load_model("minimax-m3")
    assert entry.draft is not None
    # 57 layers and the draft layer have a router with corrections in 32 bits.
    wide = 58 * (128 * 6144 + 128)
    count = parameters(entry.model) + draft_parameters(entry.draft)
    # Vision: 32 layers of 1280 and 5120 with biases, patches of 2 × 14 × 14 × 3 in 32 bits, a norm;
    # products 1280 × 6144 × 6144, then four tokens' 24576 × 6144 × 6144.
    tower = 32 * (4 * (1280**2 + 1280) + 2 * 1280 * 5120 + 5120 + 1280 + 4 * 1280) + 2 * 1280
    patches = 1280 * 3 * 2 * 14 * 14
    products = (1280 + 24576) * 6144 + 2 * 6144**2 + 4 * 6144
    stored = 2 * (count + wide + tower + products) + 4 * patches
    assert stored == 869_157_697_024


def test_compressors_hold_the_tokens_of_entries_to_come():
    model = load_model("deepseek-v4-flash").model
    # Values and weights in 32 bits: 128 tokens of 512, or 8 of 2 · 512 and of 2 · 128.
    states = 20 * 128 * 2 * 512 * 4 + 21 * 8 * 2 * (1024 + 256) * 4
    assert kv_bytes(model, BF16, 8192) == 61_997_056
    assert sequence_bytes(model, BF16, 8192, Shard()) == 61_997_056 + states == 74_203_136
    assert sequence_bytes(model, BF16, 2**20, Shard()) - kv_bytes(model, BF16, 2**20) == states
    plain = load_model("deepseek-v3").model
    assert sequence_bytes(plain, BF16, 8192, Shard(8)) == kv_bytes(plain, BF16, 8192, Shard(8))


@pytest.mark.parametrize(
    ("name", "published", "layers"),
    [
        ("deepseek-v4-flash", 231_125_253_357_568, 21),
        ("deepseek-v4-pro", 861_614_907_000_000, 30),
    ],
)
def test_work_of_a_prompt_is_that_of_a_public_ledger(name: str, published: int, layers: int):
    """Products of 8,192 tokens. The ledger scores entries that are still to come as well."""
    model = load_model(name).model
    tokens = 8192
    chunk = Chunk(tokens, causal_pairs(tokens, 0), tokens, new=tokens)
    step = Step(0, 1, chunk=chunk)
    ops = (
        *layer_operators(model, step, Shard(), BF16),
        *head_operators(model, step, Shard(), BF16),
    )
    work = sum(float(o.count * o.flops()) for o in ops if isinstance(o, Matmul | Attention))
    ahead = tokens * (tokens // 4) - sum(place // 4 for place in range(1, tokens + 1))
    work += layers * 2 * 64 * 128 * ahead
    assert work == pytest.approx(published, rel=1e-6)
