"""The fit of the constants of grouped products to measured expert layers (`_expert_rows`)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import pandas as pd
from jax import Array

from perfmodel import _fitting
from perfmodel._expert_rows import expert_columns, expert_seconds
from perfmodel._fitting import Prior, Table
from perfmodel._measurements import (
    CHIPS,
    EXPERT_FORMATS,
    WARM,
    Case,
    Format,
    bare_machine,
    in_seconds,
    one_hot,
    sets,
    sheet_values,
)
from perfmodel.operators import KERNELS

_FITTED_ROWS = 4000


def trial_seconds(constants: Mapping[str, Array], fixed: Any, row: Mapping[str, Array]) -> Array:
    """Returns the seconds of measured expert layers for trial constants."""
    machine, kernel = fixed
    ones = jnp.ones(len(KERNELS))
    trial = {name: value * ones for name, value in constants.items()}
    experts = dataclasses.replace(machine.experts, **trial)
    return expert_seconds(row, kernel, dataclasses.replace(machine, experts=experts))


def expert_priors(form: Format) -> dict[str, Prior]:
    """Returns what is believed of a set's constants; achieved shares stay below 1.

    A quantising kernel reads 16 bits and writes 8 or less; any kernel may copy rows into the order
    of experts.
    """
    return {
        "efficiency": Prior(form.efficiency, 0.8, "share"),
        "stream": Prior(0.75, 0.75, "share"),
        "floor": Prior(6e-6, 0.5),
        "split_latency": Prior(2.8e-6, 0.4),
        "quantise": Prior(6.4 if form.quantises else 4.0, 0.7),
    }


def expert_cases(
    rows: pd.DataFrame, vectors: Mapping[str, float], shared: Mapping[str, float]
) -> list[Case]:
    """Returns one case per (system, framework, dtype, kernel), for kernels with enough shapes.

    Args:
        rows: the table of expert layers.
        vectors: achieved share of bandwidth of element-wise kernels by chip, "" for one without.
        shared: the constants of tiles that matrix products share.

    Every second (hidden, width, top-k, experts) group is held out, whole. In scope are ranks that
    hold at least 64 columns of each expert.
    """
    cases = []
    by = ["system", "framework", "moe_dtype", "kernel_source"]
    for (system, framework, dtype, source), part in sets(rows, by):
        shape = ["hidden_size", "inter_size", "topk", "num_experts"]
        group = part.groupby(shape, observed=True).ngroup().to_numpy()
        if group.max() == 0:
            continue  # one shape alone: nothing to hold out
        form, bare = EXPERT_FORMATS[dtype], bare_machine(system)
        machine = dataclasses.replace(
            bare,
            memory=dataclasses.replace(
                bare.memory, vector_stream=vectors.get(CHIPS[system], vectors[""])
            ),
            compute=dataclasses.replace(bare.compute, **shared),
        )
        size = np.ones(len(part))
        columns = expert_columns(part) | {
            "weight_bytes": form.weight_bytes * size,
            "activation_bytes": form.activation_bytes * size,
            "column_bytes": form.column_bytes * size,
        }
        size = columns["touched"] * (columns["gates"] + 1) * columns["hidden"] * columns["width"]
        memory = size * form.weight_bytes / sheet_values(system)["memory_bandwidth"]
        cache = 1.5 * sheet_values(system)["cache_capacity"] / form.weight_bytes
        scope = columns["width"] >= 64
        if system in WARM:
            scope = scope & ~((size < cache) & (memory > 2e-6))
        kept = group % 2 == 1
        seen = np.flatnonzero(scope & ~kept)
        if len(seen) > _FITTED_ROWS:
            seen = np.random.default_rng(0).choice(seen, _FITTED_ROWS, replace=False)
        fixed = (machine, one_hot(form.kind))
        table = Table(columns, in_seconds(part), fixed, expert_priors(form))
        mask = np.isin(np.arange(len(part)), seen)
        detail = f"{dtype} {source}"
        cases.append(
            Case("experts", system, framework, detail, part, table, mask, scope & kept, kept)
        )
    return cases


def fit_experts(cases: list[Case]) -> None:
    """Fits each case by itself, filling it in."""
    for case in cases:
        (case.constants,), _, _ = _fitting.fit(trial_seconds, [case.training()])
        case.predicted = _fitting.predict(trial_seconds, case.constants, case.table)
