"""The example from data to report: its versions agree, runs resume bitwise, the commands work."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from movielens_files import MOVIES, ratings, write_grouplens

import ikbo_jax as ikbo
from benchmarks import report, timing
from examples.movielens import __main__ as command
from examples.movielens import compare, data, train
from examples.movielens.impressions import Batch, Impressions, Requests
from examples.movielens.model import Candidates, Catalogue, Ranker, Sizes
from examples.movielens.plain import PlainRanker
from examples.movielens.progress import Progress
from examples.serving import models
from examples.serving.settings import Settings

SIZES = Sizes(
    movies=MOVIES + 1, history=8, layers=1, width=8, head_dim=4, pooled=2, compressed=3, hidden=8
)
PROTOCOL = train.Protocol(steps=30, users=8, evaluate_every=15, save_every=10)
QUIET = Progress(quiet=True)


@pytest.fixture(autouse=True)
def promotion():
    # optax' count of steps mixes dtypes.
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def impressions(folder):
    return Impressions(data.load(folder), SIZES.history)


@pytest.fixture(scope="module")
def trainers(impressions):
    """Returns the trainer of a version; every test gets the same one, which compiles once."""
    make = train.Trainer
    return functools.cache(lambda name: make(name, SIZES, impressions, PROTOCOL))


@pytest.fixture(scope="module")
def whole(trainers):
    """An uninterrupted run."""
    with jax.numpy_dtype_promotion("standard"):
        return trainers("ikbo").run(0, None, QUIET)


def assert_same_bits(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def catalogue():
    return Catalogue(np.ones((SIZES.movies, SIZES.genres), np.float32), np.ones(SIZES.movies, int))


# The model.


def test_versions_compute_the_same_loss_and_gradients(impressions):
    """From the same parameters, with the dtypes and ranks that the library itself keeps to."""
    batch = impressions.train_batch(4, 0, 0)
    found = {}
    with jax.numpy_dtype_promotion("strict"):
        for version in train.VERSIONS:
            net = train.network(version, SIZES, impressions.data.catalogue)

            def loss(params, net=net):
                logits = net.logits(params, batch)
                return jnp.mean(jax.nn.softplus(logits) - batch.label * logits)

            found[version] = jax.jit(jax.value_and_grad(loss))(net.start(3))
    value, gradients = found.pop("plain")
    for other_value, other in found.values():
        np.testing.assert_allclose(other_value, value, rtol=1e-5)
        assert jax.tree.structure(other) == jax.tree.structure(gradients)
        for a, b in zip(jax.tree.leaves(other), jax.tree.leaves(gradients), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)
    sizes = [np.abs(leaf).max() for leaf in jax.tree.leaves(gradients)]
    assert min(sizes) > 0, "a parameter has no effect"


def test_the_rewrite_replaces_the_copies(impressions):
    batch = impressions.train_batch(4, 0, 0)
    net = train.network("rewrite", SIZES, impressions.data.catalogue)
    text = str(ikbo.explain(net.logits, net.start(0), batch))
    for op in ("attention: B=256 U=4", "gdpa: batch=256,4"):
        assert op in text
    plain = train.network("plain", SIZES, impressions.data.catalogue)
    assert "attention" not in str(ikbo.explain(plain.logits, plain.start(0), batch)).split("\n")[-1]
    ours = train.network("ikbo", SIZES, impressions.data.catalogue)
    text = str(ikbo.explain(ours.logits, ours.start(0), batch))
    for op in ("attention: B=256 U=4", "gdpa: batch=256,4", "linear_compression: B=4,256"):
        assert op in text


@pytest.fixture(scope="module")
def ranker(impressions):
    model = Ranker(SIZES, impressions.data.catalogue, rngs=nnx.Rngs(1))
    graph, state = nnx.split(model)
    encode = jax.jit(lambda users: nnx.merge(graph, state).encode_users(users))
    score = jax.jit(lambda *args: nnx.merge(graph, state).score(*args))
    return encode, score


def test_rows_past_the_length_and_later_events_have_no_effect(impressions, ranker):
    encode, score = ranker
    batch = impressions.train_batch(4, 0, 0)
    short = batch.users._replace(length=jnp.minimum(batch.users.length, 3))
    changed = short._replace(
        movie=short.movie.at[:, 3:].set(5), rating=short.rating.at[:, 3:].set(1)
    )
    scores = [score(encode(u), batch.candidates, batch.cand_to_user) for u in (short, changed)]
    np.testing.assert_array_equal(*scores)
    other = short._replace(movie=short.movie.at[:, 2].set(5))
    assert (score(encode(other), batch.candidates, batch.cand_to_user) != scores[0]).any()
    # The history is causal: earlier rows' keys do not know the newest event.
    for a, b in zip(encode(short).layers, encode(other).layers, strict=True):
        np.testing.assert_array_equal(a.key[:, :2], b.key[:, :2])
        assert (a.key[:, 2] != b.key[:, 2]).any()


def test_a_catalogue_of_other_sizes_is_refused():
    sizes = dataclasses.replace(SIZES, movies=7)
    for kind in (Ranker, PlainRanker):
        with pytest.raises(ValueError, match=r"movies=7 and genres=19.*\(301, 19\)"):
            kind(sizes, catalogue(), rngs=nnx.Rngs(0))


# Training.


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(trainers, whole, tmp_path):
    trainer = trainers("ikbo")
    assert np.mean(whole.loss[-10:]) < np.mean(whole.loss[:10]) - 0.05
    # Interrupted after step 15, whose newest checkpoint is of step 10.
    part = trainer.run(0, tmp_path / "run", QUIET, until=15)
    assert part.loss == whole.loss[:15]
    resumed = trainer.run(0, tmp_path / "run", QUIET)
    assert_same_bits(resumed.params, whole.params)
    assert (resumed.loss, resumed.validation) == (whole.loss, whole.validation)
    np.testing.assert_array_equal(resumed.test.auc, whole.test.auc)
    # A finished run is not trained again.
    again = trainer.run(0, tmp_path / "run", QUIET)
    assert_same_bits(again.params, whole.params)
    assert len(again.loss) == PROTOCOL.steps
    assert [step for step, *_ in again.validation] == [15, 30]
    # Another seed is another run, and its checkpoints are not taken.
    assert trainer.run(1, None, QUIET, until=1).loss[0] != whole.loss[0]
    with pytest.raises(ValueError, match="the checkpoint has seed=0, but the run has seed=1"):
        trainer.run(1, tmp_path / "run", QUIET)


def test_a_trained_ranker_is_loaded(trainers, whole, tmp_path):
    trainer = trainers("ikbo")
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        train.load(tmp_path, trainer.data.data.catalogue)
    trainer.run(0, tmp_path, QUIET)
    model = train.load(tmp_path, trainer.data.data.catalogue)
    assert model.sizes == SIZES
    assert_same_bits(nnx.state(model, nnx.Param), whole.params)


def test_a_server_scores_as_the_trained_ranker(folder, trainers, whole, tmp_path):
    """The server's answers for users of the data are those of the run's parameters."""
    trainer = trainers("ikbo")
    trainer.run(0, tmp_path, QUIET)
    settings = Settings(
        checkpoint=str(tmp_path), data=str(folder), candidates=(256,), users=(4,), new_users=(4,)
    )
    source = settings.load()
    assert (source.newest, source.num_users, source.num_items) == ("30", 41, MOVIES + 1)
    scorer = settings.scorer(source)
    users, found = np.array([3, 40, 5, 12]), trainer.data.data.ratings
    movies = np.random.default_rng(0).integers(0, source.num_items, (4, 64), np.int32)
    requests = [models.request(source, int(u), m) for u, m in zip(users, movies, strict=True)]
    answers = scorer.rank(requests)
    assert {answer.weights for answer in answers} == {"30"}

    # Histories of the newest ratings, as a run makes them.
    last = np.searchsorted(found.user, users, side="right")
    assert (np.bincount(found.user)[users] > SIZES.history).all()
    chosen = Requests(users, last - (SIZES.history - 1), last, last, last)
    index = np.repeat(np.arange(4, dtype=np.int32), 64)
    batch = Batch(trainer.data.users(chosen), Candidates(movies.ravel()), index, None, None)
    expected = train.rounded(trainer.network, PROTOCOL)(whole.params, batch)
    scores = np.concatenate([answer.scores for answer in answers])
    assert np.ptp(scores) > 0.1
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5)

    # An earlier step is another version; a user without ratings has finite scores.
    scorer.set_weights(source.weights("20"), "20")
    earlier, nobody = scorer.rank([requests[0], models.request(source, 0, movies[0])])
    assert earlier.weights == "20"
    assert np.abs(earlier.scores - answers[0].scores).max() > 1e-3
    assert np.isfinite(nobody.scores).all()
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 7 .* steps \[20, 30\]"):
        source.weights("7")


def test_what_a_server_cannot_load_is_refused(folder, trainers, tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        models.source_of("random", str(tmp_path / "none"), str(folder))
    assert not (tmp_path / "none").exists()
    trainers("ikbo").run(0, tmp_path / "run", QUIET, until=10)
    rows = [row for row in ratings() if row.movie < MOVIES]
    other = write_grouplens(tmp_path / "other", rows)
    text = (other / "u.item").read_text("latin-1").splitlines(keepends=True)
    (other / "u.item").write_text("".join(text[:-1]), "latin-1")
    with pytest.raises(ValueError, match="the checkpoint has movies=301, but the data have 300"):
        models.source_of("random", str(tmp_path / "run"), str(other))


@pytest.mark.parametrize("version", ["ikbo", "plain"])
def test_it_computes_in_the_parameters_dtype(impressions, version):
    """Bfloat16 parameters make bfloat16 states and products, without implicit promotion."""
    net = train.network(version, SIZES, impressions.data.catalogue)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), net.start(0))
    with jax.numpy_dtype_promotion("strict"):
        traced = jax.make_jaxpr(net.logits)(params, impressions.train_batch(4, 0, 0))
    assert [x.dtype for x in traced.out_avals] == [jnp.float32]
    products = [e for e in traced.eqns if e.primitive.name == "dot_general"]
    assert products
    assert {x.aval.dtype for e in products for x in e.invars} == {jnp.dtype(jnp.bfloat16)}


def test_an_unknown_version_is_refused():
    with pytest.raises(ValueError, match="unknown version 'fast'; known: ikbo, plain, rewrite"):
        train.network("fast", SIZES, catalogue())


# The commands.


@pytest.fixture
def small(monkeypatch, trainers):
    def trainer(version, sizes, data, protocol):
        assert (sizes, protocol) == (SIZES, PROTOCOL)
        assert len(data.test.user) == len(trainers(version).data.test.user)
        return trainers(version)

    monkeypatch.setattr(train, "Trainer", trainer)
    monkeypatch.setenv(timing.COMMIT_VARIABLE, "0123456789abcdef")
    monkeypatch.setitem(command.SIZES, "small", (SIZES, PROTOCOL))
    quick = functools.partial(compare.interleaved_ms, window_s=0.001, rounds=2)
    monkeypatch.setattr(compare, "interleaved_ms", lambda steps, **_: quick(steps))


def test_the_training_command(folder, small, tmp_path, capsys):
    words = ["--data", str(folder), "--factor-steps", "3", "--out", str(tmp_path)]
    assert command.main(words) == 0
    out, err = capsys.readouterr()
    table = out.splitlines()
    assert [line.split("  ")[0] for line in table[:4]] == [
        "model",
        "popularity",
        "matrix factorisation",
        "ranker, this library's ops",
    ]
    assert "ikbo, seed 0: step 30/30, loss" in err
    assert "validation: AUC 0." in err
    assert "log loss" in (tmp_path / "small-ikbo-0.svg").read_text()
    assert (tmp_path / "small" / "ikbo-0" / "30").is_dir()


def test_data_that_cannot_be_read_end_the_command(tmp_path, capsys):
    assert command.main(["train", "--data", str(tmp_path)]) == 2
    assert "(GroupLens) nor" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["train", "--steps", "-3"])
    assert "argument --steps: -3 is not a positive number" in capsys.readouterr().err


@pytest.mark.slow
def test_the_comparison_and_its_report(folder, small, tmp_path, capsys):
    path = tmp_path / "r.json"
    words = ["--data", str(folder), "--factor-steps", "3", "--out", str(tmp_path / "out")]
    assert command.main(["compare", *words, "--seeds", "2", "--results", str(path)]) == 0
    results = timing.read_results(path)
    quality = {record["name"]: record for record in results["quality"]}
    assert list(quality) == ["popularity", "factorisation", *train.VERSIONS]
    plain = quality["plain"]["auc"]["by_seed"]
    for name in ("ikbo", "rewrite"):
        # From the same parameters on the same batches: the same, up to the growth of roundings.
        np.testing.assert_allclose(quality[name]["auc"]["by_seed"], plain, atol=0.01)
        mean, low, high = quality[name]["auc"]["difference"]
        assert low <= mean <= high
        assert mean == pytest.approx(np.mean(np.subtract(quality[name]["auc"]["by_seed"], plain)))
    for record in results["points"][0]["providers"]:
        assert len(record["ms"]) == 2
        assert record["peak_bytes"] > record["temp_bytes"] > 0

    page = tmp_path / "docs/training.md"
    page.parent.mkdir()
    names = ("movielens-quality", "movielens-quality-plot", "movielens-steps")
    page.write_text(
        "".join(f"<!-- begin generated: {n} -->\n<!-- end generated: {n} -->\n" for n in names)
    )
    assert report.main([str(path), "--root", str(tmp_path)]) == 0
    text = page.read_text()
    assert "| ranker, this library's ops |" in text
    assert "commit `0123456789ab`" in text
    assert "(images/movielens.svg)" in text
    assert "log loss" in (tmp_path / "docs/images/movielens.svg").read_text()


def test_steps_alone_are_timed_without_training(folder, small, tmp_path):
    out, path = tmp_path / "out", tmp_path / "r.json"
    words = ["--data", str(folder), "--out", str(out), "--results", str(path)]
    assert command.main(["compare", *words, "--seeds", "0"]) == 0
    results = timing.read_results(path)
    assert [record["name"] for record in results["points"][0]["providers"]] == [*train.VERSIONS]
    assert not out.exists()
    on_gpu = results | {"environment": results["environment"] | {"platform": "gpu"}}
    assert list(report.blocks(results, "")) == ["movielens-steps"]
    assert list(report.blocks(on_gpu, "")) == ["movielens-steps-gpu"]
    assert report.draw(results, tmp_path) == []


@pytest.mark.parametrize("path", sorted((report.ROOT / "benchmarks/results").glob("movielens-*")))
def test_the_page_is_made_from_the_results(path):
    """docs/training.md holds what the committed results files say."""
    results = timing.read_results(path)
    text = (report.ROOT / "docs/training.md").read_text("utf-8")
    assert report.replace_blocks(text, report.blocks(results, "docs/training.md")) == text
    assert "movielens-steps" in text
    # Five seeds, and no difference beyond the noise: every interval contains zero, or what it
    # excludes is less than the deviation of the seeds.
    for record in json.loads(path.read_text())["quality"]:
        for metric in ("auc", "ndcg"):
            if "difference" in (found := record[metric]):
                assert len(found["by_seed"]) == 5
                mean, low, high = found["difference"]
                assert low <= 0 <= high or abs(mean) < found["deviation"]
