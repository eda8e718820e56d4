"""Predictions of tables of measured kernels: matrix products, attention, links and experts.

Every row goes through the function that times the same operator inside a step, on its chip of the
catalogue. What kind of kernel a table holds is told by its columns.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jax import Array

from perfmodel import question
from perfmodel._rows import (
    OK,
    Column,
    Predictions,
    Reader,
    Table,
    TableLike,
    check_free,
    count,
    read,
    text,
)
from perfmodel.chips import Chip
from perfmodel.deployments import find_chip
from perfmodel.errors import InputError, nearest, shorten
from perfmodel.fabric import links
from perfmodel.formats import precision_name, precision_numbers
from perfmodel.machine import (
    Machine,
    Rank,
    context_attention_parts,
    decode_attention_parts,
    matmul_parts,
)
from perfmodel.models.mlp import MixtureOfExperts
from perfmodel.operators import KERNELS, Attention, Matmul
from perfmodel.step import Shard, Step
from perfmodel.timing import usage
from perfmodel.units import MILLISECOND

BLOCK = 8192
"""Rows evaluated in one call; shorter lists are filled up."""

PREDICTED, ERROR = "predicted_latency_ms", "latency_error"

CHIPS = {"a100_sxm": "a100_80gb_sxm", "rtx_pro_6000_server": "rtx_pro_6000"}
"""Names of systems in the public tables that are no aliases of a chip."""

PRODUCTS: Mapping[str, tuple[str, str | None]] = {
    "bfloat16": ("bf16", None), "float16": ("bf16", None), "fp8": ("fp8", None),
    "fp8_block": ("fp8", None), "nvfp4": ("nvfp4", None), "sq": ("int8", "int8"),
    "int8_wo": ("int8", "bf16"), "int4_wo": ("int4", "bf16"), "w4a16_mxfp4": ("mxfp4", "bf16"),
    "w4a8_mxfp4_mxfp8": ("mxfp4", "fp8"),
}  # fmt: skip
"""Formats of weights and activations by the names of the public tables."""

CACHES = {"bfloat16": 2.0, "float16": 2.0, "bf16": 2.0, "fp8": 1.0, "int8": 1.0}
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")

_COMMON: Mapping[str, Column] = {
    "system": text("chip", "system", "chip", "gpu", required=True),
    "framework": text("software measured", "framework"),
    "latency_ms": Column(("latency_ms",), "measured time [ms]"),
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of table: the columns that tell it, those it reads, and its time [s] of a row.

    `resolve` turns the words of a row into numbers, or fails saying why there are none; `kernel`
    are the columns of words that name a row's kernel in a summary.
    """

    name: str
    fields: Mapping[str, Column]
    kernel: tuple[str, ...]
    resolve: Callable[..., tuple[float, ...]]
    seconds: Callable[[Machine, Mapping[str, Array]], Array]


def _whole(*names: str) -> dict[str, Column]:
    return {name: count(name, name, required=True) for name in names}


def _one_hot(kind: str) -> tuple[float, ...]:
    return tuple(float(kind == kernel) for kernel in KERNELS)


def _known(word: str, known: Mapping[str, Any] | tuple[str, ...], what: str) -> str:
    if word not in known:
        raise InputError(f"unknown {what} '{shorten(word, 30)}'{nearest(word, known)}")
    return word


def _formats(chip: Chip, word: str) -> Any:
    names = precision_name(*PRODUCTS[_known(word, PRODUCTS, "format")])
    question.check_kernel(chip, names)
    return names


def _matmul_words(chip: Chip, dtype: str) -> tuple[float, ...]:
    names = _formats(chip, dtype)
    p = precision_numbers(names)
    return (p.weight_bytes, p.activation_bytes, p.column_bytes, *_one_hot(names.kernel))


def _matmul_seconds(machine: Machine, row: Mapping[str, Array]) -> Array:
    weight, activation, column, *kernel = row["words"]
    op = Matmul(
        "matmul", "decode/ffn", rows=row["m"], columns=row["n"], inner=row["k"],
        weight_bytes=weight, activation_bytes=activation, column_bytes=column,
        kernel=jnp.stack(kernel),
    )  # fmt: skip
    return matmul_parts(op, Rank(machine)).total


def _attention_words(chip: Chip, arithmetic: str, cache: str) -> tuple[float, ...]:
    narrow = CACHES[_known(arithmetic or cache, CACHES, "format")] == 1.0
    return CACHES[_known(cache, CACHES, "format of the cache")], float(narrow)


def _attention_seconds(machine: Machine, row: Mapping[str, Array]) -> Array:
    queries, length, window = row["isl"], row["isl"] + row["step"], row["window_size"]
    keys = jnp.where(window > 0, jnp.minimum(window, length), length)
    cache, narrow = row["words"]
    shape: dict[str, Any] = dict(
        sequences=row["batch_size"], heads=row["num_heads"],
        kv_heads=row["num_kv_heads"], qk_width=row["head_dim"], v_width=row["head_dim"],
        kv_bytes=cache, narrow=narrow,
    )  # fmt: skip
    rank = Rank(machine)
    decode = Attention(
        "attention", "decode/attention", "decode", queries=queries, keys=keys, pairs=keys, **shape
    )
    # Pairs under the mask of new tokens after cached ones, in a window where there is one.
    first = jnp.minimum(jnp.maximum(keys - row["step"], 0.0), queries)
    pairs = first * (row["step"] + 0.5 * (first + 1.0)) + (queries - first) * keys
    context = Attention(
        "attention", "prefill/attention", "prefill", queries=queries, keys=keys, pairs=pairs,
        **shape,
    )  # fmt: skip
    single = (queries <= 1.0) & (row["step"] > 0.0)
    return jnp.where(
        single, decode_attention_parts(decode, rank).total,
        context_attention_parts(context, rank).total,
    )  # fmt: skip


def _collective_words(chip: Chip, op: str, library: str) -> tuple[float, ...]:
    general = library.lower() in ("nccl", "oneccl", "rccl")
    return float(OPS.index(_known(op, OPS, "collective"))), float(general)


def _collective_seconds(machine: Machine, row: Mapping[str, Array]) -> Array:
    message, ranks = row["message_bytes"], row["num_gpus"]
    op, general = row["words"]

    def seconds(kind: str) -> Array:
        over = links(kind, ranks, machine.fabric)
        # General libraries have no one-shot kernels, in which every rank reads all others.
        return over._replace(start=over.start + 1e3 * general).seconds(message)

    # A reduce-scatter is the first half of an all-reduce as an all-gather is the second.
    gather = seconds("all_gather")
    listed = jnp.stack([seconds("all_reduce"), gather, gather, seconds("all_to_all")])
    return listed[op.astype(int)]


def _expert_words(chip: Chip, dtype: str, source: str) -> tuple[float, ...]:
    names = _formats(chip, dtype)
    p = precision_numbers(names)
    gates = 1.0 if "nongated" in source else 2.0
    return (gates, p.weight_bytes, p.activation_bytes, p.column_bytes, *_one_hot(names.kernel))


def _expert_seconds(machine: Machine, row: Mapping[str, Array]) -> Array:
    gates, weight, activation, column, *kernel = row["words"]
    plain = precision_numbers(precision_name())
    formats = dataclasses.replace(
        plain, expert_weight_bytes=weight, expert_activation_bytes=activation,
        expert_column_bytes=column, expert_kernel=jnp.stack(kernel),
    )  # fmt: skip
    experts = MixtureOfExperts(
        experts=row["num_experts"], top_k=row["topk"], intermediate=row["inter_size"], gates=gates
    )
    ranks = row["moe_tp_size"] * row["moe_ep_size"]
    shard = Shard(ranks=ranks, expert_ranks=row["moe_ep_size"])
    ops = experts.operators(row["hidden_size"], Step(row["num_tokens"], 1.0), shard, formats)
    rank = Rank(machine)
    # The table's kernels are those of the experts alone: no router, no links.
    own = [usage(op, rank).seconds for op in ops if op.name.startswith("expert_")]
    return jnp.sum(jnp.stack([jnp.asarray(seconds) for seconds in own]))


_OPTIONAL = {
    "step": count("cached tokens [0]", "step"),
    "window_size": count("sliding window, 0 for none [0]", "window_size"),
}

KINDS: tuple[Kind, ...] = (
    Kind("experts",
         {**_whole("num_tokens", "hidden_size", "inter_size", "topk", "num_experts",
                   "moe_tp_size", "moe_ep_size"),
          "dtype": text("format", "moe_dtype", required=True),
          "source": text("kernel", "kernel_source")},
         ("dtype",), _expert_words, _expert_seconds),
    Kind("attention",
         {**_whole("batch_size", "isl", "num_heads", "num_kv_heads", "head_dim"), **_OPTIONAL,
          "dtype": text("arithmetic", "attn_dtype"),
          "cache": text("format of the cache", "kv_cache_dtype", required=True)},
         ("cache",), _attention_words, _attention_seconds),
    Kind("matmul",
         {**_whole("m", "n", "k"), "dtype": text("format", "gemm_dtype", required=True)},
         ("dtype",), _matmul_words, _matmul_seconds),
    Kind("collective",
         {**_whole("message_bytes", "num_gpus"), "op": text("collective", "op", required=True),
          "library": text("library", "library")},
         ("op", "library"), _collective_words, _collective_seconds),
)  # fmt: skip
"""Kinds of tables, in the order they are tried: by the columns that all rows must have."""


def find_kind(columns: list[str]) -> Kind:
    """Returns the kind of kernels that a table with these columns holds."""
    best: tuple[float, Kind, list[str]] | None = None
    for kind in KINDS:
        needed = {n: f for n, f in kind.fields.items() if f.required}
        missing = [f.names[0] for f in needed.values() if not set(f.names) & set(columns)]
        if not missing:
            return kind
        share = len(missing) / len(needed)
        if best is None or share < best[0]:
            best = share, kind, missing
    _, kind, missing = best or (1.0, KINDS[0], [])
    raise InputError(f"no table of kernels: for {kind.name}, columns are missing: "
                     f"{', '.join(missing)}")  # fmt: skip


@functools.cache
def _program(kind: int) -> Any:
    return jax.jit(jax.vmap(KINDS[kind].seconds, in_axes=(None, 0)))


def _find_chip(name: str) -> Chip:
    return find_chip(CHIPS.get(name, name))


def predict_kernels(source: TableLike) -> Predictions:
    """Returns the predictions of every row of a table of kernels.

    Args:
        source: a Parquet or CSV file, or a frame, in the form of the public AIConfigurator tables:
            a `system`, and shapes on one chip (m, n, k and gemm_dtype of products; batch_size, isl,
            step, num_heads, num_kv_heads, head_dim, window_size, kv_cache_dtype of attention;
            op, message_bytes and num_gpus of links; num_tokens, hidden_size, inter_size, topk,
            num_experts, moe_tp_size, moe_ep_size and moe_dtype of experts).
    """
    every = dict(_COMMON)
    first = read(source, every)
    kind = find_kind(list(first.frame.columns))
    table = read(first.frame, {**every, **kind.fields})
    table = Table(table.frame, first.lines, table.fields, table.given, first.status)
    check_free(table, (PREDICTED, ERROR, "status"))
    reader = Reader(table)
    systems = reader.texts("system")
    chips, chip = reader.entries([systems], _find_chip)
    words = {n: reader.texts(n) for n, f in kind.fields.items() if not f.number}
    seconds = np.full(len(reader.status), np.nan)
    if chips:
        resolved, place = reader.entries(
            [chip, *words.values()], lambda which, *named: kind.resolve(chips[which], *named)
        )
        numbers = {
            n: reader.numbers(n, None if f.required else 0.0)
            for n, f in kind.fields.items()
            if f.number
        }
        good = reader.status == ""
        for which in np.unique(chip[good]):
            rows = np.flatnonzero(good & (chip == which))
            columns = {name: value[rows] for name, value in numbers.items()}
            columns["words"] = np.asarray(resolved, float)[place[rows]]
            seconds[rows] = _evaluate(kind, chips[which], columns, len(rows))
    status = np.where(reader.status == "", OK, reader.status)
    added: dict[str, np.ndarray] = {PREDICTED: seconds / MILLISECOND}
    if "latency_ms" in table.given:
        measured = reader.numbers("latency_ms", np.nan)
        added[ERROR] = added[PREDICTED] / measured - 1.0
    frame = pd.concat([table.frame, pd.DataFrame({**added, "status": status})], axis=1)
    named = zip(*(words[name] for name in kind.kernel), strict=True)
    kernels = [" ".join((kind.name, *filter(None, parts))) for parts in named]
    labels = {"system": systems, "kernel": np.asarray(kernels, dtype=object)}
    if "framework" in table.given:
        labels["framework"] = reader.texts("framework")
    return Predictions(frame, table.lines, labels, tuple(name for name in added if name == ERROR))


def _evaluate(kind: Kind, chip: Chip, columns: Mapping[str, np.ndarray], count_: int) -> np.ndarray:
    real = question.real()
    machine = question.numbers(chip.machine)
    program = _program(KINDS.index(kind))
    found = np.empty(count_)
    for start in range(0, count_, BLOCK):
        places = np.minimum(np.arange(start, start + BLOCK), count_ - 1)
        row = {name: value[places].astype(real) for name, value in columns.items()}
        stop = min(start + BLOCK, count_)
        found[start:stop] = np.asarray(program(machine, row))[: stop - start]
    return found
