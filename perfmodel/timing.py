"""Lists of operators on one rank of a machine: seconds and joules."""

from perfmodel.fabric import collective_usage
from perfmodel.machine import (
    Rank,
    Usage,
    attention_usage,
    matmul_usage,
    scan_usage,
    vector_usage,
)
from perfmodel.operators import (
    Attention,
    Collective,
    Matmul,
    Operator,
    Operators,
    Scan,
    Vector,
)
from perfmodel.relax import inverse


def usage(op: Operator, rank: Rank) -> Usage:
    """Returns where one execution of an operator spends time and energy on one rank.

    The kind of operator is static structure, so this is no branch in a traced program.
    """
    spent = _usage(op, rank)
    if rank.efficiencies is None:
        return spent
    return spent.slowed(inverse(rank.efficiencies.of(op)))


def _usage(op: Operator, rank: Rank) -> Usage:
    match op:
        case Matmul():
            return matmul_usage(op, rank)
        case Attention():
            return attention_usage(op, rank)
        case Scan():
            return scan_usage(op, rank)
        case Vector():
            return vector_usage(op, rank)
        case Collective():
            return collective_usage(op, rank)


def total_usage(operators: Operators, rank: Rank) -> Usage:
    """Returns the usage of a list of operators executed one after the other."""
    spent = Usage()
    for op in operators:
        once = usage(op, rank)
        # A literal 1 is the common case inside a layer; multiplying by it would cost a sweep.
        literal = isinstance(op.count, int) and op.count == 1
        spent = spent.plus(once if literal else once.scale(op.count))
    return spent
