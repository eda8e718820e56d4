"""An unknown network read as a plain dense decoder: only where asked, and never in silence."""

import re
from collections.abc import Mapping
from typing import Any

from perfmodel.errors import InputError, shorten
from perfmodel.models._values import is_off
from perfmodel.models.architectures import ARCHITECTURES

_PLAIN = "llama"
# Keys that make no layer another one: ids, sampling, initialisation, rotary bases, dropout. Tight,
# since a key too many in the note does no harm and one that is missing does.
_COUNTLESS = re.compile(
    r"token_id|^(rope|partial_rotary|output_attentions|output_hidden|return_|_?name_or_path)"
    r"|initializer|dropout|use_cache|version|norm_eps|epsilon|^architectures$|^model_type$"
    r"|^hidden_act|^activation_function$|dtype|^auto_map$|tokenizer|^pretraining_tp$"
)
_OPTIONAL = (
    "num_key_value_heads", "head_dim", "tie_word_embeddings", "attention_bias", "mlp_bias",
    "hidden_act",
)  # fmt: skip
_SHOWN = 8


def _decoder(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the part of a config.json that has the sizes of a decoder."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) and "hidden_size" not in config else config


def _missing(decoder: Mapping[str, Any]) -> list[str]:
    return [key for key in ARCHITECTURES[_PLAIN].required() if decoder.get(key) is None]


def can_be_dense(config: Mapping[str, Any]) -> bool:
    """Returns whether a config.json has the sizes that `as_dense` needs."""
    return not _missing(_decoder(config))


def as_dense(config: Mapping[str, Any], where: str) -> tuple[dict[str, Any], str]:
    """Returns a config.json as that of a plain dense decoder, and what that leaves out.

    Grouped-query attention over all keys and a gated feed-forward layer in every layer, as in
    Llama. Sizes must be there; whatever else the file says of its layers is ignored and named.

    >>> sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    ...          "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 512}
    >>> as_dense({"model_type": "odd", "num_experts": 8, **sizes}, "config.json")[1]
    "model_type 'odd' is read as a plain dense decoder, as asked: ignored are num_experts"
    """
    arch = ARCHITECTURES[_PLAIN]
    decoder = _decoder(config)
    missing = _missing(decoder)
    if missing:
        raise InputError(
            f"{where}: cannot be read as a plain dense decoder: {', '.join(missing)} missing"
        )
    sizes = (*arch.required(), *_OPTIONAL)
    kept = {key: decoder[key] for key in sizes if key in decoder}
    # Beside an encoder, the whole network's count too.
    for key in ("torch_dtype", "dtype", "quantization_config", "tie_word_embeddings"):
        given = config[key] if config.get(key) is not None else decoder.get(key)
        if given is not None:
            kept[key] = given
    ignored = [
        shorten(key, 40)
        for key, value in decoder.items()
        if key not in kept and not is_off(value) and not _COUNTLESS.search(key)
    ]
    kind = shorten(config.get("model_type"), 40)
    more = f" and {len(ignored) - _SHOWN} more" if len(ignored) > _SHOWN else ""
    told = f": ignored are {', '.join(ignored[:_SHOWN])}{more}" if ignored else ""
    note = f"model_type '{kind}' is read as a plain dense decoder, as asked{told}"
    return {**kept, "model_type": _PLAIN}, note
