"""One design looked at closely: every number of it, and the operators it is made of.

`estimate` and `operators` are what `perfmodel estimate` prints.
"""

import math
from typing import Any

import equinox as eqx
import jax
import numpy as np
import xarray as xr
from jax import Array

from perfmodel import question, results, serving
from perfmodel.advice import advise, narrower
from perfmodel.designs import Designs, designs, evaluate
from perfmodel.footprint import attention_groups, footprint, placed, split_prompt
from perfmodel.formats import Precision
from perfmodel.machine import Machine, Rank, Usage
from perfmodel.models.transformer import (
    Model,
    head_operators,
    layer_operators,
    tower_operators,
)
from perfmodel.operators import KERNELS, Matmul, Operator
from perfmodel.passes import passes, served, unhidden
from perfmodel.plan import Engine, Load, Plan
from perfmodel.question import ChipLike, EngineLike, ModelLike, Question
from perfmodel.relax import Real
from perfmodel.timing import total_usage, usage


def one_design(
    model: ModelLike,
    chip: ChipLike,
    *,
    tp: int,
    pp: int,
    ep: int,
    attention_dp: int,
    cp: int,
    regions: int,
    offload: float,
    weights_first: float,
    batch: int,
    chunk: int | None,
    replicas: int,
    isl: int,
    osl: int,
    prefix_hit: float,
    weights: str | None,
    activations: str | None,
    kv: str | None,
    engine: EngineLike,
    slo_ttft: float | None,
    slo_tpot: float | None,
    price: float | None,
    ownership: str,
    electricity: float | None,
    pue: float | None,
    lifetime: float | None,
    routing: float | None,
    images: float | None,
) -> tuple[Question, Designs]:
    """Returns the question, narrower formats added for advice, and the one design asked for."""
    network = question.find_model(model)
    (machine,) = question.unique_chips([chip])
    names = question.own_precision(network, weights, activations, kv)
    question.check_kernel(machine, names)
    degrees = {
        name: question.whole(name, degree)
        for name, degree in zip(
            question.Layout._fields, (tp, pp, ep, attention_dp, cp, regions), strict=True
        )
    }
    question.check_degrees(network, **degrees)
    formats = [names, *narrower(names)]
    asked = question.ask(
        network, [machine], formats, isl=isl, osl=osl, prefix_hit=prefix_hit, engine=engine,
        slo_ttft=slo_ttft, slo_tpot=slo_tpot, price=price, ownership=ownership,
        electricity=electricity, pue=pue, lifetime=lifetime, routing=routing, images=images,
    )  # fmt: skip
    budget = int(asked.engine.engine.token_budget)
    own = machine.fields.get("prompt_chunk")
    usual = budget if own is None else int(own.value or budget)
    most = usual if chunk is None else question.whole("chunk", chunk)
    design = designs(
        **degrees,
        offload=question.share("offload", offload),
        weights_first=question.share("weights_first", weights_first),
        batch=question.whole("batch", batch),
        chunk=most,
        replicas=question.whole("replicas", replicas),
    )
    return asked, design


def estimate(
    model: ModelLike,
    chip: ChipLike,
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    attention_dp: int = 1,
    cp: int = 1,
    regions: int = 1,
    offload: float = 0.0,
    weights_first: float = 1.0,
    batch: int = 1,
    chunk: int | None = None,
    replicas: int = 1,
    isl: int,
    osl: int,
    prefix_hit: float = 0.0,
    weights: str | None = None,
    activations: str | None = None,
    kv: str | None = None,
    engine: EngineLike = "neutral",
    slo_ttft: float | None = None,
    slo_tpot: float | None = None,
    price: float | None = None,
    ownership: str = "rented",
    electricity: float | None = None,
    pue: float | None = None,
    lifetime: float | None = None,
    routing: float | None = None,
    images: float | None = None,
) -> xr.Dataset:
    """Returns what one design achieves: scalars with units, by the names in `results`.

    A design that does not fit has `feasible` False, the constraint in `binding`, the smallest
    change that helps in `advice`, and NaN for every number it would have to run to have. Where
    only a service level is missed, the numbers stand.

    Args:
        model, chip, engine: names, paths, or loaded entries.
        tp, pp: chips of a stage, and pipeline stages of a replica (tp·pp chips).
        ep: expert-parallel degree: ranks of a stage over which whole experts are spread.
        attention_dp: groups of a stage's ranks that attend to requests of their own.
        cp: ranks of a group over which each sequence's keys are spread.
        regions: stages side by side on each of the `pp` chips of a pipeline (wafers).
        offload: share of each memory behind the fastest that weights and keys may take, host
            memory among them.
        weights_first: share of the weights that is placed before any keys, fastest memory first.
        batch: concurrent requests per replica.
        chunk: most prompt tokens in a step [the engine's]; shorter prompts share one.
        replicas: equal replicas.
        isl, osl: prompt and output tokens.
        prefix_hit: share of the prompt that is cached already [0, 1).
        weights, activations, kv: number formats; what the model's own file asks for by default.
        slo_ttft, slo_tpot: longest acceptable [s].
        price: rent [USD per chip and hour] instead of the catalogue's.
        ownership: `rented`, `list` (owned at list price) or `cost` (at the estimated cost of making
            the chip); see `perfmodel.ownership`.
        electricity, lifetime: of owned chips [USD/kWh, years], instead of the catalogue's.
        pue: power usage effectiveness, for energy at the wall and electricity.
        routing: exponent of the power law by which tokens prefer some experts; even where None or
            0 (`perfmodel.models.routing`, docs/routing.md).
        images: images of a prompt on average, of the size that the network's tower was trained for.
            Their tokens are part of `isl`; encoding them is part of prefill.

    >>> found = estimate("llama-3.3-70b", "h100", tp=8, batch=32, isl=4000, osl=1000)
    >>> found.tokens_per_second_user.attrs["units"], bool(found.feasible), int(found.chips)
    ('token/s', True, 8)
    """
    options: dict[str, Any] = dict(
        tp=tp, pp=pp, ep=ep, attention_dp=attention_dp, cp=cp, regions=regions, offload=offload,
        weights_first=weights_first, batch=batch, chunk=chunk, replicas=replicas, isl=isl, osl=osl,
        prefix_hit=prefix_hit, weights=weights,
        activations=activations, kv=kv, engine=engine, slo_ttft=slo_ttft, slo_tpot=slo_tpot,
        price=price, ownership=ownership, electricity=electricity, pue=pue, lifetime=lifetime,
        routing=routing, images=images,
    )  # fmt: skip
    asked, design = one_design(model, chip, **options)
    found = evaluate(asked, design)
    dataset = results.to_dataset(
        {name: value[0] for name, value in found.items()},
        (),
        asked.chips[0].name,
        str(asked.formats[0]),
    )
    call = question.described("estimate", model, chip, **options)
    return _finish(
        dataset, asked, call, "" if results.feasible(found)[0] else advise(asked, design)
    )


def _finish(dataset: xr.Dataset, asked: Question, call: str, advice: str) -> xr.Dataset:
    text = xr.Variable((), advice, {"units": "1", "long_name": results.TEXTS["advice"]})
    return dataset.assign(advice=text).assign_attrs(_about(asked, call))


def _about(asked: Question, call: str) -> dict[str, Any]:
    """Returns how a design was made, and which numbers of its chip are not the chip's own."""
    (chip,) = asked.chips
    origins = {
        "kernel_constants": chip.kernels_of(),
        "assumed": question.assumed_of(chip),
    }
    return asked.attributes(call) | origins | results.stamp()


SHAPES = (
    "rows", "columns", "inner", "groups", "sequences", "queries", "keys", "pairs", "heads",
    "kv_heads", "qk_width", "v_width", "width", "ranks", "reads", "writes",
    "tokens", "state",
)  # fmt: skip
"""Shapes of operators on one rank; an operator has those of its kind."""

PARTS = {
    "compute": "arithmetic",
    "weights": "memory traffic of weights and activations",
    "cache": "memory traffic of keys and values",
    "network": "links",
    "latency": "floors, launches and serial steps",
}
"""Parts of an operator's time, and what they mean."""

_PHASES = ("decode", "mixed")
# Kinds of what is in a step beside its operators; the others are waits.
_TRANSFERS = ("stage_crossing",)


class _Row(eqx.Module):
    """One row of the table: an operator, or None for what is none but has a `name`."""

    name: str = eqx.field(static=True)
    op: Operator | None
    count: Real
    flops: Real
    memory_bytes: Real
    wire_bytes: Real
    usage: Usage


@jax.jit
def _open(
    machine: Machine, model: Model, load: Load, plan: Plan, precision: Precision, engine: Engine
) -> tuple[list[list[_Row]], Array]:
    """Returns the rows of both steps, and the share of steps that carry a chunk."""
    found = serving.estimate(machine, model, load, plan, precision, engine)
    shard = plan.shard(machine)
    # `running` of an estimate is of all attention groups, memory is of one.
    groups = attention_groups(plan)
    attended = found.running if groups is None else found.running / groups
    room = footprint(machine, model, load, plan, precision, engine)
    lying = placed(machine, plan, room, attended)
    rank = Rank(served(machine, engine), shard.share, placed=lying)
    prefill = split_prompt(load, plan)._replace(again=found.recomputed)
    _, _, *steps = passes(load, plan, prefill, attended, engine)
    tables = []
    for step in steps:
        layers = layer_operators(model, step, shard, precision)
        tower = tower_operators(model, step, shard, precision)
        rows = [
            _Row(
                op.name, op, op.count, op.flops(), op.memory_bytes(), op.wire_bytes(),
                usage(op, rank),
            )
            for op in (*tower, *layers, *head_operators(model, step, shard, precision))
        ]  # fmt: skip
        busy = total_usage(layers, rank).seconds
        seen = total_usage(tower, rank).seconds if tower else None
        rest = unhidden(rank, model, step, plan, engine, busy, seen)
        wires = {"stage_crossing": 2 * step.rows * model.hidden}
        rows += [
            _Row(name, None, count, 0, 0, wires.get(name, 0), spent)
            for name, (count, spent) in rest.items()
        ]
        tables.append(rows)
    return tables, found.chunk_share


def operators(
    model: ModelLike,
    chip: ChipLike,
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    attention_dp: int = 1,
    cp: int = 1,
    regions: int = 1,
    offload: float = 0.0,
    weights_first: float = 1.0,
    batch: int = 1,
    chunk: int | None = None,
    replicas: int = 1,
    isl: int,
    osl: int,
    prefix_hit: float = 0.0,
    weights: str | None = None,
    activations: str | None = None,
    kv: str | None = None,
    engine: EngineLike = "neutral",
    slo_ttft: float | None = None,
    slo_tpot: float | None = None,
    price: float | None = None,
    ownership: str = "rented",
    electricity: float | None = None,
    pue: float | None = None,
    lifetime: float | None = None,
    routing: float | None = None,
    images: float | None = None,
) -> xr.Dataset:
    """Returns what `estimate` is made of: every operator of the decode step and of the step that
    carries a chunk, along `operator`, and the two steps along `phase`.

    Arguments as of `estimate`. Shapes, FLOPs and bytes are of one execution on one rank; `count`
    executions make a step. TPOT is the mean of the steps' times with `step_weight`. Times are NaN
    where the design cannot run.
    """
    options: dict[str, Any] = dict(
        tp=tp, pp=pp, ep=ep, attention_dp=attention_dp, cp=cp, regions=regions, offload=offload,
        weights_first=weights_first, batch=batch, chunk=chunk, replicas=replicas, isl=isl, osl=osl,
        prefix_hit=prefix_hit, weights=weights,
        activations=activations, kv=kv, engine=engine, slo_ttft=slo_ttft, slo_tpot=slo_tpot,
        price=price, ownership=ownership, electricity=electricity, pue=pue, lifetime=lifetime,
        routing=routing, images=images,
    )  # fmt: skip
    asked, design = one_design(model, chip, **options)
    first = (asked.machines, asked.precisions, design.plan(asked.network.is_mixture))
    machine, precision, plan = jax.tree.map(lambda leaf: leaf[0], first)
    engine_numbers = question.numbers(asked.engine.engine)
    opened = _open(machine, asked.network, asked.load, plan, precision, engine_numbers)
    tables, chunk_share = jax.device_get(opened)
    verdict = estimate(model, chip, **options)
    runs = results.can_run(evaluate(asked, design)["margins"])[0]
    columns: dict[str, list[Any]] = {}
    for phase, table in zip(_PHASES, tables, strict=True):
        for row in table:
            for name, value in _cells(row, phase).items():
                columns.setdefault(name, []).append(value)
    times, step = np.asarray(columns["seconds"]), np.asarray(columns["step"])
    steps = {phase: np.sum(times[step == phase]) for phase in _PHASES}
    columns["share_of_step"] = list(times / [steps[phase] for phase in step])
    mixture = np.asarray([1.0 - chunk_share, chunk_share])
    variables: dict[str, Any] = {
        "step_seconds": ("phase", list(steps.values()), _attrs("s", "time of a step")),
        "step_weight": ("phase", mixture, _attrs("1", "its share in TPOT")),
    }
    for name, unit, long_name in _COLUMNS:
        values = np.asarray(columns[name])
        variables[name] = ("operator", values, _attrs(unit, long_name))
    for name in _TIMES if not runs else ():
        dims, values, attrs = variables[name]
        variables[name] = (dims, np.full_like(values, np.nan), attrs)
    coords = {"phase": ("phase", list(_PHASES), _attrs("1", "kind of step"))}
    table = xr.Dataset(variables, coords).assign(verdict[["feasible", "binding", "advice"]])
    call = question.described("evaluation.operators", model, chip, **options)
    return table.assign_attrs(_about(asked, call))


def _attrs(unit: str, long_name: str) -> dict[str, str]:
    return {"units": unit, "long_name": long_name}


_TIMES = (
    "step_seconds", "step_weight", "seconds_each", "seconds", "share_of_step",
    *(f"{part}_s" for part in PARTS),
)  # fmt: skip

_COLUMNS = (
    ("name", "1", "operator"),
    ("step", "1", "step it is in: decode, or mixed where a chunk of a prompt rides along"),
    ("group", "1", "phase and part of the network"),
    ("kind", "1", "kind of operator"),
    ("kernel", "1", "matrix-product kernel"),
    ("count", "1", "executions in a step"),
    *((shape, "1", f"{shape} on one rank".replace("_", " ")) for shape in SHAPES),
    ("flops", "FLOP", "operations of one execution on one rank"),
    ("memory_bytes", "B", "memory traffic of one execution on one rank"),
    ("wire_bytes", "B", "message of one execution on one rank, in 16 bits"),
    ("seconds_each", "s", "time of one execution"),
    ("seconds", "s", "time of all executions in a step"),
    ("share_of_step", "1", "share of the step's time"),
    *((f"{part}_s", "s", f"time of all executions: {what}") for part, what in PARTS.items()),
)


def _cells(row: _Row, phase: str) -> dict[str, Any]:
    """Returns one row of the operator table."""
    kind = "transfer" if row.name in _TRANSFERS else "wait"
    op, count = row.op, float(row.count)
    kernel = KERNELS[int(np.argmax(op.kernel))] if isinstance(op, Matmul) else ""
    shapes = {shape: float(getattr(op, shape, math.nan)) for shape in SHAPES}
    parts = {part: getattr(row.usage, part) for part in PARTS}
    seconds = float(row.usage.seconds or 0.0)
    return {
        "name": row.name,
        "step": phase,
        "group": op.group if op else f"{phase}/rest",
        "kind": type(op).__name__.lower() if op else kind,
        "kernel": kernel,
        "count": count,
        **shapes,
        "flops": float(row.flops),
        "memory_bytes": float(row.memory_bytes),
        "wire_bytes": float(row.wire_bytes),
        "seconds_each": seconds,
        "seconds": seconds * count,
        **{f"{k}_s": math.nan if v is None else float(v) * count for k, v in parts.items()},
    }
