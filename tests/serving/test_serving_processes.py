"""Processes with a scorer: a second one loads the programs of the first, and each ends well."""

import pytest
from processes import run_forked


def test_a_second_process_loads_its_programs(tmp_path):
    """With a warm cache folder nothing is compiled, and the answers are the same."""
    code = f"""
import jax, numpy as np, serving_model as small
from ikbo_jax import serving
from jax._src import stages
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
serving.use_cache_folder({str(tmp_path / "cache")!r})
scorer = serving.Scorer(small.Model(), small.weights(), small.USER, small.CANDIDATE,
                        buckets=serving.Buckets((16,), (3,), (3,)), user_bytes=10_000)
slow = []
stages.Compiled.call = slow.append
answers = scorer.rank(small.random_requests(5))
print(hits.count('/jax/compilation_cache/cache_hits'),
      hits.count('/jax/compilation_cache/cache_misses'), scorer.metrics.compilations,
      float(sum(np.abs(answer.scores).sum() for answer in answers)), len(slow))
"""
    runs = [run_forked([code], tmp_path)[0] for _ in range(2)]
    assert [run.returncode for run in runs] == [0, 0], runs[-1].stderr
    first, second = (run.stdout.split() for run in runs)
    assert first[:3] == ["0", "2", "0"]
    assert second[:3] == ["2", "0", "0"]
    assert first[3] == second[3]
    # Programs that were loaded are started without JAX's Python, as compiled ones are.
    assert (first[4], second[4]) == ("0", "0")


#: The product keeps the device busy until long after the host has started the call.
BUSY_SCORER = """
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
    """The process aborts if a thread of XLA that runs Python outlives the interpreter."""
    statement, number = ENDINGS[ending]
    # Side by side, so that the threads of XLA have to wait for a core.
    found = run_forked([BUSY_SCORER + statement] * number, tmp_path)
    assert [one.returncode for one in found] == [0] * number, "\n".join(x.stderr for x in found)
