"""Signed margins of a design: what is left of each limit, relative; negative is infeasible."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from perfmodel.formats import Precision
from perfmodel.machine import Machine
from perfmodel.models.transformer import Model
from perfmodel.plan import UNLIMITED, Limits
from perfmodel.relax import Real, as_real, ceil, inverse, minimum
from perfmodel.step import Shard
from perfmodel.units import HOUR

MARGINS = (
    "memory", "kernel", "divisibility", "context length", "ttft limit", "tpot limit",
    "power limit", "footprint limit", "cost limit",
)  # fmt: skip
"""Signed margins in the order of `Estimate.margins`; a negative one is infeasible."""


class Taken(NamedTuple):
    """What chips take of power [W], footprint [racks] and cost [USD/s]; 0 where unknown."""

    power: Array
    racks: Array
    cost: Array


def taken(machine: Machine, chips: Real, dollars: Array) -> Taken:
    """Returns what so many chips take; `dollars` is their cost [USD/s]."""
    around = machine.site
    racked = as_real(around.rack_chips) > 0.0
    racks = jnp.where(racked, chips * inverse(jnp.where(racked, around.rack_chips, 1.0)), 0.0)
    return Taken(around.provisioned_power * chips, racks, dollars)


def budget_margins(asked: Limits, used: Taken) -> tuple[Array, ...]:
    """Returns what is left of power, footprint and cost, relative; −1 where a budget is asked for
    and what is taken is unknown."""
    amounts = (used.power, used.racks, used.cost * HOUR)
    limits = (asked.power, asked.racks, asked.cost)
    return tuple(
        jnp.where((amount > 0.0) | (limit >= UNLIMITED), (limit - amount) * inverse(limit), -1.0)
        for amount, limit in zip(amounts, map(as_real, limits), strict=True)
    )


def kernel_margin(machine: Machine, precision: Precision) -> Array:
    """Returns the least peak of the kernels in use over the 16-bit one; negative if none."""
    peaks = machine.kernels.peak
    least = jnp.sum(peaks * precision.kernel)
    least = minimum(least, jnp.sum(peaks * precision.expert_kernel))
    return least / peaks[0] - 1e-6


def divisibility(model: Model, shard: Shard) -> Array:
    """Returns minus how far the plan is from cutting heads, widths and experts into whole parts."""
    miss = as_real(0.0)
    for block in model.blocks:
        for whole in block.body.parts(shard):
            miss = miss + ceil(as_real(whole)) - whole
    # Rounding of a float32 quotient is not a remainder.
    return jnp.where(jnp.abs(miss) < 1e-3, 0.0, -miss)
