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
from perfmodel.margins import MARGINS
from perfmodel.models.transformer import Model, kv_bytes_per_token
from perfmodel.ownership import spend
from perfmodel.plan import Plan
from perfmodel.relax import as_real, maximum, minimum
from perfmodel.serving import BINDING, PARTS, Estimate
from perfmodel.units import HOUR, KILOWATT, MILLION

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


def _hourly(design: Design, fixed: Array) -> Array:
    """Returns the cost of an hour of all chips, of a fixed price per second [USD/h]."""
    around, power = design.machine.site, design.estimate.chip_power
    return _priced(design, spend(fixed, around, power) * HOUR * design.estimate.chips)


def _at(design: Design, fixed: Array, dollars: Array) -> Array:
    """Returns dollars as they would be at another fixed price per second."""
    machine, power = design.machine, design.estimate.chip_power
    # An unknown price is 0 with all that follows; it is blank, and must not divide.
    priced = jnp.where(machine.price > 0.0, spend(machine.price, machine.site, power), 1.0)
    return _priced(design, dollars * spend(fixed, machine.site, power) / priced)


def _wall(design: Design) -> Array:
    """Returns power at the wall over board power: host and PUE."""
    around, power = design.machine.site, design.estimate.chip_power
    return (power + around.host_power) * around.pue / power


def _per_output(design: Design, per_total: Array) -> Array:
    """Returns all that is spent over output tokens, from what is spent per token."""
    found = design.estimate
    return per_total * (found.isl + found.osl) / found.osl


def _per_input(design: Design, per_total: Array) -> Array:
    """Returns prefill's share by busy time over input tokens, from what is spent per token."""
    found = design.estimate
    return per_total * (found.isl + found.osl) / found.isl * found.prefill_busy


def _known(amount: Array) -> Array:
    """Returns an amount, nan where it is unknown (0)."""
    return jnp.where(amount > 0.0, amount, jnp.nan)


def _decoding(design: Design, value: Array) -> Array:
    # One output token comes with the prefill: no step decodes.
    return jnp.where(design.estimate.osl > 1.0, value, jnp.nan)


PER: Mapping[str, tuple[str, str, Callable[[Design], Array]]] = {
    "chip": ("token/s/chip", "chip", lambda d: jnp.asarray(1.0)),
    "kw": ("token/s/kW", "kW provisioned (rated power of chips and hosts, without PUE)",
           lambda d: KILOWATT / _known(d.machine.site.provisioned_power)),
    "usd": ("token/s/(USD/h)", "USD an hour",
            lambda d: d.estimate.chips / _hourly(d, d.machine.price)),
    "rack": ("token/s/rack", "rack", lambda d: _known(d.machine.site.rack_chips)),
}  # fmt: skip
"""What throughput is counted per: unit, words, and the chips that it takes; nan where unknown."""


def _throughputs(per: str) -> tuple["Quantity", "Quantity"]:
    """Returns output tokens, and all tokens, per second and something."""
    unit, words, chips = PER[per]
    return (
        Quantity(f"output_tokens_per_second_{per}", unit, f"output tokens per second per {words}",
                 lambda d: d.estimate.output_rate_per_chip * chips(d), "higher"),
        Quantity(f"total_tokens_per_second_{per}", unit,
                 f"input and output tokens per second per {words}",
                 lambda d: d.estimate.total_rate_per_chip * chips(d), "higher"),
    )  # fmt: skip


def _count(name: str, unit: str, long_name: str, read: Callable[[Design], Array]) -> Quantity:
    return Quantity(name, unit, long_name, read, runs=False, whole=True)


def _choice(degree: Array | None) -> Array:
    """Returns a degree of parallelism that a plan may leave out."""
    return as_real(1.0 if degree is None else degree)


# Name, meaning, and how it follows from the estimate.
_ENERGY = (
    ("energy_per_output_token", "output token (decode's share of busy time)",
     lambda d: d.estimate.energy_per_output_token),
    ("energy_per_input_token", "input token (prefill's share of busy time)",
     lambda d: _per_input(d, d.estimate.energy_per_total_token)),
    ("energy_per_total_token", "input or output token (undivided)",
     lambda d: d.estimate.energy_per_total_token),
    ("energy_per_output_token_undivided", "output token, that of input tokens included",
     lambda d: _per_output(d, d.estimate.energy_per_total_token)),
)  # fmt: skip

_ENERGIES = (
    *(Quantity(f"{name}_j", "J/token", f"board energy per {words}", read, "lower")
      for name, words, read in _ENERGY),
    *(Quantity(f"wall_{name}_j", "J/token", f"energy at the wall per {words}",
               lambda d, read=read: read(d) * _wall(d), "lower")
      for name, words, read in _ENERGY),
)  # fmt: skip

QUANTITIES: tuple[Quantity, ...] = (
    _count("tp", "chip", "chips of a stage (tensor-parallel degree)",
           lambda d: maximum(d.plan.width, 1.0)),
    _count("pp", "1", "pipeline stages, or chips of a pipeline with several on each",
           lambda d: minimum(d.plan.chips, d.plan.stages)),
    _count("ep", "1", "expert-parallel degree, of the chips of a stage",
           lambda d: _choice(d.plan.expert_ranks)),
    _count("attention_dp", "1", "attention groups of a stage (attention data parallelism)",
           lambda d: _choice(d.plan.attention_dp)),
    _count("cp", "1", "chips over which a sequence's keys are spread (context parallelism)",
           lambda d: _choice(d.plan.context_ranks)),
    _count("regions", "1", "pipeline stages side by side on one chip",
           lambda d: maximum(d.plan.stages / d.plan.chips, 1.0)),
    Quantity("offload", "1", "share of slower memories that is used",
             lambda d: as_real(0.0 if d.plan.offload is None else d.plan.offload), runs=False),
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
    *(quantity for per in PER for quantity in _throughputs(per)),
    Quantity("output_tokens_per_second", "token/s", "output tokens per second of the deployment",
             lambda d: d.estimate.output_rate * d.plan.replicas, "higher"),
    Quantity("requests_per_second", "request/s", "requests finished per second by the deployment",
             lambda d: d.estimate.request_rate * d.plan.replicas, "higher"),
    Quantity("power_w", "W", "mean power of all chips deployed", lambda d: d.estimate.power,
             "lower"),
    Quantity("chip_power_w", "W", "mean power of one chip", lambda d: d.estimate.chip_power,
             "lower"),
    Quantity("wall_power_w", "W", "mean power at the wall of all chips deployed: hosts and PUE",
             lambda d: d.estimate.power * _wall(d), "lower"),
    Quantity("provisioned_power_w", "W",
             "rated power of all chips deployed and their hosts, without PUE",
             lambda d: d.machine.site.provisioned_power * d.estimate.chips, "lower", runs=False),
    *_ENERGIES,
    Quantity("usd_per_million_output_tokens", "USD/1e6 token",
             "cost of a million output tokens (decode's share of busy time)",
             lambda d: _priced(d, MILLION * d.estimate.usd_per_output_token), "lower"),
    Quantity("usd_per_million_input_tokens", "USD/1e6 token",
             "cost of a million input tokens (prefill's share of busy time)",
             lambda d: _priced(d, MILLION * d.estimate.usd_per_input_token), "lower"),
    Quantity("usd_per_million_total_tokens", "USD/1e6 token",
             "cost of a million input or output tokens (undivided)",
             lambda d: _priced(d, MILLION * d.estimate.usd_per_total_token), "lower"),
    Quantity("usd_per_million_output_tokens_undivided", "USD/1e6 token",
             "cost of a million output tokens, that of input tokens included",
             lambda d: _priced(d, MILLION * _per_output(d, d.estimate.usd_per_total_token)),
             "lower"),
    *(Quantity(f"usd_per_million_output_tokens_{end}", "USD/1e6 token",
               f"cost of a million output tokens at the {end} end of the price's range",
               lambda d, end=end: _at(d, getattr(d.machine.site, f"price_{end}"),
                                      MILLION * d.estimate.usd_per_output_token))
      for end in ("low", "high")),
    Quantity("usd_per_hour", "USD/h",
             "cost of an hour of all chips deployed: rent, or capital and electricity",
             lambda d: _hourly(d, d.machine.price), "lower"),
    *(Quantity(f"usd_per_hour_{end}", "USD/h",
               f"cost of an hour of all chips deployed at the {end} end of the price's range",
               lambda d, end=end: _hourly(d, getattr(d.machine.site, f"price_{end}")))
      for end in ("low", "high")),
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
    Quantity("preempted", "1", "times that a request gives up its memory, and is computed again",
             lambda d: d.estimate.preempted),
)  # fmt: skip
"""Every number reported, in the order in which it is listed."""

BY_NAME: Mapping[str, Quantity] = {quantity.name: quantity for quantity in QUANTITIES}

AXES = tuple(quantity.name for quantity in QUANTITIES if quantity.better)
"""Names of the numbers that can be an axis of a frontier."""

THROUGHPUTS: Mapping[str, tuple[str, ...]] = {
    per: tuple(f"{tokens}_tokens_per_second_{per}" for tokens in ("output", "total")) for per in PER
}
"""Names of the throughputs, by what they are counted per."""


def per_axis(axis: str, per: str) -> str:
    """Returns a throughput counted per something else; any other axis as it is.

    >>> per_axis("total_tokens_per_second_chip", "kw"), per_axis("ttft_s", "kw")
    ('total_tokens_per_second_kw', 'ttft_s')
    """
    names = next((names for names in THROUGHPUTS.values() if axis in names), ())
    return THROUGHPUTS[per][names.index(axis)] if names else axis


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
