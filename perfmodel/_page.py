"""The frontier as one HTML file that works without a network: plotly.js and the data are inside.

The figure is written as plotly's JSON by hand: building it through plotly's Python classes takes
longer than everything else in the file.
"""

import html
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel import _labels, _spans
from perfmodel._labels import Front, Measured

if TYPE_CHECKING:
    import xarray as xr

ROWS = 16
"""Most rows of the table per chip."""

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "star")
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_INK, _GREY, _FAINT = "#1F2933", "#5F6B7A", "#E3E7EB"

# Between marks, in the natural logarithm of the coordinates.
_APART = 0.05

_HOVER = (
    ("TTFT", "ttft_s", _labels.duration),
    ("TPOT", "tpot_s", _labels.duration),
    ("tokens/s per user", "tokens_per_second_user", _labels.number),
    ("over the whole request", "tokens_per_second_user_e2e", _labels.number),
    ("output tokens/s per chip", "output_tokens_per_second_chip", _labels.number),
    ("memory of a chip", "memory_bytes", lambda v: f"{_labels.number(v / 1e9)} GB"),
    ("power, all chips", "power_w", lambda v: f"{_labels.number(v / 1e3)} kW"),
    ("energy", "energy_per_output_token_j", lambda v: f"{_labels.number(v)} J per output token"),
    ("cost", "usd_per_million_output_tokens",
     lambda v: f"${_labels.number(v)} per million output tokens"),
)  # fmt: skip


def _hover(front: Front, i: int) -> str:
    """Returns what is shown over one point: the whole plan and its numbers."""
    column = {name: values[i] for name, values in front.columns.items()}
    lines = [f"<b>{html.escape(front.title)}</b> · {int(column['chips'])} chips"]
    lines += [html.escape(front.plans[i]), ""]
    for words, name, form in _HOVER:
        value = float(column[name])
        if np.isfinite(value):
            lines.append(f"{words}: <b>{form(value)}</b>")
    lines.append(f"bound by <b>{html.escape(str(column['binding']))}</b>")
    return "<br>".join(lines)


def _errors(front: Front, x: str, y: str) -> dict[str, Any]:
    """Returns the bars that the range of a price makes of a cost."""
    found: dict[str, Any] = {}
    for key, name in (("error_x", x), ("error_y", y)):
        span = _spans.price_span(front.columns, name)
        if span is not None:
            value = front.columns[name].astype(float)
            found[key] = {
                "type": "data", "symmetric": False, "thickness": 1, "width": 0,
                "array": [float(v) for v in span[1] - value],
                "arrayminus": [float(v) for v in value - span[0]],
                "color": front.colour + "55",
            }  # fmt: skip
    return found


def _trace(front: Front, x: str, y: str, key: str, kinds: Sequence[Any]) -> dict[str, Any]:
    own = front.columns[key]
    places = [list(kinds).index(int(kind) if key == "tp" else str(kind)) for kind in own]
    xy = np.column_stack([front.columns[x], front.columns[y]]).astype(float)
    # Every point can be pointed at; where they lie close, only some are marked.
    shown = _labels.apart(np.log(xy) if xy.min() > 0 else xy, own, _APART)
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": html.escape(front.title),
        "legendgroup": front.chip,
        "x": [float(v) for v in front.columns[x]],
        "y": [float(v) for v in front.columns[y]],
        "text": [_hover(front, i) for i in range(len(front))],
        "hovertemplate": "%{text}<extra></extra>",
        **_errors(front, x, y),
        "line": {
            "color": front.colour,
            "width": 2.5,
            "dash": "solid" if front.sure else "6px,3px",
        },
        "marker": {
            "color": front.colour,
            "size": 8,
            "opacity": [float(mark) for mark in shown],
            "symbol": [SYMBOLS[place % len(SYMBOLS)] for place in places],
            "line": {"color": "white", "width": 1},
        },
        "hoverlabel": {"bordercolor": front.colour},
    }


def _measured_trace(group: Measured, chip: str) -> dict[str, Any]:
    words = [
        f"<b>{html.escape(group.title)}, measured</b><br>{html.escape(w)}" for w in group.words
    ]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": f"{html.escape(group.title)}, measured",
        "legendgroup": chip,
        "showlegend": False,
        "x": group.xy[:, 0].tolist(),
        "y": group.xy[:, 1].tolist(),
        "text": words,
        "hovertemplate": "%{text}<br>x %{x:.4g}<br>y %{y:.4g}<extra></extra>",
        "marker": {
            "color": "white",
            "size": 11,
            "symbol": "circle",
            "line": {"color": group.colour, "width": 2},
        },
        "hoverlabel": {"bordercolor": group.colour},
    }


def _axis(title: str, log: bool) -> dict[str, Any]:
    axis = {
        "title": {"text": html.escape(title), "font": {"color": _INK, "size": 14}},
        "type": "log" if log else "linear",
        "gridcolor": _FAINT,
        "linecolor": _GREY,
        "tickfont": {"color": _GREY},
        "ticks": "outside",
        "tickcolor": _GREY,
        "showline": True,
        "zeroline": False,
    }
    # Plain numbers at 1, 2 and 5 of each decade.
    ticks = [m * 10.0**e for e in range(-9, 10) for m in (1, 2, 5)]
    labels = [f"{t:,.0f}" if t >= 1 else f"{t:g}" for t in ticks]
    return axis | ({"tickvals": ticks, "ticktext": labels} if log else {})


def figure(dataset: "xr.Dataset", measured: "xr.Dataset | None" = None) -> dict[str, Any]:
    """Returns the plotly figure of a frontier, as its JSON object."""
    x, y = _labels.axes(dataset)
    found = _labels.fronts(dataset)
    key, kinds = _labels.marked_by(found)
    points = _labels.measured_points(measured, x, y, found)
    traces = [_trace(front, x, y, key, kinds) for front in found]
    chips = {front.title: front.chip for front in found}
    traces += [_measured_trace(group, chips[group.title]) for group in points]
    logs = [
        _labels.log_axis([f.columns[name] for f in found] + [p.xy[:, k] for p in points])
        for k, name in enumerate((x, y))
    ]
    layout = {
        "font": {"family": FONT, "size": 13, "color": _INK},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "xaxis": _axis(_labels.axis_title(dataset, x), logs[0]),
        "yaxis": _axis(_labels.axis_title(dataset, y), logs[1]),
        "hovermode": "closest",
        "hoverlabel": {
            "align": "left", "bgcolor": "white",
            "font": {"family": FONT, "color": _INK, "size": 13},
        },
        "legend": {
            "orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom",
            "font": {"size": 14}, "groupclick": "togglegroup",
        },
        "margin": {"l": 75, "r": 20, "t": 20, "b": 60},
    }  # fmt: skip
    return {"data": traces, "layout": layout}


def _marker_key(found: Sequence[Front]) -> str:
    """Returns what the markers mean, as text with the signs themselves."""
    signs = ("●", "■", "◆", "▲", "▼", "✚", "✖", "★")
    key, kinds = _labels.marked_by(found)
    if len(kinds) < 2:
        return ""
    names = [f"TP{k}" for k in kinds] if key == "tp" else _labels.short_precisions(kinds).values()
    pairs = zip(signs * (len(kinds) // len(signs) + 1), names, strict=False)
    return " &nbsp; ".join(f"{sign} {html.escape(name)}" for sign, name in pairs)


_COLUMNS = (
    ("tokens_per_second_user", "tok/s/user", _labels.number),
    ("output_tokens_per_second_chip", "tok/s/chip", _labels.number),
    ("ttft_s", "TTFT", _labels.duration),
    ("tpot_s", "TPOT", _labels.duration),
    ("memory_bytes", "GB/chip", lambda v: _labels.number(v / 1e9)),
    ("power_w", "kW", lambda v: _labels.number(v / 1e3)),
    ("energy_per_output_token_j", "J/token", _labels.number),
    ("usd_per_million_output_tokens", "$/M out", _labels.number),
)


def _table(found: Sequence[Front], x: str) -> str:
    """Returns points spread along each front as an HTML table, one section per chip."""
    heads = "".join(f"<th>{html.escape(head)}</th>" for _, head, _ in _COLUMNS)
    rows = []
    for front in found:
        rows.append(
            f'<tbody><tr class="chip"><th colspan="{len(_COLUMNS) + 2}" '
            f'style="color:{front.ink}">{html.escape(front.title)}</th></tr>'
        )
        for i in _labels.spread(front.columns[x], ROWS):
            values = [form(float(front.columns[name][i])) for name, _, form in _COLUMNS]
            cells = "".join(f"<td>{html.escape(value)}</td>" for value in values)
            words = (front.plans[i], str(front.columns["binding"][i]))
            plan, binding = (f'<td class="t">{html.escape(text)}</td>' for text in words)
            rows.append(f"<tr>{plan}{cells}{binding}</tr>")
        rows.append("</tbody>")
    head = f'<thead><tr><th class="t">plan</th>{heads}<th class="t">bound by</th></tr></thead>'
    return f"<table>{head}{''.join(rows)}</table>"


_STYLE = f"""
:root {{ color-scheme: light; }}
body {{ margin: 0 auto; max-width: 1180px; padding: 28px 28px 48px; background: white;
       color: {_INK}; font: 15px/1.5 {FONT}; }}
h1 {{ font-size: 25px; line-height: 1.25; margin: 0; }}
.setting, .key, .notes {{ color: {_GREY}; }}
.setting {{ margin: 4px 0 18px; }}
.key {{ margin: 4px 0 0 75px; }}
#figure {{ height: 600px; }}
.notes {{ font-size: 13.5px; margin: 18px 0; padding: 0; list-style: none; }}
h2 {{ font-size: 17px; margin: 26px 0 8px; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums;
        width: 100%; }}
th, td {{ padding: 3px 10px; text-align: right; white-space: nowrap; }}
thead th {{ border-bottom: 1px solid {_GREY}; }}
td {{ border-bottom: 1px solid {_FAINT}; }}
.t, .chip th {{ text-align: left; }}
.chip th {{ padding-top: 14px; font-size: 15px; }}
tr:hover td {{ background: #F5F7F9; }}
"""


def page(
    dataset: "xr.Dataset", measured: "xr.Dataset | None" = None, notes: Sequence[str] = ()
) -> str:
    """Returns the page of a frontier: figure, notes, and a table of every point."""
    x, y = _labels.axes(dataset)
    found = _labels.fronts(dataset)
    title = f"{_labels.model_title(str(dataset.attrs['model']))}: {_labels.trade_off(x, y)}"
    key = _marker_key(found) + (" &nbsp; ○ measured" if measured is not None else "")
    hint = "Point at a mark for its plan; click a chip to hide it, twice to see it alone."
    return document(
        title,
        _labels.setting(dataset),
        figure(dataset, measured),
        f"{key}<br>{hint}",
        notes,
        "<h2>Points spread along each front</h2>",
        f'<div class="wide">{_table(found, x)}</div>',
    )


def document(
    title: str, setting: str, drawn: Mapping[str, Any], key: str, notes: Sequence[str], *below: str
) -> str:
    """Returns a page that loads nothing: title, setting, a plotly figure, its key, notes.

    `key` and `below` are HTML; the other texts are not.
    """
    # Inside a script element only "</" and "<!--" would end or open anything.
    data = json.dumps(drawn, allow_nan=False).replace("<", "\\u003c")
    script = files("plotly").joinpath("package_data", "plotly.min.js").read_text("utf-8")
    listed = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return "\n".join((
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{html.escape(title)}</title>",
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="setting">{html.escape(setting)}</p>',
        '<div id="figure"></div>',
        f'<p class="key">{key}</p>',
        f'<ul class="notes">{listed}</ul>',
        *below,
        f"<script>{script}</script>",
        f"<script>const f = {data};",
        "Plotly.newPlot('figure', f.data, f.layout, {responsive: true, displaylogo: false,",
        "  modeBarButtons: [['toImage', 'zoom2d', 'pan2d', 'zoomIn2d', 'zoomOut2d',",
        "    'resetScale2d']]});</script>",
        "</body></html>",
        "",
    ))  # fmt: skip
