"""The number formats that a config.json asks for.

Published quantised checkpoints say in `quantization_config` how their weights, activations and
cache are stored. One format for all layers is understood, with embeddings, output head, routers,
norms and biases in 16 bits; so is one for routed experts alone, with all the rest in 16 bits. Any
other mixture is refused, never averaged.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from perfmodel.errors import InputError, nearest
from perfmodel.formats import PrecisionName, precision_name
from perfmodel.models._values import is_off, show
from perfmodel.models.mlp import MixtureOfExperts
from perfmodel.models.transformer import Model

_EXCLUDED = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
# Modules that stay in 16 bits here too, or that no network here has.
_KEPT = re.compile(
    r"(^|\.)(lm_head|embed_tokens|wte|wpe|\w*norm\w*|gate|router|e_score_correction_bias)$"
    r"|(^|\.)(vision_\w+|visual|embed_vision|multi_modal_projector|mm_projector)(\.|$)"
)
# Modules of which all together may stay in 16 bits beside quantised experts.
_APART = re.compile(
    r"(?:^|\.)(?:layers\.(?P<layer>\d+|\*)\.)?"
    r"(?:(?P<attention>self_attn)|(?:mlp\.|feed_forward\.)?(?P<shared>shared_experts?)"
    r"|(?P<dense>mlp|feed_forward)(?=\.(?:gate_proj|up_proj|down_proj|gate_up_proj)$))"
    r"(?:\.(?P<product>q_proj|k_proj|v_proj|qkv_proj|o_proj|gate_proj|up_proj|down_proj"
    r"|gate_up_proj))?$"
)
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_PRODUCTS = {
    "attention": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "shared": {"gate_proj", "up_proj", "down_proj"},
    "dense": {"gate_proj", "up_proj", "down_proj"},
}
_CHOICE = re.compile(r"([^()|]*)\(([\w|]+)\)([^()|]*)")
# How copies of long lists say that they were cut.
_CUT = re.compile(r"\.\.\. ?truncated")
_SIMPLE_METHODS = {"fp8": "fp8", "mxfp4": "mxfp4"}
# Engines serve 32-bit checkpoints in 16 bits, too.
_DTYPES = ("bfloat16", "float16", "float32", "auto")
_METHODS = ("fp8", "mxfp4", "awq", "gptq", "modelopt", "compressed-tensors")
_ALGORITHMS = {"FP8": "fp8", "NVFP4": "nvfp4"}
# (bits, type, group) of compressed-tensors; a group of None is any.
_SCHEMES = {
    (8, "float", None): "fp8",
    (8, "int", None): "int8",
    (4, "int", 128): "int4",
    (4, "int", 32): "int4g32",
    (4, "float", 16): "nvfp4",
    (4, "float", 32): "mxfp4",
}


def suggested_precision(
    config: Mapping[str, Any], where: str = "config.json", model: Model | None = None
) -> PrecisionName:
    """Returns the number formats that a config.json asks for; bf16 where it asks for none.

    `quantization_config` must treat all layers alike, or quantise routed experts alone in a network
    (`model`) with mixtures, feed-forward layers alone in one without; embeddings, head, routers and
    norms stay in 16 bits.

    >>> str(suggested_precision({"quantization_config": {"quant_method": "fp8"}}))
    'fp8'
    """
    _check_dtype(config, where)
    quantization = config.get("quantization_config")
    nested = config.get("text_config")
    if quantization is None and isinstance(nested, Mapping):
        # Beside vision layers, a decoder may say so for itself.
        quantization, where = nested.get("quantization_config"), f"{where}: text_config"
    if quantization is None:
        return precision_name()
    place = f"{where}: quantization_config"
    if not isinstance(quantization, Mapping):
        raise InputError(f"{place} must be an object, not {show(quantization)}")
    method = quantization.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        hint = nearest(method, _METHODS) if isinstance(method, str) else _one_of(_METHODS)
        raise InputError(f"{place}: quant_method {show(method)} is not understood{hint}")
    own = _expert_format(config, where)
    experts_alone = own is None and _experts_alone(quantization, model, place)
    weights, activations = _formats(quantization, method, place)
    cache = _cache_format(quantization, place)
    if own is not None:
        return precision_name(weights, activations, cache, own, "fp8")
    if experts_alone:
        return precision_name(kv=cache, experts=weights, expert_activations=activations)
    return precision_name(weights, activations, cache)


def _expert_format(config: Mapping[str, Any], where: str) -> str | None:
    """Returns the weights' format of routed experts by `expert_dtype`, None where as the rest.

    DeepSeek-V4's fp4 has a scale for 32 elements, a power of two: MXFP4 (arXiv 2606.19348), which
    its kernels multiply by activations of 8 bits.
    """
    name = config.get("expert_dtype")
    if name is None or name == "fp8":
        return None
    if name != "fp4":
        raise InputError(f"{where}: expert_dtype {show(name)} is not understood (known: fp4, fp8)")
    return "mxfp4"


def _check_dtype(config: Mapping[str, Any], where: str) -> None:
    """Refuses a type of the checkpoint that is not served in 16 bits."""
    for key in ("torch_dtype", "dtype"):
        dtype = config.get(key)
        if dtype is not None and (not isinstance(dtype, str) or dtype not in _DTYPES):
            hint = nearest(dtype, _DTYPES) if isinstance(dtype, str) else _one_of(_DTYPES)
            raise InputError(f"{where}: {key} {show(dtype)} is not understood{hint}")


def _one_of(names: Iterable[Any]) -> str:
    return f" (known: {', '.join(map(str, names))})"


def _left_out(quantization: Mapping[str, Any], place: str) -> Iterator[tuple[str, str]]:
    """Yields (as written, plain) names of modules that are left out of the quantisation."""
    for key in _EXCLUDED:
        entries = quantization.get(key)
        if entries is None:
            continue
        if not isinstance(entries, list | tuple):
            raise InputError(f"{place}: {key} must be a list, not {show(entries)}")
        for entry in entries:
            if not isinstance(entry, str):
                raise InputError(f"{place}: {key} must list names, not {show(entry)}")
            # Globs, and regular expressions after "re:", with at most one choice of words.
            plain = entry.removeprefix("re:").replace("\\.", ".").replace(".*", "*")
            choice = _CHOICE.fullmatch(plain) if entry.startswith("re:") else None
            names = [plain]
            if choice is not None:
                before, words, after = choice.groups()
                names = [f"{before}{word}{after}" for word in words.split("|")]
            for name in names:
                yield entry, name.strip("^$*.").replace("layers*", "layers.*.")


def is_cut(config: Mapping[str, Any]) -> bool:
    """Returns whether a file's list of modules that are not quantised was cut short."""
    quantization = config.get("quantization_config")
    listed = quantization if isinstance(quantization, Mapping) else {}
    return any(
        isinstance(entry, str) and _CUT.fullmatch(entry)
        for key in _EXCLUDED
        for entry in listed.get(key) or ()
    )


def _experts_alone(quantization: Mapping[str, Any], model: Model | None, place: str) -> bool:
    """Returns whether routed experts alone are quantised; raises for any other mixture."""
    if not is_off(quantization.get("sparsity_config")):
        raise InputError(f"{place}: sparsity_config is not understood")
    mixture = model is not None and model.is_mixture
    alone = "routed experts" if mixture else "feed-forward layers"
    apart: dict[str, dict[str, set[str]]] = {}
    cut, named = False, ""
    for entry, plain in _left_out(quantization, place):
        if _CUT.fullmatch(entry):
            cut = True
        elif not _KEPT.search(plain):
            match = _APART.search(plain.removesuffix("*"))
            if match is None or (not mixture and not match["attention"]):
                raise InputError(
                    f"{place}: {show(entry)} is left out; only one format for all layers, or for "
                    f"{alone} alone, is understood"
                )
            named = named or entry
            kind = next(kind for kind in _PRODUCTS if match[kind])
            product = match["product"]
            products = {*_FUSED.get(product, (product,))} if product else _PRODUCTS[kind]
            layer = match["layer"] or "*"
            apart.setdefault(kind, {}).setdefault(layer, set()).update(products)
    if not apart:
        # What a cut list still shows is kept in 16 bits here too: the rest is taken to be alike.
        return False
    assert model is not None
    for kind, layers in _kinds(model).items():
        if not mixture and kind != "attention":
            continue
        found = apart.get(kind, {})
        whole = [layer for layer, products in found.items() if products >= _PRODUCTS[kind]]
        if "*" in whole or len(whole) == layers or (cut and _unbroken(whole, layers)):
            continue
        why = "the list is cut" if cut else f"{len(whole)} of {layers} {kind} layers are whole"
        raise InputError(
            f"{place}: {show(named)} is left out, but not all beside the {alone} ({why}); "
            f"only one format for all layers, or for {alone} alone, is understood"
        )
    return True


def _unbroken(whole: list[str], layers: int) -> bool:
    """Returns whether a list in the order of names shows layers without a gap, and not the first
    alone: what was cut from its end is taken to go on so."""
    return len(whole) > 1 and whole == sorted(map(str, range(layers)))[: len(whole)]


def _kinds(model: Model) -> dict[str, int]:
    """Returns how many layers of each kind a network has beside its routed experts."""
    mixtures = [block for block in model.blocks if isinstance(block.body, MixtureOfExperts)]
    counts = {
        "attention": sum(block.count for block in model.attention),
        "shared": sum(b.count for b in mixtures if b.body.shared is not None),  # pyright: ignore
        "dense": sum(block.count for block in model.feed_forward if block not in mixtures),
    }
    return {kind: count for kind, count in counts.items() if count}


def _formats(quantization: Mapping[str, Any], method: str, place: str) -> tuple[str, str | None]:
    if method in _SIMPLE_METHODS:
        return _SIMPLE_METHODS[method], None
    if method in ("awq", "gptq"):
        for key, value in (("bits", 4), ("group_size", 128)):
            if quantization.get(key) != value:
                given = show(quantization.get(key))
                raise InputError(f"{place}: {key} {given} is not understood (nearest: {value})")
        return "int4", "bf16"
    if method == "modelopt":
        algorithm = quantization.get("quant_algo")
        if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
            raise InputError(
                f"{place}: quant_algo {show(algorithm)} is not understood{_one_of(_ALGORITHMS)}"
            )
        return _ALGORITHMS[algorithm], None
    groups = quantization.get("config_groups")
    found = list(groups.values()) if isinstance(groups, Mapping) else []
    group = found[0] if len(found) == 1 else None
    if not isinstance(group, Mapping) or group.get("targets") != ["Linear"]:
        raise InputError(f"{place}: config_groups must have one group with targets ['Linear']")
    weights = _scheme(group.get("weights"), f"{place}: weights")
    inputs = group.get("input_activations")
    if inputs is None:
        return weights, "bf16"
    return weights, _scheme(inputs, f"{place}: input_activations")


def _scheme(scheme: Any, place: str) -> str:
    if not isinstance(scheme, Mapping):
        raise InputError(f"{place} must be an object, not {show(scheme)}")
    bits, sort, group = (scheme.get(key) for key in ("num_bits", "type", "group_size"))
    for (known_bits, known_sort, known_group), name in _SCHEMES.items():
        if (bits, sort) == (known_bits, known_sort) and known_group in (None, group):
            return name
    known = (f"{b} {t}" + (f" in groups of {g}" if g else "") for b, t, g in _SCHEMES)
    raise InputError(
        f"{place}: num_bits {show(bits)}, type {show(sort)}, group_size {show(group)} is not "
        f"understood{_one_of(known)}"
    )


def _cache_format(quantization: Mapping[str, Any], place: str) -> str | None:
    algorithm = quantization.get("kv_cache_quant_algo")
    if algorithm is not None:
        if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
            raise InputError(
                f"{place}: kv_cache_quant_algo {show(algorithm)} is not understood"
                f"{_one_of(_ALGORITHMS)}"
            )
        return _ALGORITHMS[algorithm]
    scheme = quantization.get("kv_cache_scheme")
    return None if scheme is None else _scheme(scheme, f"{place}: kv_cache_scheme")
