"""Published gains: what their table says, and ratios of the model by hand."""

import math

import pytest

from perfmodel import gains
from perfmodel.chips import load_chip
from perfmodel.errors import InputError
from perfmodel.fabric import links
from perfmodel.gains import METRICS, settings

pytestmark = pytest.mark.xdist_group("gains")

BY_ID = {gain.id: gain for gain in gains.gains()}


def test_every_gain_has_settings_or_says_why():
    assert len(BY_ID) == len(gains.gains()) > 30
    for gain in BY_ID.values():
        assert gain.published > 0 and gain.source
        assert bool(gain.why) != bool(gain.before), gain.id
        assert bool(gain.before) == bool(gain.assumption and gain.metric in METRICS), gain.id


def test_settings_are_checked():
    assert settings("") == ()
    assert len(settings("pool=h100|h200 batch=1|2|4 isl=8 osl=8")) == 6
    with pytest.raises(InputError, match="unknown setting 'bach=1'"):
        settings("bach=1")
    assert settings("gap_p99=0.1")[0] == {"gap_p99": "0.1"}
    with pytest.raises(InputError, match="unknown setting 'gap_q99"):
        settings("gap_q99=0.1")


def test_without_settings_there_is_no_ratio():
    ratio, before, after = gains.modelled(BY_ID["kv-offload"])
    assert math.isnan(ratio) and not before and not after


def test_paged_keys_by_hand():
    """What is set aside decides how many run: the ratio of requests is that of bytes a request."""
    gain = BY_ID["paged-high"]
    few, many = (gains.serve(gain.model, side[0]) for side in (gain.before, gain.after))
    held = (161 + 0.5 * 338) / 2048
    assert few["admitted"].item() / many["admitted"].item() == pytest.approx(held, rel=0.03)
    ratio, *_ = gains.modelled(gain)
    assert 2.0 < ratio < 1 / held


def test_the_best_setting_that_runs_is_taken():
    gain = BY_ID["pp-without-ib"]
    value, setting = gains.best(gain, gain.before)
    each = {s["batch"]: gains.value(gain.model, gain.metric, s) for s in gain.before}
    assert value == each[setting["batch"]] == max(v for v in each.values() if math.isfinite(v))
    # No batch fits one chip.
    assert math.isnan(gains.best(gain, settings("pool=h100:weights=bf16 batch=1|2 isl=9 osl=9"))[0])


def test_a_slow_network_is_what_pipelines_avoid():
    slow, fast = (gains.modelled(BY_ID[name])[0] for name in ("pp-without-ib", "pp-with-ib"))
    assert slow > 4 * fast


def test_narrow_keys_and_hits():
    assert 0.5 < gains.modelled(BY_ID["fp8-kv"])[0] < 0.7
    assert gains.modelled(BY_ID["prefix-humaneval"])[0] == 1.0
    assert 1.1 < gains.modelled(BY_ID["prefix-sonnet"])[0] < 1.4


def test_a_product_by_hand():
    """A100: bytes of the weights over its bandwidth; the wafer: one sum across its mesh."""
    gain = BY_ID["wafer-gemv"]
    columns = float(gain.before[0]["product"])
    seconds, joules = gains.product(gain.before[0])
    read = 2 * columns**2 / 2.039e12
    assert read < seconds < 1.6 * read
    # Between an idle board and its limit of 400 W.
    assert 100 * seconds < joules < 400 * seconds
    wafer, _ = gains.product(gain.after[0])
    # 850,000 elements are 922 to a side; sums there and back, and a tree, at 1.1 GHz.
    hops = (2 * 922 + 16 * 922**0.5) / 1.1e9
    assert 0.3 * hops < wafer < 2 * hops
    assert gains.modelled(gain)[0] == pytest.approx(seconds / wafer)


@pytest.mark.slow
def test_chunks_raise_the_load_that_keeps_gaps_short():
    """The published 2.6 is met by the event simulation of both schedulers."""
    ratio, before, after = gains.modelled(BY_ID["chunked-mistral"])
    assert before["exclusive"] == "1" and after["exclusive"] == "0"
    assert 2.0 < ratio < 3.2


@pytest.mark.parametrize(("nodes", "rate"), [(2, 81e9), (4, 61e9)])
def test_exchanges_over_nodes_against_published_rates(nodes: int, rate: float):
    """DeepEP's README (commit 0297fc80): combine of 8,192 tokens of 7,168 in 16 bits, top 8, on
    8 × 2 and 8 × 4 Hopper chips. Its rates count each token once per node that it reaches."""
    rows, width = 8192, 2 * 7168
    reached = nodes * (1 - (1 - 1 / nodes) ** 8)
    measured = rows * reached * width / rate
    fabric = load_chip("h100").machine.fabric
    found = float(links("all_to_all", 8 * nodes, fabric, 8.0).seconds(8.0 * rows * width))
    assert found == pytest.approx(measured, rel=0.35)
    # Straight to every rank it would take more than twice as long.
    straight = float(links("all_to_all", 8 * nodes, fabric).seconds(8.0 * rows * width))
    assert straight > 2.3 * found


def test_copies_change_nothing_inside_a_domain():
    fabric = load_chip("h100").machine.fabric
    one, many = (links("all_to_all", 8, fabric, copies) for copies in (1, 8.0))
    assert float(one.seconds(1e8)) == float(many.seconds(1e8))
