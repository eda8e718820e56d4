"""A closed loop of requests around a server: how long prompts wait, and how often they are met.

C requests are served at once. Each has its prompt computed, decodes in rounds that all share, and
is replaced by another. Where a chunk of a prompt rides along with decoding sequences (`fused` 1), a
round that carries one takes the place of a decode round; where prompts are computed in rounds of
their own (0), it comes on top, and nobody comes back meanwhile.

    chunk share   φ = min(1, n(C−1)/O): the other requests' chunks that meet a decoding one
    mean round    (1−φ)·t(B) + φ·t(B, c)

Waits. A request comes when another ends, so at the end of a round. It may start after the request
time R and, while others run, (a−1)/2 rounds of the engine's admission: after w = ⌈y⌉ rounds t of
decoding, y = R/t + (a−1)/2. Per round λ others come, and a prompt takes s = n·t(B, c):

    first         finds no other's prompt ahead, and waits w·t
    followers     F = λ·w came while the first waited, i rounds behind it. Each waits
                  s + max(w−i, ⌈y−s/t⌉)·t, and for the prompts of those before it
    meanwhile     came while chunks of a run of prompts rode along, ρ = λ·n of all: they wait for
                  what is left of the run, V, E[V²]/2E[V], and a queue behind it, beside R

These are an M/G/1 queue whose server sets up (R) before it works (Welch, Operations Research 12,
1964): of (1 + F)/(1 − ρ) requests in a run one is the first, F follow. The queue is closed: as the
server saturates, waits tend to those of all customers in line. Prompts shorter than a chunk share
one: whoever does sees all of it, so a pair costs both the part that a prompt adds to a round.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from perfmodel.plan import Engine, Load
from perfmodel.relax import Real, ceil, inverse, maximum, minimum


class Prompts(NamedTuple):
    """How prompts are computed.

    Fields: `service` of a prompt, `fill` of the pipeline before it ends, time of a `round` that
    carries a chunk, and what of it is `fixed`, however many prompts share it [s]; `fit`, tokens of
    that round over the most that it may carry; `per_round`, chunks of a request in a round of
    decoding; `customers` that share the server; `here`, 1 where that server also decodes, and
    `meets`, 1 where its rounds hold up those of decoding.
    """

    service: Array
    fill: Array
    round: Array
    fixed: Array
    fit: Array
    per_round: Array
    customers: Array
    here: Real = 1.0
    meets: Real = 1.0


class Decoding(NamedTuple):
    """What decoding sequences go through.

    Fields: time of a decode `round`, and of one `without` one of its sequences [s]; requests
    `running` at once; `rounds` of a request's whole output, and those that it `stays` after its
    first token; `fused`, 1 where a chunk rides along; `together`, 1 where requests arrive in step
    and wait for each other's prompts.
    """

    round: Array
    without: Array
    running: Array
    rounds: Array
    stays: Array
    fused: Real
    together: Real


class Loop(NamedTuple):
    """The steady state: mean `time` of a round [s], `share` of rounds that carry a chunk, `rate` of
    requests [1/s], time until a request has `started`, with its first token, and `handed`, the part
    of that for its hand-over [s]."""

    time: Array
    share: Array
    rate: Array
    started: Array
    handed: Array


def closed_queue(service: Array, away: Array, customers: Array, variability: Real) -> Array:
    """Returns the mean time at a server of a closed loop, its own service included [s].

    `customers` cycle between one server (mean `service`) and an absence (mean `away`). The larger
    root R of

        R² − R·(s + sC − Z − v·s) + s·(sC − Z) − v·s²·C = 0

    is s for one customer and tends to sC − Z when the server saturates; v = 0 is its lower bound
    max(s, sC − Z), v = 1 Schweitzer's mean-value analysis of an exponential server.

    >>> float(closed_queue(2.0, 10.0, 1.0, 0.5)), float(closed_queue(2.0, 0.0, 5.0, 0.5))
    (2.0, 10.0)
    """
    bound = service * customers - away
    b = service + bound - variability * service
    # The discriminant as a sum of non-negative terms, and the root by the form that does not
    # subtract: the textbook ones cancel in float32.
    discriminant = (service - bound) ** 2 + variability * service * (
        2.0 * service * (customers - 1.0) + 2.0 * away + variability * service
    )
    root = jnp.sqrt(discriminant + 1e-36)
    idle = 2.0 * service * (away - (1.0 - variability) * service * customers)
    few = b < 0.0
    return jnp.where(few, idle * inverse(jnp.where(few, root - b, 1.0)), 0.5 * (b + root))


def variability(load: Load, engine: Engine) -> Real:
    """Returns how varied prefill is to those that wait: more where classes differ.

    The mean wait for a server grows with (1 + c²)/2 (Pollaczek and Khinchine), c the standard
    deviation over the mean of its service, here of the prompt tokens to compute.
    """
    if load.weight is None:
        return engine.variability
    new = load.isl * (1.0 - load.prefix_hit)
    mean = load.mean(new)
    return engine.variability + 0.5 * (load.mean(new * new) * inverse(mean * mean) - 1.0)


class _Waits(NamedTuple):
    """Until a request is admitted, its request time included, and for others' prompts [s]."""

    admitted: Array
    queued: Array


def _waits(
    prompts: Prompts, decoding: Decoding, engine: Engine, time: Array, handed: Array, varied: Real
) -> _Waits:
    """Returns how long a request waits for its prompt to start, in rounds of a mean `time` [s]."""
    fused, here = decoding.fused, prompts.here
    alone = 1.0 - fused
    others = maximum(0.0, decoding.running - 1.0)
    s, n, fit = prompts.service, prompts.per_round, prompts.fit
    t = decoding.without
    per_t = inverse(t)
    # What a further prompt costs in a full round, and how long that is.
    more = maximum(fit * s, s - here * (1.0 - fit) * n * prompts.fixed)
    packed = fit * n
    # While a prompt is computed, others decode all the same, in rounds that last longer: they come
    # back after as many rounds, not after as much time.
    each = fused * more * inverse(packed) + alone * time
    line = closed_queue(more, decoding.stays * each + handed, prompts.customers, varied) - more
    behind = fused * line

    lag = 0.5 * (engine.admission_steps - 1.0)
    y = maximum(engine.request_time * per_t + lag, 0.0)
    whole = ceil(y)
    coming = here * others * inverse(decoding.stays + y + fused * n)
    busy = fused * minimum(coming * packed, 1.0)
    followers = coming * whole
    # Of the followers a prompt delays those at most s/t rounds behind, and these delay others.
    r = s * per_t
    near = minimum(r * inverse(maximum(whole, 1.0)), 1.0)
    near = followers * minimum(near * (1.0 + followers * near), 1.0)
    # Rounds that the last followers still have to wait when the prompt ahead is done; the others'
    # number; and those of them that let a round pass, as the lag is counted in the longer one.
    left = ceil(maximum(y - r, 0.0))
    met = whole - left
    late = ceil(maximum(y - r + lag * (prompts.round * per_t - 1.0), 0.0)) - left
    late = minimum(maximum(late, 0.0), met)
    # Followers' waits beyond the mean y + 1/2 of those whose rounds are no longer in step with R,
    # summed over i, and of those who came with the first, half of them behind it.
    beyond = coming * (
        t * (whole * (r + whole - y - 0.5) - met * (whole + 0.5 - 0.5 * met) + late)
        + 0.5 * (2.0 - fit) * more
    )
    per_run = inverse(1.0 + near)
    following = per_run * (beyond + 0.5 * (2.0 - fit) * near * near * more)
    # What is left of a run at the ends of its rounds; evenly spread, so that R hides the square.
    rest = s * (varied + 0.5 * (near + near * per_run - inverse(n))) + behind
    rest = maximum(rest, 1e-3 * s)
    seen = maximum(1.0 - 0.5 * y * t * inverse(rest), 0.0)
    # Behind R alone prompts queue as in any line: 1/(1−ρ) of the delay of one.
    crowd = 1.0 + 2.0 * behind * inverse(more) * (1.0 - seen)
    queued = following * (1.0 - busy * seen) * crowd + busy * rest * seen * seen
    queued = queued + (1.0 - here) * line

    first = here * (1.0 - busy) * inverse(1.0 + followers)
    admitted = t * (y + 0.5 + first * (whole - y - 0.5))
    lone = engine.request_time
    # Prompts on a pool of their own pass through two servers, one after the other.
    admitted = lone * (2.0 - here) + (admitted - lone) * minimum(others, 1.0)
    return _Waits(admitted, queued)


def closed_loop(
    prompts: Prompts,
    decoding: Decoding,
    load: Load,
    engine: Engine,
    hand_over: Callable[[Array], Array] | None = None,
) -> Loop:
    """Returns the steady state of a closed loop.

    Args:
        prompts, decoding: what is computed. load, engine: traffic and software.
        hand_over: by which the keys of a prompt take their way to where it is decoded, as a
            function of the time that a request decodes [s].
    """
    fused, together = decoding.fused, decoding.together
    alone = 1.0 - fused
    behind = maximum(prompts.customers - 1.0, 0.0)
    most_share = 1.0 + alone * 1e6

    # A round of prompts alone comes on top of a decode round; one that carries them replaces it.
    # Requests in step wait for each other's prompts, on average half of them before their own,
    # and half after it, between their first tokens.
    def mean_round(share: Array) -> Array:
        longer = prompts.round - fused * decoding.round
        return decoding.round + prompts.meets * share * (1.0 - 0.5 * together) * longer

    share = minimum(prompts.per_round * behind * inverse(decoding.rounds), most_share)
    time = mean_round(share)
    handed = jnp.zeros(()) if hand_over is None else hand_over(decoding.stays * time)
    varied = variability(load, engine)
    waits = _waits(prompts, decoding, engine, time, handed, varied)
    prefill_time = prompts.fill + prompts.service + (1.0 - together) * waits.queued
    before = waits.admitted + handed
    there = decoding.stays + (before + prefill_time) * inverse(time)
    share = minimum(share, prompts.per_round * behind * inverse(there))
    time = mean_round(share)
    # Those that start at once find one another in line, half of them ahead, and no steady queue.
    burst = load.burst + together * (1.0 - load.burst)
    first = prompts.fill + prompts.service
    queue = (1.0 - burst) * waits.queued + burst * 0.5 * behind * prompts.service
    started = before + first + queue
    rate = decoding.running * inverse(started + decoding.stays * time)
    return Loop(time, share, rate, started, handed)
