"""A small synthetic data set in the layouts of MovieLens-100k."""

import pathlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from examples.movielens.data import GENDERS, GENRES, OCCUPATIONS

USERS, MOVIES = 40, 300


class Row(NamedTuple):
    """A rating."""

    user: int
    movie: int
    rating: int
    time: int


def ratings(seed: int = 0) -> list[Row]:
    """Ratings in a random order, many at equal times.

    Even users watch mostly even movies, which are comedies; odd movies are horror.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for user in range(1, USERS + 1):
        odds = np.where(np.arange(1, MOVIES + 1) % 2 == user % 2, 12.0, 1.0)
        count = int(rng.integers(30, 45))
        movies = 1 + rng.choice(MOVIES, count, replace=False, p=odds / odds.sum())
        # Pages of up to four movies are rated in the same second.
        times = 880_000_000 + np.sort(rng.integers(0, count // 2, count)) * 3600
        for movie, time in zip(movies, times, strict=True):
            rows.append(Row(user, int(movie), int(rng.integers(1, 6)), int(time)))
    return [rows[i] for i in rng.permutation(len(rows))]


def _movies() -> list[tuple[int, str, str, list[str]]]:
    rng = np.random.default_rng(1)
    found = []
    for movie in range(1, MOVIES + 1):
        year = "" if movie == 7 else str(1915 + movie % 84)
        genres = sorted({("Comedy", "Horror")[movie % 2], rng.choice(GENRES)}, key=GENRES.index)
        found.append((movie, f"Movie {movie}, the é", year, [str(genre) for genre in genres]))
    return found


def _users() -> list[tuple[int, int, str, str, str]]:
    return [
        (u, 7 + 3 * u, GENDERS[u % 2], OCCUPATIONS[u % 21], "V3N4P" if u == 5 else f"{u % 10}1234")
        for u in range(1, USERS + 1)
    ]


def write_grouplens(folder: pathlib.Path, rows: list[Row]) -> pathlib.Path:
    """Writes u.data, u.item and u.user; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "u.data").write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))
    lines = []
    for movie, title, year, genres in _movies():
        name = f"{title} ({year})" if year else title
        flags = [str(int(genre in genres)) for genre in GENRES]
        date = f"01-Jan-{year}" if year else ""
        lines.append("|".join([str(movie), name, date, "", "http://example.org", *flags]) + "\n")
    (folder / "u.item").write_text("".join(lines), encoding="latin-1")
    (folder / "u.user").write_text("".join("|".join(map(str, u)) + "\n" for u in _users()))
    return folder


def write_recbole(folder: pathlib.Path, rows: list[Row]) -> pathlib.Path:
    """Writes ml-100k.inter, ml-100k.item and ml-100k.user; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tables: dict[str, tuple[Sequence[str], Iterable[Iterable[object]]]] = {
        "inter": (("user_id", "item_id", "rating", "timestamp"), rows),
        "item": (
            ("item_id", "movie_title", "release_year", "class"),
            [(m, title, year, " ".join(genres)) for m, title, year, genres in _movies()],
        ),
        "user": (("user_id", "age", "gender", "occupation", "zip_code"), _users()),
    }
    for name, (header, table) in tables.items():
        lines = ["\t".join(f"{column}:token" for column in header)]
        lines += ["\t".join(map(str, row)) for row in table]
        (folder / f"ml-100k.{name}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder
