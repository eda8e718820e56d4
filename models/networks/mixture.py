"""Mixtures of experts, as `MixtureOfExperts` sizes them: every token to its experts, none dropped.

Rows are sorted by expert and multiplied by `jax.lax.ragged_dot`, whose work is tokens × top-k rows
however they fall.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float, Int

from perfmodel.errors import InputError
from perfmodel.models.mlp import MixtureOfExperts
from perfmodel.models.networks.mlp import FeedForward, activate, gates_of
from perfmodel.models.networks.norms import rms_norm
from perfmodel.models.networks.weights import Weights, sum_ranks, whole


class Mixture(nnx.Module):
    """A router, experts side by side, and a layer that every token takes.

    The router is whole on every rank; ranks share out the inner width of each expert. Experts of a
    width of their own take what a product makes of the hidden state, and another turns their sum
    back; both are whole on every rank.
    """

    def __init__(self, body: MixtureOfExperts, hidden: int, weights: Weights) -> None:
        experts, inner = whole(body.experts, "experts"), whole(body.intermediate, "intermediate")
        gates = gates_of(body.gates)
        self.top_k = whole(body.top_k, "top_k")
        if self.top_k > experts:
            raise InputError(f"network: top_k {self.top_k} exceeds experts {experts}")
        self.router = weights.matrix(hidden, experts, inner=hidden)
        self.router_bias = weights.vector(experts) if body.router_bias else None
        width = hidden if body.latent is None else whole(body.latent, "latent")
        if body.latent is not None and body.bias:
            raise InputError(
                "network: biases of experts of a width of their own have none yet (nearest: none)"
            )
        latent = body.latent is not None
        self.into = weights.matrix(hidden, width, inner=hidden) if latent else None
        self.out = weights.matrix(width, hidden, inner=width) if latent else None
        self.norm = weights.scales(width) if latent and body.latent_norm else None
        self.up = weights.matrix(experts, width, gates, inner, inner=width, split=3)
        self.down = weights.matrix(experts, inner, width, inner=inner, split=1)
        self.up_bias = weights.vector(experts, gates, inner, split=2) if body.bias else None
        self.down_bias = weights.vector(experts, hidden) if body.bias else None
        self.shared = None if body.shared is None else FeedForward(body.shared, hidden, weights)
        self.shared_gate = weights.matrix(hidden, 1, inner=hidden) if body.shared_gate else None

    def route(
        self, x: Float[Array, "tokens hidden"]
    ) -> tuple[Float[Array, "tokens top_k"], Int[Array, "tokens top_k"]]:
        """Returns the weights of each token's experts, which sum to 1, and the experts."""
        logits = jnp.einsum("tm,me->te", x, self.router[...], preferred_element_type=jnp.float32)
        if self.router_bias is not None:
            logits = logits + self.router_bias[...]
        highest, chosen = lax.top_k(logits, self.top_k)
        return jax.nn.softmax(highest, -1).astype(x.dtype), chosen

    def __call__(
        self, x: Float[Array, "... hidden"], axis: str | None = None
    ) -> Float[Array, "... hidden"]:
        shape, hidden = x.shape, x.shape[-1]
        x = x.reshape(-1, hidden)
        shares, chosen = self.route(x)
        taken = x if self.into is None else x @ self.into[...]
        y = self.experts(taken, shares, chosen)
        gate = jnp.ones((), x.dtype)
        beside = None
        if self.shared is not None:
            if self.shared_gate is not None:
                gate = jax.nn.sigmoid(x @ self.shared_gate[...])
            beside = gate * self.shared.partial(x)
        y = self._summed(y, beside, axis)
        if self.down_bias is not None:
            y = y + jnp.sum(shares[..., None] * self.down_bias[...][chosen], 1)
        if self.shared is not None and self.shared.down_bias is not None:
            y = y + gate * self.shared.down_bias[...]
        return y.reshape(shape)

    def _summed(
        self, y: Float[Array, "tokens width"], beside: Array | None, axis: str | None
    ) -> Float[Array, "tokens hidden"]:
        """Returns the sum of the experts' results and the shared layer's, of all ranks."""
        if self.norm is not None and self.out is not None:
            # Ranks must sum what is normed before: in one message with the shared result.
            both = sum_ranks(y if beside is None else jnp.concatenate([y, beside], -1), axis)
            width = y.shape[-1]
            turned = rms_norm(both[:, :width], self.norm[...], (-1,), None) @ self.out[...]
            return turned if beside is None else turned + both[:, width:]
        y = y if self.out is None else y @ self.out[...]
        return sum_ranks(y if beside is None else y + beside, axis)

    def experts(self, x: Array, shares: Array, chosen: Array) -> Float[Array, "tokens width"]:
        """Returns the sum over each token's experts of what this rank's part of them adds."""
        experts, hidden, gates, inner = self.up.shape
        flat = chosen.reshape(-1)
        order = jnp.argsort(flat)
        rows = jnp.bincount(flat, length=experts)
        up = lax.ragged_dot(
            x[order // self.top_k], self.up[...].reshape(experts, hidden, gates * inner), rows
        ).reshape(-1, gates, inner)
        if self.up_bias is not None:
            up = up + self.up_bias[...][flat[order]]
        sorted_rows = lax.ragged_dot(activate(up), self.down[...], rows)
        back = jnp.zeros_like(sorted_rows).at[order].set(sorted_rows)
        return jnp.sum(back.reshape(-1, self.top_k, hidden) * shares[..., None], 1)
