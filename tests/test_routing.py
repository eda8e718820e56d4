"""Routings of measured expert layers, and the links that carry tokens to experts."""

import jax.numpy as jnp
import numpy as np
import pytest

from perfmodel._routing import balanced_counts, busiest_load, power_law_counts
from perfmodel.chips import load_chip
from perfmodel.fabric import all_gather_seconds, all_to_all_seconds


def test_balanced_routing_by_hand() -> None:
    # Stride 8/2 = 4. Two tokens start at 0 and 2 and take the 4th expert from there as well.
    assert balanced_counts(2, 2, 8).tolist() == [1, 0, 1, 0, 1, 0, 1, 0]
    # Five tokens start at 0 … 4: experts 0 and 4 get two.
    assert balanced_counts(5, 2, 8).tolist() == [2, 1, 1, 1, 2, 1, 1, 1]
    assert busiest_load("balanced", 5, 2, 8, 4) == (3.0, 2.0)


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 8, 256), (37, 2, 8), (4096, 22, 512)])
@pytest.mark.parametrize("exponent", [1.01, 1.2])
def test_power_law_keeps_all_choices(
    tokens: int, top_k: int, experts: int, exponent: float
) -> None:
    counts = power_law_counts(tokens, top_k, experts, 1, exponent)
    assert (counts.sum(1) == tokens * top_k).all()
    assert counts.max() <= tokens and counts.min() >= 0


def test_power_law_loads_one_rank_more() -> None:
    rows, touched = busiest_load("power_law_1.2", 512, 8, 256, 16)
    even, all_there = busiest_load("balanced", 512, 8, 256, 16)
    assert even == 512 * 8 / 16 and all_there == 16
    assert 1.2 * even < rows <= 512 * 8 and 1 <= touched <= 16
    steeper, _ = busiest_load("power_law_1.2", 512, 8, 256, 64)
    assert steeper * 64 > rows * 16, "fewer experts a rank, less evening out"


def test_an_all_to_all_fills_every_port() -> None:
    fabric = load_chip("h100").machine.fabric
    port = float(fabric.nic_bandwidth * fabric.nic_efficiency)
    link = float(fabric.bandwidth * fabric.twoshot_efficiency)
    ramp = float(fabric.twoshot_ramp) * (np.sqrt(2e9 / 1e6) - np.sqrt(1e9 / 1e6))
    gather, exchange = (
        float(f(jnp.asarray(2e9), 16, fabric) - f(jnp.asarray(1e9), 16, fabric)) - ramp
        for f in (all_gather_seconds, all_to_all_seconds)
    )
    # 16 ranks in two domains of 8. Gathered bytes cross once for a domain, a rank's share of them
    # through its own port; exchanged ones are a rank's own.
    assert gather == pytest.approx(1e9 * (7 / 8 / link + 1 / 2 / 8 / port), rel=1e-3)
    assert exchange == pytest.approx(1e9 * (7 / 8 / link + 1 / 2 / port), rel=1e-3)
