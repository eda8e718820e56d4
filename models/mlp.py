"""Dense feed-forward layers, gated (three matrices) or plain (two)."""

import equinox as eqx

from perfmodel.formats import Precision
from perfmodel.operators import Collective, Matmul, Operators, Vector
from perfmodel.relax import Real, divide
from perfmodel.step import Shard, Step


class Mlp(eqx.Module):
    """A feed-forward layer; `gates` is 2 where a gate multiplies the up projection, else 1.

    Parameters: (gates + 1) × hidden × intermediate, so a SwiGLU layer has three matrices.
    """

    intermediate: Real
    gates: Real = 2
    bias: Real = 0

    def matrices(self, hidden: Real) -> Real:
        """Returns the elements of the weight matrices."""
        return (self.gates + 1) * hidden * self.intermediate

    def vectors(self, hidden: Real) -> Real:
        """Returns the elements of biases."""
        return self.bias * (self.gates * self.intermediate + hidden)

    def weight_bytes(self, hidden: Real, precision: Precision, shard: Shard) -> Real:
        """Returns bytes of weights on one rank [B]."""
        inner = divide(self.intermediate, shard.ranks)
        elements = (self.gates + 1) * hidden * inner
        scales = (self.gates * inner + hidden) * precision.column_bytes
        return elements * precision.weight_bytes + scales + 2 * self.vectors(hidden)

    def activation_width(self, shard: Shard) -> Real:
        """Returns the widest intermediate result per token on one rank [elements]."""
        return self.gates * divide(self.intermediate, shard.ranks)

    def operators(self, hidden: Real, step: Step, shard: Shard, precision: Precision) -> Operators:
        """Returns the operators of one layer on one rank."""
        group = f"{step.phase}/ffn"
        inner = divide(self.intermediate, shard.ranks)
        rows = step.rows
        return (
            Matmul(
                "up_projection", group, rows, self.gates * inner, hidden,
                precision.weight_bytes, precision.activation_bytes, precision.kernel,
                precision.column_bytes,
            ),
            Vector(
                "activation", group, rows, self.gates * inner, inner, 8 * inner,
            ),
            Matmul(
                "down_projection", group, rows, hidden, inner,
                precision.weight_bytes, precision.activation_bytes, precision.kernel,
                precision.column_bytes,
            ),
            Collective(
                "ffn_all_reduce", group, "all_reduce", rows, hidden, shard.ranks
            ),
        )  # fmt: skip
