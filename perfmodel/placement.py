"""Pools of chips, the links between them, and which part of the work each pool does.

The work has four parts: `prefill` (prompts, through the whole network), `attention` (of decoding
sequences, with norms, embedding, output head and sampling), `ffn` (their feed-forward layers) and
`draft` (guessing tokens ahead). A placement names the pool of each. Every serving form is such a
table, and nothing else:

    form                 prefill  attention  ffn  draft
    aggregated              A         A       A     A
    prefill–decode          P         D       D     D
    attention–FFN           P         A       F     A
    draft elsewhere         G         G       G     C

Two parts on one pool share its chips, weights and memory, and hand nothing over; parts on different
pools hand over what crosses between them on a link. `perfmodel.system` evaluates any of them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np

from perfmodel.errors import InputError, nearest, shorten
from perfmodel.formats import Precision
from perfmodel.machine import Machine
from perfmodel.plan import Plan
from perfmodel.relax import Real
from perfmodel.speculation import Speculation

PARTS = ("prefill", "attention", "ffn", "draft")
"""Parts of the work, in the order of a placement."""


class Pool(eqx.Module):
    """Equal replicas of one layout of one kind of chip; `plan.replicas` may be fractional.

    `plan.batch` counts for the pool of `attention`: concurrent requests of each of its replicas,
    those in prefill and in hand-over among them. `plan.chunk` counts for that of `prefill`.
    """

    machine: Machine
    plan: Plan
    precision: Precision


class Link(eqx.Module):
    """What joins a replica of one pool to a replica of another.

    Bytes leave through the ports of all chips of a replica and arrive through those of the other
    (`ports` 1), and pass something between them, at `seconds_per_byte` (0: never the slowest).
    `latency` [s] of a message. A link of zeros costs nothing.
    """

    ports: Real = 1.0
    seconds_per_byte: Real = 0.0
    latency: Real = 5e-6


FREE = Link(0.0, 0.0, 0.0)
"""An infinite link."""


class Links(eqx.Module):
    """Links for keys and values, for activations between attention and FFN, and for drafts."""

    kv: Link = Link()
    activations: Link = Link()
    draft: Link = Link()


class System(eqx.Module):
    """What serves: for each part of the work its pool, and what they share.

    Fields:
        prefill, attention, ffn, draft: the pool of each part; `draft` is None without speculation.
        same: 1 where two parts are on one pool, shape [parts, parts].
        links: between pools.
        micro: micro-batches that take turns between attention, FFN and draft (ping-pong); a
            pipeline has at least one for each of its stages.
        streamed: 1 where keys and values are handed over layer by layer while the prompt is
            computed, 0 where after it.
        speculation: how tokens are guessed ahead, None where they are not.
    """

    prefill: Pool
    attention: Pool
    ffn: Pool
    draft: Pool | None
    same: Any
    links: Links
    micro: Real = 1.0
    streamed: Real = 1.0
    speculation: Speculation | None = None

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The pools by part, some of them more than once."""
        found = (self.prefill, self.attention, self.ffn, self.draft)
        return tuple(pool for pool in found if pool is not None)


@dataclasses.dataclass(frozen=True)
class Placement:
    """The table of a serving form: names of pools by part."""

    prefill: str
    attention: str
    ffn: str
    draft: str

    def names(self) -> tuple[str, ...]:
        """Returns the pools in use, each once, in order of the parts.

        >>> prefill_decode("p", "d").names()
        ('p', 'd')
        """
        listed = (self.prefill, self.attention, self.ffn, self.draft)
        return tuple(dict.fromkeys(listed))


def aggregated(pool: str = "pool") -> Placement:
    """Returns the placement of everything on one pool."""
    return Placement(pool, pool, pool, pool)


def prefill_decode(prefill: str = "prefill", decode: str = "decode") -> Placement:
    """Returns prompts on one pool and tokens on another."""
    return Placement(prefill, decode, decode, decode)


def attention_ffn(prefill: str, attention: str, ffn: str) -> Placement:
    """Returns decoding cut in two: attention on one pool, feed-forward layers on another."""
    return Placement(prefill, attention, ffn, attention)


def draft_on(base: Placement, draft: str) -> Placement:
    """Returns a placement with drafts on a pool of their own.

    >>> draft_on(aggregated("gpus"), "wafer")
    Placement(prefill='gpus', attention='gpus', ffn='gpus', draft='wafer')
    """
    return dataclasses.replace(base, draft=draft)


def _same(listed: Sequence[str]) -> np.ndarray:
    return np.asarray([[float(a == b) for b in listed] for a in listed])


def same_pools(placement: Placement) -> np.ndarray:
    """Returns 1 where two parts are on one pool, without drafts, shape [3, 3].

    >>> same_pools(prefill_decode())[0]
    array([1., 0., 0.])
    """
    return _same([placement.prefill, placement.attention, placement.ffn])


def build(
    placement: Placement,
    pools: dict[str, Pool],
    *,
    links: Links | None = None,
    micro: Real = 1.0,
    streamed: Real = 1.0,
    speculation: Speculation | None = None,
) -> System:
    """Returns the system of a placement; its arrays are all that depends on the form.

    Raises: InputError naming a pool that the table has and `pools` lacks.
    """
    listed = [placement.prefill, placement.attention, placement.ffn]
    if speculation is not None:
        listed.append(placement.draft)
    for name in listed:
        if name not in pools:
            raise InputError(f"placement: no pool is named {shorten(name)!r}{nearest(name, pools)}")
    same = _same(listed)
    prefill, attention, ffn, *draft = (pools[name] for name in listed)
    return System(
        prefill=prefill,
        attention=attention,
        ffn=ffn,
        draft=draft[0] if draft else None,
        same=same,
        links=Links() if links is None else links,
        micro=micro,
        streamed=streamed,
        speculation=speculation,
    )


def stacked(systems: Sequence[System]) -> Any:
    """Returns systems of equal structure as one, with a new first axis."""
    return jax.tree.map(lambda *leaves: np.stack([np.asarray(x) for x in leaves]), *systems)
