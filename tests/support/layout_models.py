"""Small ranking models in the layouts that ranking teams write."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from layout_table import F_CAND, F_USER, VOCABULARY, B, D, F, S, U, layout

# Fields that are concatenated or stacked, flattened, and multiplied by weights.


@layout("user_fields cand_fields index w_fields", 0.61)
def fields_concatenated_and_flattened(user_fields, cand_fields, index, w_fields):
    x = jnp.concatenate([user_fields[index], cand_fields], axis=1)
    return jax.nn.relu(x.reshape(B, -1) @ w_fields)


@layout("user_fields cand_fields index w_wide", 0.45)
def features_concatenated_by_field_and_flattened(user_fields, cand_fields, index, w_wide):
    x = jnp.concatenate([user_fields[index][:, :F_CAND], cand_fields], axis=2)
    return x.reshape(B, -1) @ w_wide[: 2 * F_CAND * D]


@layout("user_fields cand_fields index w_tower", 0.61)
def batch_and_positions_merged(user_fields, cand_fields, index, w_tower):
    x = jnp.concatenate([user_fields[index], cand_fields], axis=1)
    return jax.nn.relu(x.reshape(B * F, D) @ w_tower).reshape(B, F, -1)


@layout("user_fields cand_fields index w_tower", 0.61)
def fields_unstacked(user_fields, cand_fields, index, w_tower):
    x = jnp.concatenate([user_fields[index], cand_fields], axis=1)
    return sum(n * jnp.tanh(field @ w_tower) for n, field in enumerate(jnp.unstack(x, axis=1)))


# Ids that are concatenated, stacked or flattened before the table.


@layout("user_ids cand_ids index table w_fields", 0.61)
def ids_concatenated(user_ids, cand_ids, index, table, w_fields):
    ids = jnp.concatenate([user_ids[index], cand_ids], axis=1)
    return jax.nn.relu(jnp.take(table, ids, axis=0).reshape(B, -1) @ w_fields)


@layout("user_ids cand_ids index table w_fields", 0.61)
def ids_flattened(user_ids, cand_ids, index, table, w_fields):
    ids = jnp.concatenate([user_ids[index], cand_ids], axis=1)
    rows = jnp.take(table, ids.reshape(-1), axis=0)
    return jax.nn.relu(rows.reshape(B, F * D) @ w_fields)


# Compression of the embeddings of users and candidates.


_compression = functools.partial(layout, never=((B, F_USER, D),), op="linear_compression")


@_compression("user_fields cand_fields index compress", 0.61)
def compression_of_concatenated_fields(user_fields, cand_fields, index, compress):
    x = jnp.concatenate([user_fields[index], cand_fields], axis=1)
    return jax.nn.relu(jnp.einsum("bkn,mk->bmn", x, compress))


@_compression("user_fields cand_fields counts compress", 0.61)
def compression_of_repeated_users(user_fields, cand_fields, counts, compress):
    users = jnp.repeat(user_fields, counts, axis=0, total_repeat_length=B)
    return jax.nn.relu(compress @ jnp.concatenate([users, cand_fields], axis=1))


@_compression("user_fields cand_fields compress", 0.63)
def compression_of_one_user(user_fields, cand_fields, compress):
    users = jnp.broadcast_to(user_fields[:1], (B, F_USER, D))
    return jax.nn.relu(compress @ jnp.concatenate([users, cand_fields], axis=1))


@layout(
    "requests user_fields cand_fields to_request index compress_three",
    0.74,
    never=((B, 5 + F_USER, D), (B, F_USER, D), (B, 5, D), (U, 5, D)),
    op="multilevel_linear_compression",
)
def compression_of_three_levels(
    requests, user_fields, cand_fields, to_request, index, compress_three
):
    users = jnp.concatenate([requests[to_request], user_fields], axis=1)
    x = jnp.concatenate([users[index], cand_fields], axis=1)
    return jax.nn.relu(jnp.einsum("mk,bkn->bmn", compress_three, x))


# Models of fields.


ROWS, COLUMNS = np.tril_indices(F, -1)


@layout("user_fields cand_fields index w_pairs w_top", 0.49)
def dlrm(user_fields, cand_fields, index, w_pairs, w_top):
    fields = jnp.concatenate([user_fields[index], cand_fields], axis=1)
    pairs = jnp.einsum("bfd,bgd->bfg", fields, fields)
    x = jnp.concatenate([fields[:, 0], pairs[:, ROWS, COLUMNS]], axis=1)
    return jax.nn.relu(x @ w_pairs) @ w_top


@layout("user_fields cand_fields index w_pairs w_top", 0.59)
def dlrm_of_masked_pairs(user_fields, cand_fields, index, w_pairs, w_top):
    fields = jnp.concatenate([user_fields[index], cand_fields], axis=1)
    pairs = fields @ fields.mT
    below = jnp.tril(jnp.ones_like(pairs, dtype=bool), -1)
    flat = jnp.where(below, pairs, jnp.zeros_like(pairs)).reshape(B, F * F)
    w = jnp.zeros((F * F, w_pairs.shape[1])).at[ROWS * F + COLUMNS].set(w_pairs[D:])
    x = jnp.concatenate([fields[:, 0], flat], axis=1)
    return jax.nn.relu(x @ jnp.concatenate([w_pairs[:D], w])) @ w_top


@layout("user_fields cand_fields index w_pairs w_top", 0.39)
def dlrm_of_alternating_fields(user_fields, cand_fields, index, w_pairs, w_top):
    users, parts = user_fields[index], []
    for n in range(F_CAND):
        parts += [users[:, 2 * n], users[:, 2 * n + 1], cand_fields[:, n]]
    fields = jnp.stack(parts, axis=1)
    pairs = jnp.einsum("bfd,bgd->bfg", fields, fields)
    x = jnp.concatenate([fields[:, 0], pairs[:, ROWS, COLUMNS]], axis=1)
    return jax.nn.relu(x @ w_pairs) @ w_top


@layout("user_fields cand_fields index w_pairs", 0.55)
def field_weighted_pairs(user_fields, cand_fields, index, w_pairs):
    fields = jnp.concatenate([user_fields[index], cand_fields], axis=1)
    return jnp.einsum("bfd,bgd,fg->b", fields, fields, w_pairs[:F, :F])


@layout("user_fields cand_fields index w_pairs", 0.71)
def field_weighted_pairs_by_a_sum(user_fields, cand_fields, index, w_pairs):
    users = user_fields[index]
    fields = jnp.concatenate([cand_fields[:, :2], users, cand_fields[:, 2:]], axis=1)
    pairs = jnp.einsum("bfd,bgd->bgf", fields, fields * 2)
    return (pairs * w_pairs[:F, :F][None]).sum(axis=(1, 2))


@layout("user_fields cand_fields index w_unit w_tower", 0.61)
def networks_of_single_fields(user_fields, cand_fields, index, w_unit, w_tower):
    """RankMixer."""
    x = jnp.concatenate([user_fields[index], cand_fields], axis=1)
    matrices = jnp.stack([w_unit[n : n + D, :D] for n in range(F)])
    return x + jax.nn.gelu(jnp.einsum("bfd,fdh->bfh", x, matrices)) @ w_tower[:, :D]


@layout("user cand index w_first", 0.77)
def negatives_in_the_batch(user, cand, index, w_first):
    """Two towers, without negatives of the same user."""
    towers = [jax.nn.relu(x @ w_first[:D]) @ w_first[D:].T for x in (user[index], cand)]
    user, item = (x / jnp.linalg.norm(x + 1e-3, axis=-1, keepdims=True) for x in towers)
    same = (index[:, None] == index[None]) & ~jnp.eye(B, dtype=bool)
    logits = jnp.where(same, -1e9, user @ item.T / 0.1)
    return jax.nn.logsumexp(logits, axis=-1) - jnp.diagonal(logits)


# Other spellings of a lookup.


def _first(users, cand, w_first):
    return jax.nn.relu(jnp.concatenate([users, cand], axis=1) @ w_first)


@layout("user cand index w_first", 0.52)
def one_hot(user, cand, index, w_first):
    return _first(jax.nn.one_hot(index, U) @ user, cand, w_first)


@layout("user cand index w_first", 0.44)
def filled(user, cand, index, w_first):
    return _first(jnp.take(user, index, axis=0, mode="fill", fill_value=0), cand, w_first)


def _first_of(copied):
    return lambda one, cand, w_first: _first(copied(one), cand, w_first)


#: Spellings of one user's row for every candidate: the argument, and its copies.
_COPIES = {
    "times_ones": ("one", lambda x: x * np.ones((B, 1), np.float32)),
    "looked_up_by_zeros": ("user", lambda x: x[jnp.zeros(B, jnp.int32)]),
    "stacked_copies": ("lone", lambda x: jnp.stack([x] * B)),
    "concatenated_copies": ("one", lambda x: jnp.concatenate([x] * B)),
}
for _name, (_one, _copied) in _COPIES.items():
    layout(f"{_one} cand w_first", 0.47, name=_name)(_first_of(_copied))


@layout("lone cand w_first w_top", 0.47)
def mapped_over_candidates(lone, cand, w_first, w_top):
    def score(cand):
        return jnp.tanh(cand @ w_first[D:]) @ w_top + jnp.tanh(lone @ w_first[:D]) @ w_top

    return lax.map(score, cand)


@layout("user cand index w_first w_out", 0.43)
def concatenated_in_a_map_over_indices(user, cand, index, w_first, w_out):
    def score(one):
        cand, n = one
        return jax.nn.relu(w_first.T @ jnp.concatenate([user[n], cand])) @ w_out

    return lax.map(score, (cand, index))


# Grids of users and items.


@layout("people items w_first w_out", 0.89)
def grid_by_nested_vmap(people, items, w_first, w_out):
    def score(user, item):
        x = jnp.concatenate([user, item])
        return lax.cond(item[0] > 0, lambda: (jax.nn.relu(x @ w_first) @ w_out)[0], lambda: 0.0)

    return jax.vmap(lambda u: jax.vmap(lambda i: score(u, i))(items))(people)


# Rules that were missing.


@layout("user bounds buckets index w_tower", 0.89)
def searchsorted(user, bounds, buckets, index, w_tower):
    return buckets[jnp.searchsorted(bounds, user[index][:, 0])] @ w_tower


@layout("requests user to_request index w_tower", 0.93)
def rows_of_requests_beside_rows_of_users(requests, user, to_request, index, w_tower):
    request = requests[to_request][index]
    weights = jnp.einsum("bfd,bd->bf", request, user[index])
    return jax.nn.relu((request * weights[..., None]).sum(1) @ w_tower)


@layout("history index kernel", 0.93)
def convolution_over_the_history(history, index, kernel):
    return lax.conv_general_dilated(
        history[index], kernel, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
    )


# Recurrences, whose first state is equal for all candidates.


def _gru(history, start, w_state):
    def cell(h, x):
        w, u = w_state[:D], w_state[D:]
        gates = jax.nn.sigmoid(x @ w[:, : 2 * D] + h @ u[:, : 2 * D])
        update, reset = jnp.split(gates, 2, axis=-1)
        new = jnp.tanh(x @ w[:, 2 * D :] + (reset * h) @ u[:, 2 * D :])
        h = update * h + (1 - update) * new
        return h, h

    return lax.scan(cell, start, history.swapaxes(0, 1))


@layout("history index w_state", 0.93)
def gru(history, index, w_state):
    return _gru(history[index], jnp.zeros((B, D)), w_state)[0]


@layout("history index w_state", 0.93)
def gru_by_vmap(history, index, w_state):
    def of_one(history):
        return _gru(history[None], jnp.zeros((1, D)), w_state)[0][0]

    return jax.vmap(of_one)(history[index])


@layout("history kept index w_state", 0.93)
def lstm_with_padding(history, kept, index, w_state):
    def step(carry, now):
        (h, c), (x, m) = carry, now
        z = x @ w_state[:D] + h @ w_state[D:]
        new = c * jax.nn.sigmoid(z[:, :D]) + jnp.tanh(z[:, D : 2 * D])
        out, m = jnp.tanh(new) * jax.nn.sigmoid(z[:, 2 * D :]), m[:, None]
        return (jnp.where(m, out, h), jnp.where(m, new, c)), None

    start = jnp.zeros((B, D)), jnp.zeros((B, D))
    return lax.scan(step, start, (history[index].swapaxes(0, 1), kept[index].T))[0][0]


def _rnn(history, w, loop):
    def step(t, h):
        return jnp.tanh((lax.dynamic_index_in_dim(history, t, 1, keepdims=False) + h) @ w[:D, :D])

    start = jnp.zeros(history[:, 0].shape)
    if loop == "fori":
        return lax.fori_loop(0, S, step, start)
    return lax.while_loop(lambda c: c[0] < S, lambda c: (c[0] + 1, step(*c)), (0, start))[1]


@layout("history index w_state", 0.93)
def rnn_in_a_fori_loop(history, index, w_state):
    return _rnn(history[index], w_state, "fori")


@layout("history index w_state", 0.93)
def rnn_in_a_while_loop(history, index, w_state):
    return _rnn(history[index], w_state, "while")


@layout("history cand index w_state", 0.93)
def candidates_in_a_while_loop(history, cand, index, w_state):
    last = history[index, -1]
    step = lambda c: (c[0] + 1, jnp.tanh(last @ w_state[:D, :D] + c[1]))  # noqa: E731
    return lax.while_loop(lambda c: c[0] < S, step, (0, cand))[1]


@layout("history cand index w_state", 0.93)
def gru_beside_a_count_of_candidates(history, cand, index, w_state):
    def step(carry, x):
        h, total = carry
        return (_gru(x[:, None], h, w_state)[0], total + cand), None

    start = jnp.zeros((B, D)), jnp.zeros((B, D))
    (h, total), _ = lax.scan(step, start, history[index].swapaxes(0, 1))
    return h + total / S


# One item of every history, at a position of the user.


@layout("history lengths index w_tower", 0.93)
def last_item_by_two_indices(history, lengths, index, w_tower):
    return history[index, lengths[index] - 1] @ w_tower


@layout("history lengths index w_tower", 0.93)
def last_item_taken_along_the_axis(history, lengths, index, w_tower):
    last = (lengths[index] - 1)[:, None, None]
    return jnp.take_along_axis(history[index], last, axis=1)[:, 0] @ w_tower


@layout("history bias index w_tower", 0.93)
def best_items(history, bias, index, w_tower):
    best = lax.top_k(bias[index], 3)[1][:, :, None]
    return jnp.take_along_axis(history[index], best, axis=1) @ w_tower


@layout("user bounds index w_tower", 0.93)
def interpolated_features(user, bounds, index, w_tower):
    return jnp.interp(user[index], bounds, jnp.cos(bounds)) @ w_tower


# Updates at positions.


@layout("user_ids index w_bag", 0.93)
def bag_of_ids(user_ids, index, w_bag):
    bag = jnp.zeros((B, VOCABULARY)).at[jnp.arange(B)[:, None], user_ids[index]].add(1.0)
    return bag @ w_bag


@layout("user cand index w_tower", 0.81)
def column_set_to_the_candidates(user, cand, index, w_tower):
    return user[index].at[:, 0].set(cand[:, 0]) @ w_tower


@layout("history cand index w_tower", 0.84)
def candidate_put_in_a_buffer(history, cand, index, w_tower):
    buffer = jnp.zeros((B, S + 1, D)).at[:, :S].set(history[index])
    return lax.dynamic_update_slice(buffer, cand[:, None], (0, S, 0)) @ w_tower


# Constant positions of concatenated fields.


@layout("user_fields cand_fields index w_fields", 0.45)
def fields_chosen_by_constants(user_fields, cand_fields, index, w_fields):
    fields = jnp.concatenate([user_fields[index], cand_fields], axis=1)
    return fields[:, jnp.array([5, 0, 3, 8, 7, 6])].reshape(B, -1) @ w_fields[: 6 * D]


@layout("user_fields cand_fields index w_wide", 0.7)
def fields_padded(user_fields, cand_fields, index, w_wide):
    fields = jnp.concatenate([user_fields[index], cand_fields], axis=1)
    padded = jnp.pad(fields, ((0, 0), (1, 2), (0, 0)))
    return padded.reshape(B, -1) @ w_wide[: 12 * D]


# Windows and transforms over the history.


@layout("history index w_tower", 0.93)
def largest_in_windows(history, index, w_tower):
    x = lax.reduce_window(history[index], -jnp.inf, lax.max, (1, 3, 1), (1, 2, 1), "VALID")
    return x @ w_tower


# Loops over candidates, of which every iteration looks up its user.


@layout("user cand index w_tower w_top", 0.66)
def scanned_over_candidates(user, cand, index, w_tower, w_top):
    def score(total, one):
        cand, n = one
        total = total + jnp.tanh(user[n] @ w_tower) @ w_top + cand @ w_tower
        return total, total

    return lax.scan(score, jnp.zeros(w_top.shape[1]), (cand, index))[1]
