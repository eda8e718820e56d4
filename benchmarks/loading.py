"""What a command pays before it starts: entries of the catalogue, and help."""

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks._measure import best, command, timed
from benchmarks._report import Result
from perfmodel import chips
from perfmodel.models import catalogue


def run(quick: bool) -> Iterator[Result]:
    """Yields the slowest first load of a network and a chip, and `perfmodel --help`."""
    repeats = 3 if quick else 7
    for what, names, load in (
        ("network", catalogue.names(), catalogue.load_model),
        ("chip", chips.names(), chips.load_chip),
        ("chip and its machine", chips.names(), lambda name: chips.load_chip(name).machine),
    ):
        times = {name: _first(load, name, repeats) for name in names}
        slowest = max(times, key=times.__getitem__)
        note = f"{slowest}, the slowest of {len(times)}; nothing remembered"
        yield Result(f"load a {what}", times[slowest], "s", note=note)
    helped = best([command(["-m", "perfmodel", "--help"]) for _ in range(repeats)])
    yield Result("perfmodel --help", helped.wall, "s", 0.5, f"{helped.cpu:.2f} CPU-seconds")
    listed = best([command(["-m", "perfmodel", "chips"]) for _ in range(repeats)])
    yield Result("perfmodel chips", listed.wall, "s", note=f"{listed.cpu:.2f} CPU-seconds")


def _first(load: Callable[[str], Any], name: str, repeats: int) -> float:
    load(name)
    runs = []
    for _ in range(repeats):
        _forget()
        runs.append(timed(functools.partial(load, name)))
    return best(runs).wall


def _forget() -> None:
    """Empties every cache of the package's own functions."""
    for module in [m for n, m in sys.modules.items() if n.startswith("perfmodel")]:
        for value in list(vars(module).values()):
            if hasattr(value, "cache_clear"):
                value.cache_clear()
