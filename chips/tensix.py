"""Grids of cores with SRAM of their own, over graphics memory and Ethernet (Tenstorrent).

64 to 120 Tensix cores, each with 1.5 MB of SRAM that kernels fill themselves: there is no cache.
Results pass from kernel to kernel in SRAM; weights stream from GDDR6 (288 GB/s a Wormhole ASIC, 512
a Blackhole). Products are of tiles of 32 × 32, so that a batch below 32 costs as 32. Kernels follow
one another on the whole grid, each started on every core: a time per layer that no roofline has.
Chips join in a mesh of Ethernet links, one hop about a microsecond; an exchange is several kernels.

    step    Σ layers ‖FLOPs/(η_c·peak), weights/(η_m·W)‖ + serial + two exchanges

Llama-3.1-8B on an n150 at batch 32, block formats of 8 bits: 7.5 GB/288 GB/s = 26 ms; published
38.5 ms. 70B over the eight ASICs of a QuietBox: 8.8 GB each, 31 ms; published 63 ms, in which the
160 exchanges count. The share of bandwidth, the time per layer and that of an exchange are fitted.

Check points (`perfmodel/validation/tensix.csv`): the maker's table of November 2025. Limits: block
formats of 4 bits, which the maker's networks use for some products, are modelled as 8; blocks
carry 8.5 bits, not 8; which network runs on which of two n300 ASICs is the plan's `chips`.
"""

from collections.abc import Mapping

from perfmodel.chips.body import body
from perfmodel.machine import Machine
from perfmodel.relax import Real


def machine(fields: Mapping[str, Real], constants: Mapping[str, Real]) -> Machine:
    """Returns the machine of a Tensix chip; arguments as of `perfmodel.chips.body.body`."""
    return body(fields, constants)
