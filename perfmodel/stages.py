"""What a micro-batch occupies of a pipeline: the time that the busiest stage, or port, is taken up.

A stage takes the next micro-batch when it is done with this one, a port when it has sent it. So a
full pipeline completes one micro-batch per largest of these, whatever a token's way takes:

    stage         ⌈L/S⌉ layers, a chain of dependent operators: floors and the latency of its sums
                  and collectives occupy it, since nothing else runs in it meanwhile
    last stage    ⌊L/S⌋ layers, the output head and sampling
    first stage   a tower of images beside its layers
    host          an engine has a process per stage, which prepares each pass: in every stage
    port          bytes/bandwidth, beside the computing of other micro-batches
    nothing       a message in flight: the latency of a crossing is on a token's way only

Engines give stages equal numbers of layers, and what is left over to others than the last (vLLM's
`get_pp_indices`; `Mapping.pp_layers` of TensorRT-LLM). The r regions of a wafer are laid out as
large as their work, so the head takes an r-th of its time from each. Hand-overs run beside
computing: in vLLM since 2026-01 (its pull request 33368, 2.9 %), at Cerebras since 2024-10 ("Wafer
IO has been streamlined to run asynchronously from compute").

By hand, 70B on four WSE-3, 20 regions each, one token in each of the 80: a layer 6.6 µs (2.4
arithmetic and SRAM, 4.2 sums across the mesh), the head 5.0 µs, a crossing 5 µs and 16 KiB/150 GB/s
= 0.11 µs. A stage is 6.6 + 5.0/20 = 6.9 µs: 80 requests see 548 µs, the way of a token, and make
146,000 tokens/s, 41 % of what 4·0.8·15.6 PFLOP/s allow. With crossing and head in every stage it
would be 16.7 µs and 60,000. Sums of one micro-batch beside the arithmetic of another in the same
region would gain up to 6.6/2.4; nobody is known to do that.

Measured: Llama-3.3-70B in FP4 on RTX PRO 6000, TensorRT-LLM 1.0 (its performance overview), 1,000
in and out: 1,787, 1,854, 1,490 and 1,021 tokens/s a GPU on 1, 2, 4 and 8 stages. As modelled with
256 requests a stage: 1,711, 1,815, 1,801 and 1,647. Deep pipelines of that engine are modelled too
fast: a pass through a stage takes 3 to 11 ms longer there, more with more requests.

Limits: groups of whole chips are of one size (a compiler may size those of LPUs by their work).
"""

from jax import Array

from perfmodel.plan import Plan
from perfmodel.relax import Real, as_real, ceil, floor, inverse, maximum, minimum


def occupied(
    plan: Plan,
    count: Real,
    layers: Real,
    last: Real,
    host: Real = 0.0,
    first: Real | None = None,
    port: Real | None = None,
) -> Array:
    """Returns how long a micro-batch occupies the busiest stage or port of a pipeline [s].

    With one stage it is the time of a pass: all layers, `last` and `first`.

    Args:
        plan: its chips and stages. count: layers of the network.
        layers: time of all of them [s]. last: of what follows the last layer, `host` included [s].
        host: time between steps, in every stage [s]. first: of what precedes the first layer [s];
            None where there is nothing. port: time that a hand-over takes of a port [s]; None where
            there are none.
    """
    each, share = count * inverse(plan.stages), inverse(count)
    # Of a chip that one stage has; the others on it make room for what stands beside the layers.
    part = minimum(as_real(plan.width), 1.0)
    busy = layers * (floor(each) * share) + last * part
    early = layers * (ceil(each) * share) + host
    if first is not None:
        only = 1.0 - minimum(as_real(plan.stages) - 1.0, 1.0)
        busy, early = busy + first * only, early + first * part
    # At a tie the derivative is that of the last stage: with one stage, of a whole pass.
    busy = maximum(early, busy)
    return busy if port is None else maximum(as_real(port), busy)
