"""How tokens fall on experts: how many experts a step touches, and the load of the busiest rank.

Even routing is the default. A skewed router is the power law of NVIDIA's AIConfigurator: loads x of
experts have the density p(x) ∝ x^−a over [1, R]. Its authors observed a ≈ 1.2 for Qwen3-235B and
a ≈ 1.01 for DeepSeek-V3/R1, on CNN/DailyMail and OpenOrca (docs/POWER_LAW_DISTRIBUTION.md of
github.com/ai-dynamo/aiconfigurator, "Real-World Model Observations"), and measured expert kernels
at both. R is theirs too: 0.8 × tokens, and 200 for steps of few tokens; here the larger of the two,
so that nothing jumps between.

Both laws are averages over where the popular experts lie: placement is taken as random.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from perfmodel.relax import Real, as_real, inverse, minimum

ROUTING_SKEW = 0.8
"""Largest of n normal deviations over the asymptote √(2 ln n): 0.70 at n = 8, 0.81 at 64.
Source: expected largest of n standard normals, 1.424 at n = 8, 2.343 at n = 64 (order statistics).
"""

_KINK = 0.01

FEWEST_RANGE = 200.0
"""Largest load over the smallest in steps of few tokens. Source: AIConfigurator,
collector/helper.py: loads between 0.01 and 2 where choices do not exceed experts."""

_TOKEN_RANGE = 0.8
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(24)
_PLACES, _SHARES = 0.5 * (_NODES + 1.0), 0.5 * _WEIGHTS
_ROUNDS = 5
_TINY = 1e-12
_NEAR_ONE = 1e-4


def distinct_experts(
    experts: Real, top_k: Real, tokens: Real, exponent: Real | None = None
) -> Real:
    """Returns how many of `experts` at least one of `tokens` is routed to, on average.

    E·(1 − (1 − k/E)^T): each token leaves a given expert alone with probability 1 − k/E, whatever
    the others do. Exact for routing that is even over experts and independent over tokens. With a
    power law of `exponent`, its mean over experts of different popularity.

    >>> round(float(distinct_experts(8, 2, 4)), 4)   # 8·(1 − 0.75⁴)
    5.4688
    >>> float(distinct_experts(128, 8, 64, 1.2)) < float(distinct_experts(128, 8, 64))
    True
    """
    if exponent is None:
        missed = jnp.exp(tokens * jnp.log1p(-as_real(top_k) * inverse(as_real(experts) + 1e-6)))
        return experts * (1.0 - missed)
    chance = power_law_chances(experts, top_k, tokens, exponent)
    missed = jnp.exp(as_real(tokens)[..., None] * jnp.log1p(-chance * (1.0 - 1e-6)))
    return experts * (1.0 - _mean(missed))


def power_law_chances(experts: Real, top_k: Real, tokens: Real, exponent: Real) -> Array:
    """Returns the probability that a token takes an expert, at 24 Gauss-Legendre places of the
    popularity from the least to the most popular; shape [..., 24], mean top_k/experts.

    A token draws experts in proportion to their loads and takes none twice, so that one of load x
    is taken with a probability of 1 − exp(−c·x), with c such that their mean is right
    (successive sampling, Rosén 1972).
    """
    tokens, exponent = as_real(tokens), as_real(exponent)
    widest = jnp.log(jnp.maximum(_TOKEN_RANGE * tokens, FEWEST_RANGE))[..., None]
    # Past 1 by a hair, where the law is the exponential of a straight line and the formula 0/0.
    power = 1.0 - exponent
    power = (power + jnp.where(jnp.abs(power) < _NEAR_ONE, 2 * _NEAR_ONE, 0.0))[..., None]
    inner = jnp.log1p(_PLACES * jnp.expm1(power * widest))
    loads = jnp.exp(inner * inverse(power) - widest)
    mean = (as_real(top_k) * inverse(experts))[..., None]
    # Newton's method from the left: the mean is concave in c, so no step goes too far.
    scale = mean * inverse(_mean(loads)[..., None])
    for _ in range(_ROUNDS):
        left = jnp.exp(-scale * loads)
        missing = mean - 1.0 + _mean(left)[..., None]
        scale = scale + missing * inverse(_mean(loads * left)[..., None] + _TINY)
    chance = 1.0 - jnp.exp(-scale * loads)
    return jnp.minimum(chance * (mean * inverse(_mean(chance)[..., None])), 1.0)


def _mean(values: Array) -> Array:
    """Returns the mean over popularity of values at its places."""
    return jnp.sum(values * _SHARES, -1)


def _deviations(ranks: Array) -> Array:
    """Returns the largest of `ranks` normal deviations; exactly 0 for one."""
    # The small constant keeps the slope finite at one rank.
    return ROUTING_SKEW * (jnp.sqrt(2.0 * jnp.log(ranks) + _KINK) - math.sqrt(_KINK))


def busiest_share(ranks: Real, assignments: Real) -> Real:
    """Returns the load of the busiest of `ranks` over the mean, for evenly random routing.

    `assignments` (tokens × top-k) fall on ranks at random: about N(μ, μ) with μ = assignments/n, so
    the busiest has μ + c·√(2 ln n)·√μ, and never more than all of them. Exactly 1 for one rank.
    """
    ranks = as_real(ranks)
    mean = as_real(assignments) * inverse(ranks)
    return minimum(1.0 + _deviations(ranks) * inverse(jnp.sqrt(mean)), ranks)


def busiest_power_law_share(
    ranks: Real, experts: Real, top_k: Real, tokens: Real, exponent: Real
) -> Real:
    """Returns the load of the busiest of `ranks` over the mean, for routing by a power law.

    The load of a rank is that of its m = E/n experts and of chance: relative to the mean μ its
    variance and third moment are

        s² = v/m·(1 − 1/n) + 1/μ
        t  = w/m²·(1 − 1/n)(1 − 2/n) + 3·v/(m·μ)·(1 − 1/n) + 1/μ²

    with v and w those of one expert's popularity. The busiest has 1 + z·s, corrected for skewness
    (Cornish and Fisher 1937): (z² − 1 + u)/6 · t/s², where z is the mean and u the variance of the
    largest of n normal deviations. A rank has no more than all tokens on each of its experts.
    """
    ranks, experts = as_real(ranks), as_real(experts)
    popularity = power_law_chances(experts, top_k, tokens, exponent) * (
        experts * inverse(top_k)
    )[..., None]  # fmt: skip
    off = popularity - 1.0
    per_rank = ranks * inverse(experts)
    one = 1.0 - inverse(ranks)
    alone = ranks * inverse(as_real(tokens) * top_k)
    spread = _mean(off * off) * per_rank * one
    # Two ranks mirror each other, and one is the mean.
    two = jnp.maximum(1.0 - 2.0 * inverse(ranks), 0.0)
    third = _mean(off * off * off) * per_rank * per_rank * one * two
    variance = spread + alone
    third = third + 3.0 * spread * alone + alone * alone
    largest = _deviations(ranks)
    # Variance of the largest of n: 1, 0.68, 0.37 and 0.20 at n = 1, 2, 8 and 64 (order statistics).
    around = inverse(1.0 + ROUTING_SKEW * jnp.log(ranks))
    skewness = third * inverse(variance) * (largest * largest - 1.0 + around) * (1.0 / 6.0)
    busiest = 1.0 + largest * jnp.sqrt(variance) + skewness
    return minimum(minimum(busiest, ranks), experts * inverse(top_k))
