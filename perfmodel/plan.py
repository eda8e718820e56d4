"""What is asked (load), how it is laid out (plan), and what serves it (engine).

The plan's unifying number is the stage width w = chips / stages: a GPU with tensor parallelism 8
is one stage of width 8; a wafer with twenty layers side by side has stages of width 0.05. Tensor
ranks are max(w, 1), the share of a chip that a stage has is min(w, 1).
"""

import equinox as eqx
import jax
import jax.numpy as jnp

from perfmodel.machine import Machine
from perfmodel.relax import Real, as_real, divide, inverse, maximum, minimum
from perfmodel.step import Shard


class Load(eqx.Module):
    """The traffic of a closed loop: every finished request is replaced by a new one.

    Fields:
        isl: prompt tokens (ISL).
        osl: output tokens (OSL).
        prefix_hit: share of the prompt already cached and shared between requests [0, 1).
        burst: share of requests that arrive in the initial burst; 0 is steady state, 1/k the
            mean over a benchmark of k × concurrency requests started at once.
        in_step: 1 where requests are of one length and start together, so that an engine which
            computes prompts first keeps them in step for ever; 0 where lengths differ.
        images: images of a prompt on average, spread evenly over it: their tokens are part of
            `isl`, and those that are cached are not encoded. None where there are none; the
            network has no tower then.
        weight: share of the requests of each class, which sum to 1, where there are several;
            `isl`, `osl` and `prefix_hit` are then arrays over classes, the last axis.
        spread: standard deviation over mean of the output lengths of a batch that is in step,
            which waits for its longest; None where that does not count.
    """

    isl: Real
    osl: Real
    prefix_hit: Real = 0.0
    burst: Real = 0.0
    in_step: Real = 0.0
    images: Real | None = None
    weight: Real | None = None
    spread: Real | None = None

    def mean(self, values: Real) -> Real:
        """Returns the mean over requests of something that each class has."""
        return values if self.weight is None else jnp.sum(self.weight * values, axis=-1)

    @property
    def input(self) -> Real:
        """Mean prompt tokens."""
        return self.mean(self.isl)

    @property
    def output(self) -> Real:
        """Mean output tokens."""
        return self.mean(self.osl)

    def while_decoding(self, values: Real) -> Real:
        """Returns the mean over decoding sequences, of which long outputs have more."""
        if self.weight is None:
            return values
        return self.mean(self.osl * values) / self.output

    @property
    def context(self) -> Real:
        """Mean keys of a decoding token: a prompt and half an output."""
        return self.while_decoding(self.isl + 0.5 * self.osl)

    @property
    def longest(self) -> Real:
        """Tokens of a whole request, of the longest class."""
        whole = self.isl + self.osl
        return whole if self.weight is None else jnp.max(whole, axis=-1)

    def last_of(self, count: Real) -> Real:
        """Returns the longest of `count` outputs over the mean, 1 where they are alike.

        Lognormal outputs: exp(σμ − σ²(1 − v)/2) with σ² = ln(1 + spread²), and the mean and
        variance of the largest of n normal numbers, μ = Φ⁻¹(p^(1/n)) with p from 0.5 to 0.5264
        (Chen and Tyler, 1999) and v = (1 + 0.6 ln n)^−1.2. Within 3 % of sampling up to a spread
        of 1 and 256 requests.
        """
        if self.spread is None:
            return 1.0
        requests = maximum(as_real(count), 1.0)
        deviation = jnp.sqrt(jnp.log1p(as_real(self.spread) ** 2) + 1e-30)
        share = 0.5 + 0.0264 * (1.0 - inverse(requests))
        mean = jax.scipy.special.ndtri(share ** inverse(requests))
        variance = (1.0 + 0.6 * jnp.log(requests)) ** -1.2
        return jnp.exp(deviation * (mean - 0.5 * deviation * (1.0 - variance)))


class Plan(eqx.Module):
    """How one replica is laid out.

    Fields:
        chips: chips of a replica.
        stages: pipeline stages they form (1: all of them work on every layer).
        batch: concurrent requests offered to a replica.
        chunk: most prompt tokens processed in one step.
        replicas: equal replicas behind a balancer, each with its own `batch`.
        attention_dp: groups of a stage's ranks that attend to sequences of their own.
        expert_ranks: ranks over which whole experts are spread (EP).
        context_ranks: ranks over which a sequence's keys are spread (CP).
        offload: share of each memory tier behind the fastest that weights and keys may
            take, 0 to 1 (offload).
        weights_first: share of the weights that is placed before any keys, fastest tier first.

    The last five are None where they are not in use; then they cost nothing.
    """

    chips: Real
    stages: Real
    batch: Real
    chunk: Real
    replicas: Real = 1
    attention_dp: Real | None = None
    expert_ranks: Real | None = None
    context_ranks: Real | None = None
    offload: Real | None = None
    weights_first: Real | None = None

    @property
    def width(self) -> Real:
        """Chips per stage."""
        return divide(self.chips, self.stages)

    def shard(self, machine: Machine) -> Shard:
        """Returns how a layer is cut on this machine.

        At width 1 the derivative is that of growing: another rank, not a smaller share.
        """
        return Shard(
            ranks=maximum(1, self.width),
            kv_shards=machine.decode.shards,
            share=minimum(self.width, 1),
            attention_groups=self.attention_dp,
            context_ranks=self.context_ranks,
            expert_ranks=self.expert_ranks,
        )


class Engine(eqx.Module):
    """What the serving software adds.

    Fields:
        memory_fraction: share of device memory the engine may use.
        workspace: memory for context, graphs and library buffers [B].
        block: tokens in a KV page.
        host_step: host time between steps, not hidden [s].
        host_sequence: the same, per running sequence [s].
        request_time: fixed service time of a request before its prefill [s].
        variability: of prefill service as seen by waiting requests: 0 deterministic and evenly
            spaced, 1 as an exponential server. 1/2 is a fixed service time with random arrivals.
        token_budget: most prompt tokens in a step where a plan does not say.
        exclusive: 1 where prompts are computed in steps of their own, before any decoding; 0 where
            a chunk rides along with decoding sequences.
        launch_graph: time a layer waits for launches in a step of decoding sequences alone, which
            is captured in a graph [s].
        launch_eager: the same in a step with prompt tokens, which no graph holds [s].
        launch_floor: host time to launch a layer, beside the device: a step takes the larger [s].
        host_prefill: host time of a step with prompt tokens beyond that of another [s].
        host_request: host time of a prompt, in the step in which it ends [s].
        reservation: share of a request's output whose memory is set aside when it is admitted; 1/2
            is what a running request holds on average.
        admission_steps: decode steps that go by before a request is admitted, twice the mean wait
            in steps; 1 where it waits for the running step to end.
        quantisation: share of the measured separate quantisation of activations that is left; 0
            where it is fused into other kernels.
    """

    memory_fraction: Real
    workspace: Real
    block: Real
    host_step: Real
    host_sequence: Real
    request_time: Real
    variability: Real
    token_budget: Real = 2048
    exclusive: Real = 0.0
    launch_graph: Real = 0.0
    launch_eager: Real = 0.0
    host_prefill: Real = 0.0
    host_request: Real = 0.0
    reservation: Real = 0.5
    admission_steps: Real = 1.0
    quantisation: Real = 1.0
    launch_floor: Real = 0.0


UNLIMITED = 1e15
"""A budget that is not asked for."""


class Limits(eqx.Module):
    """Service levels and budgets asked for; margins are measured against them.

    Fields: `ttft` and `tpot`, the longest acceptable [s]; `power` [W], rated, `racks` and `cost`
    [USD/h] are the most that all chips of all replicas may take. Large values mean no limit.
    """

    ttft: Real = 1e9
    tpot: Real = 1e9
    power: Real = UNLIMITED
    racks: Real = UNLIMITED
    cost: Real = UNLIMITED
