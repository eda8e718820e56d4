"""Preemption in the steady state: what a greedy scheduler computes again where memory is full.

An engine admits a request as soon as its prompt fits. Running requests then grow, and where they
outgrow the pool the youngest gives up its keys, waits at the head of the queue, and is computed
anew. Those that run are always the oldest that fit, and what waits is counted by its depth w in
units of a new request's bytes; ρ is what a request grows by, in the same units:

    between two ends   w grows by ρ, and by as much less as ends and growth share a step: the
                       chance of a step without an end, e^(−λ), λ = running/output tokens
    at an end          w falls by 1 + ρ: the room of a whole request, to 0 at the least
    so w > u           with probability e^(−u/ω), ω the root of ρ = ω(1 − e^(−(1+ρ)/ω))

(ends that know nothing of each other: a steady rise with sudden drops, kept above 0, is
exponential; Asmussen, Applied Probability and Queues, 2003, on Lévy processes). All growth but
what ends take up at once is made room for by evictions, so ρ·e^(−λ) prompts are computed again
per request, whatever ω is. Requests at depth u run a share 1 − e^(−u/ω) of the time and have
grown meanwhile, by ρ/n per end:

    a request's size   √(1 + (2ρ/n)(u − ω(1 − e^(−u/ω))))
    fewer requests     g = ∫ e^(−x)/√(1 + κ(x − 1 + e^(−x))) dx,  κ = 2ρω/n
    preemptions        ρ·e^(−λ)·g per request;  waiting  ω·g

All of it holds while memory is full. What `batch` requests would take if all ran is their mean
and, as their ages differ, a normal fluctuation around it; memory is full for that share of time.
Prompts that are long beside outputs are whole things: see `_whole`. A prefix that requests share
stays; what is computed again is the rest. A preempted request's own blocks may still lie in an
engine's prefix cache when it comes back: that is neither here nor in the simulation.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from perfmodel.plan import Engine, Load
from perfmodel.relax import as_real, floor, inverse, maximum, minimum


def _nodes() -> tuple[list[float], list[float]]:
    """Nodes and weights of ∫ e^(−x) … dx: those of Gauss and Legendre in √(1 − e^(−x)).

    With eight of them g is within 0.5 % up to κ = 10,000.
    """
    nodes, weights = np.polynomial.legendre.leggauss(8)
    nodes = 0.5 * (nodes + 1.0)
    return (-np.log1p(-nodes * nodes)).tolist(), (weights * nodes).tolist()


_DEPTHS, _WEIGHTS = _nodes()


class Sizes(NamedTuple):
    """Bytes of a request's own keys on a chip [B].

    Fields: `start`, of its prompt alone; `growth`, of its output; standard `deviation` among those
    that decode, whose ages differ.
    """

    start: Array
    growth: Array
    deviation: Array


class Preemption(NamedTuple):
    """What happens while memory is full; zeros where it never is.

    Fields: prompts computed `again` per request, and `times` it is preempted; mean number of
    requests that wait with a first token (`waiting`), and by how many `fewer` run because what
    they take fluctuates.
    """

    again: Array
    times: Array
    waiting: Array
    fewer: Array


def request_sizes(load: Load, start: Array, whole: Array) -> Sizes:
    """Returns the sizes of requests that take `start` [B] with their prompt and `whole` [B] at
    their end, of each class; ages are spread evenly."""
    growth = whole - start
    live = start + 0.5 * growth
    mean = load.while_decoding(live)
    spread = growth * growth / 12.0
    if load.weight is not None:
        spread = spread + (live - mean[..., None]) ** 2
    variance = load.while_decoding(spread)
    return Sizes(as_real(load.mean(start)), as_real(load.mean(growth)), jnp.sqrt(variance + 1e-12))


def greed(load: Load, engine: Engine) -> Array:
    """Returns how much of its growth the scheduler leaves out when it admits a request: all where
    it looks at the prompt, nothing where whole outputs are set aside or batches are in step."""
    return minimum(2.0 * (1.0 - as_real(engine.reservation)), 1.0) * (1.0 - as_real(load.in_step))


def _whole(fit: Array, deviation: Array) -> Array:
    """Returns how often memory runs out over what it would if requests were no whole things.

    Σ N(fit; m, deviation) over whole m: where memory is full with m that run, and their sizes
    differ little, m + 1 do not fit. Its mean over `fit` is 1; that is also what is derived.
    """
    part = fit - floor(fit)
    # Less is beyond what is known of the room for requests, and of the sum's terms.
    squared = maximum(deviation, 0.12) ** 2
    # cos kφ by Chebyshev's recurrence, and e^(−k²q) as powers.
    wave, decay = jnp.cos(2.0 * np.pi * part), jnp.exp(-2.0 * np.pi**2 * squared)
    twice = 2.0 * wave * wave - 1.0
    fourth = (decay * decay) ** 2
    ninth = fourth * fourth * decay
    found = wave * decay + twice * fourth + wave * (2.0 * twice - 1.0) * ninth
    return maximum(1.0 + 2.0 * found, 0.0)


def preemption(
    size: Sizes, live: Array, fit: Array, batch: Array, most: Array, rounds: Array, greedy: Array
) -> Preemption:
    """Returns preemptions in the steady state of one attention group.

    Args:
        size, live: bytes of a request, and of a running one on average [B].
        fit: requests that fit memory on average, not rounded. batch: requests in the loop.
        most: sequences that can decode at once, however many fit (`footprint.preempted`).
        rounds: decode passes of a request. greedy: of `greed`.
    """
    seats = minimum(batch, most)
    # One always fits, or the plan is infeasible, and one alone has nobody to make room for.
    fit = maximum(fit, 1.0)
    greedy = greedy * minimum(maximum(seats - 1.0, 0.0), 1.0)
    running = maximum(minimum(seats, fit), 1.0)
    deviation = jnp.sqrt(running) * size.deviation * inverse(live) + 1e-6
    beyond = (seats - fit) * inverse(deviation)
    density = jnp.exp(-0.5 * beyond * beyond) * float(1.0 / np.sqrt(2.0 * np.pi))
    below = 0.5 * jax.lax.erfc(beyond * float(-np.sqrt(0.5)))
    tail = minimum(below, 1.0 - below)
    full = greedy * below
    short = greedy * deviation * maximum(density - jnp.abs(beyond) * tail, 0.0)

    growth = size.growth * inverse(size.start)
    # ω, the root of the equation above, within 2.5 %; exact for little and for much growth.
    depth = growth * (0.5 * growth + 2.0 / 3.0) + (1.0 - jnp.exp(-3.0 * growth)) / 9.0
    grown = 2.0 * growth * depth * inverse(running)
    share = as_real(0.0)
    for x, weight in zip(_DEPTHS, _WEIGHTS, strict=True):
        share = share + weight * jax.lax.rsqrt(1.0 + grown * (x + full * math.expm1(-x)))
    again = full * growth * jnp.exp(-running * inverse(rounds)) * _whole(fit, deviation)
    # Those that wait are among the requests without a seat: an exponential that ends there.
    deep = maximum(depth * share, 1e-6)
    spare = seats - minimum(seats, fit) + short
    ratio = minimum(spare * inverse(deep), 60.0)
    some = ratio > 1e-2
    ratio = jnp.where(some, ratio, 1.0)
    few = spare * (0.5 - spare * inverse(12.0 * deep))
    waiting = jnp.where(some, deep * (1.0 - ratio / jnp.expm1(ratio)), few)
    return Preemption(again, again * share, greedy * waiting, short)


def after_first(found: Preemption, prompt: Array, rate: Array, osl: Array) -> Array:
    """Returns how long a request waits and is computed again after its first token [s].

    Args: `prompt`, time of all prompts of a request [s]; `rate` of requests [1/s]; `osl`, its
        output tokens: with one there is no time after the first.
    """
    again = prompt * found.again * inverse(1.0 + found.again)
    return (found.waiting / rate + again) * minimum(maximum(osl - 1.0, 0.0), 1.0)
