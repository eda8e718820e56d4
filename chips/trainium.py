"""Systolic cores with HBM on a torus: AWS Inferentia2, Trainium1, 2 and 3.

A NeuronCore multiplies on an array of 128 × 128: a tile of weights stays, the rows of activations
move through it, and a pass takes max(N, 64) cycles for N rows. So few rows cost as much as 64:

    product    ‖2·max(rows, 64)·n·k/(η_c·peak), weights/(η_m·W)‖

Software moves everything through SBUF by DMA, and cores wait for one another by semaphores: one
time per layer, the largest term of a small network. Each core (a pair of them on Trainium2 and 3)
holds whole kv heads: over 32 cores the eight of a 70B lie there four times, and are read as often.
Chips form a ring (Inferentia2) or a torus of two axes in an instance, three in an UltraServer; an
UltraServer of Trainium3 has switches. Beyond, EFA is the port, 15 µs from node to node.

    all-reduce  a·(N^(1/a) − 1)·hop + 2(N − 1)/N·m/W over a axes

Prompts: the scores of attention pass the vector and scalar engines about six times (scale, mask,
maximum, exponential, sum, copy) at a cycle for 128 of them: 6/(128·1.12 GHz) = 42 ps a score, and
24 B of it over a core's 410 GB/s of HBM, 58 ps, where kernels are not fused. Both triangles are
computed: 2·100 ps for the 4·128 FLOP of a pair is 2.6 TFLOP/s, 3 % of a core's 95: that is
`context.efficiency`, assumed so, not fitted.

By hand, one request of Llama-2-70B on 16 Trainium1, 32 cores: weights 141 GB/(16·0.85·820 GB/s) =
12.6 ms; 64 rows 2·64·70e9/(16·0.27·190e12) = 11 ms; both 16.8 ms; 80 layers of 95 µs 7.6 ms; 160
all-reduces of six hops 1.4 ms; keys and host 1 ms. Together 27 ms, measured 25.2.

Check points (`perfmodel/validation/trainium.csv`): AWS's tables for Transformers-NeuronX of 2024 on
Trainium1 and Inferentia2, nine of the rows fitted; tutorials for Trainium2, none fitted. What is
assumed, not fitted, was chosen with all of them in view.
Limits: time to first token of these tables jumps at 2,048 tokens and grows faster than the number
of prompts in a batch, so that long and batched prompts come out up to five times too fast; those
of Trainium2 with kernels of 2025 up to twice too slow. Heads that do not divide over the cores are
taken as if they did. The 70B row of Trainium2 reaches 15 % of its bandwidth and 405B 46 %: no one
time per layer explains both. Of Trainium3 nothing is measured.
"""

from collections.abc import Mapping

from perfmodel.chips.body import body
from perfmodel.machine import Machine
from perfmodel.relax import Real


def machine(fields: Mapping[str, Real], constants: Mapping[str, Real]) -> Machine:
    """Returns the machine of a Trainium chip; arguments as of `perfmodel.chips.body.body`."""
    return body(fields, constants)
