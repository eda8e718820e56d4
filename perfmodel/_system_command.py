"""Options of commands that name several pools, read into what `perfmodel.systems` takes."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from perfmodel.errors import InputError, shorten

if TYPE_CHECKING:
    import xarray as xr


@dataclasses.dataclass(frozen=True)
class Asked:
    """Options as typed: pools by role, the draft, and the `base` pool on `chip`."""

    model: str
    chip: str | None
    pools: dict[str, str]
    draft: str | None
    draft_tokens: float
    acceptance: str | None
    accepted_length: str | None
    micro_batches: int
    link: str | None
    base: dict[str, Any]
    assume_dense: bool


def numbers(text: str | None, option: str) -> list[float] | None:
    """Returns numbers from a list with commas.

    >>> numbers("0.8,0.7", "--acceptance")
    [0.8, 0.7]
    """
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(
            f"{option}: numbers with commas between are needed (0.8, or 0.9,0.7), "
            f"not {shorten(text, 30)!r}"
        ) from None


def bandwidth(text: str | None) -> float | None:
    """Returns bytes per second from gigabytes; None where the chips' ports are meant."""
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0.0:
        raise InputError(f"--link: GB/s are needed (50, or inf), not {shorten(text, 30)!r}")
    return value * 1e9


def run(asked: Asked, export: str | None, **options: Any) -> tuple["xr.Dataset", Any]:
    """Returns what the system asked for achieves, and its commands for an engine where named."""
    from perfmodel import _export_command, systems
    from perfmodel.export import of_system

    network, pools, base, extra = _read(asked)
    where, named = systems.table(pools, base)
    made = systems.ask(
        network, named, where, micro=float(asked.micro_batches), **extra, **options
    )  # fmt: skip
    found = systems.dataset(made, systems.evaluate(made), options["batch"])
    tokens = asked.draft_tokens if "draft" in extra else 0.0
    return found, _export_command.scripts(
        export, lambda: of_system(made, found, extra.get("draft"), tokens)
    )


def frontier(asked: Asked, chips: list[str], plain: dict[str, Any], **options: Any) -> "xr.Dataset":
    """Returns the frontier of the system asked for, and of one pool of each of `chips` beside it.

    Args: `plain`, the formats of those pools.
    """
    from perfmodel import system_search, systems

    network, pools, base, extra = _read(asked)
    named = ", ".join(f"{role} {_chip(pool)}" for role, pool in pools.items())
    fronts = {named: system_search.frontier(network, pools, base=base, **extra, **options)}
    about = dict(fronts[named].attrs)
    options.pop("descend", None)
    for chip in chips:
        one = {"decode": systems.PoolAsked(chip, **plain)}
        fronts[f"{chip} alone"] = system_search.frontier(network, one, **options)
    return system_search.beside(fronts).assign_attrs(about)


def _chip(pool: Any) -> str:
    return str(pool).partition(":")[0] if isinstance(pool, str) else str(pool.chip)


def _read(asked: Asked) -> tuple[Any, dict[str, Any], Any, dict[str, Any]]:
    """Returns the network, pools by role, the pool of the rest, and further arguments."""
    from perfmodel import systems
    from perfmodel.models.catalogue import load_model
    from perfmodel.placement import Links

    pools: dict[str, Any] = dict(asked.pools)
    base = None
    if asked.chip is not None:
        base = systems.PoolAsked(asked.chip, **asked.base)
    else:
        # Without a chip of the rest, its formats are those of every pool that names none.
        formats = {k: asked.base[k] for k in ("weights", "activations", "kv") if asked.base[k]}
        for role, text in pools.items():
            pool = systems.parse_pool(text, f"--{role}")
            lacks = {k: v for k, v in formats.items() if getattr(pool, k) is None}
            pools[role] = dataclasses.replace(pool, **lacks)
    extra: dict[str, Any] = {}
    rates = numbers(asked.acceptance, "--acceptance")
    lengths = numbers(asked.accepted_length, "--accepted-length")
    if asked.draft is not None:
        name, at, pool = asked.draft.partition("@")
        if at:
            pools["draft"] = pool
        if rates is None and lengths is None:
            raise InputError("--draft: its --acceptance or --accepted-length is needed")
        rate = rates[0] if rates is not None and len(rates) == 1 else rates
        extra["spec"] = systems.acceptance(asked.draft_tokens, rate, lengths)
        extra["draft"] = name
    elif rates is not None or lengths is not None:
        raise InputError("--acceptance, --accepted-length: of the model that --draft names")
    if asked.link is not None:
        between = systems.link(bandwidth(asked.link), None)
        extra["links"] = Links(between, between, between)
    network = load_model(asked.model, assume_dense=asked.assume_dense)
    return network, pools, base, extra
