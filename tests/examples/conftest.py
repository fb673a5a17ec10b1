"""Fixtures of the examples' tests."""

import pathlib

import pytest
from movielens_files import ratings, write_grouplens


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A small data set like MovieLens-100k."""
    return write_grouplens(tmp_path_factory.mktemp("data"), ratings())
