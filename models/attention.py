"""Multi-head, multi-query and grouped-query attention: operators, parameters and cache.

One kind covers all three: `kv_heads` equal to `heads`, one, or between. Weights: q, k, v fused
into one product (columns (H + 2K)·d), the output product back to the hidden width. A layer may
see all keys before a token, the last `window` of them, or those of its own chunk of `window`.
"""

from typing import Literal

import equinox as eqx

from perfmodel.formats import Precision
from perfmodel.operators import Attention, Collective, Matmul, Operators, Vector
from perfmodel.relax import Real, divide, floor, maximum, minimum
from perfmodel.step import Chunk, Shard, Step, causal_pairs

Span = Literal["full", "window", "chunk"]

Cached = Literal["own", "key", "earlier"]
"""Where keys and values come from: products of their own; one product for both, values being keys
before their rotation; the cache of an earlier layer, so that there are no products at all."""


def window_pairs(new: Real, cached: Real, window: Real) -> Real:
    """Returns the pairs of `new` queries after `cached` keys that see at most `window` keys.

    The first queries still see everything, a triangle; the others `window` keys each.

    >>> window_pairs(5, 2, 4)  # 3 + 4 + 4 + 4 + 4
    19
    """
    growing = minimum(maximum(window - cached, 0), new)
    return causal_pairs(growing, cached) + (new - growing) * window


def chunk_pairs(new: Real, cached: Real, chunk: Real) -> Real:
    """Returns the pairs of `new` queries after `cached` keys that see keys of their own chunk.

    >>> chunk_pairs(5, 2, 4)  # 3 + 4, then 1 + 2 + 3
    13
    """

    def before(tokens: Real) -> Real:
        whole = floor(divide(tokens, chunk))
        rest = tokens - whole * chunk
        return whole * divide(chunk * (chunk + 1), 2) + divide(rest * (rest + 1), 2)

    return before(cached + new) - before(cached)


class GroupedQueryAttention(eqx.Module):
    """Self-attention with `heads` query heads over `kv_heads` key-value heads of `head_dim`.

    Flags are numbers, 0 or 1, so that models that differ in them share one program:
    `qkv_bias`, `output_bias`, `qk_norm` (norms of query and key, with `qk_weights` elements),
    `sinks` (a learned logit per head that keys compete with). `span` is static; `window` is its
    number of keys. `v_width` is the width of a value where keys are wider or narrower, and
    `gate_width` the columns per head of a product whose sigmoid weighs the results (1 for one
    weight a head, the width of a value for one an element); None where there is no such thing.
    Static: `cached`, where keys and values come from, and `joined`, whether the result is added to
    that of the feed-forward layer beside it before ranks sum both in one.
    """

    heads: Real
    kv_heads: Real
    head_dim: Real
    qkv_bias: Real = 0
    output_bias: Real = 0
    qk_norm: Real = 0
    qk_weights: Real = 0
    sinks: Real = 0
    window: Real | None = None
    span: Span = eqx.field(static=True, default="full")
    v_width: Real | None = None
    gate_width: Real | None = None
    cached: Cached = eqx.field(static=True, default="own")
    joined: bool = eqx.field(static=True, default=False)

    @property
    def value_width(self) -> Real:
        """Width of a value and of a head's result."""
        return self.head_dim if self.v_width is None else self.v_width

    @property
    def query_columns(self) -> Real:
        """Columns per head of the product of queries, with those of its gate."""
        return self.head_dim if self.gate_width is None else self.head_dim + self.gate_width

    @property
    def kv_columns(self) -> Real:
        """Columns per kv head of the products of keys and values."""
        if self.cached == "earlier":
            return 0
        return self.head_dim if self.cached == "key" else self.head_dim + self.value_width

    @property
    def cache_width(self) -> Real:
        """Elements that a layer writes to the cache per token and kv head."""
        return 0 if self.cached == "earlier" else self.head_dim + self.value_width

    def matrices(self, hidden: Real) -> Real:
        """Returns the elements of the weight matrices."""
        queries = self.heads * (self.query_columns + self.value_width)
        return hidden * (queries + self.kv_heads * self.kv_columns)

    def vectors(self, hidden: Real) -> Real:
        """Returns the elements of biases, norms and sinks."""
        return self._vectors(hidden, self.heads, self.kv_heads)

    def _vectors(self, hidden: Real, heads: Real, kv_heads: Real) -> Real:
        qkv = heads * self.head_dim + kv_heads * self.kv_columns
        norms = self.qk_weights + self.sinks * heads
        return self.qkv_bias * qkv + self.output_bias * hidden + norms

    def weight_bytes(self, hidden: Real, precision: Precision, shard: Shard) -> Real:
        """Returns bytes of weights on one rank [B]; kv heads are replicated past their number."""
        heads, kv_heads = divide(self.heads, shard.attention_ranks), self._kv_heads(shard)
        columns = heads * self.query_columns + kv_heads * self.kv_columns
        elements = hidden * (columns + heads * self.value_width)
        scales = (columns + hidden) * precision.column_bytes
        vectors = self._vectors(hidden, heads, kv_heads)
        return elements * precision.weight_bytes + scales + 2 * vectors

    def _kv_heads(self, shard: Shard) -> Real:
        """Returns kv heads that one rank projects; context ranks project them as without."""
        ranks = shard.attention_ranks * shard.kv_shards
        return maximum(divide(self.kv_heads, ranks), 1) * shard.kv_shards

    def cache_bytes_per_token(self, precision: Precision, shard: Shard) -> Real:
        """Returns bytes of keys and values of one cached token that one rank holds [B]."""
        elements = shard.kv_heads(self.kv_heads) * self.cache_width
        return shard.keys(elements * precision.kv_bytes)

    def cached_tokens(self, tokens: Real) -> Real:
        """Returns how many of a sequence's tokens are kept in the cache."""
        return tokens if self.window is None else minimum(tokens, self.window)

    def activation_width(self, shard: Shard) -> Real:
        """Returns the widest intermediate result per token on one rank [elements]."""
        heads = divide(self.heads, shard.attention_ranks)
        return heads * self.query_columns + shard.kv_heads(self.kv_heads) * self.kv_columns

    def parts(self, shard: Shard) -> tuple[Real, ...]:
        """Returns the quotients that must be whole numbers for a plan to cut this layer."""
        ranks = shard.attention_ranks
        ratio = divide(self.kv_heads, ranks)
        whole = [divide(self.heads, ranks), maximum(ratio, divide(1, ratio))]
        if shard.attention_groups is not None:
            whole.append(ranks)
        if shard.context_ranks is not None:
            # The ranks left must still share out the kv heads, or hold copies of them.
            left = divide(self.kv_heads * shard.context_ranks, ranks)
            whole += [divide(ranks, shard.context_ranks), maximum(left, divide(1, left))]
        return tuple(whole)

    def decode_keys(self, context: Real) -> Real:
        """Returns the keys that a token with `context` keys before it, itself included, sees."""
        if self.window is None:
            return context
        if self.span == "window":
            return minimum(context, self.window)
        past = context - 1
        return past - floor(divide(past, self.window)) * self.window + 1

    def chunk_keys(self, chunk: Chunk) -> tuple[Real, Real]:
        """Returns (query, key) pairs and keys read of one prompt's part."""
        if self.window is None:
            return chunk.pairs, chunk.keys
        count = window_pairs if self.span == "window" else chunk_pairs
        pairs = count(chunk.new, chunk.cached, self.window) * chunk.share
        return pairs, minimum(chunk.keys, self.window + chunk.queries - 1)

    def operators(self, hidden: Real, step: Step, shard: Shard, precision: Precision) -> Operators:
        """Returns the operators of one layer on one rank."""
        group = f"{step.phase}/attention"
        ranks = shard.attention_ranks
        heads = divide(self.heads, ranks)
        kv_heads = shard.kv_heads(self.kv_heads)
        columns = heads * self.query_columns + self._kv_heads(shard) * self.kv_columns
        # Queries and keys are turned, keys and values written; a gate waits for the results.
        queries = heads * self.head_dim
        turned = queries + self._kv_heads(shard) * self.kv_columns
        written = queries + self._kv_heads(shard) * self.cache_width
        rows = step.rows
        context = self.decode_keys(step.context)
        # Spread keys are asked by the queries of all ranks that share them.
        asked = heads if shard.context_ranks is None else heads * shard.context_ranks
        ops: list = [
            Matmul(
                "qkv_projection", group, rows, columns, hidden,
                precision.weight_bytes, precision.activation_bytes, precision.kernel,
                precision.column_bytes,
            ),
            Vector(
                "rotary_and_cache_write", group, rows, turned, written, 6 * written,
                launches=1 + self.qk_norm,
            ),
            Attention(
                "decode_attention", group, "decode",
                sequences=step.sequences, queries=step.queries, keys=shard.keys(context),
                pairs=step.queries * shard.keys(context), heads=asked, kv_heads=kv_heads,
                qk_width=self.head_dim, v_width=self.value_width, kv_bytes=precision.kv_bytes,
                narrow=precision.narrow_attention,
            ),
        ]  # fmt: skip
        if step.chunk is not None:
            pairs, keys = self.chunk_keys(step.chunk)
            ops.append(
                Attention(
                    "chunk_attention", group, "prefill",
                    sequences=step.chunk.prompts, queries=step.chunk.queries,
                    keys=shard.keys(keys), pairs=shard.keys(pairs), heads=asked,
                    kv_heads=kv_heads, qk_width=self.head_dim, v_width=self.value_width,
                    kv_bytes=precision.kv_bytes, narrow=precision.narrow_attention,
                )
            )  # fmt: skip
        if shard.context_ranks is not None:
            # Queries to all ranks of a sequence; partial results, with their two running sums
            # per head, back to the ranks that own the heads.
            asking, answers = asked * self.head_dim, asked * self.value_width
            ops += [
                Collective(
                    "query_all_gather", group, "all_gather", rows, asking, shard.context_ranks
                ),
                Collective(
                    "partial_reduce_scatter", group, "reduce_scatter", rows, answers + 2 * asked,
                    shard.context_ranks,
                ),
            ]  # fmt: skip
        if self.gate_width is not None:
            # Read a result and its gate, write their product.
            results, gates = heads * self.value_width, heads * self.gate_width
            ops.append(Vector("output_gate", group, rows, results + gates, results, 5 * results))
        ops.append(
            Matmul(
                "output_projection", group, rows, hidden, heads * self.value_width,
                precision.weight_bytes, precision.activation_bytes, precision.kernel,
                precision.column_bytes,
            )
        )  # fmt: skip
        if not self.joined:
            ops.append(Collective("attention_all_reduce", group, "all_reduce", rows, hidden, ranks))
        elif shard.attention_groups is not None:
            # The ranks of a group are not those that sum the feed-forward layer.
            several = minimum(shard.attention_groups - 1, 1)
            ops.append(
                Collective(
                    "attention_all_reduce", group, "all_reduce", rows, hidden, ranks, count=several
                )
            )
        return tuple(ops)
