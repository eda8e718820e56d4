"""Datasets as JSON: SI numbers by the names of `results`, unknown numbers as null."""

import json
import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import xarray as xr

# Attributes that tell how a result was made, repeated at the top of the object.
_ATTRS = (
    "version", "created", "call", "command", "model", "notes", "isl", "osl", "prefix_hit",
    "images", "image_tokens", "routing", "engine", "slo_ttft_s", "slo_tpot_s", "max_power_w",
    "max_racks", "max_cost_usd_per_hour", "catalogue_digest", "ownership",
    "price_assumption", "site_assumption", "kernel_constants", "assumed", "host_assumed",
    "rate", "headroom", "spare", "by", "x", "y", "max_chips", "evaluated", "feasible",
)  # fmt: skip


def plain(value: Any) -> Any:
    """Returns a value as JSON has it: numpy scalars as Python's, NaN and infinities as None.

    >>> plain({"a": float("nan"), "b": (1, 2)})
    {'a': None, 'b': [1, 2]}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def text(value: Any) -> str:
    """Returns JSON text that any reader takes."""
    return json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False, default=str)


def _head(dataset: "xr.Dataset") -> dict[str, Any]:
    return {name: dataset.attrs[name] for name in _ATTRS if name in dataset.attrs}


def rows(dataset: "xr.Dataset", dim: str) -> list[dict[str, Any]]:
    """Returns one object per entry along a dimension."""
    columns = {
        str(name): plain(variable.values)
        for name, variable in dataset.variables.items()
        if variable.dims == (dim,)
    }
    keys = list(columns)
    return [dict(zip(keys, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def estimate(
    dataset: "xr.Dataset",
    operators: "xr.Dataset | None" = None,
    sensitivity: "xr.Dataset | None" = None,
    files: Mapping[str, Any] | None = None,
    ranges: "xr.Dataset | None" = None,
) -> dict[str, Any]:
    """Returns one design as a flat object; with the operator table as lists, what the design
    depends on, and the bands that ranges of its chip give, where given."""
    numbers = {
        str(name): variable.values
        for name, variable in dataset.variables.items()
        if variable.ndim == 0
    }
    found = _head(dataset) | numbers
    if operators is not None:
        found["steps"] = rows(operators, "phase")
        found["operators"] = rows(operators, "operator")
    if sensitivity is not None:
        found["sensitivity"] = _sensitivity(sensitivity)
    if ranges is not None:
        found["bands"] = {row.pop("quantity"): row for row in rows(ranges, "quantity")}
        found["ranges"] = rows(ranges, "number")
    if files:
        found["files"] = dict(files)
    return found


def _sensitivity(dataset: "xr.Dataset") -> dict[str, Any]:
    """Returns elasticities and derivatives as one object per input, with a key per output."""
    names = [str(name) for name in dataset["output"].values]
    inputs = rows(dataset, "input")
    for i, entry in enumerate(inputs):
        for key in ("elasticity", "derivative"):
            entry[key] = dict(zip(names, plain(dataset[key].values[:, i]), strict=True))
    return {
        "method": dataset.attrs["method"],
        "main": dataset.attrs["main"],
        "outputs": rows(dataset, "output"),
        "inputs": inputs,
    }


def frontier(
    dataset: "xr.Dataset",
    measured: "xr.Dataset | None" = None,
    files: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns a frontier: how it was made, the chips asked for, and its points."""
    head = _head(dataset)
    # "feasible" is the number of plans here, and a flag on each point.
    found = {("plans_" + k if k in ("evaluated", "feasible") else k): v for k, v in head.items()}
    found["chips"] = rows(dataset, "candidate")
    found["points"] = rows(dataset, "point")
    if measured is not None:
        found["measured"] = rows(measured, "run")
    if files:
        found["files"] = dict(files)
    return found


def size(dataset: "xr.Dataset", files: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns deployments, the smallest first, and the chips asked for."""
    head = _head(dataset)
    found = {("plans_" + k if k in ("evaluated", "feasible") else k): v for k, v in head.items()}
    found["chips"] = rows(dataset, "candidate")
    found["deployments"] = rows(dataset, "deployment")
    if files:
        found["files"] = dict(files)
    return found


def traced(dataset: "xr.Dataset") -> dict[str, Any]:
    """Returns a traced function on a chip: totals, and its operators as a list."""
    numbers = {
        str(name): variable.values
        for name, variable in dataset.variables.items()
        if variable.ndim == 0
    }
    return {**dataset.attrs, **numbers, "operators": rows(dataset, "operator")}


def system(found: "xr.Dataset") -> dict[str, Any]:
    """Returns a serving system: its numbers, and its pools and links."""
    scalars = {
        str(name): plain(value.values) for name, value in found.data_vars.items() if not value.dims
    }
    links = dict(zip(found["link"].values, found["link_load"].values, strict=True))
    parts = dict(zip(found["part"].values, found["tpot_parts_s"].values, strict=True))
    margins = dict(zip(found["constraint"].values, found["margin"].values, strict=True))
    return {
        **_head(found),
        "batch": found.attrs["batch"],
        **({"draft": found.attrs["draft"]} if "draft" in found.attrs else {}),
        **scalars,
        "pools": rows(found, "pool"),
        "link_load": plain(links),
        "tpot_parts_s": plain(parts),
        "margins": plain(margins),
        **({"classes": rows(found, "class")} if "class" in found.coords else {}),
        **({"simulated": rows(found, "statistic")} if "statistic" in found.coords else {}),
    }


def systems(found: "xr.Dataset", files: Mapping[str, Any]) -> dict[str, Any]:
    """Returns frontiers of serving systems: their points."""
    keys = ("hypervolume", "gradients", "enumerated", "starts", "traffic", "formats", "batching",
            "kv_memory", "left_out")  # fmt: skip
    points = rows(found, "point")
    if "statistic" in found.coords:
        for i, point in enumerate(points):
            point["simulated"] = rows(found.isel(point=i), "statistic")
    return {
        **_head(found),
        **{key: plain(found.attrs[key]) for key in keys if key in found.attrs},
        "points": points,
        **({"files": plain(files)} if files else {}),
    }
