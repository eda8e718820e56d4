"""Systems followed request by request, against their closed forms."""

import functools
from typing import Any

import pytest
import xarray as xr

from perfmodel import percentiles, systems
from perfmodel.errors import InputError
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
    assert float(mean["simulated_ttft_s"]) == pytest.approx(float(closed.ttft), rel=0.1)
    rate = float(found["simulated_request_rate"])
    assert rate == pytest.approx(float(closed.request_rate), rel=0.05)


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


def test_what_is_not_simulated_is_refused() -> None:
    pools = {"prefill": TWO["prefill"], "attention": TWO["decode"], "ffn": "b200:tp=4,weights=fp8"}
    with pytest.raises(InputError, match="one of prefill and one of decode"):
        percentiles.percentiles(asked(pools, 8), 8, requests=10)
    half = {**TWO, "decode": TWO["decode"] + ",replicas=1.5"}
    with pytest.raises(InputError, match="must be whole, not 1.5"):
        percentiles.percentiles(asked(half, 8), 8, requests=10)
