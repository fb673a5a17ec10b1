"""What the example adds to scorer and engine: requests that are drawn, figures, ranking offline."""

from __future__ import annotations

import collections
import functools
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ikbo_jax
from examples.serving import load, models, offline, plans, plot, records, wire
from examples.serving.settings import Settings
from ikbo_jax.serving.programs import specs_of, with_rows

ROOT = pathlib.Path(__file__).resolve().parents[2]
PLAN = plans.Plan(rate=200, seconds=10, users=50, items=30, fewest=64, most=2048)


def test_requests_are_those_of_the_plan():
    asked = plans.requests(PLAN)
    assert len(asked) == pytest.approx(2000, rel=0.1)
    assert all(0 <= a.at < 10 for a in asked)
    sizes = np.asarray([len(a.items) for a in asked])
    assert (sizes.min(), sizes.max()) == (64, pytest.approx(2048, rel=0.05))
    # Half of the sizes are below the geometric mean of the bounds.
    assert np.median(sizes) == pytest.approx(np.sqrt(64 * 2048), rel=0.15)
    counts = collections.Counter(a.user for a in asked)
    assert counts[0] / counts[1] == pytest.approx(2**1.1, rel=0.3)
    assert [a.at for a in plans.requests(PLAN)] == [a.at for a in asked]


def test_figures_count_all_tries():
    asked = [plans.Asked(float(n), n, np.zeros(10, np.int32)) for n in range(4)]
    told = [
        load.Told(asked[0], 200, 0.1, 1, np.zeros(10, "f4"), "1", "a"),
        load.Told(asked[1], 200, 0.3, 2, np.zeros(10, "f4"), "1", "b"),
        load.Told(asked[2], 503, 0.5, 3, None, "", ""),
        load.Told(asked[3], 0, 7.0, 3, None, "", ""),
    ]
    counts = {"calls": 2, "requests": 3, "candidates": 30, "padding": 10, "hits": 1, "misses": 3}
    zero = dict.fromkeys(counts, 0) | {"evictions": 0, "compilations": 0}
    since = load.since({"a": zero}, {"a": zero | counts, "b": zero | counts})
    found = load.summary(PLAN, told, since)
    assert found["statuses"] == {"200": 2, "503": 1, "0": 1}
    assert found["retried"] == 3
    assert found["throughput"] == 2 / 10
    assert found["p50_ms"] == pytest.approx(200)
    assert (found["requests_per_call"], found["hit_rate"]) == (1.5, 0.25)
    assert found["padding_share"] == 0.25


@pytest.mark.parametrize("binary", [True, False])
def test_both_forms_keep_every_value(binary):
    items = np.arange(5, dtype=np.int32)
    body, headers = wire.ask(3, items, binary=binary, timeout_ms=20)
    read = wire.read(headers["Content-Type"] + "; charset=utf-8", body)
    assert (read.user, read.version, read.timeout_ms) == (3, 0, 20)
    np.testing.assert_array_equal(read.candidates, items)
    scores = np.asarray([1 / 3, -2e-9, 5e8], np.float32)
    content, kind = wire.write(headers["Content-Type"], scores, "w", "r")
    found, weights, replica = wire.answer(kind, content)
    np.testing.assert_array_equal(found, scores)
    assert (weights, replica) == ("w", "r")


@pytest.mark.parametrize("name", ["hopper", "hopper-long"])
def test_the_ranker_for_hopper_is_one_that_the_kernels_take(name):
    source = models.SOURCES[name]()
    weights = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), source.weights("1"))
    specs = specs_of(source.model, weights, source.user, source.candidate)
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(specs.weights)}
    assert dtypes == {jnp.dtype("bfloat16"), jnp.dtype("int32")}
    batch = functools.partial(with_rows, source.candidate)
    with ikbo_jax.export_target("H200"):
        report = ikbo_jax.explain(
            source.model.score,
            specs.weights,
            with_rows(specs.state, 256),
            batch(4096),
            jax.ShapeDtypeStruct((4096,), jnp.int32),
        )
    ran = {(plan.op, plan.cuda.implementation) for plan in report.plans}
    assert ran == {
        ("attention", "mosaic_gpu"),
        ("linear_compression", "mosaic_gpu"),
        ("gdpa", "mosaic_gpu"),
    }


def test_users_and_items_out_of_range_are_refused():
    source = models.SOURCES["tiny"]()
    assert models.request(source, 99, [199, 0]).size == 2
    with pytest.raises(models.UnknownUserError, match=r"user is 100, expected one in \[0, 100\)"):
        models.request(source, 100, [1])
    for item in (-1, 200):
        with pytest.raises(ValueError, match=rf"candidates\[2\] is {item}, .* in \[0, 200\)"):
            models.candidates(source, [1, 2, item])


@pytest.mark.parametrize("joint", [False, True])
def test_ranking_offline(joint):
    source = models.SOURCES["tiny"]()
    settings = Settings(source="tiny", candidates=(128,), users=4, new_users=(4,), joint=joint)
    scorer = settings.scorer(source)
    shown = []
    found = offline.rank(scorer, source, 500, 40, progress=lambda *done: shown.append(done))
    assert (found["candidates"], found["users"], found["compilations"]) == (500, 40, 0)
    assert found["calls"] == 10, "users of a call are the bound"
    assert shown[-1] == (500, 500)
    oracle = models.Offline(source, "1")
    asked = offline.job(source, 500, 40)
    parts = np.split(asked.items, np.cumsum(asked.counts)[:-1])
    total = sum(
        oracle.scores(user, np.resize(items, 64))[: len(items)].sum()
        for user, items in zip(asked.users, parts, strict=True)
    )
    assert found["mean_score"] == pytest.approx(total / 500, abs=1e-6)


def test_ranking_offline_is_compared_with_the_program_alone():
    settings = Settings(source="tiny", candidates=(128,), users=4, new_users=(4,), joint=True)
    source = settings.load()
    shown = []
    found = offline.compare(
        *(settings.scorer(source), source, 500, 40, 3), progress=lambda *done: shown.append(done)
    )
    # The counts are those of one turn.
    assert (found["candidates"], found["calls"], found["compilations"]) == (500, 10, 0)
    assert found["padding_share"] == pytest.approx(1 - 500 / 1280)
    assert len(found["shares"]) == 3
    assert found["share_of_bound"] == sorted(found["shares"])[1] > 0
    assert shown[-1] == (1500, 1500)


def test_results_name_no_folder_of_the_machine():
    settings = Settings(cache="/a/cache", checkpoint="/a/run", data="/a/data", source="tiny")
    assert "/" not in json.dumps(records.recorded(settings))
    assert records.recorded(settings)["source"] == "tiny"
    found = (ROOT / "examples" / "serving" / "results").glob("*.json")
    texts = [path.read_text("utf-8") for path in found]
    assert texts
    assert not [
        text for text in texts if re.search(r'"[^"]*(/root|/home|/tmp|/Users|[.]cache)', text)
    ]


def test_the_page_holds_the_figures_of_the_results_file(tmp_path):
    results = ROOT / "examples" / "serving" / "results" / "cpu.json"
    page = (ROOT / "docs" / "serving.md").read_text("utf-8")
    assert page == plot.page(page, results)
    plot.draw(results, tmp_path / "serving.svg")
    assert (tmp_path / "serving.svg").read_text("utf-8").count("<svg") == 1
