"""Every chip on one line: where the model runs, its best plan, its fastest, and why there is none.

Made from a frontier of throughput against interactivity.
"""

from typing import TYPE_CHECKING

import numpy as np

from perfmodel import _labels
from perfmodel._tables import footnotes, grid, headline, lines
from perfmodel.errors import shorten

if TYPE_CHECKING:
    import xarray as xr
    from rich.console import Group

AXES = ("tokens_per_second_user", "output_tokens_per_second_chip")
"""The axes of a frontier that has an overview."""

INTERACTIVITY = 25.0
"""Tokens per second and user at which plans are compared: the 40 ms per token of MLPerf Inference
v5.0, Llama 2 70B Interactive."""

PROMPT = 2.0
"""Longest time to first token of such a plan [s]: that of MLPerf Inference, Llama 2 70B Server."""


def overview_table(dataset: "xr.Dataset", interactivity: float = INTERACTIVITY) -> "Group":
    """Returns one row per chip of a frontier along `AXES`: where the model runs, the plan of most
    throughput per chip among those of at least `interactivity` tokens/s per user, and the fastest.

    Chips are sorted by that throughput; those without any plan come last, with the reason.
    """
    from rich.console import Group

    fronts = {front.chip: front for front in _labels.fronts(dataset)}
    short = _labels.short_precisions(dataset["precision"].values)
    fit = dict(zip(dataset["candidate"].values, dataset["candidate_fits"].values, strict=True))
    least = dict(
        zip(dataset["candidate"].values, dataset["candidate_least_chips"].values, strict=True)
    )
    x, y = AXES
    table = grid(
        ("chip", "left"), ("runs\nfrom", "right"), ("tok/s\nchip", "right"),
        ("tok/s\nuser", "right"), ("TTFT", "right"), ("$/M\nout", "right"),
        ("best plan there", "left"), ("fastest\ntok/s user", "right"), ("plan", "left"),
    )  # fmt: skip

    def plan(front: _labels.Front, row: int) -> str:
        column = {name: values[row] for name, values in front.columns.items()}
        layout = _labels.layout_text(*(int(column[key]) for key in _labels.LAYOUT))
        return f"{layout}, batch {int(column['batch'])}, {short[str(column['precision'])]}"

    rows = []
    for chip, front in fronts.items():
        soon = front.columns["ttft_s"] <= PROMPT
        quick = np.flatnonzero((front.columns[x] >= interactivity) & soon)
        last = len(front) - 1
        best = int(quick[np.argmax(front.columns[y][quick])]) if len(quick) else None
        rate = float(front.columns[y][best]) if best is not None else 0.0
        form = [
            _labels.number(float(front.columns[name][best])) if best is not None else "–"
            for name in (y, x)
        ]
        ttft = _labels.duration(float(front.columns["ttft_s"][best])) if best is not None else "–"
        dollars = front.columns["usd_per_million_output_tokens"]
        cells = (
            chip, str(int(least[chip])), *form, ttft,
            _labels.number(float(dollars[best])) if best is not None else "–",
            plan(front, best) if best is not None else f"none of {interactivity:g} tok/s per user",
            _labels.number(float(front.columns[x][last])), plan(front, last),
        )  # fmt: skip
        rows.append((rate, cells))
    for _, cells in sorted(rows, key=lambda row: -row[0]):
        table.add_row(*cells)
    without = [
        f"{chip}: {shorten(why, 200)}"
        for chip, why in zip(dataset["candidate"].values, dataset["obstacle"].values, strict=True)
        if why
    ]
    partly = [f"{chip}: {text}" for chip, text in fit.items()]
    title, *searched = headline(dataset)
    best = (
        f"best plan: most output tokens/s per chip at {interactivity:g} or more per user and a "
        f"first token within {PROMPT:g} s"
    )
    return Group(
        lines(title, style="bold"),
        *map(lines, searched),
        "",
        table,
        "",
        *([lines("No plan", style="bold"), lines(*without), ""] if without else []),
        lines("Where it runs (fewest chips that hold it and one request)", style="bold"),
        lines(*partly),
        "",
        lines(
            best,
            *(note for note in footnotes(dataset) if ": no plan, " not in note),
            style="dim",
        ),
    )
