"""A traced function on a chip as a table for a terminal."""

from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel import _labels
from perfmodel._tables import grid, lines
from perfmodel.errors import shorten
from perfmodel.units import si

if TYPE_CHECKING:
    import xarray as xr
    from rich.console import Group

_PARTS = {
    "compute_s": "compute",
    "weights_s": "memory",
    "network_s": "network",
    "latency_s": "latency",
}
_MOST = 40


def _shape(row: dict[str, Any]) -> str:
    """Returns the sizes of an operator, in elements."""

    def show(*names: str) -> str:
        return " × ".join(f"{row[name]:,.10g}" for name in names)

    if row["kind"] == "matmul":
        groups = f"{row['groups']:,.10g} × " if row["groups"] != 1.0 else ""
        return f"{groups}[{show('rows', 'columns', 'inner')}]"
    if row["kind"] == "collective":
        return f"{show('width')} over {row['ranks']:g}"
    return f"{si(row['reads'])} in, {si(row['writes'])} out"


def traced_table(dataset: "xr.Dataset") -> "Group":
    """Returns the totals of a traced function on a chip, and its longest operators.

    Shapes are of one rank: rows × columns × inner of products, elements of the others.
    """
    from rich.console import Group

    value = {str(name): dataset[name].item() for name in dataset if dataset[name].ndim == 0}
    attrs, operators = dataset.attrs, dataset.sizes["operator"]
    ranks = int(value["ranks"])
    title = f"{attrs['function']} on {attrs['chip']}" + (f", {ranks} ranks" if ranks > 1 else "")
    seconds, least = value["time_s"], value["time_least_s"]
    facts = grid(("", "left"), ("", "right"), ("", "left"), edge=False)
    mostly = _PARTS.get(f"{value['binding']}_s", "nothing")
    bound = "" if least == seconds else f"with the cheapest branches {_labels.duration(least)}"
    facts.add_row("time", _labels.duration(seconds), bound or f"mostly {mostly}")
    rate = value["total_flops"] / seconds if seconds else 0.0
    facts.add_row("arithmetic", si(value["total_flops"], "FLOP"), f"{si(rate, 'FLOP/s')} a rank")
    rate = value["total_memory_bytes"] / seconds if seconds else 0.0
    facts.add_row("memory traffic", si(value["total_memory_bytes"], "B"), si(rate, "B/s"))
    if value["collective_bytes"]:
        facts.add_row("collectives", si(value["collective_bytes"], "B"), "messages of a rank")
    if value["parameter_bytes"]:
        facts.add_row("parameters", si(value["parameter_bytes"], "B"), "")
    facts.add_row("arguments", si(value["input_bytes"], "B"), "")
    table = grid(
        ("operator", "left"), ("where", "left"), ("kernel", "left"), ("shape", "left"),
        ("count", "right"), ("FLOP", "right"), ("bytes", "right"), ("time\neach", "right"),
        ("share", "right"), ("mostly", "left"),
    )  # fmt: skip
    columns = {str(name): dataset[name].values for name in dataset if dataset[name].ndim == 1}
    order = np.argsort(-columns["seconds"], kind="stable")
    for i in order[:_MOST]:
        row = {name: column[i] for name, column in columns.items()}
        moved = max(float(row["memory_bytes"]), float(row["wire_bytes"]))
        table.add_row(
            str(row["name"]), shorten(row["group"], 30), str(row["kernel"]), _shape(row),
            f"{row['count']:g}", si(float(row["flops"])) if row["flops"] else "", si(moved),
            _labels.duration(float(row["seconds_each"])), f"{row['share']:.1%}",
            _PARTS[max(_PARTS, key=lambda part: float(row[part]))],
        )  # fmt: skip
    unknown, unbounded = list(attrs["unknown"]), list(attrs["unbounded"])
    notes = [
        f"{operators - _MOST} shorter operators are not shown" if operators > _MOST else "",
        f"not counted, no rule for: {', '.join(unknown)}" if unknown else "",
        f"counted once, trips unknown: {', '.join(unbounded)}" if unbounded else "",
        *attrs["notes"],
        f"kernel constants: {attrs['kernel_constants']}",
    ]
    return Group(lines(title, style="bold"), facts, "", table, "", lines(*notes))
