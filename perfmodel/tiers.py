"""Memory tiers: which bytes of a chip lie where, and what a byte of each then costs.

Weights W and keys and values K are laid over the tiers of a chip, fastest first, in three passes:
a share z of the weights, then all keys, then the rest of the weights. z = 1 keeps weights in the
fastest tier, z = 0 keys; between, the split is continuous and bytes are conserved. What no tier
holds comes over the spill link, and is the negative memory margin.

A pass takes from tier i what is free, g = min(free, x). Parts lie whole in one tier, so times add:

    seconds per byte of W   Σ (W in tier i)/(W·bandwidth i)

Corsair, 8 GB of weights over 2 GB at 150 TB/s and the rest at 400 GB/s: 15 ms a token, against
20 ms from the slow memory alone.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from perfmodel.machine import Machine, Placed
from perfmodel.relax import Real, as_real, inverse, maximum, minimum


class Fill(NamedTuple):
    """Bytes of weights and of keys by tier, shape [TIERS] each, and what no tier holds of them."""

    weights: Array
    cache: Array
    spilt_weights: Array
    spilt_cache: Array


def capacity(machine: Machine, fraction: Real, offload: Real | None) -> list[Array]:
    """Returns the usable bytes of each tier.

    Args:
        machine: the chip.
        fraction: share of the fastest tier that an engine may use.
        offload: share of each slower one that is used; None where none is.
    """
    sizes = machine.memory.capacity
    first = sizes[0] * fraction
    return [first] if offload is None else [first, *(sizes[1:] * offload)]


def fill(free: Sequence[Array], weights: Real, cache: Real, weights_first: Real) -> Fill:
    """Returns where weights and keys lie.

    >>> found = fill([as_real(2.0), as_real(9.0), as_real(0.0), as_real(0.0)], 8.0, 1.0, 1.0)
    >>> found.weights.tolist(), found.cache.tolist()
    ([2.0, 6.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0])
    """
    left = [maximum(as_real(room), 0.0) for room in free]

    def lay(amount: Array) -> tuple[list[Array], Array]:
        parts = []
        for tier, room in enumerate(left):
            part = minimum(room, amount)
            left[tier], amount = room - part, amount - part
            parts.append(part)
        return parts, amount

    early, spilt_early = lay(as_real(weights * weights_first))
    keys, spilt_keys = lay(as_real(cache))
    late, spilt_late = lay(as_real(weights) - as_real(weights * weights_first))
    both = [a + b for a, b in zip(early, late, strict=True)]
    return Fill(jnp.stack(both), jnp.stack(keys), spilt_early + spilt_late, spilt_keys)


def place(
    machine: Machine, free: Sequence[Array], weights: Real, cache: Real, weights_first: Real
) -> Placed:
    """Returns what a byte of weights and of keys costs as they are laid out.

    Args:
        machine: the chip.
        free: bytes of each of the `TIERS` that weights and keys may take.
        weights, cache: bytes of both on the chip [B].
        weights_first: share of the weights placed before any keys, 0 to 1.
    """
    memory = machine.memory
    found = fill(free, weights, cache, weights_first)
    seconds, spill = inverse(memory.bandwidth), inverse(memory.spill_bandwidth)

    def mean(parts: Array, spilt: Array, each: Array, beyond: Array) -> Array:
        # One byte more in the fastest tier, so that a mean over nothing is that tier's.
        total = jnp.sum(parts) + spilt + 1.0
        return (jnp.sum(parts * each) + spilt * beyond + each[0]) * inverse(total)

    def weights_of(each: Array, beyond: Array) -> Array:
        return mean(found.weights, found.spilt_weights, each, beyond)

    def cache_of(each: Array, beyond: Array) -> Array:
        return mean(found.cache, found.spilt_cache, each, beyond)

    return Placed(
        weight_seconds=weights_of(seconds, spill),
        cache_seconds=cache_of(seconds, spill),
        weight_joules=weights_of(memory.energy, memory.energy[-1]),
        cache_joules=cache_of(memory.energy, memory.energy[-1]),
        latency=weights_of(memory.latency, memory.latency[-1]),
    )
