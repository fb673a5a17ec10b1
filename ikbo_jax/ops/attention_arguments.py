"""Argument checks of broadcast attention; errors quote both conflicting values."""

from typing import Any

import jax

from ikbo_jax.ops import arguments
from ikbo_jax.ops.attention_vmap import Arrays


def check(arrays: Arrays) -> None:
    """Raises ValueError, quoting both conflicting values, unless the arrays agree."""
    query, key, value, cand_to_user, lengths, ranges = arrays[:6]
    operands = query, key, value
    if arrays.page_table is None:
        arguments.check_attention("attention", operands, "B T N H", "U S K H", "S")
        users, of_users = key.shape[0], "key"
    else:
        arguments.check_attention("attention", operands, "B T N H", "pages page K H", "page")
        users, of_users = _users_of_pages(arrays), "page_table"
    batch = query.shape[0]
    arguments.check_index("cand_to_user", cand_to_user, "query", "B", batch)
    if lengths is not None:
        arguments.check_index("key_value_seq_lengths", lengths, of_users, "U", users)
    if ranges is not None:
        arguments.check_int32("key_value_ranges", ranges)
        if ranges.shape != (batch, 2):
            raise ValueError(
                f"key_value_ranges has shape {ranges.shape} but query has B={batch}, so it must "
                f"have shape {(batch, 2)}"
            )
    if arrays.bias is not None:
        _check_bias(arrays.bias, arrays)
    if batch and not users:
        shape = (key if arrays.page_table is None else arrays.page_table).shape
        raise ValueError(f"{of_users} has no rows, shape {shape}, but query has B={batch}")


def _check_bias(bias: Any, arrays: Arrays) -> None:
    arguments.check_array("bias", bias, "[U, N or 1, T or 1, S]")
    (_, q_len, q_heads, _), (users, keys) = arrays.query.shape, arrays.keys
    wanted = users, q_heads, q_len, keys
    pairs = enumerate(zip(bias.shape, wanted, strict=True))
    if not all(a == b or (a == 1 and d in (1, 2)) for d, (a, b) in pairs):
        raise ValueError(
            f"bias has shape {bias.shape} but query and key have [U, N, T, S] = {wanted}; N and T "
            "may be 1 in the bias"
        )
    if arrays.page_table is not None:
        raise NotImplementedError("a bias and a page_table do not go together")


def _users_of_pages(arrays: Arrays) -> int:
    """Counts the users; raises ValueError unless the page table fits the pages."""
    table: Any = arrays.page_table
    arguments.check_int32("page_table", table)
    if table.ndim != 2:
        raise ValueError(f"page_table must have shape [U, most], but has shape {table.shape}")
    if arrays.lengths is None:
        raise ValueError("page_table needs key_value_seq_lengths, but they are None")
    if table.size and not arrays.key.shape[0]:
        raise ValueError(f"page_table has shape {table.shape} but key has no pages")
    users: int = table.shape[0]
    return users


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
