"""Gaudi and Ascend: peaks and layers by hand, measured batches, measured operators."""

import importlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import perfmodel
from perfmodel import calibrate_ascend, validation
from perfmodel.chips import constants, load_chip
from perfmodel.fabric import local_bandwidth
from perfmodel.machine import Rank, matmul_parts
from perfmodel.operators import KERNELS, Matmul

CHIPS = ("gaudi2", "gaudi3", "ascend_910b", "ascend_910c")
MIXED = ("gaudi2", "ascend_910b", "h100")


def product(rows, columns, inner):
    kind = jnp.zeros(len(KERNELS)).at[0].set(1.0)
    return Matmul("p", "decode/ffn", rows, columns, inner, 2, 2, kind)


def test_peaks_are_arrays_times_clock():
    fields = {name: load_chip(name).inputs()[0] for name in CHIPS}
    for name, side in (("gaudi2", 256**2), ("gaudi3", 256**2), ("ascend_910b", 16**3)):
        of = fields[name]
        assert of["peak_bf16"] == pytest.approx(2 * of["units"] * side * of["clock"], rel=2e-3)
    assert fields["ascend_910b"]["peak_vector"] == pytest.approx(48 * 64 * 2 * 1.8e9, rel=1e-3)
    assert fields["gaudi2"]["peak_vector"] == pytest.approx(24 * 64 * 2 * 1.65e9, rel=1e-3)


def test_two_gaudis_share_three_ports():
    fabric = load_chip("gaudi2").machine.fabric
    rates = [float(local_bandwidth(fabric, n)) for n in (2, 4, 8)]
    assert rates == pytest.approx([37.5e9, 112.5e9, 262.5e9])


def test_best_products_by_hand():
    # Gaudi 2: 8,192³ in whole tiles at the best share of the peak. Ascend: 1.1 PFLOP, measured
    # in 3.36 ms.
    gaudi = float(matmul_parts(product(8192, 8192, 8192), Rank(load_chip("gaudi2").machine)).total)
    assert 2 * 8192**3 / gaudi == pytest.approx(418.7e12, rel=0.03)
    rank = Rank(load_chip("ascend_910b").machine)
    found = float(matmul_parts(product(16384, 8192, 4096), rank).total)
    assert found == pytest.approx(3364.33e-6, rel=0.1)


def test_a_token_of_a_7b_by_hand():
    # One sequence on one Gaudi 2: 13.2 GB of weights at their share of 2.46 TB/s, and little else.
    chip = load_chip("gaudi2")
    weights = 2 * (6_738_415_616 - 32_000 * 4096)
    stream = weights / (chip.constants["kernels.bf16.stream"].value * 2.46e12)
    setting = {"isl": 64, "osl": 64, "engine": "ideal"}
    found = float(perfmodel.estimate("llama-2-7b", "gaudi2", **setting).tpot_s)
    assert stream < found < 1.15 * stream
    # On eight chips each layer waits for its launch instead.
    launch = 32 * chip.constants["floors.launch"].value
    found = float(perfmodel.estimate("llama-2-7b", "gaudi2", tp=8, **setting).tpot_s)
    assert launch <= found < 1.15 * launch


def test_measured_batches_of_gaudi():
    rows = [p for p in validation.points("gaudi") if p.kind == "measured"]
    seen = [p for p in rows if p.fitted]
    unseen = [p for p in rows if not p.fitted]
    assert (len(seen), len(unseen)) == (12, 179)
    assert {p.model for p in seen} == {"llama-2-7b", "llama-2-70b"}
    found = np.abs(np.expm1(validation.errors(unseen)))
    assert np.median(found) < 0.10 and np.quantile(found, 0.9) < 0.25, np.median(found)


@pytest.mark.parametrize(("chip", "most"), [("gaudi2", 0.2), ("gaudi3", 0.1)])
def test_makers_own_points_in_8_bits(chip, most):
    rows = [p for p in validation.points("gaudi") if p.kind == "vendor" and p.chip == chip]
    assert len(rows) > 10 and not any(p.fitted for p in rows)
    assert np.median(np.abs(np.expm1(validation.errors(rows)))) < most


MEDIANS = {
    "kernels bf16": 0.18,
    "kernels int8": 0.18,
    "decode": 0.18,
    "context": 0.10,
    "experts bf16": 0.10,
    "experts int8": 0.15,
}


@pytest.fixture(scope="module")
def operators():
    return pd.read_csv(Path(__file__).parent / "data" / "ascend.csv")


@pytest.mark.parametrize("kind", calibrate_ascend.KINDS, ids=lambda kind: kind.name)
def test_measured_operators_of_ascend(kind, operators):
    rows = operators[(operators["kind"] == kind.name) & ~operators["seen"]].reset_index(drop=True)
    assert len(rows) >= 15
    size = np.abs(calibrate_ascend.errors(kind, load_chip("ascend_910b").machine, rows))
    assert np.median(size) < MEDIANS[kind.name], np.median(size)


def test_fit_of_ascend_says_what_it_has_seen():
    found = load_chip("ascend_910b").constants
    for kind in calibrate_ascend.KINDS:
        fitted = [found[f"{kind.group}.{name}"].number for name in kind.free]
        assert len(fitted) == 3 and all(number.kind == "fitted" for number in fitted)
        assert all(number.note.startswith("seen: ") for number in fitted)
    # The other die's chip takes them from its generation.
    assert "same generation" in load_chip("ascend_910c").constants["decode.stream"].origin


def test_a_die_of_a_910c_keeps_its_own_keys():
    assert float(load_chip("ascend_910c").machine.decode.shards) == 2.0


@pytest.mark.parametrize("name", CHIPS)
def test_derivatives_are_finite(name):
    chip = load_chip(name)
    family = importlib.import_module(f"perfmodel.chips.{chip.sheet.identity['family']}")

    def total(fields, known):
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(family.machine(fields, known)))

    for gradient in jax.grad(total, argnums=(0, 1))(*chip.inputs()):
        assert all(np.isfinite(value) for value in gradient.values())


def test_families_stack_in_one_program():
    machines = [load_chip(name).machine for name in MIXED]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *machines)
    one = product(16, 8192, 8192)
    together = jax.vmap(lambda m: matmul_parts(one, Rank(m)).total)(stacked)
    alone = [float(matmul_parts(one, Rank(m)).total) for m in machines]
    assert together.tolist() == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("name", CHIPS)
def test_neutral_constants_leave_the_roofline(name):
    chip = load_chip(name)
    family = importlib.import_module(f"perfmodel.chips.{chip.sheet.identity['family']}")
    fields, _ = chip.inputs()
    # As many outputs as units at least: a unit cannot share the work of one output.
    found = matmul_parts(product(8, 4096, 4096), Rank(family.machine(fields, constants.neutral())))
    arithmetic = 2 * 8 * 4096**2 / fields["peak_bf16"]
    moved = 2 * (4096**2 + 2 * 8 * 4096) / fields["memory_bandwidth"]
    assert float(found.total) == pytest.approx(np.hypot(arithmetic, moved), rel=1e-4)
