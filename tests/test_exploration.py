"""The frontier: what is searched, what is kept, and measured runs beside it."""

import itertools
import json

import numpy as np
import pytest
import xarray as xr

import perfmodel
from perfmodel import cache, designs, exploration, question, results
from perfmodel.errors import Infeasible, InputError

LOAD = dict(isl=4000, osl=1000)
SMALL = dict(batches=(1, 2, 4, 8, 16, 32, 64, 128), chunks=(512, 2048), **LOAD)


def frontier(model: str = "llama-3.3-70b", chips=("h100", "b200"), **options) -> xr.Dataset:
    return perfmodel.frontier(model, chips, **SMALL | options)


def tps(*degrees: int) -> list[question.Layout]:
    """Layouts of one stage and plain tensor parallelism."""
    return [question.Layout(tp, 1, 1, 1, 1) for tp in degrees]


def brute_force(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns which points no other point is at least as good as on both, and better on one."""
    better = (x[:, None] >= x) & (y[:, None] >= y) & ((x[:, None] > x) | (y[:, None] > y))
    return ~better.any(axis=0)


def test_a_frontier_is_complete_and_documented(tmp_path) -> None:
    found = frontier()
    assert {q.name for q in results.QUANTITIES} <= set(found)
    for name, variable in found.variables.items():
        assert variable.attrs["units"] and variable.attrs["long_name"], name
    assert bool(found.feasible.all())
    # 5 degrees × 8 batches × 2 chunks × 2 precisions, for each of 2 chips.
    assert found.attrs["evaluated"] == 2 * 160 == int(found.candidate_evaluated.sum())
    assert found.attrs["feasible"] == int(found.candidate_feasible.sum())
    assert list(found.candidate_points) == [int((found.chip == c).sum()) for c in found.candidate]
    assert json.loads(found.attrs["catalogue"])["chips"].keys() == {"h100_sxm", "b200_sxm"}
    file = tmp_path / "frontier.nc"
    found.to_netcdf(file, engine="h5netcdf")
    with xr.open_dataset(file, engine="h5netcdf") as again:
        xr.testing.assert_identical(again.load().drop_attrs(), found.drop_attrs())
        assert again.attrs["x"] == "tokens_per_second_user"


@pytest.mark.parametrize(
    ("x", "y"),
    [
        ("tokens_per_second_user", "output_tokens_per_second_chip"),
        ("ttft_s", "usd_per_million_output_tokens"),
        ("tokens_per_second_user_e2e", "energy_per_output_token_j"),
        ("output_tokens_per_second", "longest_gap_s"),
    ],
)
def test_dominance_is_that_of_the_axes_shown(x: str, y: str) -> None:
    found = frontier(x=x, y=y)
    asked = question.ask(
        "llama-3.3-70b", ["h100", "b200"], [question.parse_precision(p) for p in ("bf16", "fp8")],
        prefix_hit=0.0, engine="neutral", slo_ttft=None, slo_tpot=None, price=None, **LOAD,
    )  # fmt: skip
    plans = exploration.enumerate_plans(tps(1, 2, 4, 8, 16), SMALL["batches"], SMALL["chunks"], 16)
    signs = [1 if results.BY_NAME[axis].better == "higher" else -1 for axis in (x, y)]
    everything = []
    for chip in range(2):
        points = []
        for kind in range(2):
            listed = plans._replace(chip=plans.chip + chip, precision=plans.precision + kind)
            values = designs.evaluate(asked, listed)
            good = results.feasible(values)
            points.append(np.stack([values[x][good], values[y][good]], axis=1))
        points = np.unique(np.concatenate(points), axis=0)
        best = points[brute_force(*(signs * points).T)]
        mine = found.isel(point=np.flatnonzero(found.chip == asked.chips[chip].name))
        np.testing.assert_array_equal(np.stack([mine[x], mine[y]], axis=1), best)
        everything.append(best)
    every = signs * np.concatenate(everything)
    np.testing.assert_array_equal(found.on_front, brute_force(*every.T))


def test_one_compilation_serves_everything() -> None:
    frontier(chips=["h100"])
    perfmodel.estimate("qwen-2.5-7b", "a100", **LOAD)
    before = cache.compilations(designs._evaluate)
    for model in ("llama-3.1-8b", "qwen-3-32b", "llama-2-13b"):
        load = dict(isl=1000, osl=500)
        frontier(model, ["h100", "h200", "b200", "mi300x"], precisions=["bf16", "fp8"], **load)
    frontier(precisions=["bf16", "fp8", "int4/bf16/fp8"], engine="ideal", slo_tpot=0.05, price=2)
    perfmodel.estimate("llama-3.1-405b", "h100", **LOAD)
    assert cache.compilations(designs._evaluate) == before


def test_points_equal_single_estimates_to_the_last_bit() -> None:
    found = frontier()
    for point in range(0, found.sizes["point"], 7):
        row = found.isel(point=point)
        single = perfmodel.estimate(
            "llama-3.3-70b", row.chip.item(), tp=int(row.tp), batch=int(row.batch),
            chunk=int(row["chunk"]), replicas=int(row.replicas),
            weights=row.precision.item(), **LOAD,
        )  # fmt: skip
        for quantity in results.QUANTITIES:
            assert row[quantity.name].item() == single[quantity.name].item(), quantity.name
        assert row.binding == single.binding


def test_blocks_do_not_change_a_bit() -> None:
    formats = [question.parse_precision("bf16")]
    asked = question.ask(
        "llama-3.3-70b", ["h100"], formats, prefix_hit=0.25, engine="neutral", slo_ttft=None,
        slo_tpot=None, price=None, **LOAD,
    )  # fmt: skip
    plans = exploration.enumerate_plans(tps(2, 4, 8), range(1, 2000), (512, 2048), 16)
    assert len(plans.tp) > designs.BLOCK
    whole = designs.evaluate(asked, plans)
    cuts = [0, 1, 258, 5000, len(plans.tp)]
    for start, stop in itertools.pairwise(cuts):
        part = designs.evaluate(asked, plans.take(slice(start, stop)))
        for name, value in part.items():
            np.testing.assert_array_equal(value, whole[name][start:stop], err_msg=name)


def test_equal_points_keep_the_plan_of_fewer_chips() -> None:
    plans = exploration.enumerate_plans(tps(1, 2, 3, 4), [1], [512], 8)
    # Three ranks fill six of eight chips, the others all.
    assert plans.tp.tolist()[0] == 3 and (plans.tp * plans.replicas).tolist() == [6, 8, 8, 8]
    axes = ("tokens_per_second_user", "output_tokens_per_second_chip")
    kept = exploration.nondominated([5.0, 5.0, 4.0], [1.0, 1.0, 2.0], axes)
    assert kept.tolist() == [True, False, True]
    # Chunks beyond the prompt are all the same plan where no two prompts can share one.
    found = frontier(chunks=(4000, 8192, 16384), chips=["h100"], batches=[1])
    assert set(found["chunk"].values) == {4000}
    points = np.stack([found[axis] for axis in axes], axis=1)
    assert len(np.unique(points, axis=0)) == len(points)


def test_service_levels_bind_the_search() -> None:
    free = frontier()
    limited = frontier(slo_tpot=0.02, slo_ttft=0.5)
    assert float(free.tpot_s.max()) > 0.02
    assert float(limited.tpot_s.max()) <= 0.02 and float(limited.ttft_s.max()) <= 0.5
    assert (
        limited.attrs["slo_tpot_s"] == 0.02 and limited.attrs["feasible"] < free.attrs["feasible"]
    )


def test_prefix_hits_help() -> None:
    cold, warm = (frontier(prefix_hit=hit) for hit in (0.0, 0.9))
    best = [float(found.output_tokens_per_second_chip.max()) for found in (cold, warm)]
    assert best[1] > 1.2 * best[0]


def test_nothing_fits() -> None:
    with pytest.raises(Infeasible, match="memory: needs .* smallest TP that fits is 16"):
        frontier("llama-3.1-405b", ["h100"], precisions=["bf16"], max_chips=8)
    with pytest.raises(Infeasible, match="ttft limit: TTFT .* against 1 ms"):
        frontier(slo_ttft=1e-3)
    with pytest.raises(Infeasible, match="kernel: none for fp8 .*bf16, int8"):
        frontier(chips=["a100"], precisions=["fp8"])
    needs = r"price: unknown, and usd_per_million_output_tokens needs it \(--price gb200=USD\)"
    with pytest.raises(Infeasible, match=needs) as error:
        frontier(chips=["gb200"], y="usd_per_million_output_tokens")
    known = error.value.found
    assert known is not None and known.candidate_points == 0 and known.attrs["x"]


def test_a_chip_without_plan_says_why() -> None:
    found = frontier("llama-3.1-405b", ["h100", "mi300x"], precisions=["bf16"], max_chips=8)
    obstacles = found.obstacle.set_index(candidate="candidate")
    assert obstacles.sel(candidate="h100_sxm").item().startswith("memory: ")
    assert obstacles.sel(candidate="mi300x") == ""
    assert set(found.chip.values) == {"mi300x"}
    mixed = frontier(chips=["a100", "h100"], precisions=["fp8"])
    assert mixed.obstacle.values[0].startswith("kernel: none for fp8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(x="speed"), "x: unknown axis 'speed'"),
        (dict(y="tp"), "y: unknown axis 'tp'"),
        (dict(x="ttft_s", y="ttft_s"), "two different axes"),
        (dict(chips=[]), "chips: at least one"),
        (dict(chips=["h10"]), "unknown chip 'h10'"),
        (dict(precisions=[]), "precisions: at least one"),
        (dict(precisions=["fp8/bf16"]), "weights/activations/kv"),
        (dict(precisions=["bf16/fp8/fp8"]), "no kernel multiplies"),
        (dict(batches=[]), "batches: at least one"),
        (dict(batches=[0]), "batches: must be at least 1"),
        (dict(chunks=[1.5]), "chunks: must be a whole number"),
        (dict(max_chips=0), "max_chips: must be at least 1"),
        (dict(price={"h200": 2.0}), "unknown priced chip 'h200'"),
        (dict(price={"h100": 2.0, "h100_sxm": 3.0}), "price: h100_sxm is given more than once"),
        (dict(price=2e5), "price: must be US dollars per chip and hour, at most 100,000"),
        (dict(osl=1), "x: tokens_per_second_user needs at least 2 output tokens"),
        (dict(batches=range(1, 10**5), chunks=range(1, 900)), "designs are more than"),
        (dict(batches=range(1, 10**7)), "batches: 9,999,999 are more than"),
    ],
)
def test_bad_input_is_one_line(options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        frontier(**options)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


HEADER = "system,model_path,isl,osl,concurrency,tp_size,ttft_ms,tpot_ms\n"


def overlay(tmp_path, text: str) -> xr.Dataset:
    file = tmp_path / "runs.csv"
    file.write_text(text)
    return perfmodel.overlay(file, frontier())


def test_measured_runs_in_the_same_axes(tmp_path) -> None:
    # Llama 3.1 70B has the architecture of 3.3. 8 requests each 0.5 s + 999 · 20 ms on 4 GPUs.
    text = HEADER + (
        "h100_sxm,meta-llama/Llama-3.1-70B,4000,1000,8,4,500,20\n"
        "B200,llama-3.3-70b,4000.0,1000,8.0,4,500,20\n"
        "h100_sxm,meta-llama/Llama-3.1-8B,4000,1000,8,4,500,20\n"
        "h100_sxm,somebody/else,4000,1000,8,4,500,20\n"
        "h100_sxm,llama-3.3-70b,1024,1024,8,4,500,20\n"
        "h200_sxm,llama-3.3-70b,4000,1000,8,4,500,20\n"
        "no such chip,llama-3.3-70b,4000,1000,8,4,500,20\n"
        "h100_sxm,llama-3.3-70b,4000,1000,8,4,fast,20\n"
        "h100_sxm,llama-3.3-70b,4000,1000,8,0,500,20\n"
        "h100_sxm,llama-3.3-70b,4000,1000\n"
    )
    found = overlay(tmp_path, text)
    assert list(found.chip.values) == ["h100_sxm", "b200_sxm"] and list(found.run) == [2, 3]
    run = found.isel(run=0)
    assert run.e2e_s == pytest.approx(20.48)
    assert run.tokens_per_second_user == pytest.approx(50.0)
    assert run.tokens_per_second_user_e2e == pytest.approx(1000 / 20.48)
    assert run.output_tokens_per_second_chip == pytest.approx(8 * 1000 / 20.48 / 4)
    assert run.total_tokens_per_second_chip == pytest.approx(5 * 8 * 1000 / 20.48 / 4)
    counts = {key: found.attrs[key] for key in found.attrs if key.startswith(("skip", "rejected"))}
    rows = counts.pop("rejected_rows").split("; ")
    assert counts == dict(skipped_model=2, skipped_lengths=1, skipped_chip=2, rejected=3)
    assert rows[0] == "line 9: ttft_ms is not a number: 'fast'"
    assert rows[1].startswith("line 10: gpus must be above 0") and "line 11: " in rows[2]
    for name, variable in found.variables.items():
        assert variable.attrs["units"] and variable.attrs["long_name"], name


def test_the_least_a_file_of_runs_must_have(tmp_path) -> None:
    text = "system,isl,osl,concurrency,gpus,ttft_ms,tpot_ms\nh100,4000,1000,8,4,500,20\n"
    assert overlay(tmp_path, text).sizes["run"] == 1
    assert overlay(tmp_path, text.split("\n")[0] + "\n").sizes["run"] == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no column system or chip"),
        ("system,isl,osl,concurrency,gpus,ttft_ms\n", "no column tpot_ms"),
        ("system,system,isl\n", "two columns have the same name"),
        (HEADER + '"' + "x" * 200_000 + '"\n', "line 2: not valid CSV"),
    ],
)
def test_a_bad_file_of_runs_is_one_line(tmp_path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        overlay(tmp_path, text)
    assert "\n" not in str(error.value)
