"""Generalised dot-product attention: checks, choice of implementation, vmap rule, gradient."""

import dataclasses
import functools
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp

from ikbo_jax.masks import Mask
from ikbo_jax.ops import (
    arguments,
    dispatch,
    gdpa_arguments,
    gdpa_backward,
    gdpa_mask,
    reverse_only,
)
from ikbo_jax.ops.op import Call, Gradient, Named, Op, Part, Pulled
from ikbo_jax.ops.partition import Division
from ikbo_jax.ops.sharded import run_kernel, zeros
from ikbo_jax.ops.stacking import concatenate, unstack
from ikbo_jax.problems import GdpaConfig, GdpaProblem, ShortGdpaConfig
from ikbo_jax.reference import gdpa as reference
from ikbo_jax.reference import gdpa_chunked, jagged
from ikbo_jax.reference.gdpa import Arrays, Settings
from ikbo_jax.reference.gdpa_chunked_vjp import chunked_vjp


def gdpa(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cu_seqlens_q: jax.Array | None,
    cu_seqlens_kv: jax.Array,
    *,
    activation: str | tuple[str, ...] = "gelu",
    approx: str | None = None,
    scale: float = 1.0,
    output_scale: float | jax.Array = 1.0,
    logit_cap: float | None = None,
    q_to_kv: jax.Array | None = None,
    broadcast_q: bool = False,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    mask: Mask | None = None,
    implementation: str | None = None,
    config: GdpaConfig | ShortGdpaConfig | None = None,
) -> jax.Array:
    """Attends over jagged sequences with an activation function in place of the softmax.

        out[i] = output_scale · Σⱼ act(scale · query[i] · key[j]) · value[j]

    over the keys j of query i's sequence that `mask` lets it see, for each head. `scale` multiplies
    the scores before the activation, `output_scale` the sum; the defaults do not depend on sizes.
    With a `logit_cap`, the activation's argument is logit_cap · tanh(score / logit_cap).
    With activation="softmax", act is the softmax over these keys. Sequences are concatenated:
    sequence b has rows cu_seqlens[b] to cu_seqlens[b + 1] - 1.

    Args:
      query: [total_q, N, H], bfloat16, float16 or float32: queries of all sequences, N heads, head
        width H. With `broadcast_q` [T, N, H].
      key: [total_kv, K, H], same dtype: K heads. N is a multiple of K: query head n uses key head
        n // (N / K).
      value: [total_kv, K, H], same dtype.
      cu_seqlens_q: [batch + 1] int32, non-decreasing offsets in [0, total_q]; the first is usually
        0, and the last may be below total_q. Rows outside all sequences have no effect, whatever
        they hold. Offsets outside the range are clamped to it, and an offset below an earlier one
        is raised to it, so nothing is read out of bounds; `ikbo_jax.debug.check_offsets` finds
        such offsets. None with `broadcast_q`.
      cu_seqlens_kv: [batch_kv + 1] int32, offsets of keys and values, likewise. Sequences may be
        empty.
      activation: one of "identity", "relu", "leaky_relu" (slope 0.01), "relu_squared", "gelu" (with
        erf), "gelu_tanh", "silu", "hardswish" and "softmax"; or a tuple with a name for each head.
      approx: None computes activations exactly. "tanh": gelu_tanh and silu within 2⁻¹² · |score|;
        "tanh_bf16": within 2⁻⁶ · |score|, for bfloat16 inputs with one activation in all heads,
        otherwise, and for gradients, as "tanh"; "polynomial": gelu within 5.0e-4. Heads with
        another activation, and other devices than GPUs, compute exactly.
      scale: factor of the scores before the activation, a number that is finite in float32.
      output_scale: factor of the result, a number that is finite in float32; or [batch] float32, a
        factor for the rows of every query sequence, such as 1 / length.
      logit_cap: bound of the scores before the activation, a number above 0; None: there is none.
        Its tanh is exact, unless `approx` approximates the tanh of all heads' activations.
      q_to_kv: [batch] int32, the key-value sequence of every query sequence (the user of a
        candidate), values in [0, batch_kv), in any order. None pairs query sequence b with
        key-value sequence b; then batch_kv = batch. Values outside the range are clamped to it;
        `ikbo_jax.debug.check_index` finds them.
      broadcast_q: whether all sequences have the same T queries. The number of sequences is then
        the size of `q_to_kv`, or batch_kv if `q_to_kv` is None.
      max_seqlen_q: bound of the queries' lengths, known while tracing. Rows of a sequence beyond it
        are ignored and have result 0; `ikbo_jax.debug.check_offsets` finds a bound too small.
      max_seqlen_kv: bound of the keys' lengths, likewise; keys beyond it have no effect.
      mask: which keys of its sequence a row sees, by `ikbo_jax.masks.causal`, `hstu` or
        `intervals`; None: all. The last query of a sequence has the position of the last key, so
        queries shorter than keys are the end of their sequence. A row that sees nothing has result
        0, and its gradients are 0. The kernels take masks at H = 64, 96 and 128, forward and for
        gradients; other calls with a mask run in XLA.
      implementation: None takes the kernel wherever it can run, unless a near row of the dispatch
        table prefers XLA; "mosaic_gpu" or "xla" take that one or raise. The kernel takes bfloat16
        and float16, H = 64, 96, 128 and 256, and every activation, but a softmax only in all heads.
      config: configuration of the "mosaic_gpu" kernel; None takes it from the dispatch table, or a
        default. A `ShortGdpaConfig` selects the kernel for short sequences.

    Returns:
      out [total_q, N, H] in the inputs' dtype; with `broadcast_q` [batch · T, N, H], sequence after
      sequence. Zero in rows outside all sequences and where a sequence has no keys. Scores,
      activations and sums are f32; activated scores are rounded to the inputs' dtype before they
      are multiplied by the values (in float16, activated scores above 65504 become inf). f32
      products follow `jax.default_matmul_precision`. An array of output scales multiplies the
      result after it was rounded to the inputs' dtype, and is rounded a second time.

      Differentiable in reverse mode with respect to query, key and value. Gradients are summed in
      f32, over all sequences that share keys, values or queries, in a deterministic order, and
      rounded once; scores are never all in memory. Rows outside all sequences have gradient 0. An
      array of output scales has a gradient, too, in f32, from the rounded result.

    Raises:
      ValueError: a rank is wrong; sizes, dtypes, offsets or the index disagree; N is not a multiple
        of K; an activation is unknown, or the number of names is not N; `approx` is unknown or
        applies to none of the activations; a scale is not finite in float32, or an array of scales
        not [batch] float32; `logit_cap` is not above 0; a `max_seqlen_*` is not an integer of at
        least 0, or `max_seqlen_q` is below T; `broadcast_q` is not a bool; both `cu_seqlens_q` and
        `broadcast_q` are set, or neither; `mask` is no mask, or its arrays have other numbers of
        rows or sequences; `implementation` is unknown; `config` is of another type, or set with
        `implementation` "xla".
      NotImplementedError: implementation="mosaic_gpu", but the kernel cannot run on this device, or
        with these sizes, this dtype, activation or `config`; N, K or H is a symbolic dimension of
        `jax.export` (rows and batches may be symbolic on the XLA path); a third derivative;
        forward-mode differentiation. The message says why.

    Source: Meta, generalised dot-product attention (GDPA), with kernels for ads models.
    """
    arrays = Arrays(query, key, value, cu_seqlens_q, cu_seqlens_kv, q_to_kv)
    request = arguments.request(
        "gdpa", implementation, config, (arrays, mask, output_scale), GdpaConfig, ShortGdpaConfig
    )
    settings = gdpa_arguments.settings(
        *(arrays, activation, approx, scale, output_scale, broadcast_q),
        *(max_seqlen_q, max_seqlen_kv, logit_cap),
    )
    described = "" if mask is None else gdpa_mask.check(mask, arrays, settings)
    call = _Call(request, settings, described)
    plan = _OP.plan(call, arrays)
    shape = reference.out_shape(arrays, settings)
    if 0 in shape or not key.shape[0] or not reference.num_sequences(arrays):
        return dispatch.record_nothing(zeros(shape, query.dtype, arrays), plan)
    if mask is not None:
        arrays = gdpa_mask.with_intervals(mask, arrays, settings)
        arrays, settings = gdpa_mask.with_rule(mask, arrays, settings)
        call = dataclasses.replace(call, settings=settings)
    arrays, output_scale = reverse_only.operands("gdpa", (arrays, output_scale))
    out, _ = _OP.jitted(call, plan, arrays)
    if gdpa_arguments.has_scales(output_scale):
        out = gdpa_mask.scaled(out, output_scale, arrays, settings)
    return out


_Results = tuple[jax.Array, jax.Array | None]


@dataclasses.dataclass(frozen=True)
class _Call(Call):
    """The arguments that are not arrays, and how the call is differentiated.

    Attributes:
      mask: the mask in words; empty without one.
    """

    settings: Settings
    mask: str = ""


def _without_rule(call: _Call) -> _Call:
    """Makes the kernels take the rows' intervals in place of the rule of a mask."""
    return dataclasses.replace(call, settings=call.settings._replace(rule=None))


class _Residuals(NamedTuple):
    """Inputs of the backward pass; `out` and `lse` are None unless a head has a softmax."""

    arrays: Arrays
    out: jax.Array | None
    lse: jax.Array | None
    d_out: jax.Array


Gradients = tuple[jax.Array, jax.Array, jax.Array]
#: Of the arrays of integers, in the place of gradients.
_NO_GRADIENTS: Any = (None,) * 6


def _run_vjp(call: _Call, residuals: _Residuals) -> Gradients:
    if call.backward_config is None:
        return chunked_vjp(residuals.arrays, call.settings, residuals.d_out, dtype=call.dtype)

    def launch(arrays: Arrays, out: Any, lse: Any, d_out: jax.Array) -> Gradients:
        return gdpa_backward.kernel_vjp(
            arrays,
            call.settings,
            d_out,
            out=out,
            lse=lse,
            num_sms=call.request.num_sms,
            config=call.backward_config,
            dtype=call.dtype,
        )

    return run_kernel(launch, *residuals)


def _run_vjp_batched(call: _Call, size: int, batched: Any, residuals: _Residuals) -> Gradients:
    """Runs the problems of a `vmap`, like `Op._run_batched`."""
    if not size or call.settings.broadcast_q:
        return _GRADIENT.one_by_one(call, batched, residuals)
    # Every problem returns its own gradients of all arrays, so copies of shared arrays take no
    # more memory than the results.
    rows = jax.tree.map(functools.partial(concatenate, size), residuals[1:], batched[1:])
    arrays = gdpa_arguments.fold(size, batched.arrays, residuals.arrays, fold_kv=True)
    return unstack(size, _GRADIENT.vmappable(_without_rule(call), _Residuals(arrays, *rows)))


@jax.custom_jvp
def _differentiated_twice(x: jax.Array) -> jax.Array:
    """Returns `x`; a derivative would be a third one, which `chunked_vjp`'s loops lack."""
    return x


@_differentiated_twice.defjvp
def _refuse_third_derivative(*_: Any) -> NoReturn:
    raise NotImplementedError(
        "gdpa has no third derivative; first and second ones are in reverse mode (jax.grad, "
        "jax.jacrev)"
    )


def _pull_back_gradients(
    call: _Call, residuals: _Residuals, cotangents: Gradients
) -> tuple[_Residuals]:
    """Pulls cotangents of the gradients back, by XLA.

    The gradients are the derivative of sum(d_out · out), whose second derivative is symmetric. So
    the cotangents, taken as tangents of query, key and value, give by forward mode the tangents of
    the gradients, which are the cotangents of query, key and value, and the tangent of out, which
    is the cotangent of d_out. Forward mode keeps no scores, and runs loops of any length.
    """
    (arrays, _, _, d_out), cotangents = jax.tree.map(
        lambda x: _differentiated_twice(x) if jnp.issubdtype(x.dtype, jnp.floating) else x,
        (residuals, cotangents),
    )

    def of(*inputs: jax.Array) -> tuple[Gradients, jax.Array]:
        given = arrays._replace(query=inputs[0], key=inputs[1], value=inputs[2])
        gradients: Gradients = chunked_vjp(given, call.settings, d_out)
        return gradients, gdpa_chunked.chunked(given, call.settings)[0]

    primals = arrays.query, arrays.key, arrays.value
    tangents = tuple(c.astype(x.dtype) for c, x in zip(cotangents, primals, strict=True))
    with jax.default_matmul_precision(call.request.precision):
        _, (of_inputs, of_d_out) = jax.jvp(of, primals, tangents)
    return (_Residuals(Arrays(*of_inputs, *_NO_GRADIENTS), None, None, of_d_out),)


_GRADIENT = Gradient(_run_vjp, _run_vjp_batched, _pull_back_gradients)


_Part = Part[_Call, Arrays, _Results]


class _Gdpa(Op[_Call, Arrays, _Results]):
    name = "_gdpa"
    xla_batches_products = False
    by_kernels = "mosaic_gpu, one kernel for queries and one for keys"
    by_xla = "XLA, a few tiles at a time"
    choose_gradient = staticmethod(gdpa_backward.choose)

    def problem(self, call: _Call, arrays: Arrays) -> GdpaProblem:
        settings = call.settings
        activations = settings.activations
        return GdpaProblem(
            batch=reference.num_sequences(arrays),
            batch_kv=arrays.cu_seqlens_kv.shape[0] - 1,
            q_rows=reference.out_shape(arrays, settings)[0],
            kv_rows=arrays.key.shape[0],
            q_heads=arrays.query.shape[1],
            kv_heads=arrays.key.shape[1],
            head_dim=arrays.query.shape[2],
            dtype=str(arrays.query.dtype),
            activations=activations[:1] if len(set(activations)) == 1 else activations,
            approx=settings.approx,
            broadcast_q=settings.broadcast_q,
            max_seqlen_q=settings.max_seqlen_q,
            max_seqlen_kv=settings.max_seqlen_kv,
            mask=call.mask,
            has_logit_cap=settings.logit_cap is not None,
        )

    def run(self, call: _Call, plan: dispatch.Plan, arrays: Arrays) -> _Results:
        """Computes out; and lse, if a gradient needs it."""
        if plan.implementation == "mosaic_gpu":
            # Imported here because Mosaic GPU takes 0.3 s to import.
            from ikbo_jax.pallas.flash.gdpa import gdpa_kernel

            launch = functools.partial(
                gdpa_kernel,
                settings=call.settings,
                return_residuals=call.return_residuals,
                config=plan.config,
                num_sms=call.request.num_sms,
            )
            out, lse = run_kernel(launch, arrays)
        else:
            out, lse = gdpa_chunked.chunked(arrays, call.settings)
        return dispatch.record(out, plan), lse if call.return_residuals else None

    def fold(
        self, call: _Call, size: int, batched: Arrays, arrays: Arrays
    ) -> tuple[_Call, Arrays] | None:
        fold_kv = gdpa_arguments.folds_keys(call.settings, batched)
        if fold_kv is None:
            return None
        one = gdpa_arguments.fold(size, batched, arrays, fold_kv)
        return _without_rule(call), one  # filler sequences have no targets

    def named(self, call: _Call, arrays: Arrays) -> Named:
        activations = call.settings.activations
        has_lse = call.return_residuals and "softmax" in activations
        # Heads with activations of their own are different programs on different devices.
        can_split = len(set(activations)) == 1
        rows = "rows" if not call.settings.broadcast_q else "out_rows"
        offsets = "offsets_q", "offsets_kv", "index"
        seen = f"{rows} ends", "targets", "contextual"
        return Named(
            Arrays._make(("rows (k g) h", "s k h", "s k h", *offsets, *seen)),
            (f"{rows} (k g) h", f"{rows} (k g)" if has_lse else None),
            ({"rows": "queries"} if not call.settings.broadcast_q else {})
            | ({"k": "heads"} if can_split else {}),
        )

    def part(self, call: _Call, arrays: Arrays, division: Division) -> _Part:
        """Gives every device its rows of queries; a sequence may be cut between two devices."""
        # All heads have one activation where heads are divided.
        activations = call.settings.activations[: arrays.query.shape[1]]
        call = dataclasses.replace(call, settings=call.settings._replace(activations=activations))
        axes = division.axes_of("rows")
        if not axes or arrays.cu_seqlens_q is None:
            return Part(call, arrays)
        rows, bound = arrays.query.shape[0], call.settings.max_seqlen_q
        first = jax.lax.axis_index(axes) * rows
        total = rows * division.parts(axes)
        # Offsets and lengths of the whole call, which are clamped to its rows before anything else.
        starts, lengths = jagged.bounds(arrays.cu_seqlens_q, total, bound)
        ends = jax.lax.cummax(jnp.clip(arrays.cu_seqlens_q, 0, total))
        inside = jnp.clip(ends - first, 0, rows)
        # A device does not know where its rows stand in a sequence, but their intervals.
        call = _without_rule(call)
        arrays = arrays._replace(cu_seqlens_q=inside, num_targets=None, contextual=None)
        if bound is None:
            return Part(call, arrays)
        # Rows beyond the bound, from the sequence's start, which may lie on another device.
        stops = jnp.clip(starts + lengths - first, 0, rows)
        steps = jnp.zeros_like(inside, shape=rows + 1).at[inside[:-1]].add(1).at[stops].add(-1)
        is_bounded = (jnp.cumsum(steps)[:rows] > 0)[:, None, None]

        def mask(results: _Results) -> Any:
            out, lse = results
            return jnp.where(is_bounded, out, jnp.zeros_like(out)), lse

        return Part(call, arrays, mask)

    def residuals(self, results: _Results) -> tuple[Any, Any]:
        out, lse = results
        return None if lse is None else out, lse

    def vjp(self, call: _Call, plan: dispatch.Plan, of: Pulled[Arrays, _Results]) -> Arrays:
        # The cotangent of lse is zero, since only the gradient uses lse.
        (out, lse), (d_out, _) = of.residuals, of.cotangents
        residuals = _Residuals(of.arrays, out, lse, d_out)
        gradients = _GRADIENT.differentiable(self.of_gradient(call, plan, of), residuals)
        return Arrays(*gradients, *_NO_GRADIENTS)


_OP = _Gdpa()
