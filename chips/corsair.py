"""Digital compute in memory with two memories (d-Matrix Corsair): fast and small, slow and large.

Weights rest in the arrays that multiply them: 2 GB at 150 TB/s a card. Behind it lie 256 GB of
LPDDR5X at 400 GB/s. In performance mode everything is in SRAM; in capacity mode (a plan's
`offload`) what does not fit is read from LPDDR at every step:

    performance    ‖weights/(n·150 TB/s), FLOPs/(n·2.4 PFLOP/s)‖ + two exchanges a layer
    capacity       weights in LPDDR/(n·400 GB/s): 8B in 8 bits, one card, 20 ms a token

Arithmetic is in block formats; activations go over the links in 8 bits (`wire_bytes` 1), which
decides the fit: 8B on eight cards at 60 sequences is published at 1 ms a token, 31 µs a layer, of
which SRAM and arithmetic take 2 µs. With 16 bits the links alone would need 27 µs of it and no
start-up time of an exchange meets the 8B and the 70B point; with 8 bits 9 µs meets both.

Check points (`perfmodel/validation/corsair.csv`): 8B on a server 1 ms, 70B on a rack 2 ms, both at
60 sequences and claims of the maker. Limits: DMX links between the cards of a pair are not told
apart from PCIe; MXINT formats are modelled as int8 with their block scales.
"""

from collections.abc import Mapping

from perfmodel.chips.body import body
from perfmodel.machine import Machine
from perfmodel.relax import Real


def machine(fields: Mapping[str, Real], constants: Mapping[str, Real]) -> Machine:
    """Returns the machine of a Corsair card; arguments as of `perfmodel.chips.body.body`."""
    return body(fields, constants)
