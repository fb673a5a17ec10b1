"""Ops on arrays that are sharded over eight devices, under plain jit: results, layouts, traffic."""

import functools
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from processes import child_environment
from sharded_calls import (
    CASES,
    CASES_OF_TWO_AXES,
    KINDS,
    B,
    Case,
    U,
    attend,
    check_source_locations,
    collectives,
    draw,
    floats,
    mesh_of,
    on,
    on_mesh,
    reductions,
    step_of,
)

import ikbo_jax as ikbo


def check(case: Case, mesh, *, alone: bool) -> None:
    """Results, gradients and collectives of a step; `alone`: also collectives of the result."""
    arrays = draw(case)
    step = step_of(case.op)
    expected_gradients, expected = step(*arrays.values())
    sharded = on_mesh(mesh, case, arrays).values()
    program = step.lower(*sharded).compile()
    gradients, out = program(*sharded)
    chex.assert_trees_all_close(np.asarray(out), np.asarray(expected), atol=1e-5)
    names = [list(arrays)[n] for n in floats(list(arrays.values()))]
    for name, x, y in zip(names, gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=2e-4, err_msg=name)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, case.out), out.ndim)
    if case.is_local:
        check_source_locations(program.as_text())
        assert collectives(program.as_text()) <= {"all-reduce"}
        assert reductions(program.as_text()) == case.sums
        if alone:
            forward = jax.jit(case.op).lower(*sharded).compile().as_text()
            check_source_locations(forward)
            assert not collectives(forward)


#: Every case on both meshes. Kinds take turns: each case has both. A program of the result alone is
#: compiled for the first mesh: a step's collectives include those of its result.
ON_MESHES = [
    (name, mesh, list(KINDS)[(m + n) % len(KINDS)])
    for n, name in enumerate(CASES)
    for m, mesh in enumerate(("8", "4x2"))
]


@pytest.mark.parametrize(("name", "mesh", "kind"), ON_MESHES)
def test_results_gradients_layouts_and_traffic(name: str, mesh: str, kind: str) -> None:
    check(CASES[name], mesh_of(mesh, kind), alone=mesh == "8")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES_OF_TWO_AXES)
def test_two_axes_at_once(name: str, kind: str) -> None:
    check(CASES_OF_TWO_AXES[name], mesh_of("4x2", kind), alone=kind == "auto")


EAGER = (
    *("linear_candidates", "attention_everything", "gdpa_heads", "gdpa_rows_masked"),
    *("gdpa_heads_masked", "gdpa_rows_within_intervals"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_eager_calls(kind: str) -> None:
    """A call outside jit on divided arrays takes the same way."""
    mesh = mesh_of("8", kind)
    for name in EAGER:
        case = CASES[name]
        arrays = draw(case)
        out = case.op(*on_mesh(mesh, case, arrays).values())
        expected = step_of(case.op)(*arrays.values())[1]
        chex.assert_trees_all_close(np.asarray(out), np.asarray(expected), atol=1e-5)
        assert out.sharding.is_equivalent_to(NamedSharding(mesh, case.out), out.ndim)


@jax.jit
def curvature(query, key, value, index):
    def slope(query):
        loss = lambda query: jnp.sum(attend(query, key, value, index) ** 2)  # noqa: E731
        return jnp.sum(jax.grad(loss)(query))

    return jax.grad(slope)(query)


@jax.jit
def repeated(query, key, value, index):
    """Gradients by queries and keys of two layers of attention."""

    def loss(query, key):
        layer = jax.checkpoint(lambda query: attend(query, key, value, index))
        out, _ = jax.lax.scan(lambda query, _: (layer(query), None), query, length=2)
        return jnp.sum(out**2)

    return jax.grad(loss, (0, 1))(query, key)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fn", [curvature, repeated], ids=["second_derivatives", "scan"])
def test_second_derivatives_and_gradients_of_repeated_layers(fn, kind: str) -> None:
    mesh, case = mesh_of("8", kind), CASES["attention_candidates"]
    arrays = draw(case)
    found, expected = fn(**on_mesh(mesh, case, arrays)), fn(**arrays)
    chex.assert_trees_all_close(jax.device_get(found), jax.device_get(expected), atol=1e-4)
    if fn is repeated:
        assert found[0].sharding.is_equivalent_to(NamedSharding(mesh, P("x")), found[0].ndim)


def test_gradients_in_bfloat16_are_rounded_once() -> None:
    """Partial sums of eight devices stay in float32: the error is that of one rounding."""
    mesh = mesh_of("8", "explicit")
    case = CASES["linear_candidates"]
    arrays = {
        name: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x
        for name, x in draw(case).items()
    }
    exact = {name: np.asarray(x.astype(jnp.float32), np.float64) for name, x in arrays.items()}
    w_cand, w_user, *rest = on_mesh(mesh, case, arrays).values()

    def total(w_user, w_cand, *rest):
        return jnp.sum(case.op(w_cand, w_user, *rest).astype(jnp.float32))

    gradient = np.asarray(jax.jit(jax.grad(total))(w_user, w_cand, *rest), np.float64)
    users = exact["e_user"][np.asarray(arrays["index"])].sum(axis=(0, 2))
    expected = np.broadcast_to(users, gradient.shape)
    np.testing.assert_allclose(gradient, expected, rtol=2.0**-8, atol=0)


def test_the_gradients_kernel_sums_parts_in_float32(fake_attention) -> None:
    """Each device's kernel returns float32 sums of its candidates, rounded after the sum."""
    mesh = mesh_of("8", "explicit")
    shape = {"query": (B, 3, 2, 64), "key": (U, 5, 2, 64), "value": (U, 5, 2, 64)}
    case = CASES["attention_candidates"]
    case = case._replace(arrays=shape | {"index": (B, -U)})
    drawn = draw(case)
    arrays = {n: x.astype(jnp.bfloat16) if n != "index" else x for n, x in drawn.items()}

    def total(floats, index):
        return jnp.sum(jnp.sin(case.op(**floats, index=index).astype(jnp.float32)))

    def gradients(arrays):
        floats = {name: x for name, x in arrays.items() if name != "index"}
        return jax.jit(jax.grad(total))(floats, arrays["index"])

    found = gradients(on_mesh(mesh, case, arrays))
    asked = {call["dtype"]: call["query"] for call in fake_attention.backward_calls}
    assert asked == {"float32": (B // 8, 3, 2, 64)}
    exact = {n: x.astype(jnp.float32) if n != "index" else x for n, x in arrays.items()}
    for name, want in gradients(exact).items():
        assert found[name].dtype == jnp.bfloat16
        x = np.asarray(found[name], np.float32)
        np.testing.assert_allclose(x, want, rtol=0, atol=0.03 * np.abs(want).max())


@pytest.mark.parametrize("kind", KINDS)
def test_explain_says_how_a_call_divides_and_what_moves(kind: str) -> None:
    mesh = mesh_of("4x2", kind)
    case = CASES["attention_users"]
    specs = {
        "query": P("x", None, "y"),
        "index": P("x"),
        "key": P("x"),
        "value": P(None, None, "y"),
    }
    shaped = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, specs[name]))
        for name, x in draw(case).items()
    }
    (plan,) = ikbo.explain(case.op, **shaped).plans
    text = plan.division
    assert "candidates over 'x' (4 devices)" in text
    assert "heads over 'y' (2 devices)" in text
    assert "gathers key over 'x', 10,240 bytes" in text
    assert "the gradient sums value over 'x', 10,240 bytes" in text
    assert "gathers value" not in text
    assert (plan.problem.batch, plan.problem.q_heads) == (4, 4)
    # One device of a large host is not divided.
    (plan,) = ikbo.explain(case.op, **draw(case)).plans
    assert plan.division == ""


@functools.cache
def rows_of(activation: str, bound: int | None, *, shared: bool) -> Callable[..., jax.Array]:
    """`gdpa` of 32 rows of queries in four sequences, which may share the memory's sequences."""
    memory_offsets = np.array([0, 4, 9] if shared else [0, 2, 5, 7, 9], np.int32)
    index = np.array([1, 0, 1, 0], np.int32) if shared else None

    def op(query: jax.Array, memory: jax.Array, offsets: jax.Array) -> jax.Array:
        return ikbo.gdpa(
            query, memory, 2 * memory, offsets, memory_offsets,
            q_to_kv=index, activation=activation, max_seqlen_q=bound,
        )  # fmt: skip

    return op


@pytest.mark.parametrize(
    ("activation", "offsets", "bound", "kind"),
    [
        ("gelu", [0, 3, 3, 20, 27], 11, "explicit"),
        ("softmax", [0, 3, 3, 20, 27], 11, "auto"),
        ("softmax", [0, 3, 3, 20, 27], 2**31 - 1, "auto"),
        ("softmax", [-5, 3, 3, 20, 27], 4, "explicit"),
        ("softmax", [-(2**31), 3, 2, 20, 2**31 - 1], 9, "auto"),
        ("softmax", [-(2**31), 3, 2, 20, 2**31 - 1], None, "explicit"),
    ],
)
def test_rows_of_jagged_queries(activation, offsets, bound, kind) -> None:
    """Sequences that lie on two devices, and gradients.

    A bound cuts one of them, or bounds nothing; offsets out of range are clamped first.
    """
    mesh = mesh_of("8", kind)
    rng = np.random.default_rng(0)
    query, memory = (rng.normal(size=(n, 2, 8)).astype(np.float32) for n in (32, 9))
    arrays = [query, memory, np.array(offsets, np.int32)]
    step = step_of(rows_of(activation, bound, shared=bound == 11))
    found, out = step(*on(mesh, arrays, [P("x"), P(), P()]))
    expected_gradients, expected = jax.device_get(step(*arrays))
    chex.assert_trees_all_close(np.asarray(out), expected, atol=1e-5)
    chex.assert_trees_all_close(jax.device_get(found), expected_gradients, atol=1e-4)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), out.ndim)
    assert bound != 11 or not np.asarray(out)[14:20].any()


# Programs of sharded ops in JAX's persistent compilation cache, in another process.
#
# With Auto mesh axes, a program has the address of a callback in its text, which another process
# does not repeat. `jax_remove_custom_partitioning_ptr_from_cache_key` leaves it out of the cache's
# key; a digest of what the callback does, which the ops write into the program, then keeps programs
# apart.

ROOT = pathlib.Path(__file__).resolve().parents[2]
#: Takes the cache's folder, and programs as JSON: [kind of the mesh axes, scale]. Prints for each
#: how often JAX found it in the cache, how often it did not, and the result.
CODE = """
import json
import sys

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ikbo_jax as ikbo

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))

rng = np.random.default_rng(0)
query = rng.normal(size=(16, 2, 1, 8)).astype(np.float32)
key, value = (rng.normal(size=(3, 5, 1, 8)).astype(np.float32) for _ in range(2))
index = np.arange(16, dtype=np.int32) % 3


def run(kind, scale):
    jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", kind == "Auto")
    mesh = jax.make_mesh((8,), ("x",), axis_types=(getattr(AxisType, kind),))
    specs = P("x"), P(), P(), P("x")
    args = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip((query, key, value, index), specs)
    ]

    @jax.jit
    def program(query, key, value, index):
        def loss(query, key, value):
            out = ikbo.attention(query, key, value, index, scale=scale)
            return (out * out).sum(), out

        gradients, out = jax.grad(loss, (0, 1, 2), has_aux=True)(query, key, value)
        return out, *gradients

    events.clear()
    results = [np.asarray(x) for x in program(*args)]
    return {
        "hits": sum("cache_hits" in name for name in events),
        "misses": sum("cache_misses" in name for name in events),
        "sums": [float(np.abs(x).sum()) for x in results],
    }


print(json.dumps([run(*program) for program in json.loads(sys.argv[2])]))
"""


def outcomes(folder: pathlib.Path, programs: list[tuple[str, float]]) -> list[dict]:
    """What a new process finds in the cache."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(folder), json.dumps(programs)],
        env=child_environment(ROOT, without="JAX_", JAX_PLATFORMS="cpu"),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.time_limit(240)
def test_another_process_finds_programs_and_tells_scales_apart(tmp_path):
    known = [("Auto", 0.5), ("Explicit", 0.5)]
    first = outcomes(tmp_path, known)
    assert [(x["hits"], x["misses"]) for x in first] == [(0, 1), (0, 1)]
    # The new scales come first: a program that is not told apart would be found here.
    *new, auto, explicit = outcomes(tmp_path, [("Auto", 0.25), ("Explicit", 0.25), *known])
    assert [(x["hits"], x["misses"]) for x in (auto, explicit)] == [(1, 0), (1, 0)]
    assert [(x["hits"], x["misses"]) for x in new] == [(0, 1), (0, 1)]
    for before, after, other in zip(first, (auto, explicit), new, strict=True):
        assert before["sums"] == after["sums"]
        # The result and all three gradients.
        assert np.all(np.abs(np.subtract(before["sums"], other["sums"])) > 1e-2)
    np.testing.assert_allclose(first[0]["sums"], first[1]["sums"], rtol=1e-5)
    np.testing.assert_allclose(new[0]["sums"], new[1]["sums"], rtol=1e-5)
