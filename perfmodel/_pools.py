"""Memory of the pools of a system: what each part of the work keeps on its chips.

A pool that does several parts holds the union of their weights.
"""

import dataclasses
from typing import NamedTuple

from jax import Array

from perfmodel import tiers
from perfmodel._cycle import Shares, groups_of, shared_plan
from perfmodel.footprint import (
    Footprint,
    attention_groups,
    chip_weights,
    footprint,
    placed,
    stage_share,
)
from perfmodel.machine import Placed
from perfmodel.models.draft import Draft, draft_weight_bytes
from perfmodel.models.transformer import Model, sequence_bytes
from perfmodel.placement import Pool, System
from perfmodel.plan import Engine, Load
from perfmodel.relax import Real, as_real, inverse, maximum, minimum
from perfmodel.step import Shard


def layer_bytes(model: Model, mixer: Real, ffn: Real, pool: Pool, shard: Shard) -> Real:
    """Returns bytes of the layers that a rank holds: shares of attention and ffn, 0 or 1 [B]."""
    h, precision = model.hidden, pool.precision
    held = [b.count * b.body.weight_bytes(h, precision, shard) for b in model.attention]
    wide = [b.count * b.body.weight_bytes(h, precision, shard) for b in model.feed_forward]
    norms = model.sublayers * model.norms + model.extra_norms + 1
    small = 2 * norms * model.norm_vectors * h + 2 * model.positions * h
    if model.streams is not None:
        small = small + model.streams.weight_bytes(h, model.sublayers)
    return mixer * (sum(held) + small) + ffn * sum(wide)


class Held(NamedTuple):
    """What is on the chips of each part.

    Fields: footprints of `prefill` (one prompt), of `attention` (sequences that decode), of `ffn`
    (no keys) and of a `draft` with a pool of its own (all its keys are `shared`), None where there
    is none; by part, `weights` and what else is on a chip whatever decodes (`rest`) [B]; relative
    `margins` with one request.
    """

    prefill: Footprint
    attention: Footprint
    ffn: Footprint
    draft: Footprint | None
    weights: list[Array]
    rest: list[Array]
    margins: list[Array]


def held(
    system: System, model: Model, draft: Model | Draft | None, load: Load, engine: Engine
) -> Held:
    """Returns what the chips of each part hold."""
    on = Shares.of(system)
    first, attention, ffn, guesser = system.prefill, system.attention, system.ffn, system.draft
    one = as_real(1.0)

    def layers(pool: Pool, mixer: Array, wide: Array) -> Array:
        shard = pool.plan.shard(pool.machine)
        some = as_real(layer_bytes(model, mixer, wide, pool, shard))
        whole = chip_weights(pool.machine, model, pool.plan, pool.precision, some)
        # Tables are where the embedding and the head are.
        tables = chip_weights(pool.machine, model, pool.plan, pool.precision, as_real(0.0))
        return whole - (1.0 - mixer) * tables

    def workspace(pool: Pool) -> Array:
        return engine.workspace * pool.machine.floors.hosted

    guessed, keys = as_real(0.0), as_real(0.0)
    if guesser is not None and draft is not None and system.speculation is not None:
        used = system.speculation.drafting
        plan, machine, precision = guesser.plan, guesser.machine, guesser.precision
        shard = plan.shard(machine)
        if isinstance(draft, Draft):
            # Heads share the tables of the network; each layer has keys of its own.
            guessed = used * as_real(draft_weight_bytes(draft, precision, shard))
            layer = sequence_bytes(draft.layer, precision, load.context, shard)
            keys = used * draft.count * layer
        else:
            guessed = used * chip_weights(machine, draft, plan, precision)
            each = sequence_bytes(draft, precision, load.context, shard)
            keys = used * stage_share(draft, plan, shard) * each
    # A pool that computes prompts holds every layer; so does one of both halves of decoding.
    weights = [
        layers(first, one, one) + on.gp * guessed,
        layers(attention, one, maximum(on.af, on.pa)) + on.ga * guessed,
        layers(ffn, maximum(on.af, on.pf), one) + on.gf * guessed,
    ]
    room = footprint(
        attention.machine, model, load, attention.plan, attention.precision, engine,
        weights=weights[1], prompts=on.pa, beside=on.ga * keys,
    )  # fmt: skip
    # A pool of prefill holds prompts only.
    prompt = dataclasses.replace(load, osl=load.osl * 0.0 + 1.0)
    reading = footprint(
        first.machine, model, prompt, shared_plan(system, first), first.precision, engine,
        weights=weights[0],
    )  # fmt: skip
    token = Load(one, one)
    feeding = footprint(
        ffn.machine, model, token, shared_plan(system, ffn), ffn.precision, engine,
        weights=weights[2], prompts=as_real(0.0),
    )  # fmt: skip
    rest = [
        reading.chunk + (1.0 - on.pa) * (reading.live + reading.shared) + workspace(first),
        room.chunk + workspace(attention),
        workspace(ffn),
    ]
    margins = [
        on.pa * room.margin + (1.0 - on.pa) * reading.margin,
        room.margin,
        on.af * room.margin + (1.0 - on.af) * feeding.margin,
    ]
    drafting = None
    if guesser is not None:
        # The draft's keys lie beside its weights, of every request that runs and shares a replica.
        there = attention_groups(attention.plan)
        fit = maximum(room.admitted, 1.0) * (1.0 if there is None else there)
        sharing = attention.plan.replicas * inverse(guesser.plan.replicas)
        groups = groups_of(system, guesser)
        each = sharing if groups is None else sharing * inverse(groups)
        keys = as_real(keys * minimum(as_real(attention.plan.batch), fit) * each)
        more = keys + workspace(guesser)
        offload = guesser.plan.offload
        free = tiers.capacity(guesser.machine, engine.memory_fraction, offload)
        free[0] = free[0] - workspace(guesser)
        usable = tiers.capacity(guesser.machine, 1.0, offload)
        left = sum(free[1:], free[0]) - guessed - keys
        alone = left * inverse(sum(usable[1:], usable[0]))
        none = as_real(0.0)
        # Its requests are those of attention: of what fits there it says nothing of its own.
        drafting = room._replace(
            weights=guessed, chunk=none, sequence=none, shared=keys, live=none, margin=alone,
            admitted=one, free=tuple(free),
        )  # fmt: skip
        shared = maximum(on.ga, maximum(on.gp, on.gf))
        least = on.ga * margins[1] + (1.0 - on.ga) * (
            on.gp * margins[0] + (1.0 - on.gp) * on.gf * margins[2]
        )
        weights, rest = [*weights, guessed], [*rest, more]
        margins = [*margins, shared * least + (1.0 - shared) * alone]
    return Held(reading, room, feeding, drafting, weights, rest, margins)


def lying(system: System, kept: Held, running: Real) -> tuple[Placed | None, ...]:
    """Returns where weights and keys lie on the pool of each part, None where memory has one tier.

    Parts that share a pool share its layout, that of whichever holds most keys.
    """
    on = Shares.of(system)

    def either(share: Array, other: Placed | None, own: Placed | None) -> Placed | None:
        if other is None or own is None:
            return own
        return Placed(*(share * a + (1.0 - share) * b for a, b in zip(other, own, strict=True)))

    def alone(pool: Pool, room: Footprint, count: Real) -> Placed | None:
        return placed(pool.machine, pool.plan, room, count)

    attention = alone(system.attention, kept.attention, running)
    first = either(on.pa, attention, alone(system.prefill, kept.prefill, 1.0))
    ffn = either(on.pf, first, alone(system.ffn, kept.ffn, 0.0))
    ffn = either(on.af, attention, ffn)
    if system.draft is None or kept.draft is None:
        return first, attention, ffn
    guess = alone(system.draft, kept.draft, 0.0)
    for share, other in ((on.gf, ffn), (on.gp, first), (on.ga, attention)):
        guess = either(share, other, guess)
    return first, attention, ffn, guess
