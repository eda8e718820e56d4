"""Feed-forward layers, gated or plain, as `Mlp` sizes them."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from perfmodel.errors import InputError
from perfmodel.models.mlp import Mlp
from perfmodel.models.networks.weights import Weights, sum_ranks, whole


def gates_of(gates: int) -> int:
    """Returns the number of up projections: 2 where one gates the other, else 1."""
    if gates not in (1, 2):
        raise InputError(f"network: gates must be 1 or 2, not {gates}")
    return int(gates)


def activate(up: Float[Array, "... gates inner"]) -> Float[Array, "... inner"]:
    """Returns SiLU of the gate × the projection where there are two, else GELU."""
    if up.shape[-2] == 1:
        return jax.nn.gelu(up[..., 0, :])
    return jax.nn.silu(up[..., 0, :]) * up[..., 1, :]


class FeedForward(nnx.Module):
    """Two products with an activation between; the inner width is what ranks share out."""

    def __init__(self, body: Mlp, hidden: int, weights: Weights) -> None:
        inner, gates = whole(body.intermediate, "intermediate"), gates_of(body.gates)
        self.up = weights.matrix(hidden, gates, inner, inner=hidden, split=2)
        self.down = weights.matrix(inner, hidden, inner=inner, split=0)
        self.up_bias = weights.vector(gates, inner, split=1) if body.bias else None
        self.down_bias = weights.vector(hidden) if body.bias else None

    def partial(self, x: Float[Array, "... hidden"]) -> Float[Array, "... hidden"]:
        """Returns what one rank's part of the inner width adds, without the last bias."""
        up = jnp.einsum("...m,mgf->...gf", x, self.up[...])
        if self.up_bias is not None:
            up = up + self.up_bias[...]
        return jnp.einsum("...f,fm->...m", activate(up), self.down[...])

    def __call__(
        self, x: Float[Array, "... hidden"], axis: str | None = None
    ) -> Float[Array, "... hidden"]:
        y = sum_ranks(self.partial(x), axis)
        return y if self.down_bias is None else y + self.down_bias[...]
