"""The best share of chips for prefill, by load, and what pools of their own gain over one pool."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import perfmodel
from perfmodel import report, results, system_search
from perfmodel.systems import PoolAsked

if TYPE_CHECKING:
    import xarray as xr
    from rich.console import RenderableType

TITLE = "How many chips should do prefill, and what do pools of their own gain?"

MODEL = "llama-3.3-70b"
FORMATS: dict[str, Any] = {"weights": "fp8", "activations": "fp8"}
MIXED = "both"
CHUNK = 2048
"""Most prompt tokens in a step of a pool that only prefills."""
X, Y = "tokens_per_second_user", "output_tokens_per_second_chip"


class Scope(NamedTuple):
    """What is searched: chips; input and output tokens of each load; chips of a system; requests in
    flight; chunks that one pool of everything may use; speeds a user asks for [token/s] and the
    longest TTFT [s]; the speed of the picture of ratios."""

    chips: tuple[str, ...] = ("h100", "b200")
    loads: Mapping[str, tuple[int, int]] = {"summarise": (16_000, 500), "write": (500, 4_000)}
    max_chips: int = 32
    batches: tuple[int, ...] = tuple(int(b) for b in np.unique(np.geomspace(1, 1024, 48).round()))
    chunks: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    speeds: tuple[float, ...] = (20, 25, 30, 35, 40, 45, 50, 60, 70, 80, 90, 100)
    ttft: tuple[float, ...] = (2.0, 10.0)
    shown: float = 40.0


SHARES = np.arange(1, 16) / 16
"""Shares of chips for prefill in the picture; a system counts for the nearest."""


class Best(NamedTuple):
    """The most output a second and chip at a speed, by share of chips for prefill [SHARES], and of
    all: `rate`, its `share` and its `plan` in words."""

    by_share: np.ndarray
    rate: float
    share: float
    plan: str


_NOTHING = Best(np.full(len(SHARES), np.nan), np.nan, np.nan, "")


def _best(scored: tuple[Any, Any, Any], speed: float, ttft: float) -> Best:
    """Returns the best systems of a space, its list and their numbers, fast enough for a user."""
    space, choices, values = scored
    rows = system_search.feasible(values, {X: speed}, {"ttft_s": ttft})
    if not len(rows):
        return _NOTHING
    rate = values[Y][rows]
    sizes = (choices.chips * choices.replicas)[rows]
    share = sizes[:, 0] / sizes.sum(axis=1) if len(space.names) > 1 else np.zeros(len(rows))
    near = np.abs(share[:, None] - SHARES).argmin(axis=1)
    near = np.where(np.abs(share - SHARES[near]) <= 0.5 / len(SHARES), near, -1)
    by_share = [np.max(rate[near == i], initial=-np.inf) for i in range(len(SHARES))]
    top = int(np.argmax(rate))
    row = rows[top]
    plan = " + ".join(
        f"{choices.replicas[row, p]:.0f} × TP{choices.chips[row, p]:.0f}"
        for p in range(len(space.names))
    )
    found = np.where(np.isfinite(by_share), by_share, np.nan)
    return Best(found, float(rate[top]), float(share[top]), f"{plan}, batch {choices.batch[row]}")


def _search(chip: str, isl: int, osl: int, scope: Scope) -> tuple[list[Any], Any]:
    """Returns scored systems of one pool, one entry a chunk, and those of two pools."""

    def scored(pools: dict[str, PoolAsked]) -> Any:
        space = system_search.space(
            MODEL, pools, isl=isl, osl=osl, max_chips=scope.max_chips, batches=scope.batches,
            chunks=(CHUNK,),
        )  # fmt: skip
        choices = system_search.enumerate_systems(space)
        return space, choices, system_search.score(space, choices)

    one = [scored({"decode": PoolAsked(chip, chunk=c, **FORMATS)}) for c in scope.chunks]
    return one, scored(
        {"prefill": PoolAsked(chip, **FORMATS), "decode": PoolAsked(chip, **FORMATS)}
    )


def mixed(loads: list[tuple[float, Best]]) -> Best:
    """Returns what a system does for which the requests of two loads alternate.

    A request of a load needs share/(requests a second and chip) chips of prefill for a second, and
    the rest of decoding, at its best. Those of two add up: with P and D chip-seconds of a pair, a
    share s of prefill gives min(s/P, (1 − s)/D) pairs, most at P/(P + D).

    >>> one, other = Best(SHARES, 100.0, 0.8, ""), Best(SHARES, 100.0, 0.2, "")
    >>> found = mixed([(100.0, one), (100.0, other)])
    >>> round(found.rate, 1), round(found.share, 2)
    (100.0, 0.5)
    """
    need = np.sum([np.array([b.share, 1.0 - b.share]) * osl / b.rate for osl, b in loads], axis=0)
    out = float(sum(osl for osl, _ in loads))
    by_share = out * np.minimum(SHARES / np.maximum(need[0], 1e-30), (1.0 - SHARES) / need[1])
    return Best(by_share, out / float(need.sum()), float(need[0] / need.sum()), "as each of both")


def _one_pool(one: list[tuple[Any, Any, Any]], speed: float, ttft: float) -> Best:
    """Returns the best of one pool of everything, whatever its chunk."""
    found = [_best(each, speed, ttft) for each in one]
    return max(found, key=lambda b: -np.inf if np.isnan(b.rate) else b.rate)


def search(scope: Scope) -> "xr.Dataset":
    """Returns rates, shares and plans by chip, load, TTFT and speed."""
    import xarray as xr

    loads = [*scope.loads, MIXED]
    shape = (len(scope.chips), len(loads), len(scope.ttft), len(scope.speeds))
    together, apart, share = (np.full(shape, np.nan) for _ in range(3))
    curves = np.full((*shape, len(SHARES)), np.nan)
    plans = np.full(shape, "", dtype=object)
    for c, chip in enumerate(scope.chips):
        searched = [_search(chip, *lengths, scope) for lengths in scope.loads.values()]
        for t, ttft in enumerate(scope.ttft):
            for s, speed in enumerate(scope.speeds):
                ones = [_one_pool(one, speed, ttft) for one, _ in searched]
                twos = [_best(two, speed, ttft) for _, two in searched]
                osl = [float(lengths[1]) for lengths in scope.loads.values()]
                ones.append(mixed([*zip(osl, ones, strict=True)]))
                twos.append(mixed([*zip(osl, twos, strict=True)]))
                for i, (a, b) in enumerate(zip(ones, twos, strict=True)):
                    at = (c, i, t, s)
                    together[at], apart[at], share[at] = a.rate, b.rate, b.share
                    curves[at], plans[at] = b.by_share, b.plan
    dims = ("chip", "load", "ttft", "speed")
    unit = {"units": "token/s/chip"}
    of = [f"{isl:,} in, {osl:,} out" for isl, osl in scope.loads.values()]
    found = xr.Dataset(
        {
            "one_pool": (dims, together, unit | {"long_name": "best rate of one pool"}),
            "two_pools": (dims, apart, unit | {"long_name": "best rate of two pools"}),
            "prefill_share": (
                dims, share, {"units": "1", "long_name": "chips of prefill, of all, at the best"},
            ),
            "by_share": (
                (*dims, "share"), curves, unit | {"long_name": "best rate by share of prefill"},
            ),
            "plan": (dims, plans.astype(str), {"long_name": "prefill + decode at the best"}),
        },
        {
            "chip": list(scope.chips), "load": loads, "ttft": list(scope.ttft),
            "speed": list(scope.speeds), "share": SHARES,
            "lengths": ("load", [*of, "a request of each in turn"]),
        },
    )  # fmt: skip
    about = {"model": MODEL, "max_chips": scope.max_chips, "shown": scope.shown} | FORMATS
    return found.assign_attrs(about | results.stamp())


def wrong_ratio(found: "xr.Dataset") -> "xr.DataArray":
    """Returns the part of the best rate that is left where chips are shared out for another load.

    Dimensions: chip, ttft, `load` that comes, and `planned`, the load whose ratio there is; at the
    speed that is shown.
    """
    import xarray as xr

    at = found.sel(speed=found.attrs["shown"])
    kept = []
    for planned in found["load"].values:
        ratio = at["prefill_share"].sel(load=planned, drop=True)
        near = abs(at["share"] - ratio).fillna(0.0).argmin("share")
        kept.append((at["by_share"].isel(share=near) / at["two_pools"]).where(ratio.notnull()))
    return xr.concat(kept, "planned").assign_coords(planned=found["load"].values)


def draw(found: "xr.Dataset", path: Path) -> None:
    """Writes the picture: ratios on the left, gains on the right, a row for each chip."""
    shown, ttft = float(found.attrs["shown"]), float(found["ttft"][-1])
    others = "".join(f" (dashed {limit:g} s)" for limit in found["ttft"].values[:-1])
    panels = []
    for chip in found["chip"].values:
        here = found.sel(chip=chip)
        at = here.sel(speed=shown, ttft=ttft)
        parts = at["by_share"] / at["two_pools"]
        hills = {
            str(load): (100 * at["share"].values, parts.sel(load=load).values)
            for load in found["load"].values
        }
        gains: dict[str, Any] = {}
        for load in found["load"].values:
            for limit in found["ttft"].values[::-1]:
                part = here.sel(load=load, ttft=limit)
                name = str(load) if limit == ttft else f"{load}, {limit:g} s"
                gains[name] = (found["speed"].values, (part["two_pools"] / part["one_pool"]).values)
        panels += [
            report.Panel(
                hills, "chips of prefill, % of all", "rate, of the load's best",
                f"{chip}: {shown:g} tok/s a user, TTFT ≤ {ttft:g} s",
            ),
            report.Panel(
                gains, "tok/s a user, at least", "two pools' rate over one pool's",
                f"{chip}: gain over one pool, TTFT ≤ {ttft:g} s{others}",
                levels={"one pool": 1.0}, dashed=tuple(gains.keys() - set(hills)),
            ),
        ]  # fmt: skip
    lengths = "; ".join(
        f"{load}: {of}"
        for load, of in zip(found["load"].values, found["lengths"].values, strict=True)
    )
    report.save_panels(
        panels, path, "Each load wants its own ratio of prefill to decode chips",
        f"Llama-3.3-70B in fp8, up to {found.attrs['max_chips']} chips · {lengths}",
        "Rates are output tokens a second and chip of the best plan: tensor-parallel degrees, "
        "replicas and batch of each pool; the chunk too where one pool does everything. Of both "
        f"loads in turn the need for each pool is added up. perfmodel {found.attrs['version']}",
    )  # fmt: skip


def run(out: Path, scope: Scope | None = None) -> "xr.Dataset":
    """Returns the study, after writing `prefill_decode.nc` and `.png` into a folder."""
    found = search(Scope() if scope is None else scope)
    out.mkdir(parents=True, exist_ok=True)
    report.save_dataset(found, out / "prefill_decode.nc")
    draw(report.load_dataset(out / "prefill_decode.nc"), out / "prefill_decode.png")
    return found


def _ratio(share: float) -> str:
    """Returns prefill to decode chips in short.

    >>> _ratio(0.75), _ratio(0.2)
    ('3.0 : 1', '1 : 4.0')
    """
    if not 0.0 < share < 1.0:
        return "–"
    return f"{share / (1 - share):.1f} : 1" if share >= 0.5 else f"1 : {(1 - share) / share:.1f}"


def verdict(found: "xr.Dataset") -> list[str]:
    """Returns what the study says, in sentences made of its numbers."""
    ttft = float(found["ttft"][-1])
    at = found.sel(ttft=ttft)
    lines = []
    for chip in found["chip"].values:
        best = at.sel(chip=chip, speed=found.attrs["shown"])
        ratios = [
            f"{load} {_ratio(float(best['prefill_share'].sel(load=load)))}"
            for load in found["load"].values
        ]
        gain = (at["two_pools"] / at["one_pool"]).sel(chip=chip)
        gains = [
            f"{load} {float(each.min()):.2f}–{float(each.max()):.2f} ×"
            for load, each in zip(gain["load"].values, gain, strict=True)
        ]
        least = float(wrong_ratio(found).sel(chip=chip, ttft=ttft).min())
        lines.append(
            f"{chip}: prefill to decode chips, {', '.join(ratios)}; gain over one pool at the same "
            f"chips, {', '.join(gains)}; the wrong ratio leaves as little as {100 * least:.0f} %"
        )
    return lines


def summary(data: "xr.Dataset") -> "RenderableType":
    """Returns the tables and the verdict to print."""
    from rich.console import Group

    rows = report.grid(
        ("chip", "left"), ("load", "left"), ("TTFT\n≤ s", "right"), ("tok/s\nuser ≥", "right"),
        ("one pool\ntok/s/chip", "right"), ("two pools\ntok/s/chip", "right"), ("gain", "right"),
        ("prefill :\ndecode", "right"), ("plan", "left"),
    )  # fmt: skip
    speeds = data["speed"].values[:: max(len(data["speed"]) // 4, 1)]
    for chip in data["chip"].values:
        for load in data["load"].values:
            for ttft in data["ttft"].values:
                for speed in speeds:
                    at = data.sel(chip=chip, load=load, ttft=ttft, speed=speed)
                    one, two = float(at["one_pool"]), float(at["two_pools"])
                    if np.isnan(one) and np.isnan(two):
                        continue
                    rows.add_row(
                        str(chip), str(load), f"{ttft:g}", f"{speed:g}", _number(one), _number(two),
                        f"{two / one:.2f} ×" if two / one == two / one else "–",
                        _ratio(float(at["prefill_share"])), str(at["plan"].item()),
                    )  # fmt: skip
    wrong = report.grid(
        ("chip", "left"), ("load that comes", "left"),
        *((f"ratio for\n{load}", "right") for load in data["load"].values),
    )  # fmt: skip
    kept = wrong_ratio(data).isel(ttft=-1)
    for chip in data["chip"].values:
        for load in data["load"].values:
            parts = [float(kept.sel(chip=chip, load=load, planned=p)) for p in data["load"].values]
            wrong.add_row(str(chip), str(load), *(_number(100 * part, " %") for part in parts))
    return Group(
        report.lines(TITLE, style="bold"), "", rows, "",
        report.lines(
            f"rate left where chips are shared out for another load, at {data.attrs['shown']:g} "
            f"tok/s a user and TTFT ≤ {float(data['ttft'][-1]):g} s"
        ),
        wrong, "", report.lines(*verdict(data), style="bold"),
    )  # fmt: skip


def _number(value: float, unit: str = "") -> str:
    return "–" if np.isnan(value) else f"{value:,.0f}{unit}"


if __name__ == "__main__":
    perfmodel.enable_cache()
    report.write(summary(run(Path(sys.argv[1] if len(sys.argv) > 1 else "out/prefill_decode"))))
