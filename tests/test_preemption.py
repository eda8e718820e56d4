"""Preemption in closed form: beside a plain model of who has a seat; its limits and derivatives."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import brentq

from perfmodel.plan import Engine, Load
from perfmodel.preemption import Preemption, greed, preemption, request_sizes

ENGINE = Engine(0.9, 0.0, 1, 0.0, 0.0, 0.0, 0.5)


def found(
    isl: Any,
    osl: Any,
    batch: Any,
    fit: Any,
    most: Any = 1e6,
    greedy: Any = 1.0,
    spread: float = 0.0,
) -> Preemption:
    """The closed form where a token takes one byte, one a step; outputs differ by `spread`."""
    isl, osl = (jnp.asarray(x, float) for x in (isl, osl))
    load = Load(isl, osl)
    if spread:
        shares = np.full(8, 0.125)
        lengths = osl * (1.0 + spread * np.linspace(-0.875, 0.875, 8))
        load = Load(isl + 0.0 * lengths, lengths, 0.0, weight=shares)
    size = request_sizes(load, load.isl, load.isl + load.osl)
    live = jnp.asarray(load.while_decoding(load.isl + 0.5 * load.osl))
    numbers = (jnp.asarray(x, float) for x in (fit, batch, most, osl, greedy))
    return preemption(size, live, *numbers)


def seats(isl: int, osl: int, batch: int, fit: float, turns: int) -> tuple[float, float, float]:
    """A row of requests, the oldest first: those whose keys fit grow by a token a step, the ended
    are replaced at the end of the row. Prompts take no time. Returns tokens computed again and
    preemptions per ended request, and how many wait that have had a seat."""
    draw = np.random.default_rng(0)
    memory = fit * (isl + 0.5 * osl)
    # Lengths of 10 to 190 %; (1 + 0.9²/3) times as many keys as the mean length has.
    memory *= 1.0 + 0.27 * osl / (2 * isl + osl)
    want = np.round(osl * draw.uniform(0.1, 1.9, batch))
    made, seated, before = np.zeros(batch), np.zeros(batch, bool), np.zeros(batch, bool)
    again = dropped = ended = waiting = 0.0
    for step in range(turns * osl):
        fits = np.cumsum(isl + made + 1) <= memory
        lost = seated & ~fits
        now = seated & fits if lost.any() else fits
        if step >= turns * osl // 4:
            again += np.sum((isl + made)[now & ~seated & before])
            dropped += np.sum(lost)
            waiting += np.sum(before & ~now)
        seated, before = now, before | now
        made[seated] += 1
        over = made >= want
        if over.any():
            kept, n = ~over, int(over.sum())
            ended += n * (step >= turns * osl // 4)
            new = np.zeros(n)
            made = np.concatenate([made[kept], new])
            want = np.concatenate([want[kept], np.round(osl * draw.uniform(0.1, 1.9, n))])
            seated = np.concatenate([seated[kept], new > 0])
            before = np.concatenate([before[kept], new > 0])
    return again / ended, dropped / ended, waiting / (turns * osl - turns * osl // 4)


@pytest.mark.parametrize(
    "isl, osl, batch, fit",
    [
        (500, 500, 80, 48),
        (200, 400, 100, 48),
        # Several end in a step, and what they leave takes up some of the growth.
        (200, 400, 260, 128),
        (100, 500, 120, 48),
        # Prompts that are long beside outputs: a whole one more must fit, or hardly any is evicted.
        (1000, 100, 24, 16),
        (1000, 100, 24, 16.3),
        (1000, 100, 24, 16.5),
    ],
)
def test_as_a_row_of_seats(isl: int, osl: int, batch: int, fit: float):
    again, times, waiting = seats(isl, osl, batch, fit, 60)
    got = found(isl, osl, batch, fit, spread=0.9)
    assert float(got.again) * isl == pytest.approx(again, rel=0.12, abs=10)
    assert float(got.times) == pytest.approx(times, rel=0.12, abs=0.01)
    # A queue near its limit: slow to settle, and it varies from run to run.
    assert float(got.waiting) == pytest.approx(waiting, rel=0.5, abs=0.2)


def test_the_integral_and_the_root():
    """With memory full and far too little of it, per end: ρ·g preemptions, ω·g that wait."""
    for growth, running in ((0.1, 2000.0), (0.5, 100.0), (1.0, 40.0), (3.0, 100.0), (20.0, 60.0)):
        osl = 1e4
        got = found(osl / growth, osl, 1e5, running)
        ends = np.exp(-running / osl)

        def root(w: float, growth: float = growth) -> float:
            return w * (1.0 - np.exp(-(1.0 + growth) / w)) - growth

        depth: Any = brentq(root, 1e-3 + growth / 2, 1e4)
        kappa = 2.0 * growth * depth / running

        def fewer(x: float, kappa: float = kappa) -> float:
            return np.exp(-x) / np.sqrt(1.0 + kappa * (x - 1.0 + np.exp(-x)))

        g, _ = quad(fewer, 0.0, 50.0)
        assert float(got.again) == pytest.approx(growth * ends, rel=1e-5)
        assert float(got.times) == pytest.approx(growth * ends * g, rel=0.02)
        assert float(got.waiting) == pytest.approx(depth * g, rel=0.03)


def test_nothing_where_there_is_room():
    """To the last bit, so that nothing else moves."""
    for roomy in (
        found(1000, 1000, 40, 100), found(1000, 1000, 1, 1), found(1000, 1000, 400, 200, most=50),
        found(1000, 1000, 100, 40, greedy=0.0),
    ):  # fmt: skip
        assert all(float(value) == 0.0 for value in roomy)


def test_who_preempts():
    whole = Engine(0.9, 0.0, 1, 0.0, 0.0, 0.0, 0.5, reservation=1.0)
    assert float(greed(Load(1, 1), ENGINE)) == 1.0
    assert float(greed(Load(1, 1), whole)) == 0.0
    assert float(greed(Load(1, 1, in_step=1.0), ENGINE)) == 0.0


def test_more_requests_never_preempt_less():
    values = [found(500, 1500, batch, 40) for batch in range(2, 160, 3)]
    for name in ("again", "waiting"):
        line = np.asarray([float(getattr(value, name)) for value in values])
        assert np.all(np.diff(line) >= -1e-5 * line[-1]), name
    # Where not all fit, but for the requests' ages: half of the time memory is full.
    assert float(found(500, 1500, 40, 40).again) == pytest.approx(
        1.5 * np.exp(-40 / 1500), rel=1e-5
    )


@pytest.mark.parametrize("batch", [30.0, 39.0, 40.0, 43.0, 90.0])
@pytest.mark.parametrize("isl, osl", [(4000.0, 400.0), (500.0, 1500.0), (500.0, 1.0)])
def test_derivatives(isl: float, osl: float, batch: float):
    def numbers(at: jax.Array) -> jax.Array:
        return jnp.stack(list(found(at[0], at[1], at[2], at[3])))

    # Half a request beyond a whole number, where its share has no slope.

    with jax.enable_x64(True):
        at = jnp.asarray([isl, osl, batch, 40.5])
        slopes = jax.jacfwd(numbers)(at)
        assert np.all(np.isfinite(slopes))
        for i in range(4):
            step = jnp.zeros(4).at[i].set(1e-5 * at[i])
            by = (numbers(at + step) - numbers(at - step)) / (2e-5 * at[i])
            np.testing.assert_allclose(slopes[:, i], by, rtol=1e-4, atol=1e-7)
