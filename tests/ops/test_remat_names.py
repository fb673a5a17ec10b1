"""Policies of `jax.checkpoint` that keep the ops' results by name."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from rewrite_basics import every_equation

import ikbo_jax as ikbo
from ikbo_jax import masks

CU = np.asarray([0, 6, 9], np.int32)


def gdpa(activation: str) -> Any:
    def run(query: Any, key: Any, value: Any) -> jax.Array:
        mask = masks.causal()
        return ikbo.gdpa(query, key, value, CU, CU, activation=activation, mask=mask)

    return run


def attention(query: Any, key: Any, value: Any) -> jax.Array:
    index = np.asarray([0, 2, 2], np.int32)
    folded = (x.reshape(3, 3, 2, 8) for x in (query, key, value))
    return ikbo.attention(*folded, index).reshape(query.shape)


def norm_linear(x: Any, scale: Any, weight: Any) -> jax.Array:
    scale, weight = scale[0].ravel(), weight.reshape(16, 9)[:8]
    options = {"norm_scale": scale[:8], "activations": ["silu"]}
    return ikbo.norm_linear(x.reshape(18, 8), [weight], **options)[0]


def executions(fn: Any, *floats: jax.Array) -> list[str]:
    """The ops that a program computes; a gradient is none."""
    found = every_equation(jax.make_jaxpr(fn)(*floats))
    return [eqn.params["plan"].op for eqn in found if eqn.primitive.name == "ikbo_plan"]


@pytest.mark.parametrize(
    ("op", "run", "names"),
    [
        ("gdpa", gdpa("softmax"), ("ikbo_gdpa_out", "ikbo_gdpa_lse")),
        ("gdpa", gdpa("silu"), ("ikbo_gdpa_out",)),
        ("attention", attention, ("ikbo_attention_out", "ikbo_attention_lse")),
        ("norm_linear", norm_linear, ("ikbo_norm_linear_out", "ikbo_norm_linear_projection")),
    ],
    ids=["softmax", "silu", "attention", "norm_linear"],
)
def test_named_results_are_not_computed_again(op: str, run: Any, names: tuple[str, ...]) -> None:
    rng = np.random.default_rng(0)
    floats = [problems.random_array(rng, (9, 2, 8), "float32") for _ in range(3)]

    def layer(*floats: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(run(*floats)))

    def gradients(policy: Any) -> Any:
        return jax.grad(jax.checkpoint(layer, policy=policy), (0, 1, 2))

    saves = gradients(jax.checkpoint_policies.save_only_these_names(*names))
    again = gradients(jax.checkpoint_policies.nothing_saveable)
    assert executions(again, *floats) == [op] * 2
    assert executions(saves, *floats) == [op]
    found, expected = jax.jit(lambda *x: (saves(*x), jax.grad(layer, (0, 1, 2))(*x)))(*floats)
    chex.assert_trees_all_close(found, expected, atol=1e-6)
