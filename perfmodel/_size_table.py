"""The smallest deployment of each chip as a table, and the smallest of all in words."""

import math
from typing import TYPE_CHECKING, Any

from perfmodel import _labels, _spans
from perfmodel._tables import grid, lines
from perfmodel.errors import shorten
from perfmodel.units import seconds

if TYPE_CHECKING:
    import xarray as xr
    from rich.console import Group, RenderableType

ONE = "one chip is enough"
"""What `set_by` says where nothing keeps a deployment from being smaller."""

_BY = {"chips": "fewest chips", "nodes": "fewest nodes", "usd": "least rent of whole nodes",
       "kw": "least board power of whole nodes"}  # fmt: skip


def size_table(dataset: "xr.Dataset") -> "Group":
    """Returns a row per chip, the smallest deployment first, and that one in words.

    Takes a Dataset of `size`, with or without deployments.
    """
    from rich.console import Group

    attrs = dataset.attrs
    limits = _labels.limits(dataset) or ["no service levels"]
    title = (
        f"{_labels.model_title(str(attrs['model']))} · {_rate(attrs['rate'])} · "
        f"{_labels.lengths(dataset)} · {' · '.join(limits)}"
    )
    asked = (
        f"{float(attrs['headroom']):.0%} headroom, {_count(int(attrs['spare']), 'spare replica')}, "
        f"engine {attrs['engine']}; smallest: {_BY[str(attrs['by'])]}; "
        f"{int(attrs['evaluated']):,} plans evaluated"
    )
    without = [
        f"{chip}: {shorten(why, 200)}"
        for chip, why in zip(dataset["candidate"].values, dataset["obstacle"].values, strict=True)
        if why
    ]
    parts: list[Any] = [lines(title, style="bold"), lines(asked), ""]
    if "deployment" in dataset.sizes:
        found = [
            {str(name): value[place].item() for name, value in columns.items()}
            for columns in [_columns(dataset)]
            for place in range(dataset.sizes["deployment"])
        ]
        parts += [_table(found), "", *_words(found[0], dataset), ""]
    if without:
        parts += [lines("No deployment", style="bold"), lines(*without), ""]
    lacks = [
        f"{chip}: {text}"
        for chip, text, why in zip(
            *(dataset[name].values for name in ("candidate", "candidate_fits", "obstacle")),
            strict=True,
        )
        if " kernel" in text and not why
    ]
    notes = (
        "chips: of the plan, spare ones too; nodes: whole servers that hold them; $/h: of those",
        "batch: most requests at once in a replica; TTFT, TPOT: at it; kW load: at the rate asked",
        "kW rated: of whole servers; * the limit of their boards alone where no rating is known",
        f"price of {attrs['price_assumption']}",
        _spans.budget_note(dataset),
        *lacks,
        *_labels.origin_notes(dataset),
        "means of a closed loop: the headroom is for bursts and percentiles of arriving traffic",
    )
    return Group(*parts, lines(*notes, style="dim"))


def _columns(dataset: "xr.Dataset") -> dict[Any, Any]:
    return {n: v.values for n, v in dataset.variables.items() if v.dims == ("deployment",)}


def _rate(value: float) -> str:
    return f"{float(value):g} {'request' if float(value) == 1.0 else 'requests'}/s"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _replica(row: dict[str, Any]) -> str:
    return _labels.layout_text(*(row[name] for name in _labels.LAYOUT[:-1]), 1)


def _kilowatts(watts: float) -> str:
    return _labels.number(watts / 1e3)


def _table(found: list[dict[str, Any]]) -> "RenderableType":
    short = _labels.short_precisions([row["precision"] for row in found])
    table = grid(
        ("chip", "left"), ("chips", "right"), ("nodes", "left"), ("kW\nload", "right"),
        ("kW\nrated", "right"), ("$/h", "right"), ("replicas", "left"), ("batch", "right"),
        ("chunk", "right"), ("format", "left"), ("TTFT", "right"), ("TPOT", "right"),
        ("head-\nroom", "right"), ("set by", "left"),
    )  # fmt: skip
    table.columns[0].no_wrap = True
    for row in found:
        rated, boards = float(row["server_power_w"]), float(row["board_power_w"])
        nodes = f"{row['nodes']:,} × {row['node_chips']}" if row["node_chips"] > 1 else "–"
        table.add_row(
            row["chip"],
            f"{row['chips']:,}",
            nodes,
            _kilowatts(row["load_power_w"]),
            _kilowatts(rated) if math.isfinite(rated) else f"{_kilowatts(boards)}*",
            _labels.number(row["provisioned_usd_per_hour"]),
            f"{row['needed_replicas']}+{row['spare_replicas']} × {_replica(row)}",
            f"{row['batch']:,}",
            str(row["chunk"]),
            short[row["precision"]],
            _labels.duration(row["ttft_s"]),
            _labels.duration(row["tpot_s"]),
            f"{row['headroom_left'] - 1.0:+.0%}",
            row["set_by"],
        )
    return table


def _words(row: dict[str, Any], dataset: "xr.Dataset") -> list["RenderableType"]:
    """Returns the smallest deployment of all, in words."""
    title = _labels.chip_title(row["chip"])
    where = "counted one by one (no server size is known)"
    if row["node_chips"] > 1:
        nodes = _count(row["nodes"], "whole node")
        where = f"in {nodes} of {row['node_chips']}, {row['provisioned_chips']:,} in all"
    dollars, rated = float(row["provisioned_usd_per_hour"]), float(row["server_power_w"])
    price = f"${dollars:,.2f}/h" if math.isfinite(dollars) else "price unknown"
    server = f", servers rated {rated / 1e3:.3g} kW" if math.isfinite(rated) else ""
    capacity = _rate(round(float(row["rate_capacity"]), 3))
    facts = (
        ("deployment", f"{_count(row['chips'], 'chip')} {where}; {price}"),
        ("power", f"{row['load_power_w'] / 1e3:.3g} kW of the chips in use, at the rate asked for; "
         f"all boards are limited to {row['board_power_w'] / 1e3:.3g} kW{server}"),
        ("replicas", f"{row['needed_replicas']} needed and {row['spare_replicas']} spare of "
         f"{_replica(row)}, batch {row['batch']}, chunk {row['chunk']}, {row['precision']}"),
        ("capacity", f"{capacity} within the limits, {row['headroom_left']:.3g} times the rate "
         f"asked for; {row['headroom_left_with_spares']:.3g} times with the spare ones"),
        ("at that rate", f"{_count(row['load_batch'], 'request')} at once in each of "
         f"{row['replicas']}: TTFT {_labels.duration(row['load_ttft_s'])}, "
         f"TPOT {_labels.duration(row['load_tpot_s'])}"),
        _limit("ttft", row, dataset),
        _limit("tpot", row, dataset),
        ("one replica fewer", _verdict(row, "fewer_replicas")),
        ("smaller replicas", _verdict(row, "smaller_replica")),
    )  # fmt: skip
    why = f"; {ONE}" if row["set_by"] == ONE else f", set by the {row['set_by']}"
    table = grid(("", "left"), ("", "left"), edge=False)
    for name, text in facts:
        table.add_row(f"  {name}", text)
    return [
        lines(f"Smallest: {row['chips']} × {title}" + why, style="bold"),
        table,
    ]


def _limit(name: str, row: dict[str, Any], dataset: "xr.Dataset") -> tuple[str, str]:
    """Returns whether a service level binds, in words."""
    label = f"{name.upper()} limit"
    key = f"slo_{name}_s"
    if key not in dataset.attrs:
        return label, "none asked for"
    limit, reached = float(dataset.attrs[key]), float(row[f"{name}_s"])
    at = f"{seconds(reached)} of {seconds(limit)} at batch {row['batch']}"
    if not math.isfinite(reached):
        return label, "does not apply to one output token"
    if not row[f"{name}_limit_binds"]:
        return label, f"does not bind: {at}; no smaller without it"
    chips = int(row[f"{name}_limit_chips_without"])
    return label, f"binds: {at}; {_count(chips, 'chip')} without it"


def _verdict(row: dict[str, Any], label: str) -> str:
    """Returns what a smaller deployment would violate, in words."""
    words, limit = str(row[f"{label}_words"]), str(row[f"{label}_limit"])
    if int(row[f"{label}_tp"]) == 0:
        return words
    layout = _labels.layout_text(*(int(row[f"{label}_{part}"]) for part in _labels.LAYOUT))
    miss = float(row[f"{label}_miss"])
    broken = f"breaks the {limit} by {miss:.1%}" if miss >= 1e-3 else f"breaks the {limit}"
    return f"{layout}: {words}; {broken}"
