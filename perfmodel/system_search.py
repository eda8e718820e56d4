"""The systems worth having: layouts and replicas of every pool, batch, drafts and micro-batches.

`frontier` of systems enumerates whole systems of a placement under a number of chips, or descends:
every choice is then a real number (chips of a replica, the share of all chips that a pool has,
batch, drafts), improved by gradient for a sweep of targets on one axis, rounded to whole systems
nearby, and scored like any others.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import xarray as xr

from perfmodel import cache, question, results, system
from perfmodel.errors import Infeasible, InputError
from perfmodel.exploration import nondominated
from perfmodel.placement import Placement, System
from perfmodel.question import ModelLike
from perfmodel.relax import inverse, maximum, minimum
from perfmodel.serving import MARGINS
from perfmodel.systems import PoolAsked, SystemAsked, ask, parse_pool, pressure, table
from perfmodel.units import KILOWATT

BLOCK = 2048
"""Systems evaluated in one call."""

_MOST_SYSTEMS = 5_000_000
_BATCHES = tuple(np.unique(np.geomspace(1, 1024, 32).round()).astype(int).tolist())
_TARGETS, _STEPS, _RATE, _PENALTY = 64, 80, 0.08, 8.0
_RELAXED = [i for i, name in enumerate(MARGINS) if name != "divisibility"]

AXES: Mapping[str, tuple[str, bool]] = {
    "tokens_per_second_user": ("tok/s a user", True),
    "output_tokens_per_second_chip": ("tok/s a chip", True),
    "output_tokens_per_second": ("tok/s", True),
    "output_tokens_per_second_kw": ("tok/s a provisioned kW, hosts included", True),
    "output_tokens_per_second_rack": ("tok/s a rack", True),
    "ttft_s": ("TTFT", False),
    "tpot_s": ("TPOT", False),
    "power_w": ("power", False),
    "energy_per_total_token_j": ("J per input or output token", False),
    "usd_per_million_output_tokens": ("$ per million output tokens", False),
}
"""Axes of a frontier of systems, and whether more is better."""


class Choice(NamedTuple):
    """Systems of one placement as columns.

    Fields: by pool, shape [n, pools]: `chips` of a replica and the pipeline `stages` they form,
    `replicas`, `ep` and `attention_dp`; of the system, shape [n]: `batch`, `tokens` drafted and
    `micro`-batches.
    """

    chips: Any
    stages: Any
    replicas: Any
    ep: Any
    attention_dp: Any
    batch: Any
    tokens: Any
    micro: Any

    def take(self, rows: Any) -> "Choice":
        """Returns the systems at an index, slice or mask."""
        return Choice(*(column[rows] for column in self))


def _footprint(made: System, found: system.SystemEstimate) -> tuple[Any, Any]:
    """Returns power provisioned for all pools, hosts included, without PUE [W], and racks they take
    (parts of one counted as such); nan where that of a pool is unknown."""
    watts, racks = [], []
    for i, pool in enumerate(made.pools):
        site, count = pool.machine.site, found.owns[i] * found.pool_chips[i]
        for known, listed, per_chip in (
            (site.provisioned_power, watts, site.provisioned_power),
            (site.rack_chips, racks, inverse(maximum(site.rack_chips, 1e-9))),
        ):
            listed.append(count * jnp.where(known > 0.0, per_chip, jnp.nan))
    return sum(watts), sum(racks)


def _numbers(made: System, found: system.SystemEstimate) -> dict[str, Any]:
    """Returns what a search reads of an estimate, by the names of `AXES` and of `results`."""
    watts, racks = _footprint(made, found)
    return {
        "tokens_per_second_user": 1.0 / found.tpot,
        "output_tokens_per_second_chip": found.output_rate / found.chips,
        "output_tokens_per_second": found.output_rate,
        "output_tokens_per_second_kw": KILOWATT * found.output_rate / watts,
        "output_tokens_per_second_rack": found.output_rate / racks,
        "requests_per_second": found.request_rate,
        "ttft_s": found.ttft,
        "tpot_s": found.tpot,
        "e2e_s": found.e2e,
        "power_w": found.power,
        "provisioned_power_w": watts,
        "racks": racks,
        "energy_per_total_token_j": found.energy_per_total_token,
        "usd_per_million_output_tokens": jnp.where(
            found.usd_per_output_token > 0.0, 1e6 * found.usd_per_output_token, jnp.nan
        ),
        "chips": found.chips,
        "load": found.load,
        "decoding_share": found.decoding / found.running,
        "margins": found.margins,
    }


def _with(base: System, part_pools: tuple[int, ...], choice: Choice) -> System:
    """Returns a system with the numbers of one choice."""

    def pool(old: Any, i: int) -> Any:
        plan = old.plan
        new = eqx.tree_at(
            lambda p: (p.chips, p.stages, p.replicas, p.batch),
            plan,
            (choice.chips[i], choice.stages[i], choice.replicas[i], choice.batch),
        )
        if plan.expert_ranks is not None:
            degrees = (
                minimum(choice.ep[i], choice.chips[i]),
                minimum(choice.attention_dp[i], choice.chips[i]),
            )
            new = eqx.tree_at(lambda p: (p.expert_ranks, p.attention_dp), new, degrees)
        return eqx.tree_at(lambda p: p.plan, old, new)

    first, attention, ffn = (
        pool(old, i)
        for old, i in zip((base.prefill, base.attention, base.ffn), part_pools[:3], strict=True)
    )
    made = eqx.tree_at(
        lambda s: (s.prefill, s.attention, s.ffn, s.micro),
        base,
        (first, attention, ffn, choice.micro),
    )
    if base.draft is None or base.speculation is None:
        return made
    spec = eqx.tree_at(lambda s: s.tokens, base.speculation, choice.tokens)
    return eqx.tree_at(
        lambda s: (s.draft, s.speculation), made, (pool(base.draft, part_pools[3]), spec)
    )


def _many(
    part_pools: tuple[int, ...],
    base: System,
    choices: Choice,
    model: Any,
    load: Any,
    engine: Any,
    limits: Any,
    draft: Any,
) -> dict[str, Any]:
    def one(choice: Choice) -> dict[str, Any]:
        made = _with(base, part_pools, choice)
        return _numbers(made, system.evaluate(made, model, load, engine, limits, draft))

    return jax.vmap(one)(choices)


def _options() -> Mapping[str, str]:
    return cache.UNFUSED if jax.default_backend() == "cpu" else {}


@functools.cache
def program_of(part_pools: tuple[int, ...]) -> Any:
    """Returns the function that evaluates many systems: `part_pools` is the pool of each part."""
    return functools.partial(_many, part_pools)


@functools.cache
def _program(part_pools: tuple[int, ...]) -> Any:
    return jax.jit(program_of(part_pools), compiler_options=dict(_options()))


class Space(NamedTuple):
    """What a search varies: `made`, the system it starts from; names of its pools; which of them
    does each part; chips and stages that a replica of each may have; `most` chips of all pools;
    batches, numbers of drafts and of micro-batches."""

    made: SystemAsked
    names: tuple[str, ...]
    part_pools: tuple[int, ...]
    layouts: tuple[tuple[tuple[int, int], ...], ...]
    most: int
    batches: tuple[int, ...]
    drafts: tuple[int, ...]
    micro: tuple[int, ...]


def score(space: Space, choices: Choice) -> dict[str, np.ndarray]:
    """Returns every number of a list of systems, block by block."""
    count = len(choices.batch)
    asked = space.made.asked
    engine, limits = space.made.engine, question.numbers(asked.limits)
    found: list[dict[str, np.ndarray]] = []
    for start in range(0, count, BLOCK):
        stop = min(start + BLOCK, count)
        rows = np.minimum(np.arange(start, start + BLOCK), count - 1)
        part = question.numbers(choices.take(rows))
        values = (
            space.made.built, part, asked.network, asked.load, engine, limits, space.made.draft,
        )  # fmt: skip
        name = f"systems-{'-'.join(map(str, space.part_pools))}"
        program = cache.stored(name, program_of(space.part_pools), values, _options())
        numbers = jax.device_get((program or _program(space.part_pools))(*values))
        found.append({k: np.asarray(v)[: stop - start] for k, v in numbers.items()})
    return {name: np.concatenate([part[name] for part in found]) for name in found[0]}


def enumerate_systems(space: Space, replicas: Sequence[Sequence[float]] | None = None) -> Choice:
    """Returns every system of a space: layouts and whole replicas of each pool that leave no room
    for another replica, times batches, drafts and micro-batches.

    Args: `replicas`, counts to try by pool; then all of them, whether or not they fill the chips.
    """
    rows: list[tuple[Any, ...]] = []
    for layout in itertools.product(*space.layouts):
        sizes = [chips for chips, _ in layout]
        counts = _fillings(sizes, space.most) if replicas is None else itertools.product(*replicas)
        for each in counts:
            if sum(n * size for n, size in zip(each, sizes, strict=True)) <= space.most:
                rows.append((*sizes, *(stages for _, stages in layout), *each))
    if not rows:
        raise InputError(
            f"max_chips: {space.most} chips hold no replica of each pool of {len(space.names)}"
        )
    count = len(rows) * len(space.batches) * len(space.drafts) * len(space.micro)
    if count > _MOST_SYSTEMS:
        raise InputError(
            f"frontier: {count:,} systems are more than {_MOST_SYSTEMS:,}; ask for fewer chips"
        )
    axes = np.meshgrid(
        np.arange(len(rows)), space.batches, space.drafts, space.micro, indexing="ij"
    )
    which, batch, tokens, micro = (axis.ravel() for axis in axes)
    columns = np.asarray(rows, dtype=float)[which]
    pools = len(space.names)
    chips, stages, counted = (columns[:, i * pools : (i + 1) * pools] for i in range(3))
    # Experts are spread over all ranks of a replica, whose attention stays together.
    return Choice(chips, stages, counted, chips, np.ones_like(chips), batch, tokens, micro)


def _fillings(sizes: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """Returns whole replicas of pools of these sizes that fill `most` chips as far as they can.

    >>> _fillings([4, 8], 16)
    [(1, 1), (2, 1)]
    """
    found: list[tuple[int, ...]] = []
    first = sizes[0]
    if len(sizes) == 1:
        return [(most // first,)] if most >= first else []
    rest = sum(sizes[1:])
    for n in range(1, (most - rest) // first + 1):
        found += [(n, *others) for others in _fillings(sizes[1:], most - n * first)]
    # Of those that differ in the last pool only, the fullest; every n of the first is kept.
    return found


def feasible(
    values: Mapping[str, np.ndarray],
    at_least: Mapping[str, float] | None = None,
    at_most: Mapping[str, float] | None = None,
) -> np.ndarray:
    """Returns the rows of feasible systems within bounds of some of their numbers."""
    good = np.all(values["margins"] >= 0.0, axis=1)
    for name, bound in (at_least or {}).items():
        good &= values[name] >= bound
    for name, bound in (at_most or {}).items():
        good &= values[name] <= bound
    return np.flatnonzero(good)


def front(values: Mapping[str, np.ndarray], axes: tuple[str, str]) -> np.ndarray:
    """Returns the rows of feasible systems that none betters, sorted by the first axis."""
    rows = feasible(values)
    x, y = (np.asarray(values[axis], dtype=float) for axis in axes)
    rows = rows[np.isfinite(x[rows]) & np.isfinite(y[rows])]
    # Of equal ones the one of fewer chips.
    rows = rows[np.argsort(values["chips"][rows], kind="stable")]
    signs = [1.0 if AXES[axis][1] else -1.0 for axis in axes]
    if not len(rows):
        return rows
    best = rows[nondominated(signs[0] * x[rows], signs[1] * y[rows], _BOTH)]
    return best[np.argsort(x[best], kind="stable")]


# Two axes of `results` of which more is better, for `nondominated`.
_BOTH = ("tokens_per_second_user", "output_tokens_per_second_chip")


# ---- Descent ----


class _Point(NamedTuple):
    """A system as real numbers: logarithms of chips of a replica and of what a pool has of all
    chips (before they are shared out), by pool; of batch, drafts + 1 and micro-batches."""

    chips: Any
    part: Any
    batch: Any
    tokens: Any
    micro: Any


def _relaxed(point: _Point, most: Any, per_chip: Any) -> Choice:
    """Returns the system of a point: pools share all chips, each has at least one replica."""
    chips = jnp.exp(point.chips)
    share = jax.nn.softmax(point.part)
    replicas = maximum(share * most / chips, 1.0)
    return Choice(
        chips=chips,
        stages=maximum(chips * per_chip, 1.0),
        replicas=replicas,
        ep=chips,
        attention_dp=jnp.ones_like(chips),
        batch=jnp.exp(point.batch),
        tokens=jnp.exp(point.tokens) - 1.0,
        micro=jnp.exp(point.micro),
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
        made = _with(base, part_pools, choice)
        found = _numbers(made, system.evaluate(made, model, load, engine, limits, draft))
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


@functools.cache
def _descent_program(part_pools: tuple[int, ...], axes: tuple[str, str]) -> Any:
    return jax.jit(_descending(part_pools, axes), compiler_options=dict(_options()))


def descended(space: Space, axes: tuple[str, str]) -> tuple[Choice, int, int]:
    """Returns whole systems near descended ones; how many were evaluated to start from, and how
    many gradients were taken."""
    coarse = space._replace(
        layouts=tuple(listed[:: max(len(listed) // 2, 1)] for listed in space.layouts),
        batches=space.batches[:: max(len(space.batches) // 6, 1)],
        drafts=space.drafts[:: max(len(space.drafts) // 3, 1)],
        micro=space.micro[:1],
    )
    grid = enumerate_systems(coarse)
    # A few ways to share out the chips start it; the descent finds the rest.
    grid = grid.take(_spread(grid, 4096))
    values = score(space, grid)
    good = np.flatnonzero(np.all(values["margins"] >= 0.0, axis=1))
    if not len(good):
        return grid.take(good), len(grid.batch), 0
    signs = [1.0 if AXES[axis][1] else -1.0 for axis in axes]
    gains = np.stack(
        [s * np.log(np.maximum(values[a][good], 1e-30)) for s, a in zip(signs, axes, strict=True)]
    )
    targets = np.linspace(gains[0].min(), gains[0].max(), _TARGETS)
    reach = np.where(gains[0] >= targets[:, None] - 1e-6, gains[1], -np.inf)
    best = grid.take(good).take(np.argmax(reach, axis=1))
    starts = _Point(
        chips=np.log(best.chips),
        part=np.log(best.chips * best.replicas),
        batch=np.log(best.batch),
        tokens=np.log1p(best.tokens),
        micro=np.log(best.micro),
    )
    ends = []
    for end in (min, max):
        sizes = np.log([end(chips for chips, _ in listed) for listed in space.layouts])
        ends.append(
            _Point(
                chips=np.broadcast_to(sizes, starts.chips.shape),
                part=np.full(starts.part.shape, end(-4.0, 8.0)),
                batch=np.full(_TARGETS, np.log(end(space.batches))),
                tokens=np.full(_TARGETS, np.log1p(end(space.drafts))),
                micro=np.full(_TARGETS, np.log(end(space.micro))),
            )
        )
    per_chip = [listed[0][1] / listed[0][0] for listed in space.layouts]
    per_chip = [each if each > 1.0 else 0.0 for each in per_chip]
    asked = space.made.asked
    values_in = question.numbers(
        (space.made.built, starts, targets, *ends, float(space.most), np.asarray(per_chip),
         asked.network, asked.load, space.made.engine, asked.limits, space.made.draft)
    )  # fmt: skip
    name = f"system-descent-{'-'.join(map(str, space.part_pools))}-{'-'.join(axes)}"
    stored = cache.stored(name, _descending(space.part_pools, axes), values_in, _options())
    program = stored or _descent_program(space.part_pools, axes)
    ended = _Point(*(np.asarray(leaf, dtype=float) for leaf in program(*values_in)))
    near = _rounded(space, ended)
    joined = zip(near, grid.take(good).take(np.unique(np.argmax(reach, axis=1))), strict=True)
    return Choice(*map(np.concatenate, joined)), len(grid.batch), _TARGETS * _STEPS


def _spread(grid: Choice, most: int) -> np.ndarray:
    """Returns at most so many rows of a list, evenly."""
    count = len(grid.batch)
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))


def _rounded(space: Space, ended: _Point) -> Choice:
    """Returns the whole systems around real ones: both neighbours of every number."""
    pools, rows = len(space.names), []
    for i in range(len(ended.batch)):
        sizes = []
        for p in range(pools):
            listed = sorted(space.layouts[p])
            logs = np.abs(np.log([c for c, _ in listed]) - ended.chips[i, p])
            sizes.append([listed[j] for j in np.argsort(logs, kind="stable")[:2]])
        share = np.exp(ended.part[i] - ended.part[i].max())
        share /= share.sum()
        batch = _neighbours(np.exp(ended.batch[i]), space.batches)
        tokens = _neighbours(np.expm1(ended.tokens[i]), space.drafts)
        micro = _neighbours(np.exp(ended.micro[i]), space.micro)
        for layout in itertools.product(*sizes):
            chips = np.asarray([c for c, _ in layout], dtype=float)
            wanted = np.maximum(share * space.most / chips, 1.0)
            choices = [sorted({int(np.floor(w)), int(np.ceil(w))}) for w in wanted]
            for replicas in itertools.product(*choices):
                if float(np.sum(chips * replicas)) > space.most:
                    continue
                for b, k, m in itertools.product(batch, tokens, micro):
                    rows.append((*chips, *(s for _, s in layout), *replicas, b, k, m))
    table_ = np.unique(np.asarray(rows, dtype=float).reshape(len(rows), -1), axis=0)
    chips, stages, replicas = (table_[:, i * pools : (i + 1) * pools] for i in range(3))
    b, k, m = table_[:, 3 * pools :].T
    return Choice(chips, stages, replicas, chips, np.ones_like(chips), b, k, m)


def _neighbours(value: float, choices: Sequence[int]) -> list[int]:
    """Returns the choices on both sides of a number.

    >>> _neighbours(3.2, (1, 2, 4, 8)), _neighbours(9.0, (1, 2))
    ([2, 4], [2])
    """
    below = [c for c in choices if c <= value]
    above = [c for c in choices if c >= value]
    return sorted({*below[-1:], *above[:1]}) or [choices[-1]]


# ---- What is asked by names ----


_NEEDS = {
    "output_tokens_per_second_rack": "rack_chips",
    "output_tokens_per_second_kw": "tdp",
    "usd_per_million_output_tokens": "a price",
}
_DRAFTS = (0, 1, 2, 3, 4, 5, 6, 8)
_MICRO = (1, 2, 3)


def space(
    model: ModelLike,
    pools: Mapping[str, PoolAsked | str],
    *,
    base: PoolAsked | str | None = None,
    isl: int,
    osl: int,
    max_chips: int = 16,
    batches: Sequence[int] = _BATCHES,
    drafts: Sequence[int] = _DRAFTS,
    micro: Sequence[int] = _MICRO,
    **options: Any,
) -> Space:
    """Returns what a frontier searches; see `frontier` for the arguments.

    `enumerate_systems` lists it and `score` evaluates the list, where more than the front is asked.
    """
    where, named = table(pools, base)
    parsed = {n: parse_pool(p, n) if isinstance(p, str) else p for n, p in named.items()}
    made = ask(model, parsed, where, batch=1, isl=isl, osl=osl, **options)
    return _space(model, made, where, max_chips, batches, drafts, micro)


def size(
    model: ModelLike,
    pools: Mapping[str, PoolAsked | str],
    *,
    rate: float,
    base: PoolAsked | str | None = None,
    isl: int,
    osl: int,
    headroom: float = 0.2,
    max_chips: int | None = None,
    batches: Sequence[int] = _BATCHES,
    drafts: Sequence[int] = (0, 1, 2, 3, 4, 5, 6, 8),
    micro: Sequence[int] = (1, 2, 3),
    **options: Any,
) -> xr.Dataset:
    """Returns the smallest system of a placement that serves `rate` requests a second, along
    `point` (one): the fewest chips of all pools, of those the least power.

    The rate is what the system finishes with every request in flight that its batch allows; the
    limits on TTFT and TPOT hold then. Arguments as of `frontier`, and `headroom`, capacity beyond
    the rate as a share of it. Chips are doubled until a system serves the rate, and then halved in
    between.

    Raises:
        Infeasible: no system of at most `max_chips` (4,096 by default) serves it.
    """
    said = "a positive number of requests per second"
    needed = question.real_number("rate", rate, 1e-12, 1e9, said) * (1.0 + headroom)
    where, named = table(pools, base)
    parsed = {n: parse_pool(p, n) if isinstance(p, str) else p for n, p in named.items()}
    made = ask(model, parsed, where, batch=1, isl=isl, osl=osl, **options)
    least = sum(p.tp * p.pp for p in parsed.values())
    most = 4096 if max_chips is None else question.whole("max_chips", max_chips, least)

    def serving(chips: int) -> tuple[Space, Choice, dict[str, np.ndarray], np.ndarray]:
        space = _space(model, made, where, chips, batches, drafts, micro)
        choices = enumerate_systems(space)
        values = score(space, choices)
        good = np.all(values["margins"] >= 0.0, axis=1)
        return (
            space,
            choices,
            values,
            np.flatnonzero(good & (values["requests_per_second"] >= needed)),
        )

    low, high, found = least - 1, least, serving(least)
    best = found[2]["requests_per_second"]
    while not len(found[3]) and high < most:
        low, high = high, min(2 * high, most)
        found = serving(high)
        best = found[2]["requests_per_second"]
    if not len(found[3]):
        good = np.all(found[2]["margins"] >= 0.0, axis=1)
        reached = float(np.max(best[good])) if np.any(good) else 0.0
        if not reached:
            raise Infeasible(_why(found[0], found[2]))
        raise Infeasible(
            f"{most} chips serve {reached:.3g} requests a second within the limits, "
            f"{needed:.3g} are asked for (with {headroom:.0%} headroom)"
        )
    while high - low > 1:
        middle = (low + high) // 2
        tried = serving(middle)
        if len(tried[3]):
            high, found = middle, tried
        else:
            low = middle
    space, choices, values, rows = found
    order = np.lexsort((values["power_w"][rows], values["chips"][rows]))
    row = rows[order[:1]]
    axes = ("tokens_per_second_user", "output_tokens_per_second_chip")
    about = {"rate": float(rate), "headroom": headroom}
    return _dataset(space, choices.take(row), {k: v[row] for k, v in values.items()}, axes, about)


def _space(
    model: ModelLike,
    made: SystemAsked,
    where: Placement,
    max_chips: int,
    batches: Sequence[int],
    drafts: Sequence[int],
    micro: Sequence[int],
) -> Space:
    network = made.asked.model
    names = tuple(made.pools)
    parts = [where.prefill, where.attention, where.ffn]
    if made.built.draft is not None:
        parts.append(where.draft)
    most = question.whole("max_chips", max_chips)
    layouts = []
    for name in names:
        pool = made.pools[name]
        fixed = pool.tp > 1 or pool.pp > 1 or pool.regions > 1
        if fixed:
            layouts.append(((pool.tp * pool.pp, pool.pp * pool.regions),))
            continue
        only_drafts = name not in parts[:3]
        source = network.model
        if only_drafts and made.draft_name:
            source = question.find_model(made.draft_name).model
        sizes = [d for d in question.degrees(source) if d <= most and d & (d - 1) == 0]
        layouts.append(tuple((d, 1) for d in sizes))
    apart = where.ffn != where.attention or (made.built.draft is not None)
    return Space(
        made, names, tuple(names.index(part) for part in parts), tuple(layouts), most,
        tuple(question.whole("batch", b) for b in batches),
        tuple(drafts) if made.built.speculation is not None else (0,),
        tuple(micro) if apart else (1,),
    )  # fmt: skip


def frontier(
    model: ModelLike,
    pools: Mapping[str, PoolAsked | str],
    *,
    x: str = "tokens_per_second_user",
    y: str = "output_tokens_per_second_chip",
    descend: bool = False,
    **options: Any,
) -> xr.Dataset:
    """Returns the systems of a placement that none betters on two axes, along `point`.

    Every layout of each pool (tensor-parallel degrees that cut the network; on wafers the
    pipelines asked for), every way to fill `max_chips` with whole replicas, every batch, and where
    there are drafts or pools of attention and FFN every number of drafts and micro-batches.

    Args:
        model, pools: as of `perfmodel.systems.serve`. A pool's `tp` above 1, `pp` or `regions` fix
            its layout; others try all.
        options: `max_chips` of all pools (16), `batches`, `drafts` and `micro`, choices of each;
            `base`, `isl`, `osl` and what else `perfmodel.systems.serve` takes.
        x, y: names of `AXES`.
        descend: find the systems by gradient, and compare with the enumeration: `hypervolume` is
            the share of its hypervolume that is reached.

    Raises:
        Infeasible: no system of the placement is feasible.
        InputError: an axis is none, or needs a number of a chip that is unknown.
    """
    axes = (x, y)
    for axis in axes:
        if axis not in AXES:
            raise InputError(f"axis: {axis!r} is none of {', '.join(AXES)}")
    searched = space(model, pools, **options)
    choices = enumerate_systems(searched)
    values = score(searched, choices)
    for axis in axes:
        if not np.any(np.isfinite(values[axis])):
            raise InputError(f"{axis}: {_NEEDS.get(axis, 'what it needs')} of a pool is unknown")
    rows = front(values, axes)
    extra: dict[str, Any] = {"evaluated": len(choices.batch)}
    if not len(rows):
        raise Infeasible(_why(searched, values))
    if descend:
        near, started, gradients = descended(searched, axes)
        own = score(searched, near)
        best = front(own, axes)
        share = _hypervolume(own, best, values, rows, axes)
        extra |= {
            "hypervolume": share, "starts": started, "gradients": gradients,
            "enumerated": len(choices.batch), "evaluated": started + len(near.batch),
        }  # fmt: skip
        choices, values, rows = near, own, best
    kept = {name: value[rows] for name, value in values.items()}
    return _dataset(searched, choices.take(rows), kept, axes, extra)


def _why(space: Space, values: Mapping[str, np.ndarray]) -> str:
    """Returns why no system of a space is feasible, of the one that comes nearest."""
    margins = values["margins"]
    nearest = int(np.argmax(np.min(margins, axis=1)))
    missed = MARGINS[int(np.argmin(margins[nearest]))]
    return (
        f"no system of {', '.join(space.names)} on {space.most} chips is feasible: the nearest "
        f"misses {missed} by {-100 * float(np.min(margins[nearest])):.0f} %"
    )


def _hypervolume(
    own: Mapping[str, np.ndarray],
    best: np.ndarray,
    values: Mapping[str, np.ndarray],
    rows: np.ndarray,
    axes: tuple[str, str],
) -> float:
    """Returns the hypervolume of systems found by gradient over that of the enumerated ones."""
    import moocore

    higher = [AXES[axis][1] for axis in axes]
    points = [
        np.stack([np.asarray(v[axis][r], dtype=float) for axis in axes], axis=1)
        for v, r in ((own, best), (values, rows))
    ]
    worst = np.where(higher, 0.0, np.max(np.concatenate(points), axis=0))
    sizes = [float(moocore.hypervolume(p, ref=worst, maximise=higher)) for p in points]
    return sizes[0] / sizes[1] if sizes[1] else np.nan


def _dataset(
    space: Space,
    choices: Choice,
    values: Mapping[str, np.ndarray],
    axes: tuple[str, str],
    extra: Mapping[str, Any],
) -> xr.Dataset:
    variables: dict[str, Any] = {}
    for name, value in values.items():
        if value.ndim == 1:
            variables[name] = ("point", value.astype(float), {"long_name": name.replace("_", " ")})
    variables["load"] = (("point", "station"), values["load"].astype(float), {"units": "1"})
    for name, column in (
        ("replica_chips", choices.chips), ("replica_stages", choices.stages),
        ("replicas", choices.replicas),
    ):  # fmt: skip
        variables[name] = (("point", "pool"), np.asarray(column, dtype=int), {"units": "1"})
    for name in ("batch", "tokens", "micro"):
        column = np.asarray(getattr(choices, name), dtype=int)
        variables["drafts" if name == "tokens" else name] = ("point", column, {"units": "1"})
    chip = [question.unique_chips([space.made.pools[n].chip])[0].name for n in space.names]
    coords = {
        "pool": list(space.names),
        "chip": ("pool", chip),
        "station": list(system.STATIONS),
    }
    attributes = space.made.asked.attributes("perfmodel.system_search.frontier")
    attributes |= {"x": axes[0], "y": axes[1], "max_chips": space.most, **extra}
    if space.made.draft_name:
        attributes |= {"draft": space.made.draft_name}
    return xr.Dataset(variables, coords).assign_attrs(attributes | results.stamp())


def beside(fronts: Mapping[str, xr.Dataset]) -> xr.Dataset:
    """Returns frontiers of several systems as one, with the `system` of each point.

    `on_front` marks the points that no point of any of them betters.
    """
    kept = []
    shared = (
        *AXES, "requests_per_second", "e2e_s", "chips", "batch", "drafts", "micro", "words",
        "busiest",
    )  # fmt: skip
    for name, found in fronts.items():
        worded = found.assign(
            words=("point", [words(found, i) for i in range(found.sizes["point"])]),
            busiest=("point", [busiest(found, i) for i in range(found.sizes["point"])]),
        )
        listed = worded[[key for key in shared if key in worded]]
        kept.append(listed.assign_coords(system=("point", [name] * found.sizes["point"])))
    first = next(iter(fronts.values()))
    joined = xr.concat(kept, "point", join="override", combine_attrs="drop")
    axes = (first.attrs["x"], first.attrs["y"])
    signs = [1.0 if AXES[axis][1] else -1.0 for axis in axes]
    x, y = (s * np.asarray(joined[axis]) for s, axis in zip(signs, axes, strict=True))
    about = {"long_name": "no system betters this point"}
    marked = joined.assign(on_front=("point", nondominated(x, y, _BOTH), about))
    return marked.assign_attrs(first.attrs)


def words(found: xr.Dataset, i: int) -> str:
    """Returns the layout of a point in short: replicas and chips of each pool."""
    parts = []
    for p, name in enumerate(found["pool"].values):
        chips, count = int(found["replica_chips"][i, p]), int(found["replicas"][i, p])
        stages = int(found["replica_stages"][i, p])
        what = f"TP{chips}" if stages == 1 else f"{chips} chips, {stages} stages"
        prefix = "" if found.sizes["pool"] == 1 else f"{name} "
        parts.append(f"{prefix}{count} × {what}")
    extra = []
    if int(found["drafts"][i]):
        extra.append(f"{int(found['drafts'][i])} drafts")
    if int(found["micro"][i]) > 1:
        extra.append(f"{int(found['micro'][i])} micro-batches")
    return ", ".join([*parts, *extra])


def busiest(found: xr.Dataset, i: int) -> str:
    """Returns the pool or link of a point that works most of the time; "" of one pool."""
    if found.sizes["pool"] == 1:
        return ""
    near = pressure(found["load"].values[i], found["decoding_share"].values[i])
    return str(found["station"].values[int(np.argmax(near))])


def best_at(found: xr.Dataset, x: float) -> float:
    """Returns the most of the second axis that a frontier has at a value of the first, or beyond.

    Both axes are better with more; nan where no point reaches it.
    """
    reach = found[found.attrs["x"]].values >= x
    return float(np.max(found[found.attrs["y"]].values[reach])) if np.any(reach) else np.nan
