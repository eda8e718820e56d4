"""One design: names and units, what does not fit and what would help, and the operator table."""

import dataclasses
import json
import math
import subprocess
import sys

import equinox as eqx
import numpy as np
import pytest
import xarray as xr

import perfmodel
from perfmodel import designs, engines, evaluation, question, results, serving
from perfmodel.errors import InputError
from perfmodel.serving import BINDING

LOAD = dict(isl=4000, osl=1000)


def estimate(model: str = "llama-3.3-70b", chip: str = "h100", **options) -> xr.Dataset:
    return perfmodel.estimate(model, chip, **LOAD | options)


def test_every_number_has_a_unit_a_name_and_a_json_value() -> None:
    found = estimate(tp=8, batch=32)
    promised = (
        "ttft_s tpot_s e2e_s longest_gap_s tokens_per_second_user tokens_per_second_user_e2e "
        "output_tokens_per_second_chip total_tokens_per_second_chip output_tokens_per_second "
        "requests_per_second power_w chip_power_w energy_per_output_token_j "
        "energy_per_total_token_j usd_per_million_output_tokens usd_per_million_input_tokens "
        "usd_per_million_total_tokens usd_per_hour chips weight_bytes kv_bytes activation_bytes "
        "memory_bytes memory_margin kv_bytes_per_token admitted running chunk_share feasible "
        "binding tp pp batch chunk replicas"
    )
    assert set(promised.split()) <= set(found)
    for name, variable in found.variables.items():
        assert variable.attrs["units"] and variable.attrs["long_name"], name
        assert json.loads(json.dumps(variable.values.item())) == variable.values.item()
    keys = "version created call model isl osl prefix_hit engine catalogue_digest price_assumption"
    assert set(keys.split()) <= set(found.attrs)
    assert found.attrs["call"].startswith("perfmodel.estimate('llama-3.3-70b', 'h100', tp=8")


def test_definitions_hang_together() -> None:
    found = {name: v.item() for name, v in estimate(tp=4, batch=16, replicas=3).items()}
    assert found["chips"] == 12
    assert found["e2e_s"] == pytest.approx(found["ttft_s"] + 999 * found["tpot_s"], rel=1e-5)
    assert found["tokens_per_second_user"] == pytest.approx(1 / found["tpot_s"], rel=1e-6)
    assert found["tokens_per_second_user_e2e"] == pytest.approx(1000 / found["e2e_s"], rel=1e-6)
    rate = found["requests_per_second"]
    # Little's law over three replicas of 16 requests each.
    assert rate * found["e2e_s"] == pytest.approx(48, rel=1e-5)
    assert found["output_tokens_per_second"] == pytest.approx(rate * 1000, rel=1e-6)
    per_chip = found["output_tokens_per_second"] / 12
    assert found["output_tokens_per_second_chip"] == pytest.approx(per_chip, rel=1e-6)
    assert found["total_tokens_per_second_chip"] == pytest.approx(5 * per_chip, rel=1e-6)
    assert found["power_w"] == pytest.approx(12 * found["chip_power_w"], rel=1e-6)
    joules = found["power_w"] / (rate * 5000)
    assert found["energy_per_total_token_j"] == pytest.approx(joules, rel=1e-5)
    # $/h ÷ (tok/s × 3,600) × 1e6; output and input tokens share the whole.
    dollars = found["usd_per_hour"] / (rate * 5000 * 3600) * 1e6
    assert found["usd_per_million_total_tokens"] == pytest.approx(dollars, rel=1e-5)
    split = 1000 * found["usd_per_million_output_tokens"]
    split += 4000 * found["usd_per_million_input_tokens"]
    assert split / 5000 == pytest.approx(dollars, rel=1e-5)
    # 2 · 80 layers · 8 kv heads · 128 · 2 B
    assert found["kv_bytes_per_token"] == 327_680


def test_gpu_divisor() -> None:
    # 8 GPUs, 100 tok/s: 12.5 tok/s per GPU.
    model = perfmodel.load_model("llama-3.3-70b").model
    machine, plan = perfmodel.load_chip("h100").machine, designs.designs(tp=4, replicas=2).take(0)
    parts = dict(machine=machine, model=question.numbers(model), plan=plan.plan())
    parts["precision"] = perfmodel.precision("bf16")
    found = serving.estimate(
        load=question.numbers(perfmodel.Load(isl=4000, osl=1000)),
        engine=engines.load_engine("neutral").engine,
        **parts,
    )
    found = eqx.tree_at(lambda e: e.output_rate, found, np.float32(50.0))
    design = results.Design(estimate=found, **parts)
    assert float(results.BY_NAME["output_tokens_per_second"].read(design)) == 100.0
    assert float(results.BY_NAME["output_tokens_per_second_chip"].read(design)) == 12.5


def test_what_does_not_fit_names_memory_and_the_smallest_tp_that_fits() -> None:
    found = estimate("llama-3.1-405b", batch=128)
    assert not found.feasible
    assert found.binding == "memory"
    # 405.9 B weights · 2 B = 812 GB over 0.9 · 85.5 − 2 GB: more than 8 cards, so 16 of 1, 2, 4 …
    assert "the smallest TP that fits is 16" in found.advice.item()
    assert not estimate("llama-3.1-405b", tp=8).feasible
    assert estimate("llama-3.1-405b", tp=16).feasible
    for quantity in results.QUANTITIES:
        assert math.isnan(found[quantity.name]) == quantity.runs, quantity.name
    assert found.weight_bytes > 8e11 and found.memory_margin < 0


def test_no_margin() -> None:
    # 70B in bf16 at 97 %: 141.1 GB of weights beside 2 GB of workspace.
    neutral = engines.load_engine("neutral")
    greedy = eqx.tree_at(lambda e: e.memory_fraction, neutral.engine, 0.97)
    engine = dataclasses.replace(neutral, engine=greedy)
    # The card as its driver reports it, 150.75 GB: one request, and 1.2 GB beside it.
    real = estimate(chip="h200", engine=engine)
    assert 0.0 < real.memory_margin < 0.02 and real.admitted == 1
    h200 = perfmodel.load_chip("h200")
    machine = eqx.tree_at(lambda m: m.memory.capacity, h200.machine, np.float32([141e9, 0, 0, 0]))
    found = estimate(chip=h200.with_machine(machine), engine=engine)
    assert not found.feasible and found.memory_margin < 0 and found.binding == "memory"
    assert "the smallest TP that fits is 2" in found.advice.item()


def test_service_levels_bind_and_numbers_stand() -> None:
    free = estimate(tp=8, batch=256)
    assert free.feasible and free.advice == ""
    bound = estimate(tp=8, batch=256, slo_tpot=float(free.tpot_s) * 0.5)
    assert not bound.feasible and bound.binding == "tpot limit"
    assert bound.tpot_s == free.tpot_s
    batch = int(bound.advice.item().split("batch of ")[1].split()[0])
    limit = dict(tp=8, slo_tpot=float(free.tpot_s) * 0.5)
    assert estimate(batch=batch, **limit).feasible
    assert not estimate(batch=batch + 1, **limit).feasible
    assert estimate(tp=8, batch=256, slo_ttft=1e-3).binding == "ttft limit"
    # Reported only where it binds.
    assert estimate(tp=8, batch=256, slo_tpot=10.0).feasible


def test_prefix_hits_and_chunks() -> None:
    cold, warm = (estimate(tp=8, batch=32, prefix_hit=hit) for hit in (0.0, 0.75))
    assert warm.ttft_s < cold.ttft_s and warm.attrs["prefix_hit"] == 0.75
    assert warm.output_tokens_per_second_chip > cold.output_tokens_per_second_chip
    assert estimate(tp=8)["chunk"] == 2048
    # A step has room for several short prompts.
    assert perfmodel.estimate("llama-3.3-70b", "h100", tp=8, isl=100, osl=10)["chunk"] == 2048


def test_price() -> None:
    found = estimate(tp=8, price=2.0)
    assert found.usd_per_hour == pytest.approx(16.0)
    assert "as given" in found.attrs["price_assumption"]
    unknown = estimate(chip="gb200", tp=8)
    assert math.isnan(unknown.usd_per_million_output_tokens) and unknown.feasible
    assert unknown.attrs["price_assumption"] == "gb200 unknown"


MINE = """
[chip]
name = "mine"
family = "hbm_gpu"
[peak_bf16]
value = 5e14
unit = "FLOP/s"
[memory_capacity]
value = 9e10
unit = "B"
[memory_bandwidth]
value = 3e12
unit = "B/s"
"""


def test_a_chip_of_ones_own_says_what_is_not_its_own(tmp_path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(MINE)
    found = estimate(chip=str(file), tp=8)
    assert found.attrs["kernel_constants"] == "its family"
    assert {"tdp", "link_bandwidth", "idle_power"} <= set(found.attrs["assumed"].split(", "))
    both = perfmodel.frontier(
        "llama-3.3-70b", [str(file), "h200"], batches=[8], chunks=[2048], **LOAD
    )
    assert list(both.candidate_kernels.values) == ["its family", "h100_sxm"]
    assert both.candidate_assumed.values[0] == found.attrs["assumed"]


def test_notes_of_a_model_are_kept() -> None:
    entry = dataclasses.replace(perfmodel.load_model("llama-3.3-70b"), notes=("one", "two"))
    assert estimate(entry, tp=8).attrs["notes"] == "one; two"  # pyright: ignore[reportArgumentType]
    assert "notes" not in estimate(tp=8).attrs


def test_one_output_token_has_no_decode_step() -> None:
    found = estimate(tp=8, osl=1, slo_tpot=1e-6)
    assert found.feasible and found.binding == "prefill"
    for name in results.OF_DECODE:
        assert math.isnan(found[name]), name
    assert found.e2e_s == pytest.approx(float(found.ttft_s), rel=1e-5)


def test_precision_defaults_to_what_the_model_file_asks_for() -> None:
    entry = perfmodel.load_model("llama-3.1-8b")
    quantised = dataclasses.replace(entry, precision=question.parse_precision("fp8"))
    found = perfmodel.estimate(quantised, "h100", **LOAD)
    assert found.precision == "fp8"
    assert perfmodel.estimate(entry, "h100", **LOAD).precision == "bf16"
    assert perfmodel.estimate(quantised, "h100", weights="bf16", **LOAD).precision == "bf16"


def test_binding_is_that_of_the_estimate() -> None:
    formats = [question.parse_precision("bf16")]
    options = dict(prefix_hit=0.0, engine="neutral", slo_ttft=2.0, slo_tpot=0.05, price=None)
    asked = question.ask("llama-3.3-70b", ["h100", "mi300x"], formats, **LOAD, **options)
    random = np.random.default_rng(0)
    count = 60
    listed = designs.designs(
        chip=random.integers(0, 2, count),
        tp=random.choice([1, 2, 4, 8, 16], count),
        batch=random.integers(1, 600, count),
        chunk=random.choice([512, 2048], count),
    )
    found = designs.evaluate(asked, listed)
    names = results.binding(found)
    assert len(set(names)) >= 4
    for row in range(0, count, 5):
        single = listed.take(row)
        expected = serving.estimate(
            asked.chips[int(single.chip)].machine, asked.network, asked.load, single.plan(),
            perfmodel.precision("bf16"), asked.engine.engine, asked.limits,
        )  # fmt: skip
        assert BINDING[int(expected.binding)] == names[row]
        for name, value in (("ttft_s", expected.ttft), ("power_w", expected.power)):
            np.testing.assert_allclose(found[name][row], value, rtol=1e-6)
        np.testing.assert_allclose(found["margins"][row], expected.margins, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(tp=3), "tp: 3 does not cut the 64 heads and 8 kv heads .*nearest: 4"),
        (dict(tp=0), "tp: must be at least 1, not 0"),
        (dict(tp=2.5), "tp: must be a whole number, not 2.5"),
        (dict(tp=True), "tp: must be a whole number"),
        (dict(pp=81), "pp: 81 stages exceed the 80 layers"),
        (dict(batch=0), "batch: must be at least 1"),
        (dict(batch=10**15), "batch: must be at most"),
        (dict(isl=-1), "isl: must be at least 1"),
        (dict(osl="many"), "osl: must be a whole number, not 'many'"),
        (dict(isl=131_072), "exceed the longest context of llama-3.3-70b, 131,072"),
        (dict(prefix_hit=1.0), "prefix_hit: must be a share"),
        (dict(prefix_hit=float("nan")), "prefix_hit: must be a share"),
        (dict(weights="nvfp4"), "h100_sxm has no fp4 kernel .* has: bf16, fp8"),
        (dict(weights="fp9"), "unknown number format 'fp9'"),
        (dict(slo_ttft=0.0), "slo_ttft: must be a positive number of seconds"),
        (dict(price=-1.0), "price: must be US dollars"),
        (dict(engine="neutra"), "unknown engine 'neutra' .*nearest: neutral"),
        (dict(model="llama-3.3-71b"), "unknown model"),
        (dict(chip="h10"), "unknown chip 'h10' .*h100_sxm"),
    ],
)
def test_bad_input_is_one_line(options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        estimate(**options)
    assert "\n" not in str(error.value) and len(str(error.value)) < 250


@pytest.mark.parametrize("plan", [dict(tp=8, batch=32), dict(tp=2, pp=4, batch=16), dict(tp=4)])
def test_operators_add_up_to_the_estimate(plan: dict) -> None:
    table = evaluation.operators("llama-3.3-70b", "h100", **LOAD, **plan)
    found = estimate(**plan)
    sums = table[["seconds", "share_of_step"]].groupby(table.step).sum()
    np.testing.assert_allclose(sums.share_of_step, 1.0, rtol=1e-6)
    np.testing.assert_allclose(sums.seconds, table.step_seconds, rtol=1e-6)
    parts = sum(table[f"{part}_s"].fillna(0.0) for part in evaluation.PARTS)
    np.testing.assert_allclose(parts, table.seconds, rtol=1e-4, atol=1e-9)
    if plan.get("pp", 1) == 1:
        mixed = (table.step_seconds * table.step_weight).sum()
        assert float(mixed) == pytest.approx(float(found.tpot_s), rel=1e-5)
    for variable in table.variables.values():
        assert variable.attrs["units"] and variable.attrs["long_name"]


@pytest.mark.parametrize(
    ("model", "chip", "plan"),
    [
        # Operators are of one attention group, of eight.
        ("qwen3-30b-a3b", "h100", dict(tp=8, ep=8, attention_dp=8, batch=64)),
        # Weights and keys in two memories.
        ("llama-3.1-8b", "corsair", dict(weights="int8", offload=1.0, batch=4)),
    ],
)
def test_operators_add_up_for_groups_and_tiers(model: str, chip: str, plan: dict) -> None:
    options = {"isl": 400, "osl": 100, **plan}
    table = evaluation.operators(model, chip, **options)
    found = evaluation.estimate(model, chip, **options)
    mixed = (table.step_seconds * table.step_weight).sum()
    assert float(mixed) == pytest.approx(float(found.tpot_s), rel=1e-5)


def test_operators_show_shapes() -> None:
    table = evaluation.operators("llama-3.3-70b", "h100", tp=8, batch=32, **LOAD)
    up = table.isel(operator=(table.name == "up_projection") & (table.step == "decode")).squeeze()
    assert (up.rows, up.columns, up.inner) == (32, 2 * 28672 / 8, 8192)
    assert up["count"] == 80 and up.kernel == "bf16" and up.kind == "matmul"
    assert up.flops == 2 * 32 * 7168 * 8192
    at = (table.name == "decode_attention") & (table.step == "decode")
    attention = table.isel(operator=at).squeeze()
    assert (attention.heads, attention.kv_heads, attention["keys"]) == (8, 1, 4500)
    hybrid = evaluation.operators("qwen3-next-80b-a3b", "h100", tp=4, batch=2, isl=400, osl=100)
    at = (hybrid.name == "decode_recurrence") & (hybrid.step == "decode")
    scan = hybrid.isel(operator=at).squeeze()
    assert (scan.sequences, scan.tokens, scan.heads, scan.state, scan.width) == (2, 1, 8, 128, 128)
    infeasible = evaluation.operators("llama-3.1-405b", "h100", **LOAD)
    assert not infeasible.feasible and np.isnan(infeasible.seconds).all()


def test_engine_profiles(tmp_path) -> None:
    for name in engines.names():
        entry = engines.load_engine(name)
        assert {field.name for field in engines.FIELDS} == set(entry.sheet.numbers)
        for number in entry.sheet.numbers.values():
            assert number.unit and number.kind and (number.source or number.kind == "assumed")
    assert engines.load_engine("ideal").engine.host_step == 0.0
    assert estimate(tp=8, engine="ideal").tpot_s < estimate(tp=8).tpot_s
    # Waiting in M/D/1 is half of that in M/M/1.
    assert engines.load_engine("neutral").engine.variability == 0.5
    file = tmp_path / "mine.toml"
    file.write_text('[engine]\nname = "mine"\n[block]\nvalue = 16\nunit = "token"\n')
    with pytest.raises(InputError, match="mine.toml: missing memory_fraction"):
        engines.load_engine(file)
    file.write_text("[block]\nvalue = 16\n")
    with pytest.raises(InputError, match=r"mine.toml: \[engine\] is missing"):
        engines.load_engine(str(file))


def test_importing_the_package_imports_no_jax() -> None:
    code = (
        "import sys, perfmodel; perfmodel.__version__; dir(perfmodel); "
        "assert not {'jax', 'xarray', 'numpy'} & set(sys.modules); "
        "assert all(getattr(perfmodel, name) is not None for name in perfmodel.__all__); "
        "import jax; assert jax.config.jax_compilation_cache_dir is None"
    )
    env = {"PYTHONPATH": ":".join(sys.path), "PATH": ""}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, cwd="/")


def test_the_cache_is_turned_on_by_hand_only(tmp_path) -> None:
    code = (
        "import perfmodel, jax, sys; where = perfmodel.enable_cache(sys.argv[1]); "
        "assert jax.config.jax_compilation_cache_dir == str(where) == sys.argv[1]; "
        "jax.jit(lambda x: x + 1)(1.0).block_until_ready(); assert any(where.iterdir())"
    )
    env = {"PYTHONPATH": ":".join(sys.path), "PATH": ""}
    path = str(tmp_path / "programs")
    subprocess.run([sys.executable, "-c", code, path], check=True, env=env, cwd="/")
