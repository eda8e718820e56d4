"""Number formats: how many bytes an element takes, scales included, and which kernel multiplies it.

Weights, activations and the KV cache are chosen apart. Formats become numbers (bytes and a
one-hot kernel kind), so designs of different precision share one compiled program.
"""

import dataclasses
from collections.abc import Mapping

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from perfmodel.errors import InputError, nearest, shorten
from perfmodel.operators import KERNELS
from perfmodel.relax import Real


@dataclasses.dataclass(frozen=True)
class Format:
    """Storage of one element: `bits`, plus `scale_bits` shared by every `block` elements, plus
    `column_bits` once per output column of a weight matrix."""

    bits: int
    scale_bits: int = 0
    block: int = 1
    column_bits: int = 0
    source: str = ""

    @property
    def element_bytes(self) -> float:
        """Bytes per element with block scales [B]."""
        bits = self.bits + self.scale_bits / self.block
        return bits / 8 if bits % 8 else int(bits // 8)

    @property
    def column_bytes(self) -> float:
        """Bytes of scales per output column [B]."""
        return self.column_bits / 8 if self.column_bits % 8 else self.column_bits // 8


FORMATS: Mapping[str, Format] = {
    "bf16": Format(16, source="IEEE 754-like bfloat16; fp16 takes the same bytes and rate"),
    "fp8": Format(8, source="OCP OFP8 1.0; one scale per tensor, a few bytes in all"),
    "int8": Format(8, column_bits=32, source="one fp32 scale per output channel, as W8A8 kernels"),
    "int4": Format(4, 16, 128, source="GPTQ/AWQ, fp16 scale per group of 128, symmetric"),
    "int4g32": Format(
        4, 16, 32, source="compressed-tensors, bf16 scale per group of 32, symmetric"
    ),
    "mxfp4": Format(4, 8, 32, source="OCP Microscaling Formats 1.0: E8M0 scale per 32"),
    "nvfp4": Format(4, 8, 16, source="NVIDIA NVFP4: E4M3 scale per 16 (and one fp32 per tensor)"),
}

ALIASES = {
    "bfloat16": "bf16", "fp16": "bf16", "float16": "bf16", "half": "bf16",
    "e4m3": "fp8", "float8": "fp8", "fp8_e4m3": "fp8", "fp4": "nvfp4",
    "awq": "int4", "gptq": "int4",
}  # fmt: skip

# Which kernel multiplies (weights, activations). A pair that is absent has no kernel.
_KERNEL_OF = {
    ("bf16", "bf16"): "bf16",
    ("fp8", "fp8"): "fp8",
    ("int8", "int8"): "int8",
    ("nvfp4", "nvfp4"): "fp4",
    ("mxfp4", "mxfp4"): "fp4",
    # Narrow weights expanded to 16 bits on the way in.
    ("fp8", "bf16"): "w8a16",
    ("int8", "bf16"): "w8a16",
    ("int4", "bf16"): "w4a16",
    ("int4g32", "bf16"): "w4a16",
    ("mxfp4", "bf16"): "w4a16",
    ("nvfp4", "bf16"): "w4a16",
    # Narrow weights expanded to 8 bits.
    ("int4", "fp8"): "fp8",
    ("int4g32", "fp8"): "fp8",
    ("mxfp4", "fp8"): "fp8",
    ("nvfp4", "fp8"): "fp8",
    ("int4", "int8"): "int8",
}


class Precision(eqx.Module):
    """The number formats of a deployment, as numbers; see `precision`.

    Fields: bytes per element of weights, activations, KV cache and of the embedding and output
    head; bytes per output column of weight scales; one-hot kernel kinds of layers and head, shape
    [len(KERNELS)]; `narrow_attention` is 1 where attention multiplies in 8 bits. `expert_…` are
    those of routed experts, which checkpoints often store in fewer bits than the rest.
    """

    weight_bytes: Real
    column_bytes: Real
    activation_bytes: Real
    kv_bytes: Real
    head_bytes: Real
    narrow_attention: Real
    kernel: Array
    head_kernel: Array
    expert_weight_bytes: Real
    expert_column_bytes: Real
    expert_activation_bytes: Real
    expert_kernel: Array


def format_name(name: str) -> str:
    """Returns the canonical name of a number format, or fails naming the nearest."""
    key = ALIASES.get(name.strip().lower(), name.strip().lower())
    if key not in FORMATS:
        raise InputError(f"unknown number format {shorten(name)!r}{nearest(key, FORMATS)}")
    return key


def _one_hot(kind: str) -> Array:
    return jnp.asarray([1.0 if k == kind else 0.0 for k in KERNELS], dtype=float)


@dataclasses.dataclass(frozen=True)
class PrecisionName:
    """Names of the formats of weights, activations and KV cache, and the kernel they use.

    `experts` are weights, activations and kernel of routed experts, None where as the rest.
    """

    weights: str
    activations: str
    kv: str
    kernel: str
    experts: tuple[str, str, str] | None = None

    def __str__(self) -> str:
        names = (self.weights, self.activations, self.kv)
        shown = self.weights if len(set(names)) == 1 else "/".join(names)
        if self.experts is None:
            return shown
        weights, activations, _ = self.experts
        return f"{shown}+{weights if weights == activations else f'{weights}/{activations}'}"

    @property
    def kernels(self) -> tuple[str, ...]:
        """Kernel kinds that a chip must have."""
        return (self.kernel,) if self.experts is None else (self.kernel, self.experts[2])


def _pair(weights: str, activations: str | None) -> tuple[str, str, str]:
    """Returns the formats of weights and activations, and the kernel that multiplies them."""
    w = format_name(weights)
    default_activations = "bf16" if w in ("int4", "int4g32", "mxfp4") else w
    a = default_activations if activations is None else format_name(activations)
    if (w, a) not in _KERNEL_OF:
        valid = ", ".join(y for x, y in _KERNEL_OF if x == w)
        raise InputError(f"no kernel multiplies {w} weights by {a} activations (valid: {valid})")
    return w, a, _KERNEL_OF[w, a]


def precision_name(
    weights: str = "bf16",
    activations: str | None = None,
    kv: str | None = None,
    experts: str | None = None,
    expert_activations: str | None = None,
) -> PrecisionName:
    """Returns the checked names of a precision, with what was left out filled in.

    Activations default to the weights' own arithmetic (16 bits for int4 and mxfp4, whose usual
    kernels are weight-only); the KV cache to bf16 beside 16-bit arithmetic, else fp8: an assumption
    (checkpoints with quantised activations are served both ways). Routed experts are as the rest
    unless named.

    >>> str(precision_name("nvfp4")), precision_name("int4").kernel
    ('nvfp4/nvfp4/fp8', 'w4a16')
    >>> str(precision_name("bf16", experts="mxfp4"))
    'bf16+mxfp4/bf16'
    """
    w, a, kernel = _pair(weights, activations)
    cache = ("bf16" if a == "bf16" else "fp8") if kv is None else format_name(kv)
    own = None if experts is None else _pair(experts, expert_activations)
    return PrecisionName(w, a, cache, kernel, None if own == (w, a, kernel) else own)


def precision(
    weights: str = "bf16",
    activations: str | None = None,
    kv: str | None = None,
    experts: str | None = None,
    expert_activations: str | None = None,
) -> Precision:
    """Returns the numbers of a precision; embeddings and output head stay in bf16.

    >>> p = precision("mxfp4")
    >>> p.weight_bytes, p.activation_bytes, p.kv_bytes
    (0.53125, 2, 2)
    """
    return precision_numbers(precision_name(weights, activations, kv, experts, expert_activations))


def precision_numbers(names: PrecisionName) -> Precision:
    """Returns the numbers of a named precision."""
    w, a, cache = (FORMATS[n] for n in (names.weights, names.activations, names.kv))
    routed = names.experts or (names.weights, names.activations, names.kernel)
    return Precision(
        weight_bytes=w.element_bytes,
        column_bytes=w.column_bytes,
        activation_bytes=a.element_bytes,
        kv_bytes=cache.element_bytes,
        head_bytes=2,
        # Measured context kernels run at the 8-bit rate whenever the cache is 8-bit.
        narrow_attention=1 if names.kv in ("fp8", "int8") else 0,
        kernel=_one_hot(names.kernel),
        head_kernel=_one_hot("bf16"),
        expert_weight_bytes=FORMATS[routed[0]].element_bytes,
        expert_column_bytes=FORMATS[routed[0]].column_bytes,
        expert_activation_bytes=FORMATS[routed[1]].element_bytes,
        expert_kernel=_one_hot(routed[2]),
    )
