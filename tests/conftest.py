"""Settings of the whole suite."""

import gc
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import oracle_attention
import problems
import pytest
from small_kernels import prefer_kernels

from ikbo_jax.ops import dispatch
from ikbo_jax.rewrite import interpret
from ikbo_jax.rewrite.calls import program

# The last is configured first.
pytest_plugins = ["kernel_record", "case_sample", "compiled_programs", "gpu_session", "time_limit"]

# The tests compile thousands of small programs to run each once.  LLVM's optimisation of them would
# be 40 % of the suite.  The emitters that lower every fusion through MLIR, and the division of a
# program into parts that compile in parallel, take half of what is then left of a gradient's test.
# A GPU would try every way of multiplying each oracle's matrices.
# XLA reads this when it first looks for devices.
if os.environ.get("JAX_PLATFORMS") == "cpu":
    # Without any optimisation, XLA of jaxlib 0.12 computes a float32 gradient near 3 with an error
    # of 2e-5; with the first level of it, and without in 0.11, the error is 2e-6.
    level = int(jax.__version_info__ >= (0, 12))
    fast = (
        f"--xla_backend_optimization_level={level} --xla_llvm_disable_expensive_passes=true "
        "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "
        "--xla_cpu_parallel_codegen_split_count=1"
    )
else:
    fast = "--xla_gpu_autotune_level=0"
os.environ.setdefault("XLA_FLAGS", fast)
# XLA's threads on the CPU, by default one for each core. An interpreted warpgroup holds a thread
# while it waits for others: with four warpgroups, two cores are too few.
os.environ.setdefault("NPROC", "8")

# The library must not promote dtypes or ranks silently, nor must its tests.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Lowering would note ten frames of the stack beside each operation: about 4 % of the time of two
# files, in three runs.
jax.config.update("jax_include_full_tracebacks_in_locations", False)

# Meshes of one axis and of two.
jax.config.update("jax_num_cpu_devices", 8)

# Every new shape compiles, which takes longer than hypothesis allows an example by default.
hypothesis.settings.register_profile(
    "ikbo", deadline=None, max_examples=12, derandomize=True, database=None
)
hypothesis.settings.load_profile("ikbo")


#: Its session of Ray Serve takes 47 s, in which the test's process waits. Last, it would run alone.
FIRST = "test_serving_engine.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name != FIRST)


def pytest_collection_finish() -> None:
    # What JAX and the collected tests have allocated lives to the end; to look through it again and
    # again was 8 % of an interpreted test's time. So do most jaxprs that the tests trace, which JAX
    # caches: with a threshold of 50,000 objects, looking through those was 6 % of a rewrite's test.
    gc.collect()
    gc.freeze()
    gc.set_threshold(400_000, 20, 6)


def pytest_runtest_setup(item: pytest.Item) -> None:
    # Who asks for the GPU tests where they cannot run learns so, instead of seeing them skipped.
    if item.get_closest_marker("gpu") and (reason := dispatch.hopper_unavailable_reason()):
        pytest.fail(f"GPU test on a machine that cannot run it: {reason}", pytrace=False)


#: Tests of rewrites in which rules raise on purpose, or for want of a symbolic size.
RULES_RAISE = ("test_rewrite_robust", "test_rewrite_runs")


@pytest.fixture(autouse=True)
def rules_do_not_raise(request, monkeypatch) -> Iterator[None]:
    """A mistake in a rule fails a test; the rewrite would only leave the original equation."""
    name = request.module.__name__
    if not name.startswith("test_rewrite") or name in RULES_RAISE:
        yield
        return

    def found(error: Exception) -> str:
        raise error

    for module in (interpret, program):
        monkeypatch.setattr(module, "described", found)
    yield


@pytest.fixture
def new_objects_alone() -> None:
    """Python's collector and its searches see no object that is older than the test.

    Among all objects of a long session, JAX's search for leaked tracers took 67 s in one test.
    """
    gc.freeze()


@pytest.fixture
def models_may_promote() -> Iterator[None]:
    """Models may add arrays of other dtypes and ranks, as people's do."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """The CPU is the default device, also on a machine with a GPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


class FakeHopper(NamedTuple):
    """What the fake kernels were called with, in order: the result's, and the gradient's."""

    calls: list[dict[str, Any]]
    backward_calls: tuple[dict[str, Any], ...] | list[dict[str, Any]] = ()


@pytest.fixture
def seems_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that seems to have a Hopper GPU; kernels are lowered or planned, and not run."""
    monkeypatch.setattr(dispatch, "hopper_unavailable_reason", lambda: None)
    monkeypatch.setattr(dispatch, "num_sms", lambda: 132)


@pytest.fixture
def fake_hopper(seems_hopper: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHopper]:
    """A machine that seems to have a Hopper GPU, whose kernels are NumPy callbacks.

    The kernels run linear compressions that the cost model leaves to XLA, because they are small.
    The callbacks have neither a vmap rule nor a gradient, like the kernels that they stand for:
    whoever gets past the op's own rules fails.
    """
    from ikbo_jax.ops import linear_compression as op
    from ikbo_jax.pallas.linear_compression import kernel
    from ikbo_jax.pallas.linear_compression_backward import d_weight
    from ikbo_jax.pallas.look_up import sums

    calls: list[dict[str, Any]] = []
    prefer_kernels(monkeypatch)

    def fake_kernel(weights, embeddings, parents, *, config, num_sms):
        calls.append({"config": config, "num_sms": num_sms})
        assert [w.ndim for w in weights] == [2] * len(weights)
        assert [e.ndim for e in embeddings] == [3] * len(weights)
        assert [p.ndim for p in parents[1:]] == [1] * (len(weights) - 1)
        batch, _, n = embeddings[-1].shape
        dtype = embeddings[-1].dtype
        out = jax.ShapeDtypeStruct((batch, weights[-1].shape[0], n), dtype)
        return jax.pure_callback(
            lambda *levels: problems.numpy_oracle(*levels).astype(dtype),
            out,
            weights,
            embeddings,
            parents,
        )

    def fake_d_weight(d_out, embedding, *, config, num_sms, problems, sources, dtype):
        dtype = jnp.dtype(dtype or d_out.dtype)
        calls.append({"config": config, "num_sms": num_sms, "dtype": dtype})
        if sources is not None:
            embedding = embedding.at[sources].get(mode="fill", fill_value=0)

        def compute(*arrays):
            d_out, embedding = (np.asarray(x, np.float64) for x in arrays)
            d_out, embedding = (x.reshape(problems, -1, *x.shape[1:]) for x in (d_out, embedding))
            return np.einsum("pbmn,pbkn->pmk", d_out, embedding).astype(dtype)

        shape = (problems, d_out.shape[1], embedding.shape[1])
        return jax.pure_callback(compute, jax.ShapeDtypeStruct(shape, dtype), d_out, embedding)

    def fake_sums(d_out, cand_to_user, users, *, config, is_sorted=False, dtype=None):
        calls.append({"config": config})
        dtype = dtype or d_out.dtype

        def compute(d_out, index):
            total = np.zeros((users, *d_out.shape[1:]))
            np.add.at(total, np.clip(index, 0, users - 1), np.asarray(d_out, np.float64))
            return total.astype(dtype)

        out = jax.ShapeDtypeStruct((users, *d_out.shape[1:]), dtype)
        return jax.pure_callback(compute, out, d_out, cand_to_user)

    monkeypatch.setattr(kernel, "linear_compression_kernel", fake_kernel)
    monkeypatch.setattr(d_weight, "d_weight_kernel", fake_d_weight)
    monkeypatch.setattr(sums, "segment_sum_kernel", fake_sums)
    # Programs traced with a real kernel, or with another test's, must not be used again.
    op._OP.jitted.clear_cache()
    yield FakeHopper(calls)
    op._OP.jitted.clear_cache()


@pytest.fixture
def fake_attention(seems_hopper: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHopper]:
    """`fake_hopper` for attention.

    A call's "is_sorted" says whether the work order is by user; a kernel that lists candidates
    finds that order itself.
    """
    from ikbo_jax.ops import attention as op
    from ikbo_jax.ops.attention_arrays import Arrays
    from ikbo_jax.pallas.attention_backward import kernel as backward_kernel
    from ikbo_jax.pallas.attention_backward import own
    from ikbo_jax.pallas.attention_backward.rows import delta_by_xla
    from ikbo_jax.pallas.attention_backward.statistics import Inputs
    from ikbo_jax.pallas.few_queries import kernel as few_queries
    from ikbo_jax.pallas.flash import attention as kernel
    from ikbo_jax.pallas.worklist import counted_order

    calls: list[dict[str, Any]] = []
    backward_calls: list[dict[str, Any]] = []

    def fake_kernel(
        query,
        key,
        value,
        index,
        lengths,
        key_value_ranges=None,
        self_key=None,
        self_value=None,
        page_table=None,
        *,
        return_residuals,
        scale,
        order=None,
        targets=None,
        **rest,
    ):
        assert (query.ndim, key.ndim, value.ndim, index.ndim) == (4, 4, 4, 1)
        assert order is None or query.shape[1] % 64 == 0
        call = {"query": query.shape, "has_order": order is not None, "scale": scale, **rest}
        call["return_residuals"] = return_residuals
        calls.append(call)
        if page_table is not None:
            laid_out = Arrays(query, key, value, index, None, page_table=page_table).laid_out()
            call["page"], key, value = key.shape[1], laid_out.key, laid_out.value

        def run(order, targets, ranges, own, *arrays):
            inputs = problems.AttentionInputs(*arrays)
            users = np.clip(inputs.cand_to_user, 0, inputs.key.shape[0] - 1)
            if order is not None:
                assert sorted(order) == list(range(len(users)))
                users = users[order]
            call["is_sorted"] = rest.get("lists", False) or bool(np.all(np.diff(users) >= 0))
            if ranges is not None and targets is not None:
                ranges = np.asarray(ranges)[targets]
            if targets is not None:
                own = {name: np.asarray(x)[targets] for name, x in own.items()}
            options = {"scale": scale, "ranges": ranges, **own}
            out, lse = oracle_attention.numpy_attention_oracle(inputs, **options)
            if targets is not None:
                place = np.argsort(targets)
                out, lse = out[place], lse[place]
            return out.astype(query.dtype), lse.astype(np.float32)

        shapes = (
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct(query.shape[:3], jnp.float32),
        )
        arrays = (query, key, value, index, lengths)
        own = {} if self_key is None else {"self_key": self_key, "self_value": self_value}
        call["own"] = list(own)
        out, lse = jax.pure_callback(run, shapes, order, targets, key_value_ranges, own, *arrays)
        return out, lse if return_residuals else None

    def fake_backward(query, key, value, index, lengths, *tensors, scale, dtype, **rest):
        assert (query.ndim, key.ndim, value.ndim, index.ndim) == (4, 4, 4, 1)
        backward_calls.append({"query": query.shape, "scale": scale, "dtype": dtype, **rest})
        dtypes = (query.dtype, dtype or key.dtype, dtype or key.dtype)
        shapes = tuple(
            jax.ShapeDtypeStruct(x.shape, jnp.dtype(d))
            for x, d in zip((query, key, value), dtypes, strict=True)
        )

        def run(query, key, value, index, lengths, out, lse, d_out, d_lse):
            inputs = problems.AttentionInputs(query, key, value, index, lengths)
            users = np.clip(index, 0, key.shape[0] - 1)
            assert not rest["indices_are_sorted"] or np.all(np.diff(users) >= 0)
            d_lse = np.zeros_like(lse) if d_lse is None else d_lse
            found = oracle_attention.numpy_attention_gradients(
                inputs, d_out, d_lse, scale=scale, merged=(out, lse)
            )
            return tuple(x.astype(s.dtype) for x, s in zip(found, shapes, strict=True))

        arrays = (query, key, value, index, lengths, *tensors)
        found = jax.pure_callback(run, shapes, *arrays)
        if rest["keeps_delta"]:
            out, lse, d_out, d_lse = tensors
            found = *found, delta_by_xla(Inputs(out, d_out, lse, d_lse, None))
        return found

    monkeypatch.setattr(counted_order, "fits", lambda *sizes: False)
    monkeypatch.setattr(kernel, "attention_kernel", fake_kernel)
    monkeypatch.setattr(backward_kernel, "attention_backward_kernel", fake_backward)
    monkeypatch.setattr(own, "add_own_tokens", oracle_attention.own_gradient)
    monkeypatch.setattr(few_queries, "few_queries_kernel", fake_kernel)
    op._OP.jitted.clear_cache()
    yield FakeHopper(calls, backward_calls)
    op._OP.jitted.clear_cache()
