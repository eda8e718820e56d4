"""Tables, pictures, pages and files made from results."""

import html.parser
import io
import json

import numpy as np
import pytest
import xarray as xr

import perfmodel
from perfmodel import _json, _labels, report

CHIPS = ["h100_sxm", "mi300x"]


@pytest.fixture(scope="module")
def data() -> xr.Dataset:
    return perfmodel.frontier(
        "llama-3.1-8b", CHIPS, isl=1000, osl=100, max_chips=8,
        batches=[1, 2, 4, 8, 16, 32, 64, 128], chunks=[512, 1000],
    )  # fmt: skip


@pytest.fixture(scope="module")
def runs(data: xr.Dataset) -> xr.Dataset:
    """Measured runs as `overlay` gives them: near two points, and one with unknown chips."""
    names = ("tokens_per_second_user", "output_tokens_per_second_chip")
    rows = {name: ("run", 0.9 * data[name].values[:3]) for name in names}
    extra = {"chips": ("run", [8.0, 8.0, np.nan]), "concurrency": ("run", [1.0, 4.0, 8.0])}
    coords = {"chip": ("run", ["h100_sxm"] * 3), "precision": ("run", ["fp8"] * 3)}
    return xr.Dataset(rows | extra, coords, {"rejected": 1, "rejected_rows": "line 7: no"})


def text(renderable) -> str:
    file = io.StringIO()
    report.write(renderable, file)
    return file.getvalue()


# ---- Tables ----


def test_frontier_table_is_plain_text_of_120_columns(data):
    shown = text(report.frontier_table(data))
    assert "\x1b" not in shown
    assert max(map(len, shown.splitlines())) <= 120
    assert "…" not in shown


def test_frontier_table_says_what_was_asked_and_what_is_uncertain(data):
    shown = text(report.frontier_table(data))
    assert "Llama-3.1-8B · 1,000 tokens in, 100 out · engine neutral" in shown
    assert f"{data.attrs['evaluated']:,} plans evaluated" in shown
    assert "h100_sxm 2.95" in shown
    assert "MI300X: no kernel measurements of its own" in shown
    assert "Assumed of every chip: link latency" in shown
    assert "decode's share of busy time" in shown


def test_frontier_table_keeps_both_ends_of_each_front(data):
    shown = text(report.frontier_table(data, rows=3)).splitlines()
    for chip in CHIPS:
        own = data.tokens_per_second_user.values[data.chip.values == chip]
        first = next(line for line in shown if line.startswith(chip))
        assert f" {_labels.number(own[0])} " in first
        assert any(f" {_labels.number(own[-1])} " in line for line in shown)


def test_rows_are_spread_evenly_in_log():
    values = np.geomspace(1.0, 1000.0, 301)
    assert _labels.spread(values, 4) == [0, 100, 200, 300]


@pytest.fixture(scope="module")
def design() -> tuple[xr.Dataset, xr.Dataset]:
    options = dict(model="llama-3.1-8b", chip="h100", tp=2, batch=8, isl=1000, osl=100)
    return perfmodel.estimate(**options), perfmodel.operator_table(**options)


def test_estimate_table_adds_up_to_tpot(design):
    found, operators = design
    shown = text(report.estimate_table(found, operators))
    assert f"bound by {found.binding.item()}" in shown
    parts = [line.split() for line in shown.splitlines() if "█" in line or line.endswith("% ")]
    shares = [int(word[:-1]) for line in parts for word in line if word.endswith("%")]
    assert 97 <= sum(shares) <= 103


def test_estimate_table_says_what_is_not_the_chips_own(design):
    attrs = {"kernel_constants": "its family", "assumed": "idle_power", "notes": "code ignored"}
    shown = text(report.estimate_table(design[0].assign_attrs(attrs)))
    assert "H100 SXM: no kernel measurements of its own" in shown
    assert "Assumed of H100 SXM: idle power" in shown
    assert "Llama-3.1-8B: code ignored" in shown
    assert "that the KV pool admits" in shown


def test_limits_and_origins_are_on_the_page(data, tmp_path):
    limited = data.assign_attrs(slo_ttft_s=2.0, slo_tpot_s=0.03, notes="code ignored")
    assert _labels.setting(limited).endswith("TTFT at most 2 s · TPOT at most 30 ms")
    report.save_html(limited, tmp_path / "x.html")
    page = (tmp_path / "x.html").read_text("utf-8")
    for words in ("TPOT at most 30 ms", "Assumed of every chip", "Llama-3.1-8B: code ignored"):
        assert words in page


def test_operators_table_shows_both_steps(design):
    shown = text(report.operators_table(design[1]))
    assert "decode step" in shown and "step with a chunk of a prompt" in shown
    # Up projection of a rank: 8 rows, gate and up of 14,336/2 columns each, hidden 4,096.
    assert "8 × 14,336 × 4,096" in shown
    assert max(map(len, shown.splitlines())) <= 120


def test_infeasible_design_shows_no_speed():
    found = perfmodel.estimate("llama-3.3-70b", "h100", isl=1000, osl=100)
    shown = text(report.estimate_table(found))
    assert "infeasible, memory" in shown
    assert "TTFT" not in shown and "TPOT" not in shown and "weights" in shown


# ---- Files ----


def test_netcdf_keeps_values_units_and_attributes(data, tmp_path):
    path = tmp_path / "new" / "folder" / "x.nc"
    strange = {"yes": True, "none": None, "list": [1, "a"], "table": {"b": 1.5}, "path": tmp_path}
    report.save_dataset(data.assign_attrs(strange), path)
    back = report.load_dataset(path)
    xr.testing.assert_equal(back, data)
    for name, variable in data.variables.items():
        assert back[name].attrs["units"] == variable.attrs["units"]
        assert back[name].attrs["long_name"] == variable.attrs["long_name"]
    assert {name: back.attrs[name] for name in data.attrs} == data.attrs
    assert back.attrs["yes"] == "true" and "none" not in back.attrs
    assert json.loads(back.attrs["list"]) == [1, "a"]
    # The Dataset given is as before.
    assert "yes" not in data.attrs


def test_failed_write_is_bad_input_and_leaves_nothing(data, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(perfmodel.InputError, match="cannot be written"):
        report.save_dataset(data, tmp_path / "file" / "x.nc")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_pictures_are_drawn_from_the_file(data, runs, tmp_path):
    paths = report.save_frontier(data, tmp_path, runs)
    assert set(paths) == {"nc", "png", "html", "measured"}
    png = paths["png"].read_bytes()
    assert png.startswith(b"\x89PNG") and len(png) > 20_000
    back = report.load_dataset(paths["nc"])
    assert list(back.candidate_kernels.values) == ["its own", "its family"]


def test_second_process_draws_the_same(data, tmp_path):
    alone = report.save_frontier(data, tmp_path / "a")
    with report.Drawing() as drawing:
        beside = report.save_frontier(data, tmp_path / "b", drawing=drawing)
        assert drawing.finished()
    for kind in ("png", "html"):
        assert alone[kind].read_bytes() == beside[kind].read_bytes()


def test_without_the_second_process_the_first_draws(data, tmp_path):
    with report.Drawing() as drawing:
        pass
    paths = report.save_frontier(data, tmp_path, drawing=drawing)
    assert paths["png"].exists() and paths["html"].exists()


class _Loads(html.parser.HTMLParser):
    """Collects what a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.found += [f"{tag} {k}" for k, v in attrs if k in ("src", "href", "srcset", "data")]
        if tag in ("link", "img", "iframe", "object", "embed"):
            self.found.append(tag)


def test_page_loads_nothing(data, tmp_path):
    report.save_html(data, tmp_path / "x.html")
    page = (tmp_path / "x.html").read_text("utf-8")
    parser = _Loads()
    parser.feed(page)
    assert parser.found == []
    assert "@import" not in page.split("<script>")[0] and "url(" not in page.split("<script>")[0]


def test_names_cannot_break_out_of_the_page(data, tmp_path):
    evil = '</script><script>alert("x")</script><img src=x>'
    pages = []
    for place, named in enumerate((data, data.assign_attrs(model=evil, engine=evil))):
        report.save_html(named, tmp_path / f"{place}.html")
        parser = _Loads()
        parser.feed((tmp_path / f"{place}.html").read_text("utf-8"))
        pages.append((parser.tags, parser.found))
    assert pages[0] == pages[1]


def _page_figure(data):
    from perfmodel import _page

    return _page.figure(data)


def test_figure_holds_every_point_with_its_plan(data):
    figure = _page_figure(data)
    assert sum(len(trace["x"]) for trace in figure["data"]) == data.sizes["point"]
    first = figure["data"][0]
    assert "TTFT" in first["text"][0] and "bound by" in first["text"][0]
    json.dumps(figure, allow_nan=False)


def test_measured_points_are_drawn_in_their_chips_colour(data, runs):
    from perfmodel import _page

    traces = _page.figure(data, runs)["data"]
    measured = [trace for trace in traces if "measured" in trace["name"]]
    assert len(measured) == 1 and len(measured[0]["x"]) == 3
    assert measured[0]["marker"]["line"]["color"] == traces[0]["marker"]["color"]
    assert "line 7: no" in text(report.overlay_text(runs))


def test_other_axes_can_be_drawn(data, tmp_path):
    other = data.assign_attrs(x="ttft_s", y="usd_per_million_output_tokens")
    report.save_frontier(other, tmp_path)
    assert "Cost of a million output tokens" in (tmp_path / "frontier.html").read_text("utf-8")
    assert max(map(len, text(report.frontier_table(other)).splitlines())) <= 120


def test_json_has_null_for_unknown_numbers():
    found = json.loads(_json.text({"a": np.float32("nan"), "b": np.array([1.0, np.inf])}))
    assert found == {"a": None, "b": [1.0, None]}
