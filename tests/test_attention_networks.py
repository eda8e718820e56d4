"""Networks of the rarer kinds of layers, against themselves: cache, parts of prompts, and ranks."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from perfmodel.models import networks
from perfmodel.models.attention import GroupedQueryAttention
from perfmodel.models.block_sparse import BlockIndexer, BlockSparseAttention
from perfmodel.models.compressed import CompressedAttention
from perfmodel.models.mla import Indexer
from perfmodel.models.mlp import MixtureOfExperts, Mlp
from perfmodel.models.networks.parallel import AXIS
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


GQA = {"heads": 4, "kv_heads": 2, "head_dim": 8}
NEAR = {**GQA, "window": 5, "span": "window"}
BESIDE = GroupedQueryAttention(**GQA, qkv_bias=1, output_bias=1, joined=True)
BLOCKS = BlockSparseAttention(
    **GQA, qk_norm=1, qk_weights=16, index=BlockIndexer(2, 4, blocks=2, size=3)
)
COMPRESSED = {
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
