"""The gradient of broadcast attention by its kernel: choice, vmap rule, second derivative."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax

from ikbo_jax.ops import attention_vmap, dispatch
from ikbo_jax.ops.attention_vmap import Arrays
from ikbo_jax.ops.op import Gradient, gradient_config
from ikbo_jax.ops.sharded import run_kernel
from ikbo_jax.ops.stacking import concatenate, unstack
from ikbo_jax.problems import AttentionBackwardConfig, AttentionBackwardProblem, AttentionProblem
from ikbo_jax.reference import attention_grouped

Gradients = tuple[jax.Array, jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of a gradient that are not arrays.

    Attributes:
      request: the caller's `implementation`; a `config` is the forward kernel's and does not count.
      scale: of the scores.
      logit_cap: of the scores, or None.
      indices_are_sorted: whether `cand_to_user` is sorted.
      dtype: name of the dtype of the gradients of key and value; None means the inputs'.
      config: the kernel's configuration; None if XLA computes the gradient.
    """

    request: dispatch.Request
    scale: float
    logit_cap: float | None
    indices_are_sorted: bool
    dtype: str | None
    config: AttentionBackwardConfig | None


class Operands(NamedTuple):
    """The arrays of a gradient; `d_lse` is None where lse is no result."""

    arrays: Arrays
    out: jax.Array
    lse: jax.Array
    d_out: jax.Array
    d_lse: jax.Array | None


def choose(
    request: dispatch.Request, problem: AttentionProblem
) -> tuple[AttentionBackwardConfig | None, str]:
    """Returns the configuration of the gradient's kernel, or None for XLA; and the reason."""
    if request.implementation == "xla":
        return None, "requested by the caller"
    backward = AttentionBackwardProblem.of(problem)
    return gradient_config(request, backward, problem.why_not_scores())


def _pull_back(settings: Settings, operands: Operands, cotangents: Gradients) -> tuple[Operands]:
    query, key, value = operands.arrays[:3]

    def run(query: Any, key: Any, value: Any, *rest: Any) -> Gradients:
        arrays = operands.arrays._replace(query=query, key=key, value=value)
        return _by_xla(settings, Operands(arrays, *rest))

    with jax.default_matmul_precision(settings.request.precision):
        pulled: Any = jax.vjp(run, query, key, value, *operands[1:])[1](cotangents)
    return (Operands(Arrays(*pulled[:3], *attention_vmap.NO_GRADIENTS), *pulled[3:]),)


def _by_xla(settings: Settings, operands: Operands) -> Gradients:
    arrays, _, _, d_out, d_lse = operands
    return attention_grouped.decomposed_vjp(
        *arrays[:5],
        d_out,
        d_lse,
        ranges=arrays.ranges,
        scale=settings.scale,
        logit_cap=settings.logit_cap,
        dtype=settings.dtype,
    )


def _run_batched(settings: Settings, size: int, batched: Operands, operands: Operands) -> Gradients:
    """Runs the problems of a `vmap`, like `Op._run_batched`."""
    if not size:
        return GRADIENT.one_by_one(settings, batched, operands)
    # Every problem returns its own gradients of all arrays, so copies of shared arrays take no
    # more memory than the results.
    arrays = attention_vmap.fold(size, batched.arrays, operands.arrays, fold_users=True)
    rows = jax.tree.map(functools.partial(concatenate, size), operands[1:], batched[1:])
    config, _ = choose(settings.request, problem_of(arrays, settings.logit_cap))
    folded = dataclasses.replace(settings, config=config)
    return unstack(size, GRADIENT.vmappable(folded, Operands(arrays, *rows)))


def _run(settings: Settings, operands: Operands) -> Gradients:
    if settings.config is None:
        return _by_xla(settings, operands)
    # Imported here because Mosaic GPU takes 0.3 s to import.
    from ikbo_jax.pallas.attention_backward import kernel

    arrays, *rest = operands
    # One candidate is sorted, and so are the candidates of one user.
    is_sorted = settings.indices_are_sorted or 1 in (arrays.query.shape[0], arrays.key.shape[0])
    launch = functools.partial(
        kernel.attention_backward_kernel,
        scale=settings.scale,
        logit_cap=settings.logit_cap,
        indices_are_sorted=is_sorted,
        config=settings.config,
        num_sms=settings.request.num_sms,
        dtype=settings.dtype,
    )
    result: Gradients = run_kernel(launch, *arrays[:5], *rest)
    return result


#: Gradients of query, key and value by the kernel; differentiable, through XLA.
GRADIENT = Gradient(_run, _run_batched, _pull_back)


def problem_of(arrays: Arrays, logit_cap: float | None) -> AttentionProblem:
    """Reads the forward problem of a call."""
    batch, q_len, q_heads, width = arrays.query.shape
    users, kv_len, kv_heads, _ = arrays.key.shape
    sizes = batch, users, q_len, kv_len, q_heads, kv_heads, width
    kinds = {"has_ranges": arrays.ranges is not None, "has_logit_cap": logit_cap is not None}
    return AttentionProblem(*sizes, dtype=str(arrays.query.dtype), **kinds)
