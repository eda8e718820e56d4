"""Recurrences over tokens: of state-space layers and of the delta rule, in the forms `Scan` counts.

A head's state is a matrix, keys × values. Each token decays it, adds its key times its value and
reads it with its query:

    Mamba-2     S = a·S + k·vᵀ                  y = Sᵀ·q     (arXiv 2405.21060)
    delta rule  S = a·S + r·k·(v - (a·S)ᵀ·k)ᵀ   y = Sᵀ·q     (arXiv 2412.06464, 2510.26692)

where `a` is one number a head, or of the delta rule one an element of the key. One token is element
by element work; prompts run in chunks, whose products are those of blocks of tokens × tokens.
Everything is in 32 bits. Axes: decays, keys and queries [batch, tokens, heads, state], decays of
one number a head [.., 1]; values [batch, tokens, heads, width]; states [batch, state, heads,
width]. Of Mamba-2, keys and queries have the groups that heads share in place of heads.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

Tokens = Float[Array, "batch tokens heads state"]
Values = Float[Array, "batch tokens heads width"]
State = Float[Array, "batch state heads width"]


def _read(state: Array, query: Array) -> Array:
    """Returns what a state says of one key or query a head [batch, heads, width]."""
    return jnp.sum(state * query, 1)


def _column(x: Array) -> Array:
    """Returns one token's elements of keys, [batch, 1, heads, n], as rows [batch, n, heads, 1]."""
    return jnp.swapaxes(x[:, 0], 1, 2)[..., None]


def _each_head(x: Tokens, heads: int) -> Tokens:
    """Returns keys of groups, repeated for the heads of each."""
    return jnp.repeat(x, heads // x.shape[2], axis=2)


def ssd_step(
    state: State, decay: Tokens, key: Tokens, value: Values, query: Tokens
) -> tuple[State, Values]:
    """Returns the state after one token of Mamba-2, and its result; `decay` is a factor."""
    heads = value.shape[2]
    columns = (_column(_each_head(x, heads)) for x in (decay, key, query))
    factor, key, query = columns
    state = factor * state + key * value
    return state, _read(state, query)[:, None]


def delta_step(
    state: State, decay: Tokens, key: Tokens, value: Values, query: Tokens, rate: Tokens
) -> tuple[State, Values]:
    """Returns the state after one token of the delta rule, and its result; `decay` is a factor."""
    factor, key, query = (_column(x) for x in (decay, key, query))
    state = factor * state
    change = rate[:, 0] * (value[:, 0] - _read(state, key))
    state = state + key * change[:, None]
    return state, _read(state, query)[:, None]


def _in_chunks(
    body: Callable[..., tuple[State, Values]], chunk: int, state: State, *given: Array
) -> tuple[State, Values]:
    """Returns the last state and the results of a chunk's function over all of them in turn.

    What fills the last chunk is 0: no decay (its logarithm), no key and no value, so that the state
    stays as it is.
    """
    batch, tokens = given[0].shape[:2]
    length = min(chunk, tokens)
    number = -(-tokens // length)

    def cut(x: Array) -> Array:
        filled = jnp.pad(x, ((0, 0), (0, number * length - tokens), (0, 0), (0, 0)))
        return jnp.moveaxis(filled.reshape(batch, number, length, *x.shape[2:]), 1, 0)

    state, parts = lax.scan(lambda held, one: body(held, *one), state, tuple(map(cut, given)))
    whole = jnp.moveaxis(parts, 0, 1).reshape(batch, number * length, *parts.shape[3:])
    return state, whole[:, :tokens]


def ssd_chunks(
    state: State, decay: Tokens, key: Tokens, value: Values, query: Tokens, chunk: int
) -> tuple[State, Values]:
    """Returns the state after all tokens of Mamba-2, and their results; `decay` is a logarithm."""
    return _in_chunks(_ssd_chunk, chunk, state, decay, key, value, query)


def _ssd_chunk(
    state: State, decay: Tokens, key: Tokens, value: Values, query: Tokens
) -> tuple[State, Values]:
    batch, length, heads, width = value.shape
    groups = key.shape[2]
    each = heads // groups
    past = jnp.cumsum(decay[..., 0], 1)
    seen = jnp.tril(jnp.ones((length, length), bool))[None, :, :, None]
    between = jnp.where(seen, past[:, :, None] - past[:, None], -jnp.inf)
    between = jnp.exp(between).reshape(batch, length, length, groups, each)
    value = value.reshape(batch, length, groups, each, width)
    held = state.reshape(batch, -1, groups, each, width)
    past = past.reshape(batch, length, groups, each)
    scores = jnp.einsum("bign,bjgn->bgij", query, key)
    shares = jnp.moveaxis(scores, 1, 3)[..., None] * between
    inside = jnp.einsum("bijgr,bjgrp->bigrp", shares, value)
    before = jnp.einsum("bign,bngrp->bigrp", query, held) * jnp.exp(past)[..., None]
    late = value * jnp.exp(past[:, -1:] - past)[..., None]
    added = jnp.einsum("bjgn,bjgrp->bngrp", key, late)
    held = jnp.exp(past[:, -1])[:, None, ..., None] * held + added
    return held.reshape(state.shape), (inside + before).reshape(batch, length, heads, width)


def delta_chunks(
    state: State,
    decay: Tokens,
    key: Tokens,
    value: Values,
    query: Tokens,
    rate: Tokens,
    chunk: int,
) -> tuple[State, Values]:
    """Returns the state after all tokens of the delta rule, and their results.

    `decay` is a logarithm. A chunk's decays are taken out of keys and put into queries, whatever
    lies between, so their sum over a chunk must stay above -80, or 32 bits overflow.
    """
    return _in_chunks(_delta_chunk, chunk, state, decay, key, value, query, rate)


def _delta_chunk(
    state: State, decay: Tokens, key: Tokens, value: Values, query: Tokens, rate: Tokens
) -> tuple[State, Values]:
    past = jnp.cumsum(decay, 1)
    end = past[:, -1:]
    kept, undone = jnp.exp(past), key * jnp.exp(-past)
    asked, query = rate * key * kept, query * kept
    # What a token's key finds of earlier tokens' changes, before those have found each other's.
    found = jnp.tril(jnp.einsum("bihn,bjhn->bhij", asked, undone), -1)
    solved = _inverse(found)
    wanted = jnp.einsum("bhij,bjhp->bihp", solved, rate * value)
    asked = jnp.einsum("bhij,bjhn->bihn", solved, asked)
    change = wanted - jnp.einsum("bihn,bnhp->bihp", asked, state)
    shares = jnp.tril(jnp.einsum("bihn,bjhn->bhij", query, undone))
    result = jnp.einsum("bhij,bjhp->bihp", shares, change)
    result = result + jnp.einsum("bihn,bnhp->bihp", query, state)
    added = jnp.einsum("bjhn,bjhp->bnhp", key * jnp.exp(end - past), change)
    return _column(jnp.exp(end)) * state + added, result


def _inverse(lower: Float[Array, "... rows rows"]) -> Float[Array, "... rows rows"]:
    """Returns the inverse of 1 + a matrix that is 0 on and above its diagonal, row by row."""
    size = lower.shape[-1]

    def row(i: Array, found: Array) -> Array:
        own = lax.dynamic_index_in_dim(found, i, -2, keepdims=False)
        # Rows above are done; this one has nothing but 0 at and beyond its own place.
        own = own + jnp.sum(own[..., None] * found, -2)
        return lax.dynamic_update_index_in_dim(found, own, i, found.ndim - 2)

    return lax.fori_loop(1, size, row, -lower) + jnp.eye(size, dtype=lower.dtype)
