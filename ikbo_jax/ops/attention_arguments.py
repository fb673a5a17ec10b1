"""Argument checks of broadcast attention; errors quote both conflicting values."""

from __future__ import annotations

import jax

from ikbo_jax.ops import arguments
from ikbo_jax.ops.attention_vmap import Arrays


def check(arrays: Arrays) -> None:
    """Raises ValueError, quoting both conflicting values, unless the arrays agree."""
    query, key, value, cand_to_user, lengths, ranges = arrays[:6]
    arguments.check_attention("attention", (query, key, value), "B T N H", "U S K H", "S")
    batch, users = query.shape[0], key.shape[0]
    arguments.check_index("cand_to_user", cand_to_user, "query", "B", batch)
    if lengths is not None:
        arguments.check_index("key_value_seq_lengths", lengths, "key", "U", users)
    if ranges is not None:
        arguments.check_int32("key_value_ranges", ranges)
        if ranges.shape != (batch, 2):
            raise ValueError(
                f"key_value_ranges has shape {ranges.shape} but query has B={batch}, so it must "
                f"have shape {(batch, 2)}"
            )
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
        arguments.check_sizes("query", query, name, array, "B  H")
        arguments.check_sizes("key", key, name, array, "  K ")
    arguments.check_sizes("self_key", self_key, "self_value", self_value, (" ", "T_self", " ", " "))
