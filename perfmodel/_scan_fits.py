"""Measured recurrences of gated delta nets, and the fits of their constants.

Rows of vLLM: a fused step per decoding token, and chunks of prompts, both with states of 32 bits
(its steps then reach 0.8 to 0.9 of the bandwidth). TensorRT-LLM's would exceed an H100's bandwidth
with such states; the table does not tell what it keeps, so it is left out.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from jax import Array

from perfmodel import _fitting
from perfmodel._fitting import Prior, Table
from perfmodel._measurements import Case, bare_machine, in_seconds, select, sets, sheet_values
from perfmodel.machine import Machine, Rank, scan_parts
from perfmodel.models.delta import CHUNK
from perfmodel.operators import Phase, Scan

_STATE_BYTES = 4.0
# Columns by the names of the other tables; keys and values are as wide as each other.
_NAMES = {
    "seq_len": "isl",
    "num_k_heads": "num_kv_heads",
    "num_v_heads": "num_heads",
    "head_v_dim": "head_dim",
}
_COLUMNS = (
    "system", "framework", "version", "kernel_source", "phase", "batch_size", *_NAMES.values(),
    "latency_ms",
)  # fmt: skip
VECTOR_SHARE = 0.05
"""Rate of vector units, which steps use, over the 16-bit peak: H100 data sheet, 67 over 989 TFLOP/s
of multiply-adds, less what a step reaches. Rows do not tell it: steps wait for memory."""


def scan_columns(rows: pd.DataFrame) -> dict[str, np.ndarray]:
    """Returns the model's inputs for rows of either phase."""
    names = {
        "sequences": "batch_size", "tokens": "isl", "key_heads": "num_kv_heads",
        "heads": "num_heads", "width": "head_dim",
    }  # fmt: skip
    return {name: rows[column].to_numpy(float) for name, column in names.items()}


def scan_operator(row: Mapping[str, Any], phase: Phase) -> Scan:
    """Returns the operator of a measured call: queries, keys, values and two rates a head in."""
    results = row["heads"] * row["width"]
    return Scan(
        "recurrence", f"{phase}/attention", "delta", phase, sequences=row["sequences"],
        tokens=row["tokens"], heads=row["heads"], state=row["width"], width=row["width"],
        state_bytes=_STATE_BYTES,
        inputs=2 * row["key_heads"] * row["width"] + results + 2 * row["heads"], outputs=results,
        chunk=CHUNK,
    )  # fmt: skip


def scan_seconds(
    constants: Mapping[str, Array], machine: Machine, row: Mapping[str, Array]
) -> Array:
    """Returns seconds of steps that go token by token for trial constants."""
    trial = dataclasses.replace(machine.scan, **constants)
    rank = Rank(dataclasses.replace(machine, scan=trial))
    return scan_parts(scan_operator(row, "decode"), rank).total


def context_scan_seconds(
    constants: Mapping[str, Array], machine: Machine, row: Mapping[str, Array]
) -> Array:
    """Returns seconds of prompts in chunks for trial constants."""
    trial = dataclasses.replace(machine.context_scan, **constants)
    rank = Rank(dataclasses.replace(machine, context_scan=trial))
    return scan_parts(scan_operator(row, "prefill"), rank).total


_SECONDS: Mapping[str, _fitting.Model] = {
    "scan": scan_seconds,
    "context_scan": context_scan_seconds,
}


def scan_priors(kind: str) -> dict[str, Prior]:
    """Returns what is believed of a set's constants beforehand; shares stay below 1."""
    if kind == "scan":
        return {
            "stream": Prior(0.8, 0.7, "share"),
            "efficiency": Prior(VECTOR_SHARE, 1.0, "fixed"),
            "floor": Prior(4e-6, 0.5),
        }
    return {
        "stream": Prior(0.6, 0.7, "share"),
        "efficiency": Prior(0.5, 0.5, "share"),
        "chunk_time": Prior(3e-6, 0.7),
        "floor": Prior(8e-6, 0.5),
    }


def scan_cases(rows: pd.DataFrame) -> list[Case]:
    """Returns one case per system and phase.

    Held out are whole pairs of head numbers, every second one. A state that stays in the last-level
    cache between repeats is no guide to a step, which streams weights in between.
    """
    wanted = rows["kernel_source"].astype(str).str.contains("delta_rule")
    wanted &= (rows["family"] == "gdn") & (rows["framework"] == "vllm")
    # A width of Mamba-2 alone gives way.
    table = select(rows, wanted).drop(columns="head_dim").rename(columns=_NAMES)[list(_COLUMNS)]
    cases = []
    for (phase, system, framework), part in sets(table, ["phase", "system", "framework"]):
        kind = "scan" if phase == "generation" else "context_scan"
        machine, columns = bare_machine(system), scan_columns(part)
        size = columns["sequences"] * columns["heads"] * columns["width"] ** 2
        size = size * _STATE_BYTES
        resident = (size < 1.5 * sheet_values(system)["cache_capacity"]) & (
            2 * size / float(machine.memory.bandwidth[0]) > 2e-6
        )
        scope = ~resident if kind == "scan" else np.ones(len(part), dtype=bool)
        pairs = list(zip(columns["key_heads"], columns["heads"], strict=True))
        order = sorted(set(pairs))
        kept = np.array([order.index(pair) % 2 == 1 for pair in pairs])
        table = Table(columns, in_seconds(part), machine, scan_priors(kind))
        cases.append(
            Case(kind, system, framework, "", part, table, scope & ~kept, scope & kept, kept)
        )
    return cases


def fit_scans(cases: list[Case]) -> None:
    """Fits each case by itself, filling it in."""
    for case in cases:
        (constants,), _, _ = _fitting.fit(_SECONDS[case.kind], [case.training()])
        case.constants = constants
        case.predicted = _fitting.predict(_SECONDS[case.kind], constants, case.table)
