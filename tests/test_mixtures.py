"""Mixtures of experts, windows and the plans that cut them, by hand, by masks and by sampling."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import perfmodel
from perfmodel import question, serving
from perfmodel._routing import power_law_counts
from perfmodel.chips import load_chip
from perfmodel.compiled import UNFUSED
from perfmodel.engines import load_engine
from perfmodel.errors import InputError
from perfmodel.formats import precision
from perfmodel.margins import MARGINS
from perfmodel.models.attention import GroupedQueryAttention, chunk_pairs, window_pairs
from perfmodel.models.catalogue import load_model
from perfmodel.models.mlp import MixtureOfExperts, Mlp
from perfmodel.models.routing import (
    FEWEST_RANGE,
    busiest_power_law_share,
    busiest_share,
    distinct_experts,
    power_law_chances,
)
from perfmodel.models.transformer import (
    Block,
    Model,
    active_parameters,
    kv_bytes,
    layer_operators,
    parameters,
    weight_bytes,
)
from perfmodel.operators import Attention, Collective, Matmul
from perfmodel.plan import Load, Plan
from perfmodel.step import Chunk, Shard, Step, causal_pairs

BF16 = precision("bf16")


def mixture(**changes) -> Model:
    """Qwen3-235B-A22B, with numbers of its config.json."""
    experts = MixtureOfExperts(experts=128, top_k=8, intermediate=1536, **changes)
    attention = GroupedQueryAttention(64, 4, 128, qk_norm=1, qk_weights=2 * 128)
    blocks = (Block(94, attention), Block(94, experts))
    return Model(4096, 151936, 0, 40960, layers=94, blocks=blocks)


def test_counts_of_a_mixture() -> None:
    model = mixture()
    attention = 4096 * (2 * 64 + 2 * 4) * 128 + 2 * 128
    expert = 3 * 4096 * 1536
    rest = 2 * 151936 * 4096 + 4096
    layer = attention + 4096 * 128 + 2 * 4096
    assert parameters(model) == 94 * (layer + 128 * expert) + rest == 235_093_634_560
    # "235B parameters in total and 22B activated", its model card.
    assert active_parameters(model) == 94 * (layer + 8 * expert) + rest == 22_190_763_520
    assert weight_bytes(model, BF16) == 2 * parameters(model)


def test_experts_are_spread_or_cut() -> None:
    model = mixture()
    router = 94 * 2 * 4096 * 128
    for ep in (1, 2, 8):
        per_rank = weight_bytes(model, BF16, Shard(8, expert_ranks=ep))
        experts = 94 * 128 * 3 * 4096 * 1536 * 2 // 8
        # Four kv heads on eight ranks: each twice. The router and norms are on every rank.
        attention = 94 * 4096 * (2 * 8 + 2 * 1) * 128 * 2
        tables = 2 * 151936 * 4096 * 2 // 8
        norms = 2 * (94 * (2 * 4096 + 2 * 128) + 4096)
        assert per_rank == experts + attention + router + tables + norms


def steps(rows: int, chunk: int = 0) -> Step:
    if not chunk:
        return Step(rows, 1000)
    part = Chunk(chunk, causal_pairs(chunk, 0), chunk, new=chunk)
    return Step(rows, 1000, chunk=part)


@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_work_follows_the_chosen_experts_and_traffic_the_distinct_ones(ep: int) -> None:
    model, rows = mixture(), 16
    for tp in (1, 8) if ep == 1 else (8,):
        ops = layer_operators(model, steps(rows), Shard(tp, expert_ranks=ep), BF16)
        routed = [op for op in ops if isinstance(op, Matmul) and op.experts]
        busiest = float(busiest_share(ep, rows * 8))
        flops = sum(float(op.count * op.flops()) for op in routed)
        assert flops == pytest.approx(94 * rows * 8 * 2 * 3 * 4096 * 1536 / tp * busiest, rel=1e-5)
        distinct = 128 * (1 - (1 - 8 / 128) ** rows)
        read = sum(float(op.count * op.weight_traffic()) for op in routed)
        assert read == pytest.approx(94 * distinct * 3 * 4096 * 1536 * 2 / tp, rel=1e-5)


def test_distinct_experts_agree_with_sampling() -> None:
    draw = np.random.default_rng(0)
    for experts, top_k, tokens in ((8, 2, 3), (128, 8, 16), (128, 4, 1), (160, 8, 200)):
        chosen = [
            len(np.unique([draw.choice(experts, top_k, replace=False) for _ in range(tokens)]))
            for _ in range(400)
        ]
        error = 4 * np.std(chosen) / np.sqrt(len(chosen)) + 1e-5 * experts
        assert abs(float(distinct_experts(experts, top_k, tokens)) - np.mean(chosen)) <= error
    assert float(distinct_experts(8, 8, 1)) == pytest.approx(8, rel=1e-5)


def test_the_busiest_rank_agrees_with_sampling() -> None:
    draw = np.random.default_rng(0)
    for experts, top_k, ranks, tokens in ((128, 8, 8, 256), (128, 8, 16, 64), (256, 8, 32, 512)):
        largest = []
        for _ in range(300):
            chosen = np.argsort(draw.random((tokens, experts)), axis=1)[:, :top_k]
            load = np.bincount((chosen // (experts // ranks)).ravel(), minlength=ranks)
            largest.append(load.max() * ranks / load.sum())
        excess = np.mean(largest) - 1
        assert float(busiest_share(ranks, tokens * top_k)) - 1 == pytest.approx(excess, rel=0.2)
    assert float(busiest_share(1, 64)) == 1.0
    # Eight assignments on 64 ranks: about one on the busiest, which is eight times the mean.
    assert float(busiest_share(64, 8)) == pytest.approx(8.0, rel=0.2)
    assert np.isfinite(float(jax.grad(lambda n: busiest_share(n, 64.0))(1.0)))


def drawn(
    experts: int, top_k: int, tokens: int, ranks: int, exponent: float, draws: int = 40
) -> tuple[float, float]:
    """Returns distinct experts and the busiest rank's share, means over routers with loads from
    the power law and over tokens that each take `top_k` experts by them, without replacement."""
    draw = np.random.default_rng(0)
    power, widest = 1.0 - exponent, max(0.8 * tokens, FEWEST_RANGE)
    distinct, largest = [], []
    for _ in range(draws):
        loads = (1 + draw.random(experts) * (widest**power - 1)) ** (1 / power)
        # The largest of log-loads with Gumbel noise: a draw in proportion, again and again.
        keys = np.log(loads) + draw.gumbel(size=(tokens, experts))
        chosen = np.argpartition(-keys, top_k - 1, axis=1)[:, :top_k]
        counts = np.bincount(chosen.ravel(), minlength=experts)
        distinct.append((counts > 0).sum())
        largest.append(counts.reshape(ranks, -1).sum(1).max() * ranks / counts.sum())
    return float(np.mean(distinct)), float(np.mean(largest))


@pytest.mark.parametrize("exponent", [1.01, 1.2])
def test_a_power_law_agrees_with_sampling(exponent: float) -> None:
    """Routers drawn at random, and tokens that choose by them: means of both."""
    for experts, top_k, tokens in ((128, 8, 64), (128, 8, 1024), (256, 8, 512), (8, 2, 64)):
        for ranks in (2, 8, 32)[: 2 if experts == 8 else 3]:
            distinct, busiest = drawn(experts, top_k, tokens, ranks, exponent)
            ours = float(distinct_experts(experts, top_k, tokens, exponent))
            assert ours == pytest.approx(distinct, rel=0.03)
            share = busiest_power_law_share(ranks, experts, top_k, tokens, exponent)
            assert float(share) - 1 == pytest.approx(busiest - 1, rel=0.13, abs=0.04)


@pytest.mark.parametrize("exponent", [1.01, 1.2])
def test_a_power_law_agrees_with_the_routing_of_measured_kernels(exponent: float) -> None:
    """Another sampler: that of the tables that expert kernels were fitted to, counts per expert."""
    for experts, top_k, tokens, ranks in ((128, 8, 4096, 8), (256, 8, 1024, 16), (256, 8, 512, 8)):
        counts = power_law_counts(tokens, top_k, experts, ranks, exponent, draws=100)
        share = counts.sum(1).mean() * ranks / (tokens * top_k)
        ours = float(busiest_power_law_share(ranks, experts, top_k, tokens, exponent))
        assert ours - 1 == pytest.approx(share - 1, rel=0.1)


def test_a_power_law_by_hand() -> None:
    """One token takes k experts whoever is popular, and each expert has at most every token."""
    for exponent in (0.5, 1.0, 1.2, 2.5):
        chance = np.asarray(power_law_chances(8, 4, 100_000, exponent))
        assert chance.max() <= 1 and (np.diff(chance) >= -1e-6).all()
        assert float(distinct_experts(128, 8, 1, exponent)) == pytest.approx(8, rel=1e-3)
        assert float(busiest_power_law_share(1, 128, 8, 64, exponent)) == pytest.approx(1, abs=1e-5)
        assert float(busiest_power_law_share(8, 8, 4, 9, exponent)) <= 2.0
    # A token is on half of two ranks' experts, or on all of one of them.
    assert float(busiest_power_law_share(2, 8, 2, 1, 1.2)) <= 2.0


def test_skew_grows_and_has_slopes() -> None:
    def score(point):
        experts, tokens, ranks, exponent = point
        share = busiest_power_law_share(ranks, experts, 8.0, tokens, exponent)
        return jnp.stack([distinct_experts(experts, 8.0, tokens, exponent), share])

    with jax.enable_x64(True):
        value, slopes = jax.jit(score), jax.jit(jax.jacfwd(score))
        for tokens, ranks in itertools.product((1.0, 33.0, 4000.0), (1.0, 2.0, 16.0)):
            point = np.asarray([128.0, tokens, ranks, 1.2])
            found = np.asarray(slopes(point))
            assert np.isfinite(found).all()
            for i in (1, 3) if tokens > 1 else (3,):
                step = np.eye(4)[i] * 1e-6 * point[i]
                chord = (value(point + step) - value(point - step)) / (2 * step[i])
                np.testing.assert_allclose(found[:, i], chord, rtol=1e-3, atol=1e-6)
        shares = [float(value(np.asarray([128.0, 512.0, 8.0, a]))[1]) for a in (0.5, 1.0, 1.2, 1.5)]
        assert np.isfinite(slopes(np.asarray([128.0, 512.0, 8.0, 1.0]))).all()
    assert shares == sorted(shares)


def test_a_skewed_router_slows_a_step() -> None:
    model = mixture()
    plan = Plan(8, 1, 256, 2048, attention_dp=8, expert_ranks=8)
    even, skewed = (found(plan, question.prefer(model, a)) for a in (None, 1.2))
    # Fewer experts are read, but the busiest rank has more of the tokens.
    assert 1.0 < float(skewed.tpot / even.tpot) < 2.0
    assert float(skewed.ttft) > float(even.ttft)
    assert float(skewed.memory_bytes) == float(even.memory_bytes)
    # Even routing is no number of the network at all.
    even_leaves = len(jax.tree.leaves(question.prefer(model, None)))
    assert even_leaves == len(jax.tree.leaves(model))
    assert len(jax.tree.leaves(question.prefer(model, 1.2))) == even_leaves + 1


def test_routing_is_asked_for_by_name() -> None:
    options = dict(tp=8, ep=8, batch=64, isl=1000, osl=100)
    skewed = perfmodel.estimate("qwen3-30b-a3b", "h200", **options, routing=1.2)
    assert skewed.attrs["routing"] == "power law, exponent 1.2"
    assert "routing=1.2" in skewed.attrs["call"] and bool(skewed.feasible)
    few = dict(precisions=["bf16"], batches=[64], chunks=[2048], isl=1000, osl=100)
    front = perfmodel.frontier("qwen3-30b-a3b", ["h200"], max_chips=8, **few, routing=1.2)
    sized = perfmodel.size("qwen3-30b-a3b", ["h200"], rate=1.0, max_chips=8, **few, routing=1.2)
    for found in (front, sized):
        assert found.attrs["routing"] == "power law, exponent 1.2"
        assert "routing=1.2" in found.attrs["call"]
    asked = dict(
        prefix_hit=0.0, engine="neutral", slo_ttft=None, slo_tpot=None, price=None, isl=10, osl=10
    )

    def ask(model: str, routing: float) -> question.Question:
        names = [question.parse_precision("bf16")]
        return question.ask(model, ["h200"], names, routing=routing, **asked)

    assert "routing" not in ask("qwen3-30b-a3b", 0).attributes("")
    with pytest.raises(InputError, match="routing: llama-3.1-8b has no experts"):
        ask("llama-3.1-8b", 1.2)
    with pytest.raises(InputError, match="routing: must be the exponent of a power law"):
        ask("qwen3-30b-a3b", -1)


@settings(deadline=None)
@given(
    new=st.integers(1, 40),
    cached=st.integers(0, 40),
    window=st.integers(1, 40),
)
def test_pairs_equal_a_mask(new: int, cached: int, window: int) -> None:
    query = np.arange(cached, cached + new)[:, None]
    key = np.arange(cached + new)[None, :]
    causal = key <= query
    assert window_pairs(new, cached, window) == (causal & (key > query - window)).sum()
    own = key // window == query // window
    assert chunk_pairs(new, cached, window) == (causal & own).sum()
    traced = jax.jit(window_pairs)(float(new), float(cached), float(window))
    assert float(traced) == window_pairs(new, cached, window)
    traced = jax.jit(chunk_pairs)(float(new), float(cached), float(window))
    assert float(traced) == chunk_pairs(new, cached, window)


def test_windows_bound_the_cache_and_the_keys_read() -> None:
    # gpt-oss-120b: every other of 36 layers sees the last 128 tokens; 8 kv heads of 64.
    full = GroupedQueryAttention(64, 8, 64)
    local = GroupedQueryAttention(64, 8, 64, window=128, span="window")
    model = Model(2880, 201088, 0, 131072, 36, (Block(18, full), Block(18, local)))
    fp8 = precision("bf16", kv="fp8")
    assert kv_bytes(model, fp8, 65_536) == 18 * (65_536 + 128) * 1024 == 1_210_318_848
    assert kv_bytes(model, fp8, 100) == 36 * 100 * 1024
    ops = layer_operators(model, Step(4, 1000), Shard(), BF16)
    keys = [op.keys for op in ops if isinstance(op, Attention)]
    assert keys == [1000, 128]
    assert local.decode_keys(50) == 50
    chunked = GroupedQueryAttention(40, 8, 128, window=8192, span="chunk")
    assert [chunked.decode_keys(n) for n in (1, 8192, 8193, 16384, 20000)] == [
        1, 8192, 1, 8192, 3616,
    ]  # fmt: skip


def test_context_ranks_share_keys_and_heads_return() -> None:
    # 8 kv heads on 16 ranks are held twice; two context ranks hold half of the keys each instead.
    model = load_model("llama-3.3-70b").model
    for cp, kept in ((None, 1.0), (1, 1.0), (2, 0.5), (4, 0.5)):
        shard = Shard(16, context_ranks=cp)
        ratio = kv_bytes(model, BF16, 1000, shard) / kv_bytes(model, BF16, 1000, Shard(16))
        assert ratio == kept
        ops = layer_operators(model, Step(8, 1000), shard, BF16)
        (attention,) = (op for op in ops if isinstance(op, Attention))
        plain = layer_operators(model, Step(8, 1000), Shard(16), BF16)
        (other,) = (op for op in plain if isinstance(op, Attention))
        # The work is conserved: more heads over fewer keys.
        assert attention.flops() == other.flops()


def test_attention_groups_split_sequences_and_share_experts() -> None:
    model = mixture()
    shard = Shard(8, attention_groups=4, expert_ranks=8)
    ops = {op.name: op for op in layer_operators(model, Step(16, 1000, groups=4), shard, BF16)}
    assert ops["decode_attention"].sequences == 16 and ops["decode_attention"].heads == 32
    assert ops["qkv_projection"].rows == 16
    alike = layer_operators(model, Step(64, 1000), Shard(8, expert_ranks=8), BF16)
    together = {op.name: op for op in alike}
    for name in ("expert_up_projection", "expert_down_projection"):
        assert float(ops[name].flops()) == pytest.approx(float(together[name].flops()))
    # Two ranks sum each group's attention; tokens travel to their experts and back.
    reduce = ops["attention_all_reduce"]
    assert isinstance(reduce, Collective) and reduce.ranks == 2 and reduce.rows == 16
    moved = 64 * min(1, 8 / 8)
    for name in ("expert_dispatch", "expert_combine"):
        op = ops[name]
        assert isinstance(op, Collective)
        assert float(op.rows) == moved and op.count == 94
    assert ops["ffn_all_reduce"].count == 0


_ESTIMATE = jax.jit(serving.estimate, compiler_options=dict(UNFUSED))


def found(plan: Plan, model: Model | None = None, **load) -> serving.Estimate:
    parts = (
        load_chip("h200").machine,
        mixture() if model is None else model,
        Load(**dict(isl=4000, osl=1000) | load),
        plan,
        precision("fp8"),
        load_engine("neutral").engine,
    )
    return _ESTIMATE(*question.numbers(parts))


def test_one_group_is_no_group_and_one_rank_is_no_rank() -> None:
    base = Plan(chips=8, stages=1, batch=64, chunk=2048)
    plain, ones = (
        found(base),
        found(Plan(8, 1, 64, 2048, attention_dp=1, expert_ranks=1, context_ranks=1)),
    )
    for name in ("tpot", "ttft", "output_rate", "memory_bytes", "admitted", "chip_power"):
        np.testing.assert_allclose(getattr(ones, name), getattr(plain, name), rtol=2e-6)
    assert bool(ones.feasible)


def test_groups_conserve_requests_and_energy() -> None:
    plan = Plan(8, 1, 64, 2048, attention_dp=8, expert_ranks=8)
    one = found(plan)
    # Little's law over the replica: requests in the system = rate × time in it.
    in_system = float(one.request_rate) * float(one.e2e)
    assert in_system == pytest.approx(64, rel=1e-5)
    assert float(one.chip_power) <= 700.0 and float(one.energy_per_output_token) > 0
    # Fewer requests than groups: some have none, and a request is as fast as with fewer groups.
    few = found(Plan(8, 1, 2, 2048, attention_dp=8, expert_ranks=8))
    assert float(few.request_rate) * float(few.e2e) == pytest.approx(2, rel=1e-5)


@pytest.mark.parametrize(
    "choices", [dict(expert_ranks=3), dict(attention_dp=16), dict(context_ranks=3)]
)
def test_what_does_not_divide_is_a_margin(choices: dict) -> None:
    plan = Plan(8, 1, 64, 2048, **dict(attention_dp=1, expert_ranks=1, context_ranks=1) | choices)
    margins = dict(zip(MARGINS, np.asarray(found(plan).margins), strict=True))
    assert margins["divisibility"] < 0


def test_gradients_are_finite_at_the_corners() -> None:
    parts = question.numbers(
        (load_chip("h200").machine, mixture(shared=Mlp(1536)), precision("fp8"),
         load_engine("neutral").engine)
    )  # fmt: skip

    def score(plan: Plan, load: Load) -> jax.Array:
        machine, model, formats, engine = parts
        one = serving.estimate(machine, model, load, plan, formats, engine)
        return jnp.log(one.tpot) + jnp.log(one.ttft) + jnp.log(one.output_rate) + one.chip_power

    slope = jax.jit(jax.grad(score, argnums=(0, 1)), compiler_options=dict(UNFUSED))
    load = question.numbers(Load(4000, 1000))
    for batch, dp, ep, cp in itertools.product((1, 512), (1, 8), (1, 8), (1, 2)):
        plan = question.numbers(
            Plan(8, 1, batch, 2048, attention_dp=dp, expert_ranks=ep, context_ranks=cp)
        )
        leaves = jax.tree.leaves(slope(plan, load))
        assert all(np.isfinite(leaf).all() for leaf in leaves)


def test_layouts_cut_everything_whole() -> None:
    model = mixture()
    listed = question.layouts(model, 16)
    assert len(set(listed)) == len(listed)
    assert question.Layout(16, 1, 16, 16, 1) in listed and question.Layout(1, 1, 1, 1, 1) in listed
    for one in listed:
        assert 64 % (one.tp // one.attention_dp) == 0 and 128 % one.ep == 0
        assert 1536 % (one.tp // one.ep) == 0
    dense = load_model("llama-3.3-70b").model
    assert [one.tp for one in question.layouts(dense, 16)] == [1, 2, 4, 8, 16]
