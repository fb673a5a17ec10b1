"""Linear compression by packed tiles and resident weights: legality, layouts, models."""

import dataclasses
import math
import statistics
from collections.abc import Iterator
from typing import Any

import measured_times
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
from ikbo_jax.problems.linear_compression_backward import embedding_config
from ikbo_jax.problems.problem import ranked
from ikbo_jax.tuning import table

SMALL = LinearCompressionProblem((100, 8192), (200, 40), 16, 32, "bfloat16")
TILES = PackedCompressionConfig(block_n=256, block_m=32, epilogue_rows=16)
CONFIG = ResidentCompressionConfig(2, 16, 2, 4)
PACKED = LinearCompressionProblem((547, 3829), (225, 27), 1100, 96, "bfloat16")
#: A launch of the kernel takes longer than XLA's batched products.
TINY = LinearCompressionProblem((1, 20), (2048, 2048), 8, 64, "bfloat16")


@pytest.mark.parametrize(
    ("config", "changes", "reason"),
    [
        (TILES, {"block_n": 200}, "block_n must be 64 or a multiple of 128, but is 200"),
        (TILES, {"block_n": 64, "block_m": 48}, "block_m must be a multiple of 32"),
        (TILES, {"block_n": 64, "block_m": 480}, "at most 224"),
        (TILES, {"block_m": 24}, "block_m must be a multiple of 16"),
        (TILES, {"block_n": 512, "block_m": 64}, "at most 224"),
        (TILES, {"epilogue_rows": 12}, "epilogue_rows must be a multiple of 8"),
        (TILES, {"block_n": 384, "epilogue_rows": 16, "block_m": 16}, "multiple of 2 stores"),
        (TILES, {"num_stages": 1}, "num_stages must be at least 2"),
        (TILES, {"cluster": 3}, "cluster must be 1 or 2"),
        (TILES, {"num_stages": 9}, "bytes of shared memory"),
        (CONFIG, {"block_m": 24}, "block_m must be a multiple of 16"),
        (CONFIG, {"accumulators": 9}, "at most 128"),
        (CONFIG, {"accumulators": 0}, "at most 128"),
        (CONFIG, {"num_stages": 0}, "num_stages must be at least 1"),
        (CONFIG, {"num_stages": 40}, "bytes of shared memory"),
        (CONFIG, {"ctas": 9}, "ctas must be from 1 to 8"),
        (CONFIG, {"coarse_k": 0}, "coarse_k must be at least 1"),
    ],
)
def test_illegal_configurations_say_why(config: Any, changes: dict[str, int], reason: str) -> None:
    assert config.illegal_reason(SMALL) is None
    assert reason in str(dataclasses.replace(config, **changes).illegal_reason(SMALL))


@pytest.mark.parametrize(
    ("config", "sizes", "reason"),
    [
        (TILES, {"n": 40}, "N to be a multiple of 16, but N=40"),
        (TILES, {"ks": (200, 0)}, "K=(200, 0)"),
        (TILES, {"batches": (100, 0)}, "B=(100, 0)"),
        (TILES, {"batches": (100, 1)}, "B=(100, 1)"),
        (TILES, {"m": 1}, "M=1"),
        (TILES, {"dtype": "float32"}, "float32"),
        (CONFIG, {"n": 40}, "N to be a multiple of 16, but N=40"),
        (CONFIG, {"m": 433}, "at most 16 parts, but M=433"),
        (CONFIG, {"dtype": "float32"}, "float32"),
        (
            dataclasses.replace(CONFIG, gathers=True),
            {"batches": (1, 100, 8192), "ks": (8, 200, 40)},
            "two levels only",
        ),
    ],
)
def test_problems_that_a_kernel_cannot_run(config: Any, sizes: dict, reason: str) -> None:
    problem = dataclasses.replace(SMALL, **sizes)
    assert reason in str(config.illegal_reason(problem))
    if config is TILES:
        assert not packed.ranked_configs(problem)
        assert not isinstance(problem.default_config(), PackedCompressionConfig)


def test_small_n_has_tiles_that_span_candidates() -> None:
    """The table's rows for N = 256 say nothing about it; M is too large for resident weights."""
    choice = table.lookup(PACKED, with_user_rows=False)
    assert isinstance(choice.config, PackedCompressionConfig)
    assert (choice.source, choice.config) == ("default", PACKED.default_config())
    kinds = {type(config) for config in PACKED.configs()}
    assert kinds >= {PackedCompressionConfig, ResidentCompressionConfig}


def test_xla_is_chosen_by_the_model_and_says_so() -> None:
    choice = table.lookup(TINY, with_user_rows=False)
    assert (choice.config, choice.source) == (None, "default")
    assert "XLA by a cost model, " in choice.reason
    assert choice.reason == f"{ranked(TINY)[0].why}; no measured row is near"
    assert ranked(SMALL)[0].config is not None
    assert TINY.default_config() is not None  # of a caller that requests the kernel
    # Of kernels that can run the problem alone.
    unserved = dataclasses.replace(SMALL, n=24)
    assert all("inf" not in way.why for way in ranked(unserved))


@pytest.mark.parametrize("n", [16, 32, 48, 64, 80, 96, 112, 128, 256])
@pytest.mark.parametrize("m", [2, 16, 100, 433, 1024])
@pytest.mark.parametrize("batch", [2, 300, 16384])
def test_packed_candidates_are_legal_and_differ(m: int, n: int, batch: int) -> None:
    problem = LinearCompressionProblem((7, batch), (300, 70), m, n, "float16")
    configs = [way.config for way in packed.ranked_configs(problem)]
    assert len(configs) == len(set(configs))
    assert bool(configs) or n % 128 == 0
    assert all(config.illegal_reason(problem) is None for config in configs)


@pytest.mark.parametrize(("block_n", "block_m", "seen"), [(256, 80, 60.3), (512, 48, 71.9)])
def test_packed_model_counts_the_short_rows_of_boxes(block_n, block_m, seen) -> None:
    """Times on an H100. Without the rows, the model said 38 us of both."""
    problem = LinearCompressionProblem((29, 8367), (1116, 22), 233, 16, "float16")
    configs = [way.config for way in packed.ranked_configs(problem)]
    tile = (block_n, block_m, 1)
    config = next(c for c in configs if (c.block_n, c.block_m, c.cluster) == tile)
    assert packed.estimated_us(problem, config) == pytest.approx(seen, rel=0.1)


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
    problem, xla_us, row_us, in_packed, in_resident = measured_times.COMPRESSIONS[name]
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


@pytest.mark.parametrize("name", measured_times.COMPRESSIONS)
def test_models_choose_what_was_fast_on_a_gpu(name: str) -> None:
    """Of what was timed, the model's choice takes at most 1.06 of the fastest."""
    found = list(contenders(name))
    _, chosen, config = min(found, key=lambda x: x[0])
    assert chosen <= 1.06 * min(us for _, us, _ in found)
    assert chosen <= 1.03 * measured_times.COMPRESSIONS[name].xla
    problem = measured_times.COMPRESSIONS[name].problem
    assert type(problem.default_config()) is type(config)
    assert isinstance(config, PackedCompressionConfig) == (name == "d1")
    assert ranked(problem)[0].config is not None
    choice = table.lookup(problem, with_user_rows=False)
    assert (choice.config, choice.source) == (problem.default_config(), "default")


SPREADS = {
    None: {
        type(None): 0.15,
        LinearCompressionConfig: 0.25,
        PackedCompressionConfig: 0.1,
        ResidentCompressionConfig: 0.15,
    },
    "drawn": dict.fromkeys(
        (LinearCompressionConfig, PackedCompressionConfig, ResidentCompressionConfig), 0.16
    ),
}


@pytest.mark.parametrize("sizes", SPREADS)
def test_models_are_near_the_times_on_a_gpu(sizes: str | None) -> None:
    """Logarithms of ratios have a mean near 0 and at most this deviation, by kind of kernel."""
    errors: dict[type, list[float]] = {}
    if sizes == "drawn":
        timed = (
            (problem, estimate(problem, config), us, config)
            for problem, measured in measured_times.drawn_compressions()
            for config, us in measured.items()
        )
    else:
        timed = (
            (measured_times.COMPRESSIONS[name].problem, *x)
            for name in measured_times.COMPRESSIONS
            for x in contenders(name)
        )
    for problem, estimated, us, config in timed:
        is_odd = any(k % 4 for k in problem.ks)
        if not sizes and is_odd and isinstance(config, ResidentCompressionConfig):
            continue  # weights were loaded element by element then, in vectors since
        errors.setdefault(type(config), []).append(math.log(estimated / us))
    assert errors.keys() == SPREADS[sizes].keys()
    for kind, values in errors.items():
        assert abs(statistics.mean(values)) < 0.06, kind
        assert statistics.pstdev(values) < SPREADS[sizes][kind], kind


@pytest.mark.parametrize(
    ("batches", "ks", "m", "us"),
    [
        ((15, 1024), (1178, 866), 433, 371),
        ((15, 1024), (1178, 866), 1024, 831),
        ((15, 1024), (1178, 2048), 433, 804),
        ((1024, 1024), (1178, 866), 433, 867),
    ],
)
def test_large_problems_keep_row_tiles(batches, ks, m, us) -> None:
    """Times are those of the dispatch table's rows (H200)."""
    problem = LinearCompressionProblem(batches, ks, m, 256, "bfloat16")
    row = next(problem.row_configs())
    assert packed.estimated_row_us(problem, row) == pytest.approx(us, rel=0.15)
    assert isinstance(problem.default_config(), LinearCompressionConfig)
    for level in range(len(ks)):
        assert isinstance(embedding_config(problem, level), LinearCompressionConfig)


def test_resident_kernel_is_no_default_of_what_was_never_timed() -> None:
    """One level, and more compressed rows."""
    one = dataclasses.replace(SMALL, batches=(8192,), ks=(40,))
    assert not isinstance(one.default_config(), ResidentCompressionConfig)
    for problem in measured_times.LARGE_COMPRESSIONS:
        assert resident.LARGE_M < problem.m <= resident.MAX_DEFAULT_M
        larger = dataclasses.replace(problem, m=resident.MAX_DEFAULT_M + 1)
        assert not isinstance(larger.default_config(), ResidentCompressionConfig)
    assert ResidentCompressionConfig(2, 16).illegal_reason(one) is None
