"""The benchmark of several devices: its points, what it reads of programs, a run in small."""

import functools
import json
import sys

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from rewrite_basics import every_equation

from benchmarks import children, scaling
from examples import several_processes
from ikbo_jax.models import ranking

PROGRAM = """
  %all-reduce.1 = (f32[16,8]{1,0}, /*index=5*/bf16[4]{0}) all-reduce(%a, %b), channel_id=1
  %all-gather.2 = s32[16]{0} all-gather(%c), dimensions={0}
  %add.3 = f32[2]{0} add(%d, %e)
"""
#: XLA lists the operands of a `-start` before its results.
ASYNCHRONOUS = """
  %s = ((bf16[16]{0}), bf16[16]{0}) all-reduce-start(%a), channel_id=1
  %d = bf16[16]{0} all-reduce-done(%s)
  %t = ((f32[4]{0}, f32[2]{0}), (f32[8]{0}, f32[4]{0})) all-gather-start(%b, %c), dimensions={0}
"""


@pytest.mark.parametrize(
    ("program", "reduced", "gathered"),
    [
        (PROGRAM, (2, 16 * 8 * 4 + 4 * 2), (1, 16 * 4)),
        (ASYNCHRONOUS, (1, 16 * 2), (2, 8 * 4 + 4 * 4)),
    ],
    ids=["synchronous", "asynchronous"],
)
def test_traffic_counts_a_collective_once_with_its_bytes(program, reduced, gathered):
    found = {name: tuple(x.values()) for name, x in several_processes.traffic(program).items()}
    assert found == {"all-reduce": (1, *reduced), "all-gather": (1, *gathered)}


@pytest.mark.parametrize(("devices", "expected"), [(2, [2]), (3, [2]), (8, [2, 4, 8])])
def test_points_are_powers_of_two(devices, expected):
    for mode in ("strong", "weak"):
        found = [
            p.case.devices for p in scaling.points("attention", devices) if p.case.mode == mode
        ]
        assert found == expected


#: Primitives that bring data from other devices.
COLLECTIVES = {"psum", "psum_invariant", "all_gather", "all_to_all", "ppermute", "reduce_scatter"}


def zeros_of(fn, *args):
    """Zeros for the results of `fn`, for which nothing is compiled."""
    shapes = jax.eval_shape(lambda: fn(*args))
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)


def test_what_the_network_and_its_training_step_sum_over_devices(monkeypatch):
    """The network nothing. What a parameter is broadcast to is summed on the device before."""
    for name in ("init", "draw_request"):
        zeros = functools.partial(zeros_of, getattr(ranking, name))
        monkeypatch.setattr(ranking, name, zeros)
    mesh = scaling.mesh_of(8, AxisType.Auto)
    network, training = (
        scaling.PROGRAMS[name](mesh, scaling.SMALL_REQUEST, small=True)
        for name in ("network", "training")
    )
    parameters = sum(x.size for x in jax.tree.leaves(training.args[0]))
    with jax.numpy_dtype_promotion("standard"):
        forward, step = (
            [*every_equation(jax.make_jaxpr(p.fn)(*p.args))] for p in (network, training)
        )
    assert not COLLECTIVES & {eqn.primitive.name for eqn in forward}
    sums = [eqn for eqn in step if eqn.primitive.name.startswith("psum")]
    assert parameters / 2 < sum(x.aval.size for eqn in sums for x in eqn.invars) <= parameters


def test_a_run_in_small(tmp_path, capsys):
    """Up to all eight of the tests' devices; the ops' forward passes move nothing."""
    out = tmp_path / "scaling.json"
    labels = ["strong 2", "weak 8"]
    options = ["--quick", "--points", *(f"linear_compression {x}" for x in labels)]
    assert scaling.main(["--out", str(out), *options]) == 0
    points = json.loads(out.read_text())["points"]
    assert [point["label"] for point in points] == labels
    for point in points:
        one, auto, explicit = point["providers"]
        assert (one["name"], auto["name"], explicit["name"]) == ("one device", "auto", "explicit")
        assert auto["ok"]
        assert auto["collectives"] == explicit["collectives"] == {}
    assert "no collectives" in capsys.readouterr().out


def test_points_of_a_large_request():
    """On more than two devices, for the network and its training step."""
    found = [p for p in scaling.points("network", 8) if p.case.mode == "large"]
    assert [p.label for p in found] == ["large 4", "large 8"]
    assert {p.case.requests(small=False)[1] for p in found} == {scaling.LARGE_REQUEST}
    assert scaling.Scale("weak", 4).requests(small=False)[1] == (8192, 128)
    assert all(p.case.mode != "large" for p in scaling.points("attention", 8))


#: Work of a process, with a network that compiles fast.
WORK = """
import sys
import jax.numpy as jnp
from benchmarks import scaling
from ikbo_jax.models import ranking

def network(params, request):
    of_user = jnp.sum(request.user_dense, axis=1)[request.cand_to_user]
    logit = jnp.sum(request.cand_tokens, axis=(1, 2)) + params["scale"] * of_user
    return jnp.stack([logit, -logit], axis=1)

ranking.co_designed = network
ranking.init = lambda sizes: {"scale": jnp.ones(())}
sys.exit(scaling.main())
"""


def test_one_process_for_each_device_in_small(tmp_path, monkeypatch):
    """Two processes on the CPU: equal results, no communication in the forward pass."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    for name, value in children.environment({}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        children, "command", lambda module, *given: [sys.executable, "-c", WORK, *given]
    )
    out = tmp_path / "processes.json"
    options = ["--processes", "0", "--sweep", "attention", "network", "--points", "* strong 2"]
    assert scaling.main(["--quick", "--out", str(out), *options]) == 0
    results = json.loads(out.read_text())
    assert (results["devices"], results["processes"]) == (2, 2)
    (point,) = results["points"]
    one, auto = point["providers"]
    assert (point["label"], point["processes"], one["devices"]) == ("strong 2", 2, 1)
    assert auto["ok"]
    assert not auto["collectives"]
    assert all(len(p["ms"]) == 1 and p["ms"][0] > 0 for p in point["providers"])
