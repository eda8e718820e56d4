"""Speculative decoding: how many tokens a cycle of drafting and verifying yields.

A cycle drafts `tokens` = k positions one after another, then one pass of the network verifies all
of them and adds a token of its own. With P_i the probability that at least i drafts are accepted,

    tokens of a cycle   1 + P_1 + … + P_k

P_i = a^i for an acceptance rate a that is the same at every position; measured heads accept less
the deeper they guess, so P is a list. Between whole k the yield is the chord, which is what a mix
of cycles of both depths yields. Several candidates at each position (a tree) are accepted as
1 − (1 − a)^w if they are independent, which is the best case, and cost w verified rows a position.

By hand, a = 0.8 and k = 4: 1 + 0.8 + 0.64 + 0.512 + 0.4096 = 3.3616.
"""

import math
from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import Array

from perfmodel.errors import InputError
from perfmodel.relax import Real, as_real, maximum, minimum

MOST = 32
"""Deepest draft that an acceptance curve describes."""


class Speculation(eqx.Module):
    """How a cycle drafts, and what is accepted of it.

    Fields:
        tokens: drafted positions of a cycle k, 0 to `MOST`; a real number while it is descended.
        accepted: P_i for i = 1 … `MOST`, shape [MOST].
        candidates: tokens drafted for each position; 1 is a chain.
    """

    tokens: Real
    accepted: Array
    candidates: Real = 1.0

    @property
    def yielded(self) -> Array:
        """Tokens of a cycle: 1 for no drafts, at most k + 1."""
        place = jnp.arange(MOST, dtype=float)
        counted = minimum(maximum(as_real(self.tokens) - place, 0.0), 1.0)
        return 1.0 + jnp.sum(counted * self.accepted)

    @property
    def rows(self) -> Real:
        """Rows that a sequence brings to the verifying pass."""
        return 1.0 + self.tokens * self.candidates

    @property
    def drafting(self) -> Array:
        """1 where anything is drafted, 0 without drafts; between, the share of a first draft."""
        return minimum(as_real(self.tokens), 1.0)


def _checked(tokens: float, candidates: float) -> None:
    if not 0 <= tokens <= MOST:
        raise InputError(f"draft tokens: must be from 0 to {MOST}, not {tokens:g}")
    if not 1 <= candidates <= 64:
        raise InputError(f"draft candidates: must be from 1 to 64, not {candidates:g}")


def chain(rate: float, tokens: float, candidates: float = 1.0) -> Speculation:
    """Returns speculation whose every position is accepted at the same rate.

    >>> round(float(chain(0.8, 4).yielded), 4), float(chain(0.8, 0).yielded)
    (3.3616, 1.0)
    """
    _checked(tokens, candidates)
    if not 0 <= rate <= 1:
        raise InputError(f"acceptance: must be a share from 0 to 1, not {rate:g}")
    best = 1.0 - (1.0 - rate) ** candidates
    return Speculation(tokens, jnp.asarray(best ** np.arange(1, MOST + 1)), candidates)


def of_positions(rates: Sequence[float], tokens: float, candidates: float = 1.0) -> Speculation:
    """Returns speculation of a list: how often each position is accepted if those before it are.

    Past its end the last rate goes on.

    >>> round(float(of_positions([0.9, 0.5], 3).yielded), 4)  # 1 + 0.9 + 0.45 + 0.225
    2.575
    """
    _checked(tokens, candidates)
    if not rates or not all(0 <= rate <= 1 for rate in rates):
        raise InputError("acceptance: a list must have shares from 0 to 1, at least one")
    listed = np.asarray([*rates[:MOST], *[rates[-1]] * (MOST - len(rates))])
    best = 1.0 - (1.0 - listed) ** candidates
    return Speculation(tokens, jnp.asarray(np.cumprod(best)), candidates)


def of_lengths(lengths: Sequence[float], tokens: float, candidates: float = 1.0) -> Speculation:
    """Returns speculation of measured mean lengths of a cycle at k = 1, 2, … (the token that the
    verifying pass adds included). Past its end nothing more is accepted.

    Lengths of a tree have the gain of its candidates in them; they cost rows all the same.

    A longer draft that was measured to yield less is noise, or a head that guesses otherwise at
    another depth: it counts as no more accepted.

    >>> found = of_lengths([1.79, 2.27, 2.49], 2)
    >>> round(float(found.yielded), 2)
    2.27
    """
    _checked(tokens, candidates)
    if not lengths or min(lengths) < 1.0:
        raise InputError("accepted length: counts the token of the network itself, so at least 1")
    gained = np.diff(np.maximum.accumulate([1.0, *lengths[:MOST]]))
    listed = np.minimum.accumulate(np.minimum(gained, 1.0))
    return Speculation(tokens, jnp.asarray(np.pad(listed, (0, MOST - len(listed)))), candidates)


def of_length(length: float, tokens: float, candidates: float = 1.0) -> Speculation:
    """Returns speculation whose cycle of `tokens` drafts has a mean length, at one rate.

    >>> round(float(of_length(3.3616, 4).accepted[0]), 4)
    0.8
    >>> round(float(of_length(2.2, 2.5, candidates=4).yielded), 4)
    2.2
    """
    _checked(tokens, candidates)
    if not 1.0 <= length <= tokens + 1:
        raise InputError(
            f"accepted length: must be from 1 to {tokens + 1:g} with {tokens:g} drafts, "
            f"not {length:g}"
        )
    low, high = 0.0, 1.0
    while high - low > 1e-12:
        middle = 0.5 * (low + high)
        whole = math.floor(tokens)
        mean = math.fsum(middle**i for i in range(whole + 1))
        mean += (tokens - whole) * middle ** (whole + 1)
        low, high = (middle, high) if mean < length else (low, middle)
    return Speculation(tokens, jnp.asarray(high ** np.arange(1, MOST + 1)), candidates)
