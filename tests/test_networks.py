"""Networks that run, against themselves (cache, chunks, ranks) and against the operators."""

import dataclasses
import math
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
from perfmodel.models.catalogue import load_model
from perfmodel.models.mla import Indexer, LatentAttention
from perfmodel.models.mlp import MixtureOfExperts, Mlp
from perfmodel.models.networks.attention import rotate, visible
from perfmodel.models.networks.latent import quantise
from perfmodel.models.networks.parallel import AXIS
from perfmodel.models.networks.transformer import even_order
from perfmodel.models.networks.weights import Weights
from perfmodel.models.transformer import (
    Block,
    Model,
    parameters,
)
from perfmodel.step import Chunk, causal_pairs

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
    "latent": small(Block(2, LatentAttention(4, 6, 8, 6, 4, 5)), Block(1, SWIGLU)),
    # 13 tokens of which each sees at most 4.
    "latent, chosen keys": small(
        Block(1, LatentAttention(4, None, 8, 6, 4, 5, index=Indexer(2, 128, 4))),
        Block(1, MixtureOfExperts(6, 3, 12)),
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


@pytest.mark.parametrize("q_rank", [6, None])
def test_latent_attention_in_either_form(q_rank: int | None) -> None:
    """Keys and values expanded, queries absorbed, and all keys chosen: the same sums."""
    plain = LatentAttention(4, q_rank, 8, 6, 4, 5)
    chosen = LatentAttention(4, q_rank, 8, 6, 4, 5, index=Indexer(2, 128, 9))
    layer, sparse = (
        networks.LatentSelfAttention(body, 16, Weights(nnx.Rngs(0), jnp.float32))
        for body in (plain, chosen)
    )
    x, start = jax.random.normal(jax.random.key(0), (2, 9, 16)), jnp.asarray(0)

    def forms(x):
        places = jnp.arange(9)
        query = jax.random.normal(jax.random.key(1), (2, 9, 4, 10))
        latents = layer._latents(x, places)
        mask = visible(places, places, "full", None)
        both = layer.expanded(query, latents, mask), layer.absorbed(query, latents, mask)
        return both, layer(x, start)[0], sparse(x, start)[0]

    (naive, absorbed), dense, all_chosen = run(forms, x)
    np.testing.assert_allclose(naive, absorbed, atol=1e-5)
    np.testing.assert_allclose(dense, all_chosen, atol=1e-5)
    assert np.std(dense) > 1e-2
    few = networks.LatentSelfAttention(
        dataclasses.replace(chosen, index=Indexer(2, 128, 2)), 16,
        Weights(nnx.Rngs(0), jnp.float32),
    )  # fmt: skip
    short = run(lambda x: few(x, start)[0], x)
    np.testing.assert_allclose(short[:, :2], dense[:, :2], atol=1e-5)
    assert np.abs(short[:, 2:] - dense[:, 2:]).max() > 1e-2


def test_the_best_keys_are_chosen() -> None:
    """Scores by hand, of one head: the places of the two largest among those seen."""
    body = LatentAttention(2, None, 8, 6, 4, 5, index=Indexer(1, 128, 2))
    layer = networks.LatentSelfAttention(body, 16, Weights(nnx.Rngs(0), jnp.float32)).index
    assert layer is not None
    keys = jnp.zeros((1, 4, 128)).at[0, :, 100].set(jnp.asarray([3.0, 1.0, 2.0, 9.0]))
    held = quantise(keys)
    np.testing.assert_allclose(
        held[0].astype(jnp.float32) * held[1][..., None], keys[:, :, None], rtol=1e-6
    )
    layer.query[...] = jnp.zeros((16, 1, 128)).at[0, 0, 100].set(1.0)
    layer.heads[...] = jnp.zeros((16, 1)).at[0, 0].set(1.0)
    x = jnp.ones((1, 1, 16))
    chosen, seen = layer(x, x, jnp.asarray([2]), *held)
    assert sorted(chosen[0, 0].tolist()) == [0, 2] and bool(seen.all())
    chosen, seen = layer(x, x, jnp.asarray([0]), *held)
    assert chosen[0, 0, 0] == 0 and seen[0, 0].tolist() == [True, False]


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


# --------------------------------------------------------------------------------- published sizes


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
        (small(Block(1, LatentAttention(4, 6, 8, 6, 3, 5))), "rope_width 3 must be even"),
        (
            small(Block(1, LatentAttention(4, 6, 8, 6, 4, 5, index=Indexer(2, 64, 4)))),
            "index width 64 must be a multiple of 128",
        ),
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
