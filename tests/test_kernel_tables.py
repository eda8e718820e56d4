"""Tables of kernels: every kind against the functions that time them, and faulty rows."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from perfmodel import cli
from perfmodel.chips import load_chip
from perfmodel.errors import InputError
from perfmodel.fabric import all_reduce_seconds
from perfmodel.kernel_tables import predict_kernels
from perfmodel.machine import Rank, matmul_parts
from perfmodel.operators import KERNELS, Matmul


def test_products_take_the_time_that_they_take_in_a_step():
    rows = pd.DataFrame({"system": "h100_sxm", "gemm_dtype": "bfloat16", "m": [1, 4096],
                         "n": 8192, "k": 8192, "latency_ms": [0.05, 0.9]})  # fmt: skip
    found = predict_kernels(rows)
    kernel = jnp.asarray([float(name == "bf16") for name in KERNELS])
    rank = Rank(load_chip("h100").machine)
    for place, m in enumerate((1, 4096)):
        op = Matmul("m", "decode/ffn", m, 8192, 8192, 2, 2, kernel)
        expected = 1e3 * float(matmul_parts(op, rank).total)
        assert found.frame["predicted_latency_ms"][place] == pytest.approx(expected, rel=1e-5)
    # 128 MiB of weights at 3.35 TB/s take 40 µs at least.
    assert 0.040 < found.frame["predicted_latency_ms"][0] < 0.060
    error = found.frame["predicted_latency_ms"][1] / 0.9 - 1
    assert found.frame["latency_error"][1] == pytest.approx(error)
    table = found.summary().set_index(["by", "name"])
    assert table.loc[("kernel", "matmul bfloat16"), "latency_rows"] == 2


def test_links_take_the_time_that_they_take_in_a_step():
    rows = pd.DataFrame({"system": "h100_sxm", "op": ["all_reduce", "all_reduce", "broadcast"],
                         "library": ["custom", "nccl", "nccl"], "message_bytes": 16384,
                         "num_gpus": 8})  # fmt: skip
    found = predict_kernels(rows).frame
    expected = 1e3 * float(all_reduce_seconds(16384.0, 8.0, load_chip("h100").machine.fabric))
    assert found["predicted_latency_ms"][0] == pytest.approx(expected, rel=1e-5)
    assert found["predicted_latency_ms"][1] > 1.5 * expected
    assert "unknown collective 'broadcast'" in found["status"][2]


def test_attention_and_experts():
    attention = pd.DataFrame({
        "system": "h100_sxm", "attn_dtype": "bfloat16", "kv_cache_dtype": ["bfloat16", "fp8"] * 2,
        "batch_size": 64, "isl": [1, 1, 2048, 2048], "step": [8191, 8191, 0, 0], "num_heads": 32,
        "num_kv_heads": 8, "head_dim": 128, "window_size": 0,
    })  # fmt: skip
    times = predict_kernels(attention).frame["predicted_latency_ms"].to_numpy()
    # 64 × 8192 keys × 8 heads × 128 × 2 × 2 B = 2.1 GB at 3.35 TB/s: 0.64 ms; half of it in fp8.
    assert 0.64 < times[0] < 0.9 and times[1] < 0.75 * times[0]
    # 64 × 32 heads × 4·128 FLOP × 2048²/2 pairs = 2.2 TFLOP at under 989 TFLOP/s.
    assert times[2] > 2.2
    experts = pd.DataFrame({
        "system": "h100_sxm", "moe_dtype": "bfloat16", "num_tokens": [1, 4096], "hidden_size": 4096,
        "inter_size": 1536, "topk": 8, "num_experts": 128, "moe_tp_size": 1, "moe_ep_size": 4,
        "kernel_source": "moe_torch_flow_cutlass",
    })  # fmt: skip
    times = predict_kernels(experts).frame["predicted_latency_ms"].to_numpy()
    # All 32 experts of the rank: 32 × 3 × 4096 × 1536 × 2 B = 1.2 GB at 3.35 TB/s.
    assert 0.36 < times[1] and times[0] < 0.2 * times[1]


def test_faulty_rows_say_why():
    rows = pd.DataFrame({"system": ["h100_sxm", "b61", "h100_sxm", "h100_sxm", "h100_sxm"],
                         "gemm_dtype": ["bfloat16", "bfloat16", "fp7", "nvfp4", "fp8"],
                         "m": [1, 1, 1, 1, "x"], "n": 64, "k": 64})  # fmt: skip
    status = predict_kernels(rows).frame["status"]
    assert status[0] == "ok"
    for place, words in enumerate(
        ["unknown chip 'b61'", "unknown format 'fp7'", "no fp4 kernel", "m is not a number: 'x'"], 1
    ):
        assert words in status[place]


def test_a_table_of_something_else_is_refused():
    with pytest.raises(InputError, match="for matmul, columns are missing: k, gemm_dtype"):
        predict_kernels(pd.DataFrame({"system": ["h100_sxm"], "m": [1], "n": [1]}))


def test_filling_up_changes_nothing():
    m = np.arange(1, 9001)
    rows = pd.DataFrame({"system": "h100_sxm", "gemm_dtype": "bfloat16", "m": m, "n": 64, "k": 64})
    many = predict_kernels(rows).frame["predicted_latency_ms"].to_numpy()
    few = predict_kernels(rows[8500:8510]).frame["predicted_latency_ms"].to_numpy()
    np.testing.assert_allclose(few, many[8500:8510], rtol=1e-6)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    table, out = tmp_path / "gemm.parquet", tmp_path / "out.csv"
    rows = {"system": ["h100_sxm"], "gemm_dtype": ["fp8"], "m": [16], "n": [4096], "k": [4096]}
    pd.DataFrame(rows | {"latency_ms": [0.02]}).to_parquet(table)
    assert cli.main(["predict", "--operators", str(table), "--out", str(out)]) == 0
    assert "1 of 1 rows predicted" in capsys.readouterr().out
    assert pd.read_csv(out)["status"].to_list() == ["ok"]
    assert cli.main(["predict", str(out), "--operators", str(table)]) == 2
