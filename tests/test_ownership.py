"""What a chip-hour and a token cost, rented and owned, and what surrounds a chip."""

import dataclasses
import io
import json
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import perfmodel
from perfmodel import _json, _labels, ownership, report, results
from perfmodel.catalog import Number
from perfmodel.errors import Infeasible, InputError

LOAD = dict(isl=4000, osl=1000)
SMALL = dict(batches=(1, 4, 16, 64), chunks=(512, 2048), max_chips=16, **LOAD)
DESIGN = dict(tp=8, batch=32, **LOAD)


def estimate(chip: str = "h100", **options) -> dict[str, float]:
    found = perfmodel.estimate("llama-3.3-70b", chip, **DESIGN | options)
    return {str(name): value.item() for name, value in found.items()}


def owner(model: str, **given: float) -> ownership.Ownership:
    numbers = dict(ownership.defaults().numbers)
    for name, value in given.items():
        numbers[name] = Number(value, numbers[name].unit, "given")
    return ownership.owner(model, numbers)


def h100() -> ownership.Economics:
    return ownership.economics(perfmodel.load_chip("h100").fields)


# ---- Chip-hours by hand ----


def test_rent_has_everything_in_it():
    for power in (0.0, 700.0):
        assert float(ownership.usd_per_chip_hour(h100(), owner("rented"), power)) == pytest.approx(
            2.95
        )


def test_owned_by_hand():
    # A server of 8 at 310,000 USD over 5 years of 8,760 h, straight.
    plain = owner("list", interest=0.0, utilisation=1.0, electricity=0.1, pue=1.5, demand=0.82)
    capital = 38_750 / (5 * 8760)
    # Beside 500 W on the board, 0.82 · 1,275 − 700 W for the host.
    power = (500 + 0.82 * 1275 - 700) * 1.5
    found = float(ownership.usd_per_chip_hour(h100(), plain, 500.0))
    assert found == pytest.approx(capital + power / 1000 * 0.1, rel=1e-5)


def test_interest_and_idle_time_by_hand():
    terms = dict(interest=0.1, lifetime=4.0, utilisation=0.5, electricity=0.1, pue=1.0)
    factor = 0.1 / (1 - 1.1**-4)
    host = 0.82 * 1275 - 700
    # An hour of serving pays for an hour at rest.
    power = (500 + host) + (85 + host)
    expected = (3320 + 4001) * factor / (0.5 * 8760) + power / 1000 * 0.1
    found = float(ownership.usd_per_chip_hour(h100(), owner("cost", **terms), 500.0))
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_host_share_stands_in_for_an_unknown_server():
    chip = ownership.economics(perfmodel.load_chip("mi300x").fields)
    listed, made = ownership.capital(chip, owner("list", host_price=0.29, host_cost=4001.0))
    assert float(listed[0]) == pytest.approx(15_000 * 1.29)
    assert float(made[0]) == pytest.approx(5300 + 4001)
    site = ownership.site(chip, owner("list", host_power=0.8, demand=0.82))
    assert float(site.provisioned_power) == pytest.approx(750 * 1.8)
    assert float(site.host_power) == pytest.approx(0.82 * 1350 - 750, rel=1e-5)


def test_a_range_is_kept():
    chip = h100()
    rate = 3600 * ownership.fixed_rate(chip, owner("rented"))
    np.testing.assert_allclose(rate, [2.95, 1.99, 6.88], rtol=1e-6)
    value, low, high = ownership.fixed_rate(chip, owner("list"))
    assert float(low / value) == pytest.approx(33_750 / 38_750, rel=1e-5)
    assert float(high / value) == pytest.approx(39_625 / 38_750, rel=1e-5)
    found = estimate()
    assert found["usd_per_hour"] == pytest.approx(8 * 2.95, rel=1e-5)
    assert found["usd_per_hour_low"] == pytest.approx(8 * 1.99, rel=1e-5)
    assert found["usd_per_hour_high"] == pytest.approx(8 * 6.88, rel=1e-5)
    ratio = found["usd_per_million_output_tokens_high"] / found["usd_per_million_output_tokens"]
    assert ratio == pytest.approx(6.88 / 2.95, rel=1e-5)


@pytest.mark.parametrize("model", ownership.MODELS)
@pytest.mark.parametrize("chip", ["h100", "mi300x", "gb200", "a100"])
def test_derivatives_are_finite_and_right(model: str, chip: str):
    inputs = ownership.economics(perfmodel.load_chip(chip).fields), owner(model)
    slopes = jax.grad(lambda both: ownership.usd_per_chip_hour(*both, 500.0))(inputs)
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(slopes))
    power = jax.grad(lambda p: ownership.usd_per_chip_hour(*inputs, p))(500.0)
    known = float(ownership.usd_per_chip_hour(*inputs, 500.0)) > 0.0
    expected = 1.3 * 0.0806 / 1000 if known and model != "rented" else 0.0
    assert float(power) == pytest.approx(expected, rel=1e-5)


def test_derivatives_against_differences():
    with jax.enable_x64():
        chip = ownership.economics(perfmodel.load_chip("h100").fields)
        for name in ("electricity", "pue", "lifetime", "interest", "utilisation", "demand"):
            base = owner("list")

            def dollars(value, name=name, base=base, chip=chip):
                changed = eqx.tree_at(lambda o: getattr(o, name), base, value)
                return ownership.usd_per_chip_hour(chip, changed, 500.0)

            at = jnp.float64(getattr(base, name))
            step = 1e-6 * float(at)
            rise = float(dollars(at + step) - dollars(at - step)) / (2 * step)
            assert float(jax.grad(dollars)(at)) == pytest.approx(rise, rel=1e-4), name


# ---- Tokens by hand ----


def test_the_published_conversion():
    # $/h ÷ (tok/s × 3,600) × 1e6: eight H100 at 2.95 USD make 1,000 output tokens/s, 6.556 USD/M.
    assert 8 * 2.95 / (1000 * 3600) * 1e6 == pytest.approx(6.5556, rel=1e-4)
    found = estimate(price=2.95)
    rate = found["output_tokens_per_second"]
    dollars = 8 * 2.95 / (rate * 3600) * 1e6
    assert found["usd_per_million_output_tokens_undivided"] == pytest.approx(dollars, rel=1e-5)
    assert found["output_tokens_per_second_usd"] == pytest.approx(rate / (8 * 2.95), rel=1e-5)
    assert found["usd_per_million_output_tokens"] < dollars


@pytest.mark.parametrize("kind", ["rented", "list", "cost"])
def test_input_and_output_share_what_is_spent(kind: str):
    found = estimate(ownership=kind)
    requests = found["requests_per_second"]
    for place, power in (("", "power_w"), ("wall_", "wall_power_w")):
        energy = {
            token: found[f"{place}energy_per_{token}_token_j"]
            for token in ("input", "output", "total")
        }
        joules = found[power] / requests
        split = 4000 * energy["input"] + 1000 * energy["output"]
        assert split == pytest.approx(joules, rel=1e-4)
        assert 5000 * energy["total"] == pytest.approx(joules, rel=1e-4)
        undivided = found[f"{place}energy_per_output_token_undivided_j"]
        assert 1000 * undivided == pytest.approx(joules, rel=1e-4)
        assert energy["output"] < undivided
    cost = {t: found[f"usd_per_million_{t}_tokens"] for t in ("input", "output", "total")}
    dollars = found["usd_per_hour"] / 3600 / requests * 1e6
    assert 4000 * cost["input"] + 1000 * cost["output"] == pytest.approx(dollars, rel=1e-4)
    assert 5000 * cost["total"] == pytest.approx(dollars, rel=1e-4)


def test_the_wall_by_hand():
    found = estimate(pue=1.2)
    host = 0.82 * 1275 - 700
    wall = (found["power_w"] + 8 * host) * 1.2
    assert found["wall_power_w"] == pytest.approx(wall, rel=1e-5)
    assert found["provisioned_power_w"] == pytest.approx(8 * 1275)
    rate = found["output_tokens_per_second"]
    assert found["output_tokens_per_second_kw"] == pytest.approx(rate / 10.2, rel=1e-5)


def test_electricity_follows_the_modelled_power():
    light, heavy = (estimate(ownership="list", batch=batch) for batch in (1, 128))
    assert heavy["chip_power_w"] > light["chip_power_w"]
    extra = (heavy["power_w"] - light["power_w"]) / 1000 * 1.3 * 0.0806
    assert heavy["usd_per_hour"] - light["usd_per_hour"] == pytest.approx(extra, rel=1e-2)
    free = estimate(ownership="list", batch=128, electricity=0.0)
    assert free["usd_per_hour"] < heavy["usd_per_hour"]
    longer = estimate(ownership="list", batch=128, lifetime=10.0)
    assert longer["usd_per_hour"] < heavy["usd_per_hour"]


# ---- Unknown stays blank ----


@pytest.mark.parametrize(
    ("chip", "kind"), [("gb200", "rented"), ("a100", "list"), ("l40s", "cost")]
)
def test_an_unknown_price_is_blank_everywhere(chip: str, kind: str):
    found = perfmodel.estimate("llama-3.1-8b", chip, ownership=kind, **LOAD)
    values = json.loads(_json.text(_json.estimate(found)))
    dollars = [name for name in values if "usd" in name]
    assert len(dollars) >= 11 and all(values[name] is None for name in dollars)
    assert values["wall_energy_per_total_token_j"] > 0.0
    assert "unknown" in values["price_assumption"] and values["ownership"] == kind


def written(renderable) -> str:
    file = io.StringIO()
    report.write(renderable, file)
    return file.getvalue()


def test_an_unknown_price_is_blank_in_tables_and_pictures(tmp_path):
    one = perfmodel.estimate("llama-3.1-8b", "gb200", **LOAD)
    shown = written(report.estimate_table(one))
    rows = [line.split() for line in shown.splitlines() if line.lstrip().startswith("$ per")]
    assert len(rows) == 4 and all(row[-1] == "–" for row in rows)
    found = perfmodel.frontier("llama-3.1-8b", ["h100", "gb200"], **SMALL)
    shown = written(report.frontier_table(found))
    assert "gb200 unknown" in shown and "h100_sxm 2.95 (1.99 to 6.88)" in shown
    assert "$0" not in shown and " 0 " not in shown
    dollars = perfmodel.frontier("llama-3.1-8b", ["h100", "gb200"], per="usd", **SMALL)
    assert set(dollars.chip.values) == {"h100_sxm"}
    assert dollars.obstacle.values[1].startswith("price: unknown")
    assert "Left out, unknown on this axis: gb200" in _labels.axis_notes(dollars)
    files = report.save_frontier(dollars, tmp_path)
    page = files["html"].read_text("utf-8")
    assert "output tokens/s per $ an hour" in page and "gb200: no plan, price: unknown" in page
    assert [front.chip for front in _labels.fronts(report.load_dataset(files["nc"]))] == [
        "h100_sxm"
    ]


# ---- Axes ----


@pytest.mark.parametrize("per", ["chip", "kw", "usd", "rack"])
def test_dominance_is_decided_per_what_is_asked(per: str):
    options = SMALL | {"y": f"total_tokens_per_second_{per}"}
    found = perfmodel.frontier("llama-3.3-70b", ["b200"], per=per, ownership="list", **SMALL)
    assert found.attrs["y"] == f"output_tokens_per_second_{per}"
    named = perfmodel.frontier("llama-3.3-70b", ["b200"], ownership="list", **options)
    assert named.attrs["y"] == options["y"]
    y = found[found.attrs["y"]].values
    # Sorted by interactivity, a front falls.
    assert np.all(np.diff(found.tokens_per_second_user) > 0) and np.all(np.diff(y) < 0)
    per_chip = found.output_tokens_per_second_chip.values
    factor = {
        "chip": 1.0,
        "kw": 1000 / 1787.5,
        "usd": (found.chips / found.usd_per_hour).values,
        "rack": 16.0,
    }
    np.testing.assert_allclose(y, per_chip * factor[per], rtol=1e-5)


def test_two_chips_change_places_per_kw():
    chips = ["b200", "gb200"]
    per_chip, per_kw = (
        perfmodel.frontier("llama-3.3-70b", chips, per=per, **SMALL) for per in ("chip", "kw")
    )
    shares = [
        int(np.sum(f.on_front.values & (f.chip.values == "gb200"))) / int(np.sum(f.on_front))
        for f in (per_chip, per_kw)
    ]
    assert shares[1] > shares[0]


def test_a_rack_that_is_not_known_is_said():
    with pytest.raises(Infeasible, match="rack: chips in a rack are unknown"):
        perfmodel.frontier("llama-3.3-70b", ["mi300x"], per="rack", **SMALL)
    mixed = perfmodel.frontier("llama-3.3-70b", ["mi300x", "gb200"], per="rack", **SMALL)
    assert set(mixed.chip.values) == {"gb200"}
    shown = written(report.frontier_table(mixed))
    assert "Chips in a rack: gb200 72" in shown


def test_what_is_assumed_is_shown():
    found = perfmodel.frontier(
        "llama-3.3-70b", ["h100", "mi300x"], per="kw", ownership="list", **SMALL
    )
    shown = " ".join(written(report.frontier_table(found)).split())
    assert "owned at list price" in shown and "utilisation 0.7 (assumed, 0.3 to 1)" in shown
    assert "mi300x 1,350 (share of the host assumed: mi300x)" in shown
    assert max(map(len, written(report.frontier_table(found)).splitlines())) <= 120


# ---- Bad input ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(ownership="own"), "ownership: unknown model 'own'"),
        (dict(ownership="list", price=2.0), "price: it is a rent, and ownership is list"),
        (dict(electricity=0.1), "electricity: a rent has it in it"),
        (dict(lifetime=3), "lifetime: a rent has it in it"),
        (dict(pue=0.9), "pue: must be 1 to 5, not 0.9"),
        (dict(ownership="cost", lifetime=0), "lifetime: must be 0.1 to 50 year"),
        (dict(ownership="cost", electricity=math.nan), "electricity: must be 0 to 10 USD/kWh"),
        (dict(per="watt"), "per: unknown measure 'watt'"),
        (dict(per="kw", y="e2e_s"), "per: neither x nor y is a throughput"),
    ],
)
def test_bad_input_is_one_line(options: dict, message: str):
    with pytest.raises(InputError, match=message) as error:
        perfmodel.frontier("llama-3.3-70b", ["h100"], **SMALL | options)
    assert "\n" not in str(error.value)


def test_every_default_has_a_source():
    sheet = ownership.defaults()
    for name, number in sheet.numbers.items():
        assert number.value is not None and (number.source in sheet.sources), name
        assert number.note, name
    fields = {field.name for field in dataclasses.fields(ownership.Ownership)} - {"model"}
    assert fields == set(sheet.numbers)
    assert {"wall_power_w", "output_tokens_per_second_kw"} <= set(results.AXES)
