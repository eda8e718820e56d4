"""A datasheet of a few numbers as TOML text: the reverse of `datasheet.parse_sheet`."""

import datetime
from collections.abc import Mapping
from typing import Any

from perfmodel.catalog import Number, Sheet, Source, parse_toml
from perfmodel.chips.datasheet import FIELDS, assumptions, complete, parse_sheet

_GIVEN = "given"


def _quoted(text: str) -> str:
    # JSON's escapes are TOML's.
    import json

    return json.dumps(text, ensure_ascii=False)


def _table(name: str, entries: Mapping[str, Any]) -> str:
    lines = [f"[{name}]"]
    for key, value in entries.items():
        shown = _quoted(value) if isinstance(value, str) else repr(value)
        lines.append(f"{key} = {shown}")
    return "\n".join(lines)


def sheet_text(
    name: str,
    family: str,
    values: Mapping[str, float],
    *,
    generation: str = "",
    source: str = "",
    base: Sheet | None = None,
) -> str:
    """Returns the TOML text of a datasheet, checked as any file is.

    Args:
        name, family, generation: of the chip; a generation that is measured has kernel constants.
        values: numbers by field, in the field's unit.
        source: title of where they were read; `as given` by default.
        base: a datasheet whose other numbers are taken over, with their sources.

    What the family assumes follows as comments.
    """
    identity = {"name": name, "family": family}
    identity |= {"generation": generation} if generation else {}
    tables = [_table("chip", identity)]
    units = {field.name: field.unit for field in FIELDS}
    kept = {} if base is None else base.numbers
    used: set[str] = set()
    for field in (f.name for f in FIELDS if f.name in values or f.name in kept):
        number = kept.get(field)
        if field in values:
            number = Number(float(values[field]), units[field], "reported", _GIVEN)
        assert number is not None
        used.add(number.source)
        parts = {"value": number.value, "low": number.low, "high": number.high}
        entries = {key: float(part) for key, part in parts.items() if part is not None}
        words = {"unit": number.unit, "kind": number.kind, "source": number.source}
        words["note"] = number.note
        tables.append(_table(field, entries | {key: word for key, word in words.items() if word}))
    today = datetime.date.today().isoformat()
    sources = {} if base is None else dict(base.sources)
    sources[_GIVEN] = Source(source or "numbers as given to perfmodel chips new", date=today)
    for key in sorted(used - {""}):
        parts = {k: v for k, v in vars(sources[key]).items() if v}
        tables.append(_table(f"sources.{key}", parts))
    text = "\n\n".join(tables) + "\n"
    sheet = parse_sheet(parse_toml(text, name), name)
    return text + _assumed(sheet)


def _assumed(sheet: Sheet) -> str:
    """Returns what the family fills in as comments."""
    filled = complete(sheet, assumptions(sheet.identity["family"]))
    lines = [
        f"# {name} = {number.value:g} {number.unit}".removesuffix(" 1") + f"  ({number.note})"
        for name, number in filled.items()
        if sheet.value(name) is None and number.value
    ]
    if not lines:
        return ""
    head = f"# Assumed of its family, {sheet.identity['family']}, where nothing is given:"
    return "\n".join(["", head, *lines, ""])
