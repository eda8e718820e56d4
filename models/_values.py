"""Values out of a parsed config.json: checked on the way out, and as messages show them."""

import difflib
from collections.abc import Mapping
from typing import Any

from perfmodel.errors import InputError, shorten

SIZE_LIMIT = 10_000_000
"""Largest width believed, far above any network built."""

# Other names of sizes, for hints.
SYNONYMS = {
    "hidden_size": ("n_embd", "d_model", "dim", "hidden_dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": (
        "num_kv_heads", "n_kv_heads", "n_head_kv", "multi_query", "num_query_groups",
    ),
    "intermediate_size": ("ffn_dim", "ffn_hidden_size", "n_inner", "d_ff"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len", "max_sequence_length"),
    "vocab_size": ("n_vocab", "padded_vocab_size"),
    "num_experts": ("num_local_experts", "n_routed_experts"),
    "num_local_experts": ("num_experts", "n_routed_experts"),
    "n_routed_experts": ("num_experts", "num_local_experts"),
    "num_experts_per_tok": ("experts_per_token", "moe_topk", "top_k"),
    "moe_intermediate_size": ("expert_intermediate_size", "ffn_dim"),
}  # fmt: skip


def is_off(value: Any) -> bool:
    """Returns whether a key with this value says no more than its absence."""
    return value is None or value is False or value in (0, "", [], (), {})


def show(value: Any) -> str:
    """Returns a value as messages show it; never long, whatever it is.

    >>> show(None), show("a"), show([1, 2]), show(10**30)
    ('null', "'a'", 'a list', 'a number of more than 20 digits')
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value) if abs(value) < 10**20 else "a number of more than 20 digits"
    if isinstance(value, str):
        return f"'{shorten(value, 40)}'"
    if isinstance(value, float):
        return str(value)
    return "a list" if isinstance(value, list | tuple) else "an object"


def found(config: Mapping[str, Any], key: str) -> str:
    """Returns ` (found x)` where a config has a key that may be a misspelt or renamed `key`."""
    names = [name for name in SYNONYMS.get(key, ()) if name in config]
    folded = {name.lower()[:80]: name for name in config}
    names += [folded[n] for n in difflib.get_close_matches(key, folded, n=1, cutoff=0.75)]
    return f" (found {shorten(names[0], 40)})" if names else ""


def size(
    config: Mapping[str, Any], key: str, where: str, high: int = SIZE_LIMIT, low: int = 1
) -> int:
    """Returns the whole number at `key`, which must be there and between `low` and `high`."""
    if key not in config:
        raise InputError(f"{where}: {key} is missing{found(config, key)}")
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InputError(
            f"{where}: {key} must be a whole number from {low} to {high}, not {show(value)}"
        )
    return int(value)


def switch(config: Mapping[str, Any], key: str, where: str, default: bool) -> bool:
    """Returns the true or false at `key`; the default where it is absent or null."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InputError(f"{where}: {key} must be true or false, not {show(value)}")
    return value
