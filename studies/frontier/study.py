"""The frontier of Llama-3.3-70B on four chips: one search, saved, and drawn from what was saved."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import perfmodel
from perfmodel import report

if TYPE_CHECKING:
    import xarray as xr
    from rich.console import RenderableType

TITLE = "What can a user and an operator get from four chips with a 70B network?"

MODEL = "llama-3.3-70b"
CHIPS = ("h100_sxm", "h200_sxm", "b200_sxm", "mi300x")
ISL, OSL = 4000, 1000
MAX_CHIPS = 16


def run(out: Path) -> "xr.Dataset":
    """Returns the frontier, after writing `frontier.nc`, `.png` and `.html` into a folder."""
    with report.Drawing() as drawing:
        model = perfmodel.load_model(MODEL)
        chips = [perfmodel.load_chip(name) for name in CHIPS]
        found = perfmodel.frontier(model, chips, isl=ISL, osl=OSL, max_chips=MAX_CHIPS)
        found = found.assign_attrs(command="perfmodel study frontier")
        report.save_frontier(found, out, drawing=drawing)
    return found


def summary(data: "xr.Dataset") -> "RenderableType":
    """Returns the table to print."""
    return report.frontier_table(data)


if __name__ == "__main__":
    perfmodel.enable_cache()
    report.write(summary(run(Path(sys.argv[1] if len(sys.argv) > 1 else "out/frontier"))))
