"""Programs of sharded ops in JAX's persistent compilation cache, in another process.

With Auto mesh axes, a program has the address of a callback in its text, which another process does
not repeat. `jax_remove_custom_partitioning_ptr_from_cache_key` leaves it out of the cache's key; a
digest of what the callback does, which the ops write into the program, then keeps programs apart.
"""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from processes import child_environment

ROOT = pathlib.Path(__file__).resolve().parents[2]
#: Takes the cache's folder, and programs as JSON: [kind of the mesh axes, scale]. Prints for each
#: how often JAX found it in the cache, how often it did not, and the result.
CODE = """
import json
import sys

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ikbo_jax as ikbo

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))

rng = np.random.default_rng(0)
query = rng.normal(size=(16, 2, 1, 8)).astype(np.float32)
key, value = (rng.normal(size=(3, 5, 1, 8)).astype(np.float32) for _ in range(2))
index = np.arange(16, dtype=np.int32) % 3


def run(kind, scale):
    jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", kind == "Auto")
    mesh = jax.make_mesh((8,), ("x",), axis_types=(getattr(AxisType, kind),))
    specs = P("x"), P(), P(), P("x")
    args = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip((query, key, value, index), specs)
    ]

    @jax.jit
    def program(query, key, value, index):
        def loss(query, key, value):
            out = ikbo.attention(query, key, value, index, scale=scale)
            return (out * out).sum(), out

        gradients, out = jax.grad(loss, (0, 1, 2), has_aux=True)(query, key, value)
        return out, *gradients

    events.clear()
    results = [np.asarray(x) for x in program(*args)]
    return {
        "hits": sum("cache_hits" in name for name in events),
        "misses": sum("cache_misses" in name for name in events),
        "sums": [float(np.abs(x).sum()) for x in results],
    }


print(json.dumps([run(*program) for program in json.loads(sys.argv[2])]))
"""


def outcomes(folder: pathlib.Path, programs: list[tuple[str, float]]) -> list[dict]:
    """What a new process finds in the cache."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(folder), json.dumps(programs)],
        env=child_environment(ROOT, without="JAX_", JAX_PLATFORMS="cpu"),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.time_limit(240)
def test_another_process_finds_programs_and_tells_scales_apart(tmp_path):
    known = [("Auto", 0.5), ("Explicit", 0.5)]
    first = outcomes(tmp_path, known)
    assert [(x["hits"], x["misses"]) for x in first] == [(0, 1), (0, 1)]
    # The new scales come first: a program that is not told apart would be found here.
    *new, auto, explicit = outcomes(tmp_path, [("Auto", 0.25), ("Explicit", 0.25), *known])
    assert [(x["hits"], x["misses"]) for x in (auto, explicit)] == [(1, 0), (1, 0)]
    assert [(x["hits"], x["misses"]) for x in new] == [(0, 1), (0, 1)]
    for before, after, other in zip(first, (auto, explicit), new, strict=True):
        assert before["sums"] == after["sums"]
        # The result and all three gradients.
        assert np.all(np.abs(np.subtract(before["sums"], other["sums"])) > 1e-2)
    np.testing.assert_allclose(first[0]["sums"], first[1]["sums"], rtol=1e-5)
    np.testing.assert_allclose(new[0]["sums"], new[1]["sums"], rtol=1e-5)
