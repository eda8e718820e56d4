"""Memory of the pools of a system: what each part of the work keeps on its chips.

A pool that does several parts holds the union of their weights.
"""

import dataclasses
from typing import NamedTuple

from jax import Array

from perfmodel._cycle import Shares
from perfmodel.models.transformer import Model, sequence_bytes
from perfmodel.placement import Pool, System
from perfmodel.plan import Engine, Load
from perfmodel.relax import Real, as_real, inverse, maximum
from perfmodel.serving import Footprint, chip_weights, footprint, stage_share
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

    Fields: footprints of `prefill` (one prompt), of `attention` (sequences that decode) and of
    `ffn` (no keys); by part, `weights` and what else is on a chip whatever decodes (`rest`) [B];
    relative `margins` with one request.
    """

    prefill: Footprint
    attention: Footprint
    ffn: Footprint
    weights: list[Array]
    rest: list[Array]
    margins: list[Array]


def held(system: System, model: Model, draft: Model | None, load: Load, engine: Engine) -> Held:
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
        guessed = used * chip_weights(machine, draft, plan, precision)
        shard = plan.shard(machine)
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
        first.machine, model, prompt, first.plan, first.precision, engine, weights=weights[0]
    )
    token = Load(one, one)
    feeding = footprint(
        ffn.machine, model, token, ffn.plan, ffn.precision, engine,
        weights=weights[2], prompts=as_real(0.0),
    )  # fmt: skip
    rest = [
        reading.chunk + (1.0 - on.pa) * reading.live + workspace(first),
        room.chunk + workspace(attention),
        workspace(ffn),
    ]
    margins = [
        on.pa * room.margin + (1.0 - on.pa) * reading.margin,
        room.margin,
        on.af * room.margin + (1.0 - on.af) * feeding.margin,
    ]
    if guesser is not None:
        # The draft's keys lie beside its weights, of every request that shares a replica of it.
        sharing = attention.plan.replicas * inverse(guesser.plan.replicas)
        keys = keys * attention.plan.batch * sharing
        capacity = guesser.machine.memory.capacity[..., 0]
        more = keys + workspace(guesser)
        alone = (capacity * engine.memory_fraction - guessed - more) * inverse(capacity)
        shared = maximum(on.ga, maximum(on.gp, on.gf))
        least = on.ga * margins[1] + (1.0 - on.ga) * (
            on.gp * margins[0] + (1.0 - on.gp) * on.gf * margins[2]
        )
        weights, rest = [*weights, guessed], [*rest, more]
        margins = [*margins, shared * least + (1.0 - shared) * alone]
    return Held(reading, room, feeding, weights, rest, margins)
