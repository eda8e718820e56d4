"""The option `--export`: what is told of exported scripts, and where they are written."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.errors import InputError

if TYPE_CHECKING:
    from perfmodel.export import Deployment, Export


def check(engine: str | None, trace: str | None, others: Mapping[str, bool]) -> None:
    """Raises InputError for an engine that is not known, or what no engine is told.

    Before anything is evaluated. Args: `others`, options of the estimate that neither servers nor
    benchmarks have, and whether they are used.
    """
    if engine is None:
        return
    from perfmodel import export

    if trace is None:
        export.documented(engine)
    for option, used in others.items():
        if used:
            raise InputError(f"--export: commands know no {option} (nearest: leave it out)")


def scripts(engine: str | None, deployment: "Callable[[], Deployment]") -> "Export | None":
    """Returns the scripts of a deployment; None where none are asked for, or nothing can run."""
    if engine is None:
        return None
    from perfmodel import export
    from perfmodel.errors import Infeasible

    try:
        return export.export(engine, deployment())
    except Infeasible:
        # The command says it of the estimate, with what helps.
        return None


def told(made: "Export | None", folder: Path | None, command: str) -> dict[str, Any]:
    """Returns what a JSON object has of scripts; they are written to a folder where one is given.

    Args: `command`, the command line that made them.
    """
    if made is None:
        return {}
    found: dict[str, Any] = {"engine": made.engine, "version": made.version, "notes": made.notes}
    found["scripts"] = made.files(command)
    if folder is not None:
        found["files"] = made.write(folder, command)
    return {"export": found}


def show(made: "Export | None", folder: Path | None, command: str) -> None:
    """Prints scripts as they are, or writes them to a folder and says where."""
    if made is None:
        return
    text = made.text(command)
    if folder is not None:
        text = "\n".join(f"wrote {path}" for path in made.write(folder, command).values()) + "\n"
    sys.stdout.write(f"\n{text}")
