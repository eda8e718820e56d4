"""Any JAX, Flax or Equinox function as a list of operators, and its time on any chip.

`trace` runs a function on shapes alone, as `jax.jit` would, and turns the program into the
operators of `perfmodel.operators`; `Traced.on` times them. What a compiler would change after that
is in `perfmodel._lowering` (fusion, views, constants) and `docs/trace.md` (what is not modelled).
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from perfmodel import _jaxpr, question, results, symbols
from perfmodel._lowering import Choice, Lowered, Node
from perfmodel.errors import InputError, shorten
from perfmodel.evaluation import PARTS, SHAPES
from perfmodel.machine import Machine, Rank, Usage
from perfmodel.operators import KERNELS, Collective, Matmul, Operator, Operators, total
from perfmodel.question import ChipLike
from perfmodel.relax import as_real
from perfmodel.symbols import Expression, Size
from perfmodel.timing import usage

_BYTES = ("parameter_bytes", "input_bytes", "output_bytes", "rank_parameter_bytes")

_GUESS = 1024
"""What every unknown is taken for where two branches with unknowns in them are compared."""


class Unknown(NamedTuple):
    """A primitive without a rule, and how often it runs. It is in no total."""

    primitive: str
    count: Size


@dataclasses.dataclass(frozen=True)
class Traced:
    """What a function does, on one rank.

    Fields:
        name: of the function.
        operators: in order of first use, equal ones as one with their `count`. Of branches
            (`jax.lax.cond`, `switch`) the dearest, by FLOPs, then bytes.
        least: the same with the cheapest branches.
        unknown: primitives that have no rule, with the number of executions.
        unbounded: loops whose number of trips is not known, by place; their bodies count once.
        parameter_bytes: of pytrees among the arguments, of the function itself where it is one
            (a module), and of arrays that it has captured [B].
        input_bytes, output_bytes: of arguments that are arrays, and of results [B].
        rank_parameter_bytes: what one rank holds of the parameters [B], as `jax.shard_map` cuts
            or copies them; all of them where there is none.
        ranks: devices of the mesh of `jax.shard_map`; operators inside are those of one of them.
        notes: what a reader of the numbers must know.

    Sizes are Python integers (exact), or expressions where a shape is symbolic.
    """

    name: str
    operators: Operators
    least: Operators
    unknown: tuple[Unknown, ...]
    unbounded: tuple[str, ...]
    parameter_bytes: Size
    input_bytes: Size
    output_bytes: Size
    rank_parameter_bytes: Size
    ranks: int = 1
    notes: tuple[str, ...] = ()
    nodes: tuple[Node, ...] = dataclasses.field(default=(), repr=False)

    def total(self, quantity: str = "flops", *names: str) -> Size:
        """Returns `flops`, `memory_bytes` or `wire_bytes` of all executions, of the operators with
        one of some names where given.

        Names are `matmul`, `batched_matmul` (with batch dimensions, as attention has),
        `ragged_dot`, `convolution`, `elementwise`, `reduction`, and those of primitives.
        """
        chosen = tuple(op for op in self.operators if not names or op.name in names)
        return symbols.plain(total(chosen, quantity))

    @property
    def matmul_flops(self) -> Size:
        """FLOPs of all products: matrices, batches, groups, convolutions."""
        products = tuple(op for op in self.operators if isinstance(op, Matmul))
        return symbols.plain(total(products, "flops"))

    @property
    def batched_flops(self) -> Size:
        """FLOPs of products with batch dimensions: scores and values of attention."""
        return self.total("flops", "batched_matmul")

    @property
    def flops(self) -> Size:
        """FLOPs of everything, element-wise work at one an element."""
        return self.total("flops")

    @property
    def memory_bytes(self) -> Size:
        """Bytes to and from memory [B]."""
        return self.total("memory_bytes")

    @property
    def collective_bytes(self) -> Size:
        """Bytes of the messages of collectives [B]: what a rank holds before an all-reduce, a
        reduce-scatter, an all-to-all or a permute, and after an all-gather."""
        return self.total("wire_bytes")

    @property
    def batched(self) -> Operators:
        """Products with batch dimensions."""
        return tuple(op for op in self.operators if op.name == "batched_matmul")

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Collectives, with their kind, message and group."""
        return tuple(op for op in self.operators if isinstance(op, Collective))

    @property
    def cheapest(self) -> "Traced":
        """The same with the cheapest branch of every choice."""
        return dataclasses.replace(self, operators=self.least)

    @property
    def symbols(self) -> tuple[str, ...]:
        """Names of the unknown sizes, sorted."""
        leaves = jax.tree.leaves(list(self.nodes or self.operators), is_leaf=_is_expression)
        sizes = [*leaves, *(getattr(self, name) for name in _BYTES)]
        return tuple(sorted(frozenset().union(*map(symbols.names, sizes))))

    def evaluate(self, values: Mapping[str, Any]) -> "Traced":
        """Returns the same with numbers for its symbolic sizes.

        Python integers keep counts exact, and branches are compared anew. With traced arrays every
        count is a floating-point number, to be differentiated.
        """
        exact = all(isinstance(value, int) for value in values.values())

        def known(size: Any) -> Any:
            found = symbols.evaluate(size, values)
            # Products of large Python integers with traced arrays would overflow 32 bits.
            return float(found) if not exact and isinstance(found, int | Fraction) else found

        sizes = {name: known(getattr(self, name)) for name in _BYTES}
        unknown = tuple(Unknown(each.primitive, known(each.count)) for each in self.unknown)
        if exact and self.nodes:
            nodes = tuple(_map(node, known) for node in self.nodes)
            lists: dict[str, Any] = dict(zip(("operators", "least"), _bounds(nodes), strict=True))
        else:
            nodes = ()
            lists = {
                "operators": tuple(_map(op, known) for op in self.operators),
                "least": tuple(_map(op, known) for op in self.least),
            }
        return dataclasses.replace(self, nodes=nodes, unknown=unknown, **lists, **sizes)

    def table(self) -> xr.Dataset:
        """Returns the operators along `operator`: shapes, FLOPs and bytes of one execution, and
        the number of executions."""
        self._check_numbers()
        rows = [_cells(op) for op in self.operators]
        variables = {
            name: ("operator", np.asarray([row[name] for row in rows]), _attrs(unit, long_name))
            for name, (unit, long_name) in _COLUMNS.items()
        }
        attrs = {
            "function": self.name,
            "unknown": [f"{each.primitive} ×{each.count}" for each in self.unknown],
            "unbounded": list(self.unbounded),
            "notes": list(self.notes),
        }
        return xr.Dataset(variables, attrs=attrs | results.stamp())

    def on(self, chip: ChipLike) -> xr.Dataset:
        """Returns the table with times on a chip, and the totals.

        Kernels run one after the other: `seconds` is their sum, `seconds_least` that with the
        cheapest branches. Nothing is added for the host. `feasible` tells whether parameters,
        arguments and results fit into the chip's memory (cut evenly over the ranks, if several).

        Raises InputError where a size is symbolic, or where the chip lacks a kernel.
        """
        table = self.table()
        (entry,) = question.unique_chips([chip])
        for op in (*self.operators, *self.least):
            if isinstance(op, Matmul) and _kernel(op) not in entry.supported:
                has = ", ".join(entry.supported)
                raise InputError(
                    f"{entry.name} has no {_kernel(op)} kernel for {self.name} (it has: {has})"
                )
        usages = times(self.operators, entry.machine)
        counts = np.asarray([float(op.count) for op in self.operators])
        parts = {part: counts * [_number(getattr(each, part)) for each in usages] for part in PARTS}
        each = np.asarray([_number(one.seconds) for one in usages])
        seconds = float(np.sum(each * counts))
        joules = float(np.sum(counts * [_number(one.joules) for one in usages]))
        least = sum(
            float(op.count) * _number(one.seconds)
            for op, one in zip(self.least, times(self.least, entry.machine), strict=True)
        )
        moved = float(self.input_bytes) + float(self.output_bytes)
        resident = float(self.rank_parameter_bytes) + moved / self.ranks
        capacity = float(entry.fields["memory_capacity"].value or 0.0)
        sums = {part: float(np.sum(values)) for part, values in parts.items()}
        share = each * counts / seconds if seconds else each
        along: dict[str, Any] = {
            "seconds_each": ("operator", each, _attrs("s", "time of one execution")),
            "seconds": ("operator", each * counts, _attrs("s", "time of all executions")),
            "share": ("operator", share, _attrs("1", "share of the time")),
            **{
                f"{part}_s": (
                    "operator", values, _attrs("s", f"time of all executions: {PARTS[part]}")
                )
                for part, values in parts.items()
            },
        }  # fmt: skip
        scalars = {
            "time_s": (seconds, "s", "time of the function"),
            "time_least_s": (least, "s", "time with the cheapest branches"),
            "dynamic_energy_j": (joules, "J", "energy beyond that of the idle chip, one rank"),
            "total_flops": (float(self.flops), "FLOP", "operations on one rank"),
            "product_flops": (float(self.matmul_flops), "FLOP", "operations of products"),
            "total_memory_bytes": (float(self.memory_bytes), "B", "memory traffic of one rank"),
            "collective_bytes": (float(self.collective_bytes), "B", "messages of collectives"),
            "parameter_bytes": (float(self.parameter_bytes), "B", "parameters, all ranks"),
            "input_bytes": (float(self.input_bytes), "B", "arguments, all ranks"),
            "output_bytes": (float(self.output_bytes), "B", "results, all ranks"),
            "ranks": (self.ranks, "1", "chips of the mesh"),
            "feasible": (
                resident <= capacity, "1", "parameters, arguments and results fit"
            ),
            "memory_capacity": (capacity, "B", "memory of a chip"),
            "binding": (
                max(sums, key=lambda part: sums[part]) if seconds else "nothing", "1",
                "part of the time that is largest",
            ),
        }  # fmt: skip
        named = {
            name: ((), value, _attrs(unit, long_name))
            for name, (value, unit, long_name) in scalars.items()
        }
        origins = {
            "chip": entry.name,
            "kernel_constants": entry.kernels_of(),
            "assumed": question.assumed_of(entry),
        }
        return table.assign({**along, **named}).assign_attrs(origins)

    def _check_numbers(self) -> None:
        if self.symbols:
            listed = ", ".join(self.symbols)
            raise InputError(f"{self.name}: values are needed for {listed} (see Traced.evaluate)")


def trace(function: Callable[..., Any], *shapes: Any) -> Traced:
    """Returns the operators that a function runs on arguments of given shapes.

    Args:
        function: anything that `jax.jit` takes: a function, a Flax module (nnx) or the `apply` of
            one (linen), an Equinox module. Modules may hold shapes instead of arrays
            (`nnx.eval_shape`, `equinox.filter_eval_shape`).
        shapes: its arguments: `jax.ShapeDtypeStruct`, arrays (only their shape counts), or pytrees
            of them. Anything else (a number, a flag) is given to the function as it is. Sizes may
            be symbolic (`jax.export.symbolic_shape`).

    Nothing is allocated and nothing is run. Raises InputError where the function does not run on
    such arguments; the error it raised is the cause.

    >>> import jax.numpy as jnp
    >>> x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((8, 4096), (4096, 1024)))
    >>> found = trace(lambda x, w: jax.nn.relu(x @ w), x, w)
    >>> [op.name for op in found.operators], found.matmul_flops == 2 * 8 * 4096 * 1024
    (['matmul', 'elementwise'], True)
    """
    if not callable(function):
        raise InputError(f"trace: {shorten(function)} is no function")
    name = _name_of(function)
    # A module is a pytree of its arrays; so is everything it is called with.
    leaves, structure = jax.tree.flatten((function, shapes))
    is_parameter = [True] * len(jax.tree.leaves(function))
    for argument in shapes:
        is_parameter += [not _jaxpr.is_array(argument)] * len(jax.tree.leaves(argument))
    arrays = [i for i, leaf in enumerate(leaves) if _jaxpr.is_array(leaf)]

    def run(*given: Any) -> list[Any]:
        filled = list(leaves)
        for i, value in zip(arrays, given, strict=True):
            filled[i] = value
        itself, arguments = jax.tree.unflatten(structure, filled)
        out = itself(*arguments)
        return [leaf for leaf in jax.tree.leaves(out) if _jaxpr.is_array(leaf) or _is_number(leaf)]

    try:
        body, captured, found = _jaxpr.record(run, [_jaxpr.abstract(leaves[i]) for i in arrays])
    except InputError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{name} raised {type(error).__name__}: {shorten(reason, 240)}") from error
    own = [is_parameter[i] for i in arrays]
    numbers = body.inputs[len(captured) :]
    parameters = [n for n, mine in zip(numbers, own, strict=True) if mine]
    parameters += body.inputs[: len(captured)]
    inputs = [n for n, mine in zip(numbers, own, strict=True) if not mine]
    shards = {step.inputs[0]: step.outputs[0] for step in body.steps if step.primitive == "shard"}
    lowered = Lowered()
    lowered.add(body, 1, set(parameters) | (body.given - set(body.inputs)) or set(inputs))
    nodes = tuple(lowered.nodes)
    operators, least = _bounds(nodes)
    return Traced(
        name,
        operators,
        least,
        tuple(Unknown(*each) for each in sorted(lowered.unknown.items())),
        tuple(lowered.unbounded),
        _bytes(body.values[n] for n in parameters),
        _bytes(body.values[n] for n in inputs),
        _bytes(found),
        _bytes(body.values[shards.get(n, n)] for n in parameters),
        body.mesh_ranks,
        _notes(lowered),
        nodes,
    )


def _name_of(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _bytes(values: Iterable[_jaxpr.Value]) -> Size:
    return sum((value.nbytes for value in values), 0)


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, bool | int | float | complex)


def _is_expression(leaf: Any) -> bool:
    return isinstance(leaf, Expression)


def _notes(lowered: Lowered) -> tuple[str, ...]:
    found = []
    if lowered.wide:
        listed = ", ".join(sorted(lowered.wide))
        found.append(
            f"products of {listed} are timed at the 16-bit rate with their own bytes: no kernel of "
            "their own is modelled, so their time is a lower bound"
        )
    if lowered.placed:
        found.append("shardings are given: collectives that a compiler adds for them are not there")
    return tuple(found)


# ---- Lists from trees ----


def _map(node: Any, function: Callable[[Any], Any]) -> Any:
    """Returns an operator or choice with a function applied to its numbers."""
    if isinstance(node, Choice):
        branches = tuple(tuple(_map(one, function) for one in each) for each in node.branches)
        return Choice(node.where, branches, function(node.count))
    return jax.tree.map(
        lambda leaf: leaf if isinstance(leaf, np.ndarray) else function(leaf),
        node,
        is_leaf=_is_expression,
    )


def _bounds(nodes: Sequence[Node]) -> tuple[Operators, Operators]:
    """Returns the operators with the dearest and with the cheapest branches, equal ones as one."""
    dearest = _merge(_flat(nodes, 1, max))
    chosen = any(isinstance(node, Choice) for node in nodes)
    return dearest, _merge(_flat(nodes, 1, min)) if chosen else dearest


def _flat(
    nodes: Sequence[Node], count: Size, choose: Callable[..., Any]
) -> list[tuple[Operator, Size]]:
    """Returns operators and how often they run, with one branch of every choice."""
    found: list[tuple[Operator, Size]] = []
    for node in nodes:
        if isinstance(node, Choice):
            branches = [_flat(branch, 1, choose) for branch in node.branches]
            runs = count * node.count
            found += [(op, times * runs) for op, times in choose(branches, key=_cost)]
        else:
            found.append((node, node.count * count))
    return found


def _cost(operators: Sequence[tuple[Operator, Size]]) -> tuple[Any, Any]:
    sums = [
        sum(times * getattr(op, quantity)() for op, times in operators)
        for quantity in ("flops", "memory_bytes")
    ]
    known = [symbols.evaluate(s, dict.fromkeys(symbols.names(s), _GUESS)) for s in sums]
    return known[0], known[1]


def _merge(operators: Sequence[tuple[Operator, Size]]) -> Operators:
    """Returns each different operator once, with the sum of its executions."""
    merged: dict[Any, tuple[Operator, Size]] = {}
    for op, times in operators:
        fields = vars(op).items()
        key = (type(op), *((name, _comparable(v)) for name, v in fields if name != "count"))
        first, before = merged.get(key, (op, 0))
        merged[key] = first, before + times
    return tuple(dataclasses.replace(op, count=times) for op, times in merged.values())


def _comparable(value: Any) -> Any:
    return value.tobytes() if isinstance(value, np.ndarray) else value


# ---- Times ----


@jax.jit
def _usages(machine: Machine, stacked: Operator) -> Usage:
    return jax.vmap(lambda op: usage(op, Rank(machine)))(stacked)


def times(operators: Operators, machine: Machine) -> list[Usage]:
    """Returns the usage of one execution of each operator.

    Operators of a kind are evaluated together, so there is a program for a kind, not for each.
    Kernels that quantise their input do so for free: a function that quantises says so itself.
    """
    quantise = lambda m: (m.kernels.quantise, m.experts.quantise)  # noqa: E731
    machine = eqx.tree_at(quantise, machine, replace_fn=jnp.zeros_like)
    kinds: dict[Any, list[int]] = collections.defaultdict(list)
    plain = [dataclasses.replace(op, name="", group="", count=1) for op in operators]
    numbers = [jax.tree.map(_floats, op) for op in plain]
    for i, op in enumerate(numbers):
        kinds[jax.tree.structure(op)].append(i)
    found: dict[int, Usage] = {}
    for places in kinds.values():
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(numbers[i] for i in places))
        spent = jax.device_get(_usages(machine, stacked))
        for row, i in enumerate(places):
            found[i] = jax.tree.map(lambda leaf, row=row: leaf[row], spent)
    return [found[i] for i in range(len(operators))]


def _floats(leaf: Any) -> Any:
    return as_real(leaf if isinstance(leaf, np.ndarray) else float(leaf))


def _number(value: Any) -> float:
    return 0.0 if value is None else float(value)


# ---- Table ----


def _attrs(unit: str, long_name: str) -> dict[str, str]:
    return {"units": unit, "long_name": long_name}


def _kernel(op: Operator) -> str:
    return KERNELS[int(np.argmax(op.kernel))] if isinstance(op, Matmul) else ""


_COLUMNS = {
    "name": ("1", "operator"),
    "group": ("1", "place in the function: scopes, calls, loops"),
    "kind": ("1", "kind of operator"),
    "kernel": ("1", "matrix-product kernel, or kind of collective"),
    "count": ("1", "executions"),
    **{shape: ("1", f"{shape} on one rank".replace("_", " ")) for shape in SHAPES},
    "flops": ("FLOP", "operations of one execution on one rank"),
    "memory_bytes": ("B", "memory traffic of one execution on one rank"),
    "wire_bytes": ("B", "message of one execution on one rank"),
}


def _cells(op: Operator) -> dict[str, Any]:
    return {
        "name": op.name,
        "group": op.group,
        "kind": type(op).__name__.lower(),
        "kernel": op.kind if isinstance(op, Collective) else _kernel(op),
        "count": float(op.count),
        **{shape: float(getattr(op, shape, np.nan)) for shape in SHAPES},
        "flops": float(op.flops()),
        "memory_bytes": float(op.memory_bytes()),
        "wire_bytes": float(op.wire_bytes()),
    }
