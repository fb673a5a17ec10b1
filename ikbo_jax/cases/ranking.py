"""The oracle of the ranking network, and the error that the error rule allows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ikbo_jax.cases import error_rule
from ikbo_jax.cases.case import widened
from ikbo_jax.models import ranking
from ikbo_jax.models.ranking import Sizes

#: Number of candidates that the oracle scores at once, since copies in float32 are large.
ORACLE_BATCH = 512


def oracle(params: Any, request: ranking.Request) -> jax.Array:
    """Scores by the materialised network in f32, `ORACLE_BATCH` candidates at once: [B, tasks]."""
    params, request = widened((params, request))
    batch = request.cand_to_user.shape[0]
    size = min(batch, ORACLE_BATCH)

    def score(rows: jax.Array) -> jax.Array:
        part = request._replace(
            cand_tokens=request.cand_tokens[rows], cand_to_user=request.cand_to_user[rows]
        )
        with jax.default_matmul_precision("highest"):
            return ranking.materialised(params, part)

    # The last part wraps around, so that all parts have one size and share one program.
    rows = np.arange(-(-batch // size) * size, dtype=np.int32).reshape(-1, size) % batch
    out = jax.lax.map(score, jnp.asarray(rows))
    return out.reshape(-1, out.shape[-1])[:batch]


def tolerance(sizes: Sizes, baseline_error: float, largest: float) -> float:
    """Computes the error that the error rule allows, with the materialised network as plain jnp.

    Every layer adds the roundings of a sum of K terms.
    """
    terms = sizes.layers**2 * (sizes.user_rows + sizes.cand_tokens)
    return error_rule.bound(baseline_error, largest, sizes.dtype, terms)
