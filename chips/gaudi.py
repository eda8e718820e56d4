"""Gaudi (Intel): matrix engines beside vector cores, and Ethernet ports for links.

A few large matrix engines (MME, 256 × 256 multiply-adds each) and many vector cores (TPC) work
side by side on one graph that a compiler cuts; HBM feeds them through an SRAM with no cache's
surprises. Eight chips join each to each by RoCE ports on the die, three of them a pair.

    peak       engines·256²·2·clock: 2·65,536·2·1.65 GHz = 432.5 TFLOP/s, 8 at 1.6 GHz 1,678
    product    tiles of 256 × 256 outputs dealt to the engines; a thin one is laid out as 64 × 1,024
    layer      ‖Σ products, attention, vectors‖ against the host, which launches each layer's graph
    all-reduce start + bytes over min((N − 1)·W_pair, W): two chips share 3 of the 21 ports

By hand, Llama-2-7B on one Gaudi 2, one sequence: 13.2 GB of weights at 0.8·2.46 TB/s are 6.7 ms;
measured 6.9. On eight chips weights take 0.8 ms and 64 all-reduces about 1 ms, yet 5.2 ms were
measured, as on four: that is 160 µs a layer, and 28 layers of a Qwen2-7B then take 4.5 ms, as
measured. So the host's launch of a layer, beside the device, is a constant of these runs.

Check points (`perfmodel/validation/gaudi.csv`): 191 static batches of Llama-2, Llama-3 and Qwen2 on
1 to 8 Gaudi 2 measured by Argonne in 2024, of which three constants have seen twelve: the median of
the others is 8 %. Intel's of the same year in 8 bits, seen by none: 6 % on Gaudi 3, 16 % on 2.
A static batch takes prompts, then steps: that is a request's time in a closed loop (burst 0).
Best products: 418.7 TFLOP/s on Gaudi 2, 1,243 on Gaudi 3, which throttles.

Limits: static shapes (prompts and caches padded to the longest) are in the constants of the fit,
not in the model. Few kv heads read by many query heads are too fast here at large batches (a
Qwen2-7B of 4 kv heads: -12 % in the median, -25 % at 64 sequences on 8 chips). Gaudi 3 takes the
constants of Gaudi 2; so do 8-bit weights, which those runs do not have.
"""

from collections.abc import Mapping

from perfmodel.chips.body import body
from perfmodel.machine import Machine
from perfmodel.relax import Real


def machine(fields: Mapping[str, Real], constants: Mapping[str, Real]) -> Machine:
    """Returns the machine of a Gaudi; arguments as of `perfmodel.chips.body.body`."""
    return body(fields, constants)
