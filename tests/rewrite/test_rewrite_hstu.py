"""HSTU with a bias of the times between all tokens, and of their positions.

`test_rewrite_blocks` has its weights with other masks, and `test_rewrite_masks` several candidates.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import layout_sequences
import numpy as np
import pytest
from layout_table import B, D, S, U, arrays
from rewrite_basics import check_values_and_gradients, report_of

from ikbo_jax.rewrite.attention import block_attention

pytestmark = pytest.mark.usefixtures("models_may_promote")

#: The number of the bucket of each time difference, an integer.
BUCKETS: dict[str, Callable[[Any], Any]] = {
    "log": lambda x: (jnp.log(jnp.maximum(jnp.abs(x), 1).astype(jnp.float32)) / 0.3).astype(int),
    "searched": lambda x: jnp.searchsorted(2 ** jnp.arange(20), jnp.abs(x)),
    "compared": lambda x: (jnp.abs(x)[..., None] > 2 ** jnp.arange(20)).sum(axis=-1),
}
#: Weights of logits [rows, heads, n, n] and a mask [.., n, n] bool.
WEIGHTS: dict[str, Callable[[Any, Any], Any]] = {
    "silu": lambda x, mask: jax.nn.silu(x) * mask / x.shape[-1],
    "softmax": lambda x, mask: jax.nn.softmax(jnp.where(mask, x, -1e9)),
}


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_times_between_all_tokens_leave_the_history_at_user_batch(
    monkeypatch: pytest.MonkeyPatch, weights: str, bucket: str
) -> None:
    """Though times between the candidate and each event differ by candidate."""
    # As with many keys: the history has nine.
    monkeypatch.setattr(block_attention, "FEW_KEYS", 0)
    rng, given, n = np.random.default_rng(3), arrays(), np.arange(S + 1)
    events = np.sort(rng.integers(0, 1000, (U, S)).astype(np.int32), axis=1)
    now = rng.integers(1000, 2000, (B, 1)).astype(np.int32)
    table = jnp.asarray(rng.standard_normal((2, 64), np.float32))

    def fn(blocks: Any, long: Any, token: Any, index: Any, table: Any) -> Any:
        at = jnp.concatenate([jnp.asarray(events)[index], now], axis=1)
        bias = table[0][BUCKETS[bucket](at[:, :, None] - at[:, None])]
        bias = (bias + table[1][n[:, None] - n + S + 1])[:, None]

        def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
            logits = jnp.einsum("btnh,bsnh->bnts", q, k) * D**-0.5 + bias
            return jnp.einsum("bnts,bsnh->btnh", WEIGHTS[weights](logits, mask), v)

        return layout_sequences.transformer(attend)(blocks, long, token, index)

    args = *(given[name] for name in ("blocks2", "long", "token", "index")), table
    report = report_of(fn, *args)
    assert report.flops_saved >= 0.83 * report.costs.original.flops, report
    check_values_and_gradients(fn, *args, bound=3e-5)
