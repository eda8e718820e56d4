"""Predictions of many deployments at once, beside what was measured of them.

Rows of the same structure of network go through one compiled program in blocks of `BLOCK`, filled
up to that size: chip, network, precision, plan, load and engine are all arrays with a row each.
Where prompts have workers of their own it is another program, of two pools (`perfmodel.system`).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import pandas as pd
from jax import Array

from perfmodel import cache, deployments, engines, placement, question, serving, system
from perfmodel._rows import OK, Predictions, TableLike, check_free
from perfmodel.deployments import Deployments
from perfmodel.engines import EngineEntry
from perfmodel.errors import InputError, shorten
from perfmodel.formats import Precision, precision_numbers
from perfmodel.machine import Machine
from perfmodel.margins import MARGINS
from perfmodel.models.catalogue import ModelEntry
from perfmodel.models.transformer import Model
from perfmodel.placement import Links, Pool, System
from perfmodel.plan import Engine, Load, Plan
from perfmodel.question import EngineLike
from perfmodel.results import RUNNING_NEEDS
from perfmodel.units import GB, MILLISECOND

BLOCK = 1024
"""Rows evaluated in one call; shorter lists are filled up."""

SPLIT_BLOCK = 128
"""The same for rows of two pools, which are fewer."""

PREDICTED = ("predicted_ttft_ms", "predicted_tpot_ms", "predicted_output_tokens_per_second_chip")
ERRORS = {"ttft_error": "ttft_ms", "tpot_error": "tpot_ms"}
"""Columns of signed relative errors, predicted/measured − 1, and what they are errors of."""


def evaluate_row(
    machine: Machine, model: Model, load: Load, plan: Plan, formats: Precision, engine: Engine
) -> dict[str, Array]:
    """Returns what is told of one deployment, in SI units."""
    found = serving.estimate(machine, model, load, plan, formats, engine)
    return {
        "ttft": found.ttft,
        "tpot": found.tpot,
        "rate": found.output_rate_per_chip,
        "margins": found.margins,
        "memory": found.memory_bytes,
    }


def evaluate_split(
    machine: Machine,
    model: Model,
    load: Load,
    plans: tuple[Plan, Plan],
    formats: Precision,
    engine: Engine,
) -> dict[str, Array]:
    """Returns the same of a deployment whose prompts have workers of their own.

    Args:
        plans: of the workers that compute prompts, and of those that decode; all have the same
            chips and formats. Keys are handed over through the ports of both once a prompt is
            computed.

    `prefill_load` is the share of time that the workers of prompts work.
    """
    first, decode = (Pool(machine, plan, formats) for plan in plans)
    made = System(first, decode, decode, None, _SPLIT, Links(), streamed=0.0)
    found = system.evaluate(made, model, load, engine)
    return {
        "ttft": found.ttft,
        "tpot": found.tpot,
        "rate": found.output_rate_per_chip,
        "margins": found.margins,
        "memory": found.memory_bytes.max(),
        "prefill_load": found.load[0],
    }


_SPLIT = placement.same_pools(placement.prefill_decode())
_rows, _split_rows = jax.vmap(evaluate_row), jax.vmap(evaluate_split)


def arguments(asked: Deployments, rows: np.ndarray) -> tuple[Any, ...]:
    """Returns the arrays of `evaluate_row`, or of `evaluate_split`, for some rows.

    Their networks have one structure, and all or none are split.
    """
    kind = question.real()

    def stacked(entries: Sequence[Any], places: np.ndarray) -> Any:
        # Only what these rows name: other networks may be of another structure.
        used, inverse = np.unique(places[rows], return_inverse=True)
        table = question.stack([entries[place] for place in used])
        return jax.tree.map(lambda leaf: leaf[inverse], table)

    column = {name: value[rows].astype(kind) for name, value in asked.numbers.items()}
    load = Load(
        isl=column["isl"],
        osl=column["osl"],
        prefix_hit=np.zeros_like(column["isl"]),
        burst=column["burst"],
        in_step=column["in_step"],
    )
    # Without experts a plan has no such degrees, and costs nothing for them.
    routed = asked.models[asked.model[rows[0]]].model.is_mixture

    def plan(pool: str) -> Plan:
        return Plan(
            chips=column[f"{pool}chips"],
            stages=column[f"{pool}stages"],
            batch=column["batch"],
            chunk=column["chunk"],
            replicas=column[f"{pool}replicas"],
            attention_dp=column[f"{pool}attention_dp"] if routed else None,
            expert_ranks=column[f"{pool}expert_ranks"] if routed else None,
        )

    split = bool(asked.split[rows[0]])
    formats = [precision_numbers(names) for names in asked.precisions]
    return (
        stacked([chip.machine for chip in asked.chips], asked.chip),
        stacked([entry.model for entry in asked.models], asked.model),
        load,
        (plan("prefill_"), plan("")) if split else plan(""),
        stacked(formats, asked.precision),
        stacked([entry.engine for entry in asked.engines], asked.engine),
    )


def structures(asked: Deployments) -> list[np.ndarray]:
    """Returns the understood rows of each structure of network, those of two pools apart."""
    kinds: dict[Any, list[int]] = {}
    for place, entry in enumerate(asked.models):
        kinds.setdefault(jax.tree.structure(entry.model), []).append(place)
    good = asked.status == ""
    parts = [
        np.flatnonzero(good & np.isin(asked.model, places) & (asked.split == split))
        for places in kinds.values()
        for split in (False, True)
    ]
    return [rows for rows in parts if len(rows)]


def evaluate(asked: Deployments, block: int = BLOCK) -> dict[str, np.ndarray]:
    """Returns the numbers of `evaluate_row` for every row; NaN where a row is not understood."""
    found: dict[str, np.ndarray] = {}
    for rows in structures(asked):
        values = arguments(asked, rows)
        split = bool(asked.split[rows[0]])
        size = min(block, SPLIT_BLOCK) if split else block
        function, name = (_split_rows, "predict-split") if split else (_rows, "predict")
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            places = np.minimum(np.arange(start, start + size), len(rows) - 1)
            filled = jax.tree.map(lambda leaf, places=places: leaf[places], values)
            program = cache.program(name, function, filled)
            for key, value in program(*filled).items():
                array = np.asarray(value)[: len(part)]
                empty = np.full((len(asked), *array.shape[1:]), np.nan)
                found.setdefault(key, empty)[part] = array
    return found


def statuses(asked: Deployments, found: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns the statuses, with those of designs that cannot run filled in."""
    status = asked.status.copy()
    if not found:
        return status
    places = [MARGINS.index(name) for name in RUNNING_NEEDS]
    margins = found["margins"][:, places]
    for row in np.flatnonzero((status == "") & (margins < 0.0).any(axis=1)):
        name = RUNNING_NEEDS[int(np.argmax(margins[row] < 0.0))]
        chip = asked.chips[asked.chip[row]]
        size = float(chip.machine.memory.capacity[0])
        short = -margins[row, 0] * size / GB
        status[row] = f"does not fit: {name}"
        if name == "memory":
            status[row] += f" ({short:.3g} GB per chip short of {size / GB:.0f} GB)"
    status[status == ""] = OK
    return status


def _notes(
    asked: Deployments, own: Sequence[ModelEntry], exponent: float | None
) -> tuple[str, ...]:
    """Returns what a reader must know of networks that a table alone does not name."""
    named = [entry.name for entry in asked.models]
    unused = next((entry.name for entry in own if entry.name not in named), None)
    if unused is not None:
        raise InputError(f"models: no row names '{shorten(unused)}'")
    notes = tuple(f"{entry.name}: {note}" for entry in own for note in entry.notes)
    law = () if exponent is None else (f"routing: power law, exponent {exponent:g}, of mixtures",)
    return notes + law


def _skewed(entry: ModelEntry, exponent: float | None) -> ModelEntry:
    return dataclasses.replace(entry, model=question.prefer(entry.model, exponent))


def predict_all(
    runs: TableLike,
    engine: EngineLike | None = None,
    models: Sequence[ModelEntry] = (),
    routing: float | None = None,
) -> Predictions:
    """Returns the predictions of every row of a table; see `predict`."""
    exponent = question.skew(routing)
    profile = (
        engine if engine is None or isinstance(engine, EngineEntry) else engines.load_engine(engine)
    )
    asked = deployments.understand(runs, profile, models)
    notes = _notes(asked, models, exponent)
    skewed = [_skewed(entry, exponent) for entry in asked.models]
    asked = dataclasses.replace(asked, models=skewed)
    table = asked.table
    check_free(table, (*PREDICTED, *ERRORS, "status"))
    found = evaluate(asked)
    status = statuses(asked, found)
    good = status == OK
    blank = np.full(len(asked), np.nan)
    columns = {
        "predicted_ttft_ms": found.get("ttft", blank) / MILLISECOND,
        "predicted_tpot_ms": found.get("tpot", blank) / MILLISECOND,
        "predicted_output_tokens_per_second_chip": found.get("rate", blank),
    }
    for error, measured in ERRORS.items():
        if measured in table.given:
            columns[error] = columns[f"predicted_{measured}"] / asked.numbers[measured] - 1.0
    columns = {name: np.where(good, value, np.nan) for name, value in columns.items()}
    frame = pd.concat(
        [table.frame, pd.DataFrame(columns), pd.DataFrame({"status": status})], axis=1
    )
    entries = {"model": asked.models, "chip": asked.chips, "engine": asked.engines}
    labels = {
        name: np.asarray([entry.name for entry in listed] or [""], dtype=object)[
            getattr(asked, name)
        ]
        for name, listed in entries.items()
    }
    labels["mode"] = np.where(asked.split, "disagg", "agg").astype(object)
    return Predictions(
        frame, table.lines, labels, tuple(name for name in ERRORS if name in columns), notes
    )


def predict(
    runs: TableLike,
    *,
    engine: EngineLike | None = None,
    models: Sequence[ModelEntry] = (),
    routing: float | None = None,
) -> pd.DataFrame:
    """Returns a table of deployments with what is predicted of each.

    The columns given, unchanged, then `predicted_ttft_ms` and `predicted_tpot_ms` (means over
    requests [ms]), `predicted_output_tokens_per_second_chip`, `ttft_error` and `tpot_error`
    (predicted/measured − 1) where `ttft_ms` and `tpot_ms` were measured, and `status`: "ok", or
    in a line why a row has no prediction.

    Args:
        runs: a CSV file, or a frame, with a deployment a row: model, chip, tp, concurrency, isl,
            osl, and what else `perfmodel.deployments.FIELDS` lists, by any of the names there.
        engine: profile for every row, instead of that of its `engine` column.
        models: networks of your own (`load_model`) that rows may name beside the catalogue's.
        routing: exponent of the power law by which tokens prefer some experts, in the rows of
            mixtures; even where None or 0.

    >>> row = {"model": "meta-llama/Llama-3.1-70B", "chip": "h200_sxm", "tp": 4,
    ...        "concurrency": 16, "isl": 1024, "osl": 1024}
    >>> predict(pd.DataFrame([row, row | {"model": "llama-9"}]))["status"].to_list()[0]
    'ok'
    """
    return predict_all(runs, engine, models, routing).frame
