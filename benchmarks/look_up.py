"""Times `look_up` and `segment_sum` beside XLA's ways: `python -m benchmarks.look_up`.

Twenty sizes are drawn once and for all: 64 to 65,536 candidates, rows of 16 bytes to 200 kB, sorted
or not, in three dtypes. Times are those on the device, of all that a call does: most points take
less time than a launch from Python. Every result is checked against sums in f64.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import math
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ikbo_jax as ikbo
from benchmarks import plots, timing
from ikbo_jax._timing import device_time
from ikbo_jax.problems.look_up import ITEM_BYTES

#: Most bytes of candidates' rows, of a one-hot matrix, and of sums in f32.
MOST_BYTES, MOST_ONE_HOT, MOST_SUMS = 2**30, 2**28, 2**30
#: Seconds of a call that is timed twice and not 20 times.
LONG_S = 0.02
#: Most numbers of a point that is checked: NumPy adds 10 million in a second.
MOST_CHECKED = 10**7


@dataclasses.dataclass(frozen=True)
class Point:
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


def drawn(count: int = 20, seed: int = 47) -> list[Point]:
    """Draws sizes whose logarithms are uniform."""
    rng, found = np.random.default_rng(seed), list[Point]()
    while len(found) < count:
        batch = int(2 ** rng.uniform(6, 16))
        row_bytes = int(2 ** rng.uniform(0, math.log2(12500))) * 16
        users = max(1, int(batch / 2 ** rng.uniform(0, min(8, math.log2(batch)))))
        dtype = list(ITEM_BYTES)[len(found) % 3]
        if batch * row_bytes <= MOST_BYTES:
            found.append(Point(batch, users, row_bytes, dtype, bool(len(found) // 3 % 2)))
    return found


#: Candidates, users and bytes of a row of points with a hot user.
HOT = [(8192, 256, 768), (33_265, 1128, 96), (65_536, 4096, 2048)]
#: Beside the drawn ones: training of an MLP, and what the kernels were made for.
CHOSEN = [
    Point(8192, 256, 768, "bfloat16", False),
    Point(8192, 256, 768, "bfloat16", True),
    Point(1024, 15, 221_696, "bfloat16", False),
    Point(10_000, 1, 256, "bfloat16", True),
    Point(10_000, 10_000, 256, "bfloat16", False),
    Point(65_536, 4096, 2048, "bfloat16", True),
    Point(65_536, 4096, 2048, "bfloat16", False),
    *(Point(*sizes, "bfloat16", False, is_hot=True) for sizes in HOT),
]


def _scatter(point: Point, values: jax.Array, index: jax.Array) -> jax.Array:
    zeros = jnp.zeros((point.users, point.width), values.dtype)
    return zeros.at[index].add(values, indices_are_sorted=point.is_sorted)


def _segment_sum(point: Point, values: jax.Array, index: jax.Array) -> jax.Array:
    sums = jax.ops.segment_sum(
        values.astype(jnp.float32), index, point.users, indices_are_sorted=point.is_sorted
    )
    return sums.astype(values.dtype)


def _one_hot(point: Point, values: jax.Array, index: jax.Array) -> jax.Array:
    one_hot = jax.nn.one_hot(index, point.users, dtype=values.dtype)
    sums = jnp.einsum("bu,bw->uw", one_hot, values, preferred_element_type=jnp.float32)
    return sums.astype(values.dtype)


def _cumulative(point: Point, values: jax.Array, index: jax.Array) -> jax.Array:
    if not point.is_sorted:
        order = jnp.argsort(index)
        values, index = values[order], index[order]
    sums = jnp.cumsum(values.astype(jnp.float32), axis=0)
    sums = jnp.concatenate([jnp.zeros_like(sums[:1]), sums])
    users = jnp.arange(point.users + 1, dtype=jnp.int32)
    ends = jnp.searchsorted(index, users, method="sort")
    return (sums[ends[1:]] - sums[ends[:-1]]).astype(values.dtype)


def providers(point: Point) -> dict[str, tuple[str, Callable[..., jax.Array]]]:
    """What is timed, by name: the op, and a function of rows and index."""
    sums: dict[str, Any] = {"scatter": _scatter, "jax.ops.segment_sum in f32": _segment_sum}
    if point.batch * point.users * ITEM_BYTES[point.dtype] <= MOST_ONE_HOT:
        sums["one-hot product"] = _one_hot
    if point.batch * point.width * 4 <= MOST_SUMS:
        sums["cumulative sums"] = _cumulative
    options: dict[str, Any] = {"indices_are_sorted": point.is_sorted}
    ours = functools.partial(ikbo.segment_sum, num_users=point.users, **options)
    return {
        "gather": ("look_up", lambda user, index: user[index]),
        "ikbo.look_up": ("look_up", functools.partial(ikbo.look_up, **options)),
        "copy": ("copy", lambda values, index: -values),
        **{name: ("segment_sum", functools.partial(fn, point)) for name, fn in sums.items()},
        "ikbo.segment_sum": ("segment_sum", ours),
    }


def compiled(point: Point) -> dict[str, Any]:
    """Compiles all providers of a point."""
    index = jax.ShapeDtypeStruct((point.batch,), jnp.int32)
    user, values = (
        jax.ShapeDtypeStruct((rows, point.width), point.dtype)
        for rows in (point.users, point.batch)
    )
    return {
        name: jax.jit(fn).lower(user if op == "look_up" else values, index).compile()
        for name, (op, fn) in providers(point).items()
    }


def measure(point: Point, seed: int, programs: Mapping[str, Any]) -> dict[str, Any]:
    """Times all providers of a point, one after another, and checks this library's."""
    rng = np.random.default_rng(seed)
    at = rng.integers(0, point.users, point.batch).astype(np.int32)
    at = np.where(rng.random(point.batch) < 0.5 * point.is_hot, np.int32(point.users // 3), at)
    at = np.sort(at) if point.is_sorted else at
    keys = jax.random.split(jax.random.key(seed))
    user, values = (
        jax.random.normal(key, (rows, point.width), jnp.float32).astype(point.dtype)
        for key, rows in zip(keys, (point.users, point.batch), strict=True)
    )
    index = jnp.asarray(at)
    record: dict[str, Any] = {**dataclasses.asdict(point), "us": {}}
    for name, (op, _) in providers(point).items():
        program, args = programs[name], (user if op == "look_up" else values, index)
        try:
            start = time.perf_counter()
            jax.block_until_ready(program(*args))
            calls = device_time.CALLS if time.perf_counter() - start < LONG_S else 2
            measured = device_time.measure(program, *args, calls=calls)
        except jax.errors.JaxRuntimeError as error:  # XLA's scatters of the largest arrays
            record["us"][name] = repr(error)[:80]
            continue
        record["us"][name] = round(measured.ms * 1e3, 2) if measured else None
    sums = programs["ikbo.segment_sum"](values, index)
    record["error"] = _error(point, at, values, sums)
    found = programs["ikbo.look_up"](user, index)
    record["is_equal"] = bool(jnp.array_equal(found, user[index]))
    return record


def _error(point: Point, at: np.ndarray, values: jax.Array, sums: jax.Array) -> float | None:
    """The largest error of sums, in units of their last place; None if they are too many."""
    if point.batch * point.width > MOST_CHECKED:
        return None
    expected = np.zeros((point.users, point.width))
    np.add.at(expected, at, np.asarray(values, np.float64))
    error = np.abs(np.asarray(sums, np.float64) - expected)
    unit = float(jnp.finfo(point.dtype).eps)
    return float(np.max(error / (unit * np.maximum(np.abs(expected), 1))))


def describe(record: Mapping[str, Any]) -> str:
    """A line of the table: sizes, times beside XLA's best, fractions of a copy's bandwidth."""
    names = {field.name for field in dataclasses.fields(Point)}
    point = Point(**{name: x for name, x in record.items() if name in names})
    us = {name: x for name, x in record["us"].items() if isinstance(x, float)}
    if not us:
        return f"{point}: not timed, no GPU"
    ours = us["ikbo.segment_sum"]
    best = min(
        (name for name in us if "ikbo" not in name and name not in ("gather", "copy")),
        key=us.__getitem__,
    )
    copied = 2 * point.batch * point.row_bytes / us["copy"]
    fractions = [point.moved / us[f"ikbo.{op}"] / copied for op in ("look_up", "segment_sum")]
    kind = "sorted" if point.is_sorted else "hot" if point.is_hot else ""
    return (
        f"{point.batch:6} {point.users:6} {point.row_bytes:7} B {point.dtype:8} "
        f"{kind:6} {point.moved / 2**20:6.1f} MB | look_up "
        f"{us['ikbo.look_up']:7.2f} us x{us['gather'] / us['ikbo.look_up']:.2f} "
        f"{fractions[0]:.2f} | "
        f"segment_sum {ours:7.2f} us x{us[best] / ours:.2f} ({best}) {fractions[1]:.2f} | "
        f"x{us.get('scatter', math.nan) / ours:.1f} scatter | error {record['error']}"
    )


def plot(records: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
    """Draws bandwidth over a row's bytes, beside XLA's, without hot users."""
    records = [x for x in records if not x.get("is_hot")]
    panels = {
        "look_up": {"ikbo.look_up": "ikbo.look_up", "gather": "XLA's gather"},
        "segment_sum": {
            "ikbo.segment_sum": "ikbo.segment_sum",
            "jax.ops.segment_sum in f32": "jax.ops.segment_sum in f32",
            "scatter": "scatter in the rows' dtype",
        },
    }
    with plots.saved(path, 2, size=(9, 3.6), sharey=True) as (_, axes):
        for axis, (title, names) in zip(axes, panels.items(), strict=True):
            for name, label in names.items():
                timed = [x for x in records if isinstance(x["us"].get(name), float)]
                moved = [(x["batch"] + x["users"]) * x["row_bytes"] for x in timed]
                rates = [size / x["us"][name] / 1e6 for size, x in zip(moved, timed, strict=True)]
                axis.scatter([x["row_bytes"] for x in timed], rates, s=14, label=label)
            axis.set(title=title, xlabel="bytes of a row", xscale="log", yscale="log")
            axis.legend(fontsize="small")
        axes[0].set_ylabel("TB/s, read and written")


def main() -> None:
    """Times the points and prints them; with `--out`, writes a results file.

    With `--plot`, draws the points of a results file instead.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--points", type=int, default=len(CHOSEN) + 20)
    parser.add_argument("--plot", type=pathlib.Path, nargs=2, metavar=("RESULTS", "IMAGE"))
    options = parser.parse_args()
    if options.plot:
        results, image = options.plot
        plot(json.loads(results.read_text())["points"], image)
        return
    points = [*drawn(), *CHOSEN][: options.points]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        programs = list(pool.map(compiled, points))
    records = []
    for number, (point, of_point) in enumerate(zip(points, programs, strict=True)):
        records.append(measure(point, number, of_point))
        print(describe(records[-1]), flush=True)
    if options.out:
        results = {
            "op": "look_up",
            "environment": timing.environment(),
            "protocol": "time on the device, of all that a call does: the median of 20 calls",
            "points": records,
        }
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
