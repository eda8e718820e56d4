"""Networks with recurrent layers: counts, states, operators and their work, all by hand."""

import dataclasses

import jax
import numpy as np
import pytest

from perfmodel.catalog import parse_json
from perfmodel.chips import load_chip
from perfmodel.errors import InputError
from perfmodel.formats import precision
from perfmodel.machine import ContextScans, Machine, Rank, Scans, scan_usage
from perfmodel.models.catalogue import load_model
from perfmodel.models.config import parse_config, sublayer_order
from perfmodel.models.delta import GatedDelta, KimiDelta
from perfmodel.models.draft import draft_parameters
from perfmodel.models.mamba import Mamba2
from perfmodel.models.mlp import MixtureOfExperts, Mlp
from perfmodel.models.recurrent import Recurrent
from perfmodel.models.transformer import (
    kv_bytes,
    kv_bytes_per_token,
    parameters,
    sequence_bytes,
    weight_bytes,
)
from perfmodel.operators import Collective, Matmul, Scan, Vector
from perfmodel.step import Chunk, Shard, Step, causal_pairs

BF16 = precision("bf16")
HYBRIDS = (
    "nemotron-h-56b", "nemotron-3-nano-30b-a3b", "nemotron-3-super-120b-a12b",
    "nemotron-3-ultra-550b-a55b", "qwen3-next-80b-a3b", "qwen3.5-27b", "qwen3.5-35b-a3b",
    "qwen3.5-397b-a17b", "kimi-k3",
)  # fmt: skip
BODIES = (
    Mamba2(16, 4, 32, 8, 4, state_bytes_each=4, chunk=128),
    GatedDelta(8, 4, 16, 16, 4, state_bytes_each=4),
    KimiDelta(8, 8, 16, 16, 4, state_bytes_each=4, decay_rank=16),
)


def step_of(decoding: int, tokens: int = 0) -> Step:
    """Returns a step of decoding sequences, and one whole prompt where it has tokens."""
    chunk = Chunk(tokens, causal_pairs(tokens, 0), tokens, new=tokens) if tokens else None
    return Step(decoding, 1000, chunk=chunk)


def scans(ops: tuple) -> list[Scan]:
    return [op for op in ops if isinstance(op, Scan)]


# ------------------------------------------------------------------------------------------- counts


def test_nemotron_h_56b_is_counted_by_hand():
    # 54 of Mamba-2: z and x of 16384, B and C of 8 · 256 each, 256 heads; a convolution of 4 and a
    # bias over x, B, C; decay, time step bias and skip a head; a norm of 16384.
    mamba = 8192 * (2 * 16384 + 2 * 8 * 256 + 256) + 16384 * 8192
    mamba += (16384 + 2 * 8 * 256) * 5 + 3 * 256 + 16384
    attention = 8192 * (2 * 64 + 2 * 8) * 128
    mlp = 2 * 8192 * 32768
    count = 54 * mamba + 10 * attention + 54 * mlp + 119 * 8192 + 2 * 131072 * 8192
    model = load_model("nemotron-h-56b").model
    assert parameters(model) == count == 56_324_350_464
    assert [block.count for block in model.blocks] == [10, 54, 54]


def test_qwen3_next_is_counted_by_hand():
    # q, k of 2048, v and z of 4096, b and a of 32; full attention has a gate as wide as queries.
    delta = 2048 * (2 * 2048 + 2 * 4096 + 2 * 32) + 4096 * 2048
    delta += (2 * 2048 + 4096) * 4 + 2 * 32 + 128
    attention = 2048 * 256 * (2 * 16 + 2 * 2 + 16) + 2 * 256
    experts = 513 * 3 * 2048 * 512 + 512 * 2048 + 2048
    count = 36 * delta + 12 * attention + 48 * experts + 97 * 2048 + 2 * 151936 * 2048
    model = load_model("qwen3-next-80b-a3b").model
    assert parameters(model) == count == 79_674_391_296
    # The draft layer of the original checkpoint, which its file does not mention.
    draft = attention + experts + 2 * 2048 + 2 * 2048**2 + 3 * 2048
    assert count + draft == 81_324_862_720


def test_kimi_k3_is_counted_by_hand():
    wide = 96 * 128
    delta = 7168 * (5 * wide + 96 + 128) + 128 * wide + 3 * wide * 4 + 96 + wide + 128
    latent = 7168 * (1536 + 576) + 1536 * 96 * 192 + 512 * 96 * 256 + 2 * wide * 7168 + 1536 + 512
    expert = 3 * 3584 * 3072
    experts = 896 * (expert + 7168 + 1) + 2 * 7168 * 3584 + 3584 + 3 * 7168 * 6144
    norms = (93 * 6 + 3) * 7168
    count = 69 * delta + 24 * latent + 3 * 7168 * 33792 + 92 * experts + norms
    count += 2 * 163840 * 7168
    entry = load_model("kimi-k3")
    assert parameters(entry.model) == count == 2_779_484_476_000
    # Tower: 27 layers of 1024 with 1536 for all heads and 4096 between, patches, 64 x 64 places,
    # a norm; a product of four patches, one to the hidden width, a norm. Decays have 128 places.
    tower = 27 * (4 * 1024 * 1536 + 2 * 1024 * 4096 + 2 * 1024) + 1024 * (588 + 4096 + 1)
    tower += 4096 * 4096 + 4096 * 7168 + 7168
    assert count + tower + 69 * 32 == 2_779_931_837_184
    # Routed experts alone in MXFP4.
    stored = 92 * 896 * expert * 17 / 32 + 2 * (count - 92 * 896 * expert)
    formats = precision("bf16", experts="mxfp4", expert_activations="bf16")
    assert weight_bytes(entry.model, formats) == stored
    assert str(entry.precision) == "bf16+mxfp4/bf16"


@pytest.mark.parametrize(
    ("name", "total", "beside"),
    [
        # (checkpoint, what it holds or leaves out beside decoder and draft layer)
        ("nemotron-3-super-120b-a12b", 123_611_012_096, -41 * 512),  # routers' corrections
        ("qwen3.5-397b-a17b", 403_397_928_944, 456_010_480),  # vision tower
        # The tower's last product alone differs: 4608 columns and a bias for each hidden one.
        ("qwen3.5-27b", 27_781_427_952, 456_010_480 + 4609 * (5120 - 4096)),
        ("qwen3.5-35b-a3b", 35_951_822_704, 456_010_480 + 4609 * (2048 - 4096)),
    ],
)
def test_checkpoints_hold_decoder_and_draft_layer(name: str, total: int, beside: int):
    entry = load_model(name)
    assert entry.draft is not None
    assert parameters(entry.model) + draft_parameters(entry.draft) + beside == total


def test_nemotron_3_nano_but_for_the_corrections_of_its_routers():
    assert parameters(load_model("nemotron-3-nano-30b-a3b").model) - 23 * 128 == 31_577_937_344


@pytest.mark.parametrize("name", HYBRIDS)
def test_order_names_every_sublayer_once(name: str):
    entry = load_model(name)
    counts = [entry.order.count(i) for i in range(len(entry.model.blocks))]
    assert counts == [block.count for block in entry.model.blocks]
    assert weight_bytes(entry.model, BF16) == 2 * parameters(entry.model)


def test_orders_are_those_of_the_files():
    kinds = {name: load_model(name) for name in ("qwen3-next-80b-a3b", "kimi-k3")}
    found = {
        name: [type(entry.model.blocks[i].body) for i in entry.order]
        for name, entry in kinds.items()
    }
    delta, experts = GatedDelta, MixtureOfExperts
    first = [delta, experts] * 3
    assert found["qwen3-next-80b-a3b"][:6] == first
    assert found["qwen3-next-80b-a3b"][6] is not delta
    assert found["kimi-k3"][:4] == [KimiDelta, Mlp, KimiDelta, MixtureOfExperts]
    # The last two layers both attend to all keys.
    assert KimiDelta not in found["kimi-k3"][-4:] and found["kimi-k3"][-6] is KimiDelta
    nano = load_model("nemotron-3-nano-30b-a3b")
    letters = "".join("*ME"[i] for i in nano.order)
    assert letters == "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"


# ------------------------------------------------------------------------------------------- states


def test_states_do_not_grow_with_the_sequence():
    # 45 layers of 64 heads of 128 x 128 in 32 bits, 3 tokens of 12288 channels in 16; 15 layers
    # keep 2 kv heads of 256.
    model = load_model("qwen3.5-397b-a17b").model
    state = 45 * (64 * 128 * 128 * 4 + 3 * 12288 * 2)
    assert 45 * 64 * 128 * 128 * 4 == 188_743_680
    assert kv_bytes_per_token(model, BF16) == 15 * 2 * 2 * 256 * 2 == 30_720
    for tokens in (0, 1, 4096, 262_144):
        assert sequence_bytes(model, BF16, tokens, Shard()) == state + 30_720 * tokens
    # Heads are cut over ranks; groups of ranks hold states of sequences of their own.
    assert sequence_bytes(model, BF16, 0, Shard(8)) == state / 8
    assert sequence_bytes(model, BF16, 0, Shard(16, attention_groups=4)) == state / 4
    assert kv_bytes(model, BF16, 100) == 3_072_000


def test_mamba_states_and_groups_past_their_number():
    # 23 layers: 64 heads of 128 x 64 in 32 bits, 3 tokens of 4096 + 2 · 8 · 128 channels.
    model = load_model("nemotron-3-nano-30b-a3b").model
    state = 23 * (64 * 128 * 64 * 4 + 3 * 6144 * 2)
    assert sequence_bytes(model, BF16, 0, Shard()) == state == 49_082_368
    # On 16 ranks each has one group of the 8.
    wide = 23 * (4 * 128 * 64 * 4 + 3 * (4 * 64 + 2 * 128) * 2)
    assert sequence_bytes(model, BF16, 0, Shard(16)) == wide


def test_kimi_states_are_in_32_bits():
    model = load_model("kimi-k3").model
    state = 69 * (96 * 128 * 128 * 4 + 3 * 3 * 12288 * 2)
    assert sequence_bytes(model, BF16, 0, Shard()) == state
    assert kv_bytes_per_token(model, BF16) == 24 * 576 * 2


# --------------------------------------------------------------------------------------------- work


def test_work_of_a_decode_step_by_hand():
    # Two tokens, a head's state of 32 x 8: decay, outer product and read are 5 · 256.
    (scan,) = scans(BODIES[0].operators(64, step_of(2), Shard(), BF16))
    assert scan.flops() == 2 * 16 * 5 * 32 * 8
    # x, B, C and time steps in, x out; states in and out.
    moved = 2 * (16 * 8 + 2 * 4 * 32 + 16 + 16 * 8)
    assert scan.memory_bytes() == 2 * (2 * 16 * 32 * 8 * 4 + moved)
    (scan,) = scans(BODIES[1].operators(64, step_of(3), Shard(), BF16))
    assert scan.flops() == 3 * 8 * 7 * 16 * 16
    assert scan.memory_bytes() == 3 * (2 * 8 * 16 * 16 * 4 + 2 * (4 * 4 * 16 + 2 * 8 + 8 * 16))


def test_work_of_a_prompt_in_chunks_by_hand():
    # 256 tokens, two chunks of 128: per head and chunk C·Bᵀ for a group of 4, times inputs, state
    # in and out, decay.
    decode, prompt = scans(BODIES[0].operators(64, step_of(2, 256), Shard(), BF16))
    chunk = 2 * 128 * 128 * 32 / 4 + 2 * 128 * 128 * 8 + 2 * 2 * 128 * 32 * 8 + 3 * 32 * 8
    assert (decode.phase, prompt.phase) == ("decode", "prefill")
    assert prompt.flops() == 2 * 16 * chunk
    # 128 tokens, two chunks of 64: four products with keys, two with values, an inverse.
    _, prompt = scans(BODIES[1].operators(64, step_of(2, 128), Shard(), BF16))
    square = 64 * 64 * 16
    chunk = 3 * 2 * square + 2 * 2 * square + 64**3 / 3 + 3 * 2 * 64 * 16 * 16 + 3 * 16 * 16
    assert prompt.flops() == pytest.approx(2 * 8 * chunk, rel=1e-12)
    # One state in and out, whatever the length.
    assert prompt.state_traffic() == 2 * 8 * 16 * 16 * 4


def test_chunks_do_the_work_of_the_recurrence():
    """The chunked form, as counted, is an exact rewriting of the recurrence."""
    rng = np.random.default_rng(0)
    n, width, tokens = 6, 5, 8
    keys = rng.normal(size=(tokens, n))
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    queries, values = rng.normal(size=(tokens, n)), rng.normal(size=(tokens, width))
    decay, rate = rng.uniform(0.5, 1, tokens), rng.uniform(size=tokens)
    state, expected = np.zeros((n, width)), []
    for t in range(tokens):
        state = decay[t] * state
        state = state + rate[t] * np.outer(keys[t], values[t] - keys[t] @ state)
        expected.append(queries[t] @ state)
    state, found, size = np.zeros((n, width)), [], 4
    for start in range(0, tokens, size):
        part = slice(start, start + size)
        k, q, v, b = keys[part], queries[part], values[part], rate[part, None]
        g = np.cumprod(decay[part])[:, None]
        ratio = np.tril(g / g.T)
        inverse = np.linalg.inv(np.eye(size) + np.tril(b * (k @ k.T) * ratio, -1))
        fresh = inverse @ (b * v) - inverse @ (b * g * k) @ state
        found.append((q * g) @ state + ((q @ k.T) * ratio) @ fresh)
        state = g[-1] * state + (k * (g[-1] / g)).T @ fresh
    assert np.concatenate(found) == pytest.approx(np.array(expected), rel=1e-9)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_weights_are_read_as_they_are_counted(body: Recurrent):
    for shard in (Shard(), Shard(4)):
        ops = body.operators(64, step_of(2), shard, BF16)
        read = sum(op.count * op.weight_traffic() for op in ops if isinstance(op, Matmul))
        stored = body.weight_bytes(64, BF16, shard)
        assert read == stored - 2 * body._vectors(*body._cut(shard))
    whole = body.weight_bytes(64, BF16, Shard())
    assert whole == 2 * (body.matrices(64) + body.vectors(64))
    assert all(float(part).is_integer() for part in body.parts(Shard(4)))
    assert not all(float(part).is_integer() for part in body.parts(Shard(32)))


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_ranks_share_the_recurrence(body: Recurrent):
    alone = scans(body.operators(64, step_of(4, 512), Shard(), BF16))
    cut = scans(body.operators(64, step_of(4, 512), Shard(4), BF16))
    for one, part in zip(alone, cut, strict=True):
        assert 4 * part.flops() == pytest.approx(one.flops(), rel=1e-12)
        assert 4 * part.state_traffic() == one.state_traffic()
    # A mixed step is the decode step and the prompt.
    (decode,) = scans(body.operators(64, step_of(4), Shard(), BF16))
    assert decode.flops() == alone[0].flops()


def test_experts_in_latent_space_by_hand():
    experts = MixtureOfExperts(
        8, 2, 48, gates=1, router_bias=1, shared=Mlp(96, gates=1), latent=16, latent_norm=1
    )
    count = 8 * 2 * 16 * 48 + 64 * 8 + 2 * 64 * 16 + 2 * 64 * 96
    assert experts.matrices(64) == count
    assert experts.vectors(64) == 8 + 16
    assert experts.idle(64) == 6 * 2 * 16 * 48
    assert experts.weight_bytes(64, BF16, Shard()) == 2 * (count + 8 + 16)
    # Products to latent width and back are on every rank.
    cut = 2 * (8 * 2 * 16 * 12 + 64 * 8 + 2 * 64 * 16 + 2 * 64 * 24 + 8 + 16)
    assert experts.weight_bytes(64, BF16, Shard(4)) == cut
    ops = {op.name: op for op in experts.operators(64, step_of(2), Shard(4), BF16)}
    up, down = ops["latent_down_projection"], ops["latent_up_projection"]
    assert isinstance(up, Matmul) and isinstance(down, Matmul)
    assert (up.columns, up.inner, down.columns, down.inner) == (16, 64, 64, 16)
    assert ops["expert_up_projection"].inner == 16
    # What is normed must be summed first, beside the shared result.
    reduce = ops["ffn_all_reduce"]
    assert isinstance(reduce, Collective) and reduce.width == 64 + 16


def test_residuals_are_read_by_every_sum():
    model = load_model("kimi-k3").model
    assert model.streams is not None
    (op,) = model.streams.operators(7168, model.sublayers, step_of(1), BF16)
    assert isinstance(op, Vector)
    # Layer 24 (from 0) reads two kept residuals and the running one before its attention, three
    # and the running one after.
    read = sum(-(-i // 12) + 1 for i in range(1, 93)) + sum(i // 12 + 2 for i in range(93)) + 9
    assert float(op.count * op.reads) == pytest.approx(read * 7168, rel=0.05)


# --------------------------------------------------------------------------------------------- time


def plain() -> Machine:
    """Returns an H100 whose recurrences reach bandwidth and peak, without latencies."""
    return dataclasses.replace(
        load_chip("h100").machine, scan=Scans(1, 1, 0), context_scan=ContextScans(1, 1, 0, 0)
    )


def test_a_step_waits_for_its_states():
    # 64 sequences of 32 heads of 128 x 128 in 32 bits, in and out, at 3.35 TB/s: 80 µs.
    scan = Scan("s", "decode/attention", "delta", "decode", 64, 1, 32, 128, 128, 4, 0, 0)
    found = float(scan_usage(scan, Rank(plain())).seconds)
    assert found == pytest.approx(2 * 64 * 32 * 128 * 128 * 4 / 3.35e12, rel=1e-3)
    # Measured under vLLM: 95 µs.
    fitted = float(scan_usage(scan, Rank(load_chip("h100").machine)).seconds)
    assert fitted == pytest.approx(95e-6, rel=0.05)


def test_chunks_of_a_prompt_follow_one_another():
    machine = dataclasses.replace(plain(), context_scan=ContextScans(1, 1, 1e-6, 3e-6))
    shape = {"heads": 2, "state": 128, "width": 128, "state_bytes": 4, "inputs": 0, "outputs": 0}
    scan = Scan(
        "s", "prefill/attention", "delta", "prefill", sequences=1, tokens=8192, chunk=64, **shape
    )
    found = float(scan_usage(scan, Rank(machine)).seconds)
    assert found == pytest.approx(1e-6 + 128 * 3e-6, rel=1e-3)
    # Nothing to do takes no time, and has a slope.
    seconds = jax.grad(
        lambda n: scan_usage(dataclasses.replace(scan, sequences=n), Rank(machine)).seconds
    )
    assert float(scan_usage(dataclasses.replace(scan, sequences=0), Rank(machine)).seconds) < 1e-15
    assert np.isfinite(float(seconds(0.0))) and float(seconds(8.0)) > 0


# ----------------------------------------------------------------------------------------- refusals


NEMOTRON = {
    "model_type": "nemotron_h", "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 100,
    "hybrid_override_pattern": "M-*-", "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 128, "max_position_embeddings": 4096, "conv_kernel": 4,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 32, "n_groups": 2,
    "chunk_size": 128, "mlp_hidden_act": "relu2",
}  # fmt: skip
QWEN = {
    "model_type": "qwen3_next", "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 100,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128,
    "max_position_embeddings": 4096, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (NEMOTRON | {"hybrid_override_pattern": "M-*"}, "names 3 layers, not 4"),
        (NEMOTRON | {"hybrid_override_pattern": "M-X-"}, "must be a text of letters"),
        (
            NEMOTRON | {"layers_block_type": ["mamba", "mlp", "mamba", "mlp"]},
            "name different layers",
        ),
        (NEMOTRON | {"layers_block_type": ["mamba", "rnn"]}, "must be a list of 'mamba'"),
        (NEMOTRON | {"hybrid_override_pattern": "----"}, "no layer that mixes tokens"),
        (NEMOTRON | {"mamba_ssm_cache_dtype": "fp4"}, "known: float32"),
        (NEMOTRON | {"n_groups": 3}, "not a multiple of n_groups 3"),
        (QWEN | {"layer_types": ["linear_attention"] * 3}, "for each of 4 layers"),
        (QWEN | {"linear_num_value_heads": 3}, "not a multiple of linear_num_key_heads"),
        (QWEN | {"mamba_num_heads": 4}, "state-space"),
    ],
)
def test_what_is_not_understood_is_refused(config: dict, message: str):
    with pytest.raises(InputError, match=message) as caught:
        parse_config(config)
    assert "\n" not in str(caught.value)


def test_layers_may_be_named_or_lettered():
    named = {k: v for k, v in NEMOTRON.items() if k not in ("hybrid_override_pattern",)}
    del named["num_hidden_layers"]
    named["layers_block_type"] = ["mamba", "mlp", "attention", "mlp"]
    assert parameters(parse_config(named)) == parameters(parse_config(NEMOTRON))
    assert sublayer_order(named) == sublayer_order(NEMOTRON) == (1, 2, 0, 2)
    listed = QWEN | {"layer_types": ["full_attention"] * 4}
    assert [block.count for block in parse_config(listed).attention] == [4]
    assert sublayer_order(QWEN) == (0, 2, 0, 2, 0, 2, 1, 2)
    half = parse_config(NEMOTRON | {"mamba_ssm_cache_dtype": "bfloat16"}).attention[1].body
    assert isinstance(half, Mamba2) and half.state_bytes_each == 2


def test_infinity_is_read_where_it_is_asked_for():
    text = '{"time_step_limit": [0.0, Infinity], "hidden_size": 1}'
    assert parse_json(text, "a.json", infinite=True)["hidden_size"] == 1
    for bad, infinite in ((text, False), (text.replace("Infinity", "NaN"), True)):
        with pytest.raises(InputError, match="is not a number that JSON allows"):
            parse_json(bad, "a.json", infinite)
