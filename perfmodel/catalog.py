"""Files in, numbers with provenance out: the reader behind every chip, fit and model file.

Every number says its unit, its source and what kind of knowledge it is; a schema (a tuple of
`Field`) is the single truth about which numbers a file may hold, and the documentation page is
made from it. Nothing here knows chips or networks.

Files are read as if written by a stranger. Whatever is wrong with one, the answer is an
`InputError` of one line: what, where, and the nearest valid thing.
"""

import collections
import dataclasses
import difflib
import hashlib
import json
import math
import os
import stat
import tomllib
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources.abc import Traversable
from typing import Any

from perfmodel import quantities
from perfmodel.errors import InputError, nearest, shorten

KINDS = ("reported", "measured", "derived", "fitted", "assumed", "unknown")
"""What is known of a number: reported by its maker or the press; measured; derived from other
numbers by the formula in its note; fitted to measurements; assumed; or unknown, with no value."""

FilePath = str | os.PathLike[str] | Traversable

_TOML_LIMIT = 512 * 1024
_JSON_LIMIT = 4 * 1024 * 1024
_DEPTH_LIMIT = 64
_DOTS_LIMIT = 100
_NUMBER_KEYS = ("value", "unit", "kind", "source", "note", "low", "high")
_SOURCE_KEYS = ("title", "publisher", "date", "locator")


@dataclasses.dataclass(frozen=True)
class Field:
    """One row of a schema: a number a file may hold, its unit, meaning and allowed range."""

    name: str
    unit: str
    meaning: str
    low: float
    high: float
    required: bool = False


@dataclasses.dataclass(frozen=True)
class Number:
    """A value with its provenance; `low` and `high` bound it where sources disagree."""

    value: float | None
    unit: str
    kind: str
    source: str = ""
    note: str = ""
    low: float | None = None
    high: float | None = None

    def covers(self, value: float | None) -> bool:
        """Returns whether another value is the same, or within the bounds where there are such."""
        if self.value is None or value is None:
            return False
        low = self.value if self.low is None else self.low
        high = self.value if self.high is None else self.high
        return low <= value <= high


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a number was read: enough to find the page or table again."""

    title: str
    publisher: str = ""
    date: str = ""
    locator: str = ""


@dataclasses.dataclass(frozen=True)
class Sheet:
    """One file: its identity (name, title, …), numbers by field, and sources by key."""

    name: str
    identity: Mapping[str, Any]
    numbers: Mapping[str, Number]
    sources: Mapping[str, Source]
    path: str

    def value(self, field: str) -> float | None:
        """Returns the value of a field, or None where it is missing or unknown."""
        number = self.numbers.get(field)
        return None if number is None else number.value


def label(path: FilePath) -> str:
    """Returns the file's name, as messages give it."""
    name = path.name if isinstance(path, Traversable) else os.path.basename(os.fspath(path))
    return shorten(name or path)


def _read_bytes(path: FilePath, limit: int) -> bytes:
    if not isinstance(path, str | os.PathLike):
        with path.open("rb") as file:
            return file.read(limit + 1)
    # Without O_NONBLOCK, opening a pipe would wait for a writer for ever.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    number = os.open(path, flags)
    try:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise InputError(f"{label(path)}: not a regular file")
        with os.fdopen(number, "rb", closefd=False) as file:
            return file.read(limit + 1)
    finally:
        os.close(number)


def read_text(path: FilePath, limit: int = _JSON_LIMIT) -> str:
    """Returns the text of a regular UTF-8 file of at most `limit` bytes."""
    try:
        data = _read_bytes(path, limit)
    except FileNotFoundError:
        raise InputError(f"no such file: {shorten(path, 120)}") from None
    except InputError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{shorten(path, 120)}: cannot be read ({shorten(reason)})") from None
    if len(data) > limit:
        raise InputError(f"{label(path)}: larger than {limit} bytes; not a file of this kind")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{label(path)}: not UTF-8 text (byte {error.start})") from None


def read_toml(path: FilePath) -> dict[str, Any]:
    """Returns the tables of a TOML file."""
    return parse_toml(read_text(path, _TOML_LIMIT), label(path))


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Returns the tables of TOML text; `where` names its file in messages."""
    # The reader's time grows with the square of a dotted key's length.
    for number, line in enumerate(text.splitlines(), 1):
        if line.count(".") > _DOTS_LIMIT:
            raise InputError(f"{where}: line {number}: nested too deeply, or too many numbers")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise InputError(f"{where}: nested too deeply") from None
    except (ValueError, OverflowError) as error:
        raise InputError(f"{where}: not valid TOML: {shorten(error, 120)}") from None


def read_json(path: FilePath, infinite: bool = False) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Rejects what the standard reader lets through: repeated keys, NaN, integers beyond 64 bits,
    unpaired surrogates and absurd nesting; and infinities, unless `infinite`: some published
    config.json have one.
    """
    return parse_json(read_text(path), label(path), infinite)


def parse_json(text: str, where: str, infinite: bool = False) -> dict[str, Any]:
    """Returns the object in JSON text; `where` names its file in messages."""

    def fail(what: str) -> Any:
        raise InputError(f"{where}: {what}")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(items)
        if len(table) != len(items):
            twice = collections.Counter(key for key, _ in items).most_common(1)[0][0]
            fail(f"key '{shorten(twice)}' appears twice in one object")
        return table

    def integer(digits: str) -> int:
        if len(digits) > 20 or not -(2**63) <= int(digits) < 2**63:
            fail(f"integer {shorten(digits, 24)} does not fit 64 bits")
        return int(digits)

    def real(digits: str) -> float:
        value = float(digits)
        return value if math.isfinite(value) else fail(f"{shorten(digits, 24)} is out of range")

    def constant(name: str) -> float:
        if infinite and name != "NaN":
            return float(name)
        return fail(f"{name} is not a number that JSON allows")

    try:
        value = json.loads(
            text,
            object_pairs_hook=pairs,
            parse_int=integer,
            parse_float=real,
            parse_constant=constant,
        )
    except InputError:
        raise
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise InputError(f"{where}: not valid JSON at {place}: {shorten(error.msg)}") from None
    except RecursionError:
        raise InputError(f"{where}: nested too deeply") from None
    if not isinstance(value, dict):
        fail(f"the top level must be an object {{...}}, not {_sort(value)}")
    _check_tree(value, where)
    return value


def _check_tree(value: Any, where: str) -> None:
    level, depth = [value], 0
    while level:
        if (depth := depth + 1) > _DEPTH_LIMIT:
            raise InputError(f"{where}: nested too deeply (more than {_DEPTH_LIMIT} levels)")
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item)
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
            elif isinstance(item, str) and not item.isascii():
                if any(0xD800 <= ord(c) <= 0xDFFF for c in item):
                    raise InputError(f"{where}: '{shorten(item)}' holds an unpaired surrogate")
        level = below


def _sort(value: Any) -> str:
    """Returns what sort of thing a parsed value is, in words."""
    if isinstance(value, bool):
        return "true or false"
    if value is None:
        return "null"
    sorts = {int: "a number", float: "a number", str: "text", list: "a list", dict: "a table"}
    return sorts.get(type(value), "a date or time")


def check_keys(table: Mapping[str, Any], known: Iterable[str], where: str, what: str) -> None:
    """Raises for a key of `table` that is not one of `known`."""
    names = tuple(known)
    for key in (key for key in table if key not in names):
        raise InputError(f"{where}: unknown {what} '{shorten(key)}'{nearest(key, names)}")


def as_table(value: Any, where: str) -> dict[str, Any]:
    """Returns `value` if it is a table."""
    if not isinstance(value, dict):
        raise InputError(f"{where}: must be a table, not {_sort(value)}")
    return value


def as_text(value: Any, where: str, limit: int = 2000) -> str:
    """Returns `value` if it is text of reasonable length, on one line."""
    if not isinstance(value, str):
        raise InputError(f"{where}: must be text, not {_sort(value)}")
    if len(value) > limit:
        raise InputError(f"{where}: longer than {limit} characters")
    # Escapes can smuggle control characters past the parser and into a terminal.
    return shorten(" ".join(value.split()), limit)


def as_number(value: Any, where: str) -> float:
    """Returns `value` as a float if it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{where}: must be a number, not {_sort(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InputError(f"{where}: must be a finite number, not {shorten(number)}")
    return number


def parse_sources(table: Any, where: str) -> dict[str, Source]:
    """Returns the sources of a file, from its `[sources.key]` tables."""
    sources: dict[str, Source] = {}
    for key, entry in as_table(table, f"{where}: [sources]").items():
        place = f"{where}: [sources.{shorten(key)}]"
        entry = as_table(entry, place)
        check_keys(entry, _SOURCE_KEYS, place, "key")
        # TOML dates are objects; all else must be text already.
        texts = {
            k: as_text(v.isoformat() if hasattr(v, "isoformat") else v, f"{place} {k}")
            for k, v in entry.items()
        }
        if not texts.get("title"):
            raise InputError(f"{place}: title is missing")
        sources[key] = Source(**texts)
    return sources


def parse_numbers(
    tables: Mapping[str, Any],
    schema: Sequence[Field],
    sources: Mapping[str, Source],
    where: str,
    extra: Sequence[str] = (),
) -> dict[str, Number]:
    """Returns the numbers of a file, each checked against its row of the schema.

    Keys named in `extra` are allowed beside the usual ones, and told in the note.
    """
    fields = {field.name: field for field in schema}
    check_keys(tables, fields, where, "field")
    missing = [f"{f.name} [{f.unit}]" for f in schema if f.required and f.name not in tables]
    if missing:
        raise InputError(f"{where}: missing {', '.join(missing)}")
    return {
        name: _parse_number(entry, fields[name], sources, f"{where}: {name}", extra)
        for name, entry in tables.items()
    }


def _parse_number(
    entry: Any, field: Field, sources: Mapping[str, Source], where: str, extra: Sequence[str]
) -> Number:
    if not isinstance(entry, dict):
        raise InputError(
            f'{where}: must be a table with value, unit = "{field.unit}", kind and source, '
            f"not {_sort(entry)}"
        )
    check_keys(entry, (*_NUMBER_KEYS, *extra), where, "key")
    keys = [key for key in ("unit", "kind", "source", "note") if key in entry]
    texts = {key: as_text(entry[key], f"{where}: {key}") for key in keys}
    if texts.get("unit") != field.unit:
        given = f", not '{shorten(texts['unit'], 30)}'" if "unit" in texts else "; it is missing"
        raise InputError(f'{where}: unit must be "{field.unit}"{given}{_converted(entry, field)}')
    source = texts.get("source", "")
    if source and source not in sources:
        raise InputError(f"{where}: no [sources.{shorten(source)}]{nearest(source, sources)}")
    # A number that cannot say where it came from is an assumption, and shown as one.
    kind = texts.get("kind", "" if source else "assumed")
    if kind not in KINDS:
        what = f"unknown kind '{shorten(kind)}'" if kind else "kind is missing"
        raise InputError(f"{where}: {what}{nearest(kind, KINDS)}")
    if not source and kind not in ("assumed", "unknown"):
        raise InputError(f"{where}: kind '{kind}' needs a source")
    values = {
        k: as_number(entry[k], f"{where}: {k}") for k in ("value", "low", "high") if k in entry
    }
    if kind == "unknown" and values:
        raise InputError(f"{where}: kind 'unknown' has no value; leave out {', '.join(values)}")
    if kind != "unknown" and "value" not in values:
        raise InputError(f'{where}: value is missing (or kind = "unknown")')
    for key, value in values.items():
        if not field.low <= value <= field.high:
            bounds = f"{field.low:g} to {field.high:g} {field.unit}"
            close = field.low if value < field.low else field.high
            raise InputError(f"{where}: {key} {value:g} is outside {bounds} (nearest: {close:g})")
    value = values.get("value")
    if value is not None and not values.get("low", value) <= value <= values.get("high", value):
        raise InputError(f"{where}: value {value:g} is not between its low and high")
    notes = [texts.get("note", "")]
    notes += [f"{key} {shorten(entry[key], 200)}" for key in extra if key in entry]
    note = "; ".join(note for note in notes if note)
    return Number(value, field.unit, kind, source, note, values.get("low"), values.get("high"))


def _converted(entry: Mapping[str, Any], field: Field) -> str:
    """Returns what a number of another unit is in the field's, "" where that is not known."""
    value, unit = entry.get("value"), entry.get("unit")
    if isinstance(value, bool) or not isinstance(value, int | float) or not isinstance(unit, str):
        return ""
    words = quantities.scaled(float(value), unit, field.unit)
    return f" ({words})" if words else ""


def fold(name: str) -> str:
    """Returns `name` without case and punctuation, as names are compared.

    A mark between two digits still counts: 3.1-8b is not 31.8b.

    >>> fold("H100 SXM") == fold("h100_sxm"), fold("Llama-3.1-8B"), fold("Llama 3 18B")
    (True, 'llama3-1-8b', 'llama3-18b')
    """
    words = "".join(c if c.isalnum() else " " for c in unicodedata.normalize("NFKC", name)).split()
    folded = ""
    for word in words:
        between_digits = folded[-1:].isdigit() and word[0].isdigit()
        folded += "-" + word if between_digits else word
    return folded.casefold()


def resolve(name: object, known: Mapping[str, Iterable[str]], what: str = "name") -> str:
    """Returns the one key of `known` that `name` stands for, by itself or by an alias.

    Args:
        known: aliases by name.
        what: the sort of thing named, for messages ("chip", "model").

    >>> resolve("H100 SXM", {"h100_sxm": ["h100"], "h200_sxm": ["h200"]})
    'h100_sxm'
    """
    if not isinstance(name, str) or not name.strip():
        raise InputError(f"{what}: a name is needed{nearest('', known)}")
    meanings: dict[str, list[str]] = {}
    for key, aliases in known.items():
        for alias in {fold(key), *map(fold, aliases)}:
            meanings.setdefault(alias, []).append(key)
    folded = fold(name[:200])
    found = meanings.get(folded, [])
    if len(found) == 1:
        return found[0]
    if found:
        raise InputError(f"{what} '{shorten(name)}' is ambiguous: {', '.join(sorted(found))}")
    close = difflib.get_close_matches(folded, meanings, n=6, cutoff=0.5)
    keys = list(dict.fromkeys(key for alias in close for key in meanings[alias]))[:3]
    hint = f" (nearest: {', '.join(keys)})" if keys else nearest(name, known)
    raise InputError(f"unknown {what} '{shorten(name)}'{hint}")


def digest(values: Mapping[str, Any]) -> str:
    """Returns 12 hexadecimal digits that change whenever one of the values does.

    >>> digest({"a": 1.0, "b": 2.0}) == digest({"b": 2.0, "a": 1.0})
    True
    """
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
