"""Elasticities: laws of scale, finite differences, names, and how they are shown."""

import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

import perfmodel
from perfmodel import (
    _influences,
    _json,
    _tornado,
    cli,
    evaluation,
    inputs,
    question,
    report,
    results,
    sensitivities,
    serving,
)
from perfmodel.chips import datasheet
from perfmodel.chips.constants import CONSTANTS
from perfmodel.efficiencies import Efficiencies
from perfmodel.machine import Rank
from perfmodel.operators import KERNELS, Collective, Matmul, Vector
from perfmodel.timing import usage

LOAD = dict(isl=4000, osl=1000)
USER, CHIP, TTFT, DOLLARS, JOULES = sensitivities.OUTPUTS
PLANS = {
    "one request": dict(model="llama-3.3-70b", chip="h100", tp=8, batch=1),
    "loaded": dict(model="llama-3.3-70b", chip="h100", tp=8, batch=32),
    "narrow": dict(model="qwen3-32b", chip="b200", tp=2, batch=64, weights="fp8"),
    "pipeline": dict(model="llama-3.3-70b", chip="h100", tp=2, pp=4, batch=16),
    "waits for memory": dict(model="llama-3.1-8b", chip="l40s", tp=1, batch=200),
}


@pytest.fixture(scope="module", params=PLANS)
def found(request) -> xr.Dataset:
    return perfmodel.sensitivity(**(LOAD | PLANS[request.param]))


@pytest.fixture(scope="module")
def loaded() -> xr.Dataset:
    return perfmodel.sensitivity(**(LOAD | PLANS["loaded"]))


def of(dataset: xr.Dataset, name: str, output: str = USER) -> float:
    return float(dataset.elasticity.sel(output=output, input=name))


# ---- Laws ----

# The power of time in each unit: with seconds 1 % longer, a number in B/s is 1 % smaller.
TIME = {"s": 1, "s/B": 1, "FLOP/s": -1, "B/s": -1, "W": -1, "USD/s": -1,
        "1": 0, "B": 0, "token": 0, "J/FLOP": 0, "J/B": 0, "USD/J": 0}  # fmt: skip
ENERGY = {"W": 1, "J/FLOP": 1, "J/B": 1}


def scaled(dataset: xr.Dataset, powers: dict[str, int]) -> np.ndarray:
    """Returns the change of each output when every input changes by its power of the scale."""
    weights = np.array([powers.get(str(unit), 0) for unit in dataset.unit.values])
    return np.nan_to_num(dataset.elasticity.values) @ weights


def test_times_and_rates_set_the_scale_of_time(found):
    """Euler: all times 1 % longer and all rates 1 % lower make TPOT and TTFT exactly 1 % longer,
    throughput 1 % lower, and leave joules and dollars per token."""
    assert set(found.unit.values) <= set(TIME)
    expected = {USER: -1.0, CHIP: -1.0, TTFT: 1.0, DOLLARS: 0.0, JOULES: 0.0}
    for output, change in zip(found.output.values, scaled(found, TIME), strict=True):
        assert change == pytest.approx(expected[output], abs=2e-4), output


def test_energies_and_powers_set_the_scale_of_energy(found):
    expected = {USER: 0.0, CHIP: 0.0, TTFT: 0.0, DOLLARS: 0.0, JOULES: 1.0}
    for output, change in zip(found.output.values, scaled(found, ENERGY), strict=True):
        assert change == pytest.approx(expected[output], abs=2e-4), output


def test_money_is_proportional_to_the_rent(found):
    assert [of(found, "rent", name) for name in sensitivities.OUTPUTS] == pytest.approx(
        [0, 0, 0, 1, 0], abs=1e-6
    )


def test_kinds_of_operator_and_the_host_are_all_of_a_token(loaded):
    """On one stage a token's time is operators and host: their elasticities add up to all of it."""
    operators = loaded.group == "operators"
    speed = float(loaded.elasticity.sel(output=USER)[operators].sum())
    host = of(loaded, "engine.host_step") + of(loaded, "engine.host_sequence")
    assert speed - host == pytest.approx(1.0, abs=2e-4)


def test_a_kind_of_operator_has_its_share_of_a_token():
    """d ln TPOT / d ln e is minus the kind's share of TPOT, but for the share of chunk steps, which
    moves too; with one request there is none."""
    plan = PLANS["one request"]
    found = perfmodel.sensitivity(**(LOAD | plan))
    table = evaluation.operators(**(LOAD | plan))
    decode = table.isel(operator=table.step == "decode")
    kinds = {"efficiency.collective": decode.kind == "collective",
             "efficiency.vector": decode.kind == "vector",
             "efficiency.decode": decode.kind == "attention",
             "efficiency.matmul.bf16": decode.kind == "matmul"}  # fmt: skip
    for name, rows in kinds.items():
        share = float(decode.share_of_step[rows].sum())
        assert share > 0.01 and of(found, name) == pytest.approx(share, rel=1e-4), name


def test_signs(loaded):
    assert of(loaded, "memory_bandwidth") > 0.3 and of(loaded, "memory_bandwidth", DOLLARS) < 0
    assert of(loaded, "peak_bf16", TTFT) < -0.3 and of(loaded, "peak_fp8") == 0.0
    assert of(loaded, "engine.host_step") < 0.0
    assert of(loaded, "memory.energy", JOULES) > 0.1 and of(loaded, "memory.energy") == 0.0


def test_memory_matters_where_requests_wait_for_it():
    tight = perfmodel.sensitivity(**(LOAD | PLANS["waits for memory"]))
    roomy = perfmodel.sensitivity(**(LOAD | PLANS["loaded"]))
    names = ("memory_capacity", "engine.memory_fraction")
    for name in names:
        assert of(tight, name, CHIP) > 0.05 and of(roomy, name, CHIP) == 0.0
    # What is left of memory·fraction counts, whichever of the two grows.
    assert of(tight, names[0], CHIP) == pytest.approx(of(tight, names[1], CHIP), rel=1e-4)


# ---- Against differences ----


# Loaded here, in float32: chips are remembered, and other tests must not find them in float64.
CHIPS = {plan["chip"]: perfmodel.load_chip(plan["chip"]) for plan in PLANS.values()}

# A step this small moves no ceiling: inputs that one takes are tested in `test_gradients`, on its
# chord.
STAIRS = {
    "compute.tile_rows", "compute.tile_columns", "units", "context.query_tile", "domain",
    "decode.shards", "engine.block", "memory_capacity", "engine.workspace",
    "engine.memory_fraction",
}  # fmt: skip
STEP = 1e-6


@jax.jit
def _logarithms(at, network, load, plan, formats):
    found = serving.estimate(
        at.machine, network, load, plan, formats, at.engine, efficiencies=at.efficiencies
    )
    design = results.Design(at.machine, network, plan, formats, found)
    names = sensitivities.OUTPUTS
    return jnp.log(jnp.stack([results.BY_NAME[name].read(design) for name in names]))


@pytest.mark.parametrize("name", ["one request", "loaded", "narrow", "pipeline"])
def test_elasticities_equal_differences_in_float64(name):
    """They are the central difference, or at a kink one of its two sides: with two ranks on a
    switch, the rate of all links and that to the one peer are equal; an admission is never before
    the next step."""
    options = LOAD | PLANS[name]
    chip, pp = CHIPS[options["chip"]], options.get("pp", 1)
    with jax.enable_x64(True):
        found = perfmodel.sensitivity(**options | {"chip": chip})
        rest = question.numbers((
            perfmodel.load_model(options["model"]).model,
            perfmodel.Load(**LOAD),
            perfmodel.Plan(options["tp"] * pp, pp, options["batch"], 2048),
            perfmodel.precision(options.get("weights", "bf16")),
        ))  # fmt: skip
        engine = perfmodel.load_engine("neutral").engine
        at = question.numbers(inputs.Inputs(chip.machine, engine, Efficiencies()))
        leaves, structure = jax.tree.flatten(at)
        base = np.asarray(_logarithms(at, *rest))
        kinks, i = [], -1
        for place, leaf in enumerate(leaves):
            for index in np.ndindex(leaf.shape):
                i += 1
                if leaf[index] == 0.0 or found.input.values[i] in STAIRS:
                    continue
                sides = []
                for step in (STEP, -STEP):
                    moved = leaf.copy()
                    moved[index] *= 1.0 + step
                    tree = jax.tree.unflatten(
                        structure, [*leaves[:place], moved, *leaves[place + 1 :]]
                    )
                    sides.append((np.asarray(_logarithms(tree, *rest)) - base) / step)
                exact, (right, left) = found.elasticity.values[:, i], sides
                spare = 2e-6 + 2e-4 * np.abs(exact)
                low, high = np.minimum(left, right) - spare, np.maximum(left, right) + spare
                assert np.all((low <= exact) & (exact <= high)), (found.input.values[i], sides)
                if np.any(np.abs(left - right) > 4.0 * spare):
                    kinks.append(str(found.input.values[i]))
    # The neutral engine admits in every step, and nothing waits less than that.
    assert set(kinks) <= {"link_bandwidth", "peer_bandwidth", "engine.admission_steps"}


# ---- Names, units, and what is not known ----


def test_every_number_of_a_machine_is_named_once_with_the_unit_of_its_source(loaded):
    machine = perfmodel.load_chip("h100").machine
    count = sum(np.size(leaf) for leaf in jax.tree.leaves(machine))
    names = [str(name) for name in loaded.input.values]
    engine = len(jax.tree.leaves(perfmodel.load_engine("neutral").engine))
    # Speeds: products and expert products by kernel, two kinds of attention, recurrences, vectors,
    # links.
    assert len(set(names)) == len(names) == count + engine + 2 * len(KERNELS) + 5
    units = dict(zip(names, loaded.unit.values, strict=True))
    known = {field.name: field.unit for field in (*datasheet.FIELDS, *CONSTANTS)}
    known["rent"] = "USD/s"
    for name, unit in units.items():
        assert known.get(name, unit) == unit, name
    # What a datasheet says, under its name; but for facts that timing does not read.
    aside = {
        "cache_capacity", "chips_per_node", "server_power", "purchase", "server_purchase",
        "manufacturing_cost", "rack_chips", "memory_efficiency",
    }  # fmt: skip
    aside |= {f"gemm_efficiency_{kind}" for kind in KERNELS}
    # Those of other families go by the name of the number that they make.
    aside |= {field.name for field in datasheet.PARTICULAR}
    assert {field.name for field in datasheet.FIELDS} - aside <= set(names)
    values = dict(zip(names, loaded.value.values, strict=True))
    chip = perfmodel.load_chip("h100")
    for name in ("memory_bandwidth", "peak_fp8", "link_bandwidth", "tdp", "units", "domain"):
        assert values[name] == pytest.approx(chip.fields[name].value, rel=1e-6), name
    for name, constant in chip.constants.items():
        if name in values:
            assert values[name] == pytest.approx(constant.value, rel=1e-6), name
    assert len(set(loaded.title.values)) == len(names)
    for variable in loaded.variables.values():
        assert variable.attrs["units"] and variable.attrs["long_name"]


def test_an_input_at_zero_has_a_derivative_and_no_elasticity(loaded):
    """A serial floor of x seconds on each of 80 layers makes TTFT's one mixed step, and a token,
    80·x longer."""
    assert np.isnan(of(loaded, "floors.serial"))
    alone = perfmodel.sensitivity(**(LOAD | PLANS["one request"]))
    slope = float(alone.derivative.sel(output=USER, input="floors.serial"))
    user = float(alone.output_value.sel(output=USER))
    assert slope == pytest.approx(-80 * user**2, rel=1e-4)
    zero = loaded.value.values == 0.0
    assert np.isnan(loaded.elasticity.values[:, zero]).all()
    assert np.isfinite(loaded.elasticity.values[:, ~zero]).all()
    assert np.isfinite(loaded.derivative.values).all()


def test_what_is_unknown_is_nan():
    unpriced = perfmodel.sensitivity("llama-3.3-70b", "gb200", tp=8, **LOAD)
    assert np.isnan(unpriced.elasticity.sel(output=DOLLARS)).all()
    assert of(unpriced, "memory_bandwidth") > 0.3
    once = perfmodel.sensitivity("llama-3.3-70b", "h100", tp=8, isl=4000, osl=1)
    assert np.isnan(once.elasticity.sel(output=USER)).all() and once.attrs["main"] == CHIP
    given = perfmodel.sensitivity("llama-3.3-70b", "h100", tp=8, price=2.0, **LOAD)
    assert given.kind.sel(input="rent") == "given"
    assert given.value.sel(input="rent") == pytest.approx(2.0 / 3600)


def test_a_design_that_cannot_run_has_none():
    found = perfmodel.sensitivity("llama-3.1-405b", "h100", **LOAD)
    assert not found.feasible and found.binding == "memory" and "smallest TP" in found.advice.item()
    assert np.isnan(found.elasticity).all()
    late = perfmodel.sensitivity("llama-3.3-70b", "h100", tp=8, slo_tpot=1e-3, **LOAD)
    assert not late.feasible and late.binding == "tpot limit" and of(late, "memory_bandwidth") > 0.3


def test_keywords_are_those_of_estimate():
    with pytest.raises(TypeError, match="unexpected keyword argument 'bach'"):
        perfmodel.sensitivity("llama-3.3-70b", "h100", bach=2, **LOAD)  # pyright: ignore[reportCallIssue]
    with pytest.raises(perfmodel.InputError, match="tp: must be at least 1"):
        perfmodel.sensitivity("llama-3.3-70b", "h100", tp=0, **LOAD)


def test_one_program_for_all_models_and_chips():
    perfmodel.sensitivity(**(LOAD | PLANS["loaded"]))
    traced = []

    def note(*_, **__):
        traced.append(1)
        return before(*_, **__)

    before = serving.estimate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "estimate", note)
        perfmodel.sensitivity("qwen2.5-7b", "mi300x", batch=7, **LOAD)
    assert not traced


# ---- Efficiencies ----


def one_hot(kind: str) -> np.ndarray:
    return np.asarray([1.0 if k == kind else 0.0 for k in KERNELS], np.float32)


OPERATORS = (
    (Matmul("p", "decode/x", 8, 1024, 1024, 2, 2, one_hot("bf16")), "matmul"),
    (Vector("v", "decode/x", 8, 1024, 1024, 1024), "vector"),
    (Collective("c", "decode/x", "all_reduce", 8, 1024, 8), "collective"),
)


@pytest.mark.parametrize(("op", "kind"), OPERATORS)
def test_an_efficiency_divides_time_and_leaves_energy(op, kind):
    machine = perfmodel.load_chip("h100").machine
    plain = usage(op, Rank(machine))
    value = 2.0 * one_hot("bf16") if kind == "matmul" else 2.0
    halved = usage(op, Rank(machine, efficiencies=Efficiencies(**{kind: value})))
    assert float(halved.seconds) == pytest.approx(0.5 * float(plain.seconds), rel=1e-6)
    assert sum(map(float, halved.parts)) == pytest.approx(0.5 * sum(map(float, plain.parts)), 1e-5)
    assert halved.joules == plain.joules


# ---- Shown ----


def text(renderable) -> str:
    file = io.StringIO()
    report.write(renderable, file)
    return file.getvalue()


def test_table_has_sentences_and_is_sorted(loaded):
    shown = text(report.sensitivity_table(loaded))
    size = f"{of(loaded, 'memory_bandwidth'):+.2f} %"
    assert f"+1 % memory bandwidth: {size} tokens/s per user" in shown
    assert max(map(len, shown.splitlines())) <= 120 and "…" not in shown
    rows = [row for row in _influences.influences(loaded) if not row.whole]
    sizes = [abs(row.elasticities[0]) for row in rows if abs(row.elasticities[0]) >= 0.005]
    assert sizes == sorted(sizes, reverse=True) and len(sizes) > 10
    assert "host time of a step *" in shown and "* assumed" in shown


def test_files_are_drawn_from_the_saved_dataset(loaded, tmp_path):
    paths = report.save_sensitivity(loaded, tmp_path / "new")
    assert paths["png"].read_bytes().startswith(b"\x89PNG")
    xr.testing.assert_equal(report.load_dataset(paths["nc"]), loaded)
    page = paths["html"].read_text("utf-8")
    assert "memory bandwidth" in page and "src=" not in page.split("<script>")[0]


def test_bars_are_sorted_and_coloured_by_what_is_better(loaded):
    figure = _tornado.figure(loaded)
    json.dumps(figure, allow_nan=False)
    assert [trace["visible"] for trace in figure["data"]] == [True, False, False, False, False]
    for place, trace in enumerate(figure["data"]):
        sizes = np.abs(trace["x"])
        assert list(sizes) == sorted(sizes, reverse=True)
        higher = place < 2
        for size, colour in zip(trace["x"], trace["marker"]["color"], strict=True):
            assert (colour == _tornado.BETTER) == ((size > 0) == higher)


def test_texts_of_the_picture_do_not_overlap(found):
    """No two texts of the picture cover each other, and none leaves it."""
    figure = _tornado.draw(found)
    renderer = figure.canvas.get_renderer()
    texts = [t for t in figure.findobj(lambda a: hasattr(a, "get_text")) if t.get_text().strip()]
    boxes = [(t.get_window_extent(renderer), t.get_text()) for t in texts if t.get_visible()]
    whole = figure.bbox
    for i, (a, said) in enumerate(boxes):
        assert a.x0 >= whole.x0 and a.x1 <= whole.x1 and a.y0 >= 0 and a.y1 <= whole.y1, said
        for b, other in boxes[:i]:
            wide = min(a.x1, b.x1) - max(a.x0, b.x0)
            high = min(a.y1, b.y1) - max(a.y0, b.y0)
            assert min(wide, high) <= 1.0, (said, other)


def test_names_cannot_break_out_of_the_page(loaded):
    evil = "</script><script>alert(1)</script>"
    page = _tornado.page(loaded.assign_attrs(model=evil, engine=evil))
    assert evil not in page and page.count("<script>") == _tornado.page(loaded).count("<script>")


def test_command(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "_ready", lambda: None)
    design = ["estimate", "llama-3.3-70b", "h100", "--tp", "8", "--batch", "32", "--sensitivity"]
    assert cli.main([*design, "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "+1 % memory bandwidth: +" in out and f"wrote {tmp_path / 'sensitivity.png'}" in out
    assert {p.name for p in tmp_path.iterdir()} == {
        f"sensitivity.{kind}" for kind in ("nc", "png", "html")
    }
    assert cli.main([*design, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["sensitivity"]
    rows = {row["input"]: row for row in found["inputs"]}
    assert rows["memory_bandwidth"]["elasticity"][USER] > 0.3
    assert rows["memory_bandwidth"]["value"] == pytest.approx(3.35e12)
    assert rows["memory_bandwidth"]["unit"] == "B/s" and "chord" in found["method"]
    assert rows["floors.serial"]["elasticity"][USER] is None
    assert rows["floors.serial"]["derivative"][USER] < 0.0


def test_infeasible_command_is_3_with_its_reason(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "_ready", lambda: None)
    design = ["estimate", "llama-3.1-405b", "h100", "--sensitivity", "--out", str(tmp_path)]
    assert cli.main(design) == 3
    out, err = capsys.readouterr()
    assert err.startswith("infeasible: memory: needs ") and err.count("\n") == 1
    assert "no elasticities: the design cannot run" in out and not list(tmp_path.iterdir())
    assert cli.main([*design, "--json"]) == 3
    rows = json.loads(capsys.readouterr().out)["sensitivity"]["inputs"]
    assert all(value is None for row in rows for value in row["elasticity"].values())
    late = ["estimate", "llama-3.3-70b", "h100", "--tp", "8", "--slo-tpot", "1ms", "--sensitivity"]
    assert cli.main(late) == 3
    out, err = capsys.readouterr()
    assert err.startswith("infeasible: tpot limit: ") and "+1 % memory bandwidth: +" in out
    assert cli.main(["estimate", "llama-3.3-70b", "h100", "--out", "x"]) == 2
    assert "--sensitivity" in capsys.readouterr().err


def test_json_has_every_input(loaded):
    found = _json.estimate(perfmodel.estimate(**(LOAD | PLANS["loaded"])), None, loaded)
    assert len(found["sensitivity"]["inputs"]) == loaded.sizes["input"]
    assert [row["output"] for row in found["sensitivity"]["outputs"]] == list(loaded.output.values)
