"""Systems of pools: any placement by one function, against the service of one pool and by hand."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perfmodel import placement, question, serving, speculation, system
from perfmodel.chips import load_chip
from perfmodel.compiled import UNFUSED
from perfmodel.engines import load_engine
from perfmodel.errors import InputError
from perfmodel.formats import precision
from perfmodel.models.catalogue import load_model
from perfmodel.placement import FREE, Link, Links, Pool, System
from perfmodel.plan import Load, Plan
from perfmodel.system import STATIONS, SystemEstimate

pytestmark = pytest.mark.xdist_group("system")

MODEL, DRAFT = "llama-3.3-70b", "llama-3.1-8b"
LOAD = Load(4000.0, 1000.0)
FREE_LINKS = Links(FREE, FREE, FREE)
traces: list[str] = []


def pool(chip: str, fmt: str = "fp8", *, chips: float = 8, **given: float) -> Pool:
    plan: dict[str, Any] = {"stages": 1, "batch": 64, "chunk": 8192} | given
    return Pool(load_chip(chip).machine, Plan(chips=chips, **plan), precision(fmt))


def _counted(*args: Any, **kwargs: Any) -> SystemEstimate:
    traces.append("trace")
    return system.evaluate(*args, **kwargs)


@functools.cache
def _program() -> Any:
    return jax.jit(_counted, compiler_options=dict(UNFUSED))


@functools.cache
def _plain() -> Any:
    return jax.jit(serving.estimate, compiler_options=dict(UNFUSED))


def run(made: System, load: Load = LOAD, draft: str | None = None) -> SystemEstimate:
    network, engine = load_model(MODEL).model, load_engine("vllm").engine
    values = question.numbers((made, network, load, engine))
    guess = None if draft is None else question.numbers(load_model(draft).model)
    return jax.device_get(_program()(*values, draft=guess))


def one(fmt: str = "fp8", **given: float) -> System:
    return placement.build(placement.aggregated("a"), {"a": pool("h100", fmt, **given)})


def two(links: Links | None = None, *, share: float = 1.0, batch: float = 64) -> System:
    pools = {
        "p": pool("h100", chips=4, replicas=share, batch=batch),
        "d": pool("h100", chips=4, batch=batch),
    }
    return placement.build(placement.prefill_decode("p", "d"), pools, links=links)


SAME = (
    "ttft", "tpot", "e2e", "longest_gap", "request_rate", "output_rate", "admitted", "running",
    "chunk_share", "power", "chips", "usd_per_total_token", "energy_per_total_token",
)  # fmt: skip


@pytest.mark.parametrize("batch", (1, 48, 512))
@pytest.mark.parametrize(
    "load", (LOAD, Load(300.0, 200.0, 0.5, 0.1), Load(8000.0, 16.0)), ids=("chat", "hit", "long")
)
def test_one_pool_is_the_service_of_one_pool(batch: float, load: Load) -> None:
    found = run(one(batch=batch, chunk=2048), load)
    a = pool("h100", batch=batch, chunk=2048)
    values = question.numbers(
        (a.machine, load_model(MODEL).model, load, a.plan, a.precision, load_engine("vllm").engine)
    )
    plain = jax.device_get(_plain()(*values))
    for name in SAME:
        got, want = getattr(found, name), getattr(plain, name)
        assert abs(got - want) <= 4 * np.spacing(np.float32(abs(want))), name
    np.testing.assert_allclose(found.margins, plain.margins, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.memory_bytes[1], plain.memory_bytes, rtol=1e-6)
    np.testing.assert_allclose(found.parts, plain.parts, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("stages", (2, 3))
def test_one_pool_of_stages_is_the_service_of_one_pool(stages: float) -> None:
    # 80 layers in three stages are 27, 27 and 26: attention and ffn occupy a stage together.
    at: dict[str, Any] = {"chips": 4 * stages, "stages": stages, "batch": 96}
    found, a = run(one(**at)), pool("h100", **at)
    values = question.numbers(
        (a.machine, load_model(MODEL).model, LOAD, a.plan, a.precision, load_engine("vllm").engine)
    )
    plain = jax.device_get(_plain()(*values))
    for name in SAME:
        got, want = getattr(found, name), getattr(plain, name)
        assert abs(got - want) <= 8 * np.spacing(np.float32(abs(want))), name


def test_one_program_serves_every_form_and_every_mix_of_chips() -> None:
    pools = {
        "h": pool("h100"), "b": pool("b200", replicas=0.5),
        "w": pool("wse3", "bf16", chips=4, stages=40, chunk=8),
        "c": pool("corsair", "int8"),
    }  # fmt: skip
    tables = (
        placement.aggregated("h"),
        placement.prefill_decode("b", "w"),
        placement.attention_ffn("h", "h", "b"),
        placement.attention_ffn("b", "h", "c"),
    )
    run(one())
    before = len(traces)
    for table in tables:
        found = run(placement.build(table, pools))
        assert np.isfinite(found.tpot) and found.tpot > 0, table
        listed = [pools[name].plan for name in (table.prefill, table.attention, table.ffn)]
        distinct = {id(plan): plan.chips * plan.replicas for plan in listed}
        assert found.chips == sum(distinct.values())
    assert len(traces) == before


def test_a_prefill_pool_takes_the_chunks_out_of_decoding() -> None:
    mixed, apart = run(one(chips=4)), run(two())
    assert apart.tpot < mixed.tpot and apart.longest_gap < mixed.longest_gap
    assert apart.chunk_share == 0 and mixed.chunk_share > 0
    # By Little's law, whatever the form: running requests are rate times time.
    for found, share in ((mixed, 1.0), (apart, 1.0)):
        assert found.request_rate * found.e2e == pytest.approx(64 * share, rel=1e-4)


def test_rates_balance_where_prefill_is_short() -> None:
    # Prefill cannot give more than it computes: decoding has what is left, and rates are equal.
    found = run(two(share=0.25, batch=256))
    assert found.load[0] == pytest.approx(1.0, abs=0.01)
    by_decode = found.decoding / (999 * found.tpot)
    assert found.request_rate == pytest.approx(by_decode, rel=0.03)
    more = run(two(share=0.5, batch=256))
    assert more.request_rate / found.request_rate == pytest.approx(2.0, rel=0.1)


def test_hand_over_by_hand() -> None:
    # 4,000 tokens of 327,680/2 B (fp8 keys) over four ports of 50 GB/s at 74 %, after the prompt.
    machine = load_chip("h100").machine
    rate = 4 * float(machine.fabric.nic_bandwidth * machine.fabric.nic_efficiency)
    kv = Link(1.0, 0.0, 0.0)
    late = placement.build(
        placement.prefill_decode("p", "d"),
        {"p": pool("h100", chips=4, batch=1), "d": pool("h100", chips=4, batch=1)},
        links=Links(kv, FREE, FREE),
        streamed=0.0,
    )
    found = run(late)
    bytes_ = 4000 * 163_840
    assert found.handover == pytest.approx(bytes_ / rate, rel=1e-4)
    assert found.load[STATIONS.index("kv link")] == pytest.approx(
        found.request_rate * bytes_ / rate, rel=1e-4
    )


def test_an_infinite_link_hands_over_for_nothing() -> None:
    assert run(two(FREE_LINKS)).handover == 0
    assert run(two(FREE_LINKS)).ttft < run(two()).ttft
    # A link slower than the work is what binds, and no clamp hides it.
    slow = run(two(Links(Link(0.0, 1e-9, 0.0), FREE, FREE), batch=256))
    assert slow.load[STATIONS.index("kv link")] == pytest.approx(1.0, abs=0.02)
    assert slow.request_rate == pytest.approx(1 / (4000 * 163_840 * 1e-9), rel=0.02)


def test_attention_and_ffn_take_turns() -> None:
    pools = {
        "p": pool("b200"), "a": pool("h200", chips=4, replicas=2, batch=128),
        "f": pool("h200", chips=4),
    }  # fmt: skip
    table = placement.attention_ffn("p", "a", "f")

    def turns(micro: float, links: Links) -> SystemEstimate:
        return run(placement.build(table, pools, links=links, micro=micro))

    single, ping = turns(1, FREE_LINKS), turns(2, FREE_LINKS)
    # One micro-batch: the way of a token is attention, then FFN; no two pools work at once.
    assert single.load[1] + single.load[2] == pytest.approx(1.0, abs=0.03)
    assert ping.load[1] + ping.load[2] > 1.2
    assert ping.load[:3].max() <= 1.01
    # A layer with a link: t_A + t_F + 2·t_link, for all 80.
    link = Links(FREE, Link(0.0, 0.0, 20e-6), FREE)
    # A slower token leaves a few more sequences decoding.
    assert turns(1, link).tpot - single.tpot == pytest.approx(160 * 20e-6, rel=0.06)


def test_drafts() -> None:
    base = pool("h100", batch=16)
    far = pool("corsair", "int8", batch=16)

    def made(table: placement.Placement, k: float, rate: float = 0.8) -> SystemEstimate:
        spec = speculation.chain(rate, k)
        return run(
            placement.build(table, {"a": base, "c": far}, speculation=spec, links=FREE_LINKS),
            draft=DRAFT,
        )

    here, there = placement.aggregated("a"), placement.draft_on(placement.aggregated("a"), "c")
    none, plain = made(here, 0), run(one(batch=16))
    for name in SAME:
        got, want = getattr(none, name), getattr(plain, name)
        assert abs(got - want) <= 4 * np.spacing(np.float32(abs(want))), name
        # Where nothing is drafted it does not matter where, but for the chips that idle.
        if name not in ("power", "chips", "usd_per_total_token", "energy_per_total_token"):
            assert getattr(made(there, 0), name) == got, name
    assert made(here, 4).tokens_per_cycle == pytest.approx(3.3616, rel=1e-5)
    assert made(here, 4).tpot < plain.tpot
    assert made(there, 4).tpot < made(here, 4).tpot
    # Drafts that are never accepted cost time and yield nothing.
    assert made(here, 4, 0.0).tpot > plain.tpot
    assert made(here, 4).memory_bytes[1] > made(here, 0).memory_bytes[1]


def test_derivatives_are_finite_and_right() -> None:
    """Replica shares, hit share, acceptance, draft length, chunk and batch, in float64."""
    with jax.enable_x64(True):
        network, engine = load_model(MODEL).model, load_engine("vllm").engine
        guess = load_model(DRAFT).model

        def outputs(x: Any) -> Any:
            share, hit, rate, k, batch = x
            pools = {
                "p": pool("h100", chips=4, replicas=share),
                "d": pool("h200", chips=4, batch=batch),
                "g": pool("l40s", chips=1),
            }
            spec = speculation.Speculation(k, rate ** jnp.arange(1, speculation.MOST + 1))
            table = placement.draft_on(placement.prefill_decode("p", "d"), "g")
            made = placement.build(table, pools, speculation=spec)
            made, model, load, eng, small = jax.tree.map(
                jnp.asarray, (made, network, Load(4000.0, 500.0, hit), engine, guess)
            )
            found = system.evaluate(made, model, load, eng, draft=small)
            return jnp.log(jnp.stack([found.ttft, found.tpot, found.output_rate, found.power]))

        at = jnp.asarray([0.8, 0.3, 0.7, 2.5, 40.3])
        options = dict(UNFUSED)
        value = jax.jit(outputs, compiler_options=options)
        slopes = jax.jit(jax.jacfwd(outputs), compiler_options=options)(at)
        assert np.all(np.isfinite(slopes))
        # Chunks of a prompt are a staircase in the hit share: flat here, with the slope of its
        # chord. More hits make everything faster by it, as by the tokens they save.
        assert np.all(slopes[:2, 1] < 0.0) and slopes[2, 1] > 0.0
        for i in (0, 2, 3, 4):
            step = 1e-6 * at[i]
            ends = value(at.at[i].add(step)), value(at.at[i].add(-step))
            np.testing.assert_allclose(
                slopes[:, i], (ends[0] - ends[1]) / (2 * step), rtol=2e-3, atol=5e-4
            )


def test_the_split_of_memory_can_be_descended() -> None:
    """Experts before keys, or keys before them, over SRAM and LPDDR of a Corsair, in float64."""
    with jax.enable_x64(True):
        network, engine = load_model("qwen3-30b-a3b").model, load_engine("ideal").engine

        def outputs(x: Any) -> Any:
            offload, first = x
            split = pool("corsair", "int8", batch=64, attention_dp=1.0, expert_ranks=8.0)
            plan = dataclasses.replace(split.plan, offload=offload, weights_first=first)
            split = dataclasses.replace(split, plan=plan)
            made = placement.build(placement.aggregated("a"), {"a": split})
            made, model, load, eng = jax.tree.map(
                jnp.asarray, (made, network, Load(2000.0, 500.0), engine)
            )
            found = system.evaluate(made, model, load, eng)
            return jnp.stack([jnp.log(found.tpot), found.memory_margin[1]])

        options = dict(UNFUSED)
        slopes = jax.jit(jax.jacfwd(outputs), compiler_options=options)
        value = jax.jit(outputs, compiler_options=options)
        at = jnp.asarray([0.6, 0.4])
        found = slopes(at)
        for i in range(2):
            ends = value(at.at[i].add(1e-6)), value(at.at[i].add(-1e-6))
            np.testing.assert_allclose(
                found[:, i], (ends[0] - ends[1]) / 2e-6, rtol=1e-3, atol=1e-6
            )
        # More of the slow memory leaves more room. A step reads all keys, but only the experts that
        # its tokens chose: keys are worth more of the fast one.
        assert found[1, 0] > 0.0 and found[0, 1] > 1e-3


def test_a_pool_that_is_not_there() -> None:
    with pytest.raises(InputError, match="decod.*decode"):
        placement.build(
            placement.prefill_decode("p", "decod"), {"p": pool("h100"), "decode": pool("h100")}
        )


@pytest.mark.parametrize(
    "make",
    (
        lambda: speculation.chain(1.2, 3),
        lambda: speculation.chain(0.5, 99),
        lambda: speculation.of_length(9.0, 3),
        lambda: speculation.of_positions([], 3),
        lambda: speculation.of_lengths([0.5], 3),
    ),
)  # fmt: skip
def test_acceptance_that_cannot_be(make: Any) -> None:
    with pytest.raises(InputError):
        make()
