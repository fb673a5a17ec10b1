"""Broadcast attention: checks, choice of implementation, own tokens, vmap rule, gradient."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ikbo_jax.ops import dispatch, reverse_only
from ikbo_jax.reference import attention as reference
from ikbo_jax.reference import attention_grouped
from ikbo_jax.tuning.configs import WGMMA_M, AttentionConfig, AttentionProblem


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cand_to_user: jax.Array,
    *,
    scale: float | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    self_key: jax.Array | None = None,
    self_value: jax.Array | None = None,
    indices_are_sorted: bool = False,
    return_residuals: bool = False,
    implementation: str | None = None,
    config: AttentionConfig | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attends from every candidate to the keys and values of its user, which are never copied.

        out[b] = softmax(scale · query[b] · key[u]ᵀ) · value[u],  u = cand_to_user[b]

    without a causal mask, for each head.

    Args:
      query: [B, T, N, H], bfloat16, float16 or float32: B candidates (which may be 0), T queries of
        each, N heads, head width H.
      key: [U, S, K, H], same dtype: U users (at least 1 if there are candidates), S keys of each, K
        heads. N is a multiple of K: query head n uses key head n // (N / K).
      value: [U, S, K, H], same dtype.
      cand_to_user: [B] int32, the user of every candidate, values in [0, U), in any order; users
        may have no candidates. A value outside is clamped to the nearest end (a negative one to 0)
        and so never reads outside `key`; `ikbo_jax.debug.check_index` finds such values.
      scale: what scores are multiplied by, a number that float32 can hold; None takes
        1 / sqrt(H).
      key_value_seq_lengths: [U] int32, how many of a user's S keys exist, values in [0, S] (clamped
        to it; `ikbo_jax.debug.check_lengths` finds others); None takes S everywhere. Keys and
        values past the length have no effect, whatever they hold.
      self_key: [B, T_self, K, H], same dtype: keys of the candidate's own, all of which its queries
        attend to beside the user's; or None. Their T · T_self scores of a candidate are held at
        once, so they are meant to be few.
      self_value: [B, T_self, K, H], same dtype, together with `self_key`.
      indices_are_sorted: that `cand_to_user` is sorted. This spares a sort of B integers; a wrong
        promise costs time, and changes no result.
      return_residuals: returns lse as well.
      implementation: None takes the fastest that works on the default device and for these sizes;
        "mosaic_gpu" (Hopper; bfloat16 and float16) and "xla" take exactly that.
      config: tuning of the "mosaic_gpu" kernel; None takes it from the tuning table.

    Returns:
      out, [B, T, N, H] in the inputs' dtype, in the order of the candidates. With
      `return_residuals` a pair of out and lse: [B, T, N] f32, the natural logarithm of the
      softmax's denominator. A row without keys has out = 0 and lse = -inf. Scores, the softmax's
      statistics and all sums are f32; the softmax's powers are rounded to the inputs' dtype before
      they meet the values. f32 products on the "xla" path follow `jax.default_matmul_precision`.

      Differentiable in reverse mode by query, key, value, self_key and self_value, through out and
      lse. Gradients run in XLA on every path, at user and candidate batch size; each is summed in
      f32 and rounded once.

    Raises:
      ValueError: wrong ranks; sizes, dtypes, the index or the lengths disagree; N is not a multiple
        of K; U = 0 with B > 0; H = 0 or K = 0; only one of `self_key` and `self_value` is given;
        `scale` is no number, or not finite in float32; `implementation` is unknown; `config` is
        not a
        configuration, or was given with implementation="xla".
      NotImplementedError: implementation="mosaic_gpu", but the kernel cannot run here, or not with
        these sizes, this dtype or this `config`; S, N, K or H is a symbolic dimension of
        `jax.export` (B, U and T may be on the XLA path); forward-mode differentiation by query,
        key or value. The message says why.

    Source: Meta IKBO, flash attention with in-kernel broadcast, published by Meta on the PyTorch
    blog.
    """
    dispatch.check_implementation(implementation)
    if config is not None and not isinstance(config, AttentionConfig):
        raise ValueError(f"config must be an AttentionConfig, but is {config!r}")
    if config is not None and implementation == "xla":
        raise ValueError(f"implementation='xla' takes no config, but config is {config}")
    _check(query, key, value, cand_to_user, key_value_seq_lengths)
    _check_own(query, key, self_key, self_value)
    arrays = _Arrays(query, key, value, cand_to_user, key_value_seq_lengths)
    call = _Call(
        dispatch.Request("attention", implementation, config),
        query.shape[3] ** -0.5 if scale is None else dispatch.finite_number("scale", scale),
        bool(indices_are_sorted),
        bool(return_residuals),
    )
    plan = dispatch.choose(call.request, _problem(arrays))
    own = None
    if self_key is not None and self_value is not None and self_key.shape[1]:
        own = (self_key, self_value)
    if 0 in query.shape:
        out, lse = jnp.zeros(query.shape, query.dtype), jnp.zeros(query.shape[:3], jnp.float32)
    else:
        arrays = reverse_only.operands("attention", reverse_only.TWICE, arrays)
        out, lse = _attention(call, plan, arrays, own)
    return (out, lse) if return_residuals else out


def merge_attention(
    out1: jax.Array, lse1: jax.Array, out2: jax.Array, lse2: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Attention over two sets of keys, from the results of attention over each.

        lse = log(exp(lse1) + exp(lse2)),  out = exp(lse1 - lse)·out1 + exp(lse2 - lse)·out2

    For candidates that attend to something beside their user's keys: a second history, say.

    Args:
      out1: [B, T, N, H], bfloat16, float16 or float32, as `attention` returns it.
      lse1: [B, T, N] f32. Where it is -inf, `out1` has no effect.
      out2: [B, T, N, H], same dtype.
      lse2: [B, T, N] f32.

    Returns:
      (out [B, T, N, H] in the inputs' dtype, lse [B, T, N] f32), computed in f32. Where both lse
      are -inf, out is 0 and lse -inf. Differentiable by all four.

    Raises:
      ValueError: ranks, shapes or dtypes are wrong or disagree.

    Source: the combination of partial softmaxes of Milakov and Gimelshein, "Online normalizer
    calculation for softmax", 2018.
    """
    for name, out in (("out1", out1), ("out2", out2)):
        dispatch.check_array(name, out, "[B, T, N, H]")
    if out1.dtype != out2.dtype:
        raise ValueError(f"out1 is {out1.dtype} but out2 is {out2.dtype}")
    if out1.shape != out2.shape:
        raise ValueError(f"out1 has shape {out1.shape} but out2 has shape {out2.shape}")
    for name, lse in (("lse1", lse1), ("lse2", lse2)):
        if getattr(lse, "dtype", None) != "float32":
            raise ValueError(f"{name} must be a float32 array, but is {dispatch.describe(lse)}")
        if lse.shape != out1.shape[:3]:
            raise ValueError(f"{name} has shape {lse.shape} but out1 has shape {out1.shape}")
    return reference.merge_attention(out1, lse1, out2, lse2)


class _Arrays(NamedTuple):
    """The arrays of the user's part."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    cand_to_user: jax.Array
    lengths: jax.Array | None


@dataclasses.dataclass(frozen=True)
class _Call:
    """What the caller asked for, apart from the arrays."""

    request: dispatch.Request
    scale: float
    indices_are_sorted: bool
    return_residuals: bool


def _check(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cand_to_user: jax.Array,
    lengths: jax.Array | None,
) -> None:
    """Raises ValueError, naming both values, unless the user's part fits together."""
    dispatch.check_array("query", query, "[B, T, N, H]")
    for name, array in (("key", key), ("value", value)):
        dispatch.check_array(name, array, "[U, S, K, H]")
        if array.dtype != query.dtype:
            raise ValueError(f"query is {query.dtype} but {name} is {array.dtype}")
    _check_sizes("key", key, "value", value, "USKH")
    _check_sizes("query", query, "key", key, "   H")
    (batch, _, q_heads, width), (users, _, kv_heads, _) = query.shape, key.shape
    if width < 1:
        raise ValueError(
            f"query must have a head width H of at least 1, but has shape {query.shape}"
        )
    if kv_heads < 1:
        raise ValueError(f"key must have at least 1 head, but has shape {key.shape}")
    dispatch.check_concrete(
        "attention", {"S": key.shape[1], "N": q_heads, "K": kv_heads, "H": width}
    )
    if q_heads % kv_heads:
        raise ValueError(
            f"query has N={q_heads} heads, which is not a multiple of key's K={kv_heads}"
        )
    dispatch.check_index("cand_to_user", cand_to_user, "query", "B", batch)
    if lengths is not None:
        dispatch.check_index("key_value_seq_lengths", lengths, "key", "U", users)
    if batch and not users:
        raise ValueError(f"key has no rows, shape {key.shape}, but query has B={batch}")


def _check_own(
    query: jax.Array, key: jax.Array, self_key: jax.Array | None, self_value: jax.Array | None
) -> None:
    """Raises ValueError, naming both values, unless the candidate's own tokens fit the rest."""
    if (self_key is None) != (self_value is None):
        raise ValueError(
            "self_key and self_value go together, but self_key is "
            f"{dispatch.describe(self_key)} and self_value is {dispatch.describe(self_value)}"
        )
    if self_key is None or self_value is None:
        return
    for name, array in (("self_key", self_key), ("self_value", self_value)):
        dispatch.check_array(name, array, "[B, T_self, K, H]")
        if array.dtype != query.dtype:
            raise ValueError(f"query is {query.dtype} but {name} is {array.dtype}")
        _check_sizes("query", query, name, array, "B  H")
        _check_sizes("key", key, name, array, "  K ")
    _check_sizes("self_key", self_key, "self_value", self_value, (" ", "T_self", " ", " "))


def _check_sizes(
    a_name: str, a: jax.Array, b_name: str, b: jax.Array, axes: str | tuple[str, ...]
) -> None:
    """Raises ValueError unless `a` and `b` agree in the axes that have a name."""
    for axis, a_size, b_size in zip(axes, a.shape, b.shape, strict=True):
        if axis != " " and a_size != b_size:
            raise ValueError(f"{a_name} has {axis}={a_size} but {b_name} has {axis}={b_size}")


def _problem(arrays: _Arrays) -> AttentionProblem:
    (batch, q_len, q_heads, width), (users, kv_len, kv_heads, _) = (
        arrays.query.shape,
        arrays.key.shape,
    )
    return AttentionProblem(
        batch=batch,
        users=users,
        q_len=q_len,
        kv_len=kv_len,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=width,
        dtype=str(arrays.query.dtype),
    )


def _run(call: _Call, plan: dispatch.Plan, arrays: _Arrays) -> tuple[jax.Array, jax.Array | None]:
    query, key, value, index, lengths = arrays
    if plan.implementation == "xla":
        results = attention_grouped.decomposed(query, key, value, index, lengths, scale=call.scale)
        return dispatch.record(results[0], plan), results[1] if call.return_residuals else None
    # Here and not above: it brings in Mosaic GPU, which costs 0.3 s to import.
    from ikbo_jax.pallas import attention as kernel
    from ikbo_jax.pallas import work_order

    order = None
    if not call.indices_are_sorted and query.shape[0] > 1 and key.shape[0] > 1:
        order = work_order.by_user(index)
    # The kernel finds a candidate's rows in place only where whole tiles belong to it. Otherwise
    # the queries are put in order, and the results back; keys and values stay where they are.
    is_regrouped = order is not None and query.shape[1] % WGMMA_M != 0
    if is_regrouped:
        query, index = query[order], index[order]
    out, lse = kernel.attention_kernel(
        query,
        key,
        value,
        index,
        lengths,
        scale=call.scale,
        order=None if is_regrouped else order,
        return_residuals=call.return_residuals,
        config=plan.config,
        num_sms=dispatch.num_sms(),
    )
    if is_regrouped:
        place = jnp.zeros_like(index).at[order].set(jnp.arange(index.size, dtype=index.dtype))
        out, lse = out[place], None if lse is None else lse[place]
    return dispatch.record(out, plan), lse


def _run_vmappable(
    call: _Call, plan: dispatch.Plan, arrays: _Arrays
) -> tuple[jax.Array, jax.Array | None]:
    """`_run` with a vmap rule of its own: the persistent kernel must not get another grid axis."""

    @jax.custom_batching.custom_vmap
    def run(arrays: _Arrays) -> tuple[jax.Array, jax.Array | None]:
        return _run(call, plan, arrays)

    @run.def_vmap
    def run_batched(size: int, batched: list, arrays: _Arrays) -> tuple[tuple, tuple]:
        out, lse = _vmap(call, plan, size, batched[0], arrays)
        return (out, lse), (True, None if lse is None else True)

    result: tuple[jax.Array, jax.Array | None] = run(arrays)
    return result


def _vmap(
    call: _Call, plan: dispatch.Plan, size: int, batched: Any, arrays: _Arrays
) -> tuple[jax.Array, jax.Array | None]:
    """Runs `size` problems, stacked along the leading axis of the arrays that are `batched`.

    Problems that share all of the users' arrays, or none of keys and values, become one problem.
    Where keys are shared and values are not, or the lengths alone differ, one problem would need
    copies of them: XLA batches its products instead, and the kernel runs in a loop.
    """
    own_users = batched.key and batched.value
    shared_users = not (batched.key or batched.value or batched.lengths)
    if own_users or shared_users:
        return _vmap_folded(call, size, batched, arrays, own_users)

    def one(arrays: _Arrays) -> tuple[jax.Array, jax.Array | None]:
        if plan.implementation == "xla":
            note = f"{plan.reason}; {size} of these at once, by vmap"
            return _run(call, dataclasses.replace(plan, reason=note), arrays)
        return _run_vmappable(call, plan, arrays)

    if plan.implementation == "xla":
        axes = _Arrays._make(0 if is_batched else None for is_batched in batched)
        result: tuple[jax.Array, jax.Array | None] = jax.vmap(one, (axes,))(arrays)
        return result
    looped: tuple[jax.Array, jax.Array | None] = dispatch.one_after_another(one, batched, arrays)
    return looped


def _vmap_folded(
    call: _Call, size: int, batched: Any, arrays: _Arrays, own_users: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Runs `size` problems as one, their rows one problem after another."""
    query, key, value, index, lengths = arrays
    one_shape = query.shape[1:] if batched.query else query.shape
    users = key.shape[1] if own_users else key.shape[0]
    if size == 0:
        lse = jnp.zeros((0, *one_shape[:3]), jnp.float32) if call.return_residuals else None
        return jnp.zeros((0, *one_shape), query.dtype), lse

    def fold(array: jax.Array, is_batched: bool) -> jax.Array:
        if not is_batched:
            array = jnp.broadcast_to(array, (size, *array.shape))
        return array.reshape(-1, *array.shape[2:])

    if own_users:
        key, value = fold(key, True), fold(value, True)
        lengths = None if lengths is None else fold(lengths, batched.lengths)
        # Clamp first: an index past one problem's users would land in the next one's.
        offsets = jnp.arange(size, dtype=jnp.int32)[:, None] * users
        if not batched.cand_to_user:
            index = jnp.broadcast_to(index, (size, *index.shape))
        index = (jnp.clip(index, 0, users - 1) + offsets).reshape(-1)
    else:
        index = fold(index, batched.cand_to_user)
        call = dataclasses.replace(call, indices_are_sorted=False)
    folded = _Arrays(fold(query, batched.query), key, value, index, lengths)
    plan = dispatch.choose(call.request, _problem(folded))
    out, lse = _run_vmappable(call, plan, folded)
    unfolded_lse = None if lse is None else lse.reshape(size, *one_shape[:3])
    return out.reshape(size, *one_shape), unfolded_lse


# custom_vjp goes outside custom_vmap, which has no reverse mode.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(
    call: _Call, plan: dispatch.Plan, arrays: _Arrays
) -> tuple[jax.Array, jax.Array | None]:
    return _run_vmappable(call, plan, arrays)


def _forward(call: _Call, plan: dispatch.Plan, arrays: _Arrays) -> tuple[tuple, tuple]:
    # The differentiable function itself, so that gradients of gradients do not meet the kernel.
    out, lse = _differentiable(dataclasses.replace(call, return_residuals=True), plan, arrays)
    return (out, lse if call.return_residuals else None), (arrays, out, lse)


def _backward(
    call: _Call, plan: dispatch.Plan, residuals: tuple, cotangents: tuple
) -> tuple[_Arrays]:
    (query, key, value, index, lengths), out, lse = residuals
    d_out, d_lse = cotangents
    gradients = attention_grouped.decomposed_vjp(
        query, key, value, index, lengths, out, lse, d_out, d_lse, scale=call.scale
    )
    return (_Arrays._make((*gradients, None, None)),)


_differentiable.defvjp(_forward, _backward)


# Static arguments are all that the choice depends on, so that jit's cache never keeps a stale one.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _attention(
    call: _Call, plan: dispatch.Plan, arrays: _Arrays, own: tuple[jax.Array, jax.Array] | None
) -> tuple[jax.Array, jax.Array | None]:
    arrays, own = dispatch.varying_alike((arrays, own))
    lse: jax.Array | None
    if arrays.key.shape[1] == 0:
        out = jnp.zeros_like(arrays.query)
        lse = jnp.full_like(arrays.query[..., 0], -jnp.inf, dtype=jnp.float32)
        out = dispatch.record(out, plan)
    else:
        with_lse = call.return_residuals or own is not None
        out, lse = _differentiable(
            dataclasses.replace(call, return_residuals=with_lse), plan, arrays
        )
    if own is not None:
        assert lse is not None
        own_out, own_lse = reference.self_attention(arrays.query, *own, scale=call.scale)
        out, lse = reference.merge_attention(out, lse, own_out, own_lse)
    return out, lse if call.return_residuals else None
