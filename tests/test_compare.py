"""Chips side by side, on rooflines, and chips of one's own."""

import json
import math
import tomllib

import numpy as np
import pytest

import perfmodel
from perfmodel import _chips_command, chips, cli, comparison, report
from perfmodel.chips import datasheet, writing
from perfmodel.errors import InputError
from perfmodel.quantities import parse_quantity

THREE = ("--peak", "1e15", "--bandwidth", "8TB/s", "--capacity", "192GB")
RUN = ("--model", "llama-3.1-8b", "--batch", "8", "--isl", "512", "--osl", "100")


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch):
    for module in (cli, _chips_command):
        monkeypatch.setattr(module, "_ready", lambda: None)


def run(capsys, *arguments):
    status = cli.main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return status, out, err


def fails(capsys, *arguments):
    """Returns the one line that refused input is answered with."""
    status, _, err = run(capsys, *arguments)
    assert status == 2 and err.count("\n") == 1, err
    assert err.startswith("error: ") and len(err) < 400
    return err


@pytest.fixture(scope="module")
def compared():
    model = perfmodel.load_model("llama-3.1-8b")
    return comparison.compare(
        comparison.named(["h100", "mi300x"]), model, batch=8, isl=512, osl=100
    )


# ---- Side by side ----


def test_numbers_side_by_side_mark_what_is_unknown(capsys):
    status, out, _ = run(capsys, "chips", "h100", "mi300x", "cs3")
    rows = {line[:24].strip(): line[24:] for line in out.splitlines()}
    assert status == 0 and "3.35 TB/s" in rows["memory bandwidth"]
    # 989e12 FLOP/s over 3.35e12 B/s.
    assert "295 FLOP/B" in rows["balance, bf16"]
    assert "none" in rows["fp4, dense"] and "–" in rows["rent"] and "*" in rows["link latency"]
    found = json.loads(run(capsys, "chips", "h100", "cs3", "--json")[1])
    first, second = (chip["numbers"] for chip in found["chips"])
    assert first["rent"]["low"] < first["rent"]["value"] < first["rent"]["high"]
    assert second["rent"] == {
        "value": None, "low": None, "high": None, "unit": "USD/h", "kind": "unknown",
    }  # fmt: skip
    assert second["peak_bf16"]["kind"] == second["balance_bf16"]["kind"] == "assumed"


def test_every_chip_side_by_side(capsys):
    status, out, _ = run(capsys, "chips", "all")
    assert status == 0 and all(name in out for name in chips.names())


def test_operators_lie_under_their_roofs(compared):
    placed = np.isfinite(compared["flop_rate"].values)
    assert {"decode", "prefill"} == set(compared["step"].values[placed])
    rate, roof = (compared[name].values[placed] for name in ("flop_rate", "roof"))
    intensity, names = (compared[name].values[placed] for name in ("intensity", "name"))
    assert np.all(rate > 0.0) and np.all(rate < 1.02 * roof)
    # Eight rows of a product: 2·8 FLOP for each weight of 2 bytes, and little traffic beside.
    products = (names == "up_projection") & (compared["step"].values[placed] == "decode")
    assert intensity[products] == pytest.approx(8.0, rel=0.02)
    # Every operator of every chip, each with its time; those without arithmetic are not placed.
    for chip in ("h100_sxm", "mi300x"):
        for step in ("decode", "prefill"):
            mine = (compared["of"].values == chip) & (compared["step"].values == step)
            assert np.sum(compared["share_of_step"].values[mine]) == pytest.approx(1.0)
    assert "host" in set(compared["name"].values[~placed])


def test_compared_numbers_are_those_of_an_estimate(compared):
    one = perfmodel.estimate("llama-3.1-8b", "mi300x", batch=8, isl=512, osl=100)
    assert float(compared["tpot_s"].sel(chip="mi300x")) == float(one.tpot_s)


def test_rooflines_as_picture_and_page(compared, tmp_path):
    report.save_roofline(compared, tmp_path / "r.png")
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    report.save_roofline(compared, tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert "up projection" in text and "H100 SXM: bf16 989 TFLOP/s" in text
    assert text.count('"mode": "markers"') == 4


def test_a_chip_that_cannot_run_it_says_so(capsys):
    arguments = ("chips", "h100", "a100", *RUN, "--weights", "fp8")
    status, out, _ = run(capsys, *arguments)
    assert status == 0 and "a100_80gb_sxm: does not run, no fp8 kernel" in out
    assert cli.main(["chips", "a100", *RUN, "--weights", "fp8"]) == 3


def test_refused_comparisons(capsys, tmp_path):
    assert "h100_sxm" in fails(capsys, "chips", "h10", "h200")
    assert ".png or .html" in fails(capsys, "chips", "h100", "--plot", tmp_path / "x.pdf")
    assert "nearest: all" in fails(capsys, "chips", "--plot", tmp_path / "x.png")
    assert "--model" in fails(capsys, "chips", "h100", "--modell", "llama-3.1-8b")


# ---- One's own ----


def test_three_numbers_make_a_chip_that_estimate_takes(capsys, tmp_path):
    path = tmp_path / "mine.toml"
    status, out, _ = run(capsys, "chips", "new", "mine", *THREE, "--tdp", "1.2kW", "--out", path)
    assert status == 0 and "link_bandwidth" in out and "0.11 times memory_bandwidth" in out
    made = chips.load_chip(path)
    assert made.sheet.value("memory_bandwidth") == 8e12 and made.sheet.value("tdp") == 1200.0
    link = made.fields["link_bandwidth"]
    assert link.kind == "assumed" and link.low is not None and link.high is not None
    # Wide: no range is known of the share, so a factor of two either way.
    assert link.high / link.low == pytest.approx(datasheet.WIDE**2)
    status, out, _ = run(capsys, "estimate", "llama-3.1-8b", path, "--isl", "512", "--osl", "100")
    assert status == 0 and "Assumed of MINE" in out
    assert "exists already" in fails(capsys, "chips", "new", "mine", *THREE, "--out", path)


@pytest.mark.parametrize("family", datasheet.FAMILIES)
def test_three_numbers_are_enough_in_every_family(family, capsys, tmp_path):
    path = tmp_path / "mine.toml"
    status, out, _ = run(capsys, "chips", "new", "mine", "--family", family, *THREE, "--out", path)
    assert status == 0 and "assumed" in out
    machine = chips.load_chip(path).machine
    assert float(machine.memory.bandwidth[0]) == pytest.approx(8e12)
    assert np.isfinite(float(machine.power.limit))


def test_like_another_chip_changes_what_is_set_only(capsys, tmp_path):
    path = tmp_path / "twice.toml"
    wide = ("--set", "memory_bandwidth=6.7TB/s", "--source", "a question")
    status, *_ = run(capsys, "chips", "new", "twice", "--like", "h100", *wide, "--out", path)
    made, base = chips.load_chip(path), chips.load_chip("h100")
    assert status == 0 and made.kernels_of() == "h100_sxm"
    changed = {n for n in base.fields if base.fields[n].value != made.fields[n].value}
    assert changed == {"memory_bandwidth"}
    assert made.fields["rent"].low == base.fields["rent"].low
    titles = {row.field: row.source for row in made.numbers()}
    assert titles["memory_bandwidth"] == "a question" and titles["tdp"]


def test_sheet_text_survives_hard_words():
    odd = 'a "quoted" \\ title\nof two lines'
    text = writing.sheet_text(
        "odd", "wafer", {f: 1e13 for f in ("peak_bf16", "memory_capacity", "memory_bandwidth")},
        source=odd,
    )  # fmt: skip
    assert tomllib.loads(text)["sources"]["given"]["title"] == odd
    assert "# Assumed of its family, wafer" in text


REFUSED = {
    "negative": ((*THREE[:2], "--bandwidth", "-8TB/s", *THREE[4:]), "nearest: 1e+06"),
    "missing": (THREE[:4], "missing --capacity"),
    "unknown field": ((*THREE, "--set", "peak_fp16=1e15"), "peak_fp8"),
    "unknown family": ((*THREE, "--family", "hbm_gp"), "hbm_gpu"),
    "bits for bytes": ((*THREE[:2], "--bandwidth", "8Tb/s", *THREE[4:]), "nearest: TB/s"),
    "another quantity": ((*THREE[:2], "--bandwidth", "8TB", *THREE[4:]), "nearest: TB/s"),
    "no number": (("--peak", "fast", *THREE[2:]), "--peak: a number is needed"),
    "too small, as if in tera": ((*THREE[:2], "--bandwidth", "8", *THREE[4:]), "outside 1e+06"),
    "twice": ((*THREE, "--set", "peak_bf16=1e15"), "more than once"),
    "no equals sign": ((*THREE, "--set", "tdp"), "FIELD=VALUE"),
    "peak beyond its power": ((*THREE, "--tdp", "3"), "takes 38 W, above tdp 3 W (nearest: peak"),
    "fp4 beyond its power": ((*THREE, "--peak-fp8", "1e15", "--peak-fp4", "1e18", "--tdp", "700"),
                             "above tdp 700 W"),
    "memory beyond its power": ((*THREE[:2], "--bandwidth", "1000TB/s", *THREE[4:], "--tdp", "700"),
                                "memory_bandwidth 1e+15 B/s at 3 pJ each"),
    "links beyond its power": ((*THREE, "--tdp", "100", "--set", "link_bandwidth=1000TB/s"),
                               "link_bandwidth 1e+15 B/s"),
    "energy beyond its power": (
        (*THREE, "--tdp", "700", "--set", "memory2_capacity=1TB", "--set",
         "memory2_bandwidth=1TB/s", "--set", "slow_memory_energy=1e5pJ/B"),
        "takes 100,000 W, far above tdp 700 W"),
    "a catalogue's name": (("h100", *THREE), "catalogue"),
    "a slower narrow format": ((*THREE, "--peak-fp8", "5e14"), "a narrower format is not slower"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_impossible_chips_are_refused_in_one_line(case, capsys, tmp_path):
    arguments, said = REFUSED[case]
    name = () if arguments[0] == "h100" else ("mine",)
    path = tmp_path / "x.toml"
    assert said in fails(capsys, "chips", "new", *name, *arguments, "--out", path)
    assert not path.exists()


def test_energies_that_are_refused_are_a_tenth_of_what_is_made():
    """The least energies believed, against the catalogue: power limit over rate."""
    for name, least in datasheet.LEAST_ENERGY.items():
        sheets = [chips.load_chip(chip).sheet for chip in chips.names()]
        pairs = [(sheet.value("tdp"), sheet.value(name)) for sheet in sheets]
        made = [limit / rate for limit, rate in pairs if limit and rate]
        assert 9.0 * least < min(made)
        if name != "link_bandwidth":
            assert min(made) < 12.0 * least


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("8TB/s", "B/s", 8e12), ("192 GiB", "B", 192 * 2.0**30), ("2.5 PFLOPS", "FLOP/s", 2.5e15),
        ("1.2kW", "W", 1200.0), ("1_000", "1", 1000.0), ("5 µs", "s", 5e-6), ("$3", "USD", None),
        ("inf", "W", None), ("1e999", "W", None), ("", "W", None), ("1 TB/s", "B", None),
    ],
)  # fmt: skip
def test_quantities_as_people_type_them(text, unit, value):
    if value is not None:
        assert parse_quantity(text, unit, "x") == pytest.approx(value)
        return
    with pytest.raises(InputError, match="^x: ") as error:
        parse_quantity(text, unit, "x")
    assert "\n" not in str(error.value)


def test_another_unit_of_a_sheet_is_converted_in_the_message():
    number = {"value": 3350, "unit": "GB/s", "kind": "assumed"}
    need = {"peak_bf16": number | {"unit": "FLOP/s", "value": 1e15}, "memory_capacity": number}
    tables = {"chip": {"name": "x", "family": "hbm_gpu"}, **need, "memory_bandwidth": number}
    with pytest.raises(InputError, match="memory_capacity: unit must be"):
        datasheet.parse_sheet(tables, "x")
    tables["memory_capacity"] = number | {"unit": "B", "value": 1e11}
    with pytest.raises(InputError, match=r"3350 GB/s are 3.35e\+12 B/s"):
        datasheet.parse_sheet(tables, "x")
    assert not math.isnan(parse_quantity("1", "1", "x"))
