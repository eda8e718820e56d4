"""From datasheet and constants to a `Machine`: what all chip families share.

A family is a function of its own (`hbm_gpu`, `wafer`, `lpu` …) that says which number of its
datasheet plays which part; what it does not have keeps its neutral value here, and vanishes.
"""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jax import Array

from perfmodel.chips.datasheet import PEAK_FIELDS
from perfmodel.kernels import KERNELS
from perfmodel.machine import (
    TIERS,
    Compute,
    ContextAttention,
    ContextScans,
    DecodeAttention,
    Fabric,
    Floors,
    Kernels,
    LatentDecode,
    Machine,
    Memory,
    Mesh,
    Power,
    Products,
    Scans,
)
from perfmodel.relax import Real, as_real, maximum, minimum
from perfmodel.units import HOUR


def _vector(values: list[Real]) -> Array:
    """Returns an array of scalars, without a compilation where they are plain numbers."""
    if all(isinstance(value, int | float) for value in values):
        return jnp.asarray(np.asarray(values, dtype=float), dtype=float)
    return jnp.stack([jnp.asarray(value, dtype=float) for value in values])


def _per(power: Real, rate: Real) -> Real:
    """Returns the energy of one operation or byte [J]; 0 where the rate is 0."""
    if isinstance(rate, int | float):
        return power / rate if rate > 0 else 0.0
    # The division must be safe in the branch not taken, or its derivative is nan.
    present = rate > 0.0
    return jnp.where(present, power / jnp.where(present, rate, 1.0), 0.0)


TIER_NAMES = ("memory", "memory2", "memory3")
"""Fields of on-board memory tiers by their first part, fastest first; the host's is the last."""


def tiers(fields: Mapping[str, Real]) -> tuple[list[Real], list[Real], list[Real]]:
    """Returns capacity [B], bandwidth [B/s] and latency [s] of the `TIERS`, fastest first.

    The host's memory comes after those on board, over its link; an absent tier has no capacity
    and that link's bandwidth.
    """
    link = fields["host_link_bandwidth"]
    sizes, rates, delays = [], [], []
    for name in TIER_NAMES:
        if f"{name}_capacity" in fields:
            sizes.append(fields[f"{name}_capacity"])
            rates.append(fields[f"{name}_bandwidth"])
            delays.append(fields.get(f"{name}_latency", 0.0))
    sizes.append(fields.get("host_memory", 0.0))
    rest = TIERS - len(rates)
    delays += [fields.get("host_latency", 0.0)] * rest
    return sizes + [0.0] * (TIERS - len(sizes)), rates + [link] * rest, delays


def body(fields: Mapping[str, Real], constants: Mapping[str, Real]) -> Machine:
    """Returns the machine of a chip; differentiable in every number given.

    Args:
        fields: every number of `perfmodel.chips.datasheet.FIELDS` that `complete` gives, by name,
            in SI units (FLOP/s, B, B/s, s, W) and rent in USD/h.
        constants: every name of `perfmodel.chips.constants.CONSTANTS`.

    Energy: a chip that serves draws P_run before any work (clocks up, never less than at rest).
    At full use of one resource alone it draws a share κ of what is left to the limit (measured
    or assumed activity), so that with P the rate of that resource

        e = κ·(P_limit − P_run)/P_rate         per FLOP of each format, byte read, byte sent

    and a step's energy is P_run·t + Σ e·work. A byte through a network port costs the chip what
    a byte on a link does; the port's own power belongs to the server.

    Price: rent/3600 [USD/s], 0 where unknown.
    """
    running = maximum(constants["power.running"] * fields["tdp"], fields["idle_power"])
    dynamic = fields["tdp"] - running
    compute_power = constants["power.compute_activity"] * dynamic
    memory_power = constants["power.memory_activity"] * dynamic
    link_power = constants["power.link_activity"] * dynamic
    peaks = [fields[PEAK_FIELDS[kind]] for kind in KERNELS]
    spill = fields["host_link_bandwidth"]
    zero, one = as_real(0.0), as_real(1.0)
    sizes, rates, delays = tiers(fields)
    slow = fields.get("slow_memory_energy", 0.0)
    memory_energy = [_per(memory_power, rates[0]), *[slow] * (TIERS - 1)]
    link_energy = _per(link_power, fields["link_bandwidth"])

    energy = _vector([_per(compute_power, peak) for peak in peaks])

    def products(group: str) -> dict[str, Array]:
        names = ("efficiency", "stream", "floor", "split_latency", "quantise")
        return {n: _vector([constants[f"{group}.{k}.{n}"] for k in KERNELS]) for n in names}

    def part(group: str) -> dict[str, Real]:
        prefix = group + "."
        return {k.removeprefix(prefix): v for k, v in constants.items() if k.startswith(prefix)}

    return Machine(
        kernels=Kernels(peak=_vector(peaks), energy=energy, **products("kernels")),
        experts=Products(**products("experts")),
        compute=Compute(
            units=fields["units"],
            vector_peak=fields["peak_vector"],
            fill_rows=fields.get("array_rows", zero),
            pes=fields.get("elements", one),
            **part("compute"),
        ),
        decode=DecodeAttention(shards=fields.get("cores", one), **part("decode")),
        context=ContextAttention(**part("context")),
        latent_decode=LatentDecode(**part("latent_decode")),
        latent_context=ContextAttention(**part("latent_context")),
        scan=Scans(**part("scan")),
        context_scan=ContextScans(**part("context_scan")),
        memory=Memory(
            capacity=_vector(sizes),
            bandwidth=_vector(rates),
            energy=_vector(memory_energy),
            latency=_vector(delays),
            spill_bandwidth=spill,
            **part("memory"),
        ),
        fabric=Fabric(
            domain=fields["domain"],
            bandwidth=fields["link_bandwidth"],
            peer_bandwidth=fields["peer_bandwidth"],
            hop_time=fields.get("hop_time", zero),
            axes=fields.get("torus_axes", one),
            torus=minimum(fields.get("torus_axes", 0.0), 1.0),
            open_ends=fields.get("open_ends", zero),
            in_network=fields.get("in_network", zero),
            wire_bytes=fields.get("wire_bytes", 2.0),
            nic_bandwidth=fields["nic_bandwidth"],
            nic_efficiency=fields["nic_efficiency"],
            nic_latency=fields["nic_latency"],
            crossing_time=fields["link_latency"],
            crossing_seconds_per_byte=1.0 / fields["peer_bandwidth"],
            energy=link_energy,
            nic_energy=link_energy,
            **part("fabric"),
        ),
        mesh=Mesh(zero, zero, zero),
        floors=Floors(hosted=1.0 - fields.get("static", zero), **part("floors")),
        power=Power(idle=fields["idle_power"], running=running, limit=fields["tdp"]),
        price=fields["rent"] / HOUR,
    )
