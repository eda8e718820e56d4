"""Held-out measured kernels against predictions of the catalogue's machines.

The bounds are the errors of `docs/accuracy.md` with a margin for the small sample; they are on
rows that no fit has seen, but the sets are those that the constants were fitted to.
"""

import functools
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from perfmodel._expert_rows import expert_columns, expert_seconds
from perfmodel._latent_fits import context_operator, decode_operator, latent_columns
from perfmodel._measurements import EXPERT_FORMATS, one_hot
from perfmodel._scan_fits import scan_columns, scan_operator
from perfmodel.chips import load_chip
from perfmodel.fabric import all_gather_seconds, all_reduce_seconds, all_to_all_seconds
from perfmodel.machine import (
    Machine,
    Rank,
    context_attention_parts,
    decode_attention_parts,
    matmul_parts,
    scan_parts,
)
from perfmodel.operators import KERNELS, Attention, Matmul

# One process evaluates the sample, for all tests of this file.
pytestmark = pytest.mark.xdist_group("accuracy")

# Source dtype: kernel, bytes of a weight, of an activation, per output column.
FORMATS = {
    "bfloat16": ("bf16", 2, 2, 0),
    "fp8": ("fp8", 1, 1, 0),
    "nvfp4": ("fp4", 0.5625, 0.5625, 0),
    "sq": ("int8", 1, 1, 4),
    "int8_wo": ("w8a16", 1, 2, 2),
    "int4_wo": ("w4a16", 0.5, 2, 2),
}

COLLECTIVES = {
    "all_reduce": all_reduce_seconds,
    "all_gather": all_gather_seconds,
    "reduce_scatter": all_gather_seconds,
    "all_to_all": all_to_all_seconds,
}


@functools.cache
def rows() -> pd.DataFrame:
    return pd.read_csv(Path(__file__).parent / "data" / "kernels.csv")


def seconds(row: pd.Series, machine: Machine) -> float:
    """Returns the predicted time of one measured row."""
    if row["operator"] == "matmul":
        kind, weight, activation, column = FORMATS[row["gemm_dtype"]]
        op = Matmul(
            name="matmul",
            group="decode/ffn",
            rows=row["m"],
            columns=row["n"],
            inner=row["k"],
            weight_bytes=weight,
            activation_bytes=activation,
            column_bytes=column,
            kernel=jnp.asarray([float(kind == name) for name in KERNELS]),
        )
        return float(matmul_parts(op, Rank(machine)).total)
    if row["operator"] in ("all_reduce", "gather"):
        message, ranks = row["message_bytes"], row["num_gpus"]
        return float(COLLECTIVES[row["op"]](message, ranks, machine.fabric))
    if row["operator"] in ("scan", "context_scan"):
        numbers = {k: v[0] for k, v in scan_columns(row.to_frame().T).items()}
        phase = "decode" if row["operator"] == "scan" else "prefill"
        return float(scan_parts(scan_operator(numbers, phase), Rank(machine)).total)
    if row["operator"].startswith("latent"):
        numbers = {k: v[0] for k, v in latent_columns(row.to_frame().T).items()}
        if row["operator"] == "latent_decode":
            op = decode_operator(numbers)
            return float(decode_attention_parts(op, Rank(machine)).total)
        return float(context_attention_parts(context_operator(numbers), Rank(machine)).total)
    length, queries = row["kv_len"], row["isl"]
    keys = min(length, row["window_size"]) if row["window_size"] > 0 else length
    decode = row["operator"] == "decode"
    pairs = keys if decode else keys * (keys + 1) / 2 + (queries - keys) * keys
    op = Attention(
        name="attention",
        group="decode/attention" if decode else "prefill/attention",
        phase="decode" if decode else "prefill",
        sequences=row["batch_size"],
        queries=queries,
        keys=keys,
        pairs=pairs,
        heads=row["num_heads"],
        kv_heads=row["num_kv_heads"],
        qk_width=row["head_dim"],
        v_width=row["head_dim"],
        kv_bytes=1 if row["kv_cache_dtype"] == "fp8" else 2,
        narrow=0 if decode else row["narrow"],
    )
    parts = decode_attention_parts if decode else context_attention_parts
    return float(parts(op, Rank(machine)).total)


@functools.cache
def errors() -> pd.DataFrame:
    """Returns the sample with the signed relative error of each row."""
    known = rows()
    predicted = pd.Series(0.0, index=known.index)
    layers = known["operator"] == "experts"
    for (chip, dtype), part in known[layers].groupby(["chip", "moe_dtype"]):
        form = EXPERT_FORMATS[dtype]
        columns = expert_columns(part) | {
            "weight_bytes": form.weight_bytes,
            "activation_bytes": form.activation_bytes,
            "column_bytes": form.column_bytes,
        }
        kernel, machine = one_hot(form.kind), load_chip(chip).machine
        predicted[part.index] = np.asarray(expert_seconds(columns, kernel, machine))
    for index, row in known[~layers].iterrows():
        predicted[index] = seconds(row, load_chip(row["chip"]).machine)
    return known.assign(error=predicted / (known["latency_ms"] * 1e-3) - 1.0)


def test_sample_covers_chips_and_operators() -> None:
    counts = rows().groupby(["operator", "chip"]).size().unstack()
    assert len(rows()) >= 400
    kinds = {"matmul", "experts", "decode", "context", "all_reduce", "gather"}
    kinds |= {"latent_decode", "latent_context"}
    # Two chips have tables of recurrences that tell what they keep.
    scans = {"scan", "context_scan"}
    assert (counts.loc[sorted(scans)].sum(axis=1) == 40).all()
    counts = counts.drop(index=sorted(scans))
    assert set(counts.index) == kinds
    assert counts.shape[1] == 6 and (counts >= 10).all().all(), counts


@pytest.mark.parametrize(
    ("query", "bound"),
    [
        ("operator == 'matmul' and gemm_dtype == 'bfloat16'", 0.08),
        ("operator == 'matmul'", 0.11),
        ("operator == 'experts' and moe_dtype == 'bfloat16'", 0.10),
        ("operator == 'experts'", 0.12),
        ("operator == 'gather'", 0.10),
        ("operator == 'decode'", 0.10),
        ("operator == 'context'", 0.10),
        ("operator == 'latent_decode'", 0.12),
        ("operator == 'latent_context'", 0.12),
        ("operator == 'all_reduce'", 0.08),
        ("operator == 'scan'", 0.06),
        ("operator == 'context_scan'", 0.11),
    ],
)
def test_median_error_is_bounded(query: str, bound: float) -> None:
    found = errors().query(query)["error"]
    assert np.isfinite(found).all()
    assert found.abs().median() <= bound


def test_no_chip_is_far_off() -> None:
    median = errors().groupby(["operator", "chip"])["error"].agg(lambda e: e.abs().median())
    assert (median <= 0.25).all(), median.sort_values().tail(5)
