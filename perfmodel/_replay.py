"""The loop of the event simulation: one replica, from the first arrival to the last end.

`perfmodel.simulate` says what is simulated and how; this is how it is computed.
"""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from perfmodel.relax import Real
from perfmodel.step_grid import StepGrid

EMPTY, PREFILL, DECODE, WAITING, HELD = range(5)
"""States of a place: free; computing a prompt; decoding; preempted; done, in a static batch."""


GAPS = 512
"""Bins of times between two tokens of a request, each 3 % longer than the one before."""

SHORTEST_GAP = 1e-4
"""Lower edge of the second bin [s]."""

_GAP_STEP = 0.03


def gap_edges() -> np.ndarray:
    """Returns the upper edges of the bins [s], shape [GAPS]; the last bin has all beyond, too."""
    return SHORTEST_GAP * np.exp(_GAP_STEP * np.arange(GAPS))


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
    its next prompt. `shared` is 1 where all servers serve one line, 0 where a request is given to
    any of them, whatever waits there, as routers do that know no queues.
    """

    grid: StepGrid
    chunk: Real
    free: Any
    latency: Real = 0.0
    seconds_per_token: Real = 0.0
    shared: Real = 1.0


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
    token: Array
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
    gaps: Array  # [GAPS]: tokens by the time since the one before
    steps: Array
    key: Array


class Design(NamedTuple):
    """One replica's simulation; `concurrency` 0 is an open loop, `count` requests are real."""

    requests: Requests
    count: Any
    concurrency: Any
    scheduler: Scheduler
    grid: StepGrid
    prefill: PrefillPool | None
    draft: Draft | None
    seed: Any


def _bin(seconds: Array) -> Array:
    """Returns the bin of a time between two tokens."""
    place = jnp.ceil(jnp.log(jnp.maximum(seconds, SHORTEST_GAP) / SHORTEST_GAP) / _GAP_STEP)
    return jnp.clip(place, 0, GAPS - 1).astype(int)


def _prompt_time(pool: PrefillPool, isl: Array, cached: Array) -> Array:
    """Returns the time in which a server of the prefill pool computes a prompt [s]."""
    new = jnp.maximum(isl - cached, 1.0)
    chunks = jnp.ceil(new / pool.chunk)
    # Mean of equal chunks: pairs are conserved.
    prior = isl - new + 0.5 * (new - new / chunks)
    each = pool.grid.time(0.0, 1.0, new / chunks, prior, 1.0 / chunks)
    return chunks * each


def _release(design: Design, s: _State, time: Array) -> _State:
    """Returns the state after the next request has arrived at a time."""
    i = s.released
    requests = design.requests
    ready = time + design.scheduler.request_time
    servers, links = s.servers, s.links
    if design.prefill is not None:
        pool = design.prefill
        drawn = jax.random.fold_in(jax.random.key(design.seed), i)
        given = jax.random.randint(drawn, (), 0, servers.shape[0])
        j = jnp.where(pool.shared > 0, jnp.argmin(servers), given)
        done = jnp.maximum(ready, servers[j])
        done = done + _prompt_time(pool, requests.isl[i], requests.cached[i])
        handed = jnp.maximum(done, links[j]) + pool.latency
        ready = handed + pool.seconds_per_token * (requests.isl[i] - requests.cached[i])
        servers, links = servers.at[j].set(done), links.at[j].set(ready)
        # A request is taken in twice, by the server that computes its prompt and by the other.
        ready = ready + design.scheduler.request_time
    return s._replace(
        released=i + 1,
        ready=s.ready.at[i].set(ready),
        record=s.record.at[i, 0].set(time),
        servers=servers,
        links=links,
    )


def _replay(design: Design, places: int) -> _State:
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

    def allowed(s: _State) -> Array:
        """How many requests have been sent; in an open loop all are from the start."""
        return jnp.where(closed, jnp.minimum(count, design.concurrency + s.ended), s.released)

    def release(s: _State) -> _State:
        return jax.lax.while_loop(
            lambda s: s.released < allowed(s), lambda s: _release(design, s, s.now), s
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
                token=put(slots.token, jnp.where(again, slots.token[j], s.now)),
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
            growth = jnp.sum(active) / jnp.maximum(sequences, 1.0)
            once = design.grid.time(sequences, context, tokens, prior, ends)
            # Every sequence takes at most one more page in `block` steps.
            used = jnp.sum(held(slots, slots.state == DECODE))
            spare = jnp.floor((plan.blocks - used) / jnp.maximum(jnp.sum(active), 1.0))
            jump = jnp.minimum(jnp.min(left), spare * block + 1.0)
            # Steps grow with the context: at most so many until the next arrival, and at the mean
            # time of those at least so many. Too few costs a turn of the loop, too many a delay.
            gap = jnp.maximum(s.ready[i] - s.now, 0.0)
            upper = jnp.minimum(jump, jnp.ceil(gap / once))
            longer = design.grid.time(
                sequences, context + 0.5 * upper * growth, tokens, prior, ends
            )
            until = jnp.minimum(upper, jnp.ceil(gap / jnp.maximum(longer, once)))
            jump = jnp.where(waiting & ~stuck, until, jump)
            # What was turned away just now has sent for another.
            jump = jnp.where(s.released < allowed(s), 1.0, jump)
            jump = jnp.where((tokens > 0) | (sequences == 0), 1.0, jnp.maximum(jump, 1.0))
            middle = context + 0.5 * (jump - 1.0) * growth
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
        # In a closed loop the next may be released only by what has just been turned away.
        coming = waiting & (s.next < s.released)
        wake = jnp.where(coming, jnp.maximum(s.ready[i], s.now), s.now)
        now = jnp.where(idle, wake, s.now + spent)
        first = jnp.where(ending & (slots.made == 0), now, slots.first)
        made = slots.made + gained + jnp.where(ending & (slots.wanted > 0), 1.0, 0.0)
        state = jnp.where(ending, DECODE, slots.state)
        # A token after a prompt that was computed anew is one more of its request.
        later = active | (ending & (slots.made > 0))
        waited = jnp.where(active, s.now + mean, now) - slots.token
        gaps = s.gaps.at[_bin(waited)].add(jnp.where(later, 1.0, 0.0))
        gaps = gaps.at[_bin(mean)].add(jnp.sum(jnp.maximum(gained - 1.0, 0.0)) * (draft is None))
        slots = slots._replace(
            token=jnp.where(later | ending, now, slots.token),
            state=state,
            todo=slots.todo - take,
            context=slots.context + take + gained,
            made=made,
            first=first,
        )
        peak = jnp.maximum(s.peak, jnp.sum(held(slots, jnp.zeros(places, bool))))
        last = jnp.where(idle, s.last, mean)
        s = s._replace(
            now=now, last=last, slots=slots, peak=peak, gaps=gaps, steps=s.steps + 1, key=key
        )
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
        gaps=jnp.zeros(GAPS),
        steps=none,
        key=jax.random.key(design.seed),
    )
    known = jnp.where(closed, 0, count)
    start = jax.lax.fori_loop(0, known, lambda i, s: _release(design, s, r.arrival[i]), start)
    return jax.lax.while_loop(lambda s: s.ended < count, body, start)


@functools.cache
def program(places: int) -> Any:
    def each(design: Design) -> dict[str, Array]:
        end = _replay(design, places)
        left = jnp.sum(end.slots.state != EMPTY)
        told = {"record": end.record, "peak": end.peak, "gaps": end.gaps}
        return told | {"left": left, "steps": end.steps}

    return jax.jit(lambda designs: jax.lax.map(each, designs))
