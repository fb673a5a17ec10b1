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
import layout_sequences  # noqa: F401
import pytest
from layout_table import LAYOUTS
from lookalikes import attention, with_gradient
from rewrite_basics import loss
from test_rewrite_compositions import OF_CALLS, arguments, calling

import ikbo_jax as ikbo

#: Functions that are called, and in what, and lookups out of bounds: those that hold most.
MODELS: dict[str, tuple[Callable[..., Any], Any]] = {
    **{name: (fn, arguments()) for name, fn in OF_CALLS.items()},
    "in_custom_vjp": (calling(with_gradient(jnp.sin, 2.0)), arguments()),
    "out_of_bounds": attention("mix(softmax(L(q)))", rows="jnp.take(X, j, axis=0)")[1:3],
}
_LAYOUTS = """
    fields_concatenated_and_flattened gru lstm_with_padding searchsorted rnn_in_a_fori_loop
    mapped_over_candidates scanned_over_candidates causal_transformer_of_jitted_layers
    causal_transformer_in_a_scan hstu din
""".split()  # noqa: SIM905  A table of words reads better.


def model(name: str) -> tuple[Callable[..., Any], Any]:
    """A new function, which JAX has not traced before, and its arguments."""
    if name in MODELS:
        fn, args = MODELS[name]
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
