"""What a search of systems may choose from: layouts of each pool, chunks, drafts, micro-batches.

Of several pools the choices multiply, so each has fewer; `bounded` says which.
"""

import collections
import itertools
import math
from collections.abc import Sequence
from typing import Any

from perfmodel import question
from perfmodel.models.transformer import Model
from perfmodel.placement import Placement
from perfmodel.question import Layout
from perfmodel.system_space import Space, replicas_of
from perfmodel.systems import PoolAsked, SystemAsked

_CHUNKS = (512, 2048, 8192)
"""Beside the usual one. Most prompts fit the largest."""

_MANY = 500_000
"""Systems that are enumerated in seconds."""


def space_of(
    made: SystemAsked,
    where: Placement,
    max_chips: int,
    batches: Sequence[int],
    drafts: Sequence[int],
    micro: Sequence[int],
    chunks: Sequence[int] | None,
) -> Space:
    """Returns what a search of a placement varies; see `perfmodel.system_search.frontier`."""
    names = tuple(made.pools)
    parts = [where.prefill, where.attention, where.ffn]
    if made.built.draft is not None:
        parts.append(where.draft)
    most = question.whole("max_chips", max_chips)
    near = []
    for name in names:
        network, guesses = made.asked.model.model, name not in parts[:3]
        if guesses and made.draft_name:
            network = question.find_model(made.draft_name).model
        listed = _layouts(network, made.pools[name], most, guesses)
        if name == where.attention and name not in (where.prefill, where.ffn):
            # No experts there: one way to cut them is as good as another.
            listed = _at_end(listed, "ep", min)
        near.append(listed)
    apart = where.ffn != where.attention or (made.built.draft is not None)
    return Space(
        made, names, tuple(names.index(part) for part in parts),
        tuple(near) if len(names) == 1 else tuple(map(_plain, near)),
        most,
        tuple(question.whole("batch", b) for b in batches),
        tuple(drafts) if made.built.speculation is not None else (0,),
        tuple(micro) if apart else (1,),
        _chunks(made, where, chunks),
        near=tuple(near),
    )  # fmt: skip


def _layouts(network: Model, pool: PoolAsked, most: int, guesses: bool) -> tuple[Layout, ...]:
    """Returns the layouts that a replica of a pool may have: chips and stages asked for, or powers
    of 2 that cut the network; expert ranks and attention groups asked for, or all of them."""
    given = Layout(pool.tp, pool.pp, pool.ep, pool.attention_dp, 1, pool.regions)
    cut = pool.ep > 1 or pool.attention_dp > 1
    if cut or (given.chips > 1 or given.regions > 1) and (guesses or not network.is_mixture):
        return (given,)
    if given.chips > 1 or given.regions > 1:
        listed = question.layouts(network, given.chips, (pool.pp,), tps=(pool.tp,))
        return tuple(each._replace(regions=pool.regions) for each in listed)
    sizes = [2**power for power in range(most.bit_length())]
    return tuple(question.layouts(network, most, tps=sizes))


def _plain(layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
    """Returns those of which all ranks of a stage share experts and attention, or each has its own;
    all where there are none. Of several pools there would be too many."""
    return tuple(x for x in layouts if {x.ep, x.attention_dp} <= {1, x.tp}) or layouts


def _chunks(made: SystemAsked, where: Placement, given: Sequence[int] | None) -> tuple[int, ...]:
    """Returns the chunks that prompts may be computed in: that of the pool where it has one, those
    given, or the usual one and a few beside it."""
    pool, usual = made.pools[where.prefill], int(made.built.prefill.plan.chunk)
    [entry] = question.unique_chips([pool.chip])
    own = entry.fields.get("prompt_chunk")
    if pool.chunk is not None or (own is not None and own.value):
        return (usual,)
    listed = (usual, *_CHUNKS) if given is None else given
    return tuple(sorted({question.whole("chunk", chunk) for chunk in listed}))


def bounded(space: Space, chunks: Sequence[int] | None) -> Space:
    """Returns a space, or where it is too large to enumerate in seconds less of it.

    First the usual chunk alone unless `chunks` were asked for, then experts over all ranks of a
    stage alone, and at last attention over all of them alone.
    """
    usual = int(space.made.built.prefill.plan.chunk)
    if _size(space) > _MANY and chunks is None:
        space = space._replace(chunks=(usual,))
    if _size(space) > _MANY:
        space = space._replace(layouts=tuple(_at_end(each, "ep", max) for each in space.layouts))
    if _size(space) > _MANY:
        few = tuple(_at_end(each, "attention_dp", min) for each in space.layouts)
        space = space._replace(layouts=few)
    return space


def _size(space: Space) -> int:
    """Returns how many systems a space has."""
    cuts = [collections.Counter(each.chips for each in listed) for listed in space.layouts]
    rows = sum(
        math.prod(cut[chips] for cut, chips in zip(cuts, sizes, strict=True))
        * len(replicas_of(space, sizes))
        for sizes in itertools.product(*cuts)
    )
    return rows * math.prod(map(len, (*space.choices, space.tiers)))


def _at_end(listed: tuple[Layout, ...], name: str, end: Any) -> tuple[Layout, ...]:
    """Returns the layouts whose degree of a name is the most, or least, of their chips."""
    ends: dict[int, int] = {}
    for each in listed:
        ends[each.chips] = end(ends.get(each.chips, getattr(each, name)), getattr(each, name))
    return tuple(each for each in listed if getattr(each, name) == ends[each.chips])
