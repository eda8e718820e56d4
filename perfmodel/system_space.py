"""Systems of one placement as columns: all of a space, their numbers, and the best of them."""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from perfmodel import cache, compiled, question, system
from perfmodel.errors import InputError
from perfmodel.exploration import nondominated
from perfmodel.placement import System
from perfmodel.question import Layout
from perfmodel.relax import inverse, maximum, minimum
from perfmodel.systems import SystemAsked
from perfmodel.units import KILOWATT

BLOCK = 8192
"""Systems evaluated in one call."""

_LONG = 100_000
"""Systems for which a program that takes longer to compile is worth it."""

_MOST_SYSTEMS = 5_000_000

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
    `replicas`, and the expert ranks (`ep`) and attention groups (`attention_dp`) of a stage; of
    the system, shape [n]: `batch`, `tokens` drafted, `micro`-batches, the `chunk` that prompts are
    computed in, the share that is used of the `slow` memories that each pool asks for (its
    `offload`), and the share of weights that each pool places `first`, before any keys, where it
    has slower memories in use.
    """

    chips: Any
    stages: Any
    replicas: Any
    ep: Any
    attention_dp: Any
    batch: Any
    tokens: Any
    micro: Any
    chunk: Any
    slow: Any
    first: Any

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


def numbers_of(made: System, found: system.SystemEstimate) -> dict[str, Any]:
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


def with_choice(base: System, part_pools: tuple[int, ...], choice: Choice) -> System:
    """Returns a system with the numbers of one choice."""

    def pool(old: Any, part: int) -> Any:
        plan, i = old.plan, part_pools[part]
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
        if plan.weights_first is not None:
            used = (plan.offload * choice.slow, choice.first)
            new = eqx.tree_at(lambda p: (p.offload, p.weights_first), new, used)
        if i == part_pools[0]:
            new = eqx.tree_at(lambda p: p.chunk, new, choice.chunk)
        return eqx.tree_at(lambda p: p.plan, old, new)

    parts = (base.prefill, base.attention, base.ffn)
    first, attention, ffn = (pool(old, part) for part, old in enumerate(parts))
    made = eqx.tree_at(
        lambda s: (s.prefill, s.attention, s.ffn, s.micro),
        base,
        (first, attention, ffn, choice.micro),
    )
    if base.draft is None or base.speculation is None:
        return made
    spec = eqx.tree_at(lambda s: s.tokens, base.speculation, choice.tokens)
    return eqx.tree_at(lambda s: (s.draft, s.speculation), made, (pool(base.draft, 3), spec))


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
        made = with_choice(base, part_pools, choice)
        return numbers_of(made, system.evaluate(made, model, load, engine, limits, draft))

    return jax.vmap(one)(choices)


@functools.cache
def program_of(part_pools: tuple[int, ...]) -> Any:
    """Returns the function that evaluates many systems: `part_pools` is the pool of each part."""
    return functools.partial(_many, part_pools)


@functools.cache
def long_program_of(part_pools: tuple[int, ...]) -> Any:
    """Returns the same function for long lists, with what its numbers share computed once."""
    return compiled.chained(program_of(part_pools))


class Space(NamedTuple):
    """What a search varies: `made`, the system it starts from; names of its pools; which of them
    does each part; layouts that a replica of each may have; `most` chips of all pools; batches,
    numbers of drafts and of micro-batches, and chunks; whether systems of fewer chips are tried,
    too (`smaller`), as under a budget; and layouts of each pool that are worth a look `near` one
    that was descended, where they are more than those enumerated."""

    made: SystemAsked
    names: tuple[str, ...]
    part_pools: tuple[int, ...]
    layouts: tuple[tuple[Layout, ...], ...]
    most: int
    batches: tuple[int, ...]
    drafts: tuple[int, ...]
    micro: tuple[int, ...]
    chunks: tuple[int, ...]
    smaller: bool = False
    near: tuple[tuple[Layout, ...], ...] = ()

    @property
    def choices(self) -> tuple[tuple[int, ...], ...]:
        """What is tried of every layout, but for `tiers`."""
        return self.batches, self.drafts, self.micro, self.chunks

    @property
    def guesser(self) -> int | None:
        """Which pool only drafts; None where none does."""
        drafts = set(self.part_pools[3:]) - set(self.part_pools[:3])
        return next(iter(drafts), None)

    @property
    def tiers(self) -> tuple[tuple[float, float], ...]:
        """Shares of slow memories and of weights placed first that are tried: none of the slow
        ones, half and all of those asked for; keys before weights, weights before keys, and
        between, or the share asked for."""
        if self.made.built.attention.plan.weights_first is None:
            return ((1.0, 1.0),)
        pools = self.made.pools.values()
        slow = any(pool.offload for pool in pools)
        asked = sorted({pool.weights_first for pool in pools} - {1.0})
        first = asked or [0.0, 0.5, 1.0]
        unused = [(0.0, first[-1])] if slow else []
        shares = (0.5, 1.0) if slow else (1.0,)
        return (*unused, *itertools.product(shares, first))


def score(space: Space, choices: Choice) -> dict[str, np.ndarray]:
    """Returns every number of a list of systems, block by block."""
    count = len(choices.batch)
    asked = space.made.asked
    engine, limits = space.made.engine, question.numbers(asked.limits)
    found: list[dict[str, np.ndarray]] = []
    name = f"systems-{'-'.join(map(str, space.part_pools))}"
    function, kind = program_of(space.part_pools), compiled.UNFUSED
    if count > _LONG:
        name = f"long-{name}"
        function, kind = long_program_of(space.part_pools), compiled.CHAINED
    for start in range(0, count, BLOCK):
        stop = min(start + BLOCK, count)
        rows = np.minimum(np.arange(start, start + BLOCK), count - 1)
        part = question.numbers(choices.take(rows))
        values = (
            space.made.built, part, asked.network, asked.load, engine, limits, space.made.draft,
        )  # fmt: skip
        numbers = jax.device_get(cache.program(name, function, values, kind)(*values))
        found.append({k: np.asarray(v)[: stop - start] for k, v in numbers.items()})
    return {name: np.concatenate([part[name] for part in found]) for name in found[0]}


def enumerate_systems(space: Space, replicas: Sequence[Sequence[float]] | None = None) -> Choice:
    """Returns every system of a space: layouts and whole replicas of each pool that leave no room
    for another replica (but of one that only drafts), times batches, drafts, micro-batches, chunks
    and shares of slow memories.

    Args: `replicas`, counts to try by pool; then all of them, whether or not they fill the chips.
    """
    rows: list[Row] = []
    counts = functools.cache(functools.partial(replicas_of, space))
    for layout in itertools.product(*space.layouts):
        sizes = tuple(each.chips for each in layout)
        for each in itertools.product(*replicas) if replicas is not None else counts(sizes):
            if sum(n * size for n, size in zip(each, sizes, strict=True)) <= space.most:
                rows.append((layout, each))
    if not rows:
        raise InputError(
            f"max_chips: {space.most} chips hold no replica of each pool of {len(space.names)}"
        )
    tiers = np.asarray(space.tiers)
    choices = (*space.choices, range(len(tiers)))
    count = len(rows) * math.prod(map(len, choices))
    if count > _MOST_SYSTEMS:
        raise InputError(
            f"frontier: {count:,} systems are more than {_MOST_SYSTEMS:,}; ask for fewer chips"
        )
    axes = np.meshgrid(np.arange(len(rows)), *choices, indexing="ij")
    which, batch, tokens, micro, chunk, tier = (axis.ravel() for axis in axes)
    laid = [column[which] for column in columns(rows)]
    numbers = [batch, tokens, micro, chunk, *tiers[tier].T]
    return Choice(*laid, *numbers)


Row = tuple[Sequence[Layout], Sequence[float]]
"""Layouts and replicas of every pool."""


def columns(rows: Sequence[Row]) -> tuple[np.ndarray, ...]:
    """Returns the columns of `Choice` by pool, shape [rows, pools] each."""
    cuts = [
        [(each.chips, each.pp * each.regions, each.ep, each.attention_dp) for each in layout]
        for layout, _ in rows
    ]
    chips, stages, ep, attention_dp = np.moveaxis(np.asarray(cuts, dtype=float), 2, 0)
    counts = np.asarray([count for _, count in rows], dtype=float)
    return chips, stages, counts, ep, attention_dp


def replicas_of(space: Space, sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns the replicas of pools of these sizes that are tried."""
    totals = range(sum(sizes) if space.smaller else space.most, space.most + 1)
    listed = (each for most in totals for each in _counts(sizes, most, space.guesser))
    return list(dict.fromkeys(listed))


def _counts(sizes: Sequence[int], most: int, guesser: int | None) -> list[tuple[int, ...]]:
    """Returns whole replicas of pools of these sizes that fill `most` chips as far as they can.

    Of a pool that only drafts (`guesser`) there may be fewer: all, half of them, a quarter, ….
    Chips that nothing uses are no part of the system.

    >>> _counts([4, 1], 8, None), _counts([4, 1], 8, 1)
    ([(1, 4)], [(1, 4), (1, 2), (1, 1)])
    """
    if guesser is None:
        return _fillings(sizes, most)
    order = [i for i in range(len(sizes)) if i != guesser] + [guesser]
    found = []
    for *others, full in _fillings([sizes[i] for i in order], most):
        for power in range(full.bit_length()):
            counted = dict(zip(order, (*others, full >> power), strict=True))
            found.append(tuple(counted[i] for i in range(len(sizes))))
    return found


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
    best = rows[nondominated(signs[0] * x[rows], signs[1] * y[rows], BOTH)]
    return best[np.argsort(x[best], kind="stable")]


# Two axes of `results` of which more is better, for `nondominated`.
BOTH = ("tokens_per_second_user", "output_tokens_per_second_chip")
