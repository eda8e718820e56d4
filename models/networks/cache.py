"""What a network keeps: keys and values of each attention layer, or its state, and of how many
tokens."""

from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from perfmodel.errors import InputError


class LayerCache(eqx.Module):
    """Keys and values of one layer, token p in slot p mod slots.

    A layer with a window has no more slots than it can see. All sequences are equally long.
    """

    keys: Float[Array, "batch slots kv_heads head_dim"]
    values: Float[Array, "batch slots kv_heads head_dim"]
    window: int | None = eqx.field(static=True)
    capacity: int = eqx.field(static=True)

    @property
    def slots(self) -> int:
        """Tokens that there is room for."""
        return self.keys.shape[1]

    def write(self, keys: Array, values: Array, start: Int[Array, ""]) -> "LayerCache":
        """Returns the cache with the keys and values of new tokens from place `start` on.

        More tokens at once than there are slots beyond the window would overwrite keys that the
        first of them still see: an `InputError`.
        """
        new = keys.shape[1]
        whole = self.slots == self.capacity or self.window is None
        room = self.slots if whole else self.slots - (self.window or 0) + 1
        if new > room:
            raise InputError(f"cache: has room for {room} tokens at once, not {new}")
        at = (start + jnp.arange(new)) % self.slots
        return LayerCache(
            self.keys.at[:, at].set(keys),
            self.values.at[:, at].set(values),
            self.window,
            self.capacity,
        )

    def places(self, end: Int[Array, ""]) -> Int[Array, " slots"]:
        """Returns which token each slot holds once `end` are written; negative where none."""
        last = end - 1
        return last - (last - jnp.arange(self.slots)) % self.slots


class LatentCache(eqx.Module):
    """Latent vectors with their rotary keys, token p in slot p, whole on every rank.

    Beside them the keys of an indexer, in 8 bits with one 32-bit scale per block of 128.
    """

    latents: Float[Array, "batch slots width"]
    keys: Float[Array, "batch slots blocks block"] | None = None
    scales: Float[Array, "batch slots blocks"] | None = None


class StateCache(eqx.Module):
    """State of a recurrent layer, and what its convolution saw last: of any number of tokens.

    Heads, or the heads of keys, are the third axis of all, as those of `LayerCache`.
    """

    state: Float[Array, "batch state heads width"]
    queries: Float[Array, "batch kept key_heads state"]
    keys: Float[Array, "batch kept key_heads state"]
    values: Float[Array, "batch kept heads width"]


class Cache(eqx.Module):
    """What a network keeps of `tokens` past tokens of each sequence; at most `capacity` fit.

    Writing past the capacity is not seen by a compiled program: it overwrites the oldest tokens.
    """

    tokens: Int[Array, ""]
    layers: Sequence[LayerCache | LatentCache | StateCache]
    capacity: int = eqx.field(static=True)
