"""Tensor parallelism: heads, inner widths and the vocabulary split over a mesh axis."""

from collections.abc import Callable

import jax
from flax import nnx
from jax import Array
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from perfmodel.errors import InputError
from perfmodel.models.networks.cache import Cache, LayerCache, StateCache
from perfmodel.models.networks.transformer import Decoder, prefill

AXIS = "tensor"
"""Name of the mesh axis."""


def _spec(variable: nnx.Variable) -> P:
    split = variable.get_metadata()["split"]
    return P() if split is None else P(*[None] * split, AXIS)


def specs(state: nnx.State) -> nnx.State:
    """Returns how each parameter lies over the ranks."""
    return jax.tree.map(_spec, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def tensor_parallel(
    network: Decoder, mesh: Mesh | AbstractMesh
) -> Callable[[nnx.State, Array, Cache], tuple[Array, Cache]]:
    """Returns `prefill` (and so `decode`) as a function of the network's state on all ranks.

    The mesh has one axis, named `AXIS`; an abstract one serves to trace. The result takes
    `nnx.state(network)`, tokens [batch, tokens] and a cache, all of whole sizes.
    """
    if mesh.axis_names != (AXIS,):
        raise InputError(f"network: the mesh must have one axis '{AXIS}', not {mesh.axis_names}")
    graph, state = nnx.split(network)
    for variable in jax.tree.leaves(state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)):
        split = variable.get_metadata()["split"]
        if split is not None and variable.shape[split] % mesh.size:
            raise InputError(
                f"network: {mesh.size} ranks do not share out {variable.shape[split]} heads, "
                "columns or tokens"
            )

    def step(state: nnx.State, tokens: Array, cache: Cache) -> tuple[Array, Cache]:
        return prefill(nnx.merge(graph, state), tokens, cache, AXIS)

    # Each rank keeps its own heads; latent vectors, which have none, are on all.
    held = P(None, None, AXIS)

    def sharded(state: nnx.State, tokens: Array, cache: Cache) -> tuple[Array, Cache]:
        lies = jax.tree.map(
            lambda each: jax.tree.map(
                lambda _: held if isinstance(each, LayerCache | StateCache) else P(), each
            ),
            cache,
            is_leaf=lambda each: isinstance(each, LayerCache | StateCache),
        )
        return jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(specs(state), P(), lies),
            out_specs=(P(), lies),
            # Sums over ranks make results equal on all; the checker does not follow gathers.
            check_vma=False,
        )(state, tokens, cache)

    return sharded
