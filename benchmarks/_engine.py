"""What `forward` and `gradient` have in common: random designs, and the rate of a program.

Designs come in blocks of the size that the search uses: what passes between operations then stays
in cache. A call of that size runs on one core, so one thread per core hands out blocks.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks._measure import Clock, Spent, best, repeated, timed
from benchmarks._report import Result
from perfmodel import compiled, question, serving
from perfmodel.chips import load_chip
from perfmodel.designs import BLOCK
from perfmodel.engines import load_engine
from perfmodel.formats import Precision, precision
from perfmodel.machine import Machine
from perfmodel.models.catalogue import load_model
from perfmodel.models.transformer import Model
from perfmodel.plan import Engine, Limits, Load, Plan
from perfmodel.serving import Estimate

MODEL, MIXTURE, CHIP, FORMAT = "llama-3.3-70b", "qwen3-235b-a22b", "h100", "fp8"
BLOCKS = 25
COUNT = BLOCKS * BLOCK

FAST = {**compiled.CHAINED, "xla_cpu_enable_fast_math": True}
"""XLA's fast math: reassociates, and takes numbers to be finite."""


class Fixed(NamedTuple):
    """What all designs of a call share; traced, as in the search."""

    machine: Machine
    model: Model
    precision: Precision
    engine: Engine
    limits: Limits


def fixed(model: str = MODEL) -> Fixed:
    """Returns what the designs are evaluated on."""
    jax.config.update("jax_enable_compilation_cache", False)
    parts = (
        load_chip(CHIP).machine,
        load_model(model).model,
        precision(FORMAT),
        load_engine("neutral").engine,
        Limits(ttft=5.0, tpot=0.05),
    )
    return Fixed(*jax.device_put(question.numbers(parts)))


def random_designs(mixture: bool = False) -> list[tuple[Plan, Load]]:
    """Returns blocks of plans and loads, every variable drawn anew in each.

    Those of a `mixture` of experts have expert ranks and attention groups, too.
    """
    draw = np.random.default_rng(0)

    def spread(low: float, high: float) -> np.ndarray:
        return np.round(np.exp(draw.uniform(np.log(low), np.log(high), COUNT)))

    one = np.ones(COUNT)
    doubled = draw.integers(0, 5, COUNT)
    plan = Plan(
        attention_dp=2.0 ** draw.integers(0, doubled + 1) if mixture else None,
        expert_ranks=2.0 ** draw.integers(0, doubled + 1) if mixture else None,
        chips=2.0**doubled,
        stages=one,
        batch=spread(1, 1024),
        chunk=2.0 ** draw.integers(9, 14, COUNT),
        replicas=one,
    )
    load = Load(isl=spread(128, 32768), osl=spread(16, 4096), prefix_hit=0 * one, burst=0 * one)
    both = question.numbers((plan, load))
    both = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (COUNT,)), both)
    return [
        jax.device_put(jax.tree.map(lambda leaf, i=i: leaf[i : i + BLOCK], both))
        for i in range(0, COUNT, BLOCK)
    ]


OUTPUTS = (
    "ttft", "tpot", "e2e", "output_rate", "memory_bytes", "admitted", "power",
    "energy_per_output_token", "usd_per_output_token",
)  # fmt: skip
"""What a forward estimate is asked for, beside the least margin."""


def outputs(found: Estimate) -> dict[str, Array]:
    """Returns the ten numbers that a forward estimate is asked for."""
    return {name: getattr(found, name) for name in OUTPUTS} | {"margin": jnp.min(found.margins)}


def estimate(plan: Plan, load: Load, shared: Fixed) -> Estimate:
    """Returns one design's estimate."""
    machine, model, formats, engine, limits = shared
    return serving.estimate(machine, model, load, plan, formats, engine, limits)


class Program(NamedTuple):
    """A compiled program, and the least that each stage of building it took."""

    call: Callable[..., Any]
    trace: Spent
    lower: Spent
    compile: Spent


def build(
    function: Callable[..., Any], example: Sequence[Any], options: Mapping[str, Any], repeats: int
) -> Program:
    """Returns a function compiled for an example, built from nothing in every repeat."""
    built: Any = None
    stages: list[tuple[Spent, ...]] = []

    def whole() -> None:
        nonlocal built
        jax.clear_caches()
        spent = []
        # A new function each time: traces are remembered by identity.
        built = jax.jit(lambda *arguments: function(*arguments), compiler_options=dict(options))
        for stage in ("trace", "lower", "compile"):
            clock = Clock()
            built = getattr(built, stage)(*(example if stage == "trace" else ()))
            spent.append(clock.spent())
        stages.append(tuple(spent))

    repeated(lambda: timed(whole), repeats)
    return Program(built, *(best(runs) for runs in zip(*stages, strict=True)))


def cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def shared(work: Callable[[int, int], None]) -> None:
    """Runs `work(thread, threads)` on a thread per core."""
    threads = cores()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads), [threads] * threads))


def speed(call: Callable[..., Any], blocks: Sequence[Any], rest: Any, repeats: int) -> Spent:
    """Returns the least time and CPU time of all blocks, handed out by a thread per core."""
    threads = cores()

    def share(first: int) -> None:
        jax.block_until_ready([call(*block, *rest) for block in blocks[first::threads]])

    with ThreadPoolExecutor(threads) as pool:
        return repeated(lambda: timed(lambda: list(pool.map(share, range(threads)))), repeats)


def start(what: str, program: Program) -> Result:
    """Returns what comes before compiling, as a line of the table."""
    trace, lower = program.trace, program.lower
    cpu = f"{trace.cpu + lower.cpu:.2f} CPU-seconds"
    note = f"{cpu}; trace {trace.wall:.2f} s, lower {lower.wall:.2f} s"
    return Result(what, trace.wall + lower.wall, "s", 0.4, note)


def rate(what: str, spent: Spent, budget: float | None = None, note: str = "") -> Result:
    """Returns a rate over all designs as a line of the table."""
    per_cpu = f"{COUNT / spent.cpu / 1e6:.2f} M per CPU-second"
    return Result(what, COUNT / spent.wall, "1/s", budget, f"{per_cpu}{'; ' if note else ''}{note}")
