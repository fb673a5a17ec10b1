"""The implementations of linear compression that the benchmark compares."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks.harness import Provider
from ikbo_jax.cases.linear_compression import ALIGNED_K, Case, Inputs
from ikbo_jax.problems import LinearCompressionProblem
from ikbo_jax.reference import linear_compression as reference


@functools.partial(jax.jit, static_argnums=1)
def _concatenated(inputs: Inputs, align: int) -> tuple[jax.Array, jax.Array]:
    (w_user, w_cand), (e_user, e_cand), (_, cand_to_user) = inputs
    weight = jnp.concatenate((w_user, w_cand), axis=1)
    embedding = jnp.concatenate((e_user[cand_to_user], e_cand), axis=1)
    return _padded(weight, align), _padded(embedding, align)


def _padded(array: jax.Array, align: int = ALIGNED_K) -> jax.Array:
    rows = -array.shape[1] % align
    return jnp.pad(array, ((0, 0), (0, rows), *((0, 0),) * (array.ndim - 2)))


@jax.jit
def _all_padded(inputs: Inputs) -> Inputs:
    weights, embeddings = jax.tree.map(_padded, inputs[:2])
    return Inputs(weights, embeddings, inputs.parents)


def _written_as(name: str, padded: Callable[[Inputs], tuple]) -> Callable[[Case, Inputs], tuple]:
    fn = functools.partial(reference.decomposed, formulation=name)
    return lambda case, inputs: (fn, padded(inputs))


OURS = Provider.of_case("ikbo", "ikbo_jax.linear_compression", "automatic")
XLA = Provider.of_case("xla", "2 decomposed (implementation='xla')", "decomposed")


def all_providers(problem: LinearCompressionProblem, formulations: bool = True) -> list[Provider]:
    """Every stage and every baseline; XLA's other formulations if `formulations`.

    A provider that cannot run here raises when it is compiled, and is then skipped.
    """
    providers = [
        Provider.of_case("materialised", "1 materialised, with its copies", "materialised"),
        Provider.of_case(
            "materialised-aligned",
            f"1 materialised, with its copies, K a multiple of {ALIGNED_K}",
            "materialised-aligned",
        ),
        Provider(
            "materialised-gemm",
            "1 materialised, copies made before",
            lambda case, inputs: (jnp.matmul, _concatenated(inputs, 1)),
        ),
        Provider(
            "materialised-gemm-aligned",
            f"1 materialised, copies made before, K a multiple of {ALIGNED_K}",
            lambda case, inputs: (jnp.matmul, _concatenated(inputs, ALIGNED_K)),
        ),
        XLA,
    ]
    for name in reference.FORMULATIONS if formulations else ():
        stage = f"2 decomposed, written as {name}"
        providers.append(Provider(f"xla-{name}", stage, _written_as(name, tuple)))
    for name in ("matmul", "rounded"):
        stage = f"2 decomposed, written as {name}, all K padded before"
        prepare = _written_as(name, _all_padded)
        providers.append(Provider(f"xla-{name}-padded-before", stage, prepare))
    for name, stage, is_single in (
        ("fused", "3 fused: broadcast in the epilogue", False),
        ("single-launch", "4 single launch", True),
    ):
        if (config := Case(problem).config(single_launch=is_single)) is not None:
            providers.append(Provider.of_case(name, stage, "fused", config))
    return [*providers, OURS]
