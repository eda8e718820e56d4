"""Multi-head latent attention, and its sparse form: operators, parameters and cache.

Keys and values of all heads come from one latent vector per token, which is what is cached, once,
beside one rotary key (DeepSeek-V2, arXiv 2405.04434, section 2.1). A decoding token multiplies its
queries into the latent space instead of expanding the cache (the absorbed form): one kv head of
`kv_rank` + `rope_width`, whose first `kv_rank` elements are the values too. Prompts expand latents
to keys and values per head and attend as usual.

Sparse attention (DeepSeek-V3.2) scores all earlier tokens with a small indexer and attends to the
`top_k` best, in the absorbed form for prompts as well, as its kernels do.
"""

from typing import Any

import equinox as eqx

from perfmodel.formats import Precision
from perfmodel.models.attention import window_pairs
from perfmodel.operators import Attention, Collective, Matmul, Operators, Vector
from perfmodel.relax import Real, divide, minimum
from perfmodel.step import Chunk, Shard, Step

INDEX_SCALE_BYTES = 4
"""Bytes beside an 8-bit index key: one fp32 scale per block of 128. Source: inference code of
DeepSeek-V3.2-Exp (class Indexer: `k_cache`, fp8, and `k_scale_cache`, fp32), whatever the format of
the rest of the cache."""


class Indexer(eqx.Module):
    """Scores of earlier tokens: `heads` of `width` against one key a token; `top_k` are kept.

    A layer norm with weight and bias is on the key. Its weights are on every rank, and every rank
    scores with all heads, as the public engines do: the choice must be the same on all.
    """

    heads: Real
    width: Real
    top_k: Real

    def matrices(self, hidden: Real, inner: Real) -> Real:
        """Returns the elements of the products: key, weights of heads, and query (`inner` in)."""
        return hidden * (self.width + self.heads) + inner * self.heads * self.width

    def vectors(self) -> Real:
        """Returns the elements of the key's norm."""
        return 2 * self.width

    def key_bytes(self) -> Real:
        """Returns bytes that the cache holds of one token [B], for blocks of 128 elements."""
        return self.width + INDEX_SCALE_BYTES * divide(self.width, 128)


class LatentAttention(eqx.Module):
    """Self-attention of `heads` over one cached latent vector of `kv_rank` a token.

    Each head has a query and key of `nope_width` elements without position and `rope_width` with,
    the latter shared by all heads of a key, and a value of `v_width`. `q_rank` is the width of the
    queries' own latent vector, None where they come straight from the hidden state; `index` the
    indexer of sparse attention, None where every token sees all before it. `chosen` is the number
    of keys taken over from the choice of an earlier layer (GLM-5.2's "shared" layers, which have
    neither indexer nor index keys: transformers, class GlmMoeDsaAttention), else None. `gated`
    is static: a gate per element of the result, made of the hidden state (Kimi K3).

    Products into latent space are on every rank, the others are cut by heads. The cache cannot be
    cut by heads: every rank of an attention group holds it whole, or its share of the tokens where
    context ranks spread them.
    """

    heads: Real
    q_rank: Real | None
    kv_rank: Real
    nope_width: Real
    rope_width: Real
    v_width: Real
    index: Indexer | None = None
    chosen: Real | None = None
    gated: bool = eqx.field(static=True, default=False, kw_only=True)

    @property
    def top_k(self) -> Real | None:
        """Most keys that a token sees; None where it sees all."""
        return self.chosen if self.index is None else self.index.top_k

    @property
    def cache_width(self) -> Real:
        """Elements cached per token: the latent vector and the rotary key."""
        return self.kv_rank + self.rope_width

    @property
    def qk_width(self) -> Real:
        """Width of a head's query and key before absorption."""
        return self.nope_width + self.rope_width

    def _down(self) -> Real:
        """Returns the columns of the products into latent space."""
        return self.cache_width + (0 if self.q_rank is None else self.q_rank)

    def _query_inner(self, hidden: Real) -> Real:
        return hidden if self.q_rank is None else self.q_rank

    def _per_head(self, hidden: Real) -> Real:
        """Returns the elements of one head's matrices: out of latent space, and of the output."""
        queries = self._query_inner(hidden) * self.qk_width
        results = (1 + self.gated) * self.v_width * hidden
        return queries + self.kv_rank * (self.nope_width + self.v_width) + results

    def matrices(self, hidden: Real) -> Real:
        """Returns the elements of the weight matrices."""
        count = hidden * self._down() + self.heads * self._per_head(hidden)
        if self.index is None:
            return count
        return count + self.index.matrices(hidden, self._query_inner(hidden))

    def vectors(self, hidden: Real) -> Real:
        """Returns the elements of the norms of both latent vectors, and of the indexer."""
        count = self.kv_rank + (0 if self.q_rank is None else self.q_rank)
        return count if self.index is None else count + self.index.vectors()

    def weight_bytes(self, hidden: Real, precision: Precision, shard: Shard) -> Real:
        """Returns bytes of weights on one rank [B]."""
        heads = divide(self.heads, shard.attention_ranks)
        elements = hidden * self._down() + heads * self._per_head(hidden)
        values = (1 + self.gated) * self.v_width
        columns = self._down() + hidden + heads * (self.qk_width + self.nope_width + values)
        if self.index is not None:
            index = self.index
            elements = elements + index.matrices(hidden, self._query_inner(hidden))
            columns = columns + index.width + index.heads * (index.width + 1)
        scales = columns * precision.column_bytes
        return elements * precision.weight_bytes + scales + 2 * self.vectors(hidden)

    def cache_bytes_per_token(self, precision: Precision, shard: Shard) -> Real:
        """Returns bytes of one cached token that one rank holds [B].

        DeepSeek-V3 in bf16: (512 + 64) · 2 B = 1,152 B a layer, on any number of ranks.
        """
        latent = self.cache_width * precision.kv_bytes
        held = latent if self.index is None else latent + self.index.key_bytes()
        return shard.keys(held * shard.kv_shards)

    def cached_tokens(self, tokens: Real) -> Real:
        """Returns how many of a sequence's tokens are kept in the cache: all."""
        return tokens

    def activation_width(self, shard: Shard) -> Real:
        """Returns the widest intermediate result per token on one rank [elements]."""
        heads = divide(self.heads, shard.attention_ranks)
        # Queries and results in latent space are wider than keys and values per head.
        return heads * (self.cache_width + self.kv_rank)

    def parts(self, shard: Shard) -> tuple[Real, ...]:
        """Returns the quotients that must be whole numbers for a plan to cut this layer."""
        ranks = shard.attention_ranks
        whole = [divide(self.heads, ranks)]
        if shard.attention_groups is not None:
            whole.append(ranks)
        if shard.context_ranks is not None:
            whole.append(divide(ranks, shard.context_ranks))
        return tuple(whole)

    def _seen(self, keys: Real) -> Real:
        return keys if self.top_k is None else minimum(keys, self.top_k)

    def chunk_pairs(self, chunk: Chunk) -> Real:
        """Returns the (query, key) pairs of one prompt's part."""
        if self.top_k is None:
            return chunk.pairs
        # As many keys of each query as a window of that length, only elsewhere.
        return window_pairs(chunk.new, chunk.cached, self.top_k) * chunk.share

    def operators(self, hidden: Real, step: Step, shard: Shard, precision: Precision) -> Operators:
        """Returns the operators of one layer on one rank."""
        group = f"{step.phase}/attention"
        ranks = shard.attention_ranks
        heads = divide(self.heads, ranks)
        rows, chunk = step.rows, step.chunk
        weights = (
            precision.weight_bytes, precision.activation_bytes, precision.kernel,
            precision.column_bytes,
        )  # fmt: skip
        normed = self._down() - self.rope_width
        turned = heads * self.rope_width
        ops: list = [
            Matmul("latent_projection", group, rows, self._down(), hidden, *weights),
            Vector(
                "latent_norm_and_cache_write", group, rows, self._down(), self._down(),
                5 * normed + 6 * self.rope_width, launches=2,
            ),
            Matmul(
                "query_projection", group, rows, heads * self.qk_width,
                self._query_inner(hidden), *weights,
            ),
            Vector("rotary", group, rows, turned, turned, 6 * turned),
        ]  # fmt: skip
        if self.index is not None:
            ops += self._index_operators(group, self.index, hidden, step, shard, precision)
        decoding = step.sequences * step.queries
        # In the absorbed form: decoding tokens, and with sparse attention prompts too.
        sparse = self.top_k is not None
        absorbed = rows if sparse else decoding
        called = 1 if chunk is None or sparse else minimum(step.sequences, 1)
        ops.append(
            Matmul(
                "query_absorption", group, absorbed, self.kv_rank, self.nope_width, *weights,
                groups=heads, count=called,
            )
        )  # fmt: skip
        ops += self._decode_operators(group, heads, step, shard, precision)
        if chunk is not None:
            ops += self._chunk_operators(group, heads, chunk, shard, precision)
        ops += [
            Matmul(
                "value_expansion", group, absorbed, self.v_width, self.kv_rank, *weights,
                groups=heads, count=called,
            ),
            *self._gate(group, heads, hidden, rows, weights),
            Matmul("output_projection", group, rows, hidden, heads * self.v_width, *weights),
            Collective("attention_all_reduce", group, "all_reduce", rows, hidden, ranks),
        ]  # fmt: skip
        return tuple(ops)

    def _gate(
        self, group: str, heads: Real, hidden: Real, rows: Real, weights: tuple[Any, ...]
    ) -> Operators:
        """Returns the product that makes a gate per element of the result, and its use."""
        if not self.gated:
            return ()
        results = heads * self.v_width
        return (
            Matmul("gate_projection", group, rows, results, hidden, *weights),
            Vector("output_gate", group, rows, 2 * results, results, 5 * results),
        )

    def _decode_operators(
        self, group: str, heads: Real, step: Step, shard: Shard, precision: Precision
    ) -> Operators:
        """Returns attention of decoding tokens in latent space, over spread keys where they are."""
        asked = heads if shard.context_ranks is None else heads * shard.context_ranks
        keys = shard.keys(self._seen(step.context))
        attend = Attention(
            "decode_attention", group, "decode",
            sequences=step.sequences, queries=step.queries, keys=keys, pairs=step.queries * keys,
            heads=asked, kv_heads=1, qk_width=self.cache_width, v_width=self.kv_rank,
            kv_bytes=precision.kv_bytes, narrow=precision.narrow_attention,
            cache_width=self.cache_width, latent=True,
        )  # fmt: skip
        if shard.context_ranks is None:
            return (attend,)
        decoding = step.sequences * step.queries
        return (
            Collective(
                "query_all_gather", group, "all_gather", decoding, asked * self.cache_width,
                shard.context_ranks,
            ),
            attend,
            # Partial results, with their two running sums per head.
            Collective(
                "partial_reduce_scatter", group, "reduce_scatter", decoding,
                asked * (self.kv_rank + 2), shard.context_ranks,
            ),
        )  # fmt: skip

    def _chunk_operators(
        self, group: str, heads: Real, chunk: Chunk, shard: Shard, precision: Precision
    ) -> Operators:
        """Returns attention of a chunk; ranks attend with their own heads, to gathered latents."""
        gathered: tuple[Collective, ...] = ()
        if shard.context_ranks is not None:
            rows = chunk.prompts * chunk.keys
            gathered = (
                Collective(
                    "latent_all_gather", group, "all_gather", rows, self.cache_width,
                    shard.context_ranks,
                ),
            )  # fmt: skip
        if self.top_k is not None:
            # Every token may be among some query's best, so the whole latent cache is read.
            return (
                *gathered,
                Attention(
                    "chunk_attention", group, "prefill",
                    sequences=chunk.prompts, queries=chunk.queries, keys=chunk.keys,
                    pairs=self.chunk_pairs(chunk), heads=heads, kv_heads=1,
                    qk_width=self.cache_width, v_width=self.kv_rank, kv_bytes=precision.kv_bytes,
                    narrow=precision.narrow_attention, cache_width=self.cache_width, latent=True,
                ),
            )  # fmt: skip
        # The latents of a prompt's earlier chunks are expanded again for each later one, to keys
        # and values of 16 bits.
        expanded = heads * (self.nope_width + self.v_width)
        return (
            *gathered,
            Matmul(
                "latent_expansion", group, chunk.prompts * chunk.keys, expanded, self.kv_rank,
                precision.weight_bytes, precision.activation_bytes, precision.kernel,
                precision.column_bytes,
            ),
            Attention(
                "chunk_attention", group, "prefill",
                sequences=chunk.prompts, queries=chunk.queries, keys=chunk.keys,
                pairs=chunk.pairs, heads=heads, kv_heads=heads, qk_width=self.qk_width,
                v_width=self.v_width, kv_bytes=2, narrow=precision.narrow_attention, latent=True,
            ),
        )  # fmt: skip

    def _index_operators(
        self, group: str, index: Indexer, hidden: Real, step: Step, shard: Shard,
        precision: Precision,
    ) -> Operators:  # fmt: skip
        """Returns the indexer: its products, scores of every earlier token, and the choice."""
        rows, chunk = step.rows, step.chunk
        queries = index.heads * index.width
        weights = (
            precision.weight_bytes, precision.activation_bytes, precision.kernel,
            precision.column_bytes,
        )  # fmt: skip
        key_bytes = divide(index.key_bytes(), index.width)

        def scores(name: str, phase: str, **shape: Real) -> Attention:
            # One key head of 8 bits; what a query's heads add up to is read by the choice.
            return Attention(
                name, group, "decode" if phase == "decode" else "prefill", heads=index.heads,
                kv_heads=1, qk_width=index.width, v_width=0, kv_bytes=key_bytes, narrow=1,
                cache_width=index.width, **shape,
            )  # fmt: skip

        def choice(name: str, asking: Real, keys: Real, count: Real = 1) -> Vector:
            return Vector(
                name, group, asking, keys, 2 * index.top_k, 2 * keys, element_bytes=4,
                launches=1, count=count,
            )  # fmt: skip

        keys = shard.keys(step.context)
        decoding = step.sequences * step.queries
        ops: list = [
            Matmul(
                "index_projection", group, rows, index.width + index.heads, hidden, *weights
            ),
            Matmul(
                "index_query_projection", group, rows, queries, self._query_inner(hidden),
                *weights,
            ),
            # Norm, rotary embedding, rotation and quantisation of queries and key.
            Vector(
                "index_quantise_and_cache_write", group, rows, queries + index.width,
                0.5 * (queries + index.width), 12 * (queries + index.width), launches=3,
            ),
            scores(
                "index_scores", "decode", sequences=step.sequences, queries=step.queries,
                keys=keys, pairs=step.queries * keys,
            ),
            choice(
                "index_choice", decoding, keys,
                1 if chunk is None else minimum(step.sequences, 1),
            ),
        ]  # fmt: skip
        if shard.context_ranks is not None:
            # Each rank's best, a 32-bit score and a 32-bit place each, to all.
            ops.append(
                Collective(
                    "index_all_gather", group, "all_gather", decoding,
                    4 * index.top_k * shard.context_ranks, shard.context_ranks,
                )
            )  # fmt: skip
        if chunk is not None:
            mean = chunk.pairs * divide(1, chunk.queries)
            ops += [
                scores(
                    "chunk_index_scores", "prefill", sequences=chunk.prompts,
                    queries=chunk.queries, keys=chunk.keys, pairs=chunk.pairs,
                ),
                choice("chunk_index_choice", chunk.tokens, mean),
            ]  # fmt: skip
        return tuple(ops)
