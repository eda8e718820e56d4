"""Power, footprint and cost as limits of a search."""

import math

import numpy as np
import pytest

import perfmodel
from perfmodel import budgets, cli, question
from perfmodel.errors import Infeasible, InputError
from perfmodel.formats import precision_name

# One list of plans for every search here.
TRIED = dict(isl=512, osl=100, precisions=["fp8"], batches=[1, 8, 64], chunks=[512])
SIZED = TRIED | dict(rate=50.0, spare=0, headroom=0.0)


def asked(chips, budget, **changed):
    options = dict(
        isl=512, osl=100, prefix_hit=0.0, engine="neutral", slo_ttft=None, slo_tpot=None, price=None
    )
    return question.ask(
        "llama-3.1-8b", chips, [precision_name("fp8")], most=budget, **options | changed
    )


def test_chips_allowed_by_hand():
    both = ["h100", "b200", "mi300x", "cs3"]
    found = asked(both, question.Budgets(power=10.2e3, racks=1.0, cost=23.6))
    h100, b200, mi300x, wafer = (budgets.allowed(found, chip, None) for chip in range(4))
    # A DGX is rated 10.2 kW: exactly its eight chips; at 2.95 USD/h eight take 23.60 USD/h.
    assert (h100.chips, h100.set_by) == (8, "power limit")
    # 23.60 over 5.50 USD/h.
    assert (b200.chips, b200.set_by) == (4, "cost limit")
    # Unknown chips of a rack, unknown rent: none can be allowed.
    assert (mi300x.chips, mi300x.set_by) == (0, "footprint limit")
    assert wafer.chips == 0
    assert budgets.allowed(found, 0, 3) == (3, "max_chips")
    rack = asked(["h100"], question.Budgets(racks=0.5))
    assert budgets.allowed(rack, 0, None) == (16, "footprint limit")
    assert budgets.allowed(asked(["h100"], None), 0, None) is None


def test_owned_chips_cost_their_electricity_at_the_power_limit():
    owned = asked(["h100"], question.Budgets(cost=100.0), ownership="list")
    each = budgets.shares(owned, 0)["cost"].used
    one = perfmodel.estimate(
        "llama-3.1-8b", "h100", isl=512, osl=100, batch=64, weights="fp8", ownership="list"
    )
    assert float(one.usd_per_hour) < each < 1.2 * float(one.usd_per_hour)


@pytest.fixture(scope="module")
def found():
    return perfmodel.frontier(
        "llama-3.1-8b", ["h100", "mi300x"], y="output_tokens_per_second", max_power=10.2e3, **TRIED
    )


def test_a_frontier_within_a_power_fills_it_and_no_more(found):
    assert dict(zip(found.candidate.values, found.candidate_allowed_chips.values, strict=True)) == {
        "h100_sxm": 8, "mi300x": int(10.2e3 / (1.8 * 750.0)),
    }  # fmt: skip
    assert np.all(found.provisioned_power_w.values <= 10.2e3 * 1.0001)
    h100 = found.where(found.chip == "h100_sxm", drop=True)
    assert int(h100.chips.max()) == 8 and bool(np.all(found.feasible))
    assert found.attrs["max_power_w"] == 10.2e3
    assert list(found.candidate_allowed_by.values) == ["power limit"] * 2


def test_pictures_and_tables_say_what_allows_how_many(found, capsys):
    from perfmodel import report

    report.write(report.frontier_table(found))
    out = " ".join(capsys.readouterr().out.split())
    assert "at most 10.2 kW rated" in out and "h100_sxm 8 (power limit)" in out


def test_a_budget_below_one_chip_names_itself():
    with pytest.raises(Infeasible) as error:
        perfmodel.frontier("llama-3.1-8b", ["h100"], max_power=1e3, **TRIED)
    assert "power limit: 1 chip takes 1.275 kW of 1 kW; allow 1.275 kW" in str(error.value)
    with pytest.raises(Infeasible, match="footprint limit: chips in a rack are unknown"):
        perfmodel.frontier("llama-3.1-8b", ["mi300x"], max_racks=1, **TRIED)
    with pytest.raises(Infeasible, match=r"cost limit: its price is unknown .*--price h800=USD"):
        perfmodel.frontier("llama-3.1-8b", ["h800"], max_cost=10, **TRIED)


def test_the_least_budget_is_rounded_up_but_not_for_a_rounding():
    # 12 chips in float32 are a rounding above 20 kW.
    assert budgets._upward(20_000.002) == 20_000.0
    assert budgets._upward(20_001.0) == 20_010.0


def test_a_named_budget_that_helps_helps():
    with pytest.raises(Infeasible) as error:
        perfmodel.frontier("llama-3.1-8b", ["h100"], max_cost=2.0, **TRIED)
    assert "allow $2.95/h" in str(error.value)
    found = perfmodel.frontier("llama-3.1-8b", ["h100"], max_cost=2.95, **TRIED)
    assert set(found.chips.values) == {1}


def test_a_deployment_is_sized_within_whole_nodes():
    free = perfmodel.size("llama-3.1-8b", ["h100"], **SIZED).isel(deployment=0)
    held = int(free.provisioned_chips)
    watts = held * 1275.0
    same = perfmodel.size("llama-3.1-8b", ["h100"], max_power=watts, **SIZED).isel(deployment=0)
    assert int(same.chips) == int(free.chips)
    with pytest.raises(Infeasible) as error:
        perfmodel.size("llama-3.1-8b", ["h100"], max_power=watts - 1.0, **SIZED)
    said = f"power limit: {held} chips take {watts / 1e3:.4g} kW"
    assert said in str(error.value) and error.value.found is not None
    assert list(error.value.found.candidate_allowed_by.values) == ["power limit"]


def test_racks_and_rent_bound_a_deployment_too():
    for limit in (dict(max_racks=0.1), dict(max_cost=20.0)):
        with pytest.raises(Infeasible, match="footprint limit|cost limit"):
            perfmodel.size("llama-3.1-8b", ["h100"], **limit, **SIZED)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, "much"])
def test_budgets_are_positive(value):
    with pytest.raises(InputError, match="^max_racks: must be a positive number of racks"):
        question.budgets(None, value, None)


def test_power_with_a_unit_on_the_command_line(capsys):
    search = ["frontier", "llama-3.1-8b", "--chip", "h100", "--max-power"]
    for value, said in (("10kJ", "nearest: kW"), ("much", "a number is needed"), ("0", "above 0")):
        assert cli.main([*search, value]) == 2
        line = capsys.readouterr().err
        assert "--max-power" in line and said in line and line.count("\n") == 1
