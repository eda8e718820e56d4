"""A plan as the commands that start it with an engine, and the benchmark that measures it.

`of_pool`, `of_size` and `of_system` read a `Deployment` from a result, `export` writes it for an
engine: a command for each server (`vllm serve`, `sglang.launch_server`, `trtllm-serve`), what
stands before servers of prefill and decode, and a benchmark with the lengths, concurrency and
shared prefix of the estimate. What the engine cannot do is refused in one line.

Requests are limited to a length that the KV pool of the estimate holds, and engines take the memory
that the estimate took: `gpu-memory-utilization` is the profile's share, and where an engine counts
otherwise, what gives weights, keys and values the same room.
"""

import dataclasses
import math
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import xarray as xr

from perfmodel import (
    _launch_sglang,
    _launch_trtllm,
    _launch_vllm,
    chips,
    engines,
    question,
)
from perfmodel._servers import Checkpoint, Deployment, Server, refuse
from perfmodel.chips import Chip
from perfmodel.engines import EngineEntry
from perfmodel.errors import Infeasible, InputError, nearest, shorten
from perfmodel.formats import PrecisionName, precision_numbers
from perfmodel.models import catalogue
from perfmodel.models.catalogue import ModelEntry
from perfmodel.models.transformer import kv_bytes_per_token
from perfmodel.question import ChipLike, EngineLike, ModelLike
from perfmodel.systems import SystemAsked

SLACK = 256
"""Tokens beyond prompt and output that servers allow a request: random prompts of a benchmark grow
when a tokenizer reads them back [token, assumed]."""

ENGINES: Mapping[str, Callable[[Deployment, str], dict[str, str]]] = {
    "vllm": _launch_vllm.commands,
    "sglang": _launch_sglang.commands,
    "trtllm": _launch_trtllm.commands,
}
"""Engines that a deployment can be written for."""

_FORMATS = ("weights", "activations", "kv")
_SUFFIXES = ("FP8", "FP4", "INT4", "INT8", "AWQ", "GPTQ")


@dataclasses.dataclass(frozen=True)
class Export:
    """Commands of a deployment: the engine with its version, notes, and scripts by file name."""

    engine: str
    title: str
    version: str
    notes: tuple[str, ...]
    scripts: Mapping[str, str]

    def files(self, command: str = "") -> dict[str, str]:
        """Returns the text of each file, with a header that says what made it."""
        return {name: f"{self._header(command)}\n{text}\n" for name, text in self.scripts.items()}

    def text(self, command: str = "") -> str:
        """Returns all scripts as one text to copy from, each after its name."""
        parts = [f"# ---- {name} ----\n{text}\n" for name, text in self.scripts.items()]
        return "\n".join([self._header(command), *parts])

    def _header(self, command: str) -> str:
        from perfmodel import __version__

        made = [f"perfmodel {__version__} for {self.title} {self.version}", command, *self.notes]
        lines = [f"# {shorten(line, 4000)}" for line in made if line]
        return "\n".join(["#!/usr/bin/env bash", *lines, ""])

    def write(self, folder: str | os.PathLike[str], command: str = "") -> dict[str, Path]:
        """Writes the scripts to a folder and returns their paths by file name."""
        base = Path(folder)
        paths = {}
        try:
            base.mkdir(parents=True, exist_ok=True)
            for name, text in self.files(command).items():
                paths[name] = base / name
                paths[name].write_text(text, encoding="utf-8")
                paths[name].chmod(0o755)
        except OSError as error:
            told = error.strerror or error
            raise InputError(f"{shorten(base, 120)}: cannot be written ({told})") from None
        return paths


def documented(engine: str) -> dict[str, Any]:
    """Returns the version of an engine, and the flags it documents with their sources.

    >>> documented("vllm")["engine"]["title"]
    'vLLM'
    """
    if engine not in ENGINES:
        raise InputError(
            f"--export: unknown engine {shorten(engine, 30)!r}{nearest(engine, ENGINES)}"
        )
    folder = files("perfmodel").joinpath("engine_flags")
    return tomllib.loads(folder.joinpath(f"{engine}.toml").read_text(encoding="utf-8"))


def export(engine: str, deployment: Deployment) -> Export:
    """Returns the commands of a deployment; InputError for what the engine cannot do."""
    known = documented(engine)["engine"]
    label = f"{known['title']} {known['version']}"
    for server in deployment.servers:
        identity = server.chip.sheet.identity
        if identity["vendor"] not in known["vendors"] or identity["family"] != "hbm_gpu":
            told = " and ".join(known["vendors"])
            raise refuse(
                label, f"does not run on {server.chip.name}, but on GPUs of {told}", "h100"
            )
    scripts = ENGINES[engine](deployment, label)
    return Export(engine, known["title"], known["version"], _notes(deployment), scripts)


def _notes(deployment: Deployment) -> tuple[str, ...]:
    """Returns what whoever starts the commands must know."""
    notes = []
    if len(deployment.servers) == 1 and deployment.servers[0].replicas > 1:
        count = deployment.servers[0].replicas
        notes.append(f"One of {count} equal replicas; the benchmark is of this one.")
    if deployment.apart:
        notes.append(
            "Each script in a shell of its own: servers, what stands before them, benchmark."
        )
        generations = {server.chip.sheet.identity["generation"] for server in deployment.servers}
        if len(generations) > 1:
            notes.append("Chips of two generations: both sides must choose one attention backend.")
    elif deployment.servers[0].nodes > 1:
        notes.append("Each script of a server on a node of its own.")
    return tuple(notes)


# ---- From results ----


def of_pool(
    model: ModelLike,
    chip: ChipLike,
    found: xr.Dataset,
    *,
    engine: EngineLike,
    weights: str | None = None,
    activations: str | None = None,
    kv: str | None = None,
) -> Deployment:
    """Returns the deployment of a design that `perfmodel.estimate` has found.

    Args: as given to `estimate`. Raises Infeasible where the design cannot run.
    """
    network = question.find_model(model)
    entry = chip if isinstance(chip, Chip) else chips.load_chip(chip)
    read = {name: found[name].item() for name in found.data_vars if not found[name].dims}
    if not math.isfinite(read["e2e_s"]):
        raise Infeasible(f"--export: {read['binding']}: nothing to start that runs")
    if read["regions"] > 1 or read["offload"] > 0.0:
        told = "regions" if read["regions"] > 1 else "offload"
        raise InputError(f"--export: engines know no {told} (nearest: leave it out)")
    precision = question.own_precision(network, weights, activations, kv)
    profile = engine if isinstance(engine, EngineEntry) else engines.load_engine(engine)
    server = _server(
        "serve", entry, precision, profile, _Memory(read["weight_bytes"], read["activation_bytes"]),
        {name: int(read[name]) for name in ("tp", "pp", "ep", "attention_dp", "cp", "chunk")},
        replicas=int(read["replicas"]), sequences=read["running"],
        length=_length(network, found, precision, read["memory_margin"], entry),
    )  # fmt: skip
    return _deployment(network, (server,), found, int(read["batch"]))


def of_size(
    model: ModelLike, given: Sequence[ChipLike], found: xr.Dataset, *, engine: EngineLike
) -> Deployment:
    """Returns the smallest deployment that `perfmodel.size` has found.

    Args: chips as `given` to `size`, and its `engine`.
    """
    network, point = question.find_model(model), found.isel(deployment=0)
    name, label = str(point["chip"].item()), str(point["precision"].item())
    asked = [each if isinstance(each, Chip) else chips.load_chip(each) for each in given]
    entry = next((each for each in asked if each.name == name), None) or chips.load_chip(name)
    formats: dict[str, str] = {}
    if label != str(network.precision):
        parts = label.split("/")
        parts = parts if len(parts) == len(_FORMATS) else parts * len(_FORMATS)
        formats = dict(zip(_FORMATS, parts, strict=True))
    return of_pool(network, entry, point, engine=engine, **formats)


def of_system(
    made: SystemAsked, found: xr.Dataset, draft: ModelLike | None = None, tokens: float = 0.0
) -> Deployment:
    """Returns the deployment of a system that `perfmodel.systems` has found.

    Args: `draft`, the draft model or "mtp", with the `tokens` of a cycle. Raises InputError for
    systems that no engine serves, Infeasible where it cannot run.
    """
    if not math.isfinite(found["e2e_s"].item()):
        raise Infeasible(f"--export: {found['binding'].item()}: nothing to start that runs")
    where, model = made.where, made.asked.model
    if where.attention != where.ffn:
        raise InputError("--export: no engine decodes with attention and FFN on pools of their own")
    if draft is not None and where.draft != where.attention:
        raise InputError("--export: no engine drafts on a pool of its own (nearest: --draft MODEL)")
    if tokens != int(tokens):
        raise InputError(f"--export: engines draft whole tokens, not {tokens:g}")
    apart = where.prefill != where.attention
    roles = {"serve": where.attention}
    if apart:
        roles = {"prefill": where.prefill, "decode": where.attention}
    replicas = {role: _whole(name, made.pools[name].replicas) for role, name in roles.items()}
    # One replica of a single pool is started, every replica of decoding where there are two.
    concurrency = math.ceil(float(found.attrs["batch"]) * replicas.get("decode", 1))
    at_once = dict.fromkeys(roles, float(found["running"]))
    if apart:
        # Every request may be waiting for its prompt, each at one of the servers.
        at_once["prefill"] = concurrency / replicas["prefill"]
    servers = tuple(
        _system_server(made, found, role, name, replicas[role], at_once[role])
        for role, name in roles.items()
    )
    deployment = _deployment(model, servers, found, concurrency)
    if draft is None:
        return deployment
    if draft == "eagle":
        raise InputError("--export: an eagle head has no checkpoint to name (nearest: mtp)")
    if draft == "mtp":
        return dataclasses.replace(deployment, draft_tokens=int(tokens))
    guess = checkpoint(question.find_model(draft))
    longest, needed = int(guess.entry.model.max_context), deployment.isl + deployment.osl
    if needed > longest:
        told = f"{needed:,} tokens exceed the context of the draft, {longest:,}"
        raise InputError(f"--export: {told}")
    servers = tuple(
        dataclasses.replace(server, length=min(server.length, longest)) for server in servers
    )
    return dataclasses.replace(deployment, servers=servers, draft=guess, draft_tokens=int(tokens))


def _whole(name: str, replicas: float) -> int:
    """Returns replicas of a pool, which must be whole servers."""
    if replicas != int(replicas):
        near = max(round(replicas), 1)
        raise InputError(
            f"--export: {replicas:g} replicas of {name} are no whole servers (nearest: {near})"
        )
    return int(replicas)


def _system_server(
    made: SystemAsked, found: xr.Dataset, role: str, name: str, replicas: int, sequences: float
) -> Server:
    """Returns the server of a pool of a system."""
    asked, here = made.pools[name], found.sel(pool=name)
    if asked.regions > 1:
        raise InputError("--export: engines know no regions (nearest: leave it out)")
    part = made.built.prefill if role == "prefill" else made.built.attention
    precision = made.asked.formats[list(made.pools).index(name)]
    (entry,) = question.unique_chips([asked.chip])
    margin = float(here["pool_memory_margin"])
    return _server(
        role, entry, precision, made.asked.engine, _Memory(float(here["pool_weight_bytes"])),
        {"tp": asked.tp, "pp": asked.pp, "ep": asked.ep, "attention_dp": asked.attention_dp,
         "cp": 1, "chunk": int(part.plan.chunk)},
        replicas=replicas, sequences=sequences,
        length=_length(made.asked.model, found, precision, margin, entry),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Bytes of weights on a chip, and of intermediate results."""

    weights: float
    activations: float = 0.0


def _server(
    role: str,
    chip: Chip,
    precision: PrecisionName,
    profile: EngineEntry,
    memory: _Memory,
    degrees: Mapping[str, int],
    *,
    replicas: int,
    sequences: float,
    length: int,
) -> Server:
    """Returns a server with the shares of memory that leave its engine the estimate's KV pool."""
    capacity = float(chip.fields["memory_capacity"].value or 0.0)
    fraction = float(profile.engine.memory_fraction)
    aside = float(profile.engine.workspace) + memory.activations
    pool = fraction * capacity - memory.weights - aside
    left = capacity - memory.weights - aside
    return Server(
        role=role, chip=chip, precision=precision, **degrees, replicas=replicas,
        sequences=max(math.ceil(sequences), 1), length=length,
        fraction=_down(fraction), static=_down(fraction - aside / capacity),
        pool=_down(pool / left),
    )  # fmt: skip


def _down(share: float) -> float:
    """Returns a share with three digits, rounded down; nearly whole thousandths are whole."""
    return math.floor(share * 1000.0 + 1e-3) / 1000.0


def _length(
    model: ModelEntry, found: xr.Dataset, precision: PrecisionName, margin: float, chip: Chip
) -> int:
    """Returns the most tokens of a request [token]: prompt, output and `SLACK`, and no more than
    the KV pool and the network's context hold.

    Args: `margin`, memory left beside one request, of a chip's capacity.
    """
    needed = int(found.attrs["isl"]) + int(found.attrs["osl"])
    if margin < 0.0:
        raise Infeasible(f"--export: the KV pool does not hold one request of {needed:,} tokens")
    spare = margin * float(chip.fields["memory_capacity"].value or 0.0)
    # Of a token over all layers and heads: a chip holds no more of it.
    each = float(kv_bytes_per_token(model.model, precision_numbers(precision)))
    held = SLACK if each <= 0.0 else int(min(spare / each, SLACK))
    return min(needed + held, int(model.model.max_context))


def _deployment(
    model: ModelEntry, servers: tuple[Server, ...], found: xr.Dataset, concurrency: int
) -> Deployment:
    isl = int(found.attrs["isl"])
    # At least the last token of a prompt is computed.
    shared = min(round(isl * float(found.attrs["prefix_hit"])), isl - 1)
    return Deployment(checkpoint(model), servers, isl, int(found.attrs["osl"]), shared, concurrency)


def checkpoint(model: ModelEntry) -> Checkpoint:
    """Returns the name or folder by which engines load a network.

    >>> checkpoint(question.find_model("llama-3.3-70b")).path
    'meta-llama/Llama-3.3-70B-Instruct'
    """
    known = catalogue.aliases().get(model.name, ()) if model.published else None
    if known is None:
        folder, file = os.path.split(os.path.abspath(model.path))
        if file != "config.json":
            told = f"a folder with a config.json and weights, not {shorten(file)}"
            raise InputError(f"--export: engines load {told}")
        return Checkpoint(folder, model)
    named = [name for name in known if "/" in name]
    plain = str(model.precision) == "bf16"
    fit = [n for n in named if not plain or not any(end in n.upper() for end in _SUFFIXES)]
    if not fit or not {"checkpoint", "card"} & set(model.sources):
        raise InputError(f"--export: no checkpoint of {model.name} is public")
    return Checkpoint(fit[0], model)
