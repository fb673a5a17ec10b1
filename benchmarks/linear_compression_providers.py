"""The implementations of linear compression that the benchmark compares, and their oracle."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import ikbo_jax
from ikbo_jax.problems import LinearCompressionConfig, LinearCompressionProblem
from ikbo_jax.reference import linear_compression as reference
from ikbo_jax.tuning import table

#: Aligned baselines pad the embedding rows to a multiple of this: 16 bytes of bf16.
ALIGNED_K = 8


class Inputs(NamedTuple):
    """The arguments of `ikbo_jax.linear_compression`, in its order."""

    w_cand: jax.Array
    w_user: jax.Array
    e_cand: jax.Array
    e_user: jax.Array
    cand_to_user: jax.Array

    @property
    def levels(self) -> tuple[tuple, tuple, tuple]:
        """(weights, embeddings, parents) for the reference functions, coarsest level first."""
        weights, embeddings = (self.w_user, self.w_cand), (self.e_user, self.e_cand)
        return weights, embeddings, (None, self.cand_to_user)


@dataclasses.dataclass(frozen=True)
class Provider:
    """One implementation of the op.

    Attributes:
      name: short name, the key in results files.
      stage: description.
      fn: the timed function; its arguments are the result of `prepare`.
      prepare: converts the inputs to the arguments of `fn`, before the timing.
    """

    name: str
    stage: str
    fn: Callable[..., jax.Array]
    prepare: Callable[[Inputs], tuple] = tuple


@functools.partial(jax.jit, static_argnums=1)
def _concatenated(inputs: Inputs, align: int) -> tuple[jax.Array, jax.Array]:
    weight = jnp.concatenate((inputs.w_user, inputs.w_cand), axis=1)
    embedding = jnp.concatenate((inputs.e_user[inputs.cand_to_user], inputs.e_cand), axis=1)
    pad = -weight.shape[1] % align
    weight = jnp.pad(weight, ((0, 0), (0, pad)))
    return weight, jnp.pad(embedding, ((0, 0), (0, pad), (0, 0)))


@jax.jit
def _padded(inputs: Inputs) -> Inputs:
    def pad(array: jax.Array) -> jax.Array:
        rows = -array.shape[1] % ALIGNED_K
        return jnp.pad(array, ((0, 0), (0, rows), *((0, 0),) * (array.ndim - 2)))

    w_cand, w_user, e_cand, e_user, cand_to_user = inputs
    return Inputs(pad(w_cand), pad(w_user), pad(e_cand), pad(e_user), cand_to_user)


def _materialised(*inputs: jax.Array, align_k: int) -> jax.Array:
    levels = Inputs(*inputs).levels
    return reference.materialised(*levels, align_k=align_k, precision=None)


def _decomposed(*inputs: jax.Array, formulation: str) -> jax.Array:
    return reference.decomposed(*Inputs(*inputs).levels, formulation=formulation)


def _kernel(*inputs: jax.Array, config: LinearCompressionConfig) -> jax.Array:
    return ikbo_jax.linear_compression(*inputs, implementation="mosaic_gpu", config=config)


OURS = Provider("ikbo", "ikbo_jax.linear_compression", ikbo_jax.linear_compression)
XLA = Provider(
    "xla",
    "2 decomposed (implementation='xla')",
    functools.partial(ikbo_jax.linear_compression, implementation="xla"),
)


def all_providers(problem: LinearCompressionProblem, formulations: bool = True) -> list[Provider]:
    """Every stage and every baseline; XLA's other formulations if `formulations`.

    A provider that cannot run here raises when it is compiled, and is then skipped.
    """
    providers = [
        Provider(
            "materialised",
            "1 materialised, with its copies",
            functools.partial(_materialised, align_k=1),
        ),
        Provider(
            "materialised-aligned",
            f"1 materialised, with its copies, K a multiple of {ALIGNED_K}",
            functools.partial(_materialised, align_k=ALIGNED_K),
        ),
        Provider(
            "materialised-gemm",
            "1 materialised, copies made before",
            jnp.matmul,
            lambda inputs: _concatenated(inputs, 1),
        ),
        Provider(
            "materialised-gemm-aligned",
            f"1 materialised, copies made before, K a multiple of {ALIGNED_K}",
            jnp.matmul,
            lambda inputs: _concatenated(inputs, ALIGNED_K),
        ),
        XLA,
    ]
    for name in reference.FORMULATIONS if formulations else ():
        fn = functools.partial(_decomposed, formulation=name)
        providers.append(Provider(f"xla-{name}", f"2 decomposed, written as {name}", fn))
    for name in ("matmul", "rounded"):
        fn = functools.partial(_decomposed, formulation=name)
        stage = f"2 decomposed, written as {name}, all K padded before"
        providers.append(Provider(f"xla-{name}-padded-before", stage, fn, _padded))
    config = table.lookup(problem).config or problem.default_config()
    if config is not None:
        for name, stage, single in (
            ("fused", "3 fused: broadcast in the epilogue", False),
            ("single-launch", "4 single launch", True),
        ):
            fn = functools.partial(
                _kernel, config=dataclasses.replace(config, single_launch=single)
            )
            providers.append(Provider(name, stage, fn))
    return [*providers, OURS]


def oracle(inputs: Inputs, rows: Sequence[int]) -> tuple[np.ndarray, float]:
    """NumPy f64 results of some candidates, and the largest error that the error rule allows."""

    def f64(array: jax.Array) -> np.ndarray:
        return np.asarray(array).astype(np.float64)

    index = np.asarray(inputs.cand_to_user)
    w_cand, w_user = f64(inputs.w_cand), f64(inputs.w_user)
    exact = np.stack(
        [w_cand @ f64(inputs.e_cand[b]) + w_user @ f64(inputs.e_user[int(index[b])]) for b in rows]
    )
    dtype = inputs.w_cand.dtype
    same_dtype = np.abs(exact.astype(dtype).astype(np.float64) - exact).max()
    # The error of f32 accumulation; only f32 results need it, since 16-bit rounding is larger.
    accumulation = 2.0**-24 * sum(w.shape[1] for w in inputs[:2]) ** 0.5 * np.abs(exact).max()
    one_rounding = float(jnp.finfo(dtype).eps) / 2 * np.abs(exact).max()
    return exact, float(2 * (same_dtype + accumulation) + one_rounding)
