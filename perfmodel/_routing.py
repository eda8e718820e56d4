"""How many rows and experts reach the busiest rank under the routings of measured kernels.

AIConfigurator times one rank's experts with synthetic routing (its `collector/helper.py`); what
it draws is drawn again here, as counts per expert.
"""

import functools

import numpy as np

_DRAWS = 10


def balanced_counts(tokens: int, top_k: int, experts: int) -> np.ndarray:
    """Returns the tokens of each expert where token t takes every ⌈E/k⌉-th expert from t on.

    With fewer tokens than that stride, tokens start evenly spread over one stride.
    """
    stride = -(-experts // top_k)
    first = np.arange(tokens)
    if tokens < stride:
        first = first * stride / tokens
    chosen = (first[:, None] + np.arange(top_k) * stride) % experts
    return np.bincount(chosen.astype(int).ravel(), minlength=experts)


def _raise_lowest(counts: np.ndarray, extra: np.ndarray) -> np.ndarray:
    """Returns counts [n, experts] with `extra` [n] ones more, each given to a row's lowest."""
    counts = np.sort(counts, axis=1)
    size = np.arange(1, counts.shape[1] + 1)
    below = np.cumsum(counts, axis=1)
    # To lift the n lowest to the height of the nth costs n·c_n − Σc.
    raised = np.maximum((size * counts - below <= extra[:, None]).sum(1), 1)
    total = np.take_along_axis(below, raised[:, None] - 1, axis=1)[:, 0] + extra
    level, rest = np.divmod(total, raised)
    filled = level[:, None] + (size <= rest[:, None])
    return np.where(size <= raised[:, None], filled, counts)


def _spread(counts: np.ndarray, extra: np.ndarray) -> np.ndarray:
    """Returns counts [draws, ranks, experts] with `extra` [draws] more, in turn over the ranks."""
    draws, ranks, experts = counts.shape
    share = extra[:, None] // ranks + (np.arange(ranks) < extra[:, None] % ranks)
    return _raise_lowest(counts.reshape(-1, experts), share.ravel()).reshape(counts.shape)


def power_law_counts(
    tokens: int, top_k: int, experts: int, ranks: int, exponent: float, draws: int = _DRAWS
) -> np.ndarray:
    """Returns the tokens of each expert of the busiest rank, shape [draws, experts/ranks].

    Loads x of experts follow p(x) ∝ x^−exponent between 1 and 0.8·tokens (0.01 and 2 where there
    are fewer choices than experts), are scaled to tokens·top_k choices and rounded. No expert
    gets more than all tokens: what is over, and what rounding leaves, goes one by one to each
    rank's least loaded expert, what is missing comes from its most loaded. Experts lie on ranks
    in order.
    """
    random = np.random.default_rng(0)
    low, high = (1.0, 0.8 * tokens) if tokens * top_k > experts else (0.01, 2.0)
    power = 1.0 - exponent
    at_low, at_high = low**power, high**power
    load = ((at_high - at_low) * random.random((draws, experts)) + at_low) ** (1.0 / power)
    choices = tokens * top_k
    counts = np.rint(load / load.sum(1, keepdims=True) * choices).astype(np.int64)
    over = np.maximum(counts - tokens, 0).sum(1)
    counts = np.minimum(counts, tokens).reshape(draws, ranks, experts // ranks)
    counts = np.minimum(_spread(counts, over), tokens)
    missing = choices - counts.sum((1, 2))
    counts = np.minimum(_spread(counts, np.maximum(missing, 0)), tokens)
    counts = np.maximum(-_spread(-counts, np.maximum(-missing, 0)), 0)
    busiest = counts.sum(2).argmax(1)
    return counts[np.arange(draws), busiest]


@functools.cache
def busiest_load(
    distribution: str, tokens: int, top_k: int, experts: int, ranks: int
) -> tuple[float, float]:
    """Returns (rows, distinct experts) of the busiest rank, means over draws.

    `distribution` is "balanced" (the first rank's load, which is the table's) or
    "power_law_<exponent>".
    """
    if distribution == "balanced":
        counts = balanced_counts(tokens, top_k, experts)[None, : experts // ranks]
    else:
        exponent = float(distribution.removeprefix("power_law_"))
        counts = power_law_counts(tokens, top_k, experts, ranks, exponent)
    return float(counts.sum(1).mean()), float((counts > 0).sum(1).mean())
