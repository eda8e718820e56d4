"""A serving system asked for by names: pools of chips, what each does, and what comes of it.

`serve` is what `perfmodel estimate` prints where pools are named. A pool is written as its chip and
what differs from one chip of it: `b200:tp=4,replicas=2,chunk=8192,weights=fp4`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import xarray as xr

from perfmodel import cache, chips, placement, question, results, speculation, system
from perfmodel.errors import InputError, nearest, shorten
from perfmodel.margins import MARGINS
from perfmodel.models.draft import Draft
from perfmodel.models.mlp import Mlp
from perfmodel.placement import FREE, Link, Links, Placement, Pool, System
from perfmodel.plan import Plan
from perfmodel.question import ChipLike, EngineLike, ModelLike, Question
from perfmodel.serving import PARTS
from perfmodel.speculation import Speculation
from perfmodel.system import STATIONS, SystemEstimate

ROLES = ("prefill", "decode", "attention", "ffn", "draft")
"""Parts of the work that a pool can be named for; `decode` is attention and ffn."""

_DEGREES = ("tp", "pp", "ep", "attention_dp", "regions")
_COUNTS = (*_DEGREES, "chunk")
_SHARES = ("replicas", "offload", "weights_first")
_FORMATS = ("weights", "activations", "kv")
_KEYS = (*_COUNTS, *_SHARES, *_FORMATS)


@dataclasses.dataclass(frozen=True)
class PoolAsked:
    """A pool by names: its chip, layout of a replica, replicas (may be fractional) and formats;
    `offload` and `weights_first` as of `perfmodel.estimate`."""

    chip: ChipLike
    tp: int = 1
    pp: int = 1
    ep: int = 1
    attention_dp: int = 1
    regions: int = 1
    replicas: float = 1.0
    offload: float = 0.0
    weights_first: float = 1.0
    chunk: int | None = None
    weights: str | None = None
    activations: str | None = None
    kv: str | None = None


def parse_pool(text: str, where: str = "pool") -> PoolAsked:
    """Returns a pool from `CHIP[:key=value,…]`.

    >>> parse_pool("b200:tp=4,replicas=0.5,weights=fp8").replicas
    0.5
    """
    chip, _, rest = text.partition(":")
    given: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in rest.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key not in _KEYS:
            raise InputError(f"{where}: unknown {shorten(part, 30)!r}{nearest(key, _KEYS)}")
        if key in given:
            raise InputError(f"{where}: {key} is given more than once")
        if key in _FORMATS:
            given[key] = value
            continue
        try:
            given[key] = float(value) if key in _SHARES else int(value)
        except ValueError:
            kind = "a number" if key in _SHARES else "a whole number"
            raise InputError(f"{where}: {key} must be {kind}, not {shorten(value, 30)!r}") from None
    if not chip.strip():
        raise InputError(f"{where}: a chip is needed before ':' in {shorten(text, 40)!r}")
    return PoolAsked(chip.strip(), **given)


def table(given: Mapping[str, Any], base: Any) -> tuple[Placement, dict[str, Any]]:
    """Returns the placement of pools named by role, and the pools by name.

    Args:
        given: pools by role, those of `ROLES` that are asked for.
        base: the pool of what no role is given for; None where there is none.

    >>> where, pools = table({"prefill": "p"}, "b")
    >>> where.prefill, where.attention, where.draft
    ('prefill', 'pool', 'pool')
    """
    for role in given:
        if role not in ROLES:
            raise InputError(f"pools: unknown role {shorten(role, 30)!r}{nearest(role, ROLES)}")
    pools = dict(given)
    if base is not None:
        pools["pool"] = base

    def name(*roles: str) -> str:
        found = next((role for role in (*roles, "pool") if role in pools), None)
        if found is None:
            needed = " or ".join(roles)
            raise InputError(f"pools: none does {roles[0]} (nearest: name a pool for {needed})")
        return found

    attention = name("attention", "decode")
    where = Placement(
        prefill=name("prefill", "decode", "attention"),
        attention=attention,
        ffn=name("ffn", "decode", "attention"),
        draft="draft" if "draft" in pools else attention,
    )
    used = where.names()
    idle = next((key for key in pools if key not in used), None)
    if idle is not None:
        called = "CHIP" if idle == "pool" else idle
        raise InputError(f"pools: {called} has nothing to do, other pools have all of its work")
    return where, {key: value for key, value in pools.items() if key in used}


def acceptance(
    tokens: float,
    rate: float | Sequence[float] | None,
    lengths: Sequence[float] | None,
    candidates: float = 1.0,
) -> Speculation:
    """Returns speculation from a rate, a list of rates by position, or measured mean lengths."""
    if (rate is None) == (lengths is None):
        raise InputError("acceptance: a rate, rates by position, or mean lengths; one of them")
    if lengths is not None:
        if len(lengths) == 1:
            return speculation.of_length(lengths[0], tokens, candidates)
        return speculation.of_lengths(lengths, tokens, candidates)
    if isinstance(rate, int | float):
        return speculation.chain(rate, tokens, candidates)
    return speculation.of_positions(list(rate or ()), tokens, candidates)


def link(bandwidth: float | None, latency: float | None, inside: bool = False) -> Link:
    """Returns a link: through the ports of both ends, and no faster than a bandwidth [B/s].

    Args:
        inside: whether both pools are in one domain (NVL72), whose links they then use.
        bandwidth: between two replicas; 0 and none are the ports', inf is an infinite link.
        latency: of a message [s].
    """
    if bandwidth is not None and np.isinf(bandwidth):
        return FREE
    if bandwidth is not None and bandwidth < 0:
        raise InputError(f"link: bandwidth must not be negative, not {bandwidth:g}")
    usual = Link()
    return Link(
        ports=1.0,
        seconds_per_byte=1.0 / bandwidth if bandwidth else 0.0,
        latency=usual.latency if latency is None else latency,
        inside=float(inside),
    )


@dataclasses.dataclass(frozen=True)
class Scheduling:
    """How a worker serves its requests.

    Fields:
        static: whether a batch is served as one: prompts first, and then tokens until the longest
            output ends. Else requests come and go (continuous batching).
        spread: standard deviation over mean of the output lengths of a static batch.
        reserved: tokens set aside for every request, however long it gets; 0 are those of the
            longest request; None where memory is given in pages as it is needed.
    """

    static: bool = False
    spread: float = 0.0
    reserved: int | None = None


@dataclasses.dataclass(frozen=True)
class Classes:
    """Several kinds of requests at once: names, and arrays over them as of `Load`."""

    names: tuple[str, ...]
    isl: Any
    osl: Any
    cached: Any
    weight: Any


@dataclasses.dataclass(frozen=True)
class SystemAsked:
    """A checked system: its question, pools by name, and everything a program needs."""

    asked: Question
    where: Placement
    pools: Mapping[str, PoolAsked]
    built: System
    draft: Any
    draft_name: str
    engine: Any
    classes: Classes | None = None


def ask(
    model: ModelLike,
    pools: Mapping[str, PoolAsked | str],
    where: Placement,
    *,
    batch: float,
    isl: int,
    osl: int,
    prefix_hit: float = 0.0,
    engine: EngineLike = "neutral",
    slo_ttft: float | None = None,
    slo_tpot: float | None = None,
    draft: ModelLike | None = None,
    draft_weights: str | None = None,
    spec: Speculation | None = None,
    micro: float = 1.0,
    streamed: bool = True,
    links: Links | None = None,
    price: float | Mapping[str, float] | None = None,
    ownership: str = "rented",
    electricity: float | None = None,
    pue: float | None = None,
    lifetime: float | None = None,
    routing: float | None = None,
    most: question.Budgets | None = None,
    classes: Classes | None = None,
    scheduling: Scheduling | None = None,
) -> SystemAsked:
    """Returns a system, every part of it checked; see `serve` for the arguments."""
    network = question.find_model(model)
    if classes is not None:
        isl, osl, prefix_hit = _means(classes, int(network.model.max_context), network.name)
    parsed = {n: parse_pool(p, n) if isinstance(p, str) else p for n, p in pools.items()}
    question.real_number("batch", batch, 1.0, 1e9, "at least 1 request")
    question.real_number("micro", micro, 1.0, 1e6, "at least 1 micro-batch")
    if (draft is None) != (spec is None):
        raise InputError("draft: a draft model and its acceptance belong together")
    heads = _heads(network, draft, where)
    guess = None if draft is None or heads is not None else question.find_model(draft)
    if guess is not None and guess.model.vocabulary != network.model.vocabulary:
        raise InputError(
            f"draft: {guess.name} has {int(guess.model.vocabulary):,} tokens, {network.name} "
            f"{int(network.model.vocabulary):,}; a draft needs the same vocabulary"
        )
    entries = {name: question.unique_chips([p.chip])[0] for name, p in parsed.items()}
    names = {}
    for name, pool in parsed.items():
        drafts = spec is not None and where.draft == name and name not in (
            where.prefill, where.attention, where.ffn,
        )  # fmt: skip
        served = guess if drafts and guess is not None else network
        weights = pool.weights or (draft_weights if drafts else None)
        names[name] = question.own_precision(served, weights, pool.activations, pool.kv)
        question.check_kernel(entries[name], names[name])
        degrees = {k: question.whole(f"{name} {k}", getattr(pool, k)) for k in _DEGREES}
        question.check_degrees(served, cp=1, **degrees)
    order = list(parsed)
    listed = list({entries[name].name: entries[name] for name in order}.values())
    asked = question.ask(
        network, listed, [names[name] for name in order], isl=isl, osl=osl, prefix_hit=prefix_hit,
        engine=engine, slo_ttft=slo_ttft, slo_tpot=slo_tpot, price=price, ownership=ownership,
        electricity=electricity, pue=pue, lifetime=lifetime, routing=routing, most=most,
    )  # fmt: skip
    mixture = network.model.is_mixture or (guess is not None and guess.model.is_mixture)
    grouped = mixture or any(pool.attention_dp != 1 for pool in parsed.values())
    tiers = any(pool.offload or pool.weights_first != 1.0 for pool in parsed.values())
    made = {
        name: _pool(
            asked, entries, parsed[name], name, order.index(name), batch, mixture, grouped, tiers
        )
        for name in order
    }
    built = placement.build(
        where, made, links=links, micro=micro, streamed=float(streamed), speculation=spec
    )
    numbers = heads if guess is None else guess.model
    numbers = None if numbers is None else question.numbers(numbers)
    called = str(draft) if guess is None and heads is not None else ""
    called = called if guess is None else guess.name
    load, engine_numbers = _scheduled(asked, classes, scheduling or Scheduling())
    return SystemAsked(
        dataclasses.replace(asked, load=load), where, parsed, question.numbers(built), numbers,
        called, engine_numbers, classes,
    )  # fmt: skip


HEADS = ("mtp", "eagle")
"""Drafts that are heads of the network itself: its own draft layers, and one more decoder layer."""


def _heads(network: Any, draft: Any, where: Placement) -> Draft | None:
    """Returns the draft heads asked for, None where the draft is another network."""
    if draft not in HEADS:
        return None
    if where.draft != where.attention:
        raise InputError(
            f"draft: {draft} heads read the network's hidden state, so they run where it decodes"
        )
    if draft == "mtp":
        if network.draft is None:
            raise InputError(
                f"draft: {network.name} has no draft layers of its own (nearest: eagle)"
            )
        return network.draft
    model = network.model
    dense = [block for block in model.feed_forward if isinstance(block.body, Mlp)]
    if not dense or not model.attention:
        raise InputError(f"draft: no dense layer of {network.name} to make an eagle head like")
    blocks = tuple(dataclasses.replace(b, count=1) for b in (model.attention[0], dense[0]))
    layer = dataclasses.replace(model, layers=1, blocks=blocks, extra_norms=0, streams=None)
    return Draft(1, layer)


def _means(classes: Classes, longest: int, name: str) -> tuple[int, int, float]:
    """Returns the mean lengths and hit share of several classes, checked."""
    whole = np.asarray(classes.isl) + np.asarray(classes.osl)
    if float(np.max(whole)) > longest:
        which = classes.names[int(np.argmax(whole))]
        raise InputError(
            f"class {which}: {int(np.max(whole)):,} tokens exceed the longest context of {name}, "
            f"{longest:,}"
        )
    weight = np.asarray(classes.weight)
    isl, osl = (float(np.sum(weight * np.asarray(x))) for x in (classes.isl, classes.osl))
    hit = float(np.sum(weight * np.asarray(classes.isl) * np.asarray(classes.cached))) / isl
    return max(round(isl), 1), max(round(osl), 1), hit


def _scheduled(asked: Question, classes: Classes | None, how: Scheduling) -> tuple[Any, Any]:
    """Returns the load and the engine, as several classes and a way of scheduling have them."""
    load, engine = asked.load, asked.engine.engine
    if classes is not None:
        load = dataclasses.replace(
            load, isl=np.asarray(classes.isl, float), osl=np.asarray(classes.osl, float),
            prefix_hit=np.asarray(classes.cached, float), weight=np.asarray(classes.weight, float),
        )  # fmt: skip
    if how.static:
        spread = question.real_number("spread", how.spread, 0.0, 10.0, "a number from 0 to 10")
        load = dataclasses.replace(load, in_step=1.0, spread=spread)
        engine = dataclasses.replace(engine, exclusive=1.0)
    elif how.spread:
        raise InputError("spread: only a static batch waits for its longest output")
    if how.reserved is not None:
        needed = int(np.max(np.asarray(load.isl) + np.asarray(load.osl)))
        tokens = question.whole("reserved", how.reserved, 0) or needed
        if tokens < needed:
            raise InputError(f"reserved: {tokens:,} tokens are less than a request has, {needed:,}")
        # What is set aside is one page that holds any request.
        engine = dataclasses.replace(engine, block=float(tokens))
    return question.numbers(load), question.numbers(engine)


def _pool(
    asked: Question,
    entries: Mapping[str, chips.Chip],
    pool: PoolAsked,
    name: str,
    kind: int,
    batch: float,
    mixture: bool,
    grouped: bool,
    tiers: bool,
) -> Pool:
    """Returns the numbers of a pool."""
    chip = next(i for i, entry in enumerate(asked.chips) if entry.name == entries[name].name)
    machine = jax.tree.map(lambda leaf: leaf[chip], asked.machines)
    own = entries[name].fields.get("prompt_chunk")
    usual = int(asked.engine.engine.token_budget)
    usual = usual if own is None else int(own.value or usual)
    said = "more than 0, at most 1e6"
    replicas = question.real_number(f"{name} replicas", pool.replicas, 1e-9, 1e6, said)
    plan = Plan(
        chips=pool.tp * pool.pp,
        stages=pool.pp * pool.regions,
        batch=batch,
        chunk=usual if pool.chunk is None else question.whole(f"{name} chunk", pool.chunk),
        replicas=replicas,
        attention_dp=pool.attention_dp if grouped else None,
        expert_ranks=pool.ep if mixture else None,
        offload=question.share(f"{name} offload", pool.offload) if tiers else None,
        weights_first=question.share(f"{name} weights_first", pool.weights_first)
        if tiers
        else None,
    )
    precision = jax.tree.map(lambda leaf: leaf[kind], asked.precisions)
    return Pool(machine, plan, precision)


def _evaluate(
    made: System, model: Any, load: Any, engine: Any, limits: Any, draft: Any
) -> dict[str, Any]:
    # A stored program returns plain containers.
    found = system.evaluate(made, model, load, engine, limits, draft)
    return {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}


def evaluate(made: SystemAsked) -> SystemEstimate:
    """Returns what a checked system achieves, as numbers of the host."""
    asked, limits = made.asked, question.numbers(made.asked.limits)
    values = (made.built, asked.network, asked.load, made.engine, limits, made.draft)
    found = cache.program("system", _evaluate, values)(*values)
    return SystemEstimate(**jax.device_get(found))


# Name, unit, meaning and how it is read; names as in `results` wherever they mean the same.
_SCALARS = (
    ("ttft_s", "s", "time to first token, hand-over included", lambda e: e.ttft),
    ("tpot_s", "s", "time per output token after the first", lambda e: e.tpot),
    ("e2e_s", "s", "request latency, end to end", lambda e: e.e2e),
    ("longest_gap_s", "s", "longest time between two steps of a request", lambda e: e.longest_gap),
    ("tokens_per_second_user", "token/s", "output tokens per second per user (1/TPOT)",
     lambda e: 1.0 / e.tpot),
    ("tokens_per_second_user_e2e", "token/s",
     "output tokens per second per user over the whole request (OSL/E2E)", lambda e: e.osl / e.e2e),
    ("output_tokens_per_second_chip", "token/s/chip",
     "output tokens per second per chip, of all pools", lambda e: e.output_rate / e.chips),
    ("total_tokens_per_second_chip", "token/s/chip",
     "input and output tokens per second per chip, of all pools",
     lambda e: e.output_rate * (e.isl + e.osl) / e.osl / e.chips),
    ("output_tokens_per_second", "token/s", "output tokens per second of the system",
     lambda e: e.output_rate),
    ("requests_per_second", "request/s", "requests finished per second by the system",
     lambda e: e.request_rate),
    ("power_w", "W", "mean power of all chips", lambda e: e.power),
    ("energy_per_output_token_j", "J/token", "board energy per output token",
     lambda e: e.energy_per_output_token),
    ("energy_per_total_token_j", "J/token", "board energy per input or output token",
     lambda e: e.energy_per_total_token),
    ("usd_per_million_output_tokens", "USD", "per million output tokens",
     lambda e: _dollars(e.usd_per_output_token)),
    ("usd_per_million_input_tokens", "USD", "per million input tokens",
     lambda e: _dollars(e.usd_per_input_token)),
    ("usd_per_million_total_tokens", "USD", "per million input or output tokens",
     lambda e: _dollars(e.usd_per_total_token)),
    ("chips", "chip", "chips of all pools", lambda e: e.chips),
    ("admitted", "request", "requests of a decoding replica that fit its memory",
     lambda e: e.admitted),
    ("running", "request", "requests of a decoding replica that are served at once",
     lambda e: e.running),
    ("decoding", "request", "those of them that decode", lambda e: e.decoding),
    ("tokens_per_cycle", "token", "tokens that a sequence gets in a cycle",
     lambda e: e.tokens_per_cycle),
    ("chunk_share", "1", "chunks of others' prompts in a cycle", lambda e: e.chunk_share),
    ("preempted", "1", "times that a request gives up its memory, and is computed again",
     lambda e: e.preempted),
    ("handover_s", "s", "of TTFT, waiting for keys and values to cross", lambda e: e.handover),
)  # fmt: skip

_BY_POOL = (
    ("pool_load", "1", "share of time that a pool works", lambda e: e.load[: len(placement.PARTS)]),
    ("pool_chips", "chip", "chips of a pool", lambda e: e.pool_chips),
    ("pool_memory_bytes", "B", "memory used on one chip", lambda e: e.memory_bytes),
    ("pool_weight_bytes", "B", "weights on one chip", lambda e: e.weight_bytes),
    ("pool_memory_margin", "1", "memory left beside one request, of a chip's capacity",
     lambda e: e.memory_margin),
    ("pool_chip_power_w", "W", "mean power of one chip", lambda e: e.chip_power),
)  # fmt: skip

_LINKS = STATIONS[len(placement.PARTS) :]


def _dollars(amount: Any) -> Any:
    return np.where(amount > 0.0, amount * 1e6, np.nan)


def pressure(load: Any, decoding: Any) -> np.ndarray:
    """Returns how near pools and links are to their limit, shape [..., stations].

    A pool that decodes works all the time, however few its sequences; near its limit is one where
    all requests that may run do decode.

    Args: `load` by `STATIONS`; `decoding`, share of the running requests that decode.
    """
    parts = len(placement.PARTS)
    full = np.array(load, dtype=float)
    full[..., 1:parts] *= np.asarray(decoding)[..., None]
    return full


def binding(found: SystemEstimate, names: Sequence[str]) -> str:
    """Returns what limits a system: the margin missed by most, else memory where requests wait for
    it, else the busiest pool or link, with the largest part of TPOT where that is a decoding pool.
    """
    margins = np.asarray(found.margins)
    if np.any(margins < 0.0):
        which = MARGINS[int(np.argmin(margins))]
        if which == "memory":
            pool = names[int(np.argmin(found.memory_margin[: len(names)]))]
            return f"memory of {pool}"
        return which
    busiest = int(np.argmax(pressure(found.load, found.decoding / found.running)))
    if STATIONS[busiest] in _LINKS:
        return STATIONS[busiest]
    part = PARTS[int(np.argmax(found.parts))]
    name = names[min(busiest, len(names) - 1)]
    return "prefill" if busiest == 0 and found.owns[1] > 0 else f"{part} on {name}"


def serve(
    model: ModelLike,
    pools: Mapping[str, PoolAsked | str],
    *,
    base: PoolAsked | str | None = None,
    batch: float,
    isl: int,
    osl: int,
    **options: Any,
) -> xr.Dataset:
    """Returns what a serving system achieves: scalars with units, and each pool and link.

    Args:
        model: the network, by name, path, or as loaded.
        pools: by role (`ROLES`); what is not named is done by `base`, or by the pool that decodes.
        base: pool of what no role is named for.
        batch: concurrent requests per replica of the pool that decodes, those in prefill and
            hand-over among them.
        isl, osl, prefix_hit, engine, slo_ttft, slo_tpot, price, ownership, electricity, pue,
            lifetime, routing: as of `perfmodel.estimate`.
        draft, spec: what guesses ahead, and what is accepted of it (`acceptance`): another network,
            "mtp" for the draft layers of this one, "eagle" for one more decoder layer like its own.
        draft_weights: format of the draft's weights on a pool of its own.
        micro: micro-batches that take turns between pools of attention, FFN and draft.
        streamed: whether keys and values cross layer by layer while a prompt is computed.
        links: `perfmodel.placement.Links`; through the ports of the chips where left out.
        most: budgets of power, footprint and cost of all pools (`perfmodel.question.budgets`).
        classes: several kinds of requests at once, instead of `isl`, `osl` and `prefix_hit`.
        scheduling: static batches, or memory reserved for the longest request.

    >>> found = serve("llama-3.3-70b", {"prefill": "h100:tp=4,weights=fp8", "decode":
    ...     "h200:tp=4,weights=fp8"}, batch=32, isl=4000, osl=1000)
    >>> found.chips.item(), [str(name) for name in found.pool.values]
    (8.0, ['prefill', 'decode'])
    """
    where, named = table(pools, base)
    made = ask(model, named, where, batch=batch, isl=isl, osl=osl, **options)
    found = evaluate(made)
    return dataset(made, found, batch)


def dataset(made: SystemAsked, found: SystemEstimate, batch: float) -> xr.Dataset:
    """Returns an evaluated system as a Dataset."""
    where = made.where
    by_part = [where.prefill, where.attention, where.ffn]
    if made.built.draft is not None:
        by_part.append(where.draft)
    first = [by_part.index(name) for name in dict.fromkeys(by_part)]
    names = [by_part[i] for i in first]
    runs = results.can_run(np.asarray(found.margins))
    variables: dict[str, Any] = {}
    for name, unit, words, read in _SCALARS:
        value = float(read(found))
        shown = value if runs or name in ("chips", "admitted") else np.nan
        variables[name] = ((), shown, {"units": unit, "long_name": words})
    for name, unit, words, read in _BY_POOL:
        value = np.asarray(read(found), dtype=float)[first]
        variables[name] = ("pool", value, {"units": unit, "long_name": words})
    links = np.asarray(found.load, dtype=float)[len(placement.PARTS) :]
    about = {"units": "1", "long_name": "share of time that a link works"}
    variables["link_load"] = ("link", links, about)
    variables["tpot_parts_s"] = (
        "part", np.asarray(found.parts, dtype=float),
        {"units": "s", "long_name": "time per output token by what it is spent on"},
    )  # fmt: skip
    variables["margin"] = (
        "constraint", np.asarray(found.margins, dtype=float),
        {"units": "1", "long_name": "how far a constraint is from being missed, relative"},
    )  # fmt: skip
    if made.classes is not None:
        variables |= _by_class(made.classes, found, runs)
    variables["feasible"] = ((), bool(found.feasible), {"units": "1"})
    variables["binding"] = ((), binding(found, by_part), {"units": "1"})
    does = [
        ", ".join(p for p, n in zip(placement.PARTS, by_part, strict=False) if n == name)
        for name in names
    ]
    chip = [question.unique_chips([made.pools[name].chip])[0].name for name in names]
    plans = [_plan_words(made.pools[name]) for name in names]
    coords = {
        "pool": names,
        "does": ("pool", does),
        "chip": ("pool", chip),
        "layout": ("pool", plans),
        "link": list(_LINKS),
        "part": list(PARTS),
        "constraint": list(MARGINS),
    }
    if made.classes is not None:
        coords["class"] = list(made.classes.names)
    attributes = mean_asked(made).attributes("perfmodel.serve") | {"batch": float(batch)}
    if made.draft_name:
        attributes |= {"draft": made.draft_name}
    return xr.Dataset(variables, coords).assign_attrs(attributes | results.stamp())


def mean_asked(made: SystemAsked) -> Question:
    """Returns the question with the mean lengths of several classes, for what is said of it."""
    return dataclasses.replace(made.asked, load=_mean_load(made.asked.load))


def _mean_load(load: Any) -> Any:
    """Returns a load of the mean lengths."""
    if load.weight is None:
        return load
    isl, osl = float(load.input), float(load.output)
    hit = float(load.mean(load.isl * load.prefix_hit)) / isl
    return dataclasses.replace(load, isl=isl, osl=osl, prefix_hit=hit, weight=None)


def _by_class(classes: Classes, found: SystemEstimate, runs: Any) -> dict[str, Any]:
    """Returns what each class sees: all wait alike, and then compute their own prompt.

    A prompt's own time is taken as the mean prompt's by its tokens to compute.
    """
    isl, osl, cached, weight = (
        np.asarray(x, float) for x in (classes.isl, classes.osl, classes.cached, classes.weight)
    )
    new = np.maximum(isl * (1.0 - cached), 1.0)
    own = (new / np.sum(weight * new) - 1.0) * float(found.prefill_time)
    ttft = float(found.ttft) + own
    e2e = ttft + np.maximum(osl - 1.0, 0.0) * float(found.tpot)
    columns = (
        ("class_isl", "token", "prompt tokens", isl),
        ("class_osl", "token", "output tokens", osl),
        ("class_share", "1", "share of the requests", weight),
        ("class_prefix_hit", "1", "share of the prompt that is cached", cached),
        ("class_ttft_s", "s", "time to first token", np.where(runs, ttft, np.nan)),
        ("class_e2e_s", "s", "request latency, end to end", np.where(runs, e2e, np.nan)),
        ("class_tokens_per_second_user_e2e", "token/s", "output tokens over the whole request",
         np.where(runs, osl / e2e, np.nan)),
    )  # fmt: skip
    return {n: ("class", v, {"units": u, "long_name": w}) for n, u, w, v in columns}


def _plan_words(pool: PoolAsked) -> str:
    """Returns the layout of a pool's replica in short.

    >>> _plan_words(PoolAsked("h100", tp=4, replicas=2))
    '2 × TP4'
    """
    parts = [f"TP{pool.tp}"]
    if pool.pp > 1:
        parts.append(f"PP{pool.pp}")
    if pool.regions > 1:
        parts.append(f"{pool.regions} regions")
    if pool.ep > 1:
        parts.append(f"EP{pool.ep}")
    if pool.attention_dp > 1:
        parts.append(f"DP{pool.attention_dp}")
    return f"{pool.replicas:g} × {' '.join(parts)}"
