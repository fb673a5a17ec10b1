"""The case of attention: inputs, oracle, contenders and checks."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ikbo_jax.cases import case
from ikbo_jax.cases.error_rule import Check
from ikbo_jax.ops.attention import attention
from ikbo_jax.problems import AttentionConfig, AttentionProblem, FewQueriesConfig
from ikbo_jax.reference import attention as reference


class Inputs(NamedTuple):
    """Holds the arrays of `ikbo_jax.attention`; `lengths` is [U] int32 or None."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    cand_to_user: jax.Array
    lengths: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Case(case.Case):
    """Combines a problem with a sorted index of random numbers of candidates, and full lengths."""

    problem: AttentionProblem

    def draw(self, seed: int | jax.Array) -> tuple[jax.Array, ...]:
        """Draws query, key and value; `seed` may be traced."""
        p = self.problem
        kv_shape = (p.users, p.kv_len, p.kv_heads, p.head_dim)
        shapes = ((p.batch, p.q_len, p.q_heads, p.head_dim), kv_shape, kv_shape)
        keys = jax.random.split(jax.random.key(seed), 3)
        dtype = jnp.dtype(p.dtype)
        return tuple(jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True))

    def inputs(self, seed: int = 0) -> Inputs:
        p, rng = self.problem, np.random.default_rng(seed)
        index = np.sort(rng.integers(0, max(p.users, 1), p.batch))
        return Inputs._make([*self.draw(seed), jnp.asarray(index, jnp.int32), None])

    def contender(self, name: str) -> Callable[..., jax.Array]:
        """Returns a function of the fields of `Inputs`.

        "materialised" and "materialised-cudnn" copy keys and values; the others are the op with
        `case.IMPLEMENTATIONS`.
        """
        copies = {"materialised": materialised, "materialised-cudnn": materialised_cudnn}
        if name in copies:
            return copies[name]
        return functools.partial(_op, implementation=case.IMPLEMENTATIONS[name], is_sorted=True)

    def xla_path(self) -> Callable[..., jax.Array]:
        return self.contender("decomposed")

    def kernel(
        self, config: AttentionConfig | FewQueriesConfig, num_sms: int
    ) -> Callable[..., jax.Array]:
        from ikbo_jax.pallas.few_queries.kernel import few_queries_kernel
        from ikbo_jax.pallas.flash.attention import attention_kernel

        run: Any = few_queries_kernel
        if isinstance(config, AttentionConfig):
            run = functools.partial(attention_kernel, order=None)
        options = {"scale": self.problem.head_dim**-0.5, "return_residuals": False}
        return lambda *inputs: run(*inputs, **options, config=config, num_sms=num_sms)[0]

    @property
    def rounding(self) -> tuple[str, float]:
        """Last arguments of `error_rule.bound`: dtype, and number of terms of the longest sums."""
        return self.problem.dtype, self.problem.kv_len

    def check(self, actual: jax.Array, inputs: Inputs) -> Check:
        return case.check_candidates(actual, _by_xla, oracle, inputs, self.rounding)


def oracle(inputs: Inputs, rows: np.ndarray | jax.Array) -> jax.Array:
    """Computes the results of some candidates by the reference in f32: [rows, T, N, H]."""
    # The reference widens keys and values after the lookup.
    query, index = inputs.query[rows].astype(jnp.float32), inputs.cand_to_user[rows]
    of_rows = inputs._replace(query=query, cand_to_user=index)
    return reference.materialised(*of_rows, scale=inputs.query.shape[-1] ** -0.5)[0]


def materialised(*inputs: Any) -> jax.Array:
    """Attends as a model without this library: copies keys and values for every candidate.

    Takes the fields of `Inputs`; every user has at least one key.
    """
    query, key, value, index, lengths = Inputs(*inputs)
    keys, values = key[index], value[index]
    if (heads := query.shape[2] // key.shape[2]) > 1:
        keys, values = (jnp.repeat(x, heads, axis=2) for x in (keys, values))
    scores = jnp.einsum("btnh,bsnh->bnts", query, keys, preferred_element_type=jnp.float32)
    scores = scores * query.shape[-1] ** -0.5
    if lengths is not None:
        is_key = jnp.arange(key.shape[1], dtype=jnp.int32)[None] < lengths[index][:, None]
        scores = jnp.where(is_key[:, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
    out = jnp.einsum("bnts,bsnh->btnh", weights, values, preferred_element_type=jnp.float32)
    return out.astype(query.dtype)


def materialised_cudnn(*inputs: Any) -> jax.Array:
    """Attends like `materialised`, by cuDNN's attention, which needs a GPU."""
    query, key, value, index, lengths = Inputs(*inputs)
    # The barrier forces XLA to materialise the copies.
    keys, values = jax.lax.optimization_barrier((key[index], value[index]))
    return jax.nn.dot_product_attention(
        query,
        keys,
        values,
        key_value_seq_lengths=None if lengths is None else lengths[index],
        implementation="cudnn",
    )


def _op(*inputs: Any, implementation: str | None, is_sorted: bool) -> Any:
    query, key, value, index, lengths = Inputs(*inputs)
    return attention(
        query,
        key,
        value,
        index,
        key_value_seq_lengths=lengths,
        indices_are_sorted=is_sorted,
        implementation=implementation,
    )


_by_xla = functools.partial(_op, implementation="xla", is_sorted=False)
