"""Hyper-connections: a residual of several streams, mixed around every sublayer.

Manifold-constrained hyper-connections (DeepSeek-V4, arXiv 2606.19348, section 2.2): before a
sublayer its N streams, together N·hidden wide, give 2N + N² weights by one product in 32 bits. N of
them sum the streams to the sublayer's input, N spread its result, N² mix the streams. A last
product of N columns sums the streams before the output head.
"""

import equinox as eqx

from perfmodel.formats import Precision
from perfmodel.operators import Matmul, Operators, Vector
from perfmodel.relax import Real, divide
from perfmodel.step import Step

_FP32 = 4


class BlockResiduals(eqx.Module):
    """Sublayers that take a weighted mean of earlier blocks' sums in place of one residual.

    Each sublayer, and the output, scores with a vector of its own the normed sums of all blocks of
    `block` layers before it, of its own block so far, and the embedding. Source: attention
    residuals, Kimi K3 technical report (arXiv 2607.24653), section 2.2.
    """

    block: Real

    def _sources(self, sublayers: Real) -> Real:
        """Returns the mean number of sums that a sublayer sees; two sublayers make a layer."""
        return divide(sublayers, 4 * self.block) + 1.5

    def parameters(self, hidden: Real, sublayers: Real) -> Real:
        """Returns the elements of score vectors and norms: of sublayers and of the output."""
        return 2 * hidden * (sublayers + 1)

    def weight_bytes(self, hidden: Real, sublayers: Real) -> Real:
        """Returns bytes of weights [B], on every rank and in 16 bits."""
        return 2 * self.parameters(hidden, sublayers)

    def operators(
        self, hidden: Real, sublayers: Real, step: Step, precision: Precision
    ) -> Operators:
        """Returns the operators before all sublayers: norm, score and weighted sum."""
        del precision
        read = self._sources(sublayers) * hidden
        return (
            Vector(
                "block_residuals", f"{step.phase}/rest", step.rows, read, hidden, 8 * read,
                count=sublayers, reductions=1,
            ),
        )  # fmt: skip

    def head_operators(
        self, hidden: Real, sublayers: Real, step: Step, precision: Precision
    ) -> Operators:
        """Returns the operators before the output head: the mean of all blocks' sums."""
        del precision
        read = (divide(sublayers, 2 * self.block) + 1) * hidden
        return (
            Vector(
                "last_block_residuals", f"{step.phase}/rest", step.rows, read, hidden, 8 * read,
                reductions=1,
            ),
        )  # fmt: skip


class HyperConnections(eqx.Module):
    """`streams` residual streams, each as wide as the hidden state."""

    streams: Real

    def _weights(self) -> Real:
        return (2 + self.streams) * self.streams

    def parameters(self, hidden: Real, sublayers: Real) -> Real:
        """Returns the elements of products, offsets and scales: of sublayers and of the head.

        >>> HyperConnections(4).parameters(8, 2)  # 2 · (24 · 32 + 24 + 3) + 4 · 32 + 4 + 1
        1723
        """
        wide = self.streams * hidden
        each = self._weights() * (wide + 1) + 3
        return sublayers * each + self.streams * (wide + 1) + 1

    def weight_bytes(self, hidden: Real, sublayers: Real) -> Real:
        """Returns bytes of weights [B], on every rank and in 32 bits as the checkpoint has them."""
        return _FP32 * self.parameters(hidden, sublayers)

    def operators(
        self, hidden: Real, sublayers: Real, step: Step, precision: Precision
    ) -> Operators:
        """Returns the operators around all sublayers, each token on every rank of its group."""
        group, n = f"{step.phase}/rest", self.streams
        return (
            Matmul(
                "stream_weights", group, step.rows, self._weights(), n * hidden, _FP32, 2,
                precision.head_kernel, count=sublayers, result_bytes=_FP32,
            ),
            # Streams in, the sublayer's input out; streams and result in, streams out.
            Vector(
                "stream_mixing", group, step.rows, (2 * n + 1) * hidden, (n + 1) * hidden,
                (4 * n + 2 * n * n) * hidden, launches=2, count=sublayers,
            ),
        )  # fmt: skip

    def head_operators(
        self, hidden: Real, sublayers: Real, step: Step, precision: Precision
    ) -> Operators:
        """Returns the operators that sum the streams before the output head.

        Of all tokens: those with logits are chosen after it (inference code of DeepSeek-V4, class
        ParallelHead; vLLM and SGLang alike).
        """
        del sublayers
        group, n = f"{step.phase}/rest", self.streams
        return (
            Matmul(
                "stream_head", group, step.rows, n, n * hidden, _FP32, 2, precision.head_kernel,
                result_bytes=_FP32,
            ),
            Vector("stream_sum", group, step.rows, n * hidden, hidden, 2 * n * hidden),
        )  # fmt: skip
