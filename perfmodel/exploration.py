"""Every integer plan of every chip, and the ones worth having.

Plans are evaluated block by block; of each block only those that none of it betters are kept, so
memory is bounded however many there are. Dominance is decided on the axes asked for.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import moocore
import numpy as np
import xarray as xr

from perfmodel import budgets, descent, feasibility, question, results
from perfmodel.advice import advise
from perfmodel.chips import Chip
from perfmodel.designs import Designs, blocks, designs, evaluate
from perfmodel.errors import Infeasible, InputError, nearest, shorten
from perfmodel.formats import PrecisionName
from perfmodel.margins import MARGINS
from perfmodel.question import ChipLike, EngineLike, ModelLike, Question

BATCHES = tuple(range(1, 1025))
CHUNKS = (512, 1024, 2048, 4096, 8192)
PRECISIONS = ("bf16", "fp8")
LARGEST = 16
"""Chips of the largest replica tried, and of a deployment without a budget, where none is given."""

_MOST_CHOICES = 100_000
_MOST_DESIGNS = 50_000_000
_NEEDS = [MARGINS.index(name) for name in results.RUNNING_NEEDS]


class Best(NamedTuple):
    """What a search of one chip found.

    Fields: the `designs` that none betters, with their `values`; how many plans were `evaluated`
    and how many of them are `feasible`; the plan that comes `nearest` to being feasible, and its
    `distance` (whether it runs, and its least margin).
    """

    designs: Designs
    values: dict[str, np.ndarray]
    evaluated: int
    feasible: int
    nearest: Designs | None
    distance: tuple[bool, float]


def search(asked: Question, chip: int, plans: Designs, axes: tuple[str, str]) -> Best:
    """Returns the plans of one chip that none betters on two axes, over all its precisions.

    `plans` come with those of fewer chips first: of equal points the first is kept.
    """
    kept: list[Designs] = []
    values: list[dict[str, np.ndarray]] = []
    evaluated = feasible = 0
    near, distance = None, (False, -np.inf)
    for kind in range(len(asked.formats)):
        if not asked.supports(chip, kind):
            continue
        for part, found in blocks(asked, chip, kind, plans):
            size = part.stop - part.start
            margins = np.asarray(found["margins"])[:size]
            x, y = (np.asarray(found[axis])[:size] for axis in axes)
            good = np.all(margins >= 0.0, axis=1)
            evaluated, feasible = evaluated + size, feasible + int(np.sum(good))
            usable = np.flatnonzero(good & np.isfinite(x) & np.isfinite(y))
            best = usable[nondominated(x[usable], y[usable], axes)]
            chosen = plans.take(part).take(best)
            where = {"chip": np.full(len(best), chip), "precision": np.full(len(best), kind)}
            kept.append(chosen._replace(**where))
            values.append({name: np.asarray(value)[best] for name, value in found.items()})
            if not feasible:
                row, gap = nearest_row(margins)
                if gap > distance:
                    one = plans.take(part).take([row])
                    near = one._replace(chip=np.asarray([chip]), precision=np.asarray([kind]))
                    distance = gap
    if not kept:
        return Best(designs().take([]), {}, 0, 0, None, distance)
    listed = Designs(*map(np.concatenate, zip(*kept, strict=True)))
    joined = {name: np.concatenate([part[name] for part in values]) for name in values[0]}
    # Of equal points of several precisions, too, the one of fewer chips.
    order = np.argsort(joined["chips"], kind="stable")
    x, y = (joined[axis][order] for axis in axes)
    rows = order[nondominated(x, y, axes)]
    rows = rows[np.argsort(joined[axes[0]][rows], kind="stable")]
    best_values = {name: value[rows] for name, value in joined.items()}
    return Best(listed.take(rows), best_values, evaluated, feasible, near, distance)


def nearest_row(margins: np.ndarray) -> tuple[int, tuple[bool, float]]:
    """Returns the row that comes nearest to being feasible: one that runs, if any does."""
    needed = np.min(margins[:, _NEEDS], axis=1)
    runs = bool(np.any(needed >= 0.0))
    score = np.where(needed >= 0.0, np.min(margins, axis=1), -np.inf) if runs else needed
    row = int(np.argmax(score))
    return row, (runs, float(score[row]))


def enumerate_plans(
    layouts: Sequence[question.Layout],
    batches: Sequence[int],
    chunks: Sequence[int],
    max_chips: int,
) -> Designs:
    """Returns every plan with as many replicas as fit, those of fewer chips first."""

    def size(layout: question.Layout) -> tuple[int, ...]:
        chips = layout.tp * layout.pp
        return (max_chips // chips * chips, chips, *layout)

    order = sorted(layouts, key=size)
    rows = np.meshgrid(np.arange(len(order)), batches, chunks, indexing="ij")
    which, batch, chunk = (column.ravel() for column in rows)
    table = np.asarray(order, dtype=int)
    columns = dict(zip(question.Layout._fields, table[which].T, strict=True))
    # An attention group without a request has nothing to do: fewer groups do as well.
    busy = columns["attention_dp"] <= batch
    # One that is larger than a budget allows is still a plan, whose margin says so.
    replicas = np.maximum(max_chips // (columns["tp"] * columns["pp"]), 1)
    return designs(**columns, batch=batch, chunk=chunk, replicas=replicas).take(busy)


def nondominated(x: Any, y: Any, axes: tuple[str, str]) -> np.ndarray:
    """Returns which points no other point betters on these axes; of equal points the first.

    >>> nondominated([1., 2., 2.], [3., 1., 1.], ("tpot_s", "power_w")).tolist()
    [True, True, False]
    """
    points = np.stack([np.asarray(x, dtype=float), np.asarray(y, dtype=float)], axis=1)
    if not len(points):
        return np.zeros(0, dtype=bool)
    higher = [results.BY_NAME[axis].better == "higher" for axis in axes]
    return np.asarray(moocore.is_nondominated(points, maximise=higher), dtype=bool)


def frontier(
    model: ModelLike,
    chips: Sequence[ChipLike],
    *,
    isl: int,
    osl: int,
    max_chips: int | None = None,
    max_power: float | None = None,
    max_racks: float | None = None,
    max_cost: float | None = None,
    pp: Sequence[int] = (1,),
    cp: Sequence[int] = (1,),
    precisions: Sequence[str] = PRECISIONS,
    chunks: Sequence[int] = CHUNKS,
    batches: Sequence[int] = BATCHES,
    prefix_hit: float = 0.0,
    engine: EngineLike = "neutral",
    slo_ttft: float | None = None,
    slo_tpot: float | None = None,
    x: str = "tokens_per_second_user",
    y: str = "output_tokens_per_second_chip",
    per: str | None = None,
    descend: bool = False,
    price: float | Mapping[str, float] | None = None,
    ownership: str = "rented",
    electricity: float | None = None,
    pue: float | None = None,
    lifetime: float | None = None,
    routing: float | None = None,
    images: float | None = None,
) -> xr.Dataset:
    """Returns the plans that none betters on two axes, for each chip, along `point`.

    Every layout that cuts the network (TP, for a mixture of experts EP and attention groups), with
    as many replicas as fit into `max_chips`, times every batch, chunk and precision. Points are
    sorted by chip as asked, then by `x`; `on_front` marks those that no point of any chip betters.
    Along `candidate`, each chip asked for with the number of plans and, where none is feasible,
    the `obstacle`.

    Args:
        model, engine: names, paths, or loaded entries.
        chips: the same, or "all" for every chip of the catalogue; formats that one of them has no
            kernel for are left out there, and said in `candidate_fits`.
        isl, osl, prefix_hit, slo_ttft, slo_tpot, routing, images: as of `estimate`.
        max_chips: chips of the deployment that plans may fill; by default 16, or with a budget as
            many as it allows, in replicas of at most 16.
        max_power, max_racks, max_cost: the most that all chips may take together: rated power with
            hosts, without PUE [W]; racks; cost [USD/h]. Each chip has as many replicas as they
            allow (`perfmodel.budgets`); to compare totals, ask for an axis of the deployment, as
            `output_tokens_per_second`.
        pp, cp: choices of pipeline stages and of context ranks.
        precisions: formats of the weights, or weights/activations/kv.
        chunks, batches: choices of each plan.
        x, y: names of `results.AXES`; dominance is decided on the axes shown.
        per: what throughput on an axis is counted per: `chip`, `kw` (provisioned, without PUE),
            `usd` (an hour) or `rack`.
        descend: find the plans by gradient instead (`perfmodel.descent`), and compare with the
            enumeration: `candidate_hypervolume` is the share of its hypervolume that is reached.
            Wafers keep the enumerated plans (no gradients).
        price: rent [USD per chip and hour], of all chips or by chip.
        ownership, electricity, pue, lifetime: as of `estimate`.

    Raises:
        Infeasible: no chip has a plan; says what binds and the smallest change that helps, and
            has what is `found` along `candidate`.
    """
    x, y = axes = _axes(*_per(x, y, per), osl)
    options: dict[str, Any] = dict(
        isl=isl, osl=osl, prefix_hit=prefix_hit, engine=engine, slo_ttft=slo_ttft,
        slo_tpot=slo_tpot, price=price, ownership=ownership, electricity=electricity, pue=pue,
        lifetime=lifetime, routing=routing, images=images,
    )  # fmt: skip
    budget = question.budgets(max_power, max_racks, max_cost)
    asked = question.ask(model, chips, parse_precisions(precisions), most=budget, **options)
    most = None if max_chips is None else question.whole("max_chips", max_chips)
    if most is None and not any(budget):
        most = LARGEST
    space = Space(
        question.layouts(asked.model.model, most or LARGEST, choices("pp", pp), choices("cp", cp)),
        choices("batches", batches),
        choices("chunks", chunks),
        most or LARGEST,
    )
    count = len(space.layouts) * len(space.batches) * len(space.chunks)
    check_count("frontier", count * len(asked.chips) * len(asked.formats))
    spaces = [_space_of(asked, chip, space, most) for chip in range(len(asked.chips))]
    made = {each.max_chips: enumerate_plans(*each) for each in spaces}
    own = [
        _plans_of(chip, asked, each, made[each.max_chips])
        for chip, each in zip(asked.chips, spaces, strict=True)
    ]
    found = [search(asked, chip, listed, axes) for chip, listed in enumerate(own)]
    extra: Mapping[str, Any] = budgets.table(asked, most)
    if descend:
        found, compared = _descended(asked, spaces, axes, found)
        extra = {**extra, **compared}
    obstacles = [_obstacle(asked, chip, best, axes) for chip, best in enumerate(found)]
    call = question.described(
        "frontier", model, chips, max_chips=max_chips or (None if any(budget) else most),
        max_power=max_power, max_racks=max_racks, max_cost=max_cost, pp=pp, cp=cp,
        precisions=precisions, chunks=chunks, x=x, y=y, descend=descend or None, **options,
    )  # fmt: skip
    limits = {"slo_ttft_s": slo_ttft, "slo_tpot_s": slo_tpot}
    counts = (
        [best.evaluated for best in found],
        [best.feasible for best in found],
        [len(best.designs.tp) for best in found],
    )
    table = xr.Dataset({**candidates(asked, *counts, obstacles), **extra}).assign_attrs(
        asked.attributes(call)
        | {name: float(limit) for name, limit in limits.items() if limit is not None}
        | budgets.attributes(asked)
        | {"x": x, "y": y, "max_chips": max(each.max_chips for each in spaces)}
        | {"evaluated": sum(best.evaluated for best in found)}
        | {"feasible": sum(best.feasible for best in found)}
        | results.stamp()
    )
    if all(obstacles):
        why = feasibility.reasons([chip.name for chip in asked.chips], obstacles)
        raise Infeasible(f"no plan of {asked.model.name} is feasible; {why}", table)
    points = _points(asked, [best for best in found if len(best.designs.tp)], axes)
    return points.assign(table.variables).assign_attrs(table.attrs)


def _side_by_side(chip: Chip) -> int:
    """Returns how many stages may lie on one chip; 0 where each takes a whole one."""
    regions = chip.fields.get("regions")
    most = 0 if regions is None or regions.value is None else int(regions.value)
    return most if most > 1 else 0


def _space_of(asked: Question, chip: int, space: "Space", most: int | None) -> "Space":
    """Returns what plans of one chip are made of: with as many chips as its budgets allow."""
    found = budgets.allowed(asked, chip, most)
    return space._replace(max_chips=space.max_chips if found is None else max(found.chips, 1))


def _plans_of(chip: Chip, asked: Question, space: "Space", plans: Designs) -> Designs:
    """Returns the plans of a chip: those of all, or where layers lie side by side on it, of such.

    Prompts then stream through the pipeline in chunks of the chip's own.
    """
    regions = _side_by_side(chip)
    if not regions:
        return plans
    largest = min(space.max_chips, max(layout.chips for layout in space.layouts))
    listed = question.pipelines(asked.model.model, largest, regions)
    chunk = chip.fields["prompt_chunk"].value
    chunks = space.chunks if not chunk else [int(chunk)]
    return enumerate_plans(listed, space.batches, chunks, space.max_chips)


class Space(NamedTuple):
    """What plans are made of: layouts, batches, chunks, and the chips that replicas may fill."""

    layouts: Sequence[question.Layout]
    batches: Sequence[int]
    chunks: Sequence[int]
    max_chips: int


def hypervolume(best: Sequence[Best], axes: tuple[str, str]) -> list[float]:
    """Returns the area that the points of each search dominate, on the same scale for all.

    From 0 where more is better, and from the worst point of any of them where less is.
    """
    if not all(len(one.designs.tp) for one in best):
        return [float(len(one.designs.tp) > 0) for one in best]
    points = [np.stack([one.values[axis].astype(float) for axis in axes], axis=1) for one in best]
    higher = [results.BY_NAME[axis].better == "higher" for axis in axes]
    worst = np.where(higher, 0.0, np.max(np.concatenate(points), axis=0))
    return [float(moocore.hypervolume(p, ref=worst, maximise=higher)) for p in points]


def _descended(
    asked: Question, spaces: Sequence[Space], axes: tuple[str, str], enumerated: Sequence[Best]
) -> tuple[list[Best], Mapping[str, Any]]:
    """Returns what descent finds of each chip, and how it compares with the enumeration."""
    found, gradients, starts = [], [], []
    for chip, space in enumerate(spaces):
        kinds = [kind for kind in range(len(asked.formats)) if asked.supports(chip, kind)]
        if _side_by_side(asked.chips[chip]):
            # The stages on a chip are no relaxed variable yet: its plans stay the enumerated ones.
            kinds = []
        parts = [descent.descend(asked, chip, kind, *space[:3], axes, space[3]) for kind in kinds]
        parts = [part for part in parts if len(part.plans.tp)]
        if parts:
            joined = zip(*(part.plans for part in parts), strict=True)
            near = Designs(*map(np.concatenate, joined))
            found.append(search(asked, chip, near, axes))
        else:
            found.append(enumerated[chip])
        gradients.append(sum(part.gradients for part in parts))
        starts.append(sum(part.start for part in parts))
    shares = []
    for one, whole in zip(found, enumerated, strict=True):
        reached, most = hypervolume([one, whole], axes)
        shares.append(reached / most if most else np.nan)
    rows = (
        ("candidate_enumerated", [one.evaluated for one in enumerated],
         "plans of the enumeration"),
        ("candidate_starts", starts, "plans evaluated for the descent to start from"),
        ("candidate_gradients", gradients, "gradients taken by the descent"),
        ("candidate_hypervolume", shares,
         "hypervolume of the descended plans over that of the enumeration"),
    )  # fmt: skip
    return found, {
        name: ("candidate", values, {"units": "1", "long_name": text})
        for name, values, text in rows
    }


def check_count(name: str, total: int) -> None:
    """Raises where more designs are asked for than one search evaluates."""
    if total > _MOST_DESIGNS:
        raise InputError(
            f"{name}: {total:,} designs are more than {_MOST_DESIGNS:,}; ask for fewer"
        )


def _per(x: str, y: str, per: str | None) -> tuple[str, str]:
    """Returns the axes with throughput counted per something else."""
    if per is None:
        return x, y
    if per not in results.PER:
        raise InputError(f"per: unknown measure {shorten(per, 30)!r}{nearest(per, results.PER)}")
    swapped = results.per_axis(x, per), results.per_axis(y, per)
    if not any(axis in results.THROUGHPUTS[per] for axis in swapped):
        raise InputError(
            f"per: neither x nor y is a throughput (nearest: {results.THROUGHPUTS[per][0]})"
        )
    return swapped


def _axes(x: str, y: str, osl: int) -> tuple[str, str]:
    for name, axis in (("x", x), ("y", y)):
        if axis not in results.AXES:
            hint = nearest(shorten(axis), results.AXES)
            raise InputError(f"{name}: unknown axis {shorten(axis)!r}{hint}")
        if osl == 1 and axis in results.OF_DECODE:
            raise InputError(f"{name}: {axis} needs at least 2 output tokens (osl); or take e2e_s")
    if x == y:
        raise InputError(f"x and y: both are {x}; two different axes are needed")
    return x, y


def parse_precisions(given: Sequence[str]) -> list[PrecisionName]:
    """Returns the precisions asked for, each once."""
    listed = [given] if isinstance(given, str) else list(given)
    if not listed:
        raise InputError("precisions: at least one is needed")
    return list(dict.fromkeys(question.parse_precision(text) for text in listed))


def choices(name: str, given: Sequence[int]) -> list[int]:
    """Returns the values of a plan's number to be tried, in order, each once."""
    # A range may be endless to walk, but its length is known.
    if hasattr(given, "__len__") and len(given) > _MOST_CHOICES:
        raise InputError(f"{name}: {len(given):,} are more than {_MOST_CHOICES:,}; ask for fewer")
    listed = [given] if isinstance(given, int) else list(given)
    if not listed:
        raise InputError(f"{name}: at least one is needed")
    return sorted({question.whole(name, value) for value in listed})


def _obstacle(asked: Question, chip: int, best: Best, axes: tuple[str, str]) -> str:
    """Returns why a chip has no plan, and the smallest change that gives it one; else ""."""
    if len(best.designs.tp):
        return ""
    if best.feasible:
        return _unknown(asked, chip, axes)
    if best.nearest is None:
        has = ", ".join(asked.chips[chip].supported)
        return f"kernel: none for {', '.join(map(str, asked.formats))} (it has: {has})"
    limit = results.binding(evaluate(asked, best.nearest))[0]
    return f"{limit}: {advise(asked, best.nearest)}"


def _unknown(asked: Question, chip: int, axes: tuple[str, str]) -> str:
    """Returns which number of a chip an axis needs and is unknown."""
    name = asked.chips[chip].name
    racks = " and ".join(a for a in axes if "rack" in results.BY_NAME[a].unit)
    if racks and not asked.machines.site.rack_chips[chip]:
        return f"rack: chips in a rack are unknown, and {racks} needs them (rack_chips of {name})"
    needs = " and ".join(a for a in axes if "USD" in results.BY_NAME[a].unit)
    helps = f"--price {name}=USD" if asked.owner == "rented" else "--ownership rented"
    return f"price: unknown, and {needs} needs it ({helps})"


def _points(asked: Question, found: Sequence[Best], axes: tuple[str, str]) -> xr.Dataset:
    """Returns the points of all chips, chip by chip."""
    listed = Designs(*map(np.concatenate, zip(*(best.designs for best in found), strict=True)))
    names = found[0].values
    values = {name: np.concatenate([best.values[name] for best in found]) for name in names}
    table = results.to_dataset(
        values,
        ("point",),
        [asked.chips[chip].name for chip in listed.chip],
        [str(asked.formats[kind]) for kind in listed.precision],
    )
    front = nondominated(values[axes[0]], values[axes[1]], axes)
    attrs = {"units": "1", "long_name": "whether no point of any chip is better on both axes"}
    return table.assign(on_front=("point", front, attrs))


def candidates(
    asked: Question,
    evaluated: Sequence[int],
    feasible: Sequence[int],
    points: Sequence[int],
    obstacles: Sequence[str],
) -> Mapping[str, Any]:
    """Returns what is said of each chip asked for, along `candidate`: plans evaluated, feasible
    and given as points, and why there are none."""
    fits = feasibility.fits(asked)
    rows = (
        ("candidate", [chip.name for chip in asked.chips], "chip asked for"),
        ("candidate_evaluated", list(evaluated), "plans evaluated"),
        ("candidate_feasible", list(feasible), "plans that are feasible"),
        ("candidate_points", list(points), "plans that none betters"),
        ("obstacle", list(obstacles), "why the chip has no plan, and what would help"),
        ("candidate_least_chips", [fit.chips for fit in fits],
         "fewest chips in one stage that hold the model and one request; 0: none"),
        ("candidate_fits", [fit.words for fit in fits],
         "fewest chips by number format, and why there are none"),
        ("candidate_kernels", [chip.kernels_of() for chip in asked.chips],
         "whose kernel measurements the chip uses"),
        ("candidate_assumed", [question.assumed_of(chip) for chip in asked.chips],
         "datasheet numbers that are assumed of the chip"),
    )  # fmt: skip
    return {
        name: ("candidate", values, {"units": "1", "long_name": text})
        for name, values, text in rows
    }
