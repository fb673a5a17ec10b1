"""The gradient of broadcast attention by its kernel: choice, vmap rule, second derivative."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ikbo_jax.ops import attention_arrays, dispatch
from ikbo_jax.ops.attention_arrays import Arrays
from ikbo_jax.ops.op import Call, Gradient
from ikbo_jax.ops.sharded import run_kernel
from ikbo_jax.ops.stacking import concatenate, unstack
from ikbo_jax.problems import AttentionBackwardConfig, AttentionBackwardProblem, AttentionProblem
from ikbo_jax.reference import attention as reference
from ikbo_jax.reference import attention_grouped

#: Of query, key and value, and of keys and values of own tokens if there are any; then of a bias.
Gradients = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class AttentionCall(Call):
    """The arguments that are not arrays."""

    scale: float
    indices_are_sorted: bool
    logit_cap: float | None

    @property
    def of_scores(self) -> dict[str, Any]:
        """Keywords of the reference's functions."""
        return {"scale": self.scale, "logit_cap": self.logit_cap}


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
    backward = AttentionBackwardProblem.of(problem)
    why_not = problem.why_not_scores(takes_ranges=True)
    if problem.has_ranges:
        why_not = why_not or "key_value_ranges run in XLA"
    if problem.page:
        why_not = why_not or "a page_table runs in XLA"
    return dispatch.gradient_config(request, backward, why_not)


def _pull_back(call: AttentionCall, operands: Operands, cotangents: Gradients) -> tuple[Operands]:
    arrays = operands.arrays

    def run(floats: Any, *rest: Any) -> Gradients:
        names = ("query", "key", "value", "self_key", "self_value")  # own tokens may be missing
        of_floats = arrays._replace(**dict(zip(names, floats, strict=False)))
        _, _, d_out, d_lse = rest
        return by_xla(call, of_floats, d_out, d_lse)

    floats = (*arrays[:3], *arrays.own)
    with jax.default_matmul_precision(call.request.precision):
        pulled, *rest = jax.vjp(run, floats, *operands[1:])[1](cotangents)
    return (Operands(Arrays.of_floats(*pulled), *rest),)


def by_xla(call: AttentionCall, arrays: Arrays, d_out: Any, d_lse: Any) -> Gradients:
    """Computes the gradients in XLA, which computes the softmax again."""
    of_scores, dtype = call.of_scores, call.dtype
    of_user, own = arrays[:5], arrays.own
    of_own: Gradients = ()
    options = {"ranges": arrays.ranges, "bias": arrays.bias, **of_scores}
    if own:
        first = attention_grouped.decomposed(*of_user, **options)

        def merged(query: Any, out: Any, lse: Any, *own: Any) -> tuple[jax.Array, jax.Array]:
            more = reference.self_attention(query.astype(own[0].dtype), *own, **of_scores)
            return reference.merge_attention(out, lse, *more)

        wide = (x.astype(dtype or x.dtype) for x in own)
        (_, lse), pull = jax.vjp(merged, arrays.query, *first, *wide)
        of_query, d_out, d_lse, *rest = pull(
            (d_out, jnp.zeros_like(lse) if d_lse is None else d_lse)
        )
        of_own = tuple(rest)
    d_query, *of_keys = attention_grouped.decomposed_vjp(
        *of_user, d_out, d_lse, dtype=dtype, **options
    )
    if own:
        d_query = d_query + of_query
    return d_query, *of_keys[:2], *of_own, *of_keys[2:]


def of_pages(call: AttentionCall, arrays: Arrays, d_out: Any, d_lse: Any) -> Gradients:
    """Computes `by_xla` where keys and values are in pages; adds up in f32 what users share."""
    table: Any = arrays.page_table
    dtype, in_f32 = call.dtype, dataclasses.replace(call, dtype="float32")
    d_query, d_key, d_value, *of_own = by_xla(in_f32, arrays.laid_out(), d_out, d_lse)

    def of_keys(rows: jax.Array, pages: jax.Array) -> jax.Array:
        rows = rows.reshape(*table.shape, *pages.shape[1:])
        places = jnp.clip(table, 0, pages.shape[0] - 1)
        return jnp.zeros(pages.shape, rows.dtype).at[places].add(rows).astype(dtype or pages.dtype)

    rounded = (x.astype(dtype or x_of.dtype) for x, x_of in zip(of_own, arrays.own, strict=True))
    return d_query, of_keys(d_key, arrays.key), of_keys(d_value, arrays.value), *rounded


def _run_batched(
    call: AttentionCall, size: int, batched: Operands, operands: Operands
) -> Gradients:
    """Runs the problems of a `vmap`, like `Op._run_batched`."""
    if not size:
        return GRADIENT.one_by_one(call, batched, operands)
    # Every problem returns its own gradients of all arrays, so copies of shared arrays take no
    # more memory than the results.
    arrays = attention_arrays.fold(size, batched.arrays, operands.arrays, fold_users=True)
    rows = jax.tree.map(functools.partial(concatenate, size), operands[1:], batched[1:])
    config, _ = choose(call.request, problem_of(arrays, call.logit_cap))
    folded = dataclasses.replace(call, backward_config=config)
    return unstack(size, GRADIENT.vmappable(folded, Operands(arrays, *rows)))


def _run(call: AttentionCall, operands: Operands) -> Gradients:
    if call.backward_config is None:
        return by_xla(call, operands.arrays, operands.d_out, operands.d_lse)
    # Imported here because Mosaic GPU takes 0.3 s to import.
    from ikbo_jax.pallas.attention_backward import kernel, own

    arrays, *rest = operands
    # One candidate is sorted, and so are the candidates of one user.
    is_sorted = call.indices_are_sorted or 1 in (arrays.query.shape[0], arrays.key.shape[0])
    launch = functools.partial(
        kernel.attention_backward_kernel,
        **call.of_scores,
        indices_are_sorted=is_sorted,
        config=call.backward_config,
        num_sms=call.request.num_sms,
        dtype=call.dtype,
        keeps_delta=bool(arrays.own),
    )
    result: Gradients = run_kernel(launch, *arrays[:5], *rest)
    if not arrays.own:
        return result
    *of_users, delta = result
    _, lse, d_out, _ = rest
    # By the merged out and lse, the kernel's gradients of keys and values are right.
    add = functools.partial(own.add_own_tokens, scale=call.scale, dtype=call.dtype)
    d_query, *of_own = run_kernel(add, of_users[0], arrays.query, *arrays.own, lse, d_out, delta)
    return d_query, *of_users[1:], *of_own


#: Gradients of query, key and value by the kernel; differentiable, through XLA.
GRADIENT = Gradient(_run, _run_batched, _pull_back)


def problem_of(arrays: Arrays, logit_cap: float | None) -> AttentionProblem:
    """Reads the forward problem of a call."""
    batch, q_len, q_heads, width = arrays.query.shape
    _, page, kv_heads, _ = arrays.key.shape
    users, kv_len = arrays.keys
    sizes = batch, users, q_len, kv_len, q_heads, kv_heads, width
    kinds: dict[str, Any] = {"page": page if arrays.page_table is not None else 0}
    kinds |= {"has_ranges": arrays.ranges is not None, "has_logit_cap": logit_cap is not None}
    kinds["has_bias"] = arrays.bias is not None
    return AttentionProblem(*sizes, dtype=str(arrays.query.dtype), **kinds)
