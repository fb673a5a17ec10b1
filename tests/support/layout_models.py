"""Small ranking models in the layouts that ranking teams write, each with its form by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from layout_table import F_CAND, F_USER, HIDDEN, B, D, F, U, layout

# Fields that are concatenated or stacked, flattened, and multiplied by weights.


def _fields_by_hand(user_fields, cand_fields, index, w_fields):
    users = user_fields.reshape(U, -1) @ w_fields[: F_USER * D]
    return jax.nn.relu(users[index] + cand_fields.reshape(B, -1) @ w_fields[F_USER * D :])


@layout("user_fields cand_fields index w_fields", _fields_by_hand)
def fields_concatenated_and_flattened(user_fields, cand_fields, index, w_fields):
    x = jnp.concatenate([user_fields[index], cand_fields], axis=1)
    return jax.nn.relu(x.reshape(B, -1) @ w_fields)


def _wide_by_hand(user_fields, cand_fields, index, w_wide):
    w = w_wide[: 2 * F_CAND * D].reshape(F_CAND, 2, D, HIDDEN)
    users = jnp.einsum("ufd,fdn->un", user_fields[:, :F_CAND], w[:, 0])
    return users[index] + jnp.einsum("bfd,fdn->bn", cand_fields, w[:, 1])


@layout("user_fields cand_fields index w_wide", _wide_by_hand)
def features_concatenated_by_field_and_flattened(user_fields, cand_fields, index, w_wide):
    x = jnp.concatenate([user_fields[index][:, :F_CAND], cand_fields], axis=2)
    return x.reshape(B, -1) @ w_wide[: 2 * F_CAND * D]


def _towers_by_hand(user_fields, cand_fields, index, w_tower):
    users = jax.nn.relu(user_fields @ w_tower)[index]
    return jnp.concatenate([users, jax.nn.relu(cand_fields @ w_tower)], axis=1)


@layout("user_fields cand_fields index w_tower", _towers_by_hand)
def batch_and_positions_merged(user_fields, cand_fields, index, w_tower):
    x = jnp.concatenate([user_fields[index], cand_fields], axis=1)
    return jax.nn.relu(x.reshape(B * F, D) @ w_tower).reshape(B, F, -1)


# Ids that are concatenated, stacked or flattened before the table.


def _ids_by_hand(user_ids, cand_ids, index, table, w_fields):
    return _fields_by_hand(table[user_ids], table[cand_ids], index, w_fields)


@layout("user_ids cand_ids index table w_fields", _ids_by_hand)
def ids_concatenated(user_ids, cand_ids, index, table, w_fields):
    ids = jnp.concatenate([user_ids[index], cand_ids], axis=1)
    return jax.nn.relu(jnp.take(table, ids, axis=0).reshape(B, -1) @ w_fields)


@layout("user_ids cand_ids index table w_fields", _ids_by_hand)
def ids_flattened(user_ids, cand_ids, index, table, w_fields):
    ids = jnp.concatenate([user_ids[index], cand_ids], axis=1)
    rows = jnp.take(table, ids.reshape(-1), axis=0)
    return jax.nn.relu(rows.reshape(B, F * D) @ w_fields)


@layout("user_ids cand_ids index table w_fields", _ids_by_hand)
def ids_of_users_flattened(user_ids, cand_ids, index, table, w_fields):
    users = table[user_ids[index].reshape(-1)].reshape(B, -1)
    cands = table[cand_ids.reshape(-1)].reshape(B, -1)
    return jax.nn.relu(jnp.concatenate([users, cands], axis=1) @ w_fields)


# Compression of the embeddings of users and candidates.


def _compressed(users, cand_fields, compress):
    return jax.nn.relu(users + compress[:, F_USER:] @ cand_fields)


def _compression_by_hand(user_fields, cand_fields, index, compress):
    return _compressed((compress[:, :F_USER] @ user_fields)[index], cand_fields, compress)


_compression = functools.partial(layout, never=((B, F_USER, D),), op="linear_compression")


@_compression("user_fields cand_fields index compress", _compression_by_hand)
def compression_of_concatenated_fields(user_fields, cand_fields, index, compress):
    x = jnp.concatenate([user_fields[index], cand_fields], axis=1)
    return jax.nn.relu(jnp.einsum("bkn,mk->bmn", x, compress))


def _repeated_by_hand(user_fields, cand_fields, counts, compress):
    index = jnp.repeat(jnp.arange(U), counts, total_repeat_length=B)
    return _compression_by_hand(user_fields, cand_fields, index, compress)


@_compression("user_fields cand_fields counts compress", _repeated_by_hand)
def compression_of_repeated_users(user_fields, cand_fields, counts, compress):
    users = jnp.repeat(user_fields, counts, axis=0, total_repeat_length=B)
    return jax.nn.relu(compress @ jnp.concatenate([users, cand_fields], axis=1))


@_compression(
    "user_fields cand_fields compress",
    lambda user_fields, *rest: _compressed(rest[1][:, :F_USER] @ user_fields[:1], *rest),
)
def compression_of_one_user(user_fields, cand_fields, compress):
    users = jnp.broadcast_to(user_fields[:1], (B, F_USER, D))
    return jax.nn.relu(compress @ jnp.concatenate([users, cand_fields], axis=1))


def _three_by_hand(requests, user_fields, cand_fields, to_request, index, compress_three):
    of_requests, compress = compress_three[:, :5], compress_three[:, 5:]
    users = (of_requests @ requests)[to_request] + compress[:, :F_USER] @ user_fields
    return _compressed(users[index], cand_fields, compress)


@layout(
    "requests user_fields cand_fields to_request index compress_three",
    _three_by_hand,
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


def _dlrm_pairs():
    return np.tril_indices(F, -1)


def _dlrm(user_fields, cand_fields, index, w_pairs, w_top):
    fields = jnp.concatenate([user_fields[index], cand_fields], axis=1)
    pairs = jnp.einsum("bfd,bgd->bfg", fields, fields)
    rows, columns = _dlrm_pairs()
    x = jnp.concatenate([fields[:, 0], pairs[:, rows, columns]], axis=1)
    return jax.nn.relu(x @ w_pairs) @ w_top


def _dlrm_by_hand(user_fields, cand_fields, index, w_pairs, w_top):
    rows, columns = np.tril_indices(F_USER, -1)
    own = jnp.einsum("ufd,ugd->ufg", user_fields, user_fields)[:, rows, columns]
    users = jnp.concatenate([user_fields[:, 0], own], 1) @ w_pairs[: D + len(rows)]
    crossed = jnp.einsum("bfd,bgd->bfg", cand_fields, user_fields[index])
    among = jnp.einsum("bfd,bgd->bfg", cand_fields, cand_fields)
    rest = []
    for f in range(F_CAND):
        rest += [crossed[:, f], among[:, f, :f]]
    x = users[index] + jnp.concatenate(rest, axis=1) @ w_pairs[D + len(rows) :]
    return jax.nn.relu(x) @ w_top


layout("user_fields cand_fields index w_pairs w_top", _dlrm_by_hand, 0.75, name="dlrm")(_dlrm)


@layout("user_fields cand_fields index w_pairs w_top", _dlrm_by_hand, 0.75)
def dlrm_of_stacked_fields(user_fields, cand_fields, index, w_pairs, w_top):
    users = user_fields[index]
    fields = [users[:, n] for n in range(F_USER)] + [cand_fields[:, n] for n in range(F_CAND)]
    stacked = jnp.stack(fields, axis=1)
    pairs = stacked @ stacked.transpose(0, 2, 1)
    rows, columns = _dlrm_pairs()
    flat = pairs.reshape(B, F * F)[:, rows * F + columns]
    return jax.nn.relu(jnp.concatenate([fields[0], flat], axis=1) @ w_pairs) @ w_top


@layout("user_fields cand_fields index w_pairs w_top", _dlrm_by_hand, 0.75)
def dlrm_of_masked_pairs(user_fields, cand_fields, index, w_pairs, w_top):
    fields = jnp.concatenate([user_fields[index], cand_fields], axis=1)
    pairs = fields @ fields.mT
    below = jnp.tril(jnp.ones_like(pairs, dtype=bool), -1)
    flat = jnp.where(below, pairs, jnp.zeros_like(pairs)).reshape(B, F * F)
    rows, columns = _dlrm_pairs()
    w = jnp.zeros((F * F, w_pairs.shape[1])).at[rows * F + columns].set(w_pairs[D:])
    x = jnp.concatenate([fields[:, 0], flat], axis=1)
    return jax.nn.relu(x @ jnp.concatenate([w_pairs[:D], w])) @ w_top


@layout("user_fields cand_fields index w_pairs w_top", lambda *args: _dlrm_alternating(*args), 0.75)
def dlrm_of_alternating_fields(user_fields, cand_fields, index, w_pairs, w_top):
    users, parts = user_fields[index], []
    for n in range(F_CAND):
        parts += [users[:, 2 * n : 2 * n + 2], cand_fields[:, n : n + 1]]
    fields = jnp.concatenate(parts, axis=1)
    pairs = jnp.einsum("bfd,bgd->bfg", fields, fields)
    rows, columns = _dlrm_pairs()
    x = jnp.concatenate([fields[:, 0], pairs[:, rows, columns]], axis=1)
    return jax.nn.relu(x @ w_pairs) @ w_top


def _dlrm_alternating(user_fields, cand_fields, index, w_pairs, w_top):
    of_user = np.array([n % 3 != 2 for n in range(F)])
    rows, columns = _dlrm_pairs()
    own = of_user[rows] & of_user[columns]
    at = np.cumsum(of_user) - 1
    among = jnp.einsum("ufd,ugd->ufg", user_fields, user_fields)
    w = w_pairs[D:]
    first = jnp.concatenate([user_fields[:, 0], among[:, at[rows[own]], at[columns[own]]]], 1)
    users = first @ jnp.concatenate([w_pairs[:D], w[own]])
    cands = np.cumsum(~of_user) - 1
    whole = jnp.concatenate([user_fields[index], cand_fields], axis=1)
    place = np.where(of_user, at, F_USER + cands)
    crossed = jnp.einsum("bfd,bgd->bfg", cand_fields, whole)
    swapped = of_user[rows]
    mixed_rows = np.where(swapped, columns, rows)[~own]
    mixed_columns = np.where(swapped, rows, columns)[~own]
    rest = crossed[:, cands[mixed_rows], place[mixed_columns]] @ w[~own]
    return jax.nn.relu(users[index] + rest) @ w_top


# Other spellings of a lookup.


def _one_hot_by_hand(user, cand, index, w_first):
    return jax.nn.relu((user @ w_first[:D])[index] + cand @ w_first[D:])


def _first(users, cand, w_first):
    return jax.nn.relu(jnp.concatenate([users, cand], axis=1) @ w_first)


@layout("user cand index w_first", _one_hot_by_hand)
def one_hot(user, cand, index, w_first):
    return _first(jax.nn.one_hot(index, U) @ user, cand, w_first)


@layout("user cand index w_first", _one_hot_by_hand)
def filled(user, cand, index, w_first):
    return _first(jnp.take(user, index, axis=0, mode="fill", fill_value=0), cand, w_first)


@layout("user cand index w_first", _one_hot_by_hand)
def filled_with_nan(user, cand, index, w_first):
    return _first(jnp.take(user, index, axis=0), cand, w_first)


def _one_by_hand(one, cand, w_first):
    return jax.nn.relu(one.reshape(-1, D)[:1] @ w_first[:D] + cand @ w_first[D:])


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
    layout(f"{_one} cand w_first", _one_by_hand, name=_name)(_first_of(_copied))


def _mapped_by_hand(lone, cand, w_first, w_top):
    users = jnp.tanh(lone @ w_first[:D]) @ w_top
    return jnp.tanh(cand @ w_first[D:]) @ w_top + users[None]


@layout("lone cand w_first w_top", _mapped_by_hand)
def mapped_over_candidates(lone, cand, w_first, w_top):
    def score(cand):
        return jnp.tanh(cand @ w_first[D:]) @ w_top + jnp.tanh(lone @ w_first[:D]) @ w_top

    return lax.map(score, cand)


# Grids of users and items.


def _grid_by_hand(people, items, w_first, w_out):
    x = (people @ w_first[:D])[:, None] + (items @ w_first[D:])[None]
    return (jax.nn.relu(x) @ w_out)[..., 0]


@layout("people items w_first w_out", _grid_by_hand)
def grid_by_nested_vmap(people, items, w_first, w_out):
    def score(user, item):
        return (jax.nn.relu(jnp.concatenate([user, item]) @ w_first) @ w_out)[0]

    return jax.vmap(lambda u: jax.vmap(lambda i: score(u, i))(items))(people)


@layout("people items w_first w_out", _grid_by_hand)
def grid_by_repeat_and_tile(people, items, w_first, w_out):
    m, n = people.shape[0], items.shape[0]
    x = [jnp.repeat(people, n, axis=0), jnp.tile(items, (m, 1))]
    return (jax.nn.relu(jnp.concatenate(x, axis=-1) @ w_first) @ w_out).reshape(m, n)


# Rules that were missing.


def _bucket_by_hand(user, bounds, buckets, index, w_tower):
    return (buckets[jnp.searchsorted(bounds, user[:, 0])] @ w_tower)[index]


@layout("user bounds buckets index w_tower", _bucket_by_hand)
def searchsorted(user, bounds, buckets, index, w_tower):
    return buckets[jnp.searchsorted(bounds, user[index][:, 0])] @ w_tower


@layout("user bounds buckets index w_tower", _bucket_by_hand)
def digitized(user, bounds, buckets, index, w_tower):
    return buckets[jnp.digitize(user[index][:, 0], bounds, right=True)] @ w_tower


def _conv(x, kernel):
    return lax.conv_general_dilated(
        x, kernel, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
    )


@layout("history index kernel", lambda history, index, kernel: _conv(history, kernel)[index])
def convolution_over_the_history(history, index, kernel):
    return _conv(history[index], kernel)


@layout("user index w_tower", lambda user, index, w_tower: (user @ w_tower)[index])
def sharding_constraint(user, index, w_tower):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    return lax.with_sharding_constraint(user[index], sharding) @ w_tower
