"""The main job as a user runs it: one command, in a process of its own, to tables and plots."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks._measure import Spent, best, command
from benchmarks._report import GIB, Result

MODEL = "llama-3.3-70b"
CHIPS = ("h100", "h200", "b200", "mi300x")


def run(quick: bool) -> Iterator[Result]:
    """Yields wall, CPU and memory with a warm and a cold compile cache, and where it goes."""
    cold_runs, warm_runs = (1, 2) if quick else (3, 6)
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base)
        cold = best([_frontier(CHIPS, folder, folder / f"cold{i}") for i in range(cold_runs)])
        cache = folder / "cold0"
        warm = best([_frontier(CHIPS, folder, cache) for _ in range(warm_runs)])
        one = best([_frontier(CHIPS[:1], folder, cache) for _ in range(warm_runs)])
        four = f"{len(CHIPS)} chips"
        yield Result(f"frontier, {four}, warm cache", warm.wall, "s", 4.0, _cpu(warm))
        yield Result(f"frontier, {four}, cold cache", cold.wall, "s", 8.0, _cpu(cold))
        yield Result("frontier, one chip, warm cache", one.wall, "s", note=_cpu(one))
        peak = max(warm.memory, cold.memory)
        yield Result("peak memory, all processes", peak, "B", 1.5 * GIB)
        parts = [_split(folder / f"split{i}", cache) for i in range(warm_runs)]
        for name, (_, cpu) in parts[0]["steps"].items():
            seconds = min(part["steps"][name][0] for part in parts)
            note = ""
            if cpu is not None:
                least = min(part["steps"][name][1] for part in parts)
                note = f"{least:.2f} CPU-seconds of the main process"
            elif name == "evaluate and select":
                note = f"{parts[0]['evaluated']:,} designs"
            budget = 0.4 if name == "trace and lower" else None
            yield Result(f"of warm: {name}", seconds, "s", budget, note)


def _frontier(chips: tuple[str, ...], out: Path, cache: Path) -> Spent:
    named = [text for chip in chips for text in ("--chip", chip)]
    arguments = ["-m", "perfmodel", "frontier", MODEL, *named, "--out", str(out / "plots")]
    return command(arguments, {"JAX_COMPILATION_CACHE_DIR": str(cache)})


def _split(out: Path, cache: Path) -> dict[str, Any]:
    arguments = ["-m", "benchmarks._split", MODEL, ",".join(CHIPS), str(out)]
    command(arguments, {"JAX_COMPILATION_CACHE_DIR": str(cache)})
    return json.loads((out / "split.json").read_text())


def _cpu(spent: Spent) -> str:
    return f"{spent.cpu:.2f} CPU-seconds, {spent.memory / GIB:.2f} GiB"
