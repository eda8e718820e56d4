"""The frontier by gradient: plans descended as real numbers, then rounded to their neighbours.

Every choice of a plan (chips of a stage, stages, expert ranks, attention groups, batch, chunk) is
a real number between its bounds; the estimate of a relaxed plan is the same function as that of a
whole one. For a sweep of targets on one axis, the other is improved:

    minimise  −log y + penalty · (shortfall of log x + what margins miss)

with Adam, all targets together in one compiled program. What comes out is rounded to whole plans
nearby, which are scored like any others: nothing relaxed is ever reported.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from perfmodel import cache, question, results, serving
from perfmodel.designs import Designs, blocks, designs
from perfmodel.formats import Precision
from perfmodel.machine import Machine
from perfmodel.margins import MARGINS
from perfmodel.models.transformer import Model
from perfmodel.plan import Engine, Limits, Load, Plan
from perfmodel.question import Layout, Question
from perfmodel.relax import maximum, minimum

TARGETS = 128
"""Points of the sweep. More follow a curved frontier more closely, at proportional cost."""

STEPS = 60
_RATE = 0.12
_PENALTY = 8.0
_START_BATCHES = 14
_NEAREST_LAYOUTS = 3
_BATCHES = 2

# Relaxed layouts do not cut heads into whole parts; the rounded ones do.
_KEPT = [i for i, name in enumerate(MARGINS) if name != "divisibility"]


class Relaxed(NamedTuple):
    """A plan as real numbers: logarithms of tp, pp, ep, attention_dp, batch and chunk."""

    tp: Any
    pp: Any
    ep: Any
    attention_dp: Any
    batch: Any
    chunk: Any


def _plan(point: Relaxed, most: Array, mixture: bool) -> Plan:
    """Returns the plan of a point; expert ranks and attention groups are part of its stage."""
    tp, pp, ep, dp, batch, chunk = map(jnp.exp, point)
    chips = tp * pp
    return Plan(
        chips=chips,
        stages=pp,
        batch=batch,
        chunk=chunk,
        replicas=maximum(most / chips, 1.0),
        attention_dp=minimum(dp, tp) if mixture else None,
        expert_ranks=minimum(ep, tp) if mixture else None,
    )


def _gain(name: str, design: results.Design) -> Array:
    """Returns the logarithm of a number, signed so that more is better."""
    quantity = results.BY_NAME[name]
    value = jnp.log(quantity.read(design))
    return value if quantity.better == "higher" else -value


def _descend(
    axes: tuple[str, str],
    machine: Machine,
    precision: Precision,
    starts: Relaxed,
    targets: Array,
    low: Relaxed,
    high: Relaxed,
    most: Array,
    model: Model,
    load: Load,
    engine: Engine,
    limits: Limits,
) -> tuple[Array, ...]:
    """Returns the leaves of `Relaxed` after all steps, each of shape [targets]."""

    def loss(point: Relaxed, target: Array) -> Array:
        plan = _plan(point, most, model.is_mixture)
        found = serving.estimate(machine, model, load, plan, precision, engine, limits)
        design = results.Design(machine, model, plan, precision, found)
        short = maximum(target - _gain(axes[0], design), 0.0)
        missed = jnp.sum(maximum(-found.margins[jnp.asarray(_KEPT)], 0.0))
        return _PENALTY * (short + missed) - _gain(axes[1], design)

    slope = jax.vmap(jax.grad(loss))
    optimiser = optax.adam(optax.cosine_decay_schedule(_RATE, STEPS, alpha=0.02), b1=0.7)

    def step(state: Any, _: None) -> tuple[Any, None]:
        points, memory = state
        updates, memory = optimiser.update(slope(points, targets), memory)
        moved = optax.apply_updates(points, updates)
        return (jax.tree.map(jnp.clip, moved, low, high), memory), None

    state = (starts, optimiser.init(starts))
    (points, _), _ = jax.lax.scan(step, state, length=STEPS)
    return tuple(points)


@functools.cache
def _of_axes(axes: tuple[str, str]) -> Any:
    return functools.partial(_descend, axes)


class Descended(NamedTuple):
    """Whole plans near the descended ones.

    Fields: `plans`, of one precision; how many plans were evaluated to `start`, and how many
    `gradients` were taken.
    """

    plans: Designs
    start: int
    gradients: int


def descend(
    asked: Question,
    chip: int,
    kind: int,
    layouts: Sequence[Layout],
    batches: Sequence[int],
    chunks: Sequence[int],
    axes: tuple[str, str],
    max_chips: int,
) -> Descended:
    """Returns whole plans of one chip and precision that lie near descended ones.

    Args:
        layouts, batches, chunks: what a plan may be; the outermost of each bound the descent.
        axes: targets are swept along the first, the second is improved.
        max_chips: chips that replicas may fill.
    """
    order = [layout for layout in layouts if layout.cp == 1]
    coarse = np.unique(np.geomspace(min(batches), max(batches), _START_BATCHES).round())
    grid = _grid(
        order, coarse.astype(int).tolist(), [*chunks][:: max(len(chunks) // 3, 1)], max_chips
    )
    points, gains = _scores(asked, chip, kind, grid, axes)
    if not len(points.tp):
        return Descended(points, len(grid.tp), 0)
    targets = np.linspace(gains[0].min(), gains[0].max(), TARGETS)
    low, high = _bounds(order, batches, chunks)

    def run(starts: Relaxed, low: Relaxed, high: Relaxed) -> Relaxed:
        return _run(asked, chip, kind, axes, (starts, targets, low, high, max_chips))

    # First everything is free.
    ended = run(_starts(points, gains, targets), low, high)
    around = _rounded(ended, order, batches, chunks, max_chips, _NEAREST_LAYOUTS)
    near, better = _scores(asked, chip, kind, around, axes)
    joined = Designs(*map(np.concatenate, zip(points, near, strict=True)))
    starts = _starts(joined, np.concatenate([gains, better], axis=1), targets)
    # Then each target keeps the whole layout that did best, and moves batch and chunk.
    kept = starts._replace(batch=low.batch, chunk=low.chunk)
    fixed = starts._replace(batch=high.batch, chunk=high.chunk)
    last = _rounded(run(starts, kept, fixed), order, batches, chunks, max_chips, 1)
    plans = Designs(*map(np.concatenate, zip(near, around, last, strict=True)))
    return Descended(plans, len(grid.tp), 2 * TARGETS * STEPS)


def _starts(points: Designs, gains: np.ndarray, targets: np.ndarray) -> Relaxed:
    """Returns, for each target, the plan that does best among those that reach it."""
    reach = np.where(gains[0] >= targets[:, None] - 1e-6, gains[1], -np.inf)
    best = points.take(np.argmax(reach, axis=1))
    return Relaxed(*(np.log(getattr(best, name)) for name in Relaxed._fields))


def _run(asked: Question, chip: int, kind: int, axes: tuple[str, str], moving: Any) -> Relaxed:
    """Returns where points end, as real numbers; one program for all calls of a structure."""
    starts, targets, low, high, most = moving
    machine = jax.tree.map(lambda leaf: leaf[chip], asked.machines)
    precision = jax.tree.map(lambda leaf: leaf[kind], asked.precisions)
    low, high = (
        Relaxed(*(np.broadcast_to(end, targets.shape) for end in ends)) for ends in (low, high)
    )
    values = question.numbers(
        (machine, precision, starts, targets, low, high, most, asked.network, asked.load,
         asked.engine.engine, asked.limits)
    )  # fmt: skip
    program = cache.program(f"descent-{'-'.join(axes)}", _of_axes(axes), values)
    found = program(*values)
    return Relaxed(*(np.exp(np.asarray(leaf, dtype=float)) for leaf in found))


def _grid(
    layouts: Sequence[Layout], batches: Sequence[int], chunks: Sequence[int], most: int
) -> Designs:
    rows = np.meshgrid(np.arange(len(layouts)), batches, chunks, indexing="ij")
    which, batch, chunk = (row.ravel() for row in rows)
    return _whole(np.asarray(layouts)[which], batch, chunk, most)


def _whole(layouts: np.ndarray, batch: np.ndarray, chunk: np.ndarray, most: int) -> Designs:
    """Returns distinct designs, with as many replicas as fit, those of fewer chips first."""
    columns = np.unique(np.column_stack([layouts, batch, chunk]).astype(int), axis=0)
    *degrees, batch, chunk = columns.T
    named = dict(zip(Layout._fields, degrees, strict=True))
    replicas = most // (named["tp"] * named["pp"])
    listed = designs(**named, batch=batch, chunk=chunk, replicas=replicas)
    listed = listed.take(named["attention_dp"] <= batch)
    return listed.take(np.argsort(listed.tp * listed.pp * listed.replicas, kind="stable"))


def _scores(
    asked: Question, chip: int, kind: int, listed: Designs, axes: tuple[str, str]
) -> tuple[Designs, np.ndarray]:
    """Returns the feasible plans, of no more requests than fit, and their gains on both axes,
    shape [2, plans]."""
    kept, gains = [], []
    for part, found in blocks(asked, chip, kind, listed):
        size = part.stop - part.start
        good = np.all(np.asarray(found["margins"])[:size] >= 0.0, axis=1)
        both = []
        for axis in axes:
            value = np.asarray(found[axis], dtype=float)[:size]
            good &= np.isfinite(value) & (value > 0.0)
            sign = 1.0 if results.BY_NAME[axis].better == "higher" else -1.0
            both.append(sign * np.log(np.where(value > 0.0, value, 1.0)))
        # Requests that wait for memory change neither rate nor TPOT: from as many as fit, the way
        # down is not flat.
        fit = np.maximum(np.asarray(found["admitted"])[:size][good], 1.0).astype(int)
        own = listed.take(part).take(good)
        kept.append(own._replace(batch=np.minimum(own.batch, fit)))
        gains.append(np.stack(both)[:, good])
    return Designs(*map(np.concatenate, zip(*kept, strict=True))), np.concatenate(gains, axis=1)


def _bounds(
    layouts: Sequence[Layout], batches: Sequence[int], chunks: Sequence[int]
) -> tuple[Relaxed, Relaxed]:
    table = np.asarray(layouts)
    named = dict(zip(Layout._fields, table.T, strict=True))
    named |= {"batch": np.asarray(batches), "chunk": np.asarray(chunks)}
    columns = [named[name] for name in Relaxed._fields]
    low, high = ([np.log(end(c)) for c in columns] for end in (np.min, np.max))
    return Relaxed(*low), Relaxed(*high)


def _rounded(
    ended: Relaxed,
    layouts: Sequence[Layout],
    batches: Sequence[int],
    chunks: Sequence[int],
    most: int,
    nearest: int,
) -> Designs:
    """Returns the whole plans around real ones: nearest layouts, neighbours of the rest."""
    table = np.asarray(layouts)
    named = [np.log(table[:, Layout._fields.index(name)]) for name in Relaxed._fields[:4]]
    here = np.log(np.stack(ended[:4], axis=1))
    distance = np.sum((here[:, None] - np.stack(named, axis=1)) ** 2, axis=2)
    near = np.argsort(distance, axis=1)[:, :nearest]

    def around(values: np.ndarray, choices: Sequence[int], each: int) -> np.ndarray:
        listed = np.sort(np.asarray(choices))
        above = np.searchsorted(listed, values)[:, None] + np.arange(-each, each)
        return listed[np.clip(above, 0, len(listed) - 1)]

    # Targets are wider apart than batches: a few of those between are worth their evaluation.
    batch, chunk = around(ended.batch, batches, _BATCHES), around(ended.chunk, chunks, 1)
    rows = np.meshgrid(
        np.arange(len(here)), range(near.shape[1]), range(2 * _BATCHES), (0, 1), indexing="ij"
    )
    point, layout, b, c = (row.ravel() for row in rows)
    return _whole(table[near[point, layout]], batch[point, b], chunk[point, c], most)
