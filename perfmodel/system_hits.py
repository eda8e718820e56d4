"""What more prefix hits would be worth to systems: by derivative, and by evaluating them again."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from perfmodel import cache, question, system
from perfmodel.placement import System
from perfmodel.system_space import (
    AXES,
    Choice,
    Space,
    numbers_of,
    score,
    with_choice,
)

MORE = 0.1
"""Share of the prompt tokens not cached that are, in the case evaluated again."""

_BLOCK = 64


def _slopes(
    part_pools: tuple[int, ...],
    base: System,
    choices: Choice,
    model: Any,
    load: Any,
    engine: Any,
    limits: Any,
    draft: Any,
) -> dict[str, Any]:
    """Returns the derivatives of all `AXES` in the share of hits, shape [systems] each."""

    def one(choice: Choice) -> dict[str, Any]:
        made = with_choice(base, part_pools, choice)

        def numbers(hit: Any) -> dict[str, Any]:
            warm = dataclasses.replace(load, prefix_hit=hit)
            found = numbers_of(made, system.evaluate(made, model, warm, engine, limits, draft))
            return {axis: found[axis] for axis in AXES}

        # One input and many results: forwards all of them cost what one does.
        _, slopes = jax.jvp(numbers, (load.prefix_hit,), (jnp.ones_like(load.prefix_hit),))
        return slopes

    return jax.vmap(one)(choices)


@functools.cache
def _slopes_of(part_pools: tuple[int, ...]) -> Any:
    return functools.partial(_slopes, part_pools)


def slopes(space: Space, choices: Choice) -> dict[str, np.ndarray]:
    """Returns the derivative of each of `AXES` in the share of prompt tokens that are cached, at
    each of a list of systems; of several classes of requests, of that of all of them alike.

    Exact but where a number is a staircase, as the chunks of a prompt: there it is the slope of the
    staircase's chord (`perfmodel.relax`).
    """
    count, asked = len(choices.batch), space.made.asked
    engine, limits = space.made.engine, question.numbers(asked.limits)
    found: list[dict[str, np.ndarray]] = []
    for start in range(0, count, _BLOCK):
        rows = np.minimum(np.arange(start, start + _BLOCK), count - 1)
        part = question.numbers(choices.take(rows))
        values = (
            space.made.built, part, asked.network, asked.load, engine, limits, space.made.draft,
        )  # fmt: skip
        name = f"system-hits-{'-'.join(map(str, space.part_pools))}"
        program = cache.program(name, _slopes_of(space.part_pools), values)
        numbers = jax.device_get(program(*values))
        found.append({k: np.asarray(v)[: count - start] for k, v in numbers.items()})
    return {axis: np.concatenate([part[axis] for part in found]) for axis in AXES}


def per_hit(space: Space, choices: Choice, axes: tuple[str, str]) -> dict[str, Any]:
    """Returns the slopes of both axes as variables along `point`."""
    found = slopes(space, choices)
    return {
        f"{axis}_per_hit": (
            "point", found[axis].astype(float),
            {"long_name": f"{AXES[axis][0]}: derivative in the share of prompts that is cached"},
        )
        for axis in axes
    }  # fmt: skip


def if_more(
    space: Space, choices: Choice, values: Mapping[str, np.ndarray], axes: tuple[str, str]
) -> dict[str, Any]:
    """Returns what both axes would gain if a tenth of what is not cached of prompts were, as
    variables along `point`: `values` of the systems, and those evaluated again."""
    load = space.made.asked.load
    more = load.prefix_hit + MORE * (1.0 - load.prefix_hit)
    asked = dataclasses.replace(space.made.asked, load=dataclasses.replace(load, prefix_hit=more))
    found = score(space._replace(made=dataclasses.replace(space.made, asked=asked)), choices)
    about = "relative change if a tenth of the prompt tokens not cached were"
    return {
        f"{axis}_if_more_hits": (
            "point", found[axis].astype(float) / values[axis] - 1.0,
            {"units": "1", "long_name": f"{AXES[axis][0]}: {about}"},
        )
        for axis in axes
    }  # fmt: skip
