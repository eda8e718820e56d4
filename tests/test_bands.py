"""What ranges of a chip's numbers make of its results, and of the axes of cost."""

import io
import json

import numpy as np
import pytest

import perfmodel
from perfmodel import _labels, _page, _spans, bands, chips, cli, report
from perfmodel.chips import datasheet, writing

PLAN = dict(batch=8, isl=512, osl=100)
FIELDS = {"peak_bf16": 1e15, "memory_capacity": 192e9, "memory_bandwidth": 8e12, "tdp": 1000.0}


def text(renderable) -> str:
    file = io.StringIO()
    report.write(renderable, file)
    return file.getvalue()


def own(tmp_path, ranged: str = "", **changed) -> chips.Chip:
    """Returns a chip of a few numbers, `ranged` beside the value of its bandwidth."""
    made = writing.sheet_text("mine", "hbm_gpu", FIELDS | changed, generation="hopper")
    path = tmp_path / "mine.toml"
    path.write_text(made.replace("value = 8000000000000.0\n", f"value = 8000000000000.0\n{ranged}"))
    return chips.load_chip(path)


def ends(found, name):
    row = found.sel(quantity=name)
    return float(row.low), float(row.value), float(row.high)


def test_a_range_of_bandwidth_is_the_estimates_at_its_ends(tmp_path):
    """Of a chip whose bandwidth alone matters to the time, the band is that of both ends."""
    chip = own(tmp_path, "low = 7e12\nhigh = 9e12\n")
    found = bands.ranges("llama-3.1-8b", chip, **PLAN)
    low, value, high = ends(found, "tpot_s")
    assert low < value < high
    rows = dict(zip(found.number.values, found.effect_low.values, strict=True))
    assert rows["memory_bandwidth"] < -0.03
    # One at a time, by estimates of sheets with the ends themselves.
    faster = dict(memory_bandwidth=9e12, peak_vector=chip.fields["peak_vector"].value)
    link = {"link_bandwidth": chip.fields["link_bandwidth"].value}
    one = perfmodel.estimate("llama-3.1-8b", own(tmp_path, **faster, **link), **PLAN)
    assert float(one.tpot_s) / value - 1.0 == pytest.approx(rows["memory_bandwidth"], abs=1e-5)
    # The vector rate has a wide range as well, and together they reach a little further.
    assert low <= float(one.tpot_s) and low == pytest.approx(float(one.tpot_s), rel=0.02)


def test_bands_hold_the_value_and_both_ends_of_a_rent():
    found = bands.ranges("llama-3.1-8b", "h100", **PLAN)
    assert np.all(found.low.values <= found.value.values)
    assert np.all(found.value.values <= found.high.values)
    low, value, high = ends(found, "usd_per_hour")
    rent = chips.load_chip("h100").fields["rent"]
    assert (low, value, high) == pytest.approx((rent.low, rent.value, rent.high), rel=1e-5)
    # One chip: links and network ports are not read, nor is a price that is given.
    assert not {n for n in map(str, found.number.values) if n.startswith(("link", "nic", "host"))}
    given = bands.ranges("llama-3.1-8b", "h100", price=2.0, **PLAN)
    assert "rent" not in given.number.values
    assert ends(given, "usd_per_hour") == pytest.approx((2.0, 2.0, 2.0), rel=1e-5)


def test_a_chip_without_measured_kernels_is_less_certain(tmp_path):
    measured = bands.ranges("llama-3.1-8b", "h100", **PLAN)
    of_family = writing.sheet_text("mine", "hbm_gpu", FIELDS)
    (tmp_path / "plain.toml").write_text(of_family)
    found = bands.ranges("llama-3.1-8b", tmp_path / "plain.toml", **PLAN)
    assert "kernel constants" in found.number.values
    assert "kernel constants" not in measured.number.values

    def width(each):
        low, value, high = ends(each, "tpot_s")
        return (high - low) / value

    assert width(found) > 0.1 > width(measured)


def test_what_cannot_run_has_no_band():
    found = bands.ranges("llama-3.3-70b", "h100", **PLAN)
    assert np.all(np.isnan(found.low.sel(quantity=["tpot_s", "power_w"]).values))


def test_estimate_shows_bands_and_what_they_are_of(capsys, monkeypatch):
    monkeypatch.setattr(cli, "_ready", lambda: None)
    command = ["estimate", "llama-3.1-8b", "corsair", "--tp", "8", "--weights", "int8"]
    command += ["--isl", "512", "--osl", "100"]
    assert cli.main(command) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Ranges: with all of these" in out and "fabric.* latency 4.00 µs to 18.0 µs, time" in out
    assert cli.main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    band = found["bands"]["tpot_s"]
    assert band["low"] < found["tpot_s"] == band["value"] < band["high"]
    assert {"number", "number_low", "number_high", "unit"} <= set(found["ranges"][0])
    assert cli.main([*command, "--json", "--no-ranges"]) == 0
    assert "bands" not in json.loads(capsys.readouterr().out)


def test_assumed_numbers_are_wide_within_what_is_possible():
    for name in chips.names():
        for field, number in chips.load_chip(name).fields.items():
            if number.kind != "assumed" or number.low is None or number.high is None:
                continue
            assert number.low <= (number.value or 0.0) <= number.high, (name, field)
            row = next(f for f in datasheet.FIELDS if f.name == field)
            assert row.low <= number.low and number.high <= row.high, (name, field)


# ---- Axes of cost ----


@pytest.fixture(scope="module")
def front():
    return perfmodel.frontier(
        "llama-3.1-8b", ["h100", "mi300x"], isl=512, osl=100, max_chips=8, precisions=["fp8"],
        batches=[1, 8, 64], chunks=[512], y="usd_per_million_output_tokens",
    )  # fmt: skip


def test_a_cost_has_the_range_of_its_price(front):
    (first, _) = _labels.fronts(front)
    span = _spans.price_span(first.columns, "usd_per_million_output_tokens")
    assert span is not None
    rent = chips.load_chip("h100").fields["rent"]
    value = first.columns["usd_per_million_output_tokens"]
    for end, price in zip(span, (rent.low, rent.high), strict=True):
        assert end / value == pytest.approx(price / rent.value, rel=1e-5)
    # As the results themselves say at that end, and turned over per dollar.
    low = first.columns["usd_per_million_output_tokens_low"]
    assert span[0] == pytest.approx(low, rel=1e-5)
    per = _spans.price_span(first.columns, "output_tokens_per_second_usd")
    assert per is not None
    rate = first.columns["output_tokens_per_second_usd"]
    assert per[1] / rate == pytest.approx(rent.value / rent.low, rel=1e-5)
    assert _spans.price_span(first.columns, "tpot_s") is None


def test_table_picture_and_page_draw_the_range(front, tmp_path):
    shown = text(report.frontier_table(front))
    assert "–" in shown and " (" in shown
    paths = report.save_frontier(front, tmp_path)
    assert paths["png"].stat().st_size > 10_000
    traces = _page.figure(report.load_dataset(paths["nc"]))["data"]
    for trace in traces:
        bars = trace["error_y"]
        assert len(bars["array"]) == len(trace["y"]) and min(bars["array"]) > 0.0
        assert "error_x" not in trace


def test_a_price_without_a_range_draws_none():
    found = perfmodel.frontier(
        "llama-3.1-8b", ["h100"], isl=512, osl=100, max_chips=8, precisions=["fp8"], price=2.0,
        batches=[1, 8, 64], chunks=[512], y="usd_per_million_output_tokens",
    )  # fmt: skip
    (one,) = _labels.fronts(found)
    assert _spans.price_span(one.columns, "usd_per_million_output_tokens") is None
    assert "error_y" not in _page.figure(found)["data"][0]
