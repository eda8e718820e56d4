"""What a network keeps: keys and values of each attention layer, or its state, and of how many
tokens."""

from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from perfmodel.errors import InputError


def write_from(held: Array, new: Array, start: Int[Array, ""]) -> Array:
    """Returns what is held, [batch, slots, ...], with new tokens from place `start` on."""
    return lax.dynamic_update_slice_in_dim(held, new.astype(held.dtype), start, 1)


def check_room(new: int, slots: int, window: int | None, capacity: int) -> None:
    """Raises where new tokens overwrite vectors that the first of them still see."""
    room = slots if slots == capacity or window is None else slots - window + 1
    if new > room:
        raise InputError(f"cache: has room for {room} tokens at once, not {new}")


def slot_places(slots: int, end: Int[Array, ""]) -> Int[Array, " slots"]:
    """Returns which token each slot holds once `end` are written; negative where none."""
    last = end - 1
    return last - (last - jnp.arange(slots)) % slots


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
        check_room(new, self.slots, self.window, self.capacity)
        at = (start + jnp.arange(new)) % self.slots
        return LayerCache(
            self.keys.at[:, at].set(keys),
            self.values.at[:, at].set(values),
            self.window,
            self.capacity,
        )

    def places(self, end: Int[Array, ""]) -> Int[Array, " slots"]:
        """Returns which token each slot holds once `end` are written; negative where none."""
        return slot_places(self.slots, end)


class BlockCache(eqx.Module):
    """Keys and values of a layer that sees chosen blocks, and the keys of its indexer.

    Ranks share out the former by kv heads; index keys are on every rank.
    """

    layer: LayerCache
    index: Float[Array, "batch slots width"]


class Entries(eqx.Module):
    """Entries of groups of tokens, and what their compressor holds of the last tokens.

    Values and weights are in 32 bits, those of token p in place p mod `held`.
    """

    entries: Float[Array, "batch entries width"]
    values: Float[Array, "batch held columns"]
    weights: Float[Array, "batch held columns"]


class CompressedCache(eqx.Module):
    """Vectors of a window, token p in slot p mod slots, and entries: whole on every rank.

    `keys` are the smaller entries that an indexer scores.
    """

    near: Float[Array, "batch slots width"]
    entries: Entries | None
    keys: Entries | None
    window: int = eqx.field(static=True)
    capacity: int = eqx.field(static=True)


class LatentCache(eqx.Module):
    """Latent vectors with their rotary keys, token p in slot p, whole on every rank.

    Beside them the keys of an indexer, in 8 bits with one 32-bit scale per block of 128. Within a
    step, and no longer, the choice that later layers take over: slots of the best keys of each new
    token, and which of them it sees. No latents where a network runs without a cache.
    """

    latents: Float[Array, "batch slots width"] | None
    keys: Float[Array, "batch slots blocks block"] | None = None
    scales: Float[Array, "batch slots blocks"] | None = None
    choice: tuple[Int[Array, "batch tokens chosen"], Bool[Array, "batch tokens chosen"]] | None = (
        None
    )

    def chosen_by(self, other: "LatentCache | None") -> "LatentCache":
        """Returns the cache with another layer's choice; with none where there is no other."""
        choice = None if other is None else other.choice
        return LatentCache(self.latents, self.keys, self.scales, choice)


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
    layers: Sequence[LayerCache | LatentCache | BlockCache | CompressedCache | StateCache]
    capacity: int = eqx.field(static=True)
