"""What a config.json of an unknown kind is read as where a user asks for it: a plain dense decoder.

Its standard sizes are those of a Llama; whatever else it says that would change a count is left
out, and told by name. Never done unasked.
"""

from collections.abc import Collection, Mapping
from typing import Any

from perfmodel.errors import shorten
from perfmodel.models._values import is_off
from perfmodel.models.architectures import ARCHITECTURES

KIND = "llama"
"""The `model_type` that an unknown one is read as."""

# Keys of a plain decoder that are handed on, with those of number formats.
_READ = frozenset(
    (
        *ARCHITECTURES[KIND].required(), "num_key_value_heads", "head_dim", "attention_bias",
        "mlp_bias", "tie_word_embeddings", "hidden_act", "torch_dtype", "dtype",
        "quantization_config",
    )
)  # fmt: skip
# Keys that change a count in one kind of network or another.
_COUNTING = frozenset(key for arch in ARCHITECTURES.values() for key in arch.reads()) - _READ
_NESTED = "text_config"
_SHOWN = 12


def is_known(kind: Any) -> bool:
    """Returns whether a `model_type` is one that is understood."""
    return isinstance(kind, str) and kind in ARCHITECTURES


def decoder(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the part of a config.json that holds the sizes of the decoder."""
    nested = config.get(_NESTED)
    inside = ARCHITECTURES[KIND].hidden not in config and isinstance(nested, Mapping)
    return nested if inside else config  # pyright: ignore[reportReturnType]


def has_sizes(config: Mapping[str, Any]) -> bool:
    """Returns whether all sizes of a plain decoder are there."""
    return all(key in decoder(config) for key in ARCHITECTURES[KIND].required())


def as_plain(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the config.json of a plain dense decoder with the sizes of another one.

    >>> as_plain({"model_type": "novel", "hidden_size": 64, "num_experts": 8})
    {'model_type': 'llama', 'hidden_size': 64}
    """
    sizes = {**config, **decoder(config)}
    return {"model_type": KIND, **{key: sizes[key] for key in sizes if key in _READ}}


def caveat(config: Mapping[str, Any], traits: Collection[str]) -> str:
    """Returns what is left out of a config.json read as a plain decoder, in words.

    Args:
        config: the file's object.
        traits: its keys that say more than a dense decoder has.

    >>> caveat({"model_type": "novel", "hidden_size": 64, "num_experts": 8}, ())
    "model_type 'novel' is not understood: read as a plain dense decoder; ignored: num_experts"
    """
    inner = decoder(config)
    ignored = [
        key for key, value in inner.items()
        if isinstance(key, str) and key not in _READ and not is_off(value)
        and (key in _COUNTING or key in traits)
    ]  # fmt: skip
    if inner is not config:
        ignored += [key for key in traits if key in config and key != _NESTED]
    shown = [shorten(key, 40) for key in ignored[:_SHOWN]]
    if len(ignored) > _SHOWN:
        shown.append(f"{len(ignored) - _SHOWN} more")
    kind = shorten(config.get("model_type", ""), 40)
    return (
        f"model_type '{kind}' is not understood: read as a plain dense decoder; "
        f"ignored: {', '.join(shown) or 'no key that is known to count'}"
    )
