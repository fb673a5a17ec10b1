"""Arguments that several ops refuse with the same words."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np


def of_indices(owner: str) -> dict[str, tuple[dict[str, Any], str]]:
    """What an op refuses as `cand_to_user`, and what it says, by name.

    Args:
      owner: the argument that has the candidates, B=7 of them.
    """

    def of_shape(index: Any) -> tuple[dict[str, Any], str]:
        return {"cand_to_user": index}, f"cand_to_user has shape {index.shape} but {owner} has B=7"

    def of_kind(index: Any, kind: str) -> tuple[dict[str, Any], str]:
        return {"cand_to_user": index}, f"cand_to_user must be an int32 array, but is {kind}"

    return {
        "b": of_shape(np.zeros(6, np.int32)),
        "index_rank": of_shape(np.zeros((7, 1), np.int32)),
        "index_scalar": of_shape(jnp.int32(0)),
        "index_unsigned": of_kind(jnp.zeros(7, jnp.uint32), "uint32[7]"),
        "index_int64": of_kind(np.zeros(7, np.int64), "int64[7]"),
        "index_float": of_kind(jnp.zeros(7, jnp.float32), "float32[7]"),
        "index_none": of_kind(None, "None"),
    }
