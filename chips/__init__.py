"""Chip families and the chip catalogue: a datasheet in, a machine out.

chip = load_chip("h100")            # by name, alias, or path of a TOML file
chip.machine                        # the pytree that timing, energy and cost work on
chip.numbers()                      # every number with unit, kind and source
"""

if __name__ != "perfmodel.chips":
    raise ImportError(f"import this package as perfmodel.chips, not as {__name__}")

from perfmodel.chips.entry import Chip, Row, build, is_known, load_chip, names

__all__ = ["Chip", "Row", "build", "is_known", "load_chip", "names"]
