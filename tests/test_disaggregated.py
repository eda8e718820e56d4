"""Rows whose prompts have workers of their own: what they say, what is predicted, and how well.

`tests/data/disaggregated.csv` holds a quarter of the DeepSeek rows with worker counts of the public
table of serving runs (SHA-256 of id and concurrency below a quarter), and
`disaggregated_workers.csv` all InferenceX rows of the public table with chips by pool.
"""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import perfmodel
from perfmodel import cache, deployments, disaggregated_report, prediction, systems
from perfmodel.deployments import Deployments
from perfmodel.disaggregated_report import END, START, Errors

pytestmark = pytest.mark.xdist_group("disaggregated")

DATA = Path(__file__).parent / "data"
ROW: dict[str, Any] = {
    "model": "deepseek-r1", "chip": "b200", "engine": "dynamo-trt", "precision": "fp8",
    "concurrency": 64, "isl": 8000, "osl": 1000, "prefill_tp": 8, "prefill_ep": 8,
    "prefill_gpus": 16, "decode_tp": 8, "decode_ep": 8, "decode_workers": 4,
}  # fmt: skip


def asked(**changed: Any) -> Deployments:
    return deployments.understand(pd.DataFrame([ROW | changed]))


@functools.cache
def found(name: str) -> Errors:
    return disaggregated_report.load(DATA / f"{name}.csv")


def test_a_row_by_hand():
    row = asked(prefill_attention_dp=4, decode_dp_attention="True")
    assert row.status.tolist() == [""] and row.split.tolist() == [True]
    names = ("chips", "stages", "expert_ranks", "attention_dp", "replicas")
    assert [row.numbers[name].item() for name in names] == [8, 1, 8, 8, 4]
    assert [row.numbers[f"prefill_{name}"].item() for name in names] == [8, 1, 8, 4, 2]
    # 64 requests over four workers that decode.
    assert row.numbers["batch"].item() == 16
    assert row.engines[0].name == "trtllm"


def test_degrees_that_count_chips_once():
    # A worker of tensor parallelism 1 with 32 attention ranks and as many of experts is 32 chips.
    wide = asked(decode_tp=1, decode_attention_dp=32, decode_ep=32, decode_workers=1)
    assert wide.status.item() == "" and wide.numbers["chips"].item() == 32
    # Without experts there are none to spread.
    dense = asked(model="llama-3.1-70b", decode_ep=0, prefill_ep=0)
    assert dense.status.item() == "" and dense.numbers["expert_ranks"].item() == 1


def test_aggregated_rows_have_one_layout():
    row = asked(mode="agg", tp=4, ep=4, gpus=8)
    assert not row.split.item() and row.numbers["replicas"].item() == 2
    assert row.numbers["prefill_chips"].item() == row.numbers["chips"].item() == 4


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"prefill_gpus": None}, "worker counts (prefill_workers or prefill_gpus)"),
        ({"decode_workers": None}, "worker counts (decode_workers or decode_gpus)"),
        ({"prefill_gpus": "", "decode_workers": ""},
         "worker counts (prefill_workers and decode_workers)"),
        ({"prefill_tp": ""}, "disaggregated without prefill_tp"),
        ({"decode_tp": "", "mode": "disagg"}, "disaggregated without decode_tp"),
        ({"decode_gpus": 24}, "decode_gpus is not decode_workers of the chips of one"),
        ({"decode_tp": 3, "decode_ep": 3}, "does not"),
        ({"concurrency": ""}, "no concurrency"),
        ({"mode": "agg"}, "missing tp"),
        ({"decode_attention_dp": 8, "model": "llama-3.1-70b"}, "experts only"),
    ],
)  # fmt: skip
def test_a_row_without_an_answer_says_what_is_missing(changed: dict[str, Any], expected: str):
    assert expected in asked(**changed).status.item()


def test_a_table_of_pools_needs_no_tp():
    assert asked().status.item() == ""
    with pytest.raises(perfmodel.InputError, match="no column tp or tp_size"):
        frame = pd.DataFrame([ROW]).drop(columns="decode_tp")
        deployments.understand(frame)


def test_names_of_formats_and_routers():
    row = asked(
        model="DeepSeek-R1-0528-MXFP4", precision="fp4", chip="mi355x", engine="mori-sglang"
    )
    assert row.status.item() == ""
    assert row.precisions[0].weights == "mxfp4" and row.engines[0].name == "sglang"
    assert asked(precision="fp4").precisions[0].weights == "nvfp4"


def test_a_row_and_a_system_say_the_same():
    row = perfmodel.predict(pd.DataFrame([ROW])).iloc[0]
    assert row["status"] == "ok"
    one = systems.serve(
        "deepseek-v3",
        {
            "prefill": "b200:tp=8,ep=8,replicas=2,weights=fp8",
            "decode": "b200:tp=8,ep=8,replicas=4,weights=fp8",
        },
        batch=16, isl=8000, osl=1000, engine="trtllm", streamed=False,
    )  # fmt: skip
    assert row["predicted_ttft_ms"] == pytest.approx(1e3 * one.ttft_s.item(), rel=1e-4)
    assert row["predicted_tpot_ms"] == pytest.approx(1e3 * one.tpot_s.item(), rel=1e-4)
    rate = row["predicted_output_tokens_per_second_chip"]
    assert rate == pytest.approx(one.output_tokens_per_second_chip.item(), rel=1e-4)
    assert one.chips.item() == 48


def test_one_program_serves_both_tables():
    one = found("disaggregated")
    before = cache.compilations(prediction._split_rows)
    two = found("disaggregated_workers")
    assert cache.compilations(prediction._split_rows) == before
    assert one.good.sum() > 25 and two.good.sum() == 24


def median(errors: np.ndarray, good: np.ndarray) -> float:
    return float(np.median(np.abs(errors[good])))


@pytest.mark.parametrize(
    ("name", "bounds"),
    [("disaggregated", (0.15, 0.45, 0.15)), ("disaggregated_workers", (0.15, 0.35, 0.10))],
)
def test_rows_that_no_fit_has_seen(name: str, bounds: tuple[float, float, float]):
    """Medians of TPOT, TTFT and of whole requests; all rows are in docs/serving-accuracy.md."""
    rows = found(name)
    for error, bound in zip((rows.tpot, rows.ttft, rows.e2e), bounds, strict=True):
        assert median(error, rows.good) < bound
    assert abs(np.median(rows.tpot[rows.good])) < 0.15


def test_full_prompt_workers_are_what_the_runs_say():
    """Fifteen times the requests on two workers: the rate does not follow, and TTFT is the rest."""
    rows = found("disaggregated_workers")
    numbers, chips = rows.asked.numbers, [chip.name for chip in rows.asked.chips]
    mine = (rows.asked.chip == chips.index("mi355x")) & (numbers["prefill_attention_dp"] == 1)
    busy = mine & (numbers["batch"] * numbers["replicas"] >= 128)
    assert busy.any() and (rows.load[busy] > 0.9).all()
    idle = mine & (numbers["batch"] * numbers["replicas"] <= 8)
    assert (rows.load[idle] < 0.5).all()


def test_experts_are_spread_only_where_attention_is():
    other, changed = disaggregated_report.spread(
        deployments.understand(
            pd.DataFrame(
                [
                    ROW,
                    ROW | {"decode_tp": 1, "decode_attention_dp": 8, "decode_ep": 1},
                    ROW | {"decode_ep": 1},
                ]
            )
        )
    )
    assert changed.tolist() == [False, True, False]
    assert other.numbers["expert_ranks"].tolist() == [8, 8, 1]


def test_the_section_is_replaced_and_kept():
    old = f"# A\n\n{START}\nold\n{END}\n\nrest\n"
    new = f"{START}\nnew\n{END}\n"
    assert disaggregated_report.replaced(old, new) == f"# A\n\n{START}\nnew\n{END}\nrest\n"
    assert disaggregated_report.kept(old, "# B\n") == f"# B\n\n{START}\nold\n{END}\n"
    assert disaggregated_report.kept("# A\n", "# B\n") == "# B\n"
