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

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from perfmodel._loop import Decoding, Prompts, closed_loop
from perfmodel.efficiencies import Efficiencies
from perfmodel.errors import InputError
from perfmodel.footprint import attention_groups, footprint, placed, preempted, split_prompt
from perfmodel.formats import Precision
from perfmodel.machine import Machine, Rank
from perfmodel.margins import MARGINS, budget_margins, divisibility, kernel_margin, taken
from perfmodel.models.transformer import Model
from perfmodel.ownership import spend
from perfmodel.passes import passes, run_step, served
from perfmodel.plan import Engine, Limits, Load, Plan
from perfmodel.preemption import after_first
from perfmodel.relax import as_real, inverse, maximum, minimum

PARTS = ("compute", "weight bandwidth", "kv bandwidth", "network", "latency")
"""What a step's time consists of, in the order of `Estimate.parts`."""


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
