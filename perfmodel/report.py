"""Results for people: Datasets as tables for a terminal, pictures, pages and files.

Every function takes a Dataset as `estimate`, `operator_table` or `frontier` return it, so anything
here can be made again from a saved file. Tables are `rich` renderables; `write` prints one to a
terminal, or as plain text to a pipe. Drawing and storage are imported where they are used.
"""

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from perfmodel import _labels
from perfmodel._drawing import Drawing
from perfmodel._overview import AXES as OVERVIEW_AXES
from perfmodel._overview import overview_table
from perfmodel._panels import Panel
from perfmodel._size_table import size_table
from perfmodel._system_table import system_table, systems_table
from perfmodel._tables import (
    estimate_table,
    footnotes,
    frontier_table,
    grid,
    headline,
    lines,
    operators_table,
    overlay_text,
    predictions_table,
    sensitivity_table,
)
from perfmodel._traced_table import traced_table
from perfmodel.errors import InputError, shorten

if TYPE_CHECKING:
    import xarray as xr
    from rich.console import Console, RenderableType

__all__ = [
    "Drawing", "OVERVIEW_AXES", "Panel", "console", "draw_files", "estimate_table", "footnotes",
    "frontier_table", "grid", "headline", "lines", "load_dataset", "operators_table",
    "overlay_text", "overview_table", "predictions_table", "save_dataset", "save_frontier",
    "save_html", "save_panels", "save_png", "save_roofline", "save_sensitivity", "save_size",
    "save_systems", "save_text", "sensitivity_table", "size_table", "system_table", "systems_table",
    "traced_table", "write",
]  # fmt: skip

WIDTH = 120
"""Columns of a table that is not shown on a terminal."""


def console(file: TextIO | None = None) -> "Console":
    """Returns where tables go: a terminal as wide as it is, or plain text of `WIDTH` columns."""
    from rich.console import Console

    stream = sys.stdout if file is None else file
    terminal = stream.isatty()
    width = None if terminal or "COLUMNS" in os.environ else WIDTH
    return Console(
        file=stream, width=width, highlight=False, no_color=not terminal, soft_wrap=False
    )


def write(renderable: "RenderableType", file: TextIO | None = None) -> None:
    """Prints a table; without colours or control codes where `file` is no terminal."""
    printer = console(file)
    # rich would end the program itself where the reader has gone.
    with printer.capture() as capture:
        printer.print(renderable)
    (sys.stdout if file is None else file).write(capture.get())


# ---- Files ----


def _plain(value: Any) -> Any:
    """Returns an attribute as netCDF can hold it: text or a number."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return value
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return _plain(value.item())
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return json.dumps(value, default=str)


def save_dataset(dataset: "xr.Dataset", path: str | os.PathLike[str]) -> None:
    """Writes a Dataset as netCDF, with all units, long names and attributes.

    Attributes that netCDF has no type for (true and false, lists, tables) become text; those that
    are None are left out. The file appears whole or not at all.
    """
    out = dataset.copy()
    for holder in (out, *out.variables.values()):
        holder.attrs = {key: _plain(v) for key, v in holder.attrs.items() if v is not None}
    _replace(path, lambda part: out.to_netcdf(part, engine="h5netcdf"))


def save_png(
    dataset: "xr.Dataset", path: str | os.PathLike[str], measured: "xr.Dataset | None" = None
) -> None:
    """Writes the picture of a frontier, with measured points (of `overlay`) where given."""
    from perfmodel import _plots

    _save_figure(_plots.draw(dataset, measured), path)


def _save_figure(picture: Any, path: str | os.PathLike[str]) -> None:
    from perfmodel import _plots

    _replace(
        path,
        lambda part: picture.savefig(
            part, format="png", dpi=_plots.DPI, pil_kwargs={"compress_level": 3}
        ),
    )


def save_systems(
    found: "xr.Dataset",
    folder: str | os.PathLike[str],
    title: str | None = None,
    notes: tuple[str, ...] = (),
    name: str = "systems",
) -> dict[str, Path]:
    """Writes frontiers of serving systems (`perfmodel.system_search.beside`): data and picture."""
    from perfmodel import _system_plot

    where = Path(folder)
    where.mkdir(parents=True, exist_ok=True)
    files = {"data": where / f"{name}.nc", "picture": where / f"{name}.png"}
    save_dataset(found, files["data"])
    said = title or f"{_labels.model_title(str(found.attrs['model']))}: systems of several pools"
    _save_figure(_system_plot.draw_systems(found, said, notes), files["picture"])
    return files


def save_panels(
    panels: Sequence[Panel],
    path: str | os.PathLike[str],
    title: str,
    subtitle: str,
    notes: str = "",
) -> None:
    """Writes the picture of a study: panels of lines side by side."""
    from perfmodel import _panels

    _save_figure(_panels.draw_panels(panels, title, subtitle, notes), path)


def save_html(
    dataset: "xr.Dataset", path: str | os.PathLike[str], measured: "xr.Dataset | None" = None
) -> None:
    """Writes the interactive page of a frontier: one file that loads nothing else."""
    from perfmodel import _page

    save_text(_page.page(dataset, measured, [*headline(dataset)[1:], *footnotes(dataset)]), path)


def save_roofline(dataset: "xr.Dataset", path: str | os.PathLike[str]) -> None:
    """Writes the rooflines of `comparison.compare` as a PNG, or where the name says so a page."""
    from perfmodel import _roofline

    if str(path).lower().endswith(".html"):
        save_text(_roofline.page(dataset), path)
    else:
        _save_figure(_roofline.draw(dataset), path)


def save_text(text: str, path: str | os.PathLike[str]) -> None:
    """Writes a text file, which appears whole or not at all."""

    def make(part: str) -> None:
        with open(part, "w", encoding="utf-8") as file:
            file.write(text)

    _replace(path, make)


def save_sensitivity(dataset: "xr.Dataset", folder: str | os.PathLike[str]) -> dict[str, Path]:
    """Writes `sensitivity.nc`, `sensitivity.png` and `sensitivity.html` into a folder, the pictures
    from the saved file; returns the paths by kind."""
    from perfmodel import _tornado

    paths = {kind: Path(folder) / f"sensitivity.{kind}" for kind in ("nc", "png", "html")}
    save_dataset(dataset, paths["nc"])
    saved = load_dataset(paths["nc"])
    _save_figure(_tornado.draw(saved), paths["png"])
    save_text(_tornado.page(saved), paths["html"])
    return paths


def save_frontier(
    dataset: "xr.Dataset",
    folder: str | os.PathLike[str],
    measured: "xr.Dataset | None" = None,
    drawing: Drawing | None = None,
) -> dict[str, Path]:
    """Writes `frontier.nc`, `frontier.png` and `frontier.html` into a folder, the pictures from the
    saved file; returns the paths by kind. Measured runs go to `measured.nc`.

    A `drawing` started before the search has by then loaded what it takes to draw.
    """
    base = Path(folder)
    paths = {kind: base / f"frontier.{kind}" for kind in ("nc", "png", "html")}
    save_dataset(dataset, paths["nc"])
    if measured is not None:
        paths["measured"] = base / "measured.nc"
        save_dataset(measured, paths["measured"])
    request = {
        "data": paths["nc"], "png": paths["png"], "page": paths["html"],
        "measured": paths.get("measured"),
        "unused": [str(n) for n in dataset.variables if n not in _labels.used(dataset)],
    }  # fmt: skip
    if drawing is not None:
        drawing.start(request)
    if drawing is None or not drawing.finished():
        draw_files(**request)
    return paths


def save_size(dataset: "xr.Dataset", folder: str | os.PathLike[str]) -> dict[str, Path]:
    """Writes the deployments of `size` into a folder as `size.nc` and `size.json`; returns the
    paths by kind."""
    from perfmodel import _json

    paths = {kind: Path(folder) / f"size.{kind}" for kind in ("nc", "json")}
    save_dataset(dataset, paths["nc"])

    def make(part: str) -> None:
        with open(part, "w", encoding="utf-8") as file:
            file.write(_json.text(_json.size(dataset)) + "\n")

    _replace(paths["json"], make)
    return paths


def draw_files(
    data: str | os.PathLike[str],
    png: str | os.PathLike[str],
    page: str | os.PathLike[str],
    measured: str | os.PathLike[str] | None = None,
    unused: Sequence[str] = (),
) -> None:
    """Draws a saved frontier as PNG and as a page, with measured runs where given.

    `unused` names variables that need not be read.
    """
    saved = load_dataset(data, unused)
    runs = None if measured is None else load_dataset(measured)
    save_png(saved, png, runs)
    save_html(saved, page, runs)


def load_dataset(path: str | os.PathLike[str], unused: Sequence[str] = ()) -> "xr.Dataset":
    """Returns a Dataset written by `save_dataset`, without the variables named in `unused`."""
    import xarray as xr

    try:
        return xr.load_dataset(path, engine="h5netcdf", drop_variables=list(unused))
    except OSError as error:
        raise InputError(f"{shorten(path, 120)}: cannot be read ({shorten(error)})") from None


def serve() -> None:
    """Draws what standard input asks for; leaves quietly where it ends without a request."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import matplotlib.backends.backend_agg  # noqa: F401
    import matplotlib.figure  # noqa: F401
    import xarray  # noqa: F401

    request = sys.stdin.read()
    if request:
        draw_files(**json.loads(request))


def _replace(path: str | os.PathLike[str], make: Callable[[str], Any]) -> None:
    """Makes a file beside its final place and moves it there."""
    folder, name = os.path.split(os.path.abspath(path))
    try:
        os.makedirs(folder, exist_ok=True)
        number, part = tempfile.mkstemp(dir=folder, prefix=".", suffix=f"-{name}")
        os.close(number)
        try:
            make(part)
            os.chmod(part, 0o644)
            os.replace(part, path)
        except BaseException:
            os.unlink(part)
            raise
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"{shorten(path, 120)}: cannot be written ({shorten(reason)})") from None
