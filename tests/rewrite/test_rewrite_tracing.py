"""The work of tracing a rewritten function, counted in calls of functions.

A count of calls does not depend on how busy the machine is. The ratio of times is up to 1.2 times
the ratio of counts: a call of the rewriting takes longer than one of JAX, on average.
"""

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import function_calls
import jax
import jax.numpy as jnp
import layout_models  # noqa: F401  It fills the table.
import layout_sequences
import numpy as np
import pytest
from layout_table import HEADS, LAYOUTS, B, D, U, arrays
from lookalikes import attention, with_gradient
from rewrite_basics import loss
from test_rewrite_compositions import OF_CALLS, arguments, calling

import ikbo_jax as ikbo

WIDTH = D * HEADS


def calls(fn: Callable[..., Any], args: Any) -> int:
    """The number of calls, of Python's functions and others, while a function is traced."""
    # New functions each time, or JAX would not trace them again.
    return function_calls.count(
        lambda: functools.partial(jax.make_jaxpr(lambda *args: fn(*args)), *args)
    )


def transformer(layers: int, **options: Any) -> tuple[Any, tuple[Any, ...]]:
    """A causal transformer over [history, candidate]."""
    given = arrays()
    blocks = [given["blocks8"][n % 8] for n in range(layers)]
    args = blocks, given["long"], given["token"], given["index"]
    return layout_sequences.transformer(**options), args


def towers(layers: int, activation: Any = jax.nn.relu) -> tuple[Any, tuple[Any, ...]]:
    """A tower of the user, and a tower of what user and candidate make together."""

    def fn(weights: Any, first: Any, user: Any, cand: Any, index: Any) -> Any:
        x = user[index]
        for w in weights:
            x = activation(x @ w)
        x = jnp.concatenate([x, cand], axis=1) @ first
        for w in weights:
            x = activation(x @ w)
        return x

    weights = [jnp.ones((WIDTH, WIDTH))] * layers
    users = jnp.ones((U, WIDTH)), jnp.ones((B, WIDTH)), jnp.zeros(B, jnp.int32)
    return fn, (weights, jnp.ones((2 * WIDTH, WIDTH)), *users)


def scanned_transformer(layers: int) -> tuple[Any, tuple[Any, ...]]:
    """The same in a `scan`, whose work does not depend on the number of layers."""
    given = arrays()
    blocks = [given["blocks8"][n % 8] for n in range(layers)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *blocks)
    args = stacked, given["long"], given["token"], given["index"]
    return layout_sequences.causal_transformer_in_a_scan, args


def activation_units(count: int) -> tuple[Any, tuple[Any, ...]]:
    """DIN's unit, several times."""
    given = arrays()

    def fn(*args: Any) -> Any:
        total = layout_sequences.din(*args)
        for _ in range(count - 1):
            total = total + layout_sequences.din(*args)
        return total

    return fn, tuple(given[name] for name in LAYOUTS["din"].uses)


MODELS = {
    "transformer": transformer,
    "transformer_of_jitted_layers": functools.partial(transformer, wrapper=jax.jit),
    "transformer_of_checkpointed_layers": functools.partial(transformer, wrapper=jax.checkpoint),
    "transformer_in_a_scan": scanned_transformer,
    "towers_with_relu": towers,
    "towers_with_gelu": functools.partial(towers, activation=jax.nn.gelu),
    "towers_with_silu": functools.partial(towers, activation=jax.nn.silu),
    "activation_units": activation_units,
}


@pytest.mark.parametrize("name", MODELS)
def test_work_is_linear_in_equations(name: str) -> None:
    four, eight, sixteen = (
        calls(ikbo.rewrite(fn), args) for fn, args in map(MODELS[name], (4, 8, 16))
    )
    # A scan's length changes nothing, but one that is also a size of the model costs a few calls.
    assert sixteen - eight <= 2.05 * max(0, eight - four)


#: Tracing a rewritten function takes at most this many times the work of tracing the function.
BAR = 2.5


@pytest.mark.parametrize(
    ("name", "layers", "bar"),
    [
        *[("transformer", n, 2.2) for n in (1, 2)],
        *[("transformer", n, 2.18) for n in (6, 16, 24)],
        # The first layers are interpreted and become the program that all calls share.
        *[("transformer_of_jitted_layers", n, 2.4) for n in (2, 4, 16)],
        *[("transformer_of_checkpointed_layers", n, BAR) for n in (2, 4, 16)],
        ("transformer_of_jitted_layers", 50, 2.3),
        ("transformer_of_checkpointed_layers", 50, 2.3),
        ("transformer_in_a_scan", 2, 2.4),
        ("transformer_in_a_scan", 8, 2.4),
        ("activation_units", 1, 2.3),
        ("activation_units", 16, 2.4),
        *[("towers_with_relu", n, 2.4) for n in (1, 4)],
        ("towers_with_relu", 16, 2.1),
        ("towers_with_gelu", 16, 1.6),
        *[("towers_with_silu", n, BAR) for n in (1, 3, 16)],
    ],
)
def test_work_beside_plain_tracing(name: str, layers: int, bar: float) -> None:
    fn, args = MODELS[name](layers)
    assert times(fn, args) <= bar <= BAR


def times(fn: Callable[..., Any], args: Any) -> float:
    """The calls of tracing the rewritten function, divided by those of tracing the function."""
    return calls(ikbo.rewrite(fn), args) / calls(fn, args)


def test_layers_share_the_function_of_an_op() -> None:
    """XLA compiles an op's kernels once for all layers; the module has one function of the op."""
    fn, args = transformer(6)
    text, plain = (jax.jit(f).lower(*args).as_text() for f in (ikbo.rewrite(fn), fn))
    assert text.count("func.func private @_attention(") == 1
    assert text.count("call @_attention(") == 6
    assert text.count("\n") <= 2.55 * plain.count("\n")


#: Models above the bar, and what they may take at most. In jax before 0.12, a binary search is a
#: loop whose body is interpreted twice. The others are functions of a few equations, where finding
#: one lookup weighs most, and loops over candidates, which become two programs.
ABOVE = {
    "batch_and_positions_merged": 2.55,
    "compression_of_repeated_users": 2.75,
    "concatenated_in_a_map_over_indices": 3.35,
    "din_tiled": 2.8,
    "dlrm_of_masked_pairs": 2.85,
    "embedded_ids_repeated": 3.75,
    "filled": 2.95,
    "interpolated_features": 6.65,
    "one_hot": 2.6,
    "rnn_in_a_while_loop": 2.7,
    "scanned_over_candidates": 3.2,
    "searchsorted": 5.3,
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_work_of_every_layout(name: str) -> None:
    fn, args = LAYOUTS[name].fn, LAYOUTS[name].args()
    assert times(fn, args) <= ABOVE.get(name, BAR)


def bucketized(count: int) -> tuple[Any, tuple[Any, ...]]:
    """Numbers of the user, each an embedding of its bucket."""

    def fn(tables: Any, bounds: Any, weights: Any, user: Any, cand: Any, index: Any) -> Any:
        rows = user[index]
        found = [table[jnp.digitize(rows[:, n], bounds)] for n, table in enumerate(tables)]
        return jnp.concatenate([*found, cand], axis=1) @ weights

    user = jnp.linspace(-1.0, 11.0, U * count).reshape(U, count)
    tables = list(jnp.arange(count * 10 * 4.0).reshape(count, 10, 4))
    arrays = jnp.arange(9.0), jnp.ones((4 * count + D, D)), user, jnp.ones((B, D))
    return fn, (tables, *arrays, jnp.arange(B, dtype=jnp.int32) % U)


def test_a_function_of_a_loop_is_interpreted_once() -> None:
    two, five = (
        calls(ikbo.rewrite(fn), args) - calls(fn, args) for fn, args in map(bucketized, (2, 5))
    )
    # 4,200 for a feature. Interpreted again at each call, the function would take 31,000, unless
    # JAX, since version 0.12, has one equation for it.
    assert five - two <= 3 * 5_000
    fn, args = bucketized(5)
    np.testing.assert_allclose(ikbo.rewrite(fn)(*args), fn(*args), rtol=1e-6)


def nested_scans(depth: int) -> tuple[Any, tuple[Any, ...]]:
    """Layers on the user's rows and on the candidate's, in a scan in a scan."""

    def fn(w: Any, user: Any, cand: Any, index: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            users, x = carry
            x = jnp.tanh(jnp.concatenate([users, x], axis=1) @ jnp.concatenate([w, w]))
            return (jnp.tanh(users @ w), x), None

        def nested(depth: int, carry: Any) -> Any:
            def inside(carry: Any, _: Any) -> Any:
                return nested(depth - 1, carry), None

            return jax.lax.scan(inside if depth > 1 else body, carry, None, length=2)[0]

        users, x = nested(depth, (user[index], cand))
        return users + x

    return fn, (jnp.eye(D), jnp.ones((U, D)), jnp.ones((B, D)), jnp.zeros(B, jnp.int32))


def test_a_scan_in_a_scan_is_interpreted_once() -> None:
    one, two, three = (
        calls(ikbo.rewrite(fn), args) - calls(fn, args) for fn, args in map(nested_scans, (1, 2, 3))
    )
    assert three - two <= 1.2 * (two - one)


# What a rewrite holds: no tracers after their trace, and nothing that only cycles keep alive.

#: Functions that are called, and in what, and lookups out of bounds: those that hold most.
HOLDING: dict[str, tuple[Callable[..., Any], Any]] = {
    **{name: (fn, arguments()) for name, fn in OF_CALLS.items()},
    "in_custom_vjp": (calling(with_gradient(jnp.sin, 2.0)), arguments()),
    "out_of_bounds": attention("mix(softmax(L(q)))", rows="jnp.take(X, j, axis=0)")[1:3],
}
_LAYOUTS = """
    fields_concatenated_and_flattened gru lstm_with_padding searchsorted rnn_in_a_fori_loop
    mapped_over_candidates scanned_over_candidates causal_transformer_of_jitted_layers
    causal_transformer_in_a_scan hstu din
""".split()  # noqa: SIM905  A table of words reads better.


def holding(name: str) -> tuple[Callable[..., Any], Any]:
    """A new function, which JAX has not traced before, and its arguments."""
    if name in HOLDING:
        fn, args = HOLDING[name]
    else:
        fn, args = LAYOUTS[name].fn, tuple(LAYOUTS[name].args())
    return lambda *args: fn(*args), args


def gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(loss(fn), allow_int=True)


@pytest.mark.usefixtures("new_objects_alone")
def test_a_leaked_tracer_is_found() -> None:
    held: list[Any] = []
    with jax.checking_leaks(), pytest.raises(Exception, match="Leaked trace"):
        jax.make_jaxpr(lambda x: held.append(x + 1))(1.0)


@pytest.mark.usefixtures("new_objects_alone")
@pytest.mark.parametrize("name", [*HOLDING, *_LAYOUTS])
def test_no_tracer_outlives_its_trace(name: str) -> None:
    fn, args = holding(name)
    # Leaks inside of the rewriting would be reasons why lookups stay as they are.
    report = str(ikbo.explain(ikbo.rewrite(fn), *args))
    with jax.checking_leaks():
        assert str(ikbo.explain(ikbo.rewrite(holding(name)[0]), *args)) == report
        jax.make_jaxpr(gradient(ikbo.rewrite(holding(name)[0])))(*args)


@pytest.fixture
def without_collection(new_objects_alone: None) -> Iterator[None]:
    """Turns Python's search for unreachable cycles off."""
    gc.disable()
    yield
    gc.enable()


def tracers() -> set[int]:
    return {id(x) for x in gc.get_objects() if isinstance(x, jax.core.Tracer)}


@pytest.mark.usefixtures("without_collection")
@pytest.mark.parametrize("name", [*HOLDING, *_LAYOUTS])
def test_what_is_traced_is_freed_at_once(name: str) -> None:
    before = tracers()
    for of in (lambda f: f, gradient):
        fn, args = holding(name)
        jax.make_jaxpr(of(ikbo.rewrite(fn)))(*args)
        assert tracers() <= before


@pytest.mark.usefixtures("without_collection")
def test_arrays_are_freed_after_a_call() -> None:
    fn, args = holding("hstu")
    args = jax.tree.map(jnp.copy, args)
    alive = [weakref.ref(x) for x in jax.tree.leaves(args)]
    results = ikbo.rewrite(fn)(*args)
    alive.append(weakref.ref(results))
    del args, results
    assert [x for x in alive if x() is not None] == []


@pytest.mark.usefixtures("without_collection")
def test_a_model_that_raises_is_freed() -> None:
    """JAX's finalizers of a trace's constants hold the trace if the traced function raises."""

    def fn(weight: Any, user: Any, index: Any) -> Any:
        raise ValueError(f"the holding, at {jnp.sum(user[index] @ weight)}")

    weight = jnp.ones((3, 3))
    alive = weakref.ref(weight)
    with pytest.raises(ValueError, match="the holding"):
        ikbo.rewrite(functools.partial(fn, weight))(jnp.ones((2, 3)), jnp.zeros(8, jnp.int32))
    del weight
    assert alive() is None
