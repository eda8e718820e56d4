"""How well each kind of operator runs, relative to the model: a knob to ask "what if" with.

An efficiency e divides the time of every operator of a kind, parts and all, and leaves its energy
as it is. 1 is the model as fitted. Without any (the default everywhere) nothing is multiplied.
"""

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from perfmodel.operators import KERNELS, Attention, Collective, Matmul, Operator, Scan, Vector
from perfmodel.relax import as_real


def _real() -> Array:
    return eqx.field(converter=as_real, default=1.0)


def _kinds() -> Array:
    return eqx.field(converter=as_real, default_factory=lambda: jnp.ones(len(KERNELS), dtype=float))


class Efficiencies(eqx.Module):
    """Relative speed by kind of operator; all neutral at 1.

    Fields: `matmul` by kind of kernel, shape [len(KERNELS)], and products of `experts` likewise;
    attention of `decode` and of `context` (prompts); `scan`, recurrences; `vector`,
    element-wise kernels; `collective`, all collectives.
    """

    matmul: Array = _kinds()
    experts: Array = _kinds()
    decode: Array = _real()
    context: Array = _real()
    scan: Array = _real()
    vector: Array = _real()
    collective: Array = _real()

    def of(self, op: Operator) -> Array:
        """Returns the efficiency of an operator's kind."""
        match op:
            case Matmul():
                return jnp.sum((self.experts if op.experts else self.matmul) * op.kernel)
            case Attention():
                return self.decode if op.phase == "decode" else self.context
            case Scan():
                return self.scan
            case Vector():
                return self.vector
            case Collective():
                return self.collective
