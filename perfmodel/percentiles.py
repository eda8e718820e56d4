"""Percentiles of a serving system: the same system followed request by request.

Closed forms give means. `percentiles` plays requests of the same classes through the event
simulation of the same scheduler (`perfmodel.simulate`): one pool, or a pool of prefill that hands
over to one that decodes. Attention groups are followed as replicas of their own.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import xarray as xr

from perfmodel import simulate
from perfmodel._replay import PrefillPool, Requests, Scheduler
from perfmodel.errors import InputError
from perfmodel.placement import Pool
from perfmodel.plan import Load
from perfmodel.simulate import Case, Outcome
from perfmodel.step_grid import StepGrid, kv_tokens, step_grid
from perfmodel.systems import Classes, SystemAsked
from perfmodel.traffic import Mix, Traffic

SHARES = (50, 90, 99)
"""Percentiles that are told."""


def percentiles(
    made: SystemAsked,
    batch: float,
    *,
    requests: int = 4000,
    rate: float | None = None,
    spread: float = 0.2,
    seed: int = 0,
) -> xr.Dataset:
    """Returns mean, P50, P90 and P99 of TTFT, TPOT, E2E and OSL/E2E along `statistic`, counts, and
    the goodput: requests a second within the limits on TTFT and TPOT.

    Args:
        made: a checked system (`perfmodel.systems.ask`).
        batch: most requests at once at a replica, and their number in a closed loop.
        requests: how many are followed; the first and last fifth are left out of the statistics.
        rate: requests per second that arrive at random; None is the closed loop of the estimate.
        spread: outputs of a class are spread evenly around its length by this share: requests
            that are all alike and start together would stay in step for ever.
        seed: of lengths and arrivals.

    Raises:
        InputError: pools of attention and FFN, drafts, and fractions of replicas are not simulated.
    """
    outcome = follow(made, batch, requests=requests, rate=rate, spread=spread, seed=seed)
    found = outcome.steady().summary()
    whole = outcome.summary()
    names = ["mean", *(f"p{share}" for share in SHARES)]
    variables: dict[str, Any] = {}
    for name, words in (
        ("ttft", "time to first token"), ("tpot", "time per output token"),
        ("e2e", "request latency"),
    ):  # fmt: skip
        values = [found[f"{name}_{statistic}"] for statistic in names]
        about = {"units": "s", "long_name": f"{words}, simulated"}
        variables[f"simulated_{name}_s"] = ("statistic", values, about)
    values = [math.nan, *(outcome.gap(share) for share in SHARES)]
    about = {"units": "s", "long_name": "time between two tokens of a request, simulated"}
    variables["simulated_gap_s"] = ("statistic", values, about)
    steady = outcome.steady()
    done = ~steady.rejected & (steady.osl > 0)
    speeds = steady.osl[done] / steady.e2e[done]
    values = [np.mean(speeds), *(np.percentile(speeds, 100 - share) for share in SHARES)]
    about = {
        "units": "token/s",
        "long_name": "output tokens over the whole request (OSL/E2E), simulated; a percentile is "
        "what so many requests have at least",
    }
    variables["simulated_tokens_per_second_user_e2e"] = ("statistic", values, about)
    limits = made.asked.limits
    kept = done & (steady.ttft <= float(limits.ttft))
    # One token has no time per token that could be too long.
    kept &= ~(steady.tpot > float(limits.tpot))
    share = float(np.mean(kept))
    about = {"units": "1", "long_name": "share of requests within the limits, simulated"}
    variables["simulated_within_limits"] = ((), share, about)
    about = {"units": "request/s", "long_name": "requests within the limits per second, simulated"}
    variables["simulated_goodput"] = ((), share * whole["request_rate"], about)
    for name, unit, words in (
        ("requests", "request", "requests followed"),
        ("rejected", "request", "requests that never fit"),
        ("preemptions", "1", "times that a request gave up its memory and was computed anew"),
        ("request_rate", "request/s", "requests finished per second"),
    ):
        about = {"units": unit, "long_name": f"{words}, simulated"}
        variables[f"simulated_{name}"] = ((), whole[name], about)
    return xr.Dataset(variables, {"statistic": names})


def follow(
    made: SystemAsked, batch: float, *, requests: int, rate: float | None, spread: float, seed: int
) -> Outcome:
    """Returns what becomes of every request; see `percentiles`."""
    case = case_of(made, batch, requests=requests, spread=spread, seed=seed)
    return simulate.simulate(case if rate is None else at_rate(case, rate, seed))


def at_rate(case: Case, rate: float, seed: int = 0) -> Case:
    """Returns a closed loop's case with requests that arrive at random, at a rate [1/s]."""
    arrival = simulate.poisson(rate, len(case.requests.isl), seed)
    return case._replace(requests=case.requests._replace(arrival=arrival), concurrency=0)


class Kept(NamedTuple):
    """What requests must keep to: `percent` of them a time [s] of a kind: ttft, tpot or gap (of
    all gaps between two tokens)."""

    kind: str
    percent: float
    seconds: float

    def kept(self, outcome: Outcome) -> bool:
        """Returns whether the requests in the middle, of gaps all, keep to it."""
        if self.kind == "gap":
            return not outcome.gap(self.percent) > self.seconds
        steady = outcome.steady()
        values = getattr(steady, self.kind)[~steady.rejected]
        values = values[np.isfinite(values)]
        return not (len(values) and np.percentile(values, self.percent) > self.seconds)


_RATES = 8


def capacity(
    made: SystemAsked,
    batch: float,
    most: float,
    limits: Sequence[Kept],
    *,
    requests: int = 1000,
    spread: float = 0.2,
    seed: int = 0,
) -> float:
    """Returns the highest rate of requests that arrive at random and keep to all limits [1/s].

    Rates are tried up to an eighth beyond `most`, eight at a time, in two rounds: the answer is
    known within 1.4 % of `most`, and 0 where not even that keeps to the limits.

    Args: as of `percentiles`; `most`, a rate about which no more is served without limits.
    """
    case = case_of(made, batch, requests=requests, spread=spread, seed=seed)
    low, high = 0.0, most * (1.0 + 1.0 / _RATES)
    for _ in range(2):
        rates = low + (high - low) * np.arange(1, _RATES + 1) / (_RATES + 1)
        found = simulate.simulate_all([at_rate(case, rate, seed) for rate in rates])
        kept = [all(limit.kept(outcome) for limit in limits) for outcome in found]
        count = kept.index(False) if False in kept else len(kept)
        low, high = (low, *rates, high)[count], (*rates, high)[count]
    return low


def case_of(made: SystemAsked, batch: float, *, requests: int, spread: float, seed: int) -> Case:
    """Returns what is simulated of a system in a closed loop; see `percentiles`."""
    where, built = made.where, made.built
    if where.attention != where.ffn or built.draft is not None:
        raise InputError("simulate: one pool, or one of prefill and one of decode; nothing else")
    decode, first = built.attention, built.prefill
    count = _whole(float(decode.plan.replicas), f"replicas of {where.attention}")
    groups = _groups(decode)
    load = _mean(made)
    grid = _grid(made, decode, load)
    room = float(
        kv_tokens(*_arrays(decode.machine, made.asked.network, load, decode.plan,
                           decode.precision, made.engine))
    )  # fmt: skip
    engine = made.engine
    block = float(engine.block)
    scheduler = Scheduler(
        batch=max(round(batch / groups), 1), chunk=_budget(first),
        blocks=math.floor(room / block), block=block, request_time=float(engine.request_time),
        admission_steps=float(engine.admission_steps), exclusive=float(engine.exclusive),
        reserve=float(engine.reservation == 1.0), static=float(made.asked.load.in_step),
    )  # fmt: skip
    prefill = None
    if where.prefill != where.attention:
        share = float(first.plan.replicas) * _groups(first) / (count * groups)
        servers = _whole(share, f"replicas of {where.prefill} for each of {where.attention}")
        from perfmodel.system import hand_over_seconds

        seconds, latency = hand_over_seconds(built, made.asked.network, float(load.input))
        prefill = PrefillPool(
            _grid(made, first, load), _budget(first), np.zeros(servers),
            latency, seconds / float(load.input), shared=0.0,
        )  # fmt: skip
    isl, osl, cached = _mix(made.classes, load).draw(requests, seed)
    drawn = np.random.default_rng(seed + 1).uniform(1.0 - spread, 1.0 + spread, requests)
    osl = np.where(osl > 1.0, np.maximum(np.round(osl * drawn), 2.0), osl)
    replicas = count * groups
    return Case(
        Requests(np.zeros(requests), isl, osl, cached), scheduler, grid,
        max(round(batch / groups), 1), replicas, prefill, seed=seed,
    )  # fmt: skip


def _budget(pool: Pool) -> float:
    """Returns the prompt tokens of a step: a round of a pipeline takes a chunk in every stage."""
    return float(pool.plan.chunk) * max(float(pool.plan.stages), 1.0)


def _arrays(*parts: Any) -> Any:
    from perfmodel.question import numbers

    return numbers(parts)


def _grid(made: SystemAsked, pool: Pool, load: Load) -> StepGrid:
    parts = (pool.machine, made.asked.network, pool.plan, pool.precision, made.engine)
    return jax.device_get(step_grid(*_arrays(*parts), load=_arrays(load)[0]))


def _groups(pool: Pool) -> int:
    return 1 if pool.plan.attention_dp is None else round(float(pool.plan.attention_dp))


def _whole(value: float, what: str) -> int:
    if abs(value - round(value)) > 1e-6 or round(value) < 1:
        raise InputError(f"simulate: {what} must be whole, not {value:g}")
    return round(value)


def _mean(made: SystemAsked) -> Load:
    """Returns a load of the mean lengths."""
    load = made.asked.load
    if load.weight is None:
        return load
    isl, osl = float(load.input), float(load.output)
    hit = float(load.mean(load.isl * load.prefix_hit)) / isl
    return Load(isl, osl, hit, load.burst, load.in_step)


def _mix(classes: Classes | None, load: Load) -> Mix:
    if classes is None:
        one = (np.asarray([float(x)]) for x in (load.isl, load.osl, load.prefix_hit, 1.0))
        return Mix(("requests",), Traffic(*one))
    traffic = Traffic(classes.isl, classes.osl, classes.cached, classes.weight)
    return Mix(classes.names, traffic)
