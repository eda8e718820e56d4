"""Pictures of studies: panels of lines side by side, each line labelled where it lies."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from perfmodel._plots import _GREY, _INK, _WIDE, _bare_figure, _dress, _limits, _Placer, _ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0B6E99", "#C4501B", "#3B7D23", "#7A3E9D", "#B08800", "#5F6B7A", "#A61E4D", "#1F2933")
"""Colours of lines, in their order."""

_WIDTH, _ROW, _TEXTS = 13.0, 4.4, 1.9


class Panel(NamedTuple):
    """One axes of a picture.

    Fields: `lines` by name, (x, y) each, nan where there is no point; `x` and `y`, what the axes
    show; `title`; `log`, whether x and y are logarithmic; `levels` and `marks`, lines across at a y
    and an x, by name; `dashed`, names of lines that are drawn so, in the colour of the line before.
    """

    lines: Mapping[str, tuple[Any, Any]]
    x: str
    y: str
    title: str = ""
    log: tuple[bool, bool] = (False, False)
    levels: Mapping[str, float] = {}
    marks: Mapping[str, float] = {}
    dashed: tuple[str, ...] = ()


def draw_panels(
    panels: Sequence[Panel], title: str, subtitle: str, notes: str = "", columns: int = 2
) -> "Figure":
    """Returns the picture of panels, row by row."""
    rows = -(-len(panels) // columns)
    height = _ROW * rows + _TEXTS
    wide = int(_WIDE * _WIDTH / 10.0)
    figure, low, high = _bare_figure(title, subtitle, textwrap.wrap(notes, wide), (_WIDTH, height))
    # Room for the titles of panels, and for the names of axes between rows.
    above, between = 0.3 / height, 0.8 / height
    tall = (high - low - between * (rows - 1)) / rows - above
    left, gap = 0.062, 0.07
    width = (0.98 - left - gap * (columns - 1)) / columns
    for place, panel in enumerate(panels):
        row, column = divmod(place, columns)
        bottom = high - above - tall - row * (tall + above + between)
        _draw(figure.add_axes((left + column * (width + gap), bottom, width, tall)), panel)
    return figure


def _draw(axes: "Axes", panel: Panel) -> None:
    _dress(axes)
    axes.set_title(panel.title, fontsize=11, color=_INK, loc="left", weight="bold")
    axes.set_xlabel(panel.x, fontsize=10, color=_INK)
    axes.set_ylabel(panel.y, fontsize=10, color=_INK)
    lines = {}
    for name, (x, y) in panel.lines.items():
        both = np.stack([np.asarray(x, float), np.asarray(y, float)], axis=1)
        lines[name] = both[np.all(np.isfinite(both), axis=1)]
    shown = [line for line in lines.values() if len(line)]
    if not shown:
        return
    for column, (log, setter, limit, axis) in enumerate(
        (
            (panel.log[0], axes.set_xscale, axes.set_xlim, axes.xaxis),
            (panel.log[1], axes.set_yscale, axes.set_ylim, axes.yaxis),
        )
    ):
        across = (panel.marks, panel.levels)[column]
        values = [line[:, column] for line in shown] + [np.asarray([*across.values()], float)]
        if log:
            setter("log")
            _ticks(axis)
        limit(*_limits(values, log, 1.25))
    for level in panel.levels.values():
        axes.axhline(level, color=_GREY, linewidth=1.0, linestyle=(0, (2, 2)), zorder=2)
    for name, mark in panel.marks.items():
        axes.axvline(mark, color=_GREY, linewidth=0.9, linestyle=(0, (1, 2)), zorder=2)
        axes.annotate(
            name, (mark, 0.99), xycoords=("data", "axes fraction"), fontsize=8, color=_GREY,
            rotation=90, ha="right", va="top",
        )  # fmt: skip
    levels = {
        name: np.array([[x, level] for x in axes.get_xlim()[::-1]])
        for name, level in panel.levels.items()
    }
    placer = _Placer(axes, [*shown, *levels.values()])
    for name, ends in levels.items():
        placer.place(name, ends, 8.5, color=_GREY)
    number = -1
    for name, line in lines.items():
        dashed = name in panel.dashed
        number += 0 if dashed else 1
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(
            line[:, 0], line[:, 1], color=colour, marker="o", markersize=3.6, linewidth=1.6,
            linestyle=(0, (4, 1.5)) if dashed else "-", zorder=5,
        )  # fmt: skip
        if len(line):
            rows = [int(share * (len(line) - 1)) for share in (0.5, 0.75, 0.3, 1.0, 0.0)]
            placer.place(name, line[rows], 9, color=colour, weight="bold")
