"""Errors on measured kernels that no fit has seen, of the very code whose speed is printed.

The predictions are those of `tests/test_accuracy.py`, on the rows of `tests/data/kernels.csv`.
"""

import runpy
from collections.abc import Iterator
from pathlib import Path

from benchmarks._report import Result

_TEST = Path(__file__).parent.parent / "tests" / "test_accuracy.py"

_NAMES = {
    "matmul": "matrix products",
    "decode": "decode attention",
    "context": "context attention",
    "experts": "expert layers",
    "latent_decode": "decode attention, latent",
    "latent_context": "context attention, latent",
    "all_reduce": "all-reduce",
    "gather": "gathers and all-to-alls",
    "scan": "recurrences, decode",
    "context_scan": "recurrences, prompts",
}


def run(quick: bool) -> Iterator[Result]:
    """Yields the median error of each kind of operator."""
    found = runpy.run_path(str(_TEST))["errors"]()
    for kind, rows in found.groupby("operator", sort=False):
        size = rows["error"].abs()
        note = f"{len(rows)} rows of {rows['chip'].nunique()} chips, p90 {size.quantile(0.9):.0%}"
        yield Result(f"median error, {_NAMES[kind]}", float(size.median()), "share", note=note)
    size = found["error"].abs()
    note = f"{len(found)} rows, p90 {size.quantile(0.9):.0%}"
    yield Result("median error, all", float(size.median()), "share", note=note)
