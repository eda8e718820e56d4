"""CS-3 that prefill and decode, against CS-3 that decode what Trainium 2 prefilled."""

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import perfmodel
from perfmodel import report, results, system_search
from perfmodel.systems import PoolAsked
from perfmodel.units import HOUR

if TYPE_CHECKING:
    import xarray as xr
    from rich.console import RenderableType

TITLE = "Does Trainium 2 for prompts make five times as much of a wafer's fast tokens?"

MODEL, WAFER, PREFILL, WEIGHTS = "llama-3.3-70b", "cs3", "trn2_ultra", "bf16"
CLAIM = 5.0
"""Times as many fast tokens in the same footprint, as announced by AWS and Cerebras (2026-03)."""

ENOUGH = 0.95
"""Of the most that wafers can give: beyond it more Trainium adds next to nothing."""

CHUNK = 2048
"""Most prompt tokens in a step of a pool that only prefills."""

X = "tokens_per_second_user"


class Scope(NamedTuple):
    """What is searched: tokens in and out; speeds that a user is to see [token/s]; the longest TTFT
    [s]; wafers and regions a wafer of a replica, and chunks of prompts that wafers alone may use;
    replicas that prefill for one; requests of it;
    loads and speed of the second picture, and Trainium racks beside one of wafers there."""

    isl: tuple[int, ...] = (500, 1000, 2000, 4000, 8000, 16_000)
    osl: tuple[int, ...] = (125, 250, 500, 1000, 2000)
    speeds: tuple[float, ...] = (500, 1000, 1500)
    ttft: float = 2.0
    wafers: tuple[tuple[int, int], ...] = (
        (4, 10),
        (4, 20),
        (5, 4),
        (5, 16),
        (8, 5),
        (8, 10),
        (16, 5),
    )
    chunks: tuple[int, ...] = (2, 4, 8, 16, 32)
    replicas: tuple[int, ...] = tuple(int(n) for n in np.unique(np.geomspace(1, 1024, 27).round()))
    batches: tuple[int, ...] = tuple(int(b) for b in np.unique(np.geomspace(1, 1024, 40).round()))
    shown: tuple[tuple[int, int], ...] = ((1000, 1000), (1000, 250), (4000, 250))
    speed: float = 1000
    beside: tuple[float, ...] = tuple(float(r) for r in np.geomspace(0.5, 64, 15))


class Systems(NamedTuple):
    """Systems that are fast enough, as columns: output `rate` [token/s], wafers and racks of them,
    chips and racks that prefill, provisioned power [kW], and `speed` of a user [token/s]."""

    rate: np.ndarray
    wafers: np.ndarray
    wafer_racks: np.ndarray
    chips: np.ndarray
    chip_racks: np.ndarray
    kw: np.ndarray
    speed: np.ndarray


def _scored(pools: dict[str, PoolAsked], isl: int, osl: int, scope: Scope) -> Systems:
    """Returns the feasible systems of one replica that decodes and those that prefill for it."""
    space = system_search.space(
        MODEL, pools, isl=isl, osl=osl, max_chips=10**6, batches=scope.batches, chunks=(CHUNK,)
    )
    counts = [scope.replicas, (1,)][-len(space.names) :]
    choices = system_search.enumerate_systems(space, counts)
    values = system_search.score(space, choices)
    rows = system_search.feasible(values, at_most={"ttft_s": scope.ttft})
    sizes = (choices.chips * choices.replicas)[rows]
    wafers, chips = sizes[:, -1], sizes[:, 0] * (len(space.names) - 1)
    per_rack = float(space.made.built.attention.machine.site.rack_chips)
    return Systems(
        values["output_tokens_per_second"][rows], wafers, wafers / per_rack, chips,
        values["racks"][rows] - wafers / per_rack, values["provisioned_power_w"][rows] / 1e3,
        values[X][rows],
    )  # fmt: skip


def _joined(parts: list[Systems]) -> Systems:
    return Systems(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _both(isl: int, osl: int, scope: Scope) -> tuple[Systems, Systems]:
    """Returns systems of wafers alone, and of wafers with Trainium for the prompts."""
    alone, apart = [], []
    for pp, regions in scope.wafers:
        wafer = PoolAsked(WAFER, pp=pp, regions=regions, weights=WEIGHTS)
        for chunk in scope.chunks:
            one = {"decode": dataclasses.replace(wafer, chunk=chunk)}
            alone.append(_scored(one, isl, osl, scope))
        pools = {"prefill": PoolAsked(PREFILL, weights=WEIGHTS), "decode": wafer}
        apart.append(_scored(pools, isl, osl, scope))
    return _joined(alone), _joined(apart)


def _most(amount: np.ndarray) -> float:
    return float(np.max(amount)) if len(amount) else np.nan


_NUMBERS = {
    "alone_rack": ("token/s/rack", "CS-3 alone, a rack"),
    "alone_kw": ("token/s/kW", "CS-3 alone, a provisioned kW"),
    "wafer_rack": ("token/s/rack", "with Trainium, a rack of CS-3 and none of Trainium counted"),
    "beside": ("1", "racks of Trainium beside a rack of CS-3 there"),
    "every_rack": ("token/s/rack", "with Trainium, every rack counted"),
    "every_kw": ("token/s/kW", "with Trainium, a provisioned kW of all"),
    "worth": ("1", "hours of a CS-3 that a Trainium-hour may cost for equal cost of a token"),
}  # fmt: skip


def _compare(alone: Systems, apart: Systems, speed: float) -> dict[str, float]:
    """Returns `_NUMBERS` of one load and speed."""
    a, b = (Systems(*(c[s.speed >= speed] for c in s)) for s in (alone, apart))
    if not len(b.rate):
        return {
            "alone_rack": _most(a.rate / a.wafer_racks), "alone_kw": _most(a.rate / a.kw)
        }  # fmt: skip
    per_wafer_rack = b.rate / b.wafer_racks
    enough = np.flatnonzero(per_wafer_rack >= ENOUGH * per_wafer_rack.max())
    beside = b.chip_racks / b.wafer_racks
    fewest = enough[np.argmin(beside[enough])]
    # Wafers alone that make as much, less the wafers there are, are what the Trainium replaces.
    replaced = b.rate / _most(a.rate / a.wafers) - b.wafers
    return {
        "alone_rack": _most(a.rate / a.wafer_racks), "alone_kw": _most(a.rate / a.kw),
        "wafer_rack": float(per_wafer_rack[fewest]), "beside": float(beside[fewest]),
        "every_rack": _most(b.rate / (b.wafer_racks + b.chip_racks)),
        "every_kw": _most(b.rate / b.kw), "worth": _most(replaced / b.chips),
    }  # fmt: skip


def _prices() -> list[float]:
    """Returns the cost of a CS-3 at list price, electricity left out: value, low, high [USD/h]."""
    wafer = {"decode": PoolAsked(WAFER, weights=WEIGHTS)}
    asked = system_search.space(MODEL, wafer, isl=500, osl=500, ownership="list").made.asked
    site = asked.machines.site
    return [
        HOUR * float(number[0])
        for number in (asked.machines.price, site.price_low, site.price_high)
    ]


def search(scope: Scope) -> "xr.Dataset":
    """Returns the comparison by load and speed, and how it grows with racks of Trainium."""
    import xarray as xr

    shape = (len(scope.isl), len(scope.osl), len(scope.speeds))
    numbers = {name: np.full(shape, np.nan) for name in _NUMBERS}
    curves = np.full((2, len(scope.shown), len(scope.beside)), np.nan)
    for i, isl in enumerate(scope.isl):
        for o, osl in enumerate(scope.osl):
            alone, apart = _both(isl, osl, scope)
            for s, speed in enumerate(scope.speeds):
                for name, value in _compare(alone, apart, speed).items():
                    numbers[name][i, o, s] = value
            if (isl, osl) in scope.shown:
                place = scope.shown.index((isl, osl))
                curves[:, place] = _grown(alone, apart, scope)
    dims = ("isl", "osl", "speed")
    variables: dict[str, Any] = {
        name: (dims, numbers[name], {"units": unit, "long_name": words})
        for name, (unit, words) in _NUMBERS.items()
    }
    about = {"units": "1", "long_name": "rate of CS-3 with Trainium over that of CS-3 alone"}
    variables["grown"] = (("counted", "load", "racks"), curves, about)
    variables["wafer_usd_per_hour"] = ("bound", _prices(), {"units": "USD/h"})
    found = xr.Dataset(
        variables,
        {
            "isl": list(scope.isl), "osl": list(scope.osl), "speed": list(scope.speeds),
            "counted": ["racks of CS-3", "all racks"], "racks": list(scope.beside),
            "load": [f"{isl:,} in, {osl:,} out" for isl, osl in scope.shown],
            "bound": ["value", "low", "high"],
        },
    )  # fmt: skip
    attrs = {"model": MODEL, "weights": WEIGHTS, "ttft_s": scope.ttft, "shown": scope.speed}
    return found.assign_attrs(attrs | results.stamp())


def _grown(alone: Systems, apart: Systems, scope: Scope) -> np.ndarray:
    """Returns the gain by racks of Trainium beside one of CS-3: a rack of CS-3, and any rack."""
    a, b = (Systems(*(c[s.speed >= scope.speed] for c in s)) for s in (alone, apart))
    base, beside = _most(a.rate / a.wafer_racks), b.chip_racks / b.wafer_racks
    found = np.full((2, len(scope.beside)), np.nan)
    for r, racks in enumerate(scope.beside):
        near = beside <= racks
        found[0, r] = _most((b.rate / b.wafer_racks)[near]) / base
        found[1, r] = found[0, r] / (1.0 + racks)
    return found


def gains(found: "xr.Dataset") -> "xr.Dataset":
    """Returns the rates with Trainium over those of CS-3 alone, by what is counted."""
    import xarray as xr

    return xr.Dataset(
        {
            "wafer_rack": found["wafer_rack"] / found["alone_rack"],
            "every_rack": found["every_rack"] / found["alone_rack"],
            "every_kw": found["every_kw"] / found["alone_kw"],
        }
    )


def draw(found: "xr.Dataset", path: Path) -> None:
    """Writes the picture: gain by load on the left, by racks of Trainium on the right."""
    speed = float(found.attrs["shown"])
    gain = gains(found).sel(speed=speed)
    osl = found["osl"].values
    by_load = {
        f"{isl:,} in": (isl / osl[::-1], gain["wafer_rack"].sel(isl=isl).values[::-1])
        for isl in found["isl"].values
    }
    by_racks: dict[str, Any] = {}
    for load in found["load"].values:
        for counted in found["counted"].values:
            line = found["grown"].sel(load=load, counted=counted).values
            by_racks[f"{load}: a rack of all" if "all" in str(counted) else str(load)] = (
                found["racks"].values, line
            )  # fmt: skip
    panels = [
        report.Panel(
            by_load, "tokens in for a token out", "tokens of a rack of CS-3, over CS-3 alone",
            "Racks of Trainium not counted", (True, True), {f"{CLAIM:g} ×": CLAIM},
        ),
        report.Panel(
            by_racks, "racks of Trainium 2 beside one of CS-3", "tokens of a rack, over CS-3 alone",
            "Racks of CS-3 (solid) or of both (dashed)", (True, True),
            {f"{CLAIM:g} ×": CLAIM, "CS-3 alone": 1.0},
            dashed=tuple(name for name in by_racks if name.endswith("all")),
        ),
    ]  # fmt: skip
    report.save_panels(
        panels, path, "Trainium 2 for prompts frees wafers, and takes more racks than it frees",
        f"Llama-3.3-70B in bf16 at {speed:,.0f} tok/s a user or more, TTFT ≤ "
        f"{found.attrs['ttft_s']:g} s · keys and values over EFA, layer by layer",
        f"Two CS-3 or 32 Trainium 2 in a rack. Left: with as much Trainium as gives {ENOUGH:.0%} "
        "of what the wafers can decode. Speeds of both chips rest on few published points and on "
        f"priors or few measurements. perfmodel {found.attrs['version']}",
    )  # fmt: skip


def run(out: Path, scope: Scope | None = None) -> "xr.Dataset":
    """Returns the study, after writing `trainium_wafer.nc` and `.png` into a folder."""
    found = search(Scope() if scope is None else scope)
    out.mkdir(parents=True, exist_ok=True)
    report.save_dataset(found, out / "trainium_wafer.nc")
    draw(report.load_dataset(out / "trainium_wafer.nc"), out / "trainium_wafer.png")
    return found


def verdict(found: "xr.Dataset") -> list[str]:
    """Returns what the study says, in sentences made of its numbers."""
    gain, lines = gains(found), []
    for speed in found["speed"].values:
        at = gain.sel(speed=speed)
        holds = at["wafer_rack"].where(at["wafer_rack"] >= CLAIM).stack(load=("isl", "osl"))
        held = holds.dropna("load")
        where = "at none of these loads"
        if held.sizes["load"]:
            loads = held["load"].values
            ratio = [isl / osl for isl, osl in loads]
            least = loads[int(np.argmin(ratio))]
            where = (
                f"at {len(loads)} of {holds.sizes['load']} loads, from {min(ratio):g} tokens in "
                f"for one out ({least[0]:,} in, {least[1]:,} out)"
            )
        lines.append(
            f"≥ {speed:,.0f} tok/s a user: {CLAIM:g} × a rack of CS-3 {where}; counting all racks "
            f"at most {float(at['every_rack'].max()):.2f} ×, a provisioned kW "
            f"{float(at['every_kw'].max()):.2f} ×"
        )
    at = found.sel(speed=found.attrs["shown"])["worth"]
    usual, low, high = (float(price) for price in found["wafer_usd_per_hour"].values)
    worth = float(at.max())
    lines.append(
        f"cost, ≥ {found.attrs['shown']:,.0f} tok/s a user: no price of Trainium 2 is known; "
        f"at best it pays below {worth:.4f} hours of a CS-3, {worth * usual:.2f} USD an hour "
        f"({worth * low:.2f} to {worth * high:.2f})"
    )
    return lines


def summary(data: "xr.Dataset") -> "RenderableType":
    """Returns the table and the verdict to print."""
    from rich.console import Group

    rows = report.grid(
        ("in", "right"), ("out", "right"), ("tok/s\nuser ≥", "right"),
        ("CS-3 alone\ntok/s/rack", "right"), ("with Trainium\n/CS-3 rack", "right"),
        ("gain", "right"), ("Trn2 racks\n/CS-3 rack", "right"), ("gain of\nany rack", "right"),
        ("gain of\na kW", "right"), ("break-even\nUSD/h/Trn2", "right"),
    )  # fmt: skip
    gain = gains(data)
    usual = float(data["wafer_usd_per_hour"][0])
    for isl in data["isl"].values:
        for osl in data["osl"].values[1::2]:
            for speed in data["speed"].values[1:]:
                place = {"isl": isl, "osl": osl, "speed": speed}
                at, by = data.sel(place), gain.sel(place)
                cost = usual * float(at["worth"])
                rows.add_row(
                    f"{isl:,}", f"{osl:,}", f"{speed:,.0f}", _number(float(at["alone_rack"])),
                    _number(float(at["wafer_rack"])), _number(float(by["wafer_rack"]), ".1f"),
                    _number(float(at["beside"]), ".1f"), _number(float(by["every_rack"]), ".2f"),
                    _number(float(by["every_kw"]), ".2f"),
                    _number(cost, ".2f") if cost > 0 else "never",
                )  # fmt: skip
    return Group(
        report.lines(TITLE, style="bold"), "", rows, "", report.lines(*verdict(data), style="bold")
    )


def _number(value: float, form: str = ",.0f") -> str:
    return "–" if np.isnan(value) else format(value, form)


if __name__ == "__main__":
    perfmodel.enable_cache()
    report.write(summary(run(Path(sys.argv[1] if len(sys.argv) > 1 else "out/trainium_wafer"))))
