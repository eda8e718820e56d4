"""Operators: the waist of the model, between networks and machines.

A network, a load and a plan become a short list of operators with *per-rank shapes*; a machine
turns each into seconds and joules. Nothing here knows a chip or a model. Every numeric field may
be a Python integer (exact counting) or a traced array (sweeps and gradients).

One row stands for `count` equal operators. `name` and `group` (phase and part) are static.
"""

from typing import Any, Literal

import equinox as eqx

from perfmodel.kernels import KERNELS as KERNELS
from perfmodel.relax import Real, divide, maximum, minimum

Phase = Literal["decode", "prefill"]

Recurrence = Literal["ssd", "delta"]

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute"]


class AbstractOperator(eqx.Module):
    """One row of the operator list; see the subclasses for fields."""

    name: str = eqx.field(static=True)
    group: str = eqx.field(static=True)

    def flops(self) -> Real:
        """Returns floating-point operations of one execution on one rank (multiply-add = 2)."""
        return 0

    def memory_bytes(self) -> Real:
        """Returns bytes moved to and from device memory by one execution on one rank."""
        return 0

    def wire_bytes(self) -> Real:
        """Returns bytes of the message handed to the network by one rank [B]."""
        return 0


class Matmul(AbstractOperator):
    """[rows, inner] × [inner, columns], `groups` of them side by side.

    Fields: `rows` are of one group; the weights of a group take `weight_bytes` per element plus
    `column_bytes` per output column (scales); activations `activation_bytes` per element in and
    `result_bytes` out. `kernel` is a one-hot vector over `KERNELS`, or None while only counting.
    `experts` is static: the groups are experts of a mixture, multiplied by a grouped kernel with
    constants of its own, and `groups` are those whose weights are read.
    """

    experts: bool = eqx.field(static=True, default=False, kw_only=True)
    rows: Real
    columns: Real
    inner: Real
    weight_bytes: Real
    activation_bytes: Real
    kernel: Any = None
    column_bytes: Real = 0
    groups: Real = 1
    count: Real = 1
    result_bytes: Real = 2

    def row_flops(self) -> Real:
        """Returns operations per row."""
        return 2 * self.columns * self.inner * self.groups

    def flops(self) -> Real:
        return self.rows * self.row_flops()

    def weight_traffic(self) -> Real:
        """Returns bytes of weights read [B]."""
        per_column = self.inner * self.weight_bytes + self.column_bytes
        return self.columns * per_column * self.groups

    def row_traffic(self) -> Real:
        """Returns bytes of activations read and written per row [B]."""
        written = self.result_bytes * self.columns
        return (self.inner * self.activation_bytes + written) * self.groups

    def memory_bytes(self) -> Real:
        return self.weight_traffic() + self.rows * self.row_traffic()


class Attention(AbstractOperator):
    """Scaled-dot-product attention of `sequences` × `queries` new tokens over `context` keys.

    `pairs` is the exact number of (query, key) pairs per sequence and head under the mask;
    `keys` how many keys of one sequence are read (the context, or the window). `heads` and
    `kv_heads` are per rank, `qk_width` and `v_width` per head, `kv_bytes` per cached element.
    `group` starts with the phase, which names the kernel used: "decode" for few queries per
    sequence (split over keys), "prefill" for many (tiled over queries). `narrow` is 1 where the
    products run in 8-bit arithmetic. `cache_width` is how many elements are cached per key and kv
    head where keys and values are not stored apart; None where they are. `latent` is static: heads
    share one latent vector per key, in kernels with constants of their own.
    """

    phase: Phase = eqx.field(static=True)
    latent: bool = eqx.field(static=True, default=False, kw_only=True)
    sequences: Real
    queries: Real
    keys: Real
    pairs: Real
    heads: Real
    kv_heads: Real
    qk_width: Real
    v_width: Real
    kv_bytes: Real
    narrow: Real = 0
    count: Real = 1
    cache_width: Real | None = None

    def cached_width(self) -> Real:
        """Returns the elements cached per key and kv head: of key and value, or of both at once.

        >>> latent = Attention("a", "decode/attention", "decode", 1, 1, 10, 10, 16, 1, 576, 512, 2,
        ...                    cache_width=576, latent=True)
        >>> latent.cache_traffic()  # not 10 · (576 + 512) · 2
        11520
        """
        return self.qk_width + self.v_width if self.cache_width is None else self.cache_width

    def sequence_flops(self) -> Real:
        """Returns operations per sequence."""
        return 2 * self.heads * self.pairs * (self.qk_width + self.v_width)

    def flops(self) -> Real:
        return self.sequences * self.sequence_flops()

    def sequence_traffic(self) -> Real:
        """Returns bytes read and written per sequence [B]: the cache, queries and results."""
        cache = self.kv_heads * self.keys * self.cached_width() * self.kv_bytes
        return cache + 2 * self.queries * self.heads * (self.qk_width + self.v_width)

    def cache_traffic(self) -> Real:
        """Returns bytes of keys and values read [B]."""
        return self.sequences * (self.kv_heads * self.keys * self.cached_width() * self.kv_bytes)

    def memory_bytes(self) -> Real:
        return self.sequences * self.sequence_traffic()


class Vector(AbstractOperator):
    """Element-wise or reducing work: norms, rotary embedding, gates, residuals, sampling.

    Per row, `reads` and `writes` elements of `element_bytes`, and `operations` floating-point
    operations on the vector units. `launches` is how many kernels it takes; `reductions` (static)
    how many sums over a whole row, which a mesh of processing elements must carry across.
    """

    reductions: int = eqx.field(static=True, default=0, kw_only=True)
    rows: Real
    reads: Real
    writes: Real
    operations: Real
    element_bytes: Real = 2
    launches: Real = 1
    count: Real = 1

    def flops(self) -> Real:
        return self.rows * self.operations

    def row_traffic(self) -> Real:
        """Returns bytes read and written per row [B]."""
        return (self.reads + self.writes) * self.element_bytes

    def memory_bytes(self) -> Real:
        return self.rows * self.row_traffic()


class Scan(AbstractOperator):
    """A recurrence over `tokens` of each of `sequences`, with a state kept per sequence and head.

    A head's state has `state` × `width` elements (N × P below) of `state_bytes`; each token decays
    it, adds an outer product and reads it. `heads` are per rank, `inputs` and `outputs` elements of
    16 bits per token on one rank. `kind` is static: "ssd" (Mamba-2, arXiv 2405.21060) or "delta"
    (gated delta rule, arXiv 2412.06464, and Kimi delta attention, arXiv 2510.26692). `phase` names
    the form: "decode" runs token by token, "prefill" in chunks of `chunk` tokens.

    Token by token, per head, a multiply-add as 2:

        ssd    decay NP, outer product 2NP, read 2NP                          5NP
        delta  the same, and what the state already says of the key, 2NP      7NP

    In chunks of C, per head and chunk; products of C × C blocks are computed whole, as tiles are:

        ssd    C·Bᵀ 2C²N (shared by the `sharing` heads of a group), times the inputs 2C²P,
               the chunk's state 2CNP, its read 2CNP, decay and sum of states 3NP
        delta  K·Kᵀ 2C²N, its unit triangular inverse C³/3, that times keys and values
               2C²N + 2C²P, values less what the state says 2CNP, the chunk's state 2CNP, its read
               2CNP, Q·Kᵀ 2C²N and that times the values 2C²P, decay and sum of states 3NP

    A chunk is no longer than the tokens; the last, partial one counts in proportion.

    >>> step = Scan("s", "decode/attention", "ssd", "decode", 2, 1, 64, 128, 64, 4, 4352, 4096)
    >>> step.flops() == 2 * 64 * 5 * 128 * 64
    True
    >>> step.memory_bytes() == 2 * (2 * 64 * 128 * 64 * 4 + 2 * (4352 + 4096))
    True
    """

    kind: Recurrence = eqx.field(static=True)
    phase: Phase = eqx.field(static=True)
    sequences: Real
    tokens: Real
    heads: Real
    state: Real
    width: Real
    state_bytes: Real
    inputs: Real
    outputs: Real
    chunk: Real = 1
    sharing: Real = 1
    count: Real = 1

    def token_flops(self) -> Real:
        """Returns operations per token and head."""
        size = self.state * self.width
        if self.phase == "decode":
            return (5 if self.kind == "ssd" else 7) * size
        length = minimum(self.chunk, self.tokens)
        carried = divide(3 * size, maximum(length, 1))
        if self.kind == "ssd":
            blocks = divide(2 * length * self.state, self.sharing) + 2 * length * self.width
            return blocks + 4 * size + carried
        blocks = length * (6 * self.state + 4 * self.width)
        return blocks + divide(length * length, 3) + 6 * size + carried

    def chunks(self) -> Real:
        """Returns the chunks of a sequence, a last, partial one in proportion, at least one."""
        return maximum(divide(self.tokens, self.chunk), 1)

    def flops(self) -> Real:
        return self.sequences * (self.tokens * (self.heads * self.token_flops()))

    def state_traffic(self) -> Real:
        """Returns bytes of one sequence's states, read and written once [B]."""
        return 2 * self.heads * (self.state * self.width * self.state_bytes)

    def memory_bytes(self) -> Real:
        moved = 2 * self.tokens * (self.inputs + self.outputs)
        return self.sequences * (self.state_traffic() + moved)


class Collective(AbstractOperator):
    """A collective over `ranks` chips of `rows` × `width` activation elements.

    They are the full message: what each rank holds before an all-reduce, and after an
    all-gather. `kind` is static. How many bytes a 16-bit element takes on the wire is the machine's
    affair; `element_bytes` scales it for others. A reduce-scatter is an all-gather run backwards.
    An all-to-all hands each row to the ranks that need it: give the rows that reach a rank from all
    others as `rows`, and to how many ranks each row goes as `copies`. A permute hands the whole
    message of each rank to one other.
    """

    kind: CollectiveKind = eqx.field(static=True)
    rows: Real
    width: Real
    ranks: Real
    count: Real = 1
    element_bytes: Real = 2
    copies: Real = 1

    def wire_bytes(self) -> Real:
        return self.rows * (self.element_bytes * self.width)


Operator = Matmul | Attention | Scan | Vector | Collective
Operators = tuple[Operator, ...]


def total(operators: Operators, quantity: str) -> Real:
    """Returns the sum over a list of `count` × one of its derived quantities.

    >>> op = Matmul("q", "decode/attention", rows=2, columns=3, inner=4,
    ...             weight_bytes=2, activation_bytes=2, count=10)
    >>> total((op,), "flops")
    480
    """
    return sum(op.count * getattr(op, quantity)() for op in operators)
