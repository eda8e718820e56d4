"""The passes of a serving step through the network: what is in them, and what they cost.

A pass is one micro-batch through all stages, its time that of its operators and of what software
and links add: launches, the host between steps, hand-overs between stages.
"""

import dataclasses
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from perfmodel.fabric import crossing_port, crossing_usage
from perfmodel.footprint import Prefill, attention_groups
from perfmodel.formats import Precision
from perfmodel.machine import Machine, Rank, Usage
from perfmodel.models.transformer import (
    Model,
    block_operators,
    head_operators,
    norm_operators,
    tower_operators,
)
from perfmodel.plan import Engine, Load, Plan
from perfmodel.relax import Real, as_real, inverse, maximum, minimum
from perfmodel.stages import occupied
from perfmodel.step import Step
from perfmodel.timing import total_usage


class Pass(NamedTuple):
    """One pass of a micro-batch through the network."""

    usage: Usage
    latency: Array
    stage: Array


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
