"""Traced functions: counts by hand, every kind of primitive, symbolic sizes, times, errors."""

import functools
import time
import tracemalloc

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AbstractMesh, PartitionSpec

import perfmodel
from perfmodel import load_chip, trace
from perfmodel.errors import InputError
from perfmodel.machine import Rank
from perfmodel.operators import Collective, Matmul, Vector
from perfmodel.timing import total_usage

P = PartitionSpec


def bf16(*shape) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def f32(*shape) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def mlp(x, w, v):
    return jax.nn.silu(x @ w) @ v


def attention(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)


def names(traced) -> list[str]:
    return [op.name for op in traced.operators]


# ---- Counts by hand ----


def test_a_feed_forward_layer() -> None:
    found = trace(mlp, bf16(8, 16), bf16(16, 64), bf16(64, 32))
    assert names(found) == ["matmul", "elementwise", "matmul"]
    first, gate, second = found.operators
    assert (first.rows, first.columns, first.inner, first.groups) == (8, 64, 16, 1)
    assert (second.rows, second.columns, second.inner) == (8, 32, 64)
    assert found.matmul_flops == 2 * 8 * 16 * 64 + 2 * 8 * 64 * 32
    assert isinstance(found.matmul_flops, int)
    # Bytes of the first: 2·(8·16 + 16·64 + 8·64).
    assert first.memory_bytes() == 2 * (8 * 16 + 16 * 64 + 8 * 64)
    # x·σ(x) is one kernel: reads and writes 8 × 64, a logistic and a product an element.
    assert (gate.reads, gate.writes, gate.operations) == (512, 512, 1024)
    assert gate.memory_bytes() == 2 * 1024
    assert found.input_bytes == 2 * (8 * 16 + 16 * 64 + 64 * 32) and found.parameter_bytes == 0
    assert found.output_bytes == 2 * 8 * 32


def test_counts_beyond_two_to_the_53_are_exact() -> None:
    found = trace(lambda x, w: x @ w, bf16(2**20 + 1, 2**19 + 1), bf16(2**19 + 1, 2**18 + 1))
    assert found.matmul_flops == 2 * (2**20 + 1) * (2**19 + 1) * (2**18 + 1) > 2**53


def test_attention_of_einsums() -> None:
    b, q, k, h, d = 2, 5, 7, 3, 4
    found = trace(attention, bf16(b, q, h, d), bf16(b, k, h, d), bf16(b, k, h, d))
    assert names(found) == ["batched_matmul", "reduction", "batched_matmul"]
    assert found.batched_flops == found.matmul_flops == 2 * 2 * b * h * q * k * d
    assert [op.groups for op in found.batched] == [b * h, b * h]
    softmax = found.operators[1]
    assert isinstance(softmax, Vector)
    assert (softmax.reads, softmax.writes) == (b * h * q * k, b * h * q * k)


def test_a_residual_across_a_product_is_two_kernels() -> None:
    # One kernel that made h and used h @ w would have to wait for itself.
    found = trace(lambda x, w: (lambda h: jnp.exp(h @ w) + h)(jnp.sin(x)), bf16(4, 4), bf16(4, 4))
    assert names(found) == ["elementwise", "matmul", "elementwise"]
    assert [op.reads for op in found.operators if isinstance(op, Vector)] == [16, 32]


def test_reductions_over_leading_axes_end_their_kernel() -> None:
    normed = trace(lambda x: x / x.sum(-1, keepdims=True), f32(8, 4))
    assert [(op.reads, op.writes) for op in normed.operators] == [(32, 32)]
    across = trace(lambda x: x / x.sum(0, keepdims=True), f32(8, 4))
    assert [(op.reads, op.writes) for op in across.operators] == [(32, 4), (36, 32)]


def test_views_masks_and_scalars_cost_nothing() -> None:
    def masked(x):
        rows, columns = (jax.lax.broadcasted_iota(jnp.int32, (8, 8), i) for i in (0, 1))
        return jnp.where(rows >= columns, x.T.reshape(8, 8) * (2.0 + 3.0), 0.0)

    found = trace(masked, f32(8, 8))
    assert [(op.reads, op.writes) for op in found.operators] == [(64, 64)]
    # A slice is read in part, a broadcast by its source.
    found = trace(lambda x, b: x[:2] + b, f32(8, 8), f32(8))
    assert [(op.reads, op.writes) for op in found.operators] == [(16 + 8, 16)]


def test_stacks_are_moved_and_taken_apart_in_place() -> None:
    found = trace(lambda x, y: jnp.stack([x, y], 1), f32(8, 4), f32(8, 4))
    assert [(op.reads, op.writes, op.operations) for op in found.operators] == [(64, 64, 0)]
    found = trace(lambda x: jnp.sin(jnp.unstack(x)[0]), f32(2, 8))
    assert [(op.reads, op.writes) for op in found.operators] == [(8, 8)]
    assert found.unknown == ()


def test_scan_counts_its_length() -> None:
    def stack(weights, x):
        return jax.lax.scan(lambda c, w: (jax.nn.relu(c @ w), None), x, weights)[0]

    once = trace(lambda w, x: jax.nn.relu(x @ w), bf16(16, 16), bf16(8, 16))
    found = trace(stack, bf16(80, 16, 16), bf16(8, 16))
    assert found.matmul_flops == 80 * once.matmul_flops == 80 * 2 * 8 * 16 * 16
    assert found.memory_bytes == 80 * once.memory_bytes
    assert {op.count for op in found.operators} == {80}
    # A loop in a loop.
    nested = trace(
        lambda x: jax.lax.scan(lambda c, _: (stack(jnp.ones((3, 4, 4)), c), None), x, length=5)[0],
        f32(2, 4),
    )
    assert nested.matmul_flops == 15 * 2 * 2 * 4 * 4


def test_loops_with_a_known_and_an_unknown_number_of_trips() -> None:
    fixed = trace(lambda x: jax.lax.fori_loop(0, 7, lambda i, c: c @ c, x), f32(4, 4))
    assert (fixed.matmul_flops, fixed.unbounded) == (7 * 128, ())
    open_ = trace(
        lambda x: jax.lax.while_loop(lambda c: jnp.sum(c) < 3, lambda c: c @ c, x), f32(4, 4)
    )
    assert (open_.matmul_flops, open_.unbounded) == (128, ("while",))


def test_branches_give_both_bounds() -> None:
    def choose(x, w):
        return jax.lax.switch(
            x[0, 0].astype(int), [lambda x: x @ w, lambda x: x + 1, lambda x: x @ w @ w], x
        )

    found = trace(choose, bf16(4, 4), bf16(4, 4))
    assert found.matmul_flops == 2 * 128 and found.cheapest.matmul_flops == 0
    twice = trace(lambda x, w: choose(choose(x, w), w), bf16(4, 4), bf16(4, 4))
    assert twice.matmul_flops == 4 * 128
    timed = found.on("h100")
    assert 0 < float(timed["time_least_s"]) < float(timed["time_s"])


def test_remat_runs_the_forward_products_again() -> None:
    def loss(layer):
        return lambda w, x: jnp.sum(layer(x, w) ** 2)

    def layer(x, w):
        return jnp.sin(x @ w)

    args = (f32(16, 16), f32(8, 16))
    plain = trace(jax.value_and_grad(loss(layer), (0, 1)), *args)
    again = trace(jax.value_and_grad(loss(jax.checkpoint(layer)), (0, 1)), *args)
    product = 2 * 8 * 16 * 16
    assert plain.matmul_flops == 3 * product
    assert again.matmul_flops == 4 * product
    # Where the value is not asked for, the first forward pass is dead, and XLA drops it.
    assert trace(jax.grad(loss(jax.checkpoint(layer))), *args).matmul_flops == 3 * product


def test_calls_of_every_kind_are_written_out() -> None:
    @jax.custom_vjp
    def square(x):
        return x @ x

    square.defvjp(lambda x: (square(x), x), lambda x, g: (g @ x.T + x.T @ g,))
    calls = (
        square, jax.jit(square), jax.checkpoint(square), jax.named_call(square, name="square"),
        eqx.filter_jit(square), functools.partial(lambda n, x: square(x) * n, 2.0),
    )  # fmt: skip
    for call in calls:
        assert trace(call, f32(4, 4)).matmul_flops == 2 * 4**3
        assert trace(lambda x, call=call: call(call(x)), f32(4, 4)).matmul_flops == 4 * 4**3
    backward = trace(jax.grad(lambda x: square(x).sum()), f32(4, 4))
    assert backward.matmul_flops == 2 * 2 * 4**3
    relu = trace(jax.nn.relu, f32(4, 4))
    assert [(op.name, op.flops()) for op in relu.operators] == [("elementwise", 16)]


def test_nothing_to_do() -> None:
    found = trace(lambda x: x.T, f32(4, 2))
    assert (found.operators, found.flops, found.output_bytes) == ((), 0, 32)
    assert float(found.on("h100")["time_s"]) == 0.0
    empty = trace(lambda x, w: x @ w, f32(0, 4), f32(4, 4))
    assert empty.matmul_flops == 0


def test_products_of_groups() -> None:
    x, w, sizes = bf16(10, 16), bf16(4, 16, 32), jax.ShapeDtypeStruct((4,), jnp.int32)
    found = trace(jax.lax.ragged_dot, x, w, sizes)
    (op,) = found.operators
    assert isinstance(op, Matmul) and op.experts
    # Ten rows among four experts: all weights are read, no row twice.
    assert found.matmul_flops == 2 * 10 * 16 * 32 and isinstance(found.matmul_flops, int)
    assert op.memory_bytes() == 2 * (10 * 16 + 4 * 16 * 32 + 10 * 32)
    back = trace(jax.grad(lambda w, x, s: jax.lax.ragged_dot(x, w, s).sum()), w, x, sizes)
    assert back.matmul_flops == 2 * 10 * 16 * 32


def test_convolutions() -> None:
    def conv(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=2
        )

    found = trace(conv, f32(1, 8, 8, 4), f32(3, 3, 2, 6))
    # 4·4 windows, 6 features, each of 3·3 taps on the 2 channels of its group.
    assert found.matmul_flops == 2 * 16 * 6 * 9 * 2
    # The image is read once, not nine times.
    assert found.memory_bytes == 4 * (8 * 8 * 4 + 3 * 3 * 2 * 6 + 4 * 4 * 6)
    back = trace(jax.grad(lambda w, x: conv(x, w).sum()), f32(3, 3, 2, 6), f32(1, 8, 8, 4))
    assert back.matmul_flops == found.matmul_flops


def test_gathers_and_scatters_touch_what_they_move() -> None:
    table, ids = f32(1000, 8), jax.ShapeDtypeStruct((3,), jnp.int32)
    found = trace(lambda t, i: jnp.take(t, i, axis=0, mode="clip"), table, ids)
    (op,) = [op for op in found.operators if op.name == "gather"]
    assert op.memory_bytes() == 4 * (24 + 3 + 24)
    found = trace(lambda t, i, u: t.at[i].add(u, mode="clip"), table, ids, f32(3, 8))
    (op,) = [op for op in found.operators if op.name == "scatter_add"]
    assert op.memory_bytes() == 4 * (24 + 24 + 3 + 24) and op.flops() == 24


def test_unknown_primitives_are_listed() -> None:
    def f(x):
        body = lambda c, _: (jnp.linalg.svd(c, compute_uv=False) + c, None)  # noqa: E731
        return jax.lax.scan(body, x, length=6)[0], jnp.linalg.eigvals(x)

    found = trace(f, f32(4, 4))
    assert dict(found.unknown) == {"svd": 6, "eig": 1}
    assert found.table().attrs["unknown"] == ["eig ×1", "svd ×6"]


# ---- Meshes ----


def test_a_tensor_parallel_layer_on_a_mesh() -> None:
    mesh = AbstractMesh((4,), ("t",))

    def rank(x, w, v):
        return jax.lax.psum(jax.nn.silu(x @ w) @ v, "t")

    specs = (P(), P(None, "t"), P("t", None))
    found = trace(
        jax.shard_map(rank, mesh=mesh, in_specs=specs, out_specs=P()),
        bf16(8, 16), bf16(16, 64), bf16(64, 16),
    )  # fmt: skip
    assert found.ranks == 4
    # Each of four ranks has a quarter of the products, and reduces the whole result.
    assert found.matmul_flops == (2 * 8 * 16 * 64 + 2 * 8 * 64 * 16) // 4
    (op,) = found.collectives
    assert (op.kind, op.ranks, op.wire_bytes()) == ("all_reduce", 4, 2 * 8 * 16)
    assert found.collective_bytes == 256


def test_every_collective_with_its_bytes_and_group() -> None:
    mesh = AbstractMesh((2, 4), ("d", "t"))

    def rank(x):
        return (
            jax.lax.psum(x, ("d", "t")),
            jax.lax.all_gather(x, "t"),
            jax.lax.psum_scatter(x, "t", scatter_dimension=1, tiled=True),
            jax.lax.all_to_all(x, "d", 1, 1, tiled=True),
            jax.lax.ppermute(x, "t", [(i, (i + 1) % 4) for i in range(4)]),
            jax.lax.pmax(x, "d"),
        )

    spec = P(("d", "t"))
    mapped = jax.shard_map(
        rank, mesh=mesh, in_specs=spec, out_specs=(P(), *[spec] * 4, P("t")), check_vma=False
    )
    found = trace(mapped, f32(64, 16))
    local = 8 * 16 * 4
    assert found.ranks == 8
    assert [(op.kind, op.ranks, op.wire_bytes()) for op in found.collectives] == [
        ("all_reduce", 8, local),
        ("all_gather", 4, 4 * local),
        ("reduce_scatter", 4, local),
        ("all_to_all", 2, local),
        ("permute", 4, local),
        ("all_reduce", 2, local),
    ]
    assert np.all(found.on("h100")["seconds"].values > 0)


def test_messages_of_wider_elements_take_longer() -> None:
    def reduced(x):
        mapped = lambda x: jax.lax.psum(x, "t")  # noqa: E731
        mesh = AbstractMesh((8,), ("t",))
        return jax.shard_map(mapped, mesh=mesh, in_specs=P("t"), out_specs=P())(x)

    wide = trace(reduced, f32(8 * 2**20, 16)).on("h100")
    same = trace(reduced, bf16(8 * 2**21, 16)).on("h100")
    assert float(wide["time_s"]) == pytest.approx(float(same["time_s"]), rel=1e-6)


# ---- Symbolic sizes ----


def block(x, w, v):
    h = x + attention(*[x.reshape(x.shape[0], x.shape[1], 4, 8)] * 3).reshape(x.shape)
    return h + mlp(h, w, v)


def test_symbolic_sizes_agree_with_concrete_ones() -> None:
    b, l = export.symbolic_shape("b, l")  # noqa: E741
    weights = bf16(32, 64), bf16(64, 32)
    symbolic = trace(block, bf16(b, l, 32), *weights)
    assert symbolic.symbols == ("b", "l")
    # Two products of 32 × 64 a token, and two of 4 heads of 8 a pair.
    assert str(symbolic.matmul_flops) == "128*b*l^2 + 8192*b*l"
    for sizes in ((1, 1), (3, 17), (8, 4096)):
        concrete = trace(block, bf16(*sizes, 32), *weights)
        found = symbolic.evaluate(dict(zip("bl", sizes, strict=True)))
        assert found.symbols == ()
        for quantity in ("matmul_flops", "flops", "memory_bytes", "input_bytes", "output_bytes"):
            assert getattr(found, quantity) == getattr(concrete, quantity), quantity
            assert isinstance(getattr(found, quantity), int)
        if sizes != (1, 1):
            assert found.table().equals(concrete.table())


def test_counts_are_differentiable_in_symbolic_sizes() -> None:
    b, l = export.symbolic_shape("b, l")  # noqa: E741
    traced = trace(block, bf16(b, l, 32), bf16(32, 64), bf16(64, 32))
    slope = jax.grad(lambda n: traced.evaluate({"b": 2, "l": n}).matmul_flops)(100.0)
    assert float(slope) == 2 * 128 * 2 * 100 + 8192 * 2
    direct = jax.grad(lambda n: traced.matmul_flops.evaluate({"b": n, "l": 100}))(2.0)
    assert float(direct) == 128 * 100**2 + 8192 * 100


def test_a_symbolic_number_of_experts_rows_and_branches() -> None:
    (n,) = export.symbolic_shape("n")

    def either(x, w):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: (x.T @ x)[:1] + x, x)

    found = trace(either, bf16(n, 64), bf16(64, 64))
    # Both branches take 2·n·64·64; that with the sum reads and writes more.
    assert found.evaluate({"n": 5}).matmul_flops == 2 * 5 * 64 * 64
    with pytest.raises(InputError, match="values are needed for n"):
        found.on("h100")


# ---- Modules ----


def test_equinox_modules_and_captured_arrays() -> None:
    made = eqx.filter_eval_shape(eqx.nn.MLP, 16, 4, 32, 2, key=jax.random.key(0))
    parameters = (16 * 32 + 32) + (32 * 32 + 32) + (32 * 4 + 4)
    for found in (
        trace(made, f32(16)),
        trace(lambda m, x: m(x), made, f32(16)),
    ):
        assert found.matmul_flops == 2 * (16 * 32 + 32 * 32 + 32 * 4)
        assert (found.parameter_bytes, found.input_bytes) == (4 * parameters, 64)
    held = jnp.ones((16, 16), jnp.bfloat16)
    assert trace(lambda x: x @ held, bf16(2, 16)).parameter_bytes == 512


def test_flax_modules() -> None:
    linen = pytest.importorskip("flax.linen")
    nnx = pytest.importorskip("flax.nnx")

    class Linen(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(4, name="out")(jax.nn.relu(linen.Dense(32, name="hidden")(x)))

    variables = jax.eval_shape(Linen().init, jax.random.key(0), f32(2, 16))
    found = trace(Linen().apply, variables, f32(2, 16))
    assert found.matmul_flops == 2 * 2 * (16 * 32 + 32 * 4)
    assert found.parameter_bytes == 4 * (16 * 32 + 32 + 32 * 4 + 4)
    assert {op.group for op in found.operators if isinstance(op, Matmul)} == {
        "Linen/hidden", "Linen/out",
    }  # fmt: skip

    module = nnx.eval_shape(lambda: nnx.Linear(16, 32, rngs=nnx.Rngs(0)))
    found = trace(module, f32(2, 16))
    assert found.matmul_flops == 2 * 2 * 16 * 32
    assert found.parameter_bytes == 4 * (16 * 32 + 32)


def test_the_given_operand_is_the_weights() -> None:
    def dense(parameters, x):
        return jax.lax.dot_general(parameters["w"], jnp.sin(x), (((1,), (1,)), ((), ())))

    # A dense layer that writes w · x has its weights on the left, here narrower ones.
    weights = {"w": jax.ShapeDtypeStruct((32, 16), jnp.int8)}
    op = trace(dense, weights, bf16(8, 16)).operators[-1]
    assert isinstance(op, Matmul)
    assert (op.rows, op.columns, op.inner) == (8, 32, 16)
    assert (op.weight_bytes, op.activation_bytes) == (1, 2)
    assert trace(dense, weights, bf16(8, 16)).table()["kernel"].values[-1] == "w8a16"


# ---- Size and speed ----


def test_a_70b_is_traced_in_seconds_without_its_memory() -> None:
    wide = {
        "up": bf16(80, 8192, 28672),
        "gate": bf16(80, 8192, 28672),
        "down": bf16(80, 28672, 8192),
    }

    def network(layers, x):
        def layer(x, w):
            return x + (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"], None

        for i in range(40):
            x, _ = layer(x, jax.tree.map(lambda w, i=i: w[i], layers))
        return jax.lax.scan(layer, x, jax.tree.map(lambda w: w[40:], layers))[0]

    tracemalloc.start()
    before = time.process_time()
    found = trace(network, wide, bf16(16, 8192))
    spent, (_, peak) = time.process_time() - before, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.matmul_flops == 80 * 3 * 2 * 16 * 8192 * 28672
    assert found.parameter_bytes == 80 * 3 * 2 * 8192 * 28672 > 100e9
    assert peak < 100e6 and spent < 20
    # Forty layers written out are as few rows as one, as is the loop.
    assert len(found.operators) < 12


# ---- XLA ----


def _xla(function, *shapes) -> float:
    return jax.jit(function).lower(*shapes).compile().cost_analysis()["flops"]


def test_xla_counts_the_same_products() -> None:
    x, w, v = f32(64, 128), f32(128, 256), f32(256, 32)
    chain = trace(lambda x, w, v: (x @ w) @ v, x, w, v)
    assert _xla(lambda x, w, v: (x @ w) @ v, x, w, v) == chain.flops == chain.matmul_flops
    q = f32(2, 64, 4, 32)
    found = trace(attention, q, q, q)
    counted = _xla(attention, q, q, q)
    # XLA adds the element-wise work (exponentials apart, which it counts beside).
    assert 0 < counted - found.matmul_flops < 0.1 * found.matmul_flops
    # It counts a loop's body once, we count it as often as it runs.
    loop = lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, length=9)[0]  # noqa: E731
    once, all_ = _xla(loop, f32(64, 64)), trace(loop, f32(64, 64)).matmul_flops
    assert all_ == 9 * 2 * 64**3 and once == pytest.approx(all_ / 9, rel=1e-3)


# ---- Times ----


def test_times_are_those_of_the_operators_one_after_the_other() -> None:
    found = trace(mlp, bf16(8, 4096), bf16(4096, 8192), bf16(8192, 4096))
    timed = found.on("h100")
    rank = Rank(load_chip("h100").machine)
    expected = total_usage(found.operators, rank)
    assert float(timed["time_s"]) == pytest.approx(float(expected.seconds), rel=1e-5)
    assert float(timed["dynamic_energy_j"]) == pytest.approx(float(expected.joules), rel=1e-5)
    parts = sum(timed[f"{part}_s"].values for part in ("compute", "weights", "network", "latency"))
    assert parts == pytest.approx(timed["seconds"].values, rel=1e-4)
    # Two products of 67 MB each: no faster than the memory of 3.35 TB/s, and not far from it.
    bound = float(timed["total_memory_bytes"]) / 3.35e12
    assert bound < float(timed["time_s"]) < 2 * bound
    for name, variable in timed.variables.items():
        assert variable.attrs["units"] and variable.attrs["long_name"], name


def test_kernels_follow_the_data_type() -> None:
    def kernel(kind) -> str:
        x = jax.ShapeDtypeStruct((64, 64), kind)
        found = trace(lambda a, b: jax.lax.dot(a, b, preferred_element_type=jnp.float32), x, x)
        return str(found.table()["kernel"].values[0])

    kinds = (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.int8, jnp.float32)
    assert [kernel(kind) for kind in kinds] == ["bf16", "bf16", "fp8", "int8", "bf16"]
    wide = trace(lambda a: a @ a, f32(8, 8))
    assert "float32 are timed at the 16-bit rate" in wide.notes[0]
    assert trace(lambda a: a @ a, bf16(8, 8)).notes == ()
    fp8 = trace(lambda a: a @ a, jax.ShapeDtypeStruct((64, 64), jnp.float8_e4m3fn))
    with pytest.raises(InputError, match="has no fp8 kernel"):
        fp8.on("a100")


def test_what_does_not_fit_is_infeasible() -> None:
    huge = trace(lambda p, x: x @ p["w"], {"w": bf16(2**18, 2**18)}, bf16(1, 2**18))
    assert not bool(huge.on("h100")["feasible"]) and bool(huge.on("b200")["feasible"])


# ---- Errors ----


def test_a_function_that_fails_says_so_in_one_line() -> None:
    with pytest.raises(InputError, match=r"mlp raised TypeError: dot_general") as error:
        trace(mlp, bf16(8, 16), bf16(17, 64), bf16(64, 32))
    assert "\n" not in str(error.value) and isinstance(error.value.__cause__, TypeError)
    with pytest.raises(InputError, match="3 is no function"):
        trace(3)  # pyright: ignore[reportArgumentType]


def test_the_function_is_public() -> None:
    assert perfmodel.trace is trace and isinstance(trace(jnp.sin, f32(2)), perfmodel.Traced)
    assert not [op for op in trace(jnp.sin, f32(2)).operators if isinstance(op, Collective)]
