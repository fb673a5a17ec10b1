"""What the report of a rewrite says is saved is what XLA counts of the compiled programs."""

import jax
import jax.numpy as jnp
import layout_models  # noqa: F401  It fills the table.
import layout_sequences  # noqa: F401
import pytest
from jax import lax
from layout_table import LAYOUTS

import ikbo_jax as ikbo
from ikbo_jax.rewrite.report.report import PRECISION


def check_saved_is_xlas(fn, args, within: float) -> None:
    """The share of bytes that is said to be saved differs from XLA's by this much at most.

    Of FLOPs, too, the sign is XLA's, if the report gives one, and what is said to be saved is saved
    but for 20 % and the estimate's precision. The report counts FLOPs of products, XLA all.
    """
    (report,) = ikbo.explain(ikbo.rewrite(fn), *args).notes
    both = report.costs.original, report.costs.rewritten
    counts = [jax.jit(f).lower(*args).compile().cost_analysis() for f in (fn, ikbo.rewrite(fn))]
    for n, key in enumerate(("flops", "bytes accessed")):
        told, by_xla = 1 - both[1][n] / both[0][n], 1 - counts[1][key] / counts[0][key]
        assert key == "flops" or abs(told - by_xla) < within, (told, by_xla)
        assert abs(told) < PRECISION or told * by_xla > 0, (key, told, by_xla)
        assert told < PRECISION or by_xla > 0.8 * told - PRECISION, (key, told, by_xla)


def target_attention(q, k, v, index):
    logits = jnp.einsum("bnh,bsnh->bns", q, k[index]) / 4
    return jnp.einsum("bns,bsnh->bnh", jax.nn.softmax(logits, axis=-1), v[index])


def senet(user, cand, squeeze, excite, w, index):
    x = jnp.concatenate([user[index], cand], axis=1)
    weights = jax.nn.relu(jax.nn.relu(x.mean(-1) @ squeeze) @ excite)
    return (x * weights[..., None]).reshape(len(cand), -1) @ w


def recurrent_layers(history, cand, decay, w_in, w_out, index):
    """Linear recurrent units with residuals, without norms."""

    def step(x, y):
        return x[0] * y[0], y[0] * x[1] + y[1]

    x = jnp.concatenate([history[index], cand[:, None]], axis=1)
    for _ in range(2):
        inputs = x @ w_in
        decays = jnp.broadcast_to(jax.nn.sigmoid(decay), inputs.shape)
        states = lax.associative_scan(step, (decays, inputs), axis=1)[1]
        x = x + jax.nn.gelu(states @ w_out)
    return x[:, -1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("fn", "candidates", "users", "shapes"),
    [
        # One user; padded groups of candidates, whose products compute more than the original's.
        (target_attention, 64, 1, ((64, 1, 32), (1, 64, 1, 32), (1, 64, 1, 32))),
        (target_attention, 512, 8, ((512, 1, 32), (8, 48, 1, 32), (8, 48, 1, 32))),
        (target_attention, 1024, 64, ((1024, 1, 32), (64, 8, 1, 32), (64, 8, 1, 32))),
        (senet, 512, 64, ((64, 8, 32), (512, 8, 32), (16, 5), (5, 16), (512, 64))),
        (recurrent_layers, 256, 16, ((16, 32, 32), (256, 32), (32,), (32, 32), (32, 32))),
    ],
)
def test_what_is_said_to_be_saved_is_what_xla_counts(fn, candidates, users, shapes, dtype) -> None:
    arrays = (jnp.zeros(x, dtype) for x in shapes)
    check_saved_is_xlas(fn, (*arrays, jnp.arange(candidates) % users), 0.1)


@pytest.mark.parametrize(
    "name",
    [
        "fields_concatenated_and_flattened",
        "dlrm",
        "concatenated_copies",
        "field_weighted_pairs_by_a_sum",
        "compression_of_one_user",
        "column_set_to_the_candidates",
        "din_tiled",
        "hstu",
    ],
)
def test_what_a_layout_saves_is_what_xla_counts(name) -> None:
    layout = LAYOUTS[name]
    check_saved_is_xlas(layout.fn, layout.args(), 0.05)
