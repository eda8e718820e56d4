"""Names that operators, formats and chips share, in a module that loads without JAX."""

KERNELS = ("bf16", "fp8", "int8", "fp4", "w8a16", "w4a16")
"""Matrix-product kernel kinds: arithmetic in 16, 8 or 4 bits, or 16-bit arithmetic on weights
that are expanded from 8 or 4 bits on the way in (weight-only quantisation)."""
