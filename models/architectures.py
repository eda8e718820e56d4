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

Windows = Literal["none", "all", "late", "alternate", "pattern", "chunks", "flagged"]
"""Which layers see only near keys: none; all; those from `max_window_layers`; every other one from
the first; all but each last of `sliding_window_pattern`; those with rotary positions, by chunks;
those with a 1 in `hybrid_layer_pattern`."""

Sparse = Literal["all", "steps", "after", "interleaved", "listed", "named"]
"""Which layers are mixtures of experts: all; each `decoder_sparse_step`th outside
`mlp_only_layers`; those from `first_k_dense_replace`; each `interleave_moe_layer_step`th; those
with a 1 in `moe_layer_freq`; those in `moe_layers_enum`, else from `first_k_dense_replace`."""

Sparsity = Literal["shared_index", "blocks", "compressed", "delta", "kimi"]
"""What attention sees where that is not all keys or near ones: those that an indexer chose, perhaps
an earlier layer's; the best blocks of keys; near keys and compressed ones. Or which layers have a
gated delta net, or Kimi delta attention, in its place."""

_WINDOW_KEYS: Mapping[Windows, tuple[str, ...]] = {
    "late": ("max_window_layers",),
    "pattern": ("sliding_window_pattern", "_sliding_window_pattern"),
    "chunks": ("attention_chunk_size", "no_rope_layers", "no_rope_layer_interval"),
    "flagged": ("hybrid_layer_pattern",),
}
_SPARSE_KEYS: Mapping[Sparse, tuple[str, ...]] = {
    "all": (),
    "steps": ("decoder_sparse_step", "mlp_only_layers"),
    "after": ("first_k_dense_replace",),
    "interleaved": ("interleave_moe_layer_step", "moe_layers"),
    "named": ("moe_layers_enum", "first_k_dense_replace"),
    "listed": ("moe_layer_freq", "first_k_dense_replace"),
}
# Keys that are read beside those of a row, or that change no count.
_SPARSITY_KEYS: Mapping[Sparsity, tuple[str, ...]] = {
    "shared_index": (
        "indexer_types", "index_topk_freq", "index_topk_pattern", "index_skip_topk_offset",
        "index_share_for_mtp_iteration",
    ),
    "blocks": ("sparse_attention_config",),
    "delta": (
        "full_attention_interval", "linear_conv_kernel_dim", "linear_key_head_dim",
        "linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim",
        "mamba_ssm_dtype",
    ),
    "kimi": ("linear_attn_config", "mla_use_output_gate", "kv_lora_rank", "q_lora_rank"),
    "compressed": (
        "compress_ratios", "compress_rope_theta", "q_lora_rank", "qk_rope_head_dim", "o_lora_rank",
        "o_groups", "index_n_heads", "index_head_dim", "index_topk",
    ),
}  # fmt: skip


_PATTERN_KEYS = (
    "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel", "chunk_size",
    "use_conv_bias", "mamba_ssm_cache_dtype", "mamba_proj_bias", "use_bias",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Routed:
    """How the mixtures of experts of an architecture are read.

    Fields: the keys of the number of `experts`, of those chosen and of their `width`; which layers
    are such (`sparse`); flags of biases; `shared`, how many experts every token takes besides, or
    the key of that number; `shared_width`, the key of their width where it is not the same;
    `enabled`, a key that switches mixtures on, where there is one; `norms` of a mixture beyond
    those of any feed-forward layer; `hashed`, the key of how many first layers choose by token, not
    by score, and so have no router bias; `shared_gate`, 1 where a product weighs the shared expert;
    `latent`, the key of the width that experts work at where that is not the hidden one, and
    `latent_norm`, a flag of a norm there.
    """

    experts: str
    width: str = "moe_intermediate_size"
    top_k: str = "num_experts_per_tok"
    sparse: Sparse = "all"
    bias: int = 0
    router_bias: Flag = 0
    shared: int | str = 0
    shared_width: str | None = None
    enabled: str | None = None
    norms: int = 0
    hashed: str | None = None
    shared_gate: int = 0
    latent: str | None = None
    latent_norm: Flag = 0

    def keys(self) -> tuple[str, ...]:
        """Returns the keys that are read."""
        keys = (self.router_bias, self.shared, self.shared_width, self.enabled, self.hashed)
        keys = (*keys, self.latent, self.latent_norm)
        named = [key for key in keys if isinstance(key, str)]
        return (self.experts, self.width, self.top_k, *_SPARSE_KEYS[self.sparse], *named)


@dataclasses.dataclass(frozen=True)
class Variant:
    """Keys of attention layers of one kind, where they differ from those of the whole network.

    Fields: keys of sizes, which keep the network's where None or absent; `sinks`; `key_values`, a
    flag of layers whose values are their keys, to which alone `kv_heads` then applies; `inside`,
    the key of an object that holds the others.
    """

    heads: str | None = None
    kv_heads: str | None = None
    head_dim: str | None = None
    v_width: str | None = None
    sinks: Flag = 0
    key_values: str | None = None
    inside: str | None = None

    def keys(self) -> tuple[str, ...]:
        """Returns the keys that are read of the whole network's object."""
        named = (self.heads, self.kv_heads, self.head_dim, self.v_width)
        own = (*named, self.sinks, self.key_values) if self.inside is None else (self.inside,)
        return tuple(key for key in own if isinstance(key, str))


@dataclasses.dataclass(frozen=True)
class Parallel:
    """Blocks whose attention and feed-forward layer see the same input: their results are added.

    Fields: `when`, the flag of such blocks; `norms`, how many norms a block has (1 where both
    layers see one normalised input), or the key of that number, and the flag that makes it 2 where
    that is absent.
    """

    when: str
    norms: int | tuple[str, str] = 1

    def keys(self) -> tuple[str, ...]:
        """Returns the keys that are read."""
        return (self.when, *(() if isinstance(self.norms, int) else self.norms))


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
    there where that is not the same with `_text` (`flat` where files without vision layers have
    the sizes outside); the keys of the sizes; `gates` of the
    feed-forward layer (2 with a gate, else 1); flags of biases, of attention `sinks` and of
    query and key norms, whose weights are one head's (`qk_weights`), all heads' or none;
    `norm_vectors` and `norms` as in `Model`; `on`, flags that are true where absent; `tied`,
    where `tie_word_embeddings` is absent; `kv_default`, whether kv heads default to heads;
    `head_dim`, where that key is absent (None is hidden / heads); `positions`, learned position
    embeddings beyond the longest context (None where positions are rotary); `windows`, the
    layers that have one, `typed` where `layer_types` overrides that; `window`, whether it acts
    without `use_sliding_window`; `window_default`, its size where absent; `latent` attention in
    place of grouped queries; `sparsity`, other choices of keys; `streams`, the key of the number
    of residual streams, and `residual_blocks` that of the layers of a block of residuals;
    `expert_dtype`, the key of the format of routed experts where that is not the rest's; `routed`
    experts; `fixed`, values that keys must have where present; `repeated`, keys that may only
    repeat another.

    Where layers differ: `full` and `near`, attention that sees all keys or has a window;
    `kv_shared`, the key of how many last layers use the cache of an earlier one of their kind;
    `gate`, a flag of gates per head; `blocks`, the key of a list with an object per layer;
    `pattern`, the key of a text with a letter per sublayer; `drafts`, whether draft layers are as
    the last layer is. `parallel` blocks; `multi_query`, a
    flag of one kv head for all, and the flag that overrules it;
    `embedding_norm`, 1 where embeddings are normalised. `inner` and `longest`, the inner width in
    hidden ones and the longest context where a file does not give them, because its class has no
    such key or a fixed one; `spellings`, other names of keys; `harmless`, keys that change no count
    though they look as if.
    """

    classes: tuple[str, ...]
    nested: str | None = None
    decoder: str | None = None
    flat: bool = False
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
    residual_blocks: str | None = None
    pattern: str | None = None
    drafts: bool = True
    routed: Routed | None = None
    fixed: tuple[tuple[str, Any], ...] = ()
    repeated: tuple[tuple[str, str], ...] = ()
    full: Variant | None = None
    near: Variant | None = None
    kv_shared: str | None = None
    gate: Flag = 0
    blocks: str | None = None
    parallel: Parallel | None = None
    multi_query: tuple[str, str] | None = None
    embedding_norm: int = 0
    inner: int | None = None
    longest: int | None = None
    spellings: tuple[tuple[str, str], ...] = ()
    harmless: tuple[str, ...] = ()

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
        flags = (self.qkv_bias, self.output_bias, self.mlp_bias, self.qk_norm, self.gate)
        named = [flag for flag in flags if isinstance(flag, str)]
        switches = ("tie_word_embeddings", "sliding_window", "use_sliding_window", "layer_types")
        routed = () if self.routed is None else self.routed.keys()
        windows = _WINDOW_KEYS.get(self.windows, ())
        latent = () if self.latent is None else self.latent.keys()
        sparse = () if self.sparsity is None else _SPARSITY_KEYS[self.sparsity]
        parts = (self.full, self.near, self.parallel)
        kinds = [key for part in parts if part is not None for key in part.keys()]
        single = (
            self.kv_shared,
            self.blocks,
            self.streams,
            self.residual_blocks,
            self.expert_dtype,
        )
        more = (*(self.multi_query or ()), *(key for key in single if key is not None))
        if self.pattern is not None:
            more = (*more, self.pattern, *_PATTERN_KEYS)
        return (
            self.kv_heads, "head_dim", *named, *switches, *windows, *latent, *sparse, *routed,
            *kinds, *more,
        )  # fmt: skip

    def reads(self) -> frozenset[str]:
        """Returns all keys that count."""
        more = (key for key, _ in (*self.fixed, *self.repeated))
        return frozenset((*self.required(), *self.optional(), *more, *self.harmless))


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
# Gated attention in every fourth layer, gated delta nets in the others.
_QWEN3_NEXT = dataclasses.replace(
    _QWEN3,
    classes=("Qwen3NextForCausalLM",),
    head_dim=None,
    windows="none",
    typed=False,
    sparsity="delta",
    routed=Routed(
        "num_experts",
        sparse="steps",
        shared=1,
        shared_width="shared_expert_intermediate_size",
        shared_gate=1,
    ),
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

# Values are keys where all keys are seen; beside its experts a mixture has a dense layer, and norms
# before the router and the experts and after both branches.
_GEMMA4 = Architecture(
    ("Gemma4ForCausalLM",),
    activation="hidden_activation",
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    qk_norm=1,
    norms=2,
    tied=True,
    kv_default=False,
    head_dim=256,
    windows="pattern",
    typed=True,
    window_default=512,
    full=Variant(
        kv_heads="num_global_key_value_heads",
        head_dim="global_head_dim",
        key_values="attention_k_eq_v",
    ),
    kv_shared="num_kv_shared_layers",
    # The router scales each expert.
    routed=Routed(
        "num_experts",
        top_k="top_k_experts",
        router_bias=1,
        shared=1,
        shared_width="intermediate_size",
        enabled="enable_moe_block",
        norms=4,
    ),
    fixed=(("use_double_wide_mlp", False),),
    # The size of tables that `hidden_size_per_layer_input` 0 leaves out.
    harmless=("vocab_size_per_layer_input",),
)
_STEP = Architecture(
    ("Step3p5ForCausalLM",),
    qk_norm=1,
    gate="use_head_wise_attn_gate",
    windows="alternate",
    typed=True,
    near=Variant(
        heads="num_attention_heads",
        kv_heads="num_attention_groups",
        head_dim="head_dim",
        inside="attention_other_setting",
    ),
    routed=Routed(
        "num_experts",
        sparse="named",
        router_bias="use_moe_router_bias",
        shared=1,
        shared_width="share_expert_dim",
    ),
    fixed=(("n_shared_experts", 1), ("use_moe", True), ("moe_every_n_layer", 1)),
    spellings=(
        ("num_key_value_heads", "num_attention_groups"),
        ("num_experts", "moe_num_experts"),
        ("num_experts_per_tok", "moe_top_k"),
    ),
    harmless=("moe_router_scaling_factor", "moe_router_activation", "norm_expert_weight"),
    # Dense, by what its checkpoint can hold; their sizes are not told.
    drafts=False,
)

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
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5": dataclasses.replace(
        _QWEN3_NEXT,
        classes=("Qwen3_5ForConditionalGeneration",),
        nested="text_config",
        routed=None,
        fixed=(("attn_output_gate", True),),
    ),
    "qwen3_5_moe": dataclasses.replace(
        _QWEN3_NEXT,
        classes=("Qwen3_5MoeForConditionalGeneration",),
        nested="text_config",
        intermediate="moe_intermediate_size",
        fixed=(("attn_output_gate", True),),
    ),
    "nemotron_h": Architecture(
        ("NemotronHForCausalLM",),
        activation="mlp_hidden_act",
        gates=1,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
        pattern="hybrid_override_pattern",
        routed=Routed(
            "n_routed_experts",
            router_bias=1,
            shared="n_shared_experts",
            shared_width="moe_shared_expert_intermediate_size",
            latent="moe_latent_size",
        ),
        fixed=(("sliding_window", None), ("mamba_hidden_act", "silu")),
        spellings=(("head_dim", "attention_head_dim"),),
        harmless=(
            "expand",
            "mamba_hidden_act",
            "use_mamba_kernels",
            "mtp_hybrid_override_pattern",
            "mtp_layers_block_type",
            "moe_shared_expert_overlap",
        ),
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
    "kimi_k3": dataclasses.replace(
        _DEEPSEEK,
        classes=("KimiK3ForConditionalGeneration",),
        nested="text_config",
        decoder="kimi_linear",
        sparsity="kimi",
        residual_blocks="attn_res_block_size",
        routed=Routed(
            "num_experts",
            top_k="num_experts_per_token",
            sparse="after",
            router_bias=1,
            shared="num_shared_experts",
            latent="routed_expert_hidden_size",
            latent_norm="latent_moe_use_norm",
        ),
        fixed=(("moe_layer_freq", 1), ("topk_method", "noaux_tc"), ("mla_use_nope", True)),
        harmless=(
            "moe_renormalize",
            "moe_router_activation_func",
            "num_expert_group",
            "activation_situ_beta",
            "activation_situ_linear_beta",
        ),
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
        inner=4,
        positions=0,
    ),
    # Positions are linear biases of the scores; embeddings are normalised.
    "bloom": dataclasses.replace(
        _BIASED,
        classes=("BloomForCausalLM",),
        layers="n_layer",
        heads="n_head",
        intermediate="n_inner",
        context="seq_length",
        tied=True,
        embedding_norm=1,
        inner=4,
        longest=2048,
        spellings=(
            ("hidden_size", "n_embed"),
            ("n_layer", "num_hidden_layers"),
            ("n_head", "num_attention_heads"),
        ),
        fixed=(("apply_residual_connection_post_layernorm", False),),
        harmless=("offset_alibi",),
    ),
    "falcon": dataclasses.replace(
        _BIASED,
        classes=("FalconForCausalLM",),
        kv_heads="num_kv_heads",
        intermediate="ffn_hidden_size",
        activation="activation",
        qkv_bias="bias",
        output_bias="bias",
        mlp_bias="bias",
        on=("parallel_attn", "multi_query"),
        tied=True,
        multi_query=("multi_query", "new_decoder_architecture"),
        parallel=Parallel("parallel_attn", ("num_ln_in_parallel_attn", "new_decoder_architecture")),
        inner=4,
        longest=2048,
        spellings=(
            ("num_hidden_layers", "n_layer"),
            ("num_attention_heads", "n_head"),
            ("num_kv_heads", "n_head_kv"),
        ),
        harmless=("alibi",),
    ),
    # As in its paper: no biases anywhere.
    "palm": Architecture(
        ("PaLMForCausalLM",),
        on=("parallel_attn",),
        tied=True,
        parallel=Parallel("parallel_attn"),
        longest=2048,
    ),
    "gemma4": dataclasses.replace(
        _GEMMA4, classes=("Gemma4ForConditionalGeneration",), nested="text_config"
    ),
    "gemma4_text": _GEMMA4,
    # The router has a correction per expert.
    "mimo_v2_flash": Architecture(
        ("MiMoV2FlashForCausalLM",),
        qkv_bias="attention_bias",
        kv_default=False,
        windows="flagged",
        full=Variant(v_width="v_head_dim", sinks="add_full_attention_sink_bias"),
        near=Variant(
            heads="swa_num_attention_heads",
            kv_heads="swa_num_key_value_heads",
            head_dim="swa_head_dim",
            v_width="swa_v_head_dim",
            sinks="add_swa_attention_sink_bias",
        ),
        routed=Routed(
            "n_routed_experts", sparse="listed", router_bias=1, shared="n_shared_experts"
        ),
        fixed=(("topk_method", "noaux_tc"),),
        repeated=(("sliding_window_size", "sliding_window"),),
        # Values are scaled by a number; its own code reads no chunks.
        harmless=("swa_rope_theta", "attention_chunk_size", "attention_value_scale"),
    ),
    "step3p5": _STEP,
    "step3p7": dataclasses.replace(
        _STEP,
        classes=("Step3p7ForConditionalGeneration", "Step3p7FlashForCausalLM"),
        nested="text_config",
        decoder="step3p5",
        flat=True,
    ),
    # Llama layers that a search has pruned one by one.
    "nemotron-nas": Architecture(
        ("DeciLMForCausalLM",),
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
        blocks="block_configs",
    ),
}
