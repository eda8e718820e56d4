"""A network's config.json read as a `Model`, with exact integers.

The file is the one published beside the weights, in the format of the transformers library. Each
`model_type` is a row of `ARCHITECTURES`: what its keys are called, what its class takes where a
key is absent, and which biases and norms it has. Sizes are never taken from class defaults: a
file without `hidden_size` is a mistake, not a 7B model.

Only dense decoders with full attention are understood. Whatever else a file asks for (experts,
latent attention, windows, recurrent layers, code of its own) is refused in one line, never
modelled as something else. Keys that change no count (dropout, token ids, rotary bases) are
ignored.
"""

import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from perfmodel.errors import InputError, nearest, shorten
from perfmodel.models._values import SYNONYMS, found, is_off, show, size, switch
from perfmodel.models.attention import GroupedQueryAttention
from perfmodel.models.mlp import Mlp
from perfmodel.models.quantization import suggested_precision
from perfmodel.models.transformer import Block, Model

Flag = int | str
"""0 or 1, or the name of the key that says which (false where absent)."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How one `model_type` is read.

    Fields: the `classes` its `architectures` key may name; the keys of the sizes; `gates` of the
    feed-forward layer (2 with a gate, else 1); flags of biases and of query and key norms;
    `norm_vectors` as in `Model`; `tied`, where `tie_word_embeddings` is absent;
    `kv_default`, whether kv heads default to heads; `head_dim`, where that key is absent (None is
    hidden / heads); `positions`, learned position embeddings beyond the longest context (None
    where positions are rotary); `window`, whether a `sliding_window` acts without
    `use_sliding_window`; `window_default`, where that key is absent; `fixed`, values that keys
    must have where present.
    """

    classes: tuple[str, ...]
    hidden: str = "hidden_size"
    layers: str = "num_hidden_layers"
    heads: str = "num_attention_heads"
    kv_heads: str = "num_key_value_heads"
    intermediate: str = "intermediate_size"
    context: str = "max_position_embeddings"
    activation: str = "hidden_act"
    gates: int = 2
    qkv_bias: Flag = 0
    output_bias: Flag = 0
    mlp_bias: Flag = 0
    qk_norm: int = 0
    norm_vectors: int = 1
    tied: bool = False
    kv_default: bool = True
    head_dim: int | None = None
    positions: int | None = None
    window: bool = True
    window_default: int | None = None
    fixed: tuple[tuple[str, Any], ...] = ()

    def required(self) -> tuple[str, ...]:
        """Returns the keys of the sizes that a file must give."""
        sizes = (self.hidden, self.layers, self.heads, self.intermediate, self.context)
        return (*sizes, "vocab_size")

    def optional(self) -> tuple[str, ...]:
        """Returns the keys that change a count and may be left out."""
        flags = [f for f in (self.qkv_bias, self.output_bias, self.mlp_bias) if isinstance(f, str)]
        switches = ("tie_word_embeddings", "sliding_window", "use_sliding_window", "layer_types")
        return (self.kv_heads, "head_dim", *flags, *switches)


_QWEN2 = Architecture(("Qwen2ForCausalLM",), qkv_bias=1, kv_default=False, window=False)
_BIASED = Architecture((), gates=1, qkv_bias=1, output_bias=1, mlp_bias=1, norm_vectors=2)

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        ("LlamaForCausalLM",),
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "mistral": Architecture(("MistralForCausalLM",), kv_default=False, window_default=4096),
    "qwen2": _QWEN2,
    "qwen3": Architecture(
        ("Qwen3ForCausalLM",),
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=1,
        kv_default=False,
        head_dim=128,
        window=False,
    ),
    # Query, key and value in one matrix, gate and up in another: the same counts.
    "phi3": Architecture(("Phi3ForCausalLM",)),
    # Qwen2 with a draft layer, which is not part of a plain decoding step.
    "mimo": dataclasses.replace(_QWEN2, classes=("MiMoForCausalLM",)),
    # Norms without weights.
    "olmo": Architecture(
        ("OlmoForCausalLM",),
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        norm_vectors=0,
    ),
    "opt": dataclasses.replace(
        _BIASED,
        classes=("OPTForCausalLM",),
        intermediate="ffn_dim",
        activation="activation_function",
        tied=True,
        # Its position table starts at 2.
        positions=2,
        fixed=(
            ("do_layer_norm_before", True),
            ("enable_bias", True),
            ("layer_norm_elementwise_affine", True),
            ("_remove_final_layer_norm", False),
        ),
    ),
    "gpt2": dataclasses.replace(
        _BIASED,
        classes=("GPT2LMHeadModel",),
        hidden="n_embd",
        layers="n_layer",
        heads="n_head",
        intermediate="n_inner",
        context="n_positions",
        activation="activation_function",
        tied=True,
        positions=0,
    ),
}

# What a key says about a network beyond a dense decoder, for the reason given in a refusal.
_TRAITS = tuple(
    (meaning, re.compile(pattern))
    for meaning, pattern in (
        ("mixture of experts", r"expert|(^|_)moe(_|$)"),
        ("latent attention", r"lora_rank|qk_nope|qk_rope"),
        ("state-space, linear or recurrent layers", r"mamba|ssm|(^|_)conv|^linear_|recurrent"),
        ("sliding windows", r"window|(^|_)swa(_|$)"),
        ("layers of several kinds", r"block_type|pattern|block_configs|_interval$|hybrid"),
        ("sparse or chunked attention", r"^index_|sparse_attention|attention_chunk|compress"),
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
# Keys that a pattern above would catch, read elsewhere or without effect.
_NOT_TRAITS = {"sliding_window", "use_sliding_window", "max_window_layers", "qk_norm_type"}
_DRAFT_LAYERS = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")

_ACTIVATIONS = (
    "silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python",
    "quick_gelu", "relu", "relu2", "relu6", "mish", "tanh",
)  # fmt: skip

# Largest sizes believed, far above any network built.
_LIMITS = {"layers": 10_000, "heads": 100_000, "vocabulary": 100_000_000, "context": 10**9}
_KEY_LIMIT = 1000
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
    kind, arch = _architecture(config, where)
    _refuse_traits(config, kind, arch, where)
    _refuse_misspelt(config, arch, where)
    suggested_precision(config, where)
    _check_activation(config, arch, where)

    hidden = size(config, arch.hidden, where)
    layers = size(config, arch.layers, where, _LIMITS["layers"])
    heads = size(config, arch.heads, where, _LIMITS["heads"])
    vocabulary = size(config, "vocab_size", where, _LIMITS["vocabulary"])
    context = size(config, arch.context, where, _LIMITS["context"])
    if kind == "gpt2" and config.get(arch.intermediate) is None:
        intermediate = 4 * hidden
    else:
        intermediate = size(config, arch.intermediate, where)
    _check_window(config, arch, layers, context, where)
    head_dim = _head_dim(config, arch, hidden, heads, where)
    _check_fixed(config, kind, arch, dict(zip(_WIDTHS, (hidden, head_dim), strict=True)), where)

    attention = GroupedQueryAttention(
        heads=heads,
        kv_heads=_kv_heads(config, arch, heads, where),
        head_dim=head_dim,
        qkv_bias=_flag(config, arch.qkv_bias, where),
        output_bias=_flag(config, arch.output_bias, where),
        qk_norm=arch.qk_norm,
    )
    mlp = Mlp(intermediate, gates=arch.gates, bias=_flag(config, arch.mlp_bias, where))
    return Model(
        hidden=hidden,
        vocabulary=vocabulary,
        tied=int(switch(config, "tie_word_embeddings", where, arch.tied)),
        max_context=context,
        layers=layers,
        blocks=(Block(layers, attention), Block(layers, mlp)),
        norm_vectors=arch.norm_vectors,
        positions=0 if arch.positions is None else context + arch.positions,
    )


def caveats(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns what a config.json that is understood asks for and `parse_config` leaves out."""
    notes = [
        f"{key} {value}: draft layers are not counted"
        for key in _DRAFT_LAYERS
        if not is_off(value := config.get(key)) and isinstance(value, int)
    ]
    if not is_off(config.get("auto_map")):
        kind = shorten(config.get("model_type"))
        notes.append(f"auto_map points at remote code: ignored, read as a plain '{kind}'")
    return tuple(notes)


def _known(kind: str = "") -> str:
    close = difflib.get_close_matches(kind.lower()[:80], ARCHITECTURES, n=3, cutoff=0.6)
    rest = [name for name in ARCHITECTURES if name not in close]
    return "known: " + ", ".join([*close, *rest])


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
        why = ": " + ", ".join(dict.fromkeys(reasons)) if reasons else ""
        raise InputError(
            f"{where}: model_type '{shorten(kind, 40)}' is not understood{why}; {_known(kind)}"
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


def _traits(config: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yields (meaning, key, value) of what a config has beyond a dense decoder."""
    for key, value in config.items():
        if not isinstance(key, str) or is_off(value) or key in _NOT_TRAITS:
            continue
        for meaning, pattern in _TRAITS:
            if pattern.search(key.lower()):
                yield meaning, key, value
                break
    types = config.get("layer_types")
    if isinstance(types, list) and any(t != "full_attention" for t in types):
        yield "layers of several kinds", "layer_types", types
    if not is_off(config.get("sliding_window")) and config.get("use_sliding_window") is not False:
        yield "sliding windows", "sliding_window", config["sliding_window"]


def _refuse_traits(config: Mapping[str, Any], kind: str, arch: Architecture, where: str) -> None:
    for meaning, key, value in _traits(config):
        # Windows and layer types are weighed later, beside the sizes they depend on.
        read_later = key in ("layer_types", "sliding_window")
        if read_later or (arch.qk_norm and meaning == "query and key norms"):
            continue
        raise InputError(
            f"{where}: {shorten(key, 40)} {show(value)} is not understood: {meaning}; "
            f"model_type '{kind}' is read as a dense decoder with full attention"
        )


def _refuse_misspelt(config: Mapping[str, Any], arch: Architecture, where: str) -> None:
    """Raises for a key that looks like one left out whose default would change the counts."""
    absent = [key for key in arch.optional() if key not in config]
    known = {*arch.required(), *arch.optional(), *_WIDTHS}
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
    if value is not None and value not in _ACTIVATIONS:
        hint = nearest(value, _ACTIVATIONS) if isinstance(value, str) else ""
        raise InputError(f"{where}: unknown {arch.activation} {show(value)}{hint}")


def _flag(config: Mapping[str, Any], flag: Flag, where: str) -> int:
    return int(switch(config, flag, where, False)) if isinstance(flag, str) else flag


def _kv_heads(config: Mapping[str, Any], arch: Architecture, heads: int, where: str) -> int:
    key = arch.kv_heads
    # An explicit null means one per head in every class; an absent key does so only in some.
    if config.get(key) is None and (key in config or arch.kv_default):
        return heads
    kv_heads = size(config, key, where, _LIMITS["heads"])
    if heads % kv_heads:
        raise InputError(
            f"{where}: {arch.heads} {heads} is not a multiple of {key} {kv_heads}"
            f" (nearest: {_nearest_divisor(heads, kv_heads)})"
        )
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
            f"head_dim is not given (nearest: {arch.heads} {_nearest_divisor(hidden, heads)})"
        )
    return hidden // heads


def _nearest_divisor(number: int, wanted: int) -> int:
    low = max(d for d in range(1, min(wanted, number) + 1) if number % d == 0)
    high = next((d for d in range(wanted, 2 * wanted - low) if number % d == 0), low)
    return high


def _check_window(
    config: Mapping[str, Any], arch: Architecture, layers: int, context: int, where: str
) -> None:
    types = config.get("layer_types")
    if types is not None:
        if not isinstance(types, list | tuple):
            raise InputError(f"{where}: layer_types must be a list, not {show(types)}")
        other = next((t for t in types if t != "full_attention"), None)
        if other is not None:
            raise InputError(
                f"{where}: layer_types has {show(other)}, which is not understood"
                " (nearest: 'full_attention')"
            )
        if len(types) != layers:
            raise InputError(
                f"{where}: layer_types names {len(types)} layers, {arch.layers} says {layers}"
            )
    active = switch(config, "use_sliding_window", where, arch.window)
    window = config.get("sliding_window", arch.window_default)
    if config.get("sliding_window") is not None:
        window = size(config, "sliding_window", where, _LIMITS["context"])
    # A window no shorter than the longest context never acts.
    asked = config.get("use_sliding_window") is True
    if active and (asked if window is None else window < context):
        shown = "use_sliding_window true" if window is None else f"sliding_window {window}"
        shown += "" if asked or "sliding_window" in config else ", its class default,"
        raise InputError(
            f"{where}: {shown} is not understood: attention would be windowed below the longest "
            f"context {context} (nearest: full attention, sliding_window null)"
        )


def _check_fixed(
    config: Mapping[str, Any],
    kind: str,
    arch: Architecture,
    sizes: Mapping[str, int],
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
