"""Dataflow chips with three memories (SambaNova SN40L): SRAM, HBM, and DDR behind it.

A layer's operators are laid out over the chip and data streams through them, so that intermediate
results stay in 520 MiB of SRAM and no kernel is launched: no floors per operator, one small one per
layer. Weights and keys stream from HBM (64 GB, 1.6 TB/s); DDR (1.5 TB) is the second memory: whole
networks wait there, and copying one takes its bytes over the DDR's bandwidth.

    step    Σ layers ‖FLOPs/(η_c·peak), weights/(η_m·1.6 TB/s)‖ + keys/(η_kv·1.6 TB/s)

Check points (`perfmodel/validation/dataflow.csv`): 8 sockets, static batches of 8B and 70B measured
by Argonne, on which η_m and η_kv are fitted; 16 sockets, 8B 1,042 tok/s. The 70B and 405B points
of 16 sockets (457, 129 tok/s) lie 2.5 and 4.1 × above what HBM can read: they need that many tokens
a step (speculation), and are not fitted. Model switch: 16 GB of an 8B at 1.6 TB/s is 0.01 s, as
published; the DDR must then deliver that over all 16 sockets (100 GB/s each).
"""

from collections.abc import Mapping

from perfmodel.chips.body import body
from perfmodel.machine import Machine
from perfmodel.relax import Real


def machine(fields: Mapping[str, Real], constants: Mapping[str, Real]) -> Machine:
    """Returns the machine of a dataflow chip; arguments as of `perfmodel.chips.body.body`."""
    return body(fields, constants)
