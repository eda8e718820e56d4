"""What commands share: options of several, and how they wait, print and say what they ran."""

import contextlib
import shlex
import sys
from typing import Annotated, Any

import typer

from perfmodel.errors import InputError, shorten

Json = Annotated[bool, typer.Option("--json", help="Print JSON, in SI units, and nothing else.")]
Isl = Annotated[int, typer.Option(help="Prompt tokens.")]
Osl = Annotated[int, typer.Option(help="Output tokens.")]
Engine = Annotated[str, typer.Option(help="Engine profile, or a TOML file of one.")]
MaxPower = Annotated[
    str | None,
    typer.Option(metavar="POWER", help="Most rated power, hosts included: 50kW, or watts."),
]
MaxRacks = Annotated[float | None, typer.Option(metavar="RACKS", help="Largest footprint.")]
MaxCost = Annotated[
    float | None, typer.Option(metavar="USD/H", help="Highest cost of an hour of all chips.")
]


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


def budgets(max_power: str | None, max_racks: float | None, max_cost: float | None) -> dict:
    """Returns limits on what all chips may take together, as `frontier` and `size` have them."""
    from perfmodel.quantities import parse_quantity

    power = None if max_power is None else parse_quantity(max_power, "W", "--max-power")
    found = {"max_power": power, "max_racks": max_racks, "max_cost": max_cost}
    for name, value in found.items():
        if value is not None and not value > 0.0:
            option = name.replace("_", "-")
            raise InputError(f"--{option}: must be above 0, not {value:g}")
    return found
