"""Published gains of serving techniques beside what the model says of the same change.

A row of `validation/gains.csv` has a published ratio and two settings, `before` and `after`, each a
list of words: pools by role (`prefill=h100:tp=8,ep=8`; `pool=` is all that is not named), and

    batch, isl, osl, hit, micro    as of `perfmodel.systems.serve`
    engine, and any of its fields  the profile, and numbers that take the place of its own
    routing, price                 as there; prices as chip:USD+chip:USD
    nic, nic_latency               bytes a second and seconds of every chip's network port
    af, af_latency                 the same between a replica of attention and FFN, where they share
                                   a domain: not through network ports
    ttft, tpot                     longest allowed [s]
    isl_spread, osl_spread         standard deviation over mean of log-normal lengths
    ttft_p50, tpot_p90, gap_p99 …  longest that so many per cent of requests may have that arrive at
                                   random (of gaps: of all between two tokens) [s]
    product                        columns of a square matrix that `batch` rows are multiplied by;
                                   instead of a network

Values joined by | are tried in turn and the best that runs is taken, as whoever publishes a gain
tunes both sides. A row without settings says in `why` what the model lacks or the source leaves
out.
"""

import csv
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import numpy as np
import xarray as xr

from perfmodel import engines, formats, percentiles, question, systems, traffic
from perfmodel.chips import load_chip
from perfmodel.chips.entry import Chip
from perfmodel.engines import EngineEntry
from perfmodel.errors import InputError, shorten
from perfmodel.machine import Rank
from perfmodel.operators import Matmul
from perfmodel.placement import Link, Links
from perfmodel.systems import ROLES, Classes, PoolAsked, SystemAsked
from perfmodel.timing import total_usage

COLUMNS = (
    "id", "technique", "published", "kind", "model", "metric", "ratio", "before", "after",
    "source", "assumption", "why",
)  # fmt: skip

METRICS: Mapping[str, bool] = {
    "ttft_s": False,
    "tokens_per_second_user": True,
    "output_tokens_per_second_chip": True,
    "usd_per_million_total_tokens": False,
    "decode_rate_per_chip": True,
    "prefill_rate_per_chip": True,
    "tpot_slope": False,
    "capacity_per_chip": True,
    "capacity_per_usd": True,
    "product_s": False,
    "product_j": False,
}
"""What can be compared, and whether more of it is better: results of `serve`, output tokens per
second and chip of pools that decode, prompt tokens of those that do not, the rise of TPOT per token
of context, the rate of requests arriving at random that keep to percentiles, simulated, and time
and energy of one matrix product."""

_ENGINE = {field.name for field in engines.FIELDS}
_OTHERS = (
    "batch",
    "isl",
    "osl",
    "hit",
    "micro",
    "routing",
    "nic",
    "nic_latency",
    "af",
    "af_latency",
    "ttft",
    "tpot",
    "isl_spread",
    "osl_spread",
    "product",
)
_KEPT = re.compile(r"(ttft|tpot|gap)_p(\d+)")


@dataclasses.dataclass(frozen=True)
class Gain:
    """One published gain: `published` is after over before of a metric, or the inverse by `ratio`.

    `before` and `after` are lists of settings, all that are tried; empty where `why` says why not.
    """

    id: str
    technique: str
    published: float
    kind: str
    model: str
    metric: str
    inverse: bool
    before: tuple[Mapping[str, str], ...]
    after: tuple[Mapping[str, str], ...]
    source: str
    assumption: str
    why: str


def settings(text: str) -> tuple[Mapping[str, str], ...]:
    """Returns every setting of a list of words.

    >>> [dict(found) for found in settings("pool=h100:tp=2 batch=1|8")]
    [{'pool': 'h100:tp=2', 'batch': '1'}, {'pool': 'h100:tp=2', 'batch': '8'}]
    """
    names, values = [], []
    for word in text.split():
        name, equals, value = word.partition("=")
        known = {*ROLES, "pool", "engine", "price", *_OTHERS, *_ENGINE}
        if not equals or not (name in known or _KEPT.fullmatch(name)):
            raise InputError(f"gains: unknown setting '{shorten(word)}'")
        names.append(name)
        values.append(value.split("|"))
    if not names:
        return ()
    return tuple(dict(zip(names, chosen, strict=True)) for chosen in itertools.product(*values))


@functools.cache
def gains() -> tuple[Gain, ...]:
    """Returns the published gains that ship, checked."""
    text = files("perfmodel.validation").joinpath("gains.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines())
    if tuple(rows.fieldnames or ()) != COLUMNS:
        raise InputError(f"validation/gains.csv: columns must be {', '.join(COLUMNS)}")
    return tuple(map(_gain, rows))


def _gain(row: Mapping[str, str]) -> Gain:
    made = Gain(
        id=row["id"],
        technique=row["technique"],
        published=float(row["published"]),
        kind=row["kind"],
        model=row["model"],
        metric=row["metric"],
        inverse=row["ratio"] == "before/after",
        before=settings(row["before"]),
        after=settings(row["after"]),
        source=row["source"],
        assumption=row["assumption"],
        why=row["why"],
    )
    if bool(made.before and made.after) == bool(made.why):
        raise InputError(f"validation/gains.csv: {made.id}: settings, or why there are none")
    if made.before and made.metric not in METRICS:
        raise InputError(f"validation/gains.csv: {made.id}: unknown metric {made.metric!r}")
    return made


def _chip(name: str, setting: Mapping[str, str]) -> Chip:
    """Returns a chip, with another network port where the setting has one."""
    chip = load_chip(name)
    if "nic" not in setting:
        return chip
    fabric = dataclasses.replace(
        chip.machine.fabric,
        nic_bandwidth=np.asarray(float(setting["nic"])),
        nic_latency=np.asarray(float(setting["nic_latency"])),
    )
    return chip.with_machine(dataclasses.replace(chip.machine, fabric=fabric))


def _engine(setting: Mapping[str, str]) -> EngineEntry:
    entry = engines.load_engine(setting.get("engine", "neutral"))
    changed = {name: float(value) for name, value in setting.items() if name in _ENGINE}
    return dataclasses.replace(entry, engine=dataclasses.replace(entry.engine, **changed))


def _pool(text: str, role: str, setting: Mapping[str, str]) -> PoolAsked:
    pool = systems.parse_pool(text, role)
    return dataclasses.replace(pool, chip=_chip(str(pool.chip), setting))


def ask(model: str, setting: Mapping[str, str], context: float = 1.0) -> SystemAsked:
    """Returns a setting as a checked system, with prompts of `context` times its length."""
    given: dict[str, Any] = {name: _pool(setting[name], name, setting) for name in ROLES
                             if name in setting}  # fmt: skip
    base = _pool(setting["pool"], "pool", setting) if "pool" in setting else None
    options: dict[str, Any] = {}
    if "price" in setting:
        pairs = (part.rsplit(":", 1) for part in setting["price"].split("+"))
        options["price"] = {chip: float(price) for chip, price in pairs}
    if "af" in setting:
        link = Link(0.0, 1.0 / float(setting["af"]), float(setting["af_latency"]))
        options["links"] = Links(activations=link)
    if "routing" in setting:
        options["routing"] = float(setting["routing"])
    for name in ("ttft", "tpot"):
        if name in setting:
            options[f"slo_{name}"] = float(setting[name])
    isl, osl = round(float(setting["isl"]) * context), int(setting["osl"])
    if "isl_spread" in setting:
        spreads = (float(setting[f"{name}_spread"]) for name in ("isl", "osl"))
        lengths = zip((isl, osl), spreads, strict=True)
        mix = traffic.lognormal(*lengths, classes=_CLASSES, cached=float(setting.get("hit", 0.0)))
        parts = mix.traffic
        options["classes"] = Classes(mix.names, parts.isl, parts.osl, parts.cached, parts.weight)
    where, named = systems.table(given, base)
    return systems.ask(
        model,
        named,
        where,
        batch=float(setting["batch"]),
        isl=isl,
        osl=osl,
        prefix_hit=float(setting.get("hit", 0.0)),
        micro=float(setting.get("micro", 1.0)),
        engine=_engine(setting),
        **options,
    )


_CLASSES = 8
"""Of each length that is spread."""


def serve(model: str, setting: Mapping[str, str], context: float = 1.0) -> xr.Dataset:
    """Returns what a setting achieves, with prompts of `context` times its length."""
    made = ask(model, setting, context)
    return systems.dataset(made, systems.evaluate(made), float(setting["batch"]))


def capacity(model: str, setting: Mapping[str, str]) -> float:
    """Returns the rate of requests arriving at random that keep to a setting's percentiles [1/s],
    at most what its closed loop serves."""
    made = ask(model, setting)
    found = systems.dataset(made, systems.evaluate(made), float(setting["batch"]))
    if not math.isfinite(float(found["requests_per_second"])):
        return math.nan
    limits = []
    for name, value in setting.items():
        match = _KEPT.fullmatch(name)
        if match:
            limits.append(percentiles.Kept(match[1], float(match[2]), float(value)))
    return percentiles.capacity(
        made, float(setting["batch"]), float(found["requests_per_second"]), limits
    )


def product(setting: Mapping[str, str]) -> tuple[float, float]:
    """Returns the time [s] of a matrix product on a chip, and the energy of the whole chip [J]."""
    pool = _pool(setting["pool"], "pool", setting)
    machine = question.unique_chips([pool.chip])[0].machine
    form = formats.precision(pool.weights or "bf16")
    columns = float(setting["product"])
    once = Matmul(
        "product", "product", rows=float(setting["batch"]), columns=columns, inner=columns,
        weight_bytes=form.weight_bytes, activation_bytes=form.activation_bytes, kernel=form.kernel,
    )  # fmt: skip
    spent = total_usage((once,), Rank(machine, 1.0))
    seconds = float(spent.seconds)
    watts = float(machine.power.running) + float(spent.joules) / seconds
    return seconds, seconds * min(watts, float(machine.power.limit))


def value(model: str, metric: str, setting: Mapping[str, str]) -> float:
    """Returns a metric of a setting; NaN where it does not run or misses a service level."""
    if metric.startswith("product"):
        return product(setting)[metric == "product_j"]
    if metric.startswith("capacity"):
        rate, found = capacity(model, setting), serve(model, setting)
        if metric == "capacity_per_chip":
            return rate / float(found["chips"])
        rents = dict(pair.rsplit(":", 1) for pair in setting["price"].split("+"))
        counts = zip(found["chip"].to_numpy(), found["pool_chips"].to_numpy(), strict=True)
        return rate / sum(float(rents[str(chip)]) * float(count) for chip, count in counts)
    found = serve(model, setting)
    if not bool(found["feasible"]):
        return math.nan
    chips = dict(zip(found["pool"].to_numpy(), found["pool_chips"].to_numpy(), strict=True))
    if metric == "decode_rate_per_chip":
        others = sum(count for name, count in chips.items() if name != "prefill")
        return float(found["output_tokens_per_second"]) / others
    if metric == "prefill_rate_per_chip":
        rate = float(found["requests_per_second"]) * float(setting["isl"])
        return rate / chips.get("prefill", chips.get("pool", math.nan))
    if metric == "tpot_slope":
        short = serve(model, setting, 0.2)
        tokens = 0.8 * float(setting["isl"]) * float(setting["batch"])
        return (float(found["tpot_s"]) - float(short["tpot_s"])) / tokens
    return float(found[metric])


def best(gain: Gain, side: tuple[Mapping[str, str], ...]) -> tuple[float, Mapping[str, str]]:
    """Returns the best value of a side, and its setting; NaN where none runs."""
    tried = [(value(gain.model, gain.metric, setting), setting) for setting in side]
    good = [pair for pair in tried if math.isfinite(pair[0])]
    if not good:
        return math.nan, side[0]
    return (max if METRICS[gain.metric] else min)(good, key=lambda pair: pair[0])


def modelled(gain: Gain) -> tuple[float, Mapping[str, str], Mapping[str, str]]:
    """Returns the ratio that the model has, as published, and the settings it is of.

    NaN where a gain has no settings, or one side does not run.
    """
    if not gain.before:
        return math.nan, {}, {}
    before, first = best(gain, gain.before)
    after, second = best(gain, gain.after)
    return (before / after if gain.inverse else after / before), first, second
