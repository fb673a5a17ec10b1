"""What a rewrite holds: no tracers after their trace, and nothing that only cycles keep alive."""

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import layout_models  # noqa: F401  These fill the table.
import layout_positions  # noqa: F401
import layout_sequences
import pytest
from layout_table import LAYOUTS, arrays
from rewrite_basics import loss

import ikbo_jax as ikbo


def layers(of: Callable[..., Any], blocks: Any, long: Any, token: Any, index: Any) -> Any:
    """Layers on looked-up rows and on the candidates' rows, by a function that calls share."""

    @of
    def layer(w: Any, users: Any, x: Any) -> Any:
        users = jnp.tanh(jnp.sin(users) @ w) * 2 + 1
        return users, jnp.tanh(jnp.concatenate([users, x], axis=1) @ jnp.concatenate([w, w])) + x

    users, x = long[index].mean(axis=1), token
    for block in blocks[:4]:
        users, x = layer(block["out"], users, x)
    return users + x


@jax.custom_jvp
def normalised(x: Any) -> Any:
    return x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1)


@normalised.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (x,), (dx,) = primals, tangents
    return normalised(x), dx * jnp.cos(x).sum(axis=-1, keepdims=True)


@jax.custom_vjp
def reversed_gradient(x: Any) -> Any:
    return x * 2


reversed_gradient.defvjp(lambda x: (x * 2, x), lambda x, g: (-g * x,))


def with_rules(blocks: Any, long: Any, token: Any, index: Any) -> Any:
    """Functions with derivatives of their own."""
    users = reversed_gradient(normalised(long[index].mean(axis=1) @ blocks[0]["out"]))
    return jnp.tanh(users * token)


def out_of_bounds(blocks: Any, long: Any, token: Any, index: Any) -> Any:
    """A function that calls share looks rows up by an index that it computes."""
    keys, values = (jnp.take(x, index, axis=0) for x in (long, long @ blocks[0]["out"]))
    weights = jax.nn.softmax(jnp.einsum("bd,bsd->bs", token, keys))
    return jnp.einsum("bs,bsd->bd", weights, values)


def in_a_cond(w: Any, x: Any, y: Any) -> Any:
    def branch(x: Any, y: Any) -> Any:
        return jnp.tanh(x @ w), y + x

    return jax.lax.cond(w[0, 0] > 0, branch, lambda x, y: (x * 2, y), x, y)


#: Sequences of a user and its candidate: those whose calls, loops and masks hold most.
MODELS: dict[str, Callable[..., Any]] = {
    "jitted": functools.partial(layers, jax.jit),
    "checkpointed": functools.partial(layers, jax.checkpoint),
    "custom_derivatives": with_rules,
    "out_of_bounds": out_of_bounds,
    "cond": functools.partial(layers, lambda _: in_a_cond),
    "transformer_in_a_scan": lambda blocks, *rest: layout_sequences.causal_transformer_in_a_scan(
        jax.tree.map(lambda *x: jnp.stack(x), *blocks), *rest
    ),
}
_LAYOUTS = """
    fields_concatenated_and_flattened gru lstm_with_padding searchsorted rnn_in_a_fori_loop
    mapped_over_candidates scanned_over_candidates causal_transformer_of_jitted_layers hstu din
""".split()  # noqa: SIM905  A table of words reads better.


def model(name: str) -> tuple[Callable[..., Any], Any]:
    """A new function, which JAX has not traced before, and its arguments."""
    if name in MODELS:
        given = arrays()
        blocks = given["blocks8"][:4]
        fn, args = MODELS[name], (blocks, *(given[x] for x in ("long", "token", "index")))
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
@pytest.mark.parametrize("name", [*MODELS, *_LAYOUTS])
def test_no_tracer_outlives_its_trace(name: str) -> None:
    fn, args = model(name)
    # Leaks inside of the rewriting would be reasons why lookups stay as they are.
    report = str(ikbo.explain(ikbo.rewrite(fn), *args))
    with jax.checking_leaks():
        assert str(ikbo.explain(ikbo.rewrite(model(name)[0]), *args)) == report
        jax.make_jaxpr(gradient(ikbo.rewrite(model(name)[0])))(*args)


@pytest.fixture
def without_collection(new_objects_alone: None) -> Iterator[None]:
    """Turns Python's search for unreachable cycles off."""
    gc.disable()
    yield
    gc.enable()


def tracers() -> set[int]:
    return {id(x) for x in gc.get_objects() if isinstance(x, jax.core.Tracer)}


@pytest.mark.usefixtures("without_collection")
@pytest.mark.parametrize("name", [*MODELS, *_LAYOUTS])
def test_what_is_traced_is_freed_at_once(name: str) -> None:
    before = tracers()
    for of in (lambda f: f, gradient):
        fn, args = model(name)
        jax.make_jaxpr(of(ikbo.rewrite(fn)))(*args)
        assert tracers() <= before


@pytest.mark.usefixtures("without_collection")
def test_arrays_are_freed_after_a_call() -> None:
    fn, args = model("hstu")
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
        raise ValueError(f"the model, at {jnp.sum(user[index] @ weight)}")

    weight = jnp.ones((3, 3))
    alive = weakref.ref(weight)
    with pytest.raises(ValueError, match="the model"):
        ikbo.rewrite(functools.partial(fn, weight))(jnp.ones((2, 3)), jnp.zeros(8, jnp.int32))
    del weight
    assert alive() is None
