"""Options that several commands have, in groups, and how their texts are read.

A parameter of a command may be a dataclass of options (`Traffic`, `Pools`, …): `grouped` makes one
option of each field, so that what commands share is written once.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from perfmodel.errors import InputError, shorten

# Headings of `--help`.
PLAN = "Plan of a replica"
TRAFFIC = "Traffic"
SOFTWARE = "Software"
LIMITS = "Limits"
COST = "Cost"
POOLS = "Several pools of chips, each with its part of the work (docs/systems.md)"
DRAFTS = "Drafts (speculative decoding)"
OUTPUT = "Output"


def option(panel: str, *names: str, **about: Any) -> Any:
    """Returns an option under a heading of `--help`."""
    return typer.Option(*names, rich_help_panel=panel, **about)


ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="Catalogue name, config.json, or a folder with one.")
]
Dense = Annotated[
    bool,
    option(
        OUTPUT,
        "--assume-dense",
        help="Read a config.json that is not understood as a dense decoder.",
    ),
]
Json = Annotated[bool, option(OUTPUT, "--json", help="Print JSON, in SI units, and nothing else.")]
Isl = Annotated[int, option(TRAFFIC, help="Prompt tokens.")]
Osl = Annotated[int, option(TRAFFIC, help="Output tokens.")]
Engine = Annotated[str, option(SOFTWARE, help="Engine profile, or a TOML file of one.")]
Precisions = Annotated[
    list[str] | None,
    option(
        PLAN,
        help="Format, or weights/activations/kv (repeat for more).",
        show_default="bf16 and fp8; of several pools or classes fp8",
    ),
]
Prices = Annotated[
    list[str] | None,
    option(COST, metavar="[CHIP=]USD", help="Rent of one chip and hour (repeat for more)."),
]
Routing = Annotated[
    str,
    option(
        TRAFFIC,
        metavar="uniform|power:EXPONENT",
        help="How tokens fall on experts: evenly, or by a power law (docs/routing.md).",
    ),
]
Batching = Annotated[
    str,
    option(
        SOFTWARE,
        metavar="continuous|static[:SPREAD]",
        help="Requests come and go, or wait for the longest output of their batch.",
    ),
]
KvMemory = Annotated[
    str,
    option(
        SOFTWARE,
        "--kv",
        metavar="paged|reserved[:TOKENS]",
        help="How memory of keys and values is given out.",
    ),
]
TraceFile = Annotated[
    str | None,
    option(
        TRAFFIC,
        "--trace",
        metavar="FILE",
        help="Requests of a trace, instead of --isl and --osl.",
    ),
]


Simulate = Annotated[
    int,
    option(TRAFFIC, metavar="REQUESTS", help="Follow so many requests, for percentiles."),
]


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What is asked of a service."""

    isl: Isl = 4000
    osl: Osl = 1000
    prefix_hit: Annotated[
        float, option(TRAFFIC, help="Share of the prompt already cached, 0 to below 1.")
    ] = 0.0
    images: Annotated[
        float,
        option(TRAFFIC, help="Images of a prompt; their tokens are part of the prompt tokens."),
    ] = 0.0
    classes: Annotated[
        list[str] | None,
        option(
            TRAFFIC,
            "--class",
            metavar="NAME=ISL:OSL:SHARE[:HIT]",
            help="Kind of requests, instead of --isl and --osl (repeat for more).",
        ),
    ] = None
    cache_tokens: Annotated[
        str | None,
        option(
            TRAFFIC,
            metavar="TOKENS[,TOKENS…]",
            help="Size of a prefix cache for a trace that names its blocks, tier by tier.",
        ),
    ] = None

    def alike(self) -> dict[str, Any]:
        """Returns the lengths of requests that are all alike."""
        return {"isl": self.isl, "osl": self.osl, "prefix_hit": self.prefix_hit}


@dataclasses.dataclass(frozen=True)
class ServiceLevels:
    """How long a request may wait."""

    slo_ttft: Annotated[
        str | None,
        option(LIMITS, metavar="TIME", help="Longest time to first token: 2s, 500ms, or seconds."),
    ] = None
    slo_tpot: Annotated[
        str | None,
        option(
            LIMITS,
            metavar="TIME",
            help="Longest time per output token: 30ms, 0.03s, or seconds.",
        ),
    ] = None

    def seconds(self) -> dict[str, float | None]:
        """Returns the limits in seconds."""
        return {
            "slo_ttft": seconds(self.slo_ttft, "--slo-ttft"),
            "slo_tpot": seconds(self.slo_tpot, "--slo-tpot"),
        }


@dataclasses.dataclass(frozen=True)
class Budgets:
    """What all chips may take together."""

    max_power: Annotated[
        str | None,
        option(LIMITS, metavar="POWER", help="Most rated power, hosts included: 50kW, or watts."),
    ] = None
    max_racks: Annotated[
        float | None, option(LIMITS, metavar="RACKS", help="Largest footprint.")
    ] = None
    max_cost: Annotated[
        float | None,
        option(LIMITS, metavar="USD/H", help="Highest cost of an hour of all chips."),
    ] = None

    def checked(self) -> dict[str, float | None]:
        """Returns the budgets as numbers, as `frontier` and `size` have them."""
        from perfmodel.quantities import parse_quantity

        text = self.max_power
        power = None if text is None else parse_quantity(text, "W", "--max-power")
        found = {"max_power": power, "max_racks": self.max_racks, "max_cost": self.max_cost}
        for name, value in found.items():
            if value is not None and not value > 0.0:
                raise InputError(f"--{name.replace('_', '-')}: must be above 0, not {value:g}")
        return found


@dataclasses.dataclass(frozen=True)
class Owning:
    """How chips are paid for."""

    ownership: Annotated[
        str,
        option(
            COST,
            metavar="rented|list|cost",
            help="Rent, or owned at list price or at the estimated cost of making the chip.",
        ),
    ] = "rented"
    electricity: Annotated[
        float | None, option(COST, metavar="USD", help="Price of a kWh, for owned chips.")
    ] = None
    pue: Annotated[float | None, option(COST, help="Power usage effectiveness of the site.")] = None
    lifetime: Annotated[
        float | None,
        option(COST, metavar="YEARS", help="Over which an owned chip is paid off."),
    ] = None

    def terms(self) -> dict[str, Any]:
        """Returns the terms by name."""
        return dataclasses.asdict(self)


_POOL = "CHIP[:tp=…,replicas=…]"


@dataclasses.dataclass(frozen=True)
class Pools:
    """Pools of chips by their part of the work, what drafts, and links between them."""

    prefill: Annotated[
        str | None, option(POOLS, metavar=_POOL, help="Pool that computes prompts.")
    ] = None
    decode: Annotated[
        str | None, option(POOLS, metavar=_POOL, help="Pool that decodes (attention and FFN).")
    ] = None
    attention: Annotated[
        str | None, option(POOLS, metavar=_POOL, help="Pool of attention while decoding.")
    ] = None
    ffn: Annotated[
        str | None,
        option(POOLS, metavar=_POOL, help="Pool of feed-forward layers while decoding."),
    ] = None
    link: Annotated[
        str | None,
        option(
            POOLS,
            metavar="GB/s|domain|inf",
            help="Bandwidth between pools; domain: they share one (NVL72).",
            show_default="the chips' ports",
        ),
    ] = None
    draft: Annotated[
        str | None,
        option(
            DRAFTS,
            metavar="MODEL[@CHIP:…]|mtp|eagle",
            help="What drafts, and its pool (else where decoded).",
        ),
    ] = None
    acceptance: Annotated[
        str | None,
        option(DRAFTS, metavar="RATE[,RATE…]", help="Share of drafts accepted, by position."),
    ] = None
    accepted_length: Annotated[
        str | None,
        option(
            DRAFTS,
            metavar="LENGTH[,…]",
            help="Mean tokens of a cycle, or those of 1, 2, … drafts.",
        ),
    ] = None
    draft_candidates: Annotated[
        float, option(DRAFTS, help="Tokens drafted for each position (a tree).")
    ] = 1.0

    def named(self) -> dict[str, str]:
        """Returns the pools that are named, by role; a draft's is part of `draft`."""
        roles = ("prefill", "decode", "attention", "ffn")
        given = {role: getattr(self, role) for role in roles}
        return {role: pool for role, pool in given.items() if pool is not None}

    def several(self) -> bool:
        """Returns whether there is more than one pool, or one named by its role."""
        return bool(self.named()) or "@" in (self.draft or "")


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Returns a command with an option for each field of its parameters that are dataclasses."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {n: k for n, k in hints.items() if dataclasses.is_dataclass(k)}
    taken = []
    for parameter in inspect.signature(command).parameters.values():
        kind = groups.get(parameter.name)
        if kind is None:
            taken.append(parameter.replace(annotation=hints[parameter.name]))
            continue
        inner = get_type_hints(kind, include_extras=True)
        taken += [
            inspect.Parameter(
                field.name, parameter.kind, default=field.default, annotation=inner[field.name]
            )
            for field in dataclasses.fields(kind)
        ]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, kind in groups.items():
            fields = {field.name: given.pop(field.name) for field in dataclasses.fields(kind)}
            given[name] = kind(**fields)
        command(**given)

    run.__signature__ = inspect.Signature(taken)  # pyright: ignore[reportAttributeAccessIssue]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in taken}
    return run


def seconds(text: str | None, option: str) -> float | None:
    """Returns seconds from `2s`, `500ms`, `80us` or a plain number of seconds."""
    if text is None:
        return None
    known = {"ms": 1e-3, "us": 1e-6, "µs": 1e-6, "s": 1.0}
    words = text.strip().lower()
    unit = next((unit for unit in known if words.endswith(unit)), "")
    try:
        return float(words.removesuffix(unit)) * known.get(unit, 1.0)
    except ValueError:
        raise InputError(
            f"{option}: a time is needed (2s, 500ms, or plain seconds), not '{shorten(text)}'"
        ) from None


def exponent(text: str) -> float | None:
    """Returns the exponent of routing from `power:1.2`, None from `uniform`."""
    kind, colon, number = text.strip().lower().partition(":")
    if kind == "uniform" and not colon:
        return None
    with contextlib.suppress(ValueError):
        if kind == "power":
            return float(number)
    raise InputError(
        f"--routing: 'uniform' or 'power:EXPONENT' is needed (nearest: power:1.2), "
        f"not '{shorten(text)}'"
    )


def is_table(text: str) -> bool:
    """Returns whether `--trace` names a table of requests, not a function."""
    return Path(text).suffix in (".csv", ".parquet", ".jsonl", ".ndjson") or Path(text).is_file()


def kv_options(text: str | None) -> tuple[str | None, str]:
    """Returns the format of the KV cache, and how its memory is given out ("" where not said)."""
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    policy = [part for part in parts if part.partition(":")[0] in ("paged", "reserved")]
    formats = [part for part in parts if part not in policy]
    if len(policy) > 1 or len(formats) > 1:
        raise InputError(f"--kv: one format and one of paged, reserved, not '{shorten(text)}'")
    return (formats or [None])[0], (policy or [""])[0]


def price_table(given: list[str] | None) -> "float | dict[str, float] | None":
    """Returns prices from `2.5` for every chip, or `h100=2.5` for one."""
    if not given:
        return None
    from perfmodel.chips import load_chip

    table: dict[str, float] = {}
    for text in given:
        name, _, amount = text.rpartition("=")
        try:
            dollars = float(amount)
        except ValueError:
            raise InputError(
                f"--price: dollars per chip and hour are needed (2.5, or h100=2.5), "
                f"not '{shorten(text)}'"
            ) from None
        if "=" in text and not name.strip():
            raise InputError(f"--price: a chip's name is needed before '=' in '{shorten(text)}'")
        if not name and len(given) > 1:
            raise InputError("--price: name a chip in each (h100=2.5) where there are several")
        if not name:
            return dollars
        chip = load_chip(name).name
        if chip in table:
            raise InputError(f"--price: {chip} is given more than once")
        table[chip] = dollars
    return table


def typed(context: typer.Context) -> dict[str, str]:
    """Returns the parameters that stand on the command line, by name, as they are written there."""
    found = {}
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            found[name] = parameter.opts[0]
    return found


def refuse(context: typer.Context, why: str, *names: str) -> None:
    """Raises where an option was given that the command could only ignore.

    Args: `why`, what the option is of; `names` of parameters.
    """
    given = typed(context)
    wrong = next((name for name in names if name in given), None)
    if wrong is not None:
        raise InputError(f"{given[wrong]}: {why}")


def refuse_unused(
    context: typer.Context, pools: Pools, traffic: Traffic, trace: str | None
) -> None:
    """Raises for options of several pools, drafts, classes or traces where there are none."""
    if not pools.several():
        why = "of several pools (--prefill, --decode …)"
        refuse(context, why, "link", "micro_batches")
    if pools.draft is None:
        names = ("acceptance", "accepted_length", "draft_tokens", "draft_candidates")
        refuse(context, "of what --draft names", *names)
    if trace is None:
        refuse(context, "of a trace that names its blocks (--trace FILE)", "cache_tokens")
    if traffic.classes or trace is not None:
        why = "--class and --trace say how long requests are"
        refuse(context, why, "isl", "osl", "prefix_hit")


def systems_asked(
    pools: Pools, traffic: Traffic, trace: str | None, batching: str, kv: str
) -> bool:
    """Returns whether more is asked than one pool of requests that are all alike."""
    usual = batching.strip() == "continuous" and kv.strip() in ("", "paged")
    return bool(pools.named() or pools.draft or traffic.classes or trace) or not usual
