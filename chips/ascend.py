"""Ascend (Huawei): AI cores, each a cube for products beside two vector units, over HBM.

A core's cube multiplies 16 × 16 × 16 a cycle; its vector units sit apart and meet it in memory, so
what one hands the other passes the 192 MiB of L2. Eight 910B join each to each by HCCS; a 910C is
two such dies, and 384 of them share one switched bus.

    peak       cores·2·16³·clock: 24·8,192·1.8 GHz = 353.9 TFLOP/s, twice that in 8-bit integers
    product    ‖2mnk/(η_c P), bytes/(η_m W)‖₂ + t₀; in 8 bits its input is quantised on the way
    decode     ‖bytes of keys and values/(η W), items·c/cores‖₂ + t₀, an item a sequence and kv head
    context    FLOPs/(η P) + items·c/cores + t₀, an item 128 queries of a head
    experts    as products, grouped, of the weights that the tokens touch

By hand: 4 × 12,288 × 12,288 in 16 bits is 302 MB, 189 µs at 1.6 TB/s; measured 237, so η_m = 0.80.
16,384 × 4,096 × 8,192 is 1.1 PFLOP, 3.11 ms at the peak; measured 3.36, 0.92 of it. Context
attention of 40 heads and one kv head over 8,192 tokens: 0.69 PFLOP under the mask are 1.94 ms; 4.29
were measured, since softmax on the vector units goes between the two products.

Check points (`perfmodel.calibrate_ascend`, whose three constants a kind see a third of the shapes):
medians of what they have not seen are 12 % on products of 16 and 8 bits, 15 % on decode, 7 % on
context attention, 5 and 10 % on experts; nine of ten lie within 21 to 42 %. Huawei's own serving of
DeepSeek-R1 (arXiv:2506.12708: prompts at 6,688 tok/s a 910C) is about twice as fast as these
kernels make it (3,200 on 16 chips): it has kernels of its own, and is not fitted.

Limits: which 910B was measured is not stated; 327 TFLOP/s exceeds what 20 cores can do. Kernels
were launched one by one, so their start of 46 to 49 µs in attention may shrink in a captured graph.
No collective is published: HCCL's constants are priors. A 910C takes a 910B's kernels.
"""

from collections.abc import Mapping

from perfmodel.chips.body import body
from perfmodel.machine import Machine
from perfmodel.relax import Real


def machine(fields: Mapping[str, Real], constants: Mapping[str, Real]) -> Machine:
    """Returns the machine of an Ascend; arguments as of `perfmodel.chips.body.body`."""
    return body(fields, constants)
