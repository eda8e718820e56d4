"""Layers that keep a state per sequence in place of a cache: what their kinds share.

A token's projections pass a short convolution over the last tokens, then a recurrence whose state
has `state` × `width` elements a head (`perfmodel.operators.Scan`); results are normed, gated and
projected back. What a sequence keeps is the state and the convolution's last inputs, whatever its
length. Heads are cut over ranks; heads of keys are replicated past their number, as kv heads are.
"""

import abc
from typing import Any

import equinox as eqx

from perfmodel.formats import Precision
from perfmodel.operators import Collective, Matmul, Operators, Recurrence, Scan, Vector
from perfmodel.relax import Real, divide, maximum
from perfmodel.step import Shard, Step

CHUNK = 64
"""Tokens of a chunk of the delta rule. Source: flash-linear-attention, chunk_size of
chunk_gated_delta_rule and chunk_kda."""


class Recurrent(eqx.Module):
    """A recurrent sublayer.

    Fields: `heads`, with values of `width` each; `key_heads` that they share, with keys of `state`
    each; `kernel`, tokens of the convolution, and `conv_bias`, 0 or 1, its bias; `state_bytes` of
    an element of the state; `chunk`, tokens of a chunk of a prompt.
    """

    heads: Real
    key_heads: Real
    state: Real
    width: Real
    kernel: Real
    conv_bias: Real = 0
    state_bytes_each: Real = 2
    chunk: Real = CHUNK

    # ---- What kinds differ in, given heads and heads of keys of one rank ----

    @property
    @abc.abstractmethod
    def kind(self) -> Recurrence:
        """Static: the recurrence."""

    @abc.abstractmethod
    def _columns(self, heads: Real, keys: Real) -> Real:
        """Returns columns of the input projection."""

    def _channels(self, heads: Real, keys: Real) -> Real:
        """Returns channels of the convolution."""
        return 2 * keys * self.state + heads * self.width

    @abc.abstractmethod
    def _own_vectors(self, heads: Real) -> Real:
        """Returns elements of decays, biases and norms."""

    def _beside(self, hidden: Real) -> tuple[tuple[str, Real, Real], ...]:
        """Returns further products by name: columns of one head, and inner width."""
        del hidden
        return ()

    def _shared_columns(self) -> Real:
        """Returns columns of the input projection that are on every rank."""
        return 0

    def _scalars(self, heads: Real) -> Real:
        """Returns what the recurrence takes per token beside the convolution's results."""
        return heads

    def _sharing(self, heads: Real, keys: Real) -> Real:
        """Returns the heads that share a head of keys."""
        return divide(heads, keys)

    # ---- Counts ----

    def _cut(self, shard: Shard) -> tuple[Real, Real]:
        ranks = shard.attention_ranks
        return divide(self.heads, ranks), maximum(divide(self.key_heads, ranks), 1)

    def _elements(self, hidden: Real, heads: Real, keys: Real) -> Real:
        whole = hidden * (self._columns(heads, keys) + self._shared_columns())
        beside = sum(heads * columns * inner for _, columns, inner in self._beside(hidden))
        return whole + beside + heads * self.width * hidden

    def _vectors(self, heads: Real, keys: Real) -> Real:
        convolution = self._channels(heads, keys) * (self.kernel + self.conv_bias)
        return convolution + self._own_vectors(heads)

    def matrices(self, hidden: Real) -> Real:
        """Returns the elements of the weight matrices."""
        return self._elements(hidden, self.heads, self.key_heads)

    def vectors(self, hidden: Real) -> Real:
        """Returns the elements of convolution, decays, biases and norms."""
        return self._vectors(self.heads, self.key_heads)

    def weight_bytes(self, hidden: Real, precision: Precision, shard: Shard) -> Real:
        """Returns bytes of weights on one rank [B]; all but products stay in 16 bits."""
        heads, keys = self._cut(shard)
        columns = self._columns(heads, keys) + self._shared_columns() + hidden
        columns = columns + sum(heads * own for _, own, _ in self._beside(hidden))
        products = self._elements(hidden, heads, keys) * precision.weight_bytes
        # On one rank: its own heads' part, as if it were the whole.
        return products + columns * precision.column_bytes + 2 * self._vectors(heads, keys)

    def cache_bytes_per_token(self, precision: Precision, shard: Shard) -> Real:
        """Returns bytes that one more token adds to what a sequence keeps: none [B]."""
        del precision, shard
        return 0

    def cached_tokens(self, tokens: Real) -> Real:
        """Returns how many of a sequence's tokens a cache would keep."""
        return tokens

    def state_bytes(self, shard: Shard) -> Real:
        """Returns bytes that a sequence keeps on one rank, whatever its length [B].

        Nemotron-H-56B, a layer in 16 bits: 256 heads · 256 · 64 · 2 B of state, and 3 tokens of
        (256 · 64 + 2 · 8 · 256) channels · 2 B.
        """
        heads, keys = self._cut(shard)
        kept = heads * (self.state * self.width * self.state_bytes_each)
        return kept + 2 * self._channels(heads, keys) * (self.kernel - 1)

    def activation_width(self, shard: Shard) -> Real:
        """Returns the widest intermediate result per token on one rank [elements]."""
        return self._columns(*self._cut(shard)) + self._shared_columns()

    def parts(self, shard: Shard) -> tuple[Real, ...]:
        """Returns the quotients that must be whole numbers for a plan to cut this layer."""
        ranks = shard.attention_ranks
        ratio = divide(self.key_heads, ranks)
        whole: list[Real] = [divide(self.heads, ranks), maximum(ratio, divide(1, ratio))]
        if shard.attention_groups is not None:
            whole.append(ranks)
        return tuple(whole)

    # ---- Work ----

    def operators(self, hidden: Real, step: Step, shard: Shard, precision: Precision) -> Operators:
        """Returns the operators of one layer on one rank."""
        group = f"{step.phase}/attention"
        heads, keys = self._cut(shard)
        channels, results = self._channels(heads, keys), heads * self.width
        rows = step.rows
        weights = (
            precision.weight_bytes, precision.activation_bytes, precision.kernel,
            precision.column_bytes,
        )  # fmt: skip
        columns = self._columns(heads, keys) + self._shared_columns()
        kept = channels * (self.kernel - 1)
        chunk = step.chunk
        sequences = step.sequences if chunk is None else step.sequences + chunk.prompts
        ops: list[Any] = [
            Matmul("input_projection", group, rows, columns, hidden, *weights),
            *(
                Matmul(name, group, rows, heads * own, inner, *weights)
                for name, own, inner in self._beside(hidden)
            ),
            # A multiply-add for each token of the kernel, and an activation.
            Vector(
                "convolution", group, rows, channels, channels, (2 * self.kernel + 4) * channels
            ),
            Vector("convolution_state", group, sequences, kept, kept, 0, launches=0),
            self._scan("decode_recurrence", group, "decode", step.sequences, step.queries, shard),
        ]  # fmt: skip
        if chunk is not None:
            ops.append(
                self._scan(
                    "chunk_recurrence", group, "prefill", chunk.prompts, chunk.queries, shard
                )
            )
        ops += [
            Vector(
                "gated_norm", group, rows, 2 * results, results, 10 * results, reductions=1,
            ),
            Matmul("output_projection", group, rows, hidden, results, *weights),
            Collective(
                "attention_all_reduce", group, "all_reduce", rows, hidden, shard.attention_ranks
            ),
        ]  # fmt: skip
        return tuple(ops)

    def _scan(
        self, name: str, group: str, phase: Any, sequences: Real, tokens: Real, shard: Shard
    ) -> Scan:
        heads, keys = self._cut(shard)
        return Scan(
            name, group, self.kind, phase, sequences=sequences, tokens=tokens, heads=heads,
            state=self.state, width=self.width, state_bytes=self.state_bytes_each,
            inputs=self._channels(heads, keys) + self._scalars(heads), outputs=heads * self.width,
            chunk=self.chunk, sharing=self._sharing(heads, keys),
        )  # fmt: skip
