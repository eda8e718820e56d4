"""Published and measured points beside what the model says of the same setting.

A point is a row of a CSV file of this folder: a chip, a network, its formats, plan and load, and
what was published of it, with its source and kind. A metric is one of `results`, or of a static
batch (`BATCH`, from `perfmodel.static`). `fitted` is 1 where a constant of the chip or of its
software has seen the row (`perfmodel.calibrate_families`); `speculation` is off, on or unknown. A
vendor's claim, or a point whose speculation is not known, is compared and never fitted.
"""

import csv
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any

import jax
import numpy as np

from perfmodel import compiled, engines, question, results, serving, static
from perfmodel.chips import load_chip
from perfmodel.errors import InputError
from perfmodel.formats import precision_numbers
from perfmodel.machine import Machine
from perfmodel.models.catalogue import load_model
from perfmodel.plan import Engine, Load, Plan

KINDS = ("measured", "vendor", "reported", "theory")
"""Who says so: a measurement anyone could repeat, the maker, the press, or arithmetic."""

BATCH = {"batch_s": "seconds", "batch_ttft_s": "prefill", "batch_step_s": "step"}
"""Metrics of a static batch: until all requests are done, to their first tokens, and a step [s]."""

COLUMNS = (
    "id", "chip", "model", "precision", "chips", "stages", "offload", "batch", "chunk", "isl",
    "osl", "burst", "engine", "metric", "value", "kind", "fitted", "speculation", "source",
    "note",
)  # fmt: skip
_NUMBERS = ("chips", "stages", "offload", "batch", "chunk", "isl", "osl", "burst", "value")
_OPTIONAL = ("context_ranks", "prefix_hit")
"""Columns that a file may have behind the others; an empty cell is a choice not in use."""


@dataclasses.dataclass(frozen=True)
class Point:
    """One row: what was run, and what was published of it, in the units of its metric."""

    id: str
    chip: str
    model: str
    precision: str
    engine: str
    metric: str
    value: float
    kind: str
    fitted: bool
    speculation: str
    source: str
    note: str
    plan: Mapping[str, float]


def names() -> list[str]:
    """Returns the files of points that ship, by name; `gains` is of ratios (`perfmodel.gains`).

    >>> "wafer" in names()
    True
    """
    folder = files("perfmodel.validation")
    return sorted(
        f.name[:-4] for f in folder.iterdir() if f.name.endswith(".csv") and f.name != "gains.csv"
    )


@functools.cache
def points(name: str) -> tuple[Point, ...]:
    """Returns the points of a file, checked."""
    where = f"validation/{name}.csv"
    text = files("perfmodel.validation").joinpath(f"{name}.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines())
    given = tuple(rows.fieldnames or ())
    if given != COLUMNS + tuple(name for name in _OPTIONAL if name in given):
        also = ", ".join(_OPTIONAL)
        raise InputError(f"{where}: columns must be {', '.join(COLUMNS)}, and may be {also}")
    return tuple(_point(row, f"{where} row {number}") for number, row in enumerate(rows, 1))


def _point(row: Mapping[str, str], where: str) -> Point:
    try:
        plan = {name: float(row[name]) for name in _NUMBERS}
        plan |= {name: float(row[name]) for name in _OPTIONAL if row.get(name)}
    except ValueError as error:
        raise InputError(f"{where}: {error}") from None
    if row["metric"] not in (*BATCH, *results.BY_NAME):
        raise InputError(f"{where}: no result is named '{row['metric']}'")
    if row["kind"] not in KINDS:
        raise InputError(f"{where}: kind '{row['kind']}' (known: {', '.join(KINDS)})")
    value = plan.pop("value")
    return Point(
        value=value,
        fitted=row["fitted"] == "1",
        plan=plan,
        **{
            name: row[name]
            for name in (
                "id", "chip", "model", "precision", "engine", "metric", "kind", "speculation",
                "source", "note",
            )
        },
    )  # fmt: skip


def _all(machine: Machine, model: Any, load: Load, plan: Plan, formats: Any, engine: Any) -> Any:
    found = serving.estimate(machine, model, load, plan, formats, engine)
    return results.read_all(results.Design(machine, model, plan, formats, found))


@functools.cache
def _program(of: Callable[..., Any]) -> Any:
    return compiled.unfused(of)


def modelled(
    point: Point, machine: Machine | None = None, engine: Engine | None = None
) -> tuple[float, float]:
    """Returns what the model says of a point, and its least margin (negative: does not fit).

    Args:
        point: the setting.
        machine, engine: others than its own, to fit constants with.
    """
    network = load_model(point.model)
    setting = dict(point.plan)
    hit = setting.get("prefix_hit", 0.0)
    load = Load(isl=setting["isl"], osl=setting["osl"], prefix_hit=hit, burst=setting["burst"])
    mixture = network.model.is_mixture
    plan = Plan(
        chips=setting["chips"],
        stages=setting["stages"],
        batch=setting["batch"],
        chunk=setting["chunk"],
        offload=setting["offload"] or None,
        context_ranks=setting.get("context_ranks"),
        attention_dp=1.0 if mixture else None,
        expert_ranks=1.0 if mixture else None,
    )
    formats = precision_numbers(question.parse_precision(point.precision))
    whole = load_chip(point.chip).under(point.engine).machine if machine is None else machine
    engine = engines.load_engine(point.engine).engine if engine is None else engine
    values = question.numbers((whole, network.model, load, plan, formats, engine))
    if point.metric in BATCH:
        batch = jax.device_get(_program(static.static_batch)(*values))
        return float(getattr(batch, BATCH[point.metric])), float(batch.margin)
    found = jax.device_get(_program(_all)(*values))
    runs = np.asarray(found["margins"])[[results.MARGINS.index(n) for n in ("memory", "kernel")]]
    return float(found[point.metric]), float(np.min(runs))


def errors(
    rows: Sequence[Point],
    machine_of: Callable[[str], Machine] | None = None,
    engine: Engine | None = None,
) -> np.ndarray:
    """Returns log(modelled/published) of each point."""
    machines = [None if machine_of is None else machine_of(p.chip) for p in rows]
    made = [modelled(p, m, engine)[0] for p, m in zip(rows, machines, strict=True)]
    return np.asarray([math.log(m / p.value) for m, p in zip(made, rows, strict=True)])
