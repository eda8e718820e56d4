"""What a chip-hour costs, rented or owned, and what surrounds a chip where it runs.

Three ownership models, by the names in `MODELS`:

    rented   the rent; electricity and everything else is in it
    list     capital at list price, and electricity
    cost     capital at the estimated cost of making the chip, and electricity

Owned, with K the capital of a chip and its share of a server, n the lifetime in years, i the
interest, u the share of the lifetime that is spent serving, P the modelled board power:

    CRF      i/(1 − (1 + i)⁻ⁿ), which is 1/n without interest
    host     H = max(demand·rated server power − board power limit, 0)
    wall     (P + H)·PUE
    USD/s    K·CRF/(u · year) + tariff·PUE·(P + H + (1/u − 1)·(P_idle + H))

Buildings, networks between servers and staff are not in it. Pure functions of arrays,
differentiable in every number; 0 marks what is unknown, and an unknown price makes the whole
cost 0, which is reported as blank. The defaults are in `ownership.toml`, each with its source.
"""

import functools
from collections.abc import Mapping
from importlib.resources import files

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from perfmodel import catalog
from perfmodel.catalog import Field, Number, Sheet
from perfmodel.relax import Real, as_real, inverse, maximum
from perfmodel.units import HOUR, KWH, YEAR

MODELS = ("rented", "list", "cost")
"""Names of the ownership models, in the order of `Ownership.model`."""

FIELDS = (
    Field("electricity", "USD/kWh", "price of electricity", 0.0, 10.0, True),
    Field("pue", "1", "power usage effectiveness: site power over servers'", 1.0, 5.0, True),
    Field("lifetime", "year", "over which capital is recovered", 0.1, 50.0, True),
    Field("interest", "1/year", "cost of capital", 0.0, 1.0, True),
    Field("utilisation", "1", "share of the lifetime spent serving", 0.01, 1.0, True),
    Field("host_price", "1", "list price of its share of a server, over the chip's", 0, 10, True),
    Field("host_cost", "USD", "cost of a chip's share of its server", 0.0, 1e7, True),
    Field("host_power", "1", "rated power of its share of a server, over tdp", 0, 10, True),
    Field("demand", "1", "most that a server draws, share of its rated power", 0.1, 1.0, True),
)  # fmt: skip
"""The numbers of `ownership.toml`; all are known."""


class Economics(eqx.Module):
    """What the datasheet of a chip says of money and power; 0 where unknown.

    Fields:
        rent: [USD/s]; purchase, server, cost: a chip at list price, the same with its share of
            a server, and a chip at the cost of making it [USD]; each as (value, low, high),
            shape [3], equal where there is no range.
        tdp, idle: board power limit, and at rest [W]; server_power: rated, per chip [W].
        rack_chips: chips in a rack.
    """

    rent: Array
    purchase: Array
    server: Array
    cost: Array
    tdp: Real
    idle: Real
    server_power: Real
    rack_chips: Real


class Ownership(eqx.Module):
    """Who pays what. `model` weighs `MODELS`, shape [3], one of them 1.

    Others as `FIELDS`, in SI units: `electricity` [USD/J], `lifetime` in years and `interest` per
    year as people state them, `host_cost` [USD], the rest are shares.
    """

    model: Array
    electricity: Real
    pue: Real
    lifetime: Real
    interest: Real
    utilisation: Real
    host_price: Real
    host_cost: Real
    host_power: Real
    demand: Real


def _real(default: float) -> Array:
    return eqx.field(converter=as_real, default=default)


class Site(eqx.Module):
    """What surrounds one chip where it runs; every default is neutral.

    Fields:
        pue: site power over power of servers.
        host_power: what the chip's share of its server draws beside the board [W].
        provisioned_power: rated power of board and host, without PUE [W]; 0 where unknown.
        rack_chips: chips in a rack; 0 where unknown.
        tariff: electricity paid beside the price, PUE included [USD/J]; 0 where it is in the rent.
        standing_power: paid for by `tariff` beside the mean board power [W].
        price_low, price_high: range of `Machine.price` [USD/s].
    """

    pue: Array = _real(1.0)
    host_power: Array = _real(0.0)
    provisioned_power: Array = _real(0.0)
    rack_chips: Array = _real(0.0)
    tariff: Array = _real(0.0)
    standing_power: Array = _real(0.0)
    price_low: Array = _real(0.0)
    price_high: Array = _real(0.0)


def recovery(lifetime: Real, interest: Real) -> Array:
    """Returns the share of a capital to be paid each year to recover it with interest (CRF).

    >>> round(float(recovery(5.0, 0.06)), 4), round(float(recovery(5.0, 0.0)), 4)
    (0.2374, 0.2)
    """
    # At 0 the quotient is 0/0; this is its limit to six digits.
    rate = maximum(as_real(interest), 1e-6)
    return -rate / jnp.expm1(-lifetime * jnp.log1p(rate))


def capital(economics: Economics, ownership: Ownership) -> Array:
    """Returns a chip with its share of a server at list price and at cost [USD], shape [2, 3].

    A known price of the server or rack comes before a share of the chip's.
    """
    known, costed = economics.server > 0.0, economics.cost > 0.0
    listed = jnp.where(known, economics.server, economics.purchase * (1.0 + ownership.host_price))
    made = jnp.where(costed, economics.cost + ownership.host_cost, 0.0)
    return jnp.stack([listed, made])


def fixed_rate(economics: Economics, ownership: Ownership) -> Array:
    """Returns what a second of a chip costs beside electricity [USD/s]: (value, low, high).

    Owned, it is a second of serving: idle time is paid for by the time that serves.
    """
    yearly = recovery(ownership.lifetime, ownership.interest) * inverse(ownership.utilisation)
    owned = capital(economics, ownership) * (yearly / YEAR)
    # A sum over models, none of them nan: unknown prices are 0.
    return jnp.sum(ownership.model[:, None] * jnp.stack([economics.rent, *owned]), axis=0)


def site(economics: Economics, ownership: Ownership) -> Site:
    """Returns what surrounds the chip, and what it pays for there."""
    price, low, high = fixed_rate(economics, ownership)
    server = jnp.where(
        as_real(economics.server_power) > 0.0,
        economics.server_power,
        economics.tdp * (1.0 + ownership.host_power),
    )
    host = maximum(ownership.demand * server - economics.tdp, 0.0)
    idle = inverse(ownership.utilisation) - 1.0
    # Rent has electricity in it, and an unknown price leaves the whole cost unknown.
    pays = (1.0 - ownership.model[0]) * jnp.where(price > 0.0, 1.0, 0.0)
    return Site(
        pue=ownership.pue,
        host_power=host,
        provisioned_power=server,
        rack_chips=economics.rack_chips,
        tariff=ownership.electricity * ownership.pue * pays,
        standing_power=host + idle * (economics.idle + host),
        price_low=low,
        price_high=high,
    )


def spend(price: Array, around: Site, chip_power: Array) -> Array:
    """Returns what a second of a chip costs [USD/s], electricity included; 0 where unknown.

    Args:
        price: fixed [USD/s]. chip_power: mean board power [W].
    """
    return price + around.tariff * (chip_power + around.standing_power)


def usd_per_chip_hour(economics: Economics, ownership: Ownership, chip_power: Real) -> Array:
    """Returns the cost of a chip-hour [USD/h]; 0 where the price it follows from is unknown.

    Args:
        chip_power: modelled mean board power [W].

    >>> three = jnp.ones(3)
    >>> chip = Economics(3 / HOUR * three, 30e3 * three, 0 * three, 4e3 * three, 700.0, 100.0,
    ...                  1200.0, 32.0)
    >>> rented, owned = (Ownership(jnp.asarray(model), 0.1 / KWH, 1.5, 5.0, 0.0, 1.0, 0.2, 4e3,
    ...                            0.8, 1.0) for model in ([1.0, 0, 0], [0, 1.0, 0]))
    >>> round(float(usd_per_chip_hour(chip, rented, 500.0)), 3)
    3.0

    36,000 USD over 43,800 h, and (500 + 500) W · 1.5 · 0.1 USD/kWh:

    >>> round(float(usd_per_chip_hour(chip, owned, 500.0)), 3)
    0.972
    """
    price = fixed_rate(economics, ownership)[0]
    return HOUR * spend(price, site(economics, ownership), as_real(chip_power))


# ---- From catalogues ----


def economics(fields: Mapping[str, Number]) -> Economics:
    """Returns the economics in the numbers of a chip (`Chip.fields`)."""

    def span(name: str, unit: float = 1.0) -> Array:
        number = fields[name]
        value = number.value or 0.0
        bounds = (number.low, number.high) if value else (None, None)
        found = [value, *(value if bound is None else bound for bound in bounds)]
        return as_real([each / unit for each in found])

    def value(name: str) -> float:
        return float(fields[name].value or 0.0)

    return Economics(
        rent=span("rent", HOUR),
        purchase=span("purchase"),
        server=span("server_purchase"),
        cost=span("manufacturing_cost"),
        tdp=value("tdp"),
        idle=value("idle_power"),
        server_power=value("server_power"),
        rack_chips=value("rack_chips"),
    )


@functools.cache
def defaults() -> Sheet:
    """Returns the numbers of `ownership.toml`, with their sources."""
    path = files("perfmodel").joinpath("ownership.toml")
    tables, where = catalog.read_toml(path), catalog.label(path)
    sources = catalog.parse_sources(tables.pop("sources", {}), where)
    numbers = catalog.parse_numbers(tables, FIELDS, sources, where)
    return Sheet("ownership", {}, numbers, sources, where)


def owner(model: str, numbers: Mapping[str, Number]) -> Ownership:
    """Returns an ownership model with the numbers of `FIELDS`.

    >>> float(owner("list", defaults().numbers).lifetime)
    5.0
    """
    values = {name: as_real(number.value or 0.0) for name, number in numbers.items()}
    values["electricity"] = values["electricity"] / KWH
    return Ownership(model=as_real([float(model == name) for name in MODELS]), **values)
