"""Collectives: seconds on the links as a function of message, group and fabric.

A group of N ranks fills domains of D chips first. Inside a domain links are fast; between
domains each chip has its own network port. The faster of two algorithms is taken, as libraries
do, and its exact value kept.
"""

import math
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from perfmodel.machine import Fabric, Rank, Usage
from perfmodel.operators import Collective
from perfmodel.relax import Real, as_real, ceil_div, inverse, maximum, minimum

_TREE_EFFICIENCY = 0.92
"""Bandwidth of a tree relative to a ring. Source: NCCL src/graph/tuning.cc (tree bandwidth)."""

_LOG_2 = math.log(2.0)


def local_bandwidth(fabric: Fabric, ranks: Real) -> Array:
    """Returns a rank's bandwidth to the others of its group, min(W, (N − 1)·W_peer) [B/s].

    On a full mesh without a switch, two chips share one link: TP2 gets one seventh of eight.
    """
    return minimum(maximum(1.0, ranks - 1.0) * fabric.peer_bandwidth, fabric.bandwidth)


class Group(eqx.Module):
    """A group of ranks laid over domains: their number, and how many share a domain."""

    ranks: Array
    domains: Array
    local: Array


def group(ranks: Real, fabric: Fabric) -> Group:
    """Returns how `ranks` chips spread over domains, each filled as evenly as may be."""
    ranks = maximum(as_real(ranks), 1.0)
    domains = maximum(ceil_div(ranks, fabric.domain), 1.0)
    return Group(ranks, domains, ranks * inverse(domains))


class Links(NamedTuple):
    """A collective over one group: what does not depend on the message.

    The faster of two algorithms, linear in the message but for a protocol ramp: one with the
    lower start, one with the lower cost per byte. `joules` per byte of the message.
    """

    start: Array
    ramp: Array
    byte: Array
    flow_start: Array
    flow_ramp: Array
    flow_byte: Array
    joules: Array

    def seconds(self, message: Real) -> Array:
        """Returns the time for a message [B] of this group [s]."""
        message = as_real(message)
        # The small constant keeps the root's derivative finite for an empty message.
        root = jnp.sqrt(message + 1e-6)
        fast_start = self.start + self.ramp * root + message * self.byte
        return minimum(
            fast_start, self.flow_start + self.flow_ramp * root + message * self.flow_byte
        )


def all_to_all_seconds(message: Real, ranks: Real, fabric: Fabric) -> Array:
    """Returns the time of an all-to-all in which each rank's buffer is `message` bytes [s].

    A rank keeps its own part and sends (N−1)/N of the buffer, once: as an all-gather. But no two
    ranks of a domain want the same bytes, so each takes all it needs through its own port.
    """
    return links("all_to_all", ranks, fabric).seconds(message)


def _reached(domains: Array, copies: Real) -> Array:
    """Returns domains that get a row of which `copies` go to ranks at random, over `copies`.

    A row crosses once to each domain that needs it and is handed on inside, as the kernels of
    DeepEP do that forward between the two kinds of link.
    """
    missed = jnp.exp(copies * jnp.log(maximum(1.0 - inverse(domains), 1e-9)))
    return domains * (1.0 - missed) * inverse(as_real(copies))


def links(kind: str, ranks: Real, fabric: Fabric, copies: Real = 1) -> Links:
    """Returns the costs of a collective of `kind` over a group of `ranks` chips.

    `copies`: of an all-to-all, to how many ranks each row goes.
    """
    passes = 2.0 if kind == "all_reduce" else 1.0
    over = group(ranks, fabric)
    local, domains = over.local, over.domains
    # Along a line, what goes round a ring must come back over the same links.
    line = 1.0 + fabric.torus * fabric.open_ends
    rate = local_bandwidth(fabric, local)
    port = fabric.nic_efficiency * fabric.nic_bandwidth
    others, other_domains = local - 1.0, domains - 1.0
    per_local, per_domain = inverse(local), inverse(domains)
    per_byte, per_port_byte = line * inverse(rate), inverse(port)
    # Exactly 0 for one rank, 1 from two on.
    any_local = minimum(others, 1.0)
    log_local = jnp.log(local)
    log_size = log_local - math.log(8.0)
    # N^(1/a) as an exponential: powers are slow to compile and are not vectorised.
    side = jnp.exp(log_local * inverse(fabric.axes))
    hops = fabric.hop_time * fabric.axes * (side - 1.0)
    flow_ramp = any_local * fabric.twoshot_ramp * 1e-3
    if kind == "all_reduce":
        oneshot = fabric.oneshot_latency * jnp.exp(fabric.oneshot_growth * log_size)
        twoshot = fabric.twoshot_latency * jnp.exp(fabric.twoshot_growth * log_size)
        # Every rank reads the whole message of all others.
        direct = others * inverse(fabric.oneshot_efficiency)
        ramp = as_real(0.0)
    else:
        # What moves once has no one-shot form: inside a domain both algorithms are the same.
        oneshot = twoshot = fabric.gather_latency * jnp.exp(fabric.gather_growth * log_size)
        direct = others * per_local * inverse(fabric.twoshot_efficiency)
        ramp = flow_ramp
    tree = passes / _LOG_2 * jnp.log(domains) * fabric.nic_latency
    tree_byte = passes / _TREE_EFFICIENCY * minimum(other_domains, 1.0) * per_port_byte
    # How much of its shard a rank takes through its port; of an all-to-all, of the whole message.
    outside = other_domains * per_domain
    two_way = others * per_byte * inverse(fabric.twoshot_efficiency)
    if kind == "all_to_all":
        # On a torus each message crosses a quarter of every ring, on links of other chips.
        through = 0.25 * fabric.axes * side * fabric.torus
        direct = direct * maximum(1.0, through)
        two_way = two_way * maximum(1.0, through)
        # Sent straight to every rank, or once to each domain.
        tree_byte = outside * per_port_byte
        outside = outside * local
        if not (isinstance(copies, int) and copies == 1):
            outside = outside * _reached(domains, copies)
            # Rows are handed on while others arrive: the slower of the two kinds of link.
            two_way = maximum(two_way, outside * per_port_byte) - outside * per_port_byte
    elif kind == "all_reduce":
        # Switches that add: each chip sends its message once and takes the sum, (N + 1)/N.
        summed = 0.5 * (local + 1.0) * per_byte * inverse(fabric.twoshot_efficiency)
        two_way = two_way + fabric.in_network * (minimum(two_way, summed * any_local) - two_way)
    sent = others * fabric.energy + outside * fabric.nic_energy
    return Links(
        start=any_local * oneshot + hops + tree,
        ramp=ramp,
        byte=direct * per_byte + tree_byte,
        flow_start=any_local * twoshot + hops + passes * other_domains * fabric.nic_latency,
        flow_ramp=flow_ramp,
        flow_byte=passes * per_local * (two_way + outside * per_port_byte),
        joules=passes * per_local * sent,
    )


def all_reduce_seconds(message: Real, ranks: Real, fabric: Fabric) -> Array:
    """Returns the time to all-reduce `message` bytes held by each of `ranks` chips [s].

    With N ranks in a domain, W(N) the rate of `local_bandwidth`, n domains and a port rate V:

        one-shot  α₁(N/8)^a + (N−1)·m/(η₁W) + a tree over domains: 2·log₂n·α + 2m/(0.92V)
        two-shot  α₂(N/8)^b + ρ√(m/1 MB) + 2(N−1)/N·m/(η₂W) + a ring: 2(n−1)·(α + m/(N·n·V))

    and hops on tori. One-shot: every rank reads all others. Two-shot: reduce-scatter and
    all-gather, so that each port carries only its chip's shard. One rank costs exactly nothing.

    Checked on measured tables of 8 H100: 3.6 µs at 16 KiB, 35.5 µs at 2 MiB, 197 µs at 32 MiB.
    """
    return links("all_reduce", ranks, fabric).seconds(message)


def all_gather_seconds(message: Real, ranks: Real, fabric: Fabric) -> Array:
    """Returns the time until each of `ranks` chips holds all `message` bytes [s].

    The second half of an all-reduce, with a latency of its own: each rank receives (N−1)/N of the
    message, once. A reduce-scatter takes as long.

        α₃(N/8)^c + ρ√(m/1 MB) + (N−1)/N·m/(η₂W)
    """
    return links("all_gather", ranks, fabric).seconds(message)


def collective_usage(op: Collective, rank: Rank) -> Usage:
    """Returns where a collective's time and energy go."""
    fabric = rank.machine.fabric
    # A literal 2 is the common case; scaling by it would cost a sweep.
    literal = isinstance(op.element_bytes, int) and op.element_bytes == 2
    width = op.width if literal else op.width * (0.5 * op.element_bytes)
    if op.kind == "permute":
        return crossing_usage(op.rows * width, op.ranks, rank)
    once = isinstance(op.copies, int) and op.copies == 1
    over = rank.once(
        op.kind if once else f"{op.kind} of copies",
        op.ranks if once else op.copies,
        lambda: links(op.kind, op.ranks, fabric, op.copies),
    )
    message = op.rows * (width * fabric.wire_bytes)
    seconds = over.seconds(message)
    return Usage(seconds, message * over.joules, network=seconds)


def crossing_usage(elements: Real, chips: Real, rank: Rank) -> Usage:
    """Returns the mean hand-over of activations from one of `chips` to the next in a pipeline.

    Of the chips − 1 neighbours of a chain, ⌈chips/domain⌉ − 1 are in different domains, and
    reached through a port.
    """
    fabric = rank.machine.fabric
    message = as_real(elements * fabric.wire_bytes)
    outside = _other_domains(chips, fabric) * inverse(maximum(1.0, as_real(chips) - 1.0))
    near = fabric.crossing_time + message * fabric.crossing_seconds_per_byte
    far = fabric.nic_latency + message * _port_byte(fabric)
    seconds = near + outside * maximum(0.0, far - near)
    joules = message * (fabric.energy + outside * fabric.nic_energy)
    return Usage(seconds, joules, network=seconds)


def crossing_port(elements: Real, chips: Real, fabric: Fabric) -> Array:
    """Returns how long a hand-over occupies the busiest port of a pipeline of `chips` [s].

    Bytes over bandwidth, of a port between domains where the pipeline has one.
    """
    far = minimum(_other_domains(chips, fabric), 1.0) * _port_byte(fabric)
    per_byte = maximum(far, fabric.crossing_seconds_per_byte)
    return as_real(elements * fabric.wire_bytes) * per_byte


def _other_domains(chips: Real, fabric: Fabric) -> Array:
    return maximum(1.0, ceil_div(as_real(chips), fabric.domain)) - 1.0


def _port_byte(fabric: Fabric) -> Array:
    return inverse(fabric.nic_efficiency * fabric.nic_bandwidth)
