"""Recorded programs as operators: what each primitive costs, and what runs as one kernel.

The rules are those of a compiler that fuses element-wise work (XLA on a GPU) and of libraries for
products:

- Products, convolutions, gathers, scatters, sorts and collectives are kernels of their own.
- Element-wise steps and reductions that follow from each other, with no kernel of its own between,
  are one kernel: it reads what comes from outside once and writes what is used outside. A
  reduction over trailing axes keeps its kernel open (a softmax or a norm is one kernel), another
  one ends it.
- Reshapes, transposes, slices and broadcasts are read in place and cost nothing. So are values that
  depend on no data (masks from `iota`), which are made where they are read, and scalars.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from fractions import Fraction

import numpy as np

from perfmodel._jaxpr import Body, Step, Value
from perfmodel.errors import InputError
from perfmodel.formats import precision_name
from perfmodel.operators import KERNELS, Collective, CollectiveKind, Matmul, Operator, Vector
from perfmodel.symbols import Size, divide


@dataclasses.dataclass(frozen=True)
class Choice:
    """Branches of which one runs, `count` times; the lists of each."""

    where: str
    branches: "tuple[tuple[Node, ...], ...]"
    count: Size


Node = Operator | Choice

KERNEL_VECTORS: Mapping[str, np.ndarray] = {
    name: np.eye(len(KERNELS))[i] for i, name in enumerate(KERNELS)
}
"""One-hot vectors by the name of a kernel."""


class Lowered:
    """What a recorded program turned into.

    Fields: `nodes`, operators and choices in order; `unknown`, executions by primitive that have
    no rule; `unbounded`, loops whose number of trips is unknown, counted once; `wide`, the data
    types that are multiplied by a 16-bit kernel for want of one of their own; `placed`, whether
    arrays are given shardings, which only a compiler turns into collectives.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.unknown: Counter[str] = Counter()
        self.unbounded: list[str] = []
        self.wide: set[str] = set()
        self.placed = False

    def add(self, body: Body, count: Size, given: set[int]) -> None:
        """Adds `count` executions of a body; `given` numbers its inputs that are no results."""
        graph = _Graph(body)
        starts = {min(members): members for members in graph.fusions()}
        for i, step in enumerate(body.steps):
            if i in starts:
                self.nodes += _fusion(body, graph, starts[i], count)
            kind = graph.kinds[i]
            self.placed |= step.primitive in ("sharding_constraint", "reshard")
            if kind in ("view", "free", "pointwise", "reduction"):
                continue
            if step.bodies:
                self._nested(body, graph, step, count, given)
            elif step.primitive in _PRODUCTS:
                # Nothing is multiplied where a size is 0.
                if all(_operand(body, n).elements != 0 for n in step.inputs[:2]):
                    self.nodes.append(self._product(body, graph, step, count, given))
            elif step.primitive in _COLLECTIVES:
                self.nodes += _collectives(body, step, count)
            elif step.primitive in _MOVES:
                self.nodes.append(_move(body, step, count))
            else:
                self.unknown[step.primitive] += count  # pyright: ignore[reportArgumentType]

    def _nested(
        self, body: Body, graph: "_Graph", step: Step, count: Size, given: set[int]
    ) -> None:
        if step.primitive == "cond":
            branches = []
            for inner in step.bodies:
                branch = Lowered()
                branch.add(inner, 1, _inner_given(graph, step, inner, given, 1))
                branches.append(tuple(branch.nodes))
                for name, executions in branch.unknown.items():
                    self.unknown[name] += executions * count
                self.unbounded += branch.unbounded
                self.wide |= branch.wide
                self.placed |= branch.placed
            self.nodes.append(Choice(step.where, tuple(branches), count))
            return
        trips = step.params.get("length")
        if trips is None:
            self.unbounded.append(step.where or "while")
            trips = 1
        for inner in step.bodies:
            offset = 0 if step.primitive == "scan" else None
            self.add(inner, count * trips, _inner_given(graph, step, inner, given, offset))

    def _product(
        self, body: Body, graph: "_Graph", step: Step, count: Size, given: set[int]
    ) -> Matmul:
        left, right = step.inputs[:2]
        operands = [_operand(body, left), _operand(body, right)]
        result = body.values[step.outputs[0]]
        make = _PRODUCTS[step.primitive]
        sizes, experts = make(step, operands[0], operands[1], result)
        groups, rows, columns, inner = sizes
        # Of two operands the weights are the one that the program was given, else the second.
        are_given = [n is not None and graph.root(n) in given for n in (left, right)]
        if are_given == [True, False] and step.primitive == "dot_general":
            operands.reverse()
            rows, columns = columns, rows
        activations, weights = operands
        narrow = Fraction(activations.bits, 8)
        if step.primitive == "conv_general_dilated":
            # A pixel is in several windows and is read once.
            narrow = divide(activations.nbytes, groups * rows * inner)
        return Matmul(
            _product_name(step),
            step.where,
            rows=rows,
            columns=columns,
            inner=inner,
            weight_bytes=divide(weights.bits, 8),
            activation_bytes=divide(narrow, 1),
            kernel=KERNEL_VECTORS[self._kernel(weights.dtype, activations.dtype)],
            groups=groups,
            count=count,
            experts=experts,
            result_bytes=divide(result.bits, 8),
        )

    def _kernel(self, weights: str, activations: str) -> str:
        formats = [_format(name) for name in (weights, activations)]
        self.wide |= {
            name
            for name, format_ in zip((weights, activations), formats, strict=True)
            if format_ is None
        }
        try:
            return precision_name(formats[0] or "bf16", formats[1] or "bf16").kernel
        except InputError:
            self.wide |= {weights, activations}
            return "bf16"


def _inner_given(
    graph: "_Graph", step: Step, inner: Body, given: set[int], offset: int | None
) -> set[int]:
    """Returns which inputs of a loop's or a branch's body are the whole program's own."""
    if offset is None:
        return set(inner.given)
    outer = step.inputs[offset:]
    own = set(inner.given) - set(inner.inputs)
    for number, source in zip(inner.inputs[-len(outer) :], outer, strict=False):
        if number in inner.given and source is not None and graph.root(source) in given:
            own.add(number)
    return own


def _format(dtype: str) -> str | None:
    """Returns the number format of a data type that matrix units multiply, else None."""
    if dtype in ("bfloat16", "float16"):
        return "bf16"
    if dtype.startswith("float8_"):
        return "fp8"
    narrow = {"int8": "int8", "uint8": "int8", "int4": "int4", "uint4": "int4"}
    return "mxfp4" if dtype.startswith("float4_") else narrow.get(dtype)


# ---- What runs as one kernel ----


class _Graph:
    """Kinds of steps, and how many kernels lie before each value."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.kinds = [_kind(body, step) for step in body.steps]
        self.fused = {i for i, kind in enumerate(self.kinds) if kind in _FUSED}
        self.source: dict[int, int | None] = {}
        self.producer: dict[int, int] = {}
        self.depths: dict[int, int] = {}
        self.places: dict[int, int] = {}
        # Values that depend on no data: made where they are read.
        self.constant: set[int] = set()
        for i, step in enumerate(body.steps):
            self._place(i, step)
        self.users = self._users()

    def _place(self, i: int, step: Step) -> None:
        roots = [self.root(n) for n in step.inputs if n is not None]
        fresh = all(root is None or root in self.constant for root in roots)
        depth = max((self.depths.get(root, 0) for root in roots if root is not None), default=0)
        for place, output in enumerate(step.outputs):
            self.producer[output] = i
            if self.kinds[i] == "view":
                several = len(step.inputs) == len(step.outputs)
                self.source[output] = step.inputs[place if several else 0]
            elif self.kinds[i] == "free" or (fresh and self.kinds[i] in _FUSED):
                self.constant.add(output)
            else:
                open_ = self.kinds[i] == "pointwise" or (
                    self.kinds[i] == "reduction" and _trailing(self.body, step)
                )
                self.depths[output] = depth if open_ else depth + 1
        self.places[i] = depth

    def root(self, number: int | None) -> int | None:
        """Returns the value that is read through views; None for a literal."""
        while number in self.source:
            number = self.source[number]
        return number

    def reads(self, number: int) -> Size:
        """Returns the elements that reading a value touches, through its views."""
        value = self.body.values[number]
        if number not in self.source:
            return value.elements
        source = self.source[number]
        if source is None:
            return 0
        step = self.body.steps[self.producer[number]]
        return value.elements if step.primitive in _NARROWING else self.reads(source)

    def _users(self) -> dict[int, set[int]]:
        """Returns the steps that read each root; -1 is the caller."""
        found: dict[int, set[int]] = {}
        for i, step in enumerate(self.body.steps):
            for number in step.inputs if self.kinds[i] != "view" else ():
                root = self.root(number)
                if root is not None:
                    found.setdefault(root, set()).add(i)
        for number in self.body.results:
            root = self.root(number)
            if root is not None:
                found.setdefault(root, set()).add(-1)
        return found

    def fusions(self) -> list[list[int]]:
        """Returns the steps of each kernel of fused steps, in order."""
        parent = {i: i for i, kind in enumerate(self.kinds) if kind in _FUSED}

        def find(i: int) -> int:
            while parent[i] != i:
                parent[i] = parent[parent[i]]
                i = parent[i]
            return i

        for i in parent:
            for number in self.body.steps[i].inputs:
                root = self.root(number)
                j = self.producer.get(root) if root is not None else None
                if j is None or j not in parent or root in self.constant:
                    continue
                # At the same depth no kernel lies between, so the two can be one.
                if self.places[i] == self.places[j] == self.depths.get(root or 0, -1):
                    parent[find(i)] = find(j)
        groups: dict[int, list[int]] = {}
        for i in parent:
            groups.setdefault(find(i), []).append(i)
        return list(groups.values())


def _fusion(body: Body, graph: _Graph, members: list[int], count: Size) -> list[Operator]:
    """Returns the kernel of fused steps, or nothing where it has nothing to do."""
    inside = set(members)
    made = {n for i in members for n in body.steps[i].outputs}
    read: dict[int, int] = {}
    for i in members:
        for number in body.steps[i].inputs:
            root = graph.root(number)
            if number is None or root is None or root in made or root in graph.constant:
                continue
            read.setdefault(root, number)
    written = [n for n in made if graph.users.get(n, set()) - inside]
    constant = made & graph.constant
    if constant:
        # What depends on no data is made where it is read, unless a kernel of its own reads it.
        written = [n for n in written if graph.users[n] - graph.fused]
    values = [body.values[n] for n in sorted(written)]
    if not values or all(value.elements == 1 for value in values):
        scalar_only = all(body.values[n].elements == 1 for n in read)
        if not values or scalar_only:
            return []
    unit = divide(values[0].bits, 8) or 1
    traffic_in = sum(divide(graph.reads(n) * body.values[n].bits, 8) for n in read.values())
    traffic_out = sum(divide(value.elements * value.bits, 8) for value in values)
    operations = sum(_operations(body, body.steps[i]) for i in members)
    names = {body.steps[i].primitive for i in members if graph.kinds[i] == "reduction"}
    where = {body.steps[i].where for i in members}
    return [
        Vector(
            "reduction" if names else "elementwise",
            where.pop() if len(where) == 1 else _common(where),
            rows=1,
            reads=divide(traffic_in, unit),
            writes=divide(traffic_out, unit),
            operations=operations,
            element_bytes=unit,
            count=count,
        )
    ]


def _common(places: Iterable[str]) -> str:
    """Returns the scopes that several places share."""
    shared: list[str] = []
    for parts in zip(*(place.split("/") for place in places), strict=False):
        if len(set(parts)) != 1:
            break
        shared.append(parts[0])
    return "/".join(shared)


_FUSED = ("pointwise", "reduction")

_VIEWS = frozenset(
    "reshape transpose squeeze expand_dims broadcast_in_dim slice rev stop_gradient pvary pcast "
    "copy optimization_barrier sharding_constraint shard dynamic_slice split unstack mesh_cast "
    "reshard bitcast_convert_type layout_constraint name reduce_precision device_put".split()
)
# Views of a part: reading them touches their own elements.
_NARROWING = frozenset({"slice", "shard", "dynamic_slice", "split", "unstack"})
_FREE = frozenset(
    "axis_index axis_size dim_as_value create_token after_all platform_index empty empty2 "
    "random_wrap random_unwrap".split()
)
# Element-wise steps that only move or relabel: no operation.
_MOVING = frozenset(
    "convert_element_type concatenate stack pad iota full real imag complex".split()
)
_POINTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil "
    "clamp conj cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma "
    "igammac integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul "
    "mulhi ne neg nextafter not or polygamma population_count clz pow random_bits random_seed "
    "random_fold_in random_split random_gamma regularized_incomplete_beta rem round rsqrt "
    "select_and_gather_add select_n shift_left shift_right_arithmetic shift_right_logical sign "
    "sin sinh sqrt square sub tan tanh threefry2x32 xor zeta".split()
)
_REDUCTIONS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor reduce argmax "
    "argmin".split()
)


def _kind(body: Body, step: Step) -> str:
    name = step.primitive
    if name in _VIEWS:
        return "view"
    if name in _FREE:
        return "free"
    if name in _POINTWISE or name in _MOVING:
        return "pointwise"
    return "reduction" if name in _REDUCTIONS else "kernel"


def _trailing(body: Body, step: Step) -> bool:
    """Tells whether a reduction is over the last axes of its operand."""
    rank = len(_operand(body, step.inputs[0]).shape)
    axes = sorted(int(a) for a in step.params.get("axes", step.params.get("dimensions", ())))
    return axes == list(range(rank - len(axes), rank))


def _operations(body: Body, step: Step) -> Size:
    """Returns the operations of an element-wise step: one an element, be it a sum or a root."""
    if step.primitive in _MOVING:
        return 0
    if step.primitive in _REDUCTIONS:
        return _operand(body, step.inputs[0]).elements
    elements = sum(body.values[n].elements for n in step.outputs)
    if step.primitive in ("threefry2x32", "random_bits"):
        # Threefry-2x32: 20 rounds of an addition, a rotation (3) and an exclusive or, and six
        # injections of a key (3), for two words. Source: Salmon et al., SC 2011, section 4.2.
        return divide(elements * (20 * 5 + 6 * 3), 2)
    return elements


def _operand(body: Body, number: int | None) -> Value:
    return Value((), "float32", 32) if number is None else body.values[number]


# ---- Products ----

_Sizes = tuple[Size, Size, Size, Size]
"""Groups, rows, columns and inner elements of a product."""


def _take(value: Value, dims: Iterable[int]) -> Size:
    return math.prod(value.shape[d] for d in dims)


def _free(value: Value, *taken: Iterable[int]) -> Size:
    used = {int(d) for dims in taken for d in dims}
    return _take(value, (d for d in range(len(value.shape)) if d not in used))


def _dot(step: Step, left: Value, right: Value, result: Value) -> tuple[_Sizes, bool]:
    (inner_l, inner_r), (batch_l, batch_r) = step.params["dimension_numbers"]
    sizes = (
        _take(left, batch_l),
        _free(left, inner_l, batch_l),
        _free(right, inner_r, batch_r),
        _take(left, inner_l),
    )
    return sizes, False


def _ragged(step: Step, left: Value, right: Value, result: Value) -> tuple[_Sizes, bool]:
    """A product whose rows, inner elements or batch are cut into groups of any sizes: together
    they are as long as the axis, and on the mean equally long."""
    numbers = step.params["ragged_dot_dimension_numbers"]
    (inner_l, inner_r), (batch_l, batch_r) = numbers.dot_dimension_numbers
    grouped = tuple(numbers.rhs_group_dimensions)
    (ragged,) = numbers.lhs_ragged_dimensions
    batch, inner = _take(left, batch_l), _take(left, inner_l)
    rows = _free(left, inner_l, batch_l)
    columns = _free(right, inner_r, batch_r, grouped)
    if ragged in batch_l:
        return (batch, rows, columns, inner), True
    if ragged in inner_l:
        # The groups come first in the result: one product for each.
        groups = result.shape[0]
        return (batch * groups, rows, columns, divide(inner, groups)), True
    groups = _take(right, grouped)
    return (batch * groups, divide(rows, groups), columns, inner), True


def _convolution(step: Step, left: Value, right: Value, result: Value) -> tuple[_Sizes, bool]:
    """A convolution as a product of windows (rows) by filters (columns): every tap is counted,
    those in the padding too."""
    numbers = step.params["dimension_numbers"]
    batch_groups = step.params.get("batch_group_count", 1)
    groups = step.params.get("feature_group_count", 1) * batch_groups
    out_batch, _, *out_space = numbers.out_spec
    filters, channels, *window = numbers.rhs_spec
    rows = _take(result, (out_batch, *out_space))
    return (
        groups,
        rows,
        divide(right.shape[filters], groups),
        _take(right, (channels, *window)),
    ), False


_PRODUCTS = {
    "dot_general": _dot,
    "ragged_dot": _ragged,
    "ragged_dot_general": _ragged,
    "conv_general_dilated": _convolution,
}


def _product_name(step: Step) -> str:
    if step.primitive != "dot_general":
        return "convolution" if step.primitive.startswith("conv") else "ragged_dot"
    _, (batch, _) = step.params["dimension_numbers"]
    return "batched_matmul" if batch else "matmul"


# ---- Collectives ----

_COLLECTIVES: Mapping[str, tuple[CollectiveKind, str]] = {
    "psum": ("all_reduce", "input"),
    "psum2": ("all_reduce", "input"),
    "psum_invariant": ("all_reduce", "input"),
    "pmax": ("all_reduce", "input"),
    "pmin": ("all_reduce", "input"),
    "all_gather": ("all_gather", "output"),
    "all_gather_invariant": ("all_gather", "output"),
    "all_gather_reduced": ("all_gather", "output"),
    "reduce_scatter": ("reduce_scatter", "input"),
    "unreduced_reduce_scatter": ("reduce_scatter", "input"),
    "all_to_all": ("all_to_all", "input"),
    "ragged_all_to_all": ("all_to_all", "input"),
    "ppermute": ("permute", "input"),
}
"""Kinds of collectives, and which side holds the full message."""


def _collectives(body: Body, step: Step, count: Size) -> list[Operator]:
    kind, side = _COLLECTIVES[step.primitive]
    ranks = step.ranks
    if kind == "permute":
        ranks = max(len({rank for pair in step.params["perm"] for rank in pair}), 1)
    if ranks == 1:
        return []
    messages = step.inputs if side == "input" else step.outputs
    if step.primitive == "ragged_all_to_all":
        messages = messages[:1]
    values = [_operand(body, number) for number in messages]
    return [
        Collective(
            kind,
            step.where,
            kind=kind,
            rows=1,
            width=value.elements,
            ranks=ranks,
            element_bytes=divide(value.bits, 8),
            count=count,
        )
        for value in values
    ]


# ---- Kernels that move elements ----

_MOVES = frozenset(
    "gather scatter scatter-add scatter_add scatter-mul scatter_mul scatter-min scatter_min "
    "scatter-max scatter_max scatter-sub scatter_sub dynamic_update_slice sort top_k cumsum "
    "cumprod cummax cummin cumlogsumexp reduce_window reduce_window_sum reduce_window_max "
    "reduce_window_min select_and_scatter_add fft".split()
)


def _move(body: Body, step: Step, count: Size) -> Operator:
    """Returns a kernel that gathers, scatters, sorts or accumulates.

    A gather reads and writes the elements of its result. A scatter and an update in place read
    and write the elements updated, not the array around them. The others read their operands and
    write their results, with one operation an element: a sort is taken as one pass.
    """
    name = step.primitive.replace("-", "_")
    inputs = [_operand(body, n) for n in step.inputs if n is not None]
    outputs = [body.values[n] for n in step.outputs]
    result = outputs[0]
    operations: Size = 0
    if name == "gather":
        read, written = [result, inputs[-1]], outputs
    elif name == "dynamic_update_slice":
        read = written = [_operand(body, step.inputs[1])]
    elif name.startswith("scatter"):
        updates = _operand(body, step.inputs[2])
        indices = _operand(body, step.inputs[1])
        combines = name != "scatter"
        read = [updates, indices, updates] if combines else [updates, indices]
        written, operations = [updates], updates.elements if combines else 0
    else:
        read, written = inputs, outputs
        operations = sum(value.elements for value in inputs)
    if name == "fft":
        # The usual count of a transform of n complex numbers, 5·n·log₂ n.
        length = math.prod(int(n) for n in step.params["fft_lengths"])
        operations = divide(result.elements * round(5 * math.log2(length)), 1)
    unit = divide(result.bits, 8) or 1
    return Vector(
        name,
        step.where,
        rows=1,
        reads=divide(sum(divide(v.elements * v.bits, 8) for v in read), unit),
        writes=divide(sum(divide(v.elements * v.bits, 8) for v in written), unit),
        operations=operations,
        element_bytes=unit,
        count=count,
    )
