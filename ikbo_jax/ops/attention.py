"""Broadcast attention: choice of implementation, self tokens, vmap rule, gradient."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp

from ikbo_jax.ops import (
    arguments,
    attention_arrays,
    attention_backward,
    attention_kernel,
    dispatch,
    reverse_only,
)
from ikbo_jax.ops.attention_arrays import LSE, QUERY, SPLIT, Arrays
from ikbo_jax.ops.attention_backward import AttentionCall
from ikbo_jax.ops.op import Named, Op, Pulled
from ikbo_jax.ops.partition import Rule, dimensions
from ikbo_jax.ops.sharded import aligned, is_typed, run_by_types, run_kernel, zeros
from ikbo_jax.problems import AttentionConfig, AttentionProblem, FewQueriesConfig
from ikbo_jax.reference import attention as reference
from ikbo_jax.reference import attention_grouped


class _Options(TypedDict, total=False):
    """The options of `attention` on which the type of its result does not depend."""

    scale: float | None
    logit_cap: float | None
    bias: jax.Array | None
    key_value_seq_lengths: jax.Array | None
    key_value_ranges: jax.Array | None
    page_table: jax.Array | None
    self_key: jax.Array | None
    self_value: jax.Array | None
    indices_are_sorted: bool
    implementation: str | None
    config: AttentionConfig | FewQueriesConfig | None


@overload
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cand_to_user: jax.Array,
    *,
    return_residuals: Literal[False] = False,
    **options: Unpack[_Options],
) -> jax.Array: ...


@overload
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cand_to_user: jax.Array,
    *,
    return_residuals: Literal[True],
    **options: Unpack[_Options],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cand_to_user: jax.Array,
    *,
    return_residuals: bool,
    **options: Unpack[_Options],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cand_to_user: jax.Array,
    *,
    scale: float | None = None,
    logit_cap: float | None = None,
    bias: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    key_value_ranges: jax.Array | None = None,
    page_table: jax.Array | None = None,
    self_key: jax.Array | None = None,
    self_value: jax.Array | None = None,
    indices_are_sorted: bool = False,
    return_residuals: bool = False,
    implementation: str | None = None,
    config: AttentionConfig | FewQueriesConfig | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attends from every candidate to its user's keys and values; never copies them.

        out[b] = softmax(scale · query[b] · key[u]ᵀ) · value[u],  u = cand_to_user[b]

    With a `logit_cap`, the softmax is of logit_cap · tanh(score / logit_cap); with a `bias`, of the
    sum of this and the bias.

    Args:
      query: [B, T, N, H], bfloat16, float16 or float32: B candidates (B may be 0), T queries per
        candidate, N heads, head width H.
      key: [U, S, K, H], same dtype: U users (at least 1 if B > 0), S keys per user, K heads. N is a
        multiple of K: query head n uses key head n // (N / K).
      value: [U, S, K, H], same dtype.
      cand_to_user: [B] int32, the user of every candidate, values in [0, U), in any order; a user
        may have no candidates. Values outside the range are clamped to it, so nothing is read
        outside `key`; `ikbo_jax.debug.check_index` finds them.
      scale: factor of the scores, a number that is finite in float32; None means 1 / sqrt(H).
      logit_cap: bound of the scores before the softmax, a number above 0; None: there is none.
      bias: [U, N or 1, T or 1, S], bfloat16, float16 or float32: added to the scores of a user's
        keys, in the bias's dtype. Runs in XLA, with its gradients. None: there is none.
      key_value_seq_lengths: [U] int32, the number of valid keys of every user, values in [0, S]
        (others are clamped; `ikbo_jax.debug.check_lengths` finds them); None means S for every
        user. Keys and values past the length have no effect.
      key_value_ranges: [B, 2] int32, a candidate sees the keys from begin to end - 1 of its user,
        also clamped; None means all. So impressions at different times can share one history. The
        kernel for users with few queries takes ranges; gradients with ranges run in XLA.
      page_table: [U, most] int32, the pages of every user in their order. `key` and `value` are
        then [pages, page, K, H], S is most · page, and the lengths are required. Pages out of range
        are clamped. The kernels read pages in place if `block_kv` divides them; otherwise XLA
        gathers them before the op runs, and `explain` says why. Gradients with pages run in XLA.
      self_key: [B, T_self, K, H], same dtype: further keys, which belong to one candidate; its
        queries attend to all of them in addition to the user's keys. None: there are none. The
        kernels merge one token; in XLA, all T · T_self scores of a candidate are in memory at once.
      self_value: [B, T_self, K, H], same dtype; required with `self_key`.
      indices_are_sorted: whether `cand_to_user` is sorted. True saves a sort of B integers and
        copies of the queries. If True is wrong, the op is slower and the result the same, but the
        gradients of the kernel are NaN.
      return_residuals: whether to return lse as well.
      implementation: None takes the fastest on the default device or `ikbo_jax.export_target`;
        "mosaic_gpu" (Hopper; bfloat16 and float16) or "xla" take that one or raise.
      config: configuration of the "mosaic_gpu" kernel; None takes it from the dispatch table. A
        `FewQueriesConfig` selects the kernel for users with few queries.

    Returns:
      out [B, T, N, H] in the inputs' dtype, in the order of the candidates. With `return_residuals`
      the pair (out, lse); lse [B, T, N] f32 is the natural logarithm of the softmax's denominator.
      A query without keys has out = 0 and lse = -inf. Scores, maxima and sums are f32; the softmax
      numerators are rounded to the inputs' dtype before they are multiplied by the values. f32
      products on the "xla" path follow `jax.default_matmul_precision`.

      Differentiable in reverse mode with respect to query, key, value, bias, self_key and
      self_value, through out and lse. On Hopper a kernel computes gradients in bfloat16 and
      float16, for the head widths of the forward kernel; XLA computes others, and derivatives of
      gradients. Each gradient is summed in f32, by the kernel in one order, and rounded once.

    Raises:
      ValueError: a rank is wrong; sizes, dtypes, index, lengths or ranges disagree; N is not a
        multiple of K; U = 0 with B > 0; H = 0 or K = 0; only one of `self_key` and `self_value` is
        an array; `scale` is not finite in float32; `logit_cap` is not above 0; a flag is not a
        bool; `implementation` is unknown; `config` is of another type, or set with `implementation`
        "xla".
      NotImplementedError: implementation="mosaic_gpu", but the kernel cannot run on this device, or
        with these sizes, this dtype or this `config`; S, N, K or H is a symbolic dimension of
        `jax.export` (B, U and T may be symbolic on the XLA path); a `bias` with a `page_table`;
        forward-mode differentiation, but for self_key and self_value that XLA merges without
        Explicit mesh axes. The message says why.

    Source: Meta IKBO, flash attention with in-kernel broadcast, on the PyTorch blog.
    """
    given = query, key, value, cand_to_user, key_value_seq_lengths, key_value_ranges
    arrays = Arrays(*given, page_table=page_table, bias=bias)
    request = arguments.request(
        "attention",
        implementation,
        config,
        (arrays, self_key, self_value),
        AttentionConfig,
        FewQueriesConfig,
    )
    attention_arrays.check(arrays)
    attention_arrays.check_self_tokens(query, key, self_key, self_value)
    scale = query.shape[3] ** -0.5 if scale is None else scale
    call = AttentionCall(
        request,
        arguments.finite_number("scale", scale),
        arguments.flag("indices_are_sorted", indices_are_sorted),
        arguments.logit_cap(logit_cap),
        return_residuals=arguments.flag("return_residuals", return_residuals),
    )
    plan = _OP.plan(call, arrays)
    runs_kernel = "mosaic_gpu" in (plan.implementation, plan.cuda and plan.cuda.implementation)
    if page_table is not None and not runs_kernel:
        arrays, why = arrays.laid_out(), (plan.cuda or plan).reason
        plan = _OP.plan(call, arrays).noted(f"XLA gathers the pages first: {why}")
    self_tokens = None
    if self_key is not None and self_value is not None and self_key.shape[1]:
        self_tokens = (self_key, self_value)
        plans = (plan, plan.cuda or plan)
        if any(attention_kernel.merges_own_tokens(x, self_key) for x in plans):
            arrays = arrays._replace(self_key=self_key, self_value=self_value)
            self_tokens = None
        else:
            plan = plan.noted("XLA merges own tokens", of_kernels=True)
            if is_typed(self_tokens):
                self_tokens = reverse_only.operands("attention", self_tokens)
    if 0 in query.shape:
        out = zeros(query.shape, query.dtype, (arrays, self_tokens))
        out = dispatch.record_nothing(out, plan)
        lse = zeros(query.shape[:3], jnp.float32, (arrays, self_tokens))
    else:
        arrays = reverse_only.operands("attention", arrays)
        out, lse = _OP.jitted(call, plan, (arrays, self_tokens))
    return (out, lse) if call.return_residuals else out


def merge_attention(
    out1: jax.Array, lse1: jax.Array, out2: jax.Array, lse2: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Merges the results of attention over two sets of keys into attention over both.

        lse = log(exp(lse1) + exp(lse2)),  out = exp(lse1 - lse)·out1 + exp(lse2 - lse)·out2

    Candidates can so attend to a second set of keys, for example to a second history.

    Args:
      out1: [B, T, N, H], bfloat16, float16 or float32, as `attention` returns it.
      lse1: [B, T, N] f32. Where it is -inf, `out1` has no effect.
      out2: [B, T, N, H], same dtype.
      lse2: [B, T, N] f32.

    Returns:
      (out [B, T, N, H] in the inputs' dtype, lse [B, T, N] f32), computed in f32. Where lse1 and
      lse2 are both -inf, out is 0 and lse -inf. Differentiable with respect to all four arguments.

    Raises:
      ValueError: ranks, shapes or dtypes are wrong or disagree.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, for the
    combination of partial softmaxes.
    """
    arguments.check_runnable("merge_attention", (out1, lse1, out2, lse2))
    for name, out in (("out1", out1), ("out2", out2)):
        arguments.check_array(name, out, "[B, T, N, H]", ("out1", out1))
    if out1.shape != out2.shape:
        raise ValueError(f"out1 has shape {out1.shape} but out2 has shape {out2.shape}")
    for name, lse in (("lse1", lse1), ("lse2", lse2)):
        if getattr(lse, "dtype", None) != "float32":
            raise ValueError(f"{name} must be a float32 array, but is {arguments.describe(lse)}")
        if lse.shape != out1.shape[:3]:
            raise ValueError(f"{name} has shape {lse.shape} but out1 has shape {out1.shape}")
    results = arguments.strongly_typed((out1, lse1, out2, lse2))
    return reference.merge_attention(*aligned(_MERGED, results))


_Results = tuple[jax.Array, jax.Array | None]


class _Attention(Op[AttentionCall, Arrays, _Results]):
    name, is_gradient_apart = "_attention", True
    choose_gradient = staticmethod(attention_backward.choose)

    def traced(self, call: AttentionCall, plan: dispatch.Plan, operands: Any) -> _Results:
        """Attends, and merges self tokens, the operands besides the arrays."""
        arrays, self_tokens = operands
        lse: jax.Array | None
        if arrays.key.shape[1] == 0:
            out = jnp.zeros_like(arrays.query)
            lse = jnp.full_like(arrays.query[..., 0], -jnp.inf, dtype=jnp.float32)
            out = dispatch.record(out, plan)
        else:
            with_lse = call.return_residuals or self_tokens is not None
            call_with_lse = dataclasses.replace(call, return_residuals=with_lse)
            out, lse = self.differentiable(call_with_lse, plan, arrays)
        if self_tokens is not None:
            assert lse is not None
            out, lse = _merged(call.of_scores, out, lse, arrays.query, *self_tokens)
        return out, lse if call.return_residuals else None

    def problem(self, call: AttentionCall, arrays: Arrays) -> AttentionProblem:
        problem = attention_backward.problem_of(arrays, call.logit_cap)
        # One candidate is sorted, and so are the candidates of one user.
        is_sorted = call.indices_are_sorted or 1 in (problem.batch, problem.users)
        return dataclasses.replace(problem, is_sorted=is_sorted)

    def run(self, call: AttentionCall, plan: dispatch.Plan, arrays: Arrays) -> _Results:
        merges = bool(arrays.own) and not attention_kernel.merges_own_tokens(plan)
        if plan.implementation == "mosaic_gpu":
            kernel_call = dataclasses.replace(
                call, return_residuals=call.return_residuals or merges
            )
            out, lse = run_kernel(
                functools.partial(attention_kernel.run, kernel_call, plan), arrays
            )
        else:
            arrays = arrays.laid_out()
            on_cpu = call.request.platform != "cuda" and dispatch.default_device().platform == "cpu"
            options = {"ranges": arrays.ranges, "bias": arrays.bias, **call.of_scores}
            out, lse = attention_grouped.decomposed(*arrays[:5], on_cpu=on_cpu, **options)
        out = dispatch.record(out, plan)
        if merges:
            own = reference.self_attention(arrays.query, *arrays.own, **call.of_scores)
            out, lse = reference.merge_attention(out, lse, *own)
        return out, lse if call.return_residuals else None

    def fold(
        self, call: AttentionCall, size: int, batched: Arrays, arrays: Arrays
    ) -> tuple[AttentionCall, Arrays] | None:
        """Concatenates the rows of problems that share no keys and values, or share all of them.

        If only one of key and value is batched, or the lengths alone, folding would copy keys or
        values.
        """
        fold_users = attention_arrays.folds_users(batched)
        if fold_users is None:
            return None
        if not fold_users:
            call = dataclasses.replace(call, indices_are_sorted=False)
        return call, attention_arrays.fold(size, batched, arrays, fold_users=fold_users)

    def named(self, call: AttentionCall, arrays: Arrays) -> Named:
        keys = "u s k h" if arrays.page_table is None else "pages page k h"
        bias = None if arrays.bias is None else attention_arrays.names_of_bias(arrays.bias)
        own = "b own k h"
        names = Arrays._make((QUERY, keys, keys, "b", "u", "b ends", own, own, "u most", bias))
        return Named(names, (QUERY, LSE if call.return_residuals else None), SPLIT)

    def vjp(self, call: AttentionCall, plan: dispatch.Plan, of: Pulled[Arrays, _Results]) -> Arrays:
        arrays, residuals, cotangents, _ = of
        call = self.of_gradient(call, plan, of)
        if arrays.page_table is not None:
            gradients = attention_backward.of_pages(call, arrays, *cotangents)
        elif plan.backward_config is None:
            gradients = attention_backward.by_xla(call, arrays, *cotangents)
        else:
            (out, lse), (d_out, d_lse) = residuals, cotangents
            operands = attention_backward.Operands(arrays, out, lse, d_out, d_lse)
            gradients = attention_backward.GRADIENT.differentiable(call, operands)
        if arrays.bias is None:
            return Arrays.of_floats(*gradients)
        return Arrays.of_floats(*gradients[:-1], bias=gradients[-1])


_OP = _Attention()


def _merged(of_scores: dict[str, Any], *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merges out and lse with the attention of every candidate's query over its own tokens."""

    def local(parts: Sequence[Any], _: Any) -> tuple[jax.Array, jax.Array]:
        out, lse, *own = parts
        return reference.merge_attention(out, lse, *reference.self_attention(*own, **of_scores))

    out, lse = run_by_types(local, _SELF_TOKENS, operands)
    return out, lse


_SELF_TOKENS = Rule(
    ("out", "lse", "query", "self_key", "self_value"),
    tuple(map(dimensions, (QUERY, LSE, QUERY, "b s k h", "b s k h"))),
    tuple(map(dimensions, (QUERY, LSE))),
    tuple(SPLIT.items()),
)
_MERGED = Rule(
    ("out1", "lse1", "out2", "lse2"),
    (dimensions("b t n h"), dimensions("b t n")) * 2,
    (dimensions("b t n h"), dimensions("b t n")),
    (("b", "candidates"), ("t", "queries"), ("n", "heads"), ("h", "H")),
)
