"""Event simulation of a serving replica: each request's first token and end, in one compiled loop.

The scheduler of continuous batching, step by step: running requests decode one token each (or a
draft's accepted ones); prompt tokens fill the step's budget, oldest request first; a request is
admitted when a place is free and its prompt's blocks fit; where the keys of running requests
outgrow the pool, the youngest is preempted and later computed anew. Requests keep the order in
which they came, so the queue is a position in a list. Steps in which nothing can change but the
number of keys are taken together, at their mean time.

Step times come from a table (`perfmodel.step_grid`). Time is kept in 64 bits: an hour in 32 bits
has steps of a quarter of a millisecond. docs/simulation.md compares with the closed forms.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from perfmodel._replay import (
    Design,
    Draft,
    PrefillPool,
    Requests,
    Scheduler,
    gap_edges,
    program,
)
from perfmodel.errors import InputError
from perfmodel.step_grid import StepGrid


class Outcome(NamedTuple):
    """What became of each request, arrays of shape [requests] in the order given.

    Fields: `arrival`, `first` token and `finish` [s], `first` NaN without output, both NaN where
    rejected; `isl`, `osl`; `preemptions`; `rejected`, where it never fits the pool; `replica`.
    By replica: `peak_blocks`, most pages held at once; `left`, places occupied at the end (none,
    ever). `decisions`, turns of the loop. `gaps`, tokens by the time since the one before of their
    request, in bins of 3 % (`gap`), of all requests.
    """

    arrival: np.ndarray
    first: np.ndarray
    finish: np.ndarray
    isl: np.ndarray
    osl: np.ndarray
    preemptions: np.ndarray
    rejected: np.ndarray
    replica: np.ndarray
    peak_blocks: np.ndarray
    left: np.ndarray
    decisions: int
    gaps: np.ndarray

    def gap(self, percent: float) -> float:
        """Returns the time between two tokens of a request that so many of all tokens keep [s],
        within 3 %; NaN where no request has two."""
        counts = np.cumsum(self.gaps)
        if not counts[-1]:
            return np.nan
        return float(gap_edges()[np.searchsorted(counts, 0.01 * percent * counts[-1])])

    @property
    def ttft(self) -> np.ndarray:
        """Time to first token [s]."""
        return self.first - self.arrival

    @property
    def tpot(self) -> np.ndarray:
        """Time per output token after the first [s]; NaN for fewer than two."""
        more = np.where(self.osl > 1, self.osl - 1, np.nan)
        return (self.finish - self.first) / more

    @property
    def e2e(self) -> np.ndarray:
        """Time from arrival to the last token [s]."""
        return self.finish - self.arrival

    def take(self, rows: Any) -> "Outcome":
        """Returns the requests at an index, slice or mask."""
        columns = {name: getattr(self, name)[rows] for name in self._fields[:8]}
        return self._replace(**columns)

    def steady(self, skip: float = 0.2) -> "Outcome":
        """Returns requests in the middle: without the first and last `skip` of those that came."""
        order = np.argsort(self.arrival, kind="stable")
        edge = int(len(order) * skip)
        return self.take(np.sort(order[edge : len(order) - edge]))

    def summary(self) -> dict[str, float]:
        """Returns means and percentiles of `ttft`, `tpot` and `e2e` [s], counts and rates [1/s]."""
        done = ~self.rejected
        found: dict[str, float] = {}
        for name in ("ttft", "tpot", "e2e"):
            values = getattr(self, name)[done]
            values = values[np.isfinite(values)]
            found[f"{name}_mean"] = float(np.mean(values)) if len(values) else np.nan
            for percent in (50, 90, 99):
                value = float(np.percentile(values, percent)) if len(values) else np.nan
                found[f"{name}_p{percent}"] = value
        span = np.nan
        if np.any(done):
            span = float(np.max(self.finish[done]) - np.min(self.arrival[done]))
        found["requests"] = float(np.sum(done))
        found["rejected"] = float(np.sum(self.rejected))
        found["preemptions"] = float(np.sum(self.preemptions))
        found["request_rate"] = found["requests"] / span if span else np.nan
        found["output_rate"] = float(np.sum(self.osl[done])) / span if span else np.nan
        return found


class Case(NamedTuple):
    """What is simulated: requests, and what serves them.

    Fields: `requests`; `scheduler` of each replica; `grid` of its step times; `concurrency`,
    requests of a closed loop at each replica, 0 where requests arrive by themselves; `replicas`,
    to which requests are dealt in turn; `prefill`, servers that compute prompts, for each replica;
    `draft`, speculation; `seed` of what is drawn.
    """

    requests: Requests
    scheduler: Scheduler
    grid: StepGrid
    concurrency: int = 0
    replicas: int = 1
    prefill: PrefillPool | None = None
    draft: Draft | None = None
    seed: int = 0


def poisson(rate: float, count: int, seed: int = 0) -> np.ndarray:
    """Returns arrivals of requests that know nothing of each other [s], shape [count].

    >>> round(float(poisson(4.0, 10_000)[-1]))  # 10,000 at four a second
    2482
    """
    if not rate > 0.0:
        raise InputError(f"rate: must be more than 0 requests a second, not {rate:g}")
    return np.cumsum(np.random.default_rng(seed).exponential(1.0 / rate, count))


def simulate(case: Case) -> Outcome:
    """Returns what becomes of every request. Raises InputError for requests that make no sense."""
    return simulate_all([case])[0]


def simulate_all(cases: Sequence[Case]) -> list[Outcome]:
    """Returns what becomes of every request of several cases of one structure, in one program."""
    orders: list[np.ndarray] = []
    parts: list[tuple[Case, np.ndarray, int]] = []
    for case in cases:
        _check(case)
        order = np.argsort(np.asarray(case.requests.arrival, float), kind="stable")
        if case.concurrency:
            order = np.arange(len(order))
        for replica in range(case.replicas):
            rows = order[replica :: case.replicas]
            orders.append(rows)
            parts.append((case, rows, replica))
    most = max(len(rows) for rows in orders)
    # Few shapes, few programs; what is filled up costs next to nothing.
    length = max(2048, 1 << (most - 1).bit_length())
    batch = int(max(case.scheduler.batch for case in cases))
    places = max(64, 1 << (batch - 1).bit_length())
    filled = max(4, 1 << (len(parts) - 1).bit_length()) - len(parts)
    # A replica without requests is done at once.
    parts += [(parts[0][0], np.zeros(0, int), 0)] * filled
    listed = [_design(case, rows, replica, length) for case, rows, replica in parts]
    with jax.enable_x64(True):
        wide = [jax.tree.map(np.asarray, design) for design in listed]
        kinds = {(jax.tree.structure(d), str(jax.tree.map(np.shape, d))) for d in wide}
        if len(kinds) > 1:
            raise InputError(
                "cases: all or none must draft, and all must have as many prefill servers"
            )
        stacked = jax.tree.map(lambda *leaves: np.stack([*map(_wide, leaves)]), *wide)
        found = jax.device_get(program(places)(stacked))
    outcomes, at = [], 0
    for case in cases:
        outcomes.append(_outcome(case, orders, found, at))
        at += case.replicas
    return outcomes


def _wide(leaf: Any) -> np.ndarray:
    array = np.asarray(leaf)
    return array.astype(np.int64 if array.dtype.kind in "iu" else np.float64)


def _check(case: Case) -> None:
    columns = [np.asarray(getattr(case.requests, name), float) for name in Requests._fields]
    if len({column.shape for column in columns}) != 1 or columns[0].ndim != 1:
        raise InputError("requests: columns must be lists of one length")
    if not len(columns[0]):
        raise InputError("requests: none given")
    arrival, isl, osl, cached = columns
    for name, column, low in (("isl", isl, 1), ("osl", osl, 0), ("cached", cached, 0)):
        bad = ~((column >= low) & (column == np.floor(column)) & np.isfinite(column))
        if np.any(bad):
            row = int(np.argmax(bad))
            raise InputError(
                f"{name}: request {row} has {column[row]:g}; a whole number from {low} is needed"
            )
    if np.any(cached > isl):
        row = int(np.argmax(cached > isl))
        raise InputError(f"cached: request {row} has more than its prompt of {isl[row]:g}")
    if not case.concurrency and not np.all(np.isfinite(arrival)):
        row = int(np.argmax(~np.isfinite(arrival)))
        raise InputError(f"arrival: request {row} has none, and the loop is open")
    least = (("batch", 1), ("chunk", 1), ("block", 1), ("blocks", 0))
    for name, low in least:
        value = float(getattr(case.scheduler, name))
        if not value >= low:
            raise InputError(f"{name}: must be at least {low}, not {value:g}")
    if case.replicas < 1 or case.concurrency < 0:
        raise InputError("replicas must be at least 1, and concurrency not negative")


def _design(case: Case, rows: np.ndarray, replica: int, length: int) -> Design:
    def filled(column: Any) -> np.ndarray:
        out = np.ones(length)
        out[: len(rows)] = np.asarray(column, float)[rows]
        return out

    return Design(
        Requests(*(filled(getattr(case.requests, name)) for name in Requests._fields)),
        len(rows),
        case.concurrency,
        case.scheduler,
        case.grid,
        case.prefill,
        case.draft,
        case.seed + replica,
    )


def _outcome(case: Case, orders: list[np.ndarray], found: Any, at: int) -> Outcome:
    count = len(np.asarray(case.requests.isl))
    record, replica = np.full((count, 4), np.nan), np.zeros(count, int)
    for place in range(at, at + case.replicas):
        rows = orders[place]
        record[rows] = found["record"][place, : len(rows)]
        replica[rows] = place - at
    arrival, first, finish, preempted = record.T
    isl, osl = (np.asarray(c, float) for c in case.requests[1:3])
    rejected = np.isnan(finish)
    peak = found["peak"][at : at + case.replicas]
    left = found["left"][at : at + case.replicas]
    return Outcome(
        arrival, first, finish, isl, osl, np.where(rejected, 0, preempted).astype(int), rejected,
        replica, peak, left, int(np.sum(found["steps"][at : at + case.replicas])),
        np.sum(found["gaps"][at : at + case.replicas], axis=0),
    )  # fmt: skip
