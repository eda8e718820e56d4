"""Measured serving runs as a fit takes them: which rows count, and which it never sees.

Reads the public table of InferenceX and NVIDIA runs. The order matters: copies are removed before
rows are split, since a copy on the other side of the split would judge a fit by what it has seen.
"""

import dataclasses
import hashlib
import os
from collections.abc import Sequence

import numpy as np
import pandas as pd

from perfmodel import deployments
from perfmodel.deployments import Deployments

SEED = 0
HELD_OUT = 0.2

_SAME_TPOT, _SAME_TTFT = 0.01, 0.03
_SERIES = (
    "model_path", "system", "backend", "precision", "tp_size", "moe_ep_size",
    "attention_dp_size", "isl", "osl",
)  # fmt: skip
"""What rows of one concurrency series share: they are on one side of the split, all of them."""

_MTP_DATES = ("2026-01-14", "2026-01-28", "2026-02-05", "2026-02-06")


@dataclasses.dataclass(frozen=True)
class Rule:
    """Rows that are left out, as a query, and why; `ttft_only` keeps their TPOT."""

    query: str
    why: str
    ttft_only: bool = False


RULES = (
    Rule("mode != 'agg'", "disaggregated: below"),
    Rule("concurrency != concurrency", "no concurrency"),
    Rule("system == 'gb200' and gpus_total_derived > 8",
         "labelled aggregated on 12 to 72 GPUs; reads like totals of disaggregated runs"),
    Rule("model_path.str.contains('gpt-oss') and system == 'h100_sxm' and concurrency == 512",
         "TPOT of a small batch and TTFT of 20 to 460 s: the server did not run 512 at once"),
    Rule("model_path.str.contains('Qwen3-32B') and system in ('gb200', 'b200_sxm')",
         "TPOT jumps from 8 to 133 ms and back with concurrency; two rows exceed peak compute"),
    Rule("model_path == 'nvidia/Llama-3.1-8B-Instruct-FP8'",
         "implies up to 102 % of peak compute: concurrency is not that of one instance"),
    Rule("model_path.str.contains('DeepSeek') and model_path.str.contains('NVFP4')",
         "off by a factor e either way between release candidates of one engine"),
    Rule("model_path.str.contains('DeepSeek') and backend == 'trtllm' "
         "and measured_date in @dates",
         "unlabelled multi-token prediction: steps twice as long at small batches, on these dates"),
    Rule("model_path.str.contains('DeepSeek') and backend == 'sglang' and system == 'b200_sxm' "
         "and measured_date == '2026-03-25'",
         "mixes runs with and without multi-token prediction on one date"),
    Rule("model_path.str.contains('Qwen3.5') and precision == 'fp8' and moe_ep_size == 1 and "
         "gpus_total_derived == 4 and ((system == 'b200_sxm' and measured_date != '2026-03-24') "
         "or (system == 'b300_sxm' and measured_date == '2026-04-03'))",
         "unlabelled multi-token prediction, by comparison with twins"),
    Rule("model_path.str.contains('Kimi') and system == 'h200_sxm' and tpot_ms > 60 and "
         "concurrency == 16 and osl == 8192", "64 ms where two repeats have 16 ms"),
    Rule("model_path.str.contains('Llama-3.1-8B') and backend == 'trtllm' and "
         "source_kind == 'nvidia_gap_analysis'",
         "TTFT falls with concurrency and grows with the output's length", ttft_only=True),
)  # fmt: skip
"""Traps of the table, in the order they are applied."""


@dataclasses.dataclass(frozen=True, eq=False)
class Runs:
    """Rows that count, understood.

    Fields: `asked`, the rows; `held_out`, a mask of those that a fit must not see; `use_ttft`, of
    those whose TTFT can be believed; `left_out`, how many rows each reason took.
    """

    asked: Deployments
    held_out: np.ndarray
    use_ttft: np.ndarray
    left_out: dict[str, int]


def copies(frame: pd.DataFrame) -> np.ndarray:
    """Returns which rows repeat an earlier one: the same configuration on the same chip, TPOT
    within 1 % and TTFT within 3 % (the same runs appear in several dumps, some rounded)."""
    keys = ["arch", "system", "backend", "precision", "isl", "osl", "concurrency", "gpus"]
    frame = frame.assign(
        arch=frame["model_path"].str.rsplit("/", n=1).str[-1].str.replace("-V3", "-R1"),
        gpus=frame["gpus_total_derived"],
    )
    repeated = np.zeros(len(frame), bool)
    tpot, ttft = np.log(frame["tpot_ms"].to_numpy(float)), np.log(frame["ttft_ms"].to_numpy(float))
    for places in frame.groupby(keys, dropna=False, sort=False).indices.values():
        kept: list[int] = []
        for row in places:
            same = [
                other
                for other in kept
                if abs(tpot[row] - tpot[other]) < _SAME_TPOT
                and abs(ttft[row] - ttft[other]) < _SAME_TTFT
            ]
            repeated[row] = bool(same)
            if not same:
                kept.append(int(row))
    return repeated


def held_out(frame: pd.DataFrame, by: Sequence[str] = _SERIES, seed: int = SEED) -> np.ndarray:
    """Returns which rows are kept from a fit: whole series, by a hash of what they share.

    A series is held out if the first 8 hexadecimal digits of SHA-256 of "seed|its values" are below
    a fifth of their range; so new rows never move old ones across.
    """
    keys = ["|".join(map(str, key)) for key in zip(*(frame[name] for name in by), strict=True)]
    part = {
        key: int(hashlib.sha256(f"{seed}|{key}".encode()).hexdigest()[:8], 16) / 2**32 < HELD_OUT
        for key in set(keys)
    }
    return np.asarray([part[key] for key in keys], bool)


def load(path: str | os.PathLike[str]) -> Runs:
    """Returns the rows of the public table that count."""
    frame = pd.read_csv(path)
    left_out: dict[str, int] = {}
    kept, use_ttft = np.ones(len(frame), bool), np.ones(len(frame), bool)
    for rule in RULES:
        chosen = frame.eval(rule.query, engine="python", local_dict={"dates": _MTP_DATES})
        chosen = np.asarray(chosen, bool) & kept
        left_out[rule.why + (" (TTFT only)" if rule.ttft_only else "")] = int(chosen.sum())
        if rule.ttft_only:
            use_ttft &= ~chosen
        else:
            kept &= ~chosen
    places = np.flatnonzero(kept)
    repeated = copies(frame.iloc[places])
    left_out["copy of another row"] = int(repeated.sum())
    places = places[~repeated]
    frame = frame.iloc[places].reset_index(drop=True)
    asked = deployments.understand(frame)
    for why in asked.status[asked.status != ""]:
        left_out[why] = left_out.get(why, 0) + 1
    return Runs(asked, held_out(frame), use_ttft[places], left_out)
