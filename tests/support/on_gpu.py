"""What the GPU suites share: comparing launch with launch, and compute-sanitizer over a script."""

import fcntl
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from hypothesis import strategies as st

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOAK_SECONDS = float(os.environ.get("IKBO_SOAK_S", "20"))
EXAMPLES = int(os.environ.get("IKBO_GPU_EXAMPLES", "3"))
#: Time limits: what is compiled before a soak took a minute or more; a sanitized script took 140 s
#: beside another one, and waits for those of other processes on its GPU.
soaks = pytest.mark.time_limit(SOAK_SECONDS + 900)


def sanitizes(test: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a test that calls `assert_sanitized`."""
    return pytest.mark.sanitizer(pytest.mark.time_limit(2400)(test))


def attention_shapes(
    q_lens: Sequence[int], most_q_len: int, head_dims: Sequence[int]
) -> st.SearchStrategy[problems.AttentionShape]:
    """Draws shapes of attention, the named numbers of queries half of the time."""

    def of(
        heads: int, group: int, sizes: tuple[int, int, int, int], **rest: Any
    ) -> problems.AttentionShape:
        return problems.AttentionShape(*sizes, q_heads=heads * group, kv_heads=heads, **rest)

    q_len = st.one_of(st.sampled_from(q_lens), st.integers(1, most_q_len))
    return st.builds(
        of,
        heads=st.integers(1, 3),
        group=st.sampled_from([1, 2, 4]),
        sizes=st.tuples(st.integers(1, 20), st.integers(1, 100), q_len, st.integers(1, 1500)),
        head_dim=st.sampled_from(head_dims),
        index=st.sampled_from(["sorted", "unsorted", "gaps"]),
        lengths=st.sampled_from(["full", "ragged"]),
    )


def drawn(test: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a test of drawn shapes, above `hypothesis.given`.

    Such tests are cut into parts, so that several processes can share them. Every part draws shapes
    of its own, and other ones each time; hypothesis prints those that fail.
    """
    settings = hypothesis.settings(max_examples=EXAMPLES, derandomize=False)
    return pytest.mark.time_limit(300 + 60 * EXAMPLES)(settings(test))


def draws_linear_compressions(test: Callable[..., Any]) -> Callable[..., Any]:
    """Draws the sizes of a linear compression, the kind of its index, and a dtype."""
    return hypothesis.given(
        users=st.integers(1, 20),
        candidates=st.integers(1, 200),
        m=st.integers(1, 500),
        k_user=st.integers(1, 300),
        k_cand=st.integers(1, 300),
        n=st.integers(1, 40).map(lambda eighth: 8 * eighth),
        index=st.sampled_from(["sorted", "unsorted", "gaps"]),
        dtype=st.sampled_from(problems.HALF_DTYPES),
    )(test)


@jax.jit
def count_if_different(count: jax.Array, actual: Any, expected: Any) -> jax.Array:
    """`count`, plus one if any value differs; on the device, so that launches follow closely."""
    differs = jax.tree.map(lambda a, b: jnp.any(a != b), actual, expected)
    return count + jnp.any(jnp.stack(jax.tree.leaves(differs))).astype(jnp.int32)


def assert_repeats(run: Callable[..., Any], arguments: Sequence[Any], times: int) -> Any:
    """Holds `times` more results to the first one, which it returns."""
    first, wrong = run(*arguments), jnp.int32(0)
    for _ in range(times):
        wrong = count_if_different(wrong, run(*arguments), first)
    assert int(wrong) == 0
    return first


def run_python(script: str, *arguments: Any, **environment: str) -> str:
    """Runs a script in a process of its own, from the repository; returns what it prints."""
    ended = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout


def soak(cases: Sequence[tuple[Callable[[Any], Any], Any, Any]]) -> None:
    """`SOAK_SECONDS` of launches in random order: no hang, no result unlike the first.

    Says every minute how far it is (`pytest -s`), so that a run that is cut short says something.

    Args:
      cases: (compiled function, its argument, the result of its first launch).
    """
    rng, wrong, launches = np.random.default_rng(0), jnp.int32(0), 0
    begin = said = time.monotonic()
    deadline = begin + SOAK_SECONDS
    while time.monotonic() < deadline:
        for position in rng.permutation(len(cases)):
            compiled, inputs, expected = cases[position]
            wrong = count_if_different(wrong, compiled(inputs), expected)
            launches += 1
        jax.block_until_ready(wrong)
        if time.monotonic() - said > 60:
            said = time.monotonic()
            print(f"{said - begin:.0f} s: {launches} launches, {int(wrong)} wrong", flush=True)
    print(f"{launches} launches")
    assert launches > 100
    assert int(wrong) == 0


def environment_of_scripts() -> dict[str, str]:
    """The environment of a process that imports what the tests for the GPU import."""
    folders = map(str, (ROOT, ROOT / "tests" / "support", ROOT / "tests" / "gpu"))
    path = os.pathsep.join((*folders, *filter(None, [os.environ.get("PYTHONPATH")])))
    return {**os.environ, "PYTHONPATH": path}


def sanitizer_test(script: str) -> Callable[[str], None]:
    """Makes a test that runs a script under each tool of compute-sanitizer."""

    @sanitizes
    @pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
    def test(tool: str) -> None:
        assert_sanitized(tool, script)

    return test


def assert_sanitized(tool: str, script: str) -> None:
    """Runs a Python script, which ends by printing FINISHED, under compute-sanitizer.

    Args:
      tool: "memcheck" or "racecheck"; it looks at this library's kernels alone.
      script: what to run; it may import what the tests share, and the tests for the GPU.
    """
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    assert pathlib.Path(sanitizer).exists(), "compute-sanitizer (CUDA toolkit) is not installed"
    environment = dict(
        environment_of_scripts(),
        XLA_PYTHON_CLIENT_PREALLOCATE="false",
        XLA_PYTHON_CLIENT_ALLOCATOR="platform",  # one allocation an array, so that its end is seen
        # XLA times no kernels when it compiles: with them, racecheck ended in "failed to handle a
        # hardware exception" at a kernel in which it finds nothing otherwise.
        XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0",
    )
    # Without the compiler's subprocesses: with them, four of twenty scripts hung in a compilation.
    options = ["--tool", tool, "--error-exitcode", "9", "--kernel-name", "kns=ikbo"]
    options += ["--target-processes", "application-only"]
    # If the sanitizer is killed, its program may stay on the GPU: after tests that ended so, a
    # script of 12 s did not end in 150. So the program ends by itself, and says where it was.
    limit = "import faulthandler; faulthandler.dump_traceback_later(240, exit=True)\n"
    program = [sys.executable, "-c", limit + script]
    # One on each GPU: beside another one on the same GPU, one that takes 13 s alone took over 140.
    # In a folder of its own, so that those on other GPUs use none of its files.
    gpu = re.sub(r"\W+", "-", os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    lock_file = pathlib.Path(tempfile.gettempdir()) / f"ikbo-jax-sanitizer{gpu}.lock"
    with lock_file.open("w") as lock, tempfile.TemporaryDirectory() as folder:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run = subprocess.run(
            [sanitizer, *options, *program],
            env=environment | {"TMPDIR": folder},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
    assert "FINISHED" in run.stdout, run.stdout[-3000:] + run.stderr[-3000:]
    assert run.returncode == 0, run.stdout[-3000:]
