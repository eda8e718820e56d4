"""What is asked, checked: names become entries and numbers before anything is traced.

Whatever is wrong is an `InputError` of one line naming the argument and the nearest valid value.
What is understood but does not fit is not an error here: it is a margin of the result.
"""

import dataclasses
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from perfmodel import catalog, chips, engines
from perfmodel import ownership as owning
from perfmodel.catalog import Number
from perfmodel.chips import Chip
from perfmodel.engines import EngineEntry
from perfmodel.errors import InputError, nearest, shorten
from perfmodel.formats import Precision, PrecisionName, precision_name, precision_numbers
from perfmodel.machine import Machine
from perfmodel.models import catalogue as networks
from perfmodel.models.attention import GroupedQueryAttention
from perfmodel.models.catalogue import ModelEntry
from perfmodel.models.config import WITHOUT_TOWER
from perfmodel.models.mlp import MixtureOfExperts
from perfmodel.models.transformer import UNSPREAD, Block, Model
from perfmodel.plan import UNLIMITED, Limits, Load
from perfmodel.step import Shard
from perfmodel.units import HOUR

ModelLike = str | os.PathLike[str] | ModelEntry
ChipLike = str | os.PathLike[str] | Chip
EngineLike = str | os.PathLike[str] | EngineEntry

_MOST = 1_000_000_000
_MOST_DOLLARS = 1e5


class Budgets(NamedTuple):
    """What all chips may take together: rated power with hosts [W], racks, and cost [USD/h]."""

    power: float | None = None
    racks: float | None = None
    cost: float | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Question:
    """Checked inputs: entries for people, and their numbers as arrays for programs.

    Fields: `machines` and `precisions` are stacked, one row per entry of `chips` and `formats`;
    `prices` says what each chip is taken to cost, `owner` who pays it, `site` the power and
    price assumptions around a chip, and `budgets` what all chips may take together.
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
    owner: str
    site: str
    budgets: Budgets

    def supports(self, chip: int, format_: int) -> bool:
        """Returns whether a chip has the kernel of a precision."""
        return set(self.formats[format_].kernels) <= set(self.chips[chip].supported)

    def _skew(self) -> dict[str, str]:
        """Returns how routers prefer some experts, nothing where they do not."""
        bodies = (block.body for block in self.network.blocks)
        found = (b.routing for b in bodies if isinstance(b, MixtureOfExperts))
        exponent = next((each for each in found if each is not None), None)
        return {} if exponent is None else {"routing": f"power law, exponent {float(exponent):g}"}

    def _images(self) -> dict[str, float]:
        """Returns images and their tokens in a prompt, nothing where there are none."""
        if self.load.images is None or self.network.encoder is None:
            return {}
        images = float(self.load.images)
        return {"images": images, "image_tokens": images * float(self.network.encoder.tokens)}

    def _notes(self) -> dict[str, str]:
        """Returns what the file asks for beyond the model; a tower is not, where it is served."""
        served = self.network.encoder is not None
        notes = [note for note in self.model.notes if not (served and note == WITHOUT_TOWER)]
        return {"notes": "; ".join(notes)} if notes else {}

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
            **self._images(),
            **self._skew(),
            "engine": self.engine.name,
            "catalogue": json.dumps(digests),
            "catalogue_digest": catalog.digest(digests),
            "ownership": self.owner,
            "price_assumption": "; ".join(self.prices),
            "site_assumption": self.site,
            "host_assumed": ", ".join(
                chip.name for chip in self.chips if not chip.fields["server_power"].value
            ),
            **self._notes(),
        }


def prefer(model: Model, exponent: float | None) -> Model:
    """Returns a network whose routers prefer some experts by a power law; as it is where None."""
    if exponent is None:
        return model

    def skewed(block: Block) -> Block:
        if not isinstance(block.body, MixtureOfExperts):
            return block
        return dataclasses.replace(block, body=dataclasses.replace(block.body, routing=exponent))

    return dataclasses.replace(model, blocks=tuple(map(skewed, model.blocks)))


def skew(routing: float | None) -> float | None:
    """Returns the exponent of a power law of routing, None where it is even."""
    if routing is None:
        return None
    said = "the exponent of a power law, 0 (even) to below 3"
    return real_number("routing", routing, 0.0, 3.0, said) or None


def _routing(model: ModelEntry, routing: float | None) -> float | None:
    exponent = skew(routing)
    if exponent and not model.model.is_mixture:
        raise InputError(f"routing: {model.name} has no experts to route to (nearest: 0)")
    return exponent


def _images(model: ModelEntry, images: float | None, isl: int) -> float | None:
    """Returns the images of a prompt, None where there are none."""
    if not images:
        return None
    count = real_number("images", images, 0.0, _MOST, "a number of images, 0 or more")
    tower = model.encoder
    if tower is None:
        why = "has no image encoder in its config.json"
        if WITHOUT_TOWER in model.notes:
            why = "has an image encoder whose sizes its config.json does not give"
        raise InputError(f"images: {model.name} {why} (nearest: 0)")
    tokens = float(tower.tokens)
    if count * tokens > isl:
        raise InputError(
            f"images: {count:g} × {tokens:,g} tokens exceed the {isl:,} prompt tokens (isl) that "
            f"they are part of (nearest: {math.floor(isl / tokens)})"
        )
    return count


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
    ownership: str = "rented",
    electricity: float | None = None,
    pue: float | None = None,
    lifetime: float | None = None,
    routing: float | None = None,
    most: Budgets | None = None,
    images: float | None = None,
) -> Question:
    """Returns the question that public functions ask, every part of it checked."""
    network = find_model(model)
    machines = unique_chips(named_chips(chip_list))
    exponent = _routing(network, routing)
    load = _load(network, isl, osl, prefix_hit)
    load = dataclasses.replace(load, images=numbers(_images(network, images, int(load.isl))))
    tower = None if load.images is None else network.encoder
    profile = engine if isinstance(engine, EngineEntry) else engines.load_engine(engine)
    if isinstance(price, Mapping):
        known = {chip.name: chip.sheet.identity["aliases"] for chip in machines}
        named = [catalog.resolve(name, known, "priced chip") for name in price]
        twice = next((name for name in named if named.count(name) > 1), None)
        if twice is not None:
            raise InputError(f"price: {twice} is given more than once")
        price = dict(zip(named, price.values(), strict=True))
    terms = _terms(ownership, electricity=electricity, pue=pue, lifetime=lifetime)
    paid = [_price(chip, price, ownership, terms) for chip in machines]
    return Question(
        model=network,
        chips=machines,
        formats=tuple(formats),
        engine=profile,
        load=load,
        limits=_limits(osl, slo_ttft, slo_tpot, most),
        network=numbers(dataclasses.replace(prefer(network.model, exponent), encoder=tower)),
        machines=stack([machine for machine, _ in paid]),
        precisions=stack([precision_numbers(names) for names in formats]),
        prices=tuple(text for _, text in paid),
        owner=ownership,
        site=_site_text(ownership, terms),
        budgets=most or Budgets(),
    )


def paid_machines(
    chip_list: Sequence[Chip],
    price: float | None,
    ownership: str,
    electricity: float | None,
    pue: float | None,
    lifetime: float | None,
) -> Machine:
    """Returns the machines of chips as they are paid for, stacked; arguments as of `ask`."""
    terms = _terms(ownership, electricity=electricity, pue=pue, lifetime=lifetime)
    return stack([_price(chip, price, ownership, terms)[0] for chip in chip_list])


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


def named_chips(chip_list: Sequence[ChipLike]) -> Sequence[ChipLike]:
    """Returns chips with the name "all" replaced by every name of the catalogue.

    >>> len(named_chips("all")) == len(chips.names()), named_chips(["h100"])
    (True, ['h100'])
    """
    listed = [chip_list] if isinstance(chip_list, str | os.PathLike | Chip) else chip_list
    return [each for item in listed for each in (chips.names() if item == "all" else [item])]


def unique_chips(chip_list: Sequence[ChipLike]) -> tuple[Chip, ...]:
    """Returns the chips by name or path, or as given, each once."""
    found: dict[str, Chip] = {}
    for item in chip_list:
        chip = item if isinstance(item, Chip) else chips.load_chip(item)
        if found.setdefault(chip.name, chip).digest != chip.digest:
            raise InputError(f"chips: two different chips are named {shorten(chip.name)!r}")
    if not found:
        raise InputError("chips: at least one is needed")
    return tuple(found.values())


def assumed_of(chip: Chip) -> str:
    """Returns the datasheet numbers that are assumed of a chip and count in a result, with commas.

    >>> assumed_of(chips.load_chip("h100"))
    'link_latency, nic_efficiency, nic_latency'
    """
    # Rents are told apart, with their kind; the others are facts to show.
    aside = (
        "rent", "purchase", "server_purchase", "manufacturing_cost", "server_power",
        "cache_capacity", "chips_per_node", "rack_chips",
        # Only plans that offload use them.
        "host_memory", "slow_memory_energy",
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


def real_number(name: str, value: Any, low: float, high: float, said: str) -> float:
    """Returns a number in [low, high), or fails naming the argument and what was `said` of it."""
    try:
        number = float("nan") if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not low <= number < high:
        raise InputError(f"{name}: must be {said}, not {_shown(value)}")
    return number


def share(name: str, value: Any) -> float:
    """Returns a number from 0 to 1, or fails naming the argument."""
    return real_number(name, value, 0.0, math.nextafter(1.0, 2.0), "a share from 0 to 1")


def _limit(name: str, value: float | None) -> float:
    if value is None:
        return Limits().ttft
    return real_number(name, value, math.ulp(0.0), math.inf, "a positive number of seconds")


# What fits exactly must not miss by a rounding of float32.
_EXACT = 1.0 + 1e-5


def budgets(max_power: float | None, max_racks: float | None, max_cost: float | None) -> Budgets:
    """Returns the budgets asked for, checked."""
    said = {"max_power": "watts", "max_racks": "racks", "max_cost": "US dollars an hour"}
    given = zip(said.items(), (max_power, max_racks, max_cost), strict=True)
    return Budgets(
        *(
            None if value is None
            else real_number(name, value, math.ulp(0.0), UNLIMITED, f"a positive number of {unit}")
            for (name, unit), value in given
        )
    )  # fmt: skip


def _limits(
    osl: int, slo_ttft: float | None, slo_tpot: float | None, most: Budgets | None
) -> Limits:
    found = Limits(_limit("slo_ttft", slo_ttft), _limit("slo_tpot", slo_tpot))
    # With one output token there is no time per token that could be too long.
    found = found if osl > 1 else Limits(ttft=found.ttft)
    asked = {n: v * _EXACT for n, v in (most or Budgets())._asdict().items() if v is not None}
    return dataclasses.replace(found, **asked)


def _load(model: ModelEntry, isl: int, osl: int, prefix_hit: float) -> Load:
    isl, osl = whole("isl", isl), whole("osl", osl)
    hit = real_number("prefix_hit", prefix_hit, 0.0, 1.0, "a share from 0 to below 1")
    longest = int(model.model.max_context)
    if isl + osl > longest:
        raise InputError(
            f"isl + osl: {isl:,} + {osl:,} tokens exceed the longest context of {model.name}, "
            f"{longest:,}"
        )
    return numbers(Load(isl=isl, osl=osl, prefix_hit=hit))


# Numbers of `ownership.FIELDS` that a rent has in it.
_OWNED = ("electricity", "lifetime", "interest", "utilisation", "host_price", "host_cost")


def _terms(model: str, **given: float | None) -> dict[str, Number]:
    """Returns the numbers of an ownership model, with those given in place of the catalogue's."""
    if model not in owning.MODELS:
        raise InputError(
            f"ownership: unknown model {shorten(model, 30)!r}{nearest(model, owning.MODELS)}"
        )
    terms = dict(owning.defaults().numbers)
    for field in owning.FIELDS:
        value = given.get(field.name)
        if value is None:
            continue
        if model == "rented" and field.name in _OWNED:
            raise InputError(f"{field.name}: a rent has it in it; ask for ownership list or cost")
        said = f"{field.low:g} to {field.high:g} {field.unit}".removesuffix(" 1")
        most = math.nextafter(field.high, math.inf)
        number = real_number(field.name, value, field.low, most, said)
        terms[field.name] = Number(number, field.unit, "given")
    return terms


def _span(number: Number) -> str:
    """Returns where a number comes from, with its range."""
    low, high = number.low, number.high
    return f"{number.kind}{'' if low is None or high is None else f', {low:,g} to {high:,g}'}"


def _site_text(model: str, terms: Mapping[str, Number]) -> str:
    """Returns the assumptions around a chip in words, those that count under an ownership model."""
    aside = {"rented": _OWNED, "list": ("host_cost",), "cost": ("host_price",)}[model]
    shown = {name: number for name, number in terms.items() if name not in aside}
    return "; ".join(
        f"{name.replace('_', ' ')} {number.value:,g}{f' {number.unit}'.removesuffix(' 1')} "
        f"({_span(number)})"
        for name, number in shown.items()
    )


def _price(
    chip: Chip,
    price: float | Mapping[str, float] | None,
    model: str,
    terms: Mapping[str, Number],
) -> tuple[Machine, str]:
    """Returns a chip's machine as it is paid for, and what the price is in words."""
    given = price.get(chip.name) if isinstance(price, Mapping) else price
    economics, owner = owning.economics(chip.fields), owning.owner(model, terms)
    if given is not None:
        if model != "rented":
            raise InputError(
                f"price: it is a rent, and ownership is {model}; leave one of them out"
            )
        most = math.nextafter(_MOST_DOLLARS, math.inf)
        said = f"US dollars per chip and hour, at most {_MOST_DOLLARS:,.0f}"
        dollars = real_number("price", given, 0.0, most, said)
        rent = np.full(3, dollars / HOUR)
        economics = eqx.tree_at(lambda e: e.rent, economics, rent)
        text = f"{chip.name} {dollars:g} USD/h as given"
    elif model == "rented":
        text = _price_text(chip, "rent")
    elif model == "list" and chip.fields["server_purchase"].value:
        text = f"{_price_text(chip, 'server_purchase')} a chip with its server"
    else:
        field = "purchase" if model == "list" else "manufacturing_cost"
        text = _price_text(chip, field)
    fixed, around = owning.fixed_rate(economics, owner), owning.site(economics, owner)
    where = lambda m: (m.price, m.site)  # noqa: E731
    return eqx.tree_at(where, chip.machine, (fixed[0], around)), text


def _price_text(chip: Chip, field: str) -> str:
    number = chip.fields[field]
    if number.value is None:
        return f"{chip.name} unknown"
    return f"{chip.name} {number.value:,g} {number.unit} ({_span(number)})"


def cuts(model: Model, shard: Shard) -> bool:
    """Returns whether a shard cuts every layer into whole heads, columns and experts."""
    wholes = (whole for block in model.blocks for whole in block.body.parts(shard))
    return all(abs(whole - round(float(whole))) < 1e-9 * whole for whole in wholes)


def degrees(model: Model, most: int | None = None) -> list[int]:
    """Returns the tensor-parallel degrees that cut every layer into whole heads and columns.

    Past their number kv heads are replicated, so a degree may also be a multiple of it.

    >>> degrees(networks.load_model("llama-3.3-70b").model)
    [1, 2, 4, 8, 16, 32, 64]
    """
    limit = min(int(block.body.heads) for block in model.attention)
    return [d for d in range(1, min(limit, most or limit) + 1) if cuts(model, Shard(d))]


class Layout(NamedTuple):
    """Degrees of parallelism of a replica: chips of a stage, stages, and how a stage is cut.

    With `regions`, each of the `pp` chips of a pipeline has so many stages side by side.
    """

    tp: int
    pp: int
    ep: int
    attention_dp: int
    cp: int
    regions: int = 1

    @property
    def chips(self) -> int:
        """Chips of a replica."""
        return self.tp * self.pp

    def text(self) -> str:
        """Returns the degrees in words; those of 1 are left out.

        >>> Layout(4, 1, 1, 1, 1).text(), Layout(8, 2, 8, 4, 1).text()
        ('TP4', 'TP8 PP2 EP8 DP4')
        >>> Layout(1, 4, 1, 1, 1, 20).text()  # four chips with 20 stages each
        'TP1 PP4×20'
        """
        words = [f"TP{self.tp}", f"PP{self.pp}×{self.regions}" if self.regions > 1 else ""]
        names = zip(("PP", "EP", "DP", "CP"), self[1:5], strict=True)
        words += [f"{n}{d}" for n, d in names if d > 1 and not (n == "PP" and self.regions > 1)]
        return " ".join(filter(None, words))


def layouts(
    model: Model,
    most: int,
    pps: Sequence[int] = (1,),
    cps: Sequence[int] = (1,),
    tps: Sequence[int] | None = None,
) -> list[Layout]:
    """Returns every layout of at most `most` chips that cuts the network into whole parts.

    `pps`, `cps` and `tps` are the pipeline stages, context ranks and chips of a stage to try; None
    tries any number of the latter.

    Attention groups and expert ranks are a mixture's: for a dense network they change nothing
    that more replicas would not.
    """
    heads = min(int(block.body.heads) for block in model.attention)
    experts = [b.body.experts for b in model.blocks if isinstance(b.body, MixtureOfExperts)]
    found = []
    largest = min(most, max(heads, *experts, 0))
    for tp in range(1, largest + 1) if tps is None else (tp for tp in tps if tp <= largest):
        parts = divisors(tp)
        for dp, ep in itertools.product(parts, parts) if model.is_mixture else ((1, 1),):
            # What a group cannot cut over more ranks is not worth looking at.
            if tp // dp > heads:
                continue
            for cp, pp in itertools.product(cps, pps):
                shard = Shard(
                    tp, attention_groups=dp if model.is_mixture else None, context_ranks=cp,
                    expert_ranks=ep if model.is_mixture else None,
                )  # fmt: skip
                if tp * pp <= most and pp <= model.layers and cuts(model, shard):
                    found.append(Layout(tp, pp, ep, dp, cp))
    return found


REGIONS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128)
"""Stages side by side on a chip that are tried."""


def pipelines(model: Model, most: int, regions: int) -> list[Layout]:
    """Returns the layouts of at most `most` chips in a pipeline, each with stages side by side.

    Args: the network; most chips; most stages on one chip.
    """
    layers = int(model.layers)
    return [
        Layout(1, chips, 1, 1, 1, stages)
        for chips in range(1, min(most, layers) + 1)
        for stages in REGIONS
        if stages <= regions and chips * stages <= layers
    ]


def check_degrees(
    model: ModelEntry,
    tp: int,
    pp: int,
    ep: int = 1,
    attention_dp: int = 1,
    cp: int = 1,
    regions: int = 1,
) -> None:
    """Raises where a plan does not cut the network into whole parts."""
    network = model.model
    if ep > 1 and not network.is_mixture:
        raise InputError(f"ep: {model.name} has no experts to spread (nearest: 1)")
    for name, degree in (("ep", ep), ("attention_dp", attention_dp)):
        if tp % degree:
            near = _near(degree, divisors(tp))
            raise InputError(f"{name}: {degree} does not divide the {tp} chips of a stage{near}")
    if tp // attention_dp % cp:
        ranks = tp // attention_dp
        near = _near(cp, divisors(ranks))
        raise InputError(f"cp: {cp} does not divide the {ranks} chips of an attention group{near}")

    def shard(tp: int = tp, ep: int = ep) -> Shard:
        groups = attention_dp if attention_dp > 1 else None
        return Shard(tp, attention_groups=groups, context_ranks=cp, expert_ranks=ep)

    unspread = (b.body for b in network.attention if isinstance(b.body, UNSPREAD))
    if cp > 1 and next(unspread, None) is not None:
        raise InputError(
            f"cp: {cp} ranks cannot share the keys of {model.name}: not modelled for keys that are "
            "chosen by blocks or compressed, nor for recurrent states (nearest: 1)"
        )
    if not cuts(network, shard()):
        body = network.attention[0].body
        heads = f"{body.heads} heads"
        if isinstance(body, GroupedQueryAttention):
            heads += f" and {body.kv_heads} kv heads"
        if cuts(network, shard(ep=1)):
            valid = [d for d in divisors(tp) if cuts(network, shard(ep=d))]
            raise InputError(
                f"ep: {ep} does not cut the experts of {model.name} at tp {tp}{_near(ep, valid)}"
            )
        valid = degrees(network)
        if attention_dp > 1:
            most = max(valid) * attention_dp
            valid = [
                d for d in range(attention_dp, most + 1, attention_dp) if cuts(network, shard(d, 1))
            ]
        raise InputError(f"tp: {tp} does not cut the {heads} of {model.name}{_near(tp, valid)}")
    if regions > 1 and tp > 1:
        raise InputError(f"regions: {regions} stages on one chip leave no room for tp {tp} (use 1)")
    if pp * regions > network.layers:
        name, told = ("regions", f"{pp} × {regions}") if regions > 1 else ("pp", str(pp))
        raise InputError(
            f"{name}: {told} stages exceed the {network.layers} layers of {model.name}"
        )


def divisors(number: int) -> list[int]:
    """Returns the divisors of a whole number.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return low + [number // d for d in reversed(low) if d * d != number]


def _near(wanted: int, valid: Sequence[int]) -> str:
    if not valid:
        return " (no other fits the rest of the plan)"
    near = min(valid, key=lambda d: (abs(math.log(d / wanted)), d))
    listed = valid if len(valid) <= 16 else [*valid[:15], "…"]
    return f" (nearest: {near}; valid: {', '.join(map(str, listed))})"


def check_kernel(chip: Chip, names: PrecisionName) -> None:
    """Raises where a chip has no kernel for a precision."""
    for kernel in names.kernels:
        if kernel not in chip.supported:
            has = ", ".join(chip.supported)
            raise InputError(f"{chip.name} has no {kernel} kernel for {names} (it has: {has})")


def parse_precision(text: str | PrecisionName) -> PrecisionName:
    """Returns a precision from the names of its formats: `weights` or `weights/activations/kv`.

    Routed experts in another format follow after a plus sign: `weights` or `weights/activations`.

    >>> str(parse_precision("fp8")), str(parse_precision("int4/bf16/fp8"))
    ('fp8', 'int4/bf16/fp8')
    >>> str(parse_precision("bf16+mxfp4"))
    'bf16+mxfp4/bf16'
    """
    if isinstance(text, PrecisionName):
        return text
    both = text.split("+") if isinstance(text, str) else []
    parts, *routed = [[part.strip() for part in half.split("/")] for half in both] or [[]]
    experts = routed[0] if routed else []
    good = len(parts) in (1, 3) and len(routed) < 2 and len(experts) < 3
    if not good or not all((*parts, *experts)):
        raise InputError(
            f"precision: must be a format or weights/activations/kv, not {shorten(text, 40)!r}"
        )
    activations, kv = parts[1:] or (None, None)
    return precision_name(parts[0], activations, kv, *experts)


def own_precision(
    model: ModelEntry, weights: str | None, activations: str | None, kv: str | None
) -> PrecisionName:
    """Returns the precision asked for; what is left out is what the model's file asks for."""
    if weights is not None:
        return precision_name(weights, activations, kv)
    own = model.precision
    experts = own.experts[:2] if own.experts is not None else ()
    return precision_name(own.weights, activations or own.activations, kv or own.kv, *experts)


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
