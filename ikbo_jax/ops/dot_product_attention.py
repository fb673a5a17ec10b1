"""`jax.nn.dot_product_attention` where candidates share the keys and values of their user."""

from typing import Any

import jax
import jax.numpy as jnp

from ikbo_jax import masks
from ikbo_jax.integers import integer
from ikbo_jax.ops import arguments, attention_arrays, gdpa_arguments
from ikbo_jax.ops.attention import attention
from ikbo_jax.ops.attention_arrays import Arrays
from ikbo_jax.ops.gdpa import gdpa
from ikbo_jax.problems.attention import HEAD_DIMS

#: Columns that hold a bias: three numbers of bfloat16 hold a float32.
_BIAS_COLUMNS = 3


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    cand_to_user: jax.Array,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """Computes `jax.nn.dot_product_attention` with the keys and values of every candidate's user.

    The result is that of the call in `jax.nn` with `key[cand_to_user]`, `value[cand_to_user]`, and
    likewise bias, mask and lengths of keys; none of them is copied.

    Args:
      query: [B, T, N, H], bfloat16, float16 or float32: T queries of each of B candidates.
      key: [U, S, K, H], same dtype: S keys of each of U users. N is a multiple of K.
      value: [U, S, K, H], same dtype.
      bias: added to the scores, [U or 1, N or 1, T or 1, S or 1] of floats, or of lower rank. The
        kernels take one that is the same for all queries, and for all heads unless N = K: it
        widens the heads by three columns to the next width of the kernels, and in float16 it counts
        as at most 65504 · scale.
      mask: which keys of their user candidates see, [U or 1, N or 1, T or 1, S or 1] bool, or of
        lower rank. The kernels take one that is the same for all queries and heads, without
        `is_causal` and `local_window_size`.
      cand_to_user: [B] int32, the user of every candidate, values in [0, U), in any order; others
        are clamped.
      scale: factor of the scores; None means 1 / sqrt(H).
      is_causal: whether query t sees only the keys 0 to t.
      query_seq_lengths: [B] int32, a candidate's number of queries; results of others are 0.
      key_value_seq_lengths: [U] int32, a user's number of keys; None means S.
      local_window_size: (left, right), or one number for both: query t sees only the keys t − left
        to t + right.
      implementation: None, "mosaic_gpu" or "xla", as in `ikbo_jax.attention`.
      return_residual: whether to return lse as well. The kernels do so without `is_causal` and
        `local_window_size`.

    Returns:
      [B, T, N, H] in the inputs' dtype; with `return_residual` also lse [B, T, N], in the same
      dtype, without a gradient. A query without keys has result 0 (in `jax.nn`, the mean of all
      values) and lse -inf. Runs `ikbo_jax.attention`, or with `is_causal` or `local_window_size`
      `ikbo_jax.gdpa`; what the kernels do not take, XLA adds to the scores, from one array
      [U, N or 1, T or 1, S] f32. `ikbo_jax.explain` says how. Differentiable in reverse mode with
      respect to query, key, value and bias.

    Raises:
      ValueError: ranks, sizes or dtypes are wrong or disagree; a window is not of integers of at
        least 0; otherwise as `ikbo_jax.attention`.
      NotImplementedError: as `ikbo_jax.attention`.

    Source: `jax.nn.dot_product_attention`.
    """
    arrays = Arrays(query, key, value, cand_to_user, key_value_seq_lengths)
    arguments.check_runnable("dot_product_attention", (arrays, bias, mask, query_seq_lengths))
    attention_arrays.check(arrays)
    if query_seq_lengths is not None:
        arguments.check_index("query_seq_lengths", query_seq_lengths, "query", "B", query.shape[0])
    width = query.shape[3]
    scale = arguments.finite_number("scale", width**-0.5 if scale is None else scale)
    with_lse = arguments.flag("return_residual", return_residual)
    window = _window(arguments.flag("is_causal", is_causal), local_window_size)
    kept = None if mask is None else _by_head("mask", mask, arrays)
    added = None if bias is None else _by_head("bias", bias, arrays)
    lse = None
    of_scores = _bias_of_scores(arrays, kept, added, scale, window, with_lse)
    if of_scores is not None:
        window = None
    else:
        if added is not None:
            arrays = _with_bias(arrays, added[:, :, 0], scale)
        if kept is not None:
            kept = kept[:, 0, 0]
            lengths, key, value = visible_first(kept, arrays.lengths, arrays.key, arrays.value)
            arrays = arrays._replace(key=key, value=value, lengths=lengths)
    if window is None:
        out, lse = attention(
            *arrays[:4],
            scale=scale,
            bias=of_scores,
            key_value_seq_lengths=arrays.lengths,
            implementation=implementation,
            return_residuals=True,
        )
    else:
        out = _by_intervals(arrays, scale, window, implementation)
    out = out[..., :width]
    if query_seq_lengths is not None:
        is_query = jnp.arange(query.shape[1], dtype=jnp.int32)[None] < query_seq_lengths[:, None]
        out = jnp.where(is_query[:, :, None, None], out, 0)
        lse = None if lse is None else jnp.where(is_query[:, :, None], lse, -jnp.inf)
    if lse is None or not with_lse:
        return out
    return out, jax.lax.stop_gradient(lse.astype(out.dtype))


def _window(is_causal: bool, size: Any) -> tuple[int, int] | None:
    """Returns how many keys before and after its place a query sees; None: all keys."""
    if size is None:
        return (masks.LARGEST, 0) if is_causal else None
    sizes = size if isinstance(size, tuple) else (size, size)
    try:
        left, right = (integer("local_window_size", x) for x in sizes)
    except ValueError:
        raise ValueError(
            "local_window_size must be an integer of at least 0, or a tuple of two, but is "
            f"{size!r:.80}"
        ) from None
    left, right = (min(x, masks.LARGEST) for x in (left, right))
    return left, 0 if is_causal else right


def _by_head(name: str, array: Any, arrays: Arrays) -> jax.Array:
    """Checks a mask or a bias; returns it as [U, N or 1, T or 1, S]."""
    is_mask, dtype = name == "mask", getattr(array, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.bool_ if is_mask else jnp.floating):
        kind = "bool" if is_mask else "floating-point"
        raise ValueError(f"{name} must be a {kind} array, but is {arguments.describe(array)}")
    (_, q_len, q_heads, _), (users, keys) = arrays.query.shape, arrays.keys
    whole, shape = (users, q_heads, q_len, keys), (1,) * (4 - array.ndim) + array.shape
    if len(shape) != 4 or any(x not in (1, size) for x, size in zip(shape, whole, strict=True)):
        raise ValueError(
            f"{name} has shape {array.shape}, which does not broadcast to [U, N, T, S] = {whole}"
        )
    return jnp.broadcast_to(array.reshape(shape), (users, *shape[1:3], keys))


def _bias_of_scores(
    arrays: Arrays,
    kept: jax.Array | None,
    bias: jax.Array | None,
    scale: float,
    window: tuple[int, int] | None,
    with_lse: bool,
) -> jax.Array | None:
    """Adds up what no kernel takes to a bias [U, N or 1, T or 1, S]; None if the kernels take it.

    These are mask, bias and window; a bias of -inf hides a key.
    """
    by_query = any(x is not None and x.shape[2] != 1 for x in (kept, bias))
    is_masked = kept is not None and (kept.shape[1] != 1 or window is not None)
    is_biased = False
    if bias is not None:
        by_head = bias.shape[1] != 1 and arrays.query.shape[2] != arrays.key.shape[2]
        is_biased = by_head or not scale or bool(arrays.key.dtype == jnp.float32)
    if not (by_query or is_masked or is_biased or (window is not None and with_lse)):
        return None
    users, keys = arrays.keys
    zeros = jnp.zeros((users, 1, 1, keys), jnp.float32)
    total = zeros if bias is None else bias.astype(jnp.float32)
    if kept is not None:
        total = jnp.where(kept, total, -jnp.inf)
    if window is not None:
        sizes = (keys, arrays.query.shape[1])
        key_places, places = (jnp.arange(size, dtype=jnp.int32) for size in sizes)
        place = key_places[None] - places[:, None]
        is_near = (place >= -window[0]) & (place <= window[1])
        total = jnp.where(is_near[None, None], total, -jnp.inf)
    return total


def _with_bias(arrays: Arrays, bias: jax.Array, scale: float) -> Arrays:
    """Adds a bias [U, K or 1, S] to the scores: further columns of 1 meet it in the keys.

    Three numbers of the keys' dtype hold a float32.
    """
    query, key, value = arrays[:3]
    width = key.shape[3]
    limit = float(jnp.finfo(key.dtype).max)
    rest = jnp.clip(jnp.swapaxes(bias, 1, 2).astype(jnp.float32) / scale, -limit, limit)
    columns = []
    for _ in range(_BIAS_COLUMNS):
        left = jax.lax.stop_gradient(rest - rest.astype(key.dtype).astype(jnp.float32))
        # The first column alone has the bias's gradient, which this rounding does not round.
        columns.append((rest - left).astype(key.dtype))
        rest = left
    of_keys = jnp.broadcast_to(jnp.stack(columns, axis=-1), (*key.shape[:3], _BIAS_COLUMNS))
    of_queries = jnp.ones((*query.shape[:3], _BIAS_COLUMNS), query.dtype)
    # The kernels take few widths; XLA takes all.
    needed = width + _BIAS_COLUMNS
    wide = next((width for width in sorted(HEAD_DIMS) if width >= needed), needed)

    def widened(*parts: jax.Array) -> jax.Array:
        joined = jnp.concatenate(parts, axis=-1)
        return jnp.pad(joined, ((0, 0),) * 3 + ((0, wide - joined.shape[-1]),))

    return arrays._replace(
        query=widened(query, of_queries), key=widened(key, of_keys), value=widened(value)
    )


def visible_first(
    kept: jax.Array, lengths: jax.Array | None, *arrays: jax.Array
) -> tuple[jax.Array, ...]:
    """Moves the keys that `kept` [U, S] keeps to the front; returns their number and `arrays`."""
    if lengths is not None:
        places = jnp.arange(kept.shape[1], dtype=jnp.int32)
        kept = kept & (places[None] < lengths[:, None])
    return jnp.sum(kept, axis=1, dtype=jnp.int32), *keys_first(kept, *arrays)


def keys_first(kept: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
    """Moves the keys that `kept` [U, S] keeps to the front of arrays [U, S, K, H], in order."""
    order = jnp.argsort(~kept, axis=1, stable=True)[:, :, None, None]
    return [jnp.take_along_axis(x, order, axis=1) for x in arrays]


def _by_intervals(
    arrays: Arrays, scale: float, window: tuple[int, int], implementation: str | None
) -> jax.Array:
    """Attends where query t sees the keys t − window[0] to t + window[1], by `gdpa`."""
    query, key, value, index, lengths = arrays[:5]
    (batch, q_len), (users, kv_len) = query.shape[:2], key.shape[:2]
    offsets = gdpa_arguments.equal_offsets(users, kv_len)
    if lengths is not None:
        # A user's padding is a sequence without queries: it has no effect, even if it is NaN.
        starts = offsets[:-1]
        pairs = jnp.stack((starts, starts + jnp.clip(lengths, 0, kv_len)), axis=1)
        offsets = jnp.append(pairs, offsets[-1:])
        index = 2 * jnp.clip(index, 0, users - 1)
    places = jnp.arange(q_len, dtype=jnp.int32)[None]
    begin, end = (
        jnp.broadcast_to(x, (batch, q_len)) for x in (places - window[0], places + window[1] + 1)
    )
    rows = [jax.lax.collapse(x, 0, 2) for x in (query, key, value)]
    out = gdpa(
        *(*rows, gdpa_arguments.equal_offsets(batch, q_len), offsets),
        activation="softmax",
        scale=scale,
        q_to_kv=index,
        max_seqlen_q=q_len,
        max_seqlen_kv=kv_len,
        mask=masks.intervals(begin.reshape(-1, 1), end.reshape(-1, 1)),
        implementation=implementation,
    )
    return out.reshape(query.shape)
