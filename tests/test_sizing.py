"""Sizing: replicas, nodes and headroom by hand; what one step smaller would violate."""

import io
import math

import numpy as np
import pytest
import xarray as xr

import perfmodel
import perfmodel.chips
from perfmodel import _json, question, report, sizing
from perfmodel.errors import Infeasible, InputError
from perfmodel.exploration import frontier

MODEL = "llama-3.3-70b"
LOAD = dict(isl=4000, osl=1000)
FEW = dict(batches=(*range(1, 65), 96, 128, 256, 512), chunks=(512, 2048))
LEVELS = dict(slo_ttft=2.0, slo_tpot=0.04)


def size(model=MODEL, chips=("h100", "b200"), **options) -> xr.Dataset:
    return sizing.size(model, chips, **LOAD | FEW | LEVELS | {"rate": 10.0} | options)


@pytest.fixture(scope="module")
def found() -> xr.Dataset:
    return size()


def rows(dataset: xr.Dataset) -> list[xr.Dataset]:
    return [dataset.isel(deployment=place) for place in range(dataset.sizes["deployment"])]


def alone(row: xr.Dataset, label: str = "", **options) -> xr.Dataset:
    """Returns the estimate of one replica of a deployment, or of what is smaller than it."""
    names = {name: row[f"{label}_{name}" if label else name].item()
             for name in ("tp", "pp", "batch", "chunk", "precision")}  # fmt: skip
    weights = names.pop("precision")
    return perfmodel.estimate(
        MODEL, row.chip.item(), weights=weights, **LOAD | LEVELS | names | options
    )


# ---- By hand ----


def test_replicas_of_a_rate_by_hand():
    need = sizing.Need(10.0, 0.2, 1, "chips", None)
    # 12 requests/s: of 5 each 2.4, of 12 each 1, and of one a little short 2.
    assert need.replicas(np.array([5.0, 1.0, 12.0, 11.99, 1e6])).tolist() == [3, 12, 1, 2, 1]


@pytest.mark.parametrize(
    ("replica", "replicas", "node", "nodes"),
    [(1, 9, 8, 2), (1, 8, 8, 1), (2, 5, 8, 2), (3, 5, 8, 3), (8, 3, 8, 3), (16, 2, 8, 4),
     (12, 2, 8, 4), (4, 5, 1, 20), (4, 1, 72, 1)],
)  # fmt: skip
def test_whole_nodes_by_hand(replica: int, replicas: int, node: int, nodes: int):
    found = sizing.occupy(replica, replicas, node)
    assert (found.chips, found.nodes) == (replica * replicas, nodes)
    assert found.provisioned == nodes * node >= found.chips


def test_deployments_add_up(found: xr.Dataset):
    assert found.sizes["deployment"] == 2
    for row in rows(found):
        one = alone(row)
        assert bool(one.feasible) and row.rate_per_replica == one.requests_per_second
        assert row.needed_replicas == math.ceil(12.0 / float(one.requests_per_second))
        assert row.replicas == row.needed_replicas + 1
        assert row.chips == row.replicas * row.tp * row.pp
        assert row.headroom_left >= 1.2
        assert row.headroom_left == pytest.approx(
            float(row.needed_replicas * one.requests_per_second) / 10.0
        )
        assert row.node_chips == 8
        assert row.provisioned_chips == 8 * row.nodes and row.chips <= row.provisioned_chips
        assert row.chips > 8 * (row.nodes - 1)
        rent = {"h100_sxm": 2.95, "b200_sxm": 5.5}[row.chip.item()]
        assert row.provisioned_usd_per_hour == pytest.approx(rent * float(row.provisioned_chips))
        tdp = {"h100_sxm": 700.0, "b200_sxm": 1000.0}[row.chip.item()]
        assert row.board_power_w == tdp * row.provisioned_chips
        assert row.load_power_w < row.power_w < row.board_power_w < row.server_power_w
    assert found.chips.values.tolist() == sorted(found.chips.values)
    for name, variable in found.variables.items():
        assert variable.attrs["units"] and variable.attrs["long_name"], name


def test_what_runs_at_the_rate_asked_for(found: xr.Dataset):
    for row in rows(found):
        share = 10.0 / float(row.replicas)
        at = int(row.load_batch)
        assert alone(row, batch=at).requests_per_second >= share
        assert at == 1 or alone(row, batch=at - 1).requests_per_second < share
        assert row.load_tpot_s == alone(row, batch=at).tpot_s <= row.tpot_s


# ---- One step smaller ----


def test_smaller_deployments_really_break_what_is_said(found: xr.Dataset):
    seen = set()
    slow = size(chips=["a100", "h200"], rate=3.0, slo_tpot=0.1)
    tight = size(chips=["h100"], rate=0.2, slo_ttft=0.3, slo_tpot=None)
    free = size(chips=["h100"], rate=10.0, slo_ttft=None, slo_tpot=None)
    large = size(chips=["a100"], rate=0.01, spare=0, slo_ttft=None, slo_tpot=0.5)
    for data, levels, rate in (
        (found, LEVELS, 10.0),
        (slow, dict(slo_ttft=2.0, slo_tpot=0.1), 3.0),
        (tight, dict(slo_ttft=0.3, slo_tpot=None), 0.2),
        (free, dict(slo_ttft=None, slo_tpot=None), 10.0),
        (large, dict(slo_ttft=None, slo_tpot=0.5), 0.01),
    ):
        for row in rows(data):
            for label in ("fewer_replicas", "smaller_replica"):
                if not int(row[f"{label}_tp"]):
                    continue
                one = alone(row, label, **levels)
                limit = row[f"{label}_limit"].item()
                left = int(row[f"{label}_replicas"])
                assert int(row[f"{label}_tp"] * row[f"{label}_pp"]) <= row.tp * row.pp
                if limit in ("rate", "kv capacity", "batch"):
                    within = left * float(one.requests_per_second)
                    assert within < 1.2 * rate, (row.chip.item(), label)
                    miss = 1.0 - within / (1.2 * rate)
                else:
                    assert not bool(one.feasible) and one.binding == limit
                    name = limit.removesuffix(" limit")
                    miss = float(row[f"{label}_miss"])
                    if limit in ("ttft limit", "tpot limit"):
                        miss = float(one[f"{name}_s"]) / levels[f"slo_{name}"] - 1.0
                said = float(row[f"{label}_miss"])
                assert said > 0.0 and said == pytest.approx(miss, rel=1e-3, abs=1e-5)
                seen.add((label, limit))
    limits = {limit for _, limit in seen}
    assert {"tpot limit", "memory", "rate", "kv capacity"} <= limits, seen


def test_a_limit_that_does_not_bind_is_said(found: xr.Dataset):
    for row in rows(found):
        chip = [row.chip.item()]
        for name in ("ttft", "tpot"):
            without = size(chips=chip, **{f"slo_{name}": None}).isel(deployment=0)
            binds = bool(row[f"{name}_limit_binds"])
            assert binds == bool(without.chips < row.chips), name
            assert row[f"{name}_limit_chips_without"] == (without if binds else row).chips
    assert not found.ttft_limit_binds.any() and found.tpot_limit_binds.all()
    shown = text(found)
    assert "TTFT limit        does not bind" in shown and "TPOT limit        binds" in shown


# ---- Monotone, and small loads ----


def test_more_rate_headroom_or_spares_never_take_fewer_chips():
    def chips(**options) -> int:
        return int(size(chips=["h200"], **options).chips[0])

    by_rate = [chips(rate=rate) for rate in (0.01, 0.3, 1.0, 3.0, 10.0, 31.0, 100.0)]
    assert by_rate == sorted(by_rate) and by_rate[0] < by_rate[-1]
    assert chips() <= chips(headroom=0.5) <= chips(headroom=2.0)
    assert chips(spare=0) <= chips() <= chips(spare=4)
    assert chips(slo_tpot=0.1) <= chips() <= chips(slo_tpot=0.02)


def test_a_small_load_takes_one_chip():
    row = size("llama-3.1-8b", ["h100"], rate=0.01, spare=0).isel(deployment=0)
    assert (row.chips, row.nodes, row.needed_replicas, row.load_batch) == (1, 1, 1, 1)
    assert row.set_by == "one chip is enough"
    assert row.provisioned_chips == 8 and row.provisioned_usd_per_hour == pytest.approx(8 * 2.95)


def test_order_of_deployments():
    chips = ["h100", "b200", "mi300x"]
    by = {name: size(chips=chips, by=name) for name in sizing.ORDERS}
    keys = {"chips": "chips", "nodes": "nodes", "usd": "provisioned_usd_per_hour",
            "kw": "board_power_w"}  # fmt: skip
    for name, key in keys.items():
        best = float(by[name][key][0])
        assert best == min(float(other[key].min()) for other in by.values()), name
    # A price of one's own decides too.
    free = size(chips=chips, by="usd", price={"h100": 0.01})
    assert free.chip[0] == "h100_sxm"
    known = size(chips=["h100", "gb200"], by="usd")
    assert set(known.chip.values) == {"h100_sxm"} and "price: unknown" in known.obstacle.values[1]


def test_a_chip_without_known_server_counts_one_by_one():
    row = size(chips=["h200_nvl"], rate=0.1, slo_tpot=0.1).isel(deployment=0)
    assert row.node_chips == 1 and row.nodes == row.provisioned_chips == row.chips
    assert bool(np.isnan(row.server_power_w))


# ---- Nothing serves it, and bad input ----


def test_infeasible_says_the_limit_and_a_change_that_helps():
    with pytest.raises(Infeasible, match="tpot limit: TPOT .* can be kept") as error:
        size(chips=["h100"], slo_tpot=1e-3)
    least = float(str(error.value).split("a TPOT of ")[1].split(" ms")[0]) * 1e-3
    assert size(chips=["h100"], slo_tpot=least).sizes["deployment"] == 1
    assert error.value.found is not None and error.value.found.candidate_points == 0
    with pytest.raises(
        Infeasible, match="chips: needs 28 where at most 8 .* allow 28, or"
    ) as error:
        size(chips=["h100"], max_chips=8)
    rate = float(str(error.value).split("ask for ")[1].split(" ")[0])
    assert size(chips=["h100"], max_chips=8, rate=rate).chips[0] <= 8
    assert size(chips=["h100"], max_chips=28).chips[0] == 28
    with pytest.raises(Infeasible, match="memory: needs"):
        size("llama-3.1-405b", ["h100"], precisions=["bf16"], max_chips=8)
    with pytest.raises(Infeasible, match="kernel: none for fp8"):
        size(chips=["a100"], precisions=["fp8"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(rate=0.0), "rate: must be a positive number of requests per second, not 0"),
        (dict(rate=math.nan), "rate: must be a positive"),
        (dict(rate="fast"), "rate: must be a positive"),
        (dict(headroom=-0.1), "headroom: must be a share"),
        (dict(spare=-1), "spare: must be at least 0"),
        (dict(by="price"), "by: unknown order 'price'"),
        (dict(max_chips=0), "max_chips: must be at least 1"),
        (dict(chips=["h10"]), "unknown chip 'h10'"),
        (dict(slo_ttft=0.0), "slo_ttft: must be a positive"),
        (dict(batches=range(1, 10**5), chunks=range(1, 900)), "size: .* designs are more than"),
    ],
)
def test_bad_input_is_one_line(options: dict, message: str):
    with pytest.raises(InputError, match=message) as error:
        size(**options)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


# ---- Tables, JSON, files ----


def text(dataset: xr.Dataset, make=report.size_table) -> str:
    file = io.StringIO()
    report.write(make(dataset), file)
    return file.getvalue()


def test_table_json_and_files_hold_the_same(found: xr.Dataset, tmp_path):
    shown = text(found)
    assert max(map(len, shown.splitlines())) <= 120 and "…" not in shown
    first = found.isel(deployment=0)
    assert f"{int(first.chips)} chips in {int(first.nodes)} whole nodes of 8" in shown
    assert "one replica fewer" in shown and "smaller replicas" in shown
    data = _json.size(found)
    assert data["rate"] == 10.0 and data["by"] == "chips" and data["slo_tpot_s"] == 0.04
    assert [row["chip"] for row in data["deployments"]] == list(found.chip.values)
    assert {"chips", "nodes", "load_power_w", "board_power_w", "server_power_w",
            "provisioned_usd_per_hour", "tp", "pp", "batch", "chunk", "precision", "replicas",
            "needed_replicas", "headroom_left", "set_by", "fewer_replicas_words",
            "smaller_replica_words"} <= set(data["deployments"][0])  # fmt: skip
    paths = report.save_size(found, tmp_path)
    assert set(paths) == {"nc", "json"} and all(path.exists() for path in paths.values())
    xr.testing.assert_equal(report.load_dataset(paths["nc"]), found)


# ---- Every chip at once ----


def test_every_chip_of_the_catalogue():
    names = perfmodel.chips.names()
    whole = frontier(MODEL, "all", max_chips=8, **LOAD, batches=(1, 8, 32), chunks=(2048,))
    assert list(whole.candidate.values) == names
    fits = dict(zip(whole.candidate.values, whole.candidate_fits.values, strict=True))
    # 70.6e9 weights of one byte in an H100's 85.5e9, of two in two of them; A100 has no fp8.
    assert fits["h100_sxm"] == "bf16 from 2 chips; fp8 from 1 chip"
    assert fits["a100_80gb_sxm"] == "bf16 from 2 chips; no fp8 kernel"
    shown = text(whole, report.overview_table)
    # Chips with a plan have a row, the others a reason.
    assert all(f"{name} " in shown or f"{name}: " in shown for name in names)
    assert max(map(len, shown.splitlines())) <= 120
    for row in (line for line in shown.splitlines() if line.startswith("h100_sxm ")):
        assert "TP" in row
    least = dict(zip(whole.candidate.values, whole.candidate_least_chips.values, strict=True))
    for chip in ("h100_sxm", "a100_80gb_sxm"):
        weights = "fp8" if chip == "h100_sxm" else "bf16"
        tp = int(least[chip])
        assert bool(perfmodel.estimate(MODEL, chip, tp=tp, weights=weights, **LOAD).feasible)
        if tp > 1:
            half = perfmodel.estimate(MODEL, chip, tp=tp // 2, weights=weights, **LOAD)
            assert half.binding == "memory"


def test_all_means_every_chip_beside_others():
    listed = question.named_chips(["h100", "all"])
    assert listed[0] == "h100" and len(listed) == 1 + len(perfmodel.chips.names())
    with pytest.raises(InputError, match="unknown chip 'all'"):
        perfmodel.estimate(MODEL, "all", **LOAD)
