"""Every number an estimate depends on beside model and plan, named: of chip, engine, operators.

A number of a chip has the name that its data sheet or its fit gives it (`memory_bandwidth`,
`kernels.fp8.efficiency`), else that of its place in `Machine`. Units are SI.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from perfmodel.chips import Chip
from perfmodel.efficiencies import Efficiencies
from perfmodel.engines import FIELDS, EngineEntry
from perfmodel.machine import Machine
from perfmodel.operators import KERNELS
from perfmodel.plan import Engine

GROUPS = ("chip", "kernels", "engine", "operators")
"""Data sheet, kernel constants, serving software, and speed of whole kinds of operator."""


class Inputs(NamedTuple):
    """What derivatives are taken in; a pytree."""

    machine: Machine
    engine: Engine
    efficiencies: Efficiencies


class Input(NamedTuple):
    """One number: its name, title for people, SI unit, group of `GROUPS`, and kind of source."""

    name: str
    title: str
    unit: str
    group: str
    kind: str


# By place in `Machine`: title and unit. {} stands for the kind of kernel, or the memory tier.
_MACHINE = {
    "kernels.peak": ("peak {}", "FLOP/s"),
    "kernels.efficiency": ("{} products: peak reached", "1"),
    "kernels.stream": ("{} products: bandwidth reached", "1"),
    "kernels.floor": ("{} products: floor", "s"),
    "kernels.split_latency": ("{} products: split latency", "s"),
    "kernels.quantise": ("{} products: quantisation traffic", "B"),
    "kernels.energy": ("energy per {} FLOP", "J/FLOP"),
    "experts.efficiency": ("{} expert products: peak reached", "1"),
    "experts.stream": ("{} expert products: bandwidth reached", "1"),
    "experts.floor": ("{} expert products: floor", "s"),
    "experts.split_latency": ("{} expert products: split latency", "s"),
    "experts.quantise": ("{} expert products: quantisation traffic", "B"),
    "compute.tile_rows": ("tile rows", "1"),
    "compute.tile_columns": ("tile columns", "1"),
    "compute.fill_rows": ("rows that fill an array", "1"),
    "compute.units": ("compute units", "1"),
    "compute.pes": ("processing elements of a mesh", "1"),
    "compute.split_time": ("shortest split of a product", "s"),
    "compute.wave": ("wave quantisation", "1"),
    "compute.vector_peak": ("peak of vector units", "FLOP/s"),
    "decode.stream": ("decode attention: bandwidth reached", "1"),
    "decode.item_time": ("decode attention: time of an item", "s"),
    "decode.item_exponent": ("decode attention: growth with head width", "1"),
    "decode.item_rate": ("decode attention: rate of a unit", "B/s"),
    "decode.single_item_time": ("decode attention: time of a one-head item", "s"),
    "decode.single_item_rate": ("decode attention: rate of a one-head unit", "B/s"),
    "decode.efficiency": ("decode attention: peak bf16 reached", "1"),
    "decode.min_group": ("decode attention: padded query heads", "1"),
    "decode.split_keys": ("decode attention: fewest keys in a split", "1"),
    "decode.floor": ("decode attention: floor", "s"),
    "decode.split_latency": ("decode attention: split latency", "s"),
    "decode.shards": ("decode attention: kv shards of a chip", "1"),
    "context.efficiency": ("context attention: peak bf16 reached", "1"),
    "context.narrow": ("context attention: speed-up in 8 bits", "1"),
    "context.width_exponent": ("context attention: growth with head width", "1"),
    "context.query_tile": ("context attention: queries of an item", "1"),
    "context.diagonal": ("context attention: masked pairs", "1"),
    "context.tail": ("context attention: imbalance of units", "1"),
    "context.longest": ("context attention: longest item", "1"),
    "context.item_time": ("context attention: time of an item", "s"),
    "context.stream": ("context attention: bandwidth reached", "1"),
    "context.floor": ("context attention: floor", "s"),
    "latent_decode.stream": ("latent decode attention: bandwidth reached", "1"),
    "latent_decode.item_time": ("latent decode attention: time of a sequence", "s"),
    "latent_decode.item_rate": ("latent decode attention: rate of a unit", "B/s"),
    "latent_decode.efficiency": ("latent decode attention: peak bf16 reached", "1"),
    "latent_decode.narrow": ("latent decode attention: speed-up in 8 bits", "1"),
    "latent_decode.min_group": ("latent decode attention: padded heads", "1"),
    "latent_decode.split_keys": ("latent decode attention: fewest keys in a split", "1"),
    "latent_decode.floor": ("latent decode attention: floor", "s"),
    "latent_decode.split_latency": ("latent decode attention: split latency", "s"),
    "latent_context.efficiency": ("latent context attention: peak bf16 reached", "1"),
    "latent_context.narrow": ("latent context attention: speed-up in 8 bits", "1"),
    "latent_context.width_exponent": ("latent context attention: growth with head width", "1"),
    "latent_context.query_tile": ("latent context attention: queries of an item", "1"),
    "latent_context.diagonal": ("latent context attention: masked pairs", "1"),
    "latent_context.tail": ("latent context attention: imbalance of units", "1"),
    "latent_context.longest": ("latent context attention: longest item", "1"),
    "latent_context.item_time": ("latent context attention: time of an item", "s"),
    "latent_context.stream": ("latent context attention: bandwidth reached", "1"),
    "latent_context.floor": ("latent context attention: floor", "s"),
    "scan.stream": ("recurrent layers: bandwidth reached", "1"),
    "scan.efficiency": ("recurrent layers: peak bf16 reached", "1"),
    "scan.floor": ("recurrent layers: floor", "s"),
    "context_scan.stream": ("recurrent layers, prompts: bandwidth reached", "1"),
    "context_scan.efficiency": ("recurrent layers, prompts: peak bf16 reached", "1"),
    "context_scan.floor": ("recurrent layers, prompts: floor", "s"),
    "context_scan.chunk_time": ("recurrent layers, prompts: time of a chunk", "s"),
    "memory.capacity": ("memory capacity{}", "B"),
    "memory.bandwidth": ("memory bandwidth{}", "B/s"),
    "memory.latency": ("latency of memory{}", "s"),
    "memory.energy": ("energy per byte of memory{}", "J/B"),
    "memory.spill_bandwidth": ("host link bandwidth", "B/s"),
    "memory.vector_stream": ("element-wise kernels: bandwidth reached", "1"),
    "memory.vector_floor": ("element-wise kernels: floor", "s"),
    "fabric.domain": ("chips of a link domain", "1"),
    "fabric.bandwidth": ("link bandwidth", "B/s"),
    "fabric.peer_bandwidth": ("link bandwidth to one peer", "B/s"),
    "fabric.oneshot_latency": ("one-shot collectives: latency", "s"),
    "fabric.oneshot_growth": ("one-shot collectives: growth with size", "1"),
    "fabric.oneshot_efficiency": ("one-shot collectives: link rate reached", "1"),
    "fabric.twoshot_latency": ("two-shot collectives: latency", "s"),
    "fabric.twoshot_growth": ("two-shot collectives: growth with size", "1"),
    "fabric.twoshot_efficiency": ("two-shot collectives: link rate reached", "1"),
    "fabric.twoshot_ramp": ("two-shot collectives: ramp", "s"),
    "fabric.gather_latency": ("gathers and all-to-alls: latency", "s"),
    "fabric.gather_growth": ("gathers and all-to-alls: growth with size", "1"),
    "fabric.hop_time": ("time of a hop between chips", "s"),
    "fabric.torus": ("messages pass through chips between", "1"),
    "fabric.open_ends": ("a torus without links around its ends", "1"),
    "fabric.in_network": ("switches add up", "1"),
    "fabric.axes": ("dimensions of a torus", "1"),
    "fabric.wire_bytes": ("bytes of an element on the wire", "B"),
    "fabric.nic_bandwidth": ("network bandwidth", "B/s"),
    "fabric.nic_efficiency": ("network: rate reached", "1"),
    "fabric.nic_latency": ("network latency", "s"),
    "fabric.crossing_time": ("link latency", "s"),
    "fabric.crossing_seconds_per_byte": ("time per byte between stages", "s/B"),
    "fabric.energy": ("energy per byte on links", "J/B"),
    "fabric.nic_energy": ("energy per byte on the network", "J/B"),
    "mesh.hop_time": ("time of a hop on the mesh", "s"),
    "mesh.tree_time": ("time of a tree level on the mesh", "s"),
    "mesh.edge_seconds_per_byte": ("time per byte on a mesh edge", "s/B"),
    "floors.serial": ("serial time of a layer", "s"),
    "floors.hosted": ("host times and workspace of the engine", "1"),
    "floors.launch": ("launch time of a layer", "s"),
    "power.idle": ("idle power", "W"),
    "power.running": ("running power before work", "W"),
    "power.limit": ("power limit (TDP)", "W"),
    "price": ("rent", "USD/s"),
    "site.pue": ("power usage effectiveness", "1"),
    "site.host_power": ("power of the host, per chip", "W"),
    "site.provisioned_power": ("provisioned power, per chip", "W"),
    "site.rack_chips": ("chips of a rack", "1"),
    "site.tariff": ("price of electricity", "USD/J"),
    "site.standing_power": ("power paid for beside the board's", "W"),
    "site.price_low": ("lowest price", "USD/s"),
    "site.price_high": ("highest price", "USD/s"),
}

# What a data sheet (or `hbm_gpu`, of what follows from one) calls a number of `Machine`.
_SHEET = {
    "compute.units": "units",
    "compute.vector_peak": "peak_vector",
    "memory.capacity": "memory_capacity",
    "memory.bandwidth": "memory_bandwidth",
    "memory.spill_bandwidth": "host_link_bandwidth",
    "fabric.domain": "domain",
    "fabric.bandwidth": "link_bandwidth",
    "fabric.peer_bandwidth": "peer_bandwidth",
    "fabric.nic_bandwidth": "nic_bandwidth",
    "fabric.nic_efficiency": "nic_efficiency",
    "fabric.nic_latency": "nic_latency",
    "fabric.crossing_time": "link_latency",
    "power.idle": "idle_power",
    "power.running": "running_power",
    "power.limit": "tdp",
    "price": "rent",
}

# Terms that a GPU lacks.
_NEUTRAL = {
    "compute.fill_rows", "compute.pes", "decode.shards", "fabric.hop_time", "fabric.axes",
    "fabric.torus", "fabric.open_ends", "fabric.in_network", "memory.latency", "floors.hosted",
    "mesh.hop_time", "mesh.tree_time", "mesh.edge_seconds_per_byte",
    "floors.serial", "floors.launch",
}  # fmt: skip

_ENGINE = {
    "memory_fraction": "engine: share of memory used",
    "workspace": "engine: workspace",
    "block": "engine: tokens of a KV page",
    "host_step": "engine: host time of a step",
    "host_sequence": "engine: host time of a sequence",
    "request_time": "engine: time before a prefill",
    "variability": "engine: variability of prefills",
    "token_budget": "engine: prompt tokens of a step",
    "exclusive": "engine: prompts in steps of their own",
    "reservation": "engine: output set aside on admission",
    "launch_graph": "engine: launches of a captured layer",
    "launch_eager": "engine: launches of a layer with a prompt",
    "launch_floor": "engine: launches of a layer, beside the device",
    "host_prefill": "engine: host time of a prefill step",
    "host_request": "engine: host time of a prompt",
    "admission_steps": "engine: steps before admission",
    "quantisation": "engine: separate quantisation left",
}

_EFFICIENCIES = {
    "matmul": "{} matrix products",
    "experts": "{} expert products",
    "decode": "decode attention",
    "context": "context attention",
    "vector": "element-wise kernels",
    "scan": "recurrent layers",
    "collective": "collectives",
}


def _places(tree: Any) -> list[tuple[str, int | None]]:
    """Returns the dotted path of every leaf, and the index of each element of an array."""
    found: list[tuple[str, int | None]] = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        dotted = ".".join(key.name for key in path)
        shape = np.shape(leaf)
        found += [(dotted, i) for i in range(shape[0])] if shape else [(dotted, None)]
    return found


def _of_machine(path: str, index: int | None, chip: Chip, priced: bool) -> Input:
    title, unit = _MACHINE[path]
    group, _, field = path.partition(".")
    if index is None:
        name = _SHEET.get(path, path)
    elif group in ("kernels", "experts"):
        kernel = KERNELS[index]
        title = title.format(kernel)
        name = f"peak_{kernel}" if field == "peak" else f"{group}.{kernel}.{field}"
    else:
        title = title.format(f" of tier {index + 1}" if index else "")
        name = f"{group}.{index + 1}.{field}" if index else _SHEET.get(path, path)
    if name in chip.constants:
        return Input(name, title, unit, "kernels", chip.constants[name].number.kind)
    if priced and name == "rent":
        kind = "given"
    elif name in chip.fields:
        kind = chip.fields[name].kind
    else:
        kind = "neutral" if path in _NEUTRAL else "derived"
    return Input(name, title, unit, "chip", kind)


def listed(inputs: Inputs, chip: Chip, engine: EngineEntry, priced: bool = False) -> list[Input]:
    """Returns the names of all numbers, in the order in which `inputs` is flattened.

    `priced` is whether the rent was given with the question instead of the data sheet.
    """
    units = {field.name: field.unit for field in FIELDS}
    names = [_of_machine(*place, chip, priced) for place in _places(inputs.machine)]
    for path, _ in _places(inputs.engine):
        kind = engine.sheet.numbers[path].kind
        names.append(Input(f"engine.{path}", _ENGINE[path], units[path], "engine", kind))
    for path, index in _places(inputs.efficiencies):
        kernel = "" if index is None else KERNELS[index]
        name = ".".join(part for part in ("efficiency", path, kernel) if part)
        title = f"speed of {_EFFICIENCIES[path].format(kernel)}"
        names.append(Input(name, title, "1", "operators", "neutral"))
    return names
