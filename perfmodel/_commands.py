"""What commands share: how they show their options, wait, print and say what they ran."""

import contextlib
import shlex
import sys
from typing import Any

import typer
from typer.core import TyperCommand

from perfmodel.errors import shorten


class Grouped(TyperCommand):
    """A command whose `--help` has its options under headings, in the order of their first."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes arguments, and then options heading by heading."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            told = parameter.get_help_record(ctx)
            if told is None:
                continue
            usual = "Arguments" if parameter.param_type_name == "argument" else "Other options"
            heading = getattr(parameter, "rich_help_panel", None) or usual
            sections.setdefault(heading, []).append(told)
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


def print_json(value: Any) -> None:
    """Prints a value as JSON."""
    from perfmodel import _json

    sys.stdout.write(_json.text(value) + "\n")


def working(what: str, quiet: bool = False) -> Any:
    """Returns a context that says on a terminal what is being done."""
    if quiet or not sys.stderr.isatty():
        return contextlib.nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(what, spinner_style="")


def command(context: typer.Context) -> dict[str, str]:
    """Returns the command line, as an attribute of what it makes."""
    return {"command": shorten(shlex.join(["perfmodel", *context.obj]), 4000)}


def ready() -> None:
    """Lets compiled programs be kept for the next run."""
    import perfmodel

    perfmodel.enable_cache()


def show(listing: Any, json: bool) -> None:
    """Prints a listing as a table, or as JSON."""
    from perfmodel import report

    if json:
        print_json(listing.values)
    else:
        report.write(listing.table)
