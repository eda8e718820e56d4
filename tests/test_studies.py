"""Every study runs on a tiny space, saves what it found, draws from it, and says its verdict."""

import functools
import io
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import xarray as xr

from perfmodel import report, studies, system_search
from perfmodel.errors import InputError
from perfmodel.studies.draft_elsewhere import study as draft_elsewhere
from perfmodel.studies.prefill_decode import study as prefill_decode
from perfmodel.studies.trainium_wafer import study as trainium_wafer

pytestmark = pytest.mark.xdist_group("system")

TINY: dict[str, tuple[ModuleType, Any]] = {
    "prefill_decode": (
        prefill_decode,
        prefill_decode.Scope(
            chips=("h100",), max_chips=16, batches=(1, 8, 32, 64), chunks=(2048,),
            speeds=(20, 40), ttft=(10.0,),
        ),
    ),
    "trainium_wafer": (
        trainium_wafer,
        trainium_wafer.Scope(
            isl=(500, 4000), osl=(125,), speeds=(500, 1000), wafers=((5, 16), (8, 10)), chunks=(8,),
            replicas=(4, 32, 128), batches=(1, 8, 32, 64), shown=((4000, 125),), beside=(1.0, 64.0),
        ),
    ),
    "draft_elsewhere": (
        draft_elsewhere,
        draft_elsewhere.Scope(
            chips=("h100",), rates=(0.8, 0.96), floors=(0.0, 20.0), layouts=((1,), (8,), (1,)),
            replicas=((1,), (1, 2), (1,)), batches=(1, 4), drafts=(4, 16, 32), micro=(1,),
        ),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns a function from the name of a study to its result and folder; each runs once."""

    @functools.cache
    def once(name: str) -> tuple[xr.Dataset, Path]:
        module, scope = TINY[name]
        folder = tmp_path_factory.mktemp(name)
        return module.run(folder, scope), folder

    return once


@pytest.mark.parametrize("name", TINY)
def test_a_study_saves_draws_and_says(run, name) -> None:
    module, (found, folder) = TINY[name][0], run(name)
    assert {path.name for path in folder.iterdir()} == {f"{name}.nc", f"{name}.png"}
    saved = report.load_dataset(folder / f"{name}.nc")
    xr.testing.assert_equal(saved, found)
    text = io.StringIO()
    report.write(module.summary(saved), text)
    said = " ".join(text.getvalue().split())
    assert module.TITLE in said
    for line in module.verdict(found):
        assert " ".join(line.split()) in said


def test_every_study_is_run_here_or_by_its_own_tests() -> None:
    assert set(TINY) | {"frontier"} == set(studies.names())
    for name in TINY:
        assert studies.load(name).run is TINY[name][0].run


def test_long_prompts_want_more_chips_for_them(run) -> None:
    found = run("prefill_decode")[0]
    at = found.isel(chip=0, ttft=0, speed=0)["prefill_share"]
    summarise, write, both = (float(at.sel(load=n)) for n in ("summarise", "write", "both"))
    assert write < both < summarise
    # A ratio is as good as the best for the load it was made for, and worse for the other.
    kept = prefill_decode.wrong_ratio(found).isel(chip=0, ttft=0)
    assert float(kept.sel(load="write", planned="summarise")) < 0.7
    assert np.nanmax(kept) <= 1.0 + 1e-6


def test_trainium_frees_wafers_and_no_racks(run) -> None:
    found = run("trainium_wafer")[0]
    gain = trainium_wafer.gains(found).sel(speed=1000, osl=125)
    assert float(gain["wafer_rack"].sel(isl=4000)) > 2.0
    assert float(gain["every_rack"].max()) < 1.0
    # More racks of Trainium never take from what a rack of CS-3 gives.
    grown = found["grown"].sel(counted="racks of CS-3").values
    assert np.all(np.diff(grown, axis=1) >= 0.0)


def test_drafts_elsewhere_are_bounded_by_what_is_accepted(run) -> None:
    found = run("draft_elsewhere")[0]
    gain = draft_elsewhere.gains(found).isel(chip=0, floor=0)
    # Without end, drafts of rate a yield 1/(1 − a) tokens a cycle.
    for rate in (0.8, 0.96):
        assert float(gain.sel(rate=rate).max()) < 1.0 / (1.0 - rate)
    assert float(gain.sel(place="on Corsair", rate=0.96)) > draft_elsewhere.CLAIM
    assert float(gain.sel(place="on the GPUs", rate=0.96)) < draft_elsewhere.CLAIM
    crossing = float(draft_elsewhere.needed(found).isel(chip=0, floor=0).sel(place="on Corsair"))
    assert 0.8 < crossing < 0.96


def test_systems_are_counted_per_kw_and_per_rack() -> None:
    lengths: dict[str, Any] = {"isl": 500, "osl": 500, "max_chips": 8, "batches": (8,)}
    search = functools.partial(system_search.frontier, "llama-3.3-70b", **lengths)
    found = search({"decode": "h100:weights=fp8"}, y="output_tokens_per_second_rack")
    # 10.2 kW of a DGX over its 8 GPUs, 32 of them in a rack.
    each = found["output_tokens_per_second_chip"]
    np.testing.assert_allclose(found["output_tokens_per_second_kw"], each / 1.275, rtol=1e-5)
    np.testing.assert_allclose(found["output_tokens_per_second_rack"], 32 * each, rtol=1e-5)
    with pytest.raises(InputError, match="rack_chips"):
        search({"decode": "trn2:weights=bf16"}, y="output_tokens_per_second_rack")
