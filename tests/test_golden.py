"""Numbers of this version to four digits: what moves is told in CHANGELOG.md under Numbers."""

import pytest

import perfmodel

# model, chip, plan; then TTFT [s], TPOT [s], output tokens/s per chip, memory of a chip [B], board
# power [W]. Not right by being here: only the same as when last looked at.
GOLDEN = [
    ("llama-3.3-70b", "h100", dict(tp=8, batch=32),
     (0.224747, 0.0212571, 186.388, 2.56671e+10, 4162.45)),
    ("llama-3.1-8b", "mi300x", dict(batch=64, weights="fp8"),
     (0.0938347, 0.0144186, 4414.4, 3.01912e+10, 572.943)),
    ("gpt-oss-120b", "b200", dict(tp=2, batch=64, engine="vllm"),
     (0.0975842, 0.0159905, 1990.95, 4.03176e+10, 1127.33)),
    ("qwen3-235b-a22b", "h200", dict(tp=8, ep=8, attention_dp=8, batch=256, weights="fp8"),
     (0.526353, 0.0422907, 748.104, 5.19229e+10, 3623.07)),
]  # fmt: skip
KEYS = ("ttft_s", "tpot_s", "output_tokens_per_second_chip", "memory_bytes", "power_w")


@pytest.mark.parametrize(("model", "chip", "plan", "numbers"), GOLDEN)
def test_numbers_have_not_moved(model: str, chip: str, plan: dict, numbers: tuple) -> None:
    found = perfmodel.estimate(model, chip, isl=4000, osl=1000, **plan)
    assert found.attrs["version"] == perfmodel.__version__
    assert [float(found[key]) for key in KEYS] == pytest.approx(list(numbers), rel=2e-4)
