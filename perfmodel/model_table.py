"""Counted parameters of the catalogue's networks against the published ones: `docs/models.md`.

python -m perfmodel.model_table --out docs/models.md
"""

import argparse
import math
from pathlib import Path

from perfmodel.catalog import Number
from perfmodel.models.catalogue import ModelEntry, load_model, names
from perfmodel.models.transformer import active_parameters, parameters

_INTRODUCTION = """\
# Counted and published parameters

Made from `models/catalog/` by `python -m perfmodel.model_table --out docs/models.md`; do not edit.

*Ours* is counted from the network's `config.json`, exactly, as it is used everywhere: without
draft layers and image encoders. *Published* is what the publisher gives, digit by digit where a
checkpoint was counted, else as printed. *Agreement* is "equal" (to the last digit), "half a digit"
(the printed number is ours, rounded), "bounds" (the publisher counts or rounds otherwise, as the
last column says) or "differs". Some publishers leave the embedding, or embedding and output head,
out of active parameters: ours are compared without them too, and the last column says so. A dense
network has no such count: all of its weights are active.

Kinds of published totals: *reported* as printed or as a checkpoint holds, *derived* from a
checkpoint's total less what is not part of the decoder, with the subtraction in the last column.
"""

_LAST_DIGIT = 1e9
"""Billions are printed to their last digit, or to one behind the point: never to tens of them."""

_HEAD = (
    "model", "ours", "published", "kind", "agreement", "active, ours", "published",
    "agreement", "source; what it counts",
)  # fmt: skip


def counted_active(entry: ModelEntry) -> int:
    """Returns the active parameters of a network as its publisher counts them."""
    table = int(entry.model.vocabulary) * int(entry.model.hidden)
    return int(active_parameters(entry.model)) - entry.active_without * table


def agreement(number: Number, count: int) -> str:
    """Returns how a counted number agrees with a published one.

    >>> agreement(Number(46.7e9, "1", "reported", low=46.65e9, high=46.75e9), 46_702_792_704)
    'half a digit'
    >>> agreement(Number(3.3e9, "1", "reported", low=3.3e9, high=3.4e9), 3_353_032_704)
    'bounds'
    """
    if number.value == count:
        return "equal"
    if not number.covers(count) or number.value is None:
        return "differs"
    above, below = number.high, number.low
    if above is None or below is None or above - number.value != number.value - below:
        return "bounds"
    digit = above - below
    whole = digit == 10.0 ** round(math.log10(digit)) and number.value % digit == 0
    return "half a digit" if whole and digit <= _LAST_DIGIT else "bounds"


def _printed(number: Number) -> str:
    if number.value is None:
        return "unknown"
    if number.low is None:
        return f"{number.value:,.0f}"
    return f"{number.value / 1e9:,.15g} billion"


def _said(entry: ModelEntry, number: Number, known: str = "") -> str:
    """Returns source and note of a number, without a source that is `known`."""
    source = entry.sources.get(number.source)
    words = [number.note] if number.note else []
    if source is not None and number.source != known:
        words = [word for word in (source.title, source.locator, *words) if word]
    return "; ".join(words)


def _both(entry: ModelEntry, total: Number, active: Number) -> str:
    rest = _said(entry, active, total.source)
    return _said(entry, total) + (f". Active: {rest}" if rest else "")


def _row(name: str) -> str:
    entry = load_model(name)
    total, count = entry.published["parameters"], int(parameters(entry.model))
    cells = [f"`{name}`", f"{count:,}", _printed(total), total.kind, agreement(total, count)]
    active = entry.published.get("active_parameters")
    if active is None:
        cells += ["all", "", ""]
    else:
        cells += [f"{int(active_parameters(entry.model)):,}", _printed(active)]
        cells += [agreement(active, counted_active(entry))]
    cells.append(_said(entry, total) if active is None else _both(entry, total, active))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page() -> str:
    """Returns `docs/models.md`, made from the catalogue."""
    rows = ["| " + " | ".join(_HEAD) + " |", "|" + "---|" * len(_HEAD), *map(_row, names())]
    return "\n".join((_INTRODUCTION, *rows, ""))


def main() -> None:
    """Writes the page, or prints it."""
    parser = argparse.ArgumentParser(
        prog="python -m perfmodel.model_table", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--out", type=Path, help="file to write, else it is printed")
    options = parser.parse_args()
    if options.out is None:
        print(page(), end="")
    else:
        options.out.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
