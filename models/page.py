"""`docs/models.md`: our counts of every network of the catalogue beside the published ones.

python -m perfmodel.models.page docs/models.md
"""

import math
import pathlib
import sys
from collections.abc import Sequence

from perfmodel.catalog import Number
from perfmodel.models.catalogue import ModelEntry, load_model, names
from perfmodel.models.transformer import active_parameters, parameters

_LEFT_OUT = {"without embedding and output head": 2, "without the embedding": 1}
"""What notes of sidecars say of tables that a publisher leaves out, and how many those are."""

_INTRODUCTION = """\
# Networks and their counts

Made by `python -m perfmodel.models.page docs/models.md` from the files in `models/catalog/`; do not edit by hand.

Ours are exact, of the decoder alone. Published ones are as printed, rounded where the publisher rounds. *Equal* is to the
last unit, *half a digit* within half of the last printed one, *its bounds* within wider ones that the note explains. *: a
published count less what the note names. A network without experts has no active count of its own.
"""  # noqa: E501

_HEAD = (
    "model",
    "total",
    "published",
    "agrees",
    "active",
    "published",
    "agrees",
    "source, and what it says",
)


def printed(number: Number) -> str:
    """Returns a published count with the digits that it has.

    >>> printed(Number(37e9, "1", "reported", low=36.5e9, high=37.5e9))
    '37 B'
    >>> printed(Number(46.7e9, "1", "reported", low=46.65e9, high=46.75e9))
    '46.7 B'
    """
    if number.value is None:
        return "unknown"
    digit = _last_digit(number)
    if digit is None:
        return f"{number.value:,.0f}" + ("*" if number.kind == "derived" else "")
    decimals = max(0, 9 - round(math.log10(digit)))
    return f"{number.value / 1e9:,.{decimals}f} B"


def _last_digit(number: Number) -> float | None:
    """Returns the worth of the last printed digit, None of a count printed whole."""
    if number.value is None or number.low is None or number.high is None:
        return None
    width = 2 * min(number.high - number.value, number.value - number.low)
    if width <= 0:
        # Bounds to one side: the last digit is the last that is not 0.
        return 10.0 ** (len(text := f"{number.value:.0f}") - len(text.rstrip("0")))
    # Bounds that a note widens are of some digit all the same: the next smaller power of ten.
    return 10.0 ** math.floor(math.log10(width) + 1e-9)


def agreement(number: Number | None, count: int, table: int) -> str:
    """Returns in words whether a count agrees with a published one, of `table` weights in each of
    the tables that its note may leave out."""
    if number is None or number.value is None:
        return ""
    left_out = next((n for words, n in _LEFT_OUT.items() if words in number.note), 0)
    for tables in dict.fromkeys((0, left_out)):
        if number.covers(count - tables * table):
            digit = _last_digit(number)
            off = abs(count - tables * table - number.value)
            near = "equal" if not off else "half a digit" if digit and off <= digit / 2 else ""
            without = f", without {tables} table{'s' * (tables > 1)}" if tables else ""
            return (near or "its bounds") + without
    return f"differs by {count / number.value - 1:+.1%}"


def _row(entry: ModelEntry) -> Sequence[str]:
    model, published = entry.model, entry.published
    total, active = int(parameters(model)), int(active_parameters(model))
    table = int(model.vocabulary * model.hidden)
    all_of, some = published["parameters"], published.get("active_parameters")
    told = []
    for number in filter(None, (all_of, some)):
        source = entry.sources.get(number.source)
        words = f"{source.title if source else ''}{f': {number.note}' if number.note else ''}"
        told += [] if words in told else [words.replace("|", "/")]
    return (
        entry.name, f"{total:,}", printed(all_of), agreement(all_of, total, table),
        f"{active:,}" if active != total else "", printed(some) if some is not None else "",
        agreement(some, active, table), "; ".join(told),
    )  # fmt: skip


def page() -> str:
    """Returns the page."""
    rows = [
        _HEAD,
        ["---", *["---:", "---:", "---"] * 2, "---"],
        *map(_row, map(load_model, names())),
    ]
    return "\n".join((_INTRODUCTION, *(f"| {' | '.join(row)} |" for row in rows), ""))


if __name__ == "__main__":
    pathlib.Path(sys.argv[1]).write_text(page(), encoding="utf-8")
