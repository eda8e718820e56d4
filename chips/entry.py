"""The catalogue of chips: names to entries, each a machine with all that is known of it."""

import dataclasses
import functools
import importlib
import os
from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING, NamedTuple

from perfmodel import catalog
from perfmodel.catalog import Number, Sheet
from perfmodel.chips import constants, datasheet
from perfmodel.chips.constants import Constant
from perfmodel.errors import InputError

if TYPE_CHECKING:
    from perfmodel.machine import Machine


class Row(NamedTuple):
    """One number of a chip, ready to be listed; `value` is None where it is unknown."""

    field: str
    value: float | None
    unit: str
    kind: str
    source: str
    origin: str
    note: str
    low: float | None
    high: float | None


@dataclasses.dataclass(frozen=True, eq=False)
class Chip:
    """A chip by name: its machine, and outside of it everything that is no number.

    Fields:
        sheet: the datasheet as it was read.
        fields: every number of the family, with what the sheet leaves out filled in and marked.
        constants: every kernel constant, with whose fit it is.
        supported: the matrix-product kernels it has.
        digest: changes with any value the machine was made from.
    """

    name: str
    title: str
    sheet: Sheet
    fields: Mapping[str, Number]
    constants: Mapping[str, Constant]
    supported: tuple[str, ...]
    digest: str

    @functools.cached_property
    def machine(self) -> "Machine":
        """What timing, energy and cost know of the chip, in the float type of its first use."""
        # Made when asked for: JAX takes longer to load than the whole catalogue.
        import jax

        family = importlib.import_module(f"perfmodel.chips.{self.sheet.identity['family']}")
        # Whoever asks first may be tracing; what is kept must hold numbers.
        with jax.ensure_compile_time_eval():
            return family.machine(*self.inputs())

    def with_machine(self, machine: "Machine") -> "Chip":
        """Returns the chip with another machine: a question about a number of it."""
        other = dataclasses.replace(self)
        vars(other)["machine"] = machine  # where the cached property keeps it
        return other

    def under(self, software: str) -> "Chip":
        """Returns the chip with the constants of one software's kernels on it, where such a fit is.

        Of old or untuned software, whose kernels are not what the chip can do; those that measure
        with it say so (`perfmodel.validation`).
        """
        fit = constants.read_fit(constants.folder(), f"{self.name}@{software}")
        if fit is None:
            return self
        own = {name: constants.of(fit, name, f"own fit, {software}") for name in fit.numbers}
        return dataclasses.replace(self, constants={**self.constants, **own})

    def kernels_of(self) -> str:
        """Returns whose kernel measurements the chip uses: "its own", the name of a chip of its
        generation, or "its family" where there are neither.

        >>> load_chip("h100").kernels_of(), load_chip("h200").kernels_of()
        ('its own', 'h100_sxm')
        """
        matter = [f"kernels.{kind}." for kind in self.supported] + ["decode.", "context."]
        origins = {c.origin for n, c in self.constants.items() if n.startswith(tuple(matter))}
        if "own fit" in origins:
            return "its own"
        kin = sorted(origin.split(" ")[0] for origin in origins if "same generation" in origin)
        return kin[0] if kin else "its family"

    def inputs(self) -> tuple[dict[str, float], dict[str, float]]:
        """Returns what the family function takes: datasheet fields and kernel constants."""
        return _values(self.fields), {name: c.value for name, c in self.constants.items()}

    def numbers(self) -> list[Row]:
        """Returns a row for every number of the chip, but for constants of kernels it lacks."""
        rows = []
        for field in datasheet.FIELDS:
            number = self.fields.get(field.name)
            if number is not None:
                source = self.sheet.sources.get(number.source)
                assumed = self.sheet.value(field.name) is None and number.value is not None
                origin = "family assumption" if assumed else "datasheet"
                rows.append(_row(field.name, number, source.title if source else "", origin))
        for name, constant in self.constants.items():
            parts = name.split(".")
            if parts[0] != "kernels" or parts[1] in self.supported:
                rows.append(_row(name, constant.number, constant.source, constant.origin))
        return rows


def _row(field: str, number: Number, source: str, origin: str) -> Row:
    return Row(
        field=field,
        value=number.value,
        unit=number.unit,
        kind=number.kind,
        source=source,
        origin=origin,
        note=number.note,
        low=number.low,
        high=number.high,
    )


def _values(fields: Mapping[str, Number]) -> dict[str, float]:
    # An unknown price is 0: the machine has no numbers that are missing.
    return {name: float(number.value or 0.0) for name, number in fields.items()}


@functools.cache
def _files() -> dict[str, Traversable]:
    """Returns the catalogue's files by chip name (the file name after the vendor's)."""
    folder = files("perfmodel.chips").joinpath("catalog")
    found = sorted((f for f in folder.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    return {file.name.removesuffix(".toml").split("_", 1)[-1]: file for file in found}


@functools.cache
def _aliases() -> dict[str, tuple[str, ...]]:
    """Returns every name of the catalogue with its aliases."""
    known = {}
    for name, file in _files().items():
        # Only the first table is needed; parsing whole sheets would take ten times as long.
        head = catalog.read_text(file).split("\n[", 1)[0]
        tables = catalog.parse_toml(head, file.name)
        known[name] = datasheet.parse_identity(tables.get("chip"), file.name)["aliases"]
    return known


def names() -> list[str]:
    """Returns the names of the chips in the catalogue.

    >>> "h100_sxm" in names()
    True
    """
    return sorted(_files())


def is_known(name: str) -> bool:
    """Returns whether a name or alias is that of a chip of the catalogue."""
    known = {catalog.fold(each) for key, more in _aliases().items() for each in (key, *more)}
    return catalog.fold(name) in known


def build(sheet: Sheet, fits: Traversable | None = None) -> Chip:
    """Returns the chip of a datasheet; `fits` is the folder of kernel constants to use."""
    family = sheet.identity["family"]
    fields = datasheet.complete(sheet, datasheet.assumptions(family))
    found = constants.resolve(sheet, fits)
    values = _values(fields)
    return Chip(
        name=sheet.name,
        title=sheet.identity["title"],
        sheet=sheet,
        fields=fields,
        constants=found,
        supported=datasheet.supported(values),
        digest=catalog.digest(
            {"fields": values, "constants": {name: c.value for name, c in found.items()}}
        ),
    )


@functools.lru_cache(maxsize=64)
def _catalogued(name: str) -> Chip:
    file = _files()[name]
    sheet = datasheet.parse_sheet(catalog.read_toml(file), file.name)
    if sheet.name != name:
        raise InputError(f"{file.name}: [chip] name '{sheet.name}' is not that of the file")
    return build(sheet)


def load_chip(name_or_path: str | os.PathLike[str]) -> Chip:
    """Returns a chip of the catalogue by name or alias, or of a TOML file by its path.

    >>> load_chip("H100").name
    'h100_sxm'
    """
    if isinstance(name_or_path, str):
        # Whatever looks like a path is one: a misspelt path must not be read as a name.
        is_path = name_or_path.endswith(".toml") or "\\" in name_or_path or "/" in name_or_path
        if not is_path:
            exact = name_or_path in _files()
            return _catalogued(
                name_or_path if exact else catalog.resolve(name_or_path, _aliases(), "chip")
            )
    elif not isinstance(name_or_path, os.PathLike):
        raise InputError("chip: a name or a path is needed")
    path = os.fspath(name_or_path)
    sheet = datasheet.parse_sheet(catalog.read_toml(path), catalog.label(path), str(path))
    if sheet.name in _files():
        # Its kernel constants would be taken for this chip's own.
        raise InputError(
            f"{catalog.label(path)}: [chip] name {sheet.name!r} is a chip of the catalogue "
            "(give yours another name)"
        )
    return build(sheet)
