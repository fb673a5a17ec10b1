"""Small ranking models in the layouts that ranking teams write."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from layout_table import F_CAND, F_USER, B, D, F, U, layout

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


@layout("user_fields cand_fields index w_pairs w_top", 0.49)
def dlrm_of_stacked_fields(user_fields, cand_fields, index, w_pairs, w_top):
    users = user_fields[index]
    fields = [users[:, n] for n in range(F_USER)] + [cand_fields[:, n] for n in range(F_CAND)]
    stacked = jnp.stack(fields, axis=1)
    pairs = stacked @ stacked.transpose(0, 2, 1)
    flat = pairs.reshape(B, F * F)[:, ROWS * F + COLUMNS]
    return jax.nn.relu(jnp.concatenate([fields[0], flat], axis=1) @ w_pairs) @ w_top


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
        parts += [users[:, 2 * n : 2 * n + 2], cand_fields[:, n : n + 1]]
    fields = jnp.concatenate(parts, axis=1)
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
        return (jax.nn.relu(jnp.concatenate([user, item]) @ w_first) @ w_out)[0]

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
