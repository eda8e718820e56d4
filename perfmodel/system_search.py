"""The systems worth having: layouts and replicas of every pool, and what they share.

`frontier` of systems enumerates whole systems of a placement under a number of chips
(`perfmodel.system_space`), or descends (`perfmodel.system_descent`); `size` finds the smallest.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from perfmodel import question, results, system, system_hits
from perfmodel.errors import Infeasible, InputError
from perfmodel.exploration import nondominated
from perfmodel.margins import MARGINS
from perfmodel.question import ModelLike
from perfmodel.system_choices import bounded, space_of
from perfmodel.system_descent import descended
from perfmodel.system_space import AXES as AXES
from perfmodel.system_space import BLOCK as BLOCK
from perfmodel.system_space import (
    BOTH,
    Choice,
    Space,
    enumerate_systems,
    front,
    score,
)
from perfmodel.system_space import feasible as feasible
from perfmodel.system_space import program_of as program_of
from perfmodel.systems import (
    PoolAsked,
    ask,
    mean_asked,
    parse_pool,
    pressure,
    table,
)

_BATCHES = tuple(np.unique(np.geomspace(1, 1024, 32).round()).astype(int).tolist())

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
    chunks: Sequence[int] | None = None,
    max_power: float | None = None,
    max_racks: float | None = None,
    max_cost: float | None = None,
    **options: Any,
) -> Space:
    """Returns what a frontier searches; see `frontier` for the arguments.

    `enumerate_systems` lists it and `score` evaluates the list, where more than the front is asked.
    """
    where, named = table(pools, base)
    parsed = {n: parse_pool(p, n) if isinstance(p, str) else p for n, p in named.items()}
    most = question.budgets(max_power, max_racks, max_cost)
    made = ask(model, parsed, where, batch=1, isl=isl, osl=osl, most=most, **options)
    found = space_of(made, where, max_chips, batches, drafts, micro, chunks)
    return found._replace(smaller=any(value is not None for value in most))


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
    max_power: float | None = None,
    max_racks: float | None = None,
    max_cost: float | None = None,
    batches: Sequence[int] = _BATCHES,
    drafts: Sequence[int] = _DRAFTS,
    micro: Sequence[int] = _MICRO,
    chunks: Sequence[int] | None = None,
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
    budget = question.budgets(max_power, max_racks, max_cost)
    made = ask(model, parsed, where, batch=1, isl=isl, osl=osl, most=budget, **options)
    least = sum(p.tp * p.pp for p in parsed.values())
    most = 4096 if max_chips is None else question.whole("max_chips", max_chips, least)

    def serving(chips: int) -> tuple[Space, Choice, dict[str, np.ndarray], np.ndarray]:
        space = space_of(made, where, chips, batches, drafts, micro, chunks)
        space = bounded(space, chunks)
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
    reached = _most_served(found[2])
    while not len(found[3]) and high < most:
        low, high = high, min(2 * high, most)
        found = serving(high)
        served = _most_served(found[2])
        if reached and not served:
            # A budget is spent: more chips do not help.
            break
        reached = max(reached, served)
    if not len(found[3]):
        if not reached:
            raise Infeasible(_why(found[0], found[2]))
        raise Infeasible(
            f"at most {reached:.3g} requests a second within the limits and {most} chips, "
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


def _most_served(values: Mapping[str, np.ndarray]) -> float:
    """Returns the highest rate of feasible systems, 0 where there is none."""
    good = np.all(values["margins"] >= 0.0, axis=1)
    return float(np.max(values["requests_per_second"][good])) if np.any(good) else 0.0


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

    Every layout of each pool (tensor-parallel degrees that cut the network, and of experts the
    expert ranks and attention groups; on wafers the pipelines asked for), every way to fill
    `max_chips` with whole replicas, every batch and chunk of prompts, where there are drafts or
    pools of attention and FFN every number of drafts and micro-batches, and of the slow memories
    that a pool asks for (`offload`) none, half and all. Where that is too many there are fewer
    (`perfmodel.system_choices.bounded`).

    Args:
        model, pools: as of `perfmodel.systems.serve`. A pool's `tp` above 1, `pp` or `regions` fix
            its layout, its `ep` or `attention_dp` above 1 how that is cut, its `chunk` that of
            prompts; others try all. Of several pools, `ep` and `attention_dp` are 1 or the chips of
            a stage; a descent tries those between, too.
        options: `max_chips` of all pools (16), `batches`, `drafts`, `micro` and `chunks`, choices
            of each;
            `base`, `isl`, `osl` and what else `perfmodel.systems.serve` takes; `max_power` [W,
            rated, with hosts], `max_racks` and `max_cost` [USD/h] of all pools, under which systems
            of fewer chips are tried, too.
        x, y: names of `AXES`; beside each, what it would gain by more prefix hits
            (`…_if_more_hits`).
        descend: find the systems by gradient, and compare with the enumeration: `hypervolume` is
            the share of its hypervolume that is reached. The gradient of both axes in the share of
            hits is then said of each point, too (`…_per_hit`).

    Raises:
        Infeasible: no system of the placement is feasible.
        InputError: an axis is none, or needs a number of a chip that is unknown.
    """
    axes = (x, y)
    for axis in axes:
        if axis not in AXES:
            raise InputError(f"axis: {axis!r} is none of {', '.join(AXES)}")
    searched = bounded(space(model, pools, **options), options.get("chunks"))
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
    found = _dataset(searched, choices.take(rows), kept, axes, extra)
    points = choices.take(rows)
    hits = system_hits.if_more(searched, points, kept, axes)
    if descend:
        hits |= system_hits.per_hit(searched, points, axes)
    return found.assign(hits)


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
        ("replicas", choices.replicas), ("ep", choices.ep), ("attention_dp", choices.attention_dp),
    ):  # fmt: skip
        variables[name] = (("point", "pool"), np.asarray(column, dtype=int), {"units": "1"})
    asked = np.asarray([space.made.pools[name].offload for name in space.names])
    used = np.asarray(choices.slow, dtype=float)[:, None] * asked
    about = {"units": "1", "long_name": "share of slower memories that is used"}
    variables["offload"] = (("point", "pool"), used, about)
    about = {"units": "1", "long_name": "share of the weights placed before any keys"}
    variables["weights_first"] = ("point", np.asarray(choices.first, dtype=float), about)
    for name in ("batch", "tokens", "micro", "chunk"):
        column = np.asarray(getattr(choices, name), dtype=int)
        unit = "token" if name == "chunk" else "1"
        variables["drafts" if name == "tokens" else name] = ("point", column, {"units": unit})
    chip = [question.unique_chips([space.made.pools[n].chip])[0].name for n in space.names]
    coords = {
        "pool": list(space.names),
        "chip": ("pool", chip),
        "station": list(system.STATIONS),
    }
    attributes = mean_asked(space.made).attributes("perfmodel.system_search.frontier")
    attributes |= {"x": axes[0], "y": axes[1], "max_chips": space.most, **extra}
    if len(space.chunks) > 1:
        attributes |= {"chunks": list(space.chunks)}
    if space.made.draft_name:
        attributes |= {"draft": space.made.draft_name}
    return xr.Dataset(variables, coords).assign_attrs(attributes | results.stamp())


def beside(fronts: Mapping[str, xr.Dataset]) -> xr.Dataset:
    """Returns frontiers of several systems as one, with the `system` of each point.

    `on_front` marks the points that no point of any of them betters.
    """
    kept = []
    shared = (
        *AXES, "requests_per_second", "e2e_s", "chips", "batch", "drafts", "micro",
        "chunk", "weights_first", "words", "busiest",
    )  # fmt: skip
    for name, found in fronts.items():
        followed = [str(key) for key in found.data_vars if str(key).startswith("simulated_")]
        worded = found.assign(
            words=("point", [words(found, i) for i in range(found.sizes["point"])]),
            busiest=("point", [busiest(found, i) for i in range(found.sizes["point"])]),
        )
        ends = ("_if_more_hits", "_per_hit")
        hits = [str(key) for key in worded.data_vars if str(key).endswith(ends)]
        listed = worded[[*(key for key in shared if key in worded), *hits, *followed]]
        kept.append(listed.assign_coords(system=("point", [name] * found.sizes["point"])))
    first = next(iter(fronts.values()))
    # What is not said of all of them is unknown of the others.
    joined = xr.concat(kept, "point", join="override", combine_attrs="drop", data_vars="all")
    axes = (first.attrs["x"], first.attrs["y"])
    signs = [1.0 if AXES[axis][1] else -1.0 for axis in axes]
    x, y = (s * np.asarray(joined[axis]) for s, axis in zip(signs, axes, strict=True))
    about = {"long_name": "no system betters this point"}
    marked = joined.assign(on_front=("point", nondominated(x, y, BOTH), about))
    return marked.assign_attrs(first.attrs)


def pools_of(
    found: xr.Dataset, pools: Mapping[str, PoolAsked | str], i: int
) -> dict[str, PoolAsked]:
    """Returns the pools of a point, as `perfmodel.systems.serve` takes them.

    Args: a frontier or size; `pools` that it was searched with.
    """
    made = {}
    for p, name in enumerate(str(name) for name in found["pool"].values):
        asked = pools[name]
        pool = parse_pool(asked, name) if isinstance(asked, str) else asked
        chips, stages = (int(found[f"replica_{key}"][i, p]) for key in ("chips", "stages"))
        pipeline = min(chips, stages)
        made[name] = dataclasses.replace(
            pool, tp=chips // pipeline, pp=pipeline, regions=stages // pipeline,
            replicas=float(found["replicas"][i, p]), weights_first=float(found["weights_first"][i]),
            ep=int(found["ep"][i, p]), attention_dp=int(found["attention_dp"][i, p]),
            offload=float(found["offload"][i, p]), chunk=int(found["chunk"][i]),
        )  # fmt: skip
    return made


def words(found: xr.Dataset, i: int) -> str:
    """Returns the layout of a point in short: replicas and chips of each pool, and how experts and
    attention are cut where they are; then what else a search varied."""
    parts = []
    for p, name in enumerate(found["pool"].values):
        chips, count = int(found["replica_chips"][i, p]), int(found["replicas"][i, p])
        stages = int(found["replica_stages"][i, p])
        what = f"TP{chips}" if stages == 1 else f"{chips} chips, {stages} stages"
        for short, key in (("EP", "ep"), ("DP", "attention_dp")):
            degree = int(found[key][i, p])
            what += f" {short}{degree}" if degree > 1 else ""
        prefix = "" if found.sizes["pool"] == 1 else f"{name} "
        parts.append(f"{prefix}{count} × {what}")
    extra = []
    drafts = int(found["drafts"][i])
    if drafts:
        extra.append(f"{drafts} draft{'' if drafts == 1 else 's'}")
    if int(found["micro"][i]) > 1:
        extra.append(f"{int(found['micro'][i])} micro-batches")
    if len(found.attrs.get("chunks", ())) > 1:
        extra.append(f"chunk {int(found['chunk'][i]):,}")
    if float(found["offload"][i].max()):
        extra.append(f"{float(found['offload'][i].max()):.0%} slow memory")
    if float(found["weights_first"][i]) < 1.0:
        extra.append(f"{float(found['weights_first'][i]):.0%} of weights before keys")
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
