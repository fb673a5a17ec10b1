"""The linear-compression kernel whose CTAs keep their weights: legality, layouts, its model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import pytest

from ikbo_jax.problems import (
    LinearCompressionProblem,
    ResidentCompressionConfig,
    hopper,
    memory,
)
from ikbo_jax.problems import problem as problem_module
from ikbo_jax.problems import resident_compression as resident
from ikbo_jax.problems.hopper import MAX_SMEM_BYTES
from ikbo_jax.tuning import table

SMALL = LinearCompressionProblem((100, 8192), (200, 40), 16, 32, "bfloat16")
CONFIG = ResidentCompressionConfig(2, 16, 2, 4)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The model may choose the kernel; default configurations are cached."""
    monkeypatch.setattr(resident, "IS_CHOSEN", True)
    problem_module._first_candidate.cache_clear()
    yield
    problem_module._first_candidate.cache_clear()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"block_m": 24}, "block_m must be a multiple of 16"),
        ({"accumulators": 9}, "at most 128"),
        ({"accumulators": 0}, "at most 128"),
        ({"num_stages": 0}, "num_stages must be at least 1"),
        ({"num_stages": 40}, "bytes of shared memory"),
        ({"ctas": 9}, "ctas must be from 1 to 8"),
        ({"coarse_k": 0}, "coarse_k must be at least 1"),
    ],
)
def test_illegal_resident_configurations_say_why(changes: dict[str, int], reason: str) -> None:
    assert CONFIG.illegal_reason(SMALL) is None
    found = dataclasses.replace(CONFIG, **changes).illegal_reason(SMALL)
    assert found is not None
    assert reason in found


@pytest.mark.parametrize(
    ("sizes", "config", "reason"),
    [
        ({"n": 40}, CONFIG, "N to be a multiple of 16, but N=40"),
        ({"m": 433}, CONFIG, "at most 16 parts, but M=433"),
        ({"dtype": "float32"}, CONFIG, "float32"),
        (
            {"batches": (1, 100, 8192), "ks": (8, 200, 40)},
            dataclasses.replace(CONFIG, gathers=True),
            "two levels only",
        ),
    ],
)
def test_problems_that_the_resident_kernel_cannot_run(
    sizes: dict, config: ResidentCompressionConfig, reason: str
) -> None:
    found = config.illegal_reason(dataclasses.replace(SMALL, **sizes))
    assert found is not None
    assert reason in found


def test_resident_layouts_of_levels() -> None:
    """Long sums of users are split, or have tiles of few rows; one user's product is shared."""
    long = dataclasses.replace(SMALL, ks=(1160, 40), m=48)
    split, whole = (
        dataclasses.replace(CONFIG, block_m=48, coarse_k=k).layout(long, 0) for k in (640, 1280)
    )
    assert (split.splits, split.groups, split.k) == (2, 1, 640)
    assert (whole.splits, whole.groups, whole.k) == (1, 3, 1216)
    one = dataclasses.replace(SMALL, batches=(1, 8192), n=512)
    config = dataclasses.replace(CONFIG, gathers=True)
    assert list(config.levels(one)) == [1]
    assert config.layout(one, 1).has_one_user
    assert config.layout(one, 1).strips == 4
    # Tiles of 128 columns begin at different columns of 96.
    assert not config.layout(dataclasses.replace(one, n=96), 1).has_one_user


@pytest.mark.parametrize("n", [16, 48, 64, 96, 512])
@pytest.mark.parametrize("batches", [(1, 602), (200, 601), (10095, 10095)])
def test_resident_candidates_are_legal_and_fit_an_sm(n: int, batches: tuple[int, int]) -> None:
    problem = LinearCompressionProblem(batches, (121, 138), 48, n, "bfloat16")
    configs = list(resident.candidate_configs(problem))
    assert configs
    assert {config.gathers for config in configs} == {False, True}
    times = [resident.estimated_us(problem, config) for config in configs]
    assert times == sorted(times)
    for config in configs:
        assert config.illegal_reason(problem) is None
        size = memory.smem_bytes(config.layout(problem, 1).shared(n, stores=True))
        assert size <= config.smem_bytes(problem) <= MAX_SMEM_BYTES
        room = hopper.ctas_by_smem(size)
        assert 1 <= config.ctas <= room


#: Batches, K, M, N, and whether the kernel was the fastest on an H100 (docs/experiments.md).
MEASURED = [
    ((100, 8192), (200, 40), 16, 32, True),
    ((29, 8367), (1116, 22), 233, 16, True),
    ((1, 602), (480, 20), 15, 32, True),
    ((200, 601), (121, 138), 48, 128, True),
    ((10095, 10095), (24, 136), 8, 64, True),
    ((1, 118), (1160, 111), 20, 512, True),
    ((547, 3829), (225, 27), 351, 96, False),
    ((1, 229), (88, 386), 42, 64, True),
    ((11, 1033), (982, 250), 240, 16, True),
    ((227, 681), (79, 44), 189, 32, True),
]


def test_resident_kernel_is_no_default_yet() -> None:
    """Its present form has not run on a GPU; the tuner, which checks results, may choose it."""
    assert not resident.IS_CHOSEN
    assert not isinstance(SMALL.default_config(), ResidentCompressionConfig)
    last = list(SMALL.candidate_configs())[-1]
    assert isinstance(last, ResidentCompressionConfig)
    for config in (SMALL.default_config(), last):
        row = table.Row(SMALL, config, "NVIDIA H100 80GB HBM3", "2026-01-01", "0.11.2", 0.02, 0.1)
        assert table.Row.from_json(json.loads(json.dumps(row.to_json()))) == row


@pytest.mark.parametrize(("batches", "ks", "m", "n", "is_fastest"), MEASURED)
def test_resident_kernel_would_be_the_default_where_it_was_the_fastest(
    batches: tuple[int, int],
    ks: tuple[int, int],
    m: int,
    n: int,
    is_fastest: bool,
    chosen: None,
) -> None:
    problem = LinearCompressionProblem(batches, ks, m, n, "bfloat16")
    config = problem.default_config()
    assert isinstance(config, ResidentCompressionConfig) == is_fastest
    assert problem.why_xla() is None
    choice = table.lookup(problem, with_user_rows=False)
    assert isinstance(choice.config, ResidentCompressionConfig) == is_fastest


def test_resident_kernel_is_no_default_of_one_level(chosen: None) -> None:
    """No time of one level, or of three, was measured."""
    one = dataclasses.replace(SMALL, batches=(8192,), ks=(40,))
    assert not isinstance(one.default_config(), ResidentCompressionConfig)
    assert ResidentCompressionConfig(2, 16).illegal_reason(one) is None
