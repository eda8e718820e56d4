"""The error table of the engine profiles: `docs/serving-accuracy.md`."""

import datetime
from collections.abc import Mapping, Sequence

import numpy as np

from perfmodel._rows import statistics
from perfmodel._serving_runs import RULES, Runs
from perfmodel.engines import FIELDS


def row(values: Sequence[object]) -> str:
    """Returns a line of a Markdown table."""
    return "| " + " | ".join(str(value) for value in values) + " |"


def cells(signed: np.ndarray) -> list[str]:
    """Returns how many errors there are, median and 90th percentile of their sizes, and bias."""
    if not len(signed):
        return ["0", "–", "–"]
    found = statistics(100.0 * signed)
    return [
        str(len(signed)),
        f"{found['median']:.1f} / {found['p90']:.0f}",
        f"{found['bias']:+.0f}",
    ]


def _head(first: Sequence[str]) -> list[str]:
    names = [*first, *(f"{w} {c}" for w in ("TPOT", "TTFT") for c in ("rows", "error", "bias"))]
    return [row(names), row(["---"] * len(names))]


def text(
    runs: Runs,
    constants: Mapping[str, Mapping[str, float]],
    found: Mapping[str, np.ndarray],
    others: Mapping[str, np.ndarray] | None,
) -> str:
    """Returns the report of a fit.

    Args:
        runs: the rows.
        constants: by engine and name.
        found: predicted `ttft` and `tpot` by row [s].
        others: the same from fits that have not seen a row's model, or None.
    """
    asked = runs.asked
    good = asked.status == ""
    usable = {"tpot": good, "ttft": good & runs.use_ttft}
    names = {
        "model": np.asarray([m.name for m in asked.models], dtype=object)[asked.model],
        "chip": np.asarray([c.name for c in asked.chips], dtype=object)[asked.chip],
        "engine": np.asarray([e.name for e in asked.engines], dtype=object)[asked.engine],
        "precision": np.asarray([str(p) for p in asked.precisions], object)[asked.precision],
    }

    def errors(predicted: Mapping[str, np.ndarray], rows: np.ndarray) -> list[str]:
        listed: list[str] = []
        for name in ("tpot", "ttft"):
            signed = 1e3 * predicted[name] / asked.numbers[f"{name}_ms"] - 1.0
            listed += cells(signed[rows & usable[name]])
        return listed

    def table(
        by: Sequence[str], rows: np.ndarray, predicted: Mapping[str, np.ndarray]
    ) -> list[str]:
        keys = sorted(set(zip(*(names[name][rows] for name in by), strict=True)))
        lines = _head(by)
        for key in keys:
            here = rows & np.all([names[n] == k for n, k in zip(by, key, strict=True)], axis=0)
            lines.append(row([*key, *errors(predicted, here)]))
        lines.append(row(["**all**", *[""] * (len(by) - 1), *errors(predicted, rows)]))
        return [*lines, ""]

    held, seen = good & runs.held_out, good & ~runs.held_out
    lines = [_INTRODUCTION.format(date=datetime.date.today().isoformat())]
    lines += ["## Rows not seen, by engine", "", *table(["engine"], held, found)]
    lines += ["## Rows not seen, by model", "", *table(["model"], held, found)]
    lines += ["## Rows not seen, by chip", "", *table(["chip"], held, found)]
    lines += ["## All rows, by set", "", f"Seen by the fit: {seen.sum()} of {good.sum()}.", ""]
    lines += table(["model", "chip", "engine", "precision"], good, found)
    if others is not None:
        lines += ["## Every model left out in turn", "", *table(["model"], good, others)]
    lines += ["## Constants", ""]
    listed = list(constants)
    lines += [row(["constant", "unit", *listed]), row(["---"] * (2 + len(listed)))]
    for field in FIELDS:
        if field.name in constants[listed[0]]:
            values = [f"{constants[engine][field.name]:.3g}" for engine in listed]
            lines.append(row([field.name, field.unit, *values]))
    lines += ["", "## Rows left out", "", row(["rows", "why"]), row(["---"] * 2)]
    known = {rule.why for rule in RULES}
    for why, count in runs.left_out.items():
        ours = why.removesuffix(" (TTFT only)") in known or why.startswith("copy")
        # What is near an unknown name is of no interest here.
        lines.append(row([count, why if ours else f"not covered: {why.split(' (')[0]}"]))
    return "\n".join([*lines, ""])


_INTRODUCTION = """\
# How well serving runs are predicted

Written by `python -m perfmodel.calibrate_serving` on {date}; do not edit by hand. Errors are in
per cent: median / 90th percentile of |predicted/measured − 1|, and the bias, the median signed
error. The engine profiles of `perfmodel/engine_profiles` are fitted to the rows that are not held
out: nine constants an engine, none of a model or a chip. Kernel constants are those of
`docs/accuracy.md` and see none of these rows.

Held out is a fifth of the concurrency series (one model, chip, engine, precision, layout and
lengths), whole, by a hash; copies of a run in several dumps are removed before. The forms of the
formulas were chosen with all rows in view, so read every figure as slightly optimistic. True
repeats of a run differ by 2 % (TPOT) and 7 % (TTFT) in the median; 13 % and 22 % between versions
of an engine.

The measured TTFT is a mean over all requests, the initial burst (a tenth of them) included.
InferenceX draws lengths from 0.8 to 1.0 of the nominal ones: predictions take 0.9. NVIDIA's own
runs have fixed lengths, so that requests of an engine that computes prompts first stay in step;
their token budget, 2048, is inferred.
"""
