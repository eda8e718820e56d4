"""A static batch: equal requests that start together, as many benchmarks run them.

All prompts are computed first, several in a pass where they fit the chunk; then all sequences
decode in step, without any prompt beside them. That is not the steady state of `serving`, in which
finished requests are replaced by new ones; nor its initial burst, in which prompts ride along.
"""

import dataclasses
from typing import NamedTuple

from jax import Array

from perfmodel.footprint import attention_groups, footprint, placed, split_prompt
from perfmodel.formats import Precision
from perfmodel.machine import Machine, Rank
from perfmodel.models.transformer import Model
from perfmodel.passes import run_step, served
from perfmodel.plan import Engine, Load, Plan
from perfmodel.relax import as_real, ceil, inverse, maximum, minimum
from perfmodel.step import Step


class Batch(NamedTuple):
    """Seconds of a static batch: until all first tokens, of each step after, and in all.

    `margin` is the memory left beside the whole batch, relative to a chip's; negative: waves.
    """

    prefill: Array
    step: Array
    seconds: Array
    margin: Array


def static_batch(
    machine: Machine, model: Model, load: Load, plan: Plan, precision: Precision, engine: Engine
) -> Batch:
    """Returns the times of `plan.batch` requests of one length that start together.

    With p = min(B, max(1, chunk/T)) prompts of n chunks in a pass, and a mean of T + O/2 keys:

        prefill    t_request + ⌈B/p⌉·n·t(p·T/n)
        all        prefill + (O − 1)·t(B sequences)

    A batch that exceeds memory runs in ⌈B/A⌉ waves of what is admitted.
    """
    shard = plan.shard(machine)
    room = footprint(machine, model, load, plan, precision, engine)
    groups = attention_groups(plan)
    batch = as_real(plan.batch) if groups is None else as_real(plan.batch) * inverse(groups)
    running = minimum(batch, maximum(room.admitted, 1.0))
    prompt = split_prompt(load, plan)
    one = prompt.chunk
    most = maximum(1.0, as_real(plan.chunk) * inverse(prompt.new_tokens))
    prompts = minimum(running, most)
    shared = dataclasses.replace(
        one, tokens=one.tokens * prompts, ends=one.ends * prompts, prompts=prompts
    )
    context = load.context
    micro = minimum(running, as_real(plan.stages))
    rank = Rank(served(machine, engine), shard.share, None, placed(machine, plan, room, running))
    prefill = Step(0.0, context, chunk=shared, groups=groups)
    first = run_step(rank, model, prefill, plan, precision, engine)
    decode = Step(running * inverse(micro), context, groups=groups)
    later = run_step(rank, model, decode, plan, precision, engine)
    step = maximum(micro * later.stage, later.latency)
    passes = ceil(running * inverse(prompts)) * prompt.chunks
    ready = engine.request_time + first.latency + (passes - 1.0) * first.stage
    waves = ceil(batch * inverse(running))
    seconds = waves * (ready + (load.osl - 1.0) * step)
    margin = minimum(room.margin, room.admitted * inverse(batch) - 1.0)
    return Batch(ready, step, seconds, margin)
