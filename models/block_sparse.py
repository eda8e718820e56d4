"""Grouped-query attention to the best blocks of keys: MiniMax Sparse Attention (arXiv 2606.13392).

An indexer beside the attention has one query head per kv head and one key head. The score of a
block is its best key's; each kv head's queries attend to the `blocks` best blocks before them, the
block they stand in always among them. Semantics as in vLLM's and SGLang's classes for MiniMax-M3.
"""

import equinox as eqx

from perfmodel.formats import Precision
from perfmodel.models.attention import GroupedQueryAttention
from perfmodel.operators import Attention, Matmul, Operators, Vector
from perfmodel.relax import Real, divide, floor, maximum, minimum
from perfmodel.step import Chunk, Shard, Step


class BlockIndexer(eqx.Module):
    """Scores of earlier tokens: `heads` of `width`, one key head; `blocks` of `size` are kept.

    Queries and keys are normed, one weight an element of a head.
    """

    heads: Real
    width: Real
    blocks: Real
    size: Real

    def pairs(self, tokens: Real) -> Real:
        """Returns the pairs of the first `tokens` queries of a sequence and the keys they see.

        A query at place t sees all of its own block up to itself and min(⌊t/size⌋, blocks − 1)
        whole blocks.

        >>> BlockIndexer(1, 4, blocks=2, size=2).pairs(6)  # 1 + 2 + 3 + 4 + 3 + 4
        17
        """
        whole = floor(divide(tokens, self.size))
        rest = tokens - whole * self.size
        over = maximum(whole - (self.blocks - 1), 0)
        left_out = self.size * divide(over * (over - 1), 2) + rest * over
        return divide(tokens * (tokens + 1), 2) - self.size * left_out

    def keys(self, context: Real) -> Real:
        """Returns the keys that a token with `context` keys before it, itself included, sees."""
        past = context - 1
        whole = floor(divide(past, self.size))
        return context - self.size * maximum(whole - (self.blocks - 1), 0)


class BlockSparseAttention(GroupedQueryAttention):
    """Grouped-query attention whose queries see the best blocks of keys that `index` chooses."""

    index: BlockIndexer = eqx.field(kw_only=True)

    def _index_columns(self, shard: Shard) -> Real:
        """Returns the columns of the index products on one rank; the key is on every rank."""
        return (self._kv_heads(shard) + 1) * self.index.width

    def matrices(self, hidden: Real) -> Real:
        """Returns the elements of the weight matrices."""
        return super().matrices(hidden) + hidden * (self.index.heads + 1) * self.index.width

    def _vectors(self, hidden: Real, heads: Real, kv_heads: Real) -> Real:
        # Norms of index queries and keys are on every rank.
        return super()._vectors(hidden, heads, kv_heads) + 2 * self.index.width

    def weight_bytes(self, hidden: Real, precision: Precision, shard: Shard) -> Real:
        """Returns bytes of weights on one rank [B]; the index key's product is on every rank."""
        columns = self._index_columns(shard)
        each = hidden * precision.weight_bytes + precision.column_bytes
        return super().weight_bytes(hidden, precision, shard) + columns * each

    def cache_bytes_per_token(self, precision: Precision, shard: Shard) -> Real:
        """Returns bytes of keys, values and the index key of one cached token on one rank [B].

        Index keys are in the cache's format, as vLLM's indexer cache of MiniMax-M3 keeps them.
        """
        keys = shard.keys(self.index.width * precision.kv_bytes * shard.kv_shards)
        return super().cache_bytes_per_token(precision, shard) + keys

    def decode_keys(self, context: Real) -> Real:
        """Returns the keys that a token with `context` keys before it, itself included, sees."""
        return self.index.keys(context)

    def chunk_keys(self, chunk: Chunk) -> tuple[Real, Real]:
        """Returns (query, key) pairs and keys read of one prompt's part: any may be chosen."""
        before = self.index.pairs
        pairs = before(chunk.cached + chunk.new) - before(chunk.cached)
        return pairs * chunk.share, chunk.keys

    def operators(self, hidden: Real, step: Step, shard: Shard, precision: Precision) -> Operators:
        """Returns the operators of one layer on one rank: the indexer's, then the attention's."""
        return (
            *self._index_operators(hidden, step, shard, precision),
            *super().operators(hidden, step, shard, precision),
        )

    def _index_operators(
        self, hidden: Real, step: Step, shard: Shard, precision: Precision
    ) -> Operators:
        group = f"{step.phase}/attention"
        index, chunk = self.index, step.chunk
        heads = shard.kv_heads(self.kv_heads)
        columns = self._index_columns(shard)
        # A query head scores with one product a key; a key is read once for all heads.
        shared = {
            "kv_heads": 1, "qk_width": index.width, "v_width": 0,
            "kv_bytes": precision.kv_bytes, "cache_width": index.width,
        }  # fmt: skip

        def choice(name: str, asking: Real, keys: Real, count: Real = 1) -> Vector:
            # The best score of each block, then the best blocks.
            return Vector(
                name, group, asking * heads, keys, index.blocks, 2 * keys, element_bytes=4,
                launches=1, count=count,
            )  # fmt: skip

        keys = shard.keys(step.context)
        ops: list = [
            Matmul(
                "index_projection", group, step.rows, columns, hidden, precision.weight_bytes,
                precision.activation_bytes, precision.kernel, precision.column_bytes,
            ),
            Vector(
                "index_norm_and_cache_write", group, step.rows, columns, columns, 11 * columns,
                launches=2,
            ),
            Attention(
                "index_scores", group, "decode", sequences=step.sequences, queries=step.queries,
                keys=keys, pairs=step.queries * keys, heads=heads, **shared,
            ),
            choice(
                "index_choice", step.sequences * step.queries, keys,
                1 if chunk is None else minimum(step.sequences, 1),
            ),
        ]  # fmt: skip
        if chunk is not None:
            mean = chunk.pairs * divide(1, chunk.queries)
            ops += [
                Attention(
                    "chunk_index_scores", group, "prefill", sequences=chunk.prompts,
                    queries=chunk.queries, keys=shard.keys(chunk.keys),
                    pairs=shard.keys(chunk.pairs), heads=heads, **shared,
                ),
                choice("chunk_index_choice", chunk.tokens, shard.keys(mean)),
            ]  # fmt: skip
        return tuple(ops)

    def parts(self, shard: Shard) -> tuple[Real, ...]:
        """Returns the quotients that must be whole numbers for a plan to cut this layer.

        Ranks that hold different keys of a sequence would have to agree on its best blocks, which
        is not modelled.
        """
        whole = super().parts(shard)
        ranks = shard.context_ranks
        return whole if ranks is None else (*whole, divide(1, ranks))
