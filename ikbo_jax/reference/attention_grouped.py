"""The XLA path of broadcast attention and its gradient: grouped by user, chunked over the keys.

Neither users' keys nor scores ever exist for all candidates at once. For definitions and letters
see `attention`.

Source: the chunked softmax follows Milakov and Gimelshein, "Online normalizer calculation for
softmax", 2018.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ikbo_jax.reference import attention_bias
from ikbo_jax.reference.attention import Softmax, directed, normalise, scaled, soft_cap_slope
from ikbo_jax.reference.attention_blocks import (
    MAX_SCORES,
    Blocking,
    blocking,
    count_groups,
    round_up,
)

#: Options of lookups and updates whose indices are in bounds: without tests for negative ones.
_IN_BOUNDS: Any = {"mode": "promise_in_bounds", "wrap_negative_indices": False}


def decomposed(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cand_to_user: jax.Array,
    key_value_seq_lengths: jax.Array | None = None,
    *,
    scale: float,
    ranges: jax.Array | None = None,
    logit_cap: float | None = None,
    bias: jax.Array | None = None,
    blocks: Blocking | None = None,
    on_cpu: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attends for groups of candidates of one user, a chunk of keys at a time.

    Candidates are sorted by user and cut into groups of at most `blocks.group` candidates of one
    user. A step computes `blocks.groups` groups with `blocks.keys` keys of each group's user, so
    copies of keys and values, and scores, exist for one step only.

    Arguments and results are as for `attention.materialised`; `blocks` are the sizes of the steps,
    or None for the result of `blocking`. Statistics of the softmax and all sums are f32; weights
    are rounded to the values' dtype for the product with them. f32 products follow
    `jax.default_matmul_precision`. `on_cpu` says that blocks are chosen for a CPU.
    """
    blocks = blocks or _blocks_of(query, key, on_cpu=on_cpu)
    parts = _partition(query, key, cand_to_user, key_value_seq_lengths, blocks)
    back = functools.partial(_candidates_of, q_len=query.shape[1], q_heads=query.shape[2])
    bias = attention_bias.with_keys_second(bias)
    left = scale if logit_cap is None and bias is None else 1.0

    def attend(groups: _Groups) -> tuple[jax.Array, jax.Array]:
        q = _rows_of(query, groups.members, key.shape[2])
        ends = _ranges_of(ranges, groups, query, key.shape[2])

        def step(state: Softmax, chunk: jax.Array) -> tuple[Softmax, None]:
            keys, values, own_bias, mask = _chunk_of(parts, groups, chunk, key, value, bias)
            of_scores = scale, logit_cap, own_bias, query
            products, *_ = attention_bias.scores_of(_products(q, keys), *of_scores)
            visible = _visible(parts, chunk, key, mask, ends)
            scores = jnp.where(visible, directed(products, left), -jnp.inf)
            state, exponentials = state.plus(scores, left)
            products = jnp.einsum(
                "gkqs,gskh->gkqh",
                exponentials.astype(values.dtype),
                values,
                preferred_element_type=jnp.float32,
            )
            return state._replace(weighted=state.weighted + products), None

        (row_max, total, out), _ = jax.lax.scan(step, Softmax.of_none(q), parts.chunks)
        out, lse = normalise(out, total, scaled(row_max, left))
        return back(out.astype(query.dtype)), back(lse[..., None])[..., 0]

    def attend_if_any(groups: _Groups) -> tuple[jax.Array, jax.Array]:
        # Groups without candidates are the last ones: up to half of them.
        def nothing(_: _Groups) -> tuple[jax.Array, jax.Array]:
            out, lse = jax.eval_shape(attend, groups)
            # In `shard_map`, they vary over the devices like the query.
            zeros = functools.partial(jnp.full_like, query, 0)
            return zeros(out.dtype, shape=out.shape), zeros(lse.dtype, shape=lse.shape)

        return jax.lax.cond(groups.members[0, 0] < query.shape[0], attend, nothing, groups)

    # Not on a GPU, whose host would wait for the condition; a single step has candidates.
    may_skip = on_cpu and parts.groups.members.shape[0] != 1
    out, lse = jax.lax.map(attend_if_any if may_skip else attend, parts.groups)
    return _gathered(parts, out), _gathered(parts, lse)


def decomposed_vjp(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cand_to_user: jax.Array,
    key_value_seq_lengths: jax.Array | None,
    d_out: jax.Array,
    d_lse: jax.Array | None,
    *,
    scale: float,
    ranges: jax.Array | None = None,
    logit_cap: float | None = None,
    bias: jax.Array | None = None,
    blocks: Blocking | None = None,
    dtype: Any = None,
) -> tuple[jax.Array, ...]:
    """Pulls cotangents of `out` and `lse` back to query, key and value.

    With P = softmax(scores), dP = d_out·valueᵀ and delta = rowsum(P ∘ dP):
    dS = P ∘ (dP - delta + d_lse), d_query = scale·dS·key, d_key = scale·dSᵀ·query and
    d_value = Pᵀ·d_out, the last two summed over the candidates of a user; dS of capped scores is
    also multiplied by the slope of the cap. P is recomputed, a chunk of keys at a time; see
    `decomposed`. If there are several chunks, the scores and dP are computed twice, the first time
    for their sums.

    Args (the others are as for `decomposed`):
      d_out: [B, T, N, H].
      d_lse: [B, T, N] f32, or None for zeros.
      dtype: dtype of the gradients of key, value and bias; None means the inputs'.

    Returns:
      Gradients of query, key, value and, if there is one, bias in their shapes and dtypes, each
      summed in f32 and rounded once.
    """
    blocks = blocks or _blocks_of(query, key, MAX_SCORES)
    parts = _partition(query, key, cand_to_user, key_value_seq_lengths, blocks)
    kv_heads = key.shape[2]
    of_keys = key, value, attention_bias.with_keys_second(bias)
    summed = [x for x in of_keys if x is not None]
    sums = tuple(jnp.zeros_like(x, jnp.float32) for x in summed)
    left = scale if logit_cap is None and bias is None else 1.0

    def pull_back(
        sums: tuple[jax.Array, ...], groups: _Groups
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        rows_of = functools.partial(_rows_of, members=groups.members, kv_heads=kv_heads)
        # Positions without a candidate hold another candidate's rows, which must not add to its
        # gradient. Rows without keys have no gradient, whatever their query and cotangent, which
        # may be NaN: 0 times NaN would be NaN.
        has_keys = (groups.lengths > 0)[:, None, None, None]
        ends = _ranges_of(ranges, groups, query, kv_heads)
        if ends is not None:
            last = jnp.minimum(ends[..., 1:], groups.lengths[:, None, None, None])
            has_keys = last > jnp.maximum(ends[..., :1], 0)
        is_real = has_keys & rows_of(jnp.ones_like(query, bool)[..., :1], fill=False)
        q, d_o = (jnp.where(is_real, rows_of(x), 0) for x in (query, d_out))
        d_rows = 0.0 if d_lse is None else rows_of(d_lse[..., None], fill=0)[..., 0]

        def scores_of(chunk: jax.Array) -> tuple[Any, ...]:
            keys, values, own_bias, mask = _chunk_of(parts, groups, chunk, *of_keys)
            counts = _visible(parts, chunk, key, mask, ends) & is_real
            of_scores = scale, logit_cap, own_bias, query
            products, _, capped = attention_bias.scores_of(_products(q, keys), *of_scores)
            slope = soft_cap_slope(capped, logit_cap)
            scores = jnp.where(counts, directed(products, left), -jnp.inf)
            return keys, counts, scores, _products(d_o, values), (slope, own_bias)

        def add(state: Softmax, chunk: jax.Array) -> tuple[Softmax, None]:
            _, _, scores, d_weights, _ = scores_of(chunk)
            return state.plus_gradients(scores, d_weights, left), None

        state = Softmax.of_none(q[..., :1])
        if is_split := parts.chunks.shape[0] > 1:
            state, _ = jax.lax.scan(add, state, parts.chunks)

        def step(carry: tuple, chunk: jax.Array) -> tuple[tuple, None]:
            d_q, d_keys, d_values, *d_bias = carry
            keys, counts, scores, d_weights, (slope, own_bias) = scores_of(chunk)
            own = state if is_split else state.plus_gradients(scores, d_weights, left)
            weights, d_scores = own.pull_back(scores, d_weights, left, d_rows)
            d_scores = jnp.where(counts, d_scores, 0.0)
            if own_bias is not None:
                of_bias = attention_bias.gradient(d_scores, own_bias, query)
                d_bias = [_add_chunk(parts, groups, chunk, d_bias[0], of_bias)]
            d_scores = jnp.where(counts, d_scores * slope, 0.0) * jnp.float32(scale)
            narrow = d_scores.astype(keys.dtype)
            product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
            d_q += product("gkqs,gskh->gkqh", narrow, keys)
            d_keys = _add_chunk(parts, groups, chunk, d_keys, product("gkqs,gkqh->gskh", narrow, q))
            d_value = product("gkqs,gkqh->gskh", weights.astype(d_o.dtype), d_o)
            d_values = _add_chunk(parts, groups, chunk, d_values, d_value)
            return (d_q, d_keys, d_values, *d_bias), None

        start = (jnp.zeros_like(q, jnp.float32), *sums)
        (d_q, *sums_after), _ = jax.lax.scan(step, start, parts.chunks)
        d_query = _candidates_of(d_q.astype(query.dtype), *query.shape[1:3])
        return tuple(sums_after), d_query

    sums, d_query = jax.lax.scan(pull_back, sums, parts.groups)
    gradients = [x.astype(dtype or of.dtype) for x, of in zip(sums, summed, strict=True)]
    gradients[2:] = [x.transpose(0, 2, 3, 1) for x in gradients[2:]]
    return _gathered(parts, d_query), *gradients


class _Groups(NamedTuple):
    """Groups of one step: users and their numbers of keys [groups], and members [groups, group],
    int32.

    Members are candidates; B at a position without a candidate.
    """

    users: jax.Array
    lengths: jax.Array
    members: jax.Array


class _Partition(NamedTuple):
    """All groups and all chunks of keys.

    Attributes:
      groups: arrays of `_Groups` with a leading axis of steps.
      position: [B] int32, position of a candidate among the members of all groups.
      chunks: [chunks] int32, the numbers of the chunks of keys.
      keys: keys of a chunk.
    """

    groups: _Groups
    position: jax.Array
    chunks: jax.Array
    keys: int


def _partition(
    query: jax.Array,
    key: jax.Array,
    cand_to_user: jax.Array,
    lengths: jax.Array | None,
    blocks: Blocking,
) -> _Partition:
    batch, users, kv_len = query.shape[0], *key.shape[:2]
    group, per_step, keys = blocks
    num_groups = round_up(count_groups(batch, users, group), per_step)

    index = jnp.clip(cand_to_user, 0, users - 1)
    numbers = jnp.zeros_like(index) + jnp.arange(batch, dtype=index.dtype)
    sorted_index, order = jax.lax.sort_key_val(index, numbers)
    counts = jnp.zeros_like(index, shape=users).at[index].add(1, **_IN_BOUNDS)
    # `//` of arrays is a function of eight operations, for negative numbers.
    groups_of_user = jax.lax.div(counts + (group - 1), jnp.full_like(counts, group))
    first_candidate = jnp.cumsum(counts) - counts
    first_group = jnp.cumsum(groups_of_user) - groups_of_user
    # The members of a user's groups lie one after another.
    offset = first_group * group - first_candidate
    position = offset.at[sorted_index].get(**_IN_BOUNDS) + numbers
    members = jnp.full_like(index, batch, shape=num_groups * group)
    members = members.at[position].set(order, **_IN_BOUNDS)
    first_members = jnp.minimum(members.reshape(num_groups, group)[:, 0], batch - 1)
    group_users = index.at[first_members].get(**_IN_BOUNDS)
    if lengths is None:
        group_lengths = jnp.full_like(group_users, kv_len)
    else:
        group_lengths = lengths.at[group_users].get(**_IN_BOUNDS)
    steps = (num_groups // per_step, per_step)
    return _Partition(
        _Groups(
            group_users.reshape(steps), group_lengths.reshape(steps), members.reshape(*steps, group)
        ),
        jnp.zeros_like(index).at[order].set(position, **_IN_BOUNDS),
        jnp.arange(-(-kv_len // keys), dtype=jnp.int32),
        keys,
    )


def _blocks_of(
    query: jax.Array, key: jax.Array, chunk_scores: int = 0, *, on_cpu: bool = False
) -> Blocking:
    batch, q_len, q_heads, head_dim = query.shape
    users, kv_len, kv_heads, _ = key.shape
    return blocking(batch, users, q_len, kv_len, q_heads, kv_heads, head_dim, chunk_scores, on_cpu)


def _rows_of(
    array: jax.Array, members: jax.Array, kv_heads: int, fill: float | bool | None = None
) -> jax.Array:
    """Gathers members' [B, T, N, X] to [groups, K, rows, X]; rows are a group's queries.

    Positions without a candidate hold `fill`; with None, their rows are arbitrary.
    """
    groups, group = members.shape
    batch, q_len, q_heads, width = array.shape
    # The minimum tells checkify's checks of indices, too, that nothing is read outside the array.
    rows = jnp.take(array, jnp.minimum(members, batch - 1), axis=0, mode="clip")
    if fill is not None:
        rows = jnp.where((members < batch)[..., None, None, None], rows, fill)
    rows = rows.reshape(groups, group * q_len, kv_heads, q_heads // kv_heads, width)
    return jnp.swapaxes(rows, 1, 2).reshape(groups, kv_heads, -1, width)


def _ranges_of(
    ranges: jax.Array | None, groups: _Groups, query: jax.Array, kv_heads: int
) -> jax.Array | None:
    """Repeats the members' ranges for each of their rows: [groups, 1, rows, 2]; None without."""
    if ranges is None:
        return None
    rows = query.shape[1] * (query.shape[2] // kv_heads)
    members = jnp.minimum(groups.members, query.shape[0] - 1)
    found = jnp.take(ranges, members, axis=0, mode="clip")[:, :, None]
    num_groups, group = members.shape
    found = jnp.broadcast_to(found, (num_groups, group, rows, 2))
    return found.reshape(num_groups, 1, -1, 2)


def _visible(
    parts: _Partition, chunk: jax.Array, key: jax.Array, mask: jax.Array, ends: jax.Array | None
) -> jax.Array:
    """Combines the mask of a chunk's keys and the rows' ranges: [groups, 1, rows or 1, keys]."""
    visible = mask[:, None, None]
    if ends is None:
        return visible
    start = _chunk_start(parts, chunk, key.shape[1])
    column = (start + jnp.arange(parts.keys, dtype=jnp.int32))[None, None, None]
    return visible & (column >= ends[..., :1]) & (column < ends[..., 1:])


def _candidates_of(rows: jax.Array, q_len: int, q_heads: int) -> jax.Array:
    """Inverts `_rows_of`: [groups, K, rows, X] to [groups * group, T, N, X]."""
    groups, kv_heads, _, width = rows.shape
    split = rows.reshape(groups, kv_heads, -1, q_heads // kv_heads, width)
    return jnp.swapaxes(split, 1, 2).reshape(-1, q_len, q_heads, width)


def _chunk_of(
    parts: _Partition,
    groups: _Groups,
    chunk: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array]:
    """Gathers a chunk's keys, values and bias [groups, keys, ...], and its mask [groups, keys].

    The mask excludes keys past a user's length. It also excludes keys of the last chunk that the
    chunk before contains, since all chunks have the same number of keys. What it excludes is zero.
    """
    start = _chunk_start(parts, chunk, key.shape[1])
    column = start + jnp.arange(parts.keys, dtype=jnp.int32)
    is_new = column >= chunk * parts.keys
    mask = is_new[None] & (column[None] < groups.lengths[:, None])

    def gather(array: jax.Array) -> jax.Array:
        zero = jnp.int32(0)
        size = (1, parts.keys, *array.shape[2:])

        def slice_of(user: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice(array, (user, start, zero, zero), size)[0]

        return jnp.where(mask[..., None, None], jax.vmap(slice_of)(groups.users), 0)

    return gather(key), gather(value), None if bias is None else gather(bias), mask


def _chunk_start(parts: _Partition, chunk: jax.Array, kv_len: int) -> jax.Array:
    return jnp.minimum(chunk * parts.keys, kv_len - parts.keys)


def _add_chunk(
    parts: _Partition, groups: _Groups, chunk: jax.Array, sums: jax.Array, update: jax.Array
) -> jax.Array:
    """Adds [groups, keys, X, Y] to the rows of [U, S, X, Y] that `_chunk_of` read."""
    start = jnp.full_like(groups.users, _chunk_start(parts, chunk, sums.shape[1]))
    return jax.lax.scatter_add(
        sums,
        jnp.stack((groups.users, start), axis=1),
        update,
        jax.lax.ScatterDimensionNumbers(
            update_window_dims=(1, 2, 3),
            inserted_window_dims=(0,),
            scatter_dims_to_operand_dims=(0, 1),
        ),
    )


def _gathered(parts: _Partition, stepwise: jax.Array) -> jax.Array:
    """Gathers [steps, groups * group, ...] to [B, ...], in the order of the candidates."""
    return stepwise.reshape(-1, *stepwise.shape[2:]).at[parts.position].get(**_IN_BOUNDS)


def _products(rows: jax.Array, keys: jax.Array) -> jax.Array:
    """Multiplies [groups, K, rows, H] by [groups, keys, K, H]: [groups, K, rows, keys] in f32."""
    return jnp.einsum("gkqh,gskh->gkqs", rows, keys, preferred_element_type=jnp.float32)
