"""Argument checks of broadcast attention; errors quote both conflicting values."""

from __future__ import annotations

import jax

from ikbo_jax.ops import arguments


def check(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cand_to_user: jax.Array,
    lengths: jax.Array | None,
) -> None:
    """Raises ValueError, quoting both conflicting values, unless query, key and index agree."""
    arguments.check_array("query", query, "[B, T, N, H]")
    for name, array in (("key", key), ("value", value)):
        arguments.check_array(name, array, "[U, S, K, H]")
        if array.dtype != query.dtype:
            raise ValueError(f"query is {query.dtype} but {name} is {array.dtype}")
    check_sizes("key", key, "value", value, "USKH")
    check_sizes("query", query, "key", key, "   H")
    (batch, _, q_heads, width), (users, _, kv_heads, _) = query.shape, key.shape
    if width < 1:
        raise ValueError(
            f"query must have a head width H of at least 1, but has shape {query.shape}"
        )
    if kv_heads < 1:
        raise ValueError(f"key must have at least 1 head, but has shape {key.shape}")
    arguments.check_concrete(
        "attention", {"S": key.shape[1], "N": q_heads, "K": kv_heads, "H": width}
    )
    if q_heads % kv_heads:
        raise ValueError(
            f"query has N={q_heads} heads, which is not a multiple of key's K={kv_heads}"
        )
    arguments.check_index("cand_to_user", cand_to_user, "query", "B", batch)
    if lengths is not None:
        arguments.check_index("key_value_seq_lengths", lengths, "key", "U", users)
    if batch and not users:
        raise ValueError(f"key has no rows, shape {key.shape}, but query has B={batch}")


def check_self_tokens(
    query: jax.Array, key: jax.Array, self_key: jax.Array | None, self_value: jax.Array | None
) -> None:
    """Raises ValueError, quoting both conflicting values, unless self tokens fit query and key."""
    if (self_key is None) != (self_value is None):
        raise ValueError(
            "self_key and self_value go together, but self_key is "
            f"{arguments.describe(self_key)} and self_value is {arguments.describe(self_value)}"
        )
    if self_key is None or self_value is None:
        return
    for name, array in (("self_key", self_key), ("self_value", self_value)):
        arguments.check_array(name, array, "[B, T_self, K, H]")
        if array.dtype != query.dtype:
            raise ValueError(f"query is {query.dtype} but {name} is {array.dtype}")
        check_sizes("query", query, name, array, "B  H")
        check_sizes("key", key, name, array, "  K ")
    check_sizes("self_key", self_key, "self_value", self_value, (" ", "T_self", " ", " "))


def check_sizes(
    a_name: str, a: jax.Array, b_name: str, b: jax.Array, axes: str | tuple[str, ...]
) -> None:
    """Raises ValueError unless `a` and `b` have equal sizes on every axis that has a name."""
    for axis, a_size, b_size in zip(axes, a.shape, b.shape, strict=True):
        if axis != " " and a_size != b_size:
            raise ValueError(f"{a_name} has {axis}={a_size} but {b_name} has {axis}={b_size}")
