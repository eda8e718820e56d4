"""Chips side by side: their numbers, and where the operators of a model's steps lie on rooflines.

    intensity  FLOP over bytes of memory traffic, of one execution on one rank
    achieved   FLOP over its modelled time
    roof       min(peak of its number format, intensity · memory bandwidth), both as on the sheet

Operators without arithmetic (links, waits) have no place there; their share of the step is told.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from perfmodel import evaluation, question, results
from perfmodel.chips import Chip
from perfmodel.chips.datasheet import FIELDS, PEAK_FIELDS
from perfmodel.errors import Infeasible
from perfmodel.models.catalogue import ModelEntry

FACTS = (
    "peak_bf16", "peak_fp8", "peak_int8", "peak_fp4", "peak_vector", "memory_capacity",
    "memory_bandwidth", "memory2_capacity", "memory2_bandwidth", "memory3_capacity",
    "memory3_bandwidth", "cache_capacity", "link_bandwidth", "link_latency", "domain",
    "nic_bandwidth", "host_link_bandwidth", "tdp", "idle_power", "server_power", "rack_chips",
    "rent", "purchase", "server_purchase", "manufacturing_cost",
)  # fmt: skip
"""Fields of a sheet that are compared."""

RATIOS = {
    "balance_bf16": ("FLOP/B", "16-bit FLOP per byte of memory traffic at which both take as long",
                     "peak_bf16", "memory_bandwidth"),
    "balance_fp8": ("FLOP/B", "the same in 8 bits", "peak_fp8", "memory_bandwidth"),
    "bf16_per_watt": ("FLOP/J", "16-bit rate over power limit", "peak_bf16", "tdp"),
    "bandwidth_per_watt": ("B/J", "memory bandwidth over power limit", "memory_bandwidth", "tdp"),
}  # fmt: skip
"""Numbers that follow from two of a sheet: unit, meaning, and the two."""

ACHIEVED = (
    "ttft_s", "tpot_s", "tokens_per_second_user", "output_tokens_per_second_chip",
    "requests_per_second", "memory_bytes", "power_w", "energy_per_output_token_j",
    "usd_per_million_output_tokens",
)  # fmt: skip
"""Numbers of an estimate that are compared."""

STEPS = {"decode": "decode", "mixed": "prefill"}
"""Names of the steps, by those of the operator table: `prefill` is one with a chunk of a prompt."""

_UNITS = {field.name: field.unit for field in FIELDS}


def named(names: Sequence[str]) -> tuple[Chip, ...]:
    """Returns the chips of names and files, "all" for every one of the catalogue."""
    return question.unique_chips(question.named_chips(names))


def compare(
    chips: Sequence[Chip], model: ModelEntry | None = None, *, isl: int = 4000, osl: int = 1000,
    **plan: Any,
) -> xr.Dataset:  # fmt: skip
    """Returns chips side by side.

    Along `chip` and `fact`: `value`, `low`, `high` and `kind` of every number of `FACTS` and
    `RATIOS`; a format that is not supported is of kind "none". With a model, along `chip` what it
    achieves at the plan (arguments as of `estimate`) and the `obstacle` where it does not run; and
    along `operator` every operator of both steps on every chip.
    """
    table = _facts(chips).assign_attrs(results.stamp())
    if model is None:
        return table
    found = [_run(chip, model, isl=isl, osl=osl, **plan) for chip in chips]
    achieved = {
        name: (
            "chip",
            [float(one[name]) if one is not None else math.nan for one, _, _ in found],
            {"units": results.BY_NAME[name].unit, "long_name": results.BY_NAME[name].long_name},
        )
        for name in ACHIEVED
    }
    texts = {
        "obstacle": ([why for _, _, why in found], "why it does not run there"),
        "binding": (
            ["" if one is None else str(one["binding"].item()) for one, _, _ in found],
            results.TEXTS["binding"],
        ),
    }
    words = {
        name: ("chip", values, {"units": "1", "long_name": text})
        for name, (values, text) in texts.items()
    }
    first = next((one for one, _, _ in found if one is not None), None)
    kept = ("model", "isl", "osl", "prefix_hit", "engine")
    about: dict[str, Any] = {"model": model.name}
    opened = next((rows for _, rows, _ in found if rows is not None), None)
    if first is not None and opened is not None:
        used = {PEAK_FIELDS.get(str(kernel), "peak_bf16") for kernel in opened["kernel"].values}
        about["peaks"] = ", ".join(name for name in FACTS if name in used)
        about |= {name: first.attrs[name] for name in kept}
        about |= {name: int(first[name]) for name in ("tp", "pp", "ep", "batch", "chunk")}
        about["precision"] = str(first["precision"].item())
    return table.assign(achieved | words).assign_attrs(about).merge(_placed(chips, found))


def check_any_runs(found: xr.Dataset) -> None:
    """Raises where a model runs on none of the chips compared."""
    if "obstacle" in found and all(found["obstacle"].values):
        whys = zip(found["chip"].values, found["obstacle"].values, strict=True)
        said = "; ".join(f"{chip}: {why}" for chip, why in list(whys)[:3])
        raise Infeasible(f"{found.attrs['model']} runs on none of the chips; {said}")


def _facts(chips: Sequence[Chip]) -> xr.Dataset:
    names = [*FACTS, *RATIOS]
    rows = [[_fact(chip, name) for name in names] for chip in chips]
    units = [_UNITS[n] if n in _UNITS else RATIOS[n][0] for n in names]
    about = {"units": "as in unit", "long_name": "number of a chip"}
    numbers = {
        part: (("chip", "fact"), np.asarray([[c[k] for c in row] for row in rows], float), about)
        for k, part in enumerate(("value", "low", "high"))
    }
    kinds = np.asarray([[cell[3] for cell in row] for row in rows], dtype=str)
    said = {"units": "1", "long_name": "what is known of it; none: no such kernel"}
    whose = {"units": "1", "long_name": "whose kernel measurements the chip uses"}
    return xr.Dataset(
        {
            **numbers,
            "kind": (("chip", "fact"), kinds, said),
            "kernels": ("chip", [chip.kernels_of() for chip in chips], whose),
        },
        {
            "chip": ("chip", [chip.name for chip in chips]),
            "fact": ("fact", names),
            "unit": ("fact", units),
            "title": ("chip", [chip.title for chip in chips]),
        },
    )


def _fact(chip: Chip, name: str) -> tuple[float, float, float, str]:
    """Returns value, low and high of a number (nan where unknown), and its kind."""
    if name in RATIOS:
        _, _, over, under = RATIOS[name]
        (a, _, _, kind), (b, _, _, other) = _fact(chip, over), _fact(chip, under)
        kinds = {kind, other}
        both = "assumed" if "assumed" in kinds else "derived"
        unsure = next((k for k in ("none", "unknown") if k in kinds), both)
        return (a / b if b else math.nan), math.nan, math.nan, unsure
    number = chip.fields.get(name)
    if number is None or number.value is None:
        return math.nan, math.nan, math.nan, "unknown"
    if not number.value and name.startswith("peak_"):
        # Given as 0 it is known to be missing; left out it is taken to be.
        return math.nan, math.nan, math.nan, "unknown" if number.kind == "assumed" else "none"
    if not number.value:
        return math.nan, math.nan, math.nan, "unknown"
    low, high = (math.nan if end is None else end for end in (number.low, number.high))
    return number.value, low, high, number.kind


def _run(
    chip: Chip, model: ModelEntry, **options: Any
) -> tuple[xr.Dataset | None, xr.Dataset | None, str]:
    """Returns estimate and operators of a chip, or why it does not run there."""
    names = question.own_precision(model, options.get("weights"), None, None)
    if not set(names.kernels) <= set(chip.supported):
        return None, None, f"no {names.kernel} kernel for {names}"
    found = evaluation.estimate(model, chip, **options)
    if not np.isfinite(float(found["ttft_s"])):
        return None, None, f"{found['binding'].item()}: {found['advice'].item()}"
    return found, evaluation.operators(model, chip, **options), ""


_OPERATOR = (
    ("step", "1", "decode, or prefill: a step with a chunk of a prompt"),
    ("name", "1", "operator"),
    ("of", "1", "chip"),
    ("sort", "1", "kind of operator"),
    ("intensity", "FLOP/B", "operations over bytes of memory traffic"),
    ("flop_rate", "FLOP/s", "operations over time"),
    ("roof", "FLOP/s", "the most at that intensity by the sheet"),
    ("seconds", "s", "time of all executions in a step"),
    ("share_of_step", "1", "share of the step's time"),
)


def _placed(
    chips: Sequence[Chip], found: Sequence[tuple[xr.Dataset | None, xr.Dataset | None, str]]
) -> xr.Dataset:
    """Returns the operators of all chips along `operator`."""
    rows: list[Mapping[str, Any]] = []
    for chip, (_, opened, _) in zip(chips, found, strict=True):
        rows += [] if opened is None else _rows(chip, opened)
    columns = {
        name: ("operator", np.asarray([row[name] for row in rows]),
               {"units": unit, "long_name": text})
        for name, unit, text in _OPERATOR
    }  # fmt: skip
    return xr.Dataset(columns)


def _rows(chip: Chip, opened: xr.Dataset) -> list[Mapping[str, Any]]:
    bandwidth = float(chip.fields["memory_bandwidth"].value or 0.0)
    names = ("step", "name", "kind", "kernel", "flops", "memory_bytes", "seconds_each", "seconds",
             "share_of_step")  # fmt: skip
    columns = {name: opened[name].values for name in names}
    rows = []
    for i in range(opened.sizes["operator"]):
        row = {name: column[i] for name, column in columns.items()}
        flops, moved = float(row["flops"]), float(row["memory_bytes"])
        there = flops > 0.0 and moved > 0.0
        intensity = flops / moved if there else math.nan
        rows.append(
            {
                "step": STEPS[str(row["step"])],
                "name": str(row["name"]),
                "of": chip.name,
                "sort": str(row["kind"]),
                "intensity": intensity,
                "flop_rate": flops / float(row["seconds_each"]) if there else math.nan,
                "roof": min(_peak(chip, row), intensity * bandwidth) if there else math.nan,
                "seconds": float(row["seconds"]),
                "share_of_step": float(row["share_of_step"]),
            }
        )
    return rows


def _peak(chip: Chip, row: Mapping[str, Any]) -> float:
    """Returns the peak of an operator's arithmetic: of its number format, or of vectors."""
    field = PEAK_FIELDS.get(str(row["kernel"]), "peak_bf16")
    if str(row["kind"]) not in ("matmul", "attention", "scan"):
        field = "peak_vector"
    return float(chip.fields[field].value or 0.0)
