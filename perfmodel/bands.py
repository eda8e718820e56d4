"""How far an estimate may be off by what is known of its chip as a range.

A number of a datasheet or of a fit may have a low and a high end; what is assumed of a chip has a
wide range, and kernels that nobody measured on it may be those of any chip of its family that was
measured. Each is moved alone first. Then, for each result, all are put at once at whichever end
lowers it, and at whichever raises it: the ends of its band. They are outermost: that all numbers
are at their worst ends together is unlikely.
"""

import dataclasses
import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from perfmodel import evaluation, question, results
from perfmodel.catalog import Number, Sheet
from perfmodel.chips import Chip, constants, datasheet
from perfmodel.chips.constants import Constant
from perfmodel.designs import Designs, evaluate
from perfmodel.question import ChipLike, ModelLike, Question

_KERNELS = "kernel constants"

# Facts that no estimate reads.
_ASIDE = ("cache_capacity", "chips_per_node", "rack_chips", "host_memory")
_PAID = {
    "rented": ("rent",),
    "list": ("purchase", "server_purchase"),
    "cost": ("manufacturing_cost",),
}
_PRICES = ("rent", "purchase", "server_purchase", "manufacturing_cost")
_PAYING = ("price", "ownership", "electricity", "pue", "lifetime")
_LINKS = ("link_bandwidth", "peer_bandwidth", "link_latency", "hop_time")
_SLOW = ("memory2_", "memory3_", "host_", "slow_memory_energy")


class Choice(NamedTuple):
    """One way in which a chip may be: numbers of its sheet and constants that differ."""

    fields: Mapping[str, float]
    constants: Mapping[str, float]


class Range(NamedTuple):
    """A number that is known as a range: its name, unit and ends, and the `choices` to try."""

    name: str
    unit: str
    low: float
    high: float
    choices: tuple[Choice, ...]


def _changed(chip: Chip, choice: Choice, name: str) -> Chip:
    """Returns a chip with other numbers, under another name."""

    def moved(number: Number, value: float) -> Number:
        return dataclasses.replace(number, value=value, low=None, high=None)

    fields = {
        key: moved(number, choice.fields[key]) if key in choice.fields else number
        for key, number in chip.fields.items()
    }
    own = {
        key: dataclasses.replace(each, number=moved(each.number, choice.constants[key]))
        if key in choice.constants
        else each
        for key, each in chip.constants.items()
    }
    return dataclasses.replace(chip, name=name, fields=fields, constants=own, digest=name)


def _matters(field: str, asked: Question, design: Designs, priced: bool) -> bool:
    """Returns whether an estimate reads a number of the sheet at all."""
    chips = int(design.tp[0] * design.pp[0])
    if field in _PRICES:
        return not priced and field in _PAID[asked.owner]
    if field in _ASIDE or (field.startswith(_SLOW) and not float(design.offload[0])):
        return False
    if field in _LINKS and chips == 1:
        return False
    if field.startswith("nic_") and chips <= float(asked.machines.fabric.domain[0]):
        return False
    used = {datasheet.PEAK_FIELDS[kernel] for kernel in asked.formats[0].kernels}
    return field not in ("peak_fp8", "peak_int8", "peak_fp4") or field in used


def _of_fields(chip: Chip, asked: Question, design: Designs, priced: bool) -> list[Range]:
    found = []
    for name, number in chip.fields.items():
        low, high, value = number.low, number.high, number.value
        if low is None or high is None or value is None or low == high:
            continue
        if not _matters(name, asked, design, priced):
            continue
        choices = []
        for end in (low, high):
            moved = {name: end}
            # What follows from a number in the family's assumptions goes with it.
            if name == "link_bandwidth" and chip.fields["peer_bandwidth"].kind == "assumed":
                moved["peer_bandwidth"] = end
            choices.append(Choice(moved, {}))
        found.append(Range(name, number.unit, low, high, tuple(choices)))
    return found


def _of_constants(chip: Chip) -> list[Range]:
    """Returns the constants with a range; those of all kinds of product or message are one."""
    groups: dict[tuple[str, float, float], list[str]] = {}
    for name, constant in chip.constants.items():
        low, high = constant.number.low, constant.number.high
        if low is not None and high is not None and low < high:
            group, last = name.split(".")[0], name.rsplit(".", 1)[1]
            alike = group + last.rsplit("_", 1)[-1]
            groups.setdefault((alike, low, high), []).append(name)
    return [
        Range(
            _common(names),
            chip.constants[names[0]].number.unit,
            low,
            high,
            tuple(Choice({}, dict.fromkeys(names, end)) for end in (low, high)),
        )
        for (_, low, high), names in groups.items()
    ]


def _common(names: Sequence[str]) -> str:
    """Returns names that differ in the middle as one.

    >>> _common(["kernels.fp8.stream", "kernels.bf16.stream"]), _common(["power.running"])
    ('kernels.*.stream', 'power.running')
    """
    if len(names) == 1:
        return names[0]
    start = os.path.commonprefix(list(names))
    end = os.path.commonprefix([name[::-1] for name in names])[::-1]
    # Whole words only: neither `bf` of bf16 nor `t` of oneshot is common.
    end = end[min((end.find(mark) for mark in "._" if mark in end), default=0) :]
    start = start[: max(start.rfind("."), start.rfind("_")) + 1]
    return f"{start}*{end}"


def _of_kernels(chip: Chip) -> list[Range]:
    """Returns kernels as any measured chip of the family has them, where the chip's own and its
    generation's were never measured."""
    if chip.kernels_of() != "its family":
        return []
    family, folder = chip.sheet.identity["family"], constants.folder()
    choices = []
    for name, generation in constants.generations(folder).items():
        fit = constants.read_fit(folder, name)
        if not generation or fit is None or fit.identity.get("family") != family:
            continue
        own: dict[str, Constant] = constants.resolve(_as_generation(chip, generation))
        values = {
            key: each.value for key, each in own.items() if each.value != chip.constants[key].value
        }
        choices.append(Choice({}, values))
    return [Range(_KERNELS, "1", np.nan, np.nan, tuple(choices))] if choices else []


def _as_generation(chip: Chip, generation: str) -> Sheet:
    """Returns the sheet of a chip as if it were of another generation."""
    identity = {**chip.sheet.identity, "generation": generation}
    return dataclasses.replace(chip.sheet, identity=identity)


def ranges(model: ModelLike, chip: ChipLike, **options: Any) -> xr.Dataset:
    """Returns the band of each number of an estimate that is for the better or the worse.

    Along `quantity`: `value`, `low` and `high`. Along `number`: what is known as a range, its ends
    (`number_low`, `number_high`, `unit`), and the band of the time per output token, or to the
    first, with that number alone (`effect_low`, `effect_high`, relative). NaN where the design
    cannot run.

    Args: as of `estimate`.
    """
    given = _defaults() | options
    asked, design = evaluation.one_design(model, chip, **given)
    entry = asked.chips[0]
    priced = options.get("price") is not None
    found = [
        *_of_fields(entry, asked, design, priced), *_of_constants(entry), *_of_kernels(entry)
    ]  # fmt: skip

    def values(choices: Sequence[Choice]) -> dict[str, np.ndarray]:
        """Returns every axis of the design as the chip may be, along choices."""
        chips = [_changed(entry, each, f"{entry.name}#{k}") for k, each in enumerate(choices)]
        paid = {name: given[name] for name in _PAYING}
        others = dataclasses.replace(asked, machines=question.paid_machines(chips, **paid))
        rows = Designs(*(np.repeat(column, len(choices)) for column in design))
        rows = rows._replace(chip=np.arange(len(choices)))
        all_values = results.to_dataset(
            evaluate(others, rows), ("choice",), [entry.name] * len(choices),
            [str(asked.formats[0])] * len(choices),
        )  # fmt: skip
        return {name: all_values[name].values.astype(float) for name in results.AXES}

    alone = [Choice({}, {}), *(choice for each in found for choice in each.choices)]
    moved = values(alone)
    starts = np.cumsum([1, *(len(each.choices) for each in found)])
    patterns: dict[tuple[int, ...], int] = {}
    ends: dict[str, tuple[int, int]] = {}
    for name, each in moved.items():
        both = []
        for sign in (1.0, -1.0):
            picked = tuple(
                _extreme(sign * each, start, len(one.choices))
                for start, one in zip(starts, found, strict=False)
            )
            both.append(patterns.setdefault(picked, len(patterns)))
        ends[name] = both[0], both[1]
    corners = values([_joined([alone[place] for place in pattern]) for pattern in patterns])
    low, high, value = [], [], []
    for name, each in moved.items():
        known = np.concatenate([each, corners[name]])
        known = known[np.isfinite(known)]
        runs = bool(np.isfinite(each[0]))
        value.append(each[0])
        low.append(float(known.min()) if runs else np.nan)
        high.append(float(known.max()) if runs else np.nan)
    return _dataset(entry, found, (value, low, high), _effects(moved, found, starts))


def _defaults() -> dict[str, Any]:
    """Returns the arguments that `estimate` has a default for, with that default."""
    known = inspect.signature(evaluation.estimate).parameters
    return {n: p.default for n, p in known.items() if p.default is not inspect.Parameter.empty}


def _extreme(values: np.ndarray, start: int, count: int) -> int:
    """Returns which of a number's choices, or 0 for none of them, makes a result least."""
    places = [0, *range(start, start + count)]
    each = np.where(np.isfinite(values[places]), values[places], np.inf)
    return places[int(np.argmin(each))]


def _joined(choices: Sequence[Choice]) -> Choice:
    fields: dict[str, float] = {}
    own: dict[str, float] = {}
    # Kernels come last and would hide constants that have a range of their own.
    for choice in reversed(choices):
        fields |= choice.fields
        own |= choice.constants
    return Choice(fields, own)


def _effects(
    moved: Mapping[str, np.ndarray], found: Sequence[Range], starts: np.ndarray
) -> list[tuple[float, float]]:
    """Returns the relative band of the main time with each number alone."""
    times = moved["tpot_s"] if np.isfinite(moved["tpot_s"][0]) else moved["ttft_s"]
    spans = []
    for start, one in zip(starts, found, strict=False):
        own = times[start : start + len(one.choices)] / times[0] - 1.0
        spans.append((float(np.min(own, initial=0.0)), float(np.max(own, initial=0.0))))
    return spans


def _dataset(
    chip: Chip,
    found: Sequence[Range],
    columns: tuple[list[float], list[float], list[float]],
    effects: Sequence[tuple[float, float]],
) -> xr.Dataset:
    names = list(results.AXES)
    value, low, high = columns
    units = [results.BY_NAME[name].unit for name in names]
    as_unit = {"units": "as in quantity_unit"}

    def text(long_name: str, unit: str = "1") -> dict[str, str]:
        return {"units": unit, "long_name": long_name}

    return xr.Dataset(
        {
            "value": ("quantity", value, as_unit | {"long_name": "as estimated"}),
            "low": ("quantity", low, as_unit | {"long_name": "low end"}),
            "high": ("quantity", high, as_unit | {"long_name": "high end"}),
            "number_low": ("number", [r.low for r in found], text("low end", "as in unit")),
            "number_high": ("number", [r.high for r in found], text("high end", "as in unit")),
            "unit": ("number", [r.unit for r in found], text("unit of the number")),
            "effect_low": ("number", [e[0] for e in effects], text("least change of the time")),
            "effect_high": ("number", [e[1] for e in effects], text("most change of the time")),
        },
        {
            "quantity": ("quantity", names),
            "quantity_unit": ("quantity", units),
            "number": ("number", [r.name for r in found]),
        },
        {"chip": chip.name, **results.stamp()},
    )
