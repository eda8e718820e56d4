"""Studies: one folder per question, each a script that saves a Dataset and draws from it.

Every package here has

    TITLE           the question, in one line
    run(out)        does the work, writes NAME.nc and figures into the folder, returns the Dataset
    summary(data)   what to print of it

and runs as `perfmodel study NAME`.
"""

if __name__ != "perfmodel.studies":
    raise ImportError(f"import this package as perfmodel.studies, not as {__name__}")

import importlib
import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from perfmodel.errors import InputError, nearest, shorten

if TYPE_CHECKING:
    import xarray as xr
    from rich.console import RenderableType


class Study(Protocol):
    """What a study's package offers."""

    TITLE: str

    def run(self, out: Path) -> "xr.Dataset": ...

    def summary(self, data: "xr.Dataset") -> "RenderableType": ...


def names() -> list[str]:
    """Returns the names of the studies.

    >>> "frontier" in names()
    True
    """
    return sorted(info.name for info in pkgutil.iter_modules(__path__) if info.ispkg)


def resolve(name: str) -> str:
    """Returns the name of a study, or fails naming the nearest."""
    known = names()
    if name not in known:
        hint = nearest(name, [*known, "list", "all"])
        raise InputError(f"unknown study '{shorten(name)}'{hint}")
    return name


def load(name: str) -> Study:
    """Returns a study by name."""
    return importlib.import_module(f"{__name__}.{resolve(name)}")  # pyright: ignore[reportReturnType]
