"""Deployments in a table, one a row: what each is, as arrays for programs, or why it cannot be read.

A row that is wrong never stops the others: it keeps its place and gets a status of one line.
Columns are found by any of their usual names (`FIELDS`); texts are resolved once per distinct
value, numbers column by column.
"""

import csv
import dataclasses
import io
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from perfmodel import catalog, engines, question
from perfmodel.chips import Chip, load_chip
from perfmodel.engines import EngineEntry
from perfmodel.errors import InputError, nearest, shorten
from perfmodel.formats import PrecisionName, precision_name
from perfmodel.models import catalogue as networks
from perfmodel.models.catalogue import ModelEntry
from perfmodel.models.mlp import MixtureOfExperts

OK = "ok"
"""The status of a row that was predicted."""

_LIMIT = 512 * 2**20
_LEAST, _MOST = 1e-6, 1e9


@dataclasses.dataclass(frozen=True)
class Column:
    """A column that a table may have: the names it goes by, and what is in it."""

    names: tuple[str, ...]
    meaning: str
    number: bool = True
    whole: bool = False
    required: bool = False


def _text(meaning: str, *names: str, required: bool = False) -> Column:
    return Column(names, meaning, number=False, required=required)


def _count(meaning: str, *names: str, required: bool = False) -> Column:
    return Column(names, meaning, whole=True, required=required)


FIELDS: Mapping[str, Column] = {
    "model": _text("network, by any name of the catalogue", "model", "model_path", "model_name",
                   "model_id", required=True),
    "chip": _text("chip, by any name of the catalogue", "chip", "system", "gpu", "hardware",
                  "device", "accelerator", required=True),
    "tp": _count("tensor-parallel degree", "tp", "tp_size", "tensor_parallel_size",
                 "tensor_parallel", required=True),
    "concurrency": _count("concurrent requests of the deployment", "concurrency", "conc",
                          "max_concurrency", "concurrent_requests", required=True),
    "isl": _count("prompt tokens, nominal", "isl", "input_len", "input_length", "input_tokens",
                  "prompt_tokens", "random_input_len", required=True),
    "osl": _count("output tokens, nominal", "osl", "output_len", "output_length",
                  "output_tokens", "random_output_len", required=True),
    "pp": _count("pipeline stages [1]", "pp", "pp_size", "pipeline_parallel_size"),
    "ep": _count("expert-parallel degree [1]", "ep", "ep_size", "moe_ep_size",
                 "expert_parallel_size"),
    "attention_dp": _count("attention data-parallel degree [1]", "attention_dp",
                           "attention_dp_size", "dp", "dp_size", "data_parallel_size"),
    "gpus": _count("chips of the deployment [those of one replica]", "gpus", "num_gpus",
                   "gpus_total_derived"),
    "engine": _text("engine profile [neutral]", "engine", "backend", "framework"),
    "precision": _text("number format of weights, or weights/activations/kv [the model's own]",
                       "precision", "weights", "quantization"),
    "products": _text("format of matrix products, before `precision`", "gemm_quant_mode"),
    "kv": _text("number format of the KV cache", "kv", "kv_cache_dtype"),
    "mode": _text("agg, or disagg where prompts have workers of their own [agg]", "mode"),
    "prefill_workers": _count("prefill workers, where disaggregated", "prefill_workers",
                              "prefill_num_workers"),
    "decode_workers": _count("decode workers, where disaggregated", "decode_workers",
                             "decode_num_workers"),
    "chunk": _count("most prompt tokens in a step [the engine's]", "chunk",
                    "max_num_batched_tokens", "chunked_prefill_size", "max_num_tokens"),
    "harness": _text("who measured; sets `length_ratio` and `burst`", "harness", "source_kind"),
    "length_ratio": Column(("length_ratio",), "mean length over nominal length [1]"),
    "burst": Column(("burst",), "share of requests that arrive at once, at the start [0]"),
    "in_step": Column(("in_step",), "1 where requests are of one length and start together [0]"),
    "ttft_ms": Column(("ttft_ms", "mean_ttft_ms", "ttft"), "measured time to first token [ms]"),
    "tpot_ms": Column(("tpot_ms", "mean_tpot_ms", "tpot"),
                      "measured time per output token [ms]"),
}  # fmt: skip
"""Every column that is looked at; what is optional says in brackets what it is taken for."""


@dataclasses.dataclass(frozen=True)
class Harness:
    """How a public benchmark loads a server: what its tables do not say.

    Fields: `length_ratio`, mean length over the nominal one; `burst`, the share of all requests
    that arrive together at the start; `in_step`, 1 where all are of one length (`perfmodel.plan.
    Load`); `budget`, most prompt tokens in a step where it was set.
    """

    length_ratio: float = 1.0
    burst: float = 0.0
    in_step: float = 0.0
    budget: float | None = None


HARNESSES: Mapping[str, Harness] = {
    # Random lengths from 0.8 to 1.0 of the nominal one; ten requests per concurrent one, all
    # sent at once, and means over all of them. Source: InferenceX benchmark scripts
    # (random-range-ratio 0.8, num-prompts = 10 × concurrency).
    "inferencex": Harness(0.9, 0.1),
    # Fixed lengths; that the start is in the mean is inferred from TTFT (docs).
    "nvidia_gap_analysis": Harness(1.0, 0.1, 1.0, 2048.0),
}
"""Harnesses by the beginning of their name."""


@dataclasses.dataclass(eq=False)
class Table:
    """A table as read: every cell, the line of each row, and the columns that were recognised.

    Fields: `frame`, the columns as given; `lines`, where each row ends in its file (or its place,
    from 1, in a frame); `given`, the column behind each name of `FIELDS`; `status`, what is known
    to be wrong with a row, else "".
    """

    frame: pd.DataFrame
    lines: np.ndarray
    given: Mapping[str, str]
    status: np.ndarray


def read(runs: "str | os.PathLike[str] | pd.DataFrame") -> Table:
    """Returns the table of a CSV file, or of a frame.

    Raises InputError for a file that cannot be read, and where a required column is missing.
    """
    if isinstance(runs, pd.DataFrame):
        frame, where = runs.reset_index(drop=True), "runs"
        header = [str(name).strip() for name in frame.columns]
        status = np.full(len(frame), "", dtype=object)
        lines = np.arange(1, len(frame) + 1)
    else:
        where = catalog.label(runs)
        header, frame, lines, status = _read_csv(runs, where)
    if len(set(header)) != len(header):
        raise InputError(f"{where}: two columns have the same name")
    frame = frame.set_axis(header, axis=1)
    given: dict[str, str] = {}
    folded = {name.lower(): name for name in header}
    for name, column in FIELDS.items():
        found = next((folded[known] for known in column.names if known in folded), None)
        if found is not None:
            given[name] = found
        elif column.required:
            known = " or ".join(column.names[:3])
            raise InputError(f"{where}: no column {known}{nearest(name, header)}")
    return Table(frame, lines, given, status)


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


@dataclasses.dataclass(eq=False)
class Deployments:
    """Rows of a table as numbers and entries; rows with a status are filled with what is harmless.

    Fields: `status`, "" where a row is understood; `models`, `chips`, `engines`, `precisions`:
    distinct entries, and `model`, `chip`, `engine`, `precision` their places by row; the rest is
    columns of numbers by name: chips and stages of a replica, expert_ranks, attention_dp, replicas,
    batch (of a replica), isl and osl (mean tokens), chunk, burst, in_step, ttft_ms and tpot_ms (NaN
    where not measured).
    """

    table: Table
    status: np.ndarray
    models: list[ModelEntry]
    chips: list[Chip]
    engines: list[EngineEntry]
    precisions: list[PrecisionName]
    model: np.ndarray
    chip: np.ndarray
    engine: np.ndarray
    precision: np.ndarray
    numbers: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.status)


class _Reader:
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
        column, given = FIELDS[name], self.table.given.get(name)
        if given is None:
            return np.full(len(self.status), fill)
        cells = self.table.frame[given]
        values = pd.to_numeric(cells, errors="coerce").to_numpy(float, na_value=np.nan).copy()
        odd = ~np.isfinite(values)
        if odd.any():
            words = self.texts(name)
            empty = odd & ((words == "") | (words == "nan"))
            message = "no concurrency" if name == "concurrency" else f"missing {name}"
            if column.required:
                self.fault(empty, message)
            self.fault(
                odd & ~empty,
                lambda row: f"{name} is not a number: '{shorten(words[row], 30)}'",
            )
            values[odd] = fill
        low = 1.0 if column.whole else _LEAST
        # Degrees that do not apply are written as 0 in public tables.
        zero = (values == 0.0) & ~odd if not column.required and column.whole else odd & False
        values[zero] = fill
        wrong = ~odd & ~zero & ~((values >= low) & (values <= _MOST))
        wrong |= ~odd & column.whole & (values != np.floor(values))
        words_ = "a whole number from 1" if column.whole else f"a number from {_LEAST:g}"
        self.fault(wrong, lambda row: f"{name} must be {words_}, not {values[row]:g}")
        return np.where(wrong, fill, values)

    def entries(
        self, keys: list[np.ndarray], find: Callable[..., Any]
    ) -> tuple[list[Any], np.ndarray]:
        """Returns the distinct entries that `find` makes of columns of keys, and places by row.

        Where it fails the row's status is its message, and its place 0.
        """
        codes, distinct = pd.MultiIndex.from_arrays(keys).factorize()
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


_QUANTISED = re.compile(r"[-_](fp8|nvfp4|fp4|mxfp4|int4|awq|gptq)$", re.IGNORECASE)
_PRODUCTS = {
    "fp8_block": ("fp8", None), "fp8_ootb": ("fp8", None), "fp4": ("nvfp4", None),
    "int8_wo": ("int8", "bf16"), "int4_wo": ("int4", "bf16"), "sq": ("int8", "int8"),
    "w4a16_mxfp4": ("mxfp4", "bf16"),
}  # fmt: skip
"""Formats of weights and activations by the names that tables use and `formats` does not."""


def _is_path(name: str) -> bool:
    return name.startswith((".", "~", "/", "\\")) or name.endswith((".json", ".toml"))


def find_model(name: str) -> ModelEntry:
    """Returns a network of the catalogue by name; a trailing number format is not part of it.

    Files are not opened: a table is data.
    """
    if not name:
        raise InputError("missing model")
    if _is_path(name):
        raise InputError(f"model '{shorten(name)}' is a path; a name of the catalogue is needed")
    known = networks.aliases()
    try:
        return networks.load_model(catalog.resolve(name, known, "model"))
    except InputError:
        base = name.rsplit("/", 1)[-1]
        for short in (base, _QUANTISED.sub("", base)):
            if short != name:
                try:
                    return networks.load_model(catalog.resolve(short, known, "model"))
                except InputError:
                    continue
        raise


def find_chip(name: str) -> Chip:
    """Returns a chip of the catalogue by name."""
    if not name:
        raise InputError("missing chip")
    if _is_path(name) or {"/", "\\"} & set(name):
        raise InputError(f"chip '{shorten(name)}' is a path; a name of the catalogue is needed")
    return load_chip(name)


def find_precision(
    model: ModelEntry, chip: Chip, named: str, products: str, precision: str, kv: str
) -> PrecisionName:
    """Returns the precision that a row's columns, or the end of its model's name, or the model's
    own file ask for; its chip must have the kernel."""
    ending = _QUANTISED.search(named)
    word = (products or precision or (ending.group(1) if ending else "")).lower()
    cache = kv or None
    if not word:
        own = model.precision
        names = precision_name(own.weights, own.activations, cache or own.kv)
    elif word.count("/") == 2:
        names = question.parse_precision(word)
    else:
        weights, activations = _PRODUCTS.get(word, (word, None))
        if weights == "nvfp4" and "fp4" not in chip.supported:
            # Chips without 4-bit arithmetic expand 4-bit weights on the way in.
            activations = "bf16"
        names = precision_name(weights, activations, cache)
    question.check_kernel(chip, names)
    return names


def find_engine(name: str) -> EngineEntry:
    """Returns the engine profile of a row's backend; the neutral one where there is none."""
    if _is_path(name):
        raise InputError(f"engine '{shorten(name)}' is a path; a name is needed")
    return engines.load_engine(name or "neutral")


def understand(table: Table, engine: EngineEntry | None = None) -> Deployments:
    """Returns the rows of a table as numbers and entries.

    Args:
        table: of `read`.
        engine: takes the place of every row's own.
    """
    reader = _Reader(table)
    mode = np.char.lower(reader.texts("mode").astype(str))
    split = mode == "disagg"
    workers = [reader.texts(f"{part}_workers") for part in ("prefill", "decode")]
    counted = (workers[0] != "") & (workers[1] != "")
    reader.fault(split & ~counted, "disaggregated without worker counts")
    reader.fault(split, "disaggregated: not covered")
    reader.fault(
        ~split & (mode != "") & (mode != "agg"),
        lambda row: f"unknown mode '{shorten(mode[row], 30)}' (known: agg, disagg)",
    )
    names = {name: reader.texts(name) for name in FIELDS if not FIELDS[name].number}
    models, model = reader.entries([names["model"]], find_model)
    chips, chip = reader.entries([names["chip"]], find_chip)
    if engine is None:
        profiles, profile = reader.entries([names["engine"]], find_engine)
    else:
        profiles, profile = [engine], np.zeros(len(reader.status), int)
    precisions, precision = _precisions(reader, names, models, model, chips, chip)
    numbers = _plans(reader, models, model, profiles, profile)
    numbers |= {name: reader.numbers(name) for name in ("isl", "osl")}
    numbers |= {name: reader.numbers(name, math.nan) for name in ("ttft_ms", "tpot_ms")}
    _check_lengths(reader, models, model, numbers)
    budgets = np.asarray([float(entry.engine.token_budget) for entry in profiles] or [1.0])
    codes, distinct = pd.factorize(names["harness"])
    usual = [_harness(str(name)) for name in distinct]
    chunk = reader.numbers("chunk", math.nan)
    set_budget = np.asarray([h.budget or math.nan for h in usual] or [math.nan])[codes]
    chunk = np.where(np.isnan(chunk), set_budget, chunk)
    numbers["chunk"] = np.where(np.isnan(chunk), budgets[profile], chunk)
    for name in ("length_ratio", "burst", "in_step"):
        value = reader.numbers(name, math.nan)
        of_harness = np.asarray([getattr(h, name) for h in usual] or [0.0])[codes]
        numbers[name] = np.where(np.isnan(value), of_harness, value)
    for name in ("isl", "osl"):
        numbers[name] = np.maximum(numbers[name] * numbers["length_ratio"], 1.0)
    return Deployments(
        table, reader.status, models, chips, profiles, precisions,
        model, chip, profile, precision, numbers,
    )  # fmt: skip


def _harness(name: str) -> Harness:
    return next((h for start, h in HARNESSES.items() if name.startswith(start)), Harness())


def _precisions(
    reader: _Reader,
    names: Mapping[str, np.ndarray],
    models: list[ModelEntry],
    model: np.ndarray,
    chips: list[Chip],
    chip: np.ndarray,
) -> tuple[list[PrecisionName], np.ndarray]:
    known: dict[PrecisionName, PrecisionName] = {}
    if not models or not chips:
        return [], np.zeros(len(model), int)

    def find(place: int, place_: int, *rest: str) -> PrecisionName:
        found = find_precision(models[place], chips[place_], *rest)
        return known.setdefault(found, found)

    words = [names[key] for key in ("model", "products", "precision", "kv")]
    return reader.entries([model, chip, *words], find)


def has_experts(entry: ModelEntry) -> bool:
    """Returns whether a network routes tokens to experts."""
    return any(isinstance(block.body, MixtureOfExperts) for block in entry.model.blocks)


def _plans(
    reader: _Reader,
    models: list[ModelEntry],
    model: np.ndarray,
    profiles: list[EngineEntry],
    profile: np.ndarray,
) -> dict[str, np.ndarray]:
    """Returns how replicas are laid out, from the degrees that a table has.

    A stage has as many chips as the largest degree; attention groups and experts are cuts of the
    same chips, not more of them. What `gpus` has beyond that are replicas, which share the load;
    where it has fewer, the degrees count chips twice and `gpus` is right (public tables do both).
    """
    tp, pp, ep, dp = (reader.numbers(name) for name in ("tp", "pp", "ep", "attention_dp"))
    concurrency, gpus = reader.numbers("concurrency"), reader.numbers("gpus", math.nan)
    # vLLM counts data-parallel ranks apart from tp; where both are given the public tables show
    # the same values under tp alone, so there they are labels of the same ranks.
    vllm = np.asarray([entry.name == "vllm" for entry in profiles] or [False])[profile]
    dp = np.where(vllm & (tp > 1), 1.0, dp)
    routed = np.asarray([has_experts(entry) for entry in models] or [False])[model]
    ep = np.where(routed, ep, 1.0)
    stage = np.maximum(np.maximum(tp, dp), ep)
    given = np.where(np.isnan(gpus), stage * pp, gpus)
    chips = np.minimum(stage * pp, given)
    replicas = np.maximum(np.floor(given / chips), 1.0)
    width = chips / pp
    dp, ep = np.minimum(dp, width), np.minimum(ep, width)
    reader.fault((dp > 1) & ~routed, "attention data parallelism: covered with experts only")
    reader.fault(given % chips != 0, "gpus is no multiple of the chips of a replica")
    dense = np.where(routed, 1.0, width)

    def check(place: int, degree: float, stages: float) -> None:
        question.check_degrees(models[place], int(degree), int(stages))

    if models:
        # Other cuts of networks with experts are told by the margin of divisibility.
        reader.entries([model, dense, pp], check)
    return {
        "chips": chips, "stages": pp, "expert_ranks": ep, "attention_dp": dp,
        "replicas": replicas, "batch": np.maximum(concurrency / replicas, 1.0),
    }  # fmt: skip


def _check_lengths(
    reader: _Reader,
    models: list[ModelEntry],
    model: np.ndarray,
    numbers: Mapping[str, np.ndarray],
) -> None:
    """Marks requests beyond the longest context of their network."""
    if not models:
        return
    longest = np.asarray([float(entry.model.max_context) for entry in models])[model]
    asked = numbers["isl"] + numbers["osl"]
    reader.fault(
        asked > longest,
        lambda row: f"isl + osl: {asked[row]:,.0f} tokens exceed the longest context of "
        f"{models[model[row]].name}, {longest[row]:,.0f}",
    )
