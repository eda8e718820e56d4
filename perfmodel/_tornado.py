"""What a design depends on, as a picture and as a page: bars by input, longest first.

The picture has a column of bars for each output over the same rows, on one scale; the page has one
output at a time, each in its own order. Blue bars are for the better, red ones for the worse.
"""

import html
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel import _influences, _labels, _page, _plots
from perfmodel._influences import Influence

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BETTER, WORSE = "#0072B2", "#D55E00"
_INK, _GREY, _FAINT, _BAND = "#1F2933", "#5F6B7A", "#E3E7EB", "#F5F7F9"
# Most rows of the picture, and of one output on the page.
_ROWS, _PAGE_ROWS = 18, 25
_LEAST = 0.02

# Of the picture [inches]: its width, a row, titles above and notes below; labels with their values,
# gaps; and what the words beside the longest bars of a panel take, and its title at least.
_WIDE, _ROW, _ABOVE, _BELOW = 13.2, 0.265, 1.42, 0.95
_LABELS, _GAP, _MARGIN = 3.85, 0.12, 0.22
_WORDS, _TITLE = 0.44, 1.3


def _colours(dataset: "xr.Dataset", names: Sequence[str], row: Influence) -> list[str]:
    """Returns the colour of each of a row's bars: whether more of the input is for the better."""
    better = dataset["better"].sel(output=list(names)).values
    good = (row.elasticities > 0) == (np.asarray(better) == "higher")
    return [BETTER if g else WORSE for g in good]


def _sections(rows: Sequence[Influence]) -> list[tuple[str, list[Influence]]]:
    """Returns the rows of the picture, single numbers before whole kinds of operator."""
    largest = sorted(
        (row for row in rows if not row.whole), key=lambda row: -np.max(np.abs(row.elasticities))
    )[:_ROWS]
    kept = {row.name for row in largest if np.max(np.abs(row.elasticities)) >= _LEAST}
    parts = (
        ("Numbers of chip, kernels and engine", [row for row in rows if row.name in kept]),
        ("Speed of whole kinds of operator", [row for row in rows if row.whole]),
    )
    return [(name, part) for name, part in parts if part]


def draw(dataset: "xr.Dataset") -> "Figure":
    """Returns the picture: bars of every output over the inputs that matter most."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = _influences.outputs(dataset)
    sections = _sections(_influences.influences(dataset))
    # Rows from the top; a section's name takes one, and half of one sets it apart.
    places: list[tuple[float, Influence]] = []
    heads: list[tuple[float, str]] = []
    at = 0.0
    for name, part in sections:
        heads.append((at, name))
        places += [(at + 1.0 + i, row) for i, row in enumerate(part)]
        at += len(part) + 1.6
    tall = at - 0.4
    wide = _WIDE
    high = _ABOVE + _BELOW + _ROW * tall
    figure = Figure(figsize=(wide, high), dpi=_plots.DPI, facecolor="white")
    FigureCanvasAgg(figure)

    def text(x: float, y: float, words: str, **style: Any) -> None:
        """Writes at inches from the left and from the top."""
        figure.text(x / wide, 1.0 - y / high, words, va="center", **style)

    text(_MARGIN, 0.3, _influences.title(dataset), fontsize=14.5, weight="bold", color=_INK)
    text(_MARGIN, 0.61, _influences.setting(dataset), fontsize=10, color=_GREY)
    text(_MARGIN, 1.03, "+1 % of …", fontsize=9.5, color=_INK, weight="bold")
    text(_MARGIN, 1.24, "changes what is on the right by … %", fontsize=9, color=_GREY)
    keys = (("better", BETTER), ("worse", WORSE))
    for place, (word, colour) in enumerate(keys):
        x = wide - _MARGIN - 0.75 * (len(keys) - place)
        text(x, 0.3, "■", fontsize=11, color=colour)
        text(x + 0.16, 0.3, word, fontsize=10, color=_GREY)
    for y, name in heads:
        text(_MARGIN, _ABOVE + _ROW * (y + 0.5), name, fontsize=9, color=_GREY, style="italic")
    for y, row in places:
        middle = _ABOVE + _ROW * (y + 0.5)
        mark = " *" if row.assumed else ""
        text(_MARGIN, middle, row.title + mark, fontsize=9, color=_INK)
        text(_MARGIN + _LABELS - _GAP, middle, row.value, fontsize=8.5, color=_GREY, ha="right")
    sizes = np.stack([row.elasticities for _, row in places])
    widths, scale = _widths(sizes, wide - 2 * _MARGIN - _LABELS)
    left = _MARGIN + _LABELS
    for column, (name, width) in enumerate(zip(names, widths, strict=True)):
        panel = (left / wide, _BELOW / high, width / wide, _ROW * tall / high)
        bars = [(y, float(row.elasticities[column]), _colours(dataset, names, row)[column])
                for y, row in places]  # fmt: skip
        _panel(figure.add_axes(panel), bars, tall, width, scale)
        value = float(dataset["output_value"].sel(output=name))
        middle = left + 0.5 * width
        left += width + _GAP
        text(middle, 1.03, _influences.words(name), fontsize=9.5, color=_INK, ha="center",
             weight="bold")  # fmt: skip
        text(middle, 1.24, _now(name, value), fontsize=9, color=_GREY, ha="center")
    marked = ["* assumed."] if any(row.assumed for _, row in places) else []
    version = f"perfmodel {dataset.attrs.get('version', '')}"
    noted = " ".join([*_influences.notes(dataset), *marked, version])
    footer = textwrap.wrap(noted, int(wide * 16.5))
    for place, line in enumerate(footer):
        text(_MARGIN, high - 0.17 * (len(footer) - place) - 0.02, line, fontsize=7.6, color=_GREY)
    return figure


def _now(name: str, value: float) -> str:
    if name == "ttft_s":
        return _labels.duration(value)
    if name == "usd_per_million_output_tokens":
        return f"${_labels.number(value)} per million"
    return _labels.number(value) + (" J" if name == "energy_per_output_token_j" else "")


def _widths(sizes: np.ndarray, room: float) -> tuple[list[float], float]:
    """Returns the widths of the panels [inches] for bars of `sizes`, shape [row, panel], and how
    many inches of a bar are one per cent, the same in all."""
    spans = np.maximum(sizes.max(axis=0), 0.0) - np.minimum(sizes.min(axis=0), 0.0)
    room -= _GAP * (len(spans) - 1)
    # Narrow panels keep room for their title; the others share what is left.
    wide = np.ones(len(spans), dtype=bool)
    while True:
        rest = room - _TITLE * float(np.sum(~wide)) - 2 * _WORDS * float(np.sum(wide))
        scale = rest / float(np.sum(spans[wide])) if np.any(wide) else 0.0
        narrow = wide & (2 * _WORDS + scale * spans < _TITLE)
        if not np.any(narrow):
            break
        wide &= ~narrow
    return [
        float(2 * _WORDS + scale * s) if w else _TITLE for s, w in zip(spans, wide, strict=True)
    ], scale


def _panel(
    axes: "Axes",
    bars: Sequence[tuple[float, float, str]],
    tall: float,
    width: float,
    scale: float,
) -> None:
    """Draws the bars of one output (row, size, colour), with what they say beside their ends, in
    an axes of `width` inches with `scale` inches to the per cent."""
    low = min(0.0, *(size for _, size, _ in bars))
    high = max(0.0, *(size for _, size, _ in bars))
    spare = 0.5 * (width / scale - (high - low))
    low, high = low - spare, high + spare
    axes.set_ylim(tall, 0.0)
    axes.set_xlim(low, high)
    for y, size, colour in bars:
        axes.axhline(y + 1.0, color=_FAINT, linewidth=0.5, zorder=0)
        shown = _influences.percent(size)
        if shown == "·":
            continue
        axes.barh(y + 0.5, size, height=0.66, color=colour, zorder=3)
        beside = (0.05 if size > 0 else -0.05) / scale
        axes.text(
            size + beside, y + 0.5, shown.removesuffix(" %"), fontsize=7.8,
            color=_INK, va="center", ha="left" if size > 0 else "right", zorder=6,
        )  # fmt: skip
    axes.axvline(0.0, color=_GREY, linewidth=0.9, zorder=5)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set_yticks([])
    axes.tick_params(axis="x", colors=_GREY, labelsize=8, length=2.5)
    steps = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
    step = next((s for s in steps if s * scale >= 0.4), steps[-1])
    ends = step * np.arange(-int(-low / step), int(high / step) + 1)
    axes.set_xticks(ends, [f"{e:+g}".replace("-", "−") if e else "0" for e in ends])
    axes.grid(True, axis="x", color=_FAINT, linewidth=0.7)
    axes.set_axisbelow(True)


# ---- Page ----


def figure(dataset: "xr.Dataset") -> dict[str, Any]:
    """Returns the plotly figure, one output at a time, as its JSON object."""
    names = _influences.outputs(dataset)
    rows = _influences.influences(dataset)
    traces, buttons = [], []
    for place, name in enumerate(names):
        ordered = sorted(rows, key=lambda row: -abs(row.elasticities[place]))
        ordered = [r for r in ordered if abs(r.elasticities[place]) >= _influences.FEWEST]
        ordered = ordered[:_PAGE_ROWS]
        sizes = [float(row.elasticities[place]) for row in ordered]
        labels = [html.escape(row.title) + " *" * row.assumed for row in ordered]
        traces.append({
            "type": "bar",
            "orientation": "h",
            "visible": place == 0,
            "x": sizes,
            "y": labels,
            "text": [_influences.percent(size) for size in sizes],
            "textposition": "outside",
            "cliponaxis": False,
            "marker": {"color": [_colours(dataset, names, row)[place] for row in ordered]},
            "customdata": [_hover(row, names) for row in ordered],
            "hovertemplate": "%{customdata}<extra></extra>",
        })  # fmt: skip
        shown = [index == place for index in range(len(names))]
        buttons.append({
            "method": "update",
            "label": _influences.words(name),
            "args": [{"visible": shown}, {"yaxis.categoryarray": labels,
                                          "xaxis.range": _range(sizes)}],
        })  # fmt: skip
    layout = {
        "font": {"family": _page.FONT, "size": 13, "color": _INK},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "showlegend": False,
        "bargap": 0.3,
        "xaxis": {
            "title": {"text": "change in per cent where the input grows by 1 %",
                      "font": {"color": _INK, "size": 14}},
            "range": _range(traces[0]["x"]),
            "gridcolor": _FAINT, "zerolinecolor": _GREY, "tickfont": {"color": _GREY},
            "ticksuffix": " %",
        },
        "yaxis": {
            "categoryorder": "array", "categoryarray": traces[0]["y"],
            "autorange": "reversed", "automargin": True, "ticksuffix": "  ",
        },
        "hoverlabel": {"align": "left", "bgcolor": "white",
                       "font": {"family": _page.FONT, "color": _INK, "size": 13}},
        "updatemenus": [{
            "type": "buttons", "direction": "right", "buttons": buttons, "active": 0,
            "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom", "pad": {"b": 6},
            "bgcolor": "white", "bordercolor": _FAINT, "showactive": True,
        }],
        "margin": {"l": 20, "r": 40, "t": 60, "b": 60},
    }  # fmt: skip
    return {"data": traces, "layout": layout}


def _range(sizes: Sequence[float]) -> list[float]:
    """Returns the ends of an axis of bars, with room for the words beside them."""
    low, high = min([0.0, *sizes]), max([0.0, *sizes])
    room = 0.12 * (high - low or 1.0)
    return [low - room, high + room]


def _hover(row: Influence, names: Sequence[str]) -> str:
    value = f": {html.escape(row.value)}" if row.value else ""
    assumed = " (assumed)" if row.assumed else ""
    head = f"<b>{html.escape(row.title)}</b>{value}{assumed}<br>"
    moved = [
        f"{_influences.percent(float(e))} {html.escape(_influences.words(name))}"
        for name, e in zip(names, row.elasticities, strict=True)
    ]
    return "<br>".join([f"{head}+1 % of it:", *moved])


def _table(dataset: "xr.Dataset") -> str:
    """Returns every input that matters as an HTML table."""
    names = _influences.outputs(dataset)
    heads = "".join(f"<th>{html.escape(_influences.words(name))}</th>" for name in names)
    lines = []
    for row in _influences.influences(dataset):
        cells = "".join(f"<td>{_influences.percent(float(e))}</td>" for e in row.elasticities)
        words = html.escape(row.title) + " *" * row.assumed
        lines.append(f'<tr><td class="t">{words}</td><td>{html.escape(row.value)}</td>{cells}</tr>')
    head = f'<thead><tr><th class="t">+1 % of</th><th>now</th>{heads}</tr></thead>'
    return f"<table>{head}<tbody>{''.join(lines)}</tbody></table>"


def page(dataset: "xr.Dataset") -> str:
    """Returns the page: bars of one output at a time, notes, and a table of all of them."""
    blue, red = (f'<span style="color:{colour}">■</span>' for colour in (BETTER, WORSE))
    key = f"{blue} better &nbsp; {red} worse &nbsp; * assumed<br>Point at a bar for its numbers."
    return _page.document(
        _influences.title(dataset),
        _influences.setting(dataset),
        figure(dataset),
        key,
        _influences.notes(dataset),
        "<h2>Every input that matters</h2>",
        f'<div class="wide">{_table(dataset)}</div>',
    )
