"""Full serving estimates per second: dense network, calibrated kernels, random designs."""

from collections.abc import Iterator

import jax
import numpy as np
from jax import Array

from benchmarks import _engine
from benchmarks._engine import BLOCK, CHIP, COUNT, FAST, FORMAT, MIXTURE, MODEL, Fixed
from benchmarks._measure import repeated, timed
from benchmarks._report import Result
from perfmodel import question
from perfmodel.compiled import CHAINED, chained
from perfmodel.designs import blocks as searched
from perfmodel.designs import designs
from perfmodel.formats import precision_name
from perfmodel.plan import Load, Plan

_BUDGET = 10e6
_MIXTURE_BUDGET = 3e6


def evaluate(plans: Plan, loads: Load, shared: Fixed) -> dict[str, Array]:
    """Returns the outputs of a block of designs."""
    return jax.vmap(lambda plan, load: _engine.outputs(_engine.estimate(plan, load, shared)))(
        plans, loads
    )


def run(quick: bool) -> Iterator[Result]:
    """Yields rates and what building the program takes."""
    builds, repeats = (1, 5) if quick else (3, 20)
    shared, listed = _engine.fixed(), _engine.random_designs()
    example = (*listed[0], shared)
    plain = _engine.build(chained(evaluate), example, CHAINED, builds)
    fast = _engine.build(chained(evaluate), example, FAST, 1)
    fused = _engine.build(evaluate, example, {}, 1)
    asked = f"{COUNT:,} designs, {MODEL} {FORMAT} on {CHIP}, blocks of {BLOCK:,}"
    yield _engine.rate(
        "estimates", _engine.speed(plain.call, listed, (shared,), repeats), _BUDGET, asked
    )
    note = _difference(plain.call(*example), fast.call(*example))
    spent = _engine.speed(fast.call, listed, (shared,), repeats)
    yield _engine.rate("estimates, XLA fast math", spent, _BUDGET, note)
    note = f"as XLA fuses by itself; compile {fused.compile.wall:.2f} s"
    spent = _engine.speed(fused.call, listed, (shared,), repeats)
    yield _engine.rate("estimates, fused", spent, note=note)
    yield _mixture(builds, repeats)
    yield _search(repeats)
    yield _engine.start("trace and lower", plain)
    note = f"{plain.compile.cpu:.2f} CPU-seconds; with fast math {fast.compile.wall:.2f} s"
    yield Result("compile", plain.compile.wall, "s", note=note)


def _difference(one: dict[str, Array], other: dict[str, Array]) -> str:
    """Returns the largest relative difference of any output, in words."""
    worst = {}
    for name in one:
        a, b = np.asarray(one[name]), np.asarray(other[name])
        # A margin may be anything around zero.
        scale = np.maximum(np.abs(a), 1.0 if name == "margin" else 1e-30)
        worst[name] = float(np.max(np.abs(a - b) / scale))
    name = max(worst, key=worst.__getitem__)
    median = float(np.median(list(worst.values())))
    return f"differs by at most {worst[name]:.0e} ({name}; the median output {median:.0e})"


def _mixture(builds: int, repeats: int) -> Result:
    """Returns the rate for a mixture of experts, with expert ranks and attention groups."""
    shared, listed = _engine.fixed(MIXTURE), _engine.random_designs(mixture=True)
    program = _engine.build(chained(evaluate), (*listed[0], shared), CHAINED, builds)
    spent = _engine.speed(program.call, listed, (shared,), repeats)
    note = f"{MIXTURE}, EP and attention groups; compile {program.compile.wall:.1f} s"
    return _engine.rate("estimates, mixture of experts", spent, _MIXTURE_BUDGET, note)


def _search(repeats: int) -> Result:
    """Returns the rate of the search's own program: every number of the table, one thread."""
    asked = question.ask(
        MODEL, [CHIP], [precision_name(FORMAT)], isl=4000, osl=1000, prefix_hit=0.0,
        engine="neutral", slo_ttft=None, slo_tpot=None, price=None,
    )  # fmt: skip
    draw = np.random.default_rng(0)
    listed = designs(
        tp=2 ** draw.integers(0, 5, COUNT),
        batch=draw.integers(1, 1025, COUNT),
        chunk=2 ** draw.integers(9, 14, COUNT),
    )
    numbers = 0

    def whole() -> None:
        nonlocal numbers
        for _, found in searched(asked, 0, 0, listed):
            numbers = sum(leaf.size for leaf in jax.block_until_ready(found).values()) // BLOCK

    whole()
    spent = repeated(lambda: timed(whole), repeats)
    return _engine.rate("estimates as the search makes them", spent, note=f"{numbers} numbers each")
