"""Steady state of a serving replica: TTFT, TPOT, throughput, memory, power and cost.

Continuous batching with chunked prefill and paged KV in a closed loop of `batch` requests. With
t(B) the time of a decode step and t(B, c) of one that carries a chunk of a prompt:

    admitted      A = ⌊(memory·fraction − weights − activations − workspace)/live KV⌋
    running       C = min(batch, A); the rest queue, and TTFT carries their wait
    chunks        n = ⌈T(1−h)/chunk⌉ steps carry one prompt
    chunk share   φ = min(1, n(C−1)/O): the other requests' chunks that meet a decoding one
    TPOT          (1−φ)·t(B) + φ·t(B, c)
    prefill wait  a closed queue of C customers, service s = n·t(B, c), away for Z = (O−1)·TPOT
    throughput    C·O/(TTFT + (O−1)·TPOT)                              (Little's law)

A mixture of two steps, not the step at the mean load: a few prompt tokens in every step and a
full chunk in some are different work. φ is corrected once for the time requests spend before
their first token. Past the load where every step carries a chunk, the number of decoding
sequences saturates at O/n and TTFT grows with the queue; nothing is clamped.

Pipeline stages, and layers side by side on a wafer: M = min(stages, C) micro-batches of C/M; a
round takes max(token latency, M × stage time). Chunks fill every stage: a prompt takes
n/stages rounds.
"""

from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from perfmodel import tiers as memory
from perfmodel.efficiencies import Efficiencies
from perfmodel.fabric import crossing_usage
from perfmodel.formats import Precision
from perfmodel.machine import Machine, Placed, Rank, Usage
from perfmodel.models.transformer import (
    Model,
    activation_bytes,
    block_operators,
    head_operators,
    kv_bytes,
    norm_operators,
    sequence_bytes,
    weight_bytes,
)
from perfmodel.ownership import spend
from perfmodel.plan import Engine, Limits, Load, Plan
from perfmodel.relax import Real, as_real, ceil, ceil_div, floor, inverse, maximum, minimum
from perfmodel.step import Chunk, Shard, Step, causal_pairs
from perfmodel.timing import total_usage

PARTS = ("compute", "weight bandwidth", "kv bandwidth", "network", "latency")
"""What a step's time consists of, in the order of `Estimate.parts`."""

MARGINS = ("memory", "kernel", "divisibility", "context length", "ttft limit", "tpot limit")
"""Signed margins in the order of `Estimate.margins`; a negative one is infeasible."""

BINDING = (*PARTS, "kv capacity", *MARGINS)
"""Names of `Estimate.binding`: the largest part of TPOT, the KV pool where requests queue for
it, or the most negative margin."""


class Estimate(eqx.Module):
    """What a design achieves. Scalars (or arrays of a sweep's shape); SI units.

    Fields:
        ttft, tpot, e2e: time to first token, per output token after it, end to end [s].
        longest_gap: longest time between two tokens of a request while others prefill [s].
        request_rate: finished requests per second of one replica [1/s].
        output_rate: output tokens per second of one replica [1/s].
        admitted, running: requests that fit the KV pool, and that run at once.
        chunk_share: share of a request's decode steps that carry another's prompt.
        prefill_busy: share of time that prompts take.
        weight_bytes, kv_bytes, activation_bytes, memory_bytes: per chip [B]; memory in all,
            with workspace, at the running batch.
        chip_power: mean board power of a chip [W]; power: of all replicas [W].
        energy_per_output_token, energy_per_total_token: split by busy time, and not [J].
        usd_per_output_token, usd_per_input_token, usd_per_total_token: [USD]; output and input
            share the cost by busy time. 0 where the price is unknown.
        chips: chips deployed.
        parts: seconds of TPOT by `PARTS`, shape [5].
        margins: by `MARGINS`, shape [6], relative; negative is infeasible.
        feasible: whether all margins are ≥ 0.
        binding: index into `BINDING`.
    """

    ttft: Array
    tpot: Array
    e2e: Array
    longest_gap: Array
    request_rate: Array
    output_rate: Array
    admitted: Array
    running: Array
    chunk_share: Array
    prefill_busy: Array
    weight_bytes: Array
    kv_bytes: Array
    activation_bytes: Array
    memory_bytes: Array
    chip_power: Array
    power: Array
    energy_per_output_token: Array
    energy_per_total_token: Array
    usd_per_output_token: Array
    usd_per_input_token: Array
    usd_per_total_token: Array
    chips: Array
    parts: Array
    margins: Array
    feasible: Array
    binding: Array
    isl: Array
    osl: Array
    replicas: Array

    @property
    def interactivity(self) -> Array:
        """Output tokens per second that one user sees while decoding, 1/TPOT."""
        return 1.0 / self.tpot

    @property
    def interactivity_e2e(self) -> Array:
        """Output tokens per second of one user over the whole request, OSL/E2E."""
        return self.osl / self.e2e

    @property
    def output_rate_per_chip(self) -> Array:
        """Output tokens per second over every deployed chip."""
        return self.output_rate * self.replicas / self.chips

    @property
    def total_rate_per_chip(self) -> Array:
        """Input and output tokens per second over every deployed chip."""
        return self.output_rate_per_chip * (self.isl + self.osl) / self.osl


class Footprint(NamedTuple):
    """Bytes per chip, and the requests that fit.

    Fields: `weights`; intermediate results of a `chunk` and of each decoding `sequence` of a pass;
    keys and values `shared` by all requests, and `live` of each; the relative `margin` with one
    request; `admitted` requests; `free`, bytes of each memory tier for weights, keys and values.
    """

    weights: Array
    chunk: Array
    sequence: Array
    shared: Array
    live: Array
    margin: Array
    admitted: Array
    free: tuple[Array, ...]


class Pass(NamedTuple):
    """One pass of a micro-batch through the network."""

    usage: Usage
    latency: Array
    stage: Array


class Prefill(NamedTuple):
    """How a prompt is cut: chunks, and the mean chunk."""

    chunks: Array
    chunk: Chunk
    new_tokens: Array


def split_prompt(load: Load, plan: Plan) -> Prefill:
    """Returns the chunks of one prompt; cached tokens are attended to but not computed.

    At least the last prompt token is always computed. The mean chunk conserves tokens and pairs:
    T(1−h)/n tokens, and the pairs of the whole prompt over n.
    """
    new = maximum(as_real(load.isl * (1.0 - load.prefix_hit)), 1.0)
    cached = as_real(load.isl) - new
    chunks = maximum(ceil_div(new, maximum(as_real(plan.chunk), 1.0)), 1.0)
    per_chunk = inverse(chunks)
    tokens = new * per_chunk
    chunk = Chunk(
        tokens=tokens,
        pairs=causal_pairs(new, cached) * per_chunk,
        keys=cached + tokens * (0.5 * chunks + 0.5),
        ends=per_chunk,
        new=new,
        cached=cached,
        share=per_chunk,
    )
    return Prefill(chunks, chunk, new)


def stage_share(model: Model, plan: Plan, shard: Shard) -> Array:
    """Returns the part of the layers that one chip holds."""
    per_stage = ceil(model.layers * inverse(plan.stages)) * inverse(model.layers)
    return per_stage * inverse(shard.share)


def placed(machine: Machine, plan: Plan, room: Footprint, running: Real) -> Placed | None:
    """Returns where weights and keys of `running` requests lie; None where one tier holds all."""
    if plan.offload is None:
        return None
    kv = room.live * running + room.shared
    first = 1.0 if plan.weights_first is None else plan.weights_first
    return memory.place(machine, room.free, room.weights, kv, first)


def attention_groups(plan: Plan) -> Array | None:
    """Returns how many attention groups have work; None where the plan has no such choice.

    Requests are spread evenly, so fewer requests than groups leave some without any.
    """
    if plan.attention_dp is None:
        return None
    return minimum(as_real(plan.batch), as_real(plan.attention_dp))


def chip_weights(
    machine: Machine,
    model: Model,
    plan: Plan,
    precision: Precision,
    decoder: Real | None = None,
) -> Array:
    """Returns bytes of weights on the fullest chip of a plan [B].

    Layers spread evenly; the first and the last stage hold the embedding and the output head.
    `decoder` are the bytes of all layers on one rank where that holds not all of them.
    """
    shard = plan.shard(machine)
    part = stage_share(model, plan, shard)
    table = model.vocabulary * model.hidden * precision.head_bytes * inverse(shard.ranks)
    tables = (2.0 - model.tied) * table
    ends = maximum(1.0, (2.0 - model.tied) * inverse(minimum(as_real(plan.chips), plan.stages)))
    layers = weight_bytes(model, precision, shard) - tables if decoder is None else decoder
    return layers * part + table * ends


def footprint(
    machine: Machine,
    model: Model,
    load: Load,
    plan: Plan,
    precision: Precision,
    engine: Engine,
    weights: Array | None = None,
    prompts: Real = 1,
    beside: Real | None = None,
) -> Footprint:
    """Returns memory per chip and how many requests an attention group admits.

    A request holds its own prompt and, on average, half its output, in whole pages; the shared
    prefix is stored once. One whole request must fit, or the plan is infeasible. `weights` on a
    chip [B] where it does not hold all of the network; `prompts` is 0 where it computes none;
    what a sequence takes `beside` its own keys and values [B], of a draft.
    """
    shard = plan.shard(machine)
    prefill = split_prompt(load, plan)
    part = stage_share(model, plan, shard)
    if weights is None:
        weights = chip_weights(machine, model, plan, precision)
    # Intermediate results are linear in the sequences of a pass: a chunk's, and one sequence's.
    groups = attention_groups(plan)
    chunk = activation_bytes(model, Step(0, load.isl, chunk=prefill.chunk, groups=groups), shard)
    chunk = chunk if isinstance(prompts, int) else chunk * prompts
    sequence = activation_bytes(model, Step(1, load.isl, groups=groups), shard)
    cached = load.isl - prefill.new_tokens

    def pages(tokens: Array) -> Array:
        whole = ceil_div(tokens, engine.block) * engine.block
        own = sequence_bytes(model, precision, whole, shard) * part
        return own if beside is None else own + beside

    shared = kv_bytes(model, precision, cached, shard) * part
    live = pages(prefill.new_tokens + 0.5 * load.osl)
    whole = pages(prefill.new_tokens + load.osl)
    tiers = memory.capacity(machine, engine.memory_fraction, plan.offload)
    # Intermediate results and the engine's own stay in the fastest memory.
    tiers = [tiers[0] - chunk - engine.workspace * machine.floors.hosted, *tiers[1:]]
    free = sum(tiers[1:], tiers[0]) - weights - shared
    held = pages(prefill.new_tokens + engine.reservation * load.osl)
    each = held + sequence * inverse(plan.stages)
    admitted = floor(maximum(free, 0.0) * inverse(each))
    margin = (free - sequence - whole) / machine.memory.capacity[0]
    return Footprint(weights, chunk, sequence, shared, live, margin, admitted, tuple(tiers))


class Passes(NamedTuple):
    """The two kinds of pass that a mean round consists of.

    Fields: `micro`, micro-batches in a round; `chunks`, passes with a chunk per request, less than
    one where prompts share them; `decode`, a pass of decoding sequences; `mixed`, one that carries
    a chunk beside them.
    """

    micro: Array
    chunks: Array
    decode: Step
    mixed: Step


def passes(
    load: Load,
    plan: Plan,
    prefill: Prefill,
    running: Array,
    engine: Engine,
    *,
    rounds: Real | None = None,
    depth: Real | None = None,
    fused: Real | None = None,
    prompts: Real | None = None,
    queries: Real = 1,
) -> Passes:
    """Returns what passes through the network while `running` requests of a group are served.

    Prompts shorter than a chunk share one: as many as finish in a round, C/(M(O + 1)), if they fit.
    Where every pass carries a chunk, O·stages/n sequences decode beside it, and no more.

    Args:
        rounds: decode passes of a request, where that is not its output tokens.
        depth: most micro-batches of a round, where that is not the plan's stages.
        fused: 1 where a chunk rides along with decoding sequences, as the engine says otherwise.
        prompts: that share a chunk if they fit, as many as finish in a round otherwise.
        queries: tokens that a decoding sequence brings to a pass.
    """
    each = as_real(load.osl if rounds is None else rounds)
    fused = 1.0 - as_real(engine.exclusive) if fused is None else as_real(fused)
    deepest = as_real(plan.stages if depth is None else depth)
    micro = minimum(running, deepest)
    per_micro, per_slot = inverse(micro), inverse(deepest)
    room = maximum(1.0, plan.chunk * inverse(prefill.new_tokens))
    finishing = running * per_micro * inverse(each + 1.0) if prompts is None else prompts
    together = maximum(1.0, minimum(finishing, room))
    chunks = prefill.chunks * inverse(together)
    one = prefill.chunk
    shared = Chunk(one.tokens * together, one.pairs, one.keys, one.ends * together, together)
    # Chunks follow each other through all stages, however few sequences decode in between.
    saturated = each * inverse(per_slot * chunks)
    context = load.isl + 0.5 * load.osl
    # Prompts computed in steps of their own starve no one, and nothing decodes beside them.
    most = jnp.where(fused > 0.0, maximum(saturated, 1.0), running)
    decoding = minimum(running, most) * per_micro
    beside = fused * minimum(maximum(0.0, running - 1.0), saturated) * per_slot
    groups = attention_groups(plan)
    decode = Step(decoding, context, queries, groups=groups)
    return Passes(
        micro, chunks, decode, Step(beside, context, queries, chunk=shared, groups=groups)
    )


def unhidden(
    rank: Rank, model: Model, step: Step, plan: Plan, engine: Engine, layers: Array
) -> dict[str, tuple[Real, Usage]]:
    """Returns what a pass costs beside its operators, as counts and usage by name.

    Launches run beside the device, so they add what `layers`, its busy time [s], does not cover.
    """
    floors = rank.machine.floors
    count = as_real(model.layers)
    # Steps of decoding sequences alone are captured in a graph; others are launched one by one.
    gaps = engine.launch_graph if step.chunk is None else engine.launch_eager
    serial = (floors.serial + gaps * floors.hosted) * count
    waiting = serial + maximum(floors.launch * count - (layers + serial), 0.0)
    host = as_real(engine.host_step + engine.host_sequence * step.sequences)
    if step.chunk is not None:
        host = host + engine.host_prefill + engine.host_request * step.chunk.ends
    host = host * floors.hosted
    crossings = maximum(minimum(as_real(plan.chips), plan.stages) - 1.0, 0.0)
    return {
        "launches": (1, Usage(waiting, latency=waiting)),
        "host": (1, Usage(host, latency=host)),
        "stage_crossing": (
            crossings,
            crossing_usage(step.all_rows * model.hidden, plan.chips, rank),
        ),
    }


def served(machine: Machine, engine: Engine) -> Machine:
    """Returns the machine as an engine's kernels use it: without quantisation that they fuse."""
    kernels = machine.kernels
    quantise = kernels.quantise * engine.quantisation
    # What the floor of a narrow kernel has beyond that of a 16-bit one is its second launch.
    own = minimum(kernels.floor, kernels.floor[0])
    floor = own + (kernels.floor - own) * engine.quantisation
    return eqx.tree_at(lambda m: (m.kernels.quantise, m.kernels.floor), machine, (quantise, floor))


def run_step(
    rank: Rank, model: Model, step: Step, plan: Plan, precision: Precision, engine: Engine
) -> Pass:
    """Returns the time of one micro-batch through all stages, and through the slowest."""
    shard = plan.shard(rank.machine)
    layers = total_usage(norm_operators(model, step, precision), rank)
    for block in model.blocks:
        ops = block_operators(model, block, step, shard, precision)
        layers = layers.plus(total_usage(ops, rank).scale(block.count))
    head = total_usage(head_operators(model, step, shard, precision), rank)
    rest = unhidden(rank, model, step, plan, engine, layers.seconds)
    layers = layers.plus(rest["launches"][1])
    head = head.plus(rest["host"][1])
    crossings, crossing = rest["stage_crossing"]
    whole = layers.plus(head).plus(crossing.scale(crossings))
    slowest = ceil(model.layers * inverse(plan.stages)) * inverse(model.layers)
    crossed = minimum(as_real(crossings), 1.0)
    stage = layers.seconds * slowest + head.seconds + crossed * crossing.seconds
    return Pass(whole, whole.seconds, stage)


def closed_queue(service: Array, away: Array, customers: Array, variability: Real) -> Array:
    """Returns the mean time at a server of a closed loop, its own service included [s].

    `customers` cycle between one server (mean `service`) and an absence (mean `away`). The larger
    root R of

        R² − R·(s + sC − Z − v·s) + s·(sC − Z) − v·s²·C = 0

    is s for one customer and tends to sC − Z when the server saturates; v = 0 is its lower bound
    max(s, sC − Z), v = 1 Schweitzer's mean-value analysis of an exponential server.

    >>> float(closed_queue(2.0, 10.0, 1.0, 0.5)), float(closed_queue(2.0, 0.0, 5.0, 0.5))
    (2.0, 10.0)
    """
    bound = service * customers - away
    b = service + bound - variability * service
    # The discriminant as a sum of non-negative terms, and the root by the form that does not
    # subtract: the textbook ones cancel in float32.
    discriminant = (service - bound) ** 2 + variability * service * (
        2.0 * service * (customers - 1.0) + 2.0 * away + variability * service
    )
    root = jnp.sqrt(discriminant + 1e-36)
    idle = 2.0 * service * (away - (1.0 - variability) * service * customers)
    few = b < 0.0
    return jnp.where(few, idle * inverse(jnp.where(few, root - b, 1.0)), 0.5 * (b + root))


def estimate(
    machine: Machine,
    model: Model,
    load: Load,
    plan: Plan,
    precision: Precision,
    engine: Engine,
    limits: Limits | None = None,
    efficiencies: Efficiencies | None = None,
) -> Estimate:
    """Returns what one design achieves; a pure function of arrays, differentiable in all.

    Args:
        machine: the chip. model: the network, with array leaves (see `relax.traced`).
        load, plan, precision, engine: traffic, layout, formats, software.
        limits: service levels for the TTFT and TPOT margins; none by default.
        efficiencies: relative speed of each kind of operator; all as modelled by default.
    """
    asked = Limits() if limits is None else limits
    shard = plan.shard(machine)
    prefill = split_prompt(load, plan)
    room = footprint(machine, model, load, plan, precision, engine)
    # Attention groups are alike: what follows is of one, and the replica has `groups` of them.
    groups = attention_groups(plan)
    every = 1.0 if groups is None else groups
    batch = as_real(plan.batch) if groups is None else as_real(plan.batch) * inverse(groups)
    osl = as_real(load.osl)
    running = minimum(batch, maximum(room.admitted, 1.0))

    others = maximum(0.0, running - 1.0)
    micro, chunks, decode_step, mixed_step = passes(load, plan, prefill, running, engine)
    lying = placed(machine, plan, room, running)
    rank = Rank(served(machine, engine), shard.share, efficiencies, lying)
    decode = run_step(rank, model, decode_step, plan, precision, engine)
    mixed = run_step(rank, model, mixed_step, plan, precision, engine)
    # With one stage both are equal, always; the derivative is then that of the latency.
    decode_round = maximum(micro * decode.stage, decode.latency)
    mixed_round = maximum(micro * mixed.stage, mixed.latency)

    # A step of prompts alone comes on top of a decode step; one that carries them replaces it.
    # Requests in step wait for each other's prompts, on average half of them before their own,
    # and half after it, between their first tokens.
    alone = as_real(engine.exclusive)
    together = alone * load.in_step
    longer = mixed_round - (1.0 - alone) * decode_round
    most_share = 1.0 + alone * 1e6

    def mean_round(share: Array) -> Array:
        return decode_round + share * (1.0 - 0.5 * together) * longer

    # A request occupies its share of passes, and waits for the whole of each.
    service = chunks * mixed.stage
    fill = mixed.latency - mixed.stage + (prefill.chunks - chunks) * mixed.stage
    per_round = chunks * inverse(as_real(plan.stages))
    share = minimum(per_round * others * inverse(osl), most_share)
    tpot = mean_round(share)
    away = maximum(osl - 1.0, 0.0)
    queued = closed_queue(service, away * tpot, running, engine.variability)
    prefill_time = fill + queued - together * (queued - service)
    # A request that finds others decoding waits, on average, for half of that step to end; behind
    # another's chunk it waits in the queue instead.
    stepwise = 0.5 * engine.admission_steps * tpot * minimum(others, 1.0)
    before = engine.request_time + stepwise * (1.0 - minimum(share, 1.0))
    rate = running * inverse(before + prefill_time + away * tpot)
    share = minimum(share, per_round * rate * tpot * others * inverse(running))
    tpot = mean_round(share)
    first = load.burst + together * (1.0 - load.burst)
    started = before + prefill_time + first * 0.5 * others * service
    rate = running * inverse(started + away * tpot)
    waiting = maximum(batch - running, 0.0) / rate
    ttft = started + waiting
    e2e = ttft + away * tpot

    # Per request: n passes with a chunk, and the decode passes that its tokens then still need.
    per_decoding = inverse(decode_step.sequences)
    plain = maximum(away - chunks * mixed_step.sequences, 0.0) * per_decoding
    joules = rate * (chunks * mixed.usage.joules + plain * decode.usage.joules)
    chip_dynamic = joules * shard.ranks * inverse(plan.chips)
    chip_power = minimum(machine.power.limit, machine.power.running + chip_dynamic)
    # Busy time of prompts is what their chunks add to steps that others would have taken anyway.
    added = maximum(mixed.stage - minimum(mixed_step.sequences, 1.0) * decode.stage, 0.0)
    prompt_time = chunks * added
    token_time = osl * per_decoding * decode.stage
    per_busy = inverse(prompt_time + token_time)
    prefill_busy, decode_busy = prompt_time * per_busy, token_time * per_busy

    rate = rate if groups is None else rate * groups
    output_rate = rate * osl
    per_output = inverse(output_rate)
    per_token = per_output * osl * inverse(osl + load.isl)
    watts = chip_power * plan.chips
    dollars = spend(machine.price, machine.site, chip_power) * plan.chips

    mean_parts = [
        (1.0 - share) * decode_round / decode.latency * d + share * mixed_round / mixed.latency * m
        for d, m in zip(decode.usage.parts, mixed.usage.parts, strict=True)
    ]
    parts = jnp.stack(mean_parts)
    margins = jnp.stack(
        [
            room.margin,
            kernel_margin(machine, precision),
            divisibility(model, shard),
            (model.max_context - load.isl - osl) / model.max_context,
            1.0 - ttft * inverse(asked.ttft),
            1.0 - tpot * inverse(asked.tpot),
        ]
    )
    feasible = jnp.all(margins >= 0.0)
    busiest = jnp.where(batch > room.admitted, len(PARTS), jnp.argmax(parts))
    binding = jnp.where(feasible, busiest, len(PARTS) + 1 + jnp.argmin(margins))

    kv = room.live * running + room.shared
    activations = room.chunk + room.sequence * (running * inverse(micro))
    return Estimate(
        ttft=ttft,
        tpot=tpot,
        e2e=e2e,
        longest_gap=jnp.where(others > 0.0, mixed_round, decode_round),
        request_rate=rate,
        output_rate=output_rate,
        admitted=room.admitted * every,
        running=running * every,
        chunk_share=share,
        prefill_busy=prefill_busy,
        weight_bytes=room.weights,
        kv_bytes=kv,
        activation_bytes=activations,
        memory_bytes=room.weights + kv + activations + engine.workspace * machine.floors.hosted,
        chip_power=chip_power,
        power=watts * plan.replicas,
        energy_per_output_token=watts * decode_busy * per_output,
        energy_per_total_token=watts * per_token,
        usd_per_output_token=dollars * decode_busy * per_output,
        usd_per_input_token=dollars * prefill_busy * per_output * osl * inverse(load.isl),
        usd_per_total_token=dollars * per_token,
        chips=as_real(plan.chips * plan.replicas),
        parts=parts,
        margins=margins,
        feasible=feasible,
        binding=binding,
        isl=as_real(load.isl),
        osl=osl,
        replicas=as_real(plan.replicas),
    )


def kernel_margin(machine: Machine, precision: Precision) -> Array:
    """Returns the least peak of the kernels in use over the 16-bit one; negative if none."""
    peaks = machine.kernels.peak
    least = jnp.sum(peaks * precision.kernel)
    least = minimum(least, jnp.sum(peaks * precision.expert_kernel))
    return least / peaks[0] - 1e-6


def divisibility(model: Model, shard: Shard) -> Array:
    """Returns minus how far the plan is from cutting heads, widths and experts into whole parts."""
    miss = as_real(0.0)
    for block in model.blocks:
        for whole in block.body.parts(shard):
            miss = miss + ceil(as_real(whole)) - whole
    # Rounding of a float32 quotient is not a remainder.
    return jnp.where(jnp.abs(miss) < 1e-3, 0.0, -miss)
