"""Step times of a replica as a small table: what an event simulation asks a hundred thousand times.

Each entry is `perfmodel.passes.run_step` at decoding sequences × mean context × prompt tokens ×
tokens cached before them. Nodes are the same for every design, so one compiled program fills the
tables of all. Between nodes times are linear in each coordinate, past the last one as well.
"""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from perfmodel.errors import InputError
from perfmodel.footprint import footprint, placed, split_prompt
from perfmodel.formats import Precision
from perfmodel.machine import Machine, Rank
from perfmodel.models.transformer import Model, sequence_bytes
from perfmodel.passes import run_step, served
from perfmodel.plan import Engine, Load, Plan
from perfmodel.relax import Real, as_real, ceil_div, inverse, maximum, minimum, traced
from perfmodel.step import Chunk, Step, causal_pairs

SEQUENCES = np.array(
    [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 4096], float
)
"""Decoding sequences of one attention group."""

CONTEXT = np.array([1, 512, 2048, 8192, 32768, 131072, 1048576], float)
"""Mean keys that a decoding token attends to."""

TOKENS = np.array([1, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192, 16384], float)
"""Prompt tokens in a step; steps without any are a table of their own."""

PRIOR = np.array([0, 4096, 65536], float)
"""Tokens of a prompt that were computed before, or cached."""


class StepGrid(eqx.Module):
    """Step times on the nodes above.

    Fields:
        seconds: [sequences, context, 1 + tokens, prior]; the first of the third axis are steps
            without prompt tokens [s].
        per_prompt: time of each prompt that ends in a step [s].
    """

    seconds: Array
    per_prompt: Array

    def time(self, sequences: Real, context: Real, tokens: Real, prior: Real, ends: Real) -> Array:
        """Returns the time of a step [s], scalar arguments.

        Args:
            sequences: decoding sequences. context: their mean keys, the new one included.
            tokens: prompt tokens. prior: mean keys before a prompt's part; negative where several
                prompts share the step and so attend to fewer keys than one of that length.
            ends: prompts that end in it.
        """
        s, fs = _place(SEQUENCES, sequences)
        c, fc = _place(CONTEXT, context)
        t, ft = _place(TOKENS, tokens)
        p, fp = _place(PRIOR, prior)
        plain = tokens <= 0
        t, ft = jnp.where(plain, 0, t + 1), jnp.where(plain, 0.0, ft)
        corners = np.array(list(itertools.product((0, 1), repeat=4)))
        _, contexts, steps, priors = self.seconds.shape
        flat = (((s + corners[:, 0]) * contexts + c + corners[:, 1]) * steps + t) * priors
        flat = flat + corners[:, 2] * priors + p + corners[:, 3]
        weight = as_real(1.0)
        for axis, share in enumerate((fs, fc, ft, fp)):
            weight = weight * jnp.where(corners[:, axis] == 1, share, 1.0 - share)
        found = jnp.sum(weight * jnp.ravel(self.seconds)[flat])
        return found + ends * self.per_prompt


def _place(nodes: np.ndarray, value: Real) -> tuple[Array, Array]:
    """Returns the lower node of the interval that a value is in, and how far it is into it."""
    places = as_real(nodes)
    lower = jnp.clip(jnp.sum(places <= value) - 1, 0, len(nodes) - 2)
    low, high = places[lower], places[lower + 1]
    return lower, (value - low) / (high - low)


def step_grid(
    machine: Machine,
    model: Model,
    plan: Plan,
    precision: Precision,
    engine: Engine,
    *,
    load: Load | None = None,
    queries: int = 1,
) -> StepGrid:
    """Returns the step times of one attention group of a replica.

    With pipeline stages an entry is a round: the sequences go through in as many micro-batches as
    there are stages, and prompt tokens beyond `plan.chunk` in several chunks.

    Args:
        machine, model, plan, precision, engine: as of `perfmodel.serving.estimate`.
        load: mean lengths, by which weights and keys are laid over memories; needed with offload.
        queries: tokens that each sequence decodes at once, one more than are drafted.
    """
    if plan.offload is not None and load is None:
        raise InputError("load: mean lengths are needed where weights or keys are offloaded")
    numbers = traced((machine, model, plan, precision, engine))
    return _sample(*numbers, None if load is None else traced(load), as_real(queries))


@jax.jit
def _sample(
    machine: Machine,
    model: Model,
    plan: Plan,
    precision: Precision,
    engine: Engine,
    load: Load | None,
    queries: Array,
) -> StepGrid:
    per_prompt = as_real(engine.host_request * machine.floors.hosted)
    engine = eqx.tree_at(lambda e: e.host_request, engine, jnp.zeros(()))
    shard = plan.shard(machine)
    speed = served(machine, engine)
    groups = None if plan.attention_dp is None else as_real(plan.attention_dp)
    room = None
    if load is not None:
        room = footprint(machine, model, load, plan, precision, engine)

    def round_time(sequences: Array, context: Array, chunk: Chunk | None, chunks: Array) -> Array:
        lying = None if room is None else placed(machine, plan, room, sequences)
        rank = Rank(speed, shard.share, None, lying)
        micro = minimum(maximum(sequences, 1.0), as_real(plan.stages))
        step = Step(sequences * inverse(micro), context, queries, chunk, groups)
        found = run_step(rank, model, step, plan, precision, engine)
        # Equal with one stage, and one chunk then.
        return maximum(maximum(micro, chunks) * found.stage, found.latency)

    def decode(sequences: Array, context: Array) -> Array:
        return round_time(maximum(sequences, 1.0), context, None, jnp.ones(()))

    def mixed(sequences: Array, context: Array, tokens: Array, prior: Array) -> Array:
        stages = as_real(plan.stages)
        chunks = jnp.clip(ceil_div(tokens, maximum(as_real(plan.chunk), 1.0)), 1.0, stages)
        part = tokens * inverse(chunks)
        pairs = causal_pairs(tokens, prior) * inverse(chunks)
        keys = prior + part * (0.5 * chunks + 0.5)
        chunk = Chunk(part, pairs, keys, new=tokens, cached=prior, share=inverse(chunks))
        return round_time(sequences, context, chunk, chunks)

    def over(*nodes: np.ndarray) -> list[Array]:
        grid = np.meshgrid(*nodes, indexing="ij")
        return [as_real(axis.ravel()) for axis in grid]

    plain = jax.vmap(decode)(*over(SEQUENCES, CONTEXT))
    plain = jnp.reshape(plain, (len(SEQUENCES), len(CONTEXT), 1, 1))
    plain = jnp.broadcast_to(plain, (*plain.shape[:3], len(PRIOR)))
    with_prompt = jax.vmap(mixed)(*over(SEQUENCES, CONTEXT, TOKENS, PRIOR))
    shape = (len(SEQUENCES), len(CONTEXT), len(TOKENS), len(PRIOR))
    seconds = jnp.concatenate([plain, jnp.reshape(with_prompt, shape)], axis=2)
    return StepGrid(seconds, per_prompt)


@jax.jit
def kv_tokens(
    machine: Machine, model: Model, load: Load, plan: Plan, precision: Precision, engine: Engine
) -> Array:
    """Returns how many tokens of requests' own keys and values one attention group has room for.

    What all requests share is set aside. Bytes per token are those of a whole request of the
    mean lengths: exact where they grow in proportion, a mean with windows and states.
    """
    prefill = split_prompt(load, plan)
    room = footprint(machine, model, load, plan, precision, engine)
    shard = plan.shard(machine)
    part = ceil_div(model.layers, plan.stages) * inverse(model.layers) * inverse(shard.share)
    own = prefill.new_tokens + as_real(load.osl)
    pages = ceil_div(own, as_real(engine.block)) * engine.block
    each = sequence_bytes(model, precision, pages, shard) * part * inverse(pages)
    waiting = room.sequence * inverse(plan.stages) * minimum(as_real(plan.batch), room.admitted)
    free = sum(room.free[1:], room.free[0]) - room.weights - room.shared - waiting
    return maximum(free, 0.0) * inverse(each)
