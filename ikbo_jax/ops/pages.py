"""Keys and values in pages: how XLA lays every user's pages out, and the gradient of that."""

import jax
import jax.numpy as jnp

from ikbo_jax.ops import dispatch
from ikbo_jax.ops.attention_vmap import Arrays


def are_read_by(plan: dispatch.Plan) -> bool:
    """Whether a kernel of the plan reads pages, on the device at hand or in a program for CUDA."""
    plans = (plan, plan.cuda)
    return any(p is not None and p.implementation == "mosaic_gpu" for p in plans)


def laid_out(arrays: Arrays) -> Arrays:
    """Gathers keys and values [pages, page, K, H] into [U, most · page, K, H].

    A page out of range is clamped, as `cand_to_user` is. Arrays without pages stay as they are.
    """
    table = arrays.page_table
    if table is None:
        return arrays
    found = [jnp.take(pages, table, axis=0, mode="clip") for pages in (arrays.key, arrays.value)]
    key, value = (x.reshape(*arrays.keys, *x.shape[3:]) for x in found)
    return arrays._replace(key=key, value=value, page_table=None)


def gradient(rows: jax.Array, pages: jax.Array, table: jax.Array) -> jax.Array:
    """Adds gradients of `laid_out` keys or values, f32, up to gradients of their pages."""
    rows = rows.reshape(*table.shape, *pages.shape[1:])
    places = jnp.clip(table, 0, pages.shape[0] - 1)
    return jnp.zeros(pages.shape, rows.dtype).at[places].add(rows)
