"""Traces of real requests: lengths, arrivals, shared prefixes, and what a prefix cache finds.

CSV, Parquet and JSON lines, in the forms in which Azure, Mooncake and Vidur publish theirs. A row
that cannot be read is left out and reported with its line; it is never dropped in silence.
"""

import collections
import dataclasses
import functools
import json
import os
from collections.abc import Mapping, Sequence
from importlib.resources import as_file, files
from typing import Any

import numpy as np
import pandas as pd

from perfmodel import _rows, catalog
from perfmodel._replay import Requests
from perfmodel._rows import Column, Reader, TableLike
from perfmodel.errors import InputError, nearest, shorten
from perfmodel.traffic import Mix, reduce

FIELDS: Mapping[str, Column] = {
    "isl": Column(("input_tokens", "contexttokens", "input_length", "num_prefill_tokens", "isl"),
                  "prompt tokens", required=True, low=1.0),
    "osl": Column(("output_tokens", "generatedtokens", "output_length", "num_decode_tokens", "osl"),
                  "output tokens", required=True, low=0.0),
    "seconds": Column(("arrival_s", "arrived_at"), "arrival [s]", low=0.0),
    "milliseconds": Column(("arrival_ms", "timestamp"), "arrival [ms]", low=0.0),
    "clock": Column(("timestamp",), "date and time of arrival", number=False),
    "blocks": Column(("hash_ids", "prefix_blocks"), "names of the prompt's blocks, in order"),
}  # fmt: skip
"""Columns by any of the names that published traces have, upper or lower case."""

MOONCAKE_BLOCK = 512
"""Tokens of a block in Mooncake's traces (their README)."""


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """Requests that were made, in the order of their arrival; arrays of shape [requests].

    Fields: `arrival` [s], from the first, NaN where the file has none; `isl`, `osl`, tokens;
    `blocks`, of each prompt the names of its blocks, equal where content and all before it are,
    None where the file has none; `block`, tokens in one; `faults`, what is wrong with rows that
    are left out, and their lines; `source`.
    """

    arrival: np.ndarray
    isl: np.ndarray
    osl: np.ndarray
    blocks: tuple[tuple[int, ...], ...] | None
    block: int
    faults: Mapping[str, list[int]]
    source: str

    def __len__(self) -> int:
        return len(self.isl)

    def note(self) -> str:
        """Returns where the trace is from and which rows were left out, on one line."""
        text = f"{self.source}: {len(self):,} request{'' if len(self) == 1 else 's'}"
        for why, lines in self.faults.items():
            listed = ", ".join(map(str, lines[:8])) + (", …" if len(lines) > 8 else "")
            text += f"; left out, {why}: line {listed}"
        return text


def read(source: TableLike, block: int = MOONCAKE_BLOCK) -> Trace:
    """Returns the requests of a CSV, Parquet or JSON-lines file, or of a frame.

    Args:
        source: the table. block: tokens in a block, where it names blocks.

    Raises InputError where it cannot be read, lacks lengths, or has no good row.
    """
    where = "table" if isinstance(source, pd.DataFrame) else catalog.label(source)
    broken: dict[int, str] = {}
    lines = None
    if not isinstance(source, pd.DataFrame) and os.fspath(source).endswith((".jsonl", ".ndjson")):
        source, lines, broken = _read_lines(source, where)
    table = _rows.read(source, FIELDS)
    if lines is not None:
        table.lines = lines
    reader = Reader(table)
    for row, why in broken.items():
        reader.status[row] = why
    isl, osl = reader.numbers("isl"), reader.numbers("osl")
    for name, column in (("isl", isl), ("osl", osl)):
        reader.fault(column != np.floor(column), f"{name} is not a whole number")
    arrival = _arrivals(reader)
    blocks = _blocks(reader)
    good = np.flatnonzero(reader.status == "")
    faults: dict[str, list[int]] = {}
    for row in np.flatnonzero(reader.status != ""):
        faults.setdefault(str(reader.status[row]), []).append(int(table.lines[row]))
    if not len(good):
        why = next(iter(faults), "no rows")
        raise InputError(f"{where}: no request can be read ({why})")
    first = arrival[good]
    if not np.any(np.isnan(first)):
        good = good[np.argsort(first, kind="stable")]
    chosen = None if blocks is None else tuple(blocks[row] for row in good)
    start = arrival[good] - np.min(arrival[good])
    return Trace(start, isl[good], osl[good], chosen, block, faults, where)


def _read_lines(
    path: str | os.PathLike[str], where: str
) -> tuple[pd.DataFrame, np.ndarray, dict[int, str]]:
    """Returns a JSON-lines file as a frame, the line of each row, and rows that are no objects."""
    rows: list[dict[str, object]] = []
    lines: list[int] = []
    broken: dict[int, str] = {}
    for number, text in enumerate(catalog.read_text(path, 512 * 2**20).splitlines(), 1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            broken[len(rows)] = "not a JSON object"
            row = {}
        rows.append(row)
        lines.append(number)
    if not rows:
        raise InputError(f"{where}: empty; one JSON object a line is needed")
    return pd.DataFrame(rows, dtype=object), np.array(lines), broken


def _arrivals(reader: Reader) -> np.ndarray:
    """Returns arrivals [s] from whichever column a table has; NaN where it has none."""
    table = reader.table
    # "TIMESTAMP" of Azure is a date; "timestamp" of Mooncake counts milliseconds.
    clock = table.given.get("clock")
    if clock is not None and not _counts(table.frame[clock]):
        words = reader.texts("clock")
        times = pd.to_datetime(words, errors="coerce", utc=True, format="ISO8601")
        bad = np.asarray(pd.isna(times))
        reader.fault(bad, lambda row: f"no date and time: '{shorten(words[row], 30)}'")
        seconds = np.asarray(times.as_unit("ns").asi8, float) * 1e-9
        return np.where(bad, 0.0, seconds - np.min(seconds[~bad], initial=np.inf))
    for name, scale in (("seconds", 1.0), ("milliseconds", 1e-3)):
        if name in table.given:
            given = reader.numbers(name, np.nan)
            empty = np.isnan(given)
            reader.fault(empty, "no arrival")
            return np.where(empty, 0.0, given) * scale
    return np.full(len(reader.status), np.nan)


def _counts(column: Any) -> bool:
    """Returns whether most cells are numbers."""
    numbers = np.asarray(pd.to_numeric(column, errors="coerce"), float)
    return bool(np.mean(np.isfinite(numbers)) > 0.5)


def _blocks(reader: Reader) -> list[tuple[int, ...]] | None:
    given = reader.table.given.get("blocks")
    if given is None:
        return None
    found: list[tuple[int, ...]] = []
    wrong = np.zeros(len(reader.status), bool)
    for row, cell in enumerate(reader.table.frame[given]):
        listed = cell
        if isinstance(cell, str):
            listed = cell.strip("[] ").replace(",", " ").split()
        try:
            found.append(tuple(int(name) for name in listed))
        except (TypeError, ValueError):
            found.append(())
            wrong[row] = True
    reader.fault(wrong, "blocks are not a list of whole numbers")
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class PrefixHits:
    """What a prefix cache of several tiers finds of a trace.

    Fields: `cached`, tokens of each prompt found in each tier, [requests, tiers]; `share` of all
    prompt tokens found in each, [tiers]; `most`, with a cache without end.
    """

    cached: np.ndarray
    share: np.ndarray
    most: float


def prefix_hits(trace: Trace, capacities: Sequence[float]) -> PrefixHits:
    """Returns which part of each prompt is found in a cache, tier by tier.

    One LRU list over all tiers: the most recently used blocks lie in the first, what it has no room
    for in the next. A prompt's hit is the longest run of its first blocks that are there; its last
    token is always computed. Outputs take no room, as published traces do not name their blocks.
    Of a prompt's blocks the last are given up first, as serving engines do. A trace begins with an
    empty cache, which understates a service that has run for long.

    Args:
        trace: with blocks.
        capacities: tokens that each tier holds, fastest first (HBM, host memory, remote).
    """
    if trace.blocks is None:
        raise InputError(f"{trace.source}: it names no blocks, so shared prefixes are unknown")
    if not len(capacities) or not all(c >= 0 for c in capacities):
        raise InputError("capacities: tokens of each tier, none negative, are needed")
    limits = np.floor(np.cumsum(capacities) / trace.block)
    unbounded = [*limits, np.inf]
    # The list of a smaller cache is the head of a larger one's: what a tier adds is a difference.
    within = np.stack([_found(trace, limit) for limit in unbounded], axis=1)
    cached = np.diff(within[:, :-1], axis=1, prepend=0.0)
    total = np.sum(trace.isl)
    return PrefixHits(cached, np.sum(cached, axis=0) / total, float(np.sum(within[:, -1]) / total))


def _found(trace: Trace, limit: float) -> np.ndarray:
    """Returns the tokens of each prompt that a cache of `limit` blocks has, [requests]."""
    assert trace.blocks is not None
    cache: collections.OrderedDict[int, None] = collections.OrderedDict()
    found = np.zeros(len(trace))
    for row, blocks in enumerate(trace.blocks):
        hits = 0
        while hits < len(blocks) and blocks[hits] in cache:
            hits += 1
        found[row] = min(hits * trace.block, trace.isl[row] - 1)
        for block in reversed(blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > limit:
            cache.popitem(last=False)
    return found


def to_classes(
    trace: Trace, classes: int, capacities: Sequence[float] = ()
) -> tuple[Mix, PrefixHits | None]:
    """Returns a trace as weighted classes, and what a prefix cache finds of it.

    Args: the trace; how many classes; tokens of each tier of a cache, none for no cache.
    """
    hits = prefix_hits(trace, capacities) if len(capacities) else None
    cached = None if hits is None else np.sum(hits.cached, axis=1)
    return reduce(trace.isl, trace.osl, classes, cached, trace.note()), hits


def to_requests(trace: Trace, hits: PrefixHits | None = None, speed: float = 1.0) -> Requests:
    """Returns a trace to be replayed by `perfmodel.simulate`.

    Args: the trace, with arrivals; cached tokens of each prompt, of all tiers; how many times as
    fast it is replayed.
    """
    if np.any(np.isnan(trace.arrival)):
        raise InputError(f"{trace.source}: it has no arrivals to replay")
    if not speed > 0.0:
        raise InputError(f"speed: must be more than 0, not {speed:g}")
    cached = np.zeros(len(trace)) if hits is None else np.sum(hits.cached, axis=1)
    return Requests(trace.arrival / speed, trace.isl, trace.osl, cached)


@functools.cache
def names() -> tuple[str, ...]:
    """Returns the names of the published traces of which an excerpt ships.

    >>> names()
    ('arxiv', 'azure-code-2023', 'azure-conv-2023', 'mooncake-conversation')
    """
    return tuple(sorted(_index()))


def _index() -> dict[str, dict[str, str]]:
    folder = files("perfmodel").joinpath("traffic_data")
    return json.loads(folder.joinpath("index.json").read_text(encoding="utf-8"))


def excerpt(name: str) -> Trace:
    """Returns the first requests of a published trace, by its name.

    Its lengths are those of some minutes, not of the whole trace; `source` says which.

    >>> len(excerpt("mooncake-conversation"))
    150
    """
    known = _index()
    if name not in known:
        raise InputError(f"unknown trace '{shorten(name)}'{nearest(name, known)}")
    entry = known[name]
    with as_file(files("perfmodel").joinpath("traffic_data", entry["file"])) as path:
        trace = read(path)
    return dataclasses.replace(trace, source=f"{entry['title']} ({entry['rows']})")
