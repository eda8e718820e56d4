"""A network's config.json read as a `Model`, with exact integers.

The file is the one published beside the weights, in the format of the transformers library. Each
`model_type` is a row of `ARCHITECTURES`. Sizes are never taken from class defaults: a file without
`hidden_size` is a mistake, not a 7B model.

Decoders of grouped-query attention (over all keys, a window or a chunk), latent attention (over all
keys or those an indexer chooses) and of feed-forward layers (dense or mixtures of experts) are
understood. Whatever else a file asks for (recurrent layers, code of its own) is refused in one
line, never modelled as something else. Keys that change no count (dropout, token ids, rotary bases)
are ignored.
"""

import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from perfmodel.errors import InputError, nearest, shorten
from perfmodel.models._values import SYNONYMS, found, is_off, show, size, switch
from perfmodel.models.architectures import ARCHITECTURES, Architecture, Latent, Routed
from perfmodel.models.attention import GroupedQueryAttention
from perfmodel.models.dense import can_be_dense
from perfmodel.models.hybrids import mamba, spelt
from perfmodel.models.hybrids import pattern as letters
from perfmodel.models.layers import local_layers, routed_layers
from perfmodel.models.mla import Indexer, LatentAttention
from perfmodel.models.mlp import MixtureOfExperts, Mlp
from perfmodel.models.quantization import is_cut, suggested_precision
from perfmodel.models.sparsity import Layers, distinct, sparse_layers
from perfmodel.models.streams import BlockResiduals, HyperConnections
from perfmodel.models.transformer import Block, Model
from perfmodel.models.variants import (
    borrowed_layers,
    check_heads,
    extra_norms,
    flag,
    is_parallel,
    listed_layers,
    nearest_divisor,
    respelt,
    varied,
)

# What a key says about a network beyond a dense decoder, for the reason given in a refusal.
_TRAITS = tuple(
    (meaning, re.compile(pattern))
    for meaning, pattern in (
        ("mixture of experts", r"expert|(^|_)moe(_|$)|^(first_k_dense|mlp_only|shared_inter)"),
        ("latent attention", r"lora_rank|qk_nope|qk_rope"),
        ("state-space, linear or recurrent layers", r"mamba|ssm|(^|_)conv|^linear_|recurrent"),
        ("sliding windows", r"window|(^|_)swa(_|$)"),
        ("layers of several kinds", r"block_type|pattern|block_configs|_interval$|hybrid"),
        (
            "sparse or chunked attention",
            r"^index_|^indexer_types|sparse_attention|attention_chunk|compress",
        ),
        ("attention beside the feed-forward layer", r"parallel_attn|parallel_residual"),
        ("linear position biases", r"alibi"),
        ("another form of attention", r"attn_output_gate|attention_output_gate|k_eq_v|kv_shared"),
        ("several modalities", r"^(text|vision|audio)_config$"),
        ("an encoder", r"is_encoder_decoder|cross_attention"),
        ("pruned heads", r"pruned_heads"),
        ("query and key norms", r"qk_(layer_?)?norm"),
        ("a layer input per embedding", r"per_layer_input"),
    )
)
_ELSEWHERE = (
    "mixture of experts", "latent attention", "sliding windows", "query and key norms",
)  # fmt: skip
# Keys that a pattern above would catch, read elsewhere or without effect.
_NOT_TRAITS = {
    "sliding_window", "use_sliding_window", "max_window_layers", "qk_norm_type",
    "moe_router_dtype",
}  # fmt: skip
# What stands beside the decoder of a network of several modalities, and is left out.
_BESIDE = ("text_config", "vision_config")
_DRAFT_LAYERS = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")

_ACTIVATIONS = (
    "silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python",
    "quick_gelu", "relu", "relu2", "relu6", "mish", "tanh", "situ",
)  # fmt: skip

# Largest sizes believed, far above any network built.
_LIMITS = {
    "layers": 10_000, "heads": 100_000, "experts": 100_000, "vocabulary": 100_000_000,
    "context": 10**9,
}  # fmt: skip
_KEY_LIMIT = 1000
_SHOWN = 24
# Keys that may only repeat the hidden width and the head width.
_WIDTHS = ("word_embed_proj_dim", "v_head_dim")


def parse_config(config: Mapping[str, Any], where: str = "config.json") -> Model:
    """Returns the network that a config.json describes, with exact Python integers.

    Args:
        config: the file's object.
        where: the file's name, for messages.

    Whatever it does not understand is an `InputError` of one line.

    >>> sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    ...          "intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 4096}
    >>> from perfmodel.models.transformer import parameters
    >>> parameters(parse_config({"model_type": "llama", **sizes}))
    6738415616
    """
    whole, place = config, where
    config, kind, arch, where = decoder_of(config, where)
    _refuse_traits(config, kind, arch, where)
    _refuse_misspelt(config, arch, where)
    _check_activation(config, arch, where)
    model = _model(config, kind, arch, where)
    suggested_precision(whole, place, model)
    return model


def decoder_of(
    config: Mapping[str, Any], where: str
) -> tuple[Mapping[str, Any], str, Architecture, str]:
    """Returns the object that holds the decoder, its type, how that is read, and its place."""
    kind, arch = _architecture(config, where)
    if arch.nested is not None and not (arch.flat and arch.nested not in config):
        config, where = _nested(config, kind, arch, where)
    if arch.pattern is not None:
        config = spelt(config, arch.pattern, where)
    return respelt(config, arch, where), kind, arch, where


def _context(config: Mapping[str, Any], arch: Architecture, where: str) -> int:
    if arch.longest is not None and config.get(arch.context) is None:
        return arch.longest
    return size(config, arch.context, where, _LIMITS["context"])


def _grouped(
    config: Mapping[str, Any], arch: Architecture, hidden: int, where: str
) -> GroupedQueryAttention:
    """Returns the attention that layers have unless they differ."""
    heads = size(config, arch.heads, where, _LIMITS["heads"])
    return GroupedQueryAttention(
        heads=heads,
        kv_heads=_kv_heads(config, arch, heads, where),
        head_dim=_head_dim(config, arch, hidden, heads, where),
        qkv_bias=flag(config, arch, arch.qkv_bias, where),
        output_bias=flag(config, arch, arch.output_bias, where),
        sinks=arch.sinks,
        gate_width=1 if flag(config, arch, arch.gate, where) else None,
        joined=is_parallel(config, arch, where),
    )


def _model(config: Mapping[str, Any], kind: str, arch: Architecture, where: str) -> Model:
    hidden = size(config, arch.hidden, where)
    layers = size(config, arch.layers, where, _LIMITS["layers"])
    heads = size(config, arch.heads, where, _LIMITS["heads"])
    vocabulary = size(config, "vocab_size", where, _LIMITS["vocabulary"])
    context = _context(config, arch, where)
    mixtures = routed_layers(config, arch.routed, layers, where).count(True)
    sizes = {key: config[original] for key, original in arch.repeated if original in config}
    special = _sparse(config, arch, layers, where)
    if special is not None:
        sizes |= {_WIDTHS[0]: hidden}
        attention: tuple[Block, ...] = tuple(
            Block(sum(body is kind for body in special), kind) for kind in distinct(special)
        )
    elif arch.latent is not None:
        body = _latent(config, arch.latent, heads, where)
        sizes |= {_WIDTHS[0]: hidden, "qk_head_dim": body.qk_width}
        attention = (Block(layers, body),)
    else:
        grouped = _grouped(config, arch, hidden, where)
        sizes |= zip(_WIDTHS, (hidden, grouped.head_dim), strict=True)
        attention = tuple(_attention(config, arch, grouped, layers, context, where))
    # What a layer of one kind reads may differ from the whole network's.
    own = {key for part in (arch.full, arch.near) if part is not None for key in part.keys()}
    sizes = {key: value for key, value in sizes.items() if key not in own}
    _check_fixed(config, kind, arch, sizes, where)
    if arch.blocks is not None:
        blocks, _ = _listed(config, arch, hidden, where)
    elif arch.pattern is not None:
        blocks, _ = _patterned(config, arch, hidden, where)
    else:
        blocks = (*attention, *_feed_forward(config, arch, hidden, layers, where))
    if not mixtures:
        blocks = tuple(
            dataclasses.replace(block, body=dataclasses.replace(block.body, apart=True))
            if isinstance(block.body, Mlp)
            else block
            for block in blocks
        )
    return Model(
        hidden=hidden,
        vocabulary=vocabulary,
        tied=int(switch(config, "tie_word_embeddings", where, arch.tied)),
        max_context=context,
        layers=layers,
        blocks=blocks,
        norm_vectors=arch.norm_vectors,
        norms=arch.norms,
        positions=0 if arch.positions is None else context + arch.positions,
        extra_norms=extra_norms(config, arch, layers, mixtures, where),
        streams=_streams(config, arch, where),
    )


def _streams(
    config: Mapping[str, Any], arch: Architecture, where: str
) -> HyperConnections | BlockResiduals | None:
    """Returns how sublayers connect where that is not by one residual."""
    if arch.streams is not None:
        return HyperConnections(size(config, arch.streams, where, 1000))
    if arch.residual_blocks is None or config.get(arch.residual_blocks) is None:
        return None
    return BlockResiduals(size(config, arch.residual_blocks, where, _LIMITS["layers"]))


def _patterned(
    config: Mapping[str, Any], arch: Architecture, hidden: int, where: str
) -> tuple[tuple[Block, ...], tuple[int, ...]]:
    """Returns the blocks of a network whose sublayers a text names, mixers first, and their order.

    Each sublayer counts as a layer, as its publisher has it.
    """
    assert arch.pattern is not None
    layers = size(config, arch.layers, where, _LIMITS["layers"])
    kinds = letters(config, arch.pattern, layers, where)
    bodies: dict[str, Any] = {}
    if "attention" in kinds:
        bodies["attention"] = _grouped(config, arch, hidden, where)
    if "mamba" in kinds:
        bodies["mamba"] = mamba(config, where)
    if "feed-forward" in kinds:
        width = size(config, arch.intermediate, where)
        bodies["feed-forward"] = Mlp(width, arch.gates, flag(config, arch, arch.mlp_bias, where))
    if "experts" in kinds:
        assert arch.routed is not None
        bodies["experts"] = _experts(config, arch, arch.routed, where)
    if not {"attention", "mamba"} & set(kinds):
        raise InputError(f"{where}: {arch.pattern} names no layer that mixes tokens")
    places = list(bodies)
    blocks = tuple(Block(kinds.count(kind), body) for kind, body in bodies.items())
    return blocks, tuple(places.index(kind) for kind in kinds)


def _listed(
    config: Mapping[str, Any], arch: Architecture, hidden: int, where: str
) -> tuple[tuple[Block, ...], tuple[int, ...]]:
    """Returns the blocks of a network that lists its layers, attention first, and their order."""
    assert arch.blocks is not None
    layers = size(config, arch.layers, where, _LIMITS["layers"])
    body = _grouped(config, arch, hidden, where)
    listed = listed_layers(config, arch.blocks, int(body.heads), hidden, layers, where)
    bias = flag(config, arch, arch.mlp_bias, where)
    kv_heads, widths = (
        [size for size in column if size is not None] for column in zip(*listed, strict=True)
    )
    mixers, inner = list(dict.fromkeys(kv_heads)), list(dict.fromkeys(widths))
    blocks = (
        *(Block(kv_heads.count(kv), dataclasses.replace(body, kv_heads=kv)) for kv in mixers),
        *(Block(widths.count(width), Mlp(width, arch.gates, bias)) for width in inner),
    )
    order = (
        index
        for kv, width in listed
        for index in (
            None if kv is None else mixers.index(kv),
            None if width is None else len(mixers) + inner.index(width),
        )
        if index is not None
    )
    return blocks, tuple(order)


def special_layers(config: Mapping[str, Any], arch: Architecture, where: str) -> Layers | None:
    """Returns the attention of each layer of a decoder whose layers choose their keys, or None."""
    return _sparse(config, arch, size(config, arch.layers, where, _LIMITS["layers"]), where)


def _sparse(
    config: Mapping[str, Any], arch: Architecture, layers: int, where: str
) -> Layers | None:
    """Returns the attention of each layer where a row says how layers choose their keys."""
    plain = None
    if arch.sparsity is not None and arch.latent is not None:
        heads = size(config, arch.heads, where, _LIMITS["heads"])
        plain = _latent(config, arch.latent, heads, where)
    elif arch.sparsity in ("blocks", "delta"):
        plain = _grouped(config, arch, size(config, arch.hidden, where), where)
        if flag(config, arch, arch.qk_norm, where):
            plain = dataclasses.replace(plain, qk_norm=1, qk_weights=2 * plain.head_dim)
    return sparse_layers(config, arch, plain, layers, where)


def _latent(config: Mapping[str, Any], keys: Latent, heads: int, where: str) -> LatentAttention:
    # null: queries come straight from the hidden state.
    direct = keys.q_rank in config and config[keys.q_rank] is None
    index = None
    if keys.sparse is not None:
        index = Indexer(*(size(config, key, where) for key in keys.sparse))
        if index.width % 128:
            raise InputError(
                f"{where}: {keys.sparse[1]} {index.width} is not understood: index keys are stored "
                f"in blocks of 128 (nearest: {max(round(index.width / 128), 1) * 128})"
            )
    return LatentAttention(
        heads=heads,
        q_rank=None if direct else size(config, keys.q_rank, where),
        kv_rank=size(config, keys.kv_rank, where),
        nope_width=size(config, keys.nope_width, where),
        rope_width=size(config, keys.rope_width, where),
        v_width=size(config, keys.v_width, where),
        index=index,
    )


def _attention(
    config: Mapping[str, Any],
    arch: Architecture,
    body: GroupedQueryAttention,
    layers: int,
    context: int,
    where: str,
) -> Iterator[Block]:
    """Yields the blocks of attention: layers that see all keys, then those that see near ones."""
    kinds, window = _attention_kinds(config, arch, layers, context, where)
    for near, norms, borrowed in sorted(set(kinds)):
        own = varied(config, arch, arch.near if near else arch.full, body, where)
        keys = 0 if borrowed else own.kv_heads
        elements = {
            "head": (1 if borrowed else 2) * own.head_dim,
            "layer": (own.heads + keys) * own.head_dim,
            "none": 0,
        }
        yield Block(
            kinds.count((near, norms, borrowed)),
            dataclasses.replace(
                own,
                qk_norm=norms,
                qk_weights=norms * elements[arch.qk_weights],
                window=window if near else None,
                span=("chunk" if arch.windows == "chunks" else "window") if near else "full",
                cached="earlier" if borrowed else own.cached,
            ),
        )


def _attention_kinds(
    config: Mapping[str, Any], arch: Architecture, layers: int, context: int, where: str
) -> tuple[list[tuple[bool, int, bool]], int | None]:
    """Returns the window, and of each layer whether it sees near keys alone, norms queries and
    keys, and uses the cache of an earlier layer."""
    local, window = local_layers(config, arch, layers, context, where)
    near = [sees_near and window is not None for sees_near in local]
    borrowed = borrowed_layers(config, arch, near, where)
    normed = flag(config, arch, arch.qk_norm, where)
    # With chunks, layers that see all keys are those without rotary positions: no norms there.
    norms = [normed * int(sees_near or arch.windows != "chunks") for sees_near in local]
    return list(zip(near, norms, borrowed, strict=True)), window


def sublayer_order(config: Mapping[str, Any], where: str = "config.json") -> tuple[int, ...]:
    """Returns the sublayers of a network in order, as indices into the blocks of its `Model`.

    Of a config.json that `parse_config` accepts. Here 0 sees all keys, 1 has a window, and 2 is
    the feed-forward layer.

    >>> sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    ...          "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100,
    ...          "max_position_embeddings": 8192, "sliding_window": 1024}
    >>> sublayer_order({"model_type": "gemma2", **sizes})
    (1, 2, 0, 2, 1, 2, 0, 2)
    """
    config, _, arch, where = decoder_of(config, where)
    layers = size(config, arch.layers, where, _LIMITS["layers"])
    if arch.blocks is not None:
        hidden = size(config, arch.hidden, where)
        return _listed(config, arch, hidden, where)[1]
    if arch.pattern is not None:
        return _patterned(config, arch, size(config, arch.hidden, where), where)[1]
    context = _context(config, arch, where)
    special = _sparse(config, arch, layers, where)
    if special is not None:
        places = {id(body): i for i, body in enumerate(distinct(special))}
        mixers = [places[id(body)] for body in special]
    else:
        kinds, _ = _attention_kinds(config, arch, layers, context, where)
        mixers = [sorted(set(kinds)).index(kind) for kind in kinds]
    routed = _routed_kinds(config, arch, layers, where)
    first, feed_forward = len(set(mixers)), sorted(set(routed))
    return tuple(
        index
        for mixer, kind in zip(mixers, routed, strict=True)
        for index in (mixer, first + feed_forward.index(kind))
    )


def _routed_kinds(
    config: Mapping[str, Any], arch: Architecture, layers: int, where: str
) -> list[int]:
    """Returns 0 for each dense feed-forward layer, 1 for experts, 2 for those chosen by token."""
    kinds = [int(flag) for flag in routed_layers(config, arch.routed, layers, where)]
    if arch.routed is None or arch.routed.hashed is None:
        return kinds
    first = size(config, arch.routed.hashed, where, layers, low=0)
    return [2 * kind if i < first else kind for i, kind in enumerate(kinds)]


def _feed_forward(
    config: Mapping[str, Any], arch: Architecture, hidden: int, layers: int, where: str
) -> Iterator[Block]:
    """Yields the blocks of feed-forward layers: dense ones, then mixtures of experts."""
    dense, sparse, hashed = map(_routed_kinds(config, arch, layers, where).count, range(3))
    if dense:
        if arch.inner is not None and config.get(arch.intermediate) is None:
            width = arch.inner * hidden
        else:
            width = size(config, arch.intermediate, where)
        bias = flag(config, arch, arch.mlp_bias, where)
        yield Block(dense, Mlp(width, gates=arch.gates, bias=bias))
    if arch.routed is not None and sparse + hashed:
        experts = _experts(config, arch, arch.routed, where)
        if sparse:
            yield Block(sparse, experts)
        if hashed:
            yield Block(hashed, dataclasses.replace(experts, router_bias=0))


def _experts(
    config: Mapping[str, Any], arch: Architecture, routed: Routed, where: str
) -> MixtureOfExperts:
    experts = size(config, routed.experts, where, _LIMITS["experts"])
    top_k = size(config, routed.top_k, where, _LIMITS["experts"])
    if top_k > experts:
        raise InputError(
            f"{where}: {routed.top_k} {top_k} exceeds {routed.experts} {experts}"
            f" (nearest: {experts})"
        )
    width = size(config, routed.width, where)
    beside = width if routed.shared_width is None else size(config, routed.shared_width, where)
    shared = routed.shared
    if isinstance(shared, str):
        key = shared
        off = key in config and config[key] is None
        shared = 0 if off else size(config, key, where, _LIMITS["experts"], low=0)
    latent = None
    if routed.latent is not None and config.get(routed.latent) is not None:
        latent = size(config, routed.latent, where)
    return MixtureOfExperts(
        experts=experts,
        top_k=top_k,
        intermediate=width,
        gates=arch.gates,
        bias=routed.bias,
        router_bias=flag(config, arch, routed.router_bias, where),
        shared=Mlp(shared * beside, gates=arch.gates) if shared else None,
        shared_gate=routed.shared_gate if shared else 0,
        latent=latent,
        latent_norm=0 if latent is None else flag(config, arch, routed.latent_norm, where),
        # Norms beyond the usual ones are around the experts and the layer beside them.
        normed_apart=routed.norms > 0,
    )


WITHOUT_TOWER = "only the decoder is counted, not the vision layers beside it"
"""What `caveats` says of a network with a tower that no image asks for."""


def caveats(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns what a config.json that is understood asks for and `parse_config` leaves out."""
    kind = config.get("model_type")
    arch = ARCHITECTURES.get(kind) if isinstance(kind, str) else None
    nested = config.get(arch.nested) if arch is not None and arch.nested is not None else None
    decoder = nested if isinstance(nested, Mapping) else config
    notes = []
    drafts = arch is not None and arch.drafts
    if arch is not None and arch.longest is not None and decoder.get(arch.context) is None:
        notes.append(f"{arch.context} is not given: {arch.longest:,} tokens, as it was trained")
    notes += [
        f"{key} {value}: draft layers are {'counted apart' if drafts else 'not counted'}"
        for key in _DRAFT_LAYERS
        if not is_off(value := decoder.get(key)) and isinstance(value, int)
    ]
    if arch is not None and arch.sparsity == "compressed":
        # Source: vLLM, DeepseekCompressor: 64 of 512 elements in 16 bits, a scale per 64.
        notes.append("an fp8 cache is counted at 1 B an element; kernels keep 584 B for 512")
        notes.append("products of compressors are counted in the format of the other layers")
        notes.append("pipeline stages hand over one residual stream, not all")
        notes.append("tables of experts by token, of the first layers, are not counted")
    if arch is not None and arch.sparsity == "shared_index":
        if config.get("index_share_for_mtp_iteration") is True:
            notes.append("draft steps after the first are counted with an indexer run of their own")
    if nested is not None:
        notes.append(WITHOUT_TOWER)
    if is_cut(config):
        notes.append("the list of what is not quantised was cut: what it shows is taken for all")
    if not is_off(config.get("auto_map")):
        plain = shorten(kind)
        notes.append(f"auto_map points at remote code: ignored, read as a plain '{plain}'")
    return tuple(notes)


def _known(kind: str = "") -> str:
    close = difflib.get_close_matches(kind.lower()[:80], ARCHITECTURES, n=3, cutoff=0.6)
    rest = [name for name in ARCHITECTURES if name not in close]
    shown = [*close, *rest][:_SHOWN]
    return f"known: {', '.join(shown)} and {len(ARCHITECTURES) - len(shown)} more"


def _architecture(config: Mapping[str, Any], where: str) -> tuple[str, Architecture]:
    if not isinstance(config, Mapping) or not all(isinstance(key, str) for key in config):
        raise InputError(f"{where}: must be an object with text keys")
    if len(config) > _KEY_LIMIT:
        raise InputError(f"{where}: more than {_KEY_LIMIT} keys; not a config.json")
    if "model_type" not in config:
        raise InputError(f"{where}: model_type is missing{found(config, 'model_type')}; {_known()}")
    kind = config["model_type"]
    if not isinstance(kind, str):
        raise InputError(f"{where}: model_type must be text, not {show(kind)}; {_known()}")
    if kind not in ARCHITECTURES:
        reasons = [meaning for meaning, _, _ in _traits(config)]
        nested = config.get("text_config")
        if isinstance(nested, Mapping) and len(nested) <= _KEY_LIMIT:
            reasons += [meaning for meaning, _, _ in _traits(nested)]
        if not is_off(config.get("auto_map")):
            reasons.insert(0, "points at remote code (auto_map)")
        # What other rows understand is told only where nothing else is known.
        reasons = [reason for reason in reasons if reason not in _ELSEWHERE] or reasons
        why = ": " + ", ".join(dict.fromkeys(reasons)) if reasons else ""
        raise InputError(
            f"{where}: model_type '{shorten(kind, 40)}' is not understood{why}; {_known(kind)}"
            + ("; or --assume-dense" if can_be_dense(config) else "")
        )
    arch = ARCHITECTURES[kind]
    classes = config.get("architectures")
    if not is_off(classes):
        names = classes if isinstance(classes, list | tuple) else [classes]
        if not any(name in arch.classes for name in names if isinstance(name, str)):
            raise InputError(
                f"{where}: architectures {show(names[0])} is not understood for model_type "
                f"'{kind}'; known: {', '.join(arch.classes)}"
            )
    return kind, arch


def _nested(
    config: Mapping[str, Any], kind: str, arch: Architecture, where: str
) -> tuple[Mapping[str, Any], str]:
    """Returns the decoder's part of a network of several modalities, and its place."""
    assert arch.nested is not None
    for meaning, key, value in _traits(config):
        if key not in _BESIDE:
            raise InputError(
                f"{where}: {shorten(key, 40)} {show(value)} is not understood: {meaning}"
            )
    if arch.nested not in config:
        raise InputError(f"{where}: {arch.nested} is missing{found(config, arch.nested)}")
    inner = config[arch.nested]
    place = f"{where}: {arch.nested}"
    if not isinstance(inner, Mapping) or not all(isinstance(key, str) for key in inner):
        raise InputError(f"{place}: must be an object with text keys")
    if len(inner) > _KEY_LIMIT:
        raise InputError(f"{place}: more than {_KEY_LIMIT} keys; not a config.json")
    decoder = arch.decoder or f"{kind}_text"
    inside = inner.get("model_type", decoder)
    if inside != decoder:
        raise InputError(
            f"{place}: model_type {show(inside)} is not understood (nearest: {decoder})"
        )
    if "tie_word_embeddings" in config:
        inner = {**inner, "tie_word_embeddings": config["tie_word_embeddings"]}
    return inner, place


def _traits(
    config: Mapping[str, Any], read: frozenset[str] = frozenset()
) -> Iterator[tuple[str, str, Any]]:
    """Yields (meaning, key, value) of what a config has beyond a dense decoder and keys read."""
    for key, value in config.items():
        if not isinstance(key, str) or is_off(value) or key in _NOT_TRAITS or key in read:
            continue
        for meaning, pattern in _TRAITS:
            if pattern.search(key.lower()):
                yield meaning, key, value
                break
    if read:
        return
    types = config.get("layer_types")
    if isinstance(types, list) and any(t != "full_attention" for t in types):
        yield "layers of several kinds", "layer_types", types
    if not is_off(config.get("sliding_window")) and config.get("use_sliding_window") is not False:
        yield "sliding windows", "sliding_window", config["sliding_window"]


def _refuse_traits(config: Mapping[str, Any], kind: str, arch: Architecture, where: str) -> None:
    reads = arch.reads()
    for meaning, key, value in _traits(config, reads):
        if arch.qk_norm and meaning == "query and key norms":
            continue
        close = difflib.get_close_matches(key.lower()[:80], sorted(reads), n=1, cutoff=0.75)
        hint = f" (nearest: {close[0]})" if close else ""
        raise InputError(
            f"{where}: {shorten(key, 40)} {show(value)} is not understood: {meaning}; "
            f"no part of model_type '{kind}'{hint}"
        )


def _refuse_misspelt(config: Mapping[str, Any], arch: Architecture, where: str) -> None:
    """Raises for a key that looks like one left out whose default would change the counts."""
    absent = [key for key in arch.optional() if key not in config]
    known = {*arch.reads(), *_WIDTHS}
    for key in config:
        if key in known:
            continue
        if arch.kv_heads in absent and key in SYNONYMS["num_key_value_heads"]:
            close = [arch.kv_heads]
        else:
            close = difflib.get_close_matches(key.lower()[:80], absent, n=1, cutoff=0.88)
        if close:
            raise InputError(f"{where}: unknown key '{shorten(key)}' (nearest: {close[0]})")


def _check_activation(config: Mapping[str, Any], arch: Architecture, where: str) -> None:
    value = config.get(arch.activation)
    # MiniMax-M3's, a clamped SwiGLU.
    if value is not None and value not in (*_ACTIVATIONS, "swigluoai"):
        hint = nearest(value, _ACTIVATIONS) if isinstance(value, str) else ""
        raise InputError(f"{where}: unknown {arch.activation} {show(value)}{hint}")


def _kv_heads(config: Mapping[str, Any], arch: Architecture, heads: int, where: str) -> int:
    key = arch.kv_heads
    if arch.multi_query is not None:
        single, grouped = arch.multi_query
        if flag(config, arch, single, where) and not flag(config, arch, grouped, where):
            return 1
    # An explicit null means one per head in every class; an absent key does so only in some.
    if config.get(key) is None and (key in config or arch.kv_default):
        return heads
    kv_heads = size(config, key, where, _LIMITS["heads"])
    check_heads(heads, kv_heads, arch.heads, key, where)
    return kv_heads


def _head_dim(
    config: Mapping[str, Any], arch: Architecture, hidden: int, heads: int, where: str
) -> int:
    if config.get("head_dim") is not None:
        return size(config, "head_dim", where)
    if "head_dim" not in config and arch.head_dim is not None:
        return arch.head_dim
    if hidden % heads:
        raise InputError(
            f"{where}: {arch.hidden} {hidden} is not a multiple of {arch.heads} {heads}, and "
            f"head_dim is not given (nearest: {arch.heads} {nearest_divisor(hidden, heads)})"
        )
    return hidden // heads


def _check_fixed(
    config: Mapping[str, Any],
    kind: str,
    arch: Architecture,
    sizes: Mapping[str, Any],
    where: str,
) -> None:
    for key, value in (*arch.fixed, *sizes.items()):
        given = config.get(key)
        # 1 == True, but a width is not a switch.
        if given is not None and (type(given) is not type(value) or given != value):
            raise InputError(
                f"{where}: {key} {show(given)} is not understood for model_type '{kind}'"
                f" (nearest: {show(value)})"
            )
