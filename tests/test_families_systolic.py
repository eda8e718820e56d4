"""Trainium and TPU: check points by hand and by the model."""

import importlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perfmodel import calibrate_families, question, serving, validation
from perfmodel.chips import constants, load_chip, tpu
from perfmodel.errors import InputError
from perfmodel.fabric import all_gather_seconds, all_reduce_seconds, all_to_all_seconds
from perfmodel.formats import precision
from perfmodel.machine import Machine, Rank, matmul_parts
from perfmodel.models.catalogue import load_model
from perfmodel.operators import KERNELS, Matmul
from perfmodel.plan import Engine, Load, Plan

CHIPS = (
    "inf2", "trn1", "trn2", "trn2_ultra", "trn3",
    "tpu_v4", "tpu_v5e", "tpu_v5p", "tpu_v6e", "tpu_v7",
)  # fmt: skip


def rows(name: str, metric: str) -> list[validation.Point]:
    """Returns measured points of a metric that no constant has seen, of dense networks."""
    unseen = [p for p in validation.points(name) if p.kind == "measured" and not p.fitted]
    mixtures = ("397b", "480b")  # programs of their own; `perfmodel validate tpu` has them
    return [p for p in unseen if p.metric == metric and not any(m in p.id for m in mixtures)]


def neutral(name: str, **fields: float) -> Machine:
    """Returns a chip of its datasheet alone, with some of its numbers changed."""
    chip = load_chip(name)
    family = importlib.import_module(f"perfmodel.chips.{chip.sheet.identity['family']}")
    return family.machine(chip.inputs()[0] | fields, constants.neutral())


@pytest.mark.parametrize(
    ("alias", "name"),
    [("v5e", "tpu_v5e"), ("tpu-v5e", "tpu_v5e"), ("Trillium", "tpu_v6e"), ("ironwood", "tpu_v7"),
     ("v7", "tpu_v7"), ("tpu7x", "tpu_v7"), ("Inferentia2", "inf2"), ("trn2u", "trn2_ultra")],
)  # fmt: skip
def test_names(alias, name):
    assert load_chip(alias).name == name


@pytest.mark.parametrize(
    ("name", "metric", "least", "error"),
    [
        ("trainium", "tpot_s", 40, 0.10),
        ("trainium", "ttft_s", 50, 0.35),
        ("tpu", "output_tokens_per_second", 4, 0.20),
    ],
)
def test_held_out_medians(name, metric, least, error):
    held = rows(name, metric)
    errors = np.abs(np.expm1(validation.errors(held)))
    assert len(held) >= least and np.median(errors) < error, np.median(errors)


def test_constants_are_few_and_so_are_the_rows_they_saw():
    for task in calibrate_families.TASKS:
        if task.fit in ("trainium", "tpu"):
            seen = [p for p in validation.points(task.fit) if p.fitted]
            assert len(task.start) <= 3 and len(task.start) <= len(seen) < 10
            assert {p.chip for p in seen} <= set(task.chips)


def test_palm_on_chips_that_the_fit_has_not_seen():
    palm = next(p for p in rows("tpu", "tpot_s") if p.chip == "tpu_v4")
    found, margin = validation.modelled(palm)
    assert margin > 0 and found == pytest.approx(0.029, rel=0.15)


def test_rows_that_do_not_fill_an_array_cost_as_much():
    # 8 rows of a 256-array take 256: 2·256·8192·8192/918e12 beside 134 MB at 1.638 TB/s.
    kind = jnp.zeros(len(KERNELS)).at[0].set(1.0)
    rank = Rank(neutral("tpu_v6e"))

    def seconds(count: int) -> float:
        op = Matmul("p", "decode/ffn", count, 8192, 8192, 2, 2, kind)
        return float(matmul_parts(op, rank).total)

    arithmetic = 2 * 256 * 8192 * 8192 / 918e12
    for count in (8, 256):
        moved = 2 * (8192 * 8192 + 2 * count * 8192) / 1.638e12
        assert seconds(count) == pytest.approx(math.hypot(arithmetic, moved), rel=1e-4)
    twice = 2 * (8192 * 8192 + 2 * 512 * 8192) / 1.638e12
    assert seconds(512) == pytest.approx(math.hypot(2 * arithmetic, twice), rel=1e-4)


def test_all_reduce_on_a_torus_by_hand():
    # A cube of 4 × 4 × 4 v5p: 3·(4 − 1) hops of 1 µs, and 2·63/64 of the message over 540 GB/s.
    message = 64e6
    found = float(all_reduce_seconds(message, 64, neutral("tpu_v5p").fabric))
    assert found == pytest.approx(9e-6 + 2 * 63 / 64 * message / 540e9, rel=1e-4)
    # The scaling book counts whole rings: 2·V/(axes · both directions of an axis, 180 GB/s).
    assert found == pytest.approx(2 * message / (3 * 180e9), rel=0.05)
    # 16 Trainium2 as 4 × 4: six hops of 1.5 µs, over 512 GB/s.
    found = float(all_reduce_seconds(1e6, 16, neutral("trn2").fabric))
    assert found == pytest.approx(9e-6 + 2 * 15 / 16 * 1e6 / 512e9, rel=1e-4)


def test_a_slice_without_closed_rings_takes_twice_the_bytes():
    line = float(all_reduce_seconds(8e6, 8, neutral("tpu_v6e").fabric))
    ring = float(all_reduce_seconds(8e6, 8, neutral("tpu_v6e", open_ends=0.0).fabric))
    hops = 2 * (math.sqrt(8) - 1) * 1e-6
    assert ring == pytest.approx(hops + 2 * 7 / 8 * 8e6 / 360e9, rel=1e-4)
    assert line - hops == pytest.approx(2 * (ring - hops), rel=1e-4)


def test_neighbours_share_one_link():
    # Two chips of a torus are joined by one of its links: 45 GB/s of a v5e's 180, both on a line.
    fabric = neutral("tpu_v5e").fabric
    bandwidth = 8e6 / (float(all_gather_seconds(8e6, 2, fabric)) - 2 * (math.sqrt(2) - 1) * 1e-6)
    assert bandwidth == pytest.approx(2 * 45e9 / 2, rel=1e-3)


def test_all_to_all_crosses_the_chips_between():
    # A ring of 12 Inferentia2: a message crosses a quarter of the ring, three links on average.
    fabric = neutral("inf2").fabric
    found = float(all_to_all_seconds(12e6, 12, fabric))
    assert found == pytest.approx(11 * 1.5e-6 + 3 * 11 / 12 * 12e6 / 96e9, rel=1e-4)


def test_reduction_in_the_network_by_hand():
    # 64 Trainium3 over switches: 2·63/64 of the message; if the switches added, (64 + 1)/64.
    message = 64e6
    plain = float(all_reduce_seconds(message, 64, neutral("trn3").fabric))
    added = float(all_reduce_seconds(message, 64, neutral("trn3", in_network=1.0).fabric))
    assert plain == pytest.approx(2 * 63 / 64 * message / 1.28e12, rel=1e-4)
    assert added == pytest.approx(65 / 64 * message / 1.28e12, rel=1e-4)


def test_kv_heads_are_held_by_every_core():
    # 16 Trainium2 are 64 cores: each of eight kv heads lies there eight times.
    shard = Plan(chips=16, stages=1, batch=1, chunk=1).shard(load_chip("trn2").machine)
    held = float(shard.kv_heads(8)) * 16
    assert held == 64


@pytest.mark.parametrize("name", CHIPS)
def test_derivatives_are_finite(name):
    chip = load_chip(name)
    family = importlib.import_module(f"perfmodel.chips.{chip.sheet.identity['family']}")

    def total(fields, known):
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(family.machine(fields, known)))

    for gradient in jax.grad(total, argnums=(0, 1))(*chip.inputs()):
        assert all(np.isfinite(value) for value in gradient.values())


def test_families_stack_in_one_program():
    names = (*CHIPS, "h100", "wse3")
    machines = [load_chip(name).machine for name in names]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *machines)
    load, plan = Load(isl=1000, osl=1000), Plan(chips=4, stages=1, batch=8, chunk=512)
    asked = (load_model("llama-3.1-8b").model, load, plan, precision("bf16"))
    asked = question.numbers((*asked, Engine(0.9, 2e9, 16, 0.0, 0.0, 0.0, 0.5)))

    def speed(machine: Machine) -> jax.Array:
        found = serving.estimate(machine, *asked)
        return jnp.stack([found.ttft, found.tpot])

    together = jax.jit(jax.vmap(speed))(stacked)
    assert bool(jnp.all(together > 0.0)) and bool(jnp.all(jnp.isfinite(together)))
    for index in (0, len(CHIPS), len(CHIPS) + 1):
        assert together[index].tolist() == pytest.approx(speed(machines[index]).tolist(), rel=1e-4)


def test_a_rate_is_never_below_the_bytes_over_the_bandwidth():
    # The scaling book's bound for Llama-3-70B in 8 bits on eight v5e: 17 ms a step.
    bound = next(p for p in validation.points("tpu") if p.kind == "theory")
    keys = 32 * 8192 * 2 * 80 * 8 * 128
    assert (70.6e9 + keys) / (8 * 819e9) == pytest.approx(bound.value, rel=0.05)
    assert bound.value < validation.modelled(bound)[0] < 2.5 * bound.value


def test_columns_that_a_file_may_have(tmp_path, monkeypatch):
    text = ",".join((*validation.COLUMNS, "context_ranks", "colour")) + "\n"
    (tmp_path / "odd.csv").write_text(text)
    monkeypatch.setattr(validation, "files", lambda _: tmp_path)
    with pytest.raises(InputError, match="and may be context_ranks, prefix_hit"):
        validation.points("odd")


def test_a_tpu_of_three_numbers(tmp_path):
    numbers = {"peak_bf16": (2e14, "FLOP/s"), "memory_capacity": (16e9, "B")}
    numbers["memory_bandwidth"] = (8e11, "B/s")
    tables = [
        f'[{name}]\nvalue = {value}\nunit = "{unit}"\nkind = "assumed"\n'
        for name, (value, unit) in numbers.items()
    ]
    file = tmp_path / "mine.toml"
    file.write_text("\n".join(['[chip]\nname = "mine"\nfamily = "tpu"\n', *tables]))
    chip = load_chip(file)
    assert float(chip.machine.compute.fill_rows) == 128.0
    assert chip.fields["array_rows"].kind == "assumed"
    assert jax.tree.structure(chip.machine) == jax.tree.structure(tpu.machine(*chip.inputs()))
