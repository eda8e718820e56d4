"""What a design depends on, in words: the inputs that matter, of a Dataset of `sensitivity`.

Shared by the table, the picture and the page. Works on a saved file, and loads without JAX.
"""

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from perfmodel import _labels
from perfmodel.units import HOUR, si

if TYPE_CHECKING:
    import xarray as xr

_WORDS = {
    "tokens_per_second_user": "tokens/s per user",
    "output_tokens_per_second_chip": "tokens/s per chip",
    "ttft_s": "TTFT",
    "usd_per_million_output_tokens": "$ per output token",
    "energy_per_output_token_j": "J per output token",
}

FEWEST = 0.005
"""Elasticities that show: those that round to 0.01 % per per cent."""


@dataclasses.dataclass(frozen=True)
class Influence:
    """One input that matters: title, value with unit, whether it is assumed or a whole kind of
    operator, and its elasticities in the order of `outputs`, shape [output]."""

    name: str
    title: str
    value: str
    assumed: bool
    whole: bool
    elasticities: np.ndarray


def words(output: str) -> str:
    """Returns an output in words.

    >>> words("ttft_s")
    'TTFT'
    """
    return _WORDS.get(output, output.replace("_", " "))


def outputs(dataset: "xr.Dataset") -> list[str]:
    """Returns the outputs that exist, the main one first."""
    known = np.isfinite(dataset["output_value"].values)
    names = [str(n) for n, ok in zip(dataset["output"].values, known, strict=True) if ok]
    return sorted(names, key=lambda name: name != dataset.attrs["main"])


def value_text(value: float, unit: str) -> str:
    """Returns a number of a machine or engine with its unit, as people write it.

    >>> value_text(3.35e12, "B/s"), value_text(8.8e-13, "J/FLOP"), value_text(0.6e-3, "s")
    ('3.35 TB/s', '0.880 pJ/FLOP', '600 µs')
    """
    if unit == "s":
        return _labels.duration(value)
    if unit == "USD/s":
        return f"${value * HOUR:.2f}/h"
    if unit in ("J/FLOP", "J/B", "s/B"):
        return f"{_labels.number(value * 1e12)} p{unit}"
    return _labels.number(value) if unit == "1" else si(value, unit)


def influences(dataset: "xr.Dataset", least: float = FEWEST) -> list[Influence]:
    """Returns the inputs that move some output by at least `least`, by size for the main one.

    Terms that the chip lacks (neutral values of its machine) are left out.
    """
    shown = dataset["elasticity"].sel(output=outputs(dataset)).values
    columns = [dataset[name].values for name in ("input", "title", "value", "unit", "kind")]
    found = []
    for i, (name, title, value, unit, kind) in enumerate(zip(*columns, strict=True)):
        whole = str(dataset["group"].values[i]) == "operators"
        moves = np.nan_to_num(shown[:, i])
        if (kind == "neutral" and not whole) or np.max(np.abs(moves), initial=0.0) < least:
            continue
        text = "" if whole else value_text(float(value), str(unit))
        row = Influence(str(name), str(title), text, kind == "assumed", whole, moves)
        found.append(row)
    return by_size(found, 0)


def by_size(rows: list[Influence], output: int) -> list[Influence]:
    """Returns influences by size for one output; of those that do not move it, by the others."""

    def size(row: Influence) -> tuple[float, float, str]:
        sizes = np.abs(row.elasticities)
        own = float(sizes[output])
        return -own if own >= FEWEST else 0.0, -float(np.max(sizes)), row.name

    return sorted(rows, key=size)


def percent(elasticity: float) -> str:
    """Returns what one per cent more of an input does, in per cent.

    >>> percent(0.714), percent(-0.2), percent(0.001)
    ('+0.71 %', '−0.20 %', '·')
    """
    if not math.isfinite(elasticity) or abs(elasticity) < FEWEST:
        return "·"
    return f"{elasticity:+.2f} %".replace("-", "−")


def sentence(row: Influence, output: str, elasticity: float) -> str:
    """Returns an influence as a sentence: +1 % memory bandwidth: +0.71 % tokens/s per user."""
    return f"+1 % {row.title}: {percent(elasticity)} {words(output)}"


def title(dataset: "xr.Dataset") -> str:
    """Returns what the figure shows."""
    model = _labels.model_title(str(dataset.attrs["model"]))
    chip = _labels.chip_title(str(dataset["chip"].item()))
    return f"What {model} on {int(dataset['chips'])} × {chip} depends on"


def setting(dataset: "xr.Dataset") -> str:
    """Returns the plan, traffic and engine of the design, on one line."""
    plan = [int(dataset[name]) for name in _labels.PLAN]
    text = _labels.plan_text(*plan, precision=str(dataset["precision"].item()))
    engine = f"engine: {dataset.attrs.get('engine', 'neutral')}"
    return " · ".join((text, _labels.lengths(dataset), engine))


def notes(dataset: "xr.Dataset") -> list[str]:
    """Returns what a reader must know."""
    return [
        "Each number is moved alone: a bandwidth at the same energy per byte, a peak at the same "
        "energy per FLOP.",
        "Exact derivatives; a staircase (tiles, pages, requests that fit) has the slope of its "
        "chord.",
        "Speed of a kind of operator: the time of all such operators, at the same energy.",
    ]
