"""The frontier by gradient, against the enumeration of the same plans."""

import numpy as np
import pytest

import perfmodel
from perfmodel import exploration, question, results


def descended(model: str, chips: list[str], **options):
    return perfmodel.frontier(model, chips, isl=4000, osl=1000, descend=True, **options)


@pytest.mark.parametrize(
    "model, chips, options",
    [
        ("llama-3.3-70b", ["h100", "b200", "mi300x"], {}),
        ("qwen3-235b-a22b", ["h200"], dict(precisions=["fp8"])),
        ("llama-3.1-8b", ["h100"], dict(x="ttft_s", y="usd_per_million_output_tokens")),
    ],
    ids=["dense", "mixture", "other axes"],
)
def test_descent_reaches_the_enumeration(model: str, chips: list[str], options: dict) -> None:
    found = descended(model, chips, **options)
    assert (found.candidate_hypervolume >= 0.99).all(), found.candidate_hypervolume.values
    # Rounded plans are among those enumerated, so they cannot do better.
    assert (found.candidate_hypervolume <= 1.0 + 1e-6).all()
    assert (found.candidate_evaluated < 0.25 * found.candidate_enumerated).all()
    assert (found.candidate_gradients > 0).all()
    assert found.feasible.all()
    assert set(found["chunk"].values) <= set(exploration.CHUNKS)
    network = perfmodel.load_model(model).model
    allowed = set(question.layouts(network, 16))
    degrees = zip(*(found[name].values for name in question.Layout._fields), strict=True)
    assert {question.Layout(*map(int, d)) for d in degrees} <= allowed
    # Nothing relaxed is reported: a point is what `estimate` says of its plan.
    point = found.isel(point=len(found.point) // 2)
    plan = {n: int(point[n]) for n in (*question.Layout._fields, "batch", "chunk", "replicas")}
    weights, *rest = str(point.precision.item()).split("/")
    alone = perfmodel.estimate(
        model, str(point.chip.item()), **plan, isl=4000, osl=1000, weights=weights,
        activations=rest[0] if rest else None, kv=rest[1] if rest else None,
    )  # fmt: skip
    for name in (str(found.attrs["x"]), str(found.attrs["y"])):
        assert float(point[name]) == float(alone[name])


def test_hypervolume_is_the_area_that_is_dominated() -> None:
    def front(points: list[tuple[float, float]]) -> exploration.Best:
        columns = np.asarray(points).T
        plans = exploration.designs(tp=np.ones(len(points)))
        values = dict(zip(axes, columns, strict=True))
        return exploration.Best(plans, values, 0, 0, None, (True, 0.0))

    axes = ("tokens_per_second_user", "output_tokens_per_second_chip")
    # 2 × 3 and 1 × 4 overlap in 1 × 3.
    one, more = exploration.hypervolume([front([(2, 3)]), front([(2, 3), (1, 4)])], axes)
    assert (one, more) == (6.0, 7.0)
    assert all(results.BY_NAME[axis].better == "higher" for axis in axes)
    # Less is better: from the worst of all points, (4, 4).
    lower = ("ttft_s", "tpot_s")
    axes = lower
    one, more = exploration.hypervolume([front([(2, 2), (4, 1)]), front([(1, 1), (2, 4)])], lower)
    assert (one, more) == (2 * 2 + 0.0, 3 * 3)
