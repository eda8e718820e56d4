"""Options of commands that name several pools, read into what `perfmodel.systems` takes."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from perfmodel._commands import command, print_json, ready, working
from perfmodel._options import Pools, Traffic
from perfmodel.errors import Infeasible, InputError, shorten

if TYPE_CHECKING:
    import xarray as xr

    from perfmodel.systems import Scheduling
    from perfmodel.traffic import Mix


@dataclasses.dataclass(frozen=True)
class Asked:
    """Options as typed: `pools`, and the `base` pool on `chip` that has the rest of the work.

    `searched` is whether layouts are searched for; pools that name no format then have fp8.
    """

    model: str
    pools: Pools
    traffic: Traffic
    base: dict[str, Any]
    chip: str | None = None
    trace: str | None = None
    batching: str = "continuous"
    kv: str = ""
    draft_tokens: float = 4.0
    micro_batches: int = 1
    simulate: int = 0
    searched: bool = False
    assume_dense: bool = False


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
        raise InputError(f"--link: GB/s, inf or domain are needed (50), not {shorten(text, 30)!r}")
    return value * 1e9


def scheduling(batching: str, kv: str) -> "Scheduling | None":
    """Returns how a worker serves, None where as usual: continuous batches, KV in pages.

    >>> scheduling("static:0.5", "").spread
    0.5
    """
    from perfmodel.systems import Scheduling

    kind, _, spread = batching.strip().partition(":")
    if kind not in ("continuous", "static") or (spread and kind == "continuous"):
        raise InputError(
            f"--batching: continuous, static or static:SPREAD are needed, "
            f"not {shorten(batching, 30)!r}"
        )
    policy, _, tokens = kv.strip().partition(":")
    if policy not in ("", "paged", "reserved") or (tokens and policy != "reserved"):
        raise InputError(
            f"--kv: paged, reserved or reserved:TOKENS are needed, not {shorten(kv, 30)!r}"
        )
    try:
        wide = float(spread) if spread else 0.0
        reserved = int(tokens) if tokens else 0
    except ValueError:
        raise InputError(
            f"--batching and --kv: numbers are needed after ':' in {shorten(batching, 30)!r} "
            f"and {shorten(kv, 30)!r}"
        ) from None
    if kind == "continuous" and policy != "reserved":
        return None
    return Scheduling(kind == "static", wide, reserved if policy == "reserved" else None)


def run(asked: Asked, export: str | None, **options: Any) -> tuple["xr.Dataset", Any]:
    """Returns what the system asked for achieves, and its commands for an engine where named."""
    from perfmodel import _export_command, systems
    from perfmodel.export import of_system

    network, pools, base, extra = _read(asked)
    where, named = systems.table(pools, base)
    batch = options.pop("batch")
    made = systems.ask(
        network, named, where, batch=batch, micro=float(asked.micro_batches), **extra, **options
    )
    found = systems.dataset(made, systems.evaluate(made), batch)
    mix = _traffic(asked)
    if mix is not None and mix.note:
        found = found.assign_attrs(traffic=mix.note)
    tokens = asked.draft_tokens if "draft" in extra else 0.0
    scripts = _export_command.scripts(
        export, lambda: of_system(made, found, extra.get("draft"), tokens)
    )
    if not asked.simulate:
        return found, scripts
    from perfmodel import percentiles

    followed = percentiles.percentiles(made, batch, requests=max(asked.simulate, 10))
    return found.merge(followed, combine_attrs="override"), scripts


def frontier(asked: Asked, chips: list[str], **options: Any) -> "xr.Dataset":
    """Returns the frontier of the system asked for, and of one pool of each chip beside it."""
    from perfmodel import system_search

    descend = options.pop("descend")
    # One pool of a chip is there to compare with.
    own = not asked.pools.several()
    return _each(
        asked, chips,
        lambda network, pools, named, given: system_search.frontier(
            network, pools, descend=descend and (own or named), **given, **options
        ),
    )  # fmt: skip


def size(asked: Asked, chips: list[str], **options: Any) -> "xr.Dataset":
    """Returns the smallest system asked for that serves a rate, and one pool of each of `chips`."""
    from perfmodel import system_search

    def smallest(network: Any, pools: Any, _: bool, given: dict[str, Any]) -> "xr.Dataset":
        found = system_search.size(network, pools, **given, **options)
        return _followed(found, network, pools, given | options, asked.simulate)

    return _each(asked, chips, smallest)


def _followed(
    found: "xr.Dataset", network: Any, pools: Any, given: dict[str, Any], requests: int
) -> "xr.Dataset":
    """Returns the smallest system with percentiles of requests that arrive at random at its rate;
    as it is where none are to be followed."""
    from perfmodel import percentiles, system_search, systems

    if not requests:
        return found
    where, named = systems.table(system_search.pools_of(found, pools, 0), None)
    aside = ("rate", "headroom", "max_chips", "max_power", "max_racks", "max_cost", "base")
    options = {name: value for name, value in given.items() if name not in aside}
    batch = float(found["batch"][0])
    made = systems.ask(network, named, where, batch=batch, **options)
    followed = percentiles.percentiles(
        made, batch, requests=max(requests, 10), rate=given["rate"]
    ).expand_dims("point")
    return found.merge(followed, combine_attrs="override")


def _each(asked: Asked, chips: list[str], search: Callable[..., "xr.Dataset"]) -> "xr.Dataset":
    """Returns what a search finds of the system asked for and of one pool of each chip, joined.

    Args: `search`, of the network, pools by role, whether they were named, and further arguments.
    """
    from perfmodel import question, system_search, systems

    network, pools, base, extra = _read(asked)
    cases: dict[str, tuple[Any, bool, dict[str, Any]]] = {}
    if pools:
        named = ", ".join(f"{role} {_chip(pool)}" for role, pool in pools.items())
        cases[named] = (pools, True, {"base": base, **extra})
    for chip in map(str, question.named_chips(chips)):
        one = {"decode": systems.PoolAsked(chip, **_formats_of(chip, asked))}
        cases[f"{chip} alone"] = (one, False, _alone(pools, extra))
    if not cases:
        raise InputError("missing option '--chip', or a pool such as '--decode'")
    found, why = {}, []
    for name, (named, chosen, given) in cases.items():
        try:
            found[name] = search(network, named, chosen, given)
        except (Infeasible, InputError) as error:
            # Of all chips, those that cannot do what is asked are left out.
            if isinstance(error, InputError) and "all" not in chips:
                raise
            why.append(f"{name}: {error}")
    if not found:
        raise Infeasible("; ".join(why))
    about = dict(next(iter(found.values())).attrs)
    about |= {"left_out": "; ".join(why)} if why else {}
    mix = _traffic(asked)
    about |= {"traffic": mix.note} if mix is not None and mix.note else {}
    formats = "/".join(filter(None, asked.base.values()))
    about |= {"formats": formats or "fp8, bf16 on chips without"}
    if asked.batching.strip() != "continuous":
        about |= {"batching": asked.batching}
    if asked.kv.strip() not in ("", "paged"):
        about |= {"kv_memory": asked.kv}
    return system_search.beside(found).assign_attrs(about)


def _formats_of(chip: str, asked: Asked) -> dict[str, Any]:
    """Returns the formats of one pool of a chip: bf16 where it lacks the usual one."""
    from perfmodel.chips import load_chip

    if asked.base["weights"] is None and "fp8" not in load_chip(chip).supported:
        return asked.base | {"weights": "bf16"}
    return asked.base | {"weights": asked.base["weights"] or "fp8"}


def _alone(pools: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Returns what counts for one pool of a chip: beside a system, without its drafts and links."""
    return {k: v for k, v in extra.items() if not pools or k in ("classes", "scheduling")}


_TRACE_CLASSES = 16
"""Classes that a trace is reduced to; docs/traffic.md says what they lose."""


def _traffic(asked: Asked) -> "Mix | None":
    """Returns the kinds of requests asked for, None where they are all alike."""
    from perfmodel import traces, traffic

    classes = asked.traffic.classes
    if asked.trace is None:
        return traffic.parse(classes) if classes else None
    if classes:
        raise InputError("--trace and --class: one of them")
    tiers = numbers(asked.traffic.cache_tokens, "--cache-tokens") or []
    mix, _ = traces.to_classes(traces.read(asked.trace), _TRACE_CLASSES, tiers)
    return mix


def _chip(pool: Any) -> str:
    return str(pool).partition(":")[0] if isinstance(pool, str) else str(pool.chip)


def _read(asked: Asked) -> tuple[Any, dict[str, Any], Any, dict[str, Any]]:
    """Returns the network, pools by role, the pool of the rest, and further arguments."""
    from perfmodel import systems
    from perfmodel.models.catalogue import load_model
    from perfmodel.placement import Links

    given = asked.pools
    pools: dict[str, Any] = dict(given.named())
    base = None
    if asked.chip is not None:
        base = systems.PoolAsked(asked.chip, **asked.base)
    else:
        # Without a chip of the rest, its formats are those of every pool that names none.
        formats = {k: asked.base[k] for k in ("weights", "activations", "kv") if asked.base[k]}
        formats = formats or ({"weights": "fp8"} if asked.searched else {})
        for role, text in pools.items():
            pool = systems.parse_pool(text, f"--{role}")
            lacks = {k: v for k, v in formats.items() if getattr(pool, k) is None}
            pools[role] = dataclasses.replace(pool, **lacks)
    extra: dict[str, Any] = {}
    rates = numbers(given.acceptance, "--acceptance")
    lengths = numbers(given.accepted_length, "--accepted-length")
    if given.draft is not None:
        name, at, pool = given.draft.partition("@")
        if at:
            pools["draft"] = pool
        if rates is None and lengths is None:
            raise InputError("--draft: its --acceptance or --accepted-length is needed")
        rate = rates[0] if rates is not None and len(rates) == 1 else rates
        extra["spec"] = systems.acceptance(
            asked.draft_tokens, rate, lengths, given.draft_candidates
        )
        extra["draft"] = name
    if given.link is not None:
        inside = given.link.strip() == "domain"
        between = systems.link(None if inside else bandwidth(given.link), None, inside)
        extra["links"] = Links(between, between, between)
    mix = _traffic(asked)
    if mix is not None:
        parts = mix.traffic
        extra["classes"] = systems.Classes(
            mix.names, parts.isl, parts.osl, parts.cached, parts.weight
        )
    how = scheduling(asked.batching, asked.kv)
    if how is not None:
        extra["scheduling"] = how
    network = load_model(asked.model, assume_dense=asked.assume_dense)
    return network, pools, base, extra


def formats(precision: list[str] | None) -> dict[str, Any]:
    """Returns the formats of pools that name none, from those that a search is asked for."""
    if precision is not None and len(precision) > 1:
        raise InputError(
            "--precision: one for all pools; a pool's own is CHIP:weights=…,activations=…,kv=…"
        )
    base: dict[str, Any] = {"weights": None, "activations": None, "kv": None}
    return base | dict(zip(base, precision[0].split("/") if precision else (), strict=False))


def per_axes(x: str, y: str, per: str | None) -> tuple[str, str]:
    """Returns the axes with throughput counted per something else.

    >>> per_axes("tokens_per_second_user", "output_tokens_per_second_chip", "kw")[1]
    'output_tokens_per_second_kw'
    """
    from perfmodel.system_search import AXES

    stem = "output_tokens_per_second_"
    known = [axis.removeprefix(stem) for axis in AXES if axis.startswith(stem)]
    if per is None:
        return x, y
    if per not in known:
        raise InputError(f"--per: {shorten(per, 30)!r} is none of {', '.join(known)} for systems")
    return tuple(stem + per if axis.startswith(stem) else axis for axis in (x, y))  # pyright: ignore[reportReturnType]


def show_size(
    context: typer.Context, given: Asked, chips: list[str], json: bool, **options: Any
) -> None:
    """Finds the smallest system of the pools named that serves a rate."""
    from perfmodel import _json, report

    with working("evaluating every system", quiet=json):
        ready()
        found = size(given, chips, **options).assign_attrs(command(context))
    if json:
        print_json(_json.systems(found, {}))
        return
    report.write(report.systems_table(found))


def show_frontier(
    context: typer.Context,
    given: Asked,
    chips: list[str],
    out: Path | None,
    json: bool,
    **options: Any,
) -> None:
    """Finds the systems worth having, beside those of one pool of each chip."""
    from perfmodel import _json, report

    with working("evaluating every system", quiet=json):
        ready()
        found = frontier(given, chips, **options)
        found = found.assign_attrs(command(context))
        files = {} if out is None else report.save_systems(found, out)
    if json:
        print_json(_json.systems(found, files))
        return
    report.write(report.systems_table(found))
    if files:
        report.write("\n".join(f"wrote {path}" for path in files.values()))
