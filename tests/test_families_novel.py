"""Wafers, LPUs, compute in memory and dataflow chips: check points by hand and by the model."""

import importlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import perfmodel
from perfmodel import calibrate_families, tiers, validation
from perfmodel.chips import constants, load_chip, wafer
from perfmodel.errors import InputError
from perfmodel.machine import Rank, matmul_parts
from perfmodel.operators import KERNELS, Matmul

CHIPS = ("wse2", "wse3", "groq_lpu", "groq_3_lpu", "corsair", "sn40l")

# Rows that no constant has seen, or few, and the factor within which the model must be. Launch
# figures of the WSE-3 and points that need several tokens a step are told apart below.
BANDS = {
    "wse2-8b-whole-wafer": 1.05,
    "wse2-72b": 1.25,
    "wse3-70b-2024-10": 1.15,
    "wse3-405b-2024-11": 1.3,
    "wse3-qwen3-32b": 1.25,
    "wse3-llama-4-maverick": 1.5,
    "groq-70b-576": 1.1,
    "groq-8b": 1.1,
    "groq-7b": 1.1,
    "groq-70b-2025": 1.1,
    "groq-scout-2025": 1.1,
    "corsair-8b-server": 1.15,
    "corsair-70b-rack": 1.15,
    "corsair-8b-card-lpddr": 1.15,
    "sn40l-16-llama-3.1-8b": 1.2,
}


def point(name):
    return next(p for n in validation.names() for p in validation.points(n) if p.id == name)


@pytest.mark.parametrize("name", BANDS)
def test_check_points(name):
    found, _ = validation.modelled(point(name))
    ratio = found / point(name).value
    assert 1 / BANDS[name] < ratio < BANDS[name], ratio


def test_launch_figures_are_one_factor_off():
    names = ("wse3-8b-launch", "wse3-70b-launch")
    ratios = [validation.modelled(point(name))[0] / point(name).value for name in names]
    assert all(3.5 < ratio < 5 for ratio in ratios), ratios
    assert max(ratios) / min(ratios) < 1.2


def test_points_above_the_memory_roofline_need_several_tokens_a_step():
    # 457 tok/s of 141 GB in 16 bits is 64 TB/s; 16 sockets read 25.6.
    assert 457 * 70.55e9 * 2 / 25.6e12 > 2.5
    found, _ = validation.modelled(point("sn40l-16-llama-3.1-70b"))
    assert found < 25.6e12 / (70.55e9 * 2)


def test_measured_batches_of_sn40l():
    rows = [p for p in validation.points("dataflow") if p.kind == "measured"]
    unseen = [p for p in rows if not p.fitted and "llama-2" not in p.id]
    errors = np.abs(np.expm1(validation.errors(unseen)))
    assert len(unseen) > 10 and np.median(errors) < 0.15, errors


def test_talks_ratio_of_bandwidths():
    # "7,000 ×" fits 3.0 TB/s; of an H100 SXM it is 6,270 ×.
    sram, hbm = (load_chip(c).machine.memory.bandwidth[0] for c in ("cs3", "h100"))
    assert round(float(sram / hbm), -1) == 6270
    assert float(sram) / 3.0e12 == pytest.approx(7000)


def test_sum_across_a_region_by_hand():
    # 900,000/20 elements, side 212: 0.67·(2·212 + 16·14.6)/1.1 GHz.
    rank = Rank(load_chip("wse3").machine, 1 / 20)
    side = math.sqrt(900_000 / 20)
    factor = load_chip("wse3").constants["mesh.reduction"].value
    expected = factor * (2 * side + 16 * math.sqrt(side)) / 1.1e9
    assert float(rank.mesh_latency) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", CHIPS)
def test_derivatives_are_finite(name):
    chip = load_chip(name)
    family = importlib.import_module(f"perfmodel.chips.{chip.sheet.identity['family']}")

    def total(fields, known):
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(family.machine(fields, known)))

    for gradient in jax.grad(total, argnums=(0, 1))(*chip.inputs()):
        assert all(np.isfinite(value) for value in gradient.values())


def test_families_stack_in_one_program():
    machines = [load_chip(name).machine for name in (*CHIPS, "h100")]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *machines)
    latency = jax.vmap(lambda m: Rank(m).mesh_latency)(stacked)
    assert latency.shape == (7,) and float(latency[-1]) == 0.0 and float(latency[0]) > 0.0


def test_neutral_constants_leave_the_roofline():
    # Without a time for sums, a product of 8 × 64 × 4096 is 2·m·n·k/P beside its bytes/W; what is
    # left of the mesh is m·n results of 2 B on an edge of √900,000 elements, 4 B a cycle each.
    fields, _ = load_chip("wse3").inputs()
    rank = Rank(wafer.machine(fields, constants.neutral() | {"mesh.reduction": 0.0}))
    kind = jnp.zeros(len(KERNELS)).at[0].set(1.0)
    found = matmul_parts(Matmul("p", "decode/ffn", 8, 64, 4096, 2, 2, kind), rank)
    arithmetic = 2 * 8 * 64 * 4096 / 15.6e15
    moved = 2 * (64 * 4096 + 8 * 4096 + 8 * 64) / 21e15
    edge = 2 * 8 * 64 / (4 * 1.1e9 * math.sqrt(900_000))
    expected = math.hypot(arithmetic, moved) + edge
    assert float(found.total) == pytest.approx(expected, rel=1e-4)


def test_constants_by_pattern():
    found = calibrate_families.expand({"fabric.*_latency": 1.0}, list(constants.neutral()))
    assert {"fabric.oneshot_latency", "fabric.twoshot_latency"} <= set(found)


def test_frontier_lays_layers_side_by_side_on_wafers():
    found = perfmodel.frontier(
        "llama-3.1-8b",
        ["cs3"],
        isl=1000,
        osl=100,
        max_chips=1,
        batches=(1, 16),
        precisions=("bf16",),
    )
    # The best number of stages lies inside: sums are shorter on small regions, products longer.
    assert set(found.tp.values) == {1} and set(found.pp.values) == {1}
    assert 1 < found.regions.values.min() <= found.regions.values.max() <= 32
    # Sixteen requests fill sixteen stages, and their prompts the rest: a stage for every layer.
    busiest = found.isel(point=int(found.output_tokens_per_second_chip.values.argmax()))
    assert int(busiest.regions) == 32
    assert set(found["chunk"].values) == {8}


def test_a_prompt_passes_few_sequences_quickly_in_a_deep_pipeline():
    # 125 chunks of 8 tokens in 32 stages: four rounds of its 100, not all of them.
    def speed(batch: int) -> float:
        found = perfmodel.estimate(
            "llama-3.1-8b", "cs3", regions=32, batch=batch, isl=1000, osl=100, weights="bf16"
        )
        return float(found.tokens_per_second_user)

    assert speed(2) > 0.9 * speed(1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"regions": 40}, "regions: 1 × 40 stages exceed the 32 layers"),
        ({"regions": 2, "tp": 2}, "2 stages on one chip leave no room for tp 2"),
        ({"offload": 1.5}, "offload: must be a share from 0 to 1"),
    ],
)
def test_plans_that_are_refused(options, words):
    with pytest.raises(InputError, match=words):
        perfmodel.estimate("llama-3.1-8b", "cs3", isl=100, osl=10, **options)


def test_offload_by_hand():
    # 8 GB of int8 weights on one Corsair: what 1.8 GB of SRAM does not hold comes at 400 GB/s.
    chip = {"weights": "int8", "isl": 32, "osl": 32, "engine": "ideal"}
    alone = perfmodel.estimate("llama-3.1-8b", "corsair", **chip)
    assert not alone.feasible and alone.binding == "memory"
    slow = perfmodel.estimate("llama-3.1-8b", "corsair", offload=1.0, **chip)
    table = 128_256 * 4096 * 2  # embedding and head stay in 16 bits
    weights = 8_030_261_248 - 2 * 128_256 * 4096 + 2 * table
    stream = load_chip("corsair").constants["kernels.int8.stream"].value
    expected = (weights - table - 1.8e9) / (stream * 400e9)
    assert bool(slow.feasible) and float(slow.tpot_s) == pytest.approx(expected, rel=0.06)


def test_offload_is_a_feature_of_every_chip_and_has_a_slope():
    # 141 GB in an H100's 80: the rest comes from the host over 63 GB/s.
    found = perfmodel.estimate("llama-3.1-70b", "h100", offload=1.0, isl=100, osl=10)
    stream = load_chip("h100").constants["kernels.bf16.stream"].value
    expected = (141.1e9 - 0.9 * 85.5e9) / (stream * 63e9)
    assert bool(found.feasible) and float(found.tpot_s) == pytest.approx(expected, rel=0.05)


def test_tiers_conserve_bytes_and_fill_in_order():
    free = [jnp.asarray(x) for x in (2.0, 3.0, 10.0, 0.0)]
    for first in (0.0, 0.3, 1.0):
        found = tiers.fill(free, 8.0, 4.0, first)
        assert float(jnp.sum(found.weights) + jnp.sum(found.cache)) == pytest.approx(12.0)
        both = found.weights + found.cache
        assert both.tolist() == pytest.approx([2.0, 3.0, 7.0, 0.0])
    slope = jax.grad(lambda z: tiers.fill(free, 8.0, 4.0, z).cache[0])(0.1)
    assert float(slope) == pytest.approx(-8.0)  # a share of the weights takes the keys' place


def test_a_wafer_of_few_numbers_still_waits_for_its_sums(tmp_path):
    # Three numbers are a chip; what is not given is the family's, and marked.
    numbers = {"peak_bf16": (5e15, "FLOP/s"), "memory_capacity": (30e9, "B")}
    numbers["memory_bandwidth"] = (1e16, "B/s")
    tables = [
        f'[{name}]\nvalue = {value}\nunit = "{unit}"\nkind = "assumed"\n'
        for name, (value, unit) in numbers.items()
    ]
    file = tmp_path / "mine.toml"
    file.write_text("\n".join(['[chip]\nname = "mine"\nfamily = "wafer"\n', *tables]))
    chip = load_chip(file)
    assert chip.fields["elements"].kind == "assumed"
    assert float(Rank(chip.machine).mesh_latency) == pytest.approx(
        float(Rank(load_chip("wse3").machine).mesh_latency), rel=1e-6
    )
