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

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from perfmodel.errors import InputError
from perfmodel.relax import Real
from perfmodel.step_grid import StepGrid

EMPTY, PREFILL, DECODE, WAITING, HELD = range(5)
"""States of a place: free; computing a prompt; decoding; preempted; done, in a static batch."""


class Requests(NamedTuple):
    """Requests in the order of their arrival, arrays of shape [requests].

    Fields: `arrival` [s], not read in a closed loop; `isl` and `osl`, prompt and output tokens (no
    output ends with the prompt); `cached`, prompt tokens that need not be computed.
    """

    arrival: Any
    isl: Any
    osl: Any
    cached: Any


class Scheduler(eqx.Module):
    """What decides when a replica computes what.

    Fields:
        batch: most requests at once. chunk: most prompt tokens in a step.
        blocks: pages of keys and values for requests. block: tokens in a page.
        request_time: between arrival and the queue [s].
        admission_steps: as of `perfmodel.plan.Engine`: those beyond the first half of the running
            step are added to the wait while others run.
        exclusive: 1 where prompts are computed in steps of their own, before any decoding.
        reserve: share of a request's output whose pages are set aside on admission.
        shared_budget: 1 where decoding sequences count against `chunk`.
        static: 1 where a batch is filled, served to its longest output, and only then replaced;
            ended requests keep their place and are computed along.
    """

    batch: Real
    chunk: Real
    blocks: Real
    block: Real = 16.0
    request_time: Real = 0.0
    admission_steps: Real = 1.0
    exclusive: Real = 0.0
    reserve: Real = 0.0
    shared_budget: Real = 0.0
    static: Real = 0.0


class Draft(eqx.Module):
    """Speculative decoding: a step verifies `tokens` drafts of each sequence.

    Fields: `tokens`; `acceptance` of each, given those before it were accepted; `seconds` that
    drafting adds to a step. The grid is then one of `tokens + 1` queries.
    """

    tokens: Real
    acceptance: Real
    seconds: Real = 0.0


class PrefillPool(eqx.Module):
    """Replicas that compute prompts alone and hand the keys to the simulated one.

    Fields: `grid` of their steps; `chunk`; `free`, zeros of shape [servers]; time of a hand-over:
    `latency` [s] and `seconds_per_token` [s]. A server's hand-overs follow one another, beside
    its next prompt.
    """

    grid: StepGrid
    chunk: Real
    free: Any
    latency: Real = 0.0
    seconds_per_token: Real = 0.0


class Outcome(NamedTuple):
    """What became of each request, arrays of shape [requests] in the order given.

    Fields: `arrival`, `first` token and `finish` [s], `first` NaN without output, both NaN where
    rejected; `isl`, `osl`; `preemptions`; `rejected`, where it never fits the pool; `replica`.
    By replica: `peak_blocks`, most pages held at once; `left`, places occupied at the end (none,
    ever). `decisions`, turns of the loop.
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
        return Outcome(*(column[rows] for column in self[:8]), *self[8:])

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


class _Slots(NamedTuple):
    """Places of running requests, arrays of shape [places]; tokens are whole numbers in floats."""

    id: Array
    state: Array
    todo: Array
    context: Array
    shared: Array
    aside: Array
    made: Array
    wanted: Array
    first: Array
    preempted: Array


class _State(NamedTuple):
    now: Array
    last: Array
    next: Array
    ended: Array
    released: Array
    gathering: Array
    slots: _Slots
    ready: Array
    record: Array  # [requests, 4]: arrival, first, finish, preemptions
    servers: Array
    links: Array
    peak: Array
    steps: Array
    key: Array


class _Design(NamedTuple):
    """One replica's simulation; `concurrency` 0 is an open loop, `count` requests are real."""

    requests: Requests
    count: Any
    concurrency: Any
    scheduler: Scheduler
    grid: StepGrid
    prefill: PrefillPool | None
    draft: Draft | None
    seed: Any


def _prompt_time(pool: PrefillPool, isl: Array, cached: Array) -> Array:
    """Returns the time in which a server of the prefill pool computes a prompt [s]."""
    new = jnp.maximum(isl - cached, 1.0)
    chunks = jnp.ceil(new / pool.chunk)
    # Mean of equal chunks: pairs are conserved.
    prior = isl - new + 0.5 * (new - new / chunks)
    each = pool.grid.time(0.0, 1.0, new / chunks, prior, 1.0 / chunks)
    return chunks * each


def _release(design: _Design, s: _State, time: Array) -> _State:
    """Returns the state after the next request has arrived at a time."""
    i = s.released
    requests = design.requests
    ready = time + design.scheduler.request_time
    servers, links = s.servers, s.links
    if design.prefill is not None:
        pool = design.prefill
        j = jnp.argmin(servers)
        done = jnp.maximum(ready, servers[j])
        done = done + _prompt_time(pool, requests.isl[i], requests.cached[i])
        handed = jnp.maximum(done, links[j]) + pool.latency
        ready = handed + pool.seconds_per_token * (requests.isl[i] - requests.cached[i])
        servers, links = servers.at[j].set(done), links.at[j].set(ready)
    return s._replace(
        released=i + 1,
        ready=s.ready.at[i].set(ready),
        record=s.record.at[i, 0].set(time),
        servers=servers,
        links=links,
    )


def _replay(design: _Design, places: int) -> _State:
    """Returns the state after the last request; `places` is at least the scheduler's batch."""
    r, plan, draft = design.requests, design.scheduler, design.draft
    total, count = r.isl.shape[0], design.count
    batch, block = plan.batch, plan.block
    queries = 1.0 if draft is None else draft.tokens + 1.0
    closed = design.concurrency > 0
    # The ended keep their pages in a static batch; nothing may need more.
    reserve = jnp.where(plan.static > 0, 1.0, plan.reserve)

    def blocks(tokens: Array) -> Array:
        return jnp.ceil(tokens / block)

    def held(s: _Slots, growing: Array) -> Array:
        """Blocks of each place; those that decode next hold their next tokens' as well."""
        tokens = s.context + s.todo - s.shared + jnp.where(growing, queries, 0.0)
        tokens = jnp.maximum(tokens, s.aside)
        running = (s.state == PREFILL) | (s.state == DECODE) | (s.state == HELD)
        return jnp.where(running, blocks(tokens), 0.0)

    def release(s: _State) -> _State:
        allowed = jnp.where(closed, jnp.minimum(count, design.concurrency + s.ended), 0)
        return jax.lax.while_loop(
            lambda s: s.released < allowed, lambda s: _release(design, s, s.now), s
        )

    def preempt(s: _State) -> tuple[_Slots, Array]:
        """Frees the youngest until the others' next tokens fit."""

        def over(carry: tuple[_Slots, Array, Array]) -> Array:
            return carry[2] > plan.blocks

        def drop(carry: tuple[_Slots, Array, Array]) -> tuple[_Slots, Array, Array]:
            slots, dropped, _ = carry
            running = (slots.state == PREFILL) | (slots.state == DECODE)
            j = jnp.argmax(jnp.where(running, slots.id, -1))
            slots = slots._replace(
                state=slots.state.at[j].set(WAITING),
                todo=slots.todo.at[j].set(r.isl[slots.id[j]] - slots.shared[j] + slots.made[j]),
                context=slots.context.at[j].set(slots.shared[j]),
                preempted=slots.preempted.at[j].add(1.0),
            )
            used = jnp.sum(held(slots, slots.state == DECODE))
            return slots, dropped + 1, used

        slots = s.slots
        used = jnp.sum(held(slots, slots.state == DECODE))
        slots, dropped, _ = jax.lax.while_loop(over, drop, (slots, jnp.zeros((), int), used))
        return slots, dropped

    def admit(s: _State) -> tuple[_State, Array, Array]:
        """Returns the state with requests admitted, prompt tokens of each place in this step, and
        whether the oldest in the queue has no room."""
        slots, dropped = preempt(s)
        decoding = slots.state == DECODE
        running = jnp.sum((slots.state != EMPTY) & (slots.state != WAITING))
        behind = jnp.sum(slots.state == WAITING)
        used = jnp.sum(held(slots, decoding))
        budget = plan.chunk - plan.shared_budget * jnp.sum(decoding)
        # At most one prompt is half computed, the youngest: it fills the budget first.
        take = jnp.where(slots.state == PREFILL, jnp.minimum(slots.todo, budget), 0.0)
        budget = budget - jnp.sum(take)
        lag = 0.5 * (plan.admission_steps - 1.0) * s.last * (running > 0)
        open_ = (dropped == 0) & (s.gathering | (plan.static == 0))

        def more(carry: Any) -> Array:
            s, _, budget, _, running, behind, blocked = carry
            i = jnp.minimum(s.next, total - 1)
            fresh = (s.next < count) & (s.ready[i] + lag <= s.now)
            fresh = fresh & (running + behind < batch)
            return open_ & (budget > 0) & ~blocked & (fresh | (behind > 0))

        def one(carry: Any) -> Any:
            s, take, budget, used, running, behind, _ = carry
            slots = s.slots
            again = behind > 0
            i = jnp.minimum(s.next, total - 1)
            old = jnp.argmin(jnp.where(slots.state == WAITING, slots.id, total + 1))
            j = jnp.where(again, old, jnp.argmin(slots.state))
            new = jnp.maximum(r.isl[i] - r.cached[i], 1.0)
            shared = r.isl[i] - new
            handed = design.prefill is not None
            todo = jnp.where(again, slots.todo[j], 0.0 if handed else new)
            context = jnp.where(again, slots.context[j], r.isl[i] if handed else shared)
            wanted = jnp.where(again, slots.wanted[j], r.osl[i])
            made = jnp.where(again, slots.made[j], 1.0 if handed else 0.0)
            shared = jnp.where(again, slots.shared[j], shared)
            # What the last step of its decoding will hold beyond the prompt.
            later = jnp.where(r.osl[i] > 1.0, r.osl[i] - 2.0 + queries, 0.0)
            aside = jnp.where(again, slots.aside[j], new + reserve * later)
            tokens = context + todo - shared + jnp.where(todo > 0, 0.0, queries)
            need = blocks(jnp.maximum(tokens, aside))
            never = ~again & (blocks(new + later) > plan.blocks)
            # A request of one token ends where its prompt is computed.
            over = handed & ~again & (wanted <= 1.0) & ~never
            gone = never | over
            fits = used + need <= plan.blocks
            go = fits & ~gone
            part = jnp.where(go, jnp.minimum(todo, budget), 0.0)

            def put(array: Array, value: Any) -> Array:
                return array.at[j].set(jnp.where(go, value, array[j]))

            slots = _Slots(
                id=put(slots.id, jnp.where(again, slots.id[j], i)),
                state=put(slots.state, jnp.where(todo > 0, PREFILL, DECODE)),
                todo=put(slots.todo, todo),
                context=put(slots.context, context),
                shared=put(slots.shared, shared),
                aside=put(slots.aside, aside),
                made=put(slots.made, made),
                wanted=put(slots.wanted, wanted),
                first=put(slots.first, jnp.where(again, slots.first[j], s.now)),
                preempted=put(slots.preempted, jnp.where(again, slots.preempted[j], 0.0)),
            )
            at = jnp.where(never, jnp.nan, s.ready[i])
            row = jnp.stack([jnp.where(wanted > 0, at, jnp.nan), at, jnp.zeros(())])
            record = s.record.at[i, 1:].set(jnp.where(gone, row, s.record[i, 1:]))
            s = s._replace(
                slots=slots,
                record=record,
                next=s.next + (gone | (go & ~again)),
                ended=s.ended + gone,
            )
            return (
                s,
                take.at[j].set(jnp.where(go, part, take[j])),
                budget - part,
                used + jnp.where(go, need, 0.0),
                running + go,
                behind - (go & again),
                ~(fits | gone),
            )

        s = s._replace(slots=slots)
        carry = (s, take, budget, used, running, behind, jnp.zeros((), bool))
        s, take, _, _, running, behind, blocked = jax.lax.while_loop(more, one, carry)
        stuck = blocked | (running + behind >= batch) | ~open_ | (behind > 0)
        return s, take, stuck

    def step(s: _State, take: Array, stuck: Array) -> _State:
        """Returns the state after one step, or after several in which nothing is decided."""
        slots = s.slots
        tokens = jnp.sum(take)
        alone = (plan.exclusive + plan.static > 0) & (tokens > 0)
        # What decodes at the start of the step; in a static batch the ended are computed along.
        active = (slots.state == DECODE) & ~alone
        counted = active | ((slots.state == HELD) & ~alone)
        sequences = jnp.sum(counted).astype(float)
        keys = jnp.sum(jnp.where(counted, slots.context, 0.0))
        context = keys / jnp.maximum(sequences, 1.0) + 1.0
        pairs = jnp.sum(take * (slots.context + 0.5 * take + 0.5))
        prior = jnp.where(tokens > 0, pairs / jnp.maximum(tokens, 1.0) - 0.5 * (tokens + 1.0), 0.0)
        ending = (take > 0) & (take >= slots.todo)
        ends = jnp.sum(ending).astype(float)
        left = jnp.where(active, slots.wanted - slots.made, jnp.inf)
        i = jnp.minimum(s.next, total - 1)
        waiting = s.next < count
        if draft is None:
            once = design.grid.time(sequences, context, tokens, prior, ends)
            # Every sequence takes at most one more page in `block` steps.
            used = jnp.sum(held(slots, slots.state == DECODE))
            spare = jnp.floor((plan.blocks - used) / jnp.maximum(jnp.sum(active), 1.0))
            until = jnp.ceil(jnp.maximum(s.ready[i] - s.now, 0.0) / once)
            jump = jnp.minimum(jnp.min(left), spare * block + 1.0)
            jump = jnp.where(waiting & ~stuck, jnp.minimum(jump, until), jump)
            jump = jnp.where((tokens > 0) | (sequences == 0), 1.0, jnp.maximum(jump, 1.0))
            middle = context + 0.5 * (jump - 1.0)
            mean = design.grid.time(sequences, middle, tokens, prior, ends)
            spent, gained, key = jump * mean, jnp.where(active, jump, 0.0), s.key
        else:
            key, now = jax.random.split(s.key)
            drawn = jax.random.uniform(now, (places,), minval=1e-12)
            chance = jnp.clip(draft.acceptance, 1e-12, 1.0 - 1e-12)
            accepted = jnp.minimum(jnp.floor(jnp.log(drawn) / jnp.log(chance)), draft.tokens)
            gained = jnp.where(active, jnp.minimum(accepted + 1.0, left), 0.0)
            mean = design.grid.time(sequences, context, tokens, prior, ends)
            mean = mean + jnp.where(sequences > 0, draft.seconds, 0.0)
            spent = mean
        idle = (tokens == 0) & (sequences == 0)
        wake = jnp.where(waiting, jnp.maximum(s.ready[i], s.now), s.now)
        now = jnp.where(idle, wake, s.now + spent)
        first = jnp.where(ending & (slots.made == 0), now, slots.first)
        made = slots.made + gained + jnp.where(ending & (slots.wanted > 0), 1.0, 0.0)
        state = jnp.where(ending, DECODE, slots.state)
        slots = slots._replace(
            state=state,
            todo=slots.todo - take,
            context=slots.context + take + gained,
            made=made,
            first=first,
        )
        peak = jnp.maximum(s.peak, jnp.sum(held(slots, jnp.zeros(places, bool))))
        last = jnp.where(idle, s.last, mean)
        s = s._replace(now=now, last=last, slots=slots, peak=peak, steps=s.steps + 1, key=key)
        return finish(s, idle | (sequences == 0))

    def finish(s: _State, prompts: Array) -> _State:
        """Records requests that have ended and frees their places."""
        over = (s.slots.state == DECODE) & (s.slots.made >= s.slots.wanted)
        after = jnp.where(plan.static > 0, HELD, EMPTY)

        def one(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            over, record, ended = carry
            j = jnp.argmax(over)
            first = jnp.where(s.slots.wanted[j] > 0, s.slots.first[j], jnp.nan)
            row = jnp.stack([first, s.now, s.slots.preempted[j]])
            return over.at[j].set(False), record.at[s.slots.id[j], 1:].set(row), ended + 1

        state = jnp.where(over, after, s.slots.state)
        any_ = lambda carry: jnp.any(carry[0])  # noqa: E731
        _, record, ended = jax.lax.while_loop(any_, one, (over, s.record, s.ended))
        drained = ~jnp.any((state != EMPTY) & (state != HELD))
        state = jnp.where(drained, EMPTY, state)
        gathering = drained | (s.gathering & prompts)
        return s._replace(
            slots=s.slots._replace(state=state), record=record, ended=ended, gathering=gathering
        )

    def body(s: _State) -> _State:
        s, take, stuck = admit(release(s))
        return step(s, take, stuck)

    zeros, none = jnp.zeros(places), jnp.zeros((), int)
    whole = jnp.zeros(places, int)
    servers = jnp.zeros(1) if design.prefill is None else design.prefill.free
    start = _State(
        now=jnp.where(closed, 0.0, r.arrival[0]),
        last=jnp.zeros(()),
        next=none,
        ended=none,
        released=none,
        gathering=jnp.ones((), bool),
        slots=_Slots(whole, whole, *(zeros for _ in _Slots._fields[2:])),
        ready=jnp.full(total, jnp.inf),
        record=jnp.full((total, 4), jnp.nan),
        servers=servers,
        links=servers,
        peak=jnp.zeros(()),
        steps=none,
        key=jax.random.key(design.seed),
    )
    known = jnp.where(closed, 0, count)
    start = jax.lax.fori_loop(0, known, lambda i, s: _release(design, s, r.arrival[i]), start)
    return jax.lax.while_loop(lambda s: s.ended < count, body, start)


@functools.cache
def _program(places: int) -> Any:
    def each(design: _Design) -> dict[str, Array]:
        end = _replay(design, places)
        left = jnp.sum(end.slots.state != EMPTY)
        return {"record": end.record, "peak": end.peak, "left": left, "steps": end.steps}

    return jax.jit(lambda designs: jax.lax.map(each, designs))


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


def simulate(case: Case) -> Outcome:
    """Returns what becomes of every request. Raises InputError for requests that make no sense."""
    return simulate_all([case])[0]


def simulate_all(cases: Sequence[Case]) -> list[Outcome]:
    """Returns what becomes of every request of several cases of one structure, in one program."""
    orders, designs = [], []
    for case in cases:
        _check(case)
        order = np.argsort(np.asarray(case.requests.arrival, float), kind="stable")
        if case.concurrency:
            order = np.arange(len(order))
        for replica in range(case.replicas):
            rows = order[replica :: case.replicas]
            orders.append(rows)
            designs.append((case, rows, replica))
    most = max(len(rows) for rows in orders)
    length = max(64, 1 << (most - 1).bit_length())
    batch = int(max(case.scheduler.batch for case in cases))
    places = max(8, 1 << (batch - 1).bit_length())
    # A replica without requests is done at once.
    listed = [_design(*design, length) for design in designs]
    with jax.enable_x64(True):
        wide = [jax.tree.map(np.asarray, design) for design in listed]
        stacked = jax.tree.map(lambda *leaves: np.stack([*map(_wide, leaves)]), *wide)
        found = jax.device_get(_program(places)(stacked))
    outcomes, at = [], 0
    for case in cases:
        outcomes.append(_outcome(case, orders, found, at))
        at += case.replicas
    return outcomes


def _wide(leaf: Any) -> np.ndarray:
    array = np.asarray(leaf)
    return array.astype(np.int64 if array.dtype.kind in "iu" else np.float64)


def _check(case: Case) -> None:
    columns = [np.asarray(column, float) for column in case.requests]
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


def _design(case: Case, rows: np.ndarray, replica: int, length: int) -> _Design:
    def filled(column: Any) -> np.ndarray:
        out = np.ones(length)
        out[: len(rows)] = np.asarray(column, float)[rows]
        return out

    return _Design(
        Requests(*map(filled, case.requests)),
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
    )  # fmt: skip
