"""Chips of SRAM alone on a static schedule (Groq LPU): hundreds of them hold one network.

No memory but 230 MB of SRAM a chip, no cache, no host between steps: the compiler knows when every
byte moves. Layers lie on groups of chips in a pipeline; a plan's stage is several chips wide, and a
token passes the stages one after another:

    layer      ‖weights/(w·80 TB/s), FLOPs/(w·peak)‖ + two exchanges over w chips
    token      the sum over all layers: a pipeline never uses all SRAM at once

70B in 8 bits on 576 chips, 80 stages of 7.2: 856 MB a layer/(7.2·80 TB/s) = 1.5 µs, 119 µs for
80 layers; measured 3.3 ms (300 tok/s), 42 µs a layer. So nine tenths are exchanges: one constant,
the time of an exchange over the point-to-point links, is fitted on those rows. A chip joins every
other of its group by one link (a full mesh; 14 GB/s as cabled): the same fields as an MI300X.

Check points (`perfmodel/validation/lpu.csv`): Llama-2-70B 300 tok/s, 7B 750, 8B 751 and 877.
Limits: routing over several hops (a dragonfly) is not modelled, nor the host that feeds prompts.
"""

from collections.abc import Mapping

from perfmodel.chips.body import body
from perfmodel.machine import Machine
from perfmodel.relax import Real


def machine(fields: Mapping[str, Real], constants: Mapping[str, Real]) -> Machine:
    """Returns the machine of an LPU; arguments as of `perfmodel.chips.body.body`."""
    return body(fields, constants)
