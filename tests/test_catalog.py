"""The reader: hostile files, numbers with provenance, names."""

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel import catalog
from perfmodel.catalog import Field, Number
from perfmodel.errors import InputError

SCHEMA = (
    Field("speed", "B/s", "how fast", 1.0, 1e15, required=True),
    Field("size", "B", "how large", 0.0, 1e15),
)
SOURCES = {"sheet": catalog.Source("A sheet")}
GOOD = {"value": 2e12, "unit": "B/s", "kind": "reported", "source": "sheet"}


def one_line(error: pytest.ExceptionInfo[InputError]) -> str:
    message = str(error.value)
    assert "\n" not in message and message.isprintable() and len(message) < 600
    return message


def parse(entry: object, field: str = "speed") -> dict[str, Number]:
    return catalog.parse_numbers({"speed": GOOD, field: entry}, SCHEMA, SOURCES, "x.toml")


def test_number_keeps_its_provenance():
    entry = GOOD | {"low": 1e12, "high": 3e12, "note": "two\n lines"}
    number = parse(entry)["speed"]
    assert number == Number(2e12, "B/s", "reported", "sheet", "two lines", 1e12, 3e12)


def test_number_without_source_is_an_assumption():
    assert parse({"value": 1.0, "unit": "B"}, "size")["size"].kind == "assumed"


def test_unknown_number_has_no_value():
    number = parse({"unit": "B", "kind": "unknown"}, "size")["size"]
    assert number.value is None and number.kind == "unknown"


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (2e12, "must be a table"),
        (GOOD | {"value": True}, "must be a number, not true or false"),
        (GOOD | {"value": "2e12"}, "must be a number, not text"),
        (GOOD | {"value": float("nan")}, "finite"),
        (GOOD | {"value": float("inf")}, "finite"),
        (GOOD | {"value": 10**400}, "finite"),
        (GOOD | {"value": -1.0}, "outside 1 to 1e+15 B/s"),
        (GOOD | {"unit": "GB/s"}, 'unit must be "B/s"'),
        (GOOD | {"unit": 3}, "must be text"),
        ({"value": 2e12, "kind": "reported", "source": "sheet"}, 'must be "B/s"; it is missing'),
        (GOOD | {"kind": "guessed"}, "unknown kind 'guessed'"),
        (GOOD | {"source": "shet"}, "nearest: sheet"),
        (GOOD | {"low": 3e12}, "not between its low and high"),
        (GOOD | {"high": 1e12}, "not between its low and high"),
        (GOOD | {"kind": "unknown"}, "has no value"),
        (GOOD | {"vlue": 1.0}, "unknown key 'vlue' (nearest: value)"),
        ({"unit": "B/s", "kind": "reported", "source": "sheet"}, "value is missing"),
        ({"value": 2e12, "unit": "B/s", "kind": "reported"}, "needs a source"),
        ({"value": 2e12, "unit": "B/s", "source": "sheet"}, "kind is missing"),
    ],
)
def test_bad_numbers_are_named(entry: object, words: str):
    with pytest.raises(InputError) as error:
        parse(entry)
    message = one_line(error)
    assert message.startswith("x.toml: speed") and words in message


def test_unknown_and_missing_fields():
    with pytest.raises(InputError, match=r"unknown field 'spede' \(nearest: speed\)"):
        catalog.parse_numbers({"spede": GOOD}, SCHEMA, SOURCES, "x")
    with pytest.raises(InputError, match=r"missing speed \[B/s\]"):
        catalog.parse_numbers({}, SCHEMA, SOURCES, "x")


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "a": 2}',
        '{"a": NaN}',
        '{"a": -Infinity}',
        '{"a": 1e999}',
        '{"a": 123456789012345678901234567890}',
        '{"a": ' + "9" * 100_000 + "}",
        "[1, 2]",
        '"text"',
        "null",
        "",
        '{"a": 1',
        "[" * 200_000,
        '{"a": ' * 100_000,
        '{"a": ' + "[" * 100 + "]" * 100 + "}",
        '{"a": "\\ud800"}',
        '{"\\ud800": 1}',
        "\ufeff\ufeff{}",
    ],
)
def test_json_that_is_refused(text: str):
    with pytest.raises(InputError) as error:
        catalog.parse_json(text, "x.json")
    assert one_line(error).startswith("x.json: ")


def test_json_says_where():
    with pytest.raises(InputError, match="line 2, column 9"):
        catalog.parse_json('{"a": 1,\n "b": 2 "c"}', "x.json")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.text("abé\n", max_size=5),
        lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text("ab"), below),
        max_leaves=10,
    )
)
def test_json_that_is_accepted(value: object):
    text = json.dumps({"key": value})
    assert catalog.parse_json(text, "x.json") == {"key": value}


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_read_or_refused_in_one_line(text: str):
    for read in (catalog.parse_json, catalog.parse_toml):
        try:
            read(text, "x")
        except InputError as error:
            assert "\n" not in str(error) and str(error).isprintable()


@pytest.mark.parametrize(
    "text", ["a = 1\na = 2", "a = [", "a = " + "[" * 50_000, "a = " + "9" * 9999]
)
def test_toml_that_is_refused(text: str):
    with pytest.raises(InputError) as error:
        catalog.parse_toml(text, "x.toml")
    assert one_line(error).startswith("x.toml: ")


def test_only_regular_utf8_files_of_reasonable_size_are_read(tmp_path):
    path = tmp_path / "file.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert catalog.read_json(path) == {"a": 1}
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(InputError, match=r"file.json: not UTF-8 text \(byte 7\)"):
        catalog.read_json(path)
    path.write_bytes(b" " * (4 * 2**20 + 1))
    with pytest.raises(InputError, match="file.json: larger than"):
        catalog.read_json(path)
    with pytest.raises(InputError, match="not a regular file"):
        catalog.read_json(tmp_path)
    with pytest.raises(InputError, match="no such file"):
        catalog.read_json(tmp_path / "none.json")
    with pytest.raises(InputError, match="cannot be read"):
        catalog.read_json("a\0b")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(InputError, match="not a regular file"):
            catalog.read_json(tmp_path / "pipe")


KNOWN = {
    "h100_sxm": ["h100", "h100-sxm5"],
    "h100_nvl": ["h100 nvl"],
    "mi300x": [],
    "q-2.5": ["same"],
}


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("h100", "h100_sxm"),
        ("H100 SXM", "h100_sxm"),
        ("h100_sxm", "h100_sxm"),
        ("H100-SXM5", "h100_sxm"),
        (" MI-300X ", "mi300x"),
        ("Q2.5", "q-2.5"),
    ],
)
def test_names_that_resolve(name: str, key: str):
    assert catalog.resolve(name, KNOWN, "chip") == key


@pytest.mark.parametrize(
    ("name", "near"),
    [("h10", "h100_sxm"), ("mi300", "mi300x"), ("q25", "q-2.5"), ("", "mi300x"), (3, "mi300x")],
)
def test_names_that_do_not(name: object, near: str):
    with pytest.raises(InputError) as error:
        catalog.resolve(name, KNOWN, "chip")
    assert near in one_line(error)


def test_ambiguous_name():
    with pytest.raises(InputError, match="ambiguous: a, b"):
        catalog.resolve("x", {"a": ["x"], "b": ["X"]})


def test_digest_follows_values():
    assert catalog.digest({"a": 1.0}) == catalog.digest({"a": 1.0})
    assert catalog.digest({"a": 1.0}) != catalog.digest({"a": 1.0 + 1e-15})
    assert len(catalog.digest({})) == 12


def test_a_long_dotted_key_is_refused_at_once():
    with pytest.raises(InputError, match="line 1"):
        catalog.parse_toml("a." * 250_000 + "a = 1", "hostile.toml")
