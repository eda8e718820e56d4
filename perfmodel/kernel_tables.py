"""Predictions of tables of measured kernels: matrix products, attention, links and experts.

Every row goes through the function that times the same operator inside a step, on its chip of the
catalogue, with the constants of the row's framework where they were fitted. What kind of kernel a
table holds is told by its columns.
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
from perfmodel._expert_rows import expert_columns, expert_seconds
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
from perfmodel.chips.sets import kernel_sets
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
from perfmodel.operators import KERNELS, Attention, Matmul
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
    are the columns of words that name a row's kernel in a summary; `sets`, which kinds of fitted
    sets it takes, by the part of `Machine` that they fill, and `detail` the columns that name one;
    `load` makes further columns of numbers and words.
    """

    name: str
    fields: Mapping[str, Column]
    kernel: tuple[str, ...]
    resolve: Callable[..., tuple[float, ...]]
    seconds: Callable[[Machine, Mapping[str, Array]], Array]
    sets: Mapping[str, str]
    detail: tuple[str, ...]
    load: Callable[..., Mapping[str, np.ndarray]] | None = None


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
    return matmul_parts(op, _warm(machine, row, op.memory_bytes())).total


def _warm(machine: Machine, row: Mapping[str, Array], size: Any) -> Rank:
    """Returns a rank whose memory is a cache where a row's operands stay in it between repeats."""
    speed = jnp.where(size < row["cache_bytes"], row["cache_speed"], 1.0)
    memory = machine.memory
    memory = dataclasses.replace(memory, bandwidth=memory.bandwidth * speed)
    return Rank(dataclasses.replace(machine, memory=memory))


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
    warm = _warm(machine, row, decode.memory_bytes())
    return jnp.where(
        single, decode_attention_parts(decode, warm).total,
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


def _expert_words(chip: Chip, dtype: str, source: str, distribution: str) -> tuple[float, ...]:
    names = _formats(chip, dtype)
    p = precision_numbers(names)
    return (p.weight_bytes, p.activation_bytes, p.column_bytes, *_one_hot(names.kernel))


def _expert_load(
    numbers: Mapping[str, np.ndarray], words: Mapping[str, np.ndarray]
) -> Mapping[str, np.ndarray]:
    """Returns the columns of expert layers at the load of their routing; balanced by default."""
    even = numbers["num_experts"] % numbers["moe_ep_size"] == 0
    drawn = np.char.startswith(words["distribution"].astype(str), "power_law_") & even
    routing = np.where(drawn, words["distribution"], "balanced")
    named = {"distribution": routing, "kernel_source": words["source"]}
    return expert_columns(pd.DataFrame({**numbers, **named}))


def _expert_seconds(machine: Machine, row: Mapping[str, Array]) -> Array:
    weight, activation, column, *kernel = row["words"]
    named = {"weight_bytes": weight, "activation_bytes": activation, "column_bytes": column}
    return expert_seconds({**row, **named}, jnp.stack(kernel), machine)


_OPTIONAL = {
    "step": count("cached tokens [0]", "step"),
    "window_size": count("sliding window, 0 for none [0]", "window_size"),
}

KINDS: tuple[Kind, ...] = (
    Kind("experts",
         {**_whole("num_tokens", "hidden_size", "inter_size", "topk", "num_experts",
                   "moe_tp_size", "moe_ep_size"),
          "dtype": text("format", "moe_dtype", required=True),
          "source": text("kernel", "kernel_source"),
          "distribution": text("routing: balanced [default] or power_law_<exponent>",
                               "distribution")},
         ("dtype",), _expert_words, _expert_seconds, {"experts": "experts"},
         ("dtype", "source"), _expert_load),
    Kind("attention",
         {**_whole("batch_size", "isl", "num_heads", "num_kv_heads", "head_dim"), **_OPTIONAL,
          "dtype": text("arithmetic", "attn_dtype"),
          "cache": text("format of the cache", "kv_cache_dtype", required=True)},
         ("cache",), _attention_words, _attention_seconds,
         {"decode": "decode", "context": "context"}, ()),
    Kind("matmul",
         {**_whole("m", "n", "k"), "dtype": text("format", "gemm_dtype", required=True)},
         ("dtype",), _matmul_words, _matmul_seconds, {"matmul": "kernels"}, ("dtype",)),
    Kind("collective",
         {**_whole("message_bytes", "num_gpus"), "op": text("collective", "op", required=True),
          "library": text("library", "library")},
         ("op", "library"), _collective_words, _collective_seconds, {"all_reduce": "fabric"},
         ("library",)),
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
        good = np.flatnonzero(reader.status == "")
        makers = reader.texts("framework") if "framework" in table.given else None
        named = [words[name][good] for name in kind.detail]
        keys = pd.DataFrame({"chip": chip[good], **dict(enumerate(named))})
        keys["maker"] = "" if makers is None else makers[good]
        for _, part in keys.groupby(list(keys.columns), sort=False):
            rows, one = good[part.index.to_numpy()], part.iloc[0]
            columns = {name: value[rows] for name, value in numbers.items()}
            if kind.load is not None:
                columns |= kind.load(columns, {n: value[rows] for n, value in words.items()})
            columns["words"] = np.asarray(resolved, float)[place[rows]]
            detail = " ".join(str(one[i]) for i in range(len(named)))
            machine, how = _fitted(kind, chips[int(one["chip"])], str(one["maker"]), detail)
            for name, neutral in (("cache_bytes", 0.0), ("cache_speed", 1.0)):
                columns[name] = np.full(len(rows), float(how.get(name, neutral)))
            if how.get("narrow_by_cache"):
                # An 8-bit cache is multiplied in 8 bits, whatever the table says.
                columns["words"][:, 1] = columns["words"][:, 0] == 1.0
            seconds[rows] = _evaluate(kind, machine, columns, len(rows))
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


def _fitted(kind: Kind, chip: Chip, maker: str, detail: str) -> tuple[Machine, Mapping[str, float]]:
    """Returns a chip's machine with the constants of an engine's kernels where they were fitted,
    and what is told of how their table was measured."""
    machine, how = chip.machine, {}
    for name, part in kind.sets.items():
        found = kernel_sets().get((chip.name, name, maker, detail))
        if found is None:
            continue
        old = getattr(machine, part)
        fields = {
            field: jnp.full_like(getattr(old, field), value)
            for field, value in found["constants"].items()
        }
        machine = dataclasses.replace(machine, **{part: dataclasses.replace(old, **fields)})
        how |= {key: value for key, value in found.items() if key != "constants"}
    return machine, how


def _evaluate(
    kind: Kind, chip: Machine, columns: Mapping[str, np.ndarray], count_: int
) -> np.ndarray:
    real = question.real()
    machine = question.numbers(chip)
    program = _program(KINDS.index(kind))
    found = np.empty(count_)
    for start in range(0, count_, BLOCK):
        places = np.minimum(np.arange(start, start + BLOCK), count_ - 1)
        row = {name: value[places].astype(real) for name, value in columns.items()}
        stop = min(start + BLOCK, count_)
        found[start:stop] = np.asarray(program(machine, row))[: stop - start]
    return found
