"""Tables of deployments: names, faulty rows, padding, errors against measured runs.

`tests/data/deployments.csv` holds rows of the public table of serving runs that the fit of the
engine profiles has not seen (drawn blindly, at most eight of a set), and two that have no answer.
"""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import perfmodel
from perfmodel import _serving_runs, cache, cli, deployments, prediction
from perfmodel._rows import Predictions, statistics
from perfmodel.engines import load_engine

RUNS = Path(__file__).parent / "data" / "deployments.csv"
ROW: dict[str, Any] = {
    "model": "llama-3.1-70b", "chip": "h200", "tp": 4, "concurrency": 16, "isl": 1024, "osl": 1024
}  # fmt: skip


def status(**changed: Any) -> str:
    return perfmodel.predict(pd.DataFrame([ROW | changed]))["status"].item()


@functools.cache
def sample() -> Predictions:
    return prediction.predict_all(RUNS)


def test_columns_given_come_back_unchanged():
    given = pd.read_csv(RUNS, dtype=str, keep_default_na=False)
    back = sample().frame
    assert list(back.columns[: len(given.columns)]) == list(given.columns)
    pd.testing.assert_frame_equal(back[given.columns].astype(str), given)
    added = [*prediction.PREDICTED, *prediction.ERRORS, "status"]
    assert list(back.columns[len(given.columns) :]) == added


def test_other_names_mean_the_same():
    plain = pd.DataFrame([ROW | {"engine": "vllm", "precision": "fp8"}])
    other = {
        "Model_Path": "meta-llama/Llama-3.1-70B-FP8", "system": "H200 SXM", "tp_size": "4",
        "max_concurrency": "16.0", "input_len": " 1024", "output_len": "1024", "backend": "vLLM",
    }  # fmt: skip
    one, two = perfmodel.predict(plain), perfmodel.predict(pd.DataFrame([other]))
    for name in prediction.PREDICTED:
        assert one[name].item() == two[name].item() > 0


def test_an_estimate_and_a_row_say_the_same():
    row = perfmodel.predict(pd.DataFrame([ROW | {"precision": "fp8", "engine": "vllm"}])).iloc[0]
    one = perfmodel.estimate(
        "llama-3.1-70b", "h200", tp=4, batch=16, isl=1024, osl=1024, weights="fp8", engine="vllm",
        chunk=8192,
    )  # fmt: skip
    assert row["predicted_ttft_ms"] == pytest.approx(1e3 * float(one.ttft_s), rel=1e-5)
    assert row["predicted_tpot_ms"] == pytest.approx(1e3 * float(one.tpot_s), rel=1e-5)
    rate = float(one.output_tokens_per_second_chip)
    assert row["predicted_output_tokens_per_second_chip"] == pytest.approx(rate, rel=1e-5)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"model": "lama-3.1-70b"}, "unknown model 'lama-3.1-70b' (nearest: llama-3.1-70b"),
        ({"model": ""}, "missing model"),
        ({"model": "./config.json"}, "is a path"),
        ({"chip": "h999"}, "unknown chip 'h999'"),
        ({"chip": "../x.toml"}, "is a path"),
        ({"engine": "vlm"}, "unknown engine 'vlm' (nearest: vllm"),
        ({"precision": "fp9"}, "unknown number format 'fp9'"),
        ({"precision": "mxfp4/mxfp4/bf16"}, "h200_sxm has no fp4 kernel"),
        ({"concurrency": ""}, "no concurrency"),
        ({"isl": "1k"}, "isl is not a number: '1k'"),
        ({"isl": None}, "missing isl"),
        ({"osl": 0}, "osl must be a whole number from 1, not 0"),
        ({"tp": 2.5}, "tp must be a whole number from 1, not 2.5"),
        ({"tp": 3}, "tp: 3 does not cut"),
        ({"isl": 1000000}, "exceed the longest context of llama-3.1-70b, 131,072"),
        ({"tp": 1, "precision": "bf16"}, "does not fit: memory ("),
        ({"mode": "disagg"}, "disaggregated without worker counts"),
        ({"mode": "disagg", "prefill_workers": 1}, "worker counts (decode_workers or decode_gpus)"),
        ({"mode": "other"}, "unknown mode 'other'"),
        ({"attention_dp": 2, "tp": 4}, "experts"),
    ],
)
def test_a_row_without_an_answer_says_why(changed: dict[str, Any], expected: str):
    assert expected in status(**changed)


def test_faulty_rows_are_told_by_line_and_stop_no_other(tmp_path: Path):
    path = tmp_path / "runs.csv"
    path.write_text(
        "model,chip,tp,concurrency,isl,osl\n"
        "llama-3.1-70b,h200,4,16,1024,1024\n"
        "llama-3.1-70b,h200,4,16,many,1024\n"
        "llama-3.1-70b,h200,4,16\n"
        "\n"
        '"llama-3.1-70b","h200","4","16","1024","1024"\n'
    )
    found = prediction.predict_all(path)
    assert found.faults() == {
        "isl is not a number: 'many'": [3],
        "it has 4 fields and the header 6": [4],
    }
    good = found.frame["predicted_tpot_ms"].to_numpy()
    assert good[0] == good[3] > 0 and np.isnan(good[1:3]).all()


def test_replicas_share_the_load():
    one = perfmodel.predict(pd.DataFrame([ROW | {"gpus": 4}])).iloc[0]
    three = perfmodel.predict(pd.DataFrame([ROW | {"gpus": 12, "concurrency": 48}])).iloc[0]
    for name in prediction.PREDICTED:
        assert three[name] == pytest.approx(one[name], rel=1e-6)
    assert "multiple" in status(gpus=6)


def test_filling_up_changes_nothing():
    asked = deployments.understand(RUNS)
    whole, parts = prediction.evaluate(asked), prediction.evaluate(asked, block=7)
    for name, value in whole.items():
        np.testing.assert_allclose(parts[name], value, rtol=2e-6)


def test_one_program_serves_every_row_of_a_structure():
    asked = deployments.understand(RUNS)
    prediction.evaluate(asked)
    before = cache.compilations(prediction._rows)
    other = pd.DataFrame([ROW | {"model": "qwen3-32b", "chip": "b200", "engine": "sglang"}])
    prediction.evaluate(deployments.understand(other))
    assert cache.compilations(prediction._rows) == before


def test_errors_are_signed_and_summed_up_by_hand():
    measured = pd.DataFrame([ROW, ROW | {"chip": "h100"}, ROW | {"chip": "h100", "tp": 8}])
    tpot = perfmodel.predict(measured)["predicted_tpot_ms"].to_numpy()
    measured["tpot_ms"] = tpot / np.array([0.9, 1.2, 1.5])
    found = prediction.predict_all(measured)
    np.testing.assert_allclose(found.frame["tpot_error"], [-0.1, 0.2, 0.5], rtol=1e-6)
    assert "ttft_error" not in found.frame
    table = found.summary().set_index(["by", "name"])
    everything = table.loc[("all", "")]
    assert everything["tpot_rows"] == 3
    assert everything["tpot_median"] == pytest.approx(20.0)
    assert everything["tpot_p90"] == pytest.approx(20 + 0.8 * 30)  # between 20 and 50
    assert everything["tpot_bias"] == pytest.approx(20.0)
    assert table.loc[("chip", "h100_sxm"), "tpot_median"] == pytest.approx(35.0)
    assert table.loc[("chip", "h200_sxm"), "tpot_bias"] == pytest.approx(-10.0)
    assert statistics(np.array([-30.0, 10.0]))["median"] == 20.0


def test_runs_that_no_fit_has_seen():
    """Targets: 10 % of TPOT and 30 % of TTFT in the median. Rows are few here; the report has
    all (docs/serving-accuracy.md)."""
    good = sample().frame.query("status == 'ok'")
    assert len(good) > 50
    assert good["tpot_error"].abs().median() < 0.10
    assert good["ttft_error"].abs().median() < 0.30
    assert abs(good["tpot_error"].median()) < 0.08


def test_every_row_held_out_is_one_that_the_rule_holds_out():
    frame = pd.read_csv(RUNS).query("mode == 'agg' and concurrency == concurrency")
    assert _serving_runs.held_out(frame).all()


def test_copies_are_found_before_rows_are_split():
    row = pd.read_csv(RUNS).iloc[[0]]
    twice = pd.concat([row, row.assign(tpot_ms=row["tpot_ms"] * 1.005), row.assign(tpot_ms=99.0)])
    twice = twice.assign(gpus_total_derived=4.0).reset_index(drop=True)
    assert _serving_runs.copies(twice).tolist() == [False, True, False]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "new" / "out.csv"
    assert cli.main(["predict", str(RUNS), "--out", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["rows"] == len(pd.read_csv(out)) == told["predicted"] + 2
    assert cli.main(["predict", str(RUNS)]) == 0
    text = capsys.readouterr().out
    assert "no concurrency" in text and "disaggregated without worker counts" in text
    assert cli.main(["predict"]) == 2
    assert cli.main(["predict", str(tmp_path / "none.csv")]) == 2
    out.write_text("model,chip\nllama-3.1-70b,h100\n")
    capsys.readouterr()
    assert cli.main(["predict", str(out)]) == 2
    assert "no column tp or tp_size" in capsys.readouterr().err


def test_rows_name_networks_of_your_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
             "num_key_value_heads": 8, "vocab_size": 128256, "intermediate_size": 14336,
             "max_position_embeddings": 131072}  # fmt: skip
    (tmp_path / "odd-8b").mkdir()
    odd = tmp_path / "odd-8b" / "config.json"
    odd.write_text(json.dumps({"model_type": "odd", "num_experts": 8, **sizes}))
    runs, out = tmp_path / "runs.csv", tmp_path / "out.csv"
    frame = pd.DataFrame([ROW | {"model": name, "tp": 1} for name in ("odd-8b", "llama-3.1-8b")])
    frame.to_csv(runs, index=False)
    plain = ["predict", str(runs), "--out", str(out), "--json"]
    # Files are opened where they are named on the command line, never because a row names them.
    assert cli.main(plain) == 0
    assert json.loads(capsys.readouterr().out)["predicted"] == 1
    assert cli.main([*plain, "--model", str(odd)]) == 2
    assert "model_type 'odd' is not understood" in capsys.readouterr().err
    assert cli.main([*plain, "--model", str(odd.parent), "--assume-dense"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert "as asked: ignored are num_experts" in told["notes"][0]
    # The sizes are those of Llama 3.1 8B.
    found = pd.read_csv(out)["predicted_tpot_ms"]
    assert told["predicted"] == 2 and found[0] == found[1] > 0
    assert cli.main([*plain, "--assume-dense"]) == 2
    frame[1:].to_csv(runs, index=False)
    assert cli.main([*plain, "--model", str(odd), "--assume-dense"]) == 2
    assert "no row names 'odd-8b'" in capsys.readouterr().err


def test_routing_is_of_mixtures_alone():
    rows = [ROW, ROW | {"model": "qwen3-30b-a3b", "ep": 4, "concurrency": 64}]
    even = perfmodel.predict(pd.DataFrame(rows))
    skewed = prediction.predict_all(pd.DataFrame(rows), routing=1.2)
    ratio = (skewed.frame["predicted_tpot_ms"] / even["predicted_tpot_ms"]).to_list()
    # Fewer experts are read.
    assert ratio[0] == 1.0 and 0.5 < ratio[1] < 1.0
    one = perfmodel.estimate(
        "qwen3-30b-a3b", "h200", tp=4, ep=4, batch=64, isl=1024, osl=1024, routing=1.2
    )
    assert skewed.frame["predicted_tpot_ms"][1] == pytest.approx(float(one.tpot_s) * 1e3, rel=1e-5)
    assert skewed.notes == ("routing: power law, exponent 1.2, of mixtures",)
    assert cli.main(["predict", "--operators", "x.csv", "--routing", "power:1.2"]) == 2


# ---- What engines add ----


def with_engine(**changed: float) -> pd.Series:
    import dataclasses

    entry = load_engine("neutral")
    numbers = dataclasses.replace(entry.engine, **changed)
    frame = pd.DataFrame([ROW | {"in_step": 1.0, "isl": 2048}])
    profile = dataclasses.replace(entry, engine=numbers)
    return perfmodel.predict(frame, engine=profile).iloc[0]


def test_neutral_values_of_new_terms_are_those_of_the_neutral_engine():
    neutral = with_engine()
    same = with_engine(
        exclusive=0.0, launch_graph=0.0, launch_eager=0.0, host_prefill=0.0, host_request=0.0,
        admission_steps=1.0, quantisation=1.0, reservation=0.5,
    )  # fmt: skip
    assert same["predicted_ttft_ms"] == neutral["predicted_ttft_ms"]


def test_launches_and_hosts_add_what_they_say():
    plain, layers = with_engine(), 80
    graph = with_engine(launch_graph=1e-6)
    # Decode steps take 80 µs more; the few with a chunk are as before.
    extra = graph["predicted_tpot_ms"] - plain["predicted_tpot_ms"]
    assert 0.9 * layers * 1e-3 < extra < 1.001 * layers * 1e-3
    eager = with_engine(launch_eager=1e-3)
    # One chunk of a prompt: 80 ms on the way to the first token, at least.
    assert eager["predicted_ttft_ms"] - plain["predicted_ttft_ms"] > 0.99 * layers


def test_prompts_first_in_step_move_waiting_to_the_first_token():
    fused, alone = with_engine(), with_engine(exclusive=1.0)
    assert alone["predicted_ttft_ms"] > 2 * fused["predicted_ttft_ms"]
    rate = "predicted_output_tokens_per_second_chip"
    # The same work in other order: throughput differs by what decoding beside a chunk saves.
    assert 0.8 < alone[rate] / fused[rate] < 1.1


@pytest.mark.parametrize("name", ["vllm", "sglang", "trtllm"])
def test_profiles_say_where_every_number_comes_from(name: str):
    entry = load_engine(name)
    assert entry.sheet.identity["version"]
    fitted = [n for n, number in entry.sheet.numbers.items() if number.kind == "fitted"]
    assert len(fitted) == 9
    assert "inferencex" in entry.sheet.sources["runs"].locator


def test_every_column_is_documented():
    page = (Path(__file__).parents[1] / "docs" / "predict.md").read_text()
    for column in deployments.FIELDS.values():
        names = ", ".join(f"`{name}`" for name in column.names)
        assert f"| {names} | {'yes' if column.required else ''} | {column.meaning} |" in page
