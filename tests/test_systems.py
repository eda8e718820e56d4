"""Systems asked for by names: pools, classes, ways of scheduling, their search and commands."""

import functools
import json
import pathlib
from typing import Any

import numpy as np
import pytest
import xarray as xr

from perfmodel import (
    cli,
    speculation,
    system_choices,
    system_hits,
    system_search,
    system_space,
    systems,
)
from perfmodel.errors import Infeasible, InputError
from perfmodel.placement import Links
from perfmodel.systems import Classes, PoolAsked, Scheduling

pytestmark = pytest.mark.xdist_group("system")

MODEL = "llama-3.3-70b"
ONE = {"decode": "h100:tp=4,weights=fp8"}
TWO = {"prefill": "h100:tp=4,weights=fp8", "decode": "h200:tp=4,weights=fp8"}


def serve(pools: dict[str, str] = ONE, *, batch: int = 64, **given: Any) -> xr.Dataset:
    return systems.serve(MODEL, pools, batch=batch, **({"isl": 4000, "osl": 1000} | given))


@functools.cache
def enumerated() -> xr.Dataset:
    pools = {"prefill": "h100:weights=fp8", "decode": "h200:weights=fp8"}
    return system_search.frontier(
        MODEL, pools, isl=4000, osl=1000, max_chips=8, slo_ttft=5.0, batches=(1, 4, 16, 64, 256)
    )


@pytest.mark.parametrize(
    ("text", "said"),
    (
        ("h100:tpp=4", "nearest: tp"),
        ("h100:tp=x", "whole number"),
        ("h100:tp=2,tp=4", "more than once"),
        (":tp=4", "a chip is needed"),
    ),
)
def test_pools_that_are_not_understood(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        systems.parse_pool(text, "--prefill")


def test_roles_make_a_placement() -> None:
    where, pools = systems.table({"prefill": "p", "attention": "a", "ffn": "f"}, None)
    assert (where.prefill, where.attention, where.ffn, where.draft) == (
        "prefill", "attention", "ffn", "attention",
    )  # fmt: skip
    assert set(pools) == {"prefill", "attention", "ffn"}
    with pytest.raises(InputError, match="name a pool for attention or decode"):
        systems.table({"prefill": "p"}, None)
    with pytest.raises(InputError, match="prefil"):
        systems.table({"prefil": "p"}, "b")


def test_what_is_said_of_a_system() -> None:
    found = serve(TWO)
    assert found["pool"].values.tolist() == ["prefill", "decode"]
    assert found["does"].values.tolist() == ["prefill", "attention, ffn"]
    assert found["chip"].values.tolist() == ["h100_sxm", "h200_sxm"]
    assert float(found["chips"]) == 8 and bool(found["feasible"])
    assert all(v.attrs["units"] for v in found.data_vars.values() if v.dtype.kind == "f")
    # What a pool works and what it costs adds up.
    assert float(found["tpot_parts_s"].sum()) == pytest.approx(float(found["tpot_s"]), rel=0.01)
    watts = float((found["pool_chips"] * found["pool_chip_power_w"]).sum())
    assert float(found["power_w"]) == pytest.approx(watts, rel=1e-6)


def test_what_binds_a_system() -> None:
    short = {**TWO, "prefill": "h100:tp=1,weights=fp8,replicas=0.5"}
    assert str(serve(short, batch=256)["binding"].item()) == "prefill"
    assert "on decode" in str(serve(TWO)["binding"].item())
    full = serve({**TWO, "decode": "l40s:tp=1,weights=fp8"})
    assert not bool(full["feasible"])
    assert str(full["binding"].item()) == "memory of decode"
    assert np.isnan(float(full["tpot_s"]))


def test_classes_reduce_to_one_and_conserve() -> None:
    same = Classes(("a", "b"), [4000, 4000], [1000, 1000], [0.0, 0.0], [0.3, 0.7])
    plain, found = serve(), serve(classes=same)
    for name in ("ttft_s", "tpot_s", "output_tokens_per_second", "admitted", "power_w"):
        assert float(found[name]) == pytest.approx(float(plain[name]), rel=2e-6), name
    mixed = Classes(("chat", "code"), [1000, 13000], [1000, 1000], [0.0, 0.0], [0.75, 0.25])
    found = serve(classes=mixed)
    assert found.attrs["isl"] == 4000 and found.attrs["osl"] == 1000
    # Longer prompts wait longer; the mean over requests is that of the whole.
    chat, code = found["class_ttft_s"].values
    assert code > chat
    assert 0.75 * chat + 0.25 * code == pytest.approx(float(found["ttft_s"]), rel=1e-6)
    # Requests of unlike prompts wait for each other longer than equal ones.
    assert float(found["ttft_s"]) > float(plain["ttft_s"])
    with pytest.raises(InputError, match="class long"):
        serve(classes=Classes(("long",), [200_000], [1000], [0.0], [1.0]))


def test_idle_places_of_a_static_batch() -> None:
    even = serve(scheduling=Scheduling(static=True))
    odd = serve(scheduling=Scheduling(static=True, spread=1.0))
    # 64 lognormal outputs of spread 1: the longest is 5.3 times the mean (by sampling).
    draws = np.random.default_rng(0).normal(size=(4000, 64)) * np.sqrt(np.log(2))
    longest = np.mean(np.max(np.exp(draws - 0.5 * np.log(2)), axis=1))
    steps = 999 * float(odd["tpot_s"]) * longest
    assert float(odd["requests_per_second"]) < 0.5 * float(even["requests_per_second"])
    assert 64 / float(odd["requests_per_second"]) == pytest.approx(
        steps + float(odd["ttft_s"]), rel=0.05
    )
    with pytest.raises(InputError, match="static batch"):
        serve(scheduling=Scheduling(spread=0.5))


def test_memory_reserved_for_the_longest() -> None:
    paged, held = serve(), serve(scheduling=Scheduling(reserved=32_768))
    # A request has 4,500 tokens on average, in pages; 32,768 are set aside.
    ratio = float(paged["admitted"]) / float(held["admitted"])
    assert ratio == pytest.approx(32_768 / 4_512, rel=0.05)
    with pytest.raises(InputError, match="less than a request has, 5,000"):
        serve(scheduling=Scheduling(reserved=4_000))


def test_a_draft_needs_the_same_vocabulary() -> None:
    spec = systems.acceptance(3, 0.8, None)
    with pytest.raises(InputError, match="same vocabulary"):
        serve(draft="qwen3-0.6b", spec=spec)
    with pytest.raises(InputError, match="belong together"):
        serve(spec=spec)


def test_a_draft_keeps_keys_of_what_runs_not_of_what_queues() -> None:
    pools = {"decode": "h200:tp=2,weights=fp8", "draft": "h200:tp=2"}
    given = dict(draft="llama-3.1-8b", spec=speculation.chain(0.8, 3))
    few, many = serve(pools, **given), serve(pools, batch=4096, **given)
    # 4,096 sequences of the draft are 590 GB, the 262 that run 38 GB.
    assert bool(few.feasible) and bool(many.feasible)
    assert 64 < float(many.admitted) < 512 and float(many.ttft_s) > 60.0


def test_draft_heads() -> None:
    spec = systems.acceptance(4, None, [1.79, 2.5, 3.0, 3.3])
    found = serve(draft="eagle", spec=spec)
    assert float(found["tokens_per_cycle"]) == pytest.approx(3.3)
    assert float(found["tpot_s"]) < float(serve()["tpot_s"])
    assert found.attrs["draft"] == "eagle"
    # One decoder layer, two norms and a product of twice the hidden width: 1.1 % of the weights.
    more = float(found["pool_weight_bytes"][0]) / float(serve()["pool_weight_bytes"][0])
    assert 1.01 < more < 1.03
    with pytest.raises(InputError, match="no draft layers of its own .nearest: eagle"):
        serve(draft="mtp", spec=spec)
    with pytest.raises(InputError, match="run where it decodes"):
        serve({**ONE, "draft": "l40s"}, draft="eagle", spec=spec)


def test_a_measured_tree_costs_its_rows() -> None:
    chain, tree = (
        serve(draft="eagle", spec=systems.acceptance(4, None, [3.3], width)) for width in (1.0, 4.0)
    )
    assert float(tree["tokens_per_cycle"]) == pytest.approx(3.3)
    # 17 rows of a sequence are verified, not 5.
    assert float(tree["tpot_s"]) > 1.2 * float(chain["tpot_s"])
    assert float(systems.acceptance(2.5, None, [2.2]).yielded) == pytest.approx(2.2)


def test_attention_groups_of_a_dense_network() -> None:
    def prefill(batch: int, replicas: int) -> tuple[xr.Dataset, float]:
        pools = {
            "prefill": "h100:tp=8,attention_dp=8,weights=fp8",
            "decode": f"h200:tp=8,attention_dp=2,weights=fp8,replicas={replicas}",
        }
        found = serve(pools, batch=batch)
        return found, float(found["pool_load"][0] / found["requests_per_second"])

    few, shared = prefill(4, 4)
    many, alone = prefill(16, 1)
    # 16 requests share a replica of prefill, whichever replica decodes them: all groups have work.
    assert shared == pytest.approx(alone, rel=1e-4)
    # Each group holds all of attention: 12.1 GB of it in 8 bits, on one chip and on four.
    weights = many["pool_weight_bytes"].values
    assert weights[0] - weights[1] == pytest.approx(12.08e9 * (1 - 1 / 4), rel=0.01)


def test_links() -> None:
    one = {"prefill": "gb200:tp=4,weights=fp8", "decode": "gb200:tp=4,weights=fp8"}
    ports, inside = serve(one), systems.link(None, None, inside=True)
    near = serve(one, links=Links(inside, inside, inside))
    # 900 GB/s inside the domain, 50 GB/s at 74 % outside.
    ratio = float(ports["link_load"][0]) / float(near["link_load"][0])
    assert ratio == pytest.approx(900 / 37, rel=0.05)
    with pytest.raises(InputError, match="must not be negative"):
        systems.link(-1.0, None)


def test_a_frontier_of_systems() -> None:
    found = enumerated()
    x, y = found["tokens_per_second_user"].values, found["output_tokens_per_second_chip"].values
    assert np.all(np.diff(x) > 0) and np.all(np.diff(y) < 0)
    assert np.all(found["ttft_s"] <= 5.0)
    used = (found["replica_chips"] * found["replicas"]).sum("pool")
    assert np.all(used <= 8) and np.all(used == found["chips"])
    # A point is what the same system gives by itself.
    i = len(x) // 2
    chips, count = found["replica_chips"].values[i], found["replicas"].values[i]
    pools = {
        name: f"{chip}:tp={chips[p]},replicas={count[p]},chunk={found['chunk'][i]:d},weights=fp8"
        for p, (name, chip) in enumerate(
            zip(found["pool"].values, found["chip"].values, strict=True)
        )
    }
    again = serve(pools, batch=int(found["batch"][i]))
    assert float(again["tpot_s"]) == pytest.approx(1.0 / x[i], rel=1e-5)


def test_the_smallest_system_for_a_rate() -> None:
    given: dict[str, Any] = dict(isl=4000, osl=1000, slo_ttft=5.0, batches=(1, 4, 16, 64, 256))
    pools = {"prefill": "h100:weights=fp8", "decode": "h200:weights=fp8"}
    found = system_search.size(MODEL, pools, rate=2.0, headroom=0.0, **given)
    assert float(found["requests_per_second"][0]) >= 2.0
    fewer = int(found["chips"][0]) - 1
    with pytest.raises(Infeasible, match="are asked for"):
        system_search.size(MODEL, pools, rate=2.0, headroom=0.0, max_chips=fewer, **given)


def space_of(model: str, pools: dict[str, str], **given: Any) -> system_space.Space:
    return system_search.space(model, pools, isl=4000, osl=1000, max_chips=8, **given)


def test_a_search_cuts_experts_in_several_ways() -> None:
    pools = {"prefill": "h100:weights=fp8", "decode": "h200:weights=fp8"}
    listed = system_search.enumerate_systems(space_of("qwen3-30b-a3b", pools))
    for degree in (listed.ep, listed.attention_dp):
        assert np.all((degree == 1) | (degree == listed.chips))
        assert set(np.unique(degree)) == {1, 2, 4}
    # Between them a descent may round to any that cuts a stage; of one pool all are enumerated.
    near = space_of("qwen3-30b-a3b", pools).near[1]
    alone = space_of("qwen3-30b-a3b", {"decode": "h200:weights=fp8"})
    assert alone.layouts == (near,)
    cut = {(x.ep, x.attention_dp) for x in near if x.tp == 4}
    assert cut == {(ep, dp) for ep in (1, 2, 4) for dp in (1, 2, 4)}
    asked = space_of("qwen3-30b-a3b", {"decode": "h200:tp=8,ep=4,attention_dp=2,weights=fp8"})
    one = system_search.enumerate_systems(asked)
    assert [set(np.unique(x)) for x in (one.chips, one.ep, one.attention_dp)] == [{8}, {4}, {2}]
    # A dense network has none to cut.
    dense = system_search.enumerate_systems(space_of(MODEL, pools))
    assert np.all(dense.ep == 1) and np.all(dense.attention_dp == 1)


def test_a_search_varies_chunks() -> None:
    assert space_of(MODEL, {"decode": "h100"}).chunks == (512, 2048, 8192)
    assert space_of(MODEL, {"decode": "h100"}, chunks=(1000,)).chunks == (1000,)
    # A pool's own, and that of a wafer, are kept.
    assert space_of(MODEL, {"decode": "h100:chunk=700"}).chunks == (700,)
    assert len(space_of(MODEL, {"decode": "cs3:pp=4,regions=20"}).chunks) == 1
    found = enumerated()
    assert np.all(np.isin(found["chunk"], (512, 2048, 8192)))
    assert f"chunk {int(found['chunk'][0]):,}" in system_search.words(found, 0)


def test_a_search_varies_slow_memory_where_asked_for() -> None:
    plain = system_search.enumerate_systems(space_of(MODEL, {"decode": "h100"}))
    assert np.all(plain.slow == 1.0) and np.all(plain.first == 1.0)
    searched = space_of("qwen3-30b-a3b", {"decode": "corsair:offload=0.5,weights=int8"})
    listed = system_search.enumerate_systems(searched)
    pairs = set(zip(listed.slow.tolist(), listed.first.tolist(), strict=True))
    assert pairs == {(0.0, 1.0)} | {(s, f) for s in (0.5, 1.0) for f in (0.0, 0.5, 1.0)}
    kept = space_of("qwen3-30b-a3b", {"decode": "corsair:offload=0.5,weights_first=0.3"})
    assert kept.tiers == ((0.0, 0.3), (0.5, 0.3), (1.0, 0.3))
    row = int(np.flatnonzero((listed.slow == 0.5) & (listed.ep[:, 0] == 4))[0])
    made = system_space.with_choice(searched.made.built, searched.part_pools, listed.take(row))
    plan = made.prefill.plan
    assert float(plan.offload) == 0.25 and float(plan.expert_ranks) == 4.0
    assert float(plan.chunk) == listed.chunk[row]


def test_a_search_that_is_too_large_has_fewer_choices() -> None:
    pools = {"prefill": "h100:weights=fp8", "decode": "h200:weights=fp8"}
    given: dict[str, Any] = dict(isl=4000, osl=1000)
    large = system_search.space("qwen3-30b-a3b", pools, max_chips=512, **given)
    few = system_choices.bounded(large, None)
    assert few.chunks == (2048,) and 100_000 < len(system_search.enumerate_systems(few).batch) < 5e5
    # Chunks asked for are kept; a space of few systems is kept whole.
    assert system_choices.bounded(large, large.chunks).chunks == large.chunks
    small = space_of("qwen3-30b-a3b", pools)
    assert system_choices.bounded(small, None) is small


def test_a_pool_of_drafts_need_not_fill_the_chips() -> None:
    pools = {"decode": "h100:tp=4,weights=fp8", "draft": "corsair:weights=int8"}
    spec = systems.acceptance(4, 0.8, None)
    searched = space_of(MODEL, pools, draft="llama-3.1-8b", spec=spec, batches=(8,))
    listed = system_search.enumerate_systems(searched)
    assert searched.guesser == 1 and np.all(listed.replicas[:, 0] == 1)
    single = listed.replicas[listed.chips[:, 1] == 1, 1]
    assert set(single) == {1, 2, 4}


@pytest.mark.slow
def test_the_slope_in_hits_is_that_of_the_difference() -> None:
    """Tiles and chunks are staircases, so over steps of several of them."""
    pools = {"prefill": "h100:weights=fp8", "decode": "h200:weights=fp8"}

    def at(hit: float) -> system_space.Space:
        return system_search.space(
            MODEL, pools, isl=4096, osl=1000, max_chips=8, prefix_hit=hit, batches=(4, 16, 64, 256)
        )

    middle, y = at(0.5), "output_tokens_per_second_chip"
    listed = system_search.enumerate_systems(middle)
    values = system_search.score(middle, listed)
    kept = listed.take(system_search.front(values, ("tokens_per_second_user", y)))
    slopes = system_hits.slopes(middle, kept)
    assert all(
        np.all(np.isfinite(slopes[axis])) for axis in ("tokens_per_second_user", y, "ttft_s")
    )
    low, high = (system_search.score(at(hit), kept)[y] for hit in (0.375, 0.625))
    away = np.abs(slopes[y] / ((high - low) / 0.25) - 1.0)
    assert np.median(away) < 0.15
    assert np.all(slopes["ttft_s"] < 0.0)


@pytest.mark.slow
def test_descent_reaches_the_enumeration() -> None:
    pools = {"prefill": "h100:weights=fp8", "decode": "h200:weights=fp8"}
    found = system_search.frontier(
        MODEL, pools, isl=4000, osl=1000, max_chips=8, slo_ttft=5.0, descend=True,
        batches=(1, 4, 16, 64, 256),
    )  # fmt: skip
    assert found.attrs["hypervolume"] > 0.95
    assert found.attrs["evaluated"] < found.attrs["enumerated"]
    for axis in ("tokens_per_second_user", "output_tokens_per_second_chip"):
        assert np.all(np.isfinite(found[f"{axis}_per_hit"]))


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["estimate", MODEL, "--prefill", "h100:tp=4", "--decode", "h200:tp=4", "--batch", "64"]
    assert cli.main([*line, "--weights", "fp8", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [pool["chip"] for pool in told["pools"]] == ["h100_sxm", "h200_sxm"]
    assert told["tpot_s"] == pytest.approx(float(serve(TWO)["tpot_s"]), rel=1e-6)
    assert {"kv link", "activation link", "draft link"} == set(told["link_load"])
    assert cli.main([*line, "--weights", "fp8", "--slo-ttft", "1ms"]) == 3
    assert "ttft limit" in capsys.readouterr().err
    assert cli.main(["estimate", MODEL, "h100", "--tp", "8", "--kv", "reserved:10"]) == 2
    assert "5,000" in capsys.readouterr().err
    for command in (["size", MODEL, "--rate", "1"], ["frontier", MODEL, "--chip", "h100"]):
        assert cli.main([*command, "--kv", "bf17"]) == 2
        assert "--kv: paged, reserved" in capsys.readouterr().err
    assert cli.main(["frontier", MODEL]) == 2
    assert "--chip" in capsys.readouterr().err


def test_layout_words() -> None:
    assert systems._plan_words(PoolAsked("wse3", pp=4, regions=20)) == "1 × TP1 PP4 20 regions"


def test_budgets_hold_for_all_pools() -> None:
    pools = {"prefill": "h100:weights=fp8", "decode": "h200:weights=fp8"}
    given: dict[str, Any] = dict(isl=4000, osl=1000, max_chips=8, slo_ttft=5.0, batches=(1, 16, 64))
    free = system_search.frontier(MODEL, pools, **given)
    tight = system_search.frontier(MODEL, pools, max_power=5e3, **given)
    # A H100 with its part of the host is rated at 1,275 W: three chips are within 5 kW.
    assert float(tight["chips"].max()) <= 3 < float(free["chips"].max())
    with pytest.raises(Infeasible, match="power limit"):
        system_search.frontier(MODEL, pools, max_power=1e3, **given)
    with pytest.raises(Infeasible, match="requests a second within the limits"):
        limits = {k: v for k, v in given.items() if k != "max_chips"}
        system_search.size(MODEL, pools, rate=50.0, max_power=20e3, **limits)


def test_a_trace_on_the_command_line(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    rows = "\n".join(f"{1000 + 10 * i},{100 + i}" for i in range(40))
    path = tmp_path / "requests.csv"
    path.write_text(f"input_length,output_length\n{rows}\n")
    line = ["estimate", MODEL, "h100", "--tp", "4", "--weights", "fp8", "--batch", "16"]
    assert cli.main([*line, "--trace", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["isl"] == 1195 and len(told["classes"]) == 16
    assert sum(kind["class_share"] for kind in told["classes"]) == pytest.approx(1.0)
    assert cli.main([*line, "--trace", str(path), "--class", "a=1:1:1"]) == 2
    assert "one of them" in capsys.readouterr().err


@pytest.mark.slow
def test_the_split_of_memory_and_hits_are_part_of_a_search() -> None:
    """Experts of which a step reads few, over SRAM and LPDDR: keys are worth the fast one more."""
    given: dict[str, Any] = dict(
        isl=2000, osl=500, max_chips=8, batches=(1, 8, 64, 256), micro=(1,), drafts=(0,)
    )
    pools = {"decode": "corsair:offload=0.5,weights=int8"}
    found = system_search.frontier("qwen3-30b-a3b", pools, descend=True, **given)
    assert found.attrs["hypervolume"] > 0.95
    # Experts and attention over the ranks of a stage, beside cutting every one of them.
    assert np.any(found["ep"] > 1) and np.any(found["attention_dp"] > 1)
    assert np.all(found["offload"] <= 0.5) and np.any(found["offload"] > 0.0)
    split = found["weights_first"].values
    assert np.all((split >= 0.0) & (split <= 1.0)) and np.any(split < 1.0)
    gain = found["output_tokens_per_second_chip_if_more_hits"].values
    assert np.all(gain > -1e-6) and np.any(gain > 0.01)


ONE_POOL = ("estimate", MODEL, "h100", "--tp", "4")
POOLS = ("--prefill", "h100:tp=4", "--decode", "h100:tp=4")


@pytest.mark.parametrize(
    ("line", "said"),
    (
        ((*ONE_POOL, "--acceptance", "0.8"), "--acceptance: of what --draft names"),
        ((*ONE_POOL, "--draft-tokens", "3"), "--draft-tokens"),
        ((*ONE_POOL, "--link", "50"), "--link: of several pools"),
        ((*ONE_POOL, "--micro-batches", "2"), "--micro-batches: of several pools"),
        ((*ONE_POOL, "--cache-tokens", "1e6"), "--cache-tokens: of a trace"),
        ((*ONE_POOL, "--simulate", "-5"), "--simulate"),
        ((*ONE_POOL, "--class", "a=100:10:1", "--isl", "7"), "--isl: --class and --trace say"),
        # What is typed counts, whatever its value.
        ((*ONE_POOL, "--class", "a=100:10:1", "--osl", "1000"), "--osl: --class and --trace say"),
        ((*ONE_POOL, "--trace", "t.csv", "--prefix-hit", "0"), "--prefix-hit: --class and"),
        ((*ONE_POOL, "--acceptance", "0.8", "--draft-tokens", "4"), "--acceptance: of what"),
        (("estimate", MODEL, *POOLS, "--no-ranges"), "--ranges: of one pool"),
        (("frontier", MODEL, "--chip", "h100", "--class", "a=9:9:1", "--isl", "4000"), "--isl: "),
        (("size", MODEL, "--rate", "5", "--trace", "t.csv", "--osl", "1000"), "--osl: --class"),
        (("size", MODEL, "--rate", "5", "--batching", "statik"), "--batching: continuous, static"),
        (("frontier", MODEL, "--batching", "static"), "missing option '--chip'"),
        (("estimate", MODEL, "--class", "a=9:9:1"), "missing argument 'CHIP', or a pool"),
        (("size", MODEL, "--rate", "5", "--simulate", "-1"), "--simulate: requests to follow"),
        (("estimate", MODEL, *POOLS, "--images", "2"), "--images: of one pool"),
        (("estimate", MODEL, *POOLS, "--cp", "2"), "--cp: of one pool"),
        (("estimate", MODEL, *POOLS, "--tp", "8"), "--tp: of CHIP"),
        (("estimate", MODEL, "h100", *POOLS), "CHIP has nothing to do"),
        (("estimate", MODEL, *POOLS, "--batch", "0"), "batch: must be at least 1"),
        (("estimate", MODEL, "--decode", "h100:tp=0"), "decode tp: must be at least 1, not 0"),
        (("estimate", MODEL, "--decode", "h100:tp=-4"), "decode tp: must be at least 1, not -4"),
        (
            (*ONE_POOL, "--draft", "llama-3.1-8b@l40s:tp=7", "--acceptance", "0.8"),
            "tp: 7 does not cut the 32 heads and 8 kv heads of llama-3.1-8b",
        ),
        (("estimate", MODEL, *POOLS, "--micro-batches", "0"), "micro: must be at least 1"),
        (("frontier", MODEL, *POOLS, "--measured", "runs.csv"), "--measured: of one pool"),
        (("frontier", MODEL, *POOLS, "--pp", "2"), "--pp: of one pool"),
        (("frontier", MODEL, *POOLS, "--per", "usd"), "--per: 'usd' is none of"),
        (("frontier", MODEL, *POOLS, "--precision", "fp8", "--precision", "bf16"), "--precision"),
        (("frontier", MODEL, "--chip", "h100", "--link", "50"), "--link: of several pools"),
        (("size", MODEL, "--rate", "5", *POOLS, "--by", "usd"), "--by: of one pool"),
        (("size", MODEL, "--rate", "5", *POOLS, "--spare", "2"), "--spare: of one pool"),
        (("size", MODEL, "--rate", "5", "--acceptance", "0.8"), "--acceptance: of what --draft"),
    ),
)
def test_no_option_is_ignored(
    line: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options of systems on one pool, and of one pool on systems, are refused in one line."""
    assert cli.main(list(line)) == 2
    told = capsys.readouterr().err.strip()
    assert said in told and "\n" not in told


def test_what_each_command_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """Traffic, pools and drafts are asked for alike, under the same headings."""
    names = (
        "isl", "osl", "prefix-hit", "class", "trace", "cache-tokens", "routing", "images", "engine",
        "batching", "kv", "slo-ttft", "slo-tpot", "price", "prefill", "decode", "attention", "ffn",
        "link", "draft", "acceptance", "accepted-length", "draft-candidates", "assume-dense",
    )  # fmt: skip
    for command in ("estimate", "frontier", "size"):
        assert cli.main([command, "--help"]) == 0
        told = capsys.readouterr().out
        lines = [line.strip() for line in told.splitlines()]
        for name in names:
            assert sum(line.startswith(f"--{name} ") for line in lines) == 1, (command, name)
        heads = ["Traffic:", "Software:", "Limits:", "Cost:", "Several pools", "Drafts", "Output:"]
        places = [next(i for i, line in enumerate(lines) if line.startswith(h)) for h in heads]
        assert len(set(places)) == len(heads)
        pools = told[told.index("Several pools") : told.index("Drafts (")]
        assert "--prefill" in pools and "--draft" not in pools


def test_searches_of_static_batches(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever waits for the longest output of a batch serves less."""
    line = ["frontier", MODEL, "--max-chips", "4", "--precision", "fp8", "--chip", "h100", "--json"]
    best = []
    for batching in ("static", "static:1"):
        assert cli.main([*line, "--batching", batching]) == 0
        told = json.loads(capsys.readouterr().out)
        best.append(max(p["output_tokens_per_second_chip"] for p in told["points"]))
    assert best[1] < 0.7 * best[0]


def test_chips_that_cannot_are_left_out_of_a_search() -> None:
    """Where one chip of several has no plan, the others are told, and why it has none."""
    from perfmodel import _system_command
    from perfmodel._options import Pools, Traffic

    asked = _system_command.Asked(
        MODEL, Pools(), Traffic(), _system_command.formats(None), kv="reserved", searched=True
    )
    given: dict[str, Any] = dict(isl=4000, osl=1000, max_chips=2, batches=(1, 16))
    given |= dict(x="tokens_per_second_user", y="output_tokens_per_second_chip", descend=False)
    found = _system_command.frontier(asked, ["h100", "l4"], **given)
    assert set(found["system"].values.tolist()) == {"h100 alone"}
    assert "l4 alone" in found.attrs["left_out"] and "memory" in found.attrs["left_out"]


def test_percentiles_of_the_smallest_deployment(capsys: pytest.CaptureFixture[str]) -> None:
    """What `size` finds is followed at the rate asked for, not at the one that it could serve."""
    line = ["size", MODEL, "--rate", "2", "--chip", "h100", "--slo-tpot", "40ms"]
    assert cli.main([*line, "--simulate", "2000", "--json"]) == 0
    point = json.loads(capsys.readouterr().out)["points"][0]
    assert point["requests_per_second"] >= 2.4
    assert point["simulated_request_rate"] == pytest.approx(2.0, rel=0.1)
    mean, p50, _, p99 = point["simulated"]
    assert [mean["statistic"], p50["statistic"]] == ["mean", "p50"]
    # Fewer requests at once than the closed loop has, and each token comes the sooner.
    assert mean["simulated_tpot_s"] < point["tpot_s"]
    assert p50["simulated_gap_s"] < mean["simulated_tpot_s"] < p99["simulated_gap_s"]
