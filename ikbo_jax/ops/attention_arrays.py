"""The arrays of broadcast attention: their checks, and how several problems' become one problem's.

Errors quote both conflicting values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ikbo_jax.ops import arguments
from ikbo_jax.ops.stacking import concatenate, own_index

#: Names of the dimensions of the query and of lse, and those that divide over devices.
QUERY, LSE = "b t (k g) h", "b t (k g)"
SPLIT = {"b": "candidates", "t": "queries", "k": "heads", "g": "heads"}


class Arrays(NamedTuple):
    """The array arguments of attention; `self_key` and `self_value` if a kernel takes them.

    With a `page_table`, key and value are pages. `bias`: [U, N or 1, T or 1, S].
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    cand_to_user: jax.Array
    lengths: jax.Array | None
    ranges: jax.Array | None = None
    self_key: jax.Array | None = None
    self_value: jax.Array | None = None
    page_table: jax.Array | None = None
    bias: jax.Array | None = None

    @property
    def keys(self) -> tuple[int, int]:
        """U and S: the number of users, and of each user's keys."""
        if self.page_table is None:
            return self.key.shape[0], self.key.shape[1]
        users, most = self.page_table.shape
        return users, most * self.key.shape[1]

    def laid_out(self) -> Arrays:
        """Gathers keys and values [pages, page, K, H] into [U, most · page, K, H].

        A page out of range is clamped, as `cand_to_user` is. Arrays without pages stay as they are.
        """
        if (table := self.page_table) is None:
            return self
        found = [jnp.take(pages, table, axis=0, mode="clip") for pages in (self.key, self.value)]
        key, value = (x.reshape(*self.keys, *x.shape[3:]) for x in found)
        return self._replace(key=key, value=value, page_table=None)

    @property
    def own(self) -> tuple[jax.Array, ...]:
        """Key and value of own tokens; empty if there are none."""
        if self.self_key is None or self.self_value is None:
            return ()
        return self.self_key, self.self_value

    @classmethod
    def of_floats(cls, *floats: Any, bias: Any = None) -> Arrays:
        """Makes a tree of gradients of query, key, value and own tokens, if there are any."""
        return cls(*floats[:3], *_NO_GRADIENTS, *floats[3:])._replace(bias=bias)


def names_of_bias(bias: jax.Array) -> str:
    """Names the dimensions of a bias; those of size 1 are not the query's."""
    heads, queries = ("one", "(k g)"), ("row", "t")
    return f"u {heads[bias.shape[1] != 1]} {queries[bias.shape[2] != 1]} s"


#: Of the arrays of integers, in the place of gradients.
_NO_GRADIENTS: Any = (None,) * 3


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
        arguments.check_array(name, array, "[B, T_self, K, H]", ("query", query))
        arguments.check_sizes("query", query, name, array, "B  H")
        arguments.check_sizes("key", key, name, array, "  K ")
    arguments.check_sizes("self_key", self_key, "self_value", self_value, (" ", "T_self", " ", " "))


def folds_users(batched: Arrays) -> bool | None:
    """Whether problems that are folded have users of their own; None: they cannot be folded.

    That would copy keys or values, unless all problems share them or each has its own, in no pages.
    """
    if batched.page_table is not None:
        return None
    if batched.key and batched.value:
        return True
    return None if batched.key or batched.value or batched.lengths or batched.bias else False


def fold(size: int, batched: Arrays, arrays: Arrays, *, fold_users: bool) -> Arrays:
    """Joins `size` problems' arrays into one problem's; `batched` as in `Op.fold`.

    With `fold_users` each problem gets users of its own, copied if they are not batched. Else
    `key`, `value`, `lengths` and `bias` are not batched.
    """
    of_users = () if fold_users else ("key", "value", "lengths", "bias")
    joined = [
        x if name in of_users else concatenate(size, x, is_batched)
        for name, x, is_batched in zip(Arrays._fields, arrays, batched, strict=True)
    ]
    if not fold_users:
        return Arrays._make(joined)
    users = arrays.key.shape[batched.key]
    index = own_index(size, arrays.cand_to_user, bool(batched.cand_to_user), users)
    return Arrays._make(joined)._replace(cand_to_user=index)
