"""Tables of what people have measured, or want to know: CSV, Parquet or frames, read row by row.

A row that is wrong never stops the others: it keeps its place and gets a status of one line.
Columns are found by any of their usual names; texts are resolved once per distinct value, numbers
column by column.
"""

import csv
import dataclasses
import io
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from perfmodel import catalog
from perfmodel.errors import InputError, nearest, shorten

OK = "ok"
"""The status of a row that was predicted."""

_LIMIT = 512 * 2**20
_MOST = 1e12

TableLike = str | os.PathLike[str] | pd.DataFrame


@dataclasses.dataclass(frozen=True)
class Column:
    """A column that a table may have: the names it goes by, and what is in it.

    Fields: `names`; `meaning`; whether it holds a `number`, a `whole` one (0 in one that is not
    required says that it does not apply); whether it is `required`; the `low` end of its range;
    the name of a column that may stand `instead` of a required one, where one of both is enough.
    """

    names: tuple[str, ...]
    meaning: str
    number: bool = True
    whole: bool = False
    required: bool = False
    low: float = 1e-6
    instead: str = ""


def text(meaning: str, *names: str, required: bool = False) -> Column:
    """Returns a column of words."""
    return Column(names, meaning, number=False, required=required)


def count(meaning: str, *names: str, required: bool = False, instead: str = "") -> Column:
    """Returns a column of whole numbers."""
    return Column(names, meaning, whole=True, required=required, instead=instead)


@dataclasses.dataclass(eq=False)
class Table:
    """A table as read: every cell, the line of each row, and the columns that were recognised.

    Fields: `frame`, the columns as given; `lines`, where each row ends in its file (or its place,
    from 1, in a frame); `fields`, what was looked for, and `given`, the column behind each name
    that was found; `status`, what is known to be wrong with a row, else "".
    """

    frame: pd.DataFrame
    lines: np.ndarray
    fields: Mapping[str, Column]
    given: Mapping[str, str]
    status: np.ndarray


def read(source: TableLike, fields: Mapping[str, Column]) -> Table:
    """Returns the table of a CSV or Parquet file, or of a frame.

    Raises InputError for a file that cannot be read, and where a required column is missing.
    """
    parquet = not isinstance(source, pd.DataFrame) and os.fspath(source).endswith(".parquet")
    where = "table" if isinstance(source, pd.DataFrame) else catalog.label(source)
    if parquet:
        source = _read_parquet(source, where)
    if isinstance(source, pd.DataFrame):
        frame = source.reset_index(drop=True)
        header = [str(name).strip() for name in frame.columns]
        status = np.full(len(frame), "", dtype=object)
        lines = np.arange(1, len(frame) + 1)
    else:
        header, frame, lines, status = _read_csv(source, where)
    if len(set(header)) != len(header):
        raise InputError(f"{where}: two columns have the same name")
    frame = frame.set_axis(header, axis=1)
    given: dict[str, str] = {}
    folded = {name.lower(): name for name in header}
    for name, column in fields.items():
        found = next((folded[known] for known in column.names if known in folded), None)
        if found is not None:
            given[name] = found
    for name, column in fields.items():
        if column.required and name not in given and column.instead not in given:
            known = " or ".join(column.names[:3])
            raise InputError(f"{where}: no column {known}{nearest(name, header)}")
    return Table(frame, lines, fields, given, status)


def _read_parquet(path: Any, where: str) -> pd.DataFrame:
    try:
        return pd.read_parquet(path)
    except FileNotFoundError:
        raise InputError(f"no such file: {shorten(path, 120)}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{where}: cannot be read ({shorten(error)})") from None


def _read_csv(path: Any, where: str) -> tuple[list[str], pd.DataFrame, np.ndarray, np.ndarray]:
    reader = csv.reader(io.StringIO(catalog.read_text(path, _LIMIT), newline=""))
    rows: list[list[str]] = []
    lines: list[int] = []
    try:
        header = [name.strip() for name in next(reader, [])]
        for row in reader:
            if row:
                rows.append(row)
                lines.append(reader.line_num)
    except csv.Error as error:
        line = reader.line_num + 1
        raise InputError(f"{where}: line {line}: not valid CSV: {shorten(error)}") from None
    if not header:
        raise InputError(f"{where}: empty; a header with column names is needed")
    status = np.full(len(rows), "", dtype=object)
    width = len(header)
    for place, row in enumerate(rows):
        if len(row) != width:
            status[place] = f"it has {len(row)} fields and the header {width}"
            rows[place] = (row + [""] * width)[:width]
    return header, pd.DataFrame(rows, columns=header, dtype=object), np.asarray(lines, int), status


class Reader:
    """Fills in statuses while columns are taken one by one; the first fault of a row stays."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.status = table.status.copy()

    def fault(self, rows: np.ndarray, message: "str | Callable[[int], str]") -> None:
        """Marks rows (a mask) that have no fault yet."""
        for row in np.flatnonzero(rows & (self.status == "")):
            self.status[row] = message if isinstance(message, str) else message(int(row))

    def texts(self, name: str) -> np.ndarray:
        """Returns a column as stripped text, "" where missing."""
        given = self.table.given.get(name)
        if given is None:
            return np.full(len(self.status), "", dtype=object)
        column = self.table.frame[given]
        codes, values = pd.factorize(column)
        # A missing value has code −1, and so takes the last of these.
        words = [*(str(value).strip() for value in values), ""]
        return np.asarray(words, dtype=object)[codes]

    def numbers(self, name: str, default: float | None = None) -> np.ndarray:
        """Returns a column of positive numbers; faulty cells become the default, or 1."""
        fill = 1.0 if default is None else default
        column, given = self.table.fields[name], self.table.given.get(name)
        if given is None:
            return np.full(len(self.status), fill)
        cells = self.table.frame[given]
        values = np.array(pd.to_numeric(cells, errors="coerce"), dtype=float)
        odd = ~np.isfinite(values)
        if odd.any():
            words = self.texts(name)
            empty = odd & ((words == "") | (words == "nan"))
            if column.required and not column.instead:
                self.fault(empty, f"missing {name}")
            self.fault(
                odd & ~empty,
                lambda row: f"{name} is not a number: '{shorten(words[row], 30)}'",
            )
            values[odd] = fill
        low = 1.0 if column.whole else column.low
        # Degrees that do not apply are written as 0 in public tables.
        zero = (values == 0.0) & ~odd if not column.required and column.whole else odd & False
        values[zero] = fill
        wrong = ~odd & ~zero & ~((values >= low) & (values <= _MOST))
        wrong |= ~odd & column.whole & (values != np.floor(values))
        words_ = "a whole number from 1" if column.whole else f"a number from {low:g}"
        self.fault(wrong, lambda row: f"{name} must be {words_}, not {values[row]:g}")
        return np.where(wrong, fill, values)

    def entries(
        self, keys: list[np.ndarray], find: Callable[..., Any]
    ) -> tuple[list[Any], np.ndarray]:
        """Returns the distinct entries that `find` makes of columns of keys, and places by row.

        Where it fails the row's status is its message, and its place 0.
        """
        codes = np.zeros(len(self.status), np.int64)
        for key in keys:
            own, values = pd.factorize(key)
            # Numbered anew each time: products of many columns would overflow.
            codes = np.unique(codes * len(values) + own, return_inverse=True)[1]
        # The first row of each combination stands for it.
        _, first, codes = np.unique(codes, return_index=True, return_inverse=True)
        distinct = [tuple(key[row] for key in keys) for row in first]
        found: dict[Any, int] = {}
        entries: list[Any] = []
        places = np.zeros(len(distinct), int)
        for code, key in enumerate(distinct):
            try:
                entry = find(*key)
            except InputError as error:
                self.fault(codes == code, str(error))
                continue
            if id(entry) not in found:
                found[id(entry)] = len(entries)
                entries.append(entry)
            places[code] = found[id(entry)]
        return entries, places[codes] if len(codes) else np.zeros(0, int)


def check_free(table: Table, names: tuple[str, ...]) -> None:
    """Raises where a table already has a column that predictions would add."""
    taken = next((name for name in names if name in table.frame.columns), None)
    if taken is not None:
        raise InputError(f"column '{taken}' is one that predictions add; rename it")


@dataclasses.dataclass(frozen=True, eq=False)
class Predictions:
    """A table with what is predicted of its rows.

    Fields: `frame`, the columns given, unchanged, then predictions, errors and `status`; `lines`,
    the line of each row; `labels`, by what rows are told apart in a summary; `errors`, the columns
    of signed relative errors, none where nothing was measured; `notes` on what was taken for rows.
    """

    frame: pd.DataFrame
    lines: np.ndarray
    labels: Mapping[str, np.ndarray]
    errors: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def faults(self) -> dict[str, list[int]]:
        """Returns the lines of rows that were not predicted, by their status."""
        status = self.frame["status"].to_numpy()
        found: dict[str, list[int]] = {}
        for row in np.flatnonzero(status != OK):
            found.setdefault(str(status[row]), []).append(int(self.lines[row]))
        return found

    def told(self) -> dict[str, Any]:
        """Returns what is worth telling of a table, as plain values: counts, errors, faults."""
        faults = [{"status": why, "lines": lines} for why, lines in self.faults().items()]
        count_ = len(self.frame)
        return {
            "rows": count_,
            "predicted": count_ - sum(len(fault["lines"]) for fault in faults),
            "errors_percent": self.summary().to_dict("records"),
            "not_predicted": faults,
            **({"notes": list(self.notes)} if self.notes else {}),
        }

    def summary(self) -> pd.DataFrame:
        """Returns the errors of all rows, and by each label.

        Columns: `by` and `name` say which rows; for each error `_rows`, how many have one, and in
        per cent `_median` and `_p90` of |error| and `_bias`, the median signed error. Empty where
        nothing was measured.
        """
        good = (self.frame["status"] == OK).to_numpy()
        groups: list[tuple[str, str, np.ndarray]] = []
        for by, names in self.labels.items():
            groups += [(by, str(name), good & (names == name)) for name in sorted(set(names[good]))]
        groups.append(("all", "", good))
        table: list[dict[str, Any]] = []
        for by, name, rows in groups if self.errors else ():
            line: dict[str, Any] = {"by": by, "name": name}
            for error in self.errors:
                what = error.removesuffix("_error")
                signed = 100.0 * self.frame[error].to_numpy(float)[rows]
                signed = signed[np.isfinite(signed)]
                line[f"{what}_rows"] = len(signed)
                line |= {f"{what}_{k}": v for k, v in statistics(signed).items()}
            table.append(line)
        return pd.DataFrame(table)


def statistics(signed: np.ndarray) -> dict[str, float]:
    """Returns the median and 90th percentile of the sizes of errors, and their median.

    >>> statistics(np.array([-10.0, 20.0, 30.0]))
    {'median': 20.0, 'p90': 28.0, 'bias': 20.0}
    """
    if not len(signed):
        return dict.fromkeys(("median", "p90", "bias"), float("nan"))
    return {
        "median": float(np.median(np.abs(signed))),
        "p90": float(np.quantile(np.abs(signed), 0.9)),
        "bias": float(np.median(signed)),
    }
