"""Functions compiled in chains: the same values, and nothing computed twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perfmodel import compiled, relax

_X = jnp.linspace(0.5, 3.0, 4096)


@jax.custom_jvp
def _doubled(x):
    return 2.0 * x


@_doubled.defjvp
def _doubled_jvp(primals, tangents):
    return _doubled(primals[0]), 3.0 * tangents[0]


def _shared(x, scale=2.0):
    """Calls of every kind, unused work, a constant and a result that is an input."""
    root = jnp.sqrt(jnp.abs(jnp.sin(x)))
    inner = jax.jit(lambda y: (y * scale, jnp.exp(y)))(root)
    unused = jnp.cos(root)
    del unused
    run = jax.lax.scan(lambda carry, _: (carry * 0.5 + root, None), x, None, length=3)[0]
    stair = relax.maximum(relax.ceil(root * 8.0), relax.inverse(root + 1.0))
    return {"a": inner[0] + inner[1], "b": (run, _doubled(root)), "c": stair, "x": x, "none": None}


def test_values_are_those_of_the_function():
    plain = jax.jit(_shared)(_X, 3.0)
    found = compiled.jit(_shared)(_X, 3.0)
    assert jax.tree.structure(plain) == jax.tree.structure(found)
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(one, other, rtol=3e-7)


def test_slopes_are_those_of_the_function_inside_and_outside():
    def total(x):
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(_shared(x)))

    plain = jax.jit(jax.grad(total))(_X)
    np.testing.assert_allclose(compiled.jit(jax.grad(total))(_X), plain, rtol=2e-6)
    np.testing.assert_allclose(jax.jit(jax.grad(compiled.chained(total)))(_X), plain, rtol=2e-6)


def _text(function, options):
    text = jax.jit(function, compiler_options=options).lower(_X).compile().as_text()
    assert text is not None
    return text


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what a CPU's compiler does")
def test_what_results_share_is_computed_once():
    def many(x):
        shared = jnp.sin(jnp.sqrt(x) / 1.7) + jnp.sqrt(x) * 0.3 + 0.1
        return tuple(jnp.cos(shared * k) for k in (1.0, 2.0, 3.0))

    once = _text(compiled.chained(many), compiled.options(compiled.CHAINED))
    assert once.count(" sine(") == 1
    assert once.count(" fusion(") <= 4, "kernels are not single operations"
    assert _text(many, {}).count(" sine(") == 3, "or there would be nothing to do"


def test_what_no_result_needs_is_left_out():
    found = jax.make_jaxpr(compiled.chained(lambda x: (jnp.tanh(x), x + 1.0)[1]))(_X)
    assert "tanh" not in str(found)


def test_designs_inside_a_loop_see_what_is_outside():
    def loop(x):
        y = jnp.sin(x)
        slope = compiled.chained(jax.vmap(jax.grad(lambda z, w: w * z**3 + z)))
        return jax.lax.scan(lambda carry, _: (carry - 0.01 * slope(carry, y), None), x, length=4)[0]

    def plain(x):
        y = jnp.sin(x)
        return jax.lax.scan(
            lambda carry, _: (carry - 0.01 * (3 * y * carry**2 + 1), None), x, length=4
        )[0]

    np.testing.assert_allclose(compiled.jit(loop)(_X), jax.jit(plain)(_X), rtol=2e-6)
