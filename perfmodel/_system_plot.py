"""Frontiers of serving systems as a picture: one line per system, labelled where it lies."""

from typing import TYPE_CHECKING

import numpy as np

from perfmodel import _labels
from perfmodel._plots import MARKERS, _bare_axes, _limits, _Placer, _ticks

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.figure import Figure

_COLOURS = ("#0B6E99", "#C4501B", "#3B7D23", "#7A3E9D", "#B08800", "#5F6B7A", "#A61E4D", "#1F2933")


def draw_systems(found: "xr.Dataset", title: str, notes: tuple[str, ...] = ()) -> "Figure":
    """Returns the picture of `perfmodel.system_search.beside`, on logarithmic axes."""
    x, y = str(found.attrs["x"]), str(found.attrs["y"])
    names = list(dict.fromkeys(str(name) for name in found["system"].values))
    subtitle = f"{_labels.lengths(found)} · {found.attrs.get('engine', 'neutral')} engine"
    figure, axes = _bare_axes(title, subtitle, notes)
    axes.set_xscale("log")
    axes.set_yscale("log")
    values = [found[x].values, found[y].values]
    axes.set_xlim(*_limits(values[:1], True, 1.6))
    axes.set_ylim(*_limits(values[1:], True, 1.5))
    for axis in (axes.xaxis, axes.yaxis):
        _ticks(axis)
    axes.set_xlabel(_axis(x), fontsize=10.5)
    axes.set_ylabel(_axis(y), fontsize=10.5)
    lines = []
    for name in names:
        own = found.isel(point=np.flatnonzero(found["system"].values == name))
        lines.append(np.stack([own[x].values, own[y].values], axis=1))
    placer = _Placer(axes, lines)
    for place, (name, line) in enumerate(zip(names, lines, strict=True)):
        colour = _COLOURS[place % len(_COLOURS)]
        axes.plot(
            line[:, 0], line[:, 1], color=colour, marker=MARKERS[place % len(MARKERS)],
            markersize=4.5, linewidth=1.6, zorder=5,
        )  # fmt: skip
        middle = line[[len(line) // 2, len(line) // 3, -1, 0]]
        placer.place(name, middle, 9.5, color=colour, weight="bold")
    return figure


def _axis(name: str) -> str:
    from perfmodel.system_search import AXES

    words, higher = AXES[name]
    return f"{words} ({'more' if higher else 'less'} is better)"
