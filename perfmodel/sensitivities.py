"""What a design's results depend on: exact elasticities in every number of chip and engine.

The elasticity of an output y in an input x is d ln y / d ln x: by how many per cent y changes where
x grows by one. They are derivatives of the program itself (forward mode), not differences.

One program takes one directional derivative, and is called once for each of some 130 inputs.
Measured on two cores, tracing and compiling it takes 5 s, against 9 s for all directions in one
program and as much for reverse mode in the five outputs; the calls take a fifth of a second.
"""

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax import Array

from perfmodel import cache, evaluation, question, results, serving
from perfmodel.efficiencies import Efficiencies
from perfmodel.formats import Precision
from perfmodel.inputs import GROUPS, Inputs, listed
from perfmodel.models.transformer import Model
from perfmodel.plan import Load, Plan

OUTPUTS = (
    "tokens_per_second_user", "output_tokens_per_second_chip", "ttft_s",
    "usd_per_million_output_tokens", "energy_per_output_token_j",
)  # fmt: skip
"""Outputs whose elasticities are given; the first that exists is the main one."""

METHOD = (
    "elasticity d ln(output)/d ln(input): exact derivatives by forward mode, each number of the "
    "machine moved alone (a bandwidth at the same energy per byte). A staircase (tiles, pages, "
    "chunks, requests that fit) has the slope of its chord, and at a tie one of its two slopes "
    "(perfmodel/relax.py). An input at 0 has no elasticity (NaN): see its derivative."
)
"""How to read them, kept with every result."""

_KEPT = (
    *question.Layout._fields, "batch", "chunk", "replicas", "chips", "feasible", "binding",
    "advice",
)  # fmt: skip

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _along(
    inputs: Inputs, ways: Inputs, model: Model, load: Load, plan: Plan, precision: Precision
) -> Array:
    """Returns the derivatives of the outputs in one direction, shape [output]."""

    def outputs(at: Inputs) -> Array:
        found = serving.estimate(
            at.machine, model, load, plan, precision, at.engine, efficiencies=at.efficiencies
        )
        design = results.Design(at.machine, model, plan, precision, found)
        return jnp.stack([results.BY_NAME[name].read(design) for name in OUTPUTS])

    return jax.jvp(outputs, (inputs,), (ways,))[1]


def _derivatives(inputs: Inputs, *rest: Any) -> np.ndarray:
    """Returns d output / d ln input, and for an input at 0 d output / d input; shape [output,
    input]."""
    leaves, structure = jax.tree.flatten(inputs)
    zeros = [np.zeros_like(leaf) for leaf in leaves]
    example = (inputs, inputs, *rest)
    program = cache.program("sensitivity", _along, example)
    fixed, rest = jax.device_put((inputs, rest))
    found = []
    for place, leaf in enumerate(leaves):
        for index in np.ndindex(leaf.shape):
            way = zeros[place].copy()
            # As large as the input: squares of a rate's inverse would leave float32's range.
            way[index] = leaf[index] or 1.0
            ways = jax.tree.unflatten(structure, [*zeros[:place], way, *zeros[place + 1 :]])
            found.append(program(fixed, ways, *rest))
    return np.stack(jax.device_get(found), axis=1).astype(float)


def _same_keywords(of: Callable[_P, _R]) -> Callable[[Callable[..., _R]], Callable[_P, _R]]:
    """Gives a function that passes its arguments on to `of` the signature of that function."""

    def signed(function: Callable[..., _R]) -> Callable[_P, _R]:
        function.__signature__ = inspect.signature(of)  # pyright: ignore[reportFunctionMemberAccess]
        return function  # pyright: ignore[reportReturnType]

    return signed


@_same_keywords(evaluation.estimate)
def sensitivity(*args: Any, **kwargs: Any) -> xr.Dataset:
    """Returns the elasticities of one design's results in every number of its chip and engine.

    Takes what `estimate` takes. Outputs (along `output`): tokens/s per user, output tokens/s per
    chip, TTFT, dollars and joules per output token. Inputs (along `input`): every number of the
    machine, named as its data sheet or fit names it, the engine's constants, and the relative
    speed of each kind of operator (`efficiency.…`, 1 as modelled: +1 % divides the time of those
    operators by 1.01 and leaves their energy).

    Variables: `elasticity`, d ln(output)/d ln(input), NaN for an input at 0; `derivative`,
    d output/d input in SI units, for all; `value`, `unit`, `title`, `group` and `kind` of each
    input; `output_value` and `output_unit`. `attrs["method"]` says what a derivative of a
    staircase is. Elasticities are NaN where the design cannot run, with the constraint in
    `binding` and what helps in `advice`, as `estimate` has them; where only a service level is
    missed they stand.

    Raises InputError for bad input, as `estimate`.

    >>> found = sensitivity("llama-3.3-70b", "h100", tp=8, batch=1, isl=4000, osl=1000)
    >>> user = found.elasticity.sel(output="tokens_per_second_user")
    >>> bool(user.sel(input="memory_bandwidth") > 0.5), found.unit.sel(input="tdp").item()
    (True, 'W')
    """
    bound = inspect.signature(evaluation.estimate).bind(*args, **kwargs)
    bound.apply_defaults()
    model, chip, options = *bound.args, bound.kwargs
    verdict = evaluation.estimate(model, chip, **options)
    asked, design = evaluation.one_design(model, chip, **options)
    first = (asked.machines, asked.precisions, design.plan(asked.network.is_mixture))
    machine, precision, plan = jax.tree.map(lambda leaf: leaf[0], first)
    neutral = question.numbers(Efficiencies())
    inputs = Inputs(machine, question.numbers(asked.engine.engine), neutral)
    names = listed(inputs, asked.chips[0], asked.engine, options["price"] is not None)
    values = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(inputs)]).astype(float)
    # NaN where the design cannot run, and where the output does not exist (no price, one token).
    outputs = np.asarray([float(verdict[name]) for name in OUTPUTS])
    runs = np.isfinite(outputs)
    slopes = np.full((len(outputs), len(values)), np.nan)
    if np.any(runs):
        found = _derivatives(inputs, asked.network, asked.load, plan, precision)
        slopes = np.where(runs[:, None], found, np.nan)
    at_zero = values == 0.0
    sizes = np.where(at_zero, 1.0, values)
    elasticity = np.where(at_zero, np.nan, slopes / outputs[:, None])
    both = ("output", "input")
    texts = {
        "title": ("1", "input in words", [name.title for name in names]),
        "unit": ("1", "unit of the input", [name.unit for name in names]),
        "group": ("1", f"where it belongs: {', '.join(GROUPS)}", [name.group for name in names]),
        "kind": ("1", "what is known of its value", [name.kind for name in names]),
        "value": ("unit", "value of the input", values),
    }
    table = xr.Dataset(
        {
            "elasticity": (both, elasticity, _attrs("1", "d ln(output)/d ln(input)")),
            "derivative": (both, slopes / sizes, _attrs("output_unit/unit", "d output/d input")),
            **{k: ("input", v, _attrs(unit, words)) for k, (unit, words, v) in texts.items()},
            "output_value": ("output", outputs, _attrs("output_unit", "value of the output")),
            "output_unit": (
                "output",
                [results.BY_NAME[name].unit for name in OUTPUTS],
                _attrs("1", "unit of the output"),
            ),
            "better": (
                "output",
                [results.BY_NAME[name].better for name in OUTPUTS],
                _attrs("1", "which way is better"),
            ),
        },
        {
            "output": ("output", list(OUTPUTS), _attrs("1", "output")),
            "input": ("input", [name.name for name in names], _attrs("1", "input")),
        },
    )
    call = question.described("sensitivity", model, chip, **options)
    main = next((name for name, run in zip(OUTPUTS, runs, strict=True) if run), OUTPUTS[0])
    attrs = verdict.attrs | {"call": call, "main": main, "method": METHOD}
    return table.assign(verdict[list(_KEPT)]).assign_attrs(attrs)


def _attrs(unit: str, long_name: str) -> dict[str, str]:
    return {"units": unit, "long_name": long_name}
