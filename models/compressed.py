"""Attention over compressed keys: DeepSeek-V4's sliding, sparse and heavily compressed layers.

One vector of `width` elements a token is key and value of all heads at once (one kv head). A layer
sees the last `window` of them and, where it has a `ratio`, entries that each stand for `ratio`
tokens: a softmax-weighted sum of projections of them. With an indexer (compressed sparse attention,
ratio 4) an entry weighs the tokens of two neighbouring groups, an indexer with compressed keys of
its own scores the entries, and the best are attended to; without (heavily compressed attention,
ratio 128) all entries are. Sources: DeepSeek-V4 (arXiv 2606.19348, section 2.3); transformers,
model deepseek_v4.
"""

import equinox as eqx

from perfmodel.formats import Precision
from perfmodel.models.attention import window_pairs
from perfmodel.models.mla import Indexer
from perfmodel.operators import Attention, Collective, Matmul, Operators, Vector
from perfmodel.relax import Real, divide, floor, maximum, minimum
from perfmodel.step import Chunk, Shard, Step


def entry_pairs(tokens: Real, ratio: Real, most: Real | None = None) -> Real:
    """Returns the pairs of the first `tokens` queries and the whole entries before each.

    The query of the t-th token sees ⌊t/ratio⌋ entries, at most `most` of them.

    >>> entry_pairs(7, 2)  # 0 + 1 + 1 + 2 + 2 + 3 + 3
    12
    >>> entry_pairs(7, 2, 2)  # 0 + 1 + 1 + 2 + 2 + 2 + 2
    10
    """
    whole = floor(divide(tokens, ratio))
    rest = tokens - whole * ratio

    def above(entries: Real) -> Real:
        """Returns the sum of entries past whole − `entries`, over all queries."""
        return ratio * divide(entries * (entries - 1), 2) + entries * (rest + 1)

    return above(whole) if most is None else above(whole) - above(maximum(whole - most, 0))


class CompressedAttention(eqx.Module):
    """Self-attention of `heads` of `width` over a window and compressed entries.

    Queries pass through `q_rank`; results through `groups` products to `o_rank` each, and one from
    there to the hidden width. Each head has a sink. `ratio` is None in layers with a window alone;
    `index` where all entries are seen.

    Products to `q_rank`, keys and entries are on every rank, the others are cut by heads (results
    by whole groups). As in latent attention every rank of a group holds the whole cache.
    """

    heads: Real
    width: Real
    rope_width: Real
    q_rank: Real
    groups: Real
    o_rank: Real
    window: Real
    ratio: Real | None = None
    index: Indexer | None = None

    @property
    def _series(self) -> int:
        """Static: how many groups of tokens an entry weighs."""
        return 1 if self.index is None else 2

    def _compressor(self, width: Real) -> Real:
        """Returns the columns of a compressor's two products, values and weights."""
        return 0 if self.ratio is None else 2 * self._series * width

    def _everywhere(self) -> Real:
        """Returns the columns of the products of the hidden state that every rank has."""
        columns = self.q_rank + self.width + self._compressor(self.width)
        if self.index is None:
            return columns
        return columns + self._compressor(self.index.width) + self.index.heads

    def _index_queries(self) -> Real:
        return 0 if self.index is None else self.index.heads * self.index.width

    def matrices(self, hidden: Real) -> Real:
        """Returns the elements of the weight matrices."""
        queries = self.q_rank * (self.heads * self.width + self._index_queries())
        results = self.heads * self.width * self.o_rank + self.groups * self.o_rank * hidden
        return hidden * self._everywhere() + queries + results

    def vectors(self, hidden: Real) -> Real:
        """Returns the elements of norms, sinks, and of the weights by place of the compressors."""
        return self._vectors(self.heads)

    def _vectors(self, heads: Real) -> Real:
        count = self.q_rank + self.width + heads
        if self.ratio is None:
            return count
        each = self.ratio * self._series + 1
        widths = self.width + (0 if self.index is None else self.index.width)
        return count + each * widths

    def weight_bytes(self, hidden: Real, precision: Precision, shard: Shard) -> Real:
        """Returns bytes of weights on one rank [B]."""
        heads = divide(self.heads, shard.attention_ranks)
        groups = divide(self.groups, shard.attention_ranks)
        queries = heads * self.width + self._index_queries()
        elements = hidden * self._everywhere() + self.q_rank * queries
        elements = elements + heads * self.width * self.o_rank + groups * self.o_rank * hidden
        columns = self._everywhere() + queries + groups * self.o_rank + hidden
        stored = elements * precision.weight_bytes + columns * precision.column_bytes
        # Sinks are cut by heads.
        return stored + 2 * self._vectors(heads)

    def cache_bytes_per_token(self, precision: Precision, shard: Shard) -> Real:
        """Returns bytes of one cached vector that one rank holds [B]: of a token or an entry."""
        return shard.keys(self.width * precision.kv_bytes * shard.kv_shards)

    def cached_tokens(self, tokens: Real) -> Real:
        """Returns how many vectors of a sequence are kept: its window, entries, and index keys.

        Index keys, in the cache's format too, count by their width. DeepSeek-V4-Pro in bf16, at
        2²⁰ tokens: 30 layers × 2¹⁸ × 640, 31 × 2¹³ × 512 and 61 × 128 × 512 elements are 9.62 GiB.
        """
        near = minimum(tokens, self.window)
        if self.ratio is None:
            return near
        entries = divide(tokens, self.ratio)
        keys = 0 if self.index is None else divide(entries * self.index.width, self.width)
        return near + entries + keys

    def state_bytes(self, shard: Shard) -> Real:
        """Returns bytes that a sequence takes on every rank beside its cached vectors [B].

        What compressors hold of the tokens that entries to come weigh: values and weights, in 32
        bits whatever the cache's format. Heavily compressed, ratio 128: 128 · 2 · 512 · 4 B =
        524,288 B; sparse, ratio 4: 8 · 2 · 2 · (512 + 128) · 4 B = 81,920 B. Source: vLLM, class
        CompressorStateCache; inference code of DeepSeek-V4 (class Compressor).
        """
        del shard
        if self.ratio is None:
            return 0
        widths = self.width + (0 if self.index is None else self.index.width)
        return 4 * (self._series * self.ratio) * self._series * 2 * widths

    def activation_width(self, shard: Shard) -> Real:
        """Returns the widest intermediate result per token on one rank [elements]."""
        return 2 * divide(self.heads * self.width, shard.attention_ranks)

    def parts(self, shard: Shard) -> tuple[Real, ...]:
        """Returns the quotients that must be whole numbers for a plan to cut this layer.

        Spreading the keys of a sequence over ranks is not modelled.
        """
        ranks = shard.attention_ranks
        whole = [divide(self.heads, ranks), divide(self.groups, ranks)]
        if shard.attention_groups is not None:
            whole.append(ranks)
        if shard.context_ranks is not None:
            whole.append(divide(1, shard.context_ranks))
        return tuple(whole)

    def decode_keys(self, context: Real) -> Real:
        """Returns the vectors that a token with `context` keys, itself included, attends to."""
        near = minimum(context, self.window)
        if self.ratio is None:
            return near
        entries = floor(divide(context, self.ratio))
        return near + (entries if self.index is None else minimum(entries, self.index.top_k))

    def chunk_pairs(self, chunk: Chunk) -> Real:
        """Returns the (query, vector) pairs of one prompt's part."""
        near = window_pairs(chunk.new, chunk.cached, self.window)
        most = None if self.index is None else self.index.top_k
        return (near + self._entry_pairs(chunk, most)) * chunk.share

    def _entry_pairs(self, chunk: Chunk, most: Real | None) -> Real:
        """Returns the (query, entry) pairs of one whole prompt."""
        if self.ratio is None:
            return 0
        last = entry_pairs(chunk.cached + chunk.new, self.ratio, most)
        return last - entry_pairs(chunk.cached, self.ratio, most)

    def _entries(self, tokens: Real) -> Real:
        return 0 if self.ratio is None else divide(tokens, self.ratio)

    def operators(self, hidden: Real, step: Step, shard: Shard, precision: Precision) -> Operators:
        """Returns the operators of one layer on one rank."""
        group = f"{step.phase}/attention"
        ranks = shard.attention_ranks
        heads, groups = divide(self.heads, ranks), divide(self.groups, ranks)
        rows, chunk = step.rows, step.chunk
        weights = (
            precision.weight_bytes, precision.activation_bytes, precision.kernel,
            precision.column_bytes,
        )  # fmt: skip
        queries = heads * self.width
        turned = heads * self.rope_width
        core = {
            "heads": heads, "kv_heads": 1, "qk_width": self.width, "v_width": self.width,
            "kv_bytes": precision.kv_bytes, "narrow": precision.narrow_attention,
            "cache_width": self.width, "latent": True,
        }  # fmt: skip
        keys = self.decode_keys(step.context)
        down = self.q_rank + self.width
        ops: list = [
            Matmul("latent_projection", group, rows, self._everywhere(), hidden, *weights),
            Vector(
                "latent_norm_and_cache_write", group, rows, down, down,
                5 * down + 6 * self.rope_width, launches=2,
            ),
            Matmul("query_projection", group, rows, queries, self.q_rank, *weights),
            # A norm of each head's query, and the rotary embedding.
            Vector(
                "query_norm_and_rotary", group, rows, queries, queries, 4 * queries + 6 * turned
            ),
            *self._compress("entry", group, self.width, rows),
        ]  # fmt: skip
        if self.index is not None:
            ops += self._index_operators(group, self.index, step, precision)
        ops.append(
            Attention(
                "decode_attention", group, "decode", sequences=step.sequences,
                queries=step.queries, keys=keys, pairs=step.queries * keys, **core,
            )
        )  # fmt: skip
        if chunk is not None:
            near = minimum(chunk.keys, self.window + chunk.queries - 1)
            ops.append(
                Attention(
                    "chunk_attention", group, "prefill", sequences=chunk.prompts,
                    queries=chunk.queries, keys=near + self._entries(chunk.keys),
                    pairs=self.chunk_pairs(chunk), **core,
                )
            )  # fmt: skip
        ops += [
            # Values carry their place, too: results are turned back.
            Vector("result_rotary", group, rows, turned, turned, 6 * turned),
            Matmul(
                "group_projection", group, rows, self.o_rank,
                divide(self.heads * self.width, self.groups), *weights, groups=groups,
            ),
            Matmul("output_projection", group, rows, hidden, groups * self.o_rank, *weights),
            Collective("attention_all_reduce", group, "all_reduce", rows, hidden, ranks),
        ]  # fmt: skip
        return tuple(ops)

    def _compress(self, name: str, group: str, width: Real, rows: Real) -> Operators:
        """Returns the weighted sums that make entries of `width`, and their norm."""
        if self.ratio is None:
            return ()
        taken = self._compressor(width)
        # Softmax and sum over the tokens of an entry, each token in every series.
        work = 6 * self._series * width + divide(11 * width, self.ratio)
        return (
            Vector(
                f"{name}_compression", group, rows, taken, divide(width, self.ratio), work,
                launches=1,
            ),
        )  # fmt: skip

    def _index_operators(
        self, group: str, index: Indexer, step: Step, precision: Precision
    ) -> Operators:
        """Returns the indexer: queries, keys of entries, their scores, and the choice."""
        assert self.ratio is not None
        rows, chunk, queries = step.rows, step.chunk, self._index_queries()
        shared = {
            "heads": index.heads, "kv_heads": 1, "qk_width": index.width, "v_width": 0,
            "kv_bytes": precision.kv_bytes, "narrow": 1, "cache_width": index.width,
        }  # fmt: skip

        def choice(name: str, asking: Real, keys: Real, count: Real = 1) -> Vector:
            return Vector(
                name, group, asking, keys, 2 * index.top_k, 2 * keys, element_bytes=4,
                launches=1, count=count,
            )  # fmt: skip

        keys = floor(divide(step.context, self.ratio))
        ops: list = [
            Matmul(
                "index_query_projection", group, rows, queries, self.q_rank,
                precision.weight_bytes, precision.activation_bytes, precision.kernel,
                precision.column_bytes,
            ),
            Vector("index_quantise", group, rows, queries, 0.5 * queries, 12 * queries),
            *self._compress("index", group, index.width, rows),
            Attention(
                "index_scores", group, "decode", sequences=step.sequences, queries=step.queries,
                keys=keys, pairs=step.queries * keys, **shared,
            ),
            choice(
                "index_choice", step.sequences * step.queries, keys,
                1 if chunk is None else minimum(step.sequences, 1),
            ),
        ]  # fmt: skip
        if chunk is not None:
            pairs = self._entry_pairs(chunk, None) * chunk.share
            ops += [
                Attention(
                    "chunk_index_scores", group, "prefill", sequences=chunk.prompts,
                    queries=chunk.queries, keys=self._entries(chunk.keys), pairs=pairs, **shared,
                ),
                choice("chunk_index_choice", chunk.tokens, pairs * divide(1, chunk.queries)),
            ]  # fmt: skip
        return tuple(ops)
