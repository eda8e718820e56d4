"""Networks of the rarer kinds of layers, against themselves: cache, parts of prompts, and ranks."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from perfmodel.errors import InputError
from perfmodel.models import networks
from perfmodel.models.attention import GroupedQueryAttention
from perfmodel.models.block_sparse import BlockIndexer, BlockSparseAttention
from perfmodel.models.compressed import CompressedAttention
from perfmodel.models.mla import Indexer, LatentAttention
from perfmodel.models.mlp import MixtureOfExperts, Mlp
from perfmodel.models.networks.compressed import Compressor
from perfmodel.models.networks.parallel import AXIS
from perfmodel.models.networks.residuals import StreamMixing
from perfmodel.models.networks.weights import Weights
from perfmodel.models.streams import BlockResiduals, HyperConnections
from perfmodel.models.transformer import Block, Model, parameters

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


GQA: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 8}
NEAR: dict[str, Any] = {**GQA, "window": 5, "span": "window"}
BESIDE = GroupedQueryAttention(**GQA, qkv_bias=1, output_bias=1, joined=True)
BLOCKS = BlockSparseAttention(
    **GQA, qk_norm=1, qk_weights=16, index=BlockIndexer(2, 4, blocks=2, size=3)
)
COMPRESSED: dict[str, Any] = {
    "heads": 4, "width": 8, "rope_width": 4, "q_rank": 6, "groups": 2, "o_rank": 5, "window": 4,
}  # fmt: skip
SPARSE = CompressedAttention(**COMPRESSED, ratio=2, index=Indexer(3, 6, 2))

# A network and the order of its sublayers; None where they are spread evenly.
KINDS: dict[str, tuple[Model, tuple[int, ...] | None]] = {
    "values are keys, norms within mixtures": (
        small(
            Block(1, GroupedQueryAttention(4, 1, 10, qk_norm=1, qk_weights=20, cached="key")),
            Block(1, GroupedQueryAttention(**NEAR, qk_norm=1, qk_weights=16)),
            Block(2, MixtureOfExperts(6, 3, 12, router_bias=1, shared=Mlp(20), normed_apart=True)),
            norms=2, extra_norms=8,
        ),
        None,
    ),
    "caches of earlier layers": (
        small(
            Block(1, GroupedQueryAttention(**GQA, qk_norm=1, qk_weights=16, cached="key")),
            Block(1, GroupedQueryAttention(**GQA, qk_norm=1, qk_weights=8, cached="earlier")),
            Block(1, GroupedQueryAttention(**NEAR, qkv_bias=1, v_width=6)),
            Block(1, GroupedQueryAttention(**NEAR, qkv_bias=1, v_width=6, cached="earlier")),
            Block(4, SWIGLU),
        ),
        (0, 4, 2, 4, 3, 4, 1, 4),
    ),
    "side by side, one norm for both": (
        small(Block(2, BESIDE), Block(2, Mlp(24, 1, 1)), norm_vectors=2, extra_norms=-1), None
    ),
    "side by side, two norms": (
        small(Block(1, BESIDE), Block(1, Mlp(24, 1, 1)), norm_vectors=2), None
    ),
    "best blocks of keys": (
        small(Block(1, GroupedQueryAttention(**GQA)), Block(1, BLOCKS), Block(2, SWIGLU)), None
    ),
    "compressed keys, several streams": (
        small(
            Block(1, CompressedAttention(**COMPRESSED)),
            Block(1, SPARSE),
            Block(1, CompressedAttention(**COMPRESSED, ratio=3)),
            Block(1, SWIGLU),
            streams=HyperConnections(3),
        ),
        None,
    ),
    "chosen keys of an earlier layer": (
        small(
            Block(1, LatentAttention(4, 6, 8, 6, 4, 5, index=Indexer(2, 128, 4))),
            Block(2, LatentAttention(4, 6, 8, 6, 4, 5, chosen=4)),
            Block(1, SWIGLU),
        ),
        (0, 1, 2, 1),
    ),
    "sums of blocks": (
        small(Block(3, GroupedQueryAttention(**GQA)), Block(3, SWIGLU), streams=BlockResiduals(2)),
        None,
    ),
}  # fmt: skip


def compiled(function):
    """Returns a function compiled without care: these run a few times, compiling is what costs."""
    fast = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(function, compiler_options=fast)


def split_state(state: nnx.State, ranks: int) -> tuple[nnx.State, nnx.State]:
    """Returns the state with the ranks' parts stacked, and which leaves are."""

    def axis_of(variable: nnx.Variable) -> int | None:
        return None if variable.get_metadata()["split"] is None else 0

    def cut(variable: nnx.Variable) -> nnx.Variable:
        split = variable.get_metadata()["split"]
        if split is None:
            return variable
        return variable.replace(jnp.stack(jnp.split(variable[...], ranks, split)))

    def is_variable(leaf: Any) -> bool:
        return isinstance(leaf, nnx.Variable)

    return (
        jax.tree.map(cut, state, is_leaf=is_variable),
        jax.tree.map(axis_of, state, is_leaf=is_variable),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_cache_parts_and_ranks_change_nothing(kind: str) -> None:
    """16 tokens at once, in parts of 5 and one by one, and on two ranks: the same logits."""
    model, order = KINDS[kind]
    network = networks.build(model, nnx.Rngs(0), order)
    leaves = jax.tree.leaves(nnx.state(network, nnx.Param))
    assert sum(math.prod(leaf.shape) for leaf in leaves) == parameters(model)
    graph, state = nnx.split(network)
    batch, length, part = 2, 16, 5
    tokens = np.random.default_rng(1).integers(0, 50, (batch, length), np.int32)
    full = compiled(lambda s, t: nnx.merge(graph, s)(t))(state, tokens)
    assert float(np.std(full)) > 0.1

    step = compiled(lambda s, t, c: networks.prefill(nnx.merge(graph, s), t, c))
    cache = networks.empty_cache(network, batch, length, part=part)
    for end in (5, 10, *range(11, length + 1)):
        new = part if end <= 10 else 1
        logits, cache = step(state, tokens[:, end - new : end], cache)
        np.testing.assert_allclose(logits, full[:, end - 1], atol=1e-4)
    assert cache.tokens == length

    if any(getattr(block.body, "kv_heads", 2) % 2 for block in model.attention):
        return
    parts, axes = split_state(state, 2)
    ranks = jax.vmap(lambda part, t: nnx.merge(graph, part)(t, AXIS), (axes, None), axis_name=AXIS)
    both = compiled(ranks)(parts, tokens)
    np.testing.assert_allclose(both[0], full, atol=1e-4)
    np.testing.assert_allclose(both[1], full, atol=1e-4)


# ------------------------------------------------------------------------------------------ by hand


def test_entries_by_hand() -> None:
    """Eleven tokens in groups of four, two series: entry 1 weighs tokens 0 to 7, entry 0 half."""
    width, ratio, rope = 6, 4, 2
    layer = Compressor(width, ratio, 2, rope, 16, Weights(nnx.Rngs(0), jnp.float32))
    x = np.random.default_rng(1).standard_normal((2, 11, 16)).astype(np.float32)
    found = compiled(lambda x: layer(x, jnp.asarray(0), layer.empty(2, 11)).entries)(x)
    assert found.shape == (2, 2, width)
    value, weight, place = (
        np.asarray(p[...], np.float64) for p in (layer.value, layer.weight, layer.by_place)
    )
    for entry in range(2):
        # Of the group before, the first columns; of its own, the last.
        tokens = [(t, 0) for t in range(4 * entry - 4, 4 * entry)] if entry else []
        tokens += [(t, width) for t in range(4 * entry, 4 * entry + 4)]
        values = np.stack([(x[:, t] @ value)[:, c : c + width] for t, c in tokens], 1)
        logits = np.stack(
            [(x[:, t] @ weight + place[t % ratio])[:, c : c + width] for t, c in tokens], 1
        )
        shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        made = (shares * values).sum(1)
        made = made / np.sqrt((made**2).mean(-1, keepdims=True) + 1e-6) * layer.norm[...]
        # Two rotary elements are one pair, turned by the place of the group's first token.
        left, right, angle = made[:, 4], made[:, 5], 4 * entry
        made = np.concatenate(
            [
                made[:, :4],
                (left * np.cos(angle) - right * np.sin(angle))[:, None],
                (right * np.cos(angle) + left * np.sin(angle))[:, None],
            ],
            -1,
        )
        np.testing.assert_allclose(found[:, entry], made, atol=1e-5)


def test_all_blocks_chosen_are_plain_attention() -> None:
    """Ten tokens in blocks of three: four blocks are all of them, two are less from the seventh."""
    plain = GroupedQueryAttention(**GQA)
    layers = [
        networks.BlockSelfAttention(
            BlockSparseAttention(**GQA, index=BlockIndexer(2, 4, blocks=blocks, size=3)),
            16, True, Weights(nnx.Rngs(0), jnp.float32),
        )
        for blocks in (4, 2)
    ]  # fmt: skip
    same = networks.SelfAttention(plain, 16, True, Weights(nnx.Rngs(0), jnp.float32))
    x, start = jax.random.normal(jax.random.key(0), (2, 10, 16)), jnp.asarray(0)
    full, every, few = compiled(lambda x: [layer(x, start)[0] for layer in (same, *layers)])(x)
    np.testing.assert_allclose(every, full, atol=1e-5)
    np.testing.assert_allclose(few[:, :6], full[:, :6], atol=1e-5)
    assert np.abs(few[:, 6:] - full[:, 6:]).max() > 1e-2


def test_streams_are_mixed_and_kept() -> None:
    """Weights between streams have rows and columns of sum 1, so that their total is kept."""
    mixing = StreamMixing(HyperConnections(3), 8, Weights(nnx.Rngs(0), jnp.float32))
    streams = jax.random.normal(jax.random.key(0), (2, 5, 3, 8))

    def around(streams):
        read, (after, between) = mixing.read(streams)
        y = jnp.ones_like(read)
        return read, after, between, mixing.write(streams, y, (after, between))

    read, after, between, written = compiled(around)(streams)
    assert np.std(read) > 0.1 and (np.asarray(between) > 0).all()
    np.testing.assert_allclose(np.sum(between, -1), 1, atol=1e-4)
    np.testing.assert_allclose(np.sum(between, -2), 1, atol=1e-3)
    total = np.sum(streams, 2) + np.sum(after, -1)[..., None]
    np.testing.assert_allclose(np.sum(written, 2), total, atol=1e-2)


# -------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (small(Block(1, BESIDE)), "nothing follows attention"),
        (small(Block(1, BESIDE), Block(1, MixtureOfExperts(4, 2, 8))), "by side with mixtures"),
        (small(Block(1, BESIDE), Block(1, SWIGLU), streams=HyperConnections(2)), "several streams"),
        (small(Block(1, GroupedQueryAttention(**GQA, cached="earlier"))), "no earlier layer of"),
        (small(Block(1, LatentAttention(4, 6, 8, 6, 4, 5, chosen=4))), "has an indexer"),
        (small(Block(1, GroupedQueryAttention(**GQA)), extra_norms=3), "3 norms beyond"),
        (small(Block(1, MixtureOfExperts(4, 2, 8, normed_apart=True)), extra_norms=4), "without a"),
        (
            small(Block(1, BlockSparseAttention(**GQA, index=BlockIndexer(1, 4, 2, 3)))),
            "1 index heads on 2 kv heads",
        ),
        (
            small(Block(1, CompressedAttention(**{**COMPRESSED, "groups": 3}))),
            "must be a multiple of 3 groups",
        ),
    ],
)  # fmt: skip
def test_sizes_that_no_network_has(model: Model, message: str) -> None:
    with pytest.raises(InputError, match=message):
        networks.abstract(model, tuple(range(len(model.blocks))))
