"""Chips side by side as a table, and as JSON values."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel import _json, _labels
from perfmodel._tables import grid, lines
from perfmodel.units import si

if TYPE_CHECKING:
    import xarray as xr
    from rich.console import Group, RenderableType

_ACROSS = 5
"""Chips in one table; more are several tables."""

_WORDS = {
    "peak_bf16": "bf16, dense", "peak_fp8": "fp8, dense", "peak_int8": "int8, dense",
    "peak_fp4": "fp4, dense", "peak_vector": "32-bit vectors", "memory_capacity": "memory",
    "memory_bandwidth": "memory bandwidth", "memory2_capacity": "second memory",
    "memory2_bandwidth": "second memory bandwidth", "memory3_capacity": "third memory",
    "memory3_bandwidth": "third memory bandwidth", "cache_capacity": "cache",
    "link_bandwidth": "links, one direction", "link_latency": "link latency",
    "domain": "chips joined by links", "nic_bandwidth": "network port",
    "host_link_bandwidth": "link to host", "tdp": "power limit (TDP)",
    "idle_power": "power at rest", "server_power": "rated power with server",
    "rack_chips": "chips in a rack", "rent": "rent", "purchase": "list price",
    "server_purchase": "list price with server", "manufacturing_cost": "cost of making it",
    "balance_bf16": "balance, bf16", "balance_fp8": "balance, fp8",
    "bf16_per_watt": "bf16 rate over TDP", "bandwidth_per_watt": "bandwidth over TDP",
}  # fmt: skip

_ACHIEVED = (
    ("ttft_s", "time to first token", _labels.duration),
    ("tpot_s", "time per output token", _labels.duration),
    ("tokens_per_second_user", "tokens/s per user", _labels.number),
    ("output_tokens_per_second_chip", "output tokens/s per chip", _labels.number),
    ("memory_bytes", "memory used on a chip", lambda v: si(v, "B")),
    ("power_w", "power, all chips", lambda v: si(v, "W")),
    ("energy_per_output_token_j", "J per output token, decode's", _labels.number),
    ("usd_per_million_output_tokens", "$ per million output, decode's", _labels.number),
)

# Facts that most chips lack; a row of nothing but blanks says little.
_SELDOM = ("memory2_capacity", "memory2_bandwidth", "memory3_capacity", "memory3_bandwidth")


def shown(value: float, unit: str) -> str:
    """Returns a number as people read it.

    >>> shown(3.35e12, "B/s"), shown(132.0, "1"), shown(1e-5, "s"), shown(2.95, "USD/h")
    ('3.35 TB/s', '132', '10.0 µs', '$2.95/h')
    """
    if unit == "s":
        return _labels.duration(value)
    if unit == "1":
        return f"{value:g}"
    if unit.startswith("USD"):
        money = f"${value:,.2f}" if value < 100.0 else f"${value:,.0f}"
        return money + unit.removeprefix("USD")
    return si(value, unit)


def _cell(found: "xr.Dataset", chip: int, fact: int) -> str:
    """Returns a number with its range; – where unknown, none where there is no such kernel."""
    value, kind = float(found["value"][chip, fact]), str(found["kind"].values[chip, fact])
    unit = str(found["unit"].values[fact])
    if not math.isfinite(value):
        return "none " if kind == "none" else "– "
    low, high = float(found["low"][chip, fact]), float(found["high"][chip, fact])
    span = ""
    if math.isfinite(low) and math.isfinite(high) and kind != "assumed":
        span = f" ({shown(low, unit)} to {shown(high, unit)})" if low < high else ""
    return shown(value, unit) + ("*" if kind == "assumed" else " ") + span


def comparison_table(found: "xr.Dataset") -> "Group":
    """Returns the chips of `comparison.compare` side by side, and what a model achieves there."""
    from rich.console import Group

    chips = [str(name) for name in found["chip"].values]
    parts: list[Any] = []
    for start in range(0, len(chips), _ACROSS):
        own = range(start, min(start + _ACROSS, len(chips)))
        parts += [_numbers(found, own), ""]
    if "obstacle" in found:
        for start in range(0, len(chips), _ACROSS):
            own = range(start, min(start + _ACROSS, len(chips)))
            parts += [*_achieved(found, own), ""]
        parts += _operators(found)
    notes = (
        "rates are dense; bandwidths one direction; –: unknown; none: no such kernel; *: assumed",
        "balance: FLOP per byte from memory below which memory is what an operator waits for",
        *(_labels.kernel_note(chip, str(whose)) for chip, whose in
          zip(chips, found["kernels"].values, strict=True)),
    )  # fmt: skip
    return Group(*parts, lines(*notes, style="dim"))


def _numbers(found: "xr.Dataset", own: Sequence[int]) -> "RenderableType":
    names = [str(name) for name in found["chip"].values]
    table = grid(("", "left"), *((names[i], "left") for i in own))
    for column in table.columns[:1]:
        column.no_wrap = True
    for place, fact in enumerate(map(str, found["fact"].values)):
        blank = not np.isfinite(found["value"].values[:, place]).any()
        if fact in _SELDOM and blank:
            continue
        table.add_row(_WORDS[fact], *(_cell(found, i, place) for i in own))
    return table


def _setting(found: "xr.Dataset") -> str:
    attrs = found.attrs
    degrees = [f"{name.upper()}{attrs[name]}" for name in ("tp", "pp", "ep")
               if name == "tp" or attrs[name] > 1]  # fmt: skip
    return (
        f"{_labels.model_title(str(attrs['model']))} · {' '.join(degrees)} · batch "
        f"{attrs['batch']} · {attrs['precision']} · {_labels.lengths(found)} · engine "
        f"{attrs['engine']}"
    )


def setting(found: "xr.Dataset") -> str:
    """Returns model, plan and traffic on one line, "" where no model was asked for or none runs."""
    return _setting(found) if "precision" in found.attrs else ""


def _achieved(found: "xr.Dataset", own: Sequence[int]) -> list[Any]:
    names = [str(name) for name in found["chip"].values]
    table = grid(("", "left"), *((names[i], "right") for i in own))
    for name, words, form in _ACHIEVED:
        values = [float(found[name][i]) for i in own]
        table.add_row(words, *(form(v) if math.isfinite(v) else "–" for v in values))
    table.add_row("bound by", *(str(found["binding"].values[i]) or "–" for i in own))
    without = [
        f"{names[i]}: does not run, {found['obstacle'].values[i]}"
        for i in own
        if found["obstacle"].values[i]
    ]
    return [lines(setting(found), style="bold"), table, *([lines(*without)] if without else [])]


def _operators(found: "xr.Dataset") -> list[Any]:
    """Returns a table for each step: every operator with its intensity, and on each chip what it
    achieves of the roof."""
    chips = [str(n) for n in found["chip"].values if str(n) in set(map(str, found["of"].values))]
    names = ("step", "name", "of", "intensity", "flop_rate", "roof", "share_of_step")
    columns = {name: found[name].values for name in names}
    parts: list[Any] = []
    for step in ("decode", "prefill") if chips else ():
        table = grid(
            (f"{step} step", "left"), ("FLOP/B", "right"),
            *((f"{chip}\nFLOP/s  of roof  of step", "right") for chip in chips[:_ACROSS]),
        )  # fmt: skip
        inside = columns["step"] == step
        # The same operators in the same order on every chip; several layers may share a name.
        own = [np.flatnonzero(inside & (columns["of"] == chip)) for chip in chips[:_ACROSS]]
        for rows in zip(*own, strict=True):
            shares = [float(columns["share_of_step"][row]) for row in rows]
            if not max(shares) > 0.0:
                continue
            cells = []
            for row, share in zip(rows, shares, strict=True):
                rate, roof = (float(columns[key][row]) for key in ("flop_rate", "roof"))
                on = f"{si(rate):>7}  {rate / roof:>6.0%}" if math.isfinite(rate) else ""
                cells.append(f"{on:>15}  {share:>6.1%}")
            intensity = _labels.number(float(columns["intensity"][rows[0]]))
            table.add_row(str(columns["name"][rows[0]]), intensity, *cells)
        parts += [table, ""]
    if len(chips) > _ACROSS:
        parts.append(
            lines(f"operators of the first {_ACROSS} chips that run it; all are in --json")
        )
    return parts


def values(found: "xr.Dataset") -> dict[str, Any]:
    """Returns the same as JSON values, in SI units."""
    facts = [str(name) for name in found["fact"].values]
    chips = []
    for i, name in enumerate(found["chip"].values):
        numbers = {
            fact: {
                part: float(found[part][i, k]) for part in ("value", "low", "high")
            } | {"unit": str(found["unit"].values[k]), "kind": str(found["kind"].values[i, k])}
            for k, fact in enumerate(facts)
        }  # fmt: skip
        one: dict[str, Any] = {"name": str(name), "title": str(found["title"].values[i])}
        one |= {"kernel_measurements": str(found["kernels"].values[i]), "numbers": numbers}
        if "obstacle" in found:
            one |= {key: float(found[key][i]) for key, _, _ in _ACHIEVED}
            one |= {key: str(found[key].values[i]) for key in ("binding", "obstacle")}
        chips.append(one)
    operators = {"operators": _json.rows(found, "operator")} if "obstacle" in found else {}
    return {**found.attrs, "chips": chips, **operators}
