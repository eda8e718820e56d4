"""How the replicas of a table's deployments are laid out, on one pool or on two.

Where prompts have workers of their own there are two pools: `prefill_*` columns describe the
workers of one, `decode_*` those of the other.
"""

import math
from collections.abc import Mapping

import numpy as np

from perfmodel import question
from perfmodel._rows import Column, Reader, count, text
from perfmodel.engines import EngineEntry
from perfmodel.models.catalogue import ModelEntry

POOLS = ("prefill", "decode")


def _columns(pool: str) -> dict[str, Column]:
    """Returns the columns of one pool of a disaggregated deployment."""
    return {
        f"{pool}_workers": count(
            f"{pool} workers, where disaggregated [{pool}_gpus over the chips of one]",
            f"{pool}_workers", f"{pool}_num_workers",
        ),
        f"{pool}_gpus": count(f"chips of all {pool} workers", f"{pool}_gpus", f"num_{pool}_gpu"),
        f"{pool}_tp": count(
            f"tensor-parallel degree of a {pool} worker [tp]", f"{pool}_tp", f"{pool}_tp_size"
        ),
        f"{pool}_pp": count("its pipeline stages [1]", f"{pool}_pp", f"{pool}_pp_size"),
        f"{pool}_ep": count(
            "its expert-parallel degree [1]",
            f"{pool}_ep", f"{pool}_ep_size", f"{pool}_moe_ep_size",
        ),
        f"{pool}_attention_dp": count(
            "its attention data-parallel degree [1]",
            f"{pool}_attention_dp", f"{pool}_attention_dp_size",
        ),
        f"{pool}_dp_attention": text(
            "true where every rank attends to sequences of its own", f"{pool}_dp_attention"
        ),
    }  # fmt: skip


FIELDS: Mapping[str, Column] = {
    name: column for pool in POOLS for name, column in _columns(pool).items()
}
"""Columns of the workers of disaggregated deployments."""

Layout = dict[str, np.ndarray]


def plans(
    reader: Reader,
    split: np.ndarray,
    models: list[ModelEntry],
    model: np.ndarray,
    profiles: list[EngineEntry],
    profile: np.ndarray,
) -> Layout:
    """Returns how replicas are laid out, from the degrees that a table has.

    A stage has as many chips as the largest degree; attention groups and experts are cuts of the
    same chips, not more of them. Columns are chips, stages, expert_ranks, attention_dp and replicas
    of what decodes, `prefill_…` of what computes prompts, the same but for rows that are `split`,
    and batch: concurrent requests of a replica that decodes, those in prefill among them.
    """
    reader.fault(~split & (reader.texts("tp") == ""), "missing tp")
    missing = _missing(reader)
    reader.fault(split & (missing != ""), lambda row: str(missing[row]))
    reader.fault(reader.texts("concurrency") == "", "no concurrency")
    routed = np.asarray([entry.model.is_mixture for entry in models] or [False])[model]
    vllm = np.asarray([entry.name == "vllm" for entry in profiles] or [False])[profile]
    whole = _whole(reader, ~split, routed, vllm)
    pools = {pool: _pool(reader, pool, split, routed) for pool in POOLS}

    def check(place: int, *degrees: float) -> None:
        question.check_degrees(models[place], *map(int, degrees))

    found: Layout = {}
    for name in whole:
        found[name] = np.where(split, pools["decode"][name], whole[name])
        found[f"prefill_{name}"] = np.where(split, pools["prefill"][name], whole[name])
    for start in ("prefill_", "") if models else ():
        width = found[f"{start}chips"] / found[f"{start}stages"]
        ranks, groups = found[f"{start}expert_ranks"], found[f"{start}attention_dp"]
        reader.fault(
            (groups > 1) & ~routed, "attention data parallelism: covered with experts only"
        )
        reader.entries([model, width, found[f"{start}stages"], ranks, groups], check)
    concurrency = reader.numbers("concurrency")
    return found | {"batch": np.maximum(concurrency / found["replicas"], 1.0)}


def _missing(reader: Reader) -> np.ndarray:
    """Returns what is not known of disaggregated rows, "" where nothing is missing."""
    words = np.full(len(reader.status), "", dtype=object)
    given = [
        (reader.texts(f"{pool}_workers") != "") | (reader.texts(f"{pool}_gpus") != "")
        for pool in POOLS
    ]
    bare = np.asarray(reader.texts("tp") == "")
    for pool, counted in zip(POOLS, given, strict=True):
        degree = bare & (reader.texts(f"{pool}_tp") == "")
        words[(words == "") & degree] = f"disaggregated without {pool}_tp"
        words[~counted] = f"disaggregated without worker counts ({pool}_workers or {pool}_gpus)"
    neither = ~given[0] & ~given[1]
    words[neither] = "disaggregated without worker counts (prefill_workers and decode_workers)"
    return words


def _stage(tp: np.ndarray, pp: np.ndarray, ep: np.ndarray, dp: np.ndarray) -> Layout:
    width = np.maximum(np.maximum(tp, dp), ep)
    return {"chips": width * pp, "stages": pp, "expert_ranks": ep, "attention_dp": dp}


def _whole(reader: Reader, rows: np.ndarray, routed: np.ndarray, vllm: np.ndarray) -> Layout:
    """Returns the layout of rows that decode where they compute prompts.

    What `gpus` has beyond a replica are more of them, which share the load; where it has fewer, the
    degrees count chips twice and `gpus` is right (public tables do both).
    """
    tp, pp, ep, dp = (reader.numbers(name) for name in ("tp", "pp", "ep", "attention_dp"))
    gpus = reader.numbers("gpus", math.nan)
    # vLLM counts data-parallel ranks apart from tp; where both are given the public tables show
    # the same values under tp alone, so there they are labels of the same ranks.
    dp = np.where(vllm & (tp > 1), 1.0, dp)
    ep = np.where(routed, ep, 1.0)
    found = _stage(tp, pp, ep, dp)
    stage = found["chips"]
    given = np.where(np.isnan(gpus), stage, gpus)
    chips = np.minimum(stage, given)
    reader.fault(rows & (given % chips != 0), "gpus is no multiple of the chips of a replica")
    width = chips / pp
    return found | {
        "chips": chips,
        "expert_ranks": np.minimum(ep, width),
        "attention_dp": np.minimum(dp, width),
        "replicas": np.maximum(np.floor(given / chips), 1.0),
    }


def _pool(reader: Reader, pool: str, rows: np.ndarray, routed: np.ndarray) -> Layout:
    """Returns the layout of one pool of rows that are disaggregated."""
    usual = np.where(reader.texts(f"{pool}_tp") == "", reader.numbers("tp"), np.nan)
    tp = reader.numbers(f"{pool}_tp")
    tp = np.where(np.isnan(usual), tp, usual)
    pp, ep, dp = (reader.numbers(f"{pool}_{name}") for name in ("pp", "ep", "attention_dp"))
    ep = np.where(routed, ep, 1.0)
    flags = reader.texts(f"{pool}_dp_attention").astype(str)
    every = np.isin(np.char.lower(flags), ("true", "1", "1.0", "yes"))
    dp = np.where(every, np.maximum(np.maximum(tp, ep), dp), dp)
    found = _stage(tp, pp, ep, dp)
    gpus = reader.numbers(f"{pool}_gpus", math.nan)
    workers = reader.numbers(f"{pool}_workers", math.nan)
    workers = np.where(np.isnan(workers), gpus / found["chips"], workers)
    workers = np.where(np.isnan(workers), 1.0, workers)
    odd = rows & ~np.isnan(gpus) & (workers * found["chips"] != gpus)
    reader.fault(odd, f"{pool}_gpus is not {pool}_workers of the chips of one")
    return found | {"replicas": np.maximum(workers, 1.0)}
