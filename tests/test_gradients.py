"""Derivatives of every output in every number, against finite differences in float64.

A staircase has the slope of its chord by design. The reference therefore freezes each ceiling at
its distance from its argument, ⌈x⌉ → x + (⌈x₀⌉ − x₀): the same value at x₀ and, around it, the
chord. Minima and maxima have one-sided slopes; a derivative must be one of them, or between.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from jax import Array
from jax.flatten_util import ravel_pytree

from perfmodel import relax
from perfmodel.chips import load_chip
from perfmodel.formats import precision
from perfmodel.models.catalogue import load_model
from perfmodel.plan import Engine, Load, Plan
from perfmodel.relax import traced
from perfmodel.serving import estimate

CHIPS = ("h100", "h200", "b200", "mi300x", "a100", "l40s")
# Loaded here, in float32: chips are remembered, and other tests must not find them in float64.
MACHINES = {chip: load_chip(chip).machine for chip in CHIPS}
OUTPUTS = (
    "ttft", "tpot", "e2e", "longest_gap", "request_rate", "output_rate", "memory_bytes",
    "weight_bytes", "kv_bytes", "chip_power", "power", "energy_per_output_token",
    "energy_per_total_token", "usd_per_output_token", "usd_per_total_token",
)  # fmt: skip
# Of these margins; divisibility is a distance to whole numbers, and has no chord.
MARGINS = (0, 3)

STEP = 1e-6

# A failing example is reported as found: shrinking ten numbers costs minutes and shows no more.
PHASES = (Phase.explicit, Phase.generate)


def design(
    chip: str, model: str, fmt: str, tp: float, stages: float, batch: float, chunk: float,
    isl: float, osl: float, hit: float,
) -> Any:  # fmt: skip
    return traced(
        (
            MACHINES[chip],
            load_model(model).model,
            Load(isl, osl, hit, 0.1),
            Plan(tp * stages, stages, batch, chunk),
            precision(fmt),
            Engine(0.9, 2e9, 16, 0.6e-3, 15e-6, 1e-3, 0.5),
        )
    )


@functools.cache
def shape() -> Callable[[Array], Any]:
    """Returns how a flat vector becomes a design again."""
    return ravel_pytree(design("h100", "llama-3.1-8b", "fp8", 2, 1, 8, 512, 1000, 100, 0.1))[1]


def outputs(flat: Array) -> Array:
    """Returns logarithms of positive outputs and margins as they are, shape [17]."""
    machine, model, load, plan, formats, engine = shape()(flat)
    found = estimate(machine, model, load, plan, formats, engine)
    scores = [jnp.log(getattr(found, name)) for name in OUTPUTS]
    return jnp.stack([*scores, *(found.margins[i] for i in MARGINS)])


class Frozen:
    """Stand-ins for the staircases of `relax` that record, or replay, where they stood."""

    def __init__(self, offsets: Array | None = None) -> None:
        self.replay: Iterator[Array] | None = None if offsets is None else iter(offsets)
        self.seen: list[Array] = []
        self.exact = {"_ceil": relax._ceil, "_floor": relax._floor}

    def stand_in(self, name: str) -> Callable[[Array], Array]:
        def stairs(x: Array) -> Array:
            if self.replay is not None:
                return x + next(self.replay)
            self.seen.append(self.exact[name](x) - x)
            return self.exact[name](x)

        return stairs


def _with_stairs(frozen: Frozen, flat: Array) -> Array:
    with pytest.MonkeyPatch.context() as patch:
        for name in frozen.exact:
            patch.setattr(relax, name, frozen.stand_in(name))
        return outputs(flat)


# Many small programs that run once: compile them cheaply.
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_disable_hlo_passes": "fusion,cpu-instruction-fusion",
}
quick_jit = functools.partial(jax.jit, compiler_options=QUICK)


@quick_jit
def stairs_at(flat: Array) -> Array:
    frozen = Frozen()
    _with_stairs(frozen, flat)
    return jnp.stack(frozen.seen)


@quick_jit
def chords(flats: Array, offsets: Array) -> Array:
    return jax.vmap(lambda flat: _with_stairs(Frozen(offsets), flat))(flats)


values_at = quick_jit(outputs)


@quick_jit
def derivatives(flat: Array) -> Array:
    """Returns the Jacobian in every input, one row per output, by forward mode.

    Reverse mode transposes the same rules, and takes minutes to compile in every number at once;
    that it gives the same is tested in the load and the plan.
    """
    columns = jax.vmap(lambda way: jax.jvp(outputs, (flat,), (way,))[1])
    return columns(jnp.eye(flat.size, dtype=flat.dtype)).T


@quick_jit
def pulled_back(flat: Array, weights: Array) -> Any:
    """Returns the derivative of a weighted sum of outputs in load and plan, by reverse mode."""
    machine, model, load, plan, *rest = shape()(flat)

    def of(load: Load, plan: Plan) -> Array:
        return jnp.dot(weights, outputs(ravel_pytree((machine, model, load, plan, *rest))[0]))

    return jax.grad(of, argnums=(0, 1))(load, plan)


def sizes(flat: Array) -> Array:
    """Returns the step unit of each input: itself, or a small rate of its kind where it is 0."""
    return jnp.where(flat == 0.0, 1e-9, jnp.abs(flat))


box = st.fixed_dictionaries(
    {
        "chip": st.sampled_from(CHIPS),
        "model": st.sampled_from(["llama-3.1-8b", "llama-3.3-70b", "qwen3-32b", "qwen2.5-7b"]),
        "fmt": st.sampled_from(["bf16", "fp8", "int8", "int4"]),
        "tp": st.one_of(st.sampled_from([1.0, 2.0, 8.0, 16.0]), st.floats(1, 16)),
        "stages": st.one_of(st.just(1.0), st.floats(1, 8)),
        "batch": st.one_of(st.just(1.0), st.floats(1, 1000)),
        "chunk": st.floats(16, 16_384),
        "isl": st.floats(1, 30_000),
        "osl": st.floats(2, 4_000),
        "hit": st.one_of(st.just(0.0), st.floats(0, 0.95)),
    }
)

CORNERS = [
    dict(chip="h100", model="llama-3.3-70b", fmt="bf16", tp=1.0, stages=1.0, batch=1.0,
         chunk=64.0, isl=64.0, osl=2.0, hit=0.0),
    # Tiles, pages and domains exactly full; kv heads equal to ranks; batch equal to what fits.
    dict(chip="h100", model="llama-3.3-70b", fmt="bf16", tp=8.0, stages=1.0, batch=64.0,
         chunk=2048.0, isl=2048.0, osl=64.0, hit=0.0),
    dict(chip="l40s", model="llama-3.3-70b", fmt="bf16", tp=2.0, stages=1.0, batch=900.0,
         chunk=512.0, isl=8192.0, osl=512.0, hit=0.5),
    dict(chip="mi300x", model="llama-3.1-8b", fmt="fp8", tp=16.0, stages=4.0, batch=4.0,
         chunk=1.0, isl=1.0, osl=2.0, hit=0.95),
]  # fmt: skip


def index_of(part: int, name: str) -> int:
    """Returns where a field of the load (2) or the plan (3) lies in the flat vector."""
    whole = jax.tree.map(jnp.zeros_like, design(**CORNERS[0]))
    values = {field: getattr(whole[part], field) for field in whole[part].__dataclass_fields__}
    marked = type(whole[part])(**{**values, name: jnp.ones(())})
    return int(np.argmax(ravel_pytree((*whole[:part], marked, *whole[part + 1 :]))[0]))


def domain_index() -> int:
    """Returns where the chips of a fast domain lie in the flat vector."""
    whole = jax.tree.map(jnp.zeros_like, design(**CORNERS[0]))
    marked = eqx.tree_at(lambda d: d[0].fabric.domain, whole, jnp.ones(()))
    return int(np.argmax(ravel_pytree(marked)[0]))


def kinked(where: dict[str, Any]) -> list[int]:
    """Returns the inputs that stand on kinks of their own: whole ranks, one stage or request.

    Two ranks share one link of a mesh, eight fill a domain, kv heads are replicated from their
    number on: several slopes meet there, and each kink takes one of its two. Within a step of a
    kink, differences straddle it.
    """

    def near(a: float, b: float) -> bool:
        return abs(a - b) <= 4.0 * STEP * max(abs(a), abs(b))

    kinks = [index_of(3, "stages")] if near(where["stages"], 1.0) else []
    if near(where["batch"], 1.0) or near(where["batch"], where["stages"]):
        kinks += [index_of(3, "batch"), index_of(3, "stages")]
    if near(where["tp"], round(where["tp"])):
        kinks += [index_of(3, "chips"), index_of(3, "stages"), domain_index()]
    return kinks


def check(where: dict[str, Any], ignored: list[int]) -> None:
    with jax.enable_x64(True):
        flat = ravel_pytree(design(**where))[0].astype(float)
        unit = np.asarray(sizes(flat))
        exact = np.asarray(derivatives(flat)) * unit
        steps = jnp.eye(flat.size) * (STEP * unit)
        around = jnp.concatenate([flat[None], flat + steps, flat - steps])
        values = np.asarray(chords(around, stairs_at(flat)))
    base, up, down = values[0], *np.split(values[1:], 2)
    right, left = ((up - base) / STEP).T, ((base - down) / STEP).T
    scale = 1e-4 + 2e-4 * np.maximum(np.abs(left), np.abs(right))
    assert np.all(np.isfinite(exact)), where
    low, high = np.minimum(left, right) - scale, np.maximum(left, right) + scale
    outside = (exact < low) | (exact > high)
    outside[:, ignored] = False
    wrong = [tuple(w) for w in np.argwhere(outside)]
    assert not wrong, [(where, w, exact[w], left[w], right[w]) for w in wrong[:5]]


@pytest.mark.xdist_group("float64")
@pytest.mark.parametrize("where", CORNERS)
def test_derivatives_at_ties_and_edges(where):
    """Where several kinks meet in one plan variable (one chip, one stage, one request) each takes
    one of its slopes, and their sum need not be a slope of the whole: there, only finite."""
    names = ("chips", "stages", "batch", "chunk")
    check(where, [*(index_of(3, name) for name in names), domain_index()])


@pytest.mark.xdist_group("float64")
@given(where=box)
@settings(max_examples=40, deadline=None, phases=PHASES)
def test_derivatives_equal_finite_differences(where):
    check(where, kinked(where))


@pytest.mark.xdist_group("float32")
@given(where=box)
@settings(max_examples=60, deadline=None, phases=PHASES)
def test_derivatives_are_finite_in_float32(where):
    flat = ravel_pytree(design(**where))[0]
    assert bool(jnp.all(jnp.isfinite(values_at(flat)))), where
    assert bool(jnp.all(jnp.isfinite(derivatives(flat)))), where
    pulled = ravel_pytree(pulled_back(flat, jnp.ones(len(OUTPUTS) + len(MARGINS))))[0]
    assert bool(jnp.all(jnp.isfinite(pulled))), where


@pytest.mark.xdist_group("float32")
def test_no_design_variable_is_dead():
    """Every plan and load variable moves some output."""
    where = dict(chip="h100", model="llama-3.3-70b", fmt="bf16", tp=4, stages=2, batch=200,
                 chunk=700, isl=3000, osl=500, hit=0.2)  # fmt: skip
    flat = ravel_pytree(design(**where))[0]
    rows = np.asarray(derivatives(flat))
    for part, names in (
        (2, ("isl", "osl", "prefix_hit")),
        (3, ("chips", "stages", "batch", "chunk")),
    ):
        for name in names:
            assert np.abs(rows[:, index_of(part, name)]).max() > 0.0, name


@pytest.mark.xdist_group("float32")
def test_reverse_mode_agrees_with_forward_mode():
    where = dict(chip="b200", model="qwen3-32b", fmt="fp8", tp=3.3, stages=1.7, batch=77.0,
                 chunk=900.0, isl=5000.0, osl=700.0, hit=0.3)  # fmt: skip
    flat = ravel_pytree(design(**where))[0]
    weights = jnp.asarray(np.random.default_rng(1).normal(size=len(OUTPUTS) + len(MARGINS)))
    weights = weights.astype(flat.dtype)
    load, plan = pulled_back(flat, weights)
    row = weights @ derivatives(flat)
    for part, found in ((2, load), (3, plan)):
        for name, value in vars(found).items():
            if value is None:
                continue
            expected = float(row[index_of(part, name)])
            assert float(getattr(found, name)) == pytest.approx(expected, rel=2e-3, abs=1e-6), name


@pytest.mark.parametrize(
    ("x", "value", "slope"), [(1.0, 1.0, 1.0), (1.01, 2.0, 1.0), (63.9, 64.0, 1.0)]
)
def test_a_staircase_has_the_slope_of_its_chord(x, value, slope):
    assert float(relax.ceil(jnp.asarray(x))) == value
    assert float(jax.grad(relax.ceil)(x)) == slope
    # The chord from one upper corner of the stairs to a later one.
    far = float(relax.ceil(jnp.asarray(1000.0)) - relax.ceil(jnp.asarray(3.0)))
    assert far / 997.0 == slope


@settings(max_examples=200, deadline=None)
@given(a=st.integers(1, 10_000), b=st.sampled_from([2, 3, 7, 16, 64, 128, 512, 1000]))
def test_ceilings_are_exact_at_whole_quotients_in_float32(a, b):
    assert int(relax.ceil_div(jnp.float32(a), jnp.float32(b))) == relax.ceil_div(a, b)
    assert int(relax.ceil(jnp.float32(a) / jnp.float32(b))) == -(-a // b)
