"""What a micro-batch occupies of a pipeline, by hand: stages, ports, and what occupies nothing."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from perfmodel import evaluation
from perfmodel.chips import load_chip
from perfmodel.fabric import crossing_port, crossing_usage
from perfmodel.machine import Rank
from perfmodel.plan import Plan
from perfmodel.stages import occupied


def plan(stages: float, chips: float | None = None) -> Plan:
    return Plan(stages if chips is None else chips, stages, batch=1, chunk=1)


def busiest(at: Plan, count: float, layer: float, head: float, **more: float) -> float:
    return float(occupied(at, count, count * layer, head + more.get("host", 0.0), **more))


@pytest.mark.parametrize(
    ("count", "stages", "head", "expected"),
    [
        (80, 8, 1.5, 11.5),  # even: ten layers and the head on the last stage
        (126, 8, 0.6, 16.0),  # six stages of sixteen, two of fifteen: the last is one of those
        (126, 8, 1.5, 16.5),  # and sets the pace where the head is worth more than a layer
        (80, 1, 1.5, 81.5),  # one stage is the pass
    ],
)
def test_layers_dealt_to_whole_chips(count: int, stages: int, head: float, expected: float) -> None:
    assert busiest(plan(stages), count, 1.0, head) == pytest.approx(expected)
    # A host prepares a pass in each stage.
    assert busiest(plan(stages), count, 1.0, head, host=2.0) == pytest.approx(expected + 2.0)


def test_regions_of_a_wafer_share_the_head() -> None:
    # 80 layers in 20 regions on each of four wafers: a twentieth of the head in each.
    assert busiest(plan(80, chips=4), 80, 1.0, 0.8) == pytest.approx(1.04)
    # A layer to a wafer: all of it beside the last one.
    assert busiest(plan(80), 80, 1.0, 0.8) == pytest.approx(1.8)


def test_what_precedes_the_first_layer_is_on_the_first_stage() -> None:
    def towered(stages: float) -> float:
        return busiest(plan(stages), 80, 1.0, 1.5, first=4.0)

    assert towered(1) == pytest.approx(85.5)
    assert towered(8) == pytest.approx(14.0)
    assert 14.0 < towered(1.5) < 85.5


def test_a_port_bounds_and_does_not_add() -> None:
    assert busiest(plan(8), 80, 1.0, 1.5, port=11.0) == pytest.approx(11.5)
    assert busiest(plan(8), 80, 1.0, 1.5, port=12.0) == pytest.approx(12.0)


def test_bytes_occupy_a_port_and_latency_does_not() -> None:
    fabric = load_chip("wse3").machine.fabric
    slow = eqx.tree_at(lambda f: (f.crossing_time, f.nic_latency), fabric, (jnp.array(1.0),) * 2)
    # One token of 8,192 elements, 2 B each, over 150 GB/s: 0.11 µs, however far it is.
    for one in (fabric, slow):
        assert float(crossing_port(8192, 4, one)) == pytest.approx(16384 / 150e9, rel=1e-5)
    # The busiest port is one between nodes, where there is one.
    gpu = load_chip("h100").machine
    port = float(gpu.fabric.nic_bandwidth * gpu.fabric.nic_efficiency)
    assert float(crossing_port(8192, 16, gpu.fabric)) == pytest.approx(16384 / port, rel=1e-5)
    near = float(crossing_port(8192, 8, gpu.fabric))
    assert near < 0.2 * 16384 / port
    # A token's way has all of it, latency and bytes.
    assert float(crossing_usage(8192, 8, Rank(gpu)).seconds) > near


def test_slopes_are_finite_where_pipelines_begin() -> None:
    def busy(stages: jax.Array, head: jax.Array) -> jax.Array:
        return occupied(Plan(stages, stages, batch=1, chunk=1), 80.0, 80.0, head, 0.0, 4.0, 0.5)

    for stages in (1.0, 1.5, 2.0, 7.0):
        slopes = jax.grad(busy, argnums=(0, 1))(jnp.array(stages), jnp.array(1.5))
        assert all(bool(jnp.isfinite(slope)) for slope in slopes)
        assert float(slopes[0]) < 0.0


def test_a_full_pipeline_of_wafers_costs_a_user_little() -> None:
    # 70B on four wafers: a stage of 6.9 µs, 80 of them are the way of a token; so 80 requests are
    # as fast as one, and make 0.41 of what 4 · 0.8 · 15.6 PFLOP/s allow. Memory holds 146 of 500
    # tokens, and 77 of 1,000.
    def found(batch: int):
        return evaluation.estimate(
            "llama-3.1-70b", "cs3", pp=4, regions=20, batch=batch, isl=8, osl=500,
            weights="bf16", engine="ideal", chunk=8,
        )  # fmt: skip

    one, full = found(1), found(80)
    assert float(full.tpot_s) < 1.1 * float(one.tpot_s)
    limit = 0.8 * 15.6e15 / (2 * 69.5e9)
    share = float(full.output_tokens_per_second_chip) / limit
    assert share == pytest.approx(0.41, abs=0.05)
