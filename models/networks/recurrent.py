"""Mamba-2, gated delta nets and Kimi delta attention, as `perfmodel.models.recurrent` sizes them.

Products of keys, queries, values and a gate, a short convolution over each channel's last tokens, a
recurrence over tokens, a gated norm, the output product. What a layer keeps is the recurrence's
state and the convolution's last inputs.
"""

import abc
import functools
import operator

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from perfmodel.errors import InputError
from perfmodel.models.delta import GatedDelta, KimiDelta
from perfmodel.models.mamba import Mamba2
from perfmodel.models.networks import scans
from perfmodel.models.networks.cache import StateCache
from perfmodel.models.networks.norms import rms_norm
from perfmodel.models.networks.weights import Weights, sum_ranks, whole
from perfmodel.models.recurrent import Recurrent


class Convolution(nnx.Module):
    """A filter of `kernel` tokens for each channel [heads, width], and SiLU."""

    def __init__(self, kernel: int, heads: int, width: int, biased: bool, weights: Weights) -> None:
        self.filter = weights.matrix(kernel, heads, width, inner=kernel, split=1)
        self.bias = weights.vector(heads, width, split=0) if biased else None

    def kept(self, batch: int) -> Float[Array, "batch kept heads width"]:
        """Returns what is kept of the tokens before the first: zeros."""
        kernel, heads, width = self.filter.shape
        return jnp.zeros((batch, kernel - 1, heads, width), self.filter.dtype)

    def __call__(
        self,
        x: Float[Array, "batch tokens heads width"],
        kept: Float[Array, "batch kept heads width"],
    ) -> tuple[Float[Array, "batch tokens heads width"], Float[Array, "batch kept heads width"]]:
        """Returns x, filtered, in 32 bits, and the last tokens of what the filter has seen."""
        kernel, tokens = self.filter.shape[0], x.shape[1]
        inputs = jnp.concatenate([kept, x], 1)
        # Taps by hand: a product of tracers, and of operators, is one with a matrix.
        taps = [inputs[:, i : i + tokens] * self.filter[...][i] for i in range(kernel)]
        y = functools.reduce(operator.add, taps)
        y = y if self.bias is None else y + self.bias[...]
        return jax.nn.silu(y.astype(jnp.float32)), inputs[:, tokens:]


class RecurrentLayer(nnx.Module):
    """What kinds of recurrent layers share; heads, and the heads of keys, are what ranks share out.

    Kinds say how the input makes decays and rates, and run the recurrence.
    """

    def __init__(self, body: Recurrent, hidden: int, weights: Weights) -> None:
        heads, keys = whole(body.heads, "heads"), whole(body.key_heads, "key_heads")
        state, width = whole(body.state, "state"), whole(body.width, "width")
        kernel, biased = whole(body.kernel, "kernel"), bool(body.conv_bias)
        if heads % keys:
            raise InputError(f"network: {heads} heads are no multiple of {keys} key_heads")
        if body.state_bytes_each not in (2, 4):
            raise InputError(
                "network: an element of a state must have 2 or 4 bytes, not "
                f"{body.state_bytes_each}"
            )
        self.chunk = whole(body.chunk, "chunk")
        self.query = weights.matrix(hidden, keys, state, inner=hidden, split=1)
        self.key = weights.matrix(hidden, keys, state, inner=hidden, split=1)
        self.value = weights.matrix(hidden, heads, width, inner=hidden, split=1)
        self.gate = weights.matrix(hidden, heads, width, inner=hidden, split=1)
        self.output = weights.matrix(heads, width, hidden, inner=heads * width, split=0)
        self.query_filter = Convolution(kernel, keys, state, biased, weights)
        self.key_filter = Convolution(kernel, keys, state, biased, weights)
        self.value_filter = Convolution(kernel, heads, width, biased, weights)
        # States of 16 bits have the type of the weights.
        self.kind = jnp.dtype(jnp.float32) if body.state_bytes_each == 4 else self.value.dtype
        self._own(body, hidden, weights)

    @abc.abstractmethod
    def _own(self, body: Recurrent, hidden: int, weights: Weights) -> None:
        """Makes the weights of decays, rates and norms."""

    @abc.abstractmethod
    def _run(
        self, x: Array, state: Array, query: Array, key: Array, value: Array
    ) -> tuple[scans.State, scans.Values]:
        """Returns the state after all tokens of the hidden state `x`, and their results."""

    @abc.abstractmethod
    def _norm(self, y: Array, gate: Array) -> Float[Array, "batch tokens heads width"]:
        """Returns results that are normed and gated."""

    def empty_cache(self, batch: int, capacity: int, part: int) -> StateCache:
        """Returns the state before the first token; its size knows no tokens."""
        del capacity, part
        (_, heads, width), (_, _, state) = self.value.shape, self.key.shape
        filters = (self.query_filter, self.key_filter, self.value_filter)
        return StateCache(
            jnp.zeros((batch, state, heads, width), self.kind), *(f.kept(batch) for f in filters)
        )

    def __call__(
        self,
        x: Float[Array, "batch tokens hidden"],
        start: Int[Array, ""],
        cache: StateCache | None = None,
        axis: str | None = None,
    ) -> tuple[Float[Array, "batch tokens hidden"], StateCache | None]:
        """Returns the layer's result for tokens after those of the cache, and the cache with them.

        Tokens have no places. `axis` is the mesh axis that heads are split over.
        """
        del start
        past = self.empty_cache(x.shape[0], 0, 0) if cache is None else cache

        def project(matrix: nnx.Param) -> Float[Array, "batch tokens heads width"]:
            return jnp.einsum("btm,mhd->bthd", x, matrix[...])

        query, queries = self.query_filter(project(self.query), past.queries)
        key, keys = self.key_filter(project(self.key), past.keys)
        value, values = self.value_filter(project(self.value), past.values)
        state, y = self._run(x, past.state.astype(jnp.float32), query, key, value)
        y = self._norm(y, project(self.gate).astype(jnp.float32)).astype(x.dtype)
        result = sum_ranks(jnp.einsum("bthd,hdm->btm", y, self.output[...]), axis)
        held = StateCache(state.astype(self.kind), queries, keys, values)
        return result, None if cache is None else held


def _wide(weight: nnx.Param) -> Array:
    return weight[...].astype(jnp.float32)


class MambaLayer(RecurrentLayer):
    """Mamba-2: groups share keys (B) and queries (C); a step per head scales value and decay."""

    def _own(self, body: Recurrent, hidden: int, weights: Weights) -> None:
        heads, width = self.value.shape[1:]
        self.step = weights.matrix(hidden, heads, inner=hidden, split=1)
        self.step_bias = weights.vector(heads, split=0)
        self.decay = weights.vector(heads, split=0)
        self.skip = weights.scales(heads, split=0)
        self.scale = weights.scales(heads, width, split=0)

    def _run(
        self, x: Array, state: Array, query: Array, key: Array, value: Array
    ) -> tuple[scans.State, scans.Values]:
        step = jnp.einsum("btm,mh->bth", x, self.step[...]).astype(jnp.float32)
        step = jax.nn.softplus(step + _wide(self.step_bias))[..., None]
        decay = -jnp.exp(_wide(self.decay))[:, None] * step
        if x.shape[1] == 1:
            state, y = scans.ssd_step(state, jnp.exp(decay), key, step * value, query)
        else:
            state, y = scans.ssd_chunks(state, decay, key, step * value, query, self.chunk)
        return state, y + _wide(self.skip)[:, None] * value

    def _norm(self, y: Array, gate: Array) -> Float[Array, "batch tokens heads width"]:
        # Over the heads of a group, so that ranks need not know of each other's.
        y = y * jax.nn.silu(gate)
        groups = self.key.shape[1]
        grouped = y.reshape(*y.shape[:2], groups, -1, y.shape[-1])
        return rms_norm(grouped, None, (-2, -1), None).reshape(y.shape) * _wide(self.scale)


class DeltaLayer(RecurrentLayer):
    """A gated delta net, or Kimi delta attention where a key's elements decay on their own."""

    def _own(self, body: Recurrent, hidden: int, weights: Weights) -> None:
        _, heads, width = self.value.shape
        if not isinstance(body, GatedDelta | KimiDelta):
            raise InputError(f"network: {type(body).__name__} has no delta rule")
        self.rate = weights.matrix(hidden, heads, inner=hidden, split=1)
        self.decay = weights.vector(heads, split=0)
        self.scale = weights.scales(width)
        if isinstance(body, GatedDelta):
            self.decay_down = None
            self.decays = weights.matrix(hidden, heads, 1, inner=hidden, split=1)
            self.decay_bias = weights.vector(heads, 1, split=0)
        else:
            rank, state = whole(body.decay_rank, "decay_rank"), self.key.shape[2]
            if self.key.shape[1] != heads:
                raise InputError(
                    f"network: {heads} heads of Kimi delta attention need as many key_heads, "
                    f"not {self.key.shape[1]}"
                )
            self.decay_down = weights.matrix(hidden, rank, inner=hidden)
            self.decays = weights.matrix(rank, heads, state, inner=rank, split=1)
            self.decay_bias = weights.vector(heads, state, split=0)

    def _run(
        self, x: Array, state: Array, query: Array, key: Array, value: Array
    ) -> tuple[scans.State, scans.Values]:
        inner = x
        if self.decay_down is not None:
            inner = jnp.einsum("btm,mr->btr", x, self.decay_down[...])
        decay = jnp.einsum("btr,rhn->bthn", inner, self.decays[...]).astype(jnp.float32)
        sharpness = jnp.exp(_wide(self.decay))[:, None]
        # At most e⁻¹ a token and e⁻⁶⁴ a chunk, which 32 bits can undo.
        fastest = min(1.0, 64 / self.chunk)
        decay = -fastest * jax.nn.sigmoid(sharpness * (decay + _wide(self.decay_bias)))
        rate = jnp.einsum("btm,mh->bth", x, self.rate[...]).astype(jnp.float32)
        rate = jax.nn.sigmoid(rate)[..., None]
        heads = value.shape[2]
        query, key = (
            jnp.repeat(_unit(each), heads // each.shape[2], axis=2) for each in (query, key)
        )
        query = query * query.shape[-1] ** -0.5
        if x.shape[1] == 1:
            return scans.delta_step(state, jnp.exp(decay), key, value, query, rate)
        return scans.delta_chunks(state, decay, key, value, query, rate, self.chunk)

    def _norm(self, y: Array, gate: Array) -> Float[Array, "batch tokens heads width"]:
        return rms_norm(y, _wide(self.scale), (-1,), None) * jax.nn.silu(gate)


def _unit(x: Float[Array, "... width"]) -> Float[Array, "... width"]:
    """Returns vectors of length 1, so that a delta rule never adds more than it takes away."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)


def recurrent_layer(body: Recurrent, hidden: int, weights: Weights) -> RecurrentLayer:
    """Returns the layer of a kind."""
    kind = MambaLayer if isinstance(body, Mamba2) else DeltaLayer
    return kind(body, hidden, weights)
