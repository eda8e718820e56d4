"""Where the layers of one network differ: read from a config.json, as its class reads it.

Attention of several widths, blocks side by side, caches that later layers share, and lists that
describe each layer.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from perfmodel.errors import InputError, nearest, shorten
from perfmodel.models._values import is_off, show, size, switch
from perfmodel.models.architectures import Architecture, Flag, Parallel, Variant
from perfmodel.models.attention import GroupedQueryAttention

_HEADS = 100_000
# Widths of feed-forward layers come in multiples of this (DeciLM's own code).
_MULTIPLE = 256
# What a list of layers may say of each, and what must be off.
_ATTENTION = ("n_heads_in_group", "no_op")
_FEED_FORWARD = ("ffn_mult", "no_op")

Layer = tuple[int | None, int | None]
"""kv heads and inner width of a layer; None where it has no attention or no feed-forward layer."""


def respelt(config: Mapping[str, Any], arch: Architecture, where: str) -> Mapping[str, Any]:
    """Returns the file with the names of keys that its architecture reads.

    >>> from perfmodel.models.architectures import ARCHITECTURES
    >>> respelt({"num_hidden_layers": 70}, ARCHITECTURES["bloom"], "config.json")
    {'n_layer': 70}
    """
    for key, other in arch.spellings:
        if other not in config:
            continue
        value = config[other]
        if config.get(key, value) != value:
            raise InputError(
                f"{where}: {key} {show(config[key])} and {other} {show(value)} are the same size"
            )
        config = {key: value, **{k: v for k, v in config.items() if k != other}}
    return config


def flag(config: Mapping[str, Any], arch: Architecture, key: Flag, where: str) -> int:
    """Returns 0 or 1, as a number of the architecture or as the file says."""
    return int(switch(config, key, where, key in arch.on)) if isinstance(key, str) else key


def varied(
    config: Mapping[str, Any],
    arch: Architecture,
    variant: Variant | None,
    body: GroupedQueryAttention,
    where: str,
) -> GroupedQueryAttention:
    """Returns the attention of layers of one kind."""
    if variant is None:
        return body
    sizes = config
    if variant.inside is not None:
        sizes = config.get(variant.inside) or {}
        where = f"{where}: {variant.inside}"
        if not isinstance(sizes, Mapping):
            raise InputError(f"{where} must be an object, not {show(sizes)}")

    def pick(key: str | None, otherwise: int) -> int:
        given = key is not None and sizes.get(key) is not None
        return size(sizes, key, where, _HEADS) if given and key is not None else otherwise

    same = variant.key_values is not None and switch(config, variant.key_values, where, False)
    heads = pick(variant.heads, int(body.heads))
    kv_heads = int(body.kv_heads)
    if same or variant.key_values is None:
        kv_heads = pick(variant.kv_heads, kv_heads)
    check_heads(heads, kv_heads, variant.heads or arch.heads, variant.kv_heads, where)
    head_dim = pick(variant.head_dim, int(body.head_dim))
    v_width = pick(variant.v_width, head_dim)
    return dataclasses.replace(
        body,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_width=None if v_width == head_dim else v_width,
        sinks=flag(config, arch, variant.sinks, where),
        cached="key" if same else body.cached,
    )


def check_heads(heads: int, kv_heads: int, key: str, kv_key: str | None, where: str) -> None:
    """Raises where kv heads do not share out the heads."""
    if heads % kv_heads:
        raise InputError(
            f"{where}: {key} {heads} is not a multiple of {kv_key} {kv_heads}"
            f" (nearest: {nearest_divisor(heads, kv_heads)})"
        )


def nearest_divisor(number: int, wanted: int) -> int:
    """Returns the divisor of a number that is nearest to another number."""
    low = max(d for d in range(1, min(wanted, number) + 1) if number % d == 0)
    high = next((d for d in range(wanted, 2 * wanted - low) if number % d == 0), low)
    return high


def borrowed_layers(
    config: Mapping[str, Any], arch: Architecture, near: list[bool], where: str
) -> list[bool]:
    """Returns which layers use the cache of the last earlier layer of their kind.

    >>> from perfmodel.models.architectures import ARCHITECTURES
    >>> gemma = ARCHITECTURES["gemma4_text"]
    >>> borrowed_layers({"num_kv_shared_layers": 2}, gemma, [True, False, True, False], "a.json")
    [False, False, True, True]
    """
    key, layers = arch.kv_shared, len(near)
    if key is None or config.get(key) is None:
        return [False] * layers
    last = size(config, key, where, layers - 1, low=0)
    first = layers - last
    for layer in range(first, layers):
        if near[layer] not in near[:first]:
            raise InputError(
                f"{where}: {key} {last} leaves layer {layer} without an earlier one of its kind "
                f"(nearest: {layers - 1 - near.index(near[layer])})"
            )
    return [layer >= first for layer in range(layers)]


def is_parallel(config: Mapping[str, Any], arch: Architecture, where: str) -> bool:
    """Returns whether attention and feed-forward layers stand side by side."""
    return arch.parallel is not None and bool(flag(config, arch, arch.parallel.when, where))


def extra_norms(
    config: Mapping[str, Any], arch: Architecture, layers: int, mixtures: int, where: str
) -> int:
    """Returns the norms beyond those of each sublayer: fewer in parallel blocks, more in others."""
    count = arch.embedding_norm
    if arch.routed is not None:
        count += arch.routed.norms * mixtures
    if arch.parallel is not None and is_parallel(config, arch, where):
        count += layers * (_parallel_norms(config, arch.parallel, where) - 2 * arch.norms)
    return count


def _parallel_norms(config: Mapping[str, Any], parallel: Parallel, where: str) -> int:
    if isinstance(parallel.norms, int):
        return parallel.norms
    key, both = parallel.norms
    if config.get(key) is not None:
        return size(config, key, where, 2)
    return 2 if switch(config, both, where, False) else 1


def listed_layers(
    config: Mapping[str, Any], key: str, heads: int, hidden: int, layers: int, where: str
) -> list[Layer]:
    """Returns kv heads and inner width of each layer that a list describes.

    Widths are 2/3 of `ffn_mult` hidden widths, rounded up to 256.

    >>> layer = {"attention": {"n_heads_in_group": 8}, "ffn": {"ffn_mult": 5.25}}
    >>> none = {"attention": {"no_op": True}, "ffn": {"ffn_mult": 0.5}}
    >>> listed_layers({"block_configs": [layer, none]}, "block_configs", 64, 8192, 2, "a.json")
    [(8, 28672), (None, 2816)]
    """
    if key not in config:
        raise InputError(f"{where}: {key} is missing")
    blocks = config[key]
    if not isinstance(blocks, list | tuple) or len(blocks) != layers:
        given = f"{len(blocks)} layers" if isinstance(blocks, list | tuple) else show(blocks)
        raise InputError(f"{where}: {key} must describe {layers} layers, not {given}")
    found: list[Layer] = []
    for i, block in enumerate(blocks):
        place = f"{where}: {key}[{i}]"
        if not isinstance(block, Mapping):
            raise InputError(f"{place} must be an object, not {show(block)}")
        attention = _part(block, "attention", _ATTENTION, place)
        ffn = _part(block, "ffn", _FEED_FORWARD, place)
        kv_heads = None
        if attention is not None:
            group = size(attention, "n_heads_in_group", f"{place}: attention", heads)
            if heads % group:
                raise InputError(
                    f"{place}: attention: n_heads_in_group {group} does not divide the {heads} "
                    f"heads (nearest: {nearest_divisor(heads, group)})"
                )
            kv_heads = heads // group
        found.append((kv_heads, None if ffn is None else _inner(ffn, hidden, f"{place}: ffn")))
    if not any(kv for kv, _ in found) or not any(width for _, width in found):
        raise InputError(f"{where}: {key} leaves no attention or no feed-forward layer")
    return found


def _part(
    block: Mapping[str, Any], name: str, known: tuple[str, ...], place: str
) -> Mapping[str, Any] | None:
    """Returns what a list says of one sublayer; None where it is left out."""
    part = block.get(name)
    place = f"{place}: {name}"
    if not isinstance(part, Mapping) or not all(isinstance(key, str) for key in part):
        raise InputError(f"{place} must be an object, not {show(part)}")
    for key, value in part.items():
        if key not in known and not is_off(value):
            raise InputError(
                f"{place}: {shorten(key, 40)} {show(value)} is not understood{nearest(key, known)}"
            )
    return None if switch(part, "no_op", place, False) else part


def _inner(part: Mapping[str, Any], hidden: int, place: str) -> int:
    factor = part.get("ffn_mult")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= 1000:
        raise InputError(f"{place}: ffn_mult must be a number above 0, not {show(factor)}")
    return _MULTIPLE * math.ceil(int(2 * factor * hidden / 3) / _MULTIPLE)
