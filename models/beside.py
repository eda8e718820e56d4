"""What a config.json describes beside the decoder: draft layers, and the tower for images.

Keys and meaning as in the checkpoints: `num_nextn_predict_layers` (DeepSeek, GLM, MiMo),
`mtp_num_hidden_layers` (Qwen) and `num_mtp_modules` of `mtp_transformer_layers` (MiniMax).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from perfmodel.models._values import is_off, size
from perfmodel.models.architectures import ARCHITECTURES
from perfmodel.models.config import decoder_of, parse_config, special_layers, sublayer_order
from perfmodel.models.draft import Draft
from perfmodel.models.encoder import Encoder
from perfmodel.models.sparsity import draft_attention
from perfmodel.models.transformer import Block
from perfmodel.relax import divide

_MOST = 1000


def read_draft(config: Mapping[str, Any], where: str = "config.json") -> Draft | None:
    """Returns the draft layers of a config.json that `parse_config` accepts; None where none.

    Each is taken to be as the network's last layer, with an indexer of its own where others share
    one, and with the compression ratio listed for it where ratios are.
    """
    decoder, _, arch, _ = decoder_of(config, where)
    count = _draft_layers(decoder, where)
    if not count or not arch.drafts:
        return None
    model = parse_config(config, where)
    if arch.pattern is not None:
        # As their own pattern has it: one that attends, and experts.
        mixer, feed_forward = model.attention[0].body, model.feed_forward[-1].body
    else:
        order = sublayer_order(config, where)
        mixer, feed_forward = (model.blocks[i].body for i in order[-2:])
    layers = special_layers(decoder, arch, where)
    if layers is not None:
        mixer = draft_attention(decoder, arch, layers, where)
    layer = dataclasses.replace(
        model, layers=1, extra_norms=0, blocks=(Block(1, mixer), Block(1, feed_forward))
    )
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


# Channels of an image; tokens of one where the file does not say (class default of Gemma 3).
_COLOURS, _GEMMA_TOKENS = 3, 256
_QWEN = (
    "depth", "hidden_size", "intermediate_size", "num_heads", "patch_size", "temporal_patch_size",
    "spatial_merge_size", "num_position_embeddings", "out_hidden_size",
)  # fmt: skip
_VIT = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "patch_size",
)  # fmt: skip
_TOWERS: Mapping[str, tuple[str, ...]] = {
    "gemma3": (*_VIT, "image_size"),
    "llama4": (
        *_VIT, "image_size", "projector_input_dim", "projector_output_dim", "vision_output_dim",
    ),
    "kimi_k25": (
        *(f"vt_{key}" for key in _VIT[:4]), "patch_size", "init_pos_emb_height",
        "init_pos_emb_width",
    ),
    "kimi_k3": (
        *(f"vt_{key}" for key in _VIT[:4]), "patch_size", "init_pos_emb_height",
        "init_pos_emb_width", "qkv_hidden_size",
    ),
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "gemma4": (
        *_VIT, "position_embedding_size", "pooling_kernel_size", "default_output_length",
    ),
}  # fmt: skip


def read_encoder(config: Mapping[str, Any], where: str = "config.json") -> Encoder | None:
    """Returns the encoder tower of a config.json that `parse_config` accepts.

    None where the file has none, or describes it without its sizes: copies of a file are often
    without. Classes: Gemma3ForConditionalGeneration, Llama4VisionModel, Qwen3_5VisionModel and
    Gemma4VisionModel of transformers, MoonViT of Kimi-VL and its form in Kimi K3.
    """
    kind = config["model_type"]
    arch = ARCHITECTURES[kind]
    table = config.get("vision_config")
    keys = _TOWERS.get(kind)
    if arch.nested is None or keys is None or not isinstance(table, Mapping):
        return None
    if any(key not in table for key in keys):
        return None
    place = f"{where}: vision_config"
    layers, h, inner, heads, patch, *rest = (size(table, key, place) for key in keys)
    width = size(config[arch.nested], arch.hidden, where)
    inputs = _COLOURS * patch**2
    # Biases of four products and of two beside each other, two norms with biases.
    plain = (h, 4 * h + inner + h + 4 * h)
    if kind == "gemma3":
        patches = (rest[0] // patch) ** 2
        given = config.get("mm_tokens_per_image") is not None
        tokens = size(config, "mm_tokens_per_image", where) if given else _GEMMA_TOKENS
        # Bias of patches, last norm, and a norm of the pooled patches before one product.
        return Encoder(
            layers, h, inner, heads, *plain, inputs, patches, patches, divide(patches, tokens),
            ((width, h),), vectors=h + 2 * h + h,
        )  # fmt: skip
    if kind == "llama4":
        image, entry, result, last = rest
        patches = (image // patch) ** 2
        merged = round(1 / float(table.get("pixel_shuffle_ratio", 0.5)) ** 2)
        # A class token with a position, norms before and after.
        return Encoder(
            layers, h, inner, heads, *plain, inputs, patches, patches + 1, merged,
            ((entry, h * merged), (result, entry), (width, last)), vectors=h + 4 * h, extra=1,
        )  # fmt: skip
    if kind == "gemma4":
        rows, side, tokens = rest
        # No biases; norms of queries and keys, four norms a layer, and a scale and an offset after
        # pooling where the file asks for them. Positions of both directions in tables of their own.
        vectors = 4 * h + 2 * divide(h, heads)
        ends = 0 if is_off(table.get("standardize")) else 2 * h
        return Encoder(
            layers, h, inner, heads, h, vectors, inputs, tokens * side**2, 2 * rows, side**2,
            ((width, h),), vectors=ends, gates=2, norms=4,
        )  # fmt: skip
    if kind in ("qwen3_5", "qwen3_5_moe"):
        # A patch of an image is seen as often as a patch has frames.
        frames, side, patches, last = rest
        group = side**2 * h
        return Encoder(
            layers, h, inner, heads, *plain, frames * inputs, patches, patches, side**2,
            ((group, group), (last, group)), vectors=h + 2 * h + group + last,
        )  # fmt: skip
    high, wide, *rest = rest
    merged = 1
    for side in table.get("merge_kernel_size", (2, 2)):
        merged *= side
    group = merged * h
    if kind == "kimi_k3":
        # No biases; norms without them, one of the result.
        return Encoder(
            layers, h, inner, heads, rest[0], 2 * h, inputs, high * wide, high * wide, merged,
            ((group, group), (width, group)), vectors=h + width,
        )  # fmt: skip
    # Bias of patches, last norm, a norm before the projector, and its biases.
    return Encoder(
        layers, h, inner, heads, *plain, inputs, high * wide, high * wide, merged,
        ((group, group), (width, group)), vectors=h + 2 * h + 2 * h + group + width,
    )  # fmt: skip
