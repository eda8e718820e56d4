"""The event simulation: 10,000 requests of a 70B, from light load to one that preempts."""

import math
from collections.abc import Iterator

import numpy as np

from benchmarks._measure import Clock, repeated, timed
from benchmarks._report import Result
from perfmodel.chips import load_chip
from perfmodel.engines import load_engine
from perfmodel.formats import precision
from perfmodel.models.catalogue import load_model
from perfmodel.plan import Load, Plan
from perfmodel.relax import traced
from perfmodel.simulate import Case, Requests, Scheduler, simulate
from perfmodel.step_grid import kv_tokens, step_grid

COUNT = 10_000
MEAN = 1000, 300
BUDGET = 2.0


def run(quick: bool) -> Iterator[Result]:
    """Yields the time of a simulation after its program is compiled, and of making that."""
    repeats = 2 if quick else 5
    machine, model = load_chip("h100").machine, load_model("llama-3.3-70b").model
    formats, engine = precision("fp8"), load_engine("vllm").engine
    plan, load = Plan(8, 1, 256, 2048), Load(*MEAN)
    numbers = traced((machine, model, load, plan, formats, engine))
    clock = Clock()
    grid = step_grid(machine, model, plan, formats, engine)
    grid.seconds.block_until_ready()
    yield Result("table of step times, compiled and filled", clock.spent().wall, "s")
    blocks = math.floor(float(kv_tokens(*numbers)) / 16)
    drawn = np.random.default_rng(0)
    isl, osl = (np.maximum(np.round(drawn.gamma(2.0, mean / 2.0, COUNT)), 1.0) for mean in MEAN)
    for name, rate, room, concurrency in (
        ("Poisson, 2 a second", 2.0, blocks, 0),
        ("Poisson, 8 a second", 8.0, blocks, 0),
        ("Poisson, beyond capacity, preempting", 20.0, 6000, 0),
        ("closed loop of 64", 1.0, blocks, 64),
    ):
        arrival = np.cumsum(drawn.exponential(1.0 / rate, COUNT))
        requests = Requests(arrival, isl, osl, np.zeros(COUNT))
        scheduler = Scheduler(256, 2048, room, 16.0, float(engine.request_time))
        case = Case(requests, scheduler, grid, concurrency)
        first = timed(lambda case=case: simulate(case))
        spent = repeated(lambda case=case: timed(lambda: simulate(case)), repeats)
        found = simulate(case)
        note = f"{found.decisions:,} turns, {np.sum(found.preemptions):,} preemptions"
        if first.wall > 2 * spent.wall + 0.5:
            note += f"; {first.wall - spent.wall:.1f} s to compile"
        yield Result(f"10,000 requests: {name}", spent.wall, "s", BUDGET, note)
