"""One machine for all silicon: operators in, seconds and joules out.

A chip family is a function from datasheet fields to the `Machine` below; nothing here knows a
family. A term that a chip lacks has its neutral value (given with each field), and then vanishes:
with every field neutral a matrix product takes the plain roofline of its FLOPs and bytes.

The forms are kernel physics with few constants. A matrix product is tiled over the compute units
with wave quantisation and split-K in closed form; decode attention is a stream of keys and values
cut into work items; context attention is tiled over queries; compute and memory overlap by a
2-norm. They were found on measured kernels (see `perfmodel.calibrate` and the error table in
`docs/accuracy.md`).

`share` is the part of one chip that a pipeline stage has to itself: 1 on a GPU, 0.05 for one of
twenty layers laid side by side on a wafer. Peak, bandwidth and units scale with it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from perfmodel.efficiencies import Efficiencies
from perfmodel.operators import Attention, Matmul, Scan, Vector
from perfmodel.ownership import Site
from perfmodel.relax import Real, as_real, ceil, inverse, maximum, minimum, overlap

TIERS = 4
"""Memory tiers a machine may have, fastest first."""


def _real(**kwargs: Any) -> Any:
    return eqx.field(converter=as_real, **kwargs)


class Products(eqx.Module):
    """Constants of one make of matrix-product kernels by kind, each of shape [len(KERNELS)].

    Fields:
        efficiency: achieved share of the peak at full tiles and waves (neutral 1).
        stream: achieved share of memory bandwidth (neutral 1).
        floor: time of the smallest product [s] (neutral 0).
        split_latency: extra serial time when the inner dimension is split over units [s] (0).
        quantise: extra traffic per activation element where a kernel quantises its input [B] (0).
    """

    efficiency: Array = _real()
    stream: Array = _real()
    floor: Array = _real()
    split_latency: Array = _real()
    quantise: Array = _real()


class Kernels(Products):
    """Matrix products by kernel kind; arrays of shape [len(KERNELS)].

    Fields beside those of `Products`:
        peak: dense datasheet rate [FLOP/s]; 0 where the chip has no such kernel.
        energy: energy per FLOP [J].
    """

    peak: Array = _real()
    energy: Array = _real()


class Compute(eqx.Module):
    """Geometry of the matrix units.

    Fields:
        tile_rows, tile_columns: output tile of one unit (neutral 1, 1).
        fill_rows: rows a systolic array must be fed to fill (neutral 0).
        units: compute units that take tiles in waves (neutral 1).
        pes: processing elements of a mesh, for hop counts (neutral 1).
        split_time: shortest piece of work worth splitting off [s] (neutral 0).
        wave: strength of wave quantisation, 0 none to 1 full (neutral 0).
        vector_peak: rate of the vector units [FLOP/s].
    """

    tile_rows: Array = _real()
    tile_columns: Array = _real()
    fill_rows: Array = _real()
    units: Array = _real()
    pes: Array = _real()
    split_time: Array = _real()
    wave: Array = _real()
    vector_peak: Array = _real()


class DecodeAttention(eqx.Module):
    """Constants of attention with few queries per sequence.

    Fields:
        stream: achieved share of memory bandwidth on keys and values (neutral 1).
        item_time: fixed time of a work item (one sequence and kv head) at width 128 [s] (0).
        item_exponent: how that time grows with the head width (0).
        item_rate: bytes per second of keys and values that one unit sustains (large).
        single_item_time, single_item_rate: the same for one query head per kv head.
        efficiency: achieved share of the 16-bit peak (1).
        min_group: query heads per kv head that a tile is padded to (1).
        split_keys: fewest keys in a split (1).
        floor: time of the smallest call [s] (0).
        split_latency: extra serial time when keys are split over units [s] (0).
        shards: parts of a chip that must each hold a kv head (1).
    """

    stream: Array = _real()
    item_time: Array = _real()
    item_exponent: Array = _real()
    item_rate: Array = _real()
    single_item_time: Array = _real()
    single_item_rate: Array = _real()
    efficiency: Array = _real()
    min_group: Array = _real()
    split_keys: Array = _real()
    floor: Array = _real()
    split_latency: Array = _real()
    shards: Array = _real()


class LatentDecode(eqx.Module):
    """Constants of decode attention whose heads share one latent vector per key.

    Fields as in `DecodeAttention`, of one width, and `narrow`, the speed-up in 8 bits (1).
    """

    stream: Array = _real()
    item_time: Array = _real()
    item_rate: Array = _real()
    efficiency: Array = _real()
    narrow: Array = _real()
    min_group: Array = _real()
    split_keys: Array = _real()
    floor: Array = _real()
    split_latency: Array = _real()


class ContextAttention(eqx.Module):
    """Constants of attention with many queries per sequence.

    Fields:
        efficiency: achieved share of the 16-bit peak at width 128 (neutral 1).
        narrow: speed-up when the products run in 8-bit arithmetic (1).
        width_exponent: how efficiency grows with the head width up to 128 (0).
        query_tile: queries in a work item (1).
        diagonal: extra pairs per query computed and masked away (0).
        tail: imbalance of work items over units, shrinking with their number (0).
        longest: weight of the longest single work item as a bound (0).
        item_time: fixed time of a work item [s] (0).
        stream: achieved share of memory bandwidth (1).
        floor: time of the smallest call [s] (0).
    """

    efficiency: Array = _real()
    narrow: Array = _real()
    width_exponent: Array = _real()
    query_tile: Array = _real()
    diagonal: Array = _real()
    tail: Array = _real()
    longest: Array = _real()
    item_time: Array = _real()
    stream: Array = _real()
    floor: Array = _real()


class Scans(eqx.Module):
    """Constants of recurrences that go token by token.

    Fields:
        stream: achieved share of memory bandwidth on states, inputs and results (neutral 1).
        efficiency: achieved share of the 16-bit peak (1).
        floor: time of the smallest call [s] (0).
    """

    stream: Array = _real()
    efficiency: Array = _real()
    floor: Array = _real()


class ContextScans(Scans):
    """Constants of recurrences that go through prompts in chunks.

    Fields: as `Scans`, and `chunk_time` of a chunk, which waits for the state of the one before
    it [s] (neutral 0).
    """

    chunk_time: Array = _real()


class Memory(eqx.Module):
    """Memory tiers, fastest first; arrays of shape [TIERS].

    Fields:
        capacity: [B]; 0 for an absent tier.
        bandwidth: [B/s]; of an absent tier the spill link's, not 0 and not infinity.
        energy: per byte moved [J].
        latency: of the first byte [s] (neutral 0).
        spill_bandwidth: where what no tier holds must come from [B/s].
        vector_stream: achieved share of bandwidth in element-wise kernels (1).
        vector_floor: time of the smallest element-wise kernel [s] (0).
    """

    capacity: Array = _real()
    bandwidth: Array = _real()
    energy: Array = _real()
    latency: Array = _real()
    spill_bandwidth: Array = _real()
    vector_stream: Array = _real()
    vector_floor: Array = _real()


class Fabric(eqx.Module):
    """Links between chips. See `perfmodel.fabric` for the formulas.

    Fields:
        domain: chips joined by the fast links.
        bandwidth: per chip, one direction [B/s].
        peer_bandwidth: from one chip to one other, one direction [B/s] (a switch: `bandwidth`).
        oneshot_latency, oneshot_growth, oneshot_efficiency: each rank reads all others [s, -, -].
        twoshot_latency, twoshot_growth, twoshot_efficiency: reduce-scatter, all-gather.
        twoshot_ramp: protocol ramp, seconds at 1 MB, growing with the root of the message [s].
        gather_latency, gather_growth: all-gather, reduce-scatter and all-to-all [s, -].
        hop_time: per hop between neighbours [s] (a switch: 0).
        axes: dimensions of a ring or torus (1).
        torus: 1 where messages pass through the chips between, on a ring or torus (0).
        open_ends: 1 where a torus has no links around its ends, a mesh (0).
        in_network: 1 where switches add up what passes through them (0).
        wire_bytes: bytes of one activation element on the wire (2).
        nic_bandwidth, nic_efficiency, nic_latency: between domains, per chip [B/s, -, s].
        crossing_time, crossing_seconds_per_byte: from one pipeline stage's chip to the next.
        energy, nic_energy: per byte sent [J].
    """

    domain: Array = _real()
    bandwidth: Array = _real()
    peer_bandwidth: Array = _real()
    oneshot_latency: Array = _real()
    oneshot_growth: Array = _real()
    oneshot_efficiency: Array = _real()
    twoshot_latency: Array = _real()
    twoshot_growth: Array = _real()
    twoshot_efficiency: Array = _real()
    twoshot_ramp: Array = _real()
    gather_latency: Array = _real()
    gather_growth: Array = _real()
    hop_time: Array = _real()
    axes: Array = _real()
    torus: Array = _real()
    open_ends: Array = _real()
    in_network: Array = _real()
    wire_bytes: Array = _real()
    nic_bandwidth: Array = _real()
    nic_efficiency: Array = _real()
    nic_latency: Array = _real()
    crossing_time: Array = _real()
    crossing_seconds_per_byte: Array = _real()
    energy: Array = _real()
    nic_energy: Array = _real()


class Mesh(eqx.Module):
    """Reductions and broadcasts across an on-chip mesh of processing elements.

    Fields: seconds per hop along the mesh side, per square root of it (a tree), and per byte
    on an edge element. All neutral at 0, as on a GPU.
    """

    hop_time: Array = _real()
    tree_time: Array = _real()
    edge_seconds_per_byte: Array = _real()


class Floors(eqx.Module):
    """Latencies of a layer that are not an operator's own.

    Fields: `serial` is added to every layer [s]; `launch` is what the host needs to launch a
    layer, in parallel with the device: a step takes the larger of the two [s]. Neutral 0.
    `hosted` is 1 where serving software runs beside the chip, with its host times and workspace,
    and 0 where the chip runs a compiled schedule.
    """

    serial: Array = _real()
    launch: Array = _real()
    hosted: Array = _real()


class Power(eqx.Module):
    """Board power [W]: at rest, while serving but before any work, and the limit."""

    idle: Array = _real()
    running: Array = _real()
    limit: Array = _real()


class Machine(eqx.Module):
    """Everything that timing, energy and cost know of one chip. All leaves are arrays.

    `experts` are the constants of grouped products of a mixture of experts, `latent_decode` and
    `latent_context` those of attention over latent vectors, `scan` and `context_scan` those of
    recurrent layers. `price` is US dollars per chip and second, beside electricity where `site` has
    a tariff; 0 marks an unknown price. A family gives the rent; `perfmodel.ownership` has the other
    models.
    """

    kernels: Kernels
    experts: Products
    compute: Compute
    decode: DecodeAttention
    context: ContextAttention
    latent_decode: LatentDecode
    latent_context: ContextAttention
    scan: Scans
    context_scan: ContextScans
    memory: Memory
    fabric: Fabric
    mesh: Mesh
    floors: Floors
    power: Power
    price: Array = _real()
    site: Site = eqx.field(default_factory=Site)


class Placed(NamedTuple):
    """Where weights and keys lie in the tiers of a chip: seconds and joules of a byte of each.

    `latency` is that of a read of weights [s]. See `perfmodel.tiers`.
    """

    weight_seconds: Array
    cache_seconds: Array
    weight_joules: Array
    cache_joules: Array
    latency: Array


class Usage(NamedTuple):
    """Where time and energy go; a part that is structurally absent is None.

    Fields: `seconds` on the critical path of one rank, and dynamic `joules` of one rank; the
    rest are parts that add up to `seconds`: `compute` (matrix and vector arithmetic), `weights`
    and `cache` (memory traffic of weights and activations, of keys and values), `network`,
    `latency` (floors, launches, serial steps).

    `seconds` is not computed from the parts, so a program that does not ask for them does not
    pay for them.
    """

    seconds: Real = 0.0
    joules: Real = 0.0
    compute: Array | None = None
    weights: Array | None = None
    cache: Array | None = None
    network: Array | None = None
    latency: Array | None = None

    def plus(self, other: "Usage") -> "Usage":
        """Returns both, one after the other."""
        return Usage(*(_sum(a, b) for a, b in zip(self, other, strict=True)))

    def scale(self, factor: Real) -> "Usage":
        """Returns the usage of `factor` repetitions, or a weighted part of a mean."""
        return Usage(*(None if part is None else part * factor for part in self))

    def slowed(self, factor: Real) -> "Usage":
        """Returns the same work in `factor` times the time, for the same energy."""
        return self.scale(factor)._replace(joules=self.joules)

    @property
    def parts(self) -> tuple[Array, ...]:
        """Compute, weights, cache, network and latency [s], zero where absent."""
        return tuple(as_real(0.0) if part is None else part for part in self[2:])


def _sum(a: Real, b: Real) -> Real:
    if a is None or (isinstance(a, float) and a == 0.0):
        return b
    return a if b is None else a + b


class Parts(NamedTuple):
    """An operator's time [s] and what it consists of: total = compute + memory + latency."""

    total: Array
    compute: Array
    memory: Array
    latency: Array


class KernelRates(NamedTuple):
    """One kind of matrix product on one rank: what does not depend on its shape.

    Fields: `tile`, time of one output tile per inner element [s]; `byte`, per byte of traffic
    [s]; `quantise`, per activation element [s]; `floor` and `split` latencies [s]; `joules` per
    FLOP. `weight_byte` is `byte` of weights.
    """

    tile: Array
    byte: Array
    weight_byte: Array
    quantise: Array
    floor: Array
    split: Array
    joules: Array


class Rank:
    """One rank of a machine as a plan uses it: a `share` of a chip, with what operators share.

    Made anew in every evaluation. Memoises while tracing, so that a step of a dozen operators
    spells out a kernel's rates or a group's links once.
    """

    def __init__(
        self,
        machine: Machine,
        share: Real = 1.0,
        efficiencies: Efficiencies | None = None,
        placed: Placed | None = None,
    ) -> None:
        self.machine = machine
        self.share = share
        self.efficiencies = efficiencies
        self.bandwidth = machine.memory.bandwidth[0] * share
        self.units = machine.compute.units * share
        self.peak = machine.kernels.peak[0] * share
        self.per_byte = inverse(self.bandwidth)
        self.per_unit = inverse(self.units)
        self.per_flop = inverse(self.peak)
        self.byte_joules = machine.memory.energy[0]
        # Where weights and keys lie in slower tiers too, a byte of them takes longer.
        self.placed = placed
        self.weight_byte, self.weight_joules = self.per_byte, self.byte_joules
        if placed is not None:
            self.weight_byte = placed.weight_seconds * inverse(as_real(share))
            self.cache_more = placed.cache_seconds * inverse(as_real(share)) - self.per_byte
            self.weight_joules = placed.weight_joules
            self.cache_joules = placed.cache_joules - self.byte_joules
        # A mesh of processing elements: hops along a side, and a tree over it.
        side = jnp.sqrt(machine.compute.pes * share)
        mesh = machine.mesh
        self.mesh_latency = mesh.hop_time * side + mesh.tree_time * jnp.sqrt(side)
        self.mesh_edge = 2.0 * mesh.edge_seconds_per_byte * inverse(side)
        self.vector_byte = self.per_byte * inverse(machine.memory.vector_stream)
        self.vector_operation = inverse(machine.compute.vector_peak * share)
        self._memo: dict[tuple[str, int], tuple[Any, Any]] = {}

    def once(self, label: str, key: Any, make: Callable[[], Any]) -> Any:
        """Returns `make()`, made once per label and identity of `key` (which is kept alive)."""
        if (label, id(key)) not in self._memo:
            self._memo[label, id(key)] = (key, make())
        return self._memo[label, id(key)][1]

    def kernel(self, kind: Array, experts: bool = False) -> KernelRates:
        """Returns the rates of a kind of matrix product, given as a one-hot vector.

        A dot product instead of an index: its derivative is a product, not a scatter. Products of
        `experts` run in grouped kernels, with constants of their own.
        """
        which = self.machine.experts if experts else self.machine.kernels
        label = "experts" if experts else "kernel"
        return self.once(label, kind, lambda: self._kernel(kind, which))

    def _kernel(self, kind: Array, make: Products) -> KernelRates:
        all_kinds, unit = self.machine.kernels, self.machine.compute

        def pick(constants: Array) -> Array:
            return jnp.sum(constants * kind)

        per_stream = inverse(pick(make.stream))
        byte = self.per_byte * per_stream
        floor = pick(make.floor) + self.mesh_latency
        # An unsupported kind is reported by a margin; here it must stay finite.
        achieved = pick(make.efficiency) * maximum(pick(all_kinds.peak), 1e9)
        return KernelRates(
            tile=2.0 * unit.tile_rows * unit.tile_columns * unit.units * inverse(achieved),
            byte=byte,
            weight_byte=byte if self.placed is None else self.weight_byte * per_stream,
            quantise=pick(make.quantise) * self.per_byte,
            floor=floor if self.placed is None else floor + self.placed.latency,
            split=pick(make.split_latency),
            joules=pick(all_kinds.energy),
        )


# Below, what does not depend on a step's rows is grouped apart: the decode step and the step
# with a chunk then share it, and a sweep evaluates it once.


def matmul_parts(op: Matmul, rank: Rank) -> Parts:
    """Returns one matrix product's time.

    With tiles of 64 × 64 outputs over S units, w = ⌈m/64⌉⌈n/64⌉/S tiles per unit and t₁ the time
    of one tile over the whole inner dimension on one unit:

        1/s = clip(w, min(τ/t₁, 1), 1)                 split-K as fine as fills the units
        t_c = [ω⌈w⌉ + (1−ω)·max(w, 1)]·t₁/s            partial wave quantisation
        t_m = bytes/(η_m W) + β·m·k/W                  β only where the kernel quantises
        t   = t₀ + ‖t_c, t_m‖₂ + σ(1 − 1/s) + mesh reduction

    The constants of each chip and kernel are fitted (`perfmodel.calibrate`).
    """
    kind = rank.kernel(op.kernel, op.experts)
    unit = rank.machine.compute
    one_tile = op.inner * kind.tile
    shortest = minimum(unit.split_time * inverse(one_tile), 1.0)
    column_tiles = ceil(op.columns * inverse(unit.tile_columns)) * (op.groups * rank.per_unit)
    rows = as_real(op.rows)
    row_tiles = ceil(maximum(rows, unit.fill_rows) * inverse(unit.tile_rows))
    per_unit = row_tiles * column_tiles
    # What is left of the inner dimension on one unit after the split, between τ and all of it.
    # (At exactly one tile per unit the slope is that of a second wave, not of a finer split.)
    even = maximum(1.0, per_unit)
    whole = minimum(maximum(per_unit, shortest), 1.0)
    compute = (even + unit.wave * (ceil(per_unit) - even)) * (whole * one_tile)
    memory = op.weight_traffic() * kind.weight_byte + rows * (op.row_traffic() * kind.byte)
    overlapped = overlap(compute, memory)
    # Per row and outside the overlap: a mesh's edge, and the quantisation of the input.
    quantise = op.inner * op.groups * kind.quantise
    outside = rows * (op.columns * rank.mesh_edge + quantise)
    total = overlapped + outside + (kind.floor + kind.split - kind.split * whole)
    arithmetic = compute * compute / overlapped
    memory = overlapped - arithmetic + rows * quantise
    return Parts(total, arithmetic, memory, total - arithmetic - memory)


def matmul_usage(op: Matmul, rank: Rank) -> Usage:
    """Returns where one matrix product's time and energy go."""
    total, compute, memory, latency = matmul_parts(op, rank)
    flop = rank.kernel(op.kernel, op.experts).joules
    per_row = op.row_flops() * flop + op.row_traffic() * rank.byte_joules
    joules = op.weight_traffic() * rank.weight_joules + op.rows * per_row
    return Usage(total, joules, compute=compute, weights=memory, latency=latency)


def decode_attention_parts(op: Attention, rank: Rank) -> Parts:
    """Returns one decode-attention call's time.

    B·K work items (sequence, kv head) over S units, each split s ways over its L keys:

        w = BK/S,  1/s = clip(w, 1/max(L/L_s, 1), 1),  u = max(w, 1)
        t_m = (cache bytes + queries and results)/(η_m W)
        t_s = u·(c·(d/128)^χ + L/s·2db/r)              an item's fixed cost and its stream
        t_f = 4BK·max(G·q, G₀)·L·d/(η_f P)
        t   = t₀ + ‖t_m, t_s, t_f‖₂ + σ(1 − 1/s)

    Latent attention has one width, so χ = 0, constants of its own, and 2d·b is what it caches.
    """
    machine = rank.machine
    constants = machine.latent_decode if op.latent else machine.decode
    width = 0.5 * (op.qk_width + op.v_width)
    group = op.heads * inverse(op.kv_heads)
    sequences = as_real(op.sequences)
    per_unit = sequences * (op.kv_heads * rank.per_unit)
    fewest = inverse(maximum(op.keys * inverse(constants.split_keys), 1.0))
    whole = minimum(maximum(per_unit, fewest), 1.0)
    if op.latent:
        own = machine.latent_decode
        fixed, item_rate = own.item_time, own.item_rate
        efficiency = own.efficiency * (1.0 + (own.narrow - 1.0) * op.narrow)
    else:
        own = machine.decode
        single = group <= 1.0
        item_time = jnp.where(single, own.single_item_time, own.item_time)
        item_rate = jnp.where(single, own.single_item_rate, own.item_rate)
        fixed = item_time * jnp.exp(own.item_exponent * jnp.log(width * (1.0 / 128.0)))
        efficiency = own.efficiency
    stream = op.keys * (op.cached_width() * op.kv_bytes * inverse(item_rate))
    serial = maximum(1.0, per_unit) * (fixed + whole * stream)
    memory = sequences * (op.sequence_traffic() * (rank.per_byte * inverse(constants.stream)))
    if rank.placed is not None:
        memory = memory + op.cache_traffic() * (rank.cache_more * inverse(constants.stream))
    rows = maximum(group * op.queries, constants.min_group)
    per_flop = rank.per_flop * inverse(efficiency)
    arithmetic = 4.0 * op.kv_heads * rows * op.keys * width * per_flop
    compute = sequences * arithmetic
    busy = jnp.sqrt(memory * memory + serial * serial + compute * compute + 1e-36)
    # Scores over the width of a head, and results over keys: two reductions on a mesh.
    fixed_time = constants.floor + constants.split_latency + 2.0 * rank.mesh_latency
    latency = fixed_time - constants.split_latency * whole
    # A step without sequences makes no call.
    called = minimum(sequences, 1.0)
    total, latency = (busy + latency) * called, latency * called
    arithmetic = compute * compute / busy * called
    return Parts(total, arithmetic, total - latency - arithmetic, latency)


def context_attention_parts(op: Attention, rank: Rank) -> Parts:
    """Returns one context-attention call's time.

    With P' the achieved rate (by head width and arithmetic), u = B·H·⌈T/q⌉/S work items per unit,
    and v keys in the longest:

        t = t₀ + max[4·B·H·d·(pairs + δT)/P'·(1 + ε/max(u, 1)), λ·4·d·q·v·S/P']
               + max(u, 1)·c + bytes/(η_m W)
    """
    constants = rank.machine.latent_context if op.latent else rank.machine.context
    width = 0.5 * (op.qk_width + op.v_width)
    # Heads wider than 128 run in slices, and gain nothing more.
    reach = minimum(width, 128.0) * (1.0 / 128.0)
    wider = jnp.exp(constants.width_exponent * jnp.log(reach))
    faster = (1.0 + (constants.narrow - 1.0) * op.narrow) * wider
    per_pair = 4.0 * width * (rank.per_flop * inverse(constants.efficiency * faster))
    queries = as_real(op.queries)
    tiles = op.sequences * op.heads * ceil(queries * inverse(constants.query_tile))
    per_unit = maximum(tiles * rank.per_unit, 1.0)
    pairs = op.pairs + constants.diagonal * queries
    work = op.sequences * op.heads * per_pair * pairs
    rows = minimum(constants.query_tile, queries)
    longest = constants.longest * per_pair * rank.units * rows * op.keys
    compute = maximum(work * (1.0 + constants.tail * inverse(per_unit)), longest)
    memory = op.memory_bytes() * (rank.per_byte * inverse(constants.stream))
    if rank.placed is not None:
        memory = memory + op.cache_traffic() * (rank.cache_more * inverse(constants.stream))
    latency = constants.floor + per_unit * constants.item_time + 2.0 * rank.mesh_latency
    return Parts(compute + memory + latency, compute, memory, latency)


def attention_usage(op: Attention, rank: Rank) -> Usage:
    """Returns where one attention call's time and energy go."""
    parts = decode_attention_parts if op.phase == "decode" else context_attention_parts
    total, compute, memory, latency = parts(op, rank)
    arithmetic = op.sequence_flops() * rank.machine.kernels.energy[0]
    joules = op.sequences * (arithmetic + op.sequence_traffic() * rank.byte_joules)
    if rank.placed is not None:
        joules = joules + op.cache_traffic() * rank.cache_joules
    return Usage(total, joules, compute=compute, cache=memory, latency=latency)


def scan_usage(op: Scan, rank: Rank) -> Usage:
    """Returns where one recurrence's time and energy go.

    A roofline: with F operations and Q bytes (states once in and out, inputs, results), and in
    prompts n chunks one after the other (whole sequences and heads run side by side),

        t = t₀ + ‖F/(η_f P), Q/(η_m W), n τ‖₂

    A step without sequences makes no call. Where states lie in slower tiers too, a byte of them
    takes as long as one of keys and values.
    """
    total, compute, memory, latency = scan_parts(op, rank)
    joules = op.flops() * rank.machine.kernels.energy[0] + op.memory_bytes() * rank.byte_joules
    if rank.placed is not None:
        joules = joules + op.sequences * op.state_traffic() * rank.cache_joules
    return Usage(total, joules, compute=compute, cache=memory, latency=latency)


def scan_parts(op: Scan, rank: Rank) -> Parts:
    """Returns seconds of one recurrence; parts of the overlapped time by their squares."""
    whole = op.phase == "prefill"
    constants = rank.machine.context_scan if whole else rank.machine.scan
    called = minimum(as_real(op.sequences), 1.0)
    compute = op.flops() * (rank.per_flop * inverse(constants.efficiency))
    stream = inverse(constants.stream)
    memory = op.memory_bytes() * (rank.per_byte * stream)
    if rank.placed is not None:
        memory = memory + op.sequences * op.state_traffic() * (rank.cache_more * stream)
    squares = compute * compute + memory * memory
    if whole:
        serial = op.chunks() * rank.machine.context_scan.chunk_time * called
        squares = squares + serial * serial
    # The small term keeps the slope finite where there is no work at all.
    busy = jnp.sqrt(squares + 1e-36)
    # Two reductions of a token on a mesh, as attention has.
    latency = (constants.floor + 2.0 * rank.mesh_latency) * called
    arithmetic = compute * compute / busy
    read = memory * memory / busy
    return Parts(busy + latency, arithmetic, read, latency + busy - arithmetic - read)


def vector_usage(op: Vector, rank: Rank) -> Usage:
    """Returns where element-wise work goes: launches, bytes over bandwidth, arithmetic.

    The arithmetic is added, not overlapped: it is small where vector units are wide, and what
    binds where they are not.
    """
    rows = as_real(op.rows)
    traffic = op.row_traffic()
    per_row = traffic * rank.vector_byte
    arithmetic = op.operations * rank.vector_operation
    latency = rank.machine.memory.vector_floor * op.launches
    if op.reductions:
        latency = latency + op.reductions * rank.mesh_latency
    return Usage(
        seconds=rows * (per_row + arithmetic) + latency,
        joules=rows * (traffic * rank.byte_joules),
        compute=rows * arithmetic,
        weights=rows * per_row,
        latency=as_real(latency),
    )
