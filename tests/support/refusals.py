"""Arguments that several ops refuse with the same words, by changes to arrays that they take."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

#: Changes of an op's arguments, and what the op says.
Refusal = tuple[dict[str, Any], str]


def ones(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    # In NumPy: jnp would compile a program for each shape, in every process that collects tests.
    return jnp.asarray(np.ones(shape, dtype))


def of_rank(name: str, wanted: str, array: Any, **others: Any) -> Refusal:
    """What an op refuses as an array of another rank."""
    return {name: array, **others}, f"{name} must have shape {wanted}, but has shape {array.shape}"


def of_list(name: str, wanted: str) -> Refusal:
    """What an op refuses as a list in place of an array of floats."""
    return {name: [[1.0]]}, f"{name} must be an array of shape {wanted}, but is a list"


def not_int32(name: str, array: Any, **others: Any) -> Refusal:
    """What an op refuses in place of an array of integers."""
    kind = "a list" if isinstance(array, list) else f"{array.dtype}{list(array.shape)}"
    return {name: array, **others}, f"{name} must be an int32 array, but is {kind}"


def misfit(name: str, shape: tuple[int, ...], other: str) -> Refusal:
    """What an op refuses as integers of another shape than another array has."""
    return {name: np.zeros(shape, np.int32)}, f"{name} has shape {shape} but {other}"


def of_dtypes(arrays: dict[str, Any], first: str, others: Sequence[str]) -> dict[str, Refusal]:
    """What an op refuses as dtypes, by name.

    Args:
      arrays: those that the op takes, in bfloat16.
      first: the array with which the op compares the dtypes of the others.
      others: which array has float32, float16, float64, int32 and an 8-bit dtype.
    """
    mixed, halves, f64, int_, f8 = others

    def differs(name: str, dtype: str) -> Refusal:
        changes = {name: arrays[name].astype(dtype)}
        return changes, f"{first} is bfloat16 but {name} is {dtype}"

    def unknown(name: str, dtype: Any) -> Refusal:
        array = np.ones(arrays[name].shape, dtype)
        return {name: array}, f"{name} must be bfloat16, float16 or float32, but is {array.dtype}"

    return {
        "mixed": differs(mixed, "float32"),
        "mixed_halves": differs(halves, "float16"),
        "f64": unknown(f64, "float64"),
        "int": unknown(int_, "int32"),
        "f8": unknown(f8, jnp.float8_e4m3fn),
    }


def of_indices(owner: str) -> dict[str, Refusal]:
    """What an op refuses as `cand_to_user`, and what it says, by name.

    Args:
      owner: the argument that has the candidates, B=7 of them.
    """
    return {
        "b": misfit("cand_to_user", (6,), f"{owner} has B=7"),
        "index_rank": misfit("cand_to_user", (7, 1), f"{owner} has B=7"),
        "index_scalar": misfit("cand_to_user", (), f"{owner} has B=7"),
        "index_unsigned": not_int32("cand_to_user", jnp.zeros(7, jnp.uint32)),
        "index_float": not_int32("cand_to_user", jnp.zeros(7, jnp.float32)),
    }


def of_heads(query: tuple[int, ...], key: tuple[int, ...]) -> dict[str, Refusal]:
    """What an op refuses as heads and their width, and what it says, by name.

    Args:
      query: shape of the op's queries before N=4 and H=8.
      key: shape of its keys and values before K=2 and H=8.
    """
    no_head, no_width = ones(*key, 0, 8), ones(*key, 2, 0)
    of_n = "query has N={} heads, which is not a multiple of key's K=2"
    of_width = "query must have a head width H of at least 1, but has shape {}"
    return {
        "key_and_value_heads": ({"value": ones(*key, 1, 8)}, "key has K=2 but value has K=1"),
        "key_and_value_widths": ({"value": ones(*key, 2, 16)}, "key has H=8 but value has H=16"),
        "query_width": ({"query": ones(*query, 4, 16)}, "query has H=16 but key has H=8"),
        "heads_do_not_divide": ({"query": ones(*query, 5, 8)}, of_n.format(5)),
        "fewer_heads_than_keys": ({"query": ones(*query, 1, 8)}, of_n.format(1)),
        "no_key_heads": (
            {"key": no_head, "value": no_head},
            f"key must have at least 1 head, but has shape {no_head.shape}",
        ),
        "no_width": (
            {"query": ones(*query, 4, 0), "key": no_width, "value": no_width},
            of_width.format((*query, 4, 0)),
        ),
    }
