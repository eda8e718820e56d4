"""Operators against networks that run, through the public tracer: equal to the integer.

Everything here is a Python integer, counted outside any program. Products of operators that know
only a mean (rows of an expert) are floats, rounded in 64 bits.
"""

import dataclasses
import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh

import perfmodel
from perfmodel.formats import precision
from perfmodel.models import networks
from perfmodel.models.attention import GroupedQueryAttention
from perfmodel.models.block_sparse import BlockIndexer, BlockSparseAttention
from perfmodel.models.catalogue import load_model, names
from perfmodel.models.compressed import CompressedAttention
from perfmodel.models.delta import GatedDelta, KimiDelta
from perfmodel.models.mamba import Mamba2
from perfmodel.models.mla import Indexer, LatentAttention
from perfmodel.models.mlp import MixtureOfExperts, Mlp
from perfmodel.models.networks.parallel import AXIS
from perfmodel.models.streams import BlockResiduals, HyperConnections
from perfmodel.models.transformer import (
    Block,
    Model,
    head_operators,
    layer_operators,
    parameters,
    sequence_bytes,
    weight_bytes,
)
from perfmodel.operators import Attention, Collective, Matmul, Operators, Scan
from perfmodel.step import Chunk, Shard, Step, causal_pairs
from perfmodel.tracing import Traced

BF16 = precision("bf16")
PLACE = 4
"""Bytes of the number of cached tokens, an int32 beside the cache."""

# Products with a matrix per head or group: batched ones, with weights.
BATCHED = ("query_absorption", "value_expansion", "group_projection")


def small(*blocks: Block, **fields: Any) -> Model:
    return Model(
        **(
            {
                "hidden": 16, "vocabulary": 48, "tied": 0, "max_context": 64, "layers": 2,
                "blocks": blocks,
            }
            | fields
        )
    )  # fmt: skip


def traced_step(
    network: networks.Decoder, batch: int, tokens: int, context: int, ranks: int | None = None
) -> Traced:
    """Returns the trace of one step of `tokens` per sequence that ends at `context`."""
    graph, state = nnx.split(network)
    cache = jax.eval_shape(lambda: networks.empty_cache(network, batch, context, tokens))
    asked = jax.ShapeDtypeStruct((batch, tokens), jnp.int32)
    if ranks is not None:
        step = networks.tensor_parallel(network, AbstractMesh((ranks,), (AXIS,)))
        return perfmodel.trace(step, state, asked, cache)
    return perfmodel.trace(
        lambda state, tokens, cache: networks.prefill(nnx.merge(graph, state), tokens, cache),
        state, asked, cache,
    )  # fmt: skip


def listed(model: Model, step: Step, shard: Shard) -> Operators:
    return (
        *layer_operators(model, step, shard, BF16),
        *head_operators(model, step, shard, BF16),
    )


def dense(model: Model, op: Attention) -> Attention:
    """Returns attention with its mask off: every query against every key that is read.

    Of chosen keys, at most as many are read for a query as are chosen; of a window beside
    entries, its slots and the entries chosen. Scores of an indexer (without values) see all.
    """
    most = [op.keys]
    for block in model.attention if op.v_width else ():
        body = block.body
        if isinstance(body, BlockSparseAttention):
            most.append(body.index.blocks * body.index.size)
        elif isinstance(body, CompressedAttention) and body.index is not None:
            # Of a context no longer than the slots, entries are one in `ratio` + 1 of all keys.
            near = min(op.queries + body.window - 1, op.keys * body.ratio // (body.ratio + 1))
            most.append(near + body.index.top_k)
        elif isinstance(body, LatentAttention) and body.top_k is not None and op.latent:
            most.append(body.top_k)
    # An operator with more pairs than a choice leaves is of a layer without that choice.
    keys = min(keys for keys in most if op.queries * keys >= op.pairs)
    return dataclasses.replace(op, pairs=op.queries * keys)


def scan_products(op: Scan) -> int:
    """Returns FLOPs of a recurrence's products: none of a step, and of chunks all but the decay and
    sum of states and the delta rule's triangular inverse."""
    if op.phase == "decode":
        return 0
    length = min(op.chunk, op.tokens)
    chunks = op.sequences * op.heads * (op.tokens / length)
    rest = 3 * op.state * op.width + (length**3 / 3 if op.kind == "delta" else 0)
    return round(float(op.flops()) - chunks * rest)


def assert_products_agree(
    model: Model, traced: Traced, step: Step, shard: Shard, masked: bool
) -> None:
    """Checks FLOPs of products with weights, of attention and of experts; with `masked`, of the
    pairs that attention sees, else of all that a dense kernel multiplies."""
    flops: Counter[str] = Counter()
    with jax.enable_x64(True):
        for op in listed(model, step, shard):
            if isinstance(op, Attention):
                one = op if masked else dense(model, op)
                flops["batched_matmul"] += op.count * one.flops()
                assert op.count * op.flops() <= op.count * dense(model, op).flops()
            elif isinstance(op, Scan):
                flops["batched_matmul"] += round(op.count * scan_products(op))
            elif isinstance(op, Matmul) and op.experts:
                flops["ragged_dot"] += round(float(op.count * op.flops()))
            elif isinstance(op, Matmul):
                kind = "batched_matmul" if op.name in BATCHED else "matmul"
                flops[kind] += op.count * op.flops()
    found = Counter({name: traced.total("flops", name) for name in flops})
    assert all(isinstance(value, int) for value in (*flops.values(), *found.values()))
    assert found == flops
    assert traced.matmul_flops == flops.total()
    assert traced.unknown == () and traced.unbounded == ()


def assert_bytes_agree(model: Model, traced: Traced, batch: int, context: int, ranks: int) -> None:
    """Checks bytes of weights, of cache and states, of all ranks and of one; and parameters."""
    cache = batch * sequence_bytes(model, BF16, context, Shard())
    logits = 4 * batch * model.vocabulary
    assert traced.output_bytes == logits + cache + PLACE
    weights = traced.parameter_bytes - cache - PLACE
    # What mixes streams is in 32 bits.
    wide = model.streams if isinstance(model.streams, HyperConnections) else None
    more = 0 if wide is None else 2 * wide.parameters(model.hidden, model.sublayers)
    assert weights == weight_bytes(model, BF16) == 2 * parameters(model) + more
    shard = Shard(ranks)
    kept = sequence_bytes(model, BF16, context, shard)
    held = weight_bytes(model, BF16, shard) + batch * kept
    assert traced.rank_parameter_bytes == held + PLACE


def assert_collectives_agree(model: Model, traced: Traced, step: Step, shard: Shard) -> None:
    sides = []
    for ops in (traced.collectives, listed(model, step, shard)):
        sent: Counter[tuple[str, str]] = Counter()
        for op in ops:
            if isinstance(op, Collective) and op.ranks > 1:
                assert op.ranks == shard.ranks
                sent[op.kind, "bytes"] += op.count * op.wire_bytes()
                sent[op.kind, "calls"] += op.count
        sides.append(sent)
    assert sides[0] == sides[1]
    assert traced.collective_bytes == sum(n for (_, unit), n in sides[1].items() if unit == "bytes")


def assert_decoding_agrees(
    model: Model,
    order: tuple[int, ...] | None,
    batch: int,
    context: int,
    ranks: int | None = None,
) -> None:
    traced = traced_step(networks.abstract(model, order), batch, 1, context, ranks)
    step, shard = Step(sequences=batch, context=context), Shard(ranks or 1)
    assert traced.ranks == (ranks or 1)
    assert_products_agree(model, traced, step, shard, masked=True)
    assert_bytes_agree(model, traced, batch, context, ranks or 1)
    assert_collectives_agree(model, traced, step, shard)


def assert_prefill_agrees(
    model: Model,
    order: tuple[int, ...] | None,
    batch: int,
    tokens: int,
    cached: int = 0,
    ranks: int | None = None,
) -> None:
    context = cached + tokens
    traced = traced_step(networks.abstract(model, order), batch, tokens, context, ranks)
    chunk = Chunk(
        tokens * batch, causal_pairs(tokens, cached), context, ends=batch, prompts=batch,
        new=tokens, cached=cached,
    )  # fmt: skip
    step, shard = Step(sequences=0, context=1, chunk=chunk), Shard(ranks or 1)
    assert_products_agree(model, traced, step, shard, masked=False)
    assert_collectives_agree(model, traced, step, shard)


# -------------------------------------------------------------------------------------- many shapes

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
        "latent": st.sampled_from([None, "dense", "chosen"]),
        "rank": st.integers(1, 20),
        "q_rank": st.sampled_from([None, 1, 7]),
        "value": st.integers(1, 12),
        "top_k": st.integers(1, 30),
    }
)


def drawn_model(s: dict[str, Any], ranks: int = 1) -> Model:
    """Returns a network whose heads, widths and vocabulary `ranks` share out."""
    kv_heads, inner = ranks * s["kv_heads"], ranks * s["inner"]
    if s["latent"] is not None:
        index = None if s["latent"] == "dense" else Indexer(s["group"], 128, s["top_k"])
        latent = LatentAttention(
            kv_heads, s["q_rank"], s["rank"], s["group"], s["head_dim"], s["value"], index
        )
        blocks = [Block(s["layers"], latent)]
    else:
        body = {
            "heads": kv_heads * s["group"], "kv_heads": kv_heads,
            "head_dim": s["head_dim"], "qkv_bias": int(s["qkv_bias"]), "sinks": int(s["sinks"]),
        }  # fmt: skip
        blocks = [Block(s["layers"], GroupedQueryAttention(**body))]
        if s["near"]:
            near = GroupedQueryAttention(**body, window=s["window"], span=s["span"])
            blocks.append(Block(s["near"], near))
    blocks.append(Block(s["layers"], Mlp(inner, s["gates"], int(s["bias"]))))
    if s["sparse"]:
        top_k = (s["experts"] + 1) // 2
        shared = Mlp(inner) if s["bias"] else None
        mixture = MixtureOfExperts(
            s["experts"], top_k, inner, s["gates"], int(s["bias"]), int(s["sinks"]), shared,
            int(s["bias"]),
        )  # fmt: skip
        blocks.append(Block(s["sparse"], mixture))
    return small(*blocks, hidden=s["hidden"], tied=int(s["tied"]))


@given(
    s=sizes,
    batch=st.integers(1, 9),
    context=st.integers(1, 40),
    ranks=st.sampled_from([None, 1, 2, 3, 4]),
)
@settings(max_examples=14, deadline=None)
def test_decoding_is_what_the_operators_say(
    s: dict[str, Any], batch: int, context: int, ranks: int | None
) -> None:
    model = drawn_model(s, ranks or 1)
    if s["near"] and s["span"] == "chunk" and context > s["window"]:
        # A dense kernel multiplies all slots; they are the chunk where it has just been filled.
        context -= context % s["window"]
    assert_decoding_agrees(model, None, batch, context, ranks)


@given(
    s=sizes,
    batch=st.integers(1, 4),
    tokens=st.integers(2, 20),
    cached=st.integers(0, 20),
    ranks=st.sampled_from([None, 2]),
)
@settings(max_examples=8, deadline=None)
def test_prefill_is_what_the_operators_say_with_the_mask_off(
    s: dict[str, Any], batch: int, tokens: int, cached: int, ranks: int | None
) -> None:
    """A dense kernel multiplies a rectangle, queries × keys read, of which pairs are the part."""
    assert_prefill_agrees(drawn_model(s, ranks or 1), None, batch, tokens, cached, ranks)


hybrids = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["mamba", "delta", "kimi"]),
        "keys": st.integers(1, 3),
        "group": st.integers(1, 3),
        "state": st.integers(1, 9),
        "width": st.integers(1, 9),
        "kernel": st.integers(1, 5),
        "bias": st.booleans(),
        "state_bytes": st.sampled_from([2, 4]),
        "chunk": st.integers(1, 7),
        "rank": st.integers(1, 9),
        "gate": st.sampled_from([None, 1, 8]),
        "latent": st.integers(1, 20),
        "norm": st.booleans(),
        "shared": st.booleans(),
        "experts": st.integers(1, 9),
        "layers": st.integers(1, 3),
        "hidden": st.integers(1, 40),
    }
)


def hybrid_model(s: dict[str, Any], ranks: int = 1) -> Model:
    """Returns a network of recurrent and gated layers with experts of a width of their own."""
    keys = ranks * s["keys"]
    heads = keys if s["kind"] == "kimi" else keys * s["group"]
    sizes = (heads, keys, s["state"], s["width"], s["kernel"])
    rest = {"state_bytes_each": s["state_bytes"], "chunk": s["chunk"]}
    mixer: Mamba2 | GatedDelta | KimiDelta = {
        "mamba": lambda: Mamba2(*sizes, conv_bias=int(s["bias"]), **rest),
        "delta": lambda: GatedDelta(*sizes, **rest),
        "kimi": lambda: KimiDelta(*sizes, decay_rank=s["rank"], **rest),
    }[s["kind"]]()
    attention = (
        LatentAttention(keys, None, s["rank"], s["state"], 4, s["width"], gated=s["bias"])
        if s["kind"] == "kimi"
        else GroupedQueryAttention(heads, keys, 8, gate_width=s["gate"])
    )
    mixture = MixtureOfExperts(
        s["experts"], (s["experts"] + 1) // 2, ranks * s["rank"], 1 + int(s["bias"]),
        shared=Mlp(ranks * s["width"], 1) if s["shared"] else None,
        latent=s["latent"], latent_norm=int(s["norm"]),
    )  # fmt: skip
    blocks = (Block(s["layers"], mixer), Block(1, attention), Block(s["layers"], mixture))
    return small(*blocks, hidden=s["hidden"])


@given(
    s=hybrids, batch=st.integers(1, 9), context=st.integers(1, 40),
    ranks=st.sampled_from([None, 1, 2, 3, 4]),
)  # fmt: skip
@settings(max_examples=12, deadline=None)
def test_decoding_with_states_is_what_the_operators_say(
    s: dict[str, Any], batch: int, context: int, ranks: int | None
) -> None:
    assert_decoding_agrees(hybrid_model(s, ranks or 1), None, batch, context, ranks)


@given(
    s=hybrids, batch=st.integers(1, 4), chunks=st.integers(1, 3), short=st.integers(0, 5),
    cached=st.integers(0, 20), ranks=st.sampled_from([None, 2]),
)  # fmt: skip
@settings(max_examples=8, deadline=None)
def test_prefill_into_states_is_what_the_operators_say(
    s: dict[str, Any], batch: int, chunks: int, short: int, cached: int, ranks: int | None
) -> None:
    """Whole chunks of the recurrence, or a part of one; a last, partial one is run as whole."""
    tokens = max(2, s["chunk"] - short) if chunks == 1 else chunks * s["chunk"]
    s = s | {"chunk": max(2, s["chunk"])} if chunks == 1 else s
    assert_prefill_agrees(hybrid_model(s, ranks or 1), None, batch, tokens, cached, ranks)


# ------------------------------------------------------------------------------- the rarer kinds

RARER = (
    "values are keys", "earlier caches", "side by side", "best blocks", "window of vectors",
    "sparse entries", "all entries",
)  # fmt: skip
rarer_sizes = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(RARER),
        "kv_heads": st.integers(1, 3),
        "group": st.integers(1, 4),
        "head_dim": st.sampled_from([2, 8, 10]),
        "window": st.integers(1, 12),
        "hidden": st.integers(1, 40),
        "inner": st.integers(1, 50),
        "flag": st.booleans(),
        "layers": st.integers(1, 3),
        "rank": st.integers(1, 20),
        "top_k": st.integers(1, 5),
        "ratio": st.integers(1, 4),
        "residual": st.sampled_from([None, HyperConnections(2), BlockResiduals(1)]),
    }
)


def rarer_model(s: dict[str, Any], ranks: int = 1) -> Model:
    """Returns a network of one of the rarer kinds, which `ranks` share out."""
    kind, flag, width = s["kind"], int(s["flag"]), s["head_dim"]
    kv_heads, inner, layers = ranks * s["kv_heads"], ranks * s["inner"], s["layers"]
    body = {"heads": kv_heads * s["group"], "kv_heads": kv_heads, "head_dim": width}
    normed = {"qk_norm": 1, "qk_weights": 2 * width}
    feed_forward: tuple[Block, ...] = (Block(layers, Mlp(inner, 2, flag)),)
    fields: dict[str, Any] = {"streams": s["residual"]}
    if kind == "values are keys":
        experts = MixtureOfExperts(
            4, 2, inner, router_bias=flag, shared=Mlp(ranks * s["rank"]), normed_apart=True
        )
        mixers = (Block(layers, GroupedQueryAttention(**body, **normed, cached="key")),)
        feed_forward = (Block(layers, experts),)
        fields |= {"norms": 2, "extra_norms": 4 * layers + flag}
    elif kind == "earlier caches":
        near = {"window": s["window"], "span": "window", "v_width": s["rank"]}
        borrowed = {"cached": "earlier", "qk_norm": 1, "qk_weights": width}
        mixers = (
            Block(1, GroupedQueryAttention(**body, **near, qkv_bias=flag)),
            Block(layers, GroupedQueryAttention(**body, **near, **borrowed, qkv_bias=flag)),
        )
        feed_forward = (Block(layers + 1, Mlp(inner, 2, flag)),)
    elif kind == "side by side":
        beside = GroupedQueryAttention(**body, qkv_bias=flag, output_bias=flag, joined=True)
        mixers = (Block(layers, beside),)
        fields = {"norm_vectors": 2, "extra_norms": -layers * flag}
    elif kind == "best blocks":
        index = BlockIndexer(kv_heads, 6, s["top_k"], s["ratio"])
        mixers = (Block(layers, BlockSparseAttention(**body, **normed, index=index)),)
    else:
        index = Indexer(s["group"], width + 2, s["top_k"]) if kind == "sparse entries" else None
        ratio = None if kind == "window of vectors" else s["ratio"]
        compressed = CompressedAttention(
            kv_heads * s["group"], width, 2, s["rank"], kv_heads, s["top_k"], s["window"], ratio,
            index,
        )  # fmt: skip
        mixers = (Block(layers, compressed),)
    return small(*mixers, *feed_forward, hidden=s["hidden"], tied=flag, **fields)


def rarer_order(model: Model) -> tuple[int, ...]:
    """Returns the sublayers in order, attention and feed-forward layers in turn."""
    mixers = [i for i, b in enumerate(model.blocks[:-1]) for _ in range(b.count)]
    return tuple(i for mixer in mixers for i in (mixer, len(model.blocks) - 1))


@given(
    s=rarer_sizes,
    batch=st.integers(1, 9),
    groups=st.integers(1, 9),
    ranks=st.sampled_from([None, 1, 2, 3, 4]),
)
@settings(max_examples=14, deadline=None)
def test_decoding_of_rarer_kinds_is_what_the_operators_say(
    s: dict[str, Any], batch: int, groups: int, ranks: int | None
) -> None:
    model = rarer_model(s, ranks or 1)
    # Whole blocks and entries: a dense kernel multiplies all of the last block.
    assert_decoding_agrees(model, rarer_order(model), batch, groups * s["ratio"], ranks)


@given(
    s=rarer_sizes,
    batch=st.integers(1, 4),
    new=st.integers(1, 6),
    cached=st.integers(0, 6),
    ranks=st.sampled_from([None, 2]),
)
@settings(max_examples=8, deadline=None)
def test_prefill_of_rarer_kinds_is_what_the_operators_say(
    s: dict[str, Any], batch: int, new: int, cached: int, ranks: int | None
) -> None:
    model = rarer_model(s, ranks or 1)
    # Up to a whole block or entry.
    tokens, before = new * s["ratio"] + 1, cached * s["ratio"] + s["ratio"] - 1
    assert_prefill_agrees(model, rarer_order(model), batch, tokens, before, ranks)


@given(new=st.integers(1, 30), cached=st.integers(0, 30), top_k=st.integers(1, 40))
@settings(deadline=None)
def test_pairs_of_chosen_keys_equal_a_mask(new: int, cached: int, top_k: int) -> None:
    body = LatentAttention(4, None, 8, 6, 4, 5, index=Indexer(2, 128, top_k))
    chunk = Chunk(new, causal_pairs(new, cached), cached + new, new=new, cached=cached)
    # The best are as many as there are; which they are changes no count.
    seen = [min(sum(key <= query for key in range(cached + new)), top_k)
            for query in range(cached, cached + new)]  # fmt: skip
    assert body.chunk_pairs(chunk) == sum(seen)


def test_balanced_experts_are_the_groups_of_the_trace() -> None:
    """8 tokens with 3 of 6 experts each, evenly: 4 rows an expert, all six read."""
    model = small(Block(1, GroupedQueryAttention(4, 2, 8)), Block(1, MixtureOfExperts(6, 3, 12)))
    traced = traced_step(networks.abstract(model), 8, 1, 4)
    up, down = (op for op in traced.operators if op.name == "ragged_dot")
    assert isinstance(up, Matmul) and isinstance(down, Matmul)
    assert (up.groups, up.rows, up.columns, up.inner) == (6, 4, 2 * 12, 16)
    assert (down.groups, down.rows, down.columns, down.inner) == (6, 4, 16, 12)
    assert up.weight_traffic() + down.weight_traffic() == 2 * 6 * 3 * 16 * 12


# ------------------------------------------------------------------------------------ XLA's counts

WIDE = dict(hidden=128, vocabulary=512)
XLA = {
    "dense": small(Block(1, GroupedQueryAttention(8, 4, 16)), Block(1, Mlp(256)), **WIDE),
    "latent": small(Block(1, LatentAttention(8, 48, 64, 16, 8, 16)), Block(1, Mlp(256)), **WIDE),
    "mixture": small(
        Block(1, GroupedQueryAttention(8, 4, 16)), Block(1, MixtureOfExperts(4, 2, 64)), **WIDE
    ),
}


@pytest.mark.parametrize("kind", XLA)
def test_xla_counts_the_same_work(kind: str) -> None:
    """XLA's own analysis of the compiled program, on CPUs.

    Differences: a grouped product is compiled as one with every expert for every row, so that it
    has as many times the work as there are experts; roots, exponentials and angles are listed
    apart; what element-wise kernels compute twice after fusion, masks and indices count there and
    not here, and so do the masks of grouped products. Element-wise work is within three times
    ours, 1 to 4 % of the products.
    """
    model, batch, context = XLA[kind], 4, 32
    network = networks.abstract(model, dtype=jnp.float32)
    traced = traced_step(network, batch, 1, context)
    graph, state = nnx.split(network)
    cache = jax.eval_shape(lambda: networks.empty_cache(network, batch, context, 1))
    step = jax.jit(lambda s, t, c: networks.prefill(nnx.merge(graph, s), t, c))
    tokens = jax.ShapeDtypeStruct((batch, 1), jnp.int32)
    analysis = step.lower(state, tokens, cache).compile().cost_analysis()
    experts = 4 if kind == "mixture" else 1
    products = traced.matmul_flops + (experts - 1) * traced.total("flops", "ragged_dot")
    rest = analysis["flops"] - products
    assert 0 < rest <= 3 * (traced.flops - traced.matmul_flops)
    assert rest <= 0.04 * products
    # Arguments and results are moved at least once.
    assert analysis["bytes accessed"] >= traced.parameter_bytes


# --------------------------------------------------------------------------------- published sizes


@pytest.mark.parametrize("name", names())
def test_published_networks_have_the_counted_weights(name: str) -> None:
    entry = load_model(name)
    network = networks.abstract(entry.model, entry.order)
    leaves = jax.tree.leaves(nnx.state(network, nnx.Param))
    assert sum(math.prod(leaf.shape) for leaf in leaves) == parameters(entry.model)
    # A cache short of any window, and one far past all; of whole entries.
    for tokens in (128, 70_144):
        cache = jax.eval_shape(lambda n=tokens: networks.empty_cache(network, 1, n))
        held = [leaf for leaf in jax.tree.leaves(cache) if leaf.ndim]
        stored = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in held)
        assert stored == sequence_bytes(entry.model, BF16, tokens, Shard())


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("gemma-3-27b", None), ("gpt-oss-20b", 4), ("llama-4-scout", None), ("opt-175b", 8),
        ("llama-3.1-8b", 8), ("glm-4.5-air", None), ("deepseek-v3", 8), ("deepseek-v3.2", 4),
        ("falcon-180b", 8), ("palm-540b", None), ("gemma-4-26b-a4b", 2), ("minimax-m3", 4),
        ("deepseek-v4-flash", 8), ("glm-5.2", 8), ("nemotron-h-56b", 8),
        ("nemotron-3-super-120b-a12b", 2), ("qwen3-next-80b-a3b", 2), ("qwen3.5-397b-a17b", None),
        ("kimi-k3", 8),
    ],
)  # fmt: skip
def test_published_networks_decode_what_the_operators_say(name: str, ranks: int | None) -> None:
    entry = load_model(name)
    # A multiple of Llama 4's chunks.
    assert_decoding_agrees(entry.model, entry.order, 64, 16_384, ranks)


@pytest.mark.parametrize(
    ("name", "tokens"), [("nemotron-3-nano-30b-a3b", 256), ("qwen3.5-27b", 128)]
)
def test_published_hybrids_prefill_what_the_operators_say(name: str, tokens: int) -> None:
    """Two chunks of their recurrence each."""
    entry = load_model(name)
    assert_prefill_agrees(entry.model, entry.order, 4, tokens)


def test_layers_of_kimi_k3_are_what_the_operators_say() -> None:
    """Its recurrent layers, gated latent attention and latent experts, one residual stream."""
    entry = load_model("kimi-k3")
    model = dataclasses.replace(entry.model, streams=None, extra_norms=0)
    assert_decoding_agrees(model, entry.order, 64, 16_384, 8)


def test_collectives_of_llama_by_hand() -> None:
    entry = load_model("llama-3.1-8b")
    traced = traced_step(networks.abstract(entry.model, entry.order), 16, 1, 4096, 8)
    sums = [op for op in traced.collectives if op.kind == "all_reduce"]
    # 32 times attention and feed-forward, and the embedding, 16 × 4096 × 2 bytes each.
    assert sum(op.count * op.wire_bytes() for op in sums) == 65 * 16 * 4096 * 2
