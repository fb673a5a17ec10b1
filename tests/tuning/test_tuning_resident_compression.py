"""The linear-compression kernel whose CTAs keep their weights: legality, layouts, its model."""

import dataclasses
import math
import statistics
from collections.abc import Iterator

import compression_times as times
import pytest

from ikbo_jax.problems import (
    LinearCompressionConfig,
    LinearCompressionProblem,
    PackedCompressionConfig,
    ResidentCompressionConfig,
    hopper,
    memory,
)
from ikbo_jax.problems import packed_cost as packed
from ikbo_jax.problems import resident_cost as resident
from ikbo_jax.problems.hopper import MAX_SMEM_BYTES
from ikbo_jax.problems.linear_compression_backward import default_config as backward_config
from ikbo_jax.problems.problem import ranked
from ikbo_jax.tuning import table

SMALL = LinearCompressionProblem((100, 8192), (200, 40), 16, 32, "bfloat16")
CONFIG = ResidentCompressionConfig(2, 16, 2, 4)


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
    assert reason in str(dataclasses.replace(CONFIG, **changes).illegal_reason(SMALL))


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
    assert reason in str(config.illegal_reason(dataclasses.replace(SMALL, **sizes)))


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
    ways = resident.ranked_configs(problem)
    configs = [way.config for way in ways]
    assert configs
    assert {config.gathers for config in configs} == {False, True}
    times = [resident.estimated_us(problem, config) for config in configs]
    assert times == sorted(times) == pytest.approx([way.us for way in ways])
    for config in configs:
        assert config.illegal_reason(problem) is None
        size = memory.smem_bytes(config.layout(problem, 1).shared(n, stores=True))
        assert size <= config.smem_bytes(problem) <= MAX_SMEM_BYTES
        room = hopper.ctas_by_smem(size)
        assert 1 <= config.ctas <= room


def estimate(problem: LinearCompressionProblem, config: object) -> float:
    """Time by the model of the configuration's kernel."""
    if isinstance(config, PackedCompressionConfig):
        return packed.estimated_us(problem, config)
    if isinstance(config, LinearCompressionConfig):
        return packed.estimated_row_us(problem, config)
    return resident.estimated_us(problem, config)


def contenders(name: str) -> Iterator[tuple[float, float, object]]:
    """(time by the model, time on an H100, configuration or None for XLA)."""
    problem, xla_us, row_us, in_packed, in_resident = times.SIZES[name]
    yield packed.estimated_xla_us(problem), xla_us, None
    row = next(problem.row_configs())
    yield estimate(problem, row), row_us, row
    for (block_n, block_m, stages, cluster), us in in_packed.items():
        config = next(
            config
            for _, config, _ in packed.ranked_configs(problem)
            if (config.block_n, config.block_m, config.cluster) == (block_n, block_m, cluster)
        )
        config = dataclasses.replace(config, num_stages=stages)
        yield estimate(problem, config), us, config
    for fields, us in in_resident.items():
        config = ResidentCompressionConfig(*fields)
        yield estimate(problem, config), us, config


@pytest.mark.parametrize("name", times.SIZES)
def test_models_choose_what_was_fast_on_a_gpu(name: str) -> None:
    """Of what was timed, the model's choice takes at most 1.06 of the fastest."""
    found = list(contenders(name))
    _, chosen, config = min(found, key=lambda x: x[0])
    assert chosen <= 1.06 * min(us for _, us, _ in found)
    assert chosen <= 1.03 * times.SIZES[name].xla
    problem = times.SIZES[name].problem
    assert type(problem.default_config()) is type(config)
    assert isinstance(config, PackedCompressionConfig) == (name == "d1")
    assert ranked(problem)[0].config is not None
    choice = table.lookup(problem, with_user_rows=False)
    assert (choice.config, choice.source) == (problem.default_config(), "default")


def assert_unbiased(errors: dict[type, list[float]], spread: dict[type, float]) -> None:
    """Logarithms of ratios have a mean near 0 and at most this deviation, by kind of kernel."""
    assert errors.keys() == spread.keys()
    for kind, values in errors.items():
        assert abs(statistics.mean(values)) < 0.06, kind
        assert statistics.pstdev(values) < spread[kind], kind


def test_models_are_near_the_times_on_a_gpu() -> None:
    """No kind of kernel is systematically too fast or too slow by its model."""
    errors: dict[type, list[float]] = {}
    for name, size in times.SIZES.items():
        is_odd = any(k % 4 for k in size.problem.ks)
        for estimate, us, config in contenders(name):
            if isinstance(config, ResidentCompressionConfig) and is_odd:
                continue  # weights were loaded element by element then, in vectors since
            errors.setdefault(type(config), []).append(math.log(estimate / us))
    spread = {
        type(None): 0.15,
        LinearCompressionConfig: 0.25,
        PackedCompressionConfig: 0.1,
        ResidentCompressionConfig: 0.15,
    }
    assert_unbiased(errors, spread)


def test_models_are_near_the_times_of_drawn_sizes() -> None:
    """No kernel is systematically too fast or too slow by its model."""
    errors: dict[type, list[float]] = {}
    for problem, measured in times.drawn():
        for config, us in measured.items():
            ratio = estimate(problem, config) / us
            errors.setdefault(type(config), []).append(math.log(ratio))
    kinds = (LinearCompressionConfig, PackedCompressionConfig, ResidentCompressionConfig)
    assert_unbiased(errors, dict.fromkeys(kinds, 0.16))


#: Batches, K, M, block_m and us of rows of the dispatch table, N = 256 (H200).
LARGE = [
    ((15, 1024), (1178, 866), 433, 371),
    ((15, 1024), (1178, 866), 1024, 831),
    ((15, 1024), (1178, 2048), 433, 804),
    ((1024, 1024), (1178, 866), 433, 867),
]


@pytest.mark.parametrize(("batches", "ks", "m", "us"), LARGE)
def test_large_problems_keep_row_tiles(
    batches: tuple[int, int], ks: tuple[int, int], m: int, us: float
) -> None:
    problem = LinearCompressionProblem(batches, ks, m, 256, "bfloat16")
    row = next(problem.row_configs())
    assert packed.estimated_row_us(problem, row) == pytest.approx(us, rel=0.15)
    assert isinstance(problem.default_config(), LinearCompressionConfig)
    for config in (problem.default_config(), *backward_config(problem).embeddings):
        assert isinstance(config, LinearCompressionConfig)


def test_resident_kernel_is_no_default_of_what_was_never_timed() -> None:
    """One level, and more compressed rows."""
    one = dataclasses.replace(SMALL, batches=(8192,), ks=(40,))
    assert not isinstance(one.default_config(), ResidentCompressionConfig)
    for problem in times.LARGE:
        assert resident.LARGE_M < problem.m <= resident.MAX_DEFAULT_M
        larger = dataclasses.replace(problem, m=resident.MAX_DEFAULT_M + 1)
        assert not isinstance(larger.default_config(), ResidentCompressionConfig)
    assert ResidentCompressionConfig(2, 16).illegal_reason(one) is None
