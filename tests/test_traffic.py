"""Traffic: classes, traces with bad rows, shared prefixes, and what a reduction loses."""

import json
from pathlib import Path

import hypothesis.strategies as st
import jax
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings

from perfmodel import traces, traffic
from perfmodel.errors import InputError
from perfmodel.traces import Trace, prefix_hits


def test_classes_are_arrays_that_vmap():
    mix = traffic.parse(["chat=2000:300:3", "rag=16000:500:1:0.5"])
    doubled = jax.vmap(lambda t: t.isl * t.weight)(mix.traffic)
    assert np.asarray(doubled) == pytest.approx([1500.0, 4000.0])
    mean = mix.traffic.mean()
    # 0.75·2000 + 0.25·16000; of those 0.25·8000 are cached.
    assert (float(mean.isl), float(mean.osl)) == (5500.0, 350.0)
    assert float(mean.prefix_hit) == pytest.approx(2000 / 5500)
    assert np.asarray(mix.traffic.load().prefix_hit).tolist() == [0.0, 0.5]
    one = traffic.fixed(1000, 200, 0.25)
    assert (len(one), float(one.traffic.mean().prefix_hit)) == (1, 0.25)


@pytest.mark.parametrize(
    "text, said",
    [
        (["chat"], "'chat' is not name=isl:osl:share"),
        (["=1:2:3"], "is not name=isl:osl:share"),
        (["a=1:2"], "is not name=isl:osl:share"),
        (["a=1:x:1"], "'a=1:x:1' has a part that is no number"),
        (["a=0:2:1"], "class 'a': isl must be at least 1, not 0"),
        (["a=9:2:1", "b=9:2:0"], "class 'b': share must be more than 0, not 0"),
        (["a=9:2:1:1"], "class 'a': cached must be at least 0 and less than 1, not 1"),
        (["a=9:2:nan"], "class 'a': share"),
        (["a=9:2:1", "a=9:2:1"], "'a' is given twice"),
        ([], "none given"),
    ],
)
def test_bad_classes_are_named(text: list[str], said: str):
    with pytest.raises(InputError, match=said.replace("(", r"\(")):
        traffic.parse(text)


def test_lognormal_keeps_the_mean_and_says_what_it_loses():
    few, many = (traffic.lognormal((1000, 1.0), (300, 0.5), n) for n in (2, 32))
    for mix in (few, many):
        assert float(mix.traffic.mean().isl) == pytest.approx(1000)
        assert float(mix.traffic.mean().osl) == pytest.approx(300)
    # E[ISL²] is (1 + 1²)·1000²; equally likely means keep less of it, fewer less.
    kept = np.sum(many.traffic.weight * np.asarray(many.traffic.isl) ** 2) / 2e6
    assert many.errors["pairs"] == pytest.approx(kept - 1)
    assert few.errors["pairs"] < many.errors["pairs"] < 0
    # Halves of a log-normal: mean·2·Φ(±σ), σ² = ln 2.
    low = 1000 * 2 * 0.20254
    assert np.unique(np.round(few.traffic.isl)) == pytest.approx([low, 2000 - low], abs=1)


def test_quantiles_of_lengths():
    mix = traffic.quantiles({0: 100, 1: 100}, {0: 10, 0.5: 10, 1: 1000}, classes=2)
    # Above the median the logarithm is uniform: (1000 − 10)/ln 100.
    assert np.asarray(mix.traffic.osl)[:2] == pytest.approx([10, 990 / np.log(100)], rel=1e-3)
    with pytest.raises(InputError, match="isl: quantiles from 0 to 1"):
        traffic.quantiles({0.5: 10, 1: 20}, {0: 1, 1: 2})


def test_draws_follow_the_weights():
    mix = traffic.parse(["a=100:10:1", "b=200:20:3:0.5"])
    isl, osl, cached = mix.draw(4000, seed=1)
    assert np.mean(isl == 200) == pytest.approx(0.75, abs=0.03)
    assert np.array_equal(osl, isl / 10) and np.array_equal(cached, np.where(isl == 200, 100, 0))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 10**5), st.integers(0, 5000)), min_size=1, max_size=80),
    st.integers(1, 20),
)
def test_reduction_keeps_tokens(rows: list[tuple[int, int]], classes: int):
    isl, osl = np.array(rows, float).T
    mix = traffic.reduce(isl, osl, classes)
    assert 1 <= len(mix) <= classes
    weight = np.asarray(mix.traffic.weight)
    assert np.sum(weight) == pytest.approx(1.0)
    assert np.sum(weight * mix.traffic.isl) == pytest.approx(np.mean(isl))
    assert np.sum(weight * mix.traffic.osl) == pytest.approx(np.mean(np.maximum(osl, 1)))
    # A mean never has a larger square than its parts.
    assert mix.errors["pairs"] <= 1e-9
    if classes >= len(set(rows)) and np.all(osl > 0):
        whole = traffic.reduce(isl, osl, 10**6)
        assert whole.errors == pytest.approx({"pairs": 0.0, "context": 0.0}, abs=1e-9)


@pytest.mark.parametrize("name", ["azure-conv-2023", "azure-code-2023", "mooncake-conversation"])
def test_sixteen_classes_stand_for_a_trace(name: str):
    trace = traces.excerpt(name)
    one, many = (traffic.reduce(trace.isl, trace.osl, n).errors for n in (1, 16))
    assert one["pairs"] < -0.4 and -0.03 <= many["pairs"] <= 0
    assert abs(many["context"]) < 0.01


def test_published_forms_are_read(tmp_path: Path):
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    newer = tmp_path / "newer.csv"
    newer.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.009930+00:00,2162,5\n"
        "2024-05-10 00:00:01+00:00,2399,6\n"
    )
    mooncake = tmp_path / "mooncake.jsonl"
    row = {"timestamp": 27482, "input_length": 1024, "output_length": 52, "hash_ids": [46, 47]}
    later = row | {"timestamp": 30482, "hash_ids": [46, 48]}
    mooncake.write_text(f"{json.dumps(later)}\n\n{json.dumps(row)}\n")
    vidur = tmp_path / "vidur.csv"
    vidur.write_text("num_prefill_tokens,num_decode_tokens\n10,2\n")
    found = [traces.read(path) for path in (azure, newer, mooncake, vidur)]
    assert found[0].arrival == pytest.approx([0.0, 4.314579])
    assert found[1].arrival == pytest.approx([0.0, 0.99007])
    assert found[2].arrival.tolist() == [0.0, 3.0]
    # In order of arrival, blocks as well.
    assert found[2].blocks == ((46, 47), (46, 48))
    assert np.isnan(found[3].arrival[0]) and found[3].blocks is None
    assert [t.isl[0] for t in found] == [374, 2162, 1024, 10]
    parquet = tmp_path / "trace.parquet"
    pd.read_csv(azure).to_parquet(parquet)
    again = traces.read(parquet)
    assert np.array_equal(again.arrival, found[0].arrival) and again.osl.tolist() == [44, 109]


def test_bad_rows_are_told_by_line(tmp_path: Path):
    path = tmp_path / "t.csv"
    path.write_text(
        "arrival_s,input_tokens,output_tokens\n"
        "0,10,5\n1,many,5\n2,0,5\n3,10\n4,10.5,5\n,10,5\n5,10,-1\n6,20,0\n"
    )
    trace = traces.read(path)
    assert trace.isl.tolist() == [10, 20] and trace.osl.tolist() == [5, 0]
    told = sorted(line for lines in trace.faults.values() for line in lines)
    assert told == [3, 4, 5, 6, 7, 8]
    assert "isl is not a number: 'many'" in trace.faults
    assert "line 3" in trace.note() and "line 7" in trace.note()
    one = traces.read(pd.DataFrame({"input_length": [5], "output_length": [2]}))
    assert one.note().endswith(": 1 request")
    lines = tmp_path / "t.jsonl"
    lines.write_text('{"isl": 5, "osl": 1, "hash_ids": [1]}\n{oops\n\n[1]\n{"isl": 5, "osl": 1}\n')
    trace = traces.read(lines)
    assert trace.faults["not a JSON object"] == [2, 4] and len(trace) == 1
    assert trace.faults["blocks are not a list of whole numbers"] == [5]
    for text, said in (
        ("", "empty"),
        ("a,b\n1,2\n", "no column"),
        ("isl,osl\nx,1\n", "no request"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=said):
            traces.read(path)


def trace_of(blocks: list[list[int]], block: int = 10) -> Trace:
    n = np.array([len(b) * block for b in blocks], float)
    return Trace(n * 0, n, n * 0 + 1, tuple(map(tuple, blocks)), block, {}, "by hand")


def test_prefix_hits_by_hand():
    trace = trace_of([[1, 2, 3], [1, 2, 4], [5, 6, 7], [1, 2, 3], [9, 2, 3]])
    # Without end: the second finds 1 2, the fourth 1 2 3 less its last token, the fifth nothing
    # (its first block is new, so what follows is another prefix).
    assert prefix_hits(trace, [1e9]).cached[:, 0].tolist() == [0, 20, 0, 29, 0]
    # Four blocks: after the third request they are 5 6 7 and 1, the first of what came before.
    assert prefix_hits(trace, [40]).cached[:, 0].tolist() == [0, 20, 0, 10, 0]
    tiers = prefix_hits(trace, [40, 10, 1000])
    assert tiers.cached[3].tolist() == [10, 10, 9]
    assert tiers.share == pytest.approx(np.array([30, 10, 9]) / 150)
    assert tiers.most == pytest.approx(49 / 150)
    with pytest.raises(InputError, match="names no blocks"):
        prefix_hits(traces.excerpt("arxiv"), [1.0])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.lists(st.integers(0, 12), min_size=1, max_size=6, unique=True), min_size=1, max_size=25
    ),
    st.lists(st.integers(0, 60), min_size=1, max_size=3),
)
def test_tiers_add_up(blocks: list[list[int]], capacities: list[int]):
    trace = trace_of(blocks)
    found = prefix_hits(trace, capacities)
    assert np.all(found.cached >= 0) and np.all(np.sum(found.cached, axis=1) < trace.isl)
    # Tiers of one list: together they are one cache of their sum.
    whole = prefix_hits(trace, [sum(c // 10 * 10 for c in capacities)])
    if all(c % 10 == 0 for c in capacities):
        assert np.array_equal(np.sum(found.cached, axis=1), whole.cached[:, 0])
    assert np.sum(found.share) <= found.most + 1e-12


def test_a_trace_becomes_classes_with_its_hits():
    trace = traces.excerpt("mooncake-conversation")
    mix, hits = traces.to_classes(trace, 8, [2e5, 1e6])
    assert hits is not None and np.all(hits.share > 0)
    cached = np.sum(mix.traffic.weight * mix.traffic.isl * mix.traffic.cached)
    assert cached / np.mean(trace.isl) == pytest.approx(np.sum(hits.share))
    assert "150 requests" in mix.note
    with pytest.raises(InputError, match="nearest: mooncake-conversation"):
        traces.excerpt("mooncake-conversatio")


def test_a_trace_is_replayed():
    trace = traces.excerpt("mooncake-conversation")
    hits = prefix_hits(trace, [1e6])
    r = traces.to_requests(trace, hits, speed=2.0)
    assert r.arrival[-1] == trace.arrival[-1] / 2 and np.all(r.cached < r.isl)
    assert np.sum(r.cached) / np.sum(r.isl) == pytest.approx(hits.share[0])
    with pytest.raises(InputError, match="no arrivals"):
        traces.to_requests(traces.excerpt("arxiv"))
