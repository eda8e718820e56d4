"""Lists of designs, evaluated: which chip, precision and plan; every number of each.

One program evaluates `BLOCK` plans of a chip and a precision. Its shapes depend on nothing that
is asked, so one compilation serves every chip, precision, network of equal structure and list of
plans, and a number is the same to the last bit wherever it is reported.

Chips and precisions are not axes of the program: with them inside, its arrays have several shapes
and fuse less well. It then took twice as long to compile and to run.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from perfmodel import cache, question, results, serving
from perfmodel.formats import Precision
from perfmodel.machine import Machine
from perfmodel.models.transformer import Model
from perfmodel.plan import Engine, Limits, Load, Plan
from perfmodel.question import Question

BLOCK = 8192
"""Plans evaluated in one call. What passes between operations then stays in cache, and memory is
bounded whatever the number of designs; shorter lists are filled up."""


class Designs(NamedTuple):
    """A list of designs, column by column: which chip and precision, and the plan.

    `ep`, `attention_dp` and `cp` divide the `tp` chips of a stage and may be 1. `regions` is how
    many stages of the pipeline lie side by side on each chip; `offload` and `weights_first`
    are as in `Plan`.
    """

    chip: np.ndarray
    precision: np.ndarray
    tp: np.ndarray
    pp: np.ndarray
    batch: np.ndarray
    chunk: np.ndarray
    replicas: np.ndarray
    ep: np.ndarray
    attention_dp: np.ndarray
    cp: np.ndarray
    regions: np.ndarray
    offload: np.ndarray
    weights_first: np.ndarray

    def take(self, rows: Any) -> "Designs":
        """Returns the designs at an index, slice or mask."""
        return Designs(*(column[rows] for column in self))

    def plan(self, mixture: bool = False) -> Plan:
        """Returns the plans as floating-point arrays.

        A choice that no plan makes is left out of the program, and costs nothing. A mixture of
        experts always has those of its experts: it is rarely served without.
        """
        chip, precision, *columns = (np.asarray(c, dtype=question.real()) for c in self)
        tp, pp, batch, chunk, replicas, ep, attention_dp, cp, regions, slow, first = columns

        def choice(
            column: np.ndarray, always: bool = False, unused: float = 1.0
        ) -> np.ndarray | None:
            return column if always or np.any(column != unused) else None

        return Plan(
            chips=tp * pp, stages=pp * regions, batch=batch, chunk=chunk, replicas=replicas,
            attention_dp=choice(attention_dp, mixture), expert_ranks=choice(ep, mixture),
            context_ranks=choice(cp), offload=choice(slow, unused=0.0),
            weights_first=choice(first),
        )  # fmt: skip


_NUMBERS = Designs._fields[2:]


def designs(**columns: Any) -> Designs:
    """Returns designs from columns; what is left out is 0 (indices, offload) or 1 (numbers)."""
    defaults = {"chip": 0, "precision": 0} | dict.fromkeys(_NUMBERS, 1) | {"offload": 0}
    return Designs(*np.broadcast_arrays(*(np.atleast_1d(v) for v in (defaults | columns).values())))


def _evaluate(
    machine: Machine,
    precision: Precision,
    plans: Plan,
    model: Model,
    load: Load,
    engine: Engine,
    limits: Limits,
) -> dict[str, Array]:
    def one(plan: Plan) -> dict[str, Array]:
        found = serving.estimate(machine, model, load, plan, precision, engine, limits)
        return results.read_all(results.Design(machine, model, plan, precision, found))

    return jax.vmap(one)(plans)


def blocks(
    asked: Question, chip: int, kind: int, listed: Designs
) -> Iterator[tuple[slice, dict[str, Array]]]:
    """Yields every number of a list of plans on one chip in one precision, block by block.

    The chip and precision of the list itself are ignored. The next block is computed while the
    caller looks at one.
    """
    count = len(listed.tp)
    machine = jax.tree.map(lambda leaf: leaf[chip], asked.machines)
    precision = jax.tree.map(lambda leaf: leaf[kind], asked.precisions)
    engine, limits = question.numbers((asked.engine.engine, asked.limits))
    plans = listed.plan(asked.network.is_mixture)
    before: tuple[slice, dict[str, Array]] | None = None
    for start in range(0, count, BLOCK):
        stop = min(start + BLOCK, count)
        rows = np.minimum(np.arange(start, start + BLOCK), count - 1)
        part = jax.tree.map(lambda leaf, rows=rows: leaf[rows], plans)
        values = (machine, precision, part, asked.network, asked.load, engine, limits)
        found = cache.program("designs", _evaluate, values)(*values)
        if before is not None:
            yield before
        before = slice(start, stop), found
    if before is not None:
        yield before


def evaluate(asked: Question, listed: Designs) -> dict[str, np.ndarray]:
    """Returns every number of a list of designs, as `results.read_all` names them."""
    values: dict[str, np.ndarray] = {}
    pairs = np.stack([listed.chip, listed.precision], axis=1)
    for chip, kind in np.unique(pairs, axis=0):
        rows = np.flatnonzero((listed.chip == chip) & (listed.precision == kind))
        for part, found in blocks(asked, int(chip), int(kind), listed.take(rows)):
            for name, value in found.items():
                array = np.asarray(value)[: part.stop - part.start]
                empty = np.empty((len(pairs), *array.shape[1:]), array.dtype)
                values.setdefault(name, empty)[rows[part]] = array
    return values
