"""Measured kernels as the fits take them: rows, columns, priors and what is held out.

Reads the public AIConfigurator operator tables (Apache-2.0). Each table says which of its rows a
fit may see and which judge it; the traps of the tables are dealt with here and listed in
`docs/accuracy.md`.
"""

import dataclasses
import functools
from collections.abc import Iterable
from importlib.resources import files
from typing import Any, NamedTuple, cast

import jax.numpy as jnp
import numpy as np
import pandas as pd
from jax import Array
from pandas.util import hash_pandas_object

from perfmodel import catalog
from perfmodel._fitting import Prior, Table
from perfmodel.chips import constants, datasheet, hbm_gpu
from perfmodel.machine import Machine
from perfmodel.operators import KERNELS

CHIPS = {
    "a100_sxm": "a100_80gb_sxm",
    "h100_sxm": "h100_sxm",
    "l40s": "l40s",
    "b200_sxm": "b200_sxm",
    "gb200": "gb200",
    "rtx_pro_6000_server": "rtx_pro_6000",
}
"""Catalogue name of each system in the tables."""

WARM = ("l40s", "rtx_pro_6000_server")
"""Systems whose tables show operands served from the last-level cache between repeats."""


@functools.cache
def sheet_values(system: str) -> dict[str, float]:
    """Returns the numbers of a system's datasheet, unknown ones assumed as the catalogue does."""
    name = CHIPS[system]
    for path in files("perfmodel.chips").joinpath("catalog").iterdir():
        tables = catalog.read_toml(path)
        if tables["chip"]["name"] == name:
            sheet = datasheet.parse_sheet(tables, path.name)
            numbers = datasheet.complete(sheet, datasheet.assumptions("hbm_gpu"))
            return {key: float(number.value or 0.0) for key, number in numbers.items()}
    raise KeyError(name)


@functools.cache
def bare_machine(system: str) -> Machine:
    """Returns a machine of datasheet numbers alone: every kernel constant neutral."""
    tile = {"compute.tile_rows": 64.0, "compute.tile_columns": 64.0}
    return hbm_gpu.machine(sheet_values(system), {**constants.neutral(), **tile})


class Format(NamedTuple):
    """How the source's matrix-product dtype reads here."""

    kind: str
    weight_bytes: float
    activation_bytes: float
    column_bytes: float
    quantises: bool
    efficiency: float
    floor: float


FORMATS = {
    "bfloat16": Format("bf16", 2, 2, 0, False, 0.75, 2.6e-6),
    "fp8": Format("fp8", 1, 1, 0, True, 0.68, 8e-6),
    "fp8_block": Format("fp8", 1, 1 + 4 / 128, 0, True, 0.6, 5e-6),
    "nvfp4": Format("fp4", 0.5625, 0.5625, 0, True, 0.5, 6e-6),
    "sq": Format("int8", 1, 1, 4, True, 0.68, 8e-6),
    "int8_wo": Format("w8a16", 1, 2, 2, False, 0.6, 3e-6),
    "int4_wo": Format("w4a16", 0.5, 2, 2, False, 0.6, 3e-6),
}

EXPERT_FORMATS = FORMATS | {
    "int4_wo": Format("w4a16", 0.515625, 2, 0, False, 0.6, 3e-6),
    "w4a16_mxfp4": Format("w4a16", 0.53125, 2, 0, False, 0.6, 3e-6),
    "w4a8_mxfp4_mxfp8": Format("fp8", 0.53125, 1 + 1 / 32, 0, True, 0.6, 3e-6),
}
"""The same for expert layers; int4 with a scale per group of 128, mxfp4 and mxfp8 per 32."""


def held_out(rows: pd.DataFrame, by: list[str], share: float) -> np.ndarray:
    """Returns which rows are kept from a fit: whole groups, the same for every table."""
    key = cast(Any, hash_pandas_object)(rows[by].astype(np.int64), index=False).to_numpy()
    return (key % np.uint64(1009)).astype(float) < share * 1009.0


def one_hot(kind: str) -> Array:
    return jnp.asarray([float(kind == kernel) for kernel in KERNELS])


def matmul_columns(rows: pd.DataFrame, form: Format) -> dict[str, np.ndarray]:
    columns = {name: rows[name].to_numpy(float) for name in ("m", "n", "k")}
    size = np.ones(len(rows))
    return columns | {
        "weight_bytes": form.weight_bytes * size,
        "activation_bytes": form.activation_bytes * size,
        "column_bytes": form.column_bytes * size,
    }


def attention_columns(rows: pd.DataFrame) -> dict[str, np.ndarray]:
    """Returns the model's inputs for attention rows; pairs are exact under mask and window."""
    length = rows["kv_len"].to_numpy(float)
    window = rows["window_size"].to_numpy(float)
    keys = np.where(window > 0, np.minimum(window, length), length)
    queries = rows["isl"].to_numpy(float)
    exact = keys * (keys + 1) / 2 + (queries - keys) * keys
    return {
        "sequences": rows["batch_size"].to_numpy(float),
        "queries": queries,
        "keys": keys,
        "pairs": np.where(queries > 1, exact, keys),
        "heads": rows["num_heads"].to_numpy(float),
        "kv_heads": rows["num_kv_heads"].to_numpy(float),
        "width": rows["head_dim"].to_numpy(float),
        "kv_bytes": np.where(rows["kv_cache_dtype"] == "fp8", 1.0, 2.0),
        "narrow": (rows["attn_dtype"] == "fp8").to_numpy(float),
    }


def matmul_priors(form: Format) -> dict[str, Prior]:
    return {
        "efficiency": Prior(form.efficiency, 0.25),
        "stream": Prior(0.80, 0.75, "share"),
        "floor": Prior(form.floor, 0.35),
        "split_latency": Prior(2.8e-6, 0.4),
        "quantise": Prior(6.4, 0.5) if form.quantises else Prior(0.0, 1.0, "fixed"),
    }


SHARED = {
    "split_time": Prior(1.4e-6, 0.5),
    "wave": Prior(0.3, 1.0, "share"),
}


def decode_priors(machine: Machine) -> dict[str, Prior]:
    rate = float(2.5 * machine.memory.bandwidth[0] / machine.compute.units)
    return {
        "stream": Prior(0.85, 0.7, "share"),
        "item_time": Prior(2.5e-6, 0.6),
        "item_exponent": Prior(1.2, 0.4, "linear"),
        "item_rate": Prior(rate, 0.7),
        "single_item_time": Prior(2e-6, 0.6),
        "single_item_rate": Prior(rate, 0.7),
        "efficiency": Prior(0.3, 0.7),
        "min_group": Prior(8.0, 0.7),
        "split_keys": Prior(256.0, 0.7),
        "floor": Prior(8e-6, 0.35),
        "split_latency": Prior(2.8e-6, 0.4),
    }


def context_priors() -> dict[str, Prior]:
    return {
        "efficiency": Prior(0.6, 0.3),
        "narrow": Prior(1.25, 0.25),
        "width_exponent": Prior(0.5, 0.4, "linear"),
        "query_tile": Prior(128.0, 0.4),
        "diagonal": Prior(100.0, 1.2),
        "tail": Prior(0.7, 0.5),
        "longest": Prior(0.9, 0.5),
        "item_time": Prior(2e-6, 0.8),
        "stream": Prior(0.8, 0.3),
        "floor": Prior(10e-6, 0.4),
    }


def scores(predicted: np.ndarray, measured: np.ndarray) -> tuple[float, float, float]:
    """Returns median and 90th percentile of |predicted/measured − 1|, and the median log ratio."""
    error = np.abs(predicted / measured - 1.0)
    return (
        float(np.median(error)),
        float(np.quantile(error, 0.9)),
        float(np.median(np.log(predicted / measured))),
    )


@dataclasses.dataclass
class Case:
    """One measured set: its rows, which of them a fit sees and which judge it, and the fit.

    Fields:
        kind: "matmul", "decode", "context", "all_reduce" or "vector".
        system, framework, detail: as in the tables; `detail` is the dtype or the library.
        rows: source columns, latency in `latency_ms`.
        table: the same as the solver takes them.
        seen, judged: masks of rows that are fitted, and that give the published errors.
        kept: all rows held out, those outside the stated range included.
        constants, predicted: the result; seconds for every row.
        cache: where operands stay in the last-level cache between repeats, up to how many bytes
            [B], and how much faster than from memory they are; (0, 1) elsewhere.
    """

    kind: str
    system: str
    framework: str
    detail: str
    rows: pd.DataFrame
    table: Table
    seen: np.ndarray
    judged: np.ndarray
    kept: np.ndarray
    constants: dict[str, float] = dataclasses.field(default_factory=dict)
    predicted: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0))
    cache: tuple[float, float] = (0.0, 1.0)

    @property
    def chip(self) -> str:
        return CHIPS[self.system]

    def training(self) -> Table:
        """Returns the rows that the fit sees."""
        columns = {name: column[self.seen] for name, column in self.table.columns.items()}
        return self.table._replace(columns=columns, seconds=self.table.seconds[self.seen])

    def score(self, where: np.ndarray | None = None) -> tuple[float, float, float]:
        """Returns median, 90th percentile and bias of the error on the judged rows."""
        chosen = self.judged if where is None else self.judged & where
        if not chosen.any():
            return float("nan"), float("nan"), float("nan")
        return scores(self.predicted[chosen], self.table.seconds[chosen])


def select(rows: pd.DataFrame, mask: Any) -> pd.DataFrame:
    """Returns the rows where `mask` holds, numbered anew."""
    return cast(pd.DataFrame, rows[mask]).reset_index(drop=True)


def sets(rows: pd.DataFrame, by: list[str]) -> Iterable[tuple[tuple[str, ...], pd.DataFrame]]:
    """Yields the rows of each set, for the systems that the catalogue has."""
    rows = select(rows, rows["system"].isin(CHIPS))
    for key, part in rows.groupby(by, observed=True):
        yield tuple(map(str, cast(tuple, key))), part.reset_index(drop=True)


def in_seconds(rows: pd.DataFrame) -> np.ndarray:
    return rows["latency_ms"].to_numpy(float) * 1e-3


def matmul_cases(rows: pd.DataFrame) -> list[Case]:
    """Returns one case per (system, dtype, framework), warm and host-bound rows left out."""
    cases = []
    for (system, dtype, framework), part in sets(rows, ["system", "gemm_dtype", "framework"]):
        if (dtype, framework) == ("fp8_block", "vllm"):
            continue  # bound by the host: floors of 57 to 340 µs, not captured in a graph
        form, machine = FORMATS[dtype], bare_machine(system)
        columns = matmul_columns(part, form)
        m, n, k = (columns[name] for name in ("m", "n", "k"))
        size = n * k * form.weight_bytes + m * k * form.activation_bytes + 2 * m * n
        memory = size / float(machine.memory.bandwidth[0])
        peak = float(machine.kernels.peak[KERNELS.index(form.kind)])
        in_cache = (size < 1.5 * sheet_values(system)["cache_capacity"]) & (
            2 * m * n * k / peak < memory
        )
        cold = ~in_cache if system in WARM else np.ones(len(part), dtype=bool)
        # Where memory takes no time, it does not matter where the bytes come from.
        tiny = memory < 0.3e-6
        kept = held_out(part, ["n", "k"], 0.5)
        table = Table(columns, in_seconds(part), (machine, one_hot(form.kind)), matmul_priors(form))
        cases.append(
            Case(
                "matmul",
                system,
                framework,
                dtype,
                part,
                table,
                (cold | tiny) & ~kept,
                cold & kept,
                kept,
            )
        )
    return cases


def _whole_groups(rows: pd.DataFrame) -> np.ndarray:
    """Returns which attention rows are held out: 2 of every 5 (width, kv heads, heads) groups."""
    keys = list(zip(rows["head_dim"], rows["num_kv_heads"], rows["num_heads"], strict=True))
    order = {key: i for i, key in enumerate(sorted(set(keys)))}
    return np.array([order[key] % 5 in (1, 3) for key in keys])


def decode_cases(rows: pd.DataFrame) -> list[Case]:
    """Returns one case per (system, framework); bf16 and fp8 caches together.

    Judged and fitted are at most 32 query heads per kv head and at least 128 keys, the range of
    serving; Triton fall-backs for odd widths are left out.
    """
    cases = []
    for (system, framework), part in sets(rows, ["system", "framework"]):
        machine, columns = bare_machine(system), attention_columns(part)
        triton = part["kernel_source"].astype(str).str.contains("triton").to_numpy()
        cache = 2 * columns["kv_bytes"] * columns["width"] * columns["keys"]
        cache = cache * columns["sequences"] * columns["kv_heads"]
        resident = (cache < 1.5 * sheet_values(system)["cache_capacity"]) & (
            cache / float(machine.memory.bandwidth[0]) > 2e-6
        )
        ranged = (columns["heads"] <= 32 * columns["kv_heads"]) & (columns["keys"] >= 128)
        windowed = (part["window_size"] > 0).to_numpy()
        wide = columns["width"] > 256
        scope = ranged & ~triton & ~resident & ~wide
        if (system, framework) == ("h100_sxm", "trtllm"):
            # Twice as long as the same window over an fp8 cache: not all of it is skipped.
            scope = scope & ~(windowed & (columns["kv_bytes"] == 2))
        priors = decode_priors(machine)
        if (system, framework) == ("a100_sxm", "trtllm"):
            # Runs at 1.6 times the data sheet's bandwidth: pages of the cache must be aliased.
            priors["stream"] = Prior(0.85, 1.0, "fixed")
        kept = _whole_groups(part)
        table = Table(columns, in_seconds(part), machine, priors)
        cases.append(
            Case("decode", system, framework, "", part, table, scope & ~kept, scope & kept, kept)
        )
    return cases


def context_cases(rows: pd.DataFrame) -> list[Case]:
    """Returns one case per (system, framework); every window and arithmetic together."""
    cases = []
    for (system, framework), part in sets(rows, ["system", "framework"]):
        columns = attention_columns(part)
        scope = ~part["kernel_source"].astype(str).str.contains("triton").to_numpy()
        scope = scope & (columns["width"] <= 256)
        kept, seen = _whole_groups(part), scope
        narrow_cache = columns["kv_bytes"] == 1
        if framework == "trtllm" and system in ("h100_sxm", "b200_sxm", "gb200"):
            # With an fp8 cache these kernels run at their fp8 rate, whatever `attn_dtype` says.
            columns["narrow"] = narrow_cache.astype(float)
        if framework == "trtllm" and system in WARM:
            # Width 192 and, in 8-bit arithmetic, any but 128 fall back to kernels twice as slow.
            fallback = (columns["width"] == 192) | (
                (columns["narrow"] == 1) & (columns["width"] != 128)
            )
            scope = seen = scope & ~fallback
        if (system, framework) == ("h100_sxm", "trtllm"):
            # A window of 128 over an fp8 cache takes longer than it should.
            seen = scope & ~(narrow_cache & (part["window_size"] == 128).to_numpy())
        table = Table(columns, in_seconds(part), bare_machine(system), context_priors())
        cases.append(
            Case("context", system, framework, "", part, table, seen & ~kept, scope & kept, kept)
        )
    return cases
