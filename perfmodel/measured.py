"""Measured serving runs in the axes of a frontier."""

import csv
import io
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import xarray as xr

from perfmodel import catalog, question, results
from perfmodel.chips import load_chip
from perfmodel.errors import InputError, nearest, shorten
from perfmodel.models.catalogue import load_model
from perfmodel.units import MILLISECOND

COLUMNS = {
    "system": ("system", "chip"),
    "isl": ("isl",),
    "osl": ("osl",),
    "concurrency": ("concurrency",),
    "gpus": ("gpus", "chips", "gpus_total_derived", "tp_size"),
    "ttft_ms": ("ttft_ms",),
    "tpot_ms": ("tpot_ms",),
}
"""Columns a file of runs must have, each by the first of its names that it has."""

_OPTIONAL = {"model": ("model", "model_path"), "precision": ("precision",), "mode": ("mode",)}
_LIMIT = 64 * 2**20
_LISTED = 20

_VALUES = (
    "ttft_s", "tpot_s", "e2e_s", "tokens_per_second_user", "tokens_per_second_user_e2e",
    "output_tokens_per_second_chip", "total_tokens_per_second_chip", "output_tokens_per_second",
    "requests_per_second", "chips",
)  # fmt: skip


class _Skip(Exception):
    """A row that is about something else; the argument says what."""


def _read(path: catalog.FilePath) -> Iterator[tuple[int, Mapping[str, str]]]:
    """Yields each row of a file of runs with its line, by the names used here."""
    where = catalog.label(path)
    reader = csv.DictReader(io.StringIO(catalog.read_text(path, _LIMIT), newline=""))
    try:
        header = [name.strip() for name in reader.fieldnames or []]
        if len(set(header)) != len(header):
            raise InputError(f"{where}: two columns have the same name")
        reader.fieldnames = header
        columns: dict[str, str] = {}
        for name, known in (COLUMNS | _OPTIONAL).items():
            given = next((column for column in known if column in header), None)
            if given is None and name in COLUMNS:
                hint = nearest(name, header)
                raise InputError(f"{where}: no column {' or '.join(known)}{hint}")
            if given is not None:
                columns[name] = given
        for row in reader:
            if None in row or None in row.values():
                yield reader.line_num, {}
            else:
                yield reader.line_num, {k: row[column].strip() for k, column in columns.items()}
    except csv.Error as error:
        line = reader.line_num + 1
        raise InputError(f"{where}: line {line}: not valid CSV: {shorten(error)}") from None


# No service, load or fleet is outside; what is would only spoil the picture.
_LEAST, _MOST = 1e-6, 1e9


def _number(row: Mapping[str, str], name: str, low: float = 0.0) -> float:
    text = row[name]
    if not text:
        raise InputError(f"{name} is empty")
    try:
        value = float(text)
    except ValueError:
        raise InputError(f"{name} is not a number: {shorten(text, 30)!r}") from None
    if not low < value < _MOST:
        raise InputError(
            f"{name} must be above {low:g} and below {_MOST:g}, not {shorten(text, 30)}"
        )
    if value < _LEAST:
        raise InputError(f"{name} must be at least {_LEAST:g}, not {shorten(text, 30)}")
    return value


class _Matcher:
    """Compares names in a file with a frontier's model and chips, each name once."""

    def __init__(self, frontier: xr.Dataset) -> None:
        self._attrs = frontier.attrs
        self._chips = {str(name) for name in frontier["candidate"].values}
        self._models: dict[str, bool] = {}
        self._systems: dict[str, str | None] = {}

    def model(self, name: str) -> bool:
        """Returns whether a network has the frontier's architecture."""
        if name not in self._models:
            same = catalog.fold(name) == catalog.fold(str(self._attrs["model"]))
            if not same and not name.startswith((".", "~", "/", "\\")):
                try:
                    shape = question.architecture(load_model(name).model)
                    same = shape == self._attrs["architecture"]
                except InputError:
                    same = False
            self._models[name] = same
        return self._models[name]

    def chip(self, name: str) -> str | None:
        """Returns the name in the catalogue of one of the frontier's chips, else None."""
        if name not in self._systems:
            found = name if name in self._chips else None
            if found is None and not {"/", "\\"} & set(name) and not name.endswith(".toml"):
                try:
                    found = load_chip(name).name
                except InputError:
                    found = None
            self._systems[name] = found if found in self._chips else None
        return self._systems[name]


def _run(row: Mapping[str, str], matcher: _Matcher, isl: int, osl: int) -> dict[str, Any]:
    """Returns one run's numbers by the names of `results`."""
    if not row:
        raise InputError("it has another number of fields than the header")
    if row.get("model") and not matcher.model(row["model"]):
        raise _Skip("model")
    if (_number(row, "isl"), _number(row, "osl")) != (isl, osl):
        raise _Skip("lengths")
    chip = matcher.chip(row["system"])
    if chip is None:
        raise _Skip("chip")
    concurrency, chips = _number(row, "concurrency"), _number(row, "gpus")
    ttft = _number(row, "ttft_ms") * MILLISECOND
    tpot = _number(row, "tpot_ms") * MILLISECOND
    e2e = ttft + max(osl - 1, 0) * tpot
    requests = concurrency / e2e
    return {
        "chip": chip,
        "precision": row.get("precision", ""),
        "mode": row.get("mode", ""),
        "concurrency": concurrency,
        "chips": chips,
        "ttft_s": ttft,
        "tpot_s": tpot,
        "e2e_s": e2e,
        "tokens_per_second_user": 1.0 / tpot,
        "tokens_per_second_user_e2e": osl / e2e,
        "requests_per_second": requests,
        "output_tokens_per_second": requests * osl,
        "output_tokens_per_second_chip": requests * osl / chips,
        "total_tokens_per_second_chip": requests * (isl + osl) / chips,
    }


def overlay(runs: str | os.PathLike[str], frontier: xr.Dataset) -> xr.Dataset:
    """Returns the measured runs of a CSV file that a frontier's axes can show, along `run`.

    A row counts where its model has the frontier's architecture, its lengths are the frontier's
    and its chip is among those asked for; others are skipped and counted (`skipped_model`,
    `skipped_lengths`, `skipped_chip`). Rows that cannot be read are `rejected`, and named in
    `rejected_rows` with their line.

    Throughput follows from the closed loop: concurrency·OSL/(TTFT + (OSL−1)·TPOT), over all GPUs.

    Args:
        runs: a CSV file with columns system, isl, osl, concurrency, gpus, ttft_ms and tpot_ms; or
            chip for system, and chips, gpus_total_derived or tp_size for gpus. Where it has them,
            model (or model_path), precision and mode are read too.
        frontier: as `frontier` returns it.
    """
    matcher = _Matcher(frontier)
    isl, osl = int(frontier.attrs["isl"]), int(frontier.attrs["osl"])
    skipped = {"model": 0, "lengths": 0, "chip": 0}
    found: list[dict[str, Any]] = []
    lines: list[int] = []
    rejected: list[str] = []
    for line, row in _read(runs):
        try:
            found.append(_run(row, matcher, isl, osl))
            lines.append(line)
        except _Skip as skip:
            skipped[str(skip)] += 1
        except InputError as error:
            rejected.append(f"line {line}: {error}")
    variables: dict[str, Any] = {}
    for name in _VALUES:
        quantity = results.BY_NAME[name]
        attrs = {"units": quantity.unit, "long_name": quantity.long_name}
        variables[name] = ("run", np.asarray([row[name] for row in found], dtype=float), attrs)
    attrs = {"units": "request", "long_name": "concurrent requests of the deployment"}
    variables["concurrency"] = ("run", [float(row["concurrency"]) for row in found], attrs)
    texts = {"chip": results.TEXTS["chip"], "precision": results.TEXTS["precision"]}
    texts["mode"] = "whether prefill and decode share chips (agg) or not (disagg)"
    coords: dict[str, Any] = {
        name: ("run", np.asarray([row[name] for row in found], dtype=str), _text(meaning))
        for name, meaning in texts.items()
    }
    coords["run"] = ("run", np.asarray(lines, dtype=np.int64), _text("line in the file"))
    more = [f"and {len(rejected) - _LISTED} more"] if len(rejected) > _LISTED else []
    return xr.Dataset(variables, coords).assign_attrs(
        {f"skipped_{what}": count for what, count in skipped.items()}
        | {"rejected": len(rejected), "rejected_rows": "; ".join(rejected[:_LISTED] + more)}
        | {"runs": catalog.label(runs), "model": frontier.attrs["model"], "isl": isl, "osl": osl}
        | results.stamp()
    )


def _text(meaning: str) -> dict[str, str]:
    return {"units": "1", "long_name": meaning}
