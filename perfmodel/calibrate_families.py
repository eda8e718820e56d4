"""Fits the few constants of chips that no kernel table covers, on published whole-model points.

    python -m perfmodel.calibrate_families --out chips/fits

For each family below, the constants named are the ones that the rows of
`perfmodel/validation/*.csv` marked `fitted` determine; errors are of log(modelled/published), with
a prior of a factor of two around the starting value. Everything else about the family stays as
its datasheet and its other constants say.
"""

import argparse
import dataclasses
import fnmatch
import importlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from perfmodel import validation
from perfmodel.chips import load_chip
from perfmodel.engines import load_engine
from perfmodel.machine import Machine
from perfmodel.plan import Engine
from perfmodel.validation import Point


@dataclasses.dataclass(frozen=True)
class Task:
    """What is fitted: the fit's name, its chips, and constants with their starting values.

    A name may be a pattern (`kernels.*.stream`): one value for all constants that fit it. Names
    without a dot are of the engine, whose profile then has the fit's name. With an `engine`, only
    rows of that one are seen.
    """

    fit: str
    chips: tuple[str, ...]
    start: Mapping[str, float]
    engine: str = ""


TENSIX = {"[ke]*s.*.stream": 0.75, "floors.serial": 100e-6, "fabric.*_latency": 60e-6}
V0 = {"launch_floor": 180e-6, "host_sequence": 60e-6}
EAGER = {"floors.launch": 250e-6, "*s.bf16.efficiency": 0.3}
SLOW = {"*s.bf16.efficiency": 0.3, "decode.item_rate": 1e11}

TASKS: tuple[Task, ...] = (
    Task("wafer", ("wse2", "wse3"), {"mesh.reduction": 0.7}),
    Task("lpu", ("groq_lpu",), {"fabric.*_latency": 20e-6}),
    Task("corsair", ("corsair",), {"fabric.*_latency": 9e-6}),
    Task("tensix", ("n150", "n300"), TENSIX),
    Task("cpu", ("xeon_6980p",), {"[ke]*s.*.efficiency": 0.2}),
    Task("vllm_2024", ("a100_40gb_sxm", "h100_sxm"), V0, "vllm_2024"),
    Task("mi250@vllm_2024", ("mi250",), EAGER | {"fabric.*_latency": 1e-4}, "vllm_2024"),
    Task("mi300x@vllm_2024", ("mi300x",), EAGER | {"decode.item_rate": 1e11}, "vllm_2024"),
    Task("max_1550@vllm_2024", ("max_1550",), SLOW, "vllm_2024"),
    Task(
        "dataflow",
        ("sn40l",),
        {"floors.serial": 6e-6, "decode.stream": 0.2, "decode.item_time": 0.2e-6},
    ),
    Task(
        "gaudi",
        ("gaudi2",),
        {"kernels.*.stream": 0.8, "floors.launch": 1.6e-4, "fabric.*_latency": 2e-5},
    ),
    Task(
        "trainium",
        ("inf2", "trn1"),
        {"floors.serial": 1.2e-4, "decode.stream": 0.3, "kernels.*.efficiency": 0.4},
    ),
    Task("tpu", ("tpu_v6e",), {"floors.serial": 3e-5}),
)
"""Fits in order."""

_PRIOR = np.log(2.0)


def expand(names: Mapping[str, float], known: Sequence[str]) -> dict[str, float]:
    """Returns constants by full name, from patterns of the shell.

    >>> expand({"kernels.*.stream": 0.9}, ["kernels.bf16.stream", "kernels.fp8.stream"])
    {'kernels.bf16.stream': 0.9, 'kernels.fp8.stream': 0.9}
    """
    found = {}
    for name, value in names.items():
        found |= {k: value for k in known if fnmatch.fnmatchcase(k, name)}
    return found


def machine(chip: str, changed: Mapping[str, float]) -> Machine:
    """Returns a chip's machine with other constants."""
    entry = load_chip(chip)
    fields, constants = entry.inputs()
    family = importlib.import_module(f"perfmodel.chips.{entry.sheet.identity['family']}")
    return family.machine(fields, constants | expand(changed, list(constants)))


def engine(name: str, changed: Mapping[str, float]) -> Engine | None:
    """Returns an engine with the numbers whose names have no dot; None where there are none."""
    own = {field: value for field, value in changed.items() if "." not in field}
    return dataclasses.replace(load_engine(name).engine, **own) if own else None


def fit(task: Task) -> tuple[dict[str, float], np.ndarray, list[Point]]:
    """Returns the fitted constants, the errors left, and the rows that were seen."""
    rows = [p for name in validation.names() for p in validation.points(name)]
    rows = [p for p in rows if p.chip in task.chips and p.fitted]
    rows = [p for p in rows if task.engine in ("", p.engine)]
    start = np.log(list(task.start.values()))

    def residuals(x: np.ndarray) -> np.ndarray:
        values = dict(zip(task.start, np.exp(x), strict=True))
        made: dict[str, Any] = {chip: machine(chip, values) for chip in task.chips}
        return np.concatenate(
            [
                validation.errors(rows, made.__getitem__, engine(task.engine, values)),
                0.1 * (x - start) / _PRIOR,
            ]
        )

    found = least_squares(residuals, start, diff_step=1e-3, xtol=1e-5, ftol=1e-6)
    values = dict(zip(task.start, (float(v) for v in np.exp(found.x)), strict=True))
    return values, found.fun[: len(rows)], rows


def write(path: Path, values: Mapping[str, float]) -> None:
    """Puts fitted values into a file of constants, whatever else it says of them kept."""
    text = path.read_text(encoding="utf-8")
    for name in (name for name in values if "." not in name):
        text = re.sub(rf"(\[{name}\]\nvalue = )\S+", rf"\g<1>{values[name]:.4g}", text)
    names = re.findall(r'^\[constants\."(.+)"\]', text, re.MULTILINE)
    for name, value in expand(values, names).items():
        head = f'[constants."{name}"]\nvalue = '
        text = re.sub(re.escape(head) + r"\S+", f"{head}{value:.4g}", text)
    path.write_text(text, encoding="utf-8")


def main() -> None:
    """Fits every task, prints what it found, and writes it where asked."""
    parser = argparse.ArgumentParser(
        prog="python -m perfmodel.calibrate_families", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--only", help="one fit by name")
    parser.add_argument("--out", type=Path, help="folder of fits to put the values in")
    options = parser.parse_args()
    for task in TASKS:
        if options.only in (None, task.fit):
            values, left, rows = fit(task)
            if options.out:
                profiles = options.out.parents[1] / "perfmodel" / "engine_profiles"
                folder = profiles if task.fit == task.engine else options.out
                write(folder / f"{task.fit}.toml", values)
            print(task.fit, {name: float(f"{value:.4g}") for name, value in values.items()})
            for row, error in zip(rows, left, strict=True):
                print(f"  {row.id:40} {100 * (np.exp(error) - 1):+6.1f} %")


if __name__ == "__main__":
    main()
