"""A closed loop of requests around a server: how long prompts wait, and how often they are met.

C requests are served at once. Each has its prompt computed, decodes in rounds that all share, and
is replaced by another. Where a chunk of a prompt rides along with decoding sequences (`fused` 1), a
round that carries one takes the place of a decode round; where prompts are computed in rounds of
their own (0), it comes on top.

    chunk share   φ = min(1, n(C−1)/O): the other requests' chunks that meet a decoding one
    mean round    (1−φ)·t(B) + φ·t(B, c)
    prefill wait  a closed queue of C customers, service s = n·t(B, c), away for O − 1 rounds
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
    carries a chunk [s]; `per_round`, chunks of a request in a round of decoding; `customers` that
    share the server; `here`, 1 where that server also decodes.
    """

    service: Array
    fill: Array
    round: Array
    per_round: Array
    customers: Array
    fit: Array
    here: Real = 1.0


class Decoding(NamedTuple):
    """What decoding sequences go through.

    Fields: time of a decode `round` [s]; requests `running` at once; `rounds` of a request's whole
    output, and those that it `stays` after its first token; `fused`, 1 where a chunk rides along;
    `together`, 1 where requests arrive in step and wait for each other's prompts.
    """

    round: Array
    waiting: Array
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
    others = maximum(0.0, decoding.running - 1.0)
    most_share = 1.0 + alone * 1e6

    # A round of prompts alone comes on top of a decode round; one that carries them replaces it.
    # Requests in step wait for each other's prompts, on average half of them before their own,
    # and half after it, between their first tokens.
    def mean_round(share: Array) -> Array:
        longer = prompts.round - fused * decoding.round
        return decoding.round + prompts.here * share * (1.0 - 0.5 * together) * longer

    share = minimum(prompts.per_round * others * inverse(decoding.rounds), most_share)
    time = mean_round(share)
    handed = jnp.zeros(()) if hand_over is None else hand_over(decoding.stays * time)
    # While a prompt is computed, others decode all the same, in rounds that last longer: they come
    # back after as many rounds, not after as much time. Prompts in rounds of their own stop them.
    each = fused * prompts.round + alone * time
    varied = variability(load, engine)
    s, t, n = prompts.service, decoding.waiting, prompts.per_round
    here, fit = prompts.here, prompts.fit
    more = maximum(s - (1.0 - fit) * n * t, fit * s)
    each = fused * more * inverse(n * fit) + alone * time
    queued = closed_queue(more, decoding.stays * each + handed, prompts.customers, varied) - more
    queued = queued * (1.0 - here * alone)
    c = 0.5 * (engine.admission_steps - 1.0)
    per_t = inverse(t)
    y = engine.request_time * per_t + c
    n0 = ceil(y)
    r = s * per_t
    late = y - r + c * (prompts.round * per_t - 1.0)
    lam = here * others * inverse(decoding.stays + y + fused * n)
    F = lam * n0
    kappa = minimum(r * inverse(maximum(n0, 1.0)), 1.0)
    kappa = minimum(kappa * (1.0 + 0.5 * F * kappa), 1.0)
    z = ceil(maximum(y - r, 0.0))
    m = n0 - z
    late = jnp.clip(ceil(maximum(late, 0.0)) - z, 0.0, m)
    rho = fused * minimum(lam * n * fit, 1.0)
    Fk = F * kappa
    L = lam * (
        t * (n0 * (r + n0 - y - 0.5) - m * (n0 + 0.5 - 0.5 * m) + late)
        + 0.5 * (2.0 - fit) * more
    )
    dampk = inverse(1.0 + Fk)
    follow = dampk * (L + 0.5 * (2.0 - fit) * Fk * Fk * more)
    X = y * t
    wb = 0.5 * s * (1.0 + Fk + Fk * dampk) + queued - 0.5 * s * inverse(n)
    psi = maximum(1.0 - 0.5 * X * inverse(wb), 0.0)
    extra = here * (
        follow * (1.0 - rho * psi) * (1.0 + 2.0 * queued * inverse(more) * (1.0 - psi))
        + rho * wb * psi * psi
    ) + (1.0 - here) * queued
    p0 = here * (1.0 - rho) * inverse(1.0 + F)
    X = t * (y + 0.5 + p0 * (n0 - y - 0.5))
    prefill_time = prompts.fill + s + (1.0 - together) * extra
    R = engine.request_time
    before = R * (1.0 - here) + R + (X - R) * minimum(others, 1.0) + handed
    there = decoding.stays + (before + prefill_time) * inverse(time)
    share = minimum(share, prompts.per_round * others * inverse(there))
    time = mean_round(share)
    burst = load.burst + together * (1.0 - load.burst)
    behind = maximum(prompts.customers - 1.0, 0.0)
    started = before + prefill_time + burst * 0.5 * behind * prompts.service
    rate = decoding.running * inverse(started + decoding.stays * time)
    return Loop(time, share, rate, started, handed)
