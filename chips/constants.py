"""Kernel constants: their schema, the fits that hold them, and which fit a chip gets.

A fit is one TOML file in `fits/`, written by `perfmodel.calibrate` and never edited by hand, so
fitted values stay apart from datasheets. For each constant alone, the first of these counts:

    1. the chip's own fit
    2. a fit of its generation (the first by name): kernels of one generation are alike
    3. a measured fact of its datasheet (`gemm_efficiency_bf16` …)
    4. the family's default, shown as assumed
    5. outside of GPUs, what makes a term vanish

The origin is kept with every constant, so nothing stands in for something else unseen.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from perfmodel import catalog
from perfmodel.catalog import Field, Number, Sheet
from perfmodel.errors import InputError
from perfmodel.kernels import KERNELS

_SHARE = (0.01, 3.0)
_TIME = (0.0, 1.0)

_KERNEL = (
    ("efficiency", "1", "achieved share of the peak at full tiles and waves", *_SHARE),
    ("stream", "1", "achieved share of memory bandwidth", *_SHARE),
    ("floor", "s", "time of the smallest product", *_TIME),
    ("split_latency", "s", "extra time when the inner dimension is split", *_TIME),
    ("quantise", "B", "extra traffic per activation element", 0.0, 1e3),
)

_CONTEXT = (
    Field("context.efficiency", "1", "achieved share of the 16-bit peak, width 128", *_SHARE),
    Field("context.narrow", "1", "speed-up of 8-bit arithmetic", 0.05, 10.0),
    Field("context.width_exponent", "1", "growth of efficiency with the head width", -5.0, 5.0),
    Field("context.query_tile", "1", "queries in a work item", 1.0, 1e5),
    Field("context.diagonal", "1", "extra pairs per query, masked away", 0.0, 1e5),
    Field("context.tail", "1", "imbalance of work items over units", 0.0, 1e3),
    Field("context.longest", "1", "weight of the longest item as a bound", 0.0, 1e3),
    Field("context.item_time", "s", "fixed time of a work item", *_TIME),
    Field("context.stream", "1", "achieved share of memory bandwidth", 0.01, 1e6),
    Field("context.floor", "s", "time of the smallest call", *_TIME),
)
_LATENT = (
    Field("latent_decode.stream", "1", "achieved share of bandwidth on latent vectors", *_SHARE),
    Field("latent_decode.item_time", "s", "fixed time of a sequence", *_TIME),
    Field("latent_decode.item_rate", "B/s", "latent vectors that one unit sustains", 1e3, 1e35),
    Field("latent_decode.efficiency", "1", "achieved share of the 16-bit peak", 1e-4, 3.0),
    Field("latent_decode.narrow", "1", "speed-up of 8-bit arithmetic", 0.05, 10.0),
    Field("latent_decode.min_group", "1", "heads that a tile is padded to", 0.0, 1e4),
    Field("latent_decode.split_keys", "1", "fewest keys in a split", 1.0, 1e7),
    Field("latent_decode.floor", "s", "time of the smallest call", *_TIME),
    Field("latent_decode.split_latency", "s", "extra time when keys are split", *_TIME),
    *(
        dataclasses.replace(
            field,
            name=f"latent_{field.name}",
            meaning=f"{field.meaning}, keys from latent vectors",
        )
        for field in _CONTEXT
    ),
)

_SCAN = (
    *(
        Field(f"{group}.{name}", unit, f"{meaning}, {what}", low, high)
        for group, what in (("scan", "recurrences"), ("context_scan", "recurrences of prompts"))
        for name, unit, meaning, low, high in (
            ("stream", "1", "achieved share of bandwidth", *_SHARE),
            ("efficiency", "1", "achieved share of the 16-bit peak", 1e-4, 10.0),
            ("floor", "s", "time of the smallest call", *_TIME),
        )
    ),
    Field("context_scan.chunk_time", "s", "time of a prompt's chunk, recurrences", *_TIME),
)

CONSTANTS = (
    *(
        Field(f"kernels.{kind}.{name}", unit, f"{meaning}, {kind}", low, high)
        for kind in KERNELS
        for name, unit, meaning, low, high in _KERNEL
    ),
    *(
        Field(f"experts.{kind}.{name}", unit, f"{meaning}, experts in {kind}", low, high)
        for kind in KERNELS
        for name, unit, meaning, low, high in _KERNEL
    ),
    Field("compute.tile_rows", "1", "rows of a unit's output tile", 1.0, 1e4),
    Field("compute.tile_columns", "1", "columns of a unit's output tile", 1.0, 1e4),
    Field("compute.split_time", "s", "shortest piece of work worth splitting off", *_TIME),
    Field("compute.wave", "1", "strength of wave quantisation", 0.0, 1.0),
    Field("decode.stream", "1", "achieved share of bandwidth on keys and values", *_SHARE),
    Field("decode.item_time", "s", "fixed time of a work item", *_TIME),
    Field("decode.item_exponent", "1", "its growth with the head width", -5.0, 5.0),
    Field("decode.item_rate", "B/s", "keys and values that one unit sustains", 1e3, 1e35),
    Field("decode.single_item_time", "s", "item_time at one query head per kv head", *_TIME),
    Field("decode.single_item_rate", "B/s", "item_rate at one query head per kv head", 1e3, 1e35),
    Field("decode.efficiency", "1", "achieved share of the 16-bit peak", 1e-4, 3.0),
    Field("decode.min_group", "1", "query heads per kv head a tile is padded to", 0.0, 1e4),
    Field("decode.split_keys", "1", "fewest keys in a split", 1.0, 1e7),
    Field("decode.floor", "s", "time of the smallest call", *_TIME),
    Field("decode.split_latency", "s", "extra time when keys are split", *_TIME),
    *_CONTEXT,
    *_LATENT,
    *_SCAN,
    Field("fabric.oneshot_latency", "s", "one-shot all-reduce, 8 chips", *_TIME),
    Field("fabric.oneshot_growth", "1", "its growth with the group", -5.0, 5.0),
    Field("fabric.oneshot_efficiency", "1", "achieved share of the links, one-shot", *_SHARE),
    Field("fabric.twoshot_latency", "s", "two-shot all-reduce, 8 chips", *_TIME),
    Field("fabric.twoshot_growth", "1", "its growth with the group", -5.0, 5.0),
    Field("fabric.twoshot_efficiency", "1", "achieved share of the links, two-shot", *_SHARE),
    Field("fabric.twoshot_ramp", "s", "protocol ramp at 1 MB", *_TIME),
    Field("fabric.gather_latency", "s", "all-gather, reduce-scatter, all-to-all, 8 chips", *_TIME),
    Field("fabric.gather_growth", "1", "its growth with the group", -5.0, 5.0),
    Field("memory.vector_stream", "1", "share of bandwidth, element-wise kernels", *_SHARE),
    Field("memory.vector_floor", "s", "time of the smallest element-wise kernel", *_TIME),
    Field("mesh.reduction", "1", "time of a sum over a mesh, over that of its hops", 0.0, 10.0),
    Field("floors.serial", "s", "added to every layer", *_TIME),
    Field("floors.launch", "s", "to launch a layer, beside the device", *_TIME),
    Field("power.running", "1", "power of a running chip before any work, share of tdp", 0.0, 1.0),
    Field("power.compute_activity", "1", "dynamic power at full arithmetic, share", 0.0, 3.0),
    Field("power.memory_activity", "1", "dynamic power at full bandwidth, share", 0.0, 3.0),
    Field("power.link_activity", "1", "dynamic power at full link rate, share", 0.0, 3.0),
)

_NEUTRAL = {
    "reduction": 1.0,
    "efficiency": 1.0,
    "stream": 1.0,
    "vector_stream": 1.0,
    "oneshot_efficiency": 1.0,
    "twoshot_efficiency": 1.0,
    "tile_rows": 1.0,
    "tile_columns": 1.0,
    "item_rate": 1e30,
    "single_item_rate": 1e30,
    "min_group": 1.0,
    "split_keys": 1.0,
    "narrow": 1.0,
    "query_tile": 1.0,
}

_EXTRA = ("framework", "rows", "held_out", "error_median", "error_p90")


@dataclasses.dataclass(frozen=True)
class Constant:
    """A kernel constant as a chip gets it: the number, whose it is, and its source's title."""

    number: Number
    origin: str
    source: str

    @property
    def value(self) -> float:
        return float(self.number.value or 0.0)


def neutral() -> dict[str, float]:
    """Returns constants with which every term but the plain roofline vanishes.

    >>> neutral()["kernels.bf16.efficiency"], neutral()["decode.floor"]
    (1.0, 0.0)
    """
    return {field.name: _NEUTRAL.get(field.name.rsplit(".", 1)[1], 0.0) for field in CONSTANTS}


def parse_fit(tables: Mapping[str, Any], where: str) -> Sheet:
    """Returns the fit in the tables of a TOML file, fully checked."""
    catalog.check_keys(tables, ("fit", "constants", "sources"), where, "table")
    identity = catalog.as_table(tables.get("fit"), f"{where}: [fit]")
    name = catalog.as_text(identity.get("name"), f"{where}: [fit] name", 200)
    sources = catalog.parse_sources(tables.get("sources", {}), where)
    numbers = catalog.as_table(tables.get("constants", {}), f"{where}: [constants]")
    numbers = catalog.parse_numbers(numbers, CONSTANTS, sources, where, _EXTRA)
    return Sheet(name, identity, numbers, sources, where)


def folder() -> Traversable:
    """Returns where the fits that ship with the package lie."""
    return files("perfmodel.chips").joinpath("fits")


@functools.cache
def generations(fits: Traversable) -> dict[str, str]:
    """Returns the generation of each fit in a folder, in order of name."""
    found = {}
    for file in sorted(fits.iterdir(), key=lambda f: f.name):
        if file.name.endswith(".toml"):
            # Only the head is parsed: a whole fit takes ten times as long, for every chip.
            head = catalog.read_text(file).split("[constants", 1)[0]
            identity = catalog.parse_toml(head, file.name).get("fit", {})
            found[file.name.removesuffix(".toml")] = identity.get("generation", "")
    return found


@functools.cache
def read_fit(fits: Traversable, name: str) -> Sheet | None:
    """Returns a fit of a folder by name, or None."""
    file = fits.joinpath(f"{name}.toml")
    return parse_fit(catalog.read_toml(file), file.name) if file.is_file() else None


def _measured(name: str, sheet: Sheet, default: Mapping[str, Number]) -> Constant | None:
    """Returns a constant that follows from a measured fact of the datasheet."""
    if name == "kernels.bf16.stream":
        field, factor = "memory_efficiency", 1.0
    elif name.startswith(("kernels.", "experts.")) and name.endswith(".efficiency"):
        kind = name.split(".")[1]
        field, base = f"gemm_efficiency_{kind}", f"kernels.{kind}.efficiency"
        if sheet.value(field) is None:
            # A chip that misses its 16-bit peak, by clock or software, misses the others too.
            field, base = "gemm_efficiency_bf16", "kernels.bf16.efficiency"
        factor = 1.0
        if name != base:
            factor = (default[name].value or 0.0) / (default[base].value or 1.0)
    else:
        return None
    number = sheet.numbers.get(field)
    if number is None or number.value is None:
        return None
    if factor != 1.0:
        note = f"{field} times {factor:.3g}, the ratio of the family's efficiencies"
        number = dataclasses.replace(
            number, value=number.value * factor, kind="derived", note=note, low=None, high=None
        )
    return _constant(number, f"datasheet, {field}", sheet)


def resolve(sheet: Sheet, fits: Traversable | None = None) -> dict[str, Constant]:
    """Returns every constant of a chip, by the order of this module's first lines."""
    fits = folder() if fits is None else fits
    family, generation = sheet.identity["family"], sheet.identity["generation"]
    default = read_fit(fits, family)
    if default is None:
        raise InputError(f"fits/{family}.toml: the family's default constants are missing")
    missing = [f.name for f in CONSTANTS if default.value(f.name) is None]
    if missing and family == "hbm_gpu":
        raise InputError(f"fits/{family}.toml: missing {', '.join(missing[:5])}")
    # Other families have few constants of their own; the terms of the others vanish.
    vanish = {
        f.name: Number(neutral()[f.name], f.unit, "assumed", note="neutral: the term vanishes")
        for f in CONSTANTS
        if f.name in missing
    }
    default = dataclasses.replace(default, numbers={**vanish, **default.numbers})
    candidates = {} if sheet.name == family else {sheet.name: "own fit"}
    for name, other in generations(fits).items():
        if other and other == generation and name not in (sheet.name, family):
            candidates[name] = f"{name} (same generation)"
    # Read when first needed: a fit takes longer to read than all else of a chip.
    fitted = [(functools.partial(read_fit, fits, name), o) for name, o in candidates.items()]
    return {field.name: _choose(field.name, fitted, default, sheet) for field in CONSTANTS}


def _choose(
    name: str,
    fitted: Sequence[tuple[Callable[[], Sheet | None], str]],
    default: Sheet,
    sheet: Sheet,
) -> Constant:
    for read, origin in fitted:
        fit = read()
        if fit is not None and fit.value(name) is not None:
            return _constant(fit.numbers[name], origin, fit)
    measured = _measured(name, sheet, default.numbers)
    if measured is not None:
        return measured
    # What was fitted elsewhere is an assumption about this chip.
    number = dataclasses.replace(default.numbers[name], kind="assumed")
    return _constant(number, "family default", default)


def of(fit: Sheet, name: str, origin: str) -> Constant:
    """Returns a constant of a fit by name."""
    return _constant(fit.numbers[name], origin, fit)


def _constant(number: Number, origin: str, sheet: Sheet) -> Constant:
    source = sheet.sources.get(number.source)
    return Constant(number, origin, source.title if source else "")
