"""Fits the constants of Huawei's Ascend 910B to public measurements of its operators.

    python -m perfmodel.calibrate_ascend OPERATORS --out chips/fits --sample tests/data/ascend.csv

with a folder that holds `ascend910b_gemm.csv` (dtype, m, k, n), `ascend910b_attention.csv` (phase,
batch_size, seq_len, num_heads, num_kv_heads, head_dim) and `ascend910b_moe.csv` (dtype, num_tokens,
hidden_size, inter_size, num_experts, topk, local_experts, model), each with latency_us. Every kind
of operator has three constants of its own, seen by about a third of the shapes:

    products    efficiency, stream, floor     pairs (n, k) on every third diagonal of their grid
    decode      stream, item_time, floor      six of fourteen pairs of query and kv heads
    context     efficiency, item_time, floor  the same six
    experts     efficiency, stream, floor     two of six networks

The tables are of kernels launched one by one. Experts are drawn evenly: of E, a token wants k, so T
tokens touch 1 − (1 − k/E)^T of those that a rank holds, and bring it T·k/E rows each.
"""

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pandas as pd
from jax import Array

from perfmodel import _fitting
from perfmodel._calibration_files import UNITS, Record, toml_value
from perfmodel._expert_rows import expert_operators
from perfmodel._fitting import Prior, Table
from perfmodel._measurements import select
from perfmodel.chips import constants, load_chip
from perfmodel.machine import (
    Machine,
    Rank,
    context_attention_parts,
    decode_attention_parts,
    matmul_parts,
)
from perfmodel.operators import KERNELS, Attention, Matmul

CHIP, GENERATION = "ascend_910b", "dav-c220"

SEEN_HEADS = ((8, 1), (16, 8), (32, 4), (32, 32), (40, 1), (64, 8))
"""(query heads, kv heads) of attention that the fit sees."""

SEEN_NETWORKS = ("deepseek-v2", "qwen3-moe-30b")
"""Networks whose expert layers the fit sees."""

QUANTISE = 5.0
"""Traffic per activation element to quantise it: 16 bits read twice, 8 written [B]. Assumed."""

QUERY_TILE = 128.0
"""Queries in a work item of context attention. Assumed."""

_TILE = 16.0  # rows and columns of what a cube multiplies in a cycle


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of operator: its table and rows, the constants it fits, and those held fixed.

    `group` is what its constants are called by; `kernel`, the kernel kind of products.
    """

    name: str
    table: str
    where: tuple[str, str]
    group: str
    free: Mapping[str, Prior]
    fixed: Mapping[str, float]
    kernel: str = "bf16"

    @property
    def element(self) -> float:
        """Bytes of a weight and of an activation."""
        return 1.0 if self.kernel == "int8" else 2.0


def _kinds() -> tuple[Kind, ...]:
    def products(group: str, file: str) -> tuple[Kind, ...]:
        floor = Prior(1e-5, 1.0)
        free = {"efficiency": Prior(0.7, 0.6, "share"), "stream": Prior(0.8, 0.6, "share")}
        return tuple(
            Kind(
                f"{group} {kernel}", file, ("dtype", dtype), f"{group}.{kernel}",
                {**free, "floor": floor}, {"quantise": QUANTISE if kernel == "int8" else 0.0},
                kernel,
            )
            for kernel, dtype in (("bf16", "bf16"), ("int8", "w8a8_dynamic"))
        )  # fmt: skip

    floor, item = Prior(5e-5, 1.0), Prior(1e-6, 1.5)
    stream, efficiency = Prior(0.7, 0.3, "share"), Prior(0.4, 0.5)
    return (
        *products("kernels", "gemm"),
        Kind("decode", "attention", ("phase", "generation"), "decode",
             {"stream": stream, "item_time": item, "floor": floor}, {}),
        Kind("context", "attention", ("phase", "context"), "context",
             {"efficiency": efficiency, "item_time": item, "floor": floor},
             {"query_tile": QUERY_TILE}),
        *products("experts", "moe"),
    )  # fmt: skip


KINDS = _kinds()


def read(folder: Path, kind: Kind) -> pd.DataFrame:
    """Returns the rows of a kind, with `seen`: whether the fit sees them."""
    rows = pd.read_csv(folder / f"ascend910b_{kind.table}.csv")
    if kind.table == "gemm":
        place = sum(rows[name].rank(method="dense") for name in ("n", "k"))
        seen = place % 3 == 2  # ranks begin at 1
    elif kind.table == "attention":
        pairs = zip(rows["num_heads"], rows["num_kv_heads"], strict=True)
        seen = pd.Series([pair in SEEN_HEADS for pair in pairs], rows.index)
    else:
        seen = rows["model"].isin(SEEN_NETWORKS)
    column, value = kind.where
    rows = rows.assign(seen=seen)
    return select(rows, rows[column] == value)


def columns(kind: Kind, rows: pd.DataFrame) -> dict[str, np.ndarray]:
    """Returns what `seconds` takes of each row."""

    def of(name: str) -> np.ndarray:
        return rows[name].to_numpy(float)

    ones = np.ones(len(rows))
    if kind.table == "gemm":
        return {name: of(name) for name in ("m", "n", "k")}
    if kind.table == "attention":
        return {
            "sequences": of("batch_size"), "length": of("seq_len"), "heads": of("num_heads"),
            "kv_heads": of("num_kv_heads"), "width": of("head_dim"),
        }  # fmt: skip
    tokens, top_k, experts = (of(name) for name in ("num_tokens", "topk", "num_experts"))
    touched = of("local_experts") * (1.0 - (1.0 - top_k / experts) ** tokens)
    return {
        "tokens": tokens, "hidden": of("hidden_size"), "width": of("inter_size"), "top_k": top_k,
        "experts": experts, "gates": 2.0 * ones, "touched": np.maximum(touched, 1.0),
        "local": tokens * top_k * of("local_experts") / experts, "every": 0.0 * ones,
        "weight_bytes": kind.element * ones, "activation_bytes": kind.element * ones,
        "column_bytes": 2.0 * ones,
    }  # fmt: skip


def seconds(kind: Kind, machine: Machine, row: Mapping[str, Array]) -> Array:
    """Returns the time of a row on a machine [s]."""
    rank = Rank(machine)
    kernel = jnp.asarray([float(name == kind.kernel) for name in KERNELS])
    if kind.table == "gemm":
        op = Matmul(
            "matmul", "decode/ffn", rows=row["m"], columns=row["n"], inner=row["k"],
            weight_bytes=kind.element, activation_bytes=kind.element, column_bytes=2.0,
            kernel=kernel,
        )  # fmt: skip
        return matmul_parts(op, rank).total
    if kind.table == "attention":
        length = row["length"]
        decodes = kind.name == "decode"
        op = Attention(
            "attention", f"{kind.name}/attention", phase="decode" if decodes else "prefill",
            sequences=row["sequences"], queries=jnp.ones_like(length) if decodes else length,
            keys=length, pairs=length if decodes else 0.5 * length * (length + 1.0),
            heads=row["heads"], kv_heads=row["kv_heads"], qk_width=row["width"],
            v_width=row["width"], kv_bytes=2.0, narrow=0.0,
        )  # fmt: skip
        return (decode_attention_parts if decodes else context_attention_parts)(op, rank).total
    # The table has the grouped products alone, without choice, activation and sum.
    found = expert_operators(row, kernel)
    parts = [matmul_parts(op, rank).total for op in found if isinstance(op, Matmul)]
    return sum(parts, start=jnp.asarray(0.0))


def _placed(kind: Kind, machine: Machine, values: Mapping[str, Any]) -> Machine:
    """Returns a machine with a kind's constants; what one query head a kv head takes is shared."""
    part = kind.group.split(".")[0]
    old: Any = getattr(machine, part)
    values = dict(values)
    if kind.name == "decode":
        values["single_item_time"] = values["item_time"]
    found = {name: jnp.ones_like(getattr(old, name)) * value for name, value in values.items()}
    return dataclasses.replace(machine, **{part: dataclasses.replace(old, **found)})


def bare_machine() -> Machine:
    """Returns the 910B of its datasheet, every constant but its tile neutral."""
    from perfmodel.chips import ascend

    fields, _ = load_chip(CHIP).inputs()
    tile = {"compute.tile_rows": _TILE, "compute.tile_columns": _TILE}
    return ascend.machine(fields, constants.neutral() | tile)


def fit(kind: Kind, rows: pd.DataFrame) -> tuple[dict[str, float], np.ndarray]:
    """Returns the constants of a kind, and log(modelled/measured) of all its rows."""

    def model(values: Mapping[str, Array], fixed: Any, row: Mapping[str, Array]) -> Array:
        return seconds(kind, _placed(kind, fixed, {**kind.fixed, **values}), row)

    def table(part: pd.DataFrame) -> Table:
        measured = part["latency_us"].to_numpy(float) * 1e-6
        return Table(columns(kind, part), measured, bare_machine(), kind.free)

    (values,), _, _ = _fitting.fit(model, [table(select(rows, rows["seen"]))])
    whole = table(rows)
    return values, np.log(_fitting.predict(model, values, whole) / whole.seconds)


def errors(kind: Kind, machine: Machine, rows: pd.DataFrame) -> np.ndarray:
    """Returns modelled over measured, less 1, of rows on a machine with all its constants."""

    def model(_: Mapping[str, Array], fixed: Any, row: Mapping[str, Array]) -> Array:
        return seconds(kind, fixed, row)

    measured = rows["latency_us"].to_numpy(float) * 1e-6
    table = Table(columns(kind, rows), measured, machine, {})
    return _fitting.predict(model, {}, table) / measured - 1.0


def records(kind: Kind, values: Mapping[str, float], left: np.ndarray, rows: Any) -> dict[str, Any]:
    """Returns the constants of a kind with their provenance, by full name."""
    seen = rows["seen"].to_numpy(bool)
    size = np.abs(np.expm1(left[~seen]))
    extra = {
        "framework": "vllm-ascend 0.18",
        "rows": int(seen.sum()),
        "held_out": int((~seen).sum()),
        "error_median": float(np.median(size)),
        "error_p90": float(np.quantile(size, 0.9)),
    }
    values = dict(values)
    if kind.name == "decode":
        values["single_item_time"] = values["item_time"]
    told = {
        "gemm": "seen: pairs (n, k) on every third diagonal of their grid",
        "attention": "seen: heads " + ", ".join(f"{q}/{kv}" for q, kv in SEEN_HEADS),
        "moe": "seen: " + " and ".join(SEEN_NETWORKS),
    }[kind.table]
    found = {
        f"{kind.group}.{name}": Record(value, UNITS.get(name, "1"), "fitted", "npu", told, extra)
        for name, value in values.items()
    }
    for name, value in kind.fixed.items():
        key, unit = f"{kind.group}.{name}", UNITS.get(name, "1")
        found[key] = Record(value, unit, "assumed", "judgement", "held fixed in the fit")
    return found


_SOURCES = """\
[sources.npu]
title = "Operators of an Ascend 910B under vllm-ascend 0.18, mean device time"
publisher = "hudingyi688"
date = "2026-04-14"
locator = "GitHub repository hudingyi688/aiconfigurator-npu, data/ascend_910b, commit 90d7765a"

[sources.judgement]
title = "Prior of this project where nothing is published"
publisher = "perfmodel"
date = "2026"
locator = "perfmodel/calibrate_ascend.py"
"""


def write(path: Path, found: Mapping[str, Record]) -> None:
    """Writes the fit file of the chip."""
    lines = ["[fit]", f"name = {toml_value(CHIP)}", f"generation = {toml_value(GENERATION)}"]
    lines += ['family = "ascend"', ""]
    for name, record in sorted(found.items()):
        lines += record.lines(name)
    path.write_text("\n".join(lines) + "\n" + _SOURCES, encoding="utf-8")


def main() -> None:
    """Fits every kind, prints what it found, and writes it where asked."""
    parser = argparse.ArgumentParser(
        prog="python -m perfmodel.calibrate_ascend", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("operators", type=Path, help="folder of the tables")
    parser.add_argument("--out", type=Path, help="folder of fits to write")
    parser.add_argument("--sample", type=Path, help="file for a sample of rows, for tests")
    options = parser.parse_args()
    found: dict[str, Record] = {}
    samples = []
    for kind in KINDS:
        rows = read(options.operators, kind)
        values, left = fit(kind, rows)
        found |= records(kind, values, left, rows)
        samples.append(rows.iloc[:: max(1, len(rows) // 40)].assign(kind=kind.name))
        seen = rows["seen"].to_numpy(bool)
        size = 100 * np.abs(np.expm1(left))
        print(
            f"{kind.name:14} seen {seen.sum():4} median {np.median(size[seen]):5.1f} %, "
            f"held out {(~seen).sum():4} median {np.median(size[~seen]):5.1f} % "
            f"p90 {np.quantile(size[~seen], 0.9):5.1f} %  "
            + ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        )
    if options.out:
        write(options.out / f"{CHIP}.toml", found)
    if options.sample:
        kept = pd.concat(samples).drop(columns=["system", "op", "kernel", "ep_size"])
        whole = kept.select_dtypes("number").columns.difference(["latency_us"])
        kept[whole] = kept[whole].astype("Int64")
        kept.to_csv(options.sample, index=False)


if __name__ == "__main__":
    main()
