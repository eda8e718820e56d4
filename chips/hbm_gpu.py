"""GPUs with stacked or graphics memory: datasheet and kernel constants to a `Machine`.

The physics of kernels is in `perfmodel.machine` and `perfmodel.fabric`; this module says which
number of a GPU plays which part there. What a GPU does not have (a mesh, a systolic fill, fast
tiers above its memory, a serial floor per layer) stays neutral.

Check points, from the numbers of the catalogue (`tests/test_chips.py` computes them):

| chip | what | published | source |
|---|---|---|---|
| H100, A100, B200 | best bf16 product | 794.5, 271, 1745 TFLOP/s | ML Engineering, measured |
| H100 | all-reduce of 8, 16 KiB / 2 MiB / 32 MiB | 3.6 / 35.5 / 197 µs | AIConfigurator tables |
| B200 | all-reduce of 8, 64 KiB | 6.0 µs | AIConfigurator tables |
| MI300X | rate between two chips of the mesh | one link of seven, 64 GB/s | AMD |
| H200 | at rest and loaded | 80 and 593 W | measured |
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
)
from perfmodel.relax import Real, as_real, maximum
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


def machine(fields: Mapping[str, Real], constants: Mapping[str, Real]) -> Machine:
    """Returns the machine of a GPU; differentiable in every number given.

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

    >>> from perfmodel.chips import constants
    >>> sheet = dict(peak_bf16=1e15, peak_fp8=0.0, peak_int8=0.0, peak_fp4=0.0, peak_vector=5e13,
    ...     units=100.0, memory_capacity=8e10, memory_bandwidth=2e12, link_bandwidth=4e11,
    ...     peer_bandwidth=4e11, domain=8.0, link_latency=1e-5, nic_bandwidth=5e10,
    ...     nic_efficiency=0.7, nic_latency=4e-6, host_link_bandwidth=6e10, tdp=700.0,
    ...     idle_power=100.0, rent=3.6)
    >>> activity = {"power.memory_activity": 0.5}
    >>> gpu = machine(sheet, {**constants.neutral(), **activity})
    >>> float(gpu.memory.energy[0] * 2e12), float(gpu.price)     # 0.5·(700 − 100) W at full rate
    (300.0, 0.001)
    """
    running = maximum(constants["power.running"] * fields["tdp"], fields["idle_power"])
    dynamic = fields["tdp"] - running
    compute_power = constants["power.compute_activity"] * dynamic
    memory_power = constants["power.memory_activity"] * dynamic
    link_power = constants["power.link_activity"] * dynamic
    peaks = [fields[PEAK_FIELDS[kind]] for kind in KERNELS]
    spill = fields["host_link_bandwidth"]
    absent = [0.0] * (TIERS - 1)
    zero, one, two = as_real(0.0), as_real(1.0), as_real(2.0)
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
            fill_rows=zero,
            pes=one,
            **part("compute"),
        ),
        decode=DecodeAttention(shards=one, **part("decode")),
        context=ContextAttention(**part("context")),
        latent_decode=LatentDecode(**part("latent_decode")),
        latent_context=ContextAttention(**part("latent_context")),
        memory=Memory(
            capacity=_vector([fields["memory_capacity"], *absent]),
            bandwidth=_vector([fields["memory_bandwidth"], *[spill] * (TIERS - 1)]),
            energy=_vector([_per(memory_power, fields["memory_bandwidth"]), *absent]),
            spill_bandwidth=spill,
            **part("memory"),
        ),
        fabric=Fabric(
            domain=fields["domain"],
            bandwidth=fields["link_bandwidth"],
            peer_bandwidth=fields["peer_bandwidth"],
            hop_time=zero,
            axes=one,
            wire_bytes=two,
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
        floors=Floors(serial=zero, launch=zero),
        power=Power(idle=fields["idle_power"], running=running, limit=fields["tdp"]),
        price=fields["rent"] / HOUR,
    )
