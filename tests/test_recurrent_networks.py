"""Networks of recurrent layers, gates and latent experts that run, against themselves.

Against the operators they are counted in `test_network_counts`.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import perfmodel
from perfmodel.errors import InputError
from perfmodel.models import networks
from perfmodel.models.attention import GroupedQueryAttention
from perfmodel.models.delta import GatedDelta, KimiDelta
from perfmodel.models.mamba import Mamba2
from perfmodel.models.mla import LatentAttention
from perfmodel.models.mlp import MixtureOfExperts, Mlp
from perfmodel.models.networks import scans
from perfmodel.models.networks.parallel import AXIS
from perfmodel.models.networks.weights import Weights
from perfmodel.models.transformer import Block, Model, parameters
from perfmodel.operators import Scan

HIDDEN, VOCABULARY, BATCH, LENGTH, CHUNK = 16, 50, 2, 13, 7


def small(*blocks: Block) -> Model:
    return Model(HIDDEN, VOCABULARY, 0, 64, 2, blocks)


# Chunks of recurrences are shorter than those of prefill, and no divisor of them.
KINDS = {
    "qwen3-next": small(
        Block(1, GatedDelta(4, 2, 6, 8, 4, chunk=3)),
        Block(1, GroupedQueryAttention(4, 2, 8, qk_norm=1, qk_weights=16, gate_width=8)),
        Block(2, MixtureOfExperts(6, 2, 12, shared=Mlp(12), shared_gate=1)),
    ),
    "nemotron-3": small(
        Block(2, Mamba2(4, 2, 6, 8, 4, conv_bias=1, state_bytes_each=4, chunk=4)),
        Block(1, GroupedQueryAttention(4, 2, 8, gate_width=1)),
        Block(1, MixtureOfExperts(6, 2, 12, gates=1, shared=Mlp(20, gates=1), latent=10)),
    ),
    "kimi": small(
        Block(1, KimiDelta(4, 4, 6, 6, 4, chunk=64, decay_rank=5)),
        Block(1, LatentAttention(4, 6, 8, 6, 4, 5, gated=True)),
        Block(1, MixtureOfExperts(6, 2, 12, shared=Mlp(12), latent=10, latent_norm=1)),
    ),
}


def run(function: Any, *arguments: Any) -> Any:
    """Returns what a function does, compiled without care: it runs once."""
    fast = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(function, compiler_options=fast)(*arguments)


TOKENS = np.random.default_rng(1).integers(0, VOCABULARY, (BATCH, LENGTH), np.int32)


@pytest.mark.parametrize("kind", KINDS)
def test_cache_and_chunks_change_nothing(kind: str) -> None:
    """A prompt in two parts, then tokens one by one, from a state in the place of a cache."""
    network = networks.build(KINDS[kind], nnx.Rngs(0))
    leaves = jax.tree.leaves(nnx.state(network, nnx.Param))
    assert sum(math.prod(leaf.shape) for leaf in leaves) == parameters(KINDS[kind])
    graph, state = nnx.split(network)
    prompt = LENGTH - 2

    def generate(state: nnx.State, cache: networks.Cache) -> Any:
        network = nnx.merge(graph, state)
        full = network(TOKENS)
        logits, cache = networks.chunked_prefill(network, TOKENS[:, :prompt], cache, CHUNK)
        found = [logits]
        for i in range(prompt, LENGTH):
            logits, cache = networks.decode(network, TOKENS[:, i], cache)
            found.append(logits)
        return full, found, cache.tokens

    empty = networks.empty_cache(network, BATCH, LENGTH, part=CHUNK)
    full, found, tokens = run(generate, state, empty)
    assert float(np.std(full)) > 0.1
    for logits, i in zip(found, range(prompt - 1, LENGTH), strict=True):
        np.testing.assert_allclose(logits, full[:, i], atol=1e-4)
    assert tokens == LENGTH


def ranked(layer: nnx.Module, ranks: int) -> tuple[Any, Any]:
    """Returns a layer's parameters with those that ranks share out stacked, and which those are."""
    state = nnx.split(layer)[1]

    def each(function: Any) -> Any:
        return jax.tree.map(
            lambda variable: function(variable, variable.get_metadata()["split"]),
            state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
        )  # fmt: skip

    def cut(variable: nnx.Variable, split: int | None) -> nnx.Variable:
        if split is None:
            return variable
        return variable.replace(jnp.stack(jnp.split(variable[...], ranks, split)))

    return each(cut), each(lambda _, split: None if split is None else 0)


def test_two_ranks_compute_what_one_does() -> None:
    """Ranks as a mapped axis: the same sums, on one device; of every kind of mixer at once."""
    weights = Weights(nnx.Rngs(0), jnp.float32)
    bodies = [block.body for model in KINDS.values() for block in model.attention]
    whole = small(*(Block(1, body) for body in bodies))
    layers = [sublayer.body for sublayer in networks.Decoder(whole, range(6), weights).sublayers]
    assert len({type(layer) for layer in layers}) == 4
    x, start = jax.random.normal(jax.random.key(0), (BATCH, 9, HIDDEN)), jnp.asarray(0)
    cuts = [ranked(layer, 2) for layer in layers]
    graphs = [nnx.split(layer)[0] for layer in layers]

    def both(states: Any, parts: Any) -> Any:
        one = [nnx.merge(g, s)(x, start)[0] for g, s in zip(graphs, states, strict=True)]
        two = [
            jax.vmap(
                lambda p, g=g: nnx.merge(g, p)(x, start, None, AXIS)[0], (axes,), axis_name=AXIS
            )(part)
            for g, part, (_, axes) in zip(graphs, parts, cuts, strict=True)
        ]
        return one, two

    one, two = run(both, [nnx.split(layer)[1] for layer in layers], [part for part, _ in cuts])
    for alone, shared in zip(one, two, strict=True):
        assert float(np.std(alone)) > 0.05
        np.testing.assert_allclose(shared[0], alone, atol=1e-5)
        np.testing.assert_allclose(shared[1], alone, atol=1e-5)


@pytest.mark.parametrize("norm", [0, 1])
def test_two_ranks_share_out_latent_experts(norm: int) -> None:
    """Grouped products cannot be mapped, so each rank's part is made apart, then summed."""
    body = MixtureOfExperts(6, 2, 12, shared=Mlp(20), latent=10, latent_norm=norm)
    layer = networks.Mixture(body, HIDDEN, Weights(nnx.Rngs(0), jnp.float32))
    parts, _ = ranked(layer, 2)
    graph, state = nnx.split(layer)
    x = jax.random.normal(jax.random.key(0), (10, HIDDEN))

    def both(state: Any, parts: Any) -> tuple[jax.Array, jax.Array]:
        rows, beside = [], []
        for i in range(2):
            held = jax.tree.map(
                lambda v, i=i: v if v.get_metadata()["split"] is None else v.replace(v[...][i]),
                parts, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
            )  # fmt: skip
            rank = nnx.merge(graph, held)
            rows.append(rank.experts(x @ rank.into[...], *rank.route(x)))
            beside.append(rank.shared.partial(x))
        summed = jax.vmap(lambda y, z: nnx.merge(graph, state)._summed(y, z, AXIS), axis_name=AXIS)(
            jnp.stack(rows), jnp.stack(beside)
        )
        return nnx.merge(graph, state)(x), summed

    one, two = run(both, state, parts)
    np.testing.assert_allclose(two[0], one, atol=1e-5)
    np.testing.assert_allclose(two[1], one, atol=1e-5)


# ------------------------------------------------------------------------------------- recurrences

HEADS, GROUPS, STATE, WIDTH = 4, 2, 5, 3


def drawn(tokens: int, keys: int, decays: int) -> dict[str, np.ndarray]:
    """Returns a state and random inputs: logarithms of decays, keys, values, queries, rates."""
    random = np.random.default_rng(0)
    shape = (BATCH, tokens)
    return {
        "state": random.standard_normal((BATCH, STATE, HEADS, WIDTH)),
        "decay": -random.uniform(0, 1, (*shape, HEADS, decays)),
        "key": random.standard_normal((*shape, keys, STATE)) / STATE**0.5,
        "value": random.standard_normal((*shape, HEADS, WIDTH)),
        "query": random.standard_normal((*shape, keys, STATE)),
        "rate": random.uniform(0, 1, (*shape, HEADS, 1)),
    }


def by_hand(x: dict[str, np.ndarray], delta: bool) -> tuple[np.ndarray, np.ndarray]:
    """The recurrence as it is written, of each sequence, token and head, in 64 bits."""
    state, results = x["state"].copy(), np.zeros_like(x["value"])
    shared = HEADS // x["key"].shape[2]
    for b, t, h in np.ndindex(results.shape[:3]):
        key, query = x["key"][b, t, h // shared], x["query"][b, t, h // shared]
        value, held = x["value"][b, t, h], state[b, :, h]
        held = np.exp(x["decay"][b, t, h])[:, None] * held
        if delta:
            value = x["rate"][b, t, h] * (value - key @ held)
        state[b, :, h] = held + np.outer(key, value)
        results[b, t, h] = query @ state[b, :, h]
    return state, results


KEYS = {"ssd": (GROUPS, 1), "delta": (HEADS, 1), "kimi": (HEADS, STATE)}
"""Heads of keys, and numbers that a decay has."""


@pytest.mark.parametrize("kind", KEYS)
def test_chunks_and_steps_are_the_recurrence(kind: str) -> None:
    x = drawn(11, *KEYS[kind])
    state, results = by_hand(x, delta=kind != "ssd")
    if kind == "ssd":
        x.pop("rate")
    given = {name: jnp.asarray(value, jnp.float32) for name, value in x.items()}
    step = scans.ssd_step if kind == "ssd" else scans.delta_step
    chunks = scans.ssd_chunks if kind == "ssd" else scans.delta_chunks

    def all_forms(state: jax.Array, rest: dict[str, jax.Array]) -> Any:
        each, held = [], state
        for i in range(11):
            one = {name: value[:, i : i + 1] for name, value in rest.items()}
            held, y = step(held, **one | {"decay": jnp.exp(one["decay"])})
            each.append(y)
        stepped = held, jnp.concatenate(each, 1)
        return stepped, chunks(state, **rest, chunk=4), chunks(state, **rest, chunk=64)

    for form in run(all_forms, given.pop("state"), given):
        np.testing.assert_allclose(form[0], state, atol=1e-4)
        np.testing.assert_allclose(form[1], results, atol=1e-4)


@pytest.mark.parametrize("kind", KEYS)
def test_a_step_is_the_work_that_operators_count(kind: str) -> None:
    """5 or 7 operations an element of the state; of the delta rule, and its change of a value."""
    x = drawn(1, *KEYS[kind])
    delta = kind != "ssd"
    if not delta:
        x.pop("rate")
    shapes = {k: jax.ShapeDtypeStruct(v.shape, jnp.float32) for k, v in x.items()}
    step = scans.delta_step if delta else scans.ssd_step
    traced = perfmodel.trace(lambda given: step(**given), shapes)
    scan = Scan(
        "s", "g", "delta" if delta else "ssd", "decode", BATCH, 1, HEADS, STATE, WIDTH, 4, 0, 0
    )
    assert traced.matmul_flops == 0 and traced.unknown == ()
    assert traced.flops == scan.flops() + (2 * BATCH * HEADS * WIDTH if delta else 0)


def test_a_state_forgets_what_decays() -> None:
    """Two prompts that differ in their first token: the same, once decays have wiped it out."""
    x = {k: jnp.asarray(v, jnp.float32) for k, v in drawn(8, HEADS, 1).items()}
    other = x | {"value": x["value"].at[:, 0].add(1.0)}
    kept = run(lambda a, b: [scans.delta_chunks(**g, chunk=4)[0] for g in (a, b)], x, other)
    assert np.abs(kept[0] - kept[1]).max() > 1e-3
    wiped = {"decay": x["decay"].at[:, 5].set(-60.0)}
    gone = run(
        lambda a, b: [scans.delta_chunks(**g, chunk=4)[0] for g in (a, b)], x | wiped, other | wiped
    )
    np.testing.assert_array_equal(gone[0], gone[1])


# ---------------------------------------------------------------------------------- latent experts


@pytest.mark.parametrize("norm", [0, 1])
def test_latent_experts_by_hand(norm: int) -> None:
    """All experts computed for all tokens in their own width, weighed, normed, turned back."""
    body = MixtureOfExperts(6, 2, 12, shared=Mlp(20), latent=10, latent_norm=norm)
    layer = networks.Mixture(body, HIDDEN, Weights(nnx.Rngs(0), jnp.float32))
    x = jax.random.normal(jax.random.key(0), (10, HIDDEN))

    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        shares, chosen = layer.route(x)
        up = jnp.einsum("tm,emgf->tegf", x @ layer.into[...], layer.up[...])
        inner = jax.nn.silu(up[..., 0, :]) * up[..., 1, :]
        each = jnp.einsum("tef,efm->tem", inner, layer.down[...])
        weight = jnp.zeros((10, 6)).at[jnp.arange(10)[:, None], chosen].set(shares)
        mixed = jnp.einsum("te,tem->tm", weight, each)
        if norm:
            size = jnp.sqrt(jnp.mean(mixed**2, -1, keepdims=True) + 1e-6)
            mixed = mixed / size * layer.norm[...]
        return layer(x), mixed @ layer.out[...] + layer.shared(x)

    found, expected = run(both, x)
    np.testing.assert_allclose(found, expected, atol=1e-5)


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (Mamba2(4, 3, 6, 8, 4), "4 heads are no multiple of 3 key_heads"),
        (Mamba2(4, 2, 6, 8, 4, state_bytes_each=3), "must have 2 or 4 bytes, not 3"),
        (KimiDelta(4, 2, 6, 6, 4), "4 heads of Kimi delta attention need as many key_heads, not 2"),
        (GatedDelta(4, 2, 6, 8, 0), "kernel must be a whole number of at least 1, not 0"),
        (GroupedQueryAttention(4, 2, 8, gate_width=3), "gate_width must be 1 or 8, not 3"),
        (MixtureOfExperts(6, 2, 12, bias=1, latent=10), "none yet"),
    ],
)
def test_sizes_that_no_layer_has(body: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        networks.abstract(small(Block(1, body)))
