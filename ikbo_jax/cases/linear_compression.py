"""The case of linear compression: inputs, oracle, contenders and checks."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ikbo_jax.cases import case
from ikbo_jax.cases.error_rule import Check
from ikbo_jax.ops.linear_compression import linear_compression
from ikbo_jax.problems import (
    LinearCompressionConfig,
    LinearCompressionProblem,
    PackedCompressionConfig,
    ResidentCompressionConfig,
)
from ikbo_jax.reference import linear_compression as reference
from ikbo_jax.tuning import table

#: The aligned baseline pads the embedding rows to a multiple of this: 16 bytes of bfloat16.
ALIGNED_K = 8

#: A configuration of one of the op's kernels.
AnyConfig = LinearCompressionConfig | PackedCompressionConfig


class Inputs(NamedTuple):
    """Holds the arguments of the reference functions, coarsest level first."""

    weights: tuple[jax.Array, ...]
    embeddings: tuple[jax.Array, ...]
    parents: tuple[jax.Array | None, ...]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of `ikbo_jax.linear_compression`, in its order."""
        (w_user, w_cand), (e_user, e_cand), (_, cand_to_user) = self
        return w_cand, w_user, e_cand, e_user, cand_to_user


@dataclasses.dataclass(frozen=True)
class Case(case.Case):
    """Combines a problem with an index, "ragged" (sorted, random numbers a user) or "unsorted"."""

    problem: LinearCompressionProblem
    index: str = "ragged"

    def _keys(self, seed: int | jax.Array) -> list[jax.Array]:
        """Splits the seed into the keys of every level's weight, embedding and parent."""
        key, levels = jax.random.key(seed), range(len(self.problem.ks))
        return [jax.random.split(jax.random.fold_in(key, level), 3) for level in levels]

    def draw(self, seed: int | jax.Array) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        """Draws weights and embeddings; `seed` may be traced."""
        p, dtype = self.problem, jnp.dtype(self.problem.dtype)
        weights, embeddings = [], []
        for (key, embedding_key, _), batch, k in zip(
            self._keys(seed), p.batches, p.ks, strict=True
        ):
            # The scale keeps outputs near one for every K, so that f16 cannot overflow.
            scale = jnp.asarray(max(k, 1) ** -0.5, dtype)
            weights.append(jax.random.normal(key, (p.m, k), dtype) * scale)
            embeddings.append(jax.random.normal(embedding_key, (batch, k, p.n), dtype))
        return tuple(weights), tuple(embeddings)

    def inputs(self, seed: int = 0) -> Inputs:
        parents: list[jax.Array | None] = [None]
        batches, keys = self.problem.batches, self._keys(seed)
        for (_, _, key), coarse, batch in zip(keys[1:], batches[:-1], batches[1:], strict=True):
            index = jnp.sort(jax.random.randint(key, (batch,), 0, coarse, jnp.int32))
            if self.index == "unsorted":
                index = jax.random.permutation(jax.random.key(seed), index)
            parents.append(index)
        return Inputs(*self.draw(seed), tuple(parents))

    def config(self, *, single_launch: bool) -> AnyConfig | None:
        """Returns the dispatch table's configuration, or the default, with one launch or two."""
        config = table.lookup(self.problem).config or self.problem.default_config()
        if isinstance(config, ResidentCompressionConfig):
            config = next(self.problem.row_configs(), None)
        assert config is None or isinstance(config, AnyConfig)
        return None if config is None else dataclasses.replace(config, single_launch=single_launch)

    @staticmethod
    def contender(name: str, config: AnyConfig | None = None) -> Callable[..., jax.Array]:
        """Returns a function of the fields of `Inputs`, which have two levels.

        "materialised" and "materialised-aligned" copy the users' embeddings; others are the op.
        """
        align = {"materialised": 1, "materialised-aligned": ALIGNED_K}
        if name in align:
            return functools.partial(reference.materialised, align_k=align[name], precision=None)
        return functools.partial(_op, implementation=case.IMPLEMENTATIONS[name], config=config)

    def xla_path(self) -> Callable[..., jax.Array]:
        return reference.decomposed

    def kernel(self, config: AnyConfig, num_sms: int) -> Callable[..., jax.Array]:
        from ikbo_jax.pallas.linear_compression.kernel import linear_compression_kernel

        return functools.partial(linear_compression_kernel, config=config, num_sms=num_sms)

    @property
    def rounding(self) -> tuple[str, float]:
        """Last arguments of `error_rule.bound`: dtype, and number of terms of a sum."""
        return self.problem.dtype, sum(self.problem.ks)

    def check(self, actual: jax.Array, inputs: Inputs) -> Check:
        return case.check_candidates(
            actual, reference.decomposed, oracle_of_rows, inputs, self.rounding
        )


def oracle(inputs: Inputs) -> jax.Array:
    """Computes the result by the materialised reference in f32: [B, M, N]."""
    return reference.materialised(*case.widened(inputs))


def _op(*inputs: Any, **options: Any) -> jax.Array:
    return linear_compression(*Inputs(*inputs).arguments, **options)


def oracle_of_rows(inputs: Inputs, rows: jax.Array) -> jax.Array:
    """Computes the results of some candidates like `oracle`: [rows, M, N]."""
    *coarse, last = inputs.parents
    return oracle(
        inputs._replace(
            embeddings=(*inputs.embeddings[:-1], inputs.embeddings[-1][rows]),
            parents=(*coarse, None if last is None else last[rows]),
        )
    )
