"""The benchmark of training: a run in small, the checks of steps, the other network."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import random_array
from test_benchmarks_ranking import SIZES

from benchmarks import harness, ranking, records, report, timing, training
from benchmarks import training_networks as networks
from benchmarks.harness import Point
from ikbo_jax.models import ranking as model

pytestmark = pytest.mark.slow

GDPA = networks.Sizes(5, 8, 8, 2, 4, 3, 1, "float32")


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch):
    quick = functools.partial(harness.interleaved_ms, window_s=0.001, rounds=2)
    monkeypatch.setattr(harness, "interleaved_ms", lambda thunks, **_: quick(thunks))
    # By NumPy: JAX would compile a program for each shape.
    rng = np.random.default_rng(0)
    monkeypatch.setattr(jax.random, "normal", lambda _, *args: random_array(rng, *args))
    # The gradient of attention in `jax.nn`, and optax' count of steps, mix dtypes.
    with jax.numpy_dtype_promotion("standard"):
        yield


def version(name: str, scale: float = 1.0, error: Exception | None = None) -> training.Version:
    def network(params, request):
        if error is not None:
            raise error
        logit = jnp.sum(request.cand_tokens, axis=(1, 2)) * jnp.sum(params["w_queries"]) * scale
        return jnp.stack([logit, -logit], axis=1)

    return training.Version(name, "a stage", lambda sizes: network)


@pytest.fixture
def one_parameter(monkeypatch):
    """The networks of `version` and their oracle have one parameter, so that steps compile fast."""
    monkeypatch.setattr(model, "init", lambda sizes: {"w_queries": jnp.full(3, 0.1)})
    monkeypatch.setattr(networks.cases, "oracle", version("oracle").make(SIZES))


def test_a_run_in_small_and_its_report(tmp_path, capsys, monkeypatch, one_parameter):
    """A point of each sweep; the ranking networks cost nothing, their loss is the oracle's."""
    names = [p.name for p in ranking.ALL]
    monkeypatch.setattr(training, "OF_RANKING", tuple(map(version, names)))

    def smaller(point):
        small = GDPA if isinstance(point.case, networks.Sizes) else SIZES
        return dataclasses.replace(point, case=small)

    firsts = list({p.sweep: p for p in reversed(training.POINTS)}.values())
    benchmark = dataclasses.replace(training.BENCHMARK, points=firsts, shrink=smaller)
    path = tmp_path / "training.json"
    assert benchmark.main(["--out", str(path), "--quick"]) == 0
    results = timing.read_results(path)
    labels = {point["sweep"]: point["label"] for point in results["points"]}
    assert set(labels) == set(training.SWEEPS)
    for record in results["points"][0]["providers"]:
        assert record["ok"]
        assert record["samples_per_s"] == pytest.approx(12e3 / record["median_ms"])
        assert record["peak_bytes"] > 0
    blocks = report.blocks(results, "docs/performance.md")
    assert {"training-table", "training-ratio", "training-gdpa"} <= blocks.keys()


def test_wrong_losses_wrong_gradients_failures_and_what_does_not_fit(one_parameter, monkeypatch):
    frozen = version("frozen")
    network = frozen.make(SIZES)

    def half_frozen(params, request):
        return network(
            jax.tree.map(lambda x: 0.7 * jax.lax.stop_gradient(x) + 0.3 * x, params), request
        )

    versions = (
        version("right"),
        version("wrong", scale=3.0),
        frozen._replace(make=lambda sizes: half_frozen),
        version("broken", error=TypeError("no such thing")),
        version("large", error=MemoryError("RESOURCE_EXHAUSTED: 1 TB")),
    )
    protocol = harness.Protocol(window_s=0.001, rounds=1, matmul_size=0)
    point = Point("default", "B=12", SIZES)
    monkeypatch.setattr(training, "OF_RANKING", versions)
    measured = training.measure_point(point, types.SimpleNamespace(protocol=protocol))
    right, wrong, frozen, broken, large = measured["providers"]
    assert (right["ok"], wrong["ok"], frozen["ok"]) == (True, False, False)
    assert "no such thing" in broken["failure"]
    assert "1 TB" in large["skipped"]
    assert len(records.wrong({"points": [point.entry() | measured]})) == 3


def test_a_step_moves_every_parameter_and_lowers_the_loss():
    _, request, labels, _ = networks.task_of(SIZES)
    assert labels.shape == (12, 2)
    assert set(np.unique(labels)) == {-1.0, 1.0}
    step = jax.jit(networks.step_of(model.co_designed, "float32"))
    # One program instead of one for each parameter.
    state = jax.jit(lambda: networks.start(model.init(SIZES)))()
    before = state.params
    losses = []
    for _ in range(8):
        state, (loss, norm) = step(state, request, labels)
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    assert norm > 0
    jax.tree.map(
        lambda a, b: np.testing.assert_array_less(0, np.abs(a - b).max()), state.params, before
    )
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state.params))


def test_versions_of_the_other_network_agree_with_their_gradients(monkeypatch):
    """On rows outside all sequences, too."""
    params, (inputs, labels) = networks.init(GDPA), networks.draw_sequences(GDPA)
    assert inputs.rows.shape[0] % networks.MULTIPLE == 0
    noise = jnp.where(
        jnp.arange(inputs.rows.shape[0])[:, None] < inputs.offsets[-1], inputs.rows, 5
    )

    def loss_of(make):
        network = functools.partial(networks.network, make, GDPA)
        return networks.loss_of(network, "float32")

    expected = jax.jit(jax.value_and_grad(loss_of(networks.xla)))(params, inputs, labels)
    ours = jax.jit(jax.value_and_grad(loss_of(networks.ours)))
    for rows in (inputs.rows, noise):
        actual = ours(params, inputs._replace(rows=rows), labels)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-5), actual, expected
        )
    with pytest.raises(NotImplementedError, match="cuDNN needs a GPU"):
        networks.softmax()
    attend = jax.nn.dot_product_attention
    monkeypatch.setattr(networks.production_providers, "cudnn", lambda: attend)
    soft = jax.jit(loss_of(networks.softmax()))(params, inputs, labels)
    assert np.isfinite(soft)
    assert soft != expected[0]
