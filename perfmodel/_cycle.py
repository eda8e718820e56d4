"""The cycle of decoding sequences over pools: drafts, attention and FFN of every layer, the head.

See `perfmodel.system` for the formulas.
"""

import dataclasses
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from perfmodel.footprint import attention_groups
from perfmodel.machine import Rank, Usage
from perfmodel.models.draft import Draft, draft_operators
from perfmodel.models.transformer import (
    Model,
    block_operators,
    head_operators,
    norm_operators,
)
from perfmodel.passes import port_time, run_step, unhidden
from perfmodel.placement import Link, Pool, System
from perfmodel.plan import Engine, Plan
from perfmodel.relax import Real, as_real, inverse, maximum
from perfmodel.stages import occupied
from perfmodel.step import Step
from perfmodel.timing import total_usage


class Shares(NamedTuple):
    """1 where two parts are on one pool: p prefill, a attention, f ffn, g draft."""

    pa: Array
    pf: Array
    af: Array
    gp: Array
    ga: Array
    gf: Array

    @classmethod
    def of(cls, system: System) -> "Shares":
        """Returns the pairs of a placement; those of a draft are 0 where there is none."""
        same = system.same
        none = as_real(0.0)
        draft = [none] * 3 if system.draft is None else [same[..., 3, i] for i in range(3)]
        return cls(same[..., 0, 1], same[..., 0, 2], same[..., 1, 2], *draft)


class Cycle(NamedTuple):
    """A cycle of decoding sequences.

    Fields: `time` of a round of all micro-batches [s], and of the `way` of one, of which `guess`
    is drafting; sequences of a micro-batch (`batch`); `work` of attention, ffn, draft, activation
    link and draft link for one micro-batch [s], shape [5], and the most that a pool or link of
    them has of it (`busiest`), with ffn on the pool of attention as part of that one's; joules of
    one rank of attention, ffn and draft, shape [3]; seconds of the way by `serving.PARTS`, shape
    [5].
    """

    time: Array
    way: Array
    guess: Array
    batch: Array
    work: Array
    busiest: Array
    joules: Array
    parts: Array


def ports(pool: Pool, link: Link) -> Array:
    """Returns the bytes a second that all chips of a replica send or take on a link [B/s]."""
    fabric = pool.machine.fabric
    outside = fabric.nic_bandwidth * fabric.nic_efficiency
    each = outside + link.inside * (fabric.bandwidth - outside)
    return pool.plan.chips * each


def crossing_time(link: Link, sender: Pool, sent: Real, receiver: Pool, received: Real) -> Array:
    """Returns the time of a message without its latency: bytes that a replica sends, takes [s]."""
    ends = maximum(sent * inverse(ports(sender, link)), received * inverse(ports(receiver, link)))
    return maximum(link.ports * ends, as_real(sent) * link.seconds_per_byte)


class Ranks(NamedTuple):
    """A rank of each pool, its shard and the software beside it."""

    prefill: Rank
    attention: Rank
    ffn: Rank
    draft: Rank | None


def draft_engine(engine: Engine) -> Engine:
    """Returns the engine of a draft's passes: inside a step, without the host's work between."""
    zero = as_real(0.0)
    names = ("host_step", "host_sequence", "host_prefill", "host_request")
    where = [lambda e, n=n: getattr(e, n) for n in names]
    return eqx.tree_at(lambda e: tuple(get(e) for get in where), engine, (zero,) * len(names))


def one_pass(
    rank: Rank, model: Model, step: Step, pool: Pool, engine: Engine
) -> tuple[Usage, Array]:
    """Returns a whole pass of a network on one pool: its usage, and the time of a stage [s]."""
    found = run_step(rank, model, step, pool.plan, pool.precision, engine)
    return found.usage, found.stage


def guess_pass(
    rank: Rank, draft: Model | Draft, step: Step, pool: Pool, engine: Engine
) -> tuple[Usage, Array]:
    """Returns a pass of what guesses ahead: a network of its own, or a layer of draft heads."""
    own = draft_engine(engine)
    if not isinstance(draft, Draft):
        return one_pass(rank, draft, step, pool, own)
    shard = pool.plan.shard(pool.machine)
    spent = total_usage(draft_operators(draft, step, shard, pool.precision), rank)
    waits = unhidden(rank, draft.layer, step, pool.plan, own, as_real(spent.seconds))
    spent = spent.plus(waits["launches"][1])
    return spent, as_real(spent.seconds)


def cycle(
    system: System,
    model: Model,
    draft: Model | Draft | None,
    ranks: Ranks,
    step: Step,
    micro: Array,
    engine: Engine,
    reading: Real = 0.0,
) -> Cycle:
    """Returns the cycle of `micro` micro-batches that each bring `step` to a replica of attention.

    `reading` is the time that the draft spends on a prompt, over the cycles of a request, where no
    other part does that work.
    """
    on = Shares.of(system)
    attention, ffn = system.attention, system.ffn
    shard_a, shard_f = attention.plan.shard(attention.machine), ffn.plan.shard(ffn.machine)
    # Replicas of attention that share one of another pool bring their sequences together.
    ratio = attention.plan.replicas * inverse(ffn.plan.replicas)
    groups_a, groups_f = (groups_of(system, pool) for pool in (attention, ffn))
    wide = step
    if groups_a is not None and groups_f is not None:
        sequences = step.sequences * (ratio * (groups_a / groups_f))
        wide = Step(sequences, step.context, step.queries, groups=groups_f)
    else:
        wide = Step(step.sequences * ratio, step.context, step.queries)

    mixing = total_usage(norm_operators(model, step, attention.precision), ranks.attention)
    for block in model.attention:
        ops = block_operators(model, block, step, shard_a, attention.precision)
        mixing = mixing.plus(total_usage(ops, ranks.attention).scale(block.count))
    feeding, fed = Usage(), as_real(0.0)
    for block in model.feed_forward:
        ops = block_operators(model, block, wide, shard_f, ffn.precision)
        feeding = feeding.plus(total_usage(ops, ranks.ffn).scale(block.count))
        fed = fed + block.count
    head = total_usage(head_operators(model, step, shard_a, attention.precision), ranks.attention)
    here = mixing.seconds + on.af * feeding.seconds
    rest = unhidden(ranks.attention, model, step, attention.plan, engine, here)
    there = unhidden(ranks.ffn, model, wide, ffn.plan, engine, as_real(feeding.seconds))
    # Where a layer is cut in two, each pool launches half of it.
    mixing = mixing.plus(rest["launches"][1].scale(0.5 + 0.5 * on.af))
    feeding = feeding.plus(there["launches"][1].scale(0.5 - 0.5 * on.af))
    host = as_real(rest["host"][1].seconds)
    head = head.plus(rest["host"][1])
    crossings, crossing = rest["stage_crossing"]
    others, other = there["stage_crossing"]
    apart = 1.0 - on.af
    # What is on one pool occupies its stages together.
    work_a = occupied(
        attention.plan,
        model.layers,
        mixing.seconds + on.af * feeding.seconds,
        head.seconds,
        host,
        port=port_time(ranks.attention, model, step, attention.plan),
    )
    work_f = apart * occupied(
        ffn.plan,
        model.layers,
        feeding.seconds,
        0.0,
        port=port_time(ranks.ffn, model, wide, ffn.plan),
    )

    # Hand-overs between attention and FFN: every layer, there and back.
    wire = step.all_rows * model.hidden * attention.machine.fabric.wire_bytes
    over = apart * crossing_time(system.links.activations, attention, wire, ffn, wire * ratio)
    delay = apart * system.links.activations.latency
    hop = Usage(over + delay, network=over + delay).scale(2.0 * fed)

    total = mixing.plus(feeding).plus(head).plus(crossing.scale(crossings))
    total = total.plus(other.scale(others * apart)).plus(hop)
    way, parts = total.seconds, jnp.stack(total.parts)
    joules = [
        mixing.plus(head).plus(crossing.scale(crossings)).joules,
        feeding.plus(other.scale(others * apart)).joules,
    ]
    zero = as_real(0.0)
    work_g, drafted, over_g, guess_way = zero, zero, zero, zero
    spec, guesser = system.speculation, system.draft
    if spec is not None and guesser is not None and draft is not None and ranks.draft is not None:
        sharing = attention.plan.replicas * inverse(guesser.plan.replicas)
        groups_g = groups_of(system, guesser)
        if groups_a is not None and groups_g is not None:
            sharing = sharing * (groups_a / groups_g)
        readers = step.sequences * sharing
        guess = Step(readers * spec.candidates, step.context, groups=groups_g)
        once, once_stage = guess_pass(ranks.draft, draft, guess, guesser, engine)
        passes = as_real(spec.tokens)
        work_g = passes * once_stage + readers * reading
        drafted = passes * once.joules
        # Token numbers, 4 B each, to the draft and back.
        ids = 4.0 * step.sequences * spec.rows
        away = (1.0 - on.ga) * spec.drafting
        over_g = away * crossing_time(system.links.draft, guesser, ids * sharing, attention, ids)
        turn = 2.0 * (over_g + away * system.links.draft.latency)
        guess_way = passes * once.seconds + turn
        way = way + guess_way
        guessing = once.scale(passes).plus(Usage(turn, network=turn))
        parts = parts + jnp.stack(guessing.parts)
    busiest = maximum(work_a + on.ga * work_g, work_f + on.gf * work_g)
    busiest = maximum(busiest, work_g + on.ga * work_a + on.gf * work_f)
    busiest = maximum(maximum(busiest, over * fed), over_g)
    return Cycle(
        time=maximum(micro * busiest, way),
        way=way,
        guess=guess_way,
        batch=as_real(step.sequences),
        work=jnp.stack([work_a, work_f, work_g, over * fed, over_g]),
        busiest=busiest,
        joules=jnp.stack([*map(as_real, joules), as_real(drafted)]),
        parts=parts,
    )


def shared_plan(system: System, pool: Pool) -> Plan:
    """Returns the plan of a pool whose batch is of all requests that share a replica of it."""
    if pool.plan.attention_dp is None:
        return pool.plan
    attention = system.attention.plan
    ratio = as_real(attention.replicas) / as_real(pool.plan.replicas)
    # Where replicas are more than requests, one that works has one.
    return dataclasses.replace(pool.plan, batch=maximum(attention.batch * ratio, as_real(1.0)))


def groups_of(system: System, pool: Pool) -> Array | None:
    """Returns how many attention groups of a replica have work, of the requests that share it."""
    return attention_groups(shared_plan(system, pool))
