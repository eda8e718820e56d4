"""Results as tables for a terminal: `rich` renderables made from Datasets."""

import math
import textwrap
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel import _influences, _labels, _spans
from perfmodel.errors import shorten
from perfmodel.units import GB, si

if TYPE_CHECKING:
    import xarray as xr
    from rich.console import Group, RenderableType
    from rich.table import Table

    from perfmodel._rows import Predictions


def grid(*columns: tuple[str, str], edge: bool = True) -> "Table":
    """Returns an empty table of (header, justification) columns."""
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD if edge else None,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
        header_style="bold",
        show_header=any(name for name, _ in columns),
    )
    for name, justify in columns:
        table.add_column(name, justify=justify, no_wrap=justify == "right", vertical="top")  # pyright: ignore[reportArgumentType]
    return table


def lines(*texts: str, style: str = "") -> "RenderableType":
    """Returns lines of text as they are; empty ones are left out."""
    from rich.text import Text

    return Text("\n".join(text for text in texts if text), style=style)


# ---- Frontier ----


_Format = Callable[[float], str]
_AXIS_HEADS = {
    "tokens_per_second_user": "tok/s\nuser",
    "tokens_per_second_user_e2e": "tok/s\nuser e2e",
    "output_tokens_per_second_chip": "tok/s\nchip",
    "total_tokens_per_second_chip": "tok/s\nchip all",
    **{
        f"{tokens}_tokens_per_second_{per}": f"tok/s\n{words}{extra}"
        for tokens, extra in (("output", ""), ("total", " all"))
        for per, words in (("kw", "kW"), ("usd", "$/h"), ("rack", "rack"))
    },
}
_COLUMNS: tuple[tuple[str, str, _Format], ...] = (
    ("ttft_s", "TTFT", _labels.duration),
    ("tpot_s", "TPOT", _labels.duration),
    ("memory_bytes", "GB\nchip", lambda v: _labels.number(v / GB)),
    ("power_w", "kW\nall", lambda v: _labels.number(v / 1e3)),
    ("energy_per_output_token_j", "J\nout tok", _labels.number),
    ("usd_per_million_output_tokens", "$/M\nout", _labels.number),
)


def _axis_format(unit: str) -> _Format:
    return _labels.duration if unit == "s" else _labels.number


def headline(dataset: "xr.Dataset") -> list[str]:
    """Returns what a frontier is of: model, traffic, engine, and how much was searched."""
    attrs = dataset.attrs
    title = (
        f"{_labels.model_title(str(attrs['model']))} · {_labels.lengths(dataset)} · "
        f"engine {attrs.get('engine', 'neutral')} · up to {attrs.get('max_chips', '?')} chips"
    )
    searched = (
        f"{int(attrs['evaluated']):,} plans evaluated, {int(attrs['feasible']):,} feasible, "
        f"{dataset.sizes['point']} on the chips' fronts"
    )
    found = [title, ", ".join([searched, *_labels.limits(dataset)])]
    return [*found, *_descent(dataset)]


def _descent(dataset: "xr.Dataset") -> list[str]:
    """Returns what a descent took and reached, against the enumeration."""
    if "candidate_gradients" not in dataset:
        return []
    total = {
        name: int(dataset[f"candidate_{name}"].sum())
        for name in ("starts", "gradients", "evaluated", "enumerated")
    }
    shares = [
        f"{chip} {share:.2%}"
        for chip, share in zip(
            dataset["candidate"].values, dataset["candidate_hypervolume"].values, strict=True
        )
        if math.isfinite(share)
    ]
    return [
        f"descended: {total['starts']:,} plans to start from, {total['gradients']:,} gradients, "
        f"{total['evaluated']:,} plans around what they end at; enumerated: "
        f"{total['enumerated']:,} plans",
        f"hypervolume over that of the enumeration: {', '.join(shares)}",
    ]


def _model_note(dataset: "xr.Dataset") -> str:
    """Returns what the model's file asks for and is left out, or ""."""
    notes = str(dataset.attrs.get("notes", ""))
    return f"{_labels.model_title(str(dataset.attrs['model']))}: {notes}" if notes else ""


def footnotes(dataset: "xr.Dataset") -> list[str]:
    """Returns what a reader of a frontier must know: prices, formats, whose kernels."""
    short = _labels.short_precisions(dataset["precision"].values)
    formats = [f"{name}: {_labels.precision_words(full)}" for full, name in short.items()]
    obstacles = [
        f"{name}: no plan, {shorten(text, 200)}"
        for name, text in zip(dataset["candidate"].values, dataset["obstacle"].values, strict=True)
        if text
    ]
    notes = [
        _labels.prices(dataset),
        _labels.site_note(dataset),
        _labels.per_note(dataset),
        _spans.budget_note(dataset),
        "J and $ per output token: decode's share of busy time",
        *_labels.origin_notes(dataset),
        _model_note(dataset),
        *formats,
        *obstacles,
    ]
    return [note for note in notes if note]


def frontier_table(dataset: "xr.Dataset", rows: int = 11) -> "Group":
    """Returns a table of at most `rows` points of each chip's front, evenly in log x, both ends
    among them, with what was searched above and prices and caveats below.

    A point marked • is on the front over all chips.
    """
    from rich.console import Group

    x, y = _labels.axes(dataset)
    shown = [
        (name, _AXIS_HEADS.get(name, name.replace("_", "\n")), _axis_format(unit))
        for name, unit in ((n, str(dataset[n].attrs.get("units", ""))) for n in (x, y))
    ]
    shown += [column for column in _COLUMNS if column[0] not in (x, y)]
    heads = [(head, "right") for _, head, _ in shown]
    plan = (("plan", "left"), ("batch", "right"), ("chunk", "right"), ("format", "left"))
    table = grid(("chip", "left"), *heads[:2], *plan, *heads[2:], ("bound by", "left"))
    found = _labels.fronts(dataset)
    table.columns[0].min_width = max(len(front.chip) for front in found) + 2
    short = _labels.short_precisions(dataset["precision"].values)
    for front in found:
        picked = _labels.spread(front.columns[x], rows)
        spans = {k: _spans.price_span(front.columns, name) for k, name in enumerate((x, y))}
        for place, i in enumerate(picked):
            column = {name: values[i] for name, values in front.columns.items()}
            cells = [form(float(column[name])) for name, _, form in shown]
            for k, span in spans.items():
                if span is not None:
                    # Two digits: the column must leave room for the plan.
                    low, high = (_labels.number(float(end[i]), 2) for end in span)
                    cells[k] += f" ({low}–{high})"
            mark = "•" if len(found) > 1 and bool(column["on_front"]) else " "
            table.add_row(
                f"{front.chip if place == 0 else '':<8} {mark}",
                *cells[:2],
                _labels.layout_text(*(int(column[key]) for key in _labels.LAYOUT)),
                str(int(column["batch"])),
                str(int(column["chunk"])),
                short[str(column["precision"])],
                *cells[2:],
                str(column["binding"]),
                end_section=place == len(picked) - 1,
            )
    title, *searched = headline(dataset)
    mark = ["• on the front over all chips"] if len(found) > 1 else []
    return Group(
        lines(title, style="bold"),
        *map(lines, searched),
        "",
        table,
        lines(*mark, *footnotes(dataset), style="dim"),
    )


def overlay_text(measured: "xr.Dataset") -> "RenderableType":
    """Returns how many measured runs are shown, and why others are not."""
    attrs = measured.attrs
    skipped = [
        f"{int(attrs[key])} {words}"
        for key, words in (
            ("skipped_model", "of another model"),
            ("skipped_lengths", "of other lengths"),
            ("skipped_chip", "on another chip"),
            ("skipped_mode", "served otherwise"),
            ("rejected", "rejected"),
        )
        if int(attrs.get(key, 0))
    ]
    why = f" (left out: {', '.join(skipped)})" if skipped else ""
    return lines(f"{measured.sizes['run']} measured runs{why}", str(attrs.get("rejected_rows", "")))


# ---- One design ----


def _dollars(value: float) -> str:
    return f"${value:.3g}"


def _joules(value: float) -> str:
    return f"{value:.3g} J"


_GROUPS: tuple[tuple[str, tuple[tuple[str, str, _Format], ...]], ...] = (
    ("speed", (
        ("time to first token (TTFT)", "ttft_s", _labels.duration),
        ("time per output token (TPOT)", "tpot_s", _labels.duration),
        ("longest gap between tokens", "longest_gap_s", _labels.duration),
        ("end to end", "e2e_s", _labels.duration),
        ("tokens/s per user, decoding", "tokens_per_second_user", _labels.number),
        ("tokens/s per user, whole request", "tokens_per_second_user_e2e", _labels.number),
    )),
    ("throughput", (
        ("output tokens/s per chip", "output_tokens_per_second_chip", _labels.number),
        ("input + output tokens/s per chip", "total_tokens_per_second_chip", _labels.number),
        ("output tokens/s, all chips", "output_tokens_per_second", _labels.number),
        ("requests/s, all chips", "requests_per_second", _labels.number),
        ("requests running", "running", _labels.number),
        ("preemptions per request", "preempted", lambda v: f"{v:.2f}"),
    )),
    ("memory of a chip", (
        ("weights", "weight_bytes", lambda v: si(v, "B")),
        ("KV cache", "kv_bytes", lambda v: si(v, "B")),
        ("activations", "activation_bytes", lambda v: si(v, "B")),
        ("in all, with workspace", "memory_bytes", lambda v: si(v, "B")),
        ("left, share of capacity", "memory_margin", lambda v: f"{v:.1%}"),
    )),
    ("energy and cost", (
        ("power, all chips", "power_w", lambda v: si(v, "W")),
        ("power at the wall, with hosts and PUE", "wall_power_w", lambda v: si(v, "W")),
        ("energy per output token, decode's share", "energy_per_output_token_j", _joules),
        ("energy per input token, prefill's share", "energy_per_input_token_j", _joules),
        ("energy per token, undivided", "energy_per_total_token_j", _joules),
        ("energy per output token, undivided", "energy_per_output_token_undivided_j", _joules),
        ("at the wall, per output token, decode's share", "wall_energy_per_output_token_j",
         _joules),
        ("at the wall, per token, undivided", "wall_energy_per_total_token_j", _joules),
        ("$ per million output tokens, decode's share", "usd_per_million_output_tokens", _dollars),
        ("$ per million input tokens, prefill's share", "usd_per_million_input_tokens", _dollars),
        ("$ per million tokens, undivided", "usd_per_million_total_tokens", _dollars),
        ("$ per million output tokens, undivided", "usd_per_million_output_tokens_undivided",
         _dollars),
        ("cost of all chips", "usd_per_hour", lambda v: f"${v:.2f}/h"),
    )),
)  # fmt: skip

RARE = 5e-3
"""Preemptions of a request that are not worth a line."""


def estimate_table(
    dataset: "xr.Dataset",
    operators: "xr.Dataset | None" = None,
    ranges: "xr.Dataset | None" = None,
) -> "Group":
    """Returns one design's numbers by group, and what binds it.

    Args:
        dataset: of `estimate`.
        operators: of `operator_table`, for the parts of a token's time.
        ranges: of `ranges`, for the bands of numbers; those of prices alone without.
    """
    from rich.console import Group

    attrs = dataset.attrs
    chip = str(dataset["chip"].item())
    plan = [int(dataset[name]) for name in _labels.PLAN]
    words = _labels.plan_text(*plan, precision=str(dataset["precision"].item()))
    title = (
        f"{_labels.model_title(str(attrs['model']))} on {int(dataset['chips'])} × {chip} · {words}"
    )
    traffic = f"{_labels.lengths(dataset)} · engine {attrs.get('engine', 'neutral')}"
    feasible = bool(dataset["feasible"])
    bands = _spans.bands(dataset, ranges)
    table = grid(("", "left"), ("", "right"), edge=False)
    for name, rows in _GROUPS:
        values = [float(dataset[key]) for _, key, _ in rows]
        if not any(map(math.isfinite, values)):
            continue
        table.add_row(lines(name, style="bold"), "")
        for (words, key, form), value in zip(rows, values, strict=True):
            if key == "preempted" and not value >= RARE:
                continue
            text = form(value) if math.isfinite(value) else "–"
            if key == "running" and math.isfinite(value):
                words = f"running of the {int(dataset['admitted']):,} that the KV pool admits"
            if key in bands and math.isfinite(value):
                low, high = map(form, bands[key])
                words += f" ({low} to {high})" if low != high else ""
            table.add_row(f"  {words}", text)
    binding = dataset["binding"].item()
    verdict = f"bound by {binding}"
    if not feasible:
        verdict = f"infeasible, {binding}: {dataset['advice'].item()}"
    tpot = float(dataset["tpot_s"])
    parts = [] if operators is None or not math.isfinite(tpot) else [_parts(operators, tpot)]
    price = str(attrs.get("price_assumption", ""))
    return Group(
        lines(title, style="bold"),
        lines(traffic),
        "",
        table,
        "",
        lines(verdict, style="bold"),
        *parts,
        lines(
            f"price of {price}" if price and not _labels.site_note(dataset) else "",
            _labels.site_note(dataset, wall=True),
            "shares are of busy time; J and $ per output token are decode's",
            _labels.kernel_note(chip, str(attrs.get("kernel_constants", ""))),
            _labels.assumed_note({chip: str(attrs.get("assumed", ""))}),
            _spans.ranges_note(ranges),
            _model_note(dataset),
            style="dim",
        ),
    )


_PARTS = (
    ("compute_s", "arithmetic"),
    ("weights_s", "weights and activations from memory"),
    ("cache_s", "keys and values from memory"),
    ("network_s", "links between chips"),
    ("latency_s", "latency: floors, launches, host"),
)


def _parts(operators: "xr.Dataset", tpot: float) -> "Table":
    """Returns what a token's time consists of, largest first, with bars."""
    weight = dict(zip(operators["phase"].values, operators["step_weight"].values, strict=True))
    weights = np.asarray([weight[step] for step in operators["step"].values])
    sums = [(float(np.nansum(operators[name].values * weights)), words) for name, words in _PARTS]
    whole = sum(value for value, _ in sums) or 1.0
    table = grid(("", "left"), ("", "right"), ("", "right"), ("", "left"), edge=False)
    for value, words in sorted(sums, reverse=True):
        share = value / whole
        bar = "█" * round(40 * share)
        table.add_row(f"  {words}", _labels.duration(share * tpot), f"{share:.0%}", bar)
    return table


def _shape(row: Mapping[str, Any]) -> str:
    """Returns an operator's shape on one rank as people write it."""

    def times(*names: str) -> str:
        return " × ".join(f"{float(row[name]):,.6g}" for name in names)

    kind = str(row["kind"])
    if kind == "matmul":
        groups = f"{row['groups']:g} × " if float(row["groups"]) > 1 else ""
        return groups + times("rows", "columns", "inner")
    if kind == "attention":
        return (
            f"{times('sequences', 'queries', 'keys')}, {row['heads']:g} heads, "
            f"{row['kv_heads']:g} kv, width {row['qk_width']:g}"
        )
    if kind == "scan":
        state = f"{row['state']:g} × {row['width']:g}"
        return f"{times('sequences', 'tokens')}, {row['heads']:g} heads, state {state}"
    if kind == "collective":
        return f"{times('rows', 'width')} over {row['ranks']:g}"
    return times("rows") if math.isfinite(float(row["rows"])) else ""


def operators_table(dataset: "xr.Dataset") -> "Group":
    """Returns the operators of the decode step and of the step that carries a chunk of a prompt.

    Shapes are of one rank: rows × columns × inner of products, sequences × queries × keys of
    attention, sequences × tokens of recurrences.
    """
    from rich.console import Group

    shown: list[Any] = []
    names = ("name", "step", "kind", "kernel", "count", "rows", "columns", "inner", "groups",
             "sequences", "queries", "keys", "heads", "kv_heads", "qk_width", "width", "ranks",
             "tokens", "state",
             "flops", "memory_bytes", "seconds_each", "seconds", "share_of_step",
             *(name for name, _ in _PARTS))  # fmt: skip
    columns = {name: dataset[name].values for name in names}
    words = {name: text.split(":")[0] for name, text in _PARTS}
    steps = zip(
        dataset["phase"].values,
        dataset["step_seconds"].values,
        dataset["step_weight"].values,
        strict=True,
    )
    for step, duration, weight in steps:
        table = grid(
            ("operator", "left"), ("kernel", "left"), ("shape on one rank", "left"),
            ("count", "right"), ("FLOP", "right"), ("bytes", "right"), ("time\neach", "right"),
            ("time\nall", "right"), ("share", "right"), ("mostly", "left"),
        )  # fmt: skip
        for i in np.flatnonzero(columns["step"] == step):
            row = {name: column[i] for name, column in columns.items()}
            if not float(row["seconds"]) > 0.0:
                continue
            parts = {name: float(np.nan_to_num(row[name])) for name, _ in _PARTS}
            table.add_row(
                str(row["name"]), str(row["kernel"]), _shape(row), f"{float(row['count']):g}",
                *(si(float(row[name])) if row[name] > 0 else "" for name in
                  ("flops", "memory_bytes")),
                _labels.duration(float(row["seconds_each"])),
                _labels.duration(float(row["seconds"])),
                f"{float(row['share_of_step']):.1%}",
                words[max(parts, key=lambda name: parts[name])].split(" ")[0],
            )  # fmt: skip
        kind = "decode step" if step == "decode" else "step with a chunk of a prompt"
        head = f"{kind}: {_labels.duration(float(duration))}, share in TPOT {float(weight):.1%}"
        shown += ["", lines(head, style="bold"), table]
    return Group(*shown)


# ---- What a design depends on ----

_SENTENCES = 5


def sensitivity_table(dataset: "xr.Dataset") -> "Group":
    """Returns what one per cent more of each input does to each output, by size for the first.

    Inputs that move nothing by 0.005 % are left out; the Dataset has them all.
    """
    from rich.console import Group

    names = _influences.outputs(dataset)
    rows = _influences.influences(dataset)
    if not rows:
        return Group(lines("no elasticities: the design cannot run"))
    top = [row for row in rows if not row.whole][:_SENTENCES]
    said = [_influences.sentence(row, names[0], row.elasticities[0]) for row in top]
    heads = [("\n".join(textwrap.wrap(_influences.words(name), 10)), "right") for name in names]
    table = grid(("+1 % of", "left"), ("now", "right"), *heads)
    for whole in (False, True):
        part = [row for row in rows if row.whole == whole]
        for place, row in enumerate(part):
            cells = [_influences.percent(float(value)) for value in row.elasticities]
            end = place == len(part) - 1
            table.add_row(row.title + " *" * row.assumed, row.value, *cells, end_section=end)
    mark = "* assumed" if any(row.assumed for row in rows) else ""
    return Group(
        "", lines("sensitivity", style="bold"), lines(*said), "", table,
        lines(mark, *_influences.notes(dataset), style="dim"),
    )  # fmt: skip


# ---- Many rows ----


def _places(lines_: list[int], most: int = 6) -> str:
    """Returns lines of a table as people write them: `3, 8 to 12`.

    >>> _places([3, 8, 9, 10])
    '3, 8 to 10'
    """
    spans: list[tuple[int, int]] = []
    for line in lines_:
        if spans and line == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], line)
        else:
            spans.append((line, line))
    shown = [f"{a}" if a == b else f"{a} to {b}" for a, b in spans[:most]]
    return ", ".join(shown + (["…"] if len(spans) > most else []))


def predictions_table(found: "Predictions", faults: int = 20) -> "Group":
    """Returns the errors of a table's predictions by what its rows are of, and what has none."""
    from rich.console import Group

    told = found.told()
    names = [error.removesuffix("_error") for error in found.errors]
    heads = [
        (f"{name.upper() if len(name) == 4 else name}\n{what}", "right")
        for name in names
        for what in ("rows", "median %", "p90 %", "bias %")
    ]
    table = grid(("by", "left"), ("", "left"), *heads)
    before = ""
    for row in told["errors_percent"]:
        cells = [
            f"{row[f'{name}_rows']:,}" if what == "rows" else f"{row[f'{name}_{what}']:.1f}"
            for name in names
            for what in ("rows", "median", "p90", "bias")
        ]
        table.add_row(row["by"] if row["by"] != before else "", row["name"], *cells)
        before = row["by"]
    listed = told["not_predicted"]
    words = [
        f"{len(fault['lines']):,} row{'s' * (len(fault['lines']) > 1)}: {fault['status']} "
        f"(line {_places(fault['lines'])})"
        for fault in sorted(listed, key=lambda fault: -len(fault["lines"]))[:faults]
    ]
    more = [f"and {len(listed) - faults} more reasons"] if len(listed) > faults else []
    measured = bool(names) and bool(told["errors_percent"])
    return Group(
        lines(f"{told['predicted']:,} of {told['rows']:,} rows predicted", style="bold"),
        *([table, lines("|error| median and 90th percentile; bias: median signed error",
                        style="dim")] if measured else []),
        lines(*words, *more),
        lines(*found.notes, style="dim"),
    )  # fmt: skip
