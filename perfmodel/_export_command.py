"""The option `--export`: what is told of exported scripts, and where they are written."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfmodel.export import Deployment, Export


def check(engine: str | None, trace: str | None) -> None:
    """Raises InputError for an engine that is not known; before anything is evaluated."""
    if engine is not None and trace is None:
        from perfmodel import export

        export.documented(engine)


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
