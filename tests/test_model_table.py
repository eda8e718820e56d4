"""The page of counted and published parameters."""

import pathlib
import re

import pytest

from perfmodel import model_table
from perfmodel.catalog import Number
from perfmodel.models.catalogue import load_model, names

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "models.md"


def test_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == model_table.page()


def test_every_network_has_a_row_that_agrees() -> None:
    rows = dict(re.findall(r"^\| `(.+?)` \| (.+) \|$", model_table.page(), re.MULTILINE))
    assert set(rows) == set(names())
    assert not [name for name, row in rows.items() if "| differs |" in row]
    # Counted by hand in the tests of models: 116,829,156,672, and 5.71 billion that are 5.13
    # without one table.
    cells = rows["gpt-oss-120b"].split(" | ")
    assert cells[:2] == ["116,829,156,672", "116,829,156,672"] and cells[3] == "equal"
    assert cells[4:7] == ["5,711,982,912", "5.13 billion", "half a digit"]
    assert cells[7].endswith("without embedding")
    entry = load_model("gpt-oss-120b")
    assert model_table.counted_active(entry) == 5_711_982_912 - 201_088 * 2_880
    assert rows["llama-3.1-8b"].split(" | ")[4] == "all"


def test_mixtures_have_a_published_active_count() -> None:
    for name in names():
        entry = load_model(name)
        assert entry.model.is_mixture == ("active_parameters" in entry.published), name


@pytest.mark.parametrize(
    ("low", "high", "count", "said"),
    [
        (None, None, 7_000_000_000, "equal"),
        (None, None, 7_000_000_001, "differs"),
        (6.5e9, 7.5e9, 7_499_999_999, "half a digit"),
        (6.5e9, 7.5e9, 7_600_000_000, "differs"),
        # Half a digit of 0.2 billion is none; nor is more on one side.
        (6.9e9, 7.1e9, 7_050_000_000, "bounds"),
        (6.5e9, 7.6e9, 7_550_000_000, "bounds"),
    ],
)
def test_agreement(low: float | None, high: float | None, count: int, said: str) -> None:
    number = Number(7e9, "1", "reported", low=low, high=high)
    assert model_table.agreement(number, count) == said
