"""Datasheets of chips: the schema, the checks, and what fills a missing number.

`FIELDS` is the single truth about a datasheet: files are checked against it, and
`docs/chip-fields.md` is made from it. A sheet needs three numbers; what else it leaves out or
calls unknown is taken from its family's assumptions (`families/*.toml`) and shown as assumed.
Those of `PARTICULAR` belong to some families only; without them they are neutral.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from perfmodel import catalog
from perfmodel.catalog import Field, Number, Sheet
from perfmodel.errors import InputError, nearest, shorten
from perfmodel.kernels import KERNELS

FAMILIES = (
    "hbm_gpu", "wafer", "lpu", "corsair", "dataflow", "trainium", "tpu", "gaudi", "ascend",
    "tensix", "cpu",
)  # fmt: skip
"""Chip families, by the name a datasheet gives: each has a module and a table of assumptions."""

_RATE = (1e9, 1e20)
_BYTES_PER_SECOND = (1e6, 1e18)

PARTICULAR = (
    Field("memory2_capacity", "B", "second memory, slower than the first", 0.0, 1e15),
    Field("memory2_bandwidth", "B/s", "second memory", *_BYTES_PER_SECOND),
    Field("memory2_latency", "s", "first byte from the second memory", 0.0, 1.0),
    Field("memory3_capacity", "B", "third memory, slower than the second", 0.0, 1e15),
    Field("memory3_bandwidth", "B/s", "third memory", *_BYTES_PER_SECOND),
    Field("memory3_latency", "s", "first byte from the third memory", 0.0, 1.0),
    Field("host_memory", "B", "memory of the host per chip, over host_link_bandwidth", 0.0, 1e15),
    Field("host_latency", "s", "first byte from the host", 0.0, 1.0),
    Field("slow_memory_energy", "J/B", "per byte of any memory but the first", 0.0, 1e-6),
    Field("elements", "1", "processing elements of an on-chip mesh", 1.0, 1e8),
    Field("clock", "Hz", "clock of the matrix units or elements", 1e6, 1e11),
    Field("array_rows", "1", "rows that fill a systolic array", 0.0, 1e4),
    Field("cores", "1", "parts of a chip that must each hold a kv head", 1.0, 1e4),
    Field("torus_axes", "1", "dimensions of a ring or torus of chips; 0: switch or mesh", 0.0, 6.0),
    Field("hop_time", "s", "from a chip of a ring or torus to its neighbour", 0.0, 1.0),
    Field("open_ends", "1", "1: a torus without links around its ends", 0.0, 1.0),
    Field("in_network", "1", "1: switches add up what passes through them", 0.0, 1.0),
    Field("regions", "1", "most stages of a pipeline side by side on one chip", 1.0, 1e4),
    Field("static", "1", "1: runs a compiled schedule, without a host between steps", 0.0, 1.0),
    Field("prompt_chunk", "token", "prompt tokens in a step, where a plan does not say", 1.0, 1e6),
    Field("wire_bytes", "B", "one activation element on the wire between chips", 0.25, 8.0),
)

FIELDS = (
    Field("peak_bf16", "FLOP/s", "dense 16-bit matrix rate; a multiply-add is two", *_RATE, True),
    Field("peak_fp8", "FLOP/s", "dense 8-bit float matrix rate; 0: unsupported", 0.0, 1e20),
    Field("peak_int8", "FLOP/s", "dense 8-bit integer matrix rate; 0: unsupported", 0.0, 1e20),
    Field("peak_fp4", "FLOP/s", "dense 4-bit float matrix rate; 0: unsupported", 0.0, 1e20),
    Field("peak_vector", "FLOP/s", "32-bit rate outside the matrix units", *_RATE),
    Field("units", "1", "compute units that take tiles (SM, CU)", 1.0, 1e6),
    Field("memory_capacity", "B", "device memory, as the driver reports it", 1e6, 1e15, True),
    Field("memory_bandwidth", "B/s", "device memory, data-sheet rate", *_BYTES_PER_SECOND, True),
    Field("cache_capacity", "B", "last-level cache on the device", 0.0, 1e13),
    Field("link_bandwidth", "B/s", "to all peers, per chip, one direction", *_BYTES_PER_SECOND),
    Field("peer_bandwidth", "B/s", "to one peer, one direction", *_BYTES_PER_SECOND),
    Field("domain", "1", "chips joined by those links", 1.0, 1e6),
    Field("chips_per_node", "1", "chips in one server or tray", 1.0, 1e6),
    Field("link_latency", "s", "one message from chip to chip", 0.0, 1.0),
    Field("nic_bandwidth", "B/s", "between domains, per chip, one direction", *_BYTES_PER_SECOND),
    Field("nic_efficiency", "1", "achieved share of that", 0.01, 1.0),
    Field("nic_latency", "s", "one step between domains", 0.0, 1.0),
    Field("host_link_bandwidth", "B/s", "to host memory, one direction", *_BYTES_PER_SECOND),
    Field("tdp", "W", "board power limit of one chip", 1.0, 1e6),
    Field("idle_power", "W", "board power at rest", 0.0, 1e6),
    Field("server_power", "W", "rated power of the server or rack, per chip", 1.0, 1e6),
    Field("rent", "USD/h", "on-demand price of one chip", 0.0, 1e5),
    Field("purchase", "USD", "list price of one chip", 0.0, 1e9),
    Field("server_purchase", "USD", "list price of a server or rack, per chip in it", 0.0, 1e9),
    Field("manufacturing_cost", "USD", "estimated cost of making one chip", 0.0, 1e9),
    Field("rack_chips", "1", "chips in a rack", 1.0, 1e6),
    Field("gemm_efficiency_bf16", "1", "achieved share of peak_bf16, large products", 0.01, 1.0),
    Field("gemm_efficiency_fp8", "1", "achieved share of peak_fp8, large products", 0.01, 1.0),
    Field("gemm_efficiency_int8", "1", "achieved share of peak_int8, large products", 0.01, 1.0),
    Field("gemm_efficiency_fp4", "1", "achieved share of peak_fp4, large products", 0.01, 1.0),
    Field("memory_efficiency", "1", "achieved share of memory_bandwidth, weights", 0.01, 1.0),
    *PARTICULAR,
)

ASSUMPTIONS = (
    Field("vector_share", "1", "peak_vector over peak_bf16", 0.0, 10.0, True),
    Field("units", "1", "compute units", 1.0, 1e6, True),
    Field("link_share", "1", "link_bandwidth over memory_bandwidth", 0.0, 10.0, True),
    Field("domain", "1", "chips joined by the links", 1.0, 1e6, True),
    Field("link_latency", "s", "one message from chip to chip", 0.0, 1.0, True),
    Field("nic_bandwidth", "B/s", "between domains, per chip", *_BYTES_PER_SECOND, True),
    Field("nic_efficiency", "1", "achieved share of that", 0.0, 1.0, True),
    Field("nic_latency", "s", "one step between domains", 0.0, 1.0, True),
    Field("host_link_bandwidth", "B/s", "to host memory", *_BYTES_PER_SECOND, True),
    Field("power_per_peak", "W·s/FLOP", "tdp over peak_bf16", 0.0, 1e-6, True),
    Field("idle_share", "1", "idle_power over tdp", 0.0, 1.0, True),
    *PARTICULAR,
)

_UNITS = {field.name: field.unit for field in FIELDS}

# Kernels that expand narrow weights on the way in compute in 16 bits.
_EXPANDED = ("w8a16", "w4a16")

PEAK_FIELDS = {k: "peak_bf16" if k in _EXPANDED else f"peak_{k}" for k in KERNELS}
"""The datasheet field that holds the peak of each kernel kind."""

# Facts to show, or (the price) 0 where unknown: these may stay unknown.
_OPTIONAL = (
    "rent", "cache_capacity", "chips_per_node", "server_power", "purchase", "server_purchase",
    "manufacturing_cost", "rack_chips",
)  # fmt: skip
_FORMATS = ("peak_fp8", "peak_int8", "peak_fp4")
_IDENTITY = ("name", "title", "vendor", "family", "generation", "year", "aliases")
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")


def parse_identity(table: Any, where: str) -> dict[str, Any]:
    """Returns the checked `[chip]` table of a datasheet."""
    place = f"{where}: [chip]"
    table = catalog.as_table(table, place)
    catalog.check_keys(table, _IDENTITY, place, "key")
    texts = {key: value for key, value in table.items() if key not in ("year", "aliases")}
    known = {key: catalog.as_text(value, f"{place} {key}", 200) for key, value in texts.items()}
    if not _NAME.fullmatch(known.get("name", "")):
        given = f", not '{shorten(known['name'])}'" if "name" in known else ""
        raise InputError(f"{place}: name must be lower-case letters, digits and _{given}")
    if known.get("family") not in FAMILIES:
        given = known.get("family", "")
        what = f"unknown family '{shorten(given)}'" if given else "family is missing"
        raise InputError(f"{place}: {what}{nearest(given, FAMILIES)}")
    year = table.get("year")
    if year is not None and not 1990 <= catalog.as_number(year, f"{place} year") <= 2100:
        raise InputError(f"{place}: year {shorten(year)} is outside 1990 to 2100")
    aliases = table.get("aliases", [])
    if not isinstance(aliases, list):
        raise InputError(f"{place}: aliases must be a list of names")
    names = tuple(catalog.as_text(alias, f"{place} aliases", 200) for alias in aliases)
    empty = {"title": known["name"], "vendor": "", "generation": ""}
    return empty | known | {"year": None if year is None else int(year), "aliases": names}


def parse_sheet(tables: Mapping[str, Any], where: str, path: str = "") -> Sheet:
    """Returns the datasheet in the tables of a TOML file, fully checked."""
    if "chip" not in tables:
        raise InputError(f"{where}: [chip] is missing (with name and family)")
    identity = parse_identity(tables["chip"], where)
    sources = catalog.parse_sources(tables.get("sources", {}), where)
    fields = {name: entry for name, entry in tables.items() if name not in ("chip", "sources")}
    numbers = catalog.parse_numbers(fields, FIELDS, sources, where)
    for field in FIELDS:
        if field.required and numbers[field.name].value is None:
            raise InputError(f"{where}: {field.name} [{field.unit}] must be known")
    _check_consistent(numbers, where)
    _check_power(numbers, identity["family"], where)
    return Sheet(identity["name"], identity, numbers, sources, path or where)


def _check_consistent(numbers: Mapping[str, Number], where: str) -> None:
    """Raises where two numbers of one sheet contradict each other."""

    def ordered(small: str, large: str, why: str) -> None:
        a, b = (numbers[f].value if f in numbers else None for f in (small, large))
        if a is not None and b is not None and a > b:
            raise InputError(f"{where}: {small} {a:g} exceeds {large} {b:g}; {why}")

    # Integers are left out: a Blackwell Ultra multiplies them at a fifteenth of its 16-bit rate.
    if numbers.get("peak_fp8") and numbers["peak_fp8"].value:
        ordered("peak_bf16", "peak_fp8", "a narrower format is not slower (0 if unsupported)")
    if numbers.get("peak_fp4") and numbers["peak_fp4"].value:
        ordered("peak_fp8", "peak_fp4", "a narrower format is not slower (0 if unsupported)")
    ordered("peer_bandwidth", "link_bandwidth", "one peer cannot get more than all")
    ordered("memory2_bandwidth", "memory_bandwidth", "memories are listed fastest first")
    ordered("memory3_bandwidth", "memory2_bandwidth", "memories are listed fastest first")
    for name in ("memory2", "memory3"):
        size, rate = (name + part in numbers for part in ("_capacity", "_bandwidth"))
        if size != rate:
            missing = name + ("_bandwidth" if size else "_capacity")
            raise InputError(f"{where}: {missing} is missing beside the other number of {name}")
    ordered("idle_power", "tdp", "a chip at rest draws less than its limit")
    ordered("tdp", "server_power", "a server draws more than its chips")


LEAST_ENERGY = {
    "peak_bf16": 0.038e-12, "peak_fp8": 0.009e-12, "peak_int8": 0.02e-12, "peak_fp4": 0.004e-12,
    "memory_bandwidth": 0.1e-12, "link_bandwidth": 1e-12,
}  # fmt: skip
"""Least energy of a FLOP or a byte at full rate that is believed [J], assumed.

A tenth of the least power limit over the rate among chips that are made or announced: 0.38 pJ a
16-bit FLOP, 0.088 pJ in 8 bits, 0.044 pJ in 4 (all Rubin CPX; 0.2 pJ for integers), 1 pJ a byte of
on-chip memory (WSE-2). Links:
a tenth of about 1.3 pJ a bit of NVLink-C2C. What is below is a slip of units.
"""

_DRAM = 3e-12
"""The same of a byte from stacked memory, a tenth of HBM2's 3.9 pJ a bit (O'Connor and others,
"Fine-Grained DRAM", MICRO 2017); assumed."""

_STACKED = ("hbm_gpu", "trainium", "tpu", "gaudi", "ascend")
"""Families whose first memory is that."""

_FAR_ABOVE = 10.0


def _check_power(numbers: Mapping[str, Number], family: str, where: str) -> None:
    """Raises where a rate takes far more power than the chip may draw."""
    values = {name: number.value for name, number in numbers.items() if number.value}
    limit = values.get("tdp")
    if limit is None:
        return
    believed = LEAST_ENERGY | ({"memory_bandwidth": _DRAM} if family in _STACKED else {})
    spent = [(rate, "", least, limit) for rate, least in believed.items()]
    slow = values.get("slow_memory_energy", 0.0)
    # Given energies are taken at their word, and memories need not all run at once.
    given = f"slow_memory_energy {slow:g} J/B × "
    spent += [(f"memory{n}_bandwidth", given, slow, _FAR_ABOVE * limit) for n in (2, 3)]
    for name, energy, each, most in spent:
        rate = values.get(name, 0.0)
        if rate * each > most:
            at = "" if energy else f" at {each * 1e12:g} pJ each, a tenth of what is made,"
            raise InputError(
                f"{where}: {energy}{name} {rate:g} {_UNITS[name]}{at} takes "
                f"{rate * each:,.0f} W, {'far ' if energy else ''}above tdp {limit:g} W "
                f"(nearest: {name} {most / each:.3g})"
            )


@functools.cache
def assumptions(family: str) -> Sheet:
    """Returns the numbers a family assumes of a chip whose datasheet leaves them out."""
    path = files("perfmodel.chips").joinpath("families", f"{family}.toml")
    tables = catalog.read_toml(path)
    where = catalog.label(path)
    identity = catalog.as_table(tables.pop("family", None), f"{where}: [family]")
    sources = catalog.parse_sources(tables.pop("sources", {}), where)
    numbers = catalog.parse_numbers(tables, ASSUMPTIONS, sources, where)
    return Sheet(family, identity, numbers, sources, where)


WIDE = 2.0
"""How far an assumed number may be off, as a factor, where its family gives no range; assumed."""

# Counts and choices: another value of these is another chip, not the same known less well.
_CHOSEN = (
    "units", "domain", "elements", "array_rows", "cores", "torus_axes", "open_ends", "in_network",
    "regions", "static", "prompt_chunk", "wire_bytes", "memory2_capacity", "memory3_capacity",
    "host_memory",
)  # fmt: skip


def _span(number: Number, name: str) -> tuple[float, float]:
    """Returns the range of an assumed number: its family's, or a wide one within the schema's."""
    value = float(number.value or 0.0)
    field = next(f for f in ASSUMPTIONS if f.name == name)
    most = 1.0 if name.endswith("_efficiency") else field.high
    low = max(value / WIDE, field.low) if number.low is None else number.low
    high = min(value * WIDE, most) if number.high is None else number.high
    return low, high


def complete(sheet: Sheet, assumed: Sheet) -> dict[str, Number]:
    """Returns every number the family function needs, each marked with where it came from.

    Numbers that the sheet leaves out or calls unknown become `assumed`; the note says what they
    follow from. Formats not given are taken as unsupported; an unknown price stays unknown.
    """
    known = {name: number for name, number in sheet.numbers.items() if number.value is not None}
    values = {name: float(number.value or 0.0) for name, number in known.items()}

    def assume(field: str, value: float, why: str, span: tuple[float, float] | None = None) -> None:
        if field not in known:
            values[field] = value
            low, high = (None, None) if span is None else span
            known[field] = Number(value, _UNITS[field], "assumed", note=why, low=low, high=high)

    def share(field: str, name: str, of: str) -> None:
        factor = assumed.value(name) or 0.0
        low, high = _span(assumed.numbers[name], name)
        span = low * values[of], high * values[of]
        assume(field, factor * values[of], f"{factor:g} times {of}", span)

    for field in _FORMATS:
        assume(field, 0.0, "not given, taken as unsupported")
    share("peak_vector", "vector_share", "peak_bf16")
    share("link_bandwidth", "link_share", "memory_bandwidth")
    # A sheet may give the rate to one peer alone; all peers together cannot get less.
    values["link_bandwidth"] = max(values["link_bandwidth"], values.get("peer_bandwidth", 0.0))
    assume("peer_bandwidth", values["link_bandwidth"], "a switch, full rate to one peer")
    share("tdp", "power_per_peak", "peak_bf16")
    values["tdp"] = max(values["tdp"], values.get("idle_power", 0.0))
    share("idle_power", "idle_share", "tdp")
    for field in (f.name for f in ASSUMPTIONS if f.name in _UNITS):
        value = assumed.value(field)
        if value is not None:
            number = assumed.numbers[field]
            span = _span(number, field) if field not in _CHOSEN and value else None
            assume(field, value, number.note, span)
    complete = {
        name: dataclasses.replace(number, value=values[name]) for name, number in known.items()
    }
    for name in _OPTIONAL:
        if name not in complete:
            missing = Number(None, _UNITS[name], "unknown", note="not given")
            complete[name] = sheet.numbers.get(name, missing)
    return complete


def supported(values: Mapping[str, float]) -> tuple[str, ...]:
    """Returns the kernel kinds a chip has, those with a peak that is not 0."""
    return tuple(kind for kind, field in PEAK_FIELDS.items() if values[field] > 0)


def page(constants: Sequence[Field]) -> str:
    """Returns `docs/chip-fields.md`, made from the schema of datasheets and kernel constants."""
    introduction = _INTRODUCTION.replace("FAMILIES", ", ".join(FAMILIES))
    return "\n".join((introduction, *_table(FIELDS), "", _CONSTANTS, *_table(constants), ""))


def _table(schema: Sequence[Field]) -> list[str]:
    rows = ["| name | unit | meaning | range | required |", "|---|---|---|---|---|"]
    for f in schema:
        high = "any" if math.isinf(f.high) else f"{f.high:g}"
        required = "yes" if f.required else ""
        rows.append(f"| `{f.name}` | {f.unit} | {f.meaning} | {f.low:g} … {high} | {required} |")
    return rows


_INTRODUCTION = """\
# Datasheet fields

Made from the schema in `chips/datasheet.py` and `chips/constants.py`; do not edit by hand.

A chip is one TOML file. Three numbers are enough; everything else that is left out or unknown is
taken from the family's assumptions and shown as assumed, with a wide range: the family's, or half
to twice the number. `perfmodel chips new my_chip --peak 500TFLOP/s --capacity 64GB --bandwidth
2TB/s` writes such a file (`docs/comparing.md`):

    [chip]
    name = "my_chip"
    family = "hbm_gpu"

    [peak_bf16]
    value = 500e12
    unit = "FLOP/s"
    kind = "reported"
    source = "sheet"

    [memory_capacity]
    value = 64e9
    unit = "B"
    kind = "reported"
    source = "sheet"

    [memory_bandwidth]
    value = 2e12
    unit = "B/s"
    kind = "reported"
    source = "sheet"

    [sources.sheet]
    title = "My chip, data sheet"

Each number has `value`, `unit` (exactly as below), `kind`, `source`, and may have `note`, `low`
and `high`. Kinds are reported, measured, derived, fitted, assumed and unknown; unknown has no
value, and a number without a source is assumed. GB are decimal; rates are dense, bandwidths one
direction, and power is that of the board. Between `low` and `high` a number may lie: results then
have bands. Numbers that contradict each other are refused: a narrower format that is slower, a
server that draws less than its chips, a rate that would take more than `tdp` at a tenth of the
energy of anything made (`LEAST_ENERGY` in `chips/datasheet.py`).

`[chip]` holds `name` and `family`, and may hold `title`, `vendor`, `generation`, `year` and
`aliases`. Families: FAMILIES.

A chip of a measured `generation` (ampere, ada, hopper, blackwell, blackwell_workstation,
dav-c220) without kernel fits of its own takes those of a chip of its generation; any other (cdna2,
cdna3, cdna4) takes the family's. Which one is shown with every constant.
"""

_CONSTANTS = """\
# Kernel constants

Fitted to measured kernels, in `chips/fits/*.toml`; see `docs/accuracy.md`. The chip's own fit comes
first, then one of its generation, then a measured fact of its datasheet, then the family's.
"""
