"""The command line: exit status, one line per error, JSON keys, and what help imports."""

import json
import os
import subprocess
import sys

import hypothesis
import pytest
from hypothesis import strategies as st

import perfmodel
from perfmodel import chips, cli

MODEL, CHIP = "llama-3.3-70b", "h100"
# One shape, so one program, for every frontier here.
SEARCH = ["frontier", "llama-3.1-8b", "--chip", "h100", "--max-chips", "2", "--isl", "512"]
SEARCH += ["--precision", "fp8"]
SIZE = ["size", "llama-3.1-8b", "--rate", "1", "--chip", "h100", "--isl", "512", "--osl", "100"]
DESIGN = ["estimate", MODEL, CHIP, "--tp", "8", "--batch", "4"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    """Commands turn on JAX's cache: not the user's, and not for other tests."""
    monkeypatch.setattr(cli, "_ready", lambda: None)


def run(capsys, *arguments):
    status = cli.main(list(arguments))
    out, err = capsys.readouterr()
    return status, out, err


def fails(capsys, status, *arguments):
    """Returns the one line that a failing command says."""
    found, _, err = run(capsys, *arguments)
    assert found == status, err
    assert err.count("\n") == 1 and "Traceback" not in err
    return err


# ---- Help and version ----


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from perfmodel.cli import main; assert main(['--help']) == 0; "
        "print(sorted({'jax', 'numpy', 'xarray', 'pandas', 'matplotlib', 'rich'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_names_every_command(capsys):
    for arguments in ([], ["--help"]):
        status, out, _ = run(capsys, *arguments)
        assert status == 0
        assert all(
            name in out for name in ("estimate", "frontier", "size", "chips", "models", "study")
        )


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"perfmodel {perfmodel.__version__}\n", "")


# ---- Commands ----


def test_estimate_json_has_the_documented_keys(capsys):
    status, out, err = run(capsys, *DESIGN, "--json")
    found = json.loads(out)
    assert (status, err) == (0, "")
    assert {
        "ttft_s", "tpot_s", "tokens_per_second_user", "output_tokens_per_second_chip",
        "total_tokens_per_second_chip", "power_w", "energy_per_output_token_j",
        "usd_per_million_output_tokens", "usd_per_million_input_tokens",
        "usd_per_million_total_tokens", "chips", "weight_bytes", "kv_bytes", "memory_bytes",
        "feasible", "binding", "version",
    } <= set(found)  # fmt: skip
    assert found["feasible"] is True and found["chips"] == 8
    assert found["version"] == perfmodel.__version__


def test_estimate_opens_down_to_operators(capsys):
    status, out, _ = run(capsys, *DESIGN, "--operators")
    assert status == 0 and "down_projection" in out
    found = json.loads(run(capsys, *DESIGN, "--operators", "--json")[1])
    assert "qkv_projection" in {row["name"] for row in found["operators"]}
    assert {row["phase"] for row in found["steps"]} == {"decode", "mixed"}


def test_ownership_and_axes_on_the_command_line(capsys):
    status, out, err = run(
        capsys, *DESIGN, "--ownership", "list", "--lifetime", "4", "--pue", "1.2",
        "--electricity", "0.05", "--json",
    )  # fmt: skip
    found = json.loads(out)
    assert (status, err) == (0, "") and found["ownership"] == "list"
    assert "lifetime 4 year (given)" in found["site_assumption"]
    assert found["wall_power_w"] > 1.2 * found["power_w"]
    status, out, _ = run(capsys, *SEARCH, "--per", "kw", "--json")
    assert status == 0 and json.loads(out)["y"] == "output_tokens_per_second_kw"
    assert "electricity" in fails(capsys, 2, *DESIGN, "--electricity", "0.05")
    assert "nearest: list" in fails(capsys, 2, *DESIGN, "--ownership", "lst")


def test_estimate_exports_commands(capsys, tmp_path):
    asked = [*DESIGN, "--prefix-hit", "0.256", "--export"]
    found = json.loads(run(capsys, *asked, "sglang", "--json")[1])["export"]
    assert (found["engine"], list(found["scripts"])) == ("sglang", ["serve.sh", "bench.sh"])
    assert "--gsp-system-prompt-len 1024" in found["scripts"]["bench.sh"]
    status, out, _ = run(capsys, *asked, "vllm")
    assert status == 0 and "TTFT" in out
    assert "# perfmodel estimate llama-3.3-70b h100 --tp 8 --batch 4" in out
    assert "\n  --max-num-seqs 4 \\\n" in out and "--random-prefix-len 1024 " in out
    status, out, _ = run(capsys, *asked, "trtllm", "--out", str(tmp_path / "run"))
    assert status == 0 and f"wrote {tmp_path / 'run' / 'serve.sh'}" in out
    assert "trtllm-serve" in (tmp_path / "run" / "serve.sh").read_text()
    assert "makes no int8" in fails(capsys, 2, *asked, "vllm", "--weights", "int8")
    # What cannot run is not exported, and says what helps as before.
    status, out, err = run(capsys, "estimate", MODEL, CHIP, "--export", "vllm", "--json")
    assert status == 3 and "export" not in json.loads(out) and "TP" in err


def test_infeasible_is_3_with_what_helps(capsys):
    status, out, err = run(capsys, "estimate", MODEL, CHIP, "--json")
    found = json.loads(out)
    assert status == 3 and found["feasible"] is False and found["ttft_s"] is None
    assert err.startswith("infeasible: memory") and "TP" in err and err.count("\n") == 1


def test_missed_limit_is_3(capsys):
    for limit in ("1us", "1e-6", "0.001ms"):
        assert "ttft limit" in fails(capsys, 3, *DESIGN, "--slo-ttft", limit)
    assert run(capsys, *DESIGN, "--slo-ttft", "10s", "--slo-tpot", "500ms")[0] == 0


def test_frontier_writes_and_prints(capsys, tmp_path):
    arguments = [*SEARCH, "--price", "h100=2", "--out", str(tmp_path)]
    status, out, err = run(capsys, *arguments)
    assert (status, err) == (0, "") and "h100_sxm 2.00" in out
    assert {p.name for p in tmp_path.iterdir()} == {f"frontier.{x}" for x in ("nc", "png", "html")}
    assert all(f"wrote {tmp_path / name}" in out for name in ("frontier.nc", "frontier.png"))
    found = json.loads(run(capsys, *arguments, "--json")[1])
    assert found["points"] and all(point["feasible"] for point in found["points"])
    assert found["chips"][0]["candidate"] == "h100_sxm" and found["version"]
    assert set(found["files"]) == {"nc", "png", "html"}
    assert found["command"].startswith("perfmodel frontier llama-3.1-8b --chip h100")


def test_frontier_without_any_plan_is_3(capsys):
    line = fails(capsys, 3, *SEARCH, "--slo-tpot", "1us")
    assert line.startswith("infeasible: ") and "h100_sxm" in line
    status, out, _ = run(capsys, *SEARCH, "--slo-tpot", "1us", "--json")
    found = json.loads(out)
    assert status == 3 and found["points"] == []
    assert found["chips"][0]["obstacle"].startswith("tpot limit")


def test_size_prints_and_writes(capsys, tmp_path):
    arguments = [*SIZE, "--slo-tpot", "30ms", "--price", "h100=2", "--out", str(tmp_path)]
    status, out, err = run(capsys, *arguments)
    assert (status, err) == (0, "")
    # 1 replica needed and 1 spare, of 1 chip each, in one server of 8 at 2 USD/h.
    assert "2 chips in 1 whole node of 8, 8 in all; $16.00/h" in out
    assert {p.name for p in tmp_path.iterdir()} == {"size.nc", "size.json"}
    found = json.loads(run(capsys, *arguments, "--json")[1])
    (row,) = found["deployments"]
    assert (row["chips"], row["replicas"], row["needed_replicas"], row["nodes"]) == (2, 2, 1, 1)
    assert row["headroom_left"] >= 1.2
    assert row["provisioned_usd_per_hour"] == pytest.approx(16.0)
    assert found["rate"] == 1.0 and found["chips"][0]["obstacle"] == ""
    assert set(found["files"]) == {"nc", "json"} and found["command"].startswith("perfmodel size")


def test_size_that_nothing_serves_is_3(capsys):
    line = fails(capsys, 3, *SIZE, "--slo-tpot", "1us")
    assert line.startswith("infeasible: ") and "h100_sxm: tpot limit" in line
    status, out, _ = run(capsys, *SIZE, "--slo-tpot", "1us", "--json")
    found = json.loads(out)
    assert status == 3 and found["deployments"] == []
    assert found["chips"][0]["obstacle"].startswith("tpot limit")
    assert "chips: needs 2 " in fails(capsys, 3, *SIZE, "--max-chips", "1")


def test_frontier_of_all_chips_gives_each_a_line(capsys):
    small = [word if word != "h100" else "all" for word in SEARCH]
    status, out, err = run(capsys, *small)
    assert (status, err) == (0, "") and "a100_80gb_sxm: no fp8 kernel" in out
    lines = out.splitlines()
    for name in chips.names():
        assert any(line.startswith((f"{name} ", f"{name}:")) for line in lines), name


def test_chips_and_models(capsys):
    listed = json.loads(run(capsys, "chips", "--json")[1])
    mine = {chip["name"]: chip for chip in listed["chips"]}
    assert mine["h100_sxm"]["memory_bandwidth_bytes_per_second"] == 3.35e12
    assert mine["h100_sxm"]["peak_fp4_flop_per_second"] is None
    assert run(capsys, "chips")[0] == run(capsys, "models")[0] == 0
    rows = json.loads(run(capsys, "chips", "mi300x", "--json")[1])["numbers"]
    assert all(row["unit"] and row["kind"] and row["origin"] for row in rows)
    status, out, _ = run(capsys, "chips", "mi300x")
    assert status == 0 and "memory_bandwidth" in out and "family default" in out
    model = json.loads(run(capsys, "models", MODEL, "--json")[1])
    assert model["parameters"] == model["active_parameters"] == 70_553_706_496
    # 2 · 80 layers · 8 kv heads · 128 wide · 2 B.
    assert model["kv_bytes_per_token"] == 327_680
    # By hand, 80 layers: queries and output of 64 heads, keys and values of 8, each 128 wide.
    flops = model["token_flops"]
    assert flops["attention projections"] == 80 * 2 * 8192 * (2 * 64 + 2 * 8) * 128
    assert flops["attention scores"] == 80 * 2 * 64 * 8192 * 2 * 128
    assert flops["dense feed-forward"] == 80 * 2 * 3 * 8192 * 28_672
    assert flops["output head"] == 2 * 8192 * 128_256
    assert flops["total"] == sum(n for name, n in flops.items() if name != "total")
    assert model["flops_context_tokens"] == 8192
    assert model["sequence_bytes"]["32768"] == 32_768 * 327_680
    assert model["own_weight_bytes"] == model["weight_bytes"]["bf16"] == 2 * model["parameters"]
    shown = run(capsys, "models", MODEL)[1]
    assert "70,553,706,496 (the same)" in shown and "attention scores" in shown
    sparse = json.loads(run(capsys, "models", "deepseek-v3.2", "--json")[1])["token_flops"]
    # 58 layers: 8 of 256 experts of width 2048, and one for every token, three matrices each.
    assert sparse["experts"] == 8 * sparse["shared experts"] == 8 * 58 * 2 * 3 * 7168 * 2048
    assert sparse["router"] == 58 * 2 * 7168 * 256
    # 64 heads of 128 score all keys; key and head weights from 7168, queries from 1536.
    scores = 2 * 64 * 128 * 8192
    assert sparse["indexer"] == 61 * (scores + 2 * (7168 * (128 + 64) + 1536 * 64 * 128))
    assert sparse["attention scores"] == 61 * 2 * 128 * 2048 * (576 + 512)
    hybrid = json.loads(run(capsys, "models", "qwen3-next-80b-a3b", "--json")[1])["token_flops"]
    # 36 delta layers of 32 heads, 7 FLOPs for each of 128 x 128 elements of a state.
    assert hybrid["recurrence"] == 36 * 32 * 7 * 128 * 128
    # Cache, and what compressors of ratios 128 and 4 hold of a sequence.
    held = json.loads(run(capsys, "models", "deepseek-v4-flash", "--json")[1])["sequence_bytes"]
    assert held["8192"] == 61_997_056 + 20 * 524_288 + 21 * 81_920


def test_study_list(capsys):
    status, out, _ = run(capsys, "study", "list")
    assert status == 0 and any(line.startswith("frontier ") for line in out.splitlines())


def test_a_network_read_as_dense_says_so(capsys, tmp_path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
             "intermediate_size": 128, "max_position_embeddings": 8192}  # fmt: skip
    file = tmp_path / "novel.json"
    file.write_text(json.dumps({"model_type": "novel", "num_experts": 8, **sizes}))
    assert "--assume-dense" in fails(capsys, 2, "models", str(file))
    said = "as asked: ignored are num_experts"
    plans = ("--chip", CHIP, "--max-chips", "1", "--precision", "bf16")
    for arguments in (
        ("estimate", str(file), CHIP),
        ("models", str(file)),
        ("frontier", str(file), *plans),
        ("size", str(file), "--rate", "1", *plans, "--spare", "0"),
    ):
        status, out, err = run(capsys, *arguments, "--assume-dense", "--json")
        assert status == 0, err
        assert said in str(json.loads(out)["notes"])
    _, out, _ = run(capsys, "models", str(file), "--assume-dense")
    assert said in " ".join(out.split())


# ---- Bad input ----

BAD = {
    "unknown chip": (["estimate", MODEL, "h10"], "h100_sxm"),
    "half a chip's name": (["estimate", MODEL, "mi300"], "mi300x"),
    "unknown chip in a list": (["frontier", MODEL, "--chip", "h100", "--chip", "b20"], "b200_sxm"),
    "unknown model": (["estimate", "lama-3.3-70b", CHIP], "llama-3.3-70b"),
    "missing file": (["estimate", "./no/config.json", CHIP], "no such file"),
    "missing chip file": (["estimate", MODEL, "no.toml"], "no such file"),
    "folder without config": (["estimate", "{tmp}", CHIP], "no such file"),
    "truncated JSON": (["estimate", "{tmp}/truncated.json", CHIP], "not valid JSON"),
    "binary file": (["estimate", "{tmp}/binary.json", CHIP], "not UTF-8"),
    "folder as a chip": (["estimate", MODEL, "{tmp}/"], "not a regular file"),
    "images without a tower": (["frontier", MODEL, "--chip", CHIP, "--images", "1"],
                               "has no image encoder in its config.json (nearest: 0)"),
    "more images than prompt": (["size", "kimi-k2.5", "--rate", "1", "--images", "4"],
                                "4 × 1,024 tokens exceed the 4,000 prompt tokens"),
    "routing without experts": (["frontier", MODEL, "--chip", CHIP, "--routing", "power:1.2"],
                                "has no experts to route to"),
    "not a routing": (["size", MODEL, "--rate", "1", "--routing", "1.2"], "nearest: power:1.2"),
    "negative batch": (["estimate", MODEL, CHIP, "--batch", "-1"], "at least 1"),
    "uneven tp": (["estimate", MODEL, CHIP, "--tp", "3"], "nearest: 4"),
    "no prompt": (["estimate", MODEL, CHIP, "--isl", "0"], "at least 1"),
    "unknown format": (["estimate", MODEL, CHIP, "--weights", "fp9"], "fp8"),
    "format without kernel": (["estimate", MODEL, CHIP, "--weights", "fp4"], "no fp4 kernel"),
    "not a number": (["estimate", MODEL, CHIP, "--tp", "two"], "--tp"),
    "not a time": (["estimate", MODEL, CHIP, "--slo-ttft", "soon"], "500ms"),
    "nan": (["estimate", MODEL, CHIP, "--prefix-hit", "nan"], "share"),
    "not a price": (["frontier", MODEL, "--chip", CHIP, "--price", "h100=x"], "dollars"),
    "two prices for all": (["frontier", MODEL, "--chip", CHIP, "--price", "1", "--price", "2"],
                           "name a chip"),
    "two prices of a chip": (["frontier", MODEL, "--chip", CHIP, "--price", "h100=1", "--price",
                              "h100_sxm=2"], "h100_sxm is given more than once"),
    "price of nothing": (["frontier", MODEL, "--chip", CHIP, "--price", "=2"], "name is needed"),
    "absurd price": (["estimate", MODEL, CHIP, "--price", "1e6"], "at most 100,000"),
    "no chip": (["frontier", MODEL], "--chip"),
    "no rate": (["size", MODEL], "--rate"),
    "negative rate": (["size", MODEL, "--rate", "-1"], "positive number of requests"),
    "unknown chip to size": (["size", MODEL, "--rate", "1", "--chip", "h10"], "h100_sxm"),
    "unknown order": (["size", MODEL, "--rate", "1", "--by", "price"], "usd"),
    "negative headroom": (["size", MODEL, "--rate", "1", "--headroom", "-1"], "0 or more"),
    "unknown axis": (["frontier", MODEL, "--chip", CHIP, "--x", "ttft"], "ttft_s"),
    "unknown option": (["estimate", MODEL, CHIP, "--bach", "2"], "--batch"),
    "unknown command": (["fronteir"], "frontier"),
    "unknown study": (["study", "fronteir"], "frontier"),
    "missing argument": (["estimate", MODEL], "CHIP"),
    "too many arguments": (["models", "llama-3.1-8b", "llama-3.3-70b"], "llama-3.3-70b"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_that_names_the_nearest(case, capsys, tmp_path):
    (tmp_path / "truncated.json").write_text('{"model_type": "llama", "hidden_size"')
    (tmp_path / "binary.json").write_bytes(bytes(range(256)))
    arguments, hint = BAD[case]
    line = fails(capsys, 2, *(a.replace("{tmp}", str(tmp_path)) for a in arguments))
    assert line.startswith("error: ") and hint in line
    assert len(line) < 400


def test_unwritable_folder(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    line = fails(capsys, 2, *SEARCH, "--out", str(tmp_path / "file"))
    assert "cannot be written" in line


TOKENS = st.sampled_from(
    ["estimate", "chips", "models", "frontier", MODEL, CHIP, "--tp", "--isl", "--osl", "--batch",
     "--weights", "--json", "--slo-ttft", "--prefix-hit", "--engine", "--help", "--version", "8",
     "0", "-1", "1e99", "nan", "fp8", "2s", "--", "-", "", "=", "--tp=2", "\u202e", "\x00", "é"]
) | st.text(max_size=8)  # fmt: skip


@hypothesis.settings(
    max_examples=150, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)
@hypothesis.given(st.lists(TOKENS, max_size=7))
def test_any_words_end_with_a_status_and_at_most_one_line(capsys, words):
    capsys.readouterr()
    status, _, err = run(capsys, *words)
    assert status in (0, 2, 3)
    assert err.count("\n") == (0 if status == 0 else 1)
    assert "Traceback" not in err


# ---- What goes wrong in between ----


def test_interrupt_is_one_line(capsys, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(perfmodel, "estimate", interrupt, raising=False)
    status, out, err = run(capsys, *DESIGN)
    assert (status, out, err) == (130, "", "error: interrupted\n")


def test_a_bug_is_one_line_and_1(capsys, monkeypatch):
    def bug(*_, **__):
        raise TypeError("first\nsecond")

    monkeypatch.setattr(perfmodel, "estimate", bug, raising=False)
    assert "TypeError" in fails(capsys, 1, *DESIGN)


def test_closed_pipe_is_quiet():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "perfmodel", "models"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert done.returncode == 141 and done.stderr == ""


@pytest.mark.parametrize("target", ["> /dev/full", ">&-"])
def test_output_that_cannot_be_written_is_one_line_and_1(target):
    command = ["sh", "-c", f'"$0" -m perfmodel models {target}', sys.executable]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: standard output") and "a bug" not in done.stderr
