"""What lies on a chip of a replica, and how many requests find room beside the weights.

Weights of the layers that a rank holds, keys and values in whole pages, intermediate results of a
chunk and of decoding sequences; which memory they lie in where a chip has several.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from perfmodel import tiers as memory
from perfmodel.formats import Precision
from perfmodel.machine import Machine, Placed
from perfmodel.models.encoder import encoder_activation_bytes, encoder_weight_bytes
from perfmodel.models.transformer import (
    Model,
    activation_bytes,
    kv_bytes,
    sequence_bytes,
    weight_bytes,
)
from perfmodel.plan import Engine, Load, Plan
from perfmodel.preemption import Preemption, Sizes, greed, preemption, request_sizes
from perfmodel.relax import Real, as_real, ceil, ceil_div, floor, inverse, maximum, minimum
from perfmodel.step import Chunk, Shard, Step, causal_pairs


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
