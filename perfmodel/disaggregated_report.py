"""How well runs with workers of their own for prompts are predicted: a section of a report.

    python -m perfmodel.disaggregated_report RUNS.csv… --report docs/serving-accuracy.md

replaces the section between two marks of the report. Nothing is fitted to these rows.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from perfmodel import deployments, prediction
from perfmodel._serving_report import cells, row
from perfmodel._serving_runs import copies
from perfmodel.deployments import Deployments
from perfmodel.units import MILLISECOND

START, END = "<!-- disaggregated -->", "<!-- /disaggregated -->"

_BUSY, _FULL = 0.5, 0.9
"""Predicted load of the workers of prompts from which they are told apart."""

_WAITING = 0.8
"""Share of the offered requests that decode, measured, below which a run waited for places."""


@dataclasses.dataclass(frozen=True, eq=False)
class Errors:
    """Rows of a table that count, and what is predicted of them.

    Fields: `asked`; `good`, rows that are predicted and measured; signed relative errors of `ttft`,
    `tpot` and `e2e` (of a whole request); `load`, predicted, of the workers of prompts; `decoding`,
    the share of offered requests that decode by Little's law from what was measured; `left_out`,
    how many rows each reason took.
    """

    asked: Deployments
    good: np.ndarray
    ttft: np.ndarray
    tpot: np.ndarray
    e2e: np.ndarray
    load: np.ndarray
    decoding: np.ndarray
    left_out: dict[str, int]

    def of(self, rows: np.ndarray) -> list[str]:
        """Returns the cells of some rows."""
        rows = rows & self.good
        return [cell for error in (self.tpot, self.ttft, self.e2e) for cell in cells(error[rows])]


def errors(asked: Deployments, repeated: int = 0) -> Errors:
    """Returns the errors of rows that were understood."""
    found = prediction.evaluate(asked)
    status = prediction.statuses(asked, found)
    ttft, tpot = (asked.numbers[f"{name}_ms"] * MILLISECOND for name in ("ttft", "tpot"))
    steps = asked.numbers["osl"] - 1.0
    left_out = {"copy of another row": repeated} if repeated else {}
    for why in status[status != "ok"]:
        short = str(why).split(" (")[0]
        left_out[short] = left_out.get(short, 0) + 1
    return Errors(
        asked,
        (status == "ok") & np.isfinite(ttft + tpot),
        found["ttft"] / ttft - 1.0,
        found["tpot"] / tpot - 1.0,
        (found["ttft"] + steps * found["tpot"]) / (ttft + steps * tpot) - 1.0,
        found["prefill_load"],
        steps * tpot / (ttft + steps * tpot),
        left_out,
    )


def load(path: Path) -> Errors:
    """Returns the errors of the disaggregated rows of a table, each run once."""
    frame = pd.read_csv(path)
    frame = _some(frame, deployments.understand(frame).split)
    repeated = np.zeros(len(frame), bool)
    if {"model_path", "gpus_total_derived"} <= set(frame.columns):
        # What has no worker counts is no copy of what has.
        counted = deployments.understand(frame).status == ""
        repeated[counted] = copies(_some(frame, counted))
    frame = _some(frame, ~repeated)
    return errors(deployments.understand(frame), int(repeated.sum()))


def _some(frame: pd.DataFrame, rows: np.ndarray) -> pd.DataFrame:
    return frame.iloc[np.flatnonzero(rows)].reset_index(drop=True)


def spread(asked: Deployments) -> tuple[Deployments, np.ndarray]:
    """Returns the rows with experts spread over all ranks wherever attention is cut into groups,
    and which rows that changes."""
    numbers, changed = dict(asked.numbers), np.zeros(len(asked), bool)
    for pool in ("prefill_", ""):
        groups, ranks = numbers[f"{pool}attention_dp"], numbers[f"{pool}expert_ranks"]
        width = numbers[f"{pool}chips"] / numbers[f"{pool}stages"]
        alone = asked.split & (groups > 1.0) & (ranks == 1.0)
        numbers[f"{pool}expert_ranks"] = np.where(alone, width, ranks)
        changed |= alone
    return dataclasses.replace(asked, numbers=numbers), changed


def _head(first: Sequence[str]) -> list[str]:
    names = [f"{w} {c}" for w in ("TPOT", "TTFT", "E2E") for c in ("rows", "error", "bias")]
    return [row([*first, *names]), row(["---"] * (len(first) + len(names)))]


def _by_set(tables: Sequence[tuple[str, Errors]]) -> list[str]:
    lines = _head(["source", "model", "chip", "engine"])
    for name, found in tables:
        asked = found.asked
        keys = {
            (asked.model[i], asked.chip[i], asked.engine[i]) for i in np.flatnonzero(found.good)
        }
        entries = sorted(
            (asked.models[m].name, asked.chips[c].name, asked.engines[e].name, m, c, e)
            for m, c, e in keys
        )
        for *words, m, c, e in entries:
            here = (asked.model == m) & (asked.chip == c) & (asked.engine == e)
            lines.append(row([name, *words, *found.of(here)]))
        lines.append(row([f"**{name}**", "", "", "", *found.of(found.good)]))
    return [*lines, ""]


def _by_regime(tables: Sequence[tuple[str, Errors]]) -> list[str]:
    lines = _head(["source", "rows with"])
    for name, found in tables:
        numbers = found.asked.numbers
        width = numbers["chips"] / numbers["stages"]
        regimes = {
            f"prompts' workers below {_BUSY:.0%} load": found.load < _BUSY,
            f"between {_BUSY:.0%} and {_FULL:.0%}": (found.load >= _BUSY) & (found.load < _FULL),
            f"{_FULL:.0%} and more": found.load >= _FULL,
            "decode workers of at most 8 chips": width <= 8,
            "decode workers of more": width > 8,
        }
        lines += [row([name, words, *found.of(rows)]) for words, rows in regimes.items()]
    return [*lines, ""]


def _diagnosis(tables: Sequence[tuple[str, Errors]]) -> list[str]:
    lines = _head(["source", "rows"])
    for name, found in tables:
        waiting = (found.load < _BUSY) & (found.decoding < _WAITING)
        lines.append(row([name, "that waited for a place to decode", *found.of(waiting)]))
        lines.append(row([name, "all others", *found.of(~waiting)]))
        other, changed = spread(found.asked)
        if changed.any():
            lines.append(row([name, "EP 1 beside attention DP, as labelled", *found.of(changed)]))
            lines.append(row([name, "the same, experts spread", *errors(other).of(changed)]))
    return [*lines, ""]


def section(paths: Sequence[Path]) -> str:
    """Returns the section on the disaggregated rows of tables."""
    tables = [(path.stem, load(path)) for path in paths]
    lines = [START, _INTRODUCTION, *_by_set(tables), "### By regime", "", *_by_regime(tables)]
    lines += ["### Where it misses", "", _MISSES, *_diagnosis(tables)]
    lines += ["### Rows left out", "", row(["source", "rows", "why"]), row(["---"] * 3)]
    for name, found in tables:
        lines += [row([name, count, why]) for why, count in found.left_out.items()]
    return "\n".join([*lines, "", END, ""])


def replaced(text: str, new: str) -> str:
    """Returns a report with its section replaced; at the end where it had none.

    >>> replaced("a", f"{START} b {END}").splitlines()[-1]
    '<!-- disaggregated --> b <!-- /disaggregated -->'
    """
    if START in text and END in text:
        before, _, rest = text.partition(START)
        after = rest.partition(END)[2].lstrip("\n")
        return before + new + after
    return text.rstrip("\n") + "\n\n" + new if text else new


def kept(old: str, text: str) -> str:
    """Returns a newly written report with the section that the old one had."""
    if START not in old or END not in old:
        return text
    return replaced(text, START + old.partition(START)[2].partition(END)[0] + END + "\n")


def main() -> None:
    """Predicts the disaggregated rows of tables and writes their section of a report."""
    parser = argparse.ArgumentParser(
        prog="python -m perfmodel.disaggregated_report", description=__doc__
    )
    parser.add_argument("runs", type=Path, nargs="+", help="public tables of serving runs")
    parser.add_argument("--report", type=Path, help="Markdown file that has the section")
    options = parser.parse_args()
    new = section(options.runs)
    if options.report:
        old = options.report.read_text(encoding="utf-8") if options.report.exists() else ""
        options.report.write_text(replaced(old, new), encoding="utf-8")
    print(new)


_INTRODUCTION = """\
## Disaggregated deployments

Written by `python -m perfmodel.disaggregated_report`. No constant is fitted to these rows, nor was
one chosen with a part of them held out: chips, engines and networks are those of all other answers.
One choice was made with all of them in view: a request is taken in by two servers, so its fixed
time counts twice (3 to 7 points of TTFT in the median, on every engine of both tables). That
tokens cross once to each node was chosen by other measurements. E2E is
TTFT + (OSL − 1)·TPOT, which is the concurrency over the rate: where prompts' workers are full, TTFT
is what is left of it and magnifies errors of the rate. Nine runs, those on B200 in the second
table, are in both.
"""

_MISSES = f"""\
What is known of the misses, by cause, none of it corrected:

- **Places to decode.** Engines serve at most so many requests at once, a number no table gives. By
  Little's law, runs with prompts' workers below {_BUSY:.0%} load of whose requests fewer than
  {_WAITING:.0%} decode waited for something else: three H100 runs of 6, 9 and 30 requests on three
  workers have 3, 6 and 24 decoding, 1, 2 and 8 a worker; where every worker takes one request and
  as many are offered as there are workers, about 1 − 1/e of them decode, as where requests choose
  workers at random. These rows are told
  apart by what was measured, so the error of the others is no figure of merit.
- **EP 1 beside attention data parallelism.** Taken as labelled it cuts experts of 2,048 columns
  over 32 ranks, 64 each, narrower than the block of 128 that shares a scale in 8 bits: those runs
  cannot have been so. Some runs on B200 are in the table twice, labelled EP 1 and EP 8, with the
  same times. Below are both readings.
- **Hopper.** TensorRT-LLM's TPOT on H100 and H200 is 10 to 35 % above the model, as it is with
  aggregated deployments on H200; over two nodes of H100 more so.
- **Prompts.** Rates of prompt workers that are full are 10 to 30 % above those measured, so queues
  start later; MI355X in MXFP4 is the other way round.
- **Exchanges of experts** are taken as those of NCCL in 16 bits. TensorRT-LLM's own send 8 or 4
  bits and take a half to a third of the time, DeepEP's twice and more (public operator tables, one
  domain). Sending in the format of the experts improves TPOT of these rows by a point and worsens
  TTFT by three, so it waits for constants by kind of exchange.
- **Speculation** is not labelled in the first table and may be on in rows that are faster than
  predicted.
"""

if __name__ == "__main__":
    main()
