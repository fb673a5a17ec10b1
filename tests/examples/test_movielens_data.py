"""The example's data: both layouts, the download's checksums, the split by time, the batches."""

import hashlib
import shutil
import zipfile

import jax
import numpy as np
import pytest
from movielens_files import MOVIES, USERS, Row, ratings, write_grouplens, write_recbole

from examples.movielens import data
from examples.movielens.impressions import IMPRESSIONS, Impressions, age_code, split
from examples.movielens.model import AGES, PROFILE

HISTORY = 8


def impressions(folder):
    return Impressions(data.load(folder), HISTORY)


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_both_layouts_hold_the_same_ratings_by_user_and_time(folder, tmp_path):
    found, other = data.load(folder), data.load(write_recbole(tmp_path, ratings()))
    assert_equal(found, other)
    rows = sorted(ratings(), key=lambda row: (row.user, row.time, row.movie))
    assert [Row(*map(int, row)) for row in zip(*found.ratings, strict=True)] == rows
    assert found.catalogue.genres.shape == (MOVIES + 1, len(data.GENRES))
    assert found.titles[1] == "Movie 1, the é"
    # Movie 7 has no date, movie 1 is of 1916, movie 83 of 1998.
    assert [found.catalogue.decade[m] for m in (0, 7, 1, 83)] == [0, 0, 1, 8]
    # User 1 is ten, male, an artist, of region 1; user 5's zip code is Canadian.
    assert found.profile[1].tolist() == [2, 2, 2, 2]
    assert found.profile[5][3] == PROFILE["region"] - 1
    assert (found.profile[1:] < list(PROFILE.values())).all()


def test_what_cannot_be_read_is_refused_with_both_values(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"neither u.data.* nor ml-100k.inter"):
        data.load(tmp_path)
    copy = shutil.copytree(folder, tmp_path / "copy")
    lines = (copy / "u.data").read_text().splitlines()
    (copy / "u.data").write_text("\n".join([lines[0], "1\t2\t3"]))
    with pytest.raises(ValueError, match="line 2: expected 4 columns, but found 3"):
        data.load(copy)
    (copy / "u.data").write_text(f"{USERS + 1}\t1\t3\t880000000\n")
    with pytest.raises(ValueError, match=f"ids from 1 to {USERS}, but .* from 41 to 41"):
        data.load(copy)


class Wheel:
    """A wheel that holds the synthetic files, and a function that "downloads" it."""

    def __init__(self, folder, monkeypatch):
        files = write_recbole(folder / "files", ratings())
        self.path = folder / "recbole.whl"
        with zipfile.ZipFile(self.path, "w") as archive:
            for name in data.RECBOLE:
                archive.write(files / name, f"{data.WHEEL_FOLDER}/{name}")
        self.downloads = 0
        sums = {name: self._sum(files / name) for name in data.RECBOLE}
        monkeypatch.setattr(data, "RECBOLE", sums)
        monkeypatch.setattr(data, "WHEEL_SHA256", self._sum(self.path))

    def _sum(self, path):
        return hashlib.sha256(path.read_bytes()).hexdigest()

    def fetch(self, folder):
        self.downloads += 1
        return shutil.copy(self.path, folder / "recbole.whl")


def test_the_download_is_checked_and_kept(tmp_path, monkeypatch, capsys):
    wheel, cache = Wheel(tmp_path, monkeypatch), tmp_path / "cache"
    for _ in range(2):
        assert data.download(cache, wheel.fetch) == cache
    assert wheel.downloads == 1
    assert "permission" in capsys.readouterr().err
    assert sorted(path.name for path in cache.iterdir()) == sorted(data.RECBOLE)
    assert_equal(data.load(cache), data.load(write_recbole(tmp_path / "again", ratings())))


def test_another_wheel_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    wheel, cache = Wheel(tmp_path, monkeypatch), tmp_path / "cache"
    expected = data.WHEEL_SHA256
    with wheel.path.open("ab") as file:
        file.write(b"x")
    found = hashlib.sha256(wheel.path.read_bytes()).hexdigest()
    with pytest.raises(ValueError, match=f"checksum {found}, but {expected} is expected"):
        data.download(cache, wheel.fetch)
    assert not list(cache.iterdir())


def test_a_damaged_file_in_the_cache_is_refused(tmp_path, monkeypatch):
    wheel, cache = Wheel(tmp_path, monkeypatch), tmp_path / "cache"
    data.download(cache, wheel.fetch)
    (cache / "ml-100k.user").write_text("damaged")
    with pytest.raises(ValueError, match=r"ml-100k.user has the SHA-256 checksum"):
        data.download(cache, wheel.fetch)


def test_the_cache_folder_follows_the_variable(tmp_path, monkeypatch):
    monkeypatch.setenv(data.CACHE_VARIABLE, str(tmp_path))
    assert data.cache_folder() == tmp_path / "ml-100k"
    monkeypatch.delenv(data.CACHE_VARIABLE)
    assert data.cache_folder().parts[-2:] == ("ikbo-jax", "ml-100k")


def test_parts_are_in_the_order_of_time(folder):
    found = data.load(folder).ratings
    parts = split(found)
    for start, validation, test, end in zip(*parts, strict=True):
        times = found.time[start:end]
        assert len(set(found.user[start:end])) == 1
        assert start < validation <= test <= end
        for cut in (validation, test):
            if cut < end:
                assert times[: cut - start].max() < times[cut - start :].min()
        assert validation - start <= 0.8 * (end - start) or validation == end
    assert (parts.validation < parts.test).any()
    assert (parts.test < parts.end).any()


def test_a_user_with_equal_times_is_in_the_training_part():
    columns = [np.full(10, value, np.int32) for value in (1, 2, 3)]
    parts = split(data.Ratings(*columns, time=np.full(10, 880_000_000)))
    assert [int(x[0]) for x in parts] == [0, 10, 10, 10]


def test_histories_are_strictly_earlier_than_what_is_watched(folder):
    found = impressions(folder)
    times = found.data.ratings.time
    for part in (found.train, found.validation, found.test):
        assert len(part.user) > USERS // 2
        for user, first, last, watched, until in zip(*part, strict=True):
            assert first < last <= watched < until
            assert times[last - 1] < times[watched]
            assert set(found.data.ratings.user[first:until]) == {user}
            # Nothing known is left out, except what is too old.
            assert last == watched or times[last] == times[watched]
            assert last - first <= HISTORY - 1


def test_nothing_of_training_depends_on_the_future(folder, tmp_path):
    """Other ratings in the later parts change no batch of training, and no popularity."""
    found = impressions(folder)
    later = {
        (int(u), int(m))
        for u, m, is_train in zip(
            found.data.ratings.user, found.data.ratings.movie, found.is_train, strict=True
        )
        if not is_train
    }
    rng, rows = np.random.default_rng(0), ratings()
    for number, row in enumerate(rows):
        if (row.user, row.movie) in later:
            unused = set(range(1, MOVIES + 1)) - {r.movie for r in rows if r.user == row.user}
            rows[number] = row._replace(movie=int(rng.choice(sorted(unused))), rating=1)
    other = impressions(write_grouplens(tmp_path, rows))
    assert (other.data.ratings.movie != found.data.ratings.movie).sum() > len(later) / 2
    assert_equal(found.popularity, other.popularity)
    for step in range(12):
        assert_equal(found.train_batch(4, 0, step), other.train_batch(4, 0, step))


def test_batches(folder):
    found = impressions(folder)
    table = found.data.ratings
    batches = [found.train_batch(4, 3, step) for step in range(8)]
    batches += [batch for batch, _ in found.evaluation(found.test, 4)]
    pairs = list(zip(table.user.tolist(), table.movie.tolist(), strict=True))
    ever, train = (
        set(pairs),
        {pair for pair, is_in in zip(pairs, found.is_train, strict=True) if is_in},
    )
    unknown_future = 0
    for number, batch in enumerate(batches):
        rated = train if number < 8 else ever
        movies = np.asarray(batch.candidates.movie).reshape(4, IMPRESSIONS)
        labels = np.asarray(batch.label).reshape(4, IMPRESSIONS)
        assert batch.cand_to_user.tolist() == np.repeat(np.arange(4), IMPRESSIONS).tolist()
        for user, movie, label in zip(batch.user.tolist(), movies, labels, strict=True):
            assert len(set(movie.tolist())) == IMPRESSIONS
            assert 1 <= label.sum() < IMPRESSIONS
            for m, is_watched in zip(movie.tolist(), label, strict=True):
                assert ((user, m) in rated) == bool(is_watched)
                unknown_future += number < 8 and (user, m) in ever - train
        users = batch.users
        assert (np.asarray(users.movie)[:, 0] == 0).all()
        for row, length in enumerate(users.length.tolist()):
            assert 2 <= length <= HISTORY
            assert (np.asarray(users.movie)[row, 1:length] > 0).all()
            assert (np.asarray(users.movie)[row, length:] == 0).all()
            assert users.age[row, length - 1] == 1
            assert (np.diff(np.asarray(users.age)[row, 1:length]) <= 0).all()
    # Training does not know what is watched later, so it samples such movies, too.
    assert unknown_future > 0


def test_batches_are_a_function_of_seed_and_step(folder):
    found = impressions(folder)
    assert_equal(found.train_batch(4, 0, 5), found.train_batch(4, 0, 5))
    for other in (found.train_batch(4, 1, 5), found.train_batch(4, 0, 6)):
        assert (other.candidates.movie != found.train_batch(4, 0, 5).candidates.movie).any()
    with pytest.raises(ValueError, match=r"a batch has 10000 requests, but there are only \d+"):
        found.train_batch(10_000, 0, 0)


def test_all_models_rank_the_same_movies(folder):
    """Sampled movies of an evaluation do not depend on the size of its batches."""
    found = impressions(folder)

    def movies(users):
        rows = []
        for batch, count in found.evaluation(found.test, users):
            rows.append(np.asarray(batch.candidates.movie).reshape(users, IMPRESSIONS)[:count])
        return np.concatenate(rows)

    np.testing.assert_array_equal(movies(4), movies(7))
    assert len(movies(4)) == len(found.test.user)


def test_too_few_movies_are_refused(folder, tmp_path):
    rows = [r for r in ratings() if r.user != 1]
    rows += [Row(1, movie, 3, 880_000_000 + movie) for movie in range(1, 241)]
    with pytest.raises(ValueError, match="has 64 impressions, but a user has only 60 movies"):
        impressions(write_grouplens(tmp_path, rows))


def test_codes_of_ages():
    seconds = np.array([0, 1, 2, 3, 4, 3600, 10**12])
    assert age_code(seconds).tolist() == [1, 2, 3, 3, 4, 13, AGES - 1]
