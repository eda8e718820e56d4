"""Gradients per second of a scalar in all variables of a design, and in every machine number."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks import _engine
from benchmarks._engine import Fixed
from benchmarks._report import Result
from perfmodel.compiled import CHAINED, UNFUSED, chained
from perfmodel.machine import Machine
from perfmodel.plan import Load, Plan
from perfmodel.relax import minimum

_WEIGHTS = (0.2, 0.3, 0.1, -1.0, 0.1, 0.2, 0.3, 0.4, -5.0)


def score(plan: Plan, load: Load, shared: Fixed, weights: Array) -> Array:
    """Returns what a search would descend: weighted logarithms, and what is infeasible."""
    found = _engine.estimate(plan, load, shared)
    numbers = (
        found.ttft, found.tpot, found.e2e, found.output_rate_per_chip, found.memory_bytes,
        found.power, found.energy_per_output_token, found.usd_per_output_token,
    )  # fmt: skip
    missed = jnp.sum(minimum(found.margins, 0.0))
    return jnp.sum(weights * jnp.stack([*map(jnp.log, numbers), missed]))


def in_design(plans: Plan, loads: Load, shared: Fixed, weights: Array):
    """Returns each design's score and its gradient in its plan and load."""

    def one(plan: Plan, load: Load):
        return jax.value_and_grad(lambda both: score(*both, shared, weights))((plan, load))

    return jax.vmap(one)(plans, loads)


def in_everything(plans: Plan, loads: Load, shared: Fixed, weights: Array):
    """Returns the same, and each design's gradient in every number of the machine."""

    def one(plan: Plan, load: Load):
        def free(plan: Plan, load: Load, machine: Machine) -> Array:
            return score(plan, load, shared._replace(machine=machine), weights)

        return jax.value_and_grad(free, argnums=(0, 1, 2))(plan, load, shared.machine)

    return jax.vmap(one)(plans, loads)


def run(quick: bool) -> Iterator[Result]:
    """Yields rates and what building the programs takes."""
    builds, repeats = (1, 4) if quick else (2, 12)
    shared, listed = _engine.fixed(), _engine.random_designs()
    rest = (shared, jax.device_put(np.asarray(_WEIGHTS, dtype=np.float32)))
    variables = len(jax.tree.leaves(listed[0]))
    constants = sum(leaf.size for leaf in jax.tree.leaves(shared.machine))
    for what, function, count, budget in (
        ("in plan and load", in_design, variables, 2e6),
        ("in plan, load and machine", in_everything, variables + constants, 1.5e6),
    ):
        example = (*listed[0], *rest)
        built = _engine.build(chained(function), example, CHAINED, builds)
        value, slopes = built.call(*example)
        wrong = sum(int(np.sum(~np.isfinite(leaf))) for leaf in jax.tree.leaves((value, slopes)))
        note = f"{count} numbers each, {f'{wrong} not finite' if wrong else 'all finite'}"
        yield _engine.rate(
            f"gradients {what}", _engine.speed(built.call, listed, rest, repeats), budget, note
        )
        unfused = _engine.build(function, example, UNFUSED, builds)
        spent = _engine.speed(unfused.call, listed, rest, repeats)
        yield _engine.rate(f"gradients {what}, unfused", spent)
        for how, program, limit in (("", built, 5.0), (", unfused", unfused, None)):
            before = program.trace.wall + program.lower.wall
            note = (
                f"{program.compile.cpu:.2f} CPU-seconds; trace and lower {before:.2f} s before it"
            )
            yield Result(f"compile, {what}{how}", program.compile.wall, "s", limit, note)
