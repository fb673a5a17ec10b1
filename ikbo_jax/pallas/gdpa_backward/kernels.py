"""Gradients of generalised dot-product attention: two persistent Mosaic GPU kernels for Hopper.

    dA = d_out @ value.T,  dS = dA * act'(scale * S),  S = query @ key.T, of each sequence and head
    d_query = scale * output_scale * dS @ key
    d_key   = scale * output_scale * dS.T @ query
    d_value = output_scale * act(scale * S).T @ d_out

One kernel computes d_query, another d_key and d_value; both launch the same body.  A tile is 128
rows of one sequence and head.  Its two *stationary* operands (query and d_out, or key and value)
stay in shared memory, while blocks of the two *streamed* operands follow one another: the keys of
one sequence, or the queries of all sequences and heads that share a key.  The tensor core computes
S and dA from shared memory.  The consumers round dS and the activated scores to the inputs' dtype,
and multiply them from registers; sums stay in registers until the tile's end.  Thus each sum is
computed in one place and in one order, and both kernels compute S and dA: seven products instead of
five, but no atomic additions and no partial sums in memory.

Rows of a block past a sequence's end are zeroed in shared memory, and have no effect since
act(0) = 0.  Rows of a tile past the end only affect results that are not stored.

With a softmax in all heads, act and act' are computed from lse and delta of each query (`softmax`):
lse is infinite for queries past the end, and dS is set to 0 for keys past the end.

Warpgroups: 0 and 1 are the consumers, with 64 rows each; one warp of warpgroup 2 is the producer.
A consumer issues the scores of a tile's next block behind the products of the current block; one
consumer's activations overlap the other's products.  A finished tile is staged in the slot of its
stationary operands, while the producer loads the next tile's operands into another slot.

Synchronisations:
  1. `stationary.ready[s]`, `stationary.free[s]`  slot s has a tile's operands and descriptor; free
                                                  once TMA has read the results staged in it.
  2. `streamed.ready[s]`, `streamed.free[s]`      stage s has a block and its descriptor.
  3. A named barrier: the consumers wait for each other after they zeroed a block's rows.
  4. `statistics_free[0]`                         the consumers have read lse and delta of a tile of
                                                  queries, which arrive with its operands.

Source: a backward pass with two consumers of 64 rows follows Shah et al., "FlashAttention-3", 2024.
No code is shared.
"""

from collections.abc import Callable
from typing import Any

import jax

from ikbo_jax.pallas.activations import slopes as gdpa_slopes
from ikbo_jax.pallas.activations.weights import ActivationSpec
from ikbo_jax.pallas.gdpa_backward import masked
from ikbo_jax.pallas.gdpa_backward.consumer import consume
from ikbo_jax.pallas.gdpa_backward.context import BackwardContext, Operands, Shape, with_words
from ikbo_jax.pallas.gdpa_backward.producer import produce
from ikbo_jax.pallas.hopper.launch import Roles, launch
from ikbo_jax.pallas.worklist.lists import Work
from ikbo_jax.problems import GdpaBackwardConfig
from ikbo_jax.problems.hopper import WGMMA_M
from ikbo_jax.reference.gdpa import Settings


def gradient_kernel(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    d_out: jax.Array,
    work: Work,
    settings: Settings,
    *,
    is_for_keys: bool,
    config: GdpaBackwardConfig,
    num_sms: int,
    statistics: jax.Array | None = None,
    masks: masked.Masks | None = None,
    stored_rows: int = 0,
    out_dtype: Any = None,
) -> tuple[jax.Array, ...]:
    """Computes (d_query,), or with `is_for_keys` (d_key, d_value).

    Arrays are as in `reference.gdpa`, bf16 or f16; gradients are summed in f32 over all queries
    that share a key, rounded once to `out_dtype`, and zeros in rows of no sequence.

    Args:
      work: of queries or of keys, by `works.works` or `by_xla.works`, with `config.block`.
      settings: of the op; softmax in all heads or in none.
      statistics: with a softmax, the result of `softmax.statistics_of`.
      masks: of the queries, with `work` by `masked.mask_work`; None: queries see all keys. With
        `d_scores`, the kernel for queries computes d_query of these.
      stored_rows: rows of `masked.Masks.d_scores` that the kernel for keys stores, as a further
        result; 0: none.
    """
    of_queries, of_keys = (query, d_out), (key, value)
    pairs = (of_keys, of_queries) if is_for_keys else (of_queries, of_keys)
    stationary = key if is_for_keys else d_out
    _, heads, head_dim = stationary.shape
    group = d_out.shape[1] // key.shape[1]
    # Sums are scaled at a tile's end.
    activation = ActivationSpec.of(settings, query.dtype)
    by_weight, by_slope = gdpa_slopes.constants(activation)
    output_scale = settings.output_scale
    scales = (settings.scale * output_scale * by_slope, output_scale * by_weight)
    reads_stored = masks is not None and masks.d_scores is not None
    if reads_stored:
        activation = ActivationSpec(
            ("identity",) * len(settings.activations), None, settings.scale, 1.0, True
        )
        statistics = None
    shape = Shape(
        heads=heads,
        streamed_per_head=group if is_for_keys else 1,
        heads_per_streamed=1 if is_for_keys else group,
        head_dim=head_dim,
        activation=activation,
        scales=scales if is_for_keys else scales[:1],
        workers=min(num_sms, work.tiles.shape[0] * heads),
        has_mask=masks is not None,
        has_stored=reads_stored or stored_rows > 0,
    )
    result = jax.ShapeDtypeStruct(stationary.shape, out_dtype or query.dtype)
    results = (result,) * len(shape.scales)
    if stored_rows:
        results += (jax.ShapeDtypeStruct((stored_rows, 1, WGMMA_M), query.dtype),)
    operands = Operands(*pairs, *work, statistics, masks=masks)
    name = "ikbo_gdpa_d_key_value" if is_for_keys else "ikbo_gdpa_d_query"
    return launch_kernel(BackwardContext, shape, config, operands, results, name)


def launch_kernel(
    context: Callable[..., BackwardContext],
    shape: Shape,
    config: GdpaBackwardConfig,
    operands: Operands,
    results: tuple[jax.ShapeDtypeStruct, ...],
    name: str,
) -> tuple[jax.Array, ...]:
    """Launches one kernel; `context` makes a `BackwardContext` of its first five fields."""

    def make(shared: Any, *rest: Any) -> BackwardContext:
        return context(shape, config, with_words(shape, config, shared), *rest)

    softmax_results = len(shape.scales) if shape.has_softmax else None
    return launch(
        Roles(make, produce, consume),
        operands,
        results,
        config.shared(shape.head_dim, softmax_results, shape.has_mask, shape.reads_stored),
        dtype=operands.stationary[0].dtype,
        name=name,
        workers=shape.workers,
        has_counter=shape.has_mask,
    )
