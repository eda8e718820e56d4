"""The model catalogue, and networks from a file: a name or a path in, a `ModelEntry` out.

Each network of the catalogue is its original config.json beside a file of the same stem with its
name, aliases, sources and published counts. Nothing here is traced: an entry wraps a `Model`.
"""

import dataclasses
import functools
import os
import re
from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from perfmodel.catalog import (
    Field,
    Number,
    Source,
    as_text,
    check_keys,
    digest,
    label,
    parse_numbers,
    parse_sources,
    read_json,
    read_toml,
    resolve,
)
from perfmodel.errors import InputError, shorten
from perfmodel.formats import PrecisionName
from perfmodel.models.beside import read_draft, read_encoder
from perfmodel.models.config import caveats, parse_config, sublayer_order
from perfmodel.models.dense import as_dense
from perfmodel.models.draft import Draft
from perfmodel.models.encoder import Encoder
from perfmodel.models.quantization import suggested_precision
from perfmodel.models.transformer import Model

PUBLISHED = (
    Field("parameters", "1", "number of weights, each once", 1, 1e14, required=True),
    Field("active_parameters", "1", "number of weights that a token meets", 1, 1e14),
)
"""The counts that a catalogue file holds, as its publisher gives them.

A rounded one has `low` and `high`, half of its last digit to either side, or wider where its note
says what the publisher counts otherwise.
"""

_TEXTS = ("name", "title", "source", "confidence")

_TABLES = {"embedding": 1, "embedding and output head": 2}
"""What the `without` of a published count may name, and how many tables that is."""


@dataclasses.dataclass(frozen=True)
class ModelEntry:
    """A network with its provenance.

    Fields: the `model`, exact; the `order` of its sublayers, as indices into its blocks; `draft`
    layers and the `encoder` of images beside it, None where its file describes none; `precision`
    that its file asks for; `source` of the config.json and `confidence` in it; `published` counts
    and their `sources` (none for a user's own file), with the number of tables (embedding, output
    head) that the published active count is `active_without`; `notes` on what the file asks for
    beyond the model; a `digest` of the file's values, and the `path` it was read from.
    """

    name: str
    title: str
    model: Model
    order: tuple[int, ...]
    draft: Draft | None
    encoder: Encoder | None
    precision: PrecisionName
    source: str
    confidence: str
    published: Mapping[str, Number]
    sources: Mapping[str, Source]
    notes: tuple[str, ...]
    digest: str
    path: str
    active_without: int = 0


@dataclasses.dataclass(frozen=True)
class _Card:
    name: str
    title: str
    aliases: tuple[str, ...]
    source: str
    confidence: str
    published: Mapping[str, Number]
    sources: Mapping[str, Source]
    config: Traversable
    active_without: int


def names() -> tuple[str, ...]:
    """Returns the names of the catalogue's networks, smaller numbers first.

    >>> "llama-3.3-70b" in names()
    True
    """

    def order(name: str) -> list[tuple[float, str]]:
        parts = re.findall(r"\d+(?:\.\d+)?|\D+", name)
        return [(float(p), "") if p[0].isdigit() else (0.0, p) for p in parts]

    return tuple(sorted(_cards(), key=order))


def aliases() -> Mapping[str, tuple[str, ...]]:
    """Returns the other names of each network of the catalogue."""
    return {name: card.aliases for name, card in _cards().items()}


def load_model(name: str | os.PathLike[str], *, assume_dense: bool = False) -> ModelEntry:
    """Returns a network by catalogue name or alias, or from a config.json or a folder with one.

    Case and punctuation of names don't matter. A name of the catalogue wins over a file or folder
    of that name: write `./name` for the latter. With `assume_dense`, a file that is not understood
    is read as a plain dense decoder (`perfmodel.models.dense`), and `notes` say what was ignored.

    >>> load_model("meta-llama/Llama-3.1-70B").name
    'llama-3.1-70b'
    """
    if isinstance(name, os.PathLike):
        return _from_path(os.fspath(name), assume_dense)
    if isinstance(name, str) and _looks_like_path(name):
        return _from_path(name, assume_dense)
    try:
        return _from_catalogue(resolve(name, aliases(), "model"))
    except InputError:
        if isinstance(name, str) and name and os.path.exists(name):
            return _from_path(name, assume_dense)
        raise


def _looks_like_path(name: str) -> bool:
    separators = tuple(s for s in (os.sep, os.altsep) if s)
    starts = (".", "~", *separators)
    return name.startswith(starts) or name.endswith((".json", *separators))


def _from_path(path: str, assume_dense: bool) -> ModelEntry:
    if not isinstance(path, str):
        raise InputError("model: a path must be text")
    path = os.path.expanduser(path)
    file = os.path.join(path, "config.json") if os.path.isdir(path) else path
    config = read_json(file, infinite=True)
    stem, extension = os.path.splitext(os.path.basename(file))
    if stem == "config":
        stem = os.path.basename(os.path.dirname(os.path.abspath(file))) or stem
    name = shorten(stem if extension == ".json" else stem + extension)
    where = label(file)
    dense: tuple[str, ...] = ()
    try:
        model = parse_config(config, where)
    except InputError:
        if not assume_dense:
            raise
        config, note = as_dense(config, where)
        model, dense = parse_config(config, where), (note,)
    return ModelEntry(
        name=name,
        title=name,
        model=model,
        order=sublayer_order(config, where),
        draft=read_draft(config, where),
        encoder=read_encoder(config, where),
        precision=suggested_precision(config, where, model),
        source="the file given",
        confidence="not checked against a published count",
        published={},
        sources={},
        notes=(*dense, *caveats(config)),
        digest=digest(config),
        path=file,
    )


@functools.cache
def _from_catalogue(name: str) -> ModelEntry:
    card = _cards()[name]
    where = label(card.config)
    config = read_json(card.config, infinite=True)
    model = parse_config(config, where)
    return ModelEntry(
        name=name,
        title=card.title,
        model=model,
        order=sublayer_order(config, where),
        draft=read_draft(config, where),
        encoder=read_encoder(config, where),
        precision=suggested_precision(config, where, model),
        source=card.source,
        confidence=card.confidence,
        published=card.published,
        sources=card.sources,
        notes=caveats(config),
        digest=digest(config),
        path=f"models/catalog/{card.config.name}",
        active_without=card.active_without,
    )


@functools.cache
def _cards() -> Mapping[str, _Card]:
    folder = files("perfmodel.models").joinpath("catalog")
    stems = sorted(f.name[:-5] for f in folder.iterdir() if f.name.endswith(".toml"))
    cards: dict[str, _Card] = {}
    for stem in stems:
        where = f"{stem}.toml"
        card = _card(read_toml(folder.joinpath(where)), folder.joinpath(f"{stem}.json"), where)
        if card.name in cards:
            raise InputError(f"{where}: the name '{card.name}' is taken")
        cards[card.name] = card
    return cards


def _card(table: Mapping[str, Any], config: Traversable, where: str) -> _Card:
    counts = [field.name for field in PUBLISHED]
    check_keys(table, (*_TEXTS, "aliases", "sources", *counts), where, "key")
    texts = {key: as_text(table.get(key), f"{where}: {key}") for key in _TEXTS}
    other = table.get("aliases", [])
    if not isinstance(other, list):
        raise InputError(f"{where}: aliases must be a list of names")
    sources = parse_sources(table.get("sources", {}), where)
    numbers = {key: table[key] for key in counts if key in table}
    active = numbers.get("active_parameters")
    without = active.get("without") if isinstance(active, dict) else None
    if without is not None and without not in tuple(_TABLES):
        raise InputError(f"{where}: active_parameters: without must be {' or '.join(_TABLES)}")
    return _Card(
        aliases=tuple(as_text(alias, f"{where}: aliases") for alias in other),
        published=parse_numbers(numbers, PUBLISHED, sources, where, ("without",)),
        sources=sources,
        config=config,
        active_without=0 if without is None else _TABLES[without],
        **texts,
    )
