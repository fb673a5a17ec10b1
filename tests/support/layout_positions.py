"""Recurrences over a history, lookups and updates at positions, and windows, each by hand, too."""

import jax
import jax.numpy as jnp
from jax import lax
from layout_table import F_CAND, F_USER, VOCABULARY, B, D, S, U, layout

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


def _gru_by_hand(history, index, w_state):
    return _gru(history, jnp.zeros((U, D)), w_state)[0][index]


@layout("history index w_state", _gru_by_hand)
def gru(history, index, w_state):
    return _gru(history[index], jnp.zeros((B, D)), w_state)[0]


@layout("history index w_state", _gru_by_hand)
def gru_by_vmap(history, index, w_state):
    def of_one(history):
        return _gru(history[None], jnp.zeros((1, D)), w_state)[0][0]

    return jax.vmap(of_one)(history[index])


def _masked_lstm(history, kept, w_state):
    rows = len(history)

    def cell(carry, now):
        (h, c), (x, m) = carry, now
        z = x @ w_state[:D] + h @ w_state[D:]
        new = c * jax.nn.sigmoid(z[:, :D]) + jnp.tanh(z[:, D : 2 * D])
        m = m[:, None]
        return (
            jnp.where(m, jnp.tanh(new) * jax.nn.sigmoid(z[:, 2 * D :]), h),
            jnp.where(m, new, c),
        )

    def step(carry, now):
        return cell(carry, now), None

    start = jnp.zeros((rows, D)), jnp.zeros((rows, D))
    return lax.scan(step, start, (history.swapaxes(0, 1), kept.T))[0][0]


@layout("history kept index w_state", lambda h, k, index, w: _masked_lstm(h, k, w)[index])
def lstm_with_padding(history, kept, index, w_state):
    return _masked_lstm(history[index], kept[index], w_state)


def _rnn(history, w, loop):
    def step(t, h):
        return jnp.tanh((lax.dynamic_index_in_dim(history, t, 1, keepdims=False) + h) @ w[:D, :D])

    start = jnp.zeros(history[:, 0].shape)
    if loop == "fori":
        return lax.fori_loop(0, S, step, start)
    return lax.while_loop(lambda c: c[0] < S, lambda c: (c[0] + 1, step(*c)), (0, start))[1]


@layout("history index w_state", lambda history, index, w: _rnn(history, w, "fori")[index])
def rnn_in_a_fori_loop(history, index, w_state):
    return _rnn(history[index], w_state, "fori")


@layout("history index w_state", lambda history, index, w: _rnn(history, w, "while")[index])
def rnn_in_a_while_loop(history, index, w_state):
    return _rnn(history[index], w_state, "while")


def _two_by_hand(history, cand, index, w_state):
    return _gru_by_hand(history, index, w_state) + cand


@layout("history cand index w_state", _two_by_hand)
def gru_beside_a_count_of_candidates(history, cand, index, w_state):
    def step(carry, x):
        h, total = carry
        return (_gru(x[:, None], h, w_state)[0], total + cand), None

    start = jnp.zeros((B, D)), jnp.zeros((B, D))
    (h, total), _ = lax.scan(step, start, history[index].swapaxes(0, 1))
    return h + total / S


# One item of every history, at a position of the user.


def _last_by_hand(history, lengths, index, w_tower):
    return (history[jnp.arange(U), lengths - 1] @ w_tower)[index]


@layout("history lengths index w_tower", _last_by_hand)
def last_item_by_two_indices(history, lengths, index, w_tower):
    return history[index, lengths[index] - 1] @ w_tower


@layout("history lengths index w_tower", _last_by_hand)
def last_item_taken_along_the_axis(history, lengths, index, w_tower):
    last = (lengths[index] - 1)[:, None, None]
    return jnp.take_along_axis(history[index], last, axis=1)[:, 0] @ w_tower


def _top_by_hand(history, bias, index, w_tower):
    best = lax.top_k(bias, 3)[1][:, :, None]
    return (jnp.take_along_axis(history, best, axis=1) @ w_tower)[index]


@layout("history bias index w_tower", _top_by_hand)
def best_items(history, bias, index, w_tower):
    best = lax.top_k(bias[index], 3)[1][:, :, None]
    return jnp.take_along_axis(history[index], best, axis=1) @ w_tower


def _sorted_by_hand(history, bias, index, w_tower):
    order = jnp.argsort(bias, axis=1)[:, :, None]
    return (jnp.take_along_axis(history, order, axis=1) @ w_tower)[index]


@layout("history bias index w_tower", _sorted_by_hand)
def sorted_items(history, bias, index, w_tower):
    order = jnp.argsort(bias[index], axis=1)
    return history[index][jnp.arange(B)[:, None], order] @ w_tower


def _digits_by_hand(user, bounds, buckets, index, w_digits):
    return (buckets[jnp.digitize(user, bounds)].reshape(U, -1) @ w_digits)[index]


@layout("user bounds buckets index w_digits", _digits_by_hand)
def digitized_features(user, bounds, buckets, index, w_digits):
    return buckets[jnp.digitize(user[index], bounds)].reshape(B, -1) @ w_digits


@layout(
    "user bounds index w_tower", lambda u, b, index, w: (jnp.interp(u, b, jnp.cos(b)) @ w)[index]
)
def interpolated_features(user, bounds, index, w_tower):
    return jnp.interp(user[index], bounds, jnp.cos(bounds)) @ w_tower


# Updates at positions.


def _bag(ids, rows):
    return jnp.zeros((rows, VOCABULARY)).at[jnp.arange(rows)[:, None], ids].add(1.0)


@layout("user_ids index w_bag", lambda ids, index, w: (_bag(ids, U) @ w)[index])
def bag_of_ids(user_ids, index, w_bag):
    return _bag(user_ids[index], B) @ w_bag


def _column_by_hand(user, cand, index, w_tower):
    return (user[:, 1:] @ w_tower[1:])[index] + cand[:, :1] @ w_tower[:1]


@layout("user cand index w_tower", _column_by_hand)
def column_set_to_the_candidates(user, cand, index, w_tower):
    return user[index].at[:, 0].set(cand[:, 0]) @ w_tower


def _appended_by_hand(history, cand, index, w_tower):
    return jnp.concatenate([(history @ w_tower)[index], (cand @ w_tower)[:, None]], axis=1)


@layout("history cand index w_tower", _appended_by_hand)
def candidate_put_in_a_buffer(history, cand, index, w_tower):
    buffer = jnp.zeros((B, S + 1, D)).at[:, :S].set(history[index])
    return lax.dynamic_update_slice(buffer, cand[:, None], (0, S, 0)) @ w_tower


# Constant positions of concatenated fields.


def _chosen_by_hand(user_fields, cand_fields, index, w_fields):
    users = user_fields[:, jnp.array([5, 0, 3])].reshape(U, -1) @ w_fields[: 3 * D]
    return users[index] + cand_fields[:, ::-1].reshape(B, -1) @ w_fields[3 * D : 6 * D]


@layout("user_fields cand_fields index w_fields", _chosen_by_hand)
def fields_chosen_by_constants(user_fields, cand_fields, index, w_fields):
    fields = jnp.concatenate([user_fields[index], cand_fields], axis=1)
    return fields[:, jnp.array([5, 0, 3, 8, 7, 6])].reshape(B, -1) @ w_fields[: 6 * D]


def _reversed_by_hand(user_fields, cand_fields, index, w_fields):
    users = user_fields[:, ::-1].reshape(U, -1) @ w_fields[F_CAND * D :]
    return users[index] + cand_fields[:, ::-1].reshape(B, -1) @ w_fields[: F_CAND * D]


@layout("user_fields cand_fields index w_fields", _reversed_by_hand)
def fields_reversed(user_fields, cand_fields, index, w_fields):
    fields = jnp.concatenate([user_fields[index], cand_fields], axis=1)
    return jnp.flip(fields, axis=1).reshape(B, -1) @ w_fields


def _padded_by_hand(user_fields, cand_fields, index, w_wide):
    users = user_fields.reshape(U, -1) @ w_wide[D : (1 + F_USER) * D]
    cands = cand_fields.reshape(B, -1) @ w_wide[(1 + F_USER) * D : (1 + F_USER + F_CAND) * D]
    return users[index] + cands


@layout("user_fields cand_fields index w_wide", _padded_by_hand)
def fields_padded(user_fields, cand_fields, index, w_wide):
    fields = jnp.concatenate([user_fields[index], cand_fields], axis=1)
    padded = jnp.pad(fields, ((0, 0), (1, 2), (0, 0)))
    return padded.reshape(B, -1) @ w_wide[: 12 * D]


# Windows and transforms over the history.


def _pooled(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 1), (1, 2, 1), "VALID")


@layout("history index w_tower", lambda h, index, w: (_pooled(h) @ w)[index])
def largest_in_windows(history, index, w_tower):
    return _pooled(history[index]) @ w_tower


def _filtered(x):
    return jnp.fft.irfft(jnp.fft.rfft(x, axis=1) * 2, n=S, axis=1)


@layout("history index w_tower", lambda h, index, w: (_filtered(h) @ w)[index])
def filtered_history(history, index, w_tower):
    return _filtered(history[index]) @ w_tower


# Loops over candidates, of which every iteration looks up its user.


def _scores_by_hand(user, cand, index, w_tower, w_top):
    return (jnp.tanh(user @ w_tower) @ w_top)[index] + cand @ w_tower


@layout("user cand index w_tower w_top", _scores_by_hand)
def mapped_over_candidates_and_indices(user, cand, index, w_tower, w_top):
    def score(one):
        cand, n = one
        return jnp.tanh(user[n] @ w_tower) @ w_top + cand @ w_tower

    return lax.map(score, (cand, index))


def _carried_by_hand(user, cand, index, w_tower, w_top):
    rows = _scores_by_hand(user, cand, index, w_tower, w_top)
    return jnp.cumsum(rows, axis=0)


@layout("user cand index w_tower w_top", _carried_by_hand)
def scanned_over_candidates(user, cand, index, w_tower, w_top):
    def score(total, one):
        cand, n = one
        total = total + jnp.tanh(user[n] @ w_tower) @ w_top + cand @ w_tower
        return total, total

    return lax.scan(score, jnp.zeros(w_top.shape[1]), (cand, index))[1]
