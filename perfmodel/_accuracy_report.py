"""The error table of a calibration: `docs/accuracy.md`."""

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from perfmodel._calibration_files import chosen, pooled
from perfmodel._measurements import Case, scores


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _percent(score: tuple[float, float, float]) -> list[str]:
    if np.isnan(score[0]):
        return ["–", "–", "–"]
    return [f"{100 * score[0]:.1f}", f"{100 * score[1]:.0f}", f"{100 * score[2]:+.0f}"]


REGIMES = {
    "matmul": {
        "m < 16": "m < 16",
        "16–63": "16 <= m < 64",
        "64–255": "64 <= m < 256",
        "256–1023": "256 <= m < 1024",
        "≥ 1024": "m >= 1024",
    },
    "experts": {
        "balanced": "distribution == 'balanced'",
        "power law": "distribution != 'balanced'",
        "< 64 tokens": "tokens < 64",
        "64–1023": "64 <= tokens < 1024",
        "≥ 1024": "tokens >= 1024",
        "1 rank": "width == inter_size and moe_ep_size == 1",
        "≥ 16 expert ranks": "moe_ep_size >= 16",
    },
    "decode": {
        "bf16 cache": "kv_bytes == 2",
        "fp8 cache": "kv_bytes == 1",
        "≥ 256 MB read": "2 * sequences * kv_heads * keys * width * kv_bytes >= 2.56e8",
        "≤ 64 items": "sequences * kv_heads <= 64",
        "≥ 1024 items": "sequences * kv_heads >= 1024",
    },
    "context": {
        "no window": "keys == queries",
        "window": "keys < queries",
        "8-bit": "narrow == 1",
        "T < 64": "queries < 64",
        "64–1023": "64 <= queries < 1024",
        "≥ 1024": "queries >= 1024",
    },
    "latent_decode": {
        "bf16 cache": "kv_bytes == 2",
        "fp8 cache": "kv_bytes == 1",
        "≥ 256 MB read": "576 * sequences * keys * kv_bytes >= 2.56e8",
        "≤ 64 sequences": "sequences <= 64",
        "≥ 32 heads": "heads >= 32",
    },
    "latent_context": {
        "bf16 cache": "narrow == 0",
        "fp8 cache": "narrow == 1",
        "T < 64": "queries < 64",
        "64–1023": "64 <= queries < 1024",
        "≥ 1024": "queries >= 1024",
        "≥ 32 heads": "heads >= 32",
    },
    "scan": {"≤ 8 sequences": "sequences <= 8", "≥ 128": "sequences >= 128"},
    "context_scan": {
        "one sequence": "sequences == 1",
        "< 1024 tokens in all": "sequences * tokens < 1024",
        "≥ 1024": "sequences * tokens >= 1024",
        "≥ 32 heads": "heads >= 32",
    },
    "all_reduce": {
        "2 ranks": "ranks == 2",
        "8 ranks": "ranks == 8",
        "< 256 kB": "message < 2.56e5",
        "≥ 1 MB": "message >= 1e6",
    },
    "gather": {
        "gather, scatter": "exchange == 0",
        "all-to-all": "exchange == 1",
        "2 ranks": "ranks == 2",
        "8 ranks": "ranks == 8",
        "< 256 kB": "message < 2.56e5",
        "≥ 1 MB": "message >= 1e6",
    },
    "vector": {"≥ 100 MB": "2 * tokens * (reads + writes) >= 1e8"},
}


def table(cases: Sequence[Case]) -> list[str]:
    """Returns a Markdown table of errors per set, with the same errors by regime."""
    regimes = REGIMES[cases[0].kind]
    heads = ["chip", "set", "framework", "used", "fitted", "judged", "median", "p90", "bias"]
    lines = [_row([*heads, "all held out", *regimes]), _row(["---"] * (10 + len(regimes)))]
    for case in cases:
        columns = pd.DataFrame(dict(case.table.columns))
        columns = columns.join(case.rows[case.rows.columns.difference(columns.columns)])
        named = "" if case.kind in ("vector", "gather") else case.detail
        cells = [case.chip, named or "–", case.framework, "yes" if chosen(case) else ""]
        cells += [str(case.seen.sum()), str(case.judged.sum()), *_percent(case.score())]
        whole = scores(case.predicted[case.kept], case.table.seconds[case.kept])
        cells.append(" / ".join(_percent(whole)[:2]))
        for query in regimes.values():
            where = columns.eval(query).to_numpy()
            few = (case.judged & where).sum() < 10
            cells.append("–" if few else " / ".join(_percent(case.score(where))[:2]))
        lines.append(_row(cells))
    for name, group in (("all", cases), ("used", [case for case in cases if chosen(case)])):
        counts = [sum(c.seen.sum() for c in group), sum(c.judged.sum() for c in group)]
        cells = [f"**{name}**", "", "", "", *counts, *_percent(pooled(group))]
        lines.append(_row([*cells, *[""] * (1 + len(regimes))]))
    return [*lines, ""]


def write_report(
    path: Path,
    cases: Sequence[Case],
    transfer: Mapping[str, Sequence[tuple[float, float, float]]],
    power: Mapping[str, float],
) -> None:
    """Writes the error table of every set of every operator kind."""
    of = {kind: [case for case in cases if case.kind == kind] for kind in REGIMES}
    lines = [_INTRODUCTION.format(date=datetime.date.today().isoformat())]
    for kind, title in _TITLES.items():
        lines += [f"## {title}", "", _RULES[kind], "", *table(of[kind])]
    lines += ["## Transfer to a chip left out (bf16 matrix products)", "", _TRANSFER, ""]
    lines += [_row(["chip", "no rows", "bias", "24 rows a set", "own fit"]), _row(["---"] * 5)]
    for chip, (zero, few, own) in transfer.items():
        pairs = [" / ".join(_percent(score)[:2]) for score in (zero, few, own)]
        lines.append(_row([chip, pairs[0], _percent(zero)[2], *pairs[1:]]))
    lines += ["", "## Power", "", _POWER.format(**power), ""]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines), encoding="utf-8")


_INTRODUCTION = """\
# How well kernels are predicted

Written by `python -m perfmodel.calibrate` on {date}; do not edit by hand. All errors are in per
cent on **rows the fit has not seen**: median and 90th percentile ("p90") of |predicted/measured −
1|, and the bias, the median of log(predicted/measured). "Used" marks the set whose constants the
catalogue takes (`chips/fits`); "judged" counts the rows behind the three errors; "all held out"
is median / p90 over every held-out row, those outside the stated range included. Regime columns
are median / p90 of judged rows.

Measured rows are the public operator tables of AIConfigurator (NVIDIA, Apache-2.0, snapshot
095f58a51c4c, 2026-08-21). Peaks, bandwidths, units and caches are those of `chips/catalog`. The
forms of the formulas were chosen while looking at errors on these same held-out groups, so read
every figure as slightly optimistic. Two frameworks that run the same cuBLAS kernels differ by 3
to 5 % among themselves: below that is noise.

The loss is Huber's on log errors (bend at 0.08) with Gaussian priors, solved by damped
Gauss–Newton.
"""

_TITLES = {
    "matmul": "Matrix products",
    "experts": "Expert layers",
    "decode": "Decode attention",
    "context": "Context attention",
    "latent_decode": "Decode attention over latent vectors",
    "latent_context": "Context attention over expanded latent vectors",
    "scan": "Recurrences, token by token",
    "context_scan": "Recurrences of prompts, in chunks",
    "all_reduce": "All-reduce",
    "gather": "All-gather, reduce-scatter, all-to-all",
    "vector": "Element-wise kernels",
}

_RULES = {
    "matmul": """\
Held out: half of the (n, k) groups, whole and the same in every set. Five constants a set; split
time and wave strength shared by all (integer and weight-only kernels, of an older library, take
them as found). Traps:

- L40S and RTX PRO 6000 tables reuse operands from the last-level cache between repeats. A serving
  step reads other weights in between, so rows of less than 1.5 caches that memory would bind are
  neither fitted (but those of less than 0.3 µs of traffic are, they hold the floor) nor judged.
- vLLM's fp8_block rows are bound by the host (floors of 57 to 340 µs): dropped.
- fp8 and nvfp4 rows contain the quantisation of activations (they grow with m·k, not n), whatever
  the source says: the constant `quantise` holds it. TensorRT-LLM's have floors of 11 to 14 µs, of
  kernels that a serving engine fuses; the catalogue takes vLLM's or SGLang's (5 to 7 µs) where
  there is a choice, although vLLM's uneven dispatch of CUTLASS kernels is much harder to predict.
- fp8_block is reported only.""",
    "experts": """\
Held out: every second (hidden, width, top-k, experts) group, whole. Five constants a set, on at
most 4,000 rows of it; a set is one framework's grouped kernel in one format, and kernels with one
shape alone are left out. A row is choosing and sorting, both products, the activation and the sum,
and is predicted by the rows that a step's mixture of experts consists of. Rows and distinct
experts of the rank are means over ten draws of the source's own routing (balanced, or power law on
the busiest rank). In scope: at least 64 columns of each expert on a rank; L40S and RTX PRO 6000
only where the weights exceed 1.5 caches. What explains the times:

- Weights of the experts that a token reached stream at 0.7 to 0.98 of the bandwidth.
- `quantise` is large where a kernel copies rows into the order of experts (CUTLASS and DeepGEMM on
  H100 and Blackwell: 5 to 28 B per element, bf16 too), small where it gathers them (Triton,
  TensorRT-LLM's own).
- `floor` holds the launches of the whole layer, half of them in each of its two products.
- Nemotron's experts have no gate, whatever the kernel is called; ranks write the sums of all
  tokens, and Triton kernels also activate and sum rows of other ranks' experts: rows are predicted
  so. A serving engine that exchanges tokens does not.
- Smaller row tiles, unpadded rows, no split, no waves and a time per tile were tried on H100's and
  B200's largest sets: once copied rows are paid for, each gains less than a point, so the form is
  that of any product.
- H100 TensorRT-LLM in bf16 and per-tensor fp8 takes 3 to 10 times as long in a tenth of its rows
  as in their neighbours (a kernel that was never tuned): hence vLLM's in bf16. A100's Triton and
  Marlin and Blackwell's block-scaled fp8 outside DeepGEMM are badly tuned likewise and not used.
- nvfp4 on B200 and GB200: the launches take 13 µs at one token and 25 at 64, whatever the bytes
  (choosing experts takes more kernels then), which one floor cannot follow.""",
    "decode": """\
Held out: 2 of every 5 (head width, kv heads, heads) groups, whole. Eleven constants a set, bf16
and fp8 caches together. Judged and fitted: at most 32 query heads per kv head, at least 128 keys,
width at most 256. Traps:

- Caches of less than 1.5 last-level caches are read from there between repeats (up to 1.7 times
  the data sheet's bandwidth): left out, except below 2 µs of traffic. A serving step is cold.
- TensorRT-LLM above 32 query heads per kv head is 3 to 7 times slower (a fallback): not covered.
- A100 TensorRT-LLM exceeds the data sheet's bandwidth 1.6 times on the largest caches (aliased
  pages): its `stream` is not fitted and the set not used.
- H100 TensorRT-LLM with a window and a bf16 cache takes twice as long as with fp8: left out.
- Triton fall-backs for odd widths are left out.""",
    "context": """\
Held out: 2 of every 5 (head width, kv heads, heads) groups, whole. Ten constants a set, every
window and arithmetic together. Traps:

- H100, B200 and GB200 under TensorRT-LLM run at their fp8 rate whenever the cache is fp8,
  whatever `attn_dtype` says; such rows count as 8-bit arithmetic.
- L40S and RTX PRO 6000 under TensorRT-LLM fall back to kernels half as fast at width 192 and, in
  8-bit arithmetic, at any width but 128: left out (see "all held out").
- H100 TensorRT-LLM with a window of 128 and an fp8 cache is slower than its window implies:
  judged, not fitted.
- Triton fall-backs and widths above 256 are left out.""",
    "latent_decode": """\
The absorbed form of DeepSeek-V3: heads of 576 over one cached vector of 576, results of 512, on
TensorRT-LLM's kernels alone (rows of whole attention layers are not used). Held out: every second
number of heads, whole, never the largest. Nine constants a set, bf16 and fp8 caches together, from
128 keys on; caches that the last-level cache holds are left out as above. The constants of other
decode attention miss these rows by 14 to 62 % in the median (B200 and H100 at 128 heads: 85 to
150 %), so they have their own. Traps:

- 32 heads take 1.3 to 1.5 times as long as 16 or 128 on B200 and GB200 (another kernel): held out
  on B200, so its 90th percentile is that kernel.
- With an fp8 cache Blackwell multiplies in 8 bits; on H100 `narrow` is below 1.
- A100, L40S and RTX PRO 6000 run a kernel that is not split over keys.""",
    "latent_context": """\
Prompts of DeepSeek-V3 with keys of 192 and values of 128 per head, no cached prefix, TensorRT-LLM's
kernels alone. Held out: every second number of heads, whole, never the largest. Ten constants a set
less the growth with the head width, of which there is one.""",
    "scan": """\
The gated delta rule of Qwen3.5 and Qwen3-Next under vLLM: one fused step a token, states of
32 bits. Held out: every second pair of key and value heads, whole. Two constants a set; `efficiency`
is fixed at the vector units' share, since steps wait for memory. States that the last-level cache
holds are left out as above. TensorRT-LLM's rows would exceed an H100's bandwidth with such states;
the table does not tell what they keep, so they are not used, and chips without vLLM's rows take
another's constants. Convolutions and Mamba-2's recurrence are predicted with the same constants: of
Mamba-2 the table has the convolution alone.""",
    "context_scan": """\
The same layers' prompts, without a prefix: vLLM's chunked kernel (FlashInfer). Held out as above.
Four constants a set. With few sequences and heads a prompt's chunks follow one another at 2 to 3 µs
each; with many the kernel is bound by its traffic. On B200 short prompts of many sequences take
longer than one floor can say.""",
    "all_reduce": """\
Held out: every second message size (interpolation, so optimistic). NCCL (newest version, 16 bit)
gives the four constants of the two-shot form; TensorRT-LLM's own all-reduce then gives the three
of the one-shot form, with the two-shot form as its alternative. L40S and RTX PRO 6000 talk over
PCIe, where a step between 2 and more ranks is missing in the form: best effort. B200's custom
kernel is measured on 8 ranks only, GB200's on 4: how the latency grows with ranks is the prior
there.""",
    "gather": """\
Held out: every second message size (interpolation, so optimistic). NCCL, newest version, 16 bit.
The latency and its growth with the group are fitted; rates and ramp are those of the all-reduce
(its latency would be up to twice too large). Sizes are the whole buffer. Over PCIe the rate falls
with the group in a way that the form lacks: L40S moves 19 GB/s between two chips, 5 among four and
2 among eight, RTX PRO 6000 31 and then 23. So of L40S, beyond two chips, only messages below 64 KiB
are fitted and judged.""",
    "vector": """\
Norms, residual adds, gated activations and rotary embeddings of Vidur (fp16, 2023 kernels,
rounded to 1 µs). Stream is the median over kinds of the median rate in rows of at least 30 µs of
traffic, the floor the median time of the smallest. Odd multiples of 64 tokens are judged. Kinds
differ by three in rate (a plain add reaches 0.85 to 0.98 of the data sheet, a norm 0.33), which
two constants cannot follow.""",
}

_TRANSFER = """\
All sets of a chip are left out, everything is fitted again on the others, and the chip predicted
from its datasheet with the others' mean constants ("no rows"); then with its five constants
fitted to 24 measured rows a set. Most of the first error is one bias per chip: the achieved share
of the peak does not transfer."""

_POWER = """\
P/TDP = i + (1 − i)·min(1, c_c·u_c + c_m·u_m), u the used shares of data-sheet FLOP/s and
bandwidth, from whole-model runs on A100 (Splitwise, 2023; H100 rows hold no power). {rows:.0f}
decode phases lie on a line with i = {running_idle:.2f} (a running chip, above the idle of a
datasheet) and c_m = {memory_activity:.2f}, median error {error:.3f} on the rows fitted, none held
out. c_c = {compute_activity:.2f} ({compute_low:.1f} to {compute_high:.1f}) is the median of
{prompt_rows:.0f} prompt phases whose peak power stays below the limit; peaks set against mean use
make it an upper estimate."""
