"""Networks of recurrent and attention layers, read from a config.json.

Layers by a list or an interval (Qwen3-Next, Qwen3.5, Kimi), or sublayers by a pattern with a letter
for each (Nemotron-H).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from perfmodel.errors import InputError
from perfmodel.models._values import is_off, show, size, switch
from perfmodel.models.attention import GroupedQueryAttention
from perfmodel.models.delta import GatedDelta, KimiDelta
from perfmodel.models.mamba import Mamba2
from perfmodel.models.mla import LatentAttention

_HEADS = 100_000
_INTERVAL = 4
# Bytes of an element of a state by the file's name of its type.
_STATE_TYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
PATTERN = {"M": "mamba", "*": "attention", "-": "feed-forward", "E": "experts"}
"""What the letters of a pattern of sublayers stand for."""


def state_bytes(config: Mapping[str, Any], key: str, where: str) -> int:
    """Returns bytes of an element of a recurrent state: 2, as engines keep it, unless a file says.

    Source: vLLM, MambaStateDtypeCalculator: the model's own type where none is asked for.
    """
    name = config.get(key)
    if name is None:
        return 2
    if name not in _STATE_TYPES:
        raise InputError(
            f"{where}: {key} {show(name)} is not understood (known: {', '.join(_STATE_TYPES)})"
        )
    return _STATE_TYPES[name]


def delta_layers(config: Mapping[str, Any], plain: Any, layers: int, where: str) -> list[Any]:
    """Returns the mixer of each layer of a Qwen hybrid: gated attention, or a gated delta net.

    By `layer_types`, else every `full_attention_interval`th layer attends.
    """
    assert isinstance(plain, GroupedQueryAttention)
    full = dataclasses.replace(plain, gate_width=plain.head_dim)
    body = GatedDelta(
        heads=size(config, "linear_num_value_heads", where, _HEADS),
        key_heads=size(config, "linear_num_key_heads", where, _HEADS),
        state=size(config, "linear_key_head_dim", where),
        width=size(config, "linear_value_head_dim", where),
        kernel=size(config, "linear_conv_kernel_dim", where),
        state_bytes_each=state_bytes(config, "mamba_ssm_dtype", where),
    )
    if body.heads % body.key_heads:
        raise InputError(
            f"{where}: linear_num_value_heads {body.heads} is not a multiple of "
            f"linear_num_key_heads {body.key_heads}"
        )
    types = config.get("layer_types")
    if types is None:
        every = _INTERVAL
        if config.get("full_attention_interval") is not None:
            every = size(config, "full_attention_interval", where)
        return [full if (i + 1) % every == 0 else body for i in range(layers)]
    kinds = {"full_attention": full, "linear_attention": body}
    if not isinstance(types, list | tuple) or len(types) != layers or set(types) - set(kinds):
        raise InputError(
            f"{where}: layer_types must have 'full_attention' or 'linear_attention' for each of "
            f"{layers} layers"
        )
    return [kinds[kind] for kind in types]


def kimi_layers(config: Mapping[str, Any], plain: Any, layers: int, where: str) -> list[Any]:
    """Returns the mixer of each layer by `linear_attn_config`, whose lists count from 1."""
    assert isinstance(plain, LatentAttention)
    gated = switch(config, "mla_use_output_gate", where, False)
    full = dataclasses.replace(plain, gated=gated)
    place = f"{where}: linear_attn_config"
    table = config.get("linear_attn_config")
    if not isinstance(table, Mapping):
        raise InputError(f"{place} must be an object, not {show(table)}")
    if not switch(table, "use_full_rank_gate", place, False):
        raise InputError(f"{place}: use_full_rank_gate false is not understood (nearest: true)")
    heads, width = size(table, "num_heads", place, _HEADS), size(table, "head_dim", place)
    body = KimiDelta(
        heads=heads, key_heads=heads, state=width, width=width,
        kernel=size(table, "short_conv_kernel_size", place), decay_rank=width,
        state_bytes_each=4,
    )  # fmt: skip
    lists = {"kda_layers": body, "full_attn_layers": full}
    found: dict[int, Any] = {}
    for key, kind in lists.items():
        named = table.get(key)
        if not isinstance(named, list | tuple) or any(type(i) is not int for i in named):
            raise InputError(f"{place}: {key} must be a list of layers from 1 to {layers}")
        found |= dict.fromkeys(named, kind)
    if sorted(found) != list(range(1, layers + 1)) or sum(len(table[k]) for k in lists) != layers:
        raise InputError(f"{place}: kda_layers and full_attn_layers must share out {layers} layers")
    return [found[i + 1] for i in range(layers)]


def mamba(config: Mapping[str, Any], where: str) -> Mamba2:
    """Returns the Mamba-2 sublayer of a Nemotron-H file."""
    for key in ("mamba_proj_bias", "use_bias"):
        if not is_off(config.get(key)):
            raise InputError(f"{where}: {key} true is not understood (nearest: false)")
    heads = size(config, "mamba_num_heads", where, _HEADS)
    groups = size(config, "n_groups", where, _HEADS)
    if heads % groups:
        raise InputError(f"{where}: mamba_num_heads {heads} is not a multiple of n_groups {groups}")
    return Mamba2(
        heads=heads,
        key_heads=groups,
        state=size(config, "ssm_state_size", where),
        width=size(config, "mamba_head_dim", where),
        kernel=size(config, "conv_kernel", where),
        conv_bias=int(switch(config, "use_conv_bias", where, True)),
        state_bytes_each=state_bytes(config, "mamba_ssm_cache_dtype", where),
        chunk=size(config, "chunk_size", where),
    )


# How a list of sublayers names what a pattern has letters for.
_LISTED = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}
_LIST, _LAYERS = "layers_block_type", "num_hidden_layers"


def spelt(config: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    """Returns the file with its list of sublayers, if it has one, as a pattern and a number.

    >>> spelt({"layers_block_type": ["mamba", "moe"]}, "hybrid_override_pattern", "config.json")
    {'num_hidden_layers': 2, 'hybrid_override_pattern': 'ME'}
    """
    listed = config.get(_LIST)
    if listed is None:
        return config
    if not isinstance(listed, list | tuple) or any(kind not in _LISTED for kind in listed):
        raise InputError(f"{where}: {_LIST} must be a list of {', '.join(map(repr, _LISTED))}")
    letters = "".join(_LISTED[kind] for kind in listed)
    if config.get(key, letters) != letters:
        raise InputError(f"{where}: {_LIST} and {key} name different layers")
    rest = {name: value for name, value in config.items() if name != _LIST}
    return {_LAYERS: len(letters), **rest, key: letters}


def pattern(config: Mapping[str, Any], key: str, layers: int, where: str) -> list[str]:
    """Returns what each sublayer is, by a text with a letter for each.

    >>> pattern({"hybrid_override_pattern": "M*-"}, "hybrid_override_pattern", 3, "config.json")
    ['mamba', 'attention', 'feed-forward']
    """
    text = config.get(key)
    known = ", ".join(f"{letter} {kind}" for letter, kind in PATTERN.items())
    if not isinstance(text, str) or set(text) - set(PATTERN):
        raise InputError(f"{where}: {key} must be a text of letters ({known})")
    if len(text) != layers:
        raise InputError(f"{where}: {key} names {len(text)} layers, not {layers}")
    return [PATTERN[letter] for letter in text]
