"""What a calibration leaves behind: fit files for the catalogue, and sample rows for tests."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from perfmodel._measurements import CHIPS, EXPERT_FORMATS, Case, scores
from perfmodel.chips.constants import CONSTANTS

GENERATIONS = {
    "a100_80gb_sxm": "ampere",
    "h100_sxm": "hopper",
    "l40s": "ada",
    "b200_sxm": "blackwell",
    "gb200": "blackwell",
    "rtx_pro_6000": "blackwell_workstation",
}

SOURCES = {
    "aic-gemm": ("matrix products, table aic_gemm", "NVIDIA", "2026-08-21"),
    "aic-moe": ("expert layers, table aic_moe", "NVIDIA", "2026-08-21"),
    "aic-generation": ("decode attention, table aic_attention_generation", "NVIDIA", "2026-08-21"),
    "aic-context": ("context attention, table aic_attention_context", "NVIDIA", "2026-08-21"),
    "aic-mla": ("attention over latent vectors, table aic_mla", "NVIDIA", "2026-08-21"),
    "aic-linear": ("recurrences, table aic_linear_attention", "NVIDIA", "2026-08-21"),
    "aic-collectives": ("collectives, table aic_collectives", "NVIDIA", "2026-08-21"),
}
_AIC = "GitHub repository ai-dynamo/aiconfigurator, snapshot 095f58a51c4c, Apache-2.0"
_OTHER = {
    "vidur-mlp": (
        "Vidur profiles of layer operators, fp16, A100 and H100",
        "Microsoft Research",
        "2024",
        "GitHub repository microsoft/vidur, compute profiles, MIT",
    ),
    "splitwise": (
        "Splitwise: times and power of whole models on A100 and H100",
        "Microsoft / University of Washington",
        "2023",
        "GitHub repository Mutinifni/splitwise-sim, data/perf_model.csv",
    ),
    "judgement": (
        "Prior of this project where measurements do not transfer between chips",
        "perfmodel",
        "2026",
        "docs/accuracy.md, section on transfer",
    ),
}
_SOURCE_OF = {
    "matmul": "aic-gemm",
    "experts": "aic-moe",
    "decode": "aic-generation",
    "context": "aic-context",
    "latent_decode": "aic-mla",
    "latent_context": "aic-mla",
    "scan": "aic-linear",
    "context_scan": "aic-linear",
    "all_reduce": "aic-collectives",
    "gather": "aic-collectives",
    "vector": "vidur-mlp",
}

CHOICE = {
    ("a100_sxm", "bfloat16"): "sglang",
    ("h100_sxm", "fp8"): "vllm",
    ("l40s", "fp8"): "vllm",
    ("b200_sxm", "fp8"): "vllm",
    ("b200_sxm", "nvfp4"): "vllm",
    ("gb200", "fp8"): "sglang",
    ("gb200", "nvfp4"): "sglang",
    ("a100_sxm", "decode"): "sglang",
    ("h100_sxm", "decode"): "vllm",
    ("b200_sxm", "decode"): "vllm",
    ("a100_sxm", "context"): "sglang",
}
"""The framework whose kernels the catalogue takes, where it is not TensorRT-LLM."""

EXPERT_CHOICE = {
    ("a100_sxm", "bf16"): ("trtllm", "bfloat16 moe_torch_flow"),
    ("h100_sxm", "bf16"): (
        "vllm",
        "bfloat16 vllm_unquantizedfusedmoe_triton_tritonexperts",
    ),
    ("h100_sxm", "fp8"): ("trtllm", "fp8_block moe_torch_flow_cutlass"),
    ("h100_sxm", "w4a16"): (
        "vllm",
        "w4a16_mxfp4 vllm_gptossmxfp4moe_triton_oaitritonmxfp4expertsmonolithic",
    ),
    ("l40s", "bf16"): ("vllm", "bfloat16 vllm_unquantizedfusedmoe_triton_tritonexperts"),
    ("l40s", "fp8"): ("vllm", "fp8 vllm_modeloptfp8moe_triton_tritonexperts"),
    ("l40s", "w4a16"): ("vllm", "w4a16_mxfp4 vllm_gptossmxfp4moe_marlin_marlinexperts"),
    ("b200_sxm", "bf16"): (
        "vllm",
        "bfloat16 vllm_unquantizedfusedmoe_flashinfer_trtllm_trtllmbf16experts",
    ),
    ("b200_sxm", "fp8"): ("trtllm", "fp8_block deepgemm"),
    ("b200_sxm", "fp4"): (
        "vllm",
        "nvfp4 vllm_compressedtensorsw4a4nvfp4moe_flashinfer_trtllm_trtllmnvfp4expertsmonolithic",
    ),
    ("b200_sxm", "w4a16"): (
        "vllm",
        "w4a16_mxfp4 vllm_gptossmxfp4moe_flashinfer_trtllm_mxfp4_bf16_trtllmmxfp4expertsmonolithic",
    ),
    ("gb200", "bf16"): ("sglang", "bfloat16 sglang_flashinfer_trtllm_moe"),
    ("gb200", "fp8"): ("trtllm", "fp8_block deepgemm"),
    ("gb200", "fp4"): ("sglang", "nvfp4 sglang_flashinfer_trtllm_moe"),
    ("rtx_pro_6000_server", "bf16"): ("trtllm", "bfloat16 moe_torch_flow_cutlass"),
    ("rtx_pro_6000_server", "fp8"): ("trtllm", "fp8 moe_torch_flow_cutlass"),
    ("rtx_pro_6000_server", "fp4"): ("trtllm", "nvfp4 moe_torch_flow_cutlass"),
}
"""Framework and grouped kernel whose constants the catalogue takes, by system and kernel kind."""

UNITS = {
    "item_rate": "B/s",
    "single_item_rate": "B/s",
    "quantise": "B",
    "floor": "s",
    "split_latency": "s",
    "split_time": "s",
    "item_time": "s",
    "chunk_time": "s",
    "single_item_time": "s",
    "oneshot_latency": "s",
    "twoshot_latency": "s",
    "twoshot_ramp": "s",
    "gather_latency": "s",
    "vector_floor": "s",
    "serial": "s",
    "launch": "s",
}


@dataclasses.dataclass(frozen=True)
class Record:
    """One constant with its provenance, as a fit file holds it."""

    value: float
    unit: str
    kind: str
    source: str
    note: str = ""
    extra: Mapping[str, float | str] = dataclasses.field(default_factory=dict)

    def lines(self, name: str) -> list[str]:
        entries: dict[str, float | str] = {
            "value": self.value,
            "unit": self.unit,
            "kind": self.kind,
            "source": self.source,
            **self.extra,
        }
        if self.note:
            entries["note"] = self.note
        return [
            f'[constants."{name}"]',
            *(f"{k} = {toml_value(v)}" for k, v in entries.items()),
            "",
        ]


def toml_value(value: float | str) -> str:
    """Returns a value as TOML writes it, numbers with four digits."""
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, int):
        return str(value)
    text = f"{value:.4g}"
    return text if "." in text or "e" in text else text + ".0"


_SCANS = ("scan", "context_scan")


def kernel_kind(case: Case) -> str:
    """Returns the kernel kind of a set of products or expert layers."""
    return EXPERT_FORMATS[case.detail.split(" ")[0]].kind


def chosen(case: Case) -> bool:
    """Returns whether the catalogue takes this set's constants."""
    if case.kind == "matmul" and case.detail == "fp8_block":
        return False
    if case.kind == "experts":
        choice = EXPERT_CHOICE.get((case.system, kernel_kind(case)))
        return (case.framework, case.detail) == choice
    if case.kind == "all_reduce":
        return (case.framework, case.detail) == ("trtllm", "custom")
    if case.kind in ("gather", "vector", "latent_decode", "latent_context", *_SCANS):
        return True
    key = case.detail if case.kind == "matmul" else case.kind
    return case.framework == CHOICE.get((case.system, key), "trtllm")


def _record(case: Case, name: str, value: float, note: str) -> Record:
    middle, high, _ = case.score()
    version = str(case.rows["version"].iloc[0]) if "version" in case.rows else "2024"
    kernel = f", {case.detail}" if case.kind == "experts" else ""
    return Record(
        value,
        UNITS.get(name, "1"),
        "fitted",
        _SOURCE_OF[case.kind],
        note,
        {
            "framework": f"{case.framework} {version}{kernel}",
            "rows": int(case.seen.sum()),
            "held_out": int(case.judged.sum()),
            "error_median": middle,
            "error_p90": high,
        },
    )


def chip_records(
    cases: Sequence[Case], shared: Mapping[str, float], notes: Mapping[str, str]
) -> dict[str, dict[str, Record]]:
    """Returns the constants of each chip, by name, from the sets that the catalogue takes."""
    chips: dict[str, dict[str, Record]] = {chip: {} for chip in GENERATIONS}
    prefixes = {
        "decode": "decode",
        "context": "context",
        "latent_decode": "latent_decode",
        "latent_context": "latent_context",
        **{kind: kind for kind in _SCANS},
        "all_reduce": "fabric",
        "gather": "fabric",
        "vector": "memory",
    }
    groups = {"matmul": "kernels", "experts": "experts"}
    for case in filter(chosen, cases):
        prefix = prefixes.get(case.kind) or f"{groups[case.kind]}.{kernel_kind(case)}"
        for name, value in case.constants.items():
            key = f"{prefix}.{name}"
            note = notes.get(f"{case.chip}.{key}", notes.get(key, ""))
            chips[case.chip][key] = _record(case, name, value, note)
    products = [case for case in cases if case.kind == "matmul" and case.detail not in NOT_JOINT]
    for constants in chips.values():
        constants.update(shared_records(products, shared))
    return {chip: dict(sorted(constants.items())) for chip, constants in chips.items()}


NOT_JOINT = ("sq", "int8_wo", "int4_wo")


def shared_records(cases: Sequence[Case], shared: Mapping[str, float]) -> dict[str, Record]:
    """Returns the constants that all chips and kernels share."""
    middle, high, _ = pooled(cases)
    extra = {
        "framework": f"{len(cases)} sets together",
        "rows": int(sum(case.seen.sum() for case in cases)),
        "held_out": int(sum(case.judged.sum() for case in cases)),
        "error_median": middle,
        "error_p90": high,
    }
    tile = "the form is one 64 by 64 tile; other tiles gained at most 0.3 points"
    records = {
        f"compute.{side}": Record(64.0, "1", "assumed", "judgement", tile)
        for side in ("tile_rows", "tile_columns")
    }
    for name, value in shared.items():
        records[f"compute.{name}"] = Record(
            float(value), UNITS.get(name, "1"), "fitted", "aic-gemm", "", extra
        )
    return {name: record for name, record in records.items() if name in _KNOWN}


_KNOWN = {field.name for field in CONSTANTS}


def pooled(cases: Sequence[Case]) -> tuple[float, float, float]:
    """Returns median, 90th percentile and bias over the judged rows of several sets."""
    return scores(
        np.concatenate([case.predicted[case.judged] for case in cases]),
        np.concatenate([case.table.seconds[case.judged] for case in cases]),
    )


def write_fit(path: Path, name: str, generation: str, records: Mapping[str, Record]) -> None:
    """Writes one fit file, sources at its end."""
    lines = ["[fit]", f'name = "{name}"']
    if generation:
        lines.append(f'generation = "{generation}"')
    lines += ['family = "hbm_gpu"', ""]
    for key, record in records.items():
        lines += record.lines(key)
    for source in sorted({record.source for record in records.values()}):
        if source in SOURCES:
            what, publisher, date = SOURCES[source]
            entry = (f"AIConfigurator operator measurements: {what}", publisher, date, _AIC)
        else:
            entry = _OTHER[source]
        keys = ("title", "publisher", "date", "locator")
        lines.append(f"[sources.{source}]")
        lines += [f"{key} = {toml_value(value)}" for key, value in zip(keys, entry, strict=True)]
        lines.append("")
    path.write_text("\n".join(lines), encoding="utf-8")


_SETS = """\
# Constants of every measured set of kernels, by chip, kind, framework and kernel: what predictions
# of kernel tables take. Written by `python -m perfmodel.calibrate`; do not edit. Rows fitted and
# held out, and errors, as in docs/accuracy.md; forms in perfmodel/machine.py.
"""


def write_sets(path: Path, cases: Sequence[Case]) -> None:
    """Writes the constants of all sets but element-wise ones, which are no engine's, and of
    recurrences, whose tables are not predicted."""
    lines = [_SETS]
    for case in cases:
        if case.kind in ("vector", *_SCANS):
            continue
        middle, high, _ = case.score()
        facts: dict[str, float | str] = {
            "chip": case.chip,
            "kind": case.kind,
            "framework": case.framework,
            "detail": case.detail,
            "rows": int(case.seen.sum()),
            "held_out": int(case.judged.sum()),
            "error_median": middle,
            "error_p90": high,
        }
        known = {k: v for k, v in facts.items() if isinstance(v, str) or np.isfinite(v)}
        lines += ["[[set]]", *(f"{key} = {toml_value(value)}" for key, value in known.items())]
        if case.cache[1] > 1.0:
            # Operands that stay in the last-level cache between repeats, and how much faster.
            lines.append(f"cache_bytes = {toml_value(case.cache[0])}")
            lines.append(f"cache_speed = {toml_value(case.cache[1])}")
        if case.kind == "context":
            # Kernels that multiply in 8 bits whenever the cache is, whatever the table says.
            told = case.rows["attn_dtype"] == "fp8"
            lines.append(f"narrow_by_cache = {int(np.any(case.table.columns['narrow'] != told))}")
        values = (f"{name} = {toml_value(value)}" for name, value in case.constants.items())
        lines += [f"constants = {{ {', '.join(values)} }}", ""]
    path.write_text("\n".join(lines), encoding="utf-8")


def family_records(
    chips: Mapping[str, Mapping[str, Record]],
    assumed: Mapping[str, tuple[float, str]],
    extra: Mapping[str, Record],
) -> dict[str, Record]:
    """Returns defaults for a chip that no table covers: medians over chips, or stated priors."""
    names = sorted({name for constants in chips.values() for name in constants} | set(assumed))
    records: dict[str, Record] = {}
    for name in names:
        field = name.rsplit(".", 1)[-1]
        if name in assumed:
            value, note = assumed[name]
            records[name] = Record(value, UNITS.get(field, "1"), "assumed", "judgement", note)
            continue
        found = [constants[name] for constants in chips.values() if name in constants]
        if name.startswith("fabric."):
            # Links over PCIe are no guide to a switched fabric.
            bridged = ("l40s", "rtx_pro_6000")
            found = [c[name] for chip, c in chips.items() if name in c and chip not in bridged]
        values = [record.value for record in found]
        first = found[0]
        if first.kind == "assumed" or name.startswith("compute."):
            records[name] = first
            continue
        note = f"median of {len(values)} chips, {min(values):.3g} to {max(values):.3g}"
        records[name] = Record(float(np.median(values)), first.unit, "fitted", first.source, note)
    return dict(sorted({**records, **extra}.items()))


def power_records(power: Mapping[str, float]) -> dict[str, Record]:
    """Returns how board power follows the used shares of peak and bandwidth."""
    extra = {"framework": "vllm 2023", "rows": int(power["rows"]), "error_median": power["error"]}
    idle = f"of a line that starts at {power['running_idle']:.2f} of the limit (a running chip)"
    return {
        "power.running": Record(
            power["running_idle"],
            "1",
            "fitted",
            "splitwise",
            "where the line of A100 decode phases starts, at no traffic",
            extra,
        ),
        "power.compute_activity": Record(
            power["compute_activity"],
            "1",
            "fitted",
            "splitwise",
            f"peak power of {power['prompt_rows']:.0f} A100 prompt phases below the limit, "
            f"{power['compute_low']:.1f} to {power['compute_high']:.1f}; peaks against mean use, "
            "so an upper estimate",
            extra,
        ),
        "power.memory_activity": Record(
            power["memory_activity"],
            "1",
            "fitted",
            "splitwise",
            f"slope {idle}; A100 decode phases",
            extra,
        ),
        "power.link_activity": Record(
            0.1, "1", "assumed", "judgement", "not identified; links draw about a tenth of a board"
        ),
    }


def write_sample(path: Path, cases: Sequence[Case], per_set: int) -> None:
    """Writes held-out rows, drawn blindly, of every set that the catalogue takes."""
    parts = []
    for case in cases:
        if case.kind == "vector" or not chosen(case):
            continue
        places = np.flatnonzero(case.judged)
        random = np.random.default_rng(len(places))
        places = np.sort(random.choice(places, min(per_set, len(places)), replace=False))
        part = case.rows.iloc[places].drop(columns=["message_elements"], errors="ignore")
        if case.kind == "context":
            part = part.assign(narrow=case.table.columns["narrow"][places])
        parts.append(part.assign(operator=case.kind, chip=CHIPS[case.system]))
    rows = pd.concat(parts, ignore_index=True)
    first = ["operator", "chip"]
    numbers = [
        c for c in rows.columns if pd.api.types.is_float_dtype(rows[c]) and c != "latency_ms"
    ]
    for column in numbers:
        rows[column] = rows[column].astype("Int64")
    rows["latency_ms"] = rows["latency_ms"].astype(float).round(7)
    rows[first + [c for c in rows.columns if c not in first]].to_csv(path, index=False)
