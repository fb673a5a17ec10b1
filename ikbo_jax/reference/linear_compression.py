"""Linear compression in plain jnp: the materialised oracle, the decomposed XLA path, the gradient.

    out[b] = W_L·E_L[b] + W_{L-1}·E_{L-1}[u(b)] + ...

All functions take levels coarsest first: `weights[l]` is [M, K_l], `embeddings[l]` is [B_l, K_l,
N], `parents[0]` is None and `parents[l]` ([B_l] int32) are indices into the batch of level l-1.
Indices are clamped to [0, B_{l-1} - 1]. The ops check arguments; these functions do not.

Source: Meta IKBO, "linear compression embedding".
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Arrays = Sequence[jax.Array]
#: None, then [B_l] int32 of every further level.
Parents = Sequence[Any]


def materialised(
    weights: Arrays,
    embeddings: Arrays,
    parents: Parents,
    *,
    align_k: int = 1,
    precision: jax.lax.PrecisionLike = jax.lax.Precision.HIGHEST,
) -> jax.Array:
    """Copies every coarser embedding to the finest batch, concatenates along K, multiplies once.

    It is the oracle of the tests and, with `align_k`, the materialised baseline of the benchmarks.

    Args:
      weights: [M, K_l] of every level.
      embeddings: [B_l, K_l, N] of every level.
      parents: None, then [B_l] int32 of every further level.
      align_k: the concatenated K is padded with zeros to a multiple of this.

    Returns:
      [B_last, M, N] in the inputs' dtype; f32 accumulation, one rounding.
    """
    finest = embeddings[-1].shape[0]
    index = jnp.arange(finest, dtype=jnp.int32)
    copies = [embeddings[-1]]
    for level in range(len(embeddings) - 1, 0, -1):
        coarser = embeddings[level - 1]
        index = jnp.clip(parents[level][index], 0, coarser.shape[0] - 1)
        copies.insert(0, coarser[index])
    weight = jnp.concatenate(weights, axis=1)
    embedding = jnp.concatenate(copies, axis=1)
    if pad := -weight.shape[1] % align_k:
        weight = jnp.pad(weight, ((0, 0), (0, pad)))
        embedding = jnp.pad(embedding, ((0, 0), (0, pad), (0, 0)))
    out = jnp.einsum(
        "mk,bkn->bmn", weight, embedding, precision=precision, preferred_element_type=jnp.float32
    )
    return out.astype(embedding.dtype)


def decomposed(weights: Arrays, embeddings: Arrays, parents: Parents) -> jax.Array:
    """Multiplies every level at its own batch, gathers the coarser results, adds.

    Arguments are as for `materialised`.

    Returns:
      [B_last, M, N] in the inputs' dtype; products accumulate in f32 and are added in f32, then one
      rounding. f32 products follow `jax.default_matmul_precision`.
    """
    total = _product(weights[0], embeddings[0])
    for weight, embedding, parent in zip(weights[1:], embeddings[1:], parents[1:], strict=True):
        coarser = jnp.take(total, parent, axis=0, mode="clip")
        total = _product(weight, embedding) + coarser
    return total.astype(embeddings[-1].dtype)


def decomposed_vjp(
    weights: Arrays,
    embeddings: Arrays,
    parents: Parents,
    cotangent: jax.Array,
    *,
    dtype: Any = None,
    sum_rows: Callable[[jax.Array, jax.Array, int], jax.Array] = jax.ops.segment_sum,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Pulls a cotangent back to the weights and the embeddings, every level at its own batch.

    With P_l the result of level l: dP_last = cotangent, dP_{l-1} = segment_sum(dP_l, parent_l),
    dW_l = Σ_b dP_l[b]·E_l[b]ᵀ and dE_l[b] = W_lᵀ·dP_l[b].

    Args (the levels are as for `materialised`):
      cotangent: [B_last, M, N] in the inputs' dtype.
      dtype: dtype of the gradients; None means the inputs'.
      sum_rows: function of f32 rows, the user of each row and the number of users; returns the sum
        of each user's rows. On a GPU, JAX's own adds in any order.

    Returns:
      Gradients of the weights and of the embeddings, each in its input's shape. Sums over
      candidates and products are f32; each gradient is rounded once. The embedding of an entry
      without candidates has no effect, whatever it holds.
    """
    batches = [embedding.shape[0] for embedding in embeddings[:-1]]
    clamped = [jnp.clip(x, 0, batch - 1) for x, batch in zip(parents[1:], batches, strict=True)]
    is_used = _entries_with_candidates(batches, clamped)
    d_weights: list[jax.Array] = []
    d_embeddings: list[jax.Array] = []
    d_result = cotangent
    for level in range(len(weights) - 1, -1, -1):
        weight, embedding = weights[level], embeddings[level]
        # The finest level multiplies in the inputs' dtype, on the tensor cores. Sums over
        # candidates are f32: rounding before the next product would round the gradient twice.
        lhs, rhs = weight.astype(d_result.dtype), embedding.astype(d_result.dtype)
        if (used := is_used[level]) is not None:
            # The cotangent of such an entry is 0, but 0 times NaN would be NaN.
            rhs = jnp.where(used[:, None, None], rhs, jnp.zeros_like(rhs))
        d_weight = jnp.einsum("bmn,bkn->mk", d_result, rhs, preferred_element_type=jnp.float32)
        d_embedding = jnp.einsum("mk,bmn->bkn", lhs, d_result, preferred_element_type=jnp.float32)
        d_weights.insert(0, d_weight.astype(dtype or weight.dtype))
        d_embeddings.insert(0, d_embedding.astype(dtype or embedding.dtype))
        if level > 0:
            coarser = level - 1
            d_result = sum_rows(d_result.astype(jnp.float32), clamped[coarser], batches[coarser])
    return tuple(d_weights), tuple(d_embeddings)


def _entries_with_candidates(batches: list[int], parents: Arrays) -> list[jax.Array | None]:
    """Whether entries have candidates, [B_l] of every level; None for the finest: all have.

    `batches` are of all levels but the finest; `parents`, of all but the coarsest, are clamped.
    """
    found: list[jax.Array | None] = [None]
    used: jax.Array | bool = True
    for batch, parent in zip(reversed(batches), reversed(parents), strict=True):
        used = jnp.zeros(batch, bool).at[parent].max(used)
        found.insert(0, used)
    return found


def _product(weight: jax.Array, embedding: jax.Array) -> jax.Array:
    """Multiplies [M, K] by [B, K, N] in f32; broadcasts the weight, so no operand is transposed."""
    weights = jnp.broadcast_to(weight, (embedding.shape[0], *weight.shape))
    return jax.lax.dot_general(
        weights, embedding, (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32
    )
