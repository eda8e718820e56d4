"""Where a network runs at all: the fewest chips that hold it, in each format, with the reason."""

from typing import NamedTuple

import numpy as np

from perfmodel import question, results
from perfmodel.designs import designs, evaluate
from perfmodel.question import Question
from perfmodel.units import GB


class Fit(NamedTuple):
    """Where a network runs on one kind of chip.

    Fields: `chips`, the fewest that hold it and one whole request, in any format asked for (0:
    none); `words`, the same for each format, with the reason where it does not run.
    """

    chips: int
    words: str


def fit(asked: Question, chip: int) -> Fit:
    """Returns where a network runs on a chip, in one stage, whatever its service levels."""
    degrees = question.degrees(asked.model.model)
    entry = asked.chips[chip]
    domain = int(entry.fields["domain"].value or 1)
    least: list[int] = []
    runs, lacks, large = {}, [], []
    for kind, names in enumerate(asked.formats):
        if not asked.supports(chip, kind):
            other = "" if names.kernel == str(names) else f" for {names}"
            lacks.append(f"no {names.kernel} kernel{other}")
            continue
        found = evaluate(asked, designs(chip=chip, precision=kind, tp=degrees))
        good = results.can_run(found["margins"])
        if np.any(good):
            least.append(degrees[int(np.argmax(good))])
            runs.setdefault(least[-1], []).append(str(names))
            continue
        room = float(entry.fields["memory_capacity"].value or 0.0)
        room *= asked.engine.engine.memory_fraction
        need = float(found["memory_bytes"][-1])
        large.append(
            f"{names} needs {need / GB:.3g} GB a chip at TP{degrees[-1]}, {room / GB:.3g} GB usable"
        )
    words = [
        f"{', '.join(names)} from {count} {'chip' if count == 1 else 'chips'}"
        + (f" (links join {domain})" if count > domain else "")
        for count, names in sorted(runs.items(), reverse=True)
    ]
    return Fit(min(least, default=0), "; ".join([*words, *large, *lacks]))


def fits(asked: Question) -> list[Fit]:
    """Returns where a network runs on each chip asked for."""
    return [fit(asked, chip) for chip in range(len(asked.chips))]


def reasons(names: list[str], obstacles: list[str], most: int = 3) -> str:
    """Returns why chips have no plan on one line, of many chips the first few.

    >>> reasons(["a", "b"], ["memory", "kernel"], 1)
    'a: memory; and 1 more chip'
    """
    listed = [f"{name}: {why}" for name, why in zip(names, obstacles, strict=True)][:most]
    rest = len(names) - len(listed)
    more = [f"and {rest} more {'chip' if rest == 1 else 'chips'}"] if rest else []
    return "; ".join([*listed, *more])
