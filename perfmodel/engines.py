"""Engine profiles: what serving software adds, each number with its unit, source and kind.

A profile is a TOML file of the fields of `perfmodel.plan.Engine`; those that ship are in
`perfmodel/engine_profiles`.
"""

import dataclasses
import functools
import os
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from perfmodel import catalog
from perfmodel.catalog import Field, Number, Sheet
from perfmodel.errors import InputError, shorten
from perfmodel.plan import Engine

FIELDS = (
    Field("memory_fraction", "1", "share of device memory the engine may use", 0.01, 1.0, True),
    Field("workspace", "B", "context, graphs and library buffers on each chip", 0.0, 1e15, True),
    Field("block", "token", "tokens in a page of the KV cache", 1.0, 1e6, True),
    Field("host_step", "s", "host time between steps, not hidden", 0.0, 10.0, True),
    Field("host_sequence", "s", "the same, per running sequence", 0.0, 1.0, True),
    Field("request_time", "s", "before the prefill of a request", 0.0, 100.0, True),
    Field("variability", "1", "of prefill service as waiting requests see it", 0.0, 1.0, True),
    Field("token_budget", "token", "most prompt tokens in a step", 1.0, 1e9),
    Field("exclusive", "1", "prompts in steps of their own (1), or beside others (0)", 0.0, 1.0),
    Field("reservation", "1", "share of the output set aside on admission", 0.0, 1.0),
    Field("launch_graph", "s", "a layer waits for launches, in a captured step", 0.0, 1.0),
    Field("launch_eager", "s", "the same in a step with prompt tokens", 0.0, 1.0),
    Field("launch_floor", "s", "to launch a layer, beside the device", 0.0, 1.0),
    Field("host_prefill", "s", "host time that prompt tokens add to a step", 0.0, 10.0),
    Field("host_request", "s", "host time of a prompt, in the step it ends in", 0.0, 100.0),
    Field("admission_steps", "1", "decode steps that pass before a request starts", 0.0, 1e4),
    Field("quantisation", "1", "share of separate quantisation left", 0.0, 1.0),
)
"""The numbers of an engine profile; what it leaves out is as `perfmodel.plan.Engine` has it."""

_IDENTITY = ("name", "title", "version", "aliases")


@dataclasses.dataclass(frozen=True, eq=False)
class EngineEntry:
    """An engine profile: its numbers, the `sheet` with their provenance, and a `digest` of them."""

    name: str
    title: str
    engine: Engine
    sheet: Sheet
    digest: str


def _files() -> dict[str, Traversable]:
    folder = files("perfmodel").joinpath("engine_profiles")
    return {f.name[:-5]: f for f in folder.iterdir() if f.name.endswith(".toml")}


def names() -> list[str]:
    """Returns the names of the engine profiles that ship.

    >>> names()
    ['ideal', 'neutral', 'sglang', 'trtllm', 'vllm', 'vllm_2024']
    """
    return sorted(_files())


def _identity(table: Any, where: str) -> dict[str, Any]:
    place = f"{where}: [engine]"
    table = catalog.as_table(table, place)
    catalog.check_keys(table, _IDENTITY, place, "key")
    name = catalog.as_text(table.get("name"), f"{place} name", 100)
    title = catalog.as_text(table.get("title", name), f"{place} title", 200)
    aliases = table.get("aliases", [])
    if not isinstance(aliases, list):
        raise InputError(f"{place}: aliases must be a list of names")
    return {
        "name": name,
        "title": title,
        # Of the software that the numbers are of; "" where that has none.
        "version": catalog.as_text(table.get("version", ""), f"{place} version", 100),
        "aliases": tuple(catalog.as_text(alias, f"{place} aliases", 200) for alias in aliases),
    }


def _read(path: catalog.FilePath) -> EngineEntry:
    where = catalog.label(path)
    tables = catalog.read_toml(path)
    if "engine" not in tables:
        raise InputError(f"{where}: [engine] is missing (with a name)")
    identity = _identity(tables["engine"], where)
    sources = catalog.parse_sources(tables.get("sources", {}), where)
    fields = {name: entry for name, entry in tables.items() if name not in ("engine", "sources")}
    numbers = catalog.parse_numbers(fields, FIELDS, sources, where)
    values: dict[str, float] = {}
    neutral: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(Engine)}
    for field in FIELDS:
        if field.name not in numbers:
            usual, note = float(neutral[field.name]), "left out: the neutral value"
            numbers[field.name] = Number(usual, field.unit, "assumed", note=note)
        value = numbers[field.name].value
        if value is None:
            raise InputError(f"{where}: {field.name} [{field.unit}] must be known")
        values[field.name] = value
    sheet = Sheet(identity["name"], identity, numbers, sources, shorten(path, 200))
    digest = catalog.digest(values)
    return EngineEntry(identity["name"], identity["title"], Engine(**values), sheet, digest)


@functools.cache
def _catalogued(name: str) -> EngineEntry:
    return _read(_files()[name])


def load_engine(name_or_path: str | os.PathLike[str]) -> EngineEntry:
    """Returns an engine profile by name, or of a TOML file by its path.

    >>> load_engine("neutral").engine.block
    16.0
    """
    if isinstance(name_or_path, str):
        # Whatever looks like a path is one: a misspelt path must not be read as a name.
        if not name_or_path.endswith(".toml") and not {"/", "\\"} & set(name_or_path):
            known = {
                name: _identity(catalog.read_toml(file).get("engine"), file.name)["aliases"]
                for name, file in _files().items()
            }
            return _catalogued(catalog.resolve(name_or_path, known, "engine"))
    elif not isinstance(name_or_path, os.PathLike):
        raise InputError("engine: a name or a path is needed")
    return _read(os.fspath(name_or_path))
