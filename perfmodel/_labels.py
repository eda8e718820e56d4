"""How results are named and grouped for people: chips, plans, axes, and where numbers come from.

Shared by tables, pictures and pages. Works on the Datasets of `frontier` and `overlay` alone, so a
figure can be made from a saved file.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel import question
from perfmodel.units import MICROSECOND, MILLISECOND, seconds, si

if TYPE_CHECKING:
    import xarray as xr

# Okabe and Ito, "Color Universal Design" (2008), without yellow, and grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6B7280", "#000000")

_TITLES = {
    "tokens_per_second_user": "Interactivity: output tokens/s per user",
    "tokens_per_second_user_e2e": "Interactivity over the whole request: tokens/s per user",
    "output_tokens_per_second_chip": "Throughput: output tokens/s per chip",
    "total_tokens_per_second_chip": "Throughput: input + output tokens/s per chip",
    "output_tokens_per_second_kw": "Throughput: output tokens/s per provisioned kW, host included",
    "total_tokens_per_second_kw": "Throughput: all tokens/s per provisioned kW, host included",
    "output_tokens_per_second_usd": "Throughput: output tokens/s per $ an hour",
    "total_tokens_per_second_usd": "Throughput: input + output tokens/s per $ an hour",
    "output_tokens_per_second_rack": "Throughput: output tokens/s per rack",
    "total_tokens_per_second_rack": "Throughput: input + output tokens/s per rack",
    "ttft_s": "Time to first token [s]",
    "tpot_s": "Time per output token [s]",
    "e2e_s": "Request latency [s]",
    "usd_per_million_output_tokens": "Cost of a million output tokens, decode's share [USD]",
    "energy_per_output_token_j": "Energy per output token, decode's share [J]",
}


# As `Chip.kernels_of` has it; this module must load without JAX.
OWN, FAMILY = "its own", "its family"

_USED = (
    "chip", "precision", "candidate", "candidate_kernels", "candidate_assumed", "obstacle",
    "on_front", "binding", "tp", "pp", "ep", "attention_dp", "cp", "regions",
    "replicas", "batch", "chunk", "chips", "ttft_s", "tpot_s",
    "tokens_per_second_user", "tokens_per_second_user_e2e", "output_tokens_per_second_chip",
    "memory_bytes", "power_w", "energy_per_output_token_j", "usd_per_million_output_tokens",
    "usd_per_hour", "usd_per_hour_low", "usd_per_hour_high", "output_tokens_per_second_kw",
    "output_tokens_per_second_rack",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Front:
    """One chip's points in order of x.

    Fields: `colour` of the chip; `sure`, whether its kernels or its generation's were measured;
    `columns` by variable; `plans` in words.
    """

    chip: str
    title: str
    colour: str
    sure: bool
    columns: Mapping[str, np.ndarray]
    plans: tuple[str, ...]

    @property
    def ink(self) -> str:
        """The colour, dark enough for text on white."""
        parts = (int(self.colour[i : i + 2], 16) for i in (1, 3, 5))
        return "#" + "".join(f"{round(0.8 * part):02X}" for part in parts)

    def __len__(self) -> int:
        return len(self.plans)


def chip_title(name: str) -> str:
    """Returns a chip's name as people write it.

    >>> chip_title("h100_sxm"), chip_title("mi300x")
    ('H100 SXM', 'MI300X')
    """
    return name.replace("_", " ").upper()


_SPELT = {"Deepseek": "DeepSeek"}


def model_title(name: str) -> str:
    """Returns a model's name as people write it.

    >>> model_title("llama-3.3-70b"), model_title("qwen3-235b-a22b-fp8"), model_title("gpt-oss-20b")
    ('Llama-3.3-70B', 'Qwen3-235B-A22B-FP8', 'GPT-OSS-20B')
    """
    words = [w[:1].upper() + w[1:] for w in name.split("-")]
    whole = re.compile(r"fp\d|gpt|glm|opt|oss", re.IGNORECASE)
    words = [w.upper() if whole.fullmatch(w) else _SPELT.get(w, w) for w in words]
    return "-".join(re.sub(r"(?<=\d)[bek]$", lambda end: end[0].upper(), w) for w in words)


def short_precisions(names: Any) -> dict[str, str]:
    """Returns the shortest name that tells each precision from the others: of the weights alone
    where that suffices.

    >>> short_precisions(["fp8", "nvfp4/nvfp4/fp8"])
    {'fp8': 'fp8', 'nvfp4/nvfp4/fp8': 'nvfp4'}
    """
    found = sorted({str(name) for name in names})
    weights = [name.split("/")[0] for name in found]
    return {
        name: short if weights.count(short) == 1 else name
        for name, short in zip(found, weights, strict=True)
    }


def precision_words(name: str) -> str:
    """Returns a precision in words.

    >>> precision_words("nvfp4/nvfp4/fp8")
    'nvfp4 weights, nvfp4 activations, fp8 KV cache'
    """
    parts = name.split("/")
    if len(parts) != 3:
        return f"{name} weights, activations and KV cache"
    return f"{parts[0]} weights, {parts[1]} activations, {parts[2]} KV cache"


LAYOUT = (*question.Layout._fields, "replicas")
"""Variables that say how a deployment is laid out, in the order that `layout_text` takes."""

PLAN = (*LAYOUT, "batch", "chunk")
"""Variables that say what a plan is, in the order that `plan_text` takes."""


def layout_text(*layout: int) -> str:
    """Returns the layout of a deployment, given in the order of `LAYOUT`, in words.

    >>> layout_text(4, 1, 1, 1, 1, 1, 4), layout_text(8, 2, 8, 4, 1, 1, 1)
    ('TP4 × 4', 'TP8 PP2 EP8 DP4')
    """
    *degrees, replicas = layout
    return question.Layout(*degrees).text() + (f" × {replicas}" if replicas > 1 else "")


def plan_text(*plan: int, precision: str = "") -> str:
    """Returns a plan, given in the order of `PLAN`, in words.

    >>> plan_text(4, 1, 1, 1, 1, 1, 4, 32, 2048, precision="fp8")
    'TP4 × 4 · batch 32 · chunk 2048 · fp8'
    """
    *layout, batch, chunk = plan
    parts = (layout_text(*layout), f"batch {batch}", f"chunk {chunk}", precision)
    return " · ".join(part for part in parts if part)


def axis_title(dataset: "xr.Dataset", name: str) -> str:
    """Returns an axis title: quantity and unit."""
    attrs = dataset[name].attrs
    words = str(attrs.get("long_name", name)).replace("_", " ")
    return _TITLES.get(name, f"{words[:1].upper()}{words[1:]} [{attrs.get('units', '1')}]")


def axes(dataset: "xr.Dataset") -> tuple[str, str]:
    """Returns the names of the two variables that are the axes of a frontier."""
    return str(dataset.attrs["x"]), str(dataset.attrs["y"])


def log_axis(values: list[np.ndarray]) -> bool:
    """Returns whether an axis is better logarithmic: positive values over a factor of 3."""
    known = np.concatenate([np.asarray(v, float).ravel() for v in values] or [np.zeros(0)])
    known = known[np.isfinite(known)]
    return known.size > 0 and known.min() > 0.0 and known.max() > 3.0 * known.min()


def used(dataset: "xr.Dataset") -> set[str]:
    """Returns the variables of a frontier that pictures and pages read."""
    return {*axes(dataset), *_USED}


def fronts(dataset: "xr.Dataset") -> list[Front]:
    """Returns the points of each chip that has any, in the order in which chips were asked for."""
    x, y = axes(dataset)
    chip = np.asarray(dataset["chip"].values, dtype=str)
    order = [str(name) for name in dataset["candidate"].values]
    short = short_precisions(dataset["precision"].values)
    kernels = dataset["candidate_kernels"].values
    columns = {
        str(name): np.asarray(variable.values)
        for name, variable in dataset.variables.items()
        if variable.dims == ("point",)
    }
    good = np.isfinite(columns[x].astype(float)) & np.isfinite(columns[y].astype(float))
    found = []
    for place, name in enumerate(order):
        rows = np.flatnonzero((chip == name) & good)
        rows = rows[np.argsort(columns[x][rows], kind="stable")]
        own = {key: column[rows] for key, column in columns.items()}
        numbers = [own[key] for key in PLAN]
        plans = tuple(
            plan_text(*map(int, plan), precision=short[str(kind)])
            for *plan, kind in zip(*numbers, own["precision"], strict=True)
        )
        if len(rows):
            colour = COLOURS[place % len(COLOURS)]
            sure = str(kernels[place]) != FAMILY
            found.append(Front(name, chip_title(name), colour, sure, own, plans))
    return found


def spread(values: Any, count: int) -> list[int]:
    """Returns at most `count` indices of sorted `values`, both ends among them, evenly in log.

    >>> spread([1, 2, 3, 10, 30, 100], 3)
    [0, 3, 5]
    """
    numbers = np.asarray(values, dtype=float)
    if len(numbers) <= count:
        return list(range(len(numbers)))
    scale = np.log(numbers) if numbers.min() > 0 else numbers
    targets = np.linspace(scale[0], scale[-1], count)
    return sorted({int(np.argmin(np.abs(scale - target))) for target in targets})


def number(value: float, digits: int = 3) -> str:
    """Returns a number with about three digits and thousands marked; blank where unknown.

    >>> number(1234.5), number(0.04567), number(float("nan")), number(12.34)
    ('1,234', '0.0457', '', '12.3')
    """
    value = float(value)
    if not math.isfinite(value):
        return ""
    size = abs(value)
    if size >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    if size == 0.0:
        return "0"
    places = digits - 1 - math.floor(math.log10(size))
    return f"{value:.{places}f}" if size >= 1e-4 else f"{value:.{digits - 1}e}"


def duration(value: float) -> str:
    """Returns a duration in the unit people read it in, with three digits; blank where unknown.

    >>> duration(0.02), duration(3.2e-6)
    ('20.0 ms', '3.20 µs')
    """
    if not math.isfinite(value):
        return ""
    for scale, unit in ((1.0, "s"), (MILLISECOND, "ms")):
        if abs(value) >= scale or value == 0.0:
            return f"{number(value / scale)} {unit}"
    return f"{number(value / MICROSECOND)} µs"


_SHORT = {
    "tokens_per_second_user": "interactivity",
    "tokens_per_second_user_e2e": "interactivity",
    "output_tokens_per_second_chip": "throughput",
    "total_tokens_per_second_chip": "throughput",
    **{
        f"{tokens}_tokens_per_second_{per}": f"throughput per {words}"
        for tokens in ("output", "total")
        for per, words in (("kw", "kW"), ("usd", "$"), ("rack", "rack"))
    },
    "ttft_s": "time to first token",
    "tpot_s": "time per token",
    "usd_per_million_output_tokens": "cost",
    "usd_per_million_total_tokens": "cost",
    "energy_per_output_token_j": "energy",
}


def trade_off(x: str, y: str) -> str:
    """Returns what is set against what, in words.

    >>> trade_off("tokens_per_second_user", "output_tokens_per_second_chip")
    'throughput against interactivity'
    """
    return f"{_SHORT.get(y, y.replace('_', ' '))} against {_SHORT.get(x, x.replace('_', ' '))}"


def setting(dataset: "xr.Dataset") -> str:
    """Returns the traffic, engine, size of the deployments and limits, on one line."""
    attrs = dataset.attrs
    formats = ", ".join(short_precisions(dataset["precision"].values).values())
    return " · ".join(
        (
            lengths(dataset),
            formats,
            f"up to {attrs.get('max_chips', '?')} chips",
            f"engine: {attrs.get('engine', 'neutral')}",
            *limits(dataset),
        )
    )


@dataclasses.dataclass(frozen=True)
class Measured:
    """Measured points of one chip: colour of its front, coordinates, and what each one is."""

    title: str
    colour: str
    xy: np.ndarray
    words: tuple[str, ...]


def measured_points(
    measured: "xr.Dataset | None", x: str, y: str, found: list[Front]
) -> list[Measured]:
    """Returns the runs of `overlay` that have both axes, by chip."""
    if measured is None or x not in measured or y not in measured:
        return []
    xy = np.column_stack([measured[x].values, measured[y].values]).astype(float)
    chip = np.asarray(measured["chip"].values, dtype=str)
    groups = []
    for front in found:
        rows = np.flatnonzero((chip == front.chip) & np.isfinite(xy).all(axis=1))
        precision = np.asarray(measured["precision"].values, dtype=str)[rows]
        words = tuple(
            " · ".join(
                f"{int(measured[name].values[i])} {unit}"
                for name, unit in (("chips", "chips"), ("concurrency", "concurrent requests"))
                if name in measured and np.isfinite(float(measured[name].values[i]))
            )
            + f" · {kind}"
            for i, kind in zip(rows, precision, strict=True)
        )
        if len(rows):
            groups.append(Measured(front.title, front.colour, xy[rows], words))
    return groups


def apart(places: np.ndarray, kinds: np.ndarray, distance: float) -> np.ndarray:
    """Returns which points of a line to mark: both ends, either side of a change of kind, and
    others at least `distance` from the one before.

    >>> apart(np.array([[0.0, 0], [1, 0], [2, 0], [9, 0]]), np.array([1, 1, 1, 1]), 2.0).tolist()
    [True, False, True, True]
    """
    marks = np.zeros(len(places), dtype=bool)
    last = 0
    for i in range(len(places)):
        ends = i in (0, len(places) - 1)
        changes = not ends and (kinds[i] != kinds[i - 1] or kinds[i] != kinds[i + 1])
        if ends or changes or np.hypot(*(places[i] - places[last])) >= distance:
            marks[i], last = True, i
    return marks


def marked_by(found: Sequence[Front]) -> tuple[str, list[Any]]:
    """Returns what markers tell apart, and its values: precision where there are several, else the
    degree of tensor parallelism."""
    precisions = sorted({str(p) for front in found for p in front.columns["precision"]})
    if len(precisions) > 1:
        return "precision", precisions
    return "tp", sorted({int(t) for front in found for t in front.columns["tp"]})


def lengths(dataset: "xr.Dataset") -> str:
    """Returns the traffic in words."""
    attrs = dataset.attrs
    words = f"{int(attrs['isl']):,} tokens in, {int(attrs['osl']):,} out"
    if "images" in attrs:
        images = float(attrs["images"])
        seen = f"{images:g} {'image' if images == 1.0 else 'images'}"
        words = f"{words}, {float(attrs['image_tokens']):,.0f} of those in for {seen}"
    hit = float(attrs.get("prefix_hit", 0.0))
    return words + (f", {hit:.0%} of the prompt cached" if hit else "")


_OWNERS = {
    "rented": "on demand",
    "list": "owned at list price, mean electricity included",
    "cost": "owned at estimated cost, mean electricity included",
}


def prices(dataset: "xr.Dataset") -> str:
    """Returns the price per chip and hour of each chip, as the points were priced, with its range.

    Where electricity comes on top it is the mean over the points.
    """
    found = []
    for front in fronts(dataset):
        hours = [
            float(np.mean(front.columns[key] / front.columns["chips"]))
            for key in ("usd_per_hour", "usd_per_hour_low", "usd_per_hour_high")
        ]
        value, low, high = (f"{hour:.2f}" for hour in hours)
        span = f" ({low} to {high})" if low != high else ""
        known = math.isfinite(hours[0])
        found.append(f"{front.chip} {value}{span}" if known else f"{front.chip} unknown")
    owner = _OWNERS[str(dataset.attrs.get("ownership", "rented"))]
    return f"Prices [USD per chip and hour, {owner}]: {', '.join(found)}"


def site_note(dataset: "xr.Dataset", wall: bool = False) -> str:
    """Returns the assumptions around chips in words; of rented ones those of power at the `wall`,
    where that is shown, as the rent has the others in it."""
    attrs = dataset.attrs
    site = str(attrs.get("site_assumption", ""))
    if attrs.get("ownership", "rented") == "rented":
        return f"At the wall: {site}" if wall and site else ""
    return f"Owned: {attrs['price_assumption']}; {site}"


def per_note(dataset: "xr.Dataset") -> str:
    """Returns what a provisioned kW or a rack is, by chip, where an axis is counted per one."""
    units = {str(dataset[name].attrs.get("units", "")) for name in axes(dataset)}
    found = fronts(dataset)

    def each(per: str) -> str:
        of = [f.columns[f"output_tokens_per_second_{per}"] for f in found]
        chips = [
            float(rate[0] / front.columns["output_tokens_per_second_chip"][0])
            for front, rate in zip(found, of, strict=True)
        ]
        shown = [number(1e3 / n) if per == "kw" else number(n) for n in chips]
        return ", ".join(f"{f.chip} {n or 'unknown'}" for f, n in zip(found, shown, strict=True))

    notes = []
    if "token/s/kW" in units:
        assumed = str(dataset.attrs.get("host_assumed", ""))
        share = f" (share of the host assumed: {assumed})" if assumed else ""
        words = "Provisioned W per chip, rated power with host, without PUE"
        notes.append(f"{words}: {each('kw')}{share}")
    if "token/s/rack" in units:
        notes.append(f"Chips in a rack: {each('rack')}")
    return "; ".join(notes)


def axis_notes(dataset: "xr.Dataset") -> list[str]:
    """Returns what must be known to read the axes: prices, provisioned power, size of racks."""
    priced = any("USD" in str(dataset[name].attrs.get("units", "")) for name in axes(dataset))
    blank = [
        str(name)
        for name, why in zip(dataset["candidate"].values, dataset["obstacle"].values, strict=True)
        if str(why).startswith(("price:", "rack:"))
    ]
    left_out = f"Left out, unknown on this axis: {', '.join(blank)}" if blank else ""
    notes = (prices(dataset) if priced else "", per_note(dataset), left_out)
    return [note for note in notes if note]


_BUDGETS = (
    ("max_power_w", lambda v: f"at most {si(v, 'W', 4)} rated"),
    ("max_racks", lambda v: f"at most {v:g} {'rack' if v == 1.0 else 'racks'}"),
    ("max_cost_usd_per_hour", lambda v: f"at most ${v:g}/h"),
)


def limits(dataset: "xr.Dataset") -> list[str]:
    """Returns the service levels and budgets asked for, in words."""
    most = [say(float(dataset.attrs[key])) for key, say in _BUDGETS if key in dataset.attrs]
    return most + [
        f"{name} at most {seconds(float(dataset.attrs[key]))}"
        for name, key in (("TTFT", "slo_ttft_s"), ("TPOT", "slo_tpot_s"))
        if key in dataset.attrs
    ]


def kernel_note(chip: str, whose: str, mark: str = "") -> str:
    """Returns what a chip without kernel measurements of its own uses; "" for others. `mark` is
    added to the name of one that does not even have its generation's."""
    if whose == FAMILY:
        words = "no kernel measurements of its own: its family's constants, less certain"
        return f"{chip_title(chip)}{mark}: {words}"
    if whose in ("", OWN):
        return ""
    return f"{chip_title(chip)}: kernels as measured on {chip_title(whose)}, of its generation"


def assumed_note(assumed: Mapping[str, str]) -> str:
    """Returns which datasheet numbers are assumed, by chip, those of every chip first.

    >>> assumed_note({"a100": "idle_power, nic_latency", "b200": "nic_latency"})
    'Assumed of every chip: nic latency; of A100 also idle power'
    >>> assumed_note({"a100": "idle_power"})
    'Assumed of A100: idle power'
    """
    lists = {chip: text.split(", ") if text else [] for chip, text in assumed.items()}
    shared = [n for n in next(iter(lists.values()), []) if all(n in own for own in lists.values())]
    shared = shared if len(lists) > 1 else []
    parts = [f"of every chip: {', '.join(shared)}"] if shared else []
    for chip, own in lists.items():
        rest = [name for name in own if name not in shared]
        if rest:
            parts.append(f"of {chip_title(chip)}{' also' if shared else ':'} {', '.join(rest)}")
    return f"Assumed {'; '.join(parts)}".replace("_", " ") if parts else ""


def origin_notes(dataset: "xr.Dataset", mark: str = "") -> list[str]:
    """Returns a line for each chip of a frontier without kernel measurements of its own, and one
    of the numbers that are assumed."""
    names = ("candidate", "candidate_kernels", "candidate_assumed")
    rows = list(zip(*(map(str, dataset[name].values) for name in names), strict=True))
    notes = [kernel_note(chip, whose, mark) for chip, whose, _ in rows]
    notes.append(assumed_note({chip: assumed for chip, _, assumed in rows}))
    return [note for note in notes if note]
