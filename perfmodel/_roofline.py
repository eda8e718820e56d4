"""Rooflines of several chips, with the operators of a model's steps on them.

One panel for the decode step and one for a step with a chunk of a prompt. Lines are what the sheet
allows; marks lie at what the model says an operator achieves, larger where it takes more of the
step's time.
"""

import html
import math
import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel import _labels, _page, _plots
from perfmodel._comparison_table import setting
from perfmodel.units import si

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK, _GREY, _FAINT = "#1F2933", "#5F6B7A", "#E3E7EB"
_MARKERS = {"matmul": "o", "attention": "s", "scan": "D", "vector": "^"}
_SYMBOLS = {"matmul": "circle", "attention": "square", "scan": "diamond", "vector": "triangle-up"}
_KINDS = {"matmul": "matrix product", "attention": "attention", "scan": "recurrence",
          "vector": "element-wise"}  # fmt: skip
_FORMATS = {"peak_bf16": "bf16", "peak_fp8": "fp8", "peak_int8": "int8", "peak_fp4": "fp4"}
_NAMED = 0.02
"""Operators with less of a step's time are not named in the picture."""


def _colour(place: int) -> str:
    return _labels.COLOURS[place % len(_labels.COLOURS)]


def roofs(found: "xr.Dataset", chip: int) -> dict[str, float]:
    """Returns the peaks of a chip that a model's formats use, all known ones without a model.

    By format; those within a hundredth of one another are one.
    """
    facts = [str(name) for name in found["fact"].values]
    used = str(found.attrs.get("peaks", ", ".join(_FORMATS))).split(", ")
    peaks: dict[str, float] = {}
    for field, words in _FORMATS.items():
        value = float(found["value"].values[chip, facts.index(field)])
        if field not in used:
            continue
        same = next((n for n, peak in peaks.items() if abs(peak - value) <= 0.01 * peak), None)
        if same is not None:
            peaks[f"{same}, {words}"] = peaks.pop(same)
        elif math.isfinite(value):
            peaks[words] = value
    return peaks


def _bandwidth(found: "xr.Dataset", chip: int) -> float:
    facts = [str(name) for name in found["fact"].values]
    return float(found["value"].values[chip, facts.index("memory_bandwidth")])


def _assumed(found: "xr.Dataset", chip: int) -> bool:
    """Returns whether a line of a chip's roof is assumed."""
    facts = [str(name) for name in found["fact"].values]
    kinds = found["kind"].values[chip]
    return any(kinds[facts.index(name)] == "assumed" for name in ("peak_bf16", "memory_bandwidth"))


def _steps(found: "xr.Dataset") -> list[str]:
    """Returns the steps to draw; one without operators where no model was asked for."""
    if "step" not in found or not found.sizes["operator"]:
        return [""]
    return [step for step in ("decode", "prefill") if (found["step"].values == step).any()]


_TITLES = {"": "What the sheets allow", "decode": "Decode step",
           "prefill": "Step with a chunk of a prompt"}  # fmt: skip


def _rows(found: "xr.Dataset", step: str, chip: str) -> np.ndarray:
    """Returns the operators of a step and chip that have a place on a roofline."""
    if not step:
        return np.zeros(0, dtype=int)
    mine = (found["step"].values == step) & (found["of"].values == chip)
    return np.flatnonzero(mine & np.isfinite(found["flop_rate"].values))


def _limits(found: "xr.Dataset") -> tuple[tuple[float, float], tuple[float, float]]:
    """Returns the ends of both axes, the same for every panel."""
    chips = range(found.sizes["chip"])
    bands, peaks = [_bandwidth(found, i) for i in chips], [roofs(found, i) for i in chips]
    ridges = [max(p.values()) / b for p, b in zip(peaks, bands, strict=True)]
    x = [min(0.3, 0.5 * min(ridges)), 4.0 * max(ridges)]
    y = [x[0] * min(bands), 3.0 * max(max(p.values()) for p in peaks)]
    if _steps(found) != [""]:
        there = np.isfinite(found["flop_rate"].values) & (found["share_of_step"].values > 0.0)
        intensity, rate = (found[n].values[there] for n in ("intensity", "flop_rate"))
        x = [min(x[0], intensity.min() / 1.6), max(x[1], intensity.max() * 8.0)]
        y[0] = min(y[0], rate.min() / 2.0)
    return (x[0], x[1]), (y[0], y[1])


def _off(found: "xr.Dataset", step: str) -> str:
    """Returns how much of a step has no place on a roofline, by chip."""
    if not step:
        return ""
    shares = []
    for chip in map(str, found["chip"].values):
        mine = (found["step"].values == step) & (found["of"].values == chip)
        if mine.any():
            nowhere = mine & ~np.isfinite(found["flop_rate"].values)
            share = float(np.sum(found["share_of_step"].values[nowhere]))
            shares.append(f"{_labels.chip_title(chip)} {share:.0%}")
    return f"links, host and other waits, of the step's time: {', '.join(shares)}"


# ---- Picture ----


def draw(found: "xr.Dataset") -> "Figure":
    """Returns the picture of chips' rooflines (of `comparison.compare`)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = _steps(found)
    wide = 7.8 * len(steps)
    figure = Figure(figsize=(wide, 6.8), dpi=_plots.DPI, facecolor="white")
    FigureCanvasAgg(figure)
    notes = textwrap.wrap(" · ".join(_notes(found, " (dashed)")), round(16.5 * wide))
    title = "Rooflines" if steps == [""] else "Rooflines, and operators on them"
    figure.text(0.3 / wide, 0.962, title, fontsize=14.5, weight="bold", color=_INK, va="center")
    figure.text(0.3 / wide, 0.922, setting(found), fontsize=10, color=_GREY, va="center")
    for place, line in enumerate(reversed(notes)):
        figure.text(0.3 / wide, 0.022 * (place + 1), line, fontsize=7.6, color=_GREY, va="center")
    low = 0.115 + 0.022 * len(notes)
    left, gap, right = 0.85 / wide, 1.75 / wide, 1.25 / wide
    width = (1.0 - left - right - gap * (len(steps) - 1)) / len(steps)
    for place, step in enumerate(steps):
        axes = figure.add_axes((left + place * (width + gap), low, width, 0.845 - low))
        _panel(axes, found, step, first=place == 0)
    return figure


def _notes(found: "xr.Dataset", mark: str = "") -> list[str]:
    chips = [str(name) for name in found["chip"].values]
    notes = ["lines: peak rates and memory bandwidth of the sheet"]
    if _steps(found) != [""]:
        notes.append("marks: as modelled, kernels included; area: share of the step's time")
    notes += [f"{_TITLES[step]}: {_off(found, step)}" for step in _steps(found) if step]
    if "obstacle" in found:
        rows = zip(chips, found["obstacle"].values, strict=True)
        notes += [
            f"{_labels.chip_title(chip)} does not run it ({why})" for chip, why in rows if why
        ]
    unsure = [_labels.chip_title(chip) for i, chip in enumerate(chips) if _assumed(found, i)]
    notes += [f"peak or bandwidth assumed{mark}: {', '.join(unsure)}"] if unsure else []
    whose = zip(chips, found["kernels"].values, strict=True)
    if "obstacle" in found:
        notes += [_labels.kernel_note(chip, str(each)) for chip, each in whose]
    return [note for note in (*notes, f"perfmodel {found.attrs.get('version', '')}") if note]


def _panel(axes: "Axes", found: "xr.Dataset", step: str, first: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_GREY)
    axes.tick_params(which="both", colors=_GREY, labelsize=9.5)
    axes.grid(True, which="major", color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xscale("log")
    axes.set_yscale("log")
    ends = _limits(found)
    axes.set_xlim(*ends[0])
    axes.set_ylim(*ends[1])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(base=10))
        axis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: si(v)))
    axes.set_title(_TITLES[step], fontsize=11, color=_INK, loc="left")
    words = "Arithmetic intensity [FLOP per byte of memory traffic]"
    axes.set_xlabel(words, fontsize=10, color=_INK)
    if first:
        axes.set_ylabel("Arithmetic rate of one chip [FLOP/s]", fontsize=10, color=_INK)
    chips = [str(name) for name in found["chip"].values]
    lines = []
    for place in range(len(chips)):
        bandwidth, peaks = _bandwidth(found, place), roofs(found, place)
        for rank, (_, peak) in enumerate(sorted(peaks.items(), key=lambda p: -p[1])):
            ridge = peak / bandwidth
            start = ends[0][0] if rank == 0 else ridge
            line = np.asarray([(start, start * bandwidth), (ridge, peak), (ends[0][1], peak)])
            style = (0, (4, 1.5)) if _assumed(found, place) else "-"
            axes.plot(
                line[:, 0], line[:, 1], linestyle=style, color=_colour(place),
                linewidth=1.5 if rank == 0 else 0.9, alpha=1.0 if rank == 0 else 0.75,
            )  # fmt: skip
            lines.append(line)
    marks, kinds = [], []
    for place, chip in enumerate(chips):
        for row in _rows(found, step, chip):
            share = float(found["share_of_step"].values[row])
            if not share > 0.0:
                continue
            kind = str(found["sort"].values[row])
            at = (float(found["intensity"].values[row]), float(found["flop_rate"].values[row]))
            axes.plot(
                *at, _MARKERS.get(kind, "P"), color=_colour(place), markeredgecolor="white",
                markeredgewidth=0.6, markersize=3.6 + 17.0 * math.sqrt(share), alpha=0.9, zorder=4,
            )  # fmt: skip
            marks.append((at, str(found["name"].values[row]), share, kind))
            kinds.append(kind)
    placer = _plots._Placer(axes, [*lines, *(np.asarray([at]) for at, *_ in marks)])
    handles = [
        Line2D([], [], linestyle="", marker=_MARKERS.get(kind, "P"), color=_GREY, markersize=6,
               label=_KINDS.get(kind, kind))
        for kind in _KINDS if kind in kinds
    ]  # fmt: skip
    if handles:
        legend = axes.legend(
            handles=handles,
            loc="lower right",
            frameon=False,
            fontsize=9,
            labelcolor=_GREY,
            handletextpad=0.2,
            borderpad=0.2,
        )
        box = legend.get_window_extent()
        placer.boxes.append((box.x0, box.y0, box.x1, box.y1))
    _label(placer, found, chips, ends[0], marks)


def _label(
    placer: Any, found: "xr.Dataset", chips: list[str], ends: tuple[float, float], marks: list[Any]
) -> None:
    """Writes chips and formats beside their lines, and operators beside their marks."""
    ends_at: list[tuple[float, str, str]] = []
    for place, chip in enumerate(chips):
        bandwidth, peaks = _bandwidth(found, place), roofs(found, place)
        ink = "#" + "".join(
            f"{round(0.8 * int(_colour(place)[i : i + 2], 16)):02X}" for i in (1, 3, 5)
        )
        ends_at += [(peak, f"{_labels.chip_title(chip)} {words}", ink)
                    for words, peak in peaks.items()]  # fmt: skip
        top = max(peaks.values())
        at = [ends[0] * (top / bandwidth / ends[0]) ** share for share in (0.3, 0.45, 0.6, 0.15)]
        anchors = np.asarray([(x, x * bandwidth) for x in at])
        placer.place(_labels.chip_title(chip), anchors, 10, color=ink, weight="bold")
    _label_peaks(placer.axes, ends_at)
    # The same operator lies at one intensity on every chip: one name for the highest mark of each.
    best: dict[str, tuple[tuple[float, float], float]] = {}
    for at, name, share, _ in marks:
        before = best.get(name)
        most = max(share, before[1]) if before else share
        best[name] = (at if before is None or at[1] > before[0][1] else before[0], most)
    for name, (at, share) in sorted(best.items(), key=lambda item: -item[1][1]):
        if share >= _NAMED:
            placer.place(name.replace("_", " "), np.asarray([at]), 8, color=_INK)


_TEXT = 7.5


def _label_peaks(axes: "Axes", peaks: list[tuple[float, str, str]]) -> None:
    """Writes the formats right of the axes, beside their lines and none over another."""
    box = axes.get_window_extent()
    apart = 1.35 * _TEXT * _plots.DPI / 72.0 / box.height
    low, high = (math.log(end) for end in axes.get_ylim())
    before = math.inf
    for peak, words, ink in sorted(peaks, reverse=True):
        at = min((math.log(peak) - low) / (high - low), before - apart)
        before = at
        axes.text(1.01, at, words, transform=axes.transAxes, fontsize=_TEXT, color=ink, va="center")


# ---- Page ----


def page(found: "xr.Dataset") -> str:
    """Returns the same as a page that loads nothing else; marks tell what they are."""
    steps = _steps(found)
    traces: list[dict[str, Any]] = []
    ends = _limits(found)
    for k, step in enumerate(steps):
        traces += _traces(found, step, k, ends[0])
    layout: dict[str, Any] = {
        "font": {"family": _page.FONT, "size": 13, "color": _INK},
        "paper_bgcolor": "white", "plot_bgcolor": "white", "hovermode": "closest",
        "hoverlabel": {"align": "left", "bgcolor": "white"},
        "legend": {"orientation": "h", "x": 0, "y": 1.08, "xanchor": "left", "yanchor": "bottom"},
        "margin": {"l": 75, "r": 20, "t": 60, "b": 60},
        "annotations": [],
    }  # fmt: skip
    width = 1.0 / len(steps)
    for k, step in enumerate(steps):
        suffix = str(k + 1) if k else ""
        axis = {"type": "log", "gridcolor": _FAINT, "zeroline": False, "exponentformat": "SI"}
        x, y = ([math.log10(v) for v in pair] for pair in ends)
        layout[f"xaxis{suffix}"] = axis | {
            "domain": [k * width + 0.04 * k, (k + 1) * width - 0.02], "anchor": f"y{suffix}",
            "range": x, "title": {"text": "FLOP per byte of memory traffic"},
        }  # fmt: skip
        layout[f"yaxis{suffix}"] = axis | {
            "anchor": f"x{suffix}", "range": y,
            "title": {"text": "FLOP/s of one chip" if not k else ""},
        }  # fmt: skip
        layout["annotations"].append(
            {"text": _TITLES[step], "xref": f"x{suffix} domain", "yref": f"y{suffix} domain",
             "x": 0, "y": 1.05, "showarrow": False, "xanchor": "left"}
        )  # fmt: skip
    hint = "Point at a mark for what it is; click a chip to hide it, twice to see it alone."
    return _page.document(
        "Rooflines, and operators on them", setting(found), {"data": traces, "layout": layout},
        html.escape(hint), _notes(found),
    )  # fmt: skip


def _traces(
    found: "xr.Dataset", step: str, k: int, ends: tuple[float, float]
) -> list[dict[str, Any]]:
    axes = {"xaxis": f"x{k + 1}" if k else "x", "yaxis": f"y{k + 1}" if k else "y"}
    traces = []
    for place, chip in enumerate(map(str, found["chip"].values)):
        bandwidth = _bandwidth(found, place)
        same = {"legendgroup": chip, **axes}
        for rank, (words, peak) in enumerate(
            sorted(roofs(found, place).items(), key=lambda p: -p[1])
        ):
            ridge = peak / bandwidth
            start = ends[0] if rank == 0 else ridge
            traces.append(
                {
                    "type": "scatter", "mode": "lines", **same,
                    "x": [start, ridge, ends[1]], "y": [start * bandwidth, peak, peak],
                    "name": _labels.chip_title(chip), "showlegend": rank == 0 and k == 0,
                    "line": {"color": _colour(place), "width": 2 if rank == 0 else 1,
                             "dash": "dash" if _assumed(found, place) else "solid"},
                    "hovertemplate": f"{_labels.chip_title(chip)}: {words} {si(peak, 'FLOP/s')}, "
                                     f"{si(bandwidth, 'B/s')}<extra></extra>",
                }
            )  # fmt: skip
        rows = [r for r in _rows(found, step, chip) if found["share_of_step"].values[r] > 0.0]
        if not rows:
            continue
        columns = {name: found[name].values[rows] for name in
                   ("name", "sort", "intensity", "flop_rate", "roof", "share_of_step")}  # fmt: skip
        texts = [
            f"<b>{html.escape(str(name)).replace('_', ' ')}</b> on {_labels.chip_title(chip)}<br>"
            f"{si(rate, 'FLOP/s')}, {rate / roof:.0%} of its roof, at {x:.3g} FLOP/B<br>"
            f"{share:.1%} of the step"
            for name, x, rate, roof, share in zip(
                *(columns[n] for n in
                  ("name", "intensity", "flop_rate", "roof", "share_of_step")), strict=True)
        ]  # fmt: skip
        traces.append(
            {
                "type": "scatter", "mode": "markers", **same, "showlegend": False,
                "x": columns["intensity"].tolist(), "y": columns["flop_rate"].tolist(),
                "text": texts, "hovertemplate": "%{text}<extra></extra>",
                "marker": {
                    "color": _colour(place),
                    "symbol": [_SYMBOLS.get(str(kind), "cross") for kind in columns["sort"]],
                    "size": [6.0 + 26.0 * math.sqrt(s) for s in columns["share_of_step"]],
                    "line": {"color": "white", "width": 1},
                },
            }
        )  # fmt: skip
    return traces
