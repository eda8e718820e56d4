"""What is known as a range, and what is allowed, in words and as ends to draw."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from perfmodel import _labels
from perfmodel._labels import Front
from perfmodel.units import si

if TYPE_CHECKING:
    import xarray as xr


def price_span(
    columns: Mapping[str, np.ndarray], name: str
) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the low and high ends of an axis of cost that the range of a price gives.

    None for other axes, and where no price has a range.

    >>> hours = {"usd_per_hour": 2.0, "usd_per_hour_low": 1.0, "usd_per_hour_high": 6.0}
    >>> columns = {k: np.array([v]) for k, v in (hours | {"usd_per_million_x": 0.5}).items()}
    >>> [end.tolist() for end in price_span(columns, "usd_per_million_x")]
    [[0.25], [1.5]]
    """
    per = name.endswith("_tokens_per_second_usd")
    if not per and not name.startswith("usd_per_"):
        return None
    value = columns[name].astype(float)
    # Every cost of a deployment goes with that of its hour.
    low, high = (
        columns[f"usd_per_hour_{end}"] / columns["usd_per_hour"] for end in ("low", "high")
    )
    if np.allclose(low, high, equal_nan=True):
        return None
    return (value / high, value / low) if per else (value * low, value * high)


def price_span_note(found: Sequence[Front], axes: tuple[str, str], what: str) -> str:
    """Returns what a band of an axis is, "" where no axis has one."""
    spans = (price_span(front.columns, name) for front in found for name in axes)
    return f"{what}: range of the price" if any(span is not None for span in spans) else ""


def budget_note(dataset: "xr.Dataset") -> str:
    """Returns how many chips of each kind the budgets allow and which sets it, "" without any."""
    if "candidate_allowed_chips" not in dataset:
        return ""
    names = ("candidate", "candidate_allowed_chips", "candidate_allowed_by")
    rows = zip(*(dataset[name].values for name in names), strict=True)
    listed = ", ".join(f"{chip} {int(chips):,} ({by})" for chip, chips, by in rows)
    asked = set(map(str, dataset["candidate"].values))
    hosts = [n for n in str(dataset.attrs.get("host_assumed", "")).split(", ") if n in asked]
    host = f" (power of the host assumed: {', '.join(hosts)})" if hosts else ""
    return f"Chips allowed, and by what: {listed}" + host * ("max_power_w" in dataset.attrs)


def bands(dataset: "xr.Dataset", ranges: "xr.Dataset | None") -> dict[str, tuple[float, float]]:
    """Returns low and high of the numbers that have a band: of the chip, or of its price alone."""
    if ranges is not None:
        rows = zip(*(ranges[k].values for k in ("quantity", "low", "high")), strict=True)
        return {str(name): (float(low), float(high)) for name, low, high in rows}
    names = [str(name) for name in dataset.variables if f"{name}_low" in dataset]
    return {n: (float(dataset[f"{n}_low"]), float(dataset[f"{n}_high"])) for n in names}


def ranges_note(ranges: "xr.Dataset | None") -> str:
    """Returns which numbers of a chip are ranges, those that matter most for the time first."""
    if ranges is None or not ranges.sizes["number"]:
        return ""
    low, high = ranges["effect_low"].values, ranges["effect_high"].values
    said = []
    for i in np.argsort(low - high, kind="stable"):
        ends = [float(ranges[f"number_{end}"][i]) for end in ("low", "high")]
        unit = str(ranges["unit"].values[i])
        span = f" {si(ends[0])} to {si(ends[1], unit)}" if unit not in ("1", "s") else ""
        span = f" {ends[0]:.3g} to {ends[1]:.3g}" if unit == "1" and ends[0] == ends[0] else span
        span = (
            f" {_labels.duration(ends[0])} to {_labels.duration(ends[1])}" * (unit == "s") or span
        )
        effect = f", time {low[i]:+.0%} to {high[i]:+.0%}" if high[i] - low[i] >= 0.005 else ""
        name = str(ranges["number"].values[i]).replace("_", " ")
        name += " of any measured chip of the family" if not math.isfinite(ends[0]) else ""
        said.append(f"{name}{span}{effect}")
    return "Ranges: with all of these at their better or worse ends at once: " + "; ".join(said)
