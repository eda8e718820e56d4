"""The event simulation: as a plain scheduler, as closed forms, and what it must conserve."""

import functools
import math
from typing import Any

import equinox as eqx
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import given, settings

from perfmodel import serving
from perfmodel._replay import Draft, PrefillPool, Requests, Scheduler
from perfmodel.chips import load_chip
from perfmodel.engines import load_engine
from perfmodel.errors import InputError
from perfmodel.formats import precision
from perfmodel.models.catalogue import load_model
from perfmodel.plan import Engine, Load, Plan
from perfmodel.relax import as_real, traced
from perfmodel.simulate import Case, Outcome, simulate, simulate_all
from perfmodel.step_grid import CONTEXT, PRIOR, SEQUENCES, TOKENS, StepGrid, kv_tokens, step_grid


def seconds(d: Any, x: Any, p: Any, y: Any) -> Any:
    """Step time of a machine that is linear in everything, so that its table is exact."""
    return 5e-3 + 1e-5 * d + 2e-8 * d * x + 1e-5 * p + 1e-9 * p * y


@functools.cache
def grid() -> StepGrid:
    axes = np.meshgrid(SEQUENCES, CONTEXT, np.concatenate([[0.0], TOKENS]), PRIOR, indexing="ij")
    per_prompt: Any = np.asarray(1e-4)
    return StepGrid(seconds(*axes), per_prompt)


def requests(arrival: Any, isl: Any, osl: Any, cached: Any = 0.0) -> Requests:
    columns = np.broadcast_arrays(arrival, isl, osl, cached)
    return Requests(*(np.asarray(column, float) for column in columns))


def plainly(
    r: Requests, plan: Scheduler, concurrency: int, gaps: list[float] | None = None
) -> np.ndarray:
    """The same scheduler one step at a time, with lists: [requests, 2], first and finish [s].

    Times between two tokens of a request are added to `gaps` [s].
    """
    gaps = [] if gaps is None else gaps
    n = len(r.isl)
    arrival = [math.inf] * n if concurrency else list(r.arrival)
    out = np.full((n, 2), np.nan)
    running: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []
    now, nxt, ended, released = 0.0 if concurrency else min(arrival), 0, 0, 0

    def held(q: dict[str, Any], grow: int = 0) -> int:
        tokens = q["context"] + q["todo"] - q["shared"] + grow
        return math.ceil(max(tokens, q["aside"]) / plan.block)

    def used() -> int:
        return sum(held(q, int(q["todo"] == 0)) for q in running)

    while ended < n:
        while concurrency and released < min(n, concurrency + ended):
            arrival[released] = now
            released += 1
        dropped = False
        while used() > plan.blocks:
            q = running.pop()
            q |= {"todo": q["new"] + q["made"], "context": q["shared"]}
            waiting.insert(0, q)
            dropped = True
        decoding = [q for q in running if q["todo"] == 0]
        budget = plan.chunk - plan.shared_budget * len(decoding)
        for q in running:
            q["take"] = min(q["todo"], budget)
            budget -= q["take"]
        while not dropped and budget > 0:
            if waiting:
                q = waiting[0]
            elif nxt < n and arrival[nxt] <= now and len(running) < plan.batch:
                new = max(r.isl[nxt] - r.cached[nxt], 1)
                later = max(r.osl[nxt] - 1, 0)
                q = {"id": nxt, "new": new, "todo": new, "shared": r.isl[nxt] - new, "made": 0}
                q |= {"context": q["shared"], "wanted": r.osl[nxt], "first": math.nan}
                q["aside"] = new + plan.reserve * later
                if math.ceil((new + later) / plan.block) > plan.blocks:
                    nxt, ended = nxt + 1, ended + 1
                    continue
            else:
                break
            if used() + held(q) > plan.blocks:
                break
            if waiting:
                waiting.pop(0)
            else:
                nxt += 1
            q["take"] = min(q["todo"], budget)
            budget -= q["take"]
            running.append(q)
        prompts = [q for q in running if q["take"] > 0]
        decoding = [] if plan.exclusive and prompts else [q for q in running if q["todo"] == 0]
        if not running:
            # In a closed loop, what was turned away releases the next.
            if ended < n and arrival[nxt] < math.inf:
                now = max(now, arrival[nxt])
            continue
        p = sum(q["take"] for q in prompts)
        pairs = sum(q["take"] * (q["context"] + 0.5 * q["take"] + 0.5) for q in prompts)
        prior = pairs / p - 0.5 * (p + 1) if p else 0.0
        d = len(decoding)
        x = sum(q["context"] for q in decoding) / max(d, 1) + 1
        ending = [q for q in prompts if q["take"] == q["todo"]]
        now += seconds(d, x, p, prior) + 1e-4 * len(ending)
        gaps += [now - q["token"] for q in decoding + ending if q["made"] > 0]
        for q in decoding + ending:
            q["token"] = now
        for q in decoding:
            q["context"] += 1
            q["made"] += 1
        for q in prompts:
            q["context"] += q["take"]
            q["todo"] -= q["take"]
        for q in ending:
            if q["made"] == 0 and q["wanted"] > 0:
                q["first"] = now
            q["made"] += int(q["wanted"] > 0)
        for q in [q for q in running if q["todo"] == 0 and q["made"] >= q["wanted"]]:
            out[q["id"]] = q["first"], now
            running.remove(q)
            ended += 1
    return out


def random_requests(seed: int, n: int = 120, rate: float = 8.0) -> Requests:
    draw = np.random.default_rng(seed)
    isl = draw.integers(1, 3000, n)
    return requests(
        np.cumsum(draw.exponential(1.0 / rate, n)),
        isl,
        draw.integers(0, 200, n),
        np.floor(isl * draw.choice([0.0, 0.5], n)),
    )


def check(found: Outcome, r: Requests, blocks: float) -> None:
    """What may never happen, whatever is asked."""
    fits = np.ceil((np.maximum(r.isl - r.cached, 1) + np.maximum(r.osl - 1, 0)) / 16) <= blocks
    # Every request ends exactly once, or is turned away because it can never fit.
    assert np.array_equal(found.rejected, ~fits)
    assert np.all(np.isfinite(found.finish[fits])) and np.all(np.isnan(found.finish[~fits]))
    assert np.array_equal(np.isfinite(found.first), fits & (r.osl > 0))
    assert np.all(found.finish[fits] > found.arrival[fits])
    some = fits & (r.osl > 0)
    assert np.all(found.first[some] > found.arrival[some])
    # One token a step, and no step is shorter than the shortest.
    least = 5e-3 * (r.osl[some] - 1)
    assert np.all(found.finish[some] - found.first[some] >= least - 1e-9)
    # No block leaks.
    assert np.all(found.peak_blocks <= blocks) and not np.any(found.left)


@pytest.mark.parametrize("concurrency", [0, 12])
@pytest.mark.parametrize(
    "plan",
    [
        Scheduler(16, 1024, 4000),
        Scheduler(16, 512, 400, shared_budget=1.0),
        Scheduler(16, 1024, 400, exclusive=1.0, reserve=1.0),
    ],
    ids=["roomy", "preempting", "reserving"],
)
def test_as_a_scheduler_written_plainly(plan: Scheduler, concurrency: int):
    r = random_requests(1)
    found = simulate(Case(r, plan, grid(), concurrency))
    check(found, r, float(plan.blocks))
    gaps: list[float] = []
    want = plainly(r, plan, concurrency, gaps)
    np.testing.assert_allclose(np.stack([found.first, found.finish], 1), want, rtol=1e-9)
    # Every token after the first is counted once, in bins of 3 %.
    assert np.sum(found.gaps) == len(gaps) == np.sum(np.maximum(r.osl[~found.rejected] - 1, 0))
    for percent in (10, 50, 90, 99):
        exact = np.percentile(gaps, percent, method="inverted_cdf")
        assert found.gap(percent) == pytest.approx(exact, rel=0.04)
    # The second plan is of interest for this only, and the third may never do it.
    assert (np.sum(found.preemptions) > 0) == (plan.shared_budget == 1.0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.0, 0.004, 1.0]),
            st.integers(1, 5000),
            st.integers(0, 60),
            st.sampled_from([0.0, 0.3, 1.0]),
        ),
        min_size=1,
        max_size=40,
    ),
    st.integers(1, 20),
    st.integers(30, 3000),
    st.integers(1, 300),
    st.integers(0, 8),
    st.sampled_from(["", "exclusive", "reserve", "shared_budget", "static"]),
)
def test_nothing_is_lost(
    rows: list[tuple[float, int, int, float]],
    batch: int,
    chunk: int,
    blocks: int,
    concurrency: int,
    flag: str,
):
    """Bursts, no output, prompts beyond the pool, pools that run out: as written plainly."""
    gaps, isl, osl, cached = np.array(rows).T
    r = requests(np.cumsum(gaps), isl, osl, np.floor(cached * isl))
    plan = Scheduler(batch, chunk, blocks, **({flag: 1.0} if flag else {}))
    found = simulate(Case(r, plan, grid(), concurrency))
    check(found, r, blocks)
    if flag != "static":
        want = plainly(r, plan, concurrency)
        np.testing.assert_allclose(np.stack([found.first, found.finish], 1), want, rtol=1e-9)


def test_one_request_by_hand():
    # 1000 tokens in chunks of 400: two full ones and one of 200, with 0, 400 and 800 before them.
    found = simulate(Case(requests([3.0], 1000, 3), Scheduler(4, 400, 100), grid()))
    prompt = sum(seconds(0, 0, p, y) for p, y in ((400, 0), (400, 400), (200, 800))) + 1e-4
    assert found.ttft[0] == pytest.approx(prompt)
    decode = seconds(1, 1001, 0, 0) + seconds(1, 1002, 0, 0)
    assert found.finish[0] == pytest.approx(3.0 + prompt + decode)
    assert found.tpot[0] == pytest.approx(decode / 2)
    assert found.peak_blocks[0] == math.ceil(1002 / 16)


def test_a_prompt_of_its_own_is_a_gap_of_the_others():
    r = requests([0.0, 1.0], [100, 3000], [400, 2])
    stalled, chunked = (
        simulate(Case(r, Scheduler(4, chunk, 1000, exclusive=alone), grid()))
        for chunk, alone in ((4096, 1.0), (256, 0.0))
    )
    # One token of 400 waits for the prompt of the other request and its own step.
    longest = seconds(0, 0, 3000, 0) + 1e-4 + seconds(2, 300, 0, 0)
    assert stalled.gap(100) == pytest.approx(longest, rel=0.05)
    assert stalled.gap(99) < 7e-3
    # Chunks are shorter, and more tokens have one beside them.
    assert chunked.gap(100) < 0.4 * longest
    none = simulate(Case(requests([0.0], 10, 1), Scheduler(4, 256, 1000), grid()))
    assert math.isnan(none.gap(50))


def test_a_static_batch_waits_for_its_longest():
    osl = np.array([2, 50, 2, 2])
    found = simulate(
        Case(requests(0.0, 100, osl), Scheduler(2, 4096, 1000, static=1.0), grid(), replicas=1)
    )
    # The third is computed when the second has ended; what has ended is computed along.
    assert np.all(found.first[2:] > found.finish[1])
    assert found.finish[1] - found.first[1] == pytest.approx(
        sum(seconds(2, (100 + min(i, 1) + 100 + i) / 2 + 1, 0, 0) for i in range(49))
    )


def test_replicas_share_and_designs_do_not_meet():
    r = random_requests(2)
    plan = Scheduler(8, 1024, 4000)
    one, two, alone = simulate_all(
        [Case(r, plan, grid()), Case(r, plan, grid(), replicas=2), Case(r, plan, grid(), 1)]
    )
    assert np.array_equal(two.replica, np.arange(len(r.isl)) % 2)
    assert two.steady().summary()["ttft_mean"] < one.steady().summary()["ttft_mean"]
    assert np.array_equal(one.finish, simulate(Case(r, plan, grid())).finish)
    # A closed loop of one is a row of lone requests.
    some = ~alone.rejected
    assert np.all(alone.arrival[1:] == alone.finish[:-1]) and np.all(some)


def test_accepted_drafts_are_drawn():
    """E[tokens of a cycle] = 1 + a + a² + … + a^k; every cycle costs the same here."""
    k, a, n = 3, 0.7, 16
    draft, plan = Draft(k, a, 2e-3), Scheduler(n, 4096, 1e6)
    # Ten requests one after another, 12,000 cycles: the mean is drawn to half a per cent.
    found = simulate(Case(requests(np.zeros(10), 16, 3001), plan, grid(), 1, draft=draft))
    cycle = seconds(1, 16 + 1500, 0, 0) + 2e-3
    expected = (1 - a ** (k + 1)) / (1 - a)
    assert np.mean(found.tpot) == pytest.approx(cycle / expected, rel=0.02)
    none = Draft(k, 0.0, 0.0)
    plain = simulate(Case(requests([0.0], 16, 30), Scheduler(n, 4096, 1e6), grid(), draft=none))
    assert plain.tpot[0] == pytest.approx(seconds(1, 16 + 1 + 14, 0, 0), rel=1e-6)


def test_prompts_from_a_pool_of_their_own():
    pool = PrefillPool(grid(), 4096, np.zeros(2), latency=0.01, seconds_per_token=1e-6)
    r = requests([0.0, 0.0, 0.0, 5.0], 1000, [4, 4, 4, 1])
    found = simulate(Case(r, Scheduler(4, 1024, 1000), grid(), prefill=pool))
    compute = seconds(0, 1, 1000, 0) + 1e-4
    first = compute + 0.01 + 1e-3
    # Two servers: the third prompt waits for one. A request of one token needs no decoding.
    assert found.ttft[:2] == pytest.approx(first)
    assert found.ttft[3] == pytest.approx(first) and found.finish[3] == found.first[3]
    third = first + compute
    assert third <= found.ttft[2] <= third + seconds(2, 1002, 0, 0)
    # Nobody else's prompt is met while decoding.
    steps = (seconds(2, x, 0, 0) for x in (1001, 1002, 1003))
    assert found.tpot[0] == pytest.approx(sum(steps) / 3)
    many = random_requests(3)
    check(simulate(Case(many, Scheduler(8, 512, 250), grid(), 6, prefill=pool)), many, 250)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"isl": [0.0, 5.0]}, "isl: request 0"),
        ({"osl": [1.0, 1.5]}, "osl: request 1"),
        ({"cached": [0.0, 11.0]}, "cached: request 1 has more"),
        ({"arrival": [0.0, np.nan]}, "arrival: request 1"),
        ({"osl": [1.0]}, "columns must be lists of one length"),
    ],
)
def test_bad_requests_are_named(change: dict[str, Any], said: str):
    r = requests([0.0, 1.0], 10, 5)._replace(**{k: np.array(v) for k, v in change.items()})
    with pytest.raises(InputError, match=said):
        simulate(Case(r, Scheduler(4, 512, 100), grid()))


def test_cases_of_one_program_are_alike():
    plain = Case(requests([0.0], 10, 5), Scheduler(4, 512, 100), grid())
    with pytest.raises(InputError, match="all or none must draft"):
        simulate_all([plain, plain._replace(draft=Draft(2, 0.5))])


@functools.cache
def served() -> list[Any]:
    machine, model = load_chip("h100").machine, load_model("llama-3.3-70b").model
    return traced([machine, model, precision("fp8"), load_engine("vllm").engine])


def test_table_of_step_times_is_the_engine():
    machine, model, formats, engine = served()
    found = step_grid(machine, model, Plan(8, 1, 64, 2048), formats, engine)
    drawn = np.random.default_rng(0)
    load, plan = traced((Load(2048, 1), Plan(8, 1, 1, 2048)))
    # One request alone: its whole prompt is one step, its one decode step is TPOT.
    one = jax.jit(serving.estimate)(machine, model, load, plan, formats, engine)
    assert float(found.time(1, 2048.5, 0, 0, 0)) == pytest.approx(float(one.tpot), rel=1e-3)
    prompt = float(one.ttft) - float(engine.request_time)
    assert float(found.time(0, 1, 2048, 0, 1)) == pytest.approx(prompt, rel=2e-3)
    # More work never takes less time.
    for _ in range(20):
        d, x, p = drawn.uniform(1, 200), drawn.uniform(100, 9000), drawn.uniform(1, 2000)
        assert float(found.time(d, x, p, 0, 1)) > float(found.time(d, x, 0, 0, 0))
        assert float(found.time(d, x, p, 8000, 1)) > float(found.time(d, x, p, 0, 1))


@pytest.mark.parametrize(
    "isl, osl, batch",
    [
        (1000, 1000, 1),
        (1000, 1000, 16),
        (200, 1000, 16),
        (4000, 1000, 4),
        # 0.6 and 0.5 of the load.
        (1000, 250, 64),
        (4000, 1000, 64),
    ],
)
def test_closed_forms(isl: int, osl: int, batch: int):
    """Outputs differ, or requests would stay in step for ever. See docs/simulation.md."""
    compare(served()[3], isl, osl, batch, tpot=0.02)


@pytest.mark.parametrize(
    "isl, osl, batch",
    # 0.01 to 0.8 of the load; two prompts of 1,000 tokens share a step.
    [(200, 1000, 4), (1000, 1000, 64), (4000, 1000, 64), (8000, 200, 4), (8000, 200, 16)],
)
def test_closed_forms_of_prompts_in_steps_of_their_own(isl: int, osl: int, batch: int):
    """What arrives while another waits to be admitted is computed with it, and stops all others."""
    engine = served()[3]
    values = tuple(map(as_real, (1.0, 0.06, 9.0)))
    engine = eqx.tree_at(lambda e: (e.exclusive, e.request_time, e.admission_steps), engine, values)
    # Prompts of four chunks with 200 tokens each are where TPOT is least right.
    compare(engine, isl, osl, batch, tpot=0.05)


def compare(engine: Engine, isl: int, osl: int, batch: int, tpot: float) -> None:
    machine, model, formats, _ = served()
    load, plan = traced((Load(isl, osl), Plan(8, 1, batch, 2048)))
    asked = jax.jit(serving.estimate)(machine, model, load, plan, formats, engine)
    room = float(kv_tokens(machine, model, load, plan, formats, engine))
    n = 1500
    drawn = np.random.default_rng(batch)
    scheduler = Scheduler(
        batch, 2048, math.floor(room / 16), 16.0,
        float(engine.request_time), float(engine.admission_steps), float(engine.exclusive),
    )  # fmt: skip
    grid = step_grid(machine, model, plan, formats, engine)
    outputs = np.round(osl * drawn.uniform(0.8, 1.2, n))
    found = simulate(Case(requests(0.0, isl, outputs), scheduler, grid, batch))
    got = found.steady().summary()
    assert got["tpot_mean"] == pytest.approx(float(asked.tpot), rel=tpot)
    assert got["ttft_mean"] == pytest.approx(float(asked.ttft), rel=0.05)


@pytest.mark.parametrize(
    "isl, osl, fit, batch",
    [(4000, 800, 40, 60), (2000, 1000, 24, 48), (1000, 1000, 32, 48), (500, 1500, 24, 64)],
)
def test_closed_form_of_preemption(isl: int, osl: int, fit: int, batch: int):
    """Memory that runs out: what is computed again, and who waits for it after a first token."""
    machine, model, formats, engine = served()
    load, plan = traced((Load(isl, osl), Plan(8, 1, batch, 2048)))

    def with_memory(share: Any) -> Any:
        return eqx.tree_at(lambda e: e.memory_fraction, engine, traced(share))

    def room(share: Any) -> float:
        return float(kv_tokens(machine, model, load, plan, formats, with_memory(share)))

    # Linear in memory: as much as so many requests take on average.
    low, high = room(0.5), room(0.9)
    share = 0.5 + 0.4 * ((fit + 0.1) * (isl + 0.5 * osl) - low) / (high - low)
    small = with_memory(share)
    asked = jax.jit(serving.estimate)(machine, model, load, plan, formats, small)
    assert float(asked.admitted) == pytest.approx(fit, abs=1)
    n = 1500
    scheduler = Scheduler(
        batch, 2048, math.floor(room(share) / 16), 16.0,
        float(engine.request_time), float(engine.admission_steps),
    )  # fmt: skip
    outputs = np.round(osl * np.random.default_rng(batch).uniform(0.8, 1.2, n))
    grid = step_grid(machine, model, plan, formats, small)
    found = simulate(Case(requests(0.0, isl, outputs), scheduler, grid, batch)).steady()
    got = found.summary()
    # Means of all requests in the loop: Little's law, whatever part of them is followed.
    assert batch / got["e2e_mean"] == pytest.approx(float(asked.request_rate), rel=0.04)
    tokens = np.sum(found.finish - found.first) / np.sum(found.osl - 1)
    assert tokens == pytest.approx(float(asked.tpot), rel=0.08)
    times = got["preemptions"] / got["requests"]
    assert times == pytest.approx(float(asked.preempted), rel=0.2, abs=0.05)
