"""Measured expert layers as the model takes them: the load of a table's routing, and its operators.

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

from perfmodel._routing import busiest_load
from perfmodel.formats import Precision
from perfmodel.machine import Machine, Rank, matmul_usage, vector_usage
from perfmodel.models.mlp import MixtureOfExperts
from perfmodel.operators import Matmul, Operators, Vector
from perfmodel.step import Shard, Step

_PLAIN = ((22, None), (6, 1856))
"""(top-k, width) of the table's models without a gate (Nemotron): two matrices, whatever the
kernel's name says. Weight-bound rows show it, and TensorRT-LLM's are named `nongated`."""


def expert_columns(rows: pd.DataFrame) -> dict[str, np.ndarray]:
    """Returns the model's inputs for rows, all but the bytes of an element.

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
