"""Counts with unknowns: normal form, exact and differentiable values, JAX's syntax."""

from fractions import Fraction

import hypothesis
import jax
import pytest
from hypothesis import strategies as st
from jax import export

from perfmodel import symbols
from perfmodel.errors import InputError

B, L = symbols.symbols("b, l")


def test_equal_polynomials_are_equal_and_constants_are_numbers() -> None:
    assert (B + L) ** 2 == B * B + 2 * L * B + L * L
    assert hash(B + L) == hash(L + B)
    assert B - B == 0 and isinstance(3 + B * 0, int)
    assert 6 * B * L // 3 == 2 * L * B
    assert str(3 * B * L**2 - 2 * B + 5) == "3*b*l^2 - 2*b + 5"


def test_values_are_exact_on_integers_of_any_size() -> None:
    huge = 2**70 + 1
    assert (B * L - 1).evaluate({"b": huge, "l": huge}) == huge * huge - 1
    assert symbols.divide(B, 3).evaluate({"b": 4}) == Fraction(4, 3)
    assert symbols.divide(B, 3).evaluate({"b": 9}) == 3
    assert isinstance(symbols.divide(B, 3).evaluate({"b": 9}), int)
    both = symbols.call("min", symbols.call("max", B, L), 5) + B % 4
    assert [both.evaluate({"b": b, "l": 3}) for b in (1, 4, 7)] == [3 + 1, 4 + 0, 5 + 3]


@hypothesis.given(st.integers(1, 10**9), st.integers(1, 10**9), st.integers(2, 50))
def test_evaluation_commutes_with_arithmetic(b: int, l: int, k: int) -> None:  # noqa: E741
    made = (B * k + L) * (L - k) // k + symbols.call("max", B, k * L) + (B + L) % k
    assert (
        made.evaluate({"b": b, "l": l}) == (b * k + l) * (l - k) // k + max(b, k * l) + (b + l) % k
    )


def test_slopes_are_those_of_the_polynomial() -> None:
    # d/db (3b²l + b) = 6bl + 1; a large coefficient overflows no 32 bits.
    slope = jax.grad(lambda b: (3 * B * B * L + B).evaluate({"b": b, "l": 7}))(5.0)
    assert float(slope) == 211.0
    large = jax.grad(lambda b: (2**50 * B).evaluate({"b": b}))(1.0)
    assert float(large) == 2.0**50
    # A quotient rounded down has the slope of its chord, a maximum that of the larger.
    assert float(jax.grad(lambda b: (B // 4).evaluate({"b": b}))(9.0)) == 0.25
    assert float(jax.grad(lambda b: symbols.call("max", B, L).evaluate({"b": b, "l": 2}))(3.0)) == 1


def test_every_form_that_jax_prints_is_read_back() -> None:
    b, l = export.symbolic_shape("b, l")  # noqa: E741
    made = [
        2 * b + 3, (b + 3) // 2, b * l * l - b, (b * l) % 4, -b + l,
        *export.symbolic_shape("max(b, 3), min(b - 1, 4), max(floordiv(b, 2), b*b - 7)"),
    ]  # fmt: skip
    expected = [
        2 * 9 + 3, 6, 9 * 25 - 9, 45 % 4, -4, 9, 4, 74,
    ]  # fmt: skip
    found = [symbols.evaluate(symbols.parse(str(d)), {"b": 9, "l": 5}) for d in made]
    assert found == expected


@pytest.mark.parametrize("text", ["b +", "f(b)", "b.c", "'b'", "b[0]", "ceil(b, 2)"])
def test_what_is_no_size_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(InputError) as error:
        symbols.parse(text)
    assert "\n" not in str(error.value)


def test_a_missing_value_is_named() -> None:
    with pytest.raises(InputError, match="l: a value is needed"):
        (B * L).evaluate({"b": 2})
