"""Steady state of a serving system: any placement of prefill, attention, FFN and draft on pools.

`perfmodel.serving` has the service of one pool. Here each part of the work runs on the pool that a
placement gives it, whatever chips that consists of, and what pools do not share crosses a link. No
serving form is known by name: two parts on one pool have `same` 1, on two pools 0, and the formulas
are products with it. With one pool, no drafts and no hits it is the service of `serving`.

A cycle is what decoding sequences go through for their next tokens, in m micro-batches that take
turns: drafts (k passes of the draft), then attention and FFN of every layer, then the head.

    cycle         max(m · work of the busiest pool or link, the way of one micro-batch)
    work          of all parts of the cycle that a pool does, itself cut into stages
    tokens        1 + P₁ + … + P_k of a sequence, one without drafts
    TPOT          (cycle + φ·(what a prompt's chunk adds to it)) / tokens

The first line holds a pipeline (m ≥ stages), attention–FFN ping-pong (the work of a layer is
max(m·t_A, m·t_F, m·t_link, t_A + t_F + 2·t_link), times its layers) and drafts on other chips.

Prompts: a closed loop of C requests per replica queues for prefill as in `serving`, whose customers
are all that share a prefill replica, and then for the link. Where prefill has a pool of its own no
chunk meets a decoding sequence, φ = 0, and the sequences that decode are those not in prefill or
hand-over, b = rate·O·TPOT(b): two steps are evaluated and TPOT is the line through both. A request
is then taken in twice, by the server that computes its prompt and by the one that decodes.

    hand-over     bytes of the new keys / (ports of the replica, the slower end)
    seen of it    all, or what is left after the prompt where layers stream while it is computed
"""

from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from perfmodel._cycle import (
    Cycle,
    Ranks,
    Shares,
    cycle,
    groups_of,
    guess_pass,
    one_pass,
    ports,
    shared_plan,
)
from perfmodel._loop import Decoding, Loop, Prompts, closed_loop, closed_queue, variability
from perfmodel._pools import held, lying
from perfmodel.efficiencies import Efficiencies
from perfmodel.footprint import Prefill, chip_weights, preempted, split_prompt
from perfmodel.machine import Rank
from perfmodel.margins import Taken, budget_margins, kernel_margin, taken
from perfmodel.models.draft import Draft
from perfmodel.models.transformer import Model, sequence_bytes
from perfmodel.ownership import spend
from perfmodel.passes import passes, served
from perfmodel.placement import Pool, System
from perfmodel.plan import Engine, Limits, Load
from perfmodel.preemption import after_first
from perfmodel.relax import Real, as_real, ceil, inverse, maximum, minimum
from perfmodel.step import Chunk, Shard, Step

STATIONS = ("prefill", "attention", "ffn", "draft", "kv link", "activation link", "draft link")
"""What can be busy, in the order of `SystemEstimate.load`."""


class SystemEstimate(eqx.Module):
    """What a system achieves. Scalars unless a shape is given; SI units.

    Fields:
        ttft, tpot, e2e: time to first token (hand-over included), per output token after it, end
            to end [s]. longest_gap: between two steps that yield tokens [s].
        request_rate, output_rate: of the whole system [1/s].
        admitted, running: requests of a replica of attention that fit its memory, and that are
            served at once. decoding: those of them that decode.
        tokens_per_cycle: of a sequence, 1 without drafts.
        chunk_share: chunks of others' prompts per cycle.
        preempted: as of `serving.Estimate`; 0 where prompts have a pool of their own.
        handover: part of TTFT that keys and values wait for a link [s].
        prefill_time: of the mean prompt alone, without any wait [s].
        chips, power: of all pools [W].
        energy_per_output_token, energy_per_total_token [J]; usd_per_output_token,
        usd_per_input_token, usd_per_total_token [USD]: as of `serving.Estimate`; 0 where the price
            of any pool is unknown.
        load: share of time that pools, by part, and links work, shape [7] by `STATIONS`; a pool
            that does several parts has the work of all of them in each.
        memory_bytes, weight_bytes, memory_margin, chip_power, pool_chips: by part, shape [4].
        owns: 1 where a part is the first on its pool, shape [4].
        parts: seconds of TPOT by `serving.PARTS`, shape [5]; hand-overs count as network.
        margins: by `margins.MARGINS`, shape [9]. feasible: whether all are ≥ 0.
    """

    ttft: Array
    tpot: Array
    e2e: Array
    longest_gap: Array
    request_rate: Array
    output_rate: Array
    admitted: Array
    running: Array
    decoding: Array
    tokens_per_cycle: Array
    chunk_share: Array
    preempted: Array
    handover: Array
    prefill_time: Array
    chips: Array
    power: Array
    energy_per_output_token: Array
    energy_per_total_token: Array
    usd_per_output_token: Array
    usd_per_input_token: Array
    usd_per_total_token: Array
    load: Array
    memory_bytes: Array
    weight_bytes: Array
    memory_margin: Array
    chip_power: Array
    pool_chips: Array
    owns: Array
    parts: Array
    margins: Array
    feasible: Array
    isl: Array
    osl: Array

    @property
    def interactivity(self) -> Array:
        """Output tokens per second that one user sees while decoding, 1/TPOT."""
        return 1.0 / self.tpot

    @property
    def output_rate_per_chip(self) -> Array:
        """Output tokens per second over every deployed chip, of all pools."""
        return self.output_rate / self.chips


def _misses(blocks: tuple, shard: Shard) -> Array:
    """Returns how far blocks are from being cut into whole parts."""
    miss = as_real(0.0)
    for block in blocks:
        for whole in block.body.parts(shard):
            miss = miss + ceil(as_real(whole)) - whole
    return miss


def _arriving(pool: Pool, model: Model, prefill: Prefill, rank: Rank, rate: Array) -> Array:
    """Returns how many prompts arrive while one is computed, on a pool of their own.

    Args: `rate`, prompts that arrive at a replica in a second. The time of a prompt is taken from
        the roofline of its weights: read once a chunk, multiplied with every token.
    """
    read = chip_weights(pool.machine, model, pool.plan, pool.precision)
    elements = read * inverse(as_real(pool.precision.weight_bytes)) * pool.plan.stages
    flops = 2.0 * elements * prefill.chunk.tokens
    return rate * prefill.chunks * maximum(flops * rank.per_flop, read * rank.per_byte)


class _Link(NamedTuple):
    """Time that the keys of a prompt occupy the ports of both ends of the link [s]: of a prefill
    replica, `sending`, and of one that decodes, `taking`."""

    sending: Array
    taking: Array


def evaluate(
    system: System,
    model: Model,
    load: Load,
    engine: Engine,
    limits: Limits | None = None,
    draft: Model | Draft | None = None,
    efficiencies: Efficiencies | None = None,
) -> SystemEstimate:
    """Returns what a system achieves; a pure function of arrays, differentiable in all.

    Args:
        system: pools, links and placement (`perfmodel.placement.build`).
        model: the network, and `draft`, what guesses ahead where anything does: another network,
            or draft heads of this one; with array leaves.
        load, engine: traffic in a closed loop of `attention.plan.batch` requests per replica, and
            the software on all pools.
        limits, efficiencies: as of `serving.estimate`.
    """
    asked = Limits() if limits is None else limits
    on = Shares.of(system)
    first, attention, ffn, guesser = system.prefill, system.attention, system.ffn, system.draft
    spec = system.speculation
    yielded = as_real(1.0) if spec is None else spec.yielded
    queries: Real = 1 if spec is None else spec.rows
    prefill = split_prompt(load, first.plan)
    kept = held(system, model, draft, load, engine)
    room = kept.attention

    # Attention groups are alike: what follows is of one, and a replica has `every` of them.
    groups, groups_p = groups_of(system, attention), groups_of(system, first)
    every = as_real(1.0 if groups is None else groups)
    every_p = as_real(1.0 if groups_p is None else groups_p)
    batch = as_real(attention.plan.batch) * inverse(every)
    isl, osl = as_real(load.input), as_real(load.output)
    cycles, away = osl * inverse(yielded), maximum(osl - 1.0, 0.0) * inverse(yielded)
    fused = on.pa * on.af * (1.0 - as_real(engine.exclusive))
    depth = maximum(maximum(attention.plan.stages, ffn.plan.stages), as_real(system.micro))
    lost = preempted(
        load, first.plan, engine, room, prefill, batch, cycles,
        depth=depth, fused=fused, here=on.pa,
    )  # fmt: skip
    prefill = prefill._replace(again=lost.again)
    entered = 1.0 + lost.again
    seats = minimum(batch, maximum(room.admitted, 1.0))
    running = seats - minimum(lost.fewer, maximum(seats - 1.0, 0.0))
    others = maximum(0.0, running - 1.0)
    # Customers of one group of a prefill replica.
    ratio = attention.plan.replicas * inverse(first.plan.replicas) * (every / every_p)
    customers = running * ratio

    listed = [
        Rank(served(p.machine, engine), p.plan.shard(p.machine).share, efficiencies, lies)
        for p, lies in zip(system.pools, lying(system, kept, running), strict=True)
    ]
    ranks = Ranks(listed[0], listed[1], listed[2], listed[3] if len(listed) > 3 else None)
    # The draft reads every prompt, too, on its own pool or beside the network.
    read, reading = as_real(0.0), as_real(0.0)
    if guesser is not None and draft is not None and ranks.draft is not None and spec is not None:
        prompt = Step(0, load.input, chunk=prefill.chunk, groups=groups_of(system, guesser))
        _, once = guess_pass(ranks.draft, draft, prompt, guesser, engine)
        read = spec.drafting * prefill.chunks * entered * once
        reading = (1.0 - on.gp) * read * inverse(cycles)

    shape: dict[str, Real] = dict(rounds=cycles, depth=depth, fused=fused, queries=queries)
    reads = shared_plan(system, first)
    plain_step = passes(load, reads, prefill, running, engine, **shape)
    micro, context = plain_step.micro, plain_step.decode.context

    def decode(sequences: Array, turns: Array) -> Cycle:
        step = Step(sequences, context, queries, groups=groups)
        return cycle(system, model, draft, ranks, step, turns, engine, reading)

    full = decode(as_real(plain_step.decode.sequences), micro)

    # On a pool of their own, prompts share a chunk if several arrive while one is computed.
    pace = customers * inverse(cycles * full.time)
    waiting = _arriving(first, model, prefill, ranks.prefill, pace)
    finishing = running * inverse(micro) * inverse(cycles + 1.0)
    shape["prompts"] = on.pa * finishing + (1.0 - on.pa) * waiting
    carried = passes(load, reads, prefill, running, engine, **shape)
    chunks, mixed_step = carried.chunks, carried.mixed
    mixed, stage = one_pass(ranks.prefill, model, mixed_step, first, engine)
    also = on.gp * read * inverse(chunks)
    # A step that carries a chunk drafts as others do.
    stage = stage + also + fused * on.ga * full.work[2]
    way = mixed.seconds + also + fused * full.guess
    sending, taking = _hand_over(system, model, prefill)
    longest = maximum(micro * stage, way)
    # Chunks hold up decoding wherever a part of it shares the pool that computes them.
    meets = maximum(on.pa, on.pf)
    if spec is not None:
        meets = maximum(meets, on.gp * spec.drafting)
    prompts = Prompts(
        service=chunks * stage,
        fill=way - stage + (prefill.chunks * entered - chunks) * stage,
        round=longest,
        fixed=(mixed.parts[1] + mixed.parts[2] + mixed.parts[4]) * (longest * inverse(way)),
        fit=prefill.new_tokens
        * entered
        * inverse(chunks * maximum(as_real(first.plan.chunk), 1.0)),
        per_round=chunks * inverse(maximum(micro, as_real(first.plan.stages))),
        # Whoever is there has a prompt of its own, though replicas be more than requests.
        customers=maximum(customers, 1.0),
        here=on.pa,
        meets=meets,
    )
    link = _Link((1.0 - on.pa) * sending, (1.0 - on.pa) * taking)
    together = on.pa * (1.0 - fused) * load.in_step
    stays = away if load.spread is None else away * (1.0 + together * (load.last_of(running) - 1.0))
    varied = variability(load, engine)

    def hand_over(gone: Array) -> Array:
        ends = prompts.customers * every_p, running * every
        return _handed(system, model, varied, prompts, link, gone, *ends)

    def loop(turn: Cycle) -> Loop:
        keys = turn.parts[2] * inverse(turn.way * running)
        without = turn.time * (1.0 - keys)
        decoding = Decoding(turn.time, without, running, cycles, stays, fused, together)
        return closed_loop(prompts, decoding, load, engine, hand_over)

    # Where prompts have chips of their own, those that are neither there nor on the link decode.
    apart, least = 1.0 - on.pa, minimum(running, 1.0)
    before = loop(full)
    # Fewer sequences decode faster, so fewer than this rate would keep: the square of the share
    # lies below the answer unless almost all of a token's time is its own keys.
    high_kept = minimum(before.rate * away * before.time, running)
    share = high_kept * inverse(running)
    decoding = on.pa * running + apart * maximum(running * share * share, least)
    turns = on.pa * micro + apart * minimum(decoding, depth)
    fewer = on.pa * full.batch + apart * decoding * inverse(turns)
    less = decode(fewer, turns)
    again = loop(less)
    # How many a round of b sequences keeps decoding is near a line in b; where it meets b.
    span = running - decoding
    wide = span > 1e-3 * running
    per_span = inverse(jnp.where(wide, span, 1.0))
    low_kept = again.rate * away * again.time
    slope = (high_kept - low_kept) * per_span
    met = (low_kept - decoding) * inverse(maximum(1.0 - slope, 0.1))
    met = jnp.clip(met, maximum(least - decoding, -0.3 * span), span)
    weight = jnp.where(wide, apart * met * per_span, 0.0)
    decoding = decoding + weight * span
    # A micro-batch is on the line by its own sequences: of those that do not fill a pipeline there
    # are fewer, and each takes its whole way.
    turns = on.pa * micro + apart * minimum(decoding, depth)
    spread = full.batch - less.batch
    differ = spread > 1e-3 * full.batch
    by_batch = (decoding * inverse(turns) - less.batch) * inverse(jnp.where(differ, spread, 1.0))
    by_batch = jnp.where(differ, apart * by_batch, 0.0)
    turn = Cycle(*(low + (high - low) * by_batch for low, high in zip(less, full, strict=True)))
    turn = turn._replace(time=maximum(turns * turn.busiest, turn.way))
    found = loop(turn)

    late = after_first(lost, prompts.fill + prompts.service, found.rate, osl)
    waited = late * inverse(maximum(osl - 1.0, 1.0))
    rate, tpot = found.rate, found.time * inverse(yielded) + waited
    stopped = late * inverse(maximum(minimum(lost.times, away), 1.0))
    ttft = found.started + maximum(batch - running, 0.0) / rate - late
    e2e = ttft + late + away * found.time

    # Work per second: of an attention group of each part's replica, and of the whole system.
    steps = rate * maximum(stays - on.pa * chunks * mixed_step.sequences, 0.0) * inverse(turn.batch)
    work = [rate * ratio * prompts.service, *(steps * turn.work[i] for i in range(3))]
    joules = [rate * ratio * chunks * mixed.joules, *(steps * turn.joules[i] for i in range(3))]
    pools = system.pools
    count = len(pools)
    same, owns, busy, powers, sizes, dollars = system.same, [], [], [], [], []
    priced = as_real(1.0)
    for i, pool in enumerate(pools):
        owned = as_real(1.0)
        for j in range(i):
            owned = owned * (1.0 - same[..., i, j])
        own = [same[..., i, j] for j in range(count)]
        dynamic = sum(
            own[j] * joules[j] * other.plan.shard(other.machine).ranks
            for j, other in enumerate(pools)
        ) * inverse(as_real(pool.plan.chips))
        machine = pool.machine
        watts = minimum(machine.power.limit, machine.power.running + dynamic)
        size = as_real(pool.plan.chips * pool.plan.replicas)
        owns.append(owned)
        busy.append(sum(own[j] * work[j] for j in range(count)))
        powers.append(watts)
        sizes.append(size)
        dollars.append(spend(machine.price, machine.site, watts) * size)
        priced = priced * jnp.where(machine.price > 0.0, 1.0, 0.0)
    every_second = rate * every * attention.plan.replicas
    output_rate = every_second * osl
    per_output = inverse(output_rate)
    per_token = per_output * osl * inverse(osl + isl)
    chips = as_real(sum(owned * size for owned, size in zip(owns, sizes, strict=True)))
    watts = [o * w * n for o, w, n in zip(owns, powers, sizes, strict=True)]
    spent = [priced * o * d for o, d in zip(owns, dollars, strict=True)]
    # Busy time of prompts is what their chunks add to steps that others would have taken anyway.
    plain = turn.work[0] + on.af * turn.work[1] + on.ga * turn.work[2]
    added = maximum(stage - minimum(mixed_step.sequences, 1.0) * plain, 0.0)
    tokens = on.pa * turn.work[0] + on.pf * turn.work[1] + on.gp * turn.work[2]
    token_time = cycles * inverse(turn.batch) * tokens
    prefill_busy = chunks * added * inverse(chunks * added + token_time)
    input_watts, input_spent = watts[0] * prefill_busy, spent[0] * prefill_busy
    watts, spent = as_real(sum(watts)), as_real(sum(spent))

    # Of what one pool takes and is unknown, all is unknown.
    each = [taken(p.machine, n, d) for p, n, d in zip(pools, sizes, dollars, strict=True)]
    used = Taken(
        *(
            jnp.where(
                sum(o * (a <= 0.0) for o, a in zip(owns, amounts, strict=True)) > 0.0,
                0.0,
                sum(o * a for o, a in zip(owns, amounts, strict=True)),
            )
            for amounts in zip(*each, strict=True)
        )
    )
    margins = _margins(system, model, load, kept.margins, ttft, tpot, asked, used)
    # Keys of all that run, and intermediate results of a micro-batch.
    keys = room.live * decoding + room.shared + room.sequence * (running * inverse(micro))
    shares = [on.pa, as_real(1.0), on.af, on.ga][:count]
    memory = [
        weights + rest + share * keys
        for weights, rest, share in zip(kept.weights, kept.rest, shares, strict=True)
    ]
    sending = maximum(rate * ratio * every_p * link.sending, rate * every * link.taking)
    links = [sending, steps * turn.work[3], steps * turn.work[4]]
    absent = [as_real(0.0)] * (4 - count)
    share = meets * found.share * (1.0 - 0.5 * together)
    mean = (1.0 - fused * share) * (turn.time / turn.way) * turn.parts
    mean = mean + share * (prompts.round / mixed.seconds) * jnp.stack(mixed.parts)
    gap = meets * prompts.round + (1.0 - meets) * turn.time
    return SystemEstimate(
        ttft=ttft,
        tpot=tpot,
        e2e=e2e,
        longest_gap=jnp.where(others > 0.0, gap, turn.time) + stopped,
        request_rate=every_second,
        output_rate=output_rate,
        admitted=room.admitted * every,
        running=running * every,
        decoding=decoding * every,
        tokens_per_cycle=yielded,
        chunk_share=meets * found.share,
        preempted=lost.times,
        handover=found.handed,
        prefill_time=(prompts.fill + prompts.service) * inverse(entered),
        chips=chips,
        power=watts,
        energy_per_output_token=(watts - input_watts) * per_output,
        energy_per_total_token=watts * per_token,
        usd_per_output_token=(spent - input_spent) * per_output,
        usd_per_input_token=input_spent * per_output * osl * inverse(isl),
        usd_per_total_token=spent * per_token,
        load=jnp.stack([*busy, *absent, *links]),
        memory_bytes=jnp.stack([*memory, *absent]),
        weight_bytes=jnp.stack([*kept.weights, *absent]),
        memory_margin=jnp.stack([*kept.margins, *([as_real(1.0)] * (4 - count))]),
        chip_power=jnp.stack([*powers, *absent]),
        pool_chips=jnp.stack([*sizes, *absent]),
        owns=jnp.stack([*owns, *absent]),
        parts=(mean * inverse(yielded)).at[-1].add(waited),
        margins=margins,
        feasible=jnp.all(margins >= 0.0),
        isl=isl,
        osl=osl,
    )


def _hand_over(system: System, model: Model, prefill: Prefill) -> tuple[Array, Array]:
    """Returns the time of the keys of a prompt's new tokens at both ends of the link [s].

    They leave once, and arrive at every rank that holds a copy: kv heads fewer than ranks, and
    latent vectors, are held more than once.
    """
    first, attention, link = system.prefill, system.attention, system.links.kv
    sent = as_real(sequence_bytes(model, first.precision, prefill.new_tokens, Shard()))
    shard = attention.plan.shard(attention.machine)
    each = as_real(sequence_bytes(model, first.precision, prefill.new_tokens, shard))
    taken = maximum(sent, each * shard.attention_ranks)
    between = sent * link.seconds_per_byte
    leaving = maximum(sent * inverse(ports(first, link)) * link.ports, between)
    return leaving, maximum(taken * inverse(ports(attention, link)) * link.ports, between)


def hand_over_seconds(system: System, model: Model, tokens: Real) -> tuple[float, float]:
    """Returns the time of the keys of some prompt tokens over the link, and its latency [s]."""
    zero = as_real(0.0)
    prompt = Prefill(zero, Chunk(zero, zero, zero), as_real(tokens))
    ends = _hand_over(system, model, prompt)
    return float(maximum(*ends)), float(system.links.kv.latency)


def _handed(
    system: System,
    model: Model,
    varied: Real,
    prompts: Prompts,
    link: _Link,
    gone: Array,
    senders: Array,
    takers: Array,
) -> Array:
    """Returns how much later a request decodes because of its keys' way over the link [s].

    The ports of both ends are servers of the closed loop. Where layers stream, all but the last
    may pass while the prompt is computed.
    """
    apart = 1.0 - system.same[..., 0, 1]
    computing = prompts.fill + prompts.service
    rest = gone + computing
    leaves = closed_queue(link.sending, rest, senders, varied)
    enters = closed_queue(link.taking, rest, takers, varied)
    crossing = apart * (maximum(leaves, enters) + system.links.kv.latency)
    early = minimum(maximum(link.sending, link.taking), computing)
    hidden = early * (1.0 - inverse(as_real(model.layers)))
    return maximum(crossing - system.streamed * hidden, 0.0)


def _margins(
    system: System,
    model: Model,
    load: Load,
    memory: list[Array],
    ttft: Array,
    tpot: Array,
    asked: Limits,
    used: Taken,
) -> Array:
    """Returns the signed margins, the least of all pools; of budgets, of all pools together."""
    pools = system.pools[:3]
    least = memory[0]
    for margin in memory[1:]:
        least = minimum(least, margin)
    kernel = kernel_margin(pools[0].machine, pools[0].precision)
    for pool in pools[1:]:
        kernel = minimum(kernel, kernel_margin(pool.machine, pool.precision))
    parts = ((*model.attention, *model.feed_forward), model.attention, model.feed_forward)
    miss = sum(
        _misses(blocks, pool.plan.shard(pool.machine))
        for blocks, pool in zip(parts, pools, strict=True)
    )
    return jnp.stack(
        [
            least,
            kernel,
            # Rounding of a float32 quotient is not a remainder.
            jnp.where(jnp.abs(miss) < 1e-3, 0.0, -as_real(miss)),
            (model.max_context - load.longest) / model.max_context,
            1.0 - ttft * inverse(asked.ttft),
            1.0 - tpot * inverse(asked.tpot),
            *budget_margins(asked, used),
        ]
    )
