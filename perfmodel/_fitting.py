"""Damped Gauss–Newton on log errors, with a Huber loss and Gaussian priors.

Small and dense on purpose: a kernel table has thousands of rows and about ten constants, and a
joint fit some hundred, so one Jacobian and one Cholesky solve per step take milliseconds.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

Constants = Mapping[str, float]
Model = Callable[[Mapping[str, Array], Any, Mapping[str, Array]], Array]
"""(constants, fixed pytree, row columns) → seconds per row."""

HUBER = 0.08
"""Log error at which the loss turns from square to linear; also its scale against the priors."""

_PAD = 4096
"""Rows are padded to a multiple of this, so that sets of one kind share a compiled program."""


class Prior(NamedTuple):
    """What is believed of a constant beforehand, and on which scale it is fitted.

    `link` is "log" for positive constants, "share" (log odds) for those in (0, 1), "linear", or
    "fixed"; `sigma` is on that scale.
    """

    value: float
    sigma: float
    link: Literal["log", "share", "linear", "fixed"] = "log"

    def free(self) -> float:
        """Returns the prior value on the fitted scale."""
        if self.link == "log":
            return float(np.log(self.value))
        if self.link == "share":
            return float(np.log(self.value / (1.0 - self.value)))
        return self.value

    def bind(self, free: float) -> tuple[float, float]:
        """Returns (value, d value/d free) at a point of the fitted scale."""
        if self.link == "log":
            value = float(np.exp(free))
            return value, value
        if self.link == "share":
            value = float(1.0 / (1.0 + np.exp(-free)))
            return value, value * (1.0 - value)
        return free, 0.0 if self.link == "fixed" else 1.0


class Table(NamedTuple):
    """Measured rows of one set: named input columns, seconds, and what the model takes as given."""

    columns: Mapping[str, np.ndarray]
    seconds: np.ndarray
    fixed: Any
    priors: Mapping[str, Prior]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _linearise(
    model: Model, names: tuple[str, ...], values: Array, fixed: Any, columns: Mapping[str, Array]
) -> tuple[Array, Array]:
    def log_seconds(v: Array) -> Array:
        constants = {name: v[i] for i, name in enumerate(names)}
        return jnp.log(model(constants, fixed, columns))

    return log_seconds(values), jax.jacfwd(log_seconds)(values)


def _padded(column: np.ndarray, fill: float) -> Array:
    rows = len(column)
    size = -(-rows // _PAD) * _PAD
    return jnp.asarray(np.pad(column.astype(float), (0, size - rows), constant_values=fill), float)


def _pad_columns(columns: Mapping[str, np.ndarray]) -> dict[str, Array]:
    return {name: _padded(column, float(column[0])) for name, column in columns.items()}


def predict(model: Model, constants: Constants, table: Table) -> np.ndarray:
    """Returns predicted seconds for each row of a table."""
    values = {name: jnp.asarray(value, float) for name, value in constants.items()}
    seconds = jax.jit(model)(values, table.fixed, _pad_columns(table.columns))
    return np.asarray(seconds, dtype=np.float64)[: len(table.seconds)]


def fit(
    model: Model,
    tables: Sequence[Table],
    shared: Mapping[str, Prior] | None = None,
    *,
    steps: int = 60,
) -> tuple[list[dict[str, float]], dict[str, float], float]:
    """Returns the constants of each table, those that all tables share, and the cost reached.

    Minimises Σ ρ(log predicted − log measured)/HUBER² + Σ ((θ − prior)/σ)², with ρ Huber's loss.
    """
    shared = shared or {}
    local = tuple(tables[0].priors)
    names = local + tuple(shared)
    priors = [prior for table in tables for prior in table.priors.values()] + list(shared.values())
    first_shared = len(tables) * len(local)
    places = [
        np.r_[i * len(local) : (i + 1) * len(local), first_shared : len(priors)]
        for i in range(len(tables))
    ]
    columns = [_pad_columns(table.columns) for table in tables]
    measured = [np.log(np.asarray(table.seconds, dtype=np.float64)) for table in tables]
    centre = np.array([prior.free() for prior in priors])
    movable = np.array([prior.link != "fixed" for prior in priors])
    precision = np.array([1.0 / p.sigma**2 if p.link != "fixed" else 1.0 for p in priors])

    def evaluate(free: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        bound = np.array([prior.bind(x) for prior, x in zip(priors, free, strict=True)])
        cost = float(np.sum(precision * (free - centre) ** 2))
        gradient = precision * (free - centre)
        hessian = np.diag(precision)
        for table, place, column, target in zip(tables, places, columns, measured, strict=True):
            log_seconds, jacobian = _linearise(
                model, names, jnp.asarray(bound[place, 0], float), table.fixed, column
            )
            rows = len(target)
            error = np.asarray(log_seconds, dtype=np.float64)[:rows] - target
            slope = np.asarray(jacobian, dtype=np.float64)[:rows] * bound[place, 1]
            size = np.abs(error)
            weight = 1.0 / np.maximum(size / HUBER, 1.0)
            small = np.minimum(size, HUBER)
            cost += float(np.sum(2.0 * small * size - small**2)) / HUBER**2
            weighted = slope * (weight / HUBER**2)[:, None]
            gradient[place] += weighted.T @ error
            hessian[np.ix_(place, place)] += weighted.T @ slope
        return cost, gradient, hessian

    free, damping = centre.copy(), 1e-2
    cost, gradient, hessian = evaluate(free)
    for _ in range(steps):
        system = hessian + damping * np.diag(np.diag(hessian))
        step = np.where(movable, -np.linalg.solve(system, gradient), 0.0)
        step = np.clip(step, -0.7, 0.7)
        tried = evaluate(free + step)
        if not tried[0] < cost:
            damping *= 6.0
            if damping > 1e8:
                break
            continue
        gain = cost - tried[0]
        free = free + step
        cost, gradient, hessian = tried
        damping = max(damping * 0.2, 1e-9)
        if gain < 1e-7 * cost:
            break
    values = [prior.bind(x)[0] for prior, x in zip(priors, free, strict=True)]
    per_table = [
        dict(zip(local, values[i * len(local) : (i + 1) * len(local)], strict=True))
        for i in range(len(tables))
    ]
    return per_table, dict(zip(shared, values[first_shared:], strict=True)), cost
