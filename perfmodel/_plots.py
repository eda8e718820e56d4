"""The frontier as a picture: one line per chip on logarithmic axes, labelled where it lies.

Texts are placed by trying positions around points and taking the one that hides least.
"""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel import _labels, _spans
from perfmodel._labels import Front

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*")
_INK, _GREY, _FAINT = "#1F2933", "#5F6B7A", "#E3E7EB"
DPI = 180
_INCHES = (10.0, 6.6)
_POINT = DPI / 72.0
_APART = 30.0
# Of the footer: height of a line in figures, and its longest in characters.
_LINE, _WIDE = 0.022, 165


class _Placer:
    """Places texts in an axes where they cover least of the points, lines and texts before."""

    def __init__(self, axes: "Axes", lines: Sequence[np.ndarray]):
        self.axes = axes
        self.transform = axes.transData
        dense = [self._dense(self.transform.transform(line)) for line in lines if len(line)]
        self.points = np.concatenate(dense) if dense else np.zeros((0, 2))
        self.boxes: list[tuple[float, float, float, float]] = []
        box = axes.get_window_extent()
        self.frame = (box.x0, box.y0, box.x1, box.y1)

    @staticmethod
    def _dense(line: np.ndarray) -> np.ndarray:
        """Returns points at most a few pixels apart along a line."""
        parts = [line[:1]]
        for a, b in zip(line[:-1], line[1:], strict=True):
            steps = max(int(np.hypot(*(b - a)) / 6.0), 1)
            parts.append(a + (b - a) * np.linspace(0, 1, steps + 1)[1:, None])
        return np.concatenate(parts)

    def _cost(self, box: tuple[float, float, float, float]) -> float:
        x0, y0, x1, y1 = box
        left, low, right, high = self.frame
        outside = max(left - x0, 0) + max(low - y0, 0) + max(x1 - right, 0) + max(y1 - high, 0)
        inside = (self.points[:, 0] > x0) & (self.points[:, 0] < x1)
        inside &= (self.points[:, 1] > y0) & (self.points[:, 1] < y1)
        shared = sum(
            max(min(x1, b[2]) - max(x0, b[0]), 0) * max(min(y1, b[3]) - max(y0, b[1]), 0)
            for b in self.boxes
        )
        return 20.0 * outside + 12.0 * float(inside.sum()) + shared

    def place(self, text: str, anchors: np.ndarray, size: float, **style: Any) -> None:
        """Draws `text` at the best place around one of the `anchors`, the first preferred."""
        lines = text.split("\n")
        wide = 0.68 if style.get("weight") == "bold" else 0.57
        width = wide * size * _POINT * max(map(len, lines))
        height = 1.25 * size * _POINT * len(lines)
        best = (np.inf, (0.0, 0.0))
        for rank, (ax, ay) in enumerate(self.transform.transform(anchors)):
            for gap in (7.0, 14.0, 26.0):
                for dx, dy in (
                    (1, 1),
                    (0, 1),
                    (1, 0),
                    (-1, -1),
                    (0, -1),
                    (-1, 0),
                    (1, -1),
                    (-1, 1),
                ):
                    reach = gap * _POINT * (0.75 if dx and dy else 1.0)
                    x = ax + dx * (reach + width / 2)
                    y = ay + dy * (reach + height / 2)
                    box = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
                    cost = self._cost(box) + rank * 6.0 + gap
                    if cost < best[0]:
                        best = (cost, (x, y))
        x, y = best[1]
        self.boxes.append((x - width / 2, y - height / 2, x + width / 2, y + height / 2))
        at = self.transform.inverted().transform((x, y))
        self.axes.text(
            at[0], at[1], text, ha="center", va="center", fontsize=size, zorder=7, **style
        )


def _ticks(axis: Any) -> None:
    """Puts plain numbers at 1, 2 and 5 of each decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}" if v >= 1 else f"{v:g}"))


def _bare_figure(
    title: str, subtitle: str, footer: Sequence[str], inches: tuple[float, float] = _INCHES
) -> "tuple[Figure, float, float]":
    """Returns a figure with its texts, and the ends of what they leave free, in its height."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    share = _INCHES[1] / inches[1]
    for place, line in enumerate(reversed(footer)):
        y = share * _LINE * (place + 1)
        figure.text(0.022, y, line, fontsize=7.6, color=_GREY, va="center")
    for y, text, size, weight, color in (
        (0.955, title, 14.5, "bold", _INK), (0.908, subtitle, 10, "normal", _GREY),
    ):  # fmt: skip
        y = 1.0 - share * (1.0 - y)
        figure.text(0.022, y, text, fontsize=size, weight=weight, color=color, va="center")
    return figure, share * (0.113 + _LINE * len(footer)), 1.0 - share * 0.14


def _dress(axes: "Axes") -> None:
    """Draws the frame, ticks and grid of an axes as everywhere here."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_GREY)
    axes.tick_params(which="both", colors=_GREY, labelsize=9.5)
    axes.grid(True, which="major", color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)


def _bare_axes(title: str, subtitle: str, footer: Sequence[str]) -> "tuple[Figure, Axes]":
    figure, low, high = _bare_figure(title, subtitle, footer)
    axes = figure.add_axes((0.085, low, 0.885, high - low))
    _dress(axes)
    return figure, axes


def _limits(values: Sequence[np.ndarray], log: bool, above: float) -> tuple[float, float]:
    """Returns the ends of an axis, with room for texts `above` the largest value."""
    known = np.concatenate([np.asarray(v, float).ravel() for v in values])
    known = known[np.isfinite(known) & ((known > 0) if log else True)]
    low, high = float(known.min()), float(known.max())
    if log:
        return low / 1.35, high * above
    room = 0.07 * ((high - low) or abs(high) or 1.0)
    return low - room, high + room


def draw(dataset: "xr.Dataset", measured: "xr.Dataset | None" = None) -> "Figure":
    """Returns the picture of a frontier, with measured points (of `overlay`) where given."""
    from matplotlib.lines import Line2D

    x, y = _labels.axes(dataset)
    found = _labels.fronts(dataset)
    attrs = dataset.attrs
    title = f"{_labels.model_title(str(attrs['model']))}: {_labels.trade_off(x, y)}"
    origins = _labels.origin_notes(dataset, " (dashed)")
    bars = _spans.price_span_note(found, (x, y), "Bars and bands")
    notes = " · ".join(
        [
            *origins,
            *_labels.axis_notes(dataset),
            *filter(None, [bars, _spans.budget_note(dataset)]),
            f"perfmodel {attrs.get('version', '')}",
        ]
    )
    figure, axes = _bare_axes(title, _labels.setting(dataset), textwrap.wrap(notes, _WIDE))
    lines = [np.column_stack([f.columns[x], f.columns[y]]).astype(float) for f in found]
    points = _labels.measured_points(measured, x, y, found)
    for name, column, setter, limit, axis in (
        (x, 0, axes.set_xscale, axes.set_xlim, axes.xaxis),
        (y, 1, axes.set_yscale, axes.set_ylim, axes.yaxis),
    ):
        values = [line[:, column] for line in lines + [p.xy for p in points]]
        values += [end for f in found for end in _spans.price_span(f.columns, name) or ()]
        log = _labels.log_axis(values)
        if log:
            setter("log")
            _ticks(axis)
        limit(*_limits(values, log, 1.55 if column == 0 else 1.9))
        axis.set_label_text(_labels.axis_title(dataset, name), fontsize=10.5, color=_INK)

    key, kinds = _labels.marked_by(found)
    marker = dict(zip(kinds, MARKERS * (len(kinds) // len(MARKERS) + 1), strict=False))
    for front, line in zip(found, lines, strict=True):
        _draw_span(axes, front, (x, y), line)
        style = "-" if front.sure else (0, (4, 1.5))
        axes.plot(line[:, 0], line[:, 1], linestyle=style, color=front.colour, linewidth=1.6)
        own = front.columns[key]
        shown = _labels.apart(axes.transData.transform(line), own, _APART)
        for kind in kinds:
            rows = (own == kind) & shown
            axes.plot(
                line[rows, 0], line[rows, 1], marker[kind], color=front.colour, markersize=4.6,
                markeredgecolor="white", markeredgewidth=0.6, zorder=4,
            )  # fmt: skip
    for group in points:
        axes.plot(
            group.xy[:, 0], group.xy[:, 1], "o", markerfacecolor="white", markersize=7,
            markeredgecolor=group.colour, markeredgewidth=1.5, zorder=5,
        )  # fmt: skip

    handles = [
        Line2D([], [], linestyle="", marker=marker[kind], color=_GREY, markersize=5,
               label=f"TP{kind}" if key == "tp" else _labels.short_precisions(kinds)[kind])
        for kind in kinds
    ]  # fmt: skip
    if points:
        handles.append(
            Line2D([], [], linestyle="", marker="o", markerfacecolor="white", markersize=7,
                   markeredgecolor=_GREY, markeredgewidth=1.5, label="measured")
        )  # fmt: skip
    placer = _Placer(axes, lines + [p.xy for p in points])
    if len(handles) > 1:
        legend = axes.legend(
            handles=handles, loc="lower left", frameon=False, fontsize=9, labelcolor=_GREY,
            handletextpad=0.2, borderpad=0.2, labelspacing=0.35,
        )  # fmt: skip
        box = legend.get_window_extent()
        placer.boxes.append((box.x0, box.y0, box.x1, box.y1))
    _label_chips(placer, found, lines)
    _label_plans(axes, placer, found, lines)
    return figure


def _draw_span(axes: "Axes", front: Front, names: tuple[str, str], line: np.ndarray) -> None:
    """Draws what the range of a price makes of a cost: a band, with bars at some points."""
    for place, name in enumerate(names):
        span = _spans.price_span(front.columns, name)
        if span is None:
            continue
        rows = _labels.spread(line[:, 0], 6)
        ends = np.stack([line[rows, place] - span[0][rows], span[1][rows] - line[rows, place]])
        band = axes.fill_betweenx if place == 0 else axes.fill_between
        band(line[:, 1 - place], *span, color=front.colour, alpha=0.10, linewidth=0, zorder=1)
        error: dict[str, Any] = {"xerr" if place == 0 else "yerr": np.maximum(ends, 0.0)}
        axes.errorbar(
            line[rows, 0], line[rows, 1], **error, fmt="none", ecolor=front.colour,
            elinewidth=1.0, capsize=2.5, alpha=0.7, zorder=3,
        )  # fmt: skip


def _label_chips(placer: _Placer, found: Sequence[Front], lines: Sequence[np.ndarray]) -> None:
    for front, line in zip(found, lines, strict=True):
        # Between the first tenth and the middle the fronts of different chips lie farthest apart.
        rows = [int(share * (len(line) - 1)) for share in (0.25, 0.35, 0.15, 0.5, 0.0, 0.7, 1.0)]
        placer.place(front.title, line[rows], 10.5, color=front.ink, weight="bold")


def _label_plans(
    axes: "Axes", placer: _Placer, found: Sequence[Front], lines: Sequence[np.ndarray]
) -> None:
    """Writes the plan beside both ends and two more points of the outermost front."""
    outer = max(range(len(found)), key=lambda i: _outwardness(lines[i], lines))
    for row in _labels.spread(lines[outer][:, 0], 4):
        axes.plot(
            *lines[outer][row], "o", markersize=8.5, markerfacecolor="none", zorder=6,
            markeredgecolor=_INK, markeredgewidth=0.9,
        )  # fmt: skip
        layout, batch, chunk, precision = found[outer].plans[row].split(" · ")
        text = f"{layout} · {precision}\n{batch}\n{chunk}"
        placer.place(text, lines[outer][[row]], 8, color=_INK, linespacing=1.15)


def _outwardness(line: np.ndarray, lines: Sequence[np.ndarray]) -> float:
    """Returns how far out a front lies: mean of its coordinates in ranks over all points."""
    everything = np.concatenate(lines)
    ranks = [np.mean(everything[:, k][None, :] < line[:, k][:, None]) for k in (0, 1)]
    return float(sum(ranks))
