"""Sublayers that do not simply follow each other: side by side, or with norms between branches."""

from flax import nnx
from jax import Array
from jaxtyping import Float

from perfmodel.errors import InputError
from perfmodel.models.networks.attention import SelfAttention
from perfmodel.models.networks.cache import LayerCache
from perfmodel.models.networks.mixture import Mixture
from perfmodel.models.networks.mlp import FeedForward
from perfmodel.models.networks.norms import Norm
from perfmodel.models.networks.weights import Weights, sum_ranks, whole
from perfmodel.models.transformer import Model


def norm_of(model: Model, weights: Weights) -> Norm:
    """Returns a norm of the hidden width."""
    vectors = whole(model.norm_vectors, "norm_vectors", 0)
    return Norm(whole(model.hidden, "hidden"), vectors, weights)


class SideBySide(nnx.Module):
    """Attention and a feed-forward layer on the same hidden state: ranks sum both at once.

    As in PaLM (arXiv 2204.02311, section 2) and Falcon (transformers, class FalconDecoderLayer),
    whose larger sizes norm the two inputs apart.
    """

    def __init__(
        self,
        model: Model,
        body: SelfAttention,
        beside: nnx.Module,
        shared: bool,
        weights: Weights,
    ) -> None:
        if not isinstance(beside, FeedForward) or model.norms != 1:
            raise InputError(
                "network: blocks side by side with mixtures, or with norms after them, have none "
                "yet (nearest: a dense layer and norms 1)"
            )
        self.before = norm_of(model, weights)
        self.beside_norm = None if shared else norm_of(model, weights)
        self.body = body
        self.beside = beside

    def result(
        self, x: Array, start: Array, cache: LayerCache | None, axis: str | None
    ) -> tuple[Float[Array, "batch tokens hidden"], LayerCache]:
        """Returns what both layers add to the residual, and the cache."""
        normed = self.before(x)
        attended, cache = self.body.partial(normed, start, cache, axis)
        other = normed if self.beside_norm is None else self.beside_norm(x)
        y = sum_ranks(attended + self.beside.partial(other), axis)
        for bias in (self.body.output_bias, self.beside.down_bias):
            y = y if bias is None else y + bias[...]
        return y, cache


class NormedBranches(nnx.Module):
    """A mixture whose router, experts and shared layer have norms of their own (Gemma 4).

    The router and the experts each norm the residual, the results of the experts and of the shared
    layer are normed before they are added, so that ranks sum each of them first (transformers,
    class Gemma4TextDecoderLayer; vLLM's class sums twice too).
    """

    def __init__(self, model: Model, mixture: Mixture, weights: Weights) -> None:
        parts = (mixture.shared_gate, mixture.down_bias, mixture.into)
        if mixture.shared is None or any(part is not None for part in parts):
            raise InputError(
                "network: norms between branches without a shared layer, or with a gate, biases or "
                "experts of a width of their own have none yet (nearest: a shared layer)"
            )
        self.mixture = mixture
        self.router_norm = norm_of(model, weights)
        self.experts_norm = norm_of(model, weights)
        self.experts_after = norm_of(model, weights)
        self.shared_after = norm_of(model, weights)

    def __call__(
        self, x: Float[Array, "batch tokens hidden"], normed: Array, axis: str | None
    ) -> Float[Array, "batch tokens hidden"]:
        """Returns the sum of the branches, of the residual x and of x as the sublayer norms it."""
        shared = self.mixture.shared
        assert shared is not None
        rows = x.reshape(-1, x.shape[-1])
        shares, chosen = self.mixture.route(self.router_norm(rows))
        routed = self.mixture.experts(self.experts_norm(rows), shares, chosen)
        routed = self.experts_after(sum_ranks(routed, axis)).reshape(x.shape)
        return self.shared_after(shared(normed, axis)) + routed
