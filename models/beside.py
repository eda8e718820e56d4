"""What a config.json describes beside the decoder: its draft layers.

Keys and meaning as in the checkpoints: `num_nextn_predict_layers` (DeepSeek, GLM, MiMo),
`mtp_num_hidden_layers` (Qwen) and `num_mtp_modules` of `mtp_transformer_layers` (MiniMax).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from perfmodel.models._values import is_off, size
from perfmodel.models.architectures import ARCHITECTURES
from perfmodel.models.config import parse_config, special_layers, sublayer_order
from perfmodel.models.draft import Draft
from perfmodel.models.sparsity import draft_attention
from perfmodel.models.transformer import Block

_MOST = 1000


def read_draft(config: Mapping[str, Any], where: str = "config.json") -> Draft | None:
    """Returns the draft layers of a config.json that `parse_config` accepts; None where none.

    Each is taken to be as the network's last layer, with an indexer of its own where others share
    one, and with the compression ratio listed for it where ratios are.
    """
    arch = ARCHITECTURES[config["model_type"]]
    decoder = config if arch.nested is None else config[arch.nested]
    count = _draft_layers(decoder, where)
    if not count:
        return None
    model = parse_config(config, where)
    order = sublayer_order(config, where)
    mixer, feed_forward = (model.blocks[i].body for i in order[-2:])
    layers = special_layers(decoder, arch, where)
    if layers is not None:
        mixer = draft_attention(decoder, arch, layers, where)
    layer = dataclasses.replace(model, layers=1, blocks=(Block(1, mixer), Block(1, feed_forward)))
    return Draft(count, layer)


def _draft_layers(config: Mapping[str, Any], where: str) -> int:
    # MiniMax-M3 names both: one layer, of seven modules in training.
    for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules"):
        if is_off(config.get(key)) or (key == "num_mtp_modules" and config.get("use_mtp") is False):
            continue
        count = size(config, key, where, _MOST)
        if key == "num_mtp_modules" and not is_off(config.get("mtp_transformer_layers")):
            count *= size(config, "mtp_transformer_layers", where, _MOST)
        return count
    return 0
