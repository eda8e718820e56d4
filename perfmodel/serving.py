"""Steady state of a serving replica: TTFT, TPOT, throughput, memory, power and cost.

Continuous batching with chunked prefill and paged KV in a closed loop of `batch` requests. With
t(B) the time of a decode step and t(B, c) of one that carries a chunk of a prompt:

    admitted      A = ⌊(memory·fraction − weights − activations − workspace)/live KV⌋
    running       C = min(batch, A); the rest queue, and TTFT carries their wait
    chunks        n = ⌈T(1−h)/chunk⌉ steps carry one prompt
    chunk share   φ = min(1, n(C−1)/O): the other requests' chunks that meet a decoding one
    TPOT          (1−φ)·t(B) + φ·t(B, c)
    prefill wait  in whole steps for the request to start, and for others' prompts (`_loop`)
    throughput    C·O/(TTFT + (O−1)·TPOT)                              (Little's law)

A mixture of two steps, not the step at the mean load: a few prompt tokens in every step and a
full chunk in some are different work. φ is corrected once for the time requests spend before
their first token. Past the load where every step carries a chunk, the number of decoding
sequences saturates at O/n and TTFT grows with the queue; nothing is clamped.

Pipeline stages, and layers side by side on a wafer: M = min(stages, C) micro-batches of C/M; a
round takes max(token latency, M × stage time). Chunks fill every stage: a prompt takes
n/stages rounds.
"""

import dataclasses
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from perfmodel import tiers as memory
from perfmodel._loop import Decoding, Prompts, closed_loop
from perfmodel.efficiencies import Efficiencies
from perfmodel.errors import InputError
from perfmodel.fabric import crossing_port, crossing_usage
from perfmodel.formats import Precision
from perfmodel.machine import Machine, Placed, Rank, Usage
from perfmodel.models.encoder import encoder_activation_bytes, encoder_weight_bytes
from perfmodel.models.transformer import (
    Model,
    activation_bytes,
    block_operators,
    head_operators,
    kv_bytes,
    norm_operators,
    sequence_bytes,
    tower_operators,
    weight_bytes,
)
from perfmodel.ownership import spend
from perfmodel.plan import UNLIMITED, Engine, Limits, Load, Plan
from perfmodel.preemption import Preemption, Sizes, after_first, greed, preemption, request_sizes
from perfmodel.relax import Real, as_real, ceil, ceil_div, floor, inverse, maximum, minimum
from perfmodel.stages import occupied
from perfmodel.step import Chunk, Shard, Step, causal_pairs
from perfmodel.timing import total_usage
from perfmodel.units import HOUR

PARTS = ("compute", "weight bandwidth", "kv bandwidth", "network", "latency")
"""What a step's time consists of, in the order of `Estimate.parts`."""

MARGINS = (
    "memory", "kernel", "divisibility", "context length", "ttft limit", "tpot limit",
    "power limit", "footprint limit", "cost limit",
)  # fmt: skip
"""Signed margins in the order of `Estimate.margins`; a negative one is infeasible."""

BINDING = (*PARTS, "kv capacity", *MARGINS)
"""Names of `Estimate.binding`: the largest part of TPOT, the KV pool where requests queue for
it, or the most negative margin."""


class Estimate(eqx.Module):
    """What a design achieves. Scalars (or arrays of a sweep's shape); SI units.

    Fields:
        ttft, tpot, e2e: time to first token, per output token after it, end to end [s].
        longest_gap: longest time between two tokens of a request while others prefill, and while
            it is preempted [s].
        request_rate: finished requests per second of one replica [1/s].
        output_rate: output tokens per second of one replica [1/s].
        admitted, running: requests that fit the KV pool, and that run at once.
        chunk_share: share of a request's decode steps that carry another's prompt.
        prefill_busy: share of time that prompts take.
        preempted: how often a request gives up its memory, on average.
        recomputed: prompts that are computed again for it, per request.
        weight_bytes, kv_bytes, activation_bytes, memory_bytes: per chip [B]; memory in all,
            with workspace, at the running batch.
        chip_power: mean board power of a chip [W]; power: of all replicas [W].
        energy_per_output_token, energy_per_total_token: split by busy time, and not [J].
        usd_per_output_token, usd_per_input_token, usd_per_total_token: [USD]; output and input
            share the cost by busy time. 0 where the price is unknown.
        chips: chips deployed.
        parts: seconds of TPOT by `PARTS`, shape [5]; what a preempted request waits and is
            computed again counts as latency.
        margins: by `MARGINS`, shape [9], relative; negative is infeasible.
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
    preempted: Array
    recomputed: Array
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
    request; `admitted` requests; `free`, bytes of each memory tier for weights, keys and values;
    requests that `fit` on average, not rounded, and the `sizes` of one.
    """

    weights: Array
    chunk: Array
    sequence: Array
    shared: Array
    live: Array
    margin: Array
    admitted: Array
    free: tuple[Array, ...]
    fit: Array
    sizes: Sizes


class Pass(NamedTuple):
    """One pass of a micro-batch through the network."""

    usage: Usage
    latency: Array
    stage: Array


class Prefill(NamedTuple):
    """How a prompt is cut: chunks, and the mean chunk; and how many prompts are computed `again`
    per request."""

    chunks: Array
    chunk: Chunk
    new_tokens: Array
    again: Real = 0.0


def split_prompt(load: Load, plan: Plan) -> Prefill:
    """Returns the chunks of one prompt; cached tokens are attended to but not computed.

    At least the last prompt token is always computed. The mean chunk conserves tokens and pairs:
    T(1−h)/n tokens, and the pairs of the whole prompt over n.
    """
    new = maximum(as_real(load.isl * (1.0 - load.prefix_hit)), 1.0)
    cached = as_real(load.isl) - new
    parts = maximum(ceil_div(new, maximum(as_real(plan.chunk), 1.0)), 1.0)
    chunks = as_real(load.mean(parts))
    per_chunk = inverse(chunks)
    mean = as_real(load.mean(new))
    tokens = mean * per_chunk
    # Of several classes, those of many chunks have more of them.
    keys = load.mean(cached * parts + new * (0.5 * parts + 0.5))
    if load.weight is None:
        keys = cached + tokens * (0.5 * chunks + 0.5)
    else:
        keys = keys * per_chunk
    images = None
    if load.images is not None:
        images = load.images * mean * inverse(load.input) * per_chunk
    chunk = Chunk(
        tokens=tokens,
        pairs=load.mean(causal_pairs(new, cached)) * per_chunk,
        keys=keys,
        ends=per_chunk,
        new=mean,
        cached=load.mean(cached),
        share=per_chunk,
        images=images,
    )
    return Prefill(chunks, chunk, mean)


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
    A tower is on the first stage, beside its layers.
    """
    shard = plan.shard(machine)
    prefill = split_prompt(load, plan)
    part = stage_share(model, plan, shard)
    if weights is None:
        weights = chip_weights(machine, model, plan, precision)
    filled: Array = weights
    # Intermediate results are linear in the sequences of a pass: a chunk's, and one sequence's.
    groups = attention_groups(plan)
    chunk = activation_bytes(model, Step(0, load.input, chunk=prefill.chunk, groups=groups), shard)
    chunk = chunk if isinstance(prompts, int) else chunk * prompts
    sequence = activation_bytes(model, Step(1, load.input, groups=groups), shard)
    if model.encoder is not None and prefill.chunk.images is not None:
        filled = filled + encoder_weight_bytes(model.encoder, shard)
        encoded, _ = prefill.chunk.encodings
        chunk = maximum(chunk, as_real(encoder_activation_bytes(model.encoder, encoded, shard)))
    new = maximum(as_real(load.isl * (1.0 - load.prefix_hit)), 1.0)

    def pages(tokens: Array) -> Array:
        whole = ceil_div(tokens, engine.block) * engine.block
        own = sequence_bytes(model, precision, whole, shard) * part
        return own if beside is None else own + beside

    # Each class has a prefix of its own.
    shared = kv_bytes(model, precision, as_real(load.isl) - new, shard) * part
    whole = pages(new + load.osl)
    own = request_sizes(load, pages(new), whole)
    if load.weight is not None:
        shared, whole = jnp.sum(shared, axis=-1), jnp.max(whole, axis=-1)
    live = load.while_decoding(pages(new + 0.5 * load.osl))
    tiers = memory.capacity(machine, engine.memory_fraction, plan.offload)
    # Intermediate results and the engine's own stay in the fastest memory.
    tiers = [tiers[0] - chunk - engine.workspace * machine.floors.hosted, *tiers[1:]]
    free = sum(tiers[1:], tiers[0]) - filled - shared
    held = load.while_decoding(pages(new + engine.reservation * load.osl))
    each = held + sequence * inverse(plan.stages)
    fit = maximum(free, 0.0) * inverse(each)
    admitted = floor(fit)
    usable = memory.capacity(machine, 1.0, plan.offload)
    margin = (free - sequence - whole) / sum(usable[1:], usable[0])
    return Footprint(
        filled, chunk, sequence, shared, live, margin, admitted, tuple(tiers), fit, own
    )  # fmt: skip


def preempted(
    load: Load,
    plan: Plan,
    engine: Engine,
    room: Footprint,
    prefill: Prefill,
    batch: Array,
    rounds: Array,
    *,
    depth: Real | None = None,
    fused: Real | None = None,
    here: Real = 1.0,
) -> Preemption:
    """Returns preemptions of an attention group of `batch` requests that decode in `rounds`.

    Where steps that carry a chunk decode as well, only so many decode as chunks leave, whatever
    memory has room for. `depth` and `fused` are as of `passes`; `here` is 1 where the group
    computes prompts, and 0 where it cannot compute any again.
    """
    fused = 1.0 - as_real(engine.exclusive) if fused is None else as_real(fused)
    deep = as_real(plan.stages if depth is None else depth)
    packed = maximum(1.0, plan.chunk * inverse(prefill.new_tokens))
    most = rounds * deep * packed * inverse(prefill.chunks)
    most = jnp.where(fused > 0.0, maximum(most, 1.0), batch)
    greedy = here * greed(load, engine)
    return preemption(room.sizes, room.live, room.fit, batch, most, rounds, greedy)


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

    Prompts shorter than a chunk share one: as many as finish in a round, C/(M(O + 1)), if they fit;
    those that are computed again are so when one finishes.
    Where every pass carries a chunk, O·stages/n sequences decode beside it, and no more.

    Args:
        rounds: decode passes of a request, where that is not its output tokens.
        depth: most micro-batches of a round, where that is not the plan's stages.
        fused: 1 where a chunk rides along with decoding sequences, as the engine says otherwise.
        prompts: that share a chunk if they fit, as many as finish in a round otherwise.
        queries: tokens that a decoding sequence brings to a pass.
    """
    each = as_real(load.output if rounds is None else rounds)
    fused = 1.0 - as_real(engine.exclusive) if fused is None else as_real(fused)
    deepest = as_real(plan.stages if depth is None else depth)
    micro = minimum(running, deepest)
    per_micro, per_slot = inverse(micro), inverse(deepest)
    room = maximum(1.0, plan.chunk * inverse(prefill.new_tokens))
    finishing = running * per_micro * inverse(each + 1.0) if prompts is None else prompts
    entered = 1.0 + prefill.again
    # With nothing computed again both are equal, always; the derivative is then that of the last.
    anew = minimum(maximum(finishing, 1.0) * entered, room)
    together = maximum(anew, maximum(1.0, minimum(finishing, room)))
    chunks = prefill.chunks * entered * inverse(together)
    one = prefill.chunk
    images = None if one.images is None else one.images * together
    shared = dataclasses.replace(
        one, tokens=one.tokens * together, ends=one.ends * together, prompts=together, images=images
    )
    # Chunks follow each other through all stages, however few sequences decode in between.
    saturated = each * inverse(per_slot * chunks)
    context = load.context
    # Prompts computed in steps of their own starve no one, and nothing decodes beside them.
    most = jnp.where(fused > 0.0, maximum(saturated, 1.0), running)
    decoding = minimum(running, most) * per_micro
    beside = fused * minimum(maximum(0.0, running - 1.0), saturated) * per_slot
    groups = attention_groups(plan)
    decode = Step(decoding, context, queries, groups=groups)
    return Passes(
        micro, chunks, decode, Step(beside, context, queries, chunk=shared, groups=groups)
    )


def _launches(rank: Rank, layers: Real, gaps: Real, engine: Engine, busy: Array) -> Usage:
    """Returns what waiting for launches adds to `layers` that keep the device `busy` [s].

    Launches run beside the device, so they add what its busy time does not cover.
    """
    floors = rank.machine.floors
    count = as_real(layers)
    serial = (floors.serial + gaps * floors.hosted) * count
    launch = (floors.launch + engine.launch_floor * floors.hosted) * count
    waiting = serial + maximum(launch - (busy + serial), 0.0)
    return Usage(waiting, latency=waiting)


def unhidden(
    rank: Rank,
    model: Model,
    step: Step,
    plan: Plan,
    engine: Engine,
    layers: Array,
    tower: Array | None = None,
) -> dict[str, tuple[Real, Usage]]:
    """Returns what a pass costs beside its operators, as counts and usage by name.

    `layers` and `tower` are busy times of the device [s]; None where no images are encoded.
    """
    floors = rank.machine.floors
    # Steps of decoding sequences alone are captured in a graph; others are launched one by one.
    gaps = engine.launch_graph if step.chunk is None else engine.launch_eager
    launched = {"launches": (1, _launches(rank, model.layers, gaps, engine, layers))}
    if model.encoder is not None and step.chunk is not None and tower is not None:
        _, runs = step.chunk.encodings
        count = model.encoder.layers * runs
        launched["encoder_launches"] = (1, _launches(rank, count, gaps, engine, tower))
    host = as_real(engine.host_step + engine.host_sequence * step.sequences)
    if step.chunk is not None:
        host = host + engine.host_prefill + engine.host_request * step.chunk.ends
    host = host * floors.hosted
    return {
        **launched,
        "host": (1, Usage(host, latency=host)),
        "stage_crossing": (
            crossings(plan),
            crossing_usage(step.all_rows * model.hidden, plan.chips, rank),
        ),
    }


def crossings(plan: Plan) -> Array:
    """Returns how often a token goes from a chip of one stage to a chip of the next."""
    return maximum(minimum(as_real(plan.chips), plan.stages) - 1.0, 0.0)


def port_time(rank: Rank, model: Model, step: Step, plan: Plan) -> Array:
    """Returns how long a step's hand-over occupies the busiest port of a pipeline [s]."""
    elements = step.all_rows * model.hidden
    once = crossing_port(elements, plan.chips, rank.machine.fabric)
    return minimum(crossings(plan), 1.0) * once


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
    """Returns the time of one micro-batch through all stages, and of the busiest one."""
    shard = plan.shard(rank.machine)
    layers = total_usage(norm_operators(model, step, precision), rank)
    for block in model.blocks:
        ops = block_operators(model, block, step, shard, precision)
        layers = layers.plus(total_usage(ops, rank).scale(block.count))
    head = total_usage(head_operators(model, step, shard, precision), rank)
    encoding = tower_operators(model, step, shard, precision)
    tower = total_usage(encoding, rank) if encoding else None
    busy = None if tower is None else tower.seconds
    rest = unhidden(rank, model, step, plan, engine, layers.seconds, busy)
    layers, host = layers.plus(rest["launches"][1]), rest["host"][1]
    last = head.plus(host)
    whole, first = layers.plus(last), None
    if tower is not None:
        # All of it is on the first stage.
        tower = tower.plus(rest["encoder_launches"][1])
        whole, first = whole.plus(tower), tower.seconds
    count, crossing = rest["stage_crossing"]
    whole = whole.plus(crossing.scale(count))
    port = port_time(rank, model, step, plan)
    stage = occupied(plan, model.layers, layers.seconds, last.seconds, host.seconds, first, port)
    return Pass(whole, whole.seconds, stage)


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
    if load.images is not None and model.encoder is None:
        raise InputError("images: the network has no encoder")
    shard = plan.shard(machine)
    prefill = split_prompt(load, plan)
    room = footprint(machine, model, load, plan, precision, engine)
    # Attention groups are alike: what follows is of one, and the replica has `groups` of them.
    groups = attention_groups(plan)
    every = 1.0 if groups is None else groups
    batch = as_real(plan.batch) if groups is None else as_real(plan.batch) * inverse(groups)
    isl, osl = as_real(load.input), as_real(load.output)
    lost = preempted(load, plan, engine, room, prefill, batch, osl)
    prefill = prefill._replace(again=lost.again)
    seats = minimum(batch, maximum(room.admitted, 1.0))
    running = seats - minimum(lost.fewer, maximum(seats - 1.0, 0.0))

    others = maximum(0.0, running - 1.0)
    micro, chunks, decode_step, mixed_step = passes(load, plan, prefill, running, engine)
    lying = placed(machine, plan, room, running)
    rank = Rank(served(machine, engine), shard.share, efficiencies, lying)
    decode = run_step(rank, model, decode_step, plan, precision, engine)
    mixed = run_step(rank, model, mixed_step, plan, precision, engine)
    # With one stage both are equal, always; the derivative is then that of the latency.
    decode_round = maximum(micro * decode.stage, decode.latency)
    mixed_round = maximum(micro * mixed.stage, mixed.latency)

    # A request occupies its share of passes, and waits for the whole of each.
    alone = as_real(engine.exclusive)
    together = alone * load.in_step
    entered = 1.0 + prefill.again
    prompts = Prompts(
        service=chunks * mixed.stage,
        fill=mixed.latency - mixed.stage + (prefill.chunks * entered - chunks) * mixed.stage,
        round=mixed_round,
        fixed=(mixed.usage.parts[1] + mixed.usage.parts[2] + mixed.usage.parts[4])
        * (mixed_round * inverse(mixed.latency)),
        fit=prefill.new_tokens * entered * inverse(chunks * maximum(as_real(plan.chunk), 1.0)),
        per_round=chunks * inverse(as_real(plan.stages)),
        customers=running,
    )
    away = maximum(osl - 1.0, 0.0)
    # A batch in step stays until its longest output ends; idle places are computed all the same.
    stays = away if load.spread is None else away * (1.0 + together * (load.last_of(running) - 1.0))
    # One sequence fewer takes its own keys along.
    keys = decode.usage.parts[2] * inverse(decode.latency * running)
    without = decode_round * (1.0 - keys)
    decoding = Decoding(decode_round, without, running, osl, stays, 1.0 - alone, together)
    found = closed_loop(prompts, decoding, load, engine)
    share, tpot, started, rate = found.share, found.time, found.started, found.rate
    waiting = maximum(batch - running, 0.0) / rate
    late = after_first(lost, prompts.fill + prompts.service, rate, osl)
    ttft = started + waiting - late
    waited = late * inverse(maximum(away, 1.0))
    tpot = tpot + waited
    stopped = late * inverse(maximum(minimum(lost.times, away), 1.0))
    e2e = ttft + away * tpot

    # Per request: n passes with a chunk, and the decode passes that its tokens then still need.
    per_decoding = inverse(decode_step.sequences)
    plain = maximum(stays - chunks * mixed_step.sequences, 0.0) * per_decoding
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
    per_token = per_output * osl * inverse(osl + isl)
    watts = chip_power * plan.chips
    dollars = spend(machine.price, machine.site, chip_power) * plan.chips

    # As `mean_round`: a step of prompts alone takes the place of no other.
    carrying = share * (1.0 - 0.5 * together)
    between = (1.0 - carrying * (1.0 - alone)) * decode_round / decode.latency
    carried = carrying * mixed_round / mixed.latency
    mean_parts = [
        between * d + carried * m
        for d, m in zip(decode.usage.parts, mixed.usage.parts, strict=True)
    ]
    mean_parts[-1] = mean_parts[-1] + waited
    parts = jnp.stack(mean_parts)
    margins = jnp.stack(
        [
            room.margin,
            kernel_margin(machine, precision),
            divisibility(model, shard),
            (model.max_context - load.longest) / model.max_context,
            1.0 - ttft * inverse(asked.ttft),
            1.0 - tpot * inverse(asked.tpot),
            *budget_margins(
                asked, taken(machine, plan.chips * plan.replicas, dollars * plan.replicas)
            ),
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
        longest_gap=jnp.where(others > 0.0, mixed_round, decode_round) + stopped,
        request_rate=rate,
        output_rate=output_rate,
        admitted=room.admitted * every,
        running=running * every,
        chunk_share=share,
        prefill_busy=prefill_busy,
        preempted=lost.times,
        recomputed=lost.again,
        weight_bytes=room.weights,
        kv_bytes=kv,
        activation_bytes=activations,
        memory_bytes=room.weights + kv + activations + engine.workspace * machine.floors.hosted,
        chip_power=chip_power,
        power=watts * plan.replicas,
        energy_per_output_token=watts * decode_busy * per_output,
        energy_per_total_token=watts * per_token,
        usd_per_output_token=dollars * decode_busy * per_output,
        usd_per_input_token=dollars * prefill_busy * per_output * osl * inverse(isl),
        usd_per_total_token=dollars * per_token,
        chips=as_real(plan.chips * plan.replicas),
        parts=parts,
        margins=margins,
        feasible=feasible,
        binding=binding,
        isl=isl,
        osl=osl,
        replicas=as_real(plan.replicas),
    )


class Taken(NamedTuple):
    """What chips take of power [W], footprint [racks] and cost [USD/s]; 0 where unknown."""

    power: Array
    racks: Array
    cost: Array


def taken(machine: Machine, chips: Real, dollars: Array) -> Taken:
    """Returns what so many chips take; `dollars` is their cost [USD/s]."""
    around = machine.site
    racked = as_real(around.rack_chips) > 0.0
    racks = jnp.where(racked, chips * inverse(jnp.where(racked, around.rack_chips, 1.0)), 0.0)
    return Taken(around.provisioned_power * chips, racks, dollars)


def budget_margins(asked: Limits, used: Taken) -> tuple[Array, ...]:
    """Returns what is left of power, footprint and cost, relative; −1 where a budget is asked for
    and what is taken is unknown."""
    amounts = (used.power, used.racks, used.cost * HOUR)
    limits = (asked.power, asked.racks, asked.cost)
    return tuple(
        jnp.where((amount > 0.0) | (limit >= UNLIMITED), (limit - amount) * inverse(limit), -1.0)
        for amount, limit in zip(amounts, map(as_real, limits), strict=True)
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
