"""Systems followed request by request, against their closed forms."""

import functools
from typing import Any

import pytest
import xarray as xr

from perfmodel import percentiles, simulate, systems
from perfmodel.errors import InputError
from perfmodel.percentiles import Kept
from perfmodel.system import SystemEstimate

pytestmark = pytest.mark.xdist_group("system")

TWO = {"prefill": "h100:tp=4,weights=fp8,chunk=8192", "decode": "h100:tp=4,weights=fp8"}


def asked(pools: dict[str, str], batch: int, **given: Any) -> systems.SystemAsked:
    where, named = systems.table(pools, None)
    return systems.ask(
        "llama-3.3-70b", named, where, batch=batch, isl=4000, osl=1000, engine="vllm", **given
    )


@functools.cache
def apart() -> tuple[SystemEstimate, xr.Dataset]:
    made = asked(TWO, 32, slo_ttft=0.5)
    return systems.evaluate(made), percentiles.percentiles(made, 32, requests=1500)


def test_a_prefill_pool_agrees_with_its_simulation() -> None:
    """Two programs of different kinds: closed forms of queues, and events on a table of steps."""
    closed, found = apart()
    mean = found.sel(statistic="mean")
    assert float(mean["simulated_tpot_s"]) == pytest.approx(float(closed.tpot), rel=0.02)
    assert float(mean["simulated_ttft_s"]) == pytest.approx(float(closed.ttft), rel=0.05)
    rate = float(found["simulated_request_rate"])
    assert rate == pytest.approx(float(closed.request_rate), rel=0.05)


def test_a_round_of_a_pipeline_takes_a_chunk_in_every_stage() -> None:
    """With one chunk a round, prompts would queue for seconds before 80 stages."""
    made = asked({"decode": "cs3:pp=8,regions=10,weights=bf16"}, 16)
    closed, found = systems.evaluate(made), percentiles.percentiles(made, 16, requests=400)
    rate = float(found["simulated_request_rate"])
    assert rate == pytest.approx(float(closed.request_rate), rel=0.15)
    mean = found.sel(statistic="mean")
    assert float(mean["simulated_tpot_s"]) == pytest.approx(float(closed.tpot), rel=0.15)
    assert float(mean["simulated_ttft_s"]) < 3.0 * float(closed.ttft)


def test_percentiles_are_in_order_and_goodput_is_a_share() -> None:
    _, found = apart()
    for name in ("ttft", "tpot", "e2e"):
        p50, p90, p99 = (
            float(found[f"simulated_{name}_s"].sel(statistic=s)) for s in ("p50", "p90", "p99")
        )
        assert p50 <= p90 <= p99
    speeds = found["simulated_tokens_per_second_user_e2e"].values
    assert speeds[1] >= speeds[2] >= speeds[3]
    share = float(found["simulated_within_limits"])
    # TTFT of 0.5 s lies between its median and its P99 here.
    assert 0.5 < share < 1.0
    assert float(found["simulated_goodput"]) == pytest.approx(
        share * float(found["simulated_request_rate"])
    )
    assert int(found["simulated_requests"]) == 1500 and int(found["simulated_rejected"]) == 0


def test_gaps_of_a_pool_that_only_decodes() -> None:
    """No prompt comes between, so gaps are steps: TPOT by another count."""
    _, found = apart()
    p50, p99 = (float(found["simulated_gap_s"].sel(statistic=s)) for s in ("p50", "p99"))
    assert p50 == pytest.approx(float(found["simulated_tpot_s"].sel(statistic="mean")), rel=0.05)
    assert p50 <= p99 < 1.2 * p50


def test_capacity_under_limits() -> None:
    """The highest rate that keeps to a limit: a little more does not, and a longer limit allows
    more."""
    made = asked(TWO, 32)
    most = float(systems.evaluate(made).request_rate)
    known = most * (1.0 + 1.0 / 8.0) / 81.0
    rates = []
    for seconds in (0.5, 2.0):
        limit = Kept("ttft", 90.0, seconds)
        rate = percentiles.capacity(made, 32, most, [limit], requests=400)
        case = percentiles.case_of(made, 32, requests=400, spread=0.2, seed=0)
        below, above = (
            limit.kept(simulate.simulate(percentiles.at_rate(case, r)))
            for r in (rate, rate + 1.01 * known)
        )
        assert below and not above
        rates.append(rate)
    assert 0.1 * most < rates[0] < rates[1]
    assert percentiles.capacity(made, 32, most, [Kept("ttft", 50.0, 1e-3)], requests=400) == 0.0


def test_what_is_not_simulated_is_refused() -> None:
    pools = {"prefill": TWO["prefill"], "attention": TWO["decode"], "ffn": "b200:tp=4,weights=fp8"}
    with pytest.raises(InputError, match="one of prefill and one of decode"):
        percentiles.percentiles(asked(pools, 8), 8, requests=10)
    half = {**TWO, "decode": TWO["decode"] + ",replicas=1.5"}
    with pytest.raises(InputError, match="must be whole, not 1.5"):
        percentiles.percentiles(asked(half, 8), 8, requests=10)
