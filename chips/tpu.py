"""Systolic arrays with HBM on a torus: Google TPU v4, v5e, v5p, v6e and v7.

An MXU holds a tile of weights of side T (128; 256 from v6e on) while rows of activations stream
through it and the next tile is loaded, which takes T cycles: fewer rows than T cost as much as T.

    product    ‖2·max(rows, T)·n·k/(η_c·peak), weights/(η_m·W)‖

The compiler (XLA) lays a product over all arrays, without waves, and fuses element-wise work into
it or keeps it in VMEM, 128 MiB at 22 times the rate of HBM; so that work is taken at three times
that of HBM, an assumption. Weights that stay in VMEM from step to step are not modelled.

Chips form a torus of two axes (v5e, v6e) or three (v4, v5p, v7), with 1 µs from hop to hop:

    all-reduce  a·(N^(1/a) − 1)·hop + 2(N − 1)/N·m/W over a axes; twice the bytes' time on a line

as in the scaling book: 2·V/(a·W_axis) with W_axis both directions of an axis is 2·V/W. Axes close
to rings only where a slice spans them: 16 chips on v5e and v6e, so smaller slices are lines
(`open_ends`); cubes of 4 × 4 × 4 on the others.

By hand, Llama-3.3-70B on eight v6e, 64 requests of 1,000 and 1,000 tokens: weights 141 GB over
8·0.85·1.638 TB/s 12.7 ms, 256 rows 2·256·70e9/(8·0.8·918e12) = 6.1 ms, both 14.1 ms; keys
64·1,500·328 kB over 8·0.6·1.638 TB/s 4.0 ms; 160 all-reduces of 1 MB, 3.7 µs of hops and 10 µs on a
line, 2.2 ms; 80 layers of 27 µs 2.1 ms; host 0.4 ms: 23 ms, and 26 with the prompts' chunks that an
eighth of the steps carry, measured 25.4.

Check points (`perfmodel/validation/tpu.csv`): one constant, the time between operators of a layer,
is fitted on that row alone. Unseen: PaLM 540B on 64 v4, 29 ms a token (arXiv:2211.05102); three
networks on v7, eight runs; but what is assumed of experts and of fused work was chosen with them
in view. Limits: collectives are not overlapped with products, which makes large
prompts of PaLM 1.7 times too slow (76 % of the peak published); the side of v7's arrays and the
power of all but v4 are not published; optical switches are free; slices smaller than a ring of
each axis have fewer links than W, beyond what `open_ends` says.
"""

from collections.abc import Mapping

from perfmodel.chips.body import body
from perfmodel.machine import Machine
from perfmodel.relax import Real


def machine(fields: Mapping[str, Real], constants: Mapping[str, Real]) -> Machine:
    """Returns the machine of a TPU; arguments as of `perfmodel.chips.body.body`."""
    return body(fields, constants)
