"""Which layer of a network is what: windows of attention, and mixtures of experts.

Both are read from a config.json as its class reads it, into one entry per layer.
"""

from collections.abc import Mapping
from typing import Any

from perfmodel.errors import InputError
from perfmodel.models._values import is_off, show, size, switch
from perfmodel.models.architectures import Architecture, Routed
from perfmodel.models.sparsity import check_dense, flags_of, listed_mixtures

_CONTEXT_LIMIT = 10**9
# Class defaults of keys that say which layers have a window.
_WINDOW_LAYERS, _PATTERN, _ROTARY = 28, 6, 4


def local_layers(
    config: Mapping[str, Any], arch: Architecture, layers: int, context: int, where: str
) -> tuple[list[bool], int | None]:
    """Returns which layers see only near keys, and how many (None where that is all of them).

    A window no shorter than the longest context never acts.

    >>> from perfmodel.models.architectures import ARCHITECTURES
    >>> gemma = {"sliding_window": 1024, "sliding_window_pattern": 3}
    >>> local_layers(gemma, ARCHITECTURES["gemma3_text"], 4, 8192, "config.json")
    ([True, True, False, True], 1024)
    """
    window = _window(config, arch, context, where)
    planned = _planned(config, arch, layers, where)
    local = planned if window is not None else [False] * layers
    types = config.get("layer_types")
    if types is None:
        return local, _acting(window, local, context)
    if not isinstance(types, list | tuple):
        raise InputError(f"{where}: layer_types must be a list, not {show(types)}")
    name = "chunked_attention" if arch.windows == "chunks" else "sliding_attention"
    known = ("full_attention", name) if window is not None else ("full_attention",)
    other = next((t for t in types if t not in known), None)
    if other is not None:
        raise InputError(
            f"{where}: layer_types has {show(other)}, which is not understood"
            f" (nearest: {' or '.join(map(repr, known))})"
        )
    drafts = config.get("num_nextn_predict_layers")
    if isinstance(drafts, int) and len(types) == layers + drafts:
        # Draft layers are named too.
        types = types[:layers]
    if len(types) != layers:
        raise InputError(
            f"{where}: layer_types names {len(types)} layers, {arch.layers} says {layers}"
        )
    listed = [kind == name for kind in types]
    if not arch.typed and listed != local:
        layer = next(i for i in range(layers) if listed[i] != local[i])
        raise InputError(
            f"{where}: layer_types says {show(types[layer])} of layer {layer}, its class "
            f"'{known[-1] if local[layer] else known[0]}'"
        )
    return listed, _acting(window, listed, context)


def _acting(window: int | None, local: list[bool], context: int) -> int | None:
    return window if window is not None and window < context and any(local) else None


def _window(config: Mapping[str, Any], arch: Architecture, context: int, where: str) -> int | None:
    """Returns how many keys layers with a window see; None where there are no windows."""
    active = switch(config, "use_sliding_window", where, arch.window)
    window = config.get(arch.window_key, arch.window_default)
    if config.get(arch.window_key) is not None:
        window = size(config, arch.window_key, where, _CONTEXT_LIMIT)
    asked = config.get("use_sliding_window") is True
    shown = "use_sliding_window true" if window is None else f"sliding_window {window}"
    if arch.windows == "none" and active and (asked if window is None else window < context):
        raise InputError(
            f"{where}: {shown} is not understood: layers of this model_type have no windows "
            "(nearest: full attention, sliding_window null)"
        )
    if arch.windows != "none" and asked and window is None:
        raise InputError(
            f"{where}: use_sliding_window true without a sliding_window is not understood "
            "(nearest: use_sliding_window false)"
        )
    return int(window) if active and window is not None and arch.windows != "none" else None


def _planned(config: Mapping[str, Any], arch: Architecture, layers: int, where: str) -> list[bool]:
    """Returns the layers that have a window where `layer_types` does not say."""
    if arch.windows == "late":
        first = _WINDOW_LAYERS
        if config.get("max_window_layers") is not None:
            first = size(config, "max_window_layers", where, low=0)
        return [i >= first for i in range(layers)]
    if arch.windows == "alternate":
        return [i % 2 == 0 for i in range(layers)]
    if arch.windows == "pattern":
        keys = ("sliding_window_pattern", "_sliding_window_pattern")
        key = next((key for key in keys if config.get(key) is not None), None)
        every = _PATTERN if key is None else size(config, key, where)
        return [(i + 1) % every != 0 for i in range(layers)]
    if arch.windows == "chunks":
        rotary = config.get("no_rope_layers")
        if not is_off(rotary):
            return flags_of(config, "no_rope_layers", layers, where)
        every = _every(config, "no_rope_layer_interval", where, _ROTARY)
        return [(i + 1) % every != 0 for i in range(layers)]
    if arch.windows == "flagged":
        return flags_of(config, "hybrid_layer_pattern", layers, where)
    return [arch.windows == "all"] * layers


def routed_layers(
    config: Mapping[str, Any], routed: Routed | None, layers: int, where: str
) -> list[bool]:
    """Returns which layers are mixtures of experts.

    >>> moe = Routed("num_local_experts", sparse="interleaved")
    >>> routed_layers({"interleave_moe_layer_step": 2}, moe, 4, "config.json")
    [False, True, False, True]
    """
    if routed is None or (
        routed.enabled is not None and not switch(config, routed.enabled, where, False)
    ):
        return [False] * layers
    if routed.sparse == "steps":
        dense = _listed(config, "mlp_only_layers", layers, where)
        every = _every(config, "decoder_sparse_step", where, 1)
        return [i not in dense and (i + 1) % every == 0 for i in range(layers)]
    if routed.sparse == "named" and config.get("moe_layers_enum") is not None:
        named = config["moe_layers_enum"]
        if isinstance(named, str):
            # A text of numbers with commas between.
            words = named.split(",")
            if all(word.strip().isdecimal() and len(word) < 10 for word in words):
                named = [int(word) for word in words]
        sparse = _listed({"moe_layers_enum": named}, "moe_layers_enum", layers, where)
        return [i in sparse for i in range(layers)]
    if routed.sparse in ("after", "named"):
        first = size(config, "first_k_dense_replace", where, low=0)
        sparse = [i >= first for i in range(layers)]
        check_dense(config, sparse, where)
        return sparse
    if routed.sparse == "listed":
        return listed_mixtures(config, layers, where)
    if routed.sparse == "interleaved":
        if config.get("moe_layers") is not None:
            sparse = _listed(config, "moe_layers", layers, where)
            return [i in sparse for i in range(layers)]
        every = _every(config, "interleave_moe_layer_step", where, 1)
        return [(i + 1) % every == 0 for i in range(layers)]
    return [True] * layers


def _every(config: Mapping[str, Any], key: str, where: str, default: int) -> int:
    return default if config.get(key) is None else size(config, key, where)


def _listed(config: Mapping[str, Any], key: str, layers: int, where: str) -> frozenset[int]:
    """Returns the layers that a list names; none where it is absent or null."""
    listed = config.get(key)
    if listed is None:
        return frozenset()
    if not isinstance(listed, list | tuple) or any(
        isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < layers for i in listed
    ):
        raise InputError(f"{where}: {key} must be a list of layers from 0 to {layers - 1}")
    return frozenset(listed)
