"""Keys and values in pages: argument checks, and how XLA lays every user's pages out."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from ikbo_jax.ops import arguments, dispatch


def laid_out(
    key: jax.Array,
    value: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array | None,
    implementation: str | None,
) -> tuple[jax.Array, jax.Array]:
    """Gathers [pages, page, K, H] by page_table [U, most] into [U, most · page, K, H].

    Raises ValueError if the arguments disagree, and NotImplementedError for a kernel, since none
    reads pages.
    """
    shapes = "[pages, page, K, H]"
    arguments.check_array("key", key, shapes)
    arguments.check_array("value", value, shapes)
    if key.shape[:2] != value.shape[:2]:
        raise ValueError(
            f"key has {key.shape[0]} pages of {key.shape[1]} positions but value has "
            f"{value.shape[0]} pages of {value.shape[1]}"
        )
    if getattr(page_table, "dtype", None) != "int32" or page_table.ndim != 2:
        raise ValueError(
            f"page_table must be an int32 array [U, most], but is {arguments.describe(page_table)}"
        )
    if lengths is None:
        raise ValueError("page_table needs key_value_seq_lengths, but they are None")
    if page_table.size and not key.shape[0]:
        raise ValueError(f"page_table has shape {page_table.shape} but key has no pages")
    if implementation == "mosaic_gpu":
        raise NotImplementedError(
            "attention has no kernel that reads pages; with page_table, implementation must be "
            "None or 'xla'"
        )
    users, most = page_table.shape
    # A page out of range is clamped, as cand_to_user is: nothing is read outside the pages.
    found = [jnp.take(pages, page_table, axis=0, mode="clip") for pages in (key, value)]
    key, value = (x.reshape(users, most * x.shape[2], *x.shape[3:]) for x in found)
    return key, value


def noted(plan: dispatch.Plan) -> dispatch.Plan:
    """Notes in a plan's reason that XLA gathers the pages before the op runs."""
    cuda = None if plan.cuda is None else noted(plan.cuda)
    reason = f"{plan.reason}; XLA gathers the pages first, no kernel reads them"
    return dataclasses.replace(plan, reason=reason, cuda=cuda)
