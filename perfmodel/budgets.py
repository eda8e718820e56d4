"""What all chips of a deployment may take together: power, footprint and cost, as numbers of chips.

    power      rated power of boards and hosts, without PUE [W]
    footprint  racks, by how many chips of a kind fit one
    cost       of an hour of all chips [USD/h]; of owned ones with electricity at the power limit

A search fills a deployment with as many chips as all three allow; whether a plan holds them is a
margin of its estimate, like a service level.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax

from perfmodel.ownership import spend
from perfmodel.question import Question
from perfmodel.units import HOUR, si

NAMES = {"power": "power limit", "racks": "footprint limit", "cost": "cost limit"}
"""Names of the margins, by the fields of `Budgets`."""

# A share that is computed in float32 may miss a whole number by a rounding.
_ROUNDING = 1e-5

_MISSING = {
    "power": ("rated power is unknown", "server_power"),
    "racks": ("chips in a rack are unknown", "rack_chips"),
    "cost": ("its price is unknown", "rent"),
}


class Share(NamedTuple):
    """What one chip takes of a budget: `used` (nan where unknown), and the `limit` for all."""

    used: float
    limit: float

    @property
    def chips(self) -> int:
        """The most chips that the budget allows; 0 where what one takes is unknown."""
        if math.isnan(self.used):
            return 0
        return int(math.floor(self.limit / self.used * (1.0 + _ROUNDING)))


class Allowed(NamedTuple):
    """The most `chips` of a kind, and what sets it: the name of a margin, or "max_chips"."""

    chips: int
    set_by: str


def shares(asked: Question, chip: int) -> dict[str, Share]:
    """Returns what a chip takes of each budget that is asked for, by the fields of `Budgets`."""
    machine = jax.tree.map(lambda leaf: leaf[chip], asked.machines)
    around, price = machine.site, float(machine.price)
    paid = spend(machine.price, around, machine.power.limit)
    each = {
        "power": float(around.provisioned_power),
        "racks": 1.0 / racked if (racked := float(around.rack_chips)) else 0.0,
        "cost": float(paid) * HOUR if price else 0.0,
    }
    return {
        name: Share(each[name] or math.nan, limit)
        for name, limit in asked.budgets._asdict().items()
        if limit is not None
    }


def allowed(asked: Question, chip: int, most: int | None) -> Allowed | None:
    """Returns the most chips of a kind that budgets and `most` allow; None where neither is set.

    Of what is unknown 0 chips are allowed.
    """
    found = [Allowed(share.chips, NAMES[name]) for name, share in shares(asked, chip).items()]
    if most is not None:
        found.insert(0, Allowed(most, "max_chips"))
    return min(found, key=lambda one: one.chips, default=None)


def amount(name: str, value: float) -> str:
    """Returns an amount of a budget in words.

    >>> amount("power", 5.1e4), amount("racks", 0.5), amount("cost", 23.6)
    ('51 kW', '0.5 racks', '$23.6/h')
    """
    if name == "power":
        return si(value, "W", 4)
    if name == "racks":
        return f"{value:.4g} {'rack' if value == 1.0 else 'racks'}"
    return f"${value:.4g}/h"


def words(asked: Question, chip: int, name: str, chips: int) -> str:
    """Returns why so many chips break a budget and the least that would hold them, on one line."""
    share, kind = shares(asked, chip)[name], asked.chips[chip].name
    if math.isnan(share.used):
        why, field = _MISSING[name]
        price = f" or --price {kind}=USD" if name == "cost" and asked.owner == "rented" else ""
        return f"{why} (give {field} in a sheet of your own{price})"
    count = f"{chips:,} {'chip takes' if chips == 1 else 'chips take'}"
    need = _upward(share.used * chips)
    return (
        f"{count} {amount(name, share.used * chips)} of {amount(name, share.limit)}; "
        f"allow {amount(name, need)}"
    )


def _upward(value: float) -> float:
    """Returns a value of four digits that is no less."""
    step = 10.0 ** (math.floor(math.log10(value)) - 3)
    # A budget that is missed by a rounding holds.
    return math.ceil(value / step * (1.0 - _ROUNDING)) * step


def table(asked: Question, most: int | None) -> dict[str, tuple[str, list, dict[str, str]]]:
    """Returns the chips of each kind that are allowed along `candidate`, and what sets it."""
    found: Sequence[Allowed | None] = [
        allowed(asked, chip, most) for chip in range(len(asked.chips))
    ]
    if all(limit is None for limit in asked.budgets):
        return {}
    chips = [one.chips if one is not None else 0 for one in found]
    by = [one.set_by if one is not None else "" for one in found]
    return {
        "candidate_allowed_chips": (
            "candidate", chips, {"units": "chip", "long_name": "chips that the budgets allow"},
        ),
        "candidate_allowed_by": (
            "candidate", by, {"units": "1", "long_name": "what keeps it from more chips"},
        ),
    }  # fmt: skip


def attributes(asked: Question) -> dict[str, float]:
    """Returns the budgets asked for as attributes of a result."""
    keys = ("max_power_w", "max_racks", "max_cost_usd_per_hour")
    pairs = zip(keys, asked.budgets, strict=True)
    return {key: float(limit) for key, limit in pairs if limit is not None}
