"""Gradient of linear compression by kernels."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ikbo_jax.ops import dispatch, look_up
from ikbo_jax.ops.op import Call, Gradient
from ikbo_jax.ops.sharded import run_kernel
from ikbo_jax.ops.stacking import concatenate, own_index, stack, unstack
from ikbo_jax.problems import LinearCompressionBackwardProblem, LinearCompressionProblem
from ikbo_jax.problems.linear_compression_backward import (
    WeightGradientConfig,
    embedding_config,
    illegal_reason,
)
from ikbo_jax.problems.look_up import SegmentSumProblem
from ikbo_jax.problems.problem import ranked
from ikbo_jax.reference import linear_compression as reference
from ikbo_jax.reference.look_up import segment_sum


class Arrays(NamedTuple):
    """Fields of all terms, coarsest first; the first parent is None.

    A weight has K columns, as its embedding has rows, or more: the rest are zeros
    (`PaddedWeight`).
    """

    weights: tuple[jax.Array, ...]
    embeddings: tuple[jax.Array, ...]
    parents: tuple[jax.Array | None, ...]


def problem_of(arrays: Arrays) -> LinearCompressionProblem:
    """Reads the problem that arrays pose."""
    weights, embeddings, _ = arrays
    return LinearCompressionProblem(
        batches=tuple(embedding.shape[0] for embedding in embeddings),
        ks=tuple(embedding.shape[1] for embedding in embeddings),
        m=weights[0].shape[0],
        n=embeddings[0].shape[2],
        dtype=str(embeddings[0].dtype),
    )


def fold(size: int, folded: Sequence[bool], arrays: Arrays) -> Arrays:
    """Joins several problems; `folded` says which levels have entries for each problem."""
    embeddings, parents, coarser_folded, coarser_rows = [], [], False, 0
    for embedding, parent, is_folded in zip(arrays.embeddings, arrays.parents, folded, strict=True):
        rows, k, n = embedding.shape[is_folded:]
        if parent is not None and is_folded:
            # Parents may be batched where they point to levels that all problems share.
            is_batched = parent.ndim > 1
            if coarser_folded:
                parent = own_index(size, parent, is_batched, coarser_rows)
            else:
                parent = concatenate(size, parent, is_batched)
        embeddings.append(embedding.reshape(size * rows, k, n) if is_folded else embedding)
        parents.append(parent)
        coarser_folded, coarser_rows = is_folded, rows
    return Arrays(arrays.weights, tuple(embeddings), tuple(parents))


#: Gradients of the weights and of the embeddings.
Gradients = tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]
#: Names of the dtypes of `kernel_vjp`.
Dtypes = tuple[str | None, str | None, str | None]


@dataclasses.dataclass(frozen=True)
class CompressionCall(Call):
    """The arguments that are not arrays.

    `is_m_divided`: every device has a part of M, and of the sum of every embedding's gradient.
    """

    is_m_divided: bool = False


def choose(
    request: dispatch.Request, problem: LinearCompressionProblem
) -> tuple[WeightGradientConfig | None, str]:
    """Returns the configuration of the kernel for weights, or None for XLA; and the reason."""
    backward = LinearCompressionBackwardProblem.of(problem)
    return dispatch.gradient_config(request, backward, illegal_reason(problem))


def kernel_vjp(
    weights: Sequence[jax.Array],
    embeddings: Sequence[jax.Array],
    parents: Sequence[Any],
    cotangent: jax.Array,
    *,
    config: WeightGradientConfig,
    num_sms: int,
    problems: int = 1,
    dtypes: Dtypes = (None, None, None),
) -> Gradients:
    """Pulls a cotangent back to weights and embeddings, like `decomposed_vjp` of the reference.

    Levels are as for `pallas.linear_compression.kernel`, coarsest first; several `problems` with
    the same weights may stand one after another in every level's batch. `dtypes` are of the
    gradients of weights, of coarser embeddings and of the finest embedding; None means the inputs'.
    The kernel rounds gradients of embeddings to the inputs' dtype, so XLA computes gradients of any
    other dtype.

    Returns:
      Gradients of the weights, [problems, M, K_l] each, and of the embeddings, in their shapes.
      Every level's cotangent is summed in f32 from the finest level's, and rounded to the inputs'
      dtype; products are summed in f32 and rounded once; all in the same order in every run. XLA
      multiplies at a level with one entry, and makes that level's sum if it is small.
    """
    # Imported here because a machine without a GPU never needs it.
    from ikbo_jax.pallas.linear_compression.kernel import linear_compression_kernel
    from ikbo_jax.pallas.linear_compression_backward.d_weight import d_weight_kernel

    options: dict[str, Any] = {"num_sms": num_sms}
    problem = problem_of(Arrays(tuple(weights), tuple(embeddings), tuple(parents)))
    weight_dtype, coarser_dtype, finest_dtype = dtypes
    d_weights: list[jax.Array] = []
    d_embeddings: list[jax.Array] = []
    d_result, ancestor, sources, dtype = cotangent, None, None, finest_dtype
    for level in range(len(weights) - 1, -1, -1):
        weight, embedding = weights[level], embeddings[level]
        if embedding.shape[0] == 1:
            d_weight, d_embedding = _products_of_one(
                weight, embedding, d_result, (weight_dtype, dtype)
            )
        else:
            d_weight = d_weight_kernel(
                d_result,
                embedding,
                config=config,
                problems=problems,
                sources=sources,
                dtype=weight_dtype,
                **options,
            )
            if dtype is None or jnp.dtype(dtype) == embedding.dtype:
                of_level = embedding_config(problem, level)
                d_embedding = linear_compression_kernel(
                    (weight.T,), (d_result,), (None,), config=of_level, **options
                )
            else:
                d_embedding = jnp.einsum(
                    "mk,bmn->bkn", weight, d_result, preferred_element_type=jnp.dtype(dtype)
                )
        d_weights.insert(0, d_weight)
        d_embeddings.insert(0, d_embedding)
        if level > 0:
            batch = embeddings[level - 1].shape[0]
            parent = jnp.clip(parents[level], 0, batch - 1)
            # Each level is summed from the finest cotangents, so that its sum is rounded once.
            ancestor = parent if ancestor is None else parent[ancestor]
            d_result = _sums(cotangent, ancestor, batch)
            sources, dtype = _with_candidates(ancestor, batch), coarser_dtype
    return tuple(d_weights), tuple(d_embeddings)


def _sums(cotangent: jax.Array, index: jax.Array, users: int) -> jax.Array:
    """Sums cotangents [B, M, N] by user, in f32 and rounded once: [users, M, N].

    XLA sums where kernels are interpreted: the interpreter runs this kernel thread by thread.
    """
    from ikbo_jax.pallas.worklist import by_xla

    batch, *shape = cotangent.shape
    width = math.prod(shape)
    ways = ranked(SegmentSumProblem(batch, users, width, str(cotangent.dtype)))
    config = ways[0].config if ways else None
    if by_xla.is_preferred() or config is None:
        return segment_sum(cotangent, index, users).astype(cotangent.dtype)
    from ikbo_jax.pallas.look_up.sums import segment_sum_kernel

    sums = segment_sum_kernel(cotangent.reshape(batch, width), index, users, config=config)
    return sums.reshape(users, *shape)


def _with_candidates(ancestor: jax.Array, batch: int) -> jax.Array:
    """Numbers the entries that have a candidate, [batch] int32; the others get `batch`."""
    from ikbo_jax.pallas.worklist import work_order

    starts = work_order.starts(ancestor, batch)  # once in the program: the sums need it, too
    return jnp.where(starts[1:] > starts[:-1], jnp.arange(batch, dtype=jnp.int32), batch)


def _products_of_one(
    weight: jax.Array, embedding: jax.Array, d_result: jax.Array, dtypes: tuple[Any, Any]
) -> tuple[jax.Array, jax.Array]:
    """Computes gradients [1, M, K] and [1, K, N] of a level with one entry, by XLA.

    Two products of matrices: two of XLA's kernels instead of two launches, a transposed copy of the
    weight and a sum of parts.
    """
    d_weight_dtype, d_embedding_dtype = (dtype or embedding.dtype for dtype in dtypes)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    d_weight = product("mn,kn->mk", d_result[0], embedding[0])
    d_embedding = product("mk,mn->kn", weight, d_result[0])
    return d_weight[None].astype(d_weight_dtype), d_embedding[None].astype(d_embedding_dtype)


def _launch(
    call: CompressionCall, arrays: Arrays, cotangent: jax.Array, problems: int
) -> Gradients:
    # A candidate is on one device, unless every device has a part of M.
    finest_dtype = call.dtype if call.is_m_divided else None
    fn = functools.partial(
        kernel_vjp,
        config=call.backward_config,
        problems=problems,
        dtypes=(call.dtype, call.dtype, finest_dtype),
        num_sms=call.request.num_sms,
    )
    return run_kernel(fn, *arrays, cotangent)


def _run(call: CompressionCall, operands: tuple[Arrays, jax.Array]) -> Gradients:
    d_weights, d_embeddings = _launch(call, *operands, 1)
    return tuple(x[0] for x in d_weights), d_embeddings


def _run_batched(call: CompressionCall, size: int, batched: Any, operands: Any) -> Gradients:
    """Runs the problems of a `vmap`, like `Op._run_batched`."""
    weights = operands[0].weights
    if not size or any(batched[0].weights):
        return GRADIENT.one_by_one(call, batched, operands)
    # Every problem returns gradients of all embeddings, so copies of shared embeddings take no more
    # memory than the results.
    (arrays, cotangent) = jax.tree.map(
        lambda x, is_batched: stack(size, x, is_batched),
        (operands[0]._replace(weights=()), operands[1]),
        (batched[0]._replace(weights=()), batched[1]),
    )
    arrays = fold(size, [True] * len(weights), arrays._replace(weights=weights))
    cotangent = cotangent.reshape(-1, *cotangent.shape[2:])
    # The kernels run even if a row says that XLA is faster for the folded problem: XLA's gradients
    # of weights would be those of one problem.
    tuning, _ = choose(call.request, problem_of(arrays))
    folded = dataclasses.replace(call, backward_config=tuning or call.backward_config)
    d_weights, d_embeddings = _launch(folded, arrays, cotangent, size)
    return d_weights, unstack(size, d_embeddings)


def decomposed_vjp(
    request: dispatch.Request, arrays: Arrays, cotangent: jax.Array, dtype: Any
) -> Gradients:
    """Computes the gradient in XLA, with sums over candidates that have one order on a GPU."""
    sum_rows = functools.partial(look_up.sum_rows, request)
    return reference.decomposed_vjp(*arrays, cotangent, dtype=dtype, sum_rows=sum_rows)


def _pull_back(
    call: CompressionCall, operands: tuple[Arrays, jax.Array], cotangents: Gradients
) -> tuple[tuple[Arrays, jax.Array]]:
    """Computes second derivatives, by XLA."""
    (weights, embeddings, parents), cotangent = operands

    def by_xla(weights: Any, embeddings: Any, cotangent: jax.Array) -> Gradients:
        request = dataclasses.replace(call.request, implementation="xla")
        arrays = Arrays(weights, embeddings, parents)
        found = decomposed_vjp(request, arrays, cotangent, jnp.float32)
        return jax.tree.map(lambda x, like: x.astype(like.dtype), found, cotangents)

    with jax.default_matmul_precision(call.request.precision):
        _, pull_back = jax.vjp(by_xla, weights, embeddings, cotangent)
    d_weights, d_embeddings, d_cotangent = pull_back(cotangents)
    return ((Arrays(d_weights, d_embeddings, (None,) * len(parents)), d_cotangent),)


#: `kernel_vjp` of one problem, with a vmap rule and with second derivatives.
GRADIENT = Gradient(_run, _run_batched, _pull_back)
