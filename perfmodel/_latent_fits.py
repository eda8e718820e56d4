"""Measured attention over latent vectors, and the fits of its constants.

Decode rows are of the absorbed form (one latent vector per key), context rows of keys and values
expanded per head, both of DeepSeek-V3's widths, and of the attention kernel alone.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from jax import Array

from perfmodel._fitting import Prior, Table
from perfmodel._measurements import (
    Case,
    bare_machine,
    context_priors,
    in_seconds,
    select,
    sets,
    sheet_values,
)
from perfmodel.machine import (
    Machine,
    Rank,
    context_attention_parts,
    decode_attention_parts,
)
from perfmodel.operators import Attention

_RANK, _NOPE, _ROPE, _VALUE = 512, 128, 64, 128
"""Widths of the measured networks: latent vector, head without and with rotary part, value."""


def latent_columns(rows: pd.DataFrame) -> dict[str, np.ndarray]:
    """Returns the model's inputs for rows of either phase; an 8-bit cache goes with 8-bit
    arithmetic."""
    narrow = (rows["kv_cache_dtype"] == "fp8").to_numpy(float)
    return {
        "sequences": rows["batch_size"].to_numpy(float),
        "queries": rows["isl"].to_numpy(float),
        "keys": rows["kv_len"].to_numpy(float),
        "heads": rows["num_heads"].to_numpy(float),
        "kv_bytes": 2.0 - narrow,
        "narrow": narrow,
    }


def decode_operator(row: Mapping[str, Any]) -> Attention:
    """Returns the operator of a measured call of the absorbed form."""
    return Attention(
        "attention", "decode/attention", "decode", sequences=row["sequences"], queries=1.0,
        keys=row["keys"], pairs=row["keys"], heads=row["heads"], kv_heads=1.0,
        qk_width=_RANK + _ROPE, v_width=_RANK, kv_bytes=row["kv_bytes"], narrow=row["narrow"],
        cache_width=_RANK + _ROPE, latent=True,
    )  # fmt: skip


def context_operator(row: Mapping[str, Any]) -> Attention:
    """Returns the operator of a measured call over expanded keys and values of 16 bits."""
    queries = row["queries"]
    return Attention(
        "attention", "prefill/attention", "prefill", sequences=row["sequences"], queries=queries,
        keys=queries, pairs=0.5 * queries * (queries + 1.0), heads=row["heads"],
        kv_heads=row["heads"], qk_width=_NOPE + _ROPE, v_width=_VALUE, kv_bytes=2.0,
        narrow=row["narrow"], latent=True,
    )  # fmt: skip


def latent_decode_seconds(
    constants: Mapping[str, Array], machine: Machine, row: Mapping[str, Array]
) -> Array:
    """Returns seconds of decode attention over latent vectors for trial constants."""
    trial = dataclasses.replace(machine.latent_decode, **constants)
    rank = Rank(dataclasses.replace(machine, latent_decode=trial))
    return decode_attention_parts(decode_operator(row), rank).total


def latent_context_seconds(
    constants: Mapping[str, Array], machine: Machine, row: Mapping[str, Array]
) -> Array:
    """Returns seconds of context attention over expanded latent vectors for trial constants."""
    trial = dataclasses.replace(machine.latent_context, **constants)
    rank = Rank(dataclasses.replace(machine, latent_context=trial))
    return context_attention_parts(context_operator(row), rank).total


def latent_decode_priors(machine: Machine) -> dict[str, Prior]:
    """Returns what is believed of a set's constants beforehand; shares stay below 1."""
    rate = float(2.5 * machine.memory.bandwidth[0] / machine.compute.units)
    return {
        "stream": Prior(0.85, 0.7, "share"),
        "item_time": Prior(5e-6, 0.8),
        "item_rate": Prior(rate, 0.7),
        "efficiency": Prior(0.7, 0.75, "share"),
        "narrow": Prior(1.25, 0.25),
        "min_group": Prior(64.0, 0.7),
        "split_keys": Prior(256.0, 0.7),
        "floor": Prior(8e-6, 0.35),
        "split_latency": Prior(2.8e-6, 0.4),
    }


def _held_out(heads: np.ndarray) -> np.ndarray:
    """Returns which rows are kept from a fit: every second number of heads, never the largest."""
    order = sorted(set(heads))
    return np.isin(heads, order[1:-1:2])


def latent_cases(rows: pd.DataFrame, phase: str) -> list[Case]:
    """Returns one case per system of a phase, "context" or "generation"; both caches together."""
    kind = "latent_context" if phase == "context" else "latent_decode"
    cases = []
    wanted = (rows["level"] == "kernel") & (rows["phase"] == phase)
    for (system, framework), part in sets(select(rows, wanted), ["system", "framework"]):
        machine, columns = bare_machine(system), latent_columns(part)
        scope = np.ones(len(part), dtype=bool)
        priors = context_priors() | {"width_exponent": Prior(0.0, 1.0, "fixed")}
        if phase != "context":
            priors = latent_decode_priors(machine)
            cache = columns["sequences"] * columns["keys"] * columns["kv_bytes"] * (_RANK + _ROPE)
            resident = (cache < 1.5 * sheet_values(system)["cache_capacity"]) & (
                cache / float(machine.memory.bandwidth[0]) > 2e-6
            )
            scope = (columns["keys"] >= 128) & ~resident
        kept = _held_out(columns["heads"])
        table = Table(columns, in_seconds(part), machine, priors)
        cases.append(
            Case(kind, system, framework, "", part, table, scope & ~kept, scope & kept, kept)
        )
    return cases
