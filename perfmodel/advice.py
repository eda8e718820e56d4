"""What would help a design that does not fit: the smallest change, found by trying."""

import numpy as np

from perfmodel import budgets, question, results
from perfmodel.designs import Designs, designs, evaluate
from perfmodel.formats import PrecisionName, precision_name
from perfmodel.question import Question
from perfmodel.units import GB, seconds

_GRID = 4096

NARROWER = ("fp8", "nvfp4", "int4")
"""Formats of weights that are tried where a network does not fit."""


def narrower(names: PrecisionName) -> list[PrecisionName]:
    """Returns the precisions to try where one does not fit."""
    order = ["bf16", *NARROWER]
    start = order.index(names.weights) + 1 if names.weights in order else len(order)
    return [precision_name(weights) for weights in order[start:]]


def advise(asked: Question, design: Designs) -> str:
    """Returns the smallest change that makes one infeasible design feasible, found by trying."""
    found = evaluate(asked, design)
    if not results.can_run(found["margins"])[0]:
        return _advise_memory(asked, design, found)
    limit = str(results.binding(found)[0])
    if limit in budgets.NAMES.values():
        return _advise_budget(asked, design, limit)
    return _advise_limit(asked, design, found)


def _advise_budget(asked: Question, design: Designs, limit: str) -> str:
    """Returns what the chips of a design take of a budget, and the least that would hold them."""
    (name,) = (name for name, margin in budgets.NAMES.items() if margin == limit)
    chips = int(design.tp[0] * design.pp[0] * design.replicas[0])
    return budgets.words(asked, int(design.chip[0]), name, chips)


def _advise_memory(asked: Question, design: Designs, found: dict[str, np.ndarray]) -> str:
    row = {name: int(column[0]) for name, column in design._asdict().items()}
    degrees = [d for d in question.degrees(asked.model.model) if d >= row["tp"]]
    kinds = [row["precision"]] + [
        k
        for k in range(len(asked.formats))
        if k != row["precision"]
        and asked.supports(row["chip"], k)
        and asked.precisions.weight_bytes[k] < asked.precisions.weight_bytes[row["precision"]]
    ]
    grid = [(kind, degree) for kind in kinds for degree in degrees]
    tried = designs(**row | {"precision": [k for k, _ in grid], "tp": [d for _, d in grid]})
    fits = results.can_run(evaluate(asked, tried)["margins"])
    changes = []
    same = [d for (k, d), ok in zip(grid, fits, strict=True) if ok and k == row["precision"]]
    if same:
        changes.append(f"the smallest TP that fits is {same[0]}")
    for kind in kinds[1:]:
        narrow = [d for (k, d), ok in zip(grid, fits, strict=True) if ok and k == kind]
        if narrow and (not same or narrow[0] < same[0]):
            changes.append(f"{asked.formats[kind]} fits at TP {narrow[0]}")
            break
    need, capacity = float(found["memory_bytes"][0]), asked.chips[row["chip"]].fields
    have = float(capacity["memory_capacity"].value or 0.0) * asked.engine.engine.memory_fraction
    start = f"needs {need / GB:.1f} GB a chip for one request where {have / GB:.1f} GB can be used"
    if not changes:
        changes.append("no TP fits; add pipeline stages or take a chip with more memory")
    return f"{start}: {', or '.join(changes)}"


def _advise_limit(asked: Question, design: Designs, found: dict[str, np.ndarray]) -> str:
    row = {name: int(column[0]) for name, column in design._asdict().items()}
    name = str(results.binding(found)[0]).removesuffix(" limit")
    reached, limit = float(found[f"{name}_s"][0]), float(getattr(asked.limits, name))
    start = f"{name.upper()} {seconds(reached)} against {seconds(limit)}"

    # Every batch where there are few, else those of a grid.
    batches = np.unique(np.geomspace(1, row["batch"], _GRID).round().astype(int))
    if row["batch"] <= _GRID:
        batches = np.arange(1, row["batch"] + 1)
    meets = results.feasible(evaluate(asked, designs(**row | {"batch": batches})))
    if np.any(meets):
        return f"{start}: a batch of {int(np.max(batches[meets]))} meets it"
    degrees = [d for d in question.degrees(asked.model.model) if d > row["tp"]]
    for at in (row["batch"], 1):
        tried = row | {"batch": at}
        if not degrees:
            break
        meets = results.feasible(evaluate(asked, designs(**tried | {"tp": degrees})))
        if np.any(meets):
            return f"{start}: TP {degrees[int(np.argmax(meets))]} at batch {at} meets it"
    alone = evaluate(asked, designs(**row | {"batch": 1}))
    least = seconds(float(alone[f"{name}_s"][0]))
    return f"{start}: no batch or TP meets it; alone a request takes {least} at TP {row['tp']}"
