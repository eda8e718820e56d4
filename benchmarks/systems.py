"""Serving systems per second: prefill, decode and drafts on three kinds of chip, all numbers."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from benchmarks import _engine
from benchmarks._measure import repeated, timed
from benchmarks._report import Result
from perfmodel import question, speculation, system_search, systems
from perfmodel.compiled import CHAINED, chained
from perfmodel.system_search import BLOCK, Choice, Space

_BUDGET = 1e6
_BLOCKS = 50
COUNT = BLOCK * _BLOCKS


def _asked(drafts: bool) -> systems.SystemAsked:
    pools = {"prefill": "trn2:tp=16", "decode": "h200:tp=8,weights=fp8"}
    given: dict[str, Any] = {}
    if drafts:
        pools["draft"] = "corsair:tp=8,weights=int8"
        given = {"draft": "llama-3.1-8b", "spec": speculation.chain(0.75, 3)}
    where, named = systems.table(pools, None)
    return systems.ask("llama-3.3-70b", named, where, batch=32, isl=4000, osl=1000, **given)


def _choices(pools: int) -> list[Choice]:
    draw = np.random.default_rng(0)
    found = []
    for _ in range(_BLOCKS):
        chips = 2.0 ** draw.integers(0, 4, (BLOCK, pools))
        found.append(
            question.numbers(
                Choice(
                    chips, np.ones_like(chips), draw.integers(1, 5, chips.shape), chips,
                    np.ones_like(chips), draw.integers(1, 257, BLOCK), draw.integers(0, 6, BLOCK),
                    draw.integers(1, 4, BLOCK), np.full(BLOCK, 2048),
                    np.ones(BLOCK), np.ones(BLOCK),
                )
            )
        )  # fmt: skip
    return found


def run(quick: bool) -> Iterator[Result]:
    """Yields rates, and what building the programs takes."""
    repeats = 3 if quick else 10
    jax.config.update("jax_enable_compilation_cache", False)
    for drafts, what in (
        (False, "prefill and decode apart"), (True, "and drafts on a third chip"),
    ):  # fmt: skip
        yield from _measured(_asked(drafts), what, repeats)


def _measured(made: systems.SystemAsked, what: str, repeats: int) -> Iterator[Result]:
    names = tuple(made.pools)
    parts = [made.where.prefill, made.where.attention, made.where.ffn]
    if made.built.draft is not None:
        parts.append(made.where.draft)
    index = tuple(names.index(part) for part in parts)
    space = Space(made, names, index, (), 0, (), (), (), ())
    listed = _choices(len(space.names))
    limits = question.numbers(made.asked.limits)
    rest = (made.asked.network, made.asked.load, made.engine, limits, made.draft)
    first = (made.built, listed[0], *rest)
    program = _engine.build(chained(system_search.program_of(index)), first, CHAINED, 1)

    def all_blocks(thread: int, threads: int) -> None:
        jax.block_until_ready(
            [program.call(made.built, block, *rest) for block in listed[thread::threads]]
        )

    spent = repeated(lambda: timed(lambda: _engine.shared(all_blocks)), repeats)
    per_cpu = f"{COUNT / spent.cpu / 1e6:.2f} M per CPU-second"
    note = f"{per_cpu}; {COUNT:,} systems, trn2, h200 and corsair, blocks of {BLOCK:,}"
    yield Result(f"systems, {what}", COUNT / spent.wall, "1/s", _BUDGET, note)
    note = f"{program.compile.cpu:.2f} CPU-seconds"
    yield Result(f"compile, {what}", program.compile.wall, "s", note=note)
