"""Fits the kernel constants of chips to public operator measurements.

The physics fitted is the physics used: every residual goes through `matmul_parts`,
`decode_attention_parts`, `context_attention_parts`, `scan_parts`, `all_reduce_seconds`,
`all_gather_seconds`, `vector_usage` and the expert rows of `MixtureOfExperts`. Run

    python -m perfmodel.calibrate OPERATORS --out chips/fits --report docs/accuracy.md \\
        --sample tests/data/kernels.csv

with the folder of the operator tables to write everything again.
"""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pandas as pd
from jax import Array

from perfmodel import _accuracy_report as report
from perfmodel import _calibration_files as output
from perfmodel import _expert_fits as expert_fits
from perfmodel import _fitting
from perfmodel import _latent_fits as latent_fits
from perfmodel import _measurements as measurements
from perfmodel import _scan_fits as scan_fits
from perfmodel._fitting import Prior, Table
from perfmodel._measurements import SHARED, Case, bare_machine, in_seconds, select, sets
from perfmodel.fabric import all_gather_seconds, all_reduce_seconds
from perfmodel.machine import (
    Machine,
    Rank,
    context_attention_parts,
    decode_attention_parts,
    matmul_parts,
    vector_usage,
)
from perfmodel.operators import KERNELS, Attention, Matmul, Vector


def matmul_seconds(constants: Mapping[str, Array], fixed: Any, row: Mapping[str, Array]) -> Array:
    """Returns seconds of matrix products for trial constants."""
    machine, one_hot = fixed
    ones = jnp.ones(len(KERNELS))
    names = ("efficiency", "stream", "floor", "split_latency", "quantise")
    kernels = dataclasses.replace(machine.kernels, **{n: constants[n] * ones for n in names})
    compute = dataclasses.replace(
        machine.compute,
        split_time=constants["split_time"],
        wave=constants["wave"],
    )
    machine = dataclasses.replace(machine, kernels=kernels, compute=compute)
    op = Matmul(
        "matmul",
        "decode/ffn",
        rows=row["m"],
        columns=row["n"],
        inner=row["k"],
        weight_bytes=row["weight_bytes"],
        activation_bytes=row["activation_bytes"],
        column_bytes=row["column_bytes"],
        kernel=one_hot,
    )
    return matmul_parts(op, Rank(machine)).total


def _attention(phase: Any, row: Mapping[str, Array]) -> Attention:
    return Attention(
        "attention",
        f"{phase}/attention",
        phase=phase,
        sequences=row["sequences"],
        queries=row["queries"],
        keys=row["keys"],
        pairs=row["pairs"],
        heads=row["heads"],
        kv_heads=row["kv_heads"],
        qk_width=row["width"],
        v_width=row["width"],
        kv_bytes=row["kv_bytes"],
        narrow=row["narrow"],
    )


def decode_seconds(
    constants: Mapping[str, Array], machine: Machine, row: Mapping[str, Array]
) -> Array:
    """Returns seconds of decode attention for trial constants."""
    decode = dataclasses.replace(machine.decode, **constants)
    return decode_attention_parts(
        _attention("decode", row), Rank(dataclasses.replace(machine, decode=decode))
    ).total


def context_seconds(
    constants: Mapping[str, Array], machine: Machine, row: Mapping[str, Array]
) -> Array:
    """Returns seconds of context attention for trial constants."""
    context = dataclasses.replace(machine.context, **constants)
    return context_attention_parts(
        _attention("prefill", row), Rank(dataclasses.replace(machine, context=context))
    ).total


_ATTENTION: Mapping[str, _fitting.Model] = {
    "decode": decode_seconds,
    "context": context_seconds,
    "latent_decode": latent_fits.latent_decode_seconds,
    "latent_context": latent_fits.latent_context_seconds,
}


def fit_matmuls(cases: list[Case]) -> dict[str, float]:
    """Fits all sets together, filling the cases in; returns the constants that they share.

    Integer and weight-only kernels are of another make and take the shared constants as found.
    """
    main = [case for case in cases if case.detail not in ("sq", "int8_wo", "int4_wo")]
    rest = [case for case in cases if case not in main]
    fitted, shared, _ = _fitting.fit(matmul_seconds, [case.training() for case in main], SHARED)
    fixed = _given(shared)
    for case in rest:
        fitted += _fitting.fit(matmul_seconds, [case.training()], fixed)[0]
    for case, constants in zip(main + rest, fitted, strict=True):
        case.constants = constants
        case.predicted = _fitting.predict(matmul_seconds, constants | shared, case.table)
    return shared


def leave_chips_out(
    cases: Sequence[Case],
) -> dict[str, list[tuple[float, float, float]]]:
    """Returns, per chip, bf16 errors without its rows, with 24 rows a set, and of its own fit.

    The prior is the mean over the other chips (each chip's sets averaged first) on log scale.
    """
    products = [case for case in cases if case.detail == "bfloat16"]
    result = {}
    for chip in dict.fromkeys(case.chip for case in products):
        own = [case for case in products if case.chip == chip]
        others = [case for case in products if case.chip != chip]
        fitted, shared, _ = _fitting.fit(
            matmul_seconds, [case.training() for case in others], SHARED
        )
        names = [name for name in fitted[0] if name != "quantise"]
        logs = np.log([[constants[name] for name in names] for constants in fitted])
        chips = np.array([case.chip for case in others])
        mean = np.mean([logs[chips == other].mean(0) for other in sorted(set(chips))], axis=0)
        given = _given(shared)
        zero, few = [], []
        for case in own:
            constants = {**dict(zip(names, np.exp(mean), strict=True)), "quantise": 0.0}
            zero.append(
                dataclasses.replace(
                    case, predicted=_fitting.predict(matmul_seconds, constants | shared, case.table)
                )
            )
            seen = np.flatnonzero(case.seen)
            seen = np.random.default_rng(0).choice(seen, 24, replace=False)
            small = dataclasses.replace(case, seen=np.isin(np.arange(len(case.seen)), seen))
            training = small.training()
            moved = {
                name: prior if prior.link == "fixed" else prior._replace(value=constants[name])
                for name, prior in training.priors.items()
            }
            (tuned,), _, _ = _fitting.fit(matmul_seconds, [training._replace(priors=moved)], given)
            small.predicted = _fitting.predict(matmul_seconds, tuned | shared, case.table)
            few.append(small)
        result[chip] = [output.pooled(group) for group in (zero, few, own)]
    return result


DECODE_STARTS = tuple({"split_keys": keys} for keys in (256.0, 1024.0, 4096.0))
CONTEXT_STARTS = tuple(
    {"query_tile": tile, "diagonal": diagonal}
    for tile, diagonal in ((64.0, 100.0), (128.0, 400.0), (256.0, 400.0))
)


def fit_attention(cases: list[Case], starts: Sequence[Mapping[str, float]]) -> None:
    """Fits each case by itself from each start (staircases have valleys); the cheapest stays."""
    model = _ATTENTION[cases[0].kind]
    for case in cases:
        tried = []
        for start in starts:
            training = case.training()
            moved = {name: training.priors[name]._replace(value=start[name]) for name in start}
            training = training._replace(priors={**training.priors, **moved})
            (constants,), _, cost = _fitting.fit(model, [training])
            tried.append((cost, constants))
        case.constants = min(tried, key=lambda pair: pair[0])[1]
        case.predicted = _fitting.predict(model, case.constants, case.table)


def traffic_of_products(row: Mapping[str, Any]) -> Any:
    """Returns the bytes that matrix products move [B]."""
    m, n, k = (row[name] for name in ("m", "n", "k"))
    weights = n * (k * row["weight_bytes"] + row["column_bytes"])
    return weights + m * (k * row["activation_bytes"] + 2 * n)


def traffic_of_decode(row: Mapping[str, Any]) -> Any:
    """Returns the bytes that calls of decode attention move [B]."""
    return row["sequences"] * _attention("decode", row).sequence_traffic()


_CACHE_SHARES = (0.1, 0.25, 0.5, 0.75, 1.0, 1.25)
_CACHE_SPEEDS = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)


def fit_cache(
    cases: Sequence[Case], seconds: Any, bytes_: Any, shared: Mapping[str, float]
) -> None:
    """Finds how tables of warm systems are served from the cache, filling it in.

    Operands of a repeated launch that fit the last-level cache come from there, in part of the
    shapes. Two numbers, by the median error of rows that are not held out, warm ones included. A
    step streams other weights in between, so this is of the tables and not of the machine.
    """
    for case in cases:
        if case.system not in measurements.WARM:
            continue
        fixed = case.table.fixed
        machine = fixed[0] if isinstance(fixed, tuple) else fixed
        size = bytes_(case.table.columns)
        capacity = measurements.sheet_values(case.system)["cache_capacity"]
        best = (np.inf, 0.0, 1.0)
        for speed in _CACHE_SPEEDS:
            memory = machine.memory
            fast = dataclasses.replace(memory, bandwidth=memory.bandwidth * speed)
            fast = dataclasses.replace(machine, memory=fast)
            given = (fast, *fixed[1:]) if isinstance(fixed, tuple) else fast
            table = case.table._replace(fixed=given)
            warm = _fitting.predict(seconds, {**case.constants, **shared}, table)
            for share in _CACHE_SHARES:
                found = np.where(size < share * capacity, warm, case.predicted)
                error = np.abs(np.log(found / case.table.seconds))[~case.kept]
                best = min(best, (float(np.median(error)), share * capacity, speed))
        case.cache = best[1:]


ONESHOT = {
    "oneshot_latency": Prior(4e-6, 0.5),
    "oneshot_growth": Prior(0.15, 0.3, "linear"),
    "oneshot_efficiency": Prior(0.5, 0.5),
}
TWOSHOT = {
    "twoshot_latency": Prior(18e-6, 0.5),
    "twoshot_growth": Prior(0.6, 0.4, "linear"),
    "twoshot_efficiency": Prior(0.8, 0.3),
    "twoshot_ramp": Prior(7e-6, 0.6),
}
_NO_ONESHOT = {"oneshot_latency": 1.0, "oneshot_growth": 0.0, "oneshot_efficiency": 1.0}


def _given(values: Mapping[str, float]) -> dict[str, Prior]:
    return {name: Prior(value, 1.0, "fixed") for name, value in values.items()}


def reduce_seconds(
    constants: Mapping[str, Array], machine: Machine, row: Mapping[str, Array]
) -> Array:
    """Returns seconds of all-reduces for trial constants."""
    fabric = dataclasses.replace(machine.fabric, **constants)
    return all_reduce_seconds(row["message"], row["ranks"], fabric)


def fit_all_reduce(rows: pd.DataFrame) -> list[Case]:
    """Returns cases for NCCL (the two-shot form alone) and each framework's own all-reduce.

    The two-shot constants come from NCCL; then the one-shot ones from the custom kernel with the
    two-shot form as its alternative. Every second message size is held out.
    """
    wanted = (rows["op"] == "all_reduce") & rows["dtype"].isin(["half", "bfloat16"])
    rows = select(rows, wanted)
    cases = []
    for (system,), part in sets(rows, ["system"]):
        two: dict[str, float] = {}
        custom = part.loc[part["library"] == "custom", "framework"].astype(str)
        # TensorRT-LLM's first: the catalogue takes its constants.
        own = sorted(set(custom), key=lambda name: (name != "trtllm", name))
        for library, maker in (("nccl", None), *(("custom", name) for name in own)):
            chosen = select(part, part["library"] == library)
            if maker is not None:
                chosen = select(chosen, chosen["framework"] == maker)
            chosen = select(chosen, chosen["version"] == max(chosen["version"].astype(str)))
            rank = chosen.groupby("num_gpus", observed=True)["message_bytes"].rank("dense")
            kept = rank.to_numpy() % 2 == 0
            columns = {
                "message": chosen["message_bytes"].to_numpy(float),
                "ranks": chosen["num_gpus"].to_numpy(float),
            }
            priors = {**ONESHOT, **_given(two)} if two else {**TWOSHOT, **_given(_NO_ONESHOT)}
            table = Table(columns, in_seconds(chosen), bare_machine(system), priors)
            framework = str(chosen["framework"].iloc[0])
            case = Case("all_reduce", system, framework, library, chosen, table, ~kept, kept, kept)
            ((case.constants,), _, _) = _fitting.fit(reduce_seconds, [case.training()])
            case.predicted = _fitting.predict(reduce_seconds, case.constants, table)
            if library == "nccl":
                two = {name: case.constants[name] for name in TWOSHOT}
            cases.append(case)
    return cases


GATHER = {
    "gather_latency": Prior(14e-6, 0.5),
    "gather_growth": Prior(0.4, 0.3, "linear"),
}


def gather_seconds(
    constants: Mapping[str, Array], machine: Machine, row: Mapping[str, Array]
) -> Array:
    """Returns seconds of all-gathers, reduce-scatters and all-to-alls for trial constants.

    Inside one domain the three are alike.
    """
    fabric = dataclasses.replace(machine.fabric, **constants)
    return all_gather_seconds(row["message"], row["ranks"], fabric)


def fit_gathers(rows: pd.DataFrame, reduces: Sequence[Case]) -> list[Case]:
    """Returns a case per system of NCCL's (newest, 16 bit) collectives that move data once.

    Their latency is their own, all else that of the system's all-reduces. Every second message
    size is held out.
    """
    kinds = ["all_gather", "reduce_scatter", "all_to_all"]
    wanted = (rows["library"] == "nccl") & rows["op"].isin(kinds) & (rows["dtype"] == "half")
    given = {case.system: case.constants for case in reduces if output.chosen(case)}
    cases = []
    for (system,), part in sets(select(rows, wanted), ["system"]):
        part = select(part, part["version"] == max(part["version"].astype(str)))
        sizes = part.groupby(["op", "num_gpus"], observed=True)["message_bytes"]
        kept = sizes.rank("dense").to_numpy() % 2 == 0
        columns = {
            "message": part["message_bytes"].to_numpy(float),
            "ranks": part["num_gpus"].to_numpy(float),
            "exchange": (part["op"] == "all_to_all").to_numpy(float),
        }
        priors = {**GATHER, **_given(given[system])}
        table = Table(columns, in_seconds(part), bare_machine(system), priors)
        scope = np.ones(len(part), dtype=bool)
        if system == "l40s":
            # More than two of its chips share the host's bridge, a quarter of a pair's rate each
            # of four and a tenth of eight, which the form lacks.
            scope = (columns["ranks"] == 2) | (columns["message"] < 2**16)
        seen, judged = scope & ~kept, scope & kept
        case = Case("gather", system, "nccl", "nccl", part, table, seen, judged, kept)
        ((constants,), _, _) = _fitting.fit(gather_seconds, [case.training()])
        case.predicted = _fitting.predict(gather_seconds, constants, table)
        case.constants = {name: constants[name] for name in GATHER}
        cases.append(case)
    return cases


VECTOR_OPS = {
    # elements in and out per token, of (hidden width, local gate width, local rotary width)
    "add": lambda hidden, inner, rotary, gated: (2 * hidden, hidden),
    "input_layernorm": lambda hidden, inner, rotary, gated: (hidden, hidden),
    "post_attention_layernorm": lambda hidden, inner, rotary, gated: (hidden, hidden),
    "mlp_act": lambda hidden, inner, rotary, gated: ((1 + gated) * inner, inner),
    "attn_rope": lambda hidden, inner, rotary, gated: (rotary, rotary),
}


def vector_seconds(
    constants: Mapping[str, Array], machine: Machine, row: Mapping[str, Array]
) -> Array:
    """Returns seconds of element-wise kernels for trial constants."""
    machine = dataclasses.replace(machine, memory=dataclasses.replace(machine.memory, **constants))
    op = Vector(
        "vector",
        "decode/rest",
        rows=row["tokens"],
        reads=row["reads"],
        writes=row["writes"],
        operations=4.0 * row["reads"],
    )
    return vector_usage(op, Rank(machine)).seconds


def fit_vectors(rows: pd.DataFrame) -> list[Case]:
    """Returns a case per device of norms, activations, residuals and rotary embeddings.

    The table is rounded to 1 µs, so nothing is solved for: the stream is the median over kinds of
    their median rate in rows of at least 30 µs of traffic, the floor the median time of rows of
    at most 64 tokens and 1 µs of traffic. Odd multiples of 64 tokens are held out.
    """
    rows = select(rows, rows["op"].isin(VECTOR_OPS))
    systems = {"a100": "a100_sxm", "h100": "h100_sxm"}
    rows = rows.assign(
        system=[systems[device] for device in rows["device"].astype(str)],
        framework="vidur",
        latency_ms=rows["time_median_ms"],
    )
    cases = []
    for (system,), part in sets(rows, ["system"]):
        machine = bare_machine(system)
        sizes = ["n_embd", "n_head", "n_kv_head", "n_expanded_embd", "tp"]
        part[sizes] = part[sizes].astype(float)  # the table's 8-bit integers would overflow
        head = part["n_embd"] / part["n_head"]
        rotary = (part["n_head"] + part["n_kv_head"]) * head / part["tp"]
        inner = part["n_expanded_embd"] / part["tp"]
        elements = [
            VECTOR_OPS[op](hidden, wide, turned, int(gated))
            for op, hidden, wide, turned, gated in zip(
                part["op"].astype(str),
                part["n_embd"],
                inner,
                rotary,
                part["use_gated_mlp"],
                strict=True,
            )
        ]
        tokens = part["num_tokens"].to_numpy(float)
        per_token = np.array(elements)
        columns = {"tokens": tokens, "reads": per_token[:, 0], "writes": per_token[:, 1]}
        traffic = 2.0 * tokens * per_token.sum(1)
        ideal = traffic / float(machine.memory.bandwidth[0])
        seconds = in_seconds(part)
        kept = (tokens // 64) % 2 == 1
        large, small = ~kept & (ideal > 30e-6), ~kept & (ideal < 1e-6) & (tokens <= 64)
        ops = part["op"].astype(str).to_numpy()[large]
        rates = (ideal / seconds)[large]
        share = {op: float(np.median(rates[ops == op])) for op in sorted(set(ops))}
        constants = {
            "vector_stream": float(np.median(list(share.values()))),
            "vector_floor": float(np.median(seconds[small])),
        }
        case = Case(
            "vector",
            system,
            "vidur",
            ", ".join(f"{op} {x:.2f}" for op, x in share.items()),
            part,
            Table(columns, seconds, machine, {}),
            large | small,
            kept,
            kept,
            constants,
        )
        case.predicted = _fitting.predict(vector_seconds, constants, case.table)
        cases.append(case)
    return cases


def fit_power(rows: pd.DataFrame) -> dict[str, float]:
    """Returns how board power follows use, from whole-model runs on A100 (2023 software).

    P/TDP = i + (1 − i)·min(1, c_c·u_c + c_m·u_m), u the used shares of data-sheet FLOP/s and
    bandwidth. Average power of short-prompt runs is the decode phase: its line in u_m gives i (a
    running chip at no traffic) and c_m. Peak power is the prompt phase, below the limit: c_c.
    """
    sheet = bare_machine("a100_sxm")
    peak, bandwidth = float(sheet.kernels.peak[0]), float(sheet.memory.bandwidth[0])
    rows = select(rows, (rows["hardware"] == "a100-80gb") & (rows["average_power"] > 0))
    number = {name: rows[name].to_numpy(float) for name in rows.columns[2:]}
    parameters = np.where(rows["model"] == "llama2-70b", 69e9, 176e9)
    local = 2.0 * parameters / number["tensor_parallel"]
    prompt, token = number["prompt_time_ms"] * 1e-3, number["token_time_ms"] * 1e-3
    average, read = number["average_power"], local / token / bandwidth
    decode = (prompt < 1e-4 * number["e2e_time_ms"]) & (number["batch_size"] <= 16)
    slope, idle = np.polyfit(read[decode], average[decode], 1)
    memory = slope / (1.0 - idle)
    tokens = number["prompt_size"] * number["batch_size"]
    arithmetic = local * tokens / prompt / peak
    busy = (number["peak_power"] - idle) / (1.0 - idle) - memory * local / prompt / bandwidth
    below = (number["peak_power"] < 0.95) & (tokens >= 512)
    implied = (busy / arithmetic)[below]
    error = (idle + slope * read - average)[decode] / average[decode]
    return {
        "compute_activity": float(np.median(implied)),
        "compute_low": float(implied.min()),
        "compute_high": float(implied.max()),
        "memory_activity": float(memory),
        "running_idle": float(idle),
        "rows": float(decode.sum()),
        "prompt_rows": float(below.sum()),
        "error": float(np.median(np.abs(error))),
    }


_UNFUSED = (
    "with the activation quantisation kernel (docs/accuracy.md); its floor is sane for a serving "
    "step, TensorRT-LLM's 11 to 14 µs is not"
)
_WEAK = "poorly told by these rows; near its prior"
_LAUNCHES = "half the launches of an expert layer: choice, sorting, products, activation, sum"
_COPIES = "copying rows into the order of experts, and quantisation"
NOTES = {
    "kernels.fp8.floor": _UNFUSED,
    "kernels.fp4.floor": _UNFUSED,
    "kernels.fp8.quantise": "bytes per activation element of an unfused quantisation; 0 if fused",
    "kernels.fp4.quantise": "bytes per activation element of an unfused quantisation; 0 if fused",
    **{f"experts.{kind}.floor": _LAUNCHES for kind in KERNELS},
    **{f"experts.{kind}.quantise": _COPIES for kind in KERNELS},
    "rtx_pro_6000.kernels.fp8.floor": "TensorRT-LLM is the only table; includes quantisation",
    "rtx_pro_6000.kernels.fp4.floor": _WEAK,
    "gb200.fabric.oneshot_growth": "measured on 4 chips only: the prior",
    "b200_sxm.fabric.oneshot_growth": "measured on 8 chips only: the prior",
    "memory.vector_stream": "kernels of 2023: a plain add reaches twice this, a norm less",
    "memory.vector_floor": "the table is rounded to 1 µs",
    "latent_context.width_exponent": "one width is measured: fixed",
    "scan.efficiency": "of vector units; not told by these rows: fixed",
}
_KERNEL = "belongs to chip and kernel and does not transfer; prior"
_NO_TABLE = {
    "fp8": {
        "efficiency": 0.7,
        "stream": 0.85,
        "floor": 12e-6,
        "split_latency": 2.8e-6,
        "quantise": 25.0,
    },
    "bf16": {
        "efficiency": 0.6,
        "stream": 0.85,
        "floor": 17e-6,
        "split_latency": 2.8e-6,
        "quantise": 1.5,
    },
}
ASSUMED: dict[str, tuple[float, str]] = {
    "kernels.bf16.efficiency": (0.75, "0.60 to 0.85 over chips, " + _KERNEL),
    "kernels.fp8.efficiency": (0.675, "0.9 times that of bf16, " + _KERNEL),
    "kernels.int8.efficiency": (0.675, "as fp8"),
    "kernels.fp4.efficiency": (0.55, "0.75 times that of bf16, " + _KERNEL),
    **{f"kernels.{k}.efficiency": (0.7, "0.95 times that of bf16") for k in ("w8a16", "w4a16")},
    **{f"kernels.{k}.stream": (0.75, "0.58 to 0.87 over sets; prior") for k in ("fp8", "int8")},
    "kernels.fp4.stream": (0.65, "0.57 to 0.84 over sets; prior"),
    **{f"kernels.{k}.stream": (0.75, "as fp8") for k in ("w8a16", "w4a16")},
    **{f"kernels.{k}.floor": (6e-6, _KERNEL) for k in ("fp8", "fp4", "int8")},
    **{f"kernels.{k}.floor": (3e-6, "as bf16: nothing to quantise") for k in ("w8a16", "w4a16")},
    **{f"kernels.{k}.split_latency": (3e-6, "as bf16") for k in KERNELS if k != "bf16"},
    **{f"kernels.{k}.quantise": (6.4, "unfused quantisation; prior") for k in ("fp8", "fp4")},
    "kernels.int8.quantise": (6.4, "as fp8"),
    **{
        f"experts.{kind}.{name}": (value, f"as {other} of an H100: no table")
        for kind, other in (("int8", "fp8"), ("w8a16", "bf16"))
        for name, value in _NO_TABLE[other].items()
    },
    "scan.stream": (0.75, "as 16-bit products: states stream like weights"),
    "scan.efficiency": (0.25, "small products between dependent steps; a prior"),
    "scan.floor": (6e-6, "two launches of a small kernel"),
    "mesh.reduction": (1.0, "no mesh"),
    "floors.serial": (0.0, "kernels follow each other without a gap; engines add theirs"),
    "floors.launch": (0.0, "steps are captured in graphs; engines add theirs"),
}


def main() -> None:
    """Fits every table of a folder and writes fits, report and sample."""
    parser = argparse.ArgumentParser(prog="python -m perfmodel.calibrate", description=__doc__)
    parser.add_argument("operators", type=Path, help="folder of the operator tables")
    parser.add_argument("--out", type=Path, required=True, help="folder for the fit files")
    parser.add_argument("--report", type=Path, help="Markdown file for the error table")
    parser.add_argument("--sample", type=Path, help="CSV file for held-out rows")
    options = parser.parse_args()

    def read(name: str) -> pd.DataFrame:
        return pd.read_parquet(options.operators / name)

    products = measurements.matmul_cases(read("aic_gemm.parquet"))
    shared = fit_matmuls(products)
    decode = measurements.decode_cases(read("aic_attention_generation.parquet"))
    fit_attention(decode, DECODE_STARTS)
    fit_cache(products, matmul_seconds, traffic_of_products, shared)
    fit_cache(decode, decode_seconds, traffic_of_decode, {})
    context = measurements.context_cases(read("aic_attention_context.parquet"))
    fit_attention(context, CONTEXT_STARTS)
    latent = latent_fits.latent_cases(read("aic_mla.parquet"), "generation")
    fit_attention(latent, DECODE_STARTS)
    expanded = latent_fits.latent_cases(read("aic_mla.parquet"), "context")
    fit_attention(expanded, CONTEXT_STARTS)
    reduces = fit_all_reduce(read("aic_collectives.parquet"))
    gathers = fit_gathers(read("aic_collectives.parquet"), reduces)
    vectors = fit_vectors(read("vidur_mlp.parquet"))
    streams = {case.chip: case.constants["vector_stream"] for case in vectors}
    streams[""] = float(np.median(list(streams.values())))
    experts = expert_fits.expert_cases(read("aic_moe.parquet"), streams, shared)
    expert_fits.fit_experts(experts)
    scans = scan_fits.scan_cases(read("aic_linear_attention.parquet"))
    scan_fits.fit_scans(scans)
    power = fit_power(pd.read_csv(options.operators / "splitwise_latency.csv"))
    attention = [*decode, *context, *latent, *expanded]
    cases = [*products, *experts, *attention, *reduces, *gathers, *vectors, *scans]
    options.out.mkdir(parents=True, exist_ok=True)
    chips = output.chip_records(cases, shared, NOTES)
    for chip, records in chips.items():
        output.write_fit(options.out / f"{chip}.toml", chip, output.GENERATIONS[chip], records)
    family = output.family_records(chips, ASSUMED, output.power_records(power))
    output.write_fit(options.out / "hbm_gpu.toml", "hbm_gpu", "", family)
    output.write_sets(options.out.parent / "kernel_sets.toml", cases)
    if options.report:
        report.write_report(options.report, cases, leave_chips_out(products), power)
    if options.sample:
        options.sample.parent.mkdir(parents=True, exist_ok=True)
        output.write_sample(options.sample, cases, 20)


if __name__ == "__main__":
    main()
