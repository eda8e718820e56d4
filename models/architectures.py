"""What each `model_type` of the transformers library means: a row of `ARCHITECTURES` per class.

A row says what the keys of the sizes are called, what its class takes where a key is absent, which
biases and norms it has, which layers see a window, and which are mixtures of experts. Adding a
network of known parts is adding a row.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

Flag = int | str
"""0 or 1, or the name of the key that says which (false where absent, unless in `on`)."""

Windows = Literal["none", "all", "late", "alternate", "pattern", "chunks"]
"""Which layers see only near keys: none; all; those from `max_window_layers`; every other one from
the first; all but each last of `sliding_window_pattern`; those with rotary positions, by chunks."""

Sparse = Literal["all", "steps", "after", "interleaved", "listed"]
"""Which layers are mixtures of experts: all; each `decoder_sparse_step`th outside
`mlp_only_layers`; those from `first_k_dense_replace`; each `interleave_moe_layer_step`th; those
with a 1 in `moe_layer_freq`."""

Sparsity = Literal["shared_index", "blocks", "compressed"]
"""What attention sees where that is not all keys or near ones: those that an indexer chose, perhaps
an earlier layer's; the best blocks of keys; near keys and compressed ones."""

_WINDOW_KEYS: Mapping[Windows, tuple[str, ...]] = {
    "late": ("max_window_layers",),
    "pattern": ("sliding_window_pattern", "_sliding_window_pattern"),
    "chunks": ("attention_chunk_size", "no_rope_layers", "no_rope_layer_interval"),
}
_SPARSE_KEYS: Mapping[Sparse, tuple[str, ...]] = {
    "all": (),
    "steps": ("decoder_sparse_step", "mlp_only_layers"),
    "after": ("first_k_dense_replace",),
    "interleaved": ("interleave_moe_layer_step", "moe_layers"),
    "listed": ("moe_layer_freq", "first_k_dense_replace"),
}
# Keys that are read beside those of a row, or that change no count.
_SPARSITY_KEYS: Mapping[Sparsity, tuple[str, ...]] = {
    "shared_index": (
        "indexer_types", "index_topk_freq", "index_topk_pattern", "index_skip_topk_offset",
        "index_share_for_mtp_iteration",
    ),
    "blocks": ("sparse_attention_config",),
    "compressed": (
        "compress_ratios", "compress_rope_theta", "q_lora_rank", "qk_rope_head_dim", "o_lora_rank",
        "o_groups", "index_n_heads", "index_head_dim", "index_topk",
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Routed:
    """How the mixtures of experts of an architecture are read.

    Fields: the keys of the number of `experts`, of those chosen and of their `width`; which layers
    are such (`sparse`); flags of biases; `shared`, how many experts of the same width every token
    takes besides, or the key of that number; `hashed`, the key of how many first layers choose by
    token, not by score, and so have no router bias.
    """

    experts: str
    width: str = "moe_intermediate_size"
    top_k: str = "num_experts_per_tok"
    sparse: Sparse = "all"
    bias: int = 0
    router_bias: Flag = 0
    shared: int | str = 0
    hashed: str | None = None

    def keys(self) -> tuple[str, ...]:
        """Returns the keys that are read."""
        flags = (self.router_bias, self.shared, self.hashed)
        named = [key for key in flags if isinstance(key, str)]
        return (self.experts, self.width, self.top_k, *_SPARSE_KEYS[self.sparse], *named)


@dataclasses.dataclass(frozen=True)
class Latent:
    """Keys of latent attention: ranks and widths, and where it is `sparse`, of its indexer."""

    kv_rank: str = "kv_lora_rank"
    q_rank: str = "q_lora_rank"
    nope_width: str = "qk_nope_head_dim"
    rope_width: str = "qk_rope_head_dim"
    v_width: str = "v_head_dim"
    sparse: tuple[str, str, str] | None = None

    def keys(self) -> tuple[str, ...]:
        """Returns the keys that are read."""
        widths = (self.nope_width, self.rope_width, self.v_width)
        return (self.kv_rank, self.q_rank, *widths, *(self.sparse or ()))


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How one `model_type` is read.

    Fields: the `classes` its `architectures` key may name; `nested`, the key of the object that
    holds the decoder, where vision layers stand beside it, and `decoder`, the `model_type` in
    there where that is not the same with `_text`; the keys of the sizes; `gates` of the
    feed-forward layer (2 with a gate, else 1); flags of biases, of attention `sinks` and of
    query and key norms, whose weights are one head's (`qk_weights`), all heads' or none;
    `norm_vectors` and `norms` as in `Model`; `on`, flags that are true where absent; `tied`,
    where `tie_word_embeddings` is absent; `kv_default`, whether kv heads default to heads;
    `head_dim`, where that key is absent (None is hidden / heads); `positions`, learned position
    embeddings beyond the longest context (None where positions are rotary); `windows`, the
    layers that have one, `typed` where `layer_types` overrides that; `window`, whether it acts
    without `use_sliding_window`; `window_default`, its size where absent; `latent` attention in
    place of grouped queries; `sparsity`, other choices of keys; `streams`, the key of the number
    of residual streams; `expert_dtype`, the key of the format of routed experts where that is not
    the rest's; `routed` experts; `fixed`, values that keys must have where
    present; `repeated`, keys that may only repeat another.
    """

    classes: tuple[str, ...]
    nested: str | None = None
    decoder: str | None = None
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
    qk_norm: Flag = 0
    qk_weights: Literal["head", "layer", "none"] = "head"
    sinks: int = 0
    norm_vectors: int = 1
    norms: int = 1
    on: tuple[str, ...] = ()
    tied: bool = False
    kv_default: bool = True
    head_dim: int | None = None
    positions: int | None = None
    windows: Windows = "none"
    typed: bool = False
    window: bool = True
    window_default: int | None = None
    latent: Latent | None = None
    sparsity: Sparsity | None = None
    streams: str | None = None
    expert_dtype: str | None = None
    routed: Routed | None = None
    fixed: tuple[tuple[str, Any], ...] = ()
    repeated: tuple[tuple[str, str], ...] = ()

    @property
    def window_key(self) -> str:
        """The key of the number of keys that a layer with a window sees."""
        return "attention_chunk_size" if self.windows == "chunks" else "sliding_window"

    def required(self) -> tuple[str, ...]:
        """Returns the keys of the sizes that a file must give."""
        sizes = (self.hidden, self.layers, self.heads, self.intermediate, self.context)
        return (*sizes, "vocab_size")

    def optional(self) -> tuple[str, ...]:
        """Returns the keys that change a count and may be left out."""
        flags = (self.qkv_bias, self.output_bias, self.mlp_bias, self.qk_norm)
        named = [flag for flag in flags if isinstance(flag, str)]
        switches = ("tie_word_embeddings", "sliding_window", "use_sliding_window", "layer_types")
        routed = () if self.routed is None else self.routed.keys()
        windows = _WINDOW_KEYS.get(self.windows, ())
        latent = () if self.latent is None else self.latent.keys()
        sparse = () if self.sparsity is None else _SPARSITY_KEYS[self.sparsity]
        rest = [key for key in (self.streams, self.expert_dtype) if key is not None]
        more = (*windows, *latent, *sparse, *rest, *routed)
        return (self.kv_heads, "head_dim", *named, *switches, *more)

    def reads(self) -> frozenset[str]:
        """Returns all keys that count."""
        more = (key for key, _ in (*self.fixed, *self.repeated))
        return frozenset((*self.required(), *self.optional(), *more))


_QWEN2 = Architecture(
    ("Qwen2ForCausalLM",),
    qkv_bias=1,
    kv_default=False,
    windows="late",
    typed=True,
    window=False,
    window_default=4096,
)
_QWEN3 = dataclasses.replace(
    _QWEN2,
    classes=("Qwen3ForCausalLM",),
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    qk_norm=1,
    head_dim=128,
)
_BIASED = Architecture((), gates=1, qkv_bias=1, output_bias=1, mlp_bias=1, norm_vectors=2)
_GEMMA2 = Architecture(
    ("Gemma2ForCausalLM",),
    activation="hidden_activation",
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    norms=2,
    tied=True,
    kv_default=False,
    head_dim=256,
    windows="alternate",
    typed=True,
    window_default=4096,
)
_GEMMA3 = dataclasses.replace(_GEMMA2, classes=("Gemma3ForCausalLM",), qk_norm=1, windows="pattern")
# Rotary layers see chunks and norm their queries and keys without weights; the others see all.
_LLAMA4 = Architecture(
    ("Llama4ForCausalLM",),
    intermediate="intermediate_size_mlp",
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    qk_norm="use_qk_norm",
    qk_weights="none",
    on=("use_qk_norm",),
    kv_default=False,
    head_dim=128,
    windows="chunks",
    typed=True,
    window_default=8192,
    routed=Routed("num_local_experts", "intermediate_size", sparse="interleaved", shared=1),
)
# Products into latent space without biases; the router has a correction per expert.
_DEEPSEEK = Architecture(
    ("DeepseekV3ForCausalLM",),
    latent=Latent(),
    routed=Routed("n_routed_experts", sparse="after", router_bias=1, shared="n_shared_experts"),
    fixed=(("attention_bias", False), ("moe_layer_freq", 1), ("topk_method", "noaux_tc")),
    repeated=(("num_key_value_heads", "num_attention_heads"),),
)
_INDEXED = Latent(sparse=("index_n_heads", "index_head_dim", "index_topk"))

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        ("LlamaForCausalLM",),
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "mistral": Architecture(
        ("MistralForCausalLM",), kv_default=False, windows="all", window_default=4096
    ),
    "mixtral": Architecture(
        ("MixtralForCausalLM",),
        kv_default=False,
        windows="all",
        routed=Routed("num_local_experts", "intermediate_size"),
    ),
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3_moe": dataclasses.replace(
        _QWEN3,
        classes=("Qwen3MoeForCausalLM",),
        head_dim=None,
        windows="all",
        typed=False,
        routed=Routed("num_experts", sparse="steps"),
    ),
    "gpt_oss": Architecture(
        ("GptOssForCausalLM",),
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        sinks=1,
        on=("attention_bias",),
        kv_default=False,
        head_dim=64,
        windows="alternate",
        typed=True,
        window_default=128,
        routed=Routed("num_local_experts", "intermediate_size", bias=1, router_bias=1),
        repeated=(("experts_per_token", "num_experts_per_tok"),),
    ),
    "llama4": dataclasses.replace(
        _LLAMA4, classes=("Llama4ForConditionalGeneration",), nested="text_config"
    ),
    "llama4_text": _LLAMA4,
    # The output product has no bias; the router has a correction per expert.
    "glm4_moe": Architecture(
        ("Glm4MoeForCausalLM",),
        qkv_bias="attention_bias",
        qk_norm="use_qk_norm",
        kv_default=False,
        head_dim=128,
        routed=Routed("n_routed_experts", sparse="after", router_bias=1, shared="n_shared_experts"),
    ),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": dataclasses.replace(
        _DEEPSEEK, classes=("DeepseekV32ForCausalLM",), latent=_INDEXED
    ),
    # DeepSeek-V3 with other numbers.
    "kimi_k2": _DEEPSEEK,
    "kimi_k25": dataclasses.replace(
        _DEEPSEEK,
        classes=("KimiK25ForConditionalGeneration",),
        nested="text_config",
        decoder="kimi_k2",
    ),
    "glm_moe_dsa": dataclasses.replace(
        _DEEPSEEK,
        classes=("GlmMoeDsaForCausalLM",),
        latent=_INDEXED,
        sparsity="shared_index",
    ),
    # Every layer is a mixture of experts; the first choose experts by token.
    "deepseek_v4": Architecture(
        ("DeepseekV4ForCausalLM",),
        intermediate="moe_intermediate_size",
        sparsity="compressed",
        streams="hc_mult",
        expert_dtype="expert_dtype",
        routed=Routed(
            "n_routed_experts", router_bias=1, shared="n_shared_experts", hashed="num_hash_layers"
        ),
        fixed=(
            ("attention_bias", False),
            ("mlp_bias", False),
            ("topk_method", "noaux_tc"),
            ("num_key_value_heads", 1),
        ),
    ),
    "minimax_m3": Architecture(
        ("MiniMaxM3ForCausalLM", "MiniMaxM3SparseForCausalLM"),
        intermediate="dense_intermediate_size",
        qk_norm="use_qk_norm",
        on=("use_qk_norm", "use_routing_bias"),
        kv_default=False,
        sparsity="blocks",
        routed=Routed(
            "num_local_experts",
            "intermediate_size",
            sparse="listed",
            router_bias="use_routing_bias",
            shared="n_shared_experts",
        ),
        fixed=(("qk_norm_type", "per_head"), ("attention_output_gate", False)),
        repeated=(
            ("moe_intermediate_size", "intermediate_size"),
            ("shared_intermediate_size", "intermediate_size"),
        ),
    ),
    "minimax_m2": Architecture(
        ("MiniMaxM2ForCausalLM",),
        qk_norm="use_qk_norm",
        qk_weights="layer",
        on=("use_qk_norm", "use_routing_bias"),
        kv_default=False,
        head_dim=128,
        routed=Routed("num_local_experts", "intermediate_size", router_bias="use_routing_bias"),
        fixed=(("qk_norm_type", "per_layer"),),
    ),
    "gemma2": _GEMMA2,
    "gemma3": dataclasses.replace(
        _GEMMA3, classes=("Gemma3ForConditionalGeneration",), nested="text_config"
    ),
    "gemma3_text": _GEMMA3,
    # Query, key and value in one matrix, gate and up in another: the same counts.
    "phi3": Architecture(("Phi3ForCausalLM",), windows="all"),
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
