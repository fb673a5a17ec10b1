"""Reads MovieLens-100k, in the layout of GroupLens or of RecBole, and downloads the latter.

The data belong to GroupLens (University of Minnesota): research use is permitted, commercial use
and redistribution need GroupLens' permission, and publications cite F. M. Harper and
J. A. Konstan, "The MovieLens Datasets: History and Context", ACM TiiS 5 (4), 2015.
`https://files.grouplens.org/datasets/movielens/ml-100k-README.txt` has the full terms.
"""

import csv
import hashlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from examples.movielens.model import DECADES, PROFILE, Catalogue

#: What `load` raises.
UNREADABLE = (FileNotFoundError, ValueError, RuntimeError)
#: Environment variable with the cache folder of this library.
CACHE_VARIABLE = "IKBO_JAX_CACHE_DIR"
LICENCE = (
    "MovieLens-100k is GroupLens' data: research use only; commercial use and redistribution need "
    "permission (files.grouplens.org/datasets/movielens/ml-100k-README.txt)"
)
#: The package on PyPI that carries the data, its wheel's checksum, and the folder in the wheel.
PACKAGE = "recbole==1.2.1"
WHEEL_SHA256 = "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407"
WHEEL_FOLDER = "recbole/dataset_example/ml-100k"
#: Files of RecBole's layout, and their checksums.
RECBOLE = {
    "ml-100k.inter": "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff",
    "ml-100k.item": "51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532",
    "ml-100k.user": "4f670007d9cfbeb9807e757209af1555b9bcc186bde25e767f67cb67c6dd5972",
}
#: Files of GroupLens' layout.
GROUPLENS = ("u.data", "u.item", "u.user")

#: Genres in the order of GroupLens' u.genre.
GENRES = (
    *("unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime"),
    *("Documentary", "Drama", "Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance"),
    *("Sci-Fi", "Thriller", "War", "Western"),
)
OCCUPATIONS = (
    *("administrator", "artist", "doctor", "educator", "engineer", "entertainment", "executive"),
    *("healthcare", "homemaker", "lawyer", "librarian", "marketing", "none", "other"),
    *("programmer", "retired", "salesman", "scientist", "student", "technician", "writer"),
)
GENDERS = ("F", "M")


class Ratings(NamedTuple):
    """Ratings, sorted by user, then by time, then by movie.

    Attributes:
      user: [R] int32, from 1.
      movie: [R] int32, from 1.
      rating: [R] int32, 1 to 5.
      time: [R] int64, seconds since 1970.
    """

    user: np.ndarray
    movie: np.ndarray
    rating: np.ndarray
    time: np.ndarray


class Data(NamedTuple):
    """A data set.

    Attributes:
      ratings: the ratings.
      profile: [users + 1, len(PROFILE)] int32, codes of `model.PROFILE`; row 0 is unused.
      catalogue: genres and decades of movies + 1 movies; row 0 stands for no movie.
      titles: the title of every movie; the first is empty.
    """

    ratings: Ratings
    profile: np.ndarray
    catalogue: Catalogue
    titles: list[str]


class _Movie(NamedTuple):
    id: int
    title: str
    year: str
    genres: list[str]


class _User(NamedTuple):
    id: int
    age: str
    gender: str
    occupation: str
    zip_code: str


def load(folder: pathlib.Path | None = None) -> Data:
    """Reads the data of a folder, or of the cache folder, which a first call fills.

    Args:
      folder: a folder in GroupLens' or in RecBole's layout; None means the cache folder.

    Raises:
      FileNotFoundError: the folder has neither layout.
      ValueError: a file is malformed, or the download has another checksum than expected.
      RuntimeError: there is no download.
    """
    if folder is None:
        return read(download())
    return read(pathlib.Path(folder))


def cache_folder() -> pathlib.Path:
    """The folder of downloads: `ml-100k` in $IKBO_JAX_CACHE_DIR, or in the user's cache folder."""
    if override := os.environ.get(CACHE_VARIABLE):
        return pathlib.Path(override).expanduser() / "ml-100k"
    import platformdirs

    return pathlib.Path(platformdirs.user_cache_dir("ikbo-jax")) / "ml-100k"


def download(
    folder: pathlib.Path | None = None,
    fetch: Callable[[pathlib.Path], pathlib.Path] | None = None,
) -> pathlib.Path:
    """Fills the cache folder with RecBole's files if they are not there, and returns it.

    Args:
      folder: the folder; None means `cache_folder()`.
      fetch: downloads the wheel into a folder and returns its path; None means pip.

    Raises:
      ValueError: the wheel, or a file in the folder, has another checksum than expected; the
        message names both.
    """
    folder = cache_folder() if folder is None else folder
    if not all((folder / name).exists() for name in RECBOLE):
        print(f"downloading {PACKAGE} to {folder}\n{LICENCE}", file=sys.stderr)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as name:
            temporary = pathlib.Path(name)
            wheel = (_fetch_by_pip if fetch is None else fetch)(temporary)
            check(wheel, WHEEL_SHA256)
            with zipfile.ZipFile(wheel) as archive:
                for file in RECBOLE:
                    (temporary / file).write_bytes(archive.read(f"{WHEEL_FOLDER}/{file}"))
            for file in RECBOLE:  # Complete files only, also if the program is ended here.
                os.replace(temporary / file, folder / file)
    for file, expected in RECBOLE.items():
        check(folder / file, expected)
    return folder


def check(path: pathlib.Path, expected: str) -> None:
    """Raises ValueError unless the file has the SHA-256 checksum `expected`."""
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != expected:
        raise ValueError(f"{path} has the SHA-256 checksum {found}, but {expected} is expected")


def _fetch_by_pip(folder: pathlib.Path) -> pathlib.Path:
    options = ("--no-deps", "--only-binary", ":all:", "--quiet", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise RuntimeError(
            f"pip could not download {PACKAGE}: {done.stderr.strip()[-500:]}\n"
            "Download MovieLens-100k by hand and name its folder: --data FOLDER"
        )
    return wheels[0]


def read(folder: pathlib.Path) -> Data:
    """Reads a folder in either layout; raises FileNotFoundError if it has neither."""
    if all((folder / name).exists() for name in GROUPLENS):
        return _data(*_read_grouplens(folder))
    if all((folder / name).exists() for name in RECBOLE):
        return _data(*_read_recbole(folder))
    raise FileNotFoundError(
        f"{folder} has neither {', '.join(GROUPLENS)} (GroupLens) nor {', '.join(RECBOLE)} "
        "(RecBole)"
    )


def _read_grouplens(folder: pathlib.Path) -> tuple[np.ndarray, list[_Movie], list[_User]]:
    ratings = [[int(x) for x in row] for row in _rows(folder / "u.data", "\t", 4)]
    movies = []
    for row in _rows(folder / "u.item", "|", 5 + len(GENRES)):
        title = re.sub(r" \(\d{4}\)$", "", row[1])
        genres = [g for g, flag in zip(GENRES, row[5:], strict=True) if flag == "1"]
        movies.append(_Movie(int(row[0]), title, row[2], genres))
    users = [_User(int(row[0]), *row[1:]) for row in _rows(folder / "u.user", "|", 5)]
    return np.array(ratings, np.int64), movies, users


def _read_recbole(folder: pathlib.Path) -> tuple[np.ndarray, list[_Movie], list[_User]]:
    ratings = [[int(float(x)) for x in row] for row in _table(folder / "ml-100k.inter", 4)]
    movies = [
        _Movie(int(row[0]), row[1], row[2], row[3].split())
        for row in _table(folder / "ml-100k.item", 4)
    ]
    users = [_User(int(row[0]), *row[1:]) for row in _table(folder / "ml-100k.user", 5)]
    return np.array(ratings, np.int64), movies, users


def _table(path: pathlib.Path, columns: int) -> Iterator[list[str]]:
    """The rows of a file in RecBole's layout, without the header."""
    rows = _rows(path, "\t", columns, encoding="utf-8")
    next(rows, None)
    return rows


def _rows(
    path: pathlib.Path, delimiter: str, columns: int, encoding: str = "latin-1"
) -> Iterator[list[str]]:
    with path.open(encoding=encoding, newline="") as file:
        rows: Iterable[list[str]] = csv.reader(file, delimiter=delimiter, quoting=csv.QUOTE_NONE)
        for number, row in enumerate(rows, 1):
            if len(row) != columns:
                raise ValueError(
                    f"{path}, line {number}: expected {columns} columns, but found {len(row)}"
                )
            yield row


def _data(ratings: np.ndarray, movies: list[_Movie], users: list[_User]) -> Data:
    user, movie, rating, time = ratings.T
    order = np.lexsort((movie, time, user))
    sorted_columns = (column[order].astype(np.int32) for column in (user, movie, rating))
    table = Ratings._make([*sorted_columns, time[order]])
    num_users, num_movies = max(u.id for u in users) + 1, max(m.id for m in movies) + 1
    for name, column, size in (("user", user, num_users), ("movie", movie, num_movies)):
        if column.min() < 1 or column.max() >= size:
            raise ValueError(
                f"{name}s have ids from 1 to {size - 1}, but ratings have ids from "
                f"{column.min()} to {column.max()}"
            )
    profile = np.zeros((num_users, len(PROFILE)), np.int32)
    for u in users:
        profile[u.id] = _profile(u)
    genres = np.zeros((num_movies, len(GENRES)), np.float32)
    decade, titles = np.zeros(num_movies, np.int32), [""] * num_movies
    for m in movies:
        genres[m.id, [GENRES.index(genre) for genre in m.genres]] = 1
        decade[m.id], titles[m.id] = _decade(m.year), m.title
    return Data(table, profile, Catalogue(genres, decade), titles)


def _profile(user: _User) -> tuple[int, ...]:
    """Codes of age (by decades), gender, occupation and region (the zip code's first digit)."""
    age = min(PROFILE["age"] - 1, int(user.age) // 10 + 1) if user.age.isdigit() else 0
    region = user.zip_code[:1]
    return (
        age,
        GENDERS.index(user.gender) + 1 if user.gender in GENDERS else 0,
        OCCUPATIONS.index(user.occupation) + 1 if user.occupation in OCCUPATIONS else 0,
        int(region) + 1 if region.isdigit() else PROFILE["region"] - 1,
    )


def _decade(date: str) -> int:
    """The code of a date's decade: 1 for the 1920s and earlier, 0 if the date has no year."""
    year = re.search(r"\d{4}", date)
    return 0 if year is None else int(np.clip((int(year[0]) - 1920) // 10 + 1, 1, DECADES - 1))
