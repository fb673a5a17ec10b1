"""Processes end as they should, whatever calls are under way.

A thread of XLA in which JAX runs Python must not outlive the interpreter: the process would abort.
"""

from __future__ import annotations

import pytest
from processes import run_forked

#: The product keeps the device busy until long after the host has started the call.
SCORER = """
import jax, jax.numpy as jnp, numpy as np
from ikbo_jax import serving

class Model:
    def encode_users(self, weights, users):
        return users

    def score(self, weights, state, candidates, cand_to_user):
        rows = candidates["item"][:, None] + state[cand_to_user][:, None] * jnp.ones((1, 600))
        matrix = jnp.broadcast_to(candidates["item"][0], (600, 600))
        return (rows @ matrix @ matrix @ matrix).sum(1)

number = jax.ShapeDtypeStruct((), np.float32)
scorer = serving.Scorer(Model(), (), number, {"item": number},
                        buckets=serving.Buckets((512,), (1,), (1,)), user_bytes=64)
items = {"item": np.ones(512, np.float32)}
pending = scorer.start([serving.Request(0, 0, lambda: np.float32(1), items)])
"""
#: What follows, and in how many processes. Before scorers took care of it, all processes aborted
#: that did not wait for a call, and 15 of 24 that read its scores as their last step.
ENDINGS = {
    "a call is under way": ("", 1),
    "its scores are the last thing read": ("pending.answers()", 6),
    "the scorer is gone": ("del scorer, pending", 1),
    "nobody can read the scores": ("del pending", 1),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_process_ends_without_an_error(ending, tmp_path):
    statement, number = ENDINGS[ending]
    # Side by side, so that the threads of XLA have to wait for a core.
    found = run_forked([SCORER + statement] * number, tmp_path)
    assert [one.returncode for one in found] == [0] * number, "\n".join(x.stderr for x in found)
