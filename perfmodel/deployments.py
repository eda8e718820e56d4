"""Deployments in a table, one a row: what each is, as arrays, or why it cannot be read.

Read by `perfmodel._rows`; `FIELDS` lists the columns that are looked at.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from perfmodel import _layouts, catalog, engines, question
from perfmodel._rows import Column, Reader, Table, TableLike, count, read, text
from perfmodel.chips import Chip, load_chip
from perfmodel.engines import EngineEntry
from perfmodel.errors import InputError, shorten
from perfmodel.formats import PrecisionName, format_name, precision_name
from perfmodel.models import catalogue as networks
from perfmodel.models.catalogue import ModelEntry

FIELDS: Mapping[str, Column] = {
    "model": text("network, by any name of the catalogue", "model", "model_path", "model_name",
                   "model_id", required=True),
    "chip": text("chip, by any name of the catalogue", "chip", "system", "gpu", "hardware",
                  "device", "accelerator", required=True),
    "tp": count("tensor-parallel degree", "tp", "tp_size", "tensor_parallel_size",
                 "tensor_parallel", required=True, instead="decode_tp"),
    "concurrency": count("concurrent requests of the deployment", "concurrency", "conc",
                          "max_concurrency", "concurrent_requests", required=True),
    "isl": count("prompt tokens, nominal", "isl", "input_len", "input_length", "input_tokens",
                  "prompt_tokens", "random_input_len", required=True),
    "osl": count("output tokens, nominal", "osl", "output_len", "output_length",
                  "output_tokens", "random_output_len", required=True),
    "pp": count("pipeline stages [1]", "pp", "pp_size", "pipeline_parallel_size"),
    "ep": count("expert-parallel degree [1]", "ep", "ep_size", "moe_ep_size",
                 "expert_parallel_size"),
    "attention_dp": count("attention data-parallel degree [1]", "attention_dp",
                           "attention_dp_size", "dp", "dp_size", "data_parallel_size"),
    "gpus": count("chips of the deployment [those of one replica]", "gpus", "num_gpus",
                   "gpus_total_derived"),
    "engine": text("engine profile [neutral]", "engine", "backend", "framework"),
    "precision": text("number format of weights, or weights/activations/kv [the model's own]",
                       "precision", "weights", "quantization"),
    "products": text("format of matrix products, before `precision`", "gemm_quant_mode"),
    "kv": text("number format of the KV cache", "kv", "kv_cache_dtype"),
    "mode": text("agg, or disagg where prompts have workers of their own [disagg where a decode "
                  "degree is given]", "mode"),
    **_layouts.FIELDS,
    "chunk": count("most prompt tokens in a step [the engine's]", "chunk",
                    "max_num_batched_tokens", "chunked_prefill_size", "max_num_tokens"),
    "harness": text("who measured; sets `length_ratio` and `burst`", "harness", "source_kind",
                    "origin"),
    "length_ratio": Column(("length_ratio",), "mean length over nominal length [1]"),
    "burst": Column(("burst",), "share of requests that arrive at once, at the start [0]", low=0.0),
    "in_step": Column(("in_step",), "1 where requests are of one length and start together [0]",
                      low=0.0),
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
    # The same script by others; inferred: end to end = TTFT + (0.9 · OSL − 1) · TPOT in every row,
    # and rates are 5 % below those of the loop, as a run of ten rounds has them.
    "atom-mesh": Harness(0.9, 0.1),
}
"""Harnesses by the beginning of their name, in any case."""


@dataclasses.dataclass(eq=False)
class Deployments:
    """Rows of a table as numbers and entries; rows with a status are filled with what is harmless.

    Fields: `status`, "" where a row is understood; `models`, `chips`, `engines`, `precisions`:
    distinct entries, and `model`, `chip`, `engine`, `precision` their places by row; the rest is
    columns of numbers by name: chips and stages of a replica, expert_ranks, attention_dp, replicas,
    batch (of a replica), isl and osl (mean tokens), chunk, burst, in_step, ttft_ms and tpot_ms (NaN
    where not measured). Where `split`, these are of the pool that decodes, and `prefill_chips`,
    `_stages`, `_expert_ranks`, `_attention_dp` and `_replicas` of the other.
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
    split: np.ndarray
    numbers: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.status)


_QUANTISED = re.compile(r"[-_](fp8|nvfp4|fp4|mxfp4|int4|awq|gptq)$", re.IGNORECASE)
_PRODUCTS = {
    "fp8_block": ("fp8", None), "fp8_ootb": ("fp8", None), "fp4": ("nvfp4", None),
    "int8_wo": ("int8", "bf16"), "int4_wo": ("int4", "bf16"), "sq": ("int8", "int8"),
    "w4a16_mxfp4": ("mxfp4", "bf16"),
}  # fmt: skip
"""Formats of weights and activations by the names that tables use and `formats` does not."""

_ROUTERS = ("dynamo-", "mori-")
"""What public tables write before the name of the engine, where requests pass through it first."""

_FOUR_BITS = ("mxfp4", "nvfp4", "int4", "int4g32")


def _is_path(name: str) -> bool:
    return name.startswith((".", "~", "/", "\\")) or name.endswith((".json", ".toml"))


def find_model(name: str, own: Mapping[str, ModelEntry] | None = None) -> ModelEntry:
    """Returns a network by name: one of its `own`, or of the catalogue, where a trailing number
    format is not part of the name.

    Files are not opened: a table is data.
    """
    if not name:
        raise InputError("missing model")
    if own and name in own:
        return own[name]
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
    tail = (ending.group(1) if ending else "").lower()
    word = (products or precision or tail).lower()
    if word == "fp4" and tail in _FOUR_BITS:
        word = tail
    cache, own = kv or None, model.precision
    weights, activations = _PRODUCTS.get(word, (word, None))
    # Where a file has its experts alone in 4 bits, a table's "fp4" says no more than that, and of
    # another kind of 4 bits, that its experts alone are.
    routed = own.experts[0] if own.experts is not None and own.experts[0] in _FOUR_BITS else ""
    alone = bool(routed) and weights in _FOUR_BITS
    if not word or (alone and weights.startswith("int") == routed.startswith("int")):
        names = dataclasses.replace(own, kv=format_name(cache or own.kv))
    elif alone:
        # Chips without 4-bit arithmetic expand 4-bit weights on the way in.
        narrow = None if "fp4" in chip.supported else "bf16"
        names = precision_name(own.weights, own.activations, cache, weights, narrow)
    elif word.count("/") == 2:
        names = question.parse_precision(word)
    else:
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
    # "dynamo-trt", "mori-sglang": what routes requests, then what serves them.
    served = name.rsplit("-", 1)[-1] if name.lower().startswith(_ROUTERS) else name
    return engines.load_engine(served or "neutral")


def _by_name(models: Sequence[ModelEntry]) -> dict[str, ModelEntry]:
    found: dict[str, ModelEntry] = {}
    for entry in models:
        if found.setdefault(entry.name, entry).digest != entry.digest:
            raise InputError(f"models: two different networks are named {shorten(entry.name)!r}")
    return found


def understand(
    source: TableLike, engine: EngineEntry | None = None, own: Sequence[ModelEntry] = ()
) -> Deployments:
    """Returns the rows of a table as numbers and entries.

    Args:
        source: a CSV or Parquet file, or a frame.
        engine: takes the place of every row's own.
        own: networks that rows may name beside the catalogue's.
    """
    table = read(source, FIELDS)
    reader = Reader(table)
    mode = np.char.lower(reader.texts("mode").astype(str))
    split = (mode == "disagg") | ((mode == "") & (reader.texts("decode_tp") != ""))
    reader.fault(
        ~split & (mode != "") & (mode != "agg"),
        lambda row: f"unknown mode '{shorten(mode[row], 30)}' (known: agg, disagg)",
    )
    names = {name: reader.texts(name) for name in FIELDS if not FIELDS[name].number}
    given = _by_name(own)
    models, model = reader.entries([names["model"]], lambda name: find_model(name, given))
    chips, chip = reader.entries([names["chip"]], find_chip)
    if engine is None:
        profiles, profile = reader.entries([names["engine"]], find_engine)
    else:
        profiles, profile = [engine], np.zeros(len(reader.status), int)
    precisions, precision = _precisions(reader, names, models, model, chips, chip)
    numbers = _layouts.plans(reader, split, models, model, profiles, profile)
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
        model, chip, profile, precision, split, numbers,
    )  # fmt: skip


def _harness(name: str) -> Harness:
    name = name.lower()
    return next((h for start, h in HARNESSES.items() if name.startswith(start)), Harness())


def _precisions(
    reader: Reader,
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


def _check_lengths(
    reader: Reader,
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
        lambda row: (
            f"isl + osl: {asked[row]:,.0f} tokens exceed the longest context of "
            f"{models[model[row]].name}, {longest[row]:,.0f}"
        ),
    )
