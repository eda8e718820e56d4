"""Numbers with units as people type them: `8TB/s`, `192 GB`, `1e15`, `700W`, to SI.

A number without a unit is in the unit asked for. Prefixes are decimal, and binary where they say so
(GiB). What is no such unit is refused with the nearest that is.
"""

import math
import re

from perfmodel.errors import InputError, nearest, shorten

_PREFIXES = {
    "": 1.0, "n": 1e-9, "p": 1e-12, "f": 1e-15, "u": 1e-6, "µ": 1e-6, "m": 1e-3, "k": 1e3, "K": 1e3,
    "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
}  # fmt: skip
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}

# Prefixes that are usual before each unit, and other spellings of it.
_LARGE, _SMALL = ("k", "M", "G", "T", "P", "E"), ("m", "u", "µ", "n")
_USUAL = {
    "FLOP/s": (_LARGE, ("FLOPS", "FLOPs", "flop/s", "OP/s", "OPS")),
    "B/s": (_LARGE, ()),
    "B": (_LARGE, ()),
    "W": (("k", "M"), ()),
    "s": (_SMALL, ()),
    "Hz": (_LARGE, ()),
    "J/B": (("p", "n", "f"), ()),
    "USD": (("k", "M"), ("$",)),
    "USD/h": ((), ("$/h",)),
    "token": ((), ("tokens",)),
}

_NUMBER = re.compile(r"\s*([-+]?(?:\d[\d_,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(.*?)\s*")


def factors(unit: str) -> dict[str, float]:
    """Returns what a number is multiplied by to be in `unit`, by every spelling of a unit.

    >>> factors("B/s")["TB/s"], factors("s")["us"], factors("1")
    (1000000000000.0, 1e-06, {'1': 1.0})
    """
    prefixes, spellings = _USUAL.get(unit, ((), ()))
    known = {
        prefix + name: _PREFIXES[prefix]
        for name in (unit, *spellings)
        for prefix in ("", *prefixes)
    }
    if unit in ("B", "B/s"):
        known |= {prefix + unit: factor for prefix, factor in _BINARY.items()}
    return known


def parse_quantity(text: str, unit: str, where: str) -> float:
    """Returns a number in `unit` from text with a unit or without.

    Raises: InputError naming `where` it stands and the nearest unit.

    >>> parse_quantity("8TB/s", "B/s", "--bandwidth"), parse_quantity("1e15", "FLOP/s", "--peak")
    (8000000000000.0, 1000000000000000.0)
    """
    found = _NUMBER.fullmatch(text)
    number = math.nan
    if found is not None:
        number = float(re.sub("[_,]", "", found[1]))
    if found is None or not math.isfinite(number):
        example = next((u for u in ("TB/s", "GB", "PFLOP/s", "ms") if u in factors(unit)), unit)
        raise InputError(f"{where}: a number is needed (as 8 {example}), not '{shorten(text)}'")
    known = factors(unit)
    given = found[2]
    if given and given not in known:
        raise InputError(
            f"{where}: '{shorten(given, 30)}' is no unit of {unit}{_near(given, unit)}"
        )
    return number * (known[given] if given else 1.0)


def _near(given: str, unit: str) -> str:
    """Returns the unit nearest to one that is not known."""
    known = factors(unit)
    if re.search(r"b(it)?(/s|ps)?$", given) and unit in ("B", "B/s"):
        prefix = given[: re.search(r"b(it)?(/s|ps)?$", given).start()]  # pyright: ignore[reportOptionalMemberAccess]
        close = prefix + unit if prefix + unit in known else prefix.upper() + unit
        return f" (bits; nearest: {close if close in known else unit}, an eighth of the number)"
    folded = {name.lower(): name for name in reversed(known)}
    if given.lower() in folded:
        return f" (nearest: {folded[given.lower()]})"
    return nearest(given, known)


def scaled(value: float, given: str, unit: str) -> str:
    """Returns in words what a value of another unit of the same kind is in `unit`, or "".

    >>> scaled(3350.0, "GB/s", "B/s")
    '3350 GB/s are 3.35e+12 B/s'
    """
    factor = factors(unit).get(given)
    return "" if factor is None else f"{value:g} {given} are {value * factor:g} {unit}"
