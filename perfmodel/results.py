"""One table of every number reported: its name, unit, meaning, and how it is read.

The same table makes the variables of a single estimate and of a frontier, the keys of `--json`,
and says which way is better where a number is an axis.
"""

import dataclasses
import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax import Array

from perfmodel.formats import Precision
from perfmodel.machine import Machine
from perfmodel.models.transformer import Model, kv_bytes_per_token
from perfmodel.plan import Plan
from perfmodel.relax import as_real
from perfmodel.serving import BINDING, MARGINS, PARTS, Estimate
from perfmodel.units import HOUR, MILLION

RUNNING_NEEDS = ("memory", "kernel", "divisibility", "context length")
"""Margins without which a design cannot run at all; service levels are not among them."""


class Design(eqx.Module):
    """A design with its estimate, as arrays: what the table below reads from."""

    machine: Machine
    model: Model
    plan: Plan
    precision: Precision
    estimate: Estimate


@dataclasses.dataclass(frozen=True)
class Quantity:
    """One number reported.

    Fields:
        name: its key everywhere, quantity and unit.
        unit, long_name: as attributes of the variable.
        read: from an evaluated design to an array.
        better: which way is better, "" where that has no meaning.
        runs: it exists only where the design can run; NaN elsewhere.
        whole: it is a whole number.
    """

    name: str
    unit: str
    long_name: str
    read: Callable[[Design], Array]
    better: Literal["higher", "lower", ""] = ""
    runs: bool = True
    whole: bool = False


def _priced(design: Design, dollars: Array) -> Array:
    return jnp.where(design.machine.price > 0.0, dollars, jnp.nan)


def _decoding(design: Design, value: Array) -> Array:
    # One output token comes with the prefill: no step decodes.
    return jnp.where(design.estimate.osl > 1.0, value, jnp.nan)


def _count(name: str, unit: str, long_name: str, read: Callable[[Design], Array]) -> Quantity:
    return Quantity(name, unit, long_name, read, runs=False, whole=True)


def _choice(degree: Array | None) -> Array:
    """Returns a degree of parallelism that a plan may leave out."""
    return as_real(1.0 if degree is None else degree)


QUANTITIES: tuple[Quantity, ...] = (
    _count("tp", "chip", "chips of a stage (tensor-parallel degree)", lambda d: d.plan.width),
    _count("pp", "1", "pipeline stages", lambda d: d.plan.stages),
    _count("ep", "1", "expert-parallel degree, of the chips of a stage",
           lambda d: _choice(d.plan.expert_ranks)),
    _count("attention_dp", "1", "attention groups of a stage (attention data parallelism)",
           lambda d: _choice(d.plan.attention_dp)),
    _count("cp", "1", "chips over which a sequence's keys are spread (context parallelism)",
           lambda d: _choice(d.plan.context_ranks)),
    _count("batch", "request", "concurrent requests per replica", lambda d: d.plan.batch),
    _count("chunk", "token", "most prompt tokens in one step", lambda d: d.plan.chunk),
    _count("replicas", "1", "equal replicas", lambda d: d.plan.replicas),
    _count("chips", "chip", "chips deployed", lambda d: d.estimate.chips),
    Quantity("ttft_s", "s", "time to first token", lambda d: d.estimate.ttft, "lower"),
    Quantity("tpot_s", "s", "time per output token after the first",
             lambda d: _decoding(d, d.estimate.tpot), "lower"),
    Quantity("e2e_s", "s", "request latency, end to end", lambda d: d.estimate.e2e, "lower"),
    Quantity("longest_gap_s", "s", "longest time between two tokens of a request",
             lambda d: _decoding(d, d.estimate.longest_gap), "lower"),
    Quantity("tokens_per_second_user", "token/s", "output tokens per second per user (1/TPOT)",
             lambda d: _decoding(d, d.estimate.interactivity), "higher"),
    Quantity("tokens_per_second_user_e2e", "token/s",
             "output tokens per second per user over the whole request (OSL/E2E)",
             lambda d: d.estimate.interactivity_e2e, "higher"),
    Quantity("output_tokens_per_second_chip", "token/s/chip", "output tokens per second per chip",
             lambda d: d.estimate.output_rate_per_chip, "higher"),
    Quantity("total_tokens_per_second_chip", "token/s/chip",
             "input and output tokens per second per chip",
             lambda d: d.estimate.total_rate_per_chip, "higher"),
    Quantity("output_tokens_per_second", "token/s", "output tokens per second of the deployment",
             lambda d: d.estimate.output_rate * d.plan.replicas, "higher"),
    Quantity("requests_per_second", "request/s", "requests finished per second by the deployment",
             lambda d: d.estimate.request_rate * d.plan.replicas, "higher"),
    Quantity("power_w", "W", "mean power of all chips deployed", lambda d: d.estimate.power,
             "lower"),
    Quantity("chip_power_w", "W", "mean power of one chip", lambda d: d.estimate.chip_power,
             "lower"),
    Quantity("energy_per_output_token_j", "J/token",
             "energy per output token (decode's share of busy time)",
             lambda d: d.estimate.energy_per_output_token, "lower"),
    Quantity("energy_per_total_token_j", "J/token", "energy per input or output token",
             lambda d: d.estimate.energy_per_total_token, "lower"),
    Quantity("usd_per_million_output_tokens", "USD/1e6 token",
             "cost of a million output tokens (decode's share of busy time)",
             lambda d: _priced(d, MILLION * d.estimate.usd_per_output_token), "lower"),
    Quantity("usd_per_million_input_tokens", "USD/1e6 token",
             "cost of a million input tokens (prefill's share of busy time)",
             lambda d: _priced(d, MILLION * d.estimate.usd_per_input_token), "lower"),
    Quantity("usd_per_million_total_tokens", "USD/1e6 token",
             "cost of a million input or output tokens (undivided)",
             lambda d: _priced(d, MILLION * d.estimate.usd_per_total_token), "lower"),
    Quantity("usd_per_hour", "USD/h", "rent of all chips deployed",
             lambda d: _priced(d, d.machine.price * HOUR * d.estimate.chips), "lower",
             runs=False),
    Quantity("weight_bytes", "B", "weights on one chip", lambda d: d.estimate.weight_bytes,
             runs=False),
    Quantity("kv_bytes", "B", "KV cache on one chip at the running batch",
             lambda d: d.estimate.kv_bytes, runs=False),
    Quantity("activation_bytes", "B", "intermediate results on one chip",
             lambda d: d.estimate.activation_bytes, runs=False),
    Quantity("memory_bytes", "B", "memory used on one chip, workspace included",
             lambda d: d.estimate.memory_bytes, runs=False),
    Quantity("memory_margin", "1", "memory left beside one whole request, of a chip's capacity",
             lambda d: d.estimate.margins[MARGINS.index("memory")], runs=False),
    Quantity("kv_bytes_per_token", "B/token", "KV cache per token, over all layers and heads",
             lambda d: kv_bytes_per_token(d.model, d.precision), runs=False),
    _count("admitted", "request", "requests of a replica that fit the KV cache",
           lambda d: d.estimate.admitted),
    Quantity("running", "request", "requests of a replica that run at once",
             lambda d: d.estimate.running),
    Quantity("chunk_share", "1", "share of decode steps that carry a chunk of another's prompt",
             lambda d: d.estimate.chunk_share),
)  # fmt: skip
"""Every number reported, in the order in which it is listed."""

BY_NAME: Mapping[str, Quantity] = {quantity.name: quantity for quantity in QUANTITIES}

AXES = tuple(quantity.name for quantity in QUANTITIES if quantity.better)
"""Names of the numbers that can be an axis of a frontier."""

OF_DECODE = ("tpot_s", "longest_gap_s", "tokens_per_second_user")
"""Names of the numbers that exist with two or more output tokens only; NaN with one."""

TEXTS = {
    "binding": "what limits the design: a part of its step time, or the constraint it breaks",
    "advice": "the smallest change that helps, where the design is infeasible",
    "chip": "chip, by its name in the catalogue",
    "precision": "number formats: weights, activations and KV cache",
    "feasible": "whether every constraint holds",
}
"""Variables and coordinates that are no numbers, and what they mean."""


def read_all(design: Design) -> dict[str, Array]:
    """Returns every number of a design, its margins and the parts of its TPOT; traceable.

    What limits it is derived from these by `binding`, for the designs that are reported only.
    """
    values = {quantity.name: quantity.read(design) for quantity in QUANTITIES}
    return {**values, "margins": design.estimate.margins, "parts": design.estimate.parts}


def feasible(values: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns whether every constraint of these designs holds."""
    return np.all(np.asarray(values["margins"]) >= 0.0, axis=-1)


def binding(values: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns the names of what limits these designs, as `serving.Estimate.binding`.

    The constraint that is missed by most; else the KV cache where requests wait for it; else the
    largest part of a token's time, or the prefill where no token is decoded.
    """
    margins, parts = np.asarray(values["margins"]), np.asarray(values["parts"])
    names = np.asarray([*BINDING, "prefill"])
    waits = np.asarray(values["batch"]) > np.asarray(values["admitted"])
    largest = np.where(np.isnan(values["tpot_s"]), len(BINDING), np.argmax(parts, axis=-1))
    busiest = np.where(waits, len(PARTS), largest)
    missed = len(PARTS) + 1 + np.argmin(margins, axis=-1)
    return names[np.where(feasible(values), busiest, missed)]


def can_run(margins: np.ndarray) -> np.ndarray:
    """Returns whether designs with these margins (last axis) run at all."""
    needs = [MARGINS.index(name) for name in RUNNING_NEEDS]
    return np.all(margins[..., needs] >= 0.0, axis=-1)


def to_dataset(
    values: Mapping[str, Any], dims: Sequence[str], chip: Any, precision: Any
) -> xr.Dataset:
    """Returns numbers read by `read_all` as variables with units and long names.

    Args:
        values: arrays over `dims`. chip, precision: names over `dims`, the coordinates.
    """
    arrays = {name: np.asarray(value) for name, value in values.items()}
    runs = can_run(arrays["margins"])
    variables: dict[str, Any] = {}
    for quantity in QUANTITIES:
        value = arrays[quantity.name]
        if quantity.whole:
            value = np.rint(value).astype(np.int64)
        else:
            value = value.astype(float)
            value = np.where(runs, value, np.nan) if quantity.runs else value
        attrs = {"units": quantity.unit, "long_name": quantity.long_name}
        variables[quantity.name] = (tuple(dims), value, attrs)
    verdict = {"feasible": feasible(arrays), "binding": binding(arrays)}
    for name, value in verdict.items():
        variables[name] = (tuple(dims), value, _text_attrs(name))
    names = {"chip": chip, "precision": precision}
    coords = {
        name: (tuple(dims), np.asarray(value, dtype=str), _text_attrs(name))
        for name, value in names.items()
    }
    return xr.Dataset(variables, coords)


def _text_attrs(name: str) -> dict[str, str]:
    return {"units": "1", "long_name": TEXTS[name]}


def stamp() -> dict[str, str]:
    """Returns the attributes that say which version made a result, and when (UTC)."""
    from perfmodel import __version__

    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"version": __version__, "created": created}
