"""Multi-head, multi-query and grouped-query attention: operators, parameters and cache.

One kind covers all three: `kv_heads` equal to `heads`, one, or between. Weights: q, k, v fused
into one product (columns (H + 2K)·d), the output product back to the hidden width.
"""

import equinox as eqx

from perfmodel.formats import Precision
from perfmodel.operators import Attention, Collective, Matmul, Operators, Vector
from perfmodel.relax import Real, divide
from perfmodel.step import Shard, Step


class GroupedQueryAttention(eqx.Module):
    """Self-attention with `heads` query heads over `kv_heads` key-value heads of `head_dim`.

    Flags are numbers, 0 or 1, so that models that differ in them share one program:
    `qkv_bias`, `output_bias`, `qk_norm` (a norm of each head's query and key).
    """

    heads: Real
    kv_heads: Real
    head_dim: Real
    qkv_bias: Real = 0
    output_bias: Real = 0
    qk_norm: Real = 0

    def matrices(self, hidden: Real) -> Real:
        """Returns the elements of the weight matrices."""
        width = (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        return hidden * width

    def vectors(self, hidden: Real) -> Real:
        """Returns the elements of biases and norms."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        return self.qkv_bias * qkv + self.output_bias * hidden + self.qk_norm * 2 * self.head_dim

    def weight_bytes(self, hidden: Real, precision: Precision, shard: Shard) -> Real:
        """Returns bytes of weights on one rank [B]; kv heads are replicated past their number."""
        heads = divide(self.heads, shard.ranks)
        columns = (heads + 2 * shard.kv_heads(self.kv_heads)) * self.head_dim
        elements = hidden * (columns + heads * self.head_dim)
        scales = (columns + hidden) * precision.column_bytes
        return elements * precision.weight_bytes + scales + 2 * self.vectors(hidden)

    def cache_bytes_per_token(self, precision: Precision, shard: Shard) -> Real:
        """Returns bytes of keys and values that one rank holds per token [B]."""
        return 2 * shard.kv_heads(self.kv_heads) * self.head_dim * precision.kv_bytes

    def activation_width(self, shard: Shard) -> Real:
        """Returns the widest intermediate result per token on one rank [elements]."""
        return (divide(self.heads, shard.ranks) + 2 * shard.kv_heads(self.kv_heads)) * self.head_dim

    def operators(self, hidden: Real, step: Step, shard: Shard, precision: Precision) -> Operators:
        """Returns the operators of one layer on one rank."""
        group = f"{step.phase}/attention"
        heads = divide(self.heads, shard.ranks)
        kv_heads = shard.kv_heads(self.kv_heads)
        columns = (heads + 2 * kv_heads) * self.head_dim
        rows = step.rows
        ops: list = [
            Matmul(
                "qkv_projection", group, rows, columns, hidden,
                precision.weight_bytes, precision.activation_bytes, precision.kernel,
                precision.column_bytes,
            ),
            Vector(
                "rotary_and_cache_write", group, rows, columns, columns, 6 * columns,
                launches=1 + self.qk_norm,
            ),
            Attention(
                "decode_attention", group, "decode",
                sequences=step.sequences, queries=step.queries, keys=step.context,
                pairs=step.queries * step.context, heads=heads, kv_heads=kv_heads,
                qk_width=self.head_dim, v_width=self.head_dim, kv_bytes=precision.kv_bytes,
                narrow=precision.narrow_attention,
            ),
        ]  # fmt: skip
        if step.chunk is not None:
            ops.append(
                Attention(
                    "chunk_attention",
                    group,
                    "prefill",
                    sequences=step.chunk.prompts,
                    queries=divide(step.chunk.tokens, step.chunk.prompts),
                    keys=step.chunk.keys,
                    pairs=step.chunk.pairs,
                    heads=heads,
                    kv_heads=kv_heads,
                    qk_width=self.head_dim,
                    v_width=self.head_dim,
                    kv_bytes=precision.kv_bytes,
                    narrow=precision.narrow_attention,
                )  # fmt: skip
            )
        ops += [
            Matmul(
                "output_projection", group, rows, hidden, heads * self.head_dim,
                precision.weight_bytes, precision.activation_bytes, precision.kernel,
                precision.column_bytes,
            ),
            Collective(
                "attention_all_reduce", group, "all_reduce", rows, hidden, shard.ranks
            ),
        ]  # fmt: skip
        return tuple(ops)
