"""The suite drops compiled programs before their memory mappings run out."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import compiled_programs
import jax
import jax.numpy as jnp
import pytest
from compiled_programs import CompiledPrograms, mappings

pytestmark = pytest.mark.skipif(mappings() == 0, reason="this system does not list mappings")


@pytest.fixture
def many_programs() -> Iterator[int]:
    """50 compiled programs, of a function that lives on; how many mappings there were before."""

    @functools.partial(jax.jit, static_argnums=1)
    def compute(x: jax.Array, i: int) -> jax.Array:
        return jnp.sin(x) * i

    compute(jnp.float32(1), -1)
    jax.clear_caches()
    before = mappings()
    for i in range(50):
        compute(jnp.float32(1), i).block_until_ready()
    assert mappings() >= before + 50
    yield before
    compute.clear_cache()


def test_programs_are_dropped_above_the_limit(many_programs: int) -> None:
    hook = CompiledPrograms(limit=many_programs, tests_between=2)
    hook.pytest_runtest_teardown()
    assert mappings() >= many_programs + 50
    hook.pytest_runtest_teardown()
    assert mappings() < many_programs + 50


def test_programs_are_kept_below_the_limit(many_programs: int) -> None:
    hook = CompiledPrograms(limit=compiled_programs.most_mappings(), tests_between=1)
    hook.pytest_runtest_teardown()
    assert mappings() >= many_programs + 50


def test_the_suite_has_the_hook(pytestconfig: pytest.Config) -> None:
    plugins = pytestconfig.pluginmanager.get_plugins()
    (hook,) = (x for x in plugins if isinstance(x, CompiledPrograms))
    assert 0 < hook.limit < 65_530
