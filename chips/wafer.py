"""Wafers of processing elements with their own SRAM (Cerebras WSE-2, WSE-3): weights stay resident.

A layer lies on a region of the mesh, regions form a pipeline over a wafer and over wafers in
series: a plan's `regions` stages a wafer, so that a stage is w = 1/regions of one. Peak, SRAM
bandwidth and elements scale with w. What sets a user's speed is neither, but the sums across the
mesh: a matrix–vector product leaves partial sums in every row of elements, which travel the side
of the region. With P = √(elements·w) elements along it and a clock f,

    one sum or broadcast     r·(2P + 16√P)/f                 there and back; a two-level tree
    eight of them a layer    four products, two in attention, two norms
    bytes on an edge         4 B a cycle and element:  e·b/(4·P·f) for e results of b bytes

The cycles are those of WaferLLM (arXiv:2502.04563) and of reductions on the mesh (arXiv:2404.15888:
(2·T+1) cycles a hop); r is fitted, once for all wafers. A wafer is bound by arithmetic, not SRAM,
even at batch one: 15.6 PFLOP/s over 21 PB/s is 0.74 FLOP a byte, and 16-bit weights need one.

By hand, 70B on four WSE-3, 80 layers, 20 regions each: P = √(900,000/20) = 212,
(2·212 + 16·14.6)/1.1 GHz = 0.60 µs a sum at r = 1, 4.8 µs a layer; products 856 M·2 FLOP at
0.8·15.6 PFLOP/s/20 = 2.7 µs; together 7 µs, about 1,800 tok/s, against 2,100 published.

What a full pipeline makes is in `perfmodel.stages`: 146,000 tokens/s of those 80 regions.

Check points (`perfmodel/validation/wafer.csv`): one request on a WSE-2, Llama-3-8B 2,700 tok/s,
measured (WaferLLM); WSE-3, 70B 2,100 and 405B 969 tok/s. The launch figures of 2024-08 (1,800 and
450) are slower by the same factor of four: software of another age.

Memory behind SRAM is MemoryX, over the 1.2 Tb/s port: weight streaming, for training and very
large batches. Limits: no defects, no routing around them; every sum takes the whole side; no
placement of keys on other regions; clock and dense peak are not published (assumed).
"""

from collections.abc import Mapping

import equinox as eqx

from perfmodel.chips.body import body
from perfmodel.machine import Machine, Mesh
from perfmodel.relax import Real, divide

HOP_CYCLES = 2.0
"""Cycles of a sum per element along the side: there and back. Source: arXiv:2404.15888."""

TREE_CYCLES = 16.0
"""Cycles per square root of the side, of the two levels of a tree. Source: arXiv:2404.15888."""

EDGE_BYTES = 4.0
"""Bytes that an element passes on in a cycle: a 32-bit wavelet. Source: Cerebras, Hot Chips."""


def machine(fields: Mapping[str, Real], constants: Mapping[str, Real]) -> Machine:
    """Returns the machine of a wafer; differentiable in every number given.

    Args: as of `perfmodel.chips.body.body`; `clock` [Hz] and `elements` must be among the fields.
    """
    cycle = divide(1.0, fields["clock"])
    reduction = constants["mesh.reduction"]
    mesh = Mesh(
        hop_time=HOP_CYCLES * reduction * cycle,
        tree_time=TREE_CYCLES * reduction * cycle,
        edge_seconds_per_byte=cycle / EDGE_BYTES,
    )
    return eqx.tree_at(lambda m: m.mesh, body(fields, constants), mesh)
