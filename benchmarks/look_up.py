"""Benchmark of `look_up` and `segment_sum`, beside XLA's ways.

    python -m benchmarks.look_up --out benchmarks/results/look_up/h100.json

Twenty sizes are drawn once and for all: 64 to 65,536 candidates, rows of 16 bytes to 200 kB, sorted
or not, in three dtypes. Times are those on the device, of all that a call does: most points take
less time than a launch from Python. This library's results are checked; sums against sums in f64.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ikbo_jax as ikbo
from benchmarks import harness
from benchmarks.harness import Benchmark, Point
from benchmarks.production import checked
from benchmarks.production_draws import normal
from benchmarks.production_providers import Contender
from ikbo_jax.cases.error_rule import Check
from ikbo_jax.problems.look_up import ITEM_BYTES

#: Most bytes of candidates' rows, of a one-hot matrix, and of sums in f32.
MOST_BYTES, MOST_ONE_HOT, MOST_SUMS = 2**30, 2**28, 2**30
#: Most numbers of a point that are checked: NumPy adds 10 million in a second.
MOST_CHECKED = 10**7
#: Largest error of a sum, in units of its last place: one rounding; f32 adds in another order.
BOUNDS = {"bfloat16": 0.5, "float16": 0.5, "float32": 64.0}
LOOK_UP, SEGMENT_SUM = "ikbo.look_up", "ikbo.segment_sum"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes: candidates, users, bytes of a row, dtype, whether the index is sorted.

    Hot: one user has half of the candidates.
    """

    batch: int
    users: int
    row_bytes: int
    dtype: str
    is_sorted: bool
    is_hot: bool = False

    @property
    def width(self) -> int:
        return self.row_bytes // ITEM_BYTES[self.dtype]

    @property
    def moved(self) -> int:
        """Bytes that a lookup or a sum moves at least."""
        return (self.batch + self.users) * self.row_bytes

    @property
    def label(self) -> str:
        kind = "sorted" if self.is_sorted else "hot" if self.is_hot else "unsorted"
        return f"B={self.batch} U={self.users} {self.row_bytes} bytes {self.dtype} {kind}"


def drawn(count: int = 20, seed: int = 47) -> list[Sizes]:
    """Draws sizes whose logarithms are uniform."""
    rng, found = np.random.default_rng(seed), list[Sizes]()
    while len(found) < count:
        batch = int(2 ** rng.uniform(6, 16))
        row_bytes = int(2 ** rng.uniform(0, math.log2(12500))) * 16
        users = max(1, int(batch / 2 ** rng.uniform(0, min(8, math.log2(batch)))))
        dtype = list(ITEM_BYTES)[len(found) % 3]
        if batch * row_bytes <= MOST_BYTES:
            found.append(Sizes(batch, users, row_bytes, dtype, bool(len(found) // 3 % 2)))
    return found


#: Candidates, users and bytes of a row of points with a hot user.
HOT = [(8192, 256, 768), (33_265, 1128, 96), (65_536, 4096, 2048)]
#: Beside the drawn ones: training of an MLP, and what the kernels were made for.
CHOSEN = [
    Sizes(8192, 256, 768, "bfloat16", False),
    Sizes(8192, 256, 768, "bfloat16", True),
    Sizes(1024, 15, 221_696, "bfloat16", False),
    Sizes(10_000, 1, 256, "bfloat16", True),
    Sizes(10_000, 10_000, 256, "bfloat16", False),
    Sizes(65_536, 4096, 2048, "bfloat16", True),
    Sizes(65_536, 4096, 2048, "bfloat16", False),
    *(Sizes(*sizes, "bfloat16", False, is_hot=True) for sizes in HOT),
]
#: Sizes by sweep.
SWEEPS: dict[str, Sequence[Sizes]] = {"drawn": drawn(), "chosen": CHOSEN}
POINTS = [Point(sweep, x.label, x) for sweep, every in SWEEPS.items() for x in every]


def providers(sizes: Sizes) -> dict[str, tuple[str, Callable[..., jax.Array]]]:
    """Lists what is timed by name: the op, and a function of rows and index."""
    options: dict[str, Any] = {"indices_are_sorted": sizes.is_sorted}

    def scatter(values: jax.Array, index: jax.Array) -> jax.Array:
        zeros = jnp.zeros((sizes.users, sizes.width), values.dtype)
        return zeros.at[index].add(values, **options)

    def segment_sum(values: jax.Array, index: jax.Array) -> jax.Array:
        sums = jax.ops.segment_sum(values.astype(jnp.float32), index, sizes.users, **options)
        return sums.astype(values.dtype)

    def one_hot(values: jax.Array, index: jax.Array) -> jax.Array:
        matrix = jax.nn.one_hot(index, sizes.users, dtype=values.dtype)
        sums = jnp.einsum("bu,bw->uw", matrix, values, preferred_element_type=jnp.float32)
        return sums.astype(values.dtype)

    def cumulative(values: jax.Array, index: jax.Array) -> jax.Array:
        if not sizes.is_sorted:
            order = jnp.argsort(index)
            values, index = values[order], index[order]
        sums = jnp.cumsum(values.astype(jnp.float32), axis=0)
        sums = jnp.concatenate([jnp.zeros_like(sums[:1]), sums])
        users = jnp.arange(sizes.users + 1, dtype=jnp.int32)
        ends = jnp.searchsorted(index, users, method="sort")
        return (sums[ends[1:]] - sums[ends[:-1]]).astype(values.dtype)

    found: dict[str, tuple[str, Callable[..., jax.Array]]] = {
        "gather": ("look_up", lambda user, index: user[index]),
        LOOK_UP: ("look_up", functools.partial(ikbo.look_up, **options)),
        "copy": ("copy", lambda values, index: -values),
        "scatter": ("segment_sum", scatter),
        "jax.ops.segment_sum in f32": ("segment_sum", segment_sum),
    }
    if sizes.batch * sizes.users * ITEM_BYTES[sizes.dtype] <= MOST_ONE_HOT:
        found["one-hot product"] = "segment_sum", one_hot
    if sizes.batch * sizes.width * 4 <= MOST_SUMS:
        found["cumulative sums"] = "segment_sum", cumulative
    ours = functools.partial(ikbo.segment_sum, num_users=sizes.users, **options)
    return found | {SEGMENT_SUM: ("segment_sum", ours)}


def _index(sizes: Sizes) -> np.ndarray:
    """Draws every candidate's user, [batch] int32."""
    rng = np.random.default_rng(0)
    index = rng.integers(0, sizes.users, sizes.batch).astype(np.int32)
    is_hot = rng.random(sizes.batch) < 0.5 * sizes.is_hot
    index = np.where(is_hot, np.int32(sizes.users // 3), index)
    return np.sort(index) if sizes.is_sorted else index


def _check_sums(sizes: Sizes, index: np.ndarray, values: jax.Array, sums: jax.Array) -> Check:
    """Compares the sums of the first columns with sums in f64, in units of their last place."""
    columns = max(1, min(sizes.width, MOST_CHECKED // sizes.batch))
    expected = np.zeros((sizes.users, columns))
    np.add.at(expected, index, np.asarray(values[:, :columns], np.float64))
    error = np.abs(np.asarray(sums[:, :columns], np.float64) - expected)
    unit = float(jnp.finfo(sizes.dtype).eps) * np.maximum(np.abs(expected), 1)
    return Check(float(np.max(error / unit)), BOUNDS[sizes.dtype])


def measure_point(point: Point, run: harness.Run) -> dict[str, Any]:
    """Checks this library at a point, and times all providers on the device."""
    sizes, at = point.case, _index(point.case)
    user, values = (
        normal(seed, (rows, sizes.width), sizes.dtype)
        for seed, rows in enumerate((sizes.users, sizes.batch))
    )
    index = jnp.asarray(at)

    def compare(contender: Contender, results: Sequence[jax.Array]) -> Check:
        (out,) = results
        if contender.name == SEGMENT_SUM:
            return _check_sums(sizes, at, values, out)
        # XLA's sums in the rows' dtype differ: of its results, none is checked.
        wrong = jnp.sum(out != user[index]) if contender.name == LOOK_UP else 0
        return Check(float(wrong), 0.5)

    makers = [
        functools.partial(Contender, name, op, fn, (user if op == "look_up" else values,), (index,))
        for name, (op, fn) in providers(sizes).items()
    ]
    found = checked(makers, "forward", compared=compare)
    return harness.measure(found, dataclasses.replace(run.protocol, short_ms=math.inf))


BENCHMARK = Benchmark("look_up", POINTS, measure_point, times_matmul=False)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
