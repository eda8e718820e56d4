"""Networks that run, against themselves (cache, chunks, ranks) and against the operators."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh

from perfmodel.errors import InputError
from perfmodel.formats import precision
from perfmodel.models import networks
from perfmodel.models.attention import GroupedQueryAttention, chunk_pairs, window_pairs
from perfmodel.models.block_sparse import BlockSparseAttention
from perfmodel.models.catalogue import load_model, names
from perfmodel.models.compressed import CompressedAttention
from perfmodel.models.mla import LatentAttention
from perfmodel.models.mlp import MixtureOfExperts, Mlp
from perfmodel.models.networks.attention import rotate, visible
from perfmodel.models.networks.parallel import AXIS
from perfmodel.models.networks.transformer import even_order
from perfmodel.models.networks.weights import Weights
from perfmodel.models.transformer import (
    Block,
    Model,
    head_operators,
    kv_bytes,
    layer_operators,
    parameters,
    weight_bytes,
)
from perfmodel.operators import Attention, Collective, Matmul
from perfmodel.step import Chunk, Shard, Step, causal_pairs

BF16 = precision("bf16")

# ------------------------------------------------------------------------------------- small ones

GQA = GroupedQueryAttention(4, 2, 8)
NEAR = GroupedQueryAttention(4, 2, 8, window=5, span="window")
SWIGLU = Mlp(24)


def small(*blocks: Block, **fields: Any) -> Model:
    return Model(
        **(
            {
                "hidden": 16, "vocabulary": 50, "tied": 0, "max_context": 64, "layers": 2,
                "blocks": blocks,
            }
            | fields
        )
    )  # fmt: skip


KINDS = {
    "dense": small(Block(1, GQA), Block(1, SWIGLU)),
    "tied, biases, norms per head": small(
        Block(1, GroupedQueryAttention(4, 1, 8, 1, 1, qk_norm=1, qk_weights=16)),
        Block(1, SWIGLU),
        tied=1,
    ),
    "norms over all heads": small(
        Block(1, GroupedQueryAttention(4, 4, 8, qk_norm=1, qk_weights=64)),
        Block(1, SWIGLU),
        norm_vectors=0,
    ),
    "windows, norms around": small(Block(1, GQA), Block(2, NEAR), Block(1, SWIGLU), norms=2),
    "chunks": small(
        Block(1, GQA),
        Block(1, GroupedQueryAttention(4, 2, 8, qk_norm=1, window=5, span="chunk")),
        Block(1, SWIGLU),
    ),
    "sinks, mixture with biases": small(
        Block(1, GroupedQueryAttention(4, 2, 8, sinks=1)),
        Block(1, GroupedQueryAttention(4, 2, 8, sinks=1, window=5, span="window")),
        Block(1, MixtureOfExperts(6, 3, 12, bias=1, router_bias=1)),
    ),
    "shared experts": small(
        Block(1, GQA), Block(1, MixtureOfExperts(8, 2, 12, shared=Mlp(12), shared_gate=1))
    ),
    "plain": small(
        Block(1, GroupedQueryAttention(4, 4, 4, qkv_bias=1, output_bias=1)),
        Block(1, Mlp(32, gates=1, bias=1)),
        tied=1, norm_vectors=2, positions=66,
    ),
}  # fmt: skip


def compiled(function):
    """Returns a function compiled without care: these run a few times, compiling is what costs."""
    fast = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(function, compiler_options=fast)


def run(function, *arguments):
    return compiled(function)(*arguments)


def elements(network: nnx.Module) -> int:
    leaves = jax.tree.leaves(nnx.state(network, nnx.Param))
    return sum(math.prod(leaf.shape) for leaf in leaves)


def stored(tree: Any) -> int:
    """Returns the bytes of all arrays of at least one dimension."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.ndim]
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


@pytest.mark.parametrize("kind", KINDS)
def test_cache_and_chunks_change_nothing(kind: str) -> None:
    network = networks.build(KINDS[kind], nnx.Rngs(0))
    assert elements(network) == parameters(KINDS[kind])
    graph, state = nnx.split(network)
    batch, length, chunk = 2, 13, 6
    tokens = np.random.default_rng(1).integers(0, 50, (batch, length), np.int32)
    full = run(lambda s, t: nnx.merge(graph, s)(t), state, tokens)
    assert float(np.std(full)) > 0.1
    decode = compiled(lambda s, t, c: networks.decode(nnx.merge(graph, s), t, c))

    whole = networks.empty_cache(network, batch, length, part=length - 1)
    logits, whole = run(
        lambda s, t, c: networks.prefill(nnx.merge(graph, s), t, c), state, tokens[:, :-1], whole
    )
    np.testing.assert_allclose(logits, full[:, -2], atol=1e-4)
    logits, whole = decode(state, tokens[:, -1], whole)
    np.testing.assert_allclose(logits, full[:, -1], atol=1e-4)
    assert whole.tokens == length

    parts = networks.empty_cache(network, batch, length, part=chunk)
    logits, _ = run(
        lambda s, t, c: networks.chunked_prefill(nnx.merge(graph, s), t, c, chunk),
        state, tokens[:, :-1], parts,
    )  # fmt: skip
    np.testing.assert_allclose(logits, full[:, -2], atol=1e-4)

    # One at a time, with no more slots than a window needs.
    ones = networks.empty_cache(network, batch, length)
    for i in range(length):
        logits, ones = decode(state, tokens[:, i], ones)
        np.testing.assert_allclose(logits, full[:, i], atol=1e-4)


def test_what_a_window_hides_changes_nothing() -> None:
    """The last of 12 tokens sees the first through one layer of window 12, not of window 5."""
    last = []
    for window in (5, 12):
        body = GroupedQueryAttention(4, 2, 8, window=window, span="window")
        network = networks.build(small(Block(1, body), Block(1, SWIGLU)), nnx.Rngs(0))
        tokens = np.tile(np.arange(12), (2, 1))
        tokens[1, 0] = 40
        last.append(np.asarray(run(network, tokens)[:, -1]))
    np.testing.assert_array_equal(last[0][0], last[0][1])
    assert np.abs(last[1][0] - last[1][1]).max() > 1e-3


def test_a_sink_takes_its_share() -> None:
    """Equal scores: of n keys and a sink of the same logit, the keys keep n/(n + 1) together."""
    body = GroupedQueryAttention(2, 1, 4, sinks=1)
    layer = networks.SelfAttention(body, 8, False, Weights(nnx.Rngs(0), jnp.float32))
    layer.query[...] = jnp.zeros_like(layer.query[...])
    layer.sinks[...] = jnp.zeros_like(layer.sinks[...])
    x = jax.random.normal(jax.random.key(0), (1, 3, 8))
    y = run(lambda x: layer(x, jnp.asarray(0))[0], x)
    mean = np.einsum("bsm,mkd->bkd", x, layer.value[...]) / 4
    expected = np.einsum("bhd,hdm->bm", np.repeat(mean, 2, 1), layer.output[...])
    np.testing.assert_allclose(y[:, -1], expected, rtol=1e-4, atol=1e-6)


def test_rotation_depends_on_distance_alone() -> None:
    x = jax.random.normal(jax.random.key(0), (1, 2, 1, 8))

    def scores(places):
        turned = [rotate(x, places[i]) for i in range(3)]
        return jnp.stack([jnp.sum(y[0, 0] * y[0, 1]) for y in turned])

    near, far, other = run(scores, jnp.asarray([[3, 7], [103, 107], [3, 8]])).tolist()
    assert near == pytest.approx(far, abs=1e-4)
    assert abs(near - other) > 1e-2


@given(
    queries=st.integers(1, 40),
    cached=st.integers(0, 40),
    window=st.integers(1, 20),
)
@settings(max_examples=30, deadline=None)
def test_masks_equal_brute_force_and_the_operators_pairs(
    queries: int, cached: int, window: int
) -> None:
    places, keys = range(cached, cached + queries), range(cached + queries)
    seen = {
        "full": [[k <= q for k in keys] for q in places],
        "window": [[q - window < k <= q for k in keys] for q in places],
        "chunk": [[k <= q and q // window == k // window for k in keys] for q in places],
    }
    pairs = {
        "full": causal_pairs(queries, cached),
        "window": window_pairs(queries, cached, window),
        "chunk": chunk_pairs(queries, cached, window),
    }
    for span in ("full", "window", "chunk"):
        limit = None if span == "full" else window
        mask = visible(np.asarray(places), np.asarray(keys), span, limit)
        assert mask.tolist() == seen[span]
        body = GroupedQueryAttention(4, 2, 8, window=limit, span=span)
        chunk = Chunk(queries, pairs["full"], cached + queries, new=queries, cached=cached)
        assert int(mask.sum()) == pairs[span] == body.chunk_keys(chunk)[0]
        assert int(mask[-1].sum()) == body.decode_keys(cached + queries)


def test_every_expert_by_hand() -> None:
    """All experts computed for all tokens and weighed by a matrix, no sorting: the same result."""
    body = MixtureOfExperts(6, 2, 12, bias=1, router_bias=1, shared=Mlp(20, bias=1), shared_gate=1)
    layer = networks.Mixture(body, 16, Weights(nnx.Rngs(0), jnp.float32))
    assert elements(layer) == body.matrices(16) + body.vectors(16)
    x = jax.random.normal(jax.random.key(0), (10, 16))

    def by_hand(x):
        shares, chosen = layer.route(x)
        up = jnp.einsum("tm,emgf->tegf", x, layer.up[...]) + layer.up_bias[...]
        inner = jax.nn.silu(up[..., 0, :]) * up[..., 1, :]
        each = jnp.einsum("tef,efm->tem", inner, layer.down[...]) + layer.down_bias[...]
        weight = jnp.zeros((10, 6)).at[jnp.arange(10)[:, None], chosen].set(shares)
        gate = jax.nn.sigmoid(x @ layer.shared_gate[...])
        expected = jnp.einsum("te,tem->tm", weight, each) + gate * layer.shared(x)
        return layer(x), expected, shares, chosen

    y, expected, shares, chosen = run(by_hand, x)
    np.testing.assert_allclose(y, expected, atol=1e-5)
    np.testing.assert_allclose(np.sum(shares, -1), 1, atol=1e-6)
    assert all(len(set(token)) == 2 for token in chosen.tolist())


# ------------------------------------------------------------------------------- against operators


def primitives(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """Yields each equation of a program and how often it runs, those of inner programs too."""
    for eqn in jaxpr.eqns:
        yield eqn, times
        length = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from primitives(inner, times * length)


def products(jaxpr: Any) -> Counter[str]:
    """Returns FLOPs of products with weights, of attention (batched ones) and of experts."""
    flops: Counter[str] = Counter()
    for eqn, times in primitives(jaxpr):
        out = math.prod(eqn.outvars[0].aval.shape)
        if eqn.primitive.name == "dot_general":
            (contracted, _), (batched, _) = eqn.params["dimension_numbers"]
            inner = math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
            flops["attention" if batched else "weights"] += 2 * out * inner * times
        elif eqn.primitive.name.startswith("ragged_dot"):
            flops["experts"] += 2 * out * eqn.invars[0].aval.shape[1] * times
    return flops


def trace_step(
    network: networks.Decoder, batch: int, tokens: int, context: int
) -> tuple[Counter[str], int]:
    """Returns FLOPs of one step of `tokens` per sequence that ends at `context`, bytes of cache."""
    graph, state = nnx.split(network)
    cache = jax.eval_shape(lambda: networks.empty_cache(network, batch, context, tokens))
    program = jax.make_jaxpr(lambda *a: networks.prefill(nnx.merge(graph, a[0]), *a[1:]))(
        state, jax.ShapeDtypeStruct((batch, tokens), jnp.int32), cache
    )
    return products(program.jaxpr), stored(cache)


def operator_flops(model: Model, step: Step, shard: Shard | None = None) -> Counter[str]:
    shard = Shard() if shard is None else shard
    flops: Counter[str] = Counter()
    for op in (
        *layer_operators(model, step, shard, BF16),
        *head_operators(model, step, shard, BF16),
    ):
        if isinstance(op, Matmul):
            # Experts have a mean number of rows, a float.
            exact = op.count * op.flops()
            flops["experts" if op.experts else "weights"] += float(exact) if op.experts else exact
        elif isinstance(op, Attention):
            flops["attention"] += op.count * op.flops()
    return flops


def assert_step_agrees(model: Model, order: tuple[int, ...] | None, batch: int, context: int):
    network = networks.abstract(model, order)
    traced, cache = trace_step(network, batch, 1, context)
    counted = operator_flops(model, Step(sequences=batch, context=context))
    assert traced["weights"] == counted["weights"]
    assert isinstance(counted["weights"], int)
    assert traced["attention"] == counted["attention"]
    assert traced["experts"] == pytest.approx(counted["experts"], rel=2e-6)
    assert cache == batch * kv_bytes(model, BF16, context)


sizes = st.fixed_dictionaries(
    {
        "kv_heads": st.integers(1, 3),
        "group": st.integers(1, 4),
        "head_dim": st.sampled_from([2, 8, 10]),
        "window": st.integers(1, 12),
        "span": st.sampled_from(["window", "chunk"]),
        "qkv_bias": st.booleans(),
        "sinks": st.booleans(),
        "hidden": st.integers(1, 40),
        "inner": st.integers(1, 50),
        "gates": st.sampled_from([1, 2]),
        "bias": st.booleans(),
        "experts": st.integers(1, 9),
        "layers": st.integers(1, 3),
        "near": st.integers(0, 2),
        "sparse": st.integers(0, 2),
        "tied": st.booleans(),
    }
)


def drawn_model(s: dict[str, Any]) -> Model:
    body = {
        "heads": s["kv_heads"] * s["group"], "kv_heads": s["kv_heads"],
        "head_dim": s["head_dim"], "qkv_bias": int(s["qkv_bias"]), "sinks": int(s["sinks"]),
    }  # fmt: skip
    blocks = [Block(s["layers"], GroupedQueryAttention(**body))]
    if s["near"]:
        near = GroupedQueryAttention(**body, window=s["window"], span=s["span"])
        blocks.append(Block(s["near"], near))
    blocks.append(Block(s["layers"], Mlp(s["inner"], s["gates"], int(s["bias"]))))
    if s["sparse"]:
        top_k = (s["experts"] + 1) // 2
        shared = Mlp(s["inner"]) if s["bias"] else None
        mixture = MixtureOfExperts(
            s["experts"], top_k, s["inner"], s["gates"], int(s["bias"]), int(s["sinks"]), shared,
            int(s["bias"]),
        )  # fmt: skip
        blocks.append(Block(s["sparse"], mixture))
    return small(*blocks, hidden=s["hidden"], tied=int(s["tied"]))


@given(s=sizes, batch=st.integers(1, 9), context=st.integers(1, 40))
@settings(max_examples=12, deadline=None)
def test_decoding_multiplies_what_the_operators_say(
    s: dict[str, Any], batch: int, context: int
) -> None:
    model = drawn_model(s)
    if s["near"] and s["span"] == "chunk" and context > s["window"]:
        # A dense kernel multiplies all slots; they are the chunk where it has just been filled.
        context -= context % s["window"]
    assert elements(networks.abstract(model)) == parameters(model)
    assert_step_agrees(model, None, batch, context)


@given(s=sizes, batch=st.integers(1, 4), tokens=st.integers(1, 20), cached=st.integers(0, 20))
@settings(max_examples=6, deadline=None)
def test_prefill_multiplies_what_the_operators_say(
    s: dict[str, Any], batch: int, tokens: int, cached: int
) -> None:
    """A dense kernel multiplies a rectangle, queries × keys read, of which pairs are the part."""
    model = drawn_model(s)
    context = cached + tokens
    traced, _ = trace_step(networks.abstract(model), batch, tokens, context)
    chunk = Chunk(
        tokens * batch, causal_pairs(tokens, cached), context, ends=batch, prompts=batch,
        new=tokens, cached=cached,
    )  # fmt: skip
    step = Step(sequences=0, context=1, chunk=chunk)
    counted = operator_flops(model, step)
    assert traced["weights"] == counted["weights"]
    assert traced["experts"] == pytest.approx(counted["experts"], rel=2e-6)
    rectangle = sum(
        4 * block.count * batch * tokens * block.body.heads * block.body.head_dim
        * min(context, context if block.body.window is None else block.body.window + tokens - 1)
        for block in model.attention
    )  # fmt: skip
    assert traced["attention"] == rectangle >= counted["attention"]


# --------------------------------------------------------------------------------- published sizes


def is_unbuilt(name: str) -> bool:
    model = load_model(name).model
    return bool(model.extra_norms) or any(
        isinstance(block.body, LatentAttention | CompressedAttention | BlockSparseAttention)
        or getattr(block.body, "v_width", None) is not None
        or getattr(block.body, "gate_width", None) is not None
        or getattr(block.body, "joined", 0)
        for block in model.blocks
    )


def test_attention_without_a_network_is_refused() -> None:
    for name in filter(is_unbuilt, names()):
        entry = load_model(name)
        with pytest.raises(InputError, match="(has|have) none yet"):
            networks.abstract(entry.model, entry.order)


@pytest.mark.parametrize("name", [name for name in names() if not is_unbuilt(name)])
def test_published_networks_have_the_counted_weights(name: str) -> None:
    entry = load_model(name)
    network = networks.abstract(entry.model, entry.order)
    assert elements(network) == parameters(entry.model)
    assert stored(nnx.state(network, nnx.Param)) == weight_bytes(entry.model, BF16)
    # A cache short of any window, and one far past all.
    for tokens in (100, 70_000):
        cache = jax.eval_shape(lambda n=tokens: networks.empty_cache(network, 1, n))
        assert stored(cache) == kv_bytes(entry.model, BF16, tokens)


@pytest.mark.parametrize(
    "name",
    ["llama-3.1-8b", "gemma-3-27b", "gpt-oss-20b", "llama-4-scout", "glm-4.5-air", "opt-175b"],
)
def test_published_networks_decode_what_the_operators_say(name: str) -> None:
    entry = load_model(name)
    # A multiple of Llama 4's chunks.
    assert_step_agrees(entry.model, entry.order, 64, 16_384)


def layer_kinds(name: str) -> str:
    """Returns a letter per layer: f all keys, n near ones; then d dense, m mixture."""
    entry = load_model(name)
    letters = {
        i: "m" if isinstance(b.body, MixtureOfExperts)
        else "d" if isinstance(b.body, Mlp)
        else "f" if b.body.window is None else "n"
        for i, b in enumerate(entry.model.blocks)
    }  # fmt: skip
    pairs = zip(entry.order[::2], entry.order[1::2], strict=True)
    return " ".join(letters[attention] + letters[rest] for attention, rest in pairs)


def test_published_orders_of_layers() -> None:
    assert layer_kinds("gpt-oss-20b") == " ".join(["nm fm"] * 12)
    assert layer_kinds("gemma-3-27b") == " ".join(["nd nd nd nd nd fd"] * 10 + ["nd nd"])
    assert layer_kinds("glm-4.5-air") == " ".join(["fd"] + ["fm"] * 45)
    assert layer_kinds("llama-4-maverick") == " ".join(["nd nm nd fm"] * 12)
    assert layer_kinds("llama-3.1-8b") == " ".join(["fd"] * 32)


def test_an_order_without_a_file_alternates() -> None:
    model = small(Block(1, GQA), Block(2, NEAR), Block(3, SWIGLU))
    # Windows around the only layer that sees all keys.
    assert even_order(model) == (1, 2, 0, 2, 1, 2)
    with pytest.raises(InputError, match=r"order names \[2, 0, 0\] .* the model has \[1, 2, 3\]"):
        networks.abstract(model, (0, 0))


# ------------------------------------------------------------------------------ tensor parallelism


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("llama-3.1-8b", 1), ("llama-3.1-8b", 2), ("llama-3.1-8b", 4), ("llama-3.1-8b", 8),
     ("gpt-oss-20b", 4)],
)  # fmt: skip
def test_ranks_exchange_and_multiply_what_the_operators_say(name: str, ranks: int) -> None:
    entry = load_model(name)
    network = networks.abstract(entry.model, entry.order)
    state = nnx.state(network)
    batch, context = 16, 4096
    cache = jax.eval_shape(lambda: networks.empty_cache(network, batch, context))
    step = networks.tensor_parallel(network, AbstractMesh((ranks,), (AXIS,)))
    tokens = jax.ShapeDtypeStruct((batch, 1), jnp.int32)
    program = jax.make_jaxpr(step)(state, tokens, cache).jaxpr
    shard = Shard(ranks)
    counted = Step(sequences=batch, context=context)
    traced, expected = products(program), operator_flops(entry.model, counted, shard)
    assert traced["weights"] == expected["weights"]
    assert traced["attention"] == expected["attention"]
    assert traced["experts"] == pytest.approx(expected["experts"], rel=2e-6)
    # Two bytes per element, as operators count them; sums do run in 16 bits.
    sent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    held = 0
    for eqn, times in primitives(program):
        kind = eqn.primitive.name
        if kind == "shard_map":
            specs = eqn.params["in_specs"]
            sharded = zip(eqn.invars, specs, strict=True)
            weights = itertools.islice(sharded, len(jax.tree.leaves(state)))
            held = sum(
                math.prod(v.aval.shape) * 2 // (ranks if AXIS in spec else 1) for v, spec in weights
            )
        if kind.startswith(("psum", "all_gather")):
            big = max((*eqn.invars, *eqn.outvars), key=lambda v: math.prod(v.aval.shape))
            assert kind.startswith("all_gather") or big.aval.dtype == jnp.bfloat16
            kind = "all_reduce" if kind.startswith("psum") else "all_gather"
            sent[kind] += 2 * math.prod(big.aval.shape) * times
            calls[kind] += times
    asked: Counter[str] = Counter()
    number: Counter[str] = Counter()
    for op in (
        *layer_operators(entry.model, counted, shard, BF16),
        *head_operators(entry.model, counted, shard, BF16),
    ):
        if isinstance(op, Collective):
            asked[op.kind] += op.count * op.wire_bytes()
            number[op.kind] += op.count
    assert sent == asked
    assert calls == number
    if name == "llama-3.1-8b":
        # By hand: 32 times attention and feed-forward, and the embedding, 16 × 4096 × 2 bytes each.
        assert sent["all_reduce"] == 65 * 16 * 4096 * 2
        assert held == weight_bytes(entry.model, BF16, shard)


@pytest.mark.parametrize("kind", ["norms over all heads", "plain"])
def test_two_ranks_compute_what_one_does(kind: str) -> None:
    """Ranks as a mapped axis: the same sums and gathers, on one device."""
    network = networks.build(KINDS[kind], nnx.Rngs(0))
    graph, state = nnx.split(network)
    tokens = np.random.default_rng(1).integers(0, 50, (2, 9), np.int32)

    def is_variable(leaf: Any) -> bool:
        return isinstance(leaf, nnx.Variable)

    def axis_of(variable: nnx.Variable) -> int | None:
        split = variable.get_metadata()["split"]
        return None if split is None else 0

    def cut(variable: nnx.Variable) -> nnx.Variable:
        split = variable.get_metadata()["split"]
        if split is None:
            return variable
        return variable.replace(jnp.stack(jnp.split(variable[...], 2, split)))

    parts = jax.tree.map(cut, state, is_leaf=is_variable)
    axes = jax.tree.map(axis_of, state, is_leaf=is_variable)
    ranks = jax.vmap(lambda part, t: nnx.merge(graph, part)(t, AXIS), (axes, None), axis_name=AXIS)
    results = run(ranks, parts, tokens)
    one = run(lambda s, t: nnx.merge(graph, s)(t), state, tokens)
    np.testing.assert_allclose(results[0], one, atol=1e-4)
    np.testing.assert_allclose(results[1], one, atol=1e-4)


# -------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (small(Block(1, GroupedQueryAttention(4, 3, 8))), "4 heads are no multiple of 3 kv_heads"),
        (small(Block(1, GroupedQueryAttention(4, 2, 7))), "head_dim 7 must be even"),
        (small(Block(1, GroupedQueryAttention(4, 2, 8, qk_norm=1, qk_weights=5))), "fits no norm"),
        (small(Block(1, Mlp(8, gates=3))), "gates must be 1 or 2, not 3"),
        (small(Block(1, Mlp(8.5))), "intermediate must be a whole number of at least 1, not 8.5"),
        (small(Block(1, Mlp(8)), norms=3), "norms must be 1 or 2, not 3"),
        (small(Block(1, Mlp(8)), norm_vectors=3), "norm_vectors must be 0, 1 or 2, not 3"),
        (small(Block(1, MixtureOfExperts(2, 3, 8))), "top_k 3 exceeds experts 2"),
    ],
)  # fmt: skip
def test_sizes_that_no_network_has(model: Model, message: str) -> None:
    with pytest.raises(InputError, match=message):
        networks.abstract(model)


def test_what_does_not_fit_is_refused() -> None:
    network = networks.build(KINDS["windows, norms around"], nnx.Rngs(0))
    tokens = jnp.zeros((1, 9), jnp.int32)
    with pytest.raises(InputError, match="has room for 8 tokens, not 9"):
        networks.prefill(network, tokens, networks.empty_cache(network, 1, 8))
    with pytest.raises(InputError, match="has room for 3 tokens at once, not 9"):
        networks.prefill(network, tokens, networks.empty_cache(network, 1, 20, part=3))
    with pytest.raises(InputError, match="needs a chunk and tokens, not 0 and 9"):
        networks.chunked_prefill(network, tokens, networks.empty_cache(network, 1, 20), 0)
    with pytest.raises(InputError, match="4 ranks do not share out 50 "):
        networks.tensor_parallel(network, AbstractMesh((4,), (AXIS,)))
    with pytest.raises(InputError, match=f"one axis '{AXIS}'"):
        networks.tensor_parallel(network, AbstractMesh((2,), ("x",)))
