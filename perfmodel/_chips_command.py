"""The command `perfmodel chips`: list, compare and make chips."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from perfmodel import _commands
from perfmodel._options import Engine, Isl, Json, Osl
from perfmodel.errors import InputError, shorten

_ready = _commands.ready


class _WithDefault(TyperGroup):
    """A group whose first word may be left out: then it is `show`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in (*self.commands, "-h", "--help"):
            args = ["show", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="chips",
    cls=_WithDefault,
    help="List chips, compare some, or make one of your own.\n\n"
    "`perfmodel chips [NAME]...` is short for `perfmodel chips show [NAME]...`.",
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def show(
    context: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Chips, TOML files of some, or all."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Run this model's steps on each, at one plan.")
    ] = None,
    tp: Annotated[int, typer.Option(help="Chips of a stage.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    ep: Annotated[int, typer.Option(help="Expert-parallel degree, of the TP chips.")] = 1,
    batch: Annotated[int, typer.Option(help="Concurrent requests per replica.")] = 1,
    isl: Isl = 4000,
    osl: Osl = 1000,
    weights: Annotated[str | None, typer.Option(help="Format of weights.")] = None,
    engine: Engine = "neutral",
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png|.html", help="Draw the rooflines, and operators on them."),
    ] = None,
    json: Json = False,
) -> None:
    """List chips; one in full, each number with its source; or several side by side.

    With a model, what each achieves at the same plan, and where its operators lie on the roofline.
    """
    asked = list(names or [])
    if plot is not None and plot.suffix.lower() not in (".png", ".html"):
        raise InputError(f"--plot: a .png or .html file is needed, not '{shorten(plot)}'")
    if not asked and (model is not None or plot is not None):
        raise InputError("chips: name the chips to compare (nearest: all)")
    if not asked or (len(asked) == 1 and asked != ["all"] and model is None and plot is None):
        from perfmodel import _listings

        _commands.show(_listings.chip(asked[0]) if asked else _listings.chips(), json)
        return
    plan = dict(tp=tp, pp=pp, ep=ep, batch=batch, isl=isl, osl=osl, weights=weights, engine=engine)
    _compare(context, asked, model, plan, plot, json)


def _compare(
    context: typer.Context,
    names: list[str],
    model: str | None,
    plan: dict[str, Any],
    plot: Path | None,
    json: bool,
) -> None:
    """Prints chips side by side, and draws them where asked."""
    from perfmodel import report

    with _commands.working("comparing", quiet=json):
        import perfmodel
        from perfmodel import _comparison_table, comparison

        if model is not None:
            _ready()
        network = None if model is None else perfmodel.load_model(model)
        chips = comparison.named(names)
        found = comparison.compare(chips, network, **plan)
        if plot is not None:
            report.save_roofline(found, plot)
    if json:
        _commands.print_json(_comparison_table.values(found) | _commands.command(context))
    else:
        report.write(_comparison_table.comparison_table(found))
        if plot is not None:
            report.write(f"wrote {plot}")
    comparison.check_any_runs(found)


_FIELD_OPTIONS = {
    "peak": "peak_bf16",
    "peak_fp8": "peak_fp8",
    "peak_fp4": "peak_fp4",
    "bandwidth": "memory_bandwidth",
    "capacity": "memory_capacity",
    "tdp": "tdp",
}


@app.command()
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Lower-case letters, digits and _.")],
    family: Annotated[
        str | None,
        typer.Option(help="Chip family, which fills in what is not given.", show_default="hbm_gpu"),
    ] = None,
    peak: Annotated[
        str | None, typer.Option(metavar="FLOP/s", help="Dense 16-bit rate: 1e15, 1PFLOP/s.")
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option(metavar="B/s", help="Of its memory: 8TB/s.")
    ] = None,
    capacity: Annotated[str | None, typer.Option(metavar="B", help="Of its memory: 192GB.")] = None,
    peak_fp8: Annotated[
        str | None, typer.Option(metavar="FLOP/s", help="Dense 8-bit rate.")
    ] = None,
    peak_fp4: Annotated[
        str | None, typer.Option(metavar="FLOP/s", help="Dense 4-bit rate.")
    ] = None,
    tdp: Annotated[str | None, typer.Option(metavar="W", help="Power limit of the board.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="FIELD=VALUE", help="Any other number of the sheet (repeat for more)."
        ),
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(metavar="CHIP", help="Take over the numbers of this chip that are not given."),
    ] = None,
    generation: Annotated[
        str | None, typer.Option(help="Take kernel constants of this generation (hopper, ...).")
    ] = None,
    source: Annotated[str, typer.Option(metavar="TEXT", help="Where the numbers were read.")] = "",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where it goes.", show_default="NAME.toml")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file.")] = False,
    json: Json = False,
) -> None:
    """Write a chip of your own as a TOML file that every command takes.

    Three numbers are enough: peak, bandwidth and capacity. The file says what its family assumes
    for the rest. Names and units of all fields are in docs/chip-fields.md.
    """
    from perfmodel import _listings, chips, report
    from perfmodel.chips import writing

    given = {
        "peak": peak, "peak_fp8": peak_fp8, "peak_fp4": peak_fp4, "bandwidth": bandwidth,
        "capacity": capacity, "tdp": tdp,
    }  # fmt: skip
    values = _values({key: text for key, text in given.items() if text is not None}, set_ or [])
    base = None if like is None else chips.load_chip(like).sheet
    if base is not None:
        if family not in (None, base.identity["family"]):
            raise InputError(f"--family: {like} is a {base.identity['family']}, not a {family}")
        family = base.identity["family"]
        generation = base.identity["generation"] if generation is None else generation
    missing = [
        f"--{option}"
        for option, field in list(_FIELD_OPTIONS.items())
        if field in ("peak_bf16", "memory_bandwidth", "memory_capacity")
        and field not in values
        and base is None
    ]
    if missing:
        raise InputError(f"chips new: missing {', '.join(missing)} (or --like CHIP)")
    path = Path(f"{name}.toml") if out is None else out
    if path.suffix.lower() != ".toml":
        raise InputError(f"--out: a .toml file is needed (nearest: {path.with_suffix('.toml')})")
    if chips.is_known(name):
        raise InputError(
            f"chips new: {shorten(name)} is a chip of the catalogue; take another name"
        )
    text = writing.sheet_text(
        name, family or "hbm_gpu", values, generation=generation or "", source=source, base=base
    )
    if path.exists() and not force:
        raise InputError(f"{shorten(path, 120)}: exists already (--force writes over it)")
    report.save_text(text, path)
    made = chips.load_chip(path)
    if json:
        _commands.print_json(_listings.chip(str(path)).values | {"file": path})
        return
    report.write(_listings.new_chip(made))
    report.write(f"wrote {path}; try: perfmodel estimate llama-3.1-8b {path}")


def _values(options: dict[str, str], more: list[str]) -> dict[str, float]:
    """Returns numbers by field from options with units and from `field=value`."""
    from perfmodel.chips.datasheet import FIELDS
    from perfmodel.errors import nearest
    from perfmodel.quantities import parse_quantity

    fields = {field.name: field for field in FIELDS}
    given = [(_FIELD_OPTIONS[key], text, f"--{key}") for key, text in options.items()]
    for text in more:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals:
            raise InputError(f"--set: FIELD=VALUE is needed, not '{shorten(text)}'")
        if name not in fields:
            raise InputError(f"--set: unknown field '{shorten(name)}'{nearest(name, fields)}")
        given.append((name, value, f"--set {name}"))
    found: dict[str, float] = {}
    for name, text, where in given:
        if name in found:
            raise InputError(f"{where}: {name} is given more than once")
        where = where.replace("_", "-") if not where.startswith("--set") else where
        field = fields[name]
        value = parse_quantity(text, field.unit, where)
        if not field.low <= value <= field.high:
            close = field.low if value < field.low else field.high
            raise InputError(
                f"{where}: {value:g} is outside {field.low:g} to {field.high:g} {field.unit} "
                f"(nearest: {close:g})"
            )
        found[name] = value
    return found
