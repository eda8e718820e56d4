"""The systems worth having, by gradient: relaxed, improved for a sweep of targets, rounded.

Every choice is a real number (chips of a replica, its expert ranks and attention groups, the share
of all chips that a pool has, batch, drafts, micro-batches, the chunk of prompts, the share of slow
memories, that of weights placed before keys); the estimate of a relaxed system is the same function
as that of a whole one. What comes out is rounded to whole systems nearby, which are scored like any
others.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from perfmodel import cache, question, system
from perfmodel.margins import MARGINS
from perfmodel.placement import System
from perfmodel.question import Layout
from perfmodel.relax import maximum, minimum
from perfmodel.system_space import (
    AXES,
    Choice,
    Row,
    Space,
    columns,
    enumerate_systems,
    numbers_of,
    score,
    with_choice,
)

_TARGETS, _STEPS, _RATE, _PENALTY = 64, 80, 0.08, 8.0
_STARTS = 8192
_BEYOND = 0.25
"""How far targets reach beyond what the best start has, as a logarithm."""
# Relaxed layouts do not cut heads into whole parts; the rounded ones do.
_RELAXED = [i for i, name in enumerate(MARGINS) if name != "divisibility"]


class _Point(NamedTuple):
    """A system as real numbers: logarithms of chips of a replica, of its expert ranks and attention
    groups, and of what a pool has of all chips (before they are shared out), by pool; of batch,
    drafts + 1, micro-batches and chunk; and, as they are, the shares of `slow` memories and of
    weights placed `first`."""

    chips: Any
    ep: Any
    attention_dp: Any
    part: Any
    batch: Any
    tokens: Any
    micro: Any
    chunk: Any
    slow: Any
    first: Any


def _relaxed(point: _Point, most: Any, per_chip: Any) -> Choice:
    """Returns the system of a point: pools share all chips, each has at least one replica; expert
    ranks and attention groups are part of a stage."""
    chips = jnp.exp(point.chips)
    share = jax.nn.softmax(point.part)
    replicas = maximum(share * most / chips, 1.0)
    stages = maximum(chips * per_chip, 1.0)
    ranks = maximum(chips / stages, 1.0)
    return Choice(
        chips=chips,
        stages=stages,
        replicas=replicas,
        ep=minimum(jnp.exp(point.ep), ranks),
        attention_dp=minimum(jnp.exp(point.attention_dp), ranks),
        batch=jnp.exp(point.batch),
        tokens=jnp.exp(point.tokens) - 1.0,
        micro=jnp.exp(point.micro),
        chunk=jnp.exp(point.chunk),
        slow=point.slow,
        first=point.first,
    )


def _descend(
    part_pools: tuple[int, ...],
    axes: tuple[str, str],
    base: System,
    starts: _Point,
    targets: Any,
    low: _Point,
    high: _Point,
    most: Any,
    per_chip: Any,
    model: Any,
    load: Any,
    engine: Any,
    limits: Any,
    draft: Any,
) -> tuple[Any, ...]:
    """Returns where points end, each of shape [targets, …]."""
    signs = [1.0 if AXES[axis][1] else -1.0 for axis in axes]

    def loss(point: _Point, target: Any) -> Any:
        choice = _relaxed(point, most, per_chip)
        made = with_choice(base, part_pools, choice)
        found = numbers_of(made, system.evaluate(made, model, load, engine, limits, draft))
        gains = [sign * jnp.log(found[axis]) for sign, axis in zip(signs, axes, strict=True)]
        over = maximum(jnp.log(jnp.sum(choice.chips * choice.replicas) / most), 0.0)
        missed = jnp.sum(maximum(-found["margins"][jnp.asarray(_RELAXED)], 0.0))
        return _PENALTY * (maximum(target - gains[0], 0.0) + missed + over) - gains[1]

    slope = jax.vmap(jax.grad(loss))
    optimiser = optax.adam(optax.cosine_decay_schedule(_RATE, _STEPS, alpha=0.02), b1=0.7)

    def step(state: Any, _: None) -> tuple[Any, None]:
        points, memory = state
        updates, memory = optimiser.update(slope(points, targets), memory)
        moved = optax.apply_updates(points, updates)
        return (jax.tree.map(jnp.clip, moved, low, high), memory), None

    (points, _), _ = jax.lax.scan(step, (starts, optimiser.init(starts)), length=_STEPS)
    return tuple(points)


@functools.cache
def _descending(part_pools: tuple[int, ...], axes: tuple[str, str]) -> Any:
    return functools.partial(_descend, part_pools, axes)


def descended(space: Space, axes: tuple[str, str]) -> tuple[Choice, int, int]:
    """Returns whole systems near descended ones; how many were evaluated to start from, and how
    many gradients were taken."""
    room = space.most - sum(min(x.chips for x in listed) for listed in space.layouts)
    coarse = space._replace(
        layouts=tuple(_coarse(listed, room) for listed in space.layouts),
        batches=space.batches[:: max(len(space.batches) // 6, 1)],
        drafts=space.drafts[:: max(len(space.drafts) // 3, 1)],
        micro=space.micro[:1],
        chunks=space.chunks[:: max(len(space.chunks) - 1, 1)],
    )
    grid = enumerate_systems(coarse)
    # A few ways to share out the chips start it; the descent finds the rest.
    grid = grid.take(_spread(grid, _STARTS))
    values = score(space, grid)
    good = np.flatnonzero(np.all(values["margins"] >= 0.0, axis=1))
    if not len(good):
        return grid.take(good), len(grid.batch), 0
    signs = [1.0 if AXES[axis][1] else -1.0 for axis in axes]
    gains = np.stack(
        [s * np.log(np.maximum(values[a][good], 1e-30)) for s, a in zip(signs, axes, strict=True)]
    )
    targets = np.linspace(gains[0].min(), gains[0].max() + _BEYOND, _TARGETS)
    reach = np.where(gains[0] >= targets[:, None] - 1e-6, gains[1], -np.inf)
    # What no start reaches starts from the one that comes nearest.
    reach[:, np.argmax(gains[0])] = np.maximum(reach[:, np.argmax(gains[0])], -1e30)
    best = grid.take(good).take(np.argmax(reach, axis=1))
    starts = _Point(
        chips=np.log(best.chips),
        ep=np.log(best.ep),
        attention_dp=np.log(best.attention_dp),
        part=np.log(best.chips * best.replicas),
        batch=np.log(best.batch),
        tokens=np.log1p(best.tokens),
        micro=np.log(best.micro),
        chunk=np.log(best.chunk),
        slow=np.asarray(best.slow, dtype=float),
        first=np.asarray(best.first, dtype=float),
    )
    ends = []
    for end in (min, max):
        sizes, ep, attention_dp = (
            np.broadcast_to(
                np.log([end(getattr(x, name) for x in listed) for listed in space.near]),
                starts.chips.shape,
            )
            for name in ("chips", "ep", "attention_dp")
        )
        ends.append(
            _Point(
                chips=sizes,
                ep=ep,
                attention_dp=attention_dp,
                part=np.full(starts.part.shape, end(-4.0, 8.0)),
                batch=np.full(_TARGETS, np.log(end(space.batches))),
                tokens=np.full(_TARGETS, np.log1p(end(space.drafts))),
                micro=np.full(_TARGETS, np.log(end(space.micro))),
                chunk=np.full(_TARGETS, np.log(end(space.chunks))),
                slow=np.full(_TARGETS, end(slow for slow, _ in space.tiers)),
                first=np.full(_TARGETS, end(first for _, first in space.tiers)),
            )
        )
    # Where stages are more than one, the layout is the one asked for.
    per_chip = [listed[0].pp * listed[0].regions / listed[0].chips for listed in space.layouts]
    per_chip = [
        each if len({x.chips for x in listed}) == 1 else 0.0
        for each, listed in zip(per_chip, space.layouts, strict=True)
    ]
    asked = space.made.asked
    values_in = question.numbers(
        (space.made.built, starts, targets, *ends, float(space.most), np.asarray(per_chip),
         asked.network, asked.load, space.made.engine, asked.limits, space.made.draft)
    )  # fmt: skip
    name = f"system-descent-{'-'.join(map(str, space.part_pools))}-{'-'.join(axes)}"
    program = cache.program(name, _descending(space.part_pools, axes), values_in)
    ended = _Point(*(np.asarray(leaf, dtype=float) for leaf in program(*values_in)))
    near = _rounded(space, ended)
    joined = zip(near, grid.take(good).take(np.unique(np.argmax(reach, axis=1))), strict=True)
    return Choice(*map(np.concatenate, joined)), len(grid.batch), _TARGETS * _STEPS


def _spread(grid: Choice, most: int) -> np.ndarray:
    """Returns at most so many rows of a list, evenly."""
    count = len(grid.batch)
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))


def _coarse(listed: tuple[Layout, ...], room: int) -> tuple[Layout, ...]:
    """Returns the layouts of few numbers of chips: the least, the most that leave `room` for the
    least of the other pools, and one between where there are several.

    Args: `room`, chips that are left when each pool has its least.
    """
    sizes = sorted({each.chips for each in listed})
    fit = [chips for chips in sizes if chips <= sizes[0] + room]
    kept = {fit[0], fit[len(fit) // 2] if len(fit) > 3 else fit[0], fit[-1]}
    return tuple(each for each in listed if each.chips in kept)


_NEAR_CUTS = 2
"""Ways to spread experts and attention that are tried, of the number of chips next to a point's."""


def _near(listed: Sequence[Layout], at: Sequence[float]) -> list[Layout]:
    """Returns the layouts around the logarithms of chips, expert ranks and attention groups: of
    both sizes next to it, those that are cut most alike."""
    size, ep, attention_dp = at
    sizes = sorted({each.chips for each in listed}, key=lambda chips: abs(np.log(chips) - size))

    def away(each: Layout) -> float:
        return (np.log(each.ep) - ep) ** 2 + (np.log(each.attention_dp) - attention_dp) ** 2

    found = []
    for chips in sizes[:2]:
        found += sorted((x for x in listed if x.chips == chips), key=away)[:_NEAR_CUTS]
    return found


def _rounded(space: Space, ended: _Point) -> Choice:
    """Returns the whole systems around real ones: both neighbours of every number."""
    rows: list[Row] = []
    numbers = []
    for i in range(len(ended.batch)):
        at = zip(ended.chips[i], ended.ep[i], ended.attention_dp[i], strict=True)
        cuts = [_near(listed, each) for listed, each in zip(space.near, at, strict=True)]
        share = np.exp(ended.part[i] - ended.part[i].max())
        share /= share.sum()
        own = list(
            itertools.product(
                _neighbours(np.exp(ended.batch[i]), space.batches),
                _neighbours(np.expm1(ended.tokens[i]), space.drafts),
                _neighbours(np.exp(ended.micro[i]), space.micro),
                _neighbours(np.exp(ended.chunk[i]), space.chunks),
                # Shares of memory are continuous: they stay what they have become.
                [round(float(ended.slow[i]), 3)],
                [round(float(ended.first[i]), 3)],
            )
        )
        for layout in itertools.product(*cuts):
            chips = np.asarray([each.chips for each in layout], dtype=float)
            wanted = np.maximum(share * space.most / chips, 1.0)
            choices = [sorted({int(np.floor(w)), int(np.ceil(w))}) for w in wanted]
            for replicas in itertools.product(*choices):
                if float(np.sum(chips * replicas)) > space.most:
                    continue
                rows += [(layout, replicas)] * len(own)
                numbers += own
    laid, rest = columns(rows), np.asarray(numbers, dtype=float)
    pools = len(space.names)
    table = np.unique(np.column_stack([*laid, rest]), axis=0)
    split = [table[:, i * pools : (i + 1) * pools] for i in range(len(laid))]
    return Choice(*split, *table[:, len(laid) * pools :].T)


def _neighbours(value: float, choices: Sequence[int]) -> list[int]:
    """Returns the choices on both sides of a number.

    >>> _neighbours(3.2, (1, 2, 4, 8)), _neighbours(9.0, (1, 2))
    ([2, 4], [2])
    """
    below = [c for c in choices if c <= value]
    above = [c for c in choices if c >= value]
    return sorted({*below[-1:], *above[:1]}) or [choices[-1]]
