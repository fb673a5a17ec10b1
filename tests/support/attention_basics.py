"""What tests of attention share: a call of the op, the oracle, and a loss of both."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import problems

import ikbo_jax as ikbo
from ikbo_jax.reference import attention as reference

SMALL = problems.AttentionShape(3, 7, 2, 5, 4, 2, 8, "unsorted", "ragged")


SCALE = 0.25


#: What the paths may differ by through the order of f32 sums alone.
ATOL = 5e-6


def attend(inputs: problems.AttentionInputs, **options: Any) -> Any:
    return ikbo.attention(
        *inputs[:4], key_value_seq_lengths=inputs.key_value_seq_lengths, **options
    )


def own_tokens(shape: problems.AttentionShape, count: int, dtype: str) -> dict[str, jax.Array]:
    rng = np.random.default_rng(2)
    size = (shape.candidates, count, shape.kv_heads, shape.head_dim)
    return {name: problems.random_array(rng, size, dtype) for name in ("self_key", "self_value")}


def loss_of(inputs: problems.AttentionInputs, run, **options: Any):
    """A loss of out and lse, of all arrays that have a gradient, that rows without keys leave."""

    def loss(query, key, value, own=None) -> jax.Array:
        arrays = inputs._replace(query=query, key=key, value=value)
        out, lse = run(arrays, **options, **(own or {}))
        finite = jnp.where(lse == -jnp.inf, 0.0, lse)
        return jnp.sum(jnp.sin(3 * out.astype(jnp.float32))) + jnp.sum(jnp.cos(finite))

    return loss


def ours(inputs: problems.AttentionInputs, **options: Any):
    return attend(inputs, return_residuals=True, scale=SCALE, **options)


def oracle(inputs: problems.AttentionInputs, **options: Any):
    return reference.materialised(*inputs, scale=SCALE, **options)
