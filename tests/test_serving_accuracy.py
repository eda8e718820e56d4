"""Measured serving runs, which no kernel constant has seen: the error of TPOT and TTFT.

The neutral engine's two host times were chosen after a look at runs of the same benchmark.

217 aggregated vLLM runs of two dense models (tests/data/serving.csv), with the neutral engine.
Prompts of the public benchmark are 0.8 to 1.0 of their nominal length, hence `lengths`; their means
include the initial burst of a tenth of the requests.
"""

import functools
from pathlib import Path

import jax
import numpy as np
import pandas as pd
import pytest

from perfmodel.chips import load_chip
from perfmodel.compiled import UNFUSED
from perfmodel.engines import load_engine
from perfmodel.formats import precision
from perfmodel.models.catalogue import load_model
from perfmodel.plan import Load, Plan
from perfmodel.relax import traced
from perfmodel.serving import estimate

# One process compiles the programs, for all tests of this file.
pytestmark = pytest.mark.xdist_group("serving_accuracy")


@functools.cache
def errors() -> pd.DataFrame:
    """Returns the runs with the signed relative errors of TPOT and TTFT."""
    runs = pd.read_csv(Path(__file__).parent / "data" / "serving.csv")
    engine = traced(load_engine("neutral").engine)
    over = jax.vmap(estimate, in_axes=(None, None, 0, 0, None, None, None))
    program = jax.jit(over, compiler_options=dict(UNFUSED))
    parts = []
    for (model, chip, weights), part in runs.groupby(["model", "chip", "weights"]):
        numbers = part.select_dtypes("number")
        column = {name: numbers[name].to_numpy(np.float32) for name in numbers}
        one = np.ones(len(part), np.float32)
        lengths = column["lengths"]
        load = Load(column["isl"] * lengths, column["osl"] * lengths, 0 * one, 0.1 * one, 0 * one)
        plan = Plan(column["tp"], one, column["concurrency"], column["chunk"], one)
        found = program(
            load_chip(str(chip)).machine,
            traced(load_model(str(model)).model),
            traced(load),
            traced(plan),
            traced(precision(str(weights))),
            engine,
            None,
        )
        parts.append(
            part.assign(
                tpot=np.asarray(found.tpot) * 1e3 / column["tpot_ms"] - 1,
                ttft=np.asarray(found.ttft) * 1e3 / column["ttft_ms"] - 1,
                feasible=np.asarray(found.feasible),
            )
        )
    return pd.concat(parts)


def test_every_run_is_feasible():
    assert len(errors()) > 200 and bool(errors()["feasible"].all())


@pytest.mark.parametrize(
    ("chip", "weights", "bound"),
    [("h100_sxm", "bf16", 0.06), ("h100_sxm", "fp8", 0.12), ("b200_sxm", "nvfp4", 0.12),
     ("b200_sxm", "fp8", 0.22)],
)  # fmt: skip
def test_time_per_output_token(chip: str, weights: str, bound: float):
    found = errors().query("chip == @chip and weights == @weights")["tpot"].abs()
    assert found.median() < bound and found.quantile(0.9) < bound + 0.15


def test_time_per_output_token_in_all():
    assert errors()["tpot"].abs().median() < 0.10


def test_time_to_first_token_is_short_by_known_amounts():
    """The neutral engine has no request cost and launches no prefill step eagerly; engine profiles
    will. Until then TTFT is a lower estimate: this says how low, and fails if it drifts."""
    assert -0.6 < errors()["ttft"].median() < 0.0


def table() -> str:
    """Returns median, 90th percentile and bias of both errors, per set, in per cent."""
    rows = []
    for key, part in errors().groupby(["chip", "model", "weights"]):
        row = [*key, len(part)]
        for name in ("tpot", "ttft"):
            sizes = 100 * part[name].abs()
            row += [sizes.median(), sizes.quantile(0.9), 100 * part[name].median()]
        rows.append(row)
    heads = ["chip", "model", "weights", "runs"]
    heads += [f"{name} {what}" for name in ("TPOT", "TTFT") for what in ("median", "p90", "bias")]
    return pd.DataFrame(rows, columns=heads).round(1).to_string(index=False)


if __name__ == "__main__":
    print(table())
