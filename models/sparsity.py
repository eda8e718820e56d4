"""Which keys the attention of each layer sees, in networks whose layers differ in that.

Read from a config.json: layers that take over another layer's choice of keys (GLM-5.2), that see
the best blocks of keys (MiniMax-M3), or compressed ones (DeepSeek-V4); recurrent layers among those
that attend (`perfmodel.models.hybrids`).
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from perfmodel.errors import InputError
from perfmodel.models._values import found, is_off, show, size, switch
from perfmodel.models.architectures import Architecture
from perfmodel.models.attention import GroupedQueryAttention
from perfmodel.models.block_sparse import BlockIndexer, BlockSparseAttention
from perfmodel.models.compressed import CompressedAttention
from perfmodel.models.hybrids import delta_layers, kimi_layers
from perfmodel.models.mla import Indexer, LatentAttention
from perfmodel.models.recurrent import Recurrent

Mixer = GroupedQueryAttention | LatentAttention | CompressedAttention | Recurrent
Layers = list[Mixer]
"""The attention of each layer in turn; equal ones are one object."""

# Ratios of compressed sparse and of heavily compressed attention.
_SPARSE_RATIO, _HEAVY_RATIO = 4, 128


def sparse_layers(
    config: Mapping[str, Any], arch: Architecture, plain: Mixer | None, layers: int, where: str
) -> Layers | None:
    """Returns the attention of each layer, or None where the architecture has no such choice.

    `plain` is the attention of a layer as the other keys of the file describe it; None where they
    describe none (DeepSeek-V4).
    """
    if arch.sparsity is None:
        return None
    return _READERS[arch.sparsity](config, plain, layers, where)


def draft_attention(
    config: Mapping[str, Any], arch: Architecture, layers: Layers, where: str
) -> Mixer:
    """Returns the attention of draft layers: that of the last layer but where a key says other.

    A draft layer of GLM-5.2 has an indexer of its own; DeepSeek-V4 lists one ratio more.
    """
    if arch.sparsity == "shared_index":
        return layers[0]
    if arch.sparsity == "compressed":
        ratios = config["compress_ratios"]
        if len(ratios) > len(layers):
            return _compressed_body(config, ratios[len(layers)], where)
    return layers[-1]


def distinct(layers: Layers) -> list[Mixer]:
    """Returns the different objects of a list, in order of their first use."""
    return list({id(body): body for body in layers}.values())


def flags_of(table: Mapping[str, Any], key: str, layers: int, where: str) -> list[bool]:
    """Returns a list of a 0 or 1 for each layer."""
    flags = table.get(key)
    if (
        not isinstance(flags, list | tuple)
        or len(flags) != layers
        or any(isinstance(flag, bool) or flag not in (0, 1) for flag in flags)
    ):
        hint = "" if key in table else found(table, key)
        raise InputError(f"{where}: {key} must have a 0 or 1 for each of {layers} layers{hint}")
    return [bool(flag) for flag in flags]


def listed_mixtures(config: Mapping[str, Any], layers: int, where: str) -> list[bool]:
    """Returns which layers are mixtures of experts by `moe_layer_freq`, a 0 or 1 for each."""
    listed = flags_of(config, "moe_layer_freq", layers, where)
    check_dense(config, listed, where)
    return listed


def check_dense(config: Mapping[str, Any], routed: list[bool], where: str) -> None:
    """Refuses keys that say other layers are mixtures of experts than `routed` does."""
    first = config.get("first_k_dense_replace")
    if first is not None and routed != [i >= first for i in range(len(routed))]:
        raise InputError(
            f"{where}: first_k_dense_replace {show(first)} contradicts the list of layers with "
            f"experts (nearest: {routed.index(True) if True in routed else len(routed)})"
        )
    types = config.get("mlp_layer_types")
    if types is None:
        return
    names = ["sparse" if flag else "dense" for flag in routed]
    if not isinstance(types, list | tuple) or list(types) != names:
        raise InputError(
            f"{where}: mlp_layer_types contradicts first_k_dense_replace "
            f"(nearest: 'dense' for {names.count('dense')} layers, then 'sparse')"
        )


def _shared_index(
    config: Mapping[str, Any], plain: Mixer | None, layers: int, where: str
) -> Layers:
    """Reads `indexer_types`: layers with an indexer, and those that take over its choice.

    The list is what counts: transformers derives it from `index_topk_freq` and
    `index_skip_topk_offset` where it is absent.
    """
    assert isinstance(plain, LatentAttention) and plain.index is not None
    types = config.get("indexer_types")
    if types is None:
        for key in ("index_topk_freq", "index_topk_pattern"):
            if not is_off(config.get(key)) and config[key] != 1:
                raise InputError(
                    f"{where}: {key} {show(config[key])} without indexer_types is not understood"
                )
        return [plain] * layers
    if (
        not isinstance(types, list | tuple)
        or len(types) != layers
        or any(kind not in ("full", "shared") for kind in types)
    ):
        raise InputError(
            f"{where}: indexer_types must have 'full' or 'shared' for each of {layers} layers"
        )
    if types[0] != "full":
        raise InputError(f"{where}: indexer_types must start with 'full': nothing to share before")
    shared = dataclasses.replace(plain, index=None, chosen=plain.index.top_k)
    return [plain if kind == "full" else shared for kind in types]


_BLOCK_KEYS = (
    "sparse_num_index_heads", "sparse_index_dim", "sparse_topk_blocks", "sparse_block_size",
)  # fmt: skip
_BLOCK_FIXED = (("sparse_init_block", 0), ("sparse_local_block", 1), ("sparse_score_type", "max"))
_BLOCK_LISTS = ("sparse_attention_freq", "sparse_disable_index_value")


def _block_sparse(
    config: Mapping[str, Any], plain: Mixer | None, layers: int, where: str
) -> Layers:
    """Reads `sparse_attention_config`: which layers see the best blocks, and their indexer."""
    assert isinstance(plain, GroupedQueryAttention)
    table = config.get("sparse_attention_config")
    if is_off(table):
        return [plain] * layers
    place = f"{where}: sparse_attention_config"
    if not isinstance(table, Mapping):
        raise InputError(f"{place} must be an object, not {show(table)}")
    known = (*_BLOCK_KEYS, *_BLOCK_LISTS, "use_sparse_attention", *(k for k, _ in _BLOCK_FIXED))
    for key in table:
        if key not in known:
            raise InputError(f"{place}: {show(key)} is not understood")
    for key, value in _BLOCK_FIXED:
        if table.get(key, value) != value:
            raise InputError(
                f"{place}: {key} {show(table[key])} is not understood (nearest: {show(value)})"
            )
    if not switch(table, "use_sparse_attention", place, True):
        return [plain] * layers
    heads, width, blocks, block = (size(table, key, place) for key in _BLOCK_KEYS)
    if heads != plain.kv_heads:
        raise InputError(
            f"{place}: sparse_num_index_heads {heads} is not understood: each kv head's queries "
            f"have one (nearest: {plain.kv_heads})"
        )
    sparse = flags_of(table, "sparse_attention_freq", layers, place)
    # Layers whose indexer has values and an output of its own would have more weights.
    if flags_of(table, "sparse_disable_index_value", layers, place) != sparse:
        raise InputError(
            f"{place}: sparse_disable_index_value must be as sparse_attention_freq: "
            "index values are not understood"
        )
    fields = {f.name: getattr(plain, f.name) for f in dataclasses.fields(plain)}
    body = BlockSparseAttention(**fields, index=BlockIndexer(heads, width, blocks, block))
    return [body if flag else plain for flag in sparse]


def _compressed(config: Mapping[str, Any], plain: Mixer | None, layers: int, where: str) -> Layers:
    """Reads `compress_ratios`: one for each layer, and those of draft layers after them."""
    ratios = config.get("compress_ratios")
    known = (0, _SPARSE_RATIO, _HEAVY_RATIO)
    if (
        not isinstance(ratios, list | tuple)
        or len(ratios) < layers
        or any(isinstance(ratio, bool) or ratio not in known for ratio in ratios)
    ):
        raise InputError(
            f"{where}: compress_ratios must have 0, {_SPARSE_RATIO} or {_HEAVY_RATIO} for each of "
            f"{layers} layers" + found(config, "compress_ratios")
        )
    bodies = {ratio: _compressed_body(config, ratio, where) for ratio in sorted(set(ratios))}
    return [bodies[ratio] for ratio in ratios[:layers]]


def _compressed_body(config: Mapping[str, Any], ratio: int, where: str) -> CompressedAttention:
    heads, groups = (size(config, key, where) for key in ("num_attention_heads", "o_groups"))
    if heads % groups:
        raise InputError(
            f"{where}: num_attention_heads {heads} is not a multiple of o_groups {groups}"
        )
    index = None
    if ratio == _SPARSE_RATIO:
        keys = ("index_n_heads", "index_head_dim", "index_topk")
        index = Indexer(*(size(config, key, where) for key in keys))
    return CompressedAttention(
        heads=heads,
        width=size(config, "head_dim", where),
        rope_width=size(config, "qk_rope_head_dim", where),
        q_rank=size(config, "q_lora_rank", where),
        groups=groups,
        o_rank=size(config, "o_lora_rank", where),
        window=size(config, "sliding_window", where),
        ratio=ratio or None,
        index=index,
    )


_READERS: Mapping[str, Callable[[Mapping[str, Any], Mixer | None, int, str], Layers]] = {
    "shared_index": _shared_index,
    "blocks": _block_sparse,
    "compressed": _compressed,
    "delta": delta_layers,
    "kimi": kimi_layers,
}
