"""The linear-compression kernel whose tiles span candidates: legality, and when it is chosen."""

import dataclasses

import pytest

from ikbo_jax.problems import (
    LinearCompressionProblem,
    PackedCompressionConfig,
    ResidentCompressionConfig,
)
from ikbo_jax.problems import packed_cost as packed
from ikbo_jax.problems.problem import ranked
from ikbo_jax.tuning import table

SMALL = LinearCompressionProblem((100, 8192), (200, 40), 16, 32, "bfloat16")
PACKED = LinearCompressionProblem((547, 3829), (225, 27), 1100, 96, "bfloat16")
#: The sizes of which most rows of the table are.
LARGE = LinearCompressionProblem((15, 1024), (1178, 866), 433, 256, "bfloat16")
#: A launch of the kernel takes longer than XLA's batched products.
TINY = LinearCompressionProblem((1, 20), (2048, 2048), 8, 64, "bfloat16")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"block_n": 200}, "block_n must be 64 or a multiple of 128, but is 200"),
        ({"block_n": 64, "block_m": 48}, "block_m must be a multiple of 32"),
        ({"block_n": 64, "block_m": 480}, "at most 224"),
        ({"block_m": 24}, "block_m must be a multiple of 16"),
        ({"block_n": 512, "block_m": 64}, "at most 224"),
        ({"epilogue_rows": 12}, "epilogue_rows must be a multiple of 8"),
        ({"block_n": 384, "epilogue_rows": 16, "block_m": 16}, "multiple of 2 stores"),
        ({"num_stages": 1}, "num_stages must be at least 2"),
        ({"cluster": 3}, "cluster must be 1 or 2"),
        ({"num_stages": 9}, "bytes of shared memory"),
    ],
)
def test_illegal_packed_configurations_say_why(changes: dict[str, int], reason: str) -> None:
    config = PackedCompressionConfig(block_n=256, block_m=32, epilogue_rows=16)
    assert config.illegal_reason(SMALL) is None
    assert reason in str(dataclasses.replace(config, **changes).illegal_reason(SMALL))


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"n": 40}, "N to be a multiple of 16, but N=40"),
        ({"ks": (200, 0)}, "K=(200, 0)"),
        ({"batches": (100, 0)}, "B=(100, 0)"),
        ({"batches": (100, 1)}, "B=(100, 1)"),
        ({"m": 1}, "M=1"),
        ({"dtype": "float32"}, "float32"),
    ],
)
def test_problems_that_the_packed_kernel_cannot_run(sizes: dict, reason: str) -> None:
    problem = dataclasses.replace(SMALL, **sizes)
    assert reason in str(PackedCompressionConfig(256, 16, 4, 16).illegal_reason(problem))
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
def test_packed_model_counts_the_short_rows_of_boxes(
    block_n: int, block_m: int, seen: float
) -> None:
    """Times on an H100. Without the rows, the model said 38 us of both."""
    problem = LinearCompressionProblem((29, 8367), (1116, 22), 233, 16, "float16")
    configs = [way.config for way in packed.ranked_configs(problem)]
    tile = (block_n, block_m, 1)
    config = next(c for c in configs if (c.block_n, c.block_m, c.cluster) == tile)
    assert packed.estimated_us(problem, config) == pytest.approx(seen, rel=0.1)
