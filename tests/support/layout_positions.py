"""Layouts of recurrences over a history, of lookups and updates at positions, and of windows."""

import jax
import jax.numpy as jnp
from jax import lax
from layout_table import VOCABULARY, B, D, S, layout

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
