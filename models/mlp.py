"""Feed-forward layers: gated (three matrices) or plain (two), and mixtures of experts."""

import equinox as eqx
from jax import Array

from perfmodel.formats import Precision
from perfmodel.models.routing import busiest_power_law_share, busiest_share, distinct_experts
from perfmodel.operators import Collective, CollectiveKind, Matmul, Operators, Vector
from perfmodel.relax import Real, divide, inverse, minimum
from perfmodel.step import Shard, Step


def gather_rows(
    name: str,
    kind: CollectiveKind,
    rows: Real,
    group: str,
    hidden: Real,
    shard: Shard,
    copies: Real = 1,
) -> Operators:
    """Returns what brings the tokens of all attention groups to the ranks; nothing for one."""
    if shard.attention_groups is None:
        return ()
    several = minimum(shard.attention_groups - 1, 1)
    return (Collective(name, group, kind, rows, hidden, shard.ranks, count=several, copies=copies),)


def reduce_rows(
    name: str,
    kind: CollectiveKind,
    rows: Real,
    group: str,
    step: Step,
    hidden: Real,
    shard: Shard,
    copies: Real = 1,
) -> Operators:
    """Returns what sums the ranks' partial results: for one group to all ranks, for several by
    what brought its tokens, backwards."""
    several = gather_rows(name, kind, rows, group, hidden, shard, copies)
    one = 1 if not several else 1 - several[0].count
    whole = Collective(
        "ffn_all_reduce", group, "all_reduce", step.all_rows, hidden, shard.ranks, count=one
    )
    return (whole, *several)


class Mlp(eqx.Module):
    """A feed-forward layer; `gates` is 2 where a gate multiplies the up projection, else 1.

    Parameters: (gates + 1) × hidden × intermediate, so a SwiGLU layer has three matrices. `apart`
    is static: in a network without mixtures its formats are those of routed experts in others,
    which checkpoints often store in fewer bits than attention.
    """

    apart: bool = eqx.field(static=True, default=False, kw_only=True)
    intermediate: Real
    gates: Real = 2
    bias: Real = 0

    def matrices(self, hidden: Real) -> Real:
        """Returns the elements of the weight matrices."""
        return (self.gates + 1) * hidden * self.intermediate

    def vectors(self, hidden: Real) -> Real:
        """Returns the elements of biases."""
        return self.bias * (self.gates * self.intermediate + hidden)

    def _formats(self, precision: Precision) -> tuple[Real, Real, Array, Real]:
        """Returns bytes of a weight and of an activation, the kernel, and bytes of a column."""
        if self.apart:
            return (
                precision.expert_weight_bytes, precision.expert_activation_bytes,
                precision.expert_kernel, precision.expert_column_bytes,
            )  # fmt: skip
        return (
            precision.weight_bytes, precision.activation_bytes, precision.kernel,
            precision.column_bytes,
        )  # fmt: skip

    def weight_bytes(self, hidden: Real, precision: Precision, shard: Shard) -> Real:
        """Returns bytes of weights on one rank [B]."""
        each, _, _, column = self._formats(precision)
        inner = divide(self.intermediate, shard.ranks)
        elements = (self.gates + 1) * hidden * inner
        columns = self.gates * inner + hidden
        return elements * each + columns * (column + 2 * self.bias)

    def activation_width(self, shard: Shard) -> Real:
        """Returns the widest intermediate result per token on one rank [elements]."""
        return self.gates * divide(self.intermediate, shard.ranks)

    def parts(self, shard: Shard) -> tuple[Real, ...]:
        """Returns the quotients that must be whole numbers for a plan to cut this layer."""
        return (divide(self.intermediate, shard.ranks),)

    def products(
        self, prefix: str, hidden: Real, step: Step, shard: Shard, precision: Precision
    ) -> Operators:
        """Returns the operators of one layer on one rank, without the links."""
        group = f"{step.phase}/ffn"
        inner = divide(self.intermediate, shard.ranks)
        rows = step.all_rows
        formats = self._formats(precision)
        return (
            Matmul(
                f"{prefix}up_projection", group, rows, self.gates * inner, hidden, *formats,
            ),
            Vector(
                f"{prefix}activation", group, rows, self.gates * inner, inner, 8 * inner,
            ),
            Matmul(
                f"{prefix}down_projection", group, rows, hidden, inner, *formats,
            ),
        )  # fmt: skip

    def operators(self, hidden: Real, step: Step, shard: Shard, precision: Precision) -> Operators:
        """Returns the operators of one layer on one rank."""
        group = f"{step.phase}/ffn"
        rows = step.all_rows
        return (
            *gather_rows("ffn_all_gather", "all_gather", rows, group, hidden, shard),
            *self.products("", hidden, step, shard, precision),
            *reduce_rows("ffn_reduce_scatter", "reduce_scatter", rows, group, step, hidden, shard),
        )


class MixtureOfExperts(eqx.Module):
    """`experts` feed-forward layers of which each token takes `top_k`, beside a `shared` one.

    Work follows the chosen experts, memory all of them, weight traffic those that at least one
    token of the step chose. Flags are numbers, 0 or 1: `bias` of the experts, `router_bias`,
    `shared_gate` (a product of width 1 that weighs the shared layer). Routing in groups changes
    which experts are chosen, not how many. Where `latent` is given, experts work on vectors of that
    width, which a product makes of the hidden state on every rank and another turns back (latent
    mixtures: Nemotron 3, Kimi K3); `latent_norm` is 1 where they are normalised first. `routing` is
    the exponent of the power law by which tokens prefer some experts (`perfmodel.models.routing`),
    None where they prefer none. `normed_apart` is static: results of the experts and of the shared
    layer are normed before they are added, so that ranks sum each first (Gemma 4: vLLM, class
    Gemma4DecoderLayer).
    """

    experts: Real
    top_k: Real
    intermediate: Real
    gates: Real = 2
    bias: Real = 0
    router_bias: Real = 0
    shared: Mlp | None = None
    shared_gate: Real = 0
    latent: Real | None = None
    latent_norm: Real = 0
    routing: Real | None = None
    normed_apart: bool = eqx.field(static=True, default=False, kw_only=True)

    def _width(self, hidden: Real) -> Real:
        """Returns the width of what experts take and give."""
        return hidden if self.latent is None else self.latent

    def _latent_elements(self, hidden: Real) -> Real:
        """Returns the elements of the products into and out of the experts' width."""
        return 0 if self.latent is None else 2 * hidden * self.latent

    def _expert(self, hidden: Real) -> Real:
        return (self.gates + 1) * hidden * self.intermediate

    def _biases(self, hidden: Real) -> Real:
        return self.bias * (self.gates * self.intermediate + hidden)

    def matrices(self, hidden: Real) -> Real:
        """Returns the elements of the weight matrices, router included."""
        shared = 0 if self.shared is None else self.shared.matrices(hidden)
        router = hidden * (self.experts + self.shared_gate)
        beside = router + shared + self._latent_elements(hidden)
        return self.experts * self._expert(self._width(hidden)) + beside

    def idle(self, hidden: Real) -> Real:
        """Returns the elements, biases among them, of experts that a token does not take."""
        width = self._width(hidden)
        return (self.experts - self.top_k) * (self._expert(width) + self._biases(width))

    def vectors(self, hidden: Real) -> Real:
        """Returns the elements of biases."""
        shared = 0 if self.shared is None else self.shared.vectors(hidden)
        norm = 0 if self.latent is None else self.latent_norm * self.latent
        biases = self.experts * self._biases(self._width(hidden))
        return biases + self.router_bias * self.experts + shared + norm

    def _cut(self, shard: Shard) -> tuple[Real, Real]:
        """Returns the experts that one rank holds, and the width that it holds of each."""
        spread = 1 if shard.expert_ranks is None else shard.expert_ranks
        experts = divide(self.experts, spread)
        return experts, divide(self.intermediate * spread, shard.ranks)

    def weight_bytes(self, hidden: Real, precision: Precision, shard: Shard) -> Real:
        """Returns bytes of weights on one rank [B]; the router stays in 16 bits, on every rank."""
        experts, inner = self._cut(shard)
        width = self._width(hidden)
        elements = (self.gates + 1) * width * inner
        scales = (self.gates * inner + width) * precision.expert_column_bytes
        biases = 2 * self.bias * (self.gates * inner + width)
        router = 2 * (hidden * (self.experts + self.shared_gate) + self.router_bias * self.experts)
        shared = 0
        if self.shared is not None:
            shared = self.shared.weight_bytes(hidden, precision, shard)
        each = elements * precision.expert_weight_bytes + scales + biases
        whole = experts * each + router + shared
        if self.latent is None:
            return whole
        turned = self._latent_elements(hidden) * precision.weight_bytes
        columns = (hidden + self.latent) * precision.column_bytes
        return whole + turned + columns + 2 * self.latent_norm * self.latent

    def activation_width(self, shard: Shard) -> Real:
        """Returns the widest intermediate result per token on one rank [elements].

        A token's rows of all its chosen experts are alive together.
        """
        return divide(self.gates * self.intermediate * self.top_k, shard.ranks)

    def parts(self, shard: Shard) -> tuple[Real, ...]:
        """Returns the quotients that must be whole numbers for a plan to cut this layer."""
        experts, inner = self._cut(shard)
        shared = () if self.shared is None else self.shared.parts(shard)
        if shard.expert_ranks is None:
            return (inner, *shared)
        return (inner, experts, divide(shard.ranks, shard.expert_ranks), *shared)

    def operators(self, hidden: Real, step: Step, shard: Shard, precision: Precision) -> Operators:
        """Returns the operators of one layer on one rank."""
        group = f"{step.phase}/ffn"
        rows = step.all_rows
        experts, inner = self._cut(shard)
        spread = 1 if shard.expert_ranks is None else shard.expert_ranks
        share = divide(experts, self.experts)
        touched = distinct_experts(self.experts, self.top_k, rows, self.routing) * share
        # The rank with the most tokens keeps the others waiting.
        assigned = rows * self.top_k
        busiest = 1 if shard.expert_ranks is None else self._busiest(spread, rows)
        local = assigned * share * busiest
        each = local * inverse(touched)
        weights = (
            precision.expert_weight_bytes, precision.expert_activation_bytes,
            precision.expert_kernel, precision.expert_column_bytes, touched,
        )  # fmt: skip
        # Every rank routes all tokens that it holds: those of its own attention group.
        own, share_moved = step.rows, self._moved(shard)
        moved, copies = step.all_rows * share_moved, shard.ranks * share_moved
        width = self._width(hidden)
        ops: list = [
            Matmul(
                "router", group, own, self.experts + self.shared_gate, hidden, 2, 2,
                precision.head_kernel,
            ),
            # Softmax or sigmoid, the choice of k, and sorting tokens by expert. Engines fuse these
            # kernels differently; the floor of grouped products holds the launches of all of them.
            Vector(
                "routing", group, own, 2 * self.experts, 2 * self.top_k, 8 * self.experts,
                element_bytes=4, launches=0,
            ),
            *self._turned("latent_down_projection", own, width, hidden, group, precision),
            *gather_rows("expert_dispatch", "all_to_all", moved, group, width, shard, copies),
            Matmul(
                "expert_up_projection", group, each, self.gates * inner, width, *weights,
                experts=True,
            ),
            Vector(
                "expert_activation", group, local, self.gates * inner, inner, 8 * inner,
                launches=0,
            ),
            Matmul(
                "expert_down_projection", group, each, width, inner, *weights, experts=True,
            ),
            # The weighted sum over a token's experts.
            Vector(
                "expert_sum", group, local, width, divide(width, self.top_k), 2 * width,
                launches=0,
            ),
            *self._turned("latent_up_projection", own, hidden, width, group, precision),
        ]  # fmt: skip
        if self.shared is not None:
            ops += self.shared.products("shared_", hidden, step, shard, precision)
        # What is normed must be summed first, beside the shared result.
        summed = hidden
        if self.latent is not None:
            left = hidden if self.shared is None else 0
            summed = hidden + self.latent_norm * (self.latent - left)
        ops += reduce_rows(
            "expert_combine", "all_to_all", moved, group, step, summed, shard, copies
        )
        if self.normed_apart:
            ops += reduce_rows(
                "ffn_reduce_scatter", "reduce_scatter", rows, group, step, hidden, shard
            )
        return tuple(ops)

    def _turned(
        self, name: str, rows: Real, columns: Real, inner: Real, group: str, precision: Precision
    ) -> Operators:
        """Returns the product into or out of the experts' width; nothing where that is hidden."""
        if self.latent is None:
            return ()
        return (
            Matmul(
                name, group, rows, columns, inner, precision.weight_bytes,
                precision.activation_bytes, precision.kernel, precision.column_bytes,
            ),
        )  # fmt: skip

    def _busiest(self, ranks: Real, tokens: Real) -> Real:
        """Returns the load of the busiest of the ranks that experts are spread over."""
        if self.routing is None:
            return busiest_share(ranks, tokens * self.top_k)
        return busiest_power_law_share(ranks, self.experts, self.top_k, tokens, self.routing)

    def _moved(self, shard: Shard) -> Real:
        """Returns the share of all rows that an exchange hands to each rank, from all others.

        Each token goes to the ranks of its experts, at most to all: as all-to-all kernels do, or,
        where that is less, as an all-gather.
        """
        if shard.expert_ranks is None:
            return 1
        return minimum(self.top_k * inverse(shard.expert_ranks), 1.0)
