"""The two ways a question can go wrong: bad input, and no feasible answer.

Both carry one line for the person who asked: what is wrong, where, and the nearest valid thing.
Infeasible *numbers* are not errors: they are signed margins on an `Estimate`.
"""

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import xarray as xr


class PerfmodelError(Exception):
    """Base of every error this package raises on purpose."""


class InputError(PerfmodelError, ValueError):
    """Input that cannot be understood or contradicts itself (exit status 2)."""


class Infeasible(PerfmodelError):
    """The search space was understood and searched, and nothing in it fits (exit status 3).

    `found` is what is known all the same, as a Dataset, where there is such.
    """

    def __init__(self, message: str, found: "xr.Dataset | None" = None) -> None:
        super().__init__(message)
        self.found = found


def shorten(text: object, width: int = 60) -> str:
    """Returns `text` on one printable line of at most `width` characters."""
    line = "".join(c if c.isprintable() else "?" for c in str(text))
    return line if len(line) <= width else line[: width - 1] + "…"


def nearest(name: str, known: Iterable[str], count: int = 3) -> str:
    """Returns `' (nearest: a, b)'` for an unknown name, or all names when none is near.

    >>> nearest("h10", ["h100_sxm", "b200_sxm"], 1)
    ' (nearest: h100_sxm)'
    """
    names = sorted(set(known))
    folded = {n.lower(): n for n in names}
    close = difflib.get_close_matches(name.lower()[:80], list(folded), n=count, cutoff=0.5)
    if close:
        return f" (nearest: {', '.join(folded[c] for c in close)})"
    listed = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
    return f" (known: {listed})" if names else ""
