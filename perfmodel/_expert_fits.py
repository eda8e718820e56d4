"""Measured expert layers, and the fit of the constants of grouped products to them.

A row is one rank's routed experts as an engine runs them: choice and sorting of tokens, the two
grouped products, the activation between and the weighted sum. It is predicted by the rows that a
`MixtureOfExperts` gives a step, at the load of the table's routing (`perfmodel._routing`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import pandas as pd
from jax import Array

from perfmodel import _fitting
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
from perfmodel._routing import busiest_load
from perfmodel.formats import Precision
from perfmodel.machine import Machine, Rank, matmul_usage, vector_usage
from perfmodel.models.mlp import MixtureOfExperts
from perfmodel.operators import KERNELS, Matmul, Operators, Vector
from perfmodel.step import Shard, Step

_FITTED_ROWS = 4000

_PLAIN = ((22, None), (6, 1856))
"""(top-k, width) of the table's models without a gate (Nemotron): two matrices, whatever the
kernel's name says. Weight-bound rows show it, and TensorRT-LLM's are named `nongated`."""


def expert_columns(rows: pd.DataFrame, form: Format) -> dict[str, np.ndarray]:
    """Returns the model's inputs for rows of one number format.

    Triton kernels of vLLM and SGLang activate and sum the rows of all chosen experts, those of
    other ranks included: `every` is 1.
    """
    ways = ["distribution", "num_tokens", "topk", "num_experts", "moe_ep_size"]
    of = rows.groupby(ways, observed=True, sort=False).ngroup().to_numpy()
    found = rows[ways].drop_duplicates().to_numpy()
    load = np.array([busiest_load(str(way), *map(int, sizes)) for way, *sizes in found])[of]
    plain = np.zeros(len(rows), dtype=bool)
    for top_k, width in _PLAIN:
        plain |= (
            (rows["topk"] == top_k) & (width is None or rows["inter_size"] == width)
        ).to_numpy()
    source = rows["kernel_source"].astype(str).str
    every = source.contains("triton") & ~source.contains("trtllm")
    size = np.ones(len(rows))
    return {
        "tokens": rows["num_tokens"].to_numpy(float),
        "hidden": rows["hidden_size"].to_numpy(float),
        "width": rows["inter_size"].to_numpy(float) / rows["moe_tp_size"].to_numpy(float),
        "top_k": rows["topk"].to_numpy(float),
        "experts": rows["num_experts"].to_numpy(float),
        "gates": 2.0 - plain,
        "local": load[:, 0],
        "touched": load[:, 1],
        "every": every.to_numpy(float),
        "weight_bytes": form.weight_bytes * size,
        "activation_bytes": form.activation_bytes * size,
        "column_bytes": form.column_bytes * size,
    }


def expert_operators(row: Mapping[str, Any], kernel: Array) -> Operators:
    """Returns the rows of a step's expert layer at a measured load, router and links left out."""
    bytes_ = [row[name] for name in ("weight_bytes", "column_bytes", "activation_bytes")]
    weight, column, activation = bytes_
    precision = Precision(
        weight, column, activation, 2, 2, 0, kernel, kernel, weight, column, activation, kernel
    )
    layer = MixtureOfExperts(row["experts"], row["top_k"], row["width"], row["gates"])
    hidden, tokens, local = row["hidden"], row["tokens"], row["local"]
    named = {op.name: op for op in layer.operators(hidden, Step(tokens, 1), Shard(), precision)}
    handled = local + row["every"] * (tokens * row["top_k"] - local)
    moved: dict[str, dict[str, Any]] = {
        "routing": {},
        "expert_up_projection": {"rows": local / row["touched"], "groups": row["touched"]},
        "expert_activation": {"rows": handled},
        "expert_down_projection": {"rows": local / row["touched"], "groups": row["touched"]},
        # Every token's row is written, also where its experts are on other ranks.
        "expert_sum": {"rows": handled, "writes": hidden * tokens / handled},
    }
    return tuple(dataclasses.replace(named[name], **change) for name, change in moved.items())


def expert_seconds(row: Mapping[str, Any], kernel: Array, machine: Machine) -> Array:
    """Returns the seconds of measured expert layers on a machine."""
    rank = Rank(machine)
    usage = {Matmul: matmul_usage, Vector: vector_usage}
    return sum(
        (usage[type(op)](op, rank).seconds for op in expert_operators(row, kernel)),
        start=jnp.asarray(0.0),
    )


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
        columns = expert_columns(part, form)
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
