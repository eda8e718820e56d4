"""Server processors with matrix instructions (AMX on Xeon, SVE2 on Arm): one socket is a chip.

A core multiplies tiles of 16 rows in AMX: 1024 multiply-adds a cycle in 16 bits, 2048 in 8. Peaks
are cores × that × the base clock, which AMX holds. Memory is the processor's own DDR5 or LPDDR5X;
keys and values are read by vector units. Two sockets join by UPI or NVLink-C2C.

    peak    128 cores · 2048 FLOP · 2.0 GHz = 524 TFLOP/s in 16 bits (Xeon 6980P), twice in 8
    step    ‖weights/(η_m·845 GB/s), FLOPs/(η_c·peak)‖: 8B in 8 bits not below 9.5 ms

Prompts bind: at 778 prompt tokens and 128 of output, 615 tokens/s of a socket are 70 TFLOP/s of
products. The achieved share of the rate is one constant, fitted on one point; it holds what the
base clock, instances of a few dozen cores and the software cost.

Check points (`perfmodel/validation/cpu.csv`): MLPerf Inference, offline, two sockets. Limits:
instances are not modelled apart (a socket is one); nor NUMA, nor turbo clocks.
"""

from collections.abc import Mapping

from perfmodel.chips.body import body
from perfmodel.machine import Machine
from perfmodel.relax import Real


def machine(fields: Mapping[str, Real], constants: Mapping[str, Real]) -> Machine:
    """Returns the machine of one socket; arguments as of `perfmodel.chips.body.body`."""
    return body(fields, constants)
