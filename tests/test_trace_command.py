"""`perfmodel estimate CHIP --trace`: what it prints, its JSON, and bad input in one line."""

import contextlib
import io
import json
import re
from pathlib import Path

import jax
import pytest

from perfmodel import cli

SOURCE = """
import jax, jax.numpy as jnp

def layer(x, w, v):
    return jax.nn.silu(x @ w) @ v

def raises(x):
    raise KeyError("no\\nsuch key")

EXAMPLE = (lambda p, x: x @ p["w"], {"w": jax.ShapeDtypeStruct((64, 32), jnp.bfloat16)},
           jax.ShapeDtypeStruct((8, 64), jnp.bfloat16))
HUGE = (lambda p, x: x @ p["w"], {"w": jax.ShapeDtypeStruct((2**18, 2**18), jnp.bfloat16)},
        jax.ShapeDtypeStruct((1, 2**18), jnp.bfloat16))
"""
SHAPES = ("--shape", "8,4096:bf16", "--shape", "4096,8192", "--shape", "8192,4096:bf16")


@pytest.fixture(autouse=True)
def _module(tmp_path, monkeypatch) -> None:
    (tmp_path / "traced_here.py").write_text(SOURCE)
    (tmp_path / "broken_here.py").write_text("import nothing_of_this_name\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "_ready", lambda: None)


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    status = cli.main(["estimate", *arguments])
    out, err = capsys.readouterr()
    return status, out, err


def test_a_function_of_the_working_directory(capsys) -> None:
    command = ("h100", "--trace", "traced_here:layer", *SHAPES)
    status, out, err = run(capsys, *command)
    assert (status, err) == (0, "")
    assert "traced_here:layer on h100_sxm" in out and "[8 × 8,192 × 4,096]" in out
    status, out, _ = run(capsys, *command, "--json")
    found = json.loads(out)
    flops = 2 * 8 * 4096 * 8192
    assert status == 0 and found["product_flops"] == 2 * flops
    assert [row["flops"] for row in found["operators"]] == [flops, 2 * 8 * 8192, flops]
    assert found["time_s"] == pytest.approx(sum(row["seconds"] for row in found["operators"]))
    assert found["feasible"] is True and found["unknown"] == [] and found["chip"] == "h100_sxm"


def test_arguments_that_come_with_the_function(capsys) -> None:
    found = json.loads(run(capsys, "h100", "--trace", "traced_here:EXAMPLE", "--json")[1])
    assert found["product_flops"] == 2 * 8 * 64 * 32
    assert (found["parameter_bytes"], found["input_bytes"]) == (2 * 64 * 32, 2 * 8 * 64)


def test_what_does_not_fit_exits_with_3(capsys) -> None:
    status, out, err = run(capsys, "h100", "--trace", "traced_here:HUGE")
    assert status == 3 and "matmul" in out
    assert err.startswith("infeasible: memory:") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("h100 --trace traced_here:laier --shape 8", "has no 'laier' (nearest: layer,"),
        ("h100 --trace traced_her:layer", "no module named 'traced_her'"),
        ("h100 --trace broken_here:f", "importing broken_here raised ModuleNotFoundError"),
        ("h100 --trace traced_here.py:layer", "try traced_here:layer"),
        ("h100 --trace traced_here", "module:function is needed"),
        ("h100 --trace traced_here:jax", "is no function"),
        ("h100 --trace traced_here:layer --shape 8,b", "not '8,b'"),
        ("h100 --trace traced_here:layer --shape 8:bf17", "unknown data type 'bf17' (nearest:"),
        ("h100 --trace traced_here:layer --shape 8,-1", "sizes and a data type are needed"),
        ("h100 --trace traced_here:EXAMPLE --shape 8", "holds its arguments already"),
        ("h100 --trace traced_here:layer --shape 8", "raised TypeError"),
        ("h100 --trace traced_here:raises --shape 8", "raised KeyError"),
        ("h10 --trace traced_here:layer --shape 8", "unknown chip 'h10'"),
        ("h100 b200 --trace traced_here:layer", "takes one CHIP and no MODEL"),
        ("h100 --trace traced_here:layer --tp 8", "takes no --tp"),
        ("llama-3.3-70b h100 --shape 8", "that --trace names"),
        ("llama-3.3-70b", "missing argument 'CHIP'"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments: str, said: str) -> None:
    status, _, err = run(capsys, *arguments.split())
    assert status == 2 and said in err, err
    assert err.count("\n") == 1 and err.startswith("error: ")


def test_the_examples_of_the_document_print_what_it_says() -> None:
    text = (Path(__file__).parents[1] / "docs" / "trace.md").read_text()
    found = re.findall(r"```python\n(.*?)```\n\n((?:    [^\n]*\n)+)", text, re.DOTALL)
    assert len(found) == 2
    scope: dict = {"jax": jax}
    for code, expected in found:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, scope)
        assert printed.getvalue() == re.sub("^    ", "", expected, flags=re.MULTILINE)
