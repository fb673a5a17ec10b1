"""GDPA's backward kernels compiled for sm_90a without a GPU: no spills, no serialised WGMMAs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import offline
import planted
import pytest

from ikbo_jax.pallas.gdpa_backward import kernels, masked, softmax
from ikbo_jax.pallas.hopper import row_products
from ikbo_jax.pallas.worklist import lists, works
from ikbo_jax.pallas.worklist.lists import Offsets, WorkSettings
from ikbo_jax.problems import GdpaBackwardConfig as Config
from ikbo_jax.problems import GdpaBackwardProblem, memory
from ikbo_jax.problems import gdpa_backward as backward_configs
from ikbo_jax.problems.hopper import NUM_CONSUMERS, TILE_ROWS, WARPGROUP_SIZE, WGMMA_M
from ikbo_jax.reference import jagged
from ikbo_jax.reference.gdpa import Settings
from ikbo_jax.tuning import table_rows

pytestmark = pytest.mark.slow

BATCH, ROWS = 1152, 1152 * 1024


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel, for keys or queries."""

    is_for_keys: bool
    head_dim: int = 128
    activations: tuple[str, ...] = ("gelu_tanh",) * 4
    approx: str | None = None
    kv_heads: int = 4
    dtype: str = "bfloat16"
    is_wide: bool = False
    config: Config | None = None
    has_mask: bool = False
    logit_cap: float | None = None
    stored_rows: int = 0

    @property
    def chosen(self) -> Config:
        return self.config or backward_configs.default_config(self.head_dim)

    @property
    def problem(self) -> GdpaBackwardProblem:
        """Without the cap: of some cases, only the other kernel spills with one."""
        sizes = (BATCH, BATCH, ROWS, ROWS, len(self.activations), self.kv_heads, self.head_dim)
        rest = (self.dtype, self.activations, self.approx, False, None, None)
        return GdpaBackwardProblem(*sizes, *rest, mask="causal" if self.has_mask else "")

    @property
    def has_softmax(self) -> bool:
        return "softmax" in self.activations

    @property
    def smem_bytes(self) -> int:
        reads_stored = self.stored_rows > 0 and not self.is_for_keys
        results = 2 if self.is_for_keys else 1
        softmax_results = results if self.has_softmax and not reads_stored else None
        shared = self.chosen.shared(self.head_dim, softmax_results, self.has_mask, reads_stored)
        return memory.smem_bytes(shared)

    @property
    def tile_words(self) -> int:
        if not self.has_mask:
            return lists.WORK_WORDS
        return masked.TILE_WORDS + (self.stored_rows > 0)

    def launch(self) -> tuple[Any, ...]:
        """The kernel's host function, and the shapes it takes."""
        options: dict[str, Any] = {
            "settings": Settings(self.activations, self.approx, 0.3, 0.7, self.logit_cap),
            "config": self.chosen,
            "num_sms": 132,
        }
        options["out_dtype"] = jnp.float32 if self.is_wide else None
        options["is_for_keys"], kernel = self.is_for_keys, kernels.gradient_kernel
        shape, dtype = jax.ShapeDtypeStruct, jnp.dtype(self.dtype)
        query = shape((ROWS, len(self.activations), self.head_dim), dtype)
        key = shape((ROWS, self.kv_heads, self.head_dim), dtype)
        count = jagged.most_tiles(BATCH + 2, ROWS, TILE_ROWS)
        work = lists.Work(
            shape((count, self.tile_words), jnp.int32),
            shape((1,), jnp.int32),
            shape((BATCH, lists.RANGE_WORDS), jnp.int32),
        )
        rows = jagged.most_tiles(BATCH, ROWS, self.chosen.block) * self.chosen.block
        statistics = masks = None
        if self.has_softmax:
            vectors = (query.shape[1], 2, rows + softmax.ABSENT_ROWS)
            statistics = shape(vectors, jnp.int32)
        if self.has_mask:
            masks = masked.Masks(
                shape((2, rows + TILE_ROWS, 2), jnp.int32),
                shape((rows // WGMMA_M + NUM_CONSUMERS, masked.GROUP_WORDS), jnp.int32),
            )
        if self.stored_rows and self.is_for_keys:
            options["stored_rows"] = self.stored_rows
        elif self.stored_rows:
            d_scores = shape((self.stored_rows, 1, WGMMA_M), dtype)
            masks = masks._replace(places=shape((count,), jnp.int32), d_scores=d_scores)

        def run(*operands: Any) -> Any:
            *operands, statistics, masks = operands
            return kernel(*operands, statistics=statistics, masks=masks, **options)

        return run, query, key, key, query, work, statistics, masks


SOFTMAX = ("softmax",) * 4
MIXED = ("gelu", "relu", "silu", "gelu_tanh")
CASES = {
    "keys": Case(True),
    "keys_tanh": Case(True, approx="tanh"),
    "keys_gelu": Case(True, activations=("gelu",) * 4),
    "keys_wide": Case(True, is_wide=True),
    "keys_mixed_f16": Case(True, activations=MIXED, kv_heads=2, dtype="float16"),
    "queries_mixed_block_48": Case(False, activations=MIXED, kv_heads=2, config=Config(48, 2)),
    "queries_broadcast_h64": Case(False, 64, approx="tanh", is_wide=True),
    "keys_softmax": Case(True, activations=SOFTMAX),
    "keys_softmax_h64_wide": Case(True, 64, activations=SOFTMAX, is_wide=True),
    "keys_softmax_h96_grouped_f16": Case(
        True, 96, activations=SOFTMAX, kv_heads=2, dtype="float16"
    ),
    "keys_softmax_block_48": Case(True, activations=SOFTMAX, config=Config(48, 3)),
    "queries_softmax": Case(False, activations=SOFTMAX),
    "queries_softmax_h64_f16": Case(False, 64, activations=SOFTMAX, dtype="float16"),
    "queries_softmax_h96_wide": Case(False, 96, activations=SOFTMAX, is_wide=True),
    # Blocks that only the tuner proposes.
    "queries_h64_widest": Case(False, 64, config=Config(96, 3)),
    "keys_h64_widest": Case(True, 64, config=Config(96, 4)),
    "keys_h64_softmax_block_80": Case(True, 64, activations=SOFTMAX, config=Config(80, 4)),
    "queries_narrow": Case(False, config=Config(32, 6)),
    "keys_narrow": Case(True, config=Config(32, 4)),
}
MASKED = {
    "keys_silu_masked": Case(True, activations=("silu",) * 4, has_mask=True),
    "keys_softmax_h96_masked_f16": Case(
        True, 96, activations=SOFTMAX, kv_heads=2, dtype="float16", has_mask=True
    ),
    "queries_gelu_masked": Case(False, activations=("gelu",) * 4, has_mask=True),
    "queries_softmax_h64_masked": Case(False, 64, activations=SOFTMAX, has_mask=True),
    "keys_silu_stored": Case(True, activations=("silu",) * 4, has_mask=True, stored_rows=2**24),
    "keys_softmax_h96_stored_f16": Case(
        True, 96, SOFTMAX, kv_heads=2, dtype="float16", has_mask=True, stored_rows=2**24
    ),
    "keys_silu_h64_stored": Case(True, 64, ("silu",) * 4, has_mask=True, stored_rows=2**24),
    "keys_softmax_h64_stored": Case(True, 64, SOFTMAX, has_mask=True, stored_rows=2**24),
    "queries_h64_stored": Case(
        False, 64, config=backward_configs.STORED_CONFIG, has_mask=True, stored_rows=2**24
    ),
    "queries_stored": Case(
        False, config=backward_configs.STORED_CONFIG, has_mask=True, stored_rows=2**24
    ),
}
CASES |= MASKED
CAPPED = {
    "keys_softmax_masked_capped": Case(
        True, activations=SOFTMAX, kv_heads=2, has_mask=True, logit_cap=30.0
    ),
    "queries_softmax_masked_capped": Case(
        False, activations=SOFTMAX, has_mask=True, logit_cap=30.0
    ),
    "keys_silu_tanh_masked_capped": Case(
        True, activations=("silu",) * 4, approx="tanh", has_mask=True, logit_cap=30.0
    ),
    "keys_h96_mixed_f16_capped": Case(True, 96, activations=MIXED, dtype="float16", logit_cap=30.0),
    "queries_gelu_tanh_masked_capped": Case(False, has_mask=True, logit_cap=30.0),
}
CASES |= CAPPED


def table_cases() -> dict[str, Case]:
    """Both kernels of every row of `sm90.json` for the gradient."""
    found = {}
    for number, row in enumerate(table_rows.builtin_rows()):
        problem = row.problem
        if row.config is not None and isinstance(problem, GdpaBackwardProblem):
            heads = problem.activations * (problem.q_heads // len(problem.activations))
            sizes = (problem.head_dim, heads, problem.approx, problem.kv_heads, problem.dtype)
            found[f"row{number}:queries"] = Case(False, *sizes, config=row.config)
            found[f"row{number}:keys"] = Case(True, *sizes, config=row.config)
    return found


CASES |= table_cases()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_offline_gdpa_backward_kernel_is_fit(name: str, compiler: offline.Compiler) -> None:
    case = CASES[name]
    if case.stored_rows == 0 or case.is_for_keys:
        assert case.chosen.illegal_reason(case.problem) is None
    (compiled,) = compiler.compile_fit(*case.launch())
    assert compiled.smem_bytes == case.smem_bytes


#: Whether sequences share keys, whether there are statistics, the bound, and how many sequences:
#: about as many as fit shared memory, and 1,152.
LISTS = {
    "statistics": (False, True, None, 14400),
    "bounded": (False, False, 512, 21600),
    "shared_bounded_statistics": (True, True, 512, 11600),
    "shared_few": (True, False, None, 1152),
}


@pytest.mark.parametrize("name", LISTS)
def test_offline_launch_that_lists_tiles_is_fit(name: str, compiler: offline.Compiler) -> None:
    is_shared, has_statistics, bound, sequences = LISTS[name]
    keys = sequences // 4 if is_shared else sequences

    def list_works(*arrays: Any) -> Any:
        given = Offsets(*arrays, sequences * 256, keys * 256, bound, bound)
        return works.works(given, WorkSettings(64, 64, 1, has_statistics))

    offsets = (jax.ShapeDtypeStruct((x + 1,), jnp.int32) for x in (sequences, keys))
    index = jax.ShapeDtypeStruct((sequences,), jnp.int32) if is_shared else None
    (compiled,) = compiler.compile_fit(list_works, *offsets, index)
    assert compiled.name == "ikbo_gdpa_backward_lists"
    assert compiled.ptxas.registers * 4 * WARPGROUP_SIZE <= 65536


@pytest.mark.parametrize("head_dim", sorted(backward_configs.HEAD_DIMS))
def test_offline_launch_that_adds_products_of_rows_is_fit(head_dim, compiler) -> None:
    rows = jax.ShapeDtypeStruct((ROWS, 4, head_dim), jnp.bfloat16)
    (compiled,) = compiler.compile_fit(row_products.sums, rows, rows)
    assert compiled.name == "ikbo_row_products"


# The check itself must be able to fail.


@pytest.mark.parametrize("function", ["add", "_multiply", "_tile"])
def test_offline_missing_wait_is_found(function, compiler, monkeypatch) -> None:
    """Without the wait for a block's scores, for its gradients of weights, or for a tile's sums,
    ptxas sees accumulators that are read while WGMMAs write them."""
    left_out = planted.missing_wait(monkeypatch, function)
    (compiled,) = compiler.compile(*CASES["queries_broadcast_h64"].launch())
    assert left_out
    assert compiled.ptxas.serialized
