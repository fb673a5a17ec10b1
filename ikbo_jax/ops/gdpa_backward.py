"""Gradients of generalised dot-product attention by kernels."""

from typing import Any

import jax
import jax.numpy as jnp

from ikbo_jax.ops import dispatch
from ikbo_jax.problems import GdpaBackwardConfig, GdpaBackwardProblem, GdpaProblem
from ikbo_jax.problems import gdpa_backward as configs
from ikbo_jax.problems.gdpa import group_rows
from ikbo_jax.problems.hopper import TILE_ROWS, WGMMA_M
from ikbo_jax.reference import jagged
from ikbo_jax.reference.activations import SOFTMAX, one_by_one
from ikbo_jax.reference.gdpa import Arrays, Settings, num_sequences

#: Largest number of parts that the queries of one key-value sequence are divided into.
MAX_PARTS = 8


def choose(
    request: dispatch.Request, problem: GdpaProblem
) -> tuple[GdpaBackwardConfig | None, str]:
    """Returns the configuration of the gradient's kernels, or None for XLA; and the reason."""
    backward = GdpaBackwardProblem.of(problem)
    return dispatch.gradient_config(request, backward, configs.illegal_reason(problem))


def kernel_vjp(
    arrays: Arrays,
    settings: Settings,
    d_out: jax.Array,
    *,
    num_sms: int,
    out: Any = None,
    lse: Any = None,
    config: GdpaBackwardConfig | None = None,
    dtype: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Pulls a cotangent of the result back to query, key and value, like `chunked_vjp`.

    `out` and `lse`, [rows of out, N] f32, are needed with a softmax. None takes the default
    configuration, which must be legal (`problems.gdpa_backward.illegal_reason`); with stored
    gradients of scores, the kernel for d_query has `STORED_CONFIG`.

    Returns:
      Gradients of query, key and value in their shapes and dtypes, each summed in f32 and rounded
      once; deterministic. With broadcast queries, d_query of every sequence is written in f32
      before the sum over sequences.
    """
    # Imported here because a machine without a GPU never needs it.
    from ikbo_jax.pallas.gdpa_backward import kernels, masked, softmax
    from ikbo_jax.pallas.worklist import by_xla, works
    from ikbo_jax.pallas.worklist.lists import Offsets, WorkSettings

    query, key, value = arrays[:3]
    config = config or configs.default_config(query.shape[-1])
    parts = _parts(arrays, settings, num_sms)
    list_works = by_xla.works if by_xla.is_preferred() else works.works
    has_softmax, has_mask = SOFTMAX in settings.activations, arrays.intervals is not None
    stored = _stored_rows(arrays, settings) if has_mask else 0
    work_settings = WorkSettings(
        config.block,
        config.block,
        group=query.shape[1] // key.shape[1],
        has_statistics=has_softmax or has_mask,
        parts=parts,
    )
    offsets = Offsets.of(arrays, settings)
    work: Any = list_works(offsets, work_settings)
    masks: Any = None
    if arrays.intervals is not None:
        _, heads, width = query.shape
        rows_of_groups = (
            group_rows(key.shape[0], key.shape[1] * width),
            group_rows(offsets.result_rows, heads * width),
        )
        work, masks = masked.mask_work(
            work, offsets, arrays.intervals, work_settings, rows_of_groups, stores=stored > 0
        )
    of_rows = None
    if has_softmax:
        blocks: dict[str, Any] = {"output_scale": settings.output_scale, "block": config.block}
        of_rows = softmax.statistics_of(work.blocks, out, lse, d_out, **blocks)
    options: dict[str, Any] = {
        "settings": settings._replace(approx=one_by_one(settings.approx)),
        "num_sms": num_sms,
        "statistics": of_rows,
        "masks": masks,
    }
    of_keys = options | {"stored_rows": stored}
    d_key, d_value, *d_scores = _d_key_value(
        arrays, work.keys, d_out, parts, config, out_dtype=dtype, options=of_keys
    )
    if stored:
        options["masks"] = masks._replace(d_scores=d_scores[0])
    (d_query,) = kernels.gradient_kernel(
        *(query, key, value, d_out, work.queries),
        is_for_keys=False,
        config=configs.STORED_CONFIG if stored else config,
        out_dtype=jnp.float32 if settings.broadcast_q else None,
        **options,
    )
    if settings.broadcast_q:
        d_query = jnp.sum(d_query.reshape(-1, *query.shape), axis=0).astype(query.dtype)
    return d_query, d_key, d_value


def _parts(arrays: Arrays, settings: Settings, num_sms: int) -> int:
    """Number of parts that the queries of a key-value sequence are divided into.

    A tile of keys takes all queries that share it. Where many queries share few keys, the tiles
    would leave most of the device idle.
    """
    if arrays.q_to_kv is None:
        return 1
    rows, heads, _ = arrays.key.shape
    batch, batch_kv = num_sequences(arrays), arrays.cu_seqlens_kv.shape[0] - 1
    most = jagged.most_tiles(batch_kv, rows, TILE_ROWS, settings.max_seqlen_kv)
    return max(1, min(num_sms // max(most * heads, 1), -(-batch // max(batch_kv, 1)), MAX_PARTS))


def _stored_rows(arrays: Arrays, settings: Settings) -> int:
    """Returns how many rows of 64 gradients of scores the kernel for keys stores with a mask.

    0: the kernel for queries computes them again, which is faster for few keys.
    """
    rows, heads, _ = arrays.query.shape
    kv_rows, sequences = arrays.key.shape[0], max(arrays.cu_seqlens_kv.shape[0] - 1, 1)
    rule, names = settings.rule, set(settings.activations)
    is_alone = arrays.q_to_kv is None and not settings.broadcast_q and len(names) == 1
    # A capped softmax spills 16 bytes at H = 128, gelu_tanh 8.
    spills = settings.logit_cap is not None or (names == {"gelu_tanh"} and settings.approx is None)
    if not is_alone or spills:
        return 0
    longest_q = rows if settings.max_seqlen_q is None else min(settings.max_seqlen_q, rows)
    longest = kv_rows if settings.max_seqlen_kv is None else min(settings.max_seqlen_kv, kv_rows)
    keys, tiles = min(longest, -(-kv_rows // sequences)), kv_rows // TILE_ROWS + sequences
    blocks = -(-longest_q // WGMMA_M)
    if rule is None or rule.causal:
        keys //= 2
    if rule is not None and rule.causal and rule.contextual == 0 and rule.target_group_size == 1:
        # The n tiles of a sequence see at most 2 n + 1, 2 n - 1, ... blocks of queries.
        blocks = min(blocks, -(-longest // TILE_ROWS) + 2)
    if rule is not None and rule.window is not None:
        keys = min(keys, rule.window)
    stored = tiles * blocks * heads * TILE_ROWS
    is_large = stored * WGMMA_M * 2 > configs.MAX_STORED_BYTES or tiles > configs.MOST_STORED_TILES
    return 0 if is_large or keys < configs.LEAST_STORED_KEYS else stored


def _d_key_value(
    arrays: Arrays,
    work: Any,
    d_out: jax.Array,
    parts: int,
    config: GdpaBackwardConfig,
    *,
    out_dtype: Any,
    options: dict[str, Any],
) -> tuple[jax.Array, ...]:
    """Computes gradients of key and value; every n-th query sequence belongs to part n.

    With several parts there are as many copies of keys and values, which are few then. The parts'
    gradients are f32 and added before they are rounded.
    """
    from ikbo_jax.pallas.gdpa_backward import kernels

    query, key, value = arrays[:3]
    rows = key.shape[0]
    if parts > 1:
        key, value = (jnp.tile(x, (parts, 1, 1)) for x in (key, value))
    d_key, d_value, *d_scores = kernels.gradient_kernel(
        *(query, key, value, d_out, work),
        is_for_keys=True,
        config=config,
        out_dtype=jnp.float32 if parts > 1 else out_dtype,
        **options,
    )
    if parts > 1:
        d_key, d_value = (
            jnp.sum(x.reshape(parts, rows, *x.shape[1:]), axis=0).astype(out_dtype or query.dtype)
            for x in (d_key, d_value)
        )
    return d_key, d_value, *d_scores
