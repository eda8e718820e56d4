"""Counts with unknowns in them: polynomials of named integers, of quotients, minima and maxima.

`8 * b * l**2 + b // 2` is an `Expression`; it adds and multiplies as a number does, stays in one
normal form (so that equal counts are equal), prints as it is read, and `evaluate` gives its value:
exact for Python integers, differentiable for traced arrays.
"""

import ast
import dataclasses
import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from perfmodel.errors import InputError, nearest, shorten
from perfmodel.relax import as_real, floor, inverse, maximum, minimum

Size = Any
"""A Python integer or fraction, or an `Expression`."""


@dataclasses.dataclass(frozen=True, order=True)
class Symbol:
    """A named unknown, a positive integer such as a batch or a length."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class Call:
    """What is no polynomial: `//`, `/`, `min`, `max` or `mod` of two expressions."""

    operation: str
    left: "Expression"
    right: "Expression"

    def __str__(self) -> str:
        if self.operation in ("//", "/"):
            return f"{_wrapped(self.left)}{self.operation}{_wrapped(self.right)}"
        return f"{self.operation}({self.left}, {self.right})"


def _wrapped(value: "Expression") -> str:
    text = str(value)
    return text if re.fullmatch(r"\w+", text) else f"({text})"


Monomial = tuple[tuple[Symbol | Call, int], ...]
"""Factors and their powers, sorted by what they print as."""


@dataclasses.dataclass(frozen=True)
class Expression:
    """A sum of products: pairs of a monomial and its coefficient, sorted, none of them 0.

    >>> b, l = symbols("b, l")
    >>> (b + 1) * (b - 1) + 2 * l // 4, (2 * b + 3).evaluate({"b": 2**60})
    (b^2 + (2*l)//4 - 1, 2305843009213693955)
    """

    terms: tuple[tuple[Monomial, Any], ...]

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        # Higher powers first, as one writes a polynomial.
        order = sorted(self.terms, key=lambda term: -sum(power for _, power in term[0]))
        texts = [_term(monomial, coefficient) for monomial, coefficient in order]
        return " + ".join(texts).replace("+ -", "- ") or "0"

    def __add__(self, other: Size) -> Size:
        if not _known(other):
            return NotImplemented
        return _normal((*self.terms, *_expression(other).terms))

    def __mul__(self, other: Size) -> Size:
        if not _known(other):
            return NotImplemented
        pairs = ((one, two) for one in self.terms for two in _expression(other).terms)
        return _normal((_product(a[0], b[0]), a[1] * b[1]) for a, b in pairs)

    __radd__ = __add__
    __rmul__ = __mul__

    def __neg__(self) -> Size:
        return self * -1

    def __sub__(self, other: Size) -> Size:
        return self + -1 * other if _known(other) else NotImplemented

    def __rsub__(self, other: Size) -> Size:
        return -self + other if _known(other) else NotImplemented

    def __pow__(self, power: int) -> Size:
        found: Size = 1
        for _ in range(power):
            found = found * self
        return found

    def __floordiv__(self, other: Size) -> Size:
        return call("//", self, other)

    def __rfloordiv__(self, other: Size) -> Size:
        return call("//", other, self)

    def __truediv__(self, other: Size) -> Size:
        return divide(self, other)

    def __rtruediv__(self, other: Size) -> Size:
        return divide(other, self)

    def __mod__(self, other: Size) -> Size:
        return call("mod", self, other)

    @property
    def names(self) -> frozenset[str]:
        """Names of the unknowns."""
        return names(self)

    def evaluate(self, values: Mapping[str, Any]) -> Any:
        """Returns the value where each unknown has one: a number, or a traced array.

        Exact on Python integers. Quotients rounded down have the slope of their chord
        (`perfmodel.relax.floor`).

        >>> import jax
        >>> b, l = symbols("b, l")
        >>> float(jax.grad(lambda x: (b * l**2).evaluate({"b": 2, "l": x}))(3.0))
        12.0
        """
        missing = sorted(self.names - set(values))
        if missing:
            raise InputError(f"{missing[0]}: a value is needed for it in {shorten(self)}")
        exact = all(isinstance(value, int | Fraction) for value in values.values())
        found: Any = 0
        for monomial, coefficient in self.terms:
            # A traced product with a large Python integer would overflow 32 bits.
            term = coefficient if exact else float(coefficient)
            for atom, power in monomial:
                value = _value(atom, values)
                for _ in range(power):
                    term = term * value
            found = found + term
        return plain(found)


def _term(monomial: Monomial, coefficient: Any) -> str:
    factors = [str(atom) if power == 1 else f"{atom}^{power}" for atom, power in monomial]
    if not factors or coefficient not in (1, -1):
        factors.insert(0, f"{coefficient}")
    return ("-" if coefficient == -1 and monomial else "") + "*".join(factors)


def _value(atom: Symbol | Call, values: Mapping[str, Any]) -> Any:
    if isinstance(atom, Symbol):
        return values[atom.name]
    left, right = atom.left.evaluate(values), atom.right.evaluate(values)
    return _apply(atom.operation, left, right)


def _apply(operation: str, left: Any, right: Any) -> Any:
    exact = isinstance(left, int | Fraction) and isinstance(right, int | Fraction)
    if operation == "max":
        return max(left, right) if exact else maximum(left, right)
    if operation == "min":
        return min(left, right) if exact else minimum(left, right)
    if exact:
        if right == 0:
            raise InputError(f"{shorten(left)} is divided by 0 in a count")
        if operation == "/":
            return plain(Fraction(left) / right)
        return left // right if operation == "//" else left % right
    quotient = as_real(left) * inverse(right)
    if operation == "/":
        return quotient
    down = floor(quotient)
    return down if operation == "//" else left - right * down


def _known(value: Any) -> bool:
    return isinstance(value, Expression | int | float | Fraction)


def _expression(value: Size) -> Expression:
    if isinstance(value, Expression):
        return value
    return Expression((((), value),) if value else ())


def _product(one: Monomial, two: Monomial) -> Monomial:
    powers: dict[Symbol | Call, int] = {}
    for atom, power in (*one, *two):
        powers[atom] = powers.get(atom, 0) + power
    return tuple(sorted(powers.items(), key=lambda factor: str(factor[0])))


def _normal(terms: Iterable[tuple[Monomial, Any]]) -> Size:
    """Returns the sum of terms in normal form; a constant as a number."""
    found: dict[Monomial, Any] = {}
    for monomial, coefficient in terms:
        found[monomial] = found.get(monomial, 0) + coefficient
    kept = {monomial: plain(value) for monomial, value in found.items() if value}
    if not set(kept) - {()}:
        return kept.get((), 0)
    return Expression(tuple(sorted(kept.items(), key=lambda term: str(term[0]))))


def plain(value: Any) -> Any:
    """Returns a fraction that is a whole number as an integer, anything else as it is."""
    whole = isinstance(value, Fraction) and value.denominator == 1
    return int(value) if whole else value


def call(operation: str, left: Size, right: Size) -> Size:
    """Returns `//`, `/`, `min`, `max` or `mod` of two sizes, worked out where they are numbers.

    >>> b = symbols("b")[0]
    >>> call("max", 3, b), call("//", 7, 2), 6 * b // 2, b // 2
    (max(3, b), 3, 3*b, b//2)
    """
    if not isinstance(left, Expression) and not isinstance(right, Expression):
        return _apply(operation, left, right)
    if left == right:
        return left if operation in ("min", "max") else 0 if operation == "mod" else 1
    if operation == "//" and isinstance(right, int) and right:
        quotient = divide(left, right)
        if all(isinstance(value, int) for _, value in _expression(quotient).terms):
            return quotient
    atom = Call(operation, _expression(left), _expression(right))
    return Expression(((((atom, 1),), 1),))


def divide(left: Size, right: Size) -> Size:
    """Returns the exact quotient: an integer, a fraction, or an expression.

    >>> b = symbols("b")[0]
    >>> divide(6, 4), divide(6 * b, 4), divide(6 * b * b, 3 * b), divide(b, b + 1)
    (Fraction(3, 2), 3/2*b, 2*b, b/(b + 1))
    """
    if not isinstance(right, Expression):
        if isinstance(left, Expression):
            return left * (1 / Fraction(right))
        return plain(Fraction(left) / right)
    over = _expression(left)
    if len(right.terms) == 1:
        # Where every term has the factors of a single product, they cancel.
        ((monomial, coefficient),) = right.terms
        powers, quotients = dict(monomial), []
        for factors, value in over.terms:
            left_over = dict(factors)
            if any(left_over.get(atom, 0) < power for atom, power in powers.items()):
                return call("/", left, right)
            rest = ((atom, power - powers.get(atom, 0)) for atom, power in factors)
            kept = tuple((atom, power) for atom, power in rest if power)
            quotients.append((kept, Fraction(value) / coefficient))
        return _normal(quotients)
    return call("/", left, right)


def symbols(listed: str) -> tuple[Expression, ...]:
    """Returns unknowns by the names in a list with commas or spaces between.

    >>> symbols("batch, length")
    (batch, length)
    """
    found = re.split(r"[\s,]+", listed.strip())
    return tuple(Expression(((((Symbol(name), 1),), 1),)) for name in found)


def names(value: Size) -> frozenset[str]:
    """Returns the names of the unknowns in a size.

    >>> sorted(names(parse("b*l^2 + max(h, 3)"))), names(3)
    (['b', 'h', 'l'], frozenset())
    """
    if not isinstance(value, Expression):
        return frozenset()
    found: set[str] = set()
    for monomial, _ in value.terms:
        for atom, _ in monomial:
            inner = {atom.name} if isinstance(atom, Symbol) else atom.left.names | atom.right.names
            found |= inner
    return frozenset(found)


def evaluate(value: Size, values: Mapping[str, Any]) -> Any:
    """Returns the value of a size where each unknown has one; a number is its own value."""
    return value.evaluate(values) if isinstance(value, Expression) else value


_OPERATORS = {ast.FloorDiv: "//", ast.Div: "/", ast.Mod: "mod"}
_FUNCTIONS = {"floordiv": "//", "mod": "mod", "max": "max", "min": "min"}


def parse(text: str) -> Size:
    """Returns the size that a text says, in the syntax in which JAX writes symbolic dimensions.

    >>> parse("b*l^2 - b + floordiv(b + 3, 2)"), parse("2*3")
    (b*l^2 + (b + 3)//2 - b, 6)
    """
    try:
        return _read(ast.parse(text.strip().replace("^", "**"), mode="eval").body, text)
    except SyntaxError:
        raise InputError(f"{shorten(text)!r} is no size that can be read") from None


def _read(node: ast.expr, text: str) -> Size:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.Name(id=name):
            return symbols(name)[0]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -1 * _read(operand, text)
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int() as power)):
            return _read(left, text) ** power
        case ast.BinOp(left=left, op=op, right=right):
            one, two = _read(left, text), _read(right, text)
            if isinstance(op, ast.Add):
                return one + two
            if isinstance(op, ast.Sub):
                return one - two
            if isinstance(op, ast.Mult):
                return one * two
            if type(op) in _OPERATORS:
                return call(_OPERATORS[type(op)], one, two)
        case ast.Call(func=ast.Name(id=name), args=[left, right]) if name in _FUNCTIONS:
            return call(_FUNCTIONS[name], _read(left, text), _read(right, text))
        case ast.Call(func=ast.Name(id=name)):
            raise InputError(f"{shorten(text)!r}: unknown {name}{nearest(name, _FUNCTIONS)}")
        case _:
            pass
    raise InputError(f"{shorten(text)!r} is no size that can be read")
