"""Traffic: what is asked of a service, as weighted classes of requests.

A `Traffic` is arrays over classes, so an estimate of a class vmaps into one of the traffic. It is
fixed, written (`chat=2000:300:0.7`), drawn from distributions, or a trace of real requests
(`perfmodel.traces`) reduced to a few classes. Every reduction keeps the mean prompt and the mean
output exactly and says what it does to the second moments that attention depends on.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import equinox as eqx
import numpy as np

from perfmodel.errors import InputError, shorten
from perfmodel.plan import Load
from perfmodel.relax import Real


class Traffic(eqx.Module):
    """Classes of requests, arrays of shape [classes].

    Fields: `isl` and `osl`, prompt and output tokens; `cached`, share of the prompt that need not
    be computed [0, 1); `weight`, share of the requests, which sum to 1.
    """

    isl: Real
    osl: Real
    cached: Real
    weight: Real

    def load(self) -> Load:
        """Returns the classes as loads of a closed loop, to be vmapped over."""
        return Load(self.isl, self.osl, self.cached)

    def mean(self) -> Load:
        """Returns one load of the mean lengths: a prompt's cached tokens and outputs are kept."""
        isl, osl = (np.sum(self.weight * x) for x in (self.isl, self.osl))
        return Load(isl, osl, np.sum(self.weight * self.isl * self.cached) / isl)


@dataclasses.dataclass(frozen=True, eq=False)
class Mix:
    """Traffic with what people call it.

    Fields: `names` of its classes; `traffic`; `errors`, relative, of what a reduction to classes
    does to the mean of ISL² (`pairs`, prefill attention) and of OSL·(ISL + OSL/2) (`context`,
    decode attention), 0 where nothing was reduced; `note`, where it comes from.
    """

    names: tuple[str, ...]
    traffic: Traffic
    errors: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {"pairs": 0.0, "context": 0.0}
    )
    note: str = ""

    def __len__(self) -> int:
        return len(self.names)

    def draw(self, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns `isl`, `osl` and `cached` tokens of requests drawn by weight, [count] each."""
        t = self.traffic
        rows = np.random.default_rng(seed).choice(len(self), count, p=np.asarray(t.weight, float))
        isl, osl = (np.maximum(np.round(np.asarray(x)[rows]), 1.0) for x in (t.isl, t.osl))
        return isl, osl, np.floor(isl * np.asarray(t.cached)[rows])


def fixed(isl: float, osl: float, cached: float = 0.0, name: str = "requests") -> Mix:
    """Returns requests that are all alike."""
    return _mix([name], [isl], [osl], [cached], [1.0])


def parse(texts: Sequence[str]) -> Mix:
    """Returns classes from `name=isl:osl:share` or `name=isl:osl:share:cached`.

    Shares are relative to each other; `cached` is a share of the prompt.

    >>> mix = parse(["chat=2000:300:3", "rag=16000:500:1:0.5"])
    >>> mix.names, mix.traffic.weight.tolist(), mix.traffic.cached.tolist()
    (('chat', 'rag'), [0.75, 0.25], [0.0, 0.5])
    """
    names, rows = [], []
    for text in texts:
        name, equals, numbers = text.partition("=")
        parts = numbers.split(":")
        if not (name.strip() and equals and len(parts) in (3, 4)):
            raise InputError(
                f"class: '{shorten(text, 40)}' is not name=isl:osl:share or "
                "name=isl:osl:share:cached (such as chat=2000:300:0.7)"
            )
        try:
            values = [float(part) for part in parts]
        except ValueError:
            raise InputError(f"class: '{shorten(text, 40)}' has a part that is no number") from None
        names.append(name.strip())
        rows.append(values + [0.0] * (4 - len(values)))
    if not rows:
        raise InputError("class: none given")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"class: '{shorten(twice)}' is given twice")
    isl, osl, share, cached = np.array(rows).T
    return _mix(names, isl, osl, cached, share)


def _mix(names: Sequence[str], isl: object, osl: object, cached: object, share: object) -> Mix:
    """Returns classes after their numbers were checked; shares are scaled to sum to 1."""
    columns = [np.asarray(c, float) for c in (isl, osl, cached, share)]
    rules = (("isl", 1, 1e9), ("osl", 1, 1e9), ("cached", 0, 1), ("share", 0, 1e12))
    for (what, low, high), column in zip(rules, columns, strict=True):
        good = np.isfinite(column) & (column >= low) & (column <= high)
        if what in ("cached", "share"):
            good &= (column < 1) if what == "cached" else (column > 0)
        if not np.all(good):
            row = int(np.argmin(good))
            said = {
                "cached": "at least 0 and less than 1",
                "share": "more than 0",
            }.get(what, "at least 1")
            raise InputError(
                f"class '{shorten(names[row])}': {what} must be {said}, not {column[row]:g}"
            )
    lengths, outputs, hits, weight = columns
    return Mix(tuple(names), Traffic(lengths, outputs, hits, weight / np.sum(weight)))


def lognormal(
    isl: tuple[float, float], osl: tuple[float, float], classes: int = 4, cached: float = 0.0
) -> Mix:
    """Returns classes of log-normal lengths that are independent of each other.

    Args:
        isl, osl: mean [tokens] and coefficient of variation, standard deviation over mean.
        classes: equally likely ones of each length, so classes² in all; each is at its mean.
        cached: share of every prompt that is cached.
    """
    for name, (mean, variation) in (("isl", isl), ("osl", osl)):
        if not (mean >= 1 and 0 <= variation <= 20):
            raise InputError(f"{name}: a mean from 1 and a variation from 0 to 20 are needed")

    def bins(mean: float, variation: float) -> np.ndarray:
        sigma = math.sqrt(math.log1p(variation**2))
        # E[x; z < q] = mean · Φ(q − σ): the mean of a bin is a difference of these.
        edges = [_normal_quantile(i / classes) - sigma for i in range(classes + 1)]
        return mean * classes * np.diff([_normal(edge) for edge in edges])

    second = [(1.0 + v * v) * m * m for m, v in (isl, osl)]
    note = f"log-normal lengths, mean and variation {isl} and {osl}"
    return _product(bins(*isl), bins(*osl), second, isl[0], osl[0], cached, note)


def quantiles(
    isl: Mapping[float, float], osl: Mapping[float, float], classes: int = 4, cached: float = 0.0
) -> Mix:
    """Returns classes of lengths known by their quantiles, independent of each other.

    Between quantiles the logarithm of the length is linear in probability; so the first (0, the
    shortest) and the last (1, the longest) are needed.

    >>> mix = quantiles({0: 100, 0.5: 1000, 1: 1000}, {0: 200, 1: 200}, classes=2)
    >>> mix.traffic.isl.round().tolist(), float(mix.traffic.osl[0])
    ([391.0, 391.0, 1000.0, 1000.0], 200.0)
    """
    found, second, means = [], [], []
    for name, given in (("isl", isl), ("osl", osl)):
        places, values = np.array(sorted(given.items()), float).reshape(-1, 2).T
        rising = len(places) > 1 and np.all(np.diff(values) >= 0) and values[0] >= 1
        if not (rising and places[0] == 0 and places[-1] == 1):
            raise InputError(
                f"{name}: quantiles from 0 to 1 of rising lengths from 1 are needed, "
                "such as 0:10 0.5:900 1:8000"
            )
        fine = (np.arange(classes * 2000) + 0.5) / (classes * 2000)
        lengths = np.exp(np.interp(fine, places, np.log(values)))
        found.append(lengths.reshape(classes, -1).mean(axis=1))
        second.append(float(np.mean(lengths**2)))
        means.append(float(np.mean(lengths)))
    note = f"quantiles of lengths {dict(isl)} and {dict(osl)}"
    return _product(found[0], found[1], second, means[0], means[1], cached, note)


def _normal(x: float) -> float:
    return 0.5 * (1.0 + math.erf(x / math.sqrt(2.0)))


def _normal_quantile(p: float) -> float:
    import statistics

    if p <= 0.0 or p >= 1.0:
        return math.copysign(math.inf, p - 0.5)
    return statistics.NormalDist().inv_cdf(p)


def _product(
    isl: np.ndarray,
    osl: np.ndarray,
    second: Sequence[float],
    mean_isl: float,
    mean_osl: float,
    cached: float,
    note: str,
) -> Mix:
    """Returns every pair of independent lengths, and what the means of bins lose."""
    longs, shorts = (x.ravel() for x in np.meshgrid(isl, osl, indexing="ij"))
    names = [f"{i}:{o}" for i in range(1, len(isl) + 1) for o in range(1, len(osl) + 1)]
    ones = np.ones(len(longs))
    mix = _mix(names, np.maximum(longs, 1), np.maximum(shorts, 1), cached * ones, ones)
    true = {"pairs": second[0], "context": mean_isl * mean_osl + 0.5 * second[1]}
    return dataclasses.replace(mix, errors=_errors(mix.traffic, true), note=note)


def _moments(isl: np.ndarray, osl: np.ndarray, weight: np.ndarray) -> dict[str, float]:
    return {
        "pairs": float(np.sum(weight * isl**2)),
        "context": float(np.sum(weight * osl * (isl + 0.5 * osl))),
    }


def _errors(traffic: Traffic, true: Mapping[str, float]) -> dict[str, float]:
    kept = _moments(*(np.asarray(x) for x in (traffic.isl, traffic.osl, traffic.weight)))
    return {name: kept[name] / true[name] - 1.0 for name in true}


CUTS = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
"""Quantiles at which a class of requests may be cut."""


def reduce(
    isl: np.ndarray,
    osl: np.ndarray,
    classes: int,
    cached: np.ndarray | None = None,
    note: str = "",
) -> Mix:
    """Returns requests as so many weighted classes, by cuts at quantiles.

    The cut that saves most is made until there are enough classes: in ISL or OSL, at one of
    `CUTS` quantiles of a class. What a cut saves is variance in ISL and OSL, each relative to its
    mean. A class is at its mean, so total tokens are kept.

    Args:
        isl, osl: tokens, shape [requests]; an output of 0 counts as 1.
        classes: how many; fewer where requests are alike.
        cached: cached tokens of each request.
        note: where they come from.
    """
    isl = np.asarray(isl, float)
    osl = np.maximum(np.asarray(osl, float), 1.0)
    hits = np.zeros_like(isl) if cached is None else np.asarray(cached, float)
    if not len(isl) or classes < 1:
        raise InputError("classes: at least one request and one class are needed")
    scaled = np.stack([isl / np.mean(isl), osl / np.mean(osl)])

    def best_cut(rows: np.ndarray) -> tuple[float, np.ndarray]:
        """Returns what the best cut of a class saves, and which of its rows are below it."""
        values = scaled[:, rows]
        before = np.sum(np.var(values, axis=1)) * len(rows)
        best = 0.0, np.zeros(len(rows), bool)
        for axis in (0, 1):
            for edge in np.unique(np.quantile(values[axis], CUTS)):
                low = values[axis] <= edge
                if not low.any() or low.all():
                    continue
                halves = (values[:, low], values[:, ~low])
                after = sum(np.sum(np.var(half, axis=1)) * half.shape[1] for half in halves)
                if before - after > best[0]:
                    best = before - after, low
        return best

    parts = [np.arange(len(isl))]
    cuts = [best_cut(parts[0])]
    while len(parts) < classes:
        worst = int(np.argmax([saved for saved, _ in cuts]))
        saved, low = cuts[worst]
        if saved <= 0.0:
            break
        parts[worst : worst + 1] = [parts[worst][low], parts[worst][~low]]
        cuts[worst : worst + 1] = [best_cut(part) for part in parts[worst : worst + 2]]
    parts.sort(key=lambda rows: (np.mean(isl[rows]), np.mean(osl[rows])))
    means = [[np.mean(x[rows]) for rows in parts] for x in (isl, osl, hits)]
    share = np.minimum(np.array(means[2]) / np.array(means[0]), 1.0 - 1e-9)
    names = [str(i) for i in range(1, len(parts) + 1)]
    mix = _mix(names, means[0], means[1], share, [len(rows) for rows in parts])
    true = _moments(isl, osl, np.full(len(isl), 1.0 / len(isl)))
    return dataclasses.replace(mix, errors=_errors(mix.traffic, true), note=note)
