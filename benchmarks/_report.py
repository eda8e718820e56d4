"""Results, the machine they were measured on, and the table of both."""

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

GIB = 2**30


class Result(NamedTuple):
    """One line of the table.

    Fields: `what` was measured, its `value` in a `unit` (s, 1/s, B, 1, or "share"), the `budget`
    if it has one (the most, or for a rate the least), and a `note`.
    """

    what: str
    value: float
    unit: str
    budget: float | None = None
    note: str = ""
    benchmark: str = ""

    @property
    def met(self) -> str:
        """Returns yes or no, or nothing without a budget."""
        if self.budget is None:
            return ""
        within = self.value >= self.budget if self.unit == "1/s" else self.value <= self.budget
        return "yes" if within else "no"

    def limit(self) -> str:
        """Returns the budget in words."""
        if self.budget is None:
            return ""
        return f"{'≥' if self.unit == '1/s' else '≤'} {quantity(self.budget, self.unit)}"


def quantity(value: float, unit: str) -> str:
    """Returns a number with its unit, short enough for a table.

    >>> quantity(9.2e6, "1/s"), quantity(0.0123, "s"), quantity(1.5 * 2**30, "B")
    ('9.20 M/s', '12.3 ms', '1.50 GiB')
    """
    if unit == "1/s":
        return f"{value / 1e6:.3g} M/s" if value < 1e6 else f"{value / 1e6:.2f} M/s"
    if unit == "s":
        return f"{value * 1e3:.3g} ms" if value < 0.1 else f"{value:.2f} s"
    if unit == "B":
        return f"{value / GIB:.2f} GiB"
    if unit == "share":
        return f"{100 * value:.2g} %"
    return f"{value:.6g}"


def machine() -> dict[str, Any]:
    """Returns what the numbers depend on."""
    packages = ("perfmodel", "jax", "jaxlib", "equinox", "numpy", "xarray", "moocore")
    available = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(_count())
    return {
        "date": datetime.date.today().isoformat(),
        "processor": _processor(),
        "cores used": len(available),
        "cores": _count(),
        "load": ", ".join(f"{x:.1f}" for x in os.getloadavg()) if hasattr(os, "getloadavg") else "",
        "system": platform.system(),
        "python": platform.python_version(),
        **{name: _version(name) for name in packages},
    }


def _count() -> int:
    return os.cpu_count() or 1


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            found = dict(line.split(":", 1) for line in file if ":" in line)
        return next(v.strip() for k, v in found.items() if k.strip() == "model name")
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(package: str) -> str:
    if package == "perfmodel":
        import perfmodel

        return perfmodel.__version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _described(machine: Mapping[str, Any]) -> str:
    return "; ".join(f"{name} {value}" for name, value in machine.items())


_HEADS = ("what", "measured", "budget", "met", "notes")


def _cells(result: Result) -> tuple[str, ...]:
    measured = quantity(result.value, result.unit)
    return result.what, measured, result.limit(), result.met, result.note


def _groups(results: Sequence[Result]) -> Iterator[tuple[str, list[Result]]]:
    for name in dict.fromkeys(result.benchmark for result in results):
        yield name, [result for result in results if result.benchmark == name]


def write(results: Sequence[Result], machine: Mapping[str, Any]) -> None:
    """Prints the table."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in _HEADS:
        right = head in ("measured", "budget")
        fold = head in ("what", "notes")
        table.add_column(head, justify="right" if right else "left", no_wrap=not fold)
    for name, group in _groups(results):
        table.add_row(Text(name, style="bold"))
        for result in group:
            colour = {"yes": "green", "no": "red"}.get(result.met, "")
            cells = [Text(cell) for cell in _cells(result)]
            cells[0] = Text("  ") + cells[0]
            cells[3].stylize(colour)
            cells[4].stylize("dim")
            table.add_row(*cells)
    printer = Console(highlight=False)
    if not printer.is_terminal:
        printer = Console(highlight=False, width=140)
    printer.print(table)
    printer.print(Text("\n" + _described(machine), style="dim"))


def markdown(results: Sequence[Result], machine: Mapping[str, Any]) -> str:
    """Returns the table as a Markdown page."""
    lines = [
        "# Results", "", "Written by `python -m benchmarks --write`; do not edit by hand.", "",
        f"{_described(machine)}.", "",
        "Best of several runs. Where the load is above the number of cores used, something else "
        "ran beside: wall times are then upper bounds; the CPU time in the notes says more.",
    ]  # fmt: skip
    for name, group in _groups(results):
        lines += ["", f"## {name}", "", f"| {' | '.join(_HEADS)} |", "|---|---:|---:|---|---|"]
        lines += [f"| {' | '.join(_cells(result))} |" for result in group]
    return "\n".join([*lines, ""])
