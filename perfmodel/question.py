"""What is asked, checked: names become entries and numbers before anything is traced.

Whatever is wrong is an `InputError` of one line naming the argument and the nearest valid value.
What is understood but does not fit is not an error here: it is a margin of the result.
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from perfmodel import catalog, chips, engines
from perfmodel.chips import Chip
from perfmodel.engines import EngineEntry
from perfmodel.errors import InputError, shorten
from perfmodel.formats import Precision, PrecisionName, precision, precision_name
from perfmodel.machine import Machine
from perfmodel.models import catalogue as networks
from perfmodel.models.catalogue import ModelEntry
from perfmodel.models.transformer import Model
from perfmodel.plan import Limits, Load
from perfmodel.units import HOUR

ModelLike = str | os.PathLike[str] | ModelEntry
ChipLike = str | os.PathLike[str] | Chip
EngineLike = str | os.PathLike[str] | EngineEntry

CHUNK = 2048
"""Prompt tokens in one step where none are asked for; the default of vLLM's scheduler."""

_MOST = 1_000_000_000
_MOST_DOLLARS = 1e5


@dataclasses.dataclass(frozen=True, eq=False)
class Question:
    """Checked inputs: entries for people, and their numbers as arrays for programs.

    Fields: `machines` and `precisions` are stacked, one row per entry of `chips` and `formats`;
    `prices` says what each chip is taken to cost.
    """

    model: ModelEntry
    chips: tuple[Chip, ...]
    formats: tuple[PrecisionName, ...]
    engine: EngineEntry
    load: Load
    limits: Limits
    network: Model
    machines: Machine
    precisions: Precision
    prices: tuple[str, ...]

    def supports(self, chip: int, format_: int) -> bool:
        """Returns whether a chip has the kernel of a precision."""
        return self.formats[format_].kernel in self.chips[chip].supported

    def attributes(self, call: str) -> dict[str, Any]:
        """Returns what a result must carry to be traced back to its inputs."""
        digests = {
            "model": self.model.digest,
            "engine": self.engine.digest,
            "chips": {chip.name: chip.digest for chip in self.chips},
        }
        return {
            "call": call,
            "model": self.model.name,
            "architecture": architecture(self.model.model),
            "isl": int(self.load.isl),
            "osl": int(self.load.osl),
            "prefix_hit": float(self.load.prefix_hit),
            "engine": self.engine.name,
            "catalogue": json.dumps(digests),
            "catalogue_digest": catalog.digest(digests),
            "price_assumption": "; ".join(self.prices),
            **({"notes": "; ".join(self.model.notes)} if self.model.notes else {}),
        }


def ask(
    model: ModelLike,
    chip_list: Sequence[ChipLike],
    formats: Sequence[PrecisionName],
    *,
    isl: int,
    osl: int,
    prefix_hit: float,
    engine: EngineLike,
    slo_ttft: float | None,
    slo_tpot: float | None,
    price: float | Mapping[str, float] | None,
) -> Question:
    """Returns the question that public functions ask, every part of it checked."""
    network = find_model(model)
    machines = unique_chips(chip_list)
    profile = engine if isinstance(engine, EngineEntry) else engines.load_engine(engine)
    if isinstance(price, Mapping):
        known = {chip.name: chip.sheet.identity["aliases"] for chip in machines}
        named = [catalog.resolve(name, known, "priced chip") for name in price]
        twice = next((name for name in named if named.count(name) > 1), None)
        if twice is not None:
            raise InputError(f"price: {twice} is given more than once")
        price = dict(zip(named, price.values(), strict=True))
    paid = [_price(chip, price) for chip in machines]
    return Question(
        model=network,
        chips=machines,
        formats=tuple(formats),
        engine=profile,
        load=_load(network, isl, osl, prefix_hit),
        limits=_limits(osl, slo_ttft, slo_tpot),
        network=numbers(network.model),
        machines=stack([machine for machine, _ in paid]),
        precisions=stack([precision(f.weights, f.activations, f.kv) for f in formats]),
        prices=tuple(text for _, text in paid),
    )


def real() -> Any:
    """Returns the floating-point type in use: float32, or float64 under x64."""
    return jnp.result_type(float)


def numbers(tree: Any) -> Any:
    """Returns `tree` with every leaf a floating-point array; on the host, so nothing compiles."""
    kind = real()
    return jax.tree.map(lambda leaf: np.asarray(leaf, dtype=kind), tree)


def stack(trees: Sequence[Any]) -> Any:
    """Returns one tree with the leaves of equal trees stacked along a new first axis."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *map(numbers, trees))


def architecture(model: Model) -> str:
    """Returns a digest of a network's shape, equal for checkpoints that differ in weights only."""
    return catalog.digest({"leaves": [float(leaf) for leaf in jax.tree.leaves(model)]})


def find_model(model: ModelLike) -> ModelEntry:
    """Returns a network by name or path, or as given."""
    return model if isinstance(model, ModelEntry) else networks.load_model(model)


def unique_chips(chip_list: Sequence[ChipLike]) -> tuple[Chip, ...]:
    """Returns the chips by name or path, or as given, each once."""
    if isinstance(chip_list, str | os.PathLike | Chip):
        chip_list = [chip_list]
    found: dict[str, Chip] = {}
    for item in chip_list:
        chip = item if isinstance(item, Chip) else chips.load_chip(item)
        if found.setdefault(chip.name, chip).digest != chip.digest:
            raise InputError(f"chips: two different chips are named {shorten(chip.name)!r}")
    if not found:
        raise InputError("chips: at least one is needed")
    return tuple(found.values())


def kernels_of(chip: Chip) -> str:
    """Returns whose kernel measurements a chip uses: "its own", the name of a chip of its
    generation, or "its family" where there are neither.

    >>> kernels_of(chips.load_chip("h100")), kernels_of(chips.load_chip("h200"))
    ('its own', 'h100_sxm')
    """
    matter = ("kernels.", "decode.", "context.")
    origins = {row.origin for row in chip.numbers() if row.field.startswith(matter)}
    if "own fit" in origins:
        return "its own"
    kin = sorted(origin.split(" ")[0] for origin in origins if "same generation" in origin)
    return kin[0] if kin else "its family"


def assumed_of(chip: Chip) -> str:
    """Returns the datasheet numbers that are assumed of a chip and count in a result, with commas.

    >>> assumed_of(chips.load_chip("h100"))
    'link_latency, nic_efficiency, nic_latency'
    """
    # Rents are told apart, with their kind; the others are facts to show.
    aside = (
        "rent", "purchase", "server_purchase", "manufacturing_cost", "server_power",
        "cache_capacity",
    )  # fmt: skip
    found = (row for row in chip.numbers() if row.field in chip.fields and row.kind == "assumed")
    return ", ".join(row.field for row in found if row.value and row.field not in aside)


def whole(name: str, value: Any, low: int = 1, high: int = _MOST) -> int:
    """Returns a whole number in a range, or fails naming the argument."""
    try:
        number = int(value)
        good = not isinstance(value, bool | str) and number == value
    except (TypeError, ValueError, OverflowError):
        number, good = 0, False
    if not good:
        raise InputError(f"{name}: must be a whole number, not {_shown(value)}")
    if not low <= number <= high:
        bound = f"at least {low}" if number < low else f"at most {high:,}"
        raise InputError(f"{name}: must be {bound}, not {shorten(number, 30)}")
    return number


def _shown(value: Any) -> str:
    return f"'{shorten(value, 30)}'" if isinstance(value, str) else shorten(value, 30)


def _real(name: str, value: Any, low: float, high: float, said: str) -> float:
    try:
        number = float("nan") if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not low <= number < high:
        raise InputError(f"{name}: must be {said}, not {_shown(value)}")
    return number


def _limit(name: str, value: float | None) -> float:
    if value is None:
        return Limits().ttft
    return _real(name, value, math.ulp(0.0), math.inf, "a positive number of seconds")


def _limits(osl: int, slo_ttft: float | None, slo_tpot: float | None) -> Limits:
    found = Limits(_limit("slo_ttft", slo_ttft), _limit("slo_tpot", slo_tpot))
    # With one output token there is no time per token that could be too long.
    return found if osl > 1 else Limits(ttft=found.ttft)


def _load(model: ModelEntry, isl: int, osl: int, prefix_hit: float) -> Load:
    isl, osl = whole("isl", isl), whole("osl", osl)
    hit = _real("prefix_hit", prefix_hit, 0.0, 1.0, "a share from 0 to below 1")
    longest = int(model.model.max_context)
    if isl + osl > longest:
        raise InputError(
            f"isl + osl: {isl:,} + {osl:,} tokens exceed the longest context of {model.name}, "
            f"{longest:,}"
        )
    return numbers(Load(isl=isl, osl=osl, prefix_hit=hit))


def _price(chip: Chip, price: float | Mapping[str, float] | None) -> tuple[Machine, str]:
    """Returns a chip's machine at the price asked for, and what the price is in words."""
    given = price.get(chip.name) if isinstance(price, Mapping) else price
    if given is not None:
        most = math.nextafter(_MOST_DOLLARS, math.inf)
        said = f"US dollars per chip and hour, at most {_MOST_DOLLARS:,.0f}"
        dollars = _real("price", given, 0.0, most, said)
        machine = eqx.tree_at(lambda m: m.price, chip.machine, dollars / HOUR)
        return machine, f"{chip.name} {dollars:g} USD/h as given"
    rent = chip.fields["rent"]
    if rent.value is None:
        return chip.machine, f"{chip.name} unknown"
    span = f", {rent.low:g} to {rent.high:g}" if rent.low is not None and rent.high else ""
    return chip.machine, f"{chip.name} {rent.value:g} USD/h ({rent.kind}{span})"


def degrees(model: Model, most: int | None = None) -> list[int]:
    """Returns the tensor-parallel degrees that cut every layer into whole heads and columns.

    Past their number kv heads are replicated, so a degree may also be a multiple of it.

    >>> degrees(networks.load_model("llama-3.3-70b").model)
    [1, 2, 4, 8, 16, 32, 64]
    """
    limit = min(int(block.mixer.heads) for block in model.blocks)

    def cuts(degree: int) -> bool:
        for block in model.blocks:
            kv = int(block.mixer.kv_heads)
            replicated = degree % kv == 0 if degree > kv else kv % degree == 0
            if block.mixer.heads % degree or block.ffn.intermediate % degree or not replicated:
                return False
        return True

    return [d for d in range(1, min(limit, most or limit) + 1) if cuts(d)]


def check_degrees(model: ModelEntry, tp: int, pp: int) -> None:
    """Raises where a plan does not cut the network into whole parts."""
    valid = degrees(model.model)
    if tp not in valid:
        near = min(valid, key=lambda d: (abs(math.log(d / tp)), d))
        block = model.model.blocks[0]
        heads = f"{block.mixer.heads} heads and {block.mixer.kv_heads} kv heads"
        listed = ", ".join(map(str, valid))
        raise InputError(
            f"tp: {tp} does not cut the {heads} of {model.name} (nearest: {near}; valid: {listed})"
        )
    if pp > model.model.layers:
        raise InputError(f"pp: {pp} stages exceed the {model.model.layers} layers of {model.name}")


def check_kernel(chip: Chip, names: PrecisionName) -> None:
    """Raises where a chip has no kernel for a precision."""
    if names.kernel not in chip.supported:
        has = ", ".join(chip.supported)
        raise InputError(f"{chip.name} has no {names.kernel} kernel for {names} (it has: {has})")


def parse_precision(text: str | PrecisionName) -> PrecisionName:
    """Returns a precision from the names of its formats: `weights` or `weights/activations/kv`.

    >>> str(parse_precision("fp8")), str(parse_precision("int4/bf16/fp8"))
    ('fp8', 'int4/bf16/fp8')
    """
    if isinstance(text, PrecisionName):
        return text
    parts = [part.strip() for part in text.split("/")] if isinstance(text, str) else []
    if len(parts) not in (1, 3) or not all(parts):
        raise InputError(
            f"precision: must be a format or weights/activations/kv, not {shorten(text, 40)!r}"
        )
    return precision_name(*parts)


def own_precision(
    model: ModelEntry, weights: str | None, activations: str | None, kv: str | None
) -> PrecisionName:
    """Returns the precision asked for; what is left out is what the model's file asks for."""
    if weights is not None:
        return precision_name(weights, activations, kv)
    own = model.precision
    return precision_name(own.weights, activations or own.activations, kv or own.kv)


def described(function: str, *args: Any, **kwargs: Any) -> str:
    """Returns a call as it could be typed, without arguments left at None."""

    def show(value: Any) -> str:
        if isinstance(value, ModelEntry | Chip | EngineEntry):
            return repr(value.name)
        if isinstance(value, os.PathLike):
            return repr(os.fspath(value))
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(show, value))}]"
        return repr(value)

    listed = [show(arg) for arg in args]
    listed += [f"{key}={show(value)}" for key, value in kwargs.items() if value is not None]
    return f"perfmodel.{function}({', '.join(listed)})"
