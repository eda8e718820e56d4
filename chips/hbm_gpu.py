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

from perfmodel.chips.body import body
from perfmodel.machine import Machine
from perfmodel.relax import Real


def machine(fields: Mapping[str, Real], constants: Mapping[str, Real]) -> Machine:
    """Returns the machine of a GPU; differentiable in every number given.

    All of `perfmodel.chips.body`, and no more. A second memory (a Grace processor's, over its
    link) is a slower tier.

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
    return body(fields, constants)
