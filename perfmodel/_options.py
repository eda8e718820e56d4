"""Options that several commands have, and how their texts are read."""

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from perfmodel.errors import InputError, shorten

ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="Catalogue name, config.json, or a folder with one.")
]
Dense = Annotated[
    bool,
    typer.Option(
        "--assume-dense", help="Read a config.json that is not understood as a dense decoder."
    ),
]
Hit = Annotated[float, typer.Option(help="Share of the prompt already cached, 0 to below 1.")]
Ttft = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Longest time to first token: 2s, 500ms, or seconds."),
]
Tpot = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Longest time per output token: 30ms, 0.03s, or seconds."),
]
Precisions = Annotated[
    list[str] | None,
    typer.Option(
        help="Format, or weights/activations/kv (repeat for more).",
        show_default="bf16 and fp8",
    ),
]
Prices = Annotated[
    list[str] | None,
    typer.Option(metavar="[CHIP=]USD", help="Rent of one chip and hour (repeat for more)."),
]
Ownership = Annotated[
    str,
    typer.Option(
        metavar="rented|list|cost",
        help="Rent, or owned at list price or at the estimated cost of making the chip.",
    ),
]
Electricity = Annotated[
    float | None, typer.Option(metavar="USD", help="Price of a kWh, for owned chips.")
]
Pue = Annotated[float | None, typer.Option(help="Power usage effectiveness of the site.")]
Lifetime = Annotated[
    float | None, typer.Option(metavar="YEARS", help="Over which an owned chip is paid off.")
]
Routing = Annotated[
    str,
    typer.Option(
        metavar="uniform|power:EXPONENT",
        help="How tokens fall on experts: evenly, or by a power law (docs/routing.md).",
    ),
]
Classes = Annotated[
    list[str] | None,
    typer.Option(
        "--class",
        metavar="NAME=ISL:OSL:SHARE[:HIT]",
        help="Kind of requests, instead of --isl and --osl (repeat for more).",
    ),
]
KvMemory = Annotated[
    str,
    typer.Option(
        "--kv",
        metavar="paged|reserved[:TOKENS]",
        help="How memory of keys and values is given out.",
    ),
]
Candidates = Annotated[
    float, typer.Option("--draft-candidates", help="Tokens drafted for each position (a tree).")
]
TraceFile = Annotated[
    str | None,
    typer.Option(
        "--trace", metavar="FILE", help="Requests of a trace, instead of --isl and --osl."
    ),
]
CacheTokens = Annotated[
    str | None,
    typer.Option(
        metavar="TOKENS[,TOKENS…]",
        help="Size of a prefix cache for a trace that names its blocks, tier by tier.",
    ),
]
POOL = "CHIP[:tp=…,replicas=…]"
Prefill = Annotated[str | None, typer.Option(metavar=POOL, help="Pool that computes prompts.")]
Decode = Annotated[
    str | None, typer.Option(metavar=POOL, help="Pool that decodes (attention and FFN).")
]
Attention = Annotated[
    str | None, typer.Option(metavar=POOL, help="Pool of attention while decoding.")
]
Ffn = Annotated[
    str | None, typer.Option(metavar=POOL, help="Pool of feed-forward layers while decoding.")
]
Draft = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL[@CHIP:…]|mtp|eagle", help="What drafts, and its pool (else where decoded)."
    ),
]
DraftTokens = Annotated[float, typer.Option(help="Tokens drafted in a cycle.")]
Acceptance = Annotated[
    str | None, typer.Option(metavar="RATE[,RATE…]", help="Share of drafts accepted, by position.")
]
Accepted = Annotated[
    str | None,
    typer.Option(metavar="LENGTH[,…]", help="Mean tokens of a cycle, or those of 1, 2, … drafts."),
]
Link = Annotated[
    str | None,
    typer.Option(
        metavar="GB/s|domain|inf",
        help="Bandwidth between pools; domain: they share one (NVL72).",
        show_default="the chips' ports",
    ),
]
Images = Annotated[
    float,
    typer.Option(help="Images of a prompt; their tokens are part of the prompt tokens."),
]


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


def refuse(why: str, **given: tuple[object, object]) -> None:
    """Raises where an option was given that a command could only ignore.

    Args:
        why: what the option is of. given: by name, its value and the one it has where left out.

    >>> refuse("of one pool only", cp=(1, 1))
    """
    for name, (value, usual) in given.items():
        if value != usual:
            raise InputError(f"--{name.replace('_', '-')}: {why}")
