"""The smallest deployment that serves a request rate within service levels, on each chip.

A replica serves a closed loop of `batch` requests, so at its batch it finishes
requests_per_second(batch), and has the TTFT and TPOT of that batch. Traffic that arrives at a rate
R of its own needs replicas whose rates, within the limits, add up to R with some headroom H:

    needed    = ⌈R·(1 + H)/rate⌉          the most that a replica does within its limits
    replicas  = needed + spare            the spare ones replace those that fail
    nodes     = whole servers that hold them, where the chip comes in servers

Every layout, batch, chunk and precision is tried. Where the load is less than the capacity, each
replica runs fewer requests at once: the smallest batch whose rate is its part of R.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from perfmodel import budgets, exploration, feasibility, question, results
from perfmodel.advice import advise
from perfmodel.chips import Chip
from perfmodel.designs import Designs, blocks, designs, evaluate
from perfmodel.errors import Infeasible, InputError, nearest, shorten
from perfmodel.margins import MARGINS
from perfmodel.models.transformer import Model
from perfmodel.question import ChipLike, EngineLike, Layout, ModelLike, Question
from perfmodel.units import GB, HOUR, seconds

PIPELINES = (1, 2, 4, 8)
"""Pipeline stages tried of each replica."""

REPLICA = 64
"""Chips of the largest replica tried; more are several replicas."""

ORDERS = {
    "chips": "chips",
    "nodes": "whole nodes",
    "usd": "rent of whole nodes",
    "kw": "power limit of the boards in whole nodes",
}
"""What the smallest deployment can be smallest in."""

_LIMITS = ("ttft limit", "tpot limit")
_MOST_RATE, _MOST_HEADROOM = 1e9, 100.0
# A rate is computed in float32, and may miss its multiple by a rounding.
_ROUNDING = 1e-6


class Need(NamedTuple):
    """What is asked of a deployment: `rate` [requests/s], `headroom` above it, `spare` replicas,
    the order `by` which it is smallest, the `most` chips it may have, and the most that its whole
    nodes may have, which budgets allow (`held`)."""

    rate: float
    headroom: float
    spare: int
    by: str
    most: int | None
    held: int | None = None

    @property
    def target(self) -> float:
        """The rate that the replicas in need must reach within the limits [requests/s]."""
        return self.rate * (1.0 + self.headroom)

    def replicas(self, rate: Any) -> Any:
        """Returns how many replicas of a rate are needed, without spare ones.

        >>> Need(10.0, 0.2, 1, "chips", None).replicas(np.array([12.0, 6.1, 4.0, 3.9])).tolist()
        [1.0, 2.0, 3.0, 4.0]
        """
        each = np.asarray(rate, dtype=float)
        return np.maximum(np.ceil(self.target / each * (1.0 - _ROUNDING)), 1.0)


class Size(NamedTuple):
    """What replicas occupy: `chips` of them, whole `nodes`, and the chips `provisioned` there."""

    chips: Any
    nodes: Any
    provisioned: Any


def occupy(replica: Any, replicas: Any, node: int) -> Size:
    """Returns what equal replicas occupy in nodes of so many chips.

    A replica does not straddle nodes where it fits into one, and has nodes of its own where not.

    >>> occupy(np.array([2, 3, 16]), np.array([5, 5, 2]), 8).nodes.tolist()
    [2, 3, 4]
    """
    fits = np.maximum(node // replica, 1)
    nodes = np.where(replica > node, -(-replica // node) * replicas, -(-replicas // fits))
    return Size(replica * replicas, nodes, nodes * node)


def node_of(chip: Chip) -> int:
    """Returns the chips of one server; 1 where a chip comes alone or no server is known."""
    return int(chip.fields["chips_per_node"].value or 1)


class Chosen(NamedTuple):
    """The best of one search: the sort `key` and its design, of one replica."""

    key: tuple[float, ...]
    design: Designs


class Found(NamedTuple):
    """What a search of one chip found.

    Fields: the `best` of each way of asking: as asked "", without a service level by its name,
    and with any number of "chips"; counts of plans; the plan `near`est to running within limits.
    """

    best: Mapping[str, Chosen]
    evaluated: int
    feasible: int
    near: Designs | None
    distance: tuple[bool, float]


def layouts(model: Model, most: int | None) -> list[Layout]:
    """Returns the layout of every replica tried, those of fewer chips first.

    Experts are cut like other layers, or spread over all chips of a stage.
    """
    limit = min(REPLICA, most or REPLICA)
    found = [one for one in question.layouts(model, limit, PIPELINES) if one.ep in (1, one.tp)]
    return sorted(found, key=lambda one: (one.chips, one.pp, one))


def _plans(listed: Sequence[Layout], batches: Sequence[int], chunks: Sequence[int]) -> Designs:
    order = np.meshgrid(np.arange(len(listed)), chunks, batches, indexing="ij")
    place, chunk, batch = (column.ravel() for column in order)
    columns = dict(zip(Layout._fields, np.asarray(listed)[place].T, strict=True))
    found = designs(**columns, batch=batch, chunk=chunk)
    return found.take(found.attention_dp <= found.batch)


def _key(
    need: Need, chip: Chip, price: float, plans: Designs, rate: np.ndarray
) -> list[np.ndarray]:
    """Returns what plans are sorted by: their size, then the capacity beyond what is asked."""
    needed = need.replicas(rate)
    size = occupy(plans.tp * plans.pp, needed + need.spare, node_of(chip))
    first = {
        "chips": [size.chips, size.provisioned],
        "nodes": [size.nodes, size.chips],
        # The price and the power limit of a chip are the same for all its plans.
        "usd": [size.provisioned * price, size.chips],
        "kw": [size.provisioned * float(chip.fields["tdp"].value or 0.0), size.chips],
    }
    return [*(np.asarray(key, dtype=float) for key in first[need.by]), -needed * rate]


def _search(
    asked: Question,
    chip: int,
    listed: Sequence[Layout],
    tried: tuple[Sequence[int], Sequence[int]],
    need: Need,
) -> Found:
    """Returns the best plans of one chip, over all its precisions."""
    entry, price = asked.chips[chip], float(asked.machines.price[chip])
    best: dict[str, Chosen] = {}
    evaluated = feasible = 0
    near, distance = None, (False, -np.inf)
    kinds = [kind for kind in range(len(asked.formats)) if asked.supports(chip, kind)]
    for _, group in itertools.groupby(listed, key=lambda one: one.chips):
        plans = _plans(list(group), *tried)
        # The least that replicas of this many chips can be is one of them, and the spare ones.
        least = _key(need, entry, price, plans.take([0]), np.asarray([np.inf]))
        if "" in best and tuple(float(key[0]) for key in least[:2]) > best[""].key[:2]:
            continue
        for kind in kinds:
            for part, found in blocks(asked, chip, kind, plans):
                size = part.stop - part.start
                margins = np.asarray(found["margins"])[:size]
                rate = np.asarray(found["requests_per_second"])[:size].astype(float)
                own = plans.take(part)
                good = np.all(margins >= 0.0, axis=1)
                evaluated, feasible = evaluated + size, feasible + int(np.sum(good))
                for way, rows in _ways(margins >= 0.0):
                    free = need._replace(by="chips", most=None, held=None)
                    order = free if way == "chips" else need
                    chosen = _best(order, entry, price, own, rate, rows)
                    if chosen and (way not in best or chosen[0] < best[way].key):
                        best[way] = Chosen(chosen[0], _one(own, chosen[1], chip, kind))
                if not feasible:
                    row, gap = exploration.nearest_row(margins)
                    if gap > distance:
                        near, distance = _one(own, row, chip, kind), gap
    return Found(best, evaluated, feasible, near, distance)


def _best(
    need: Need, chip: Chip, price: float, listed: Designs, rate: np.ndarray, rows: np.ndarray
) -> tuple[tuple[float, ...], int] | None:
    """Returns the key and row of the best of some rows, or None where there is none."""
    if need.most is not None:
        replicas = need.replicas(rate[rows]) + need.spare
        rows = rows[replicas * (listed.tp * listed.pp)[rows] <= need.most]
    if need.held is not None:
        replicas = need.replicas(rate[rows]) + need.spare
        held = occupy((listed.tp * listed.pp)[rows], replicas, node_of(chip)).provisioned
        rows = rows[held <= need.held]
    if not len(rows):
        return None
    keys = _key(need, chip, price, listed.take(rows), rate[rows])
    first = int(np.lexsort(keys[::-1])[0])
    return tuple(float(key[first]) for key in keys), int(rows[first])


def _ways(meets: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the rows that are feasible as asked, and with one of the conditions left out."""
    yield "", np.flatnonzero(np.all(meets, axis=1))
    yield "chips", np.flatnonzero(np.all(meets, axis=1))
    for name in _LIMITS:
        others = [i for i, margin in enumerate(MARGINS) if margin != name]
        yield name, np.flatnonzero(np.all(meets[:, others], axis=1))


def _one(listed: Designs, row: Any, chip: int, kind: int) -> Designs:
    one = listed.take([int(row)])
    return one._replace(chip=np.asarray([chip]), precision=np.asarray([kind]))


# ---- What the answer is made of ----


class Verdict(NamedTuple):
    """What a smaller deployment would violate.

    Fields: its plan (degrees, `batch`, `chunk`, `precision`, `replicas` in need); the `limit` it
    breaks, by how much (`miss`, relative), and that in `words`. A plan of 0 is none.
    """

    tp: int = 0
    pp: int = 0
    ep: int = 0
    attention_dp: int = 0
    cp: int = 0
    regions: int = 1
    batch: int = 0
    chunk: int = 0
    precision: str = ""
    replicas: int = 0
    limit: str = ""
    miss: float = math.nan
    words: str = ""


def _broken(asked: Question, values: Mapping[str, np.ndarray], row: int, chip: int):
    """Returns the limit that a design breaks by most, by how much, and that in words."""
    one = {name: column[[row]] for name, column in values.items()}
    limit = str(results.binding(one)[0])
    miss = -float(np.min(one["margins"]))
    if limit in _LIMITS:
        name = limit.removesuffix(" limit")
        reached, most = float(one[f"{name}_s"][0]), float(getattr(asked.limits, name))
        return limit, miss, f"{name.upper()} {seconds(reached)} against {seconds(most)}"
    if limit == "memory":
        capacity = float(asked.chips[chip].fields["memory_capacity"].value or 0.0)
        have, need = capacity * asked.engine.engine.memory_fraction, float(one["memory_bytes"][0])
        words = f"{need / GB:.4g} GB a chip for one request where {have / GB:.4g} GB can be used"
        return limit, miss, f"memory: needs {words}"
    return limit, miss, f"{limit} is not met"


def _over(miss: float) -> str:
    return f"{miss:.1%}" if miss >= 1e-3 else f"{miss:.1g} of it"


def _fewer_replicas(
    asked: Question, best: Designs, needed: int, curve: Mapping[str, np.ndarray], need: Need
) -> Verdict:
    """Returns what breaks where one replica fewer takes the load, the plan otherwise the same."""
    row = {name: int(column[0]) for name, column in best._asdict().items()}
    names = str(asked.formats[row["precision"]])
    own = {name: row[name] for name in (*Layout._fields, "batch", "chunk")}
    plan = Verdict(precision=names, replicas=needed - 1)._replace(**own)
    if needed == 1:
        words = "it is the only replica that the load needs"
        return Verdict(limit="rate", miss=1.0, words=words)
    share = need.target / (needed - 1)
    rates = curve["requests_per_second"].astype(float)
    start = f"each would serve {share:.3g} requests/s"
    enough = np.flatnonzero(rates >= share)
    if len(enough):
        at = int(enough[0])
        limit, miss, words = _broken(asked, curve, at, row["chip"])
        batch = int(curve["batch"][at])
        return plan._replace(
            batch=batch, limit=limit, miss=miss, words=f"{start}, batch {batch}: {words}"
        )
    at = int(np.argmax(rates))
    batch, admitted = int(curve["batch"][at]), int(curve["admitted"][at])
    miss = 1.0 - float(rates[at]) / share
    if float(curve["batch"][-1]) > admitted:
        limit, why = "kv capacity", f"the KV cache admits {admitted:,} requests"
    elif at == len(rates) - 1:
        limit, why = "batch", f"a larger batch than {batch:,} is not tried"
    else:
        limit, why = "rate", "more requests at once do not go faster"
    words = f"{start}, and does {rates[at]:.3g} at most ({_over(miss)} short): {why}"
    return plan._replace(batch=batch, limit=limit, miss=miss, words=words)


def _smaller_replica(
    asked: Question, best: Designs, needed: int, need: Need, batches: list[int], chunks: list[int]
) -> Verdict:
    """Returns what breaks where as many replicas are of the next smaller number of chips."""
    chip, size = int(best.chip[0]), int(best.tp[0] * best.pp[0])
    smaller = layouts(asked.model.model, size - 1) if size > 1 else []
    if not smaller:
        return Verdict(words="one chip is the smallest replica")
    smaller = [one for one in smaller if one.chips == smaller[-1].chips]
    kinds = [k for k in range(len(asked.formats)) if asked.supports(chip, k)]
    plans = _plans(smaller, batches, chunks)
    parts = [plans._replace(precision=plans.precision + k, chip=plans.chip + chip) for k in kinds]
    listed = Designs(*map(np.concatenate, zip(*parts, strict=True)))
    values = evaluate(asked, listed)
    good = results.feasible(values)
    if np.any(good):
        rates = np.where(good, values["requests_per_second"].astype(float), -np.inf)
        row = int(np.argmax(rates))
        within = float(rates[row]) * needed
        limit, miss = "rate", 1.0 - within / need.target
        words = (
            f"{within:.3g} requests/s within the limits where {need.target:.3g} are needed "
            f"({_over(miss)} short)"
        )
    else:
        row, _ = exploration.nearest_row(values["margins"])
        limit, miss, words = _broken(asked, values, row, chip)
    plan = {name: int(getattr(listed, name)[row]) for name in (*Layout._fields, "batch", "chunk")}
    names = str(asked.formats[int(listed.precision[row])])
    found = Verdict(precision=names, replicas=needed, limit=limit, miss=miss, words=words)
    return found._replace(**plan)


class _Answer(NamedTuple):
    """One chip's smallest deployment: its design with all replicas, and everything beside it."""

    key: tuple[float, ...]
    design: Designs
    extra: dict[str, Any]


def _answer(
    asked: Question, found: Found, need: Need, batches: list[int], chunks: list[int]
) -> _Answer:
    key, one = found.best[""]
    chip = int(one.chip[0])
    entry = asked.chips[chip]
    row = {name: int(column[0]) for name, column in one._asdict().items()}
    curve = evaluate(asked, designs(**row | {"batch": batches}))
    rates = curve["requests_per_second"].astype(float)
    rate = float(rates[batches.index(row["batch"])])
    needed = int(need.replicas(rate))
    replicas = needed + need.spare
    size = occupy(row["tp"] * row["pp"], replicas, node_of(entry))
    design = one._replace(replicas=np.asarray([replicas]))

    # What runs at the rate asked for, spread over all replicas.
    at = int(np.argmax(rates >= min(need.rate / replicas, rate)))
    running = float(asked.machines.power.running[chip])
    busy = min(need.rate / replicas / float(rates[at]), 1.0)
    watts = running + (float(curve["chip_power_w"][at]) - running) * busy

    fewer = _fewer_replicas(asked, one, needed, curve, need)
    smaller = _smaller_replica(asked, one, needed, need, batches, chunks)
    setter = fewer.limit if needed > 1 else smaller.limit
    provisioned = int(size.provisioned)
    per_hour = float(asked.machines.price[chip]) * HOUR * provisioned
    server = entry.fields["server_power"].value
    extra: dict[str, Any] = {
        "needed_replicas": needed,
        "spare_replicas": need.spare,
        "rate_per_replica": rate,
        "rate_capacity": rate * needed,
        "headroom_left": rate * needed / need.rate,
        "headroom_left_with_spares": rate * replicas / need.rate,
        "node_chips": node_of(entry),
        "nodes": int(size.nodes),
        "provisioned_chips": provisioned,
        "provisioned_usd_per_hour": per_hour if per_hour > 0.0 else math.nan,
        "load_batch": int(curve["batch"][at]),
        "load_ttft_s": float(curve["ttft_s"][at]),
        "load_tpot_s": float(curve["tpot_s"][at]) if float(asked.load.osl) > 1 else math.nan,
        "load_power_w": watts * int(size.chips),
        "board_power_w": float(entry.fields["tdp"].value or math.nan) * provisioned,
        "server_power_w": math.nan if server is None else server * provisioned,
        "set_by": setter or "one chip is enough",
    }
    for name in _LIMITS:
        other = found.best[name]
        label = name.replace(" ", "_")
        chips = (needed + need.spare) * row["tp"] * row["pp"]
        free = _chips_of(asked, other, need)
        extra[f"{label}_binds"] = other.key[:2] < key[:2]
        extra[f"{label}_chips_without"] = min(free, chips) if other.key[:2] < key[:2] else chips
    for label, verdict in (("fewer_replicas", fewer), ("smaller_replica", smaller)):
        extra |= {f"{label}_{part}": value for part, value in verdict._asdict().items()}
    return _Answer(key, design, extra)


def _chips_of(asked: Question, chosen: Chosen, need: Need) -> int:
    rate = float(evaluate(asked, chosen.design)["requests_per_second"][0])
    replica = int(chosen.design.tp[0] * chosen.design.pp[0])
    return int(need.replicas(rate) + need.spare) * replica


_PLAN = (
    ("tp", "chip", "tensor-parallel degree"),
    ("pp", "1", "pipeline stages"),
    ("ep", "1", "expert-parallel degree"),
    ("attention_dp", "1", "attention groups"),
    ("cp", "1", "context-parallel degree"),
    ("regions", "1", "pipeline stages side by side on one chip"),
    ("batch", "request", "requests at once in a replica"),
    ("chunk", "token", "most prompt tokens in one step"),
    ("precision", "1", "number formats"),
    ("replicas", "1", "replicas, without spare ones; with 0 there is no such deployment"),
    ("limit", "1", "the limit it breaks"),
    ("miss", "1", "by how much, relative to the limit"),
    ("words", "1", "that in words"),
)

_EXTRA: Mapping[str, tuple[str, str]] = {
    "needed_replicas": ("1", "replicas that the rate with its headroom needs"),
    "spare_replicas": ("1", "replicas beyond those, for failures"),
    "rate_per_replica": ("request/s", "most that one replica serves within the limits"),
    "rate_capacity": ("request/s", "the same of the replicas needed, without spare ones"),
    "headroom_left": ("1", "rate capacity over the rate asked for, without spare replicas"),
    "headroom_left_with_spares": ("1", "rate capacity over the rate asked for, all replicas up"),
    "node_chips": ("chip", "chips of one node; 1 where a chip comes alone, or no server is known"),
    "nodes": ("1", "whole nodes that hold the replicas"),
    "provisioned_chips": ("chip", "chips of those nodes"),
    "provisioned_usd_per_hour": ("USD/h", "rent of the chips of those nodes"),
    "load_batch": ("request", "requests at once in a replica at the rate asked for"),
    "load_ttft_s": ("s", "time to first token at the rate asked for"),
    "load_tpot_s": ("s", "time per output token at the rate asked for"),
    "load_power_w": ("W", "mean power of all chips deployed at the rate asked for"),
    "board_power_w": ("W", "power limit of the boards of whole nodes"),
    "server_power_w": ("W", "rated power of whole nodes, hosts and fans included"),
    "set_by": ("1", "the limit that keeps the deployment from being smaller"),
    **{
        key: value
        for name in ("TTFT", "TPOT")
        for key, value in {
            f"{name.lower()}_limit_binds": ("1", f"whether it is smaller without {name} limit"),
            f"{name.lower()}_limit_chips_without": ("chip", f"chips without {name} limit"),
        }.items()
    },
    **{
        f"{label}_{part}": (unit, f"{what}: {words}")
        for label, what in (
            ("fewer_replicas", "with one replica fewer"),
            ("smaller_replica", "with replicas of the next fewer chips"),
        )
        for part, unit, words in _PLAN
    },
}  # fmt: skip
"""What a deployment has beside the numbers of its plan: unit and meaning."""


def size(
    model: ModelLike,
    chips: Sequence[ChipLike] = ("all",),
    *,
    rate: float,
    isl: int,
    osl: int,
    slo_ttft: float | None = None,
    slo_tpot: float | None = None,
    headroom: float = 0.2,
    spare: int = 1,
    by: str = "chips",
    max_chips: int | None = None,
    max_power: float | None = None,
    max_racks: float | None = None,
    max_cost: float | None = None,
    precisions: Sequence[str] = exploration.PRECISIONS,
    chunks: Sequence[int] = exploration.CHUNKS,
    batches: Sequence[int] = exploration.BATCHES,
    prefix_hit: float = 0.0,
    engine: EngineLike = "neutral",
    price: float | Mapping[str, float] | None = None,
    routing: float | None = None,
    images: float | None = None,
) -> xr.Dataset:
    """Returns the smallest deployment that serves a request rate, for each chip.

    Along `deployment`, one per chip that has an answer, the smallest first: the numbers of its
    plan as `estimate` gives them, at the most requests a replica runs within the limits, for all
    replicas; and those of `_EXTRA`: replicas needed and spare, nodes, headroom, what runs at the
    rate asked for, and what the next smaller deployments would violate. Along `candidate`, each
    chip asked for with the number of plans and, where there is no answer, the `obstacle`.

    Args:
        model, engine: names, paths, or loaded entries.
        chips: the same, or "all" for every chip of the catalogue.
        rate: requests that arrive [1/s], on average.
        isl, osl, prefix_hit: prompt and output tokens, and the share of the prompt cached.
        routing, images: as of `estimate`.
        slo_ttft, slo_tpot: longest acceptable means [s]; none by default.
        headroom: capacity asked for beyond the rate, relative.
        spare: replicas beyond those needed, for failures.
        by: one of `ORDERS`; of equal ones the one with fewer chips, then with more capacity.
        max_chips: most chips of a deployment, spare replicas included.
        max_power, max_racks, max_cost: the most that whole nodes may take together: rated power
            with hosts, without PUE [W]; racks; rent [USD/h] (`perfmodel.budgets`).
        precisions, chunks, batches: choices of each plan. price: as of `frontier`.

    Raises:
        Infeasible: no chip has an answer; says the nearest and the smallest change that helps,
            and has what is `found` along `candidate`.

    >>> found = size("llama-3.1-8b", ["h100"], rate=1.0, isl=1000, osl=100, slo_tpot=0.02)
    >>> one = found.isel(deployment=0)
    >>> int(one.needed_replicas), int(one.replicas), int(one.chips), int(one.nodes)
    (1, 2, 2, 1)
    """
    most = None if max_chips is None else question.whole("max_chips", max_chips)
    need = Need(
        rate=question.real_number(
            "rate", rate, math.ulp(0.0), _MOST_RATE, "a positive number of requests per second"
        ),
        headroom=question.real_number(
            "headroom", headroom, 0.0, _MOST_HEADROOM, "a share of the rate, 0 or more"
        ),
        spare=question.whole("spare", spare, low=0),
        by=by,
        most=most,
    )
    if by not in ORDERS:
        raise InputError(f"by: unknown order {shorten(by)!r}{nearest(shorten(by), ORDERS)}")
    options: dict[str, Any] = dict(
        isl=isl, osl=osl, prefix_hit=prefix_hit, engine=engine, slo_ttft=slo_ttft,
        slo_tpot=slo_tpot, price=price, routing=routing, images=images,
    )  # fmt: skip
    budget = question.budgets(max_power, max_racks, max_cost)
    formats = exploration.parse_precisions(precisions)
    # A replica that breaks a budget alone is no plan; the deployment's nodes are counted below.
    asked = question.ask(model, chips, formats, most=budget, **options)
    needs = [_need_of(asked, chip, need) for chip in range(len(asked.chips))]
    tried = exploration.choices("batches", batches), exploration.choices("chunks", chunks)
    listed = layouts(asked.model.model, most)
    plans = len(listed) * len(tried[0]) * len(tried[1])
    exploration.check_count("size", plans * len(asked.chips) * len(asked.formats))
    found = [_search(asked, chip, listed, tried, own) for chip, own in enumerate(needs)]
    obstacles = [_obstacle(asked, chip, each, needs[chip]) for chip, each in enumerate(found)]
    call = question.described(
        "size", model, chips, rate=rate, headroom=headroom, spare=spare, by=by,
        max_chips=max_chips, max_power=max_power, max_racks=max_racks, max_cost=max_cost,
        precisions=precisions, chunks=chunks, batches=_span(batches),
        **options,
    )  # fmt: skip
    levels = {"slo_ttft_s": slo_ttft, "slo_tpot_s": slo_tpot, "max_chips": most}
    listing = {**_candidates(asked, found, obstacles), **budgets.table(asked, most)}
    table = xr.Dataset(listing).assign_attrs(
        asked.attributes(call)
        | budgets.attributes(asked)
        | {name: limit for name, limit in levels.items() if limit is not None}
        | {"rate": need.rate, "headroom": need.headroom, "spare": need.spare, "by": by}
        | {"evaluated": sum(each.evaluated for each in found)}
        | {"feasible": sum(each.feasible for each in found)}
        | results.stamp()
    )
    if all(obstacles):
        raise Infeasible(_nothing(asked, found, obstacles, need), table)
    answers = [
        _answer(asked, each, need, *tried)
        for each, why in zip(found, obstacles, strict=True)
        if not why
    ]
    answers.sort(key=lambda answer: answer.key)
    points = _points(asked, answers)
    return points.assign(table.variables).assign_attrs(table.attrs)


def _need_of(asked: Question, chip: int, need: Need) -> Need:
    """Returns the need with the chips that whole nodes of one kind may have by the budgets."""
    found = budgets.allowed(asked, chip, None)
    return need if found is None else need._replace(held=found.chips)


def _span(given: Sequence[int]) -> Any:
    """Returns a list of choices as a call is described by it; a default is left out."""
    return None if given is exploration.BATCHES else list(given)[:20]


def _points(asked: Question, answers: Sequence[_Answer]) -> xr.Dataset:
    listed = Designs(*map(np.concatenate, zip(*(a.design for a in answers), strict=True)))
    table = results.to_dataset(
        evaluate(asked, listed),
        ("deployment",),
        [asked.chips[chip].name for chip in listed.chip],
        [str(asked.formats[kind]) for kind in listed.precision],
    )
    extra = {
        name: (
            "deployment",
            np.asarray([answer.extra[name] for answer in answers]),
            {"units": unit, "long_name": words},
        )
        for name, (unit, words) in _EXTRA.items()
    }
    return table.assign(extra)


def _candidates(
    asked: Question, found: Sequence[Found], obstacles: Sequence[str]
) -> Mapping[str, Any]:
    return exploration.candidates(
        asked,
        [each.evaluated for each in found],
        [each.feasible for each in found],
        [0 if why else 1 for why in obstacles],
        obstacles,
    )


def _obstacle(asked: Question, chip: int, found: Found, need: Need) -> str:
    """Returns why a chip has no answer, and the smallest change that gives it one; else ""."""
    entry = asked.chips[chip]
    if need.by == "usd" and not float(asked.machines.price[chip]):
        return f"price: unknown, and by usd needs it (--price {entry.name}=USD)"
    if "" in found.best:
        return ""
    if "chips" in found.best:
        return _too_many(asked, found.best["chips"], need)
    if found.near is None:
        has = ", ".join(entry.supported)
        return f"kernel: none for {', '.join(map(str, asked.formats))} (it has: {has})"
    values = evaluate(asked, found.near)
    limit = str(results.binding(values)[0])
    if limit not in _LIMITS:
        return f"{limit}: {advise(asked, found.near)}"
    one = {name: int(column[0]) for name, column in found.near._asdict().items()}
    missed = [
        name
        for name in ("ttft", "tpot")
        if float(values["margins"][0][MARGINS.index(f"{name} limit")]) < 0.0
    ]
    reached = " and ".join(
        f"{name.upper()} {seconds(float(values[f'{name}_s'][0]))} against "
        f"{seconds(float(getattr(asked.limits, name)))}"
        for name in missed
    )
    kept = " and ".join(f"a {n.upper()} of {_upward(float(values[f'{n}_s'][0]))}" for n in missed)
    plan = Layout(*(one[name] for name in Layout._fields)).text()
    plan += f", batch {one['batch']}, {asked.formats[one['precision']]}"
    return f"{limit}: {reached} at the nearest plan ({plan}); {kept} can be kept"


def _too_many(asked: Question, chosen: Chosen, need: Need) -> str:
    """Returns that a deployment has more chips than it may, and what would help."""
    chips = _chips_of(asked, chosen, need)
    replica, chip = int(chosen.design.tp[0] * chosen.design.pp[0]), int(chosen.design.chip[0])
    most = need.most if need.most is not None else need.held or 0
    if need.held is not None and (need.most is None or chips <= need.most):
        set_by = budgets.allowed(asked, chip, None)
        (name,) = (n for n, limit in budgets.NAMES.items() if set_by and limit == set_by.set_by)
        held = int(occupy(replica, chips // replica, node_of(asked.chips[chip])).provisioned)
        return f"{budgets.NAMES[name]}: {budgets.words(asked, chip, name, held)}"
    rate = float(evaluate(asked, chosen.design)["requests_per_second"][0])
    within = max(most // replica - need.spare, 0) * rate / (1.0 + need.headroom)
    # Rounded down, so that the rate named can be asked for.
    step = 10.0 ** (math.floor(math.log10(within)) - 2) if within else 1.0
    less = f", or ask for {math.floor(within / step) * step:.3g} requests/s" if within else ""
    return f"chips: needs {chips:,} where at most {most:,} are allowed; allow {chips:,}{less}"


def _upward(value: float) -> str:
    """Returns a duration of three digits that is no shorter, so that a limit of it is met."""
    step = 10.0 ** (math.floor(math.log10(value)) - 2)
    return seconds(math.ceil(value / step - 1e-9) * step)


def _nothing(asked: Question, found: Sequence[Found], obstacles: Sequence[str], need: Need) -> str:
    """Returns on one line that no chip has an answer, the chip that comes nearest first."""

    def distance(chip: int) -> tuple[bool, float]:
        best = found[chip].best
        if "chips" in best:
            return True, 1.0 / _chips_of(asked, best["chips"], need)
        return found[chip].distance

    order = sorted(range(len(found)), key=distance, reverse=True)
    why = feasibility.reasons(
        [asked.chips[chip].name for chip in order], [obstacles[chip] for chip in order], 1
    )
    rate = f"{need.rate:g} {'request' if need.rate == 1.0 else 'requests'}/s"
    return f"no deployment of {asked.model.name} serves {rate}; nearest is {why}"
