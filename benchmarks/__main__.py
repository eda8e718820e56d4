"""`python -m benchmarks [--quick] [--json OUT] [--write FILE] [NAME…]`."""

import argparse
import importlib
import json
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from benchmarks import _report
from benchmarks._report import Result

NAMES = {
    "forward": "estimates per second",
    "gradient": "gradients per second",
    "systems": "systems of several pools per second",
    "frontier": "the main job as a command",
    "compiles": "programs compiled for the whole catalogue",
    "simulation": "10,000 requests, one by one",
    "loading": "what every command pays",
    "accuracy": "held-out error of the code timed above",
}
"""Benchmarks in the order they run, each a module with `run(quick)`."""

CORES = 2


def main() -> int:
    """Runs the benchmarks asked for and prints one table; returns 1 where any failed to run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--cores", type=int, default=CORES, help="cores to use (2)")
    parser.add_argument("--json", metavar="OUT", help="write results as JSON; - for the screen")
    parser.add_argument("--write", metavar="FILE", type=Path, help="write results as Markdown")
    asked = parser.parse_args()
    unknown = sorted(set(asked.names) - set(NAMES))
    if unknown:
        parser.error(f"unknown benchmark {', '.join(unknown)} (known: {', '.join(NAMES)})")
    _settle(asked.cores)
    failed: list[str] = []
    found = list(_results(asked.names or list(NAMES), asked.quick, failed))
    machine = _report.machine() | {"repeats": "few (--quick)" if asked.quick else "full"}
    if asked.json != "-":
        _report.write(found, machine)
    if asked.write:
        asked.write.write_text(_report.markdown(found, machine), encoding="utf-8")
    if asked.json:
        text = json.dumps({"machine": machine, "results": [r._asdict() for r in found]}, indent=1)
        if asked.json == "-":
            print(text)
        else:
            Path(asked.json).write_text(text + "\n", encoding="utf-8")
    return 1 if failed else 0


def _settle(cores: int) -> None:
    """Keeps this process and its children to a few cores, and to the processor's backend."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Where it can't be set (macOS, Windows), the table says how many cores there were.
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])


def _results(names: list[str], quick: bool, failed: list[str]) -> Iterator[Result]:
    for name in (name for name in NAMES if name in names):
        print(f"{name}: {NAMES[name]} …", file=sys.stderr, flush=True)
        try:
            for result in importlib.import_module(f"benchmarks.{name}").run(quick):
                yield result._replace(benchmark=name)
        except Exception:
            # What the others measured is worth having.
            traceback.print_exc()
            failed.append(name)


if __name__ == "__main__":
    sys.exit(main())
