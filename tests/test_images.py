"""Encoder towers, and serving prompts with images."""

import dataclasses
import json
import pathlib
from importlib.resources import files

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import perfmodel
from perfmodel import _labels, question
from perfmodel.chips import load_chip
from perfmodel.errors import InputError
from perfmodel.formats import precision
from perfmodel.machine import Rank
from perfmodel.models.beside import read_encoder
from perfmodel.models.catalogue import load_model, names
from perfmodel.models.encoder import (
    Encoder,
    encoder_operators,
    encoder_parameters,
    encoder_weight_bytes,
)
from perfmodel.models.transformer import parameters
from perfmodel.operators import Matmul, total
from perfmodel.passes import served
from perfmodel.plan import Engine, Load, Plan
from perfmodel.relax import as_real, traced
from perfmodel.serving import Estimate, estimate
from perfmodel.step import Shard
from perfmodel.timing import total_usage

BF16 = precision("bf16")


def tower(name: str) -> Encoder:
    encoder = load_model(name).encoder
    assert encoder is not None
    return encoder


# ---- Towers ----


@pytest.mark.parametrize(
    ("name", "count", "tokens"),
    [
        ("gemma-3-27b", 423_060_336, 256),
        ("llama-4-scout", 871_932_416, 144),
        ("llama-4-maverick", 871_932_416, 144),
        ("kimi-k2.5", 471_143_920, 1024),
        ("kimi-k3", 447_358_976, 1024),
        ("qwen3.5-27b", 460_730_096, 576),
        ("qwen3.5-35b-a3b", 446_571_248, 576),
        ("qwen3.5-397b-a17b", 456_010_480, 576),
    ],
)
def test_towers_that_checkpoints_include(name: str, count: int, tokens: int) -> None:
    assert encoder_parameters(tower(name)) == count
    assert tower(name).tokens == tokens


@pytest.mark.parametrize(
    ("name", "checkpoint", "scalars"),
    [("gemma-4-31b-nvfp4", 31_273_088_876, 60), ("gemma-4-26b-a4b", 25_805_936_206, 30)],
)
def test_gemma_4_fills_its_checkpoint(name: str, checkpoint: int, scalars: int) -> None:
    # safetensors.total of google/gemma-4-31B-it and -26B-A4B-it; a scalar a layer is not counted.
    entry = load_model(name)
    assert parameters(entry.model) + encoder_parameters(tower(name)) + scalars == checkpoint
    assert tower(name).tokens == 280 and tower(name).patches == 280 * 9


def test_every_tower_is_on_the_page() -> None:
    page = (pathlib.Path(__file__).parents[1] / "docs" / "images.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    told = {name: cells[1:] for cells in rows for name in cells[0].strip("| `").split("`, `")}
    towers = {name: encoder for name in names() if (encoder := load_model(name).encoder)}
    assert set(told) == set(towers)
    for name, encoder in towers.items():
        count, image = told[name]
        assert count == f"{encoder_parameters(encoder):,}", name
        assert image.startswith(f"{encoder.patches:,}"), name
        assert image.endswith(f", {encoder.tokens:,} |"), name


def test_a_copy_without_the_sizes_of_its_tower_has_none() -> None:
    text = files("perfmodel.models").joinpath("catalog/kimi_k3.json").read_text()
    config = json.loads(text)
    assert read_encoder(config) is not None
    del config["vision_config"]["vt_hidden_size"]
    assert read_encoder(config) is None


def test_an_image_is_seen_whole() -> None:
    encoder = tower("kimi-k2.5")
    ops = {op.name: op for op in encoder_operators(encoder, 2, 1024, Shard(), BF16)}
    # 4,096 patches of each of two images, all pairs, 16 heads of 72.
    assert ops["encoder_attention"].flops() == 2 * 2 * 16 * 4096**2 * 2 * 72
    matrices = 588 * 1152 + 27 * (4 * 1152**2 + 2 * 1152 * 4304)
    work = sum(op.count * op.flops() for op in ops.values() if isinstance(op, Matmul))
    projector = 4608 * 4608 + 4608 * 7168
    assert work == 2 * 2 * (4096 * matrices + 1024 * projector)


def test_a_gate_and_heads_of_their_own_width() -> None:
    ops = {
        op.name: op for op in encoder_operators(tower("gemma-4-31b-nvfp4"), 1, 280, Shard(), BF16)
    }
    assert ops["encoder_up"].flops() == 2 * 2520 * 2 * 4304 * 1152
    assert ops["encoder_down"].flops() == 2 * 2520 * 4304 * 1152
    wide = {op.name: op for op in encoder_operators(tower("kimi-k3"), 1, 1024, Shard(), BF16)}
    assert wide["encoder_qkv"].flops() == 2 * 4096 * 3 * 1536 * 1024
    assert wide["encoder_attention"].flops() == 2 * 12 * 4096**2 * 2 * 128


def test_ranks_share_heads_and_columns_and_no_more() -> None:
    encoder = tower("kimi-k2.5")

    def attention(shard: Shard) -> float:
        ops = encoder_operators(encoder, 1, 1024, shard, BF16)
        return total(tuple(op for op in ops if op.name == "encoder_attention"), "flops")

    assert 4 * attention(Shard(4)) == attention(Shard())
    # 16 heads over 32 ranks are one on each, and over 12 ranks two on some.
    assert attention(Shard(32)) == attention(Shard(16)) == attention(Shard()) / 16
    assert attention(Shard(12)) == attention(Shard(8))
    # Attention groups encode images of their own.
    assert attention(Shard(8, attention_groups=8)) == attention(Shard())
    layers = 2 * 27 * (4 * 1152**2 + 2 * 1152 * 4304)
    assert encoder_weight_bytes(encoder, Shard()) == 2 * encoder_parameters(encoder)
    saved = encoder_weight_bytes(encoder, Shard()) - encoder_weight_bytes(encoder, Shard(8))
    assert saved == layers * 7 // 8


# ---- Serving ----

PLAIN = Engine(0.9, 2e9, 16, 0.0, 0.0, 0.0, 0.5)
_estimate = jax.jit(estimate)
_seconds = jax.jit(lambda ops, on: total_usage(ops, Rank(on, as_real(1.0))).seconds)


def run(
    images: float | None,
    *,
    isl: float = 4000,
    chunk: float = 8192,
    hit: float = 0.0,
    tp: float = 2,
    pp: float = 1,
    batch: float = 1,
    engine: Engine = PLAIN,
) -> Estimate:
    """Returns the estimate of Gemma 3 27B on H200s with `images` of 256 tokens."""
    entry = load_model("gemma-3-27b")
    seen = None if images is None else entry.encoder
    return _estimate(
        load_chip("h200").machine,
        traced(dataclasses.replace(entry.model, encoder=seen)),
        traced(Load(isl, 1000, hit, images=images)),
        traced(Plan(tp * pp, pp, batch, chunk)),
        traced(BF16),
        traced(engine),
    )


def encoding(images: float, tp: float = 2) -> float:
    """Returns the seconds of encoding images at once, from the tower's operators alone."""
    ops = encoder_operators(tower("gemma-3-27b"), images, 256, Shard(tp), BF16)
    return float(_seconds(traced(ops), served(load_chip("h200").machine, traced(PLAIN))))


def test_the_first_token_waits_for_the_tower() -> None:
    text, one, three = (float(run(images).ttft) for images in (None, 1, 3))
    assert one - text == pytest.approx(encoding(1), rel=1e-3)
    assert three - text == pytest.approx(encoding(3), rel=1e-3)
    # 27 layers of 4,096 patches: 3.4 TFLOP of products and 0.99 of attention, over two ranks.
    work = (
        4096 * 2 * (588 * 1152 + 27 * (4 * 1152**2 + 2 * 1152 * 4304)) + 27 * 2 * 2 * 4096**2 * 1152
    )
    peak = float(load_chip("h200").machine.kernels.peak[0])
    assert work / 2 / peak < one - text < 6 * work / 2 / peak
    # Half of the prompts with an image: on average half the time.
    assert float(run(0.5).ttft) - text == pytest.approx(0.5 * (one - text), rel=1e-3)


def test_an_image_is_encoded_once_however_its_prompt_is_cut() -> None:
    whole, cut = (float(run(1, chunk=c).ttft - run(None, chunk=c).ttft) for c in (8192, 512))
    assert cut == pytest.approx(whole, rel=1e-3)
    # What is cached is not encoded.
    cached = float(run(2, hit=0.5).ttft - run(None, hit=0.5).ttft)
    assert cached == pytest.approx(whole, rel=1e-3)
    # A pipeline has the tower on its first stage.
    piped = float(run(1, pp=2).ttft - run(None, pp=2).ttft)
    assert piped == pytest.approx(whole, rel=1e-3)


def test_layers_of_a_tower_are_launched_one_by_one() -> None:
    eager = dataclasses.replace(PLAIN, launch_eager=1e-3)
    added = float(run(1, engine=eager).ttft - run(None, engine=eager).ttft)
    assert added == pytest.approx(encoding(1) + 27e-3, rel=1e-3)


def test_a_tower_takes_memory() -> None:
    text, seen = run(None), run(1)
    held = float(encoder_weight_bytes(tower("gemma-3-27b"), Shard(2)))
    assert 0.42e9 < held < 0.48e9  # 411 M of 423 M parameters are cut in two
    assert float(seen.weight_bytes - text.weight_bytes) == pytest.approx(held, rel=1e-4)
    # 20 images at once: 81,920 rows of 2 · 1152 and 2152, and 5,120 tokens of 5376.
    many = run(20, isl=8000)
    rows = 81_920 * (2 * 1152 + 2152) + 5_120 * 5_376
    assert float(many.activation_bytes) > 2 * rows > float(run(None, isl=8000).activation_bytes)
    assert float(many.admitted) < float(run(None, isl=8000).admitted)


def test_others_wait_for_a_tower_too() -> None:
    text, seen = run(None, batch=32), run(4, batch=32)
    assert seen.tpot > text.tpot and seen.request_rate < text.request_rate
    assert seen.energy_per_total_token > text.energy_per_total_token
    assert seen.usd_per_input_token > text.usd_per_input_token


def test_no_images_are_no_change() -> None:
    text, none = run(None, batch=32), run(0.0, batch=32)
    for name in ("ttft", "tpot", "request_rate", "chip_power", "prefill_busy", "parts"):
        # Two programs: they may differ in the last places.
        both = getattr(text, name), getattr(none, name)
        np.testing.assert_allclose(*both, rtol=5e-7, err_msg=name)
    entry = load_model("gemma-3-27b")
    for images in (None, 0):
        asked = ask("gemma-3-27b", images)
        assert jax.tree.structure(asked.network) == jax.tree.structure(entry.model)
        assert len(jax.tree.leaves(asked.load)) == len(jax.tree.leaves(Load(10, 10)))
        assert "images" not in asked.attributes("")


def outputs_of(found: Estimate) -> Array:
    names = ("ttft", "tpot", "request_rate", "prefill_busy", "chip_power")
    return jnp.stack([getattr(found, name) for name in names])


def test_gradients_in_images() -> None:
    entry = load_model("gemma-3-27b")
    machine = load_chip("h200").machine
    rest = traced((Plan(2, 1, 32, 2048), BF16, PLAIN))
    model = traced(dataclasses.replace(entry.model, encoder=entry.encoder))

    def outputs(images: Array) -> Array:
        load = dataclasses.replace(traced(Load(4000, 1000)), images=images)
        return outputs_of(estimate(machine, model, load, *rest))

    slopes = jax.jit(jax.jacfwd(outputs))
    for images in (0.0, 0.25, 1.0, 3.0, 15.0):
        assert np.all(np.isfinite(slopes(as_real(images)))), images
    # Below one image a step, everything but the queue is linear in it.
    low, high = (
        outputs_of(run(2.0, chunk=2048, batch=32)),
        outputs_of(run(2.02, chunk=2048, batch=32)),
    )
    chord = (np.asarray(high) - np.asarray(low)) / 0.02
    # The last, power, is a staircase of tiles there.
    assert np.asarray(slopes(as_real(2.01)))[:4] == pytest.approx(chord[:4], rel=0.05)


# ---- Asking ----


def ask(model: str, images: float | None, isl: int = 4000) -> question.Question:
    names = [question.parse_precision("bf16")]
    return question.ask(
        model, ["h200"], names, isl=isl, osl=10, prefix_hit=0.0, engine="neutral", slo_ttft=None,
        slo_tpot=None, price=None, images=images,
    )  # fmt: skip


def test_images_are_part_of_the_prompt() -> None:
    asked = ask("gemma-3-27b", 15)
    told = asked.attributes("")
    assert (told["isl"], told["images"], told["image_tokens"]) == (4000, 15, 15 * 256)
    assert asked.network.encoder is not None and "notes" not in told
    assert "not the vision layers" in ask("gemma-3-27b", None).attributes("")["notes"]


def test_estimate_frontier_and_size_take_images() -> None:
    load = dict(isl=2000, osl=100, images=2)
    one = perfmodel.estimate("gemma-3-27b", "h200", tp=2, batch=4, weights="bf16", **load)
    table = perfmodel.operator_table("gemma-3-27b", "h200", tp=2, batch=4, weights="bf16", **load)
    seen = table.isel(operator=table["group"].values == "mixed/encoder")
    assert set(seen["step"].values) == {"mixed"} and "projector_1" in seen["name"].values
    assert float(seen["seconds"].sum()) == pytest.approx(encoding(2), rel=1e-3)
    whole = table["seconds"].values[table["step"].values == "mixed"].sum()
    assert whole == pytest.approx(float(table["step_seconds"].sel(phase="mixed")), rel=1e-6)
    few = dict(precisions=["bf16"], batches=[4], chunks=[2048])
    front = perfmodel.frontier("gemma-3-27b", ["h200"], max_chips=2, **few, **load)
    sized = perfmodel.size("gemma-3-27b", ["h200"], rate=0.1, max_chips=4, **few, **load)
    same = front.isel(point=front["tp"].values == 2)
    assert float(same["ttft_s"].item()) == float(one["ttft_s"])
    for found in (one, front, sized):
        assert found.attrs["images"] == 2 and found.attrs["image_tokens"] == 512
        assert "images=2" in found.attrs["call"]
        assert _labels.lengths(found).endswith("100 out, 512 of those in for 2 images")


@pytest.mark.parametrize(
    ("model", "images", "message"),
    [
        ("gemma-3-27b", 16, r"16 × 256 tokens exceed the 4,000 prompt .* \(nearest: 15\)"),
        (
            "llama-3.3-70b",
            1,
            r"images: llama-3.3-70b has no image encoder in its config.json \(nearest: 0\)",
        ),
        ("gemma-3-27b", -1, "images: must be a number of images, 0 or more, not -1"),
        ("gemma-3-27b", float("nan"), "images: must be a number"),
        ("gemma-3-27b", "two", "images: must be a number of images, 0 or more, not 'two'"),
    ],
)
def test_images_that_cannot_be_are_refused(model: str, images: float, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        ask(model, images)
    assert "\n" not in str(caught.value)


def test_a_tower_without_sizes_is_refused(tmp_path: pathlib.Path) -> None:
    text = files("perfmodel.models").joinpath("catalog/gemma_3_27b.json").read_text()
    config = json.loads(text)
    del config["vision_config"]
    path = tmp_path / "cut.json"
    path.write_text(json.dumps(config))
    with pytest.raises(InputError, match="encoder whose sizes its config.json does not give"):
        ask(str(path), 1)
    with pytest.raises(InputError, match="the network has no encoder"):
        estimate(
            load_chip("h200").machine, load_model("llama-3.1-8b").model, Load(10, 10, images=1),
            Plan(1, 1, 1, 10), BF16, PLAIN,
        )  # fmt: skip
