"""Steady state by hand: what a 70B on real chips must give, and what may never happen."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax import Array

from perfmodel._loop import Decoding, Prompts, closed_loop, closed_queue
from perfmodel.chips import load_chip
from perfmodel.footprint import split_prompt
from perfmodel.formats import precision
from perfmodel.machine import Machine
from perfmodel.margins import MARGINS
from perfmodel.models.attention import GroupedQueryAttention
from perfmodel.models.catalogue import load_model
from perfmodel.models.transformer import head_operators, layer_operators
from perfmodel.operators import total
from perfmodel.passes import passes
from perfmodel.plan import Engine, Limits, Load, Plan
from perfmodel.relax import Real, as_real, traced
from perfmodel.serving import PARTS, Estimate, estimate
from perfmodel.step import Shard, Step

ENGINE = Engine(0.9, 2e9, 16, 0.6e-3, 15e-6, 0.0, 0.5)
IDEAL = Engine(0.9, 2e9, 16, 0.0, 0.0, 0.0, 0.5)

_estimate = jax.jit(estimate)


def run(
    chip: str | Machine = "h100",
    model: str = "llama-3.3-70b",
    *,
    tp: float = 8,
    pp: float = 1,
    batch: float = 1,
    chunk: float = 2048,
    isl: float = 1000,
    osl: float = 1000,
    hit: float = 0.0,
    burst: float = 0.0,
    fmt: str = "bf16",
    engine: Engine = ENGINE,
    limits: Limits | None = None,
) -> Estimate:
    machine = load_chip(chip).machine if isinstance(chip, str) else chip
    return _estimate(
        machine,
        traced(load_model(model).model),
        traced(Load(isl, osl, hit, burst)),
        traced(Plan(tp * pp, pp, batch, chunk)),
        traced(precision(fmt)),
        traced(engine),
        traced(Limits() if limits is None else limits),
    )


@functools.cache
def achieved_ratio(chip: str) -> float:
    """Returns FLOP per byte at which a chip's achieved peaks balance, bf16."""
    machine = load_chip(chip).machine
    flops = machine.kernels.efficiency[0] * machine.kernels.peak[0]
    return float(flops / (machine.kernels.stream[0] * machine.memory.bandwidth[0]))


def idle_share(batch: int, context: int, chip: str = "h100") -> float:
    """Returns the share of a decode step in which the arithmetic units have nothing to do, with
    arithmetic and memory at their achieved rates, perfectly overlapped."""
    model = load_model("llama-3.3-70b").model
    machine = load_chip(chip).machine
    step, formats = Step(batch, context), precision("bf16")
    ops = layer_operators(model, step, Shard(), formats)
    ops += head_operators(model, step, Shard(), formats)
    ops = tuple(op for op in ops if type(op).__name__ in ("Matmul", "Attention"))
    arithmetic = total(ops, "flops") / float(
        machine.kernels.efficiency[0] * machine.kernels.peak[0]
    )
    memory = total(ops, "memory_bytes") / float(
        machine.kernels.stream[0] * machine.memory.bandwidth[0]
    )
    return 1.0 - arithmetic / max(arithmetic, memory)


def test_decode_at_batch_one_leaves_arithmetic_idle_99_7_percent_of_the_time():
    # On the datasheet: 2 FLOP per 2-byte weight against 989 TFLOP/s over 3.35 TB/s = 295 FLOP
    # per byte, 1 − 1/295 = 99.7 %. At achieved rates the ratio is a little lower.
    assert round(100 * (1 - 3.35 / 989), 1) == 99.7
    assert 265 < achieved_ratio("h100") < 305
    assert idle_share(1, 100) == pytest.approx(1 - 1 / achieved_ratio("h100"), abs=2e-4)
    # The whole model, on as few H100s as hold it: 2 × 70.6e9 FLOP over two of them.
    found = run(tp=2, batch=1)
    assert bool(found.feasible)
    achieved = 989e12 * float(load_chip("h100").machine.kernels.efficiency[0])
    assert round(100 * (1 - 2 * 70.55e9 / 2 / achieved / float(found.tpot)), 1) == 99.7


def test_idle_falls_to_90_percent_at_a_tenth_of_the_ratio_and_to_zero_near_it():
    batches = np.arange(1, 600)
    idle = np.array([idle_share(int(b), 100) for b in batches])
    below = batches[np.argmax(idle < 0.9)]
    assert below == pytest.approx(29, abs=2)
    zero = batches[np.argmax(idle <= 0.0)]
    # Cache and activations move a few bytes more than the weights alone.
    assert 1.0 <= zero / achieved_ratio("h100") < 1.25


def test_long_contexts_are_never_compute_bound():
    # 327,680 B of cache per token of context: 8,192 tokens are 2.7 GB a sequence, 0.93 ms of
    # bandwidth against 0.2 ms of arithmetic, whatever the batch.
    assert min(idle_share(b, 8192) for b in (1, 30, 300, 3_000, 30_000)) > 0.7


def test_tensor_parallel_tax_at_batch_one():
    """TP4 against TP1: 3.1 × for a 70B in bf16 on H100, and about 2 × where a rank has little to
    read: an 8B on H100, or a 70B in fp8 on B200. There the talk's "2 × for 4 ×" is right."""
    for chip, model, fmt, low, high in (
        ("h100", "llama-3.3-70b", "bf16", 2.9, 3.4),
        ("h100", "llama-3.1-8b", "bf16", 1.8, 2.3),
        ("b200", "llama-3.3-70b", "fp8", 1.8, 2.2),
    ):
        one, four = (run(chip, model, tp=tp, fmt=fmt) for tp in (1, 4))
        assert low < float(one.tpot / four.tpot) < high, (chip, model, fmt)
        network = float(four.parts[PARTS.index("network")] / four.tpot)
        assert 0.02 < network < 0.12
        assert float(one.parts[PARTS.index("network")]) == 0.0
    # The all-reduces are the smaller half of the tax: floors that do not shrink are the rest.
    four = run("h100", "llama-3.1-8b", tp=4)
    assert float(four.parts[PARTS.index("latency")]) > float(four.parts[PARTS.index("network")])


def test_parts_add_up_to_tpot():
    for batch in (1, 32, 256):
        found = run(batch=batch)
        assert float(jnp.sum(found.parts)) == pytest.approx(float(found.tpot), rel=1e-5)


def test_littles_law():
    for batch in (1, 7, 64, 900, 4000):
        found = run(batch=batch)
        assert float(found.request_rate * found.e2e) == pytest.approx(batch, rel=1e-4)


def test_one_request_alone():
    found = run(batch=1, isl=4000, chunk=2048, engine=IDEAL)
    # Nobody else's chunks meet its decode steps, and nobody's prefill delays its own.
    assert float(found.chunk_share) == 0.0
    assert float(found.ttft) == pytest.approx(2 * float(run(batch=1, isl=2000).ttft), rel=0.1)


def test_burst_of_prompts_served_one_by_one():
    # b prompts at once: the k-th waits k prefills, so the mean is (b + 1)/2 of them.
    one = float(run(batch=1, osl=1, chunk=1000, engine=IDEAL).ttft)
    every = run(batch=9, osl=1, chunk=1000, engine=IDEAL)
    # With one output token the loop is all prefill: each request waits for the eight others.
    assert float(every.e2e) == pytest.approx(9 * one, rel=0.05)
    # All at once on an idle server, and long outputs: eight wait, four prefills on average, each
    # a little slower for the decoding ones beside it.
    burst = run(batch=9, osl=10_000, isl=1000, chunk=1000, burst=1.0, engine=IDEAL)
    steady = run(batch=9, osl=10_000, isl=1000, chunk=1000, burst=0.0, engine=IDEAL)
    assert 4 * one < float(burst.ttft - steady.ttft) < 4 * 1.4 * one


def test_ttft_grows_with_the_queue_without_a_clamp():
    # 9,000 tokens in, 30 out: nearly all prefill.
    ttft = [
        float(run("h200", "llama-3.1-8b", tp=1, batch=b, isl=9000, osl=30, chunk=8192).ttft)
        for b in (1, 8, 16, 31, 62)
    ]
    service = ttft[0]
    assert all(np.diff(ttft) > 0)
    slope = (ttft[-1] - ttft[-2]) / 31
    assert slope == pytest.approx(service, rel=0.15)


def test_queue_for_the_kv_pool():
    found = run(batch=4000)
    assert float(found.running) == float(found.admitted) < 4000
    waiting = (4000 - float(found.running)) / float(found.request_rate)
    assert float(found.ttft) > waiting


def test_chunks_conserve_tokens_and_pairs():
    for isl, chunk, hit in ((4000, 512, 0.0), (4001, 512, 0.25), (100, 8192, 0.9)):
        prefill = split_prompt(traced(Load(isl, 10, hit)), traced(Plan(1, 1, 1, chunk)))
        new = isl * (1 - hit)
        pairs = new * (isl - new) + new * (new + 1) / 2
        assert float(prefill.chunks) == np.ceil(new / chunk - 1e-6)
        assert float(prefill.chunks * prefill.chunk.tokens) == pytest.approx(new, rel=1e-5)
        assert float(prefill.chunks * prefill.chunk.pairs) == pytest.approx(pairs, rel=1e-4)


@pytest.mark.parametrize("isl", [4000, 300])
def test_a_step_keeps_the_mask_of_its_prompts(isl: int):
    # A query sees itself and at most 1,023 keys before it, whatever chunk it is in.
    load, plan = traced((Load(isl, 10, 0.25), Plan(1, 1, 8, 512)))
    prefill = split_prompt(load, plan)
    found = passes(load, plan, prefill, as_real(8.0), traced(ENGINE))
    assert found.mixed.chunk is not None
    (windowed,) = (
        body
        for body in (block.body for block in load_model("gemma-3-27b").model.attention)
        if isinstance(body, GroupedQueryAttention) and body.window is not None
    )
    pairs, _ = windowed.chunk_keys(found.mixed.chunk)
    exact = sum(min(at, 1024) for at in range(isl // 4 + 1, isl + 1))
    assert float(pairs * prefill.chunks) == pytest.approx(exact, rel=1e-4)


def test_memory_of_a_70b_by_hand():
    found = run(tp=8, batch=32, isl=4000, osl=1000)
    # Weights in eighths, norms whole: 80 layers × 2 norms + 1.
    norms = (2 * 80 + 1) * 8192
    weights = ((70_553_706_496 - norms) / 8 + norms) * 2
    assert float(found.weight_bytes) == pytest.approx(weights, rel=1e-6)
    # 4,000 + 500 tokens in 282 pages of 16, 40,960 B per token on each of 8 ranks.
    assert float(found.kv_bytes) == pytest.approx(32 * 282 * 16 * 40_960, rel=1e-6)


def test_prefix_hits_are_stored_once_and_not_computed_again():
    cold, warm = run(batch=32, isl=4000), run(batch=32, isl=4000, hit=0.5)
    own = (2000 + 500 + 12) * 40_960  # whole pages: 157 of 16
    assert float(warm.kv_bytes) == pytest.approx(32 * own + 2000 * 40_960, rel=1e-3)
    assert float(warm.ttft) < 0.65 * float(cold.ttft)
    assert float(warm.tpot) < float(cold.tpot)


def test_kv_heads_are_replicated_past_their_number():
    eight, sixteen = run(tp=8, batch=8), run(tp=16, batch=8)
    assert float(sixteen.kv_bytes) == pytest.approx(float(eight.kv_bytes), rel=1e-6)


def test_a_70b_does_not_fit_one_card_with_a_margin():
    engine = Engine(0.97, 2e9, 16, 0.6e-3, 15e-6, 0.0, 0.5)
    found = run("h200", tp=1, engine=engine, batch=1)
    # 150.8 GB × 0.97 = 146.2 GB less 141.1 GB of weights and 2 GB of workspace: 3 GB at most.
    assert float(found.margins[MARGINS.index("memory")]) < 0.02
    assert float(run("h100", tp=1).margins[MARGINS.index("memory")]) < 0.0


def test_crossing_a_node_costs():
    inside = float(run(tp=8, batch=64).parts[PARTS.index("network")])
    across = float(run(tp=16, batch=64).parts[PARTS.index("network")])
    # 64 × 8192 × 2 B over 50 GB/s ports, both ways, twice a layer, is far more than over NVLink.
    assert across > inside * 1.3


def test_pipeline_stages_raise_throughput_not_speed():
    flat, piped = run(tp=4, pp=1, batch=64), run(tp=4, pp=2, batch=64)
    assert float(piped.chips) == 2 * float(flat.chips)
    assert float(piped.weight_bytes) == pytest.approx(float(flat.weight_bytes) / 2, rel=1e-6)
    assert float(piped.output_rate) > float(flat.output_rate)
    alone = run(tp=4, pp=2, batch=1)
    assert float(alone.tpot) >= float(run(tp=4, pp=1, batch=1).tpot)


def test_money_by_hand():
    found = run(batch=64, isl=4000)
    rate = float(found.request_rate)
    dollars = 8 * float(load_chip("h100").machine.price)
    both = float(found.usd_per_output_token) * rate * 1000
    both += float(found.usd_per_input_token) * rate * 4000
    assert both == pytest.approx(dollars, rel=1e-4)
    assert float(found.usd_per_total_token) == pytest.approx(dollars / (rate * 5000), rel=1e-4)


def test_every_deployed_chip_counts():
    found = run(batch=8)
    assert float(found.output_rate_per_chip) == pytest.approx(float(found.output_rate) / 8)


def first_token(request_time: Real, customers: float = 2.0, fused: float = 1.0) -> Array:
    """Returns the TTFT of prompts of 3 ms, rounds of 10 ms and outputs of a million tokens [s]."""
    n, one, prompt, decode = map(as_real, (customers, 1.0, 3e-3, 1e-2))
    prompts = Prompts(prompt, 0.0 * one, prompt, prompt / 3.0, one, one, n)
    rounds = 1e6 * one
    decoding = Decoding(decode, decode, n, rounds, rounds, fused, 0.0)
    engine = Engine(0.9, 0.0, 16, 0.0, 0.0, request_time, 0.5)
    return closed_loop(prompts, decoding, Load(1, 1), engine).started


def test_a_lone_request_waits_for_whole_rounds():
    """It comes at the end of a round; its slope is the chord's, and with no other there is none."""
    for wait, rounds in ((0.0, 0), (1e-4, 1), (0.0199, 2), (0.0201, 3)):
        assert float(first_token(wait)) == pytest.approx(rounds * 1e-2 + 3e-3, abs=1e-6)
        assert float(first_token(wait, 1.0)) == pytest.approx(wait + 3e-3, abs=1e-9)
    assert float(jax.grad(first_token)(0.0155)) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("fused", [0.0, 1.0])
def test_whoever_met_a_prompt_is_out_of_step(fused: float):
    """Of many that come, most met another's prompt: half a round on average, and no prompt's wait.

    Prompts of 3 ms, each with as many tokens as a round can carry, take a tenth of the time."""
    often = float(first_token(0.0901, 1e5, fused))
    assert 0.0901 + 0.5e-2 + 3e-3 < often < 0.0901 + 0.5e-2 + 3e-3 + 0.5e-2


def test_closed_queue_has_the_right_ends():
    queue = functools.partial(closed_queue, variability=0.5)
    assert float(queue(jnp.float32(2), jnp.float32(100), jnp.float32(1))) == pytest.approx(2.0)
    # Saturated: 50 customers at 2 s each, less the 10 s that each is away.
    assert float(queue(jnp.float32(2), jnp.float32(10), jnp.float32(50))) == pytest.approx(
        90, rel=0.02
    )


designs = st.fixed_dictionaries(
    {
        "tp": st.sampled_from([1, 2, 4, 8, 16]),
        "batch": st.integers(1, 600),
        "chunk": st.sampled_from([256, 1024, 2048, 8192]),
        "isl": st.integers(1, 20_000),
        "osl": st.integers(2, 4_000),
        "fmt": st.sampled_from(["bf16", "fp8"]),
        "chip": st.sampled_from(["h100", "h200", "b200", "mi300x"]),
    }
)

# Numbers of which more may never make a token slower or rarer.
MORE_IS_BETTER = (
    ("kernels", "peak"),
    ("kernels", "efficiency"),
    ("kernels", "stream"),
    ("memory", "bandwidth"),
    ("memory", "capacity"),
    ("memory", "vector_stream"),
    ("compute", "vector_peak"),
    ("decode", "stream"),
    ("decode", "efficiency"),
    ("context", "efficiency"),
    ("context", "stream"),
    ("fabric", "bandwidth"),
    ("fabric", "peer_bandwidth"),
    ("fabric", "nic_bandwidth"),
    ("fabric", "oneshot_efficiency"),
    ("fabric", "twoshot_efficiency"),
)


def better(machine: Machine, group: str, field: str, factor: float) -> Machine:
    part = getattr(machine, group)
    changed = type(part)(
        **{
            name: getattr(part, name) * (factor if name == field else 1.0)
            for name in part.__dataclass_fields__
        }
    )
    return type(machine)(
        **{
            name: changed if name == group else getattr(machine, name)
            for name in machine.__dataclass_fields__
        }
    )


@given(design=designs, which=st.sampled_from(MORE_IS_BETTER), factor=st.floats(1.01, 3.0))
@settings(max_examples=60, deadline=None)
def test_more_of_a_rate_or_capacity_is_never_worse(design, which, factor):
    machine = load_chip(design.pop("chip")).machine
    before, after = run(machine, **design), run(better(machine, *which, factor), **design)
    # At the same number of running requests: a larger pool runs more of them, each slower.
    if float(before.running) == float(after.running):
        assert float(after.tpot) <= float(before.tpot) * (1 + 1e-5)
    assert float(after.output_rate) >= float(before.output_rate) * (1 - 1e-4)
    assert np.all(np.asarray(after.margins) >= np.asarray(before.margins) - 1e-4)


@given(design=designs)
@settings(max_examples=60, deadline=None)
def test_energy_is_positive_and_within_the_power_limit(design):
    found = run(**design)
    machine = load_chip(design["chip"]).machine
    assert 0.0 < float(machine.power.running) <= float(found.chip_power)
    assert float(found.chip_power) <= float(machine.power.limit) * (1 + 1e-6)
    assert float(found.energy_per_total_token) > 0.0
    assert float(found.ttft) > 0.0 and float(found.tpot) > 0.0
    assert 0.0 <= float(found.chunk_share) <= 1.0 and 0.0 <= float(found.prefill_busy) <= 1.0
    assert float(found.longest_gap) >= float(found.tpot) * (1 - 1e-6)


def test_queued_requests_take_no_memory():
    """What waits outside has no intermediate results: however many, as many are admitted."""
    few, many = (run("h100", "llama-3.1-8b", tp=1, batch=b) for b in (1_000, 1_000_000))
    assert float(few.admitted) == float(many.admitted) == float(many.running)
    assert float(many.memory_bytes) <= 0.9 * 85.6e9
    assert bool(many.margins[MARGINS.index("memory")] > 0.0)


def test_short_prompts_share_a_step():
    """128 tokens in and out: hundreds of prompts a second do not take a step each."""
    shared = run(tp=8, batch=512, isl=128, osl=128, chunk=8192)
    alone = run(tp=8, batch=512, isl=128, osl=128, chunk=128)
    assert float(shared.output_rate) > 1.3 * float(alone.output_rate)
    # One request never shares, and long prompts do not either.
    for batch, isl in ((1, 128), (64, 8192)):
        same = [run(tp=8, batch=batch, isl=isl, osl=128, chunk=c) for c in (8192, isl)]
        assert float(same[0].output_rate) == pytest.approx(float(same[1].output_rate), rel=1e-5)


def test_end_stages_hold_the_embedding_and_the_head():
    # 70B in bf16, four stages: a quarter of the layers and one table of 128,256 × 8,192.
    table = 128_256 * 8_192 * 2
    layers = (70_553_706_496 * 2 - 2 * table) / 4
    found = run(tp=1, pp=4, batch=1)
    assert float(found.weight_bytes) == pytest.approx(layers + table, rel=1e-4)


def test_pipeline_stages_in_two_nodes_cross_a_port():
    inside, across = (run(tp=4, pp=pp, batch=64) for pp in (2, 4))
    slow = better(load_chip("h100").machine, "fabric", "nic_bandwidth", 1e-3)
    assert float(run(slow, tp=4, pp=2, batch=64).tpot) == pytest.approx(float(inside.tpot))
    assert float(run(slow, tp=4, pp=4, batch=64).tpot) > 1.01 * float(across.tpot)
