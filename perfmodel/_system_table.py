"""A serving system as a table: what it achieves, and how busy each pool and link is."""

import math
from typing import TYPE_CHECKING

from perfmodel import _labels
from perfmodel._tables import RARE, grid, lines
from perfmodel.units import GB, KILOWATT

if TYPE_CHECKING:
    import xarray as xr
    from rich.console import Group, RenderableType

# Words, key, factor and form of the numbers of the whole system.
_ROWS = (
    ("TTFT", "ttft_s", 1.0, "{:,.3f} s"),
    ("  of it, hand-over", "handover_s", 1e3, "{:,.2f} ms"),
    ("TPOT", "tpot_s", 1e3, "{:,.3f} ms"),
    ("tokens per second per user", "tokens_per_second_user", 1.0, "{:,.1f}"),
    ("  over the whole request", "tokens_per_second_user_e2e", 1.0, "{:,.1f}"),
    ("output tokens per second per chip", "output_tokens_per_second_chip", 1.0, "{:,.1f}"),
    ("output tokens per second", "output_tokens_per_second", 1.0, "{:,.0f}"),
    ("requests per second", "requests_per_second", 1.0, "{:,.3f}"),
    ("preemptions per request", "preempted", 1.0, "{:,.2f}"),
    ("tokens per cycle of drafts", "tokens_per_cycle", 1.0, "{:,.2f}"),
    ("power", "power_w", 1 / KILOWATT, "{:,.2f} kW"),
    ("energy per output token", "energy_per_output_token_j", 1.0, "{:,.2f} J"),
    ("$ per million output tokens", "usd_per_million_output_tokens", 1.0, "{:,.2f}"),
    ("$ per million input tokens", "usd_per_million_input_tokens", 1.0, "{:,.2f}"),
)  # fmt: skip


def system_table(found: "xr.Dataset") -> "Group":
    """Returns the tables of a Dataset of `perfmodel.systems.serve`."""
    from rich.console import Group

    attrs = found.attrs
    title = f"{_labels.model_title(str(attrs['model']))} on {float(found['chips']):g} chips"
    load = f"{_labels.lengths(found)} · {attrs['batch']:g} concurrent per replica that decodes"
    numbers = grid(("", "left"), ("", "right"), edge=False)
    for words, key, factor, form in _ROWS:
        value = float(found[key])
        if key in ("handover_s", "tokens_per_cycle") and value in (0.0, 1.0):
            continue
        if key == "preempted" and not value >= RARE:
            continue
        shown = form.format(value * factor) if math.isfinite(value) else "–"
        numbers.add_row(words, shown)
    pools = grid(
        ("pool", "left"), ("does", "left"), ("chip", "left"), ("layout", "left"),
        ("busy\n%", "right"), ("memory\nGB", "right"), ("margin\n%", "right"),
        ("power\nW", "right"),
    )  # fmt: skip
    for i, name in enumerate(found["pool"].values):
        here = found.isel(pool=i)
        pools.add_row(
            str(name), str(here["does"].item()), str(here["chip"].item()),
            str(here["layout"].item()), f"{100 * float(here['pool_load']):.0f}",
            f"{float(here['pool_memory_bytes']) / GB:,.1f}",
            f"{100 * float(here['pool_memory_margin']):.0f}",
            f"{float(here['pool_chip_power_w']):,.0f}",
        )  # fmt: skip
    used = [
        f"{name} {100 * float(load_):.1f} %"
        for name, load_ in zip(found["link"].values, found["link_load"].values, strict=True)
        if load_ > 0.0
    ]
    verdict = f"bound by {found['binding'].item()}"
    if not bool(found["feasible"]):
        verdict = f"infeasible: {found['binding'].item()}"
    parts = [
        f"{name} {1e3 * float(value):.2f}"
        for name, value in zip(found["part"].values, found["tpot_parts_s"].values, strict=True)
        if value > 0.0
    ]
    return Group(
        lines(title, style="bold"),
        *_noted(found),
        lines(f"{load} · engine {attrs.get('engine', 'neutral')}"),
        "",
        numbers,
        "",
        pools,
        "",
        *_classes(found),
        *_simulated(found),
        lines(f"links busy: {', '.join(used)}" if used else ""),
        lines(verdict, style="bold"),
        lines(f"a token's way in ms: {', '.join(parts)}"),
        lines(
            f"price of {attrs.get('price_assumption', '')}",
            "busy: share of time; J and $ per output token are those of what decodes",
            style="dim",
        ),
    )


def _classes(found: "xr.Dataset") -> "list[RenderableType]":
    """Returns what each kind of request sees, nothing where all are alike."""
    if "class" not in found.coords:
        return []
    table = grid(
        ("class", "left"), ("share\n%", "right"), ("tokens\nin", "right"), ("out", "right"),
        ("cached\n%", "right"), ("TTFT\ns", "right"), ("E2E\ns", "right"),
    )  # fmt: skip
    for i, name in enumerate(found["class"].values):
        here = {key: float(found[f"class_{key}"][i]) for key in _CLASS_KEYS}
        table.add_row(
            str(name), f"{100 * here['share']:.1f}", f"{here['isl']:,.0f}", f"{here['osl']:,.0f}",
            f"{100 * here['prefix_hit']:.0f}", f"{here['ttft_s']:,.3f}", f"{here['e2e_s']:,.2f}",
        )  # fmt: skip
    return [table, ""]


_CLASS_KEYS = ("share", "isl", "osl", "prefix_hit", "ttft_s", "e2e_s")


def _simulated(found: "xr.Dataset") -> "list[RenderableType]":
    """Returns percentiles of requests that were followed, nothing where none were."""
    if "statistic" not in found.coords:
        return []
    names = [str(name) for name in found["statistic"].values]
    table = grid(("simulated", "left"), *((name, "right") for name in names))
    for key, words, factor, unit in (
        ("ttft", "TTFT", 1.0, "s"), ("tpot", "TPOT", 1e3, "ms"), ("e2e", "E2E", 1.0, "s"),
    ):  # fmt: skip
        values = found[f"simulated_{key}_s"].values * factor
        table.add_row(f"{words}, {unit}", *(f"{value:,.3f}" for value in values))
    gaps = 1e3 * found["simulated_gap_s"].values
    told = (f"{value:,.3f}" if value == value else "" for value in gaps)  # noqa: PLR0124
    table.add_row("between tokens, ms", *told)
    speeds = found["simulated_tokens_per_second_user_e2e"].values
    table.add_row("tok/s a user, E2E", *(f"{value:,.1f}" for value in speeds))
    count, again, away = (
        int(found[f"simulated_{key}"]) for key in ("requests", "preemptions", "rejected")
    )
    said = f"{count:,} requests followed, {again:,} preemptions, {away:,} turned away; "
    said += f"{float(found['simulated_within_limits']):.0%} within the limits, "
    said += f"{float(found['simulated_goodput']):.3g} a second"
    return [table, lines(said), ""]


def _followed(found: "xr.Dataset") -> "list[RenderableType]":
    """Returns percentiles at the rate asked for, system by system; nothing where none followed."""
    if "statistic" not in found.coords:
        return []
    table = grid(
        ("simulated at that rate", "left"), ("TTFT s\np50", "right"), ("\np99", "right"),
        ("TPOT ms\np50", "right"), ("\np99", "right"), ("gap ms\np99", "right"),
        ("within\nlimits %", "right"),
    )  # fmt: skip
    for i, name in enumerate(found["system"].values):
        here = found.isel(point=i)
        values = [
            factor * float(here[f"simulated_{key}_s"].sel(statistic=statistic))
            for key, statistic, factor in (
                ("ttft", "p50", 1.0), ("ttft", "p99", 1.0), ("tpot", "p50", 1e3),
                ("tpot", "p99", 1e3), ("gap", "p99", 1e3),
            )
        ]  # fmt: skip
        within = 100.0 * float(here["simulated_within_limits"])
        table.add_row(str(name), *(f"{value:,.3g}" for value in values), f"{within:.0f}")
    return ["", table]


def _noted(found: "xr.Dataset") -> "list[RenderableType]":
    """Returns where the traffic is from, nothing where it was written."""
    return [lines(str(found.attrs["traffic"]))] if "traffic" in found.attrs else []


def _served(found: "xr.Dataset") -> str:
    """Returns how the systems of a search serve, in words."""
    words = [f"engine {found.attrs.get('engine', 'neutral')}"]
    for key, said in (("formats", "formats {}"), ("batching", "batches {}"),
                      ("kv_memory", "memory {}")):  # fmt: skip
        if key in found.attrs:
            words.append(said.format(found.attrs[key]))
    return " · ".join(words)


def systems_table(found: "xr.Dataset", most: int = 14) -> "Group":
    """Returns the points of `perfmodel.system_search.beside`, of each system the fewest that show
    its whole range."""
    import numpy as np
    from rich.console import Group

    x, y = str(found.attrs["x"]), str(found.attrs["y"])
    rows = grid(
        ("system", "left"), ("tok/s\nuser", "right"), ("tok/s\nchip", "right"),
        ("TTFT\ns", "right"), ("chips", "right"), ("batch", "right"), ("", "left"),
        ("busiest", "left"),
    )  # fmt: skip
    for name in dict.fromkeys(str(name) for name in found["system"].values):
        own = np.flatnonzero(found["system"].values == name)
        shown = np.unique(np.linspace(0, len(own) - 1, min(most, len(own))).round().astype(int))
        for place, i in enumerate(own[shown]):
            here = found.isel(point=i)
            rows.add_row(
                name if place == 0 else "",
                f"{float(here['tokens_per_second_user']):,.1f}",
                f"{float(here['output_tokens_per_second_chip']):,.1f}",
                f"{float(here['ttft_s']):,.2f}", f"{float(here['chips']):g}",
                f"{int(here['batch']):,}", str(here["words"].item()), str(here["busiest"].item()),
            )  # fmt: skip
    gain = f"{y}_if_more_hits"
    told = ""
    if gain in found:
        told = (
            f"if a tenth of the prompt tokens not cached were: {y} "
            f"{float(found[gain].median()):+.1%} in the median of the points"
        )
    if f"{y}_per_hit" in found:
        steep = (found[f"{y}_per_hit"] / found[y]).median()
        told += f"; by the gradient {0.01 * float(steep):+.2%} for a hundredth of the prompts"
    what, most_chips = f"{y} against {x}", f" · at most {found.attrs['max_chips']} chips"
    if "rate" in found.attrs:
        most_chips = ""
        what = f"smallest systems for {found.attrs['rate']:g} requests a second"
    extra = []
    if "left_out" in found.attrs:
        extra += [f"left out: {why}" for why in str(found.attrs["left_out"]).split("; ")]
    if "hypervolume" in found.attrs:
        extra.append(
            f"descent reaches {found.attrs['hypervolume']:.2%} of the enumeration's hypervolume: "
            f"{found.attrs['evaluated']:,} systems and {found.attrs['gradients']:,} gradients "
            f"against {found.attrs['enumerated']:,} systems"
        )
    return Group(
        lines(f"{_labels.model_title(str(found.attrs['model']))}: {what}", style="bold"),
        *_noted(found),
        lines(_labels.lengths(found) + most_chips),
        lines(_served(found)),
        "",
        rows,
        *_followed(found),
        *(["", lines(*extra)] if extra else []),
        *(["", lines(told, style="dim")] if told else []),
    )
