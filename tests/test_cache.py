"""Programs kept between runs give the same numbers, and a damaged file is no harm."""

import jax
import jax.numpy as jnp
import pytest

from perfmodel import cache


def double(x: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
    return {"sum": x + y, "product": 2.0 * x * y}


@pytest.fixture
def folder(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    cache._stored.cache_clear()
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)
    cache._stored.cache_clear()


def test_nothing_is_stored_without_a_cache():
    if not jax.config.jax_compilation_cache_dir:
        found = cache.program("double", double, (jnp.ones(3), jnp.ones(3)))
        assert found is cache.program("double", double, (jnp.ones(4), jnp.ones(4)))


def test_a_stored_program_gives_the_same_and_survives_damage(folder):
    arguments = (jnp.arange(3.0), jnp.full(3, 0.1))
    expected = double(*arguments)
    for damage in (None, b"", b"not a program"):
        found = cache.program("double", double, arguments)
        for name, value in found(*arguments).items():
            assert value.tolist() == expected[name].tolist()
        (file,) = folder.glob("double-*.stablehlo")
        assert file.stat().st_size > 100
        if damage is not None:
            file.write_bytes(damage)
        cache._stored.cache_clear()


def test_other_shapes_are_another_program(folder):
    for size in (3, 4):
        cache.program("double", double, (jnp.ones(size), jnp.ones(size)))
    assert len(list(folder.glob("double-*.stablehlo"))) == 2
