"""GPUs with prefill apart, with drafts of their own, and with drafts on Corsair or CS-3."""

import csv
import sys
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import perfmodel
from perfmodel import report, results, speculation, system_search
from perfmodel.question import Layout
from perfmodel.systems import PoolAsked

if TYPE_CHECKING:
    import xarray as xr
    from rich.console import RenderableType

TITLE = "Do drafts on other silicon make a user's tokens ten times as fast?"

MODEL, DRAFT = "llama-3.3-70b", "llama-3.2-1b"
FORMATS: dict[str, Any] = {"weights": "fp8", "activations": "fp8"}
CLAIM = 10.0
CHUNK = 2048
"""Most prompt tokens in a step of a pool that only prefills."""
X, Y = "tokens_per_second_user", "output_tokens_per_second_kw"

OWN = "on GPUs apart"

PLACES: dict[str, PoolAsked | None] = {
    "on the GPUs": None,
    OWN: None,
    "on Corsair": PoolAsked("corsair", weights="int8"),
    "on CS-3": PoolAsked("cs3", regions=16, weights="bf16"),
}
"""Where drafts are computed; on the GPUs, those that decode, or more of the same apart."""

PLAIN = "no drafts"


class Scope(NamedTuple):
    """What is searched: GPUs; tokens in and out; the longest TTFT [s]; rates at which a draft is
    accepted at every position; least throughput of a plan [token/s/kW]; chips of a replica of
    prefill, of decoding and of drafts (but a wafer's), and replicas of each pool; requests, drafts
    and micro-batches; points of a frontier that are kept, and the task of `accepted.csv` whose
    acceptance they have.
    """

    chips: tuple[str, ...] = ("h100", "b200")
    isl: int = 4000
    osl: int = 1000
    ttft: float = 5.0
    rates: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.94, 0.96, 0.98)
    floors: tuple[float, ...] = (0.0, 20.0, 50.0, 100.0)
    layouts: tuple[tuple[int, ...], ...] = ((1, 4), (1, 2, 4, 8), (1, 2))
    replicas: tuple[tuple[int, ...], ...] = ((1, 2, 4), (1, 2, 4, 8), (1, 2, 4))
    batches: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128)
    drafts: tuple[int, ...] = (1, 2, 3, 4, 5, 7, 10, 16, 24, 32)
    micro: tuple[int, ...] = (1, 2)
    points: int = 24
    task: str = "HumanEval"


class Accepted(NamedTuple):
    """A measured mean length of a cycle, and the rate at every position that gives it."""

    target: str
    method: str
    task: str
    tokens: int
    length: float
    rate: float
    source: str


def accepted() -> list[Accepted]:
    """Returns the measured lengths of `accepted.csv`.

    >>> first = accepted()[0]
    >>> first.length, first.tokens, round(first.rate, 2)
    (3.89, 7, 0.78)
    """
    text = files("perfmodel.studies.draft_elsewhere").joinpath("accepted.csv").read_text("utf-8")
    found = []
    for row in csv.DictReader(text.splitlines()):
        tokens, length = int(row["draft_tokens"]), float(row["accepted_length"])
        rate = float(speculation.of_length(length, tokens).accepted[0])
        found.append(
            Accepted(row["target"], row["method"], row["task"], tokens, length, rate, row["source"])
        )
    return found


class Scored(NamedTuple):
    """Plans in time for TTFT, as columns: what `system_search` says of them, and their words."""

    values: dict[str, np.ndarray]
    choices: Any
    names: tuple[str, ...]


def _scored(chip: str, place: str, rate: float, scope: Scope) -> Scored:
    """Returns the feasible plans with drafts at a place; of `PLAIN`, without."""
    pools = {"prefill": PoolAsked(chip, **FORMATS), "decode": PoolAsked(chip, **FORMATS)}
    options: dict[str, Any] = {"isl": scope.isl, "osl": scope.osl, "batches": scope.batches}
    options["chunks"] = (CHUNK,)
    if place != PLAIN:
        spec = speculation.chain(rate, 1)
        options |= {"draft": DRAFT, "spec": spec, "drafts": scope.drafts, "micro": scope.micro}
        pool = PoolAsked(chip, **FORMATS) if place == OWN else PLACES[place]
        if pool is not None:
            pools["draft"] = pool
    space = system_search.space(MODEL, pools, max_chips=10**6, **options)
    allowed = [
        tuple(Layout(d, 1, 1, 1, 1) for d in degrees)
        if name != "draft" or place != "on CS-3"
        else given
        for name, degrees, given in zip(space.names, scope.layouts, space.layouts, strict=False)
    ]
    space = space._replace(layouts=tuple(allowed))
    choices = system_search.enumerate_systems(space, scope.replicas[: len(space.names)])
    values = system_search.score(space, choices)
    rows = system_search.feasible(values, at_most={"ttft_s": scope.ttft})
    kept = {name: values[name][rows] for name in (X, Y, "ttft_s", "provisioned_power_w")}
    return Scored(kept, choices.take(rows), space.names)


def _words(found: Scored, i: int) -> str:
    """Returns a plan in short."""
    at = found.choices
    pools = [
        f"{name} {at.replicas[i, p]:.0f} × {at.chips[i, p]:.0f}"
        for p, name in enumerate(found.names)
    ]
    drafted = f", {at.tokens[i]:.0f} drafts" if at.tokens[i] else ""
    return f"{', '.join(pools)}; batch {at.batch[i]}{drafted}"


def _front(found: Scored, points: int) -> np.ndarray:
    """Returns points of a frontier, evenly of all, shape [2, points]; nan beyond."""
    values = found.values | {
        "margins": np.zeros((len(found.values[X]), 1)), "chips": found.values["provisioned_power_w"]
    }  # fmt: skip
    rows = system_search.front(values, (X, Y))
    shown = np.full((2, points), np.nan)
    if len(rows):
        some = rows[np.unique(np.linspace(0, len(rows) - 1, points).round().astype(int))]
        shown[:, : len(some)] = [values[X][some], values[Y][some]]
    return shown


def search(scope: Scope) -> "xr.Dataset":
    """Returns the fastest speeds by GPU, place, acceptance and floor, and frontiers."""
    import xarray as xr

    places, measured = [PLAIN, *PLACES], accepted()
    shown = next(each for each in measured if each.task == scope.task)
    shape = (len(scope.chips), len(places), len(scope.rates), len(scope.floors))
    speed, plans = np.full(shape, np.nan), np.full(shape, "", dtype=object)
    held = np.full(shape[:2], np.nan)
    fronts = np.full((2, len(scope.chips), len(places), scope.points), np.nan)
    for c, chip in enumerate(scope.chips):
        plain = _scored(chip, PLAIN, 0.0, scope)
        for p, place in enumerate(places):
            for r, rate in enumerate((*scope.rates, shown.rate)):
                found = plain if place == PLAIN else _scored(chip, place, rate, scope)
                if r == len(scope.rates):
                    fronts[:, c, p] = _front(found, scope.points)
                    few = found.choices.tokens <= shown.tokens
                    slow = few & (found.values[Y] >= scope.floors[1])
                    held[c, p] = np.max(found.values[X][slow], initial=-np.inf)
                    continue
                for f, floor in enumerate(scope.floors):
                    rows = np.flatnonzero(found.values[Y] >= floor)
                    if len(rows):
                        row = rows[np.argmax(found.values[X][rows])]
                        speed[c, p, r, f] = found.values[X][row]
                        plans[c, p, r, f] = _words(found, row)
    dims = ("chip", "place", "rate", "floor")
    found = xr.Dataset(
        {
            "speed": (
                dims, speed, {"units": "token/s", "long_name": "most tokens a second of a user"},
            ),
            "plan": (dims, plans.astype(str), {"long_name": "the plan of that speed"}),
            "held": (
                ("chip", "place"), held,
                {"units": "token/s", "long_name": "speed with no more drafts than were measured"},
            ),
            "front_speed": (("chip", "place", "point"), fronts[0], {"units": "token/s"}),
            "front_rate": (("chip", "place", "point"), fronts[1], {"units": "token/s/kW"}),
            "measured_rate": ("measured", [each.rate for each in measured], {"units": "1"}),
            "measured_length": ("measured", [each.length for each in measured], {"units": "token"}),
            "measured_drafts": ("measured", [each.tokens for each in measured], {"units": "token"}),
            "measured_source": ("measured", [each.source for each in measured]),
        },
        {
            "chip": list(scope.chips), "place": places, "rate": list(scope.rates),
            "floor": list(scope.floors),
            "measured": [f"{e.target}, {e.method}, {e.task}" for e in measured],
        },
    )  # fmt: skip
    attrs = {
        "model": MODEL, "draft": DRAFT, "isl": scope.isl, "osl": scope.osl, "ttft_s": scope.ttft,
        "shown": f"{shown.task}, {shown.rate:.2f}",
    }  # fmt: skip
    return found.assign_attrs(attrs | FORMATS | results.stamp())


def gains(found: "xr.Dataset") -> "xr.DataArray":
    """Returns how many times as fast a user is as without drafts, at the same floor."""
    return found["speed"] / found["speed"].sel(place=PLAIN)


def needed(found: "xr.Dataset") -> "xr.DataArray":
    """Returns the acceptance at which the claim holds, on the line between those searched; nan
    where it never does."""
    import xarray as xr

    def cross(gain: np.ndarray) -> float:
        over = np.flatnonzero(gain >= CLAIM)
        if not len(over):
            return np.nan
        part = slice(max(int(over[0]) - 1, 0), int(over[0]) + 1)
        return float(np.interp(CLAIM, gain[part], found["rate"].values[part]))

    return xr.apply_ufunc(cross, gains(found), input_core_dims=[["rate"]], vectorize=True)


def draw(found: "xr.Dataset", path: Path) -> None:
    """Writes the picture: frontiers on the left, gains by acceptance on the right."""
    floor, gain = float(found["floor"][1]), gains(found)
    # Least and most of those of the network itself.
    own = found["measured"].str.startswith("Llama")
    measured = found["measured_rate"].values[own.values]
    marks = {f"measured {rate:.2f}": rate for rate in (measured.min(), measured.max())}
    panels = []
    for chip in found["chip"].values:
        here, by_rate = found.sel(chip=chip), gain.sel(chip=chip, floor=floor)
        panels += [
            report.Panel(
                {
                    str(place): (here["front_speed"].sel(place=place).values,
                                 here["front_rate"].sel(place=place).values)
                    for place in found["place"].values
                },
                "tok/s a user", "output tok/s a provisioned kW",
                f"{chip}, drafts accepted as measured ({found.attrs['shown']})", (True, True),
            ),
            report.Panel(
                {
                    str(place): (found["rate"].values, by_rate.sel(place=place).values)
                    for place in found["place"].values
                },
                "acceptance of a draft at every position", "tok/s a user, over no drafts",
                f"{chip}, at {floor:g} tok/s/kW or more", (False, True),
                {f"{CLAIM:g} ×": CLAIM}, marks,
            ),
        ]  # fmt: skip
    attrs = found.attrs
    report.save_panels(
        panels, path, "Drafts elsewhere: what acceptance would ten times the speed take?",
        f"Llama-3.3-70B in fp8, prefill on GPUs of its own, drafts of Llama-3.2-1B · "
        f"{attrs['isl']:,} in, {attrs['osl']:,} out, TTFT ≤ {attrs['ttft_s']:g} s",
        "Best of all plans: replicas and degrees of each pool, batch, 1 to 32 drafts, "
        "micro-batches. Measured: mean lengths of EAGLE-3 drafts of the same network (card of "
        "nebius/EAGLE3-Llama-3.3-70B-Instruct), as a rate at every position; those of the 1B draft "
        f"are not known. perfmodel {attrs['version']}",
    )  # fmt: skip


def run(out: Path, scope: Scope | None = None) -> "xr.Dataset":
    """Returns the study, after writing `draft_elsewhere.nc` and `.png` into a folder."""
    found = search(Scope() if scope is None else scope)
    out.mkdir(parents=True, exist_ok=True)
    report.save_dataset(found, out / "draft_elsewhere.nc")
    draw(report.load_dataset(out / "draft_elsewhere.nc"), out / "draft_elsewhere.png")
    return found


def verdict(found: "xr.Dataset") -> list[str]:
    """Returns what the study says, in sentences made of its numbers."""
    gain, at_least, lines = gains(found), needed(found), []
    best = float(found["measured_rate"].max())
    for chip in found["chip"].values:
        for place in found["place"].values[1:]:
            here = {"chip": chip, "place": place, "floor": found["floor"].values[1]}
            rate, reached = float(at_least.sel(here)), gain.sel(here)
            when = f"from an acceptance of {rate:.2f}" if rate == rate else "at none up to 0.98"
            measured = float(reached.interp(rate=best))
            held = found["held"].sel(chip=chip)
            few = float(held.sel(place=place) / held.sel(place=PLAIN))
            lines.append(
                f"{chip}, drafts {place}: {CLAIM:g} × {when}; at the best that is measured "
                f"({best:.2f}) {measured:.1f} ×, {few:.1f} × with no more drafts than measured"
            )
    return lines


def summary(data: "xr.Dataset") -> "RenderableType":
    """Returns the tables and the verdict to print."""
    from rich.console import Group

    gain = gains(data)
    floors = data["floor"].values
    rows = report.grid(
        ("chip", "left"), ("drafts", "left"), ("accepted", "right"),
        *((f"tok/s user\n≥ {floor:g}/kW", "right") for floor in floors),
        ("gain\n" + f"≥ {floors[1]:g}/kW", "right"), (f"plan, ≥ {floors[1]:g} tok/s/kW", "left"),
    )  # fmt: skip
    for chip in data["chip"].values:
        for place in data["place"].values:
            rates = data["rate"].values[:1] if place == PLAIN else data["rate"].values[1::3]
            for rate in rates:
                at = data.sel(chip=chip, place=place, rate=rate)
                times = float(gain.sel(chip=chip, place=place, rate=rate, floor=floors[1]))
                rows.add_row(
                    str(chip), str(place), "" if place == PLAIN else f"{rate:.2f}",
                    *("–" if v != v else f"{v:,.0f}" for v in at["speed"].values),
                    "–" if times != times else f"{times:.1f} ×",
                    str(at["plan"].sel(floor=floors[1]).item()),
                )  # fmt: skip
    known = report.grid(
        ("measured", "left"), ("drafts", "right"), ("length", "right"), ("rate", "right"),
        ("source", "left"),
    )  # fmt: skip
    for i, name in enumerate(data["measured"].values):
        at = data.isel(measured=i)
        known.add_row(
            str(name), f"{int(at['measured_drafts'])}", f"{float(at['measured_length']):.2f}",
            f"{float(at['measured_rate']):.2f}", str(at["measured_source"].item()),
        )  # fmt: skip
    return Group(
        report.lines(TITLE, style="bold"), "", rows, "", known, "",
        report.lines(*verdict(data), style="bold"),
    )  # fmt: skip


if __name__ == "__main__":
    perfmodel.enable_cache()
    report.write(summary(run(Path(sys.argv[1] if len(sys.argv) > 1 else "out/draft_elsewhere"))))
