"""`python -m perfmodel.validate_simulation [RUNS.csv] --out docs/simulation.md`.

Sets the event simulation beside the closed forms of `perfmodel.serving`, and beside runs of vLLM
that were measured request by request (columns as LLMServingSim publishes them).
"""

import argparse
import math
import textwrap
from pathlib import Path
from typing import NamedTuple

import equinox as eqx
import jax
import numpy as np
import pandas as pd

from perfmodel import serving
from perfmodel.chips import load_chip
from perfmodel.engines import load_engine
from perfmodel.formats import precision
from perfmodel.models.catalogue import load_model
from perfmodel.plan import Load, Plan
from perfmodel.relax import traced
from perfmodel.simulate import Case, Outcome, Requests, Scheduler, simulate, simulate_all
from perfmodel.step_grid import kv_tokens, step_grid

LENGTHS = ((200, 1000), (1000, 1000), (1000, 250), (4000, 1000), (8000, 200))
BATCHES = (1, 4, 16, 64, 256)
CHUNK = 2048
COUNT = 3000
SPREADS = {"±20 %": (0.8, 1.2), "±90 %": (0.1, 1.9)}
"""How far outputs are spread, evenly, around the mean."""

SETS = (
    ("Llama-3.3-70B, fp8, eight H100, vLLM", "llama-3.3-70b", "h100", "fp8", "vllm", 8),
    ("Llama-3.1-8B, bf16, one H100, vLLM", "llama-3.1-8b", "h100", "bf16", "vllm", 1),
    ("Llama-3.3-70B, fp8, four B200, SGLang", "llama-3.3-70b", "b200", "fp8", "sglang", 4),
)
"""What is compared: title, network, chip, formats, engine profile, tensor-parallel degree. The form
of the closed loop was chosen with all of them in view."""

_estimate = jax.jit(serving.estimate)


class Point(NamedTuple):
    """One closed loop: `load`, the share of time in which steps carry a prompt; TPOT and TTFT [s]
    of `perfmodel.serving`, and as simulated."""

    isl: int
    osl: int
    batch: int
    load: float
    closed: tuple[float, float]
    found: tuple[tuple[float, float], ...]


def closed_loops(model: str, chip: str, formats: str, engine: str, tp: int) -> list[Point]:
    """Returns TPOT and TTFT of closed loops, in closed form and simulated."""
    machine, network = load_chip(chip).machine, load_model(model).model
    fixed = traced((machine, network)), traced((precision(formats), load_engine(engine).engine))
    (machine, network), (kind, serves) = fixed
    cases, asked = [], []
    for isl, osl in LENGTHS:
        for batch in BATCHES:
            load, plan = traced((Load(isl, osl), Plan(tp, 1, batch, CHUNK)))
            grid = step_grid(machine, network, plan, kind, serves)
            room = float(kv_tokens(machine, network, load, plan, kind, serves))
            scheduler = Scheduler(
                batch, CHUNK, math.floor(room / serves.block), float(serves.block),
                float(serves.request_time), float(serves.admission_steps), float(serves.exclusive),
                float(serves.reservation == 1.0),
            )  # fmt: skip
            for low, high in SPREADS.values():
                drawn = np.random.default_rng(batch).uniform(low, high, COUNT)
                columns = (0.0, isl, np.maximum(np.round(osl * drawn), 1.0), 0.0)
                requests = Requests(*np.broadcast_arrays(*columns))
                cases.append(Case(requests, scheduler, grid, batch))
            asked.append((isl, osl, batch, _estimate(machine, network, load, plan, kind, serves)))
    outcomes = simulate_all(cases)
    points = []
    for place, (isl, osl, batch, found) in enumerate(asked):
        both = outcomes[place * len(SPREADS) : (place + 1) * len(SPREADS)]
        means = [outcome.steady(0.25).summary() for outcome in both]
        chunks = math.ceil(isl / CHUNK)
        grid = cases[place * len(SPREADS)].grid
        each = grid.time(found.running - 1, isl + osl / 2, isl / chunks, isl / 2, 1 / chunks)
        points.append(
            Point(
                isl, osl, batch, float(found.request_rate * chunks * each),
                (float(found.tpot), float(found.ttft)),
                tuple((mean["tpot_mean"], mean["ttft_mean"]) for mean in means),
            )
        )  # fmt: skip
    return points


FULL_LENGTHS = ((4000, 400), (2000, 1000), (1000, 1000), (500, 1500), (200, 4000))
FULL_SEATS = 48
FULL_TIMES = (0.8, 1.0, 1.5, 3.0)
"""Where memory runs out: requests that fit it on average, and how many times as many are asked."""


def _several(isl: int, osl: int, low: float, high: float) -> Load:
    """Returns outputs spread evenly from `low` to `high` of their mean as eight classes."""
    middles = low + (high - low) * (np.arange(8) + 0.5) / 8.0
    same = np.full(8, 1.0)
    return traced(Load(isl * same, osl * middles, 0.0 * same, weight=same / 8.0))


def full_memory(model: str, chip: str, formats: str, engine: str, tp: int) -> list[list[object]]:
    """Returns rows of a table: closed loops that run out of memory, and what is simulated."""
    machine, network = traced((load_chip(chip).machine, load_model(model).model))
    kind, serves = traced((precision(formats), load_engine(engine).engine))
    cases, asked = [], []
    for isl, osl in FULL_LENGTHS:
        for times in FULL_TIMES:
            batch = round(FULL_SEATS * times)
            load, plan = traced((Load(isl, osl), Plan(tp, 1, batch, CHUNK)))

            def room(share: float, load: Load = load, plan: Plan = plan) -> float:
                least = eqx.tree_at(lambda e: e.memory_fraction, serves, traced(share))
                return float(kv_tokens(machine, network, load, plan, kind, least))

            # Linear in memory.
            low, high = room(0.5), room(0.9)
            share = 0.5 + 0.4 * (FULL_SEATS * (isl + 0.5 * osl) - low) / (high - low)
            small = eqx.tree_at(lambda e: e.memory_fraction, serves, traced(share))
            grid = step_grid(machine, network, plan, kind, small)
            scheduler = Scheduler(
                batch, CHUNK, math.floor(room(share) / serves.block), float(serves.block),
                float(serves.request_time), float(serves.admission_steps),
            )  # fmt: skip
            for ends in SPREADS.values():
                drawn = np.random.default_rng(batch).uniform(*ends, COUNT)
                columns = (0.0, isl, np.maximum(np.round(osl * drawn), 1.0), 0.0)
                cases.append(Case(Requests(*np.broadcast_arrays(*columns)), scheduler, grid, batch))
                several = _several(isl, osl, *ends)
                found = _estimate(machine, network, several, plan, kind, small)
                asked.append((isl, osl, batch, found))
    rows: list[list[object]] = []
    for (isl, osl, batch, found), outcome in zip(asked, simulate_all(cases), strict=True):
        steady = outcome.steady(0.25)
        mean = steady.summary()
        tokens = np.sum(steady.finish - steady.first) / np.sum(steady.osl - 1.0)
        pairs = (
            (found.request_rate, batch / mean["e2e_mean"]),
            (found.tpot, tokens),
            (found.ttft, mean["ttft_mean"]),
        )
        errors = [_percent(float(value), of) for value, of in pairs]
        counts = mean["preemptions"] / mean["requests"], float(found.preempted)
        rows.append([isl, osl, batch, *(f"{count:.2f}" for count in counts), *errors])
    # Both spreads of a loop in one row.
    count = len(SPREADS)
    return [
        [*rows[i][:3], *(", ".join(str(r[k]) for r in rows[i : i + count]) for k in range(3, 8))]
        for i in range(0, len(rows), count)
    ]


class Run(NamedTuple):
    """How a measured run was set up: names of the table and of the catalogues, and the plan."""

    label: str
    chip: str
    model: str
    plan: Plan
    replicas: int
    places: int


RUNS = (
    Run("RTX4090", "rtx_4090", "llama-3.1-8b", Plan(1, 1, 256, CHUNK), 1, 256),
    Run("RTXPRO6000", "rtx_pro_6000", "qwen3-30b-a3b",
        Plan(2, 1, 256, CHUNK, attention_dp=2, expert_ranks=2), 2, 128),
)  # fmt: skip


def replay(run: Run, rows: pd.DataFrame, factor: float = 1.0) -> Outcome:
    """Returns what the simulation makes of the arrivals and lengths of a measured run.

    `factor` scales all step times: 1 predicts; another takes the engine's error out, to see the
    scheduler's.
    """
    machine, network = load_chip(run.chip).machine, load_model(run.model).model
    kind, engine = precision("bf16"), load_engine("vllm").engine
    grid = step_grid(machine, network, run.plan, kind, engine)
    grid = eqx.tree_at(lambda g: g.seconds, grid, grid.seconds * factor)
    means = [np.mean(rows[name].to_numpy(float)) for name in ("input_tokens", "output_tokens")]
    load = Load(float(means[0]), float(means[1]))
    numbers = traced((machine, network, load, run.plan, kind, engine))
    given = float(rows["kv_cache_tokens"].to_numpy(float)[0])
    room = float(kv_tokens(*numbers)) if math.isnan(given) else given
    scheduler = Scheduler(
        run.places, CHUNK, math.floor(room / 16), 16.0, float(engine.request_time),
        float(engine.admission_steps), shared_budget=1.0,
    )  # fmt: skip
    columns = [rows[name].to_numpy(float) for name in ("arrival_s", "input_tokens")]
    outputs = rows["output_tokens"].to_numpy(float)
    requests = Requests(columns[0], columns[1], outputs, np.zeros(len(rows)))
    return simulate(Case(requests, scheduler, grid, replicas=run.replicas))


def _percent(value: float, of: float) -> str:
    return f"{100 * (value / of - 1):+.1f}"


def _line(cells: list[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _loops_table(points: list[Point]) -> list[str]:
    names = ["ISL", "OSL", "batch", "load", "TPOT [ms]", "TTFT [ms]"]
    names += [f"{what}, ±20 %, ±90 %" for what in ("TPOT", "TTFT")]
    lines = [_line([*names]), _line(["---"] * len(names))]
    for p in points:
        tpot, ttft = p.found[0]
        cells: list[object] = [p.isl, p.osl, p.batch, f"{p.load:.2f}"]
        cells += [f"{1e3 * tpot:.2f}", f"{1e3 * ttft:.0f}"]
        cells += [
            ", ".join(_percent(p.closed[what], found[what]) for found in p.found) for what in (0, 1)
        ]
        lines.append(_line(cells))
    return lines


def _told(points: list[Point]) -> str:
    """Returns the errors below 80 % load, in a sentence."""
    light = [p for p in points if p.load < 0.8]
    tpot, ttft = (
        np.asarray([100 * abs(p.closed[what] / p.found[0][what] - 1) for p in light])
        for what in (0, 1)
    )
    return (
        f"Below 80 % load, {len(light)} rows: TPOT off by {np.median(tpot):.1f} % in the median, "
        f"{np.max(tpot):.1f} % at most; TTFT by {np.median(ttft):.1f} % and {np.max(ttft):.0f} %, "
        f"within 5 % in {np.sum(ttft <= 5.0)} rows."
    )


def _errors(outcome: Outcome, rows: pd.DataFrame) -> dict[str, list[object]]:
    """Returns lines of the table of runs, by quantity."""
    measured = {"TTFT [s]": rows["ttft_s"], "TPOT [ms]": rows["tpot_ms"]}
    found = {"TTFT [s]": outcome.ttft, "TPOT [ms]": 1e3 * outcome.tpot}
    lines: dict[str, list[object]] = {}
    for name in found:
        sim, real = found[name], measured[name].to_numpy(float)
        cells: list[object] = []
        for of in (np.mean, np.median, lambda x: np.quantile(x, 0.9)):
            cells.append(f"{of(sim):.4g} / {of(real):.4g}")
        signed = 100 * (sim / real - 1)
        cells += [f"{np.median(np.abs(signed)):.0f}", f"{np.median(signed):+.0f}"]
        lines[name] = cells
    return lines


def _runs_table(table: pd.DataFrame) -> list[str]:
    names = ["run", "times", "of", "mean", "P50", "P90", "error", "bias"]
    lines = [_line([*names]), _line(["---"] * len(names))]
    for run in RUNS:
        rows = table.iloc[np.flatnonzero(table["chip"] == run.label)]
        as_is = replay(run, rows)
        real = float(np.mean(rows["tpot_ms"].to_numpy(float))) * 1e-3
        factor = 1.0
        for _ in range(4):
            factor *= real / float(np.nanmean(replay(run, rows, factor).tpot))
        scaled = replay(run, rows, factor)
        both = (("as predicted", as_is), (f"times {factor:.2f}", scaled))
        for what, outcome in both:
            for name, cells in _errors(outcome, rows).items():
                lines.append(_line([f"{run.chip}, {run.model}", what, name, *cells]))
    return lines


def text(runs: pd.DataFrame | None) -> str:
    """Returns the page."""
    lines = [_INTRODUCTION, "## Beside the closed forms", "", _LOOPS, ""]
    for title, model, chip, formats, engine, tp in SETS:
        points = closed_loops(model, chip, formats, engine, tp)
        told = textwrap.fill(_told(points), 99)
        lines += [f"### {title}", "", *_loops_table(points), "", told, ""]
    lines += ["### Where they stop", "", _STOPS, ""]
    lines += ["## Where memory runs out", "", _FULL, ""]
    for title, model, chip, formats, engine, tp in SETS[:2]:
        names = [
            "ISL",
            "OSL",
            "batch",
            "preemptions",
            "in closed form",
            "requests/s",
            "TPOT",
            "TTFT",
        ]
        table = [names, ["---"] * len(names), *full_memory(model, chip, formats, engine, tp)]
        lines += [f"### {title}", "", *(_line([*row]) for row in table), ""]
    lines += [_FULL_LIMITS, ""]
    if runs is not None:
        lines += ["## Beside measured runs", "", _RUNS, "", *_runs_table(runs), "", _READ, ""]
    return "\n".join([*lines, _LIMITS])


def main() -> None:
    """Writes the page."""
    parser = argparse.ArgumentParser(prog="python -m perfmodel.validate_simulation")
    parser.add_argument("runs", nargs="?", type=Path, help="measured requests; left out without")
    parser.add_argument("--out", type=Path, default=Path("docs/simulation.md"))
    asked = parser.parse_args()
    page = text(None if asked.runs is None else pd.read_csv(asked.runs))
    asked.out.write_text(page, encoding="utf-8")


_INTRODUCTION = """\
# The event simulation

Written by `python -m perfmodel.validate_simulation llmservingsim_vllm_requests.csv`; do not edit by
hand.

`perfmodel.simulate` follows every request through the scheduler of an engine: continuous batching
with chunked prefill, pages of keys and values, preemption with recomputation, prompts that never
fit turned away, prompts in steps of their own, whole outputs set aside, static batches, drafts
whose acceptance is drawn, several replicas, and a pool of servers that compute prompts and hand
the keys over. Step times are those of `perfmodel.passes.run_step`, sampled once on a table
(`perfmodel.step_grid`). A test compares it, request by request, with the same scheduler written
plainly, one step at a time.
"""

_LOOPS = """\
Prompts of one length, outputs spread evenly around their mean by 20 or 90 %, chunks of 2,048
tokens, 3,000 requests of which the first and last quarter are left out. `load` is the share of
time in which steps carry a prompt; times are simulated (±20 %), and errors are of
`perfmodel.serving.estimate` in per cent of the simulated mean."""

_STOPS = """\
**Mean TPOT** stops at prompts of four chunks with outputs of 200 tokens: from half load on it is
up to 5 % low, because the share of chunk steps is corrected by seconds spent before the first
token. Corrected by steps it would be within 1 % here, and 0.6 points further from measured runs.

**Mean TTFT** stops at saturation. Past 80 % load, where prompts of several chunks fill most steps,
it is up to 13 % short, and up to 30 % long where requests just begin to pile up: the root that
joins a queue to its saturation line approaches it slowly. Far past saturation both agree again.

**A wait is a whole number of steps.** A request of a closed loop comes when another ends, at the
end of a step, and may start R + lag later: in step ⌈R/t + lag/t⌉. Where that quotient is near a
whole number, a step time 1 % off is a step more or less, up to 10 % of the TTFT of short prompts;
and a faster chip can wait up to one of its steps longer. Requests that come at random wait half a
step on average instead, which is what those do that have met another's prompt. An engine without
request time (`neutral`) admits a request when another ends, here and in the simulation.

**Memory that preempts** is in the closed forms, less exactly: how far is below. Behind a pool of
prefill it is in the simulation alone, and TTFT may be many times as long as in closed form.

**The loop is counted in steps.** A step that carries a chunk lasts several times as long as one
without, but it too ends one token of each request: requests come back to the queue for prefill
after O − 1 steps, whatever those last. Counted in seconds the queue would be longer: TTFT was up
to 23 % (70B) and 33 % (8B) above the simulation below 80 % load. Where prompts
have steps of their own nobody comes back meanwhile.

Requests that start together and have one length stay in step for ever: outputs must differ for
means to be those of random traffic. How much they differ matters little where requests are not
slowed by it (±20 % or ±90 %)."""

_FULL = """\
The same loops with memory for 48 requests on average, and 0.8 to 3 times as many asked. Engines
admit a request whose prompt fits; what runs then outgrows the pool, and the youngest is preempted
and computed again. `perfmodel.preemption` has this in closed form (its docstring derives it). Every
cell has two values, of outputs spread by 20 and by 90 %, which the closed form has as eight
classes: preemptions of a request simulated and in closed form, and errors of the closed form in
per cent. TPOT is of all tokens, waiting between them included."""

_FULL_LIMITS = """\
Prompts computed again are right within a few per cent, and with them the rate. How many requests
wait with a first token and how many without one, and so TPOT against TTFT, is that of ends that
know nothing of each other: outputs of nearly one length stay partly in step, swing between many
young and few old requests, and wait longer after their first token (TPOT up to 12 % low where an
output is many times its prompt). Where about as many requests are asked as fit, few wait and TTFT
hangs on a request more or less: it is off by up to half, and by more where outputs are twenty
times the prompts."""

_RUNS = """\
vLLM 0.19, 300 requests each with ShareGPT-like lengths at about ten a second (LLMServingSim's
published runs; MIT). Simulated / measured; error and bias are the median |error| and median error
of single requests, in per cent. Llama-3.1-8B ran on one RTX 4090 with room for 41,408 tokens, so
most of TTFT is waiting and requests are preempted; Qwen3-30B-A3B on two RTX PRO 6000, each with
requests of its own and half of the experts. Nothing was fitted to these runs. The second pair of
rows of each scales every step time by the one number that makes the mean TPOT right: what is left
is the scheduler's error."""

_READ = """\
**Queueing is right:** with step times of the right mean, the wait of each of 300 requests in
front of a full RTX 4090 is within 2 % in the median, preemptions included. **Step times are
not:** they are a third too long on the RTX 4090 and 14 % too short for experts over two RTX PRO
6000. Likely causes, not tested: the RTX 4090 borrows an L40S's kernel constants (0.82 of the
bandwidth and 0.61 of the peak; the last request, for the most part alone, took 21.7 ms a token
where 26.4 are predicted, and 15.9 is the weights over the data sheet's bandwidth); ranks that
share experts wait for each other's prompts (below). TTFT without a queue, as most of it is on
the RTX PRO 6000, stays 15 to 31 % too long: request time and admission of the profile are
fitted to loaded servers of other chips."""

_LIMITS = """\
## What it does not follow

- Attention groups (data-parallel attention) are simulated as replicas that do not wait for each
  other; in reality all wait in every layer for the one that computes a prompt.
- A pipeline's round is one step, with room for a chunk in every stage: micro-batches do not drift
  apart, and a lone prompt of several chunks takes the longer of a token's latency and its chunks.
  So a chunk holds up all micro-batches on its whole way: TPOT of a loaded pipeline of four stages
  of H100 is simulated half as long again as in closed form, of forty on four wafers 7 % longer.
- Pages are of the bytes that a request of the mean length holds a token. Sliding windows and
  recurrent states make short requests heavier and long ones lighter than that.
- A request is admitted when its whole prompt fits, and one that could never end is turned away;
  engines may admit a first chunk alone, and stop at the longest context.
- Cached prompt tokens are given with the request (`perfmodel.traces.prefix_hits`); the cache is
  not simulated along, and what all share is stored once, outside the pool.
- A prefill pool gives a request to any of its servers, whatever waits there (one line for all
  would be up to 30 % faster, and further from measured runs); each decoding replica has prefill
  servers of its own, and prompts are computed one at a time.
- Drafts: steps are not taken together, so that runs take as many turns as there are cycles.
"""

if __name__ == "__main__":
    main()
