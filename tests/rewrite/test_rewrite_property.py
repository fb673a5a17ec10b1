"""Random small programs of the supported primitives: rewritten and not, they agree."""

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rewrite_basics import both, computed, report_of

import ikbo_jax as ikbo

pytestmark = pytest.mark.slow

B, U, R, MID = 12, 3, 2, 5
RNG = np.random.default_rng(0)
# In NumPy: jnp would compile a program for each width.
WEIGHTS = {
    width: RNG.standard_normal((width, 4), dtype=np.float32) * np.float32(0.5)
    for width in range(1, 81)
}
USER = problems.random_array(RNG, (U, 6), "float32")
HISTORY = problems.random_array(RNG, (U, MID, 4), "float32")
REQUEST = problems.random_array(RNG, (R, 4), "float32")
CAND = problems.random_array(RNG, (B, 4), "float32")
INDEX = jnp.asarray(problems.ragged_index(RNG, U, B, "unsorted"))
OTHER = jnp.asarray(problems.ragged_index(RNG, U, B, "unsorted"))
PARENT = jnp.asarray(problems.ragged_index(RNG, R, U, "unsorted"))
IDS = jnp.asarray([6, 0, 3, 3, 5, 1, 6, 2, 4, 4, 0, 6], jnp.int32)


def fit(x, y):
    """Two values of one width, so that they can be worked on together."""
    width = min(x.shape[1], y.shape[1])
    return x[:, :width], y[:, :width]


def scanned(x, _):
    def layer(carry, w):
        return jnp.tanh(carry @ w) + x[:, :1], carry.sum(axis=1)

    carry, ys = jax.lax.scan(
        layer, x @ WEIGHTS[x.shape[1]], jnp.stack([WEIGHTS[4], WEIGHTS[4] * 2])
    )
    return carry + ys.T[:, :1]


def attended(x, _):
    tokens = HISTORY[INDEX]
    logits = jnp.einsum("bd,bsd->bs", x @ WEIGHTS[x.shape[1]], tokens)
    return jnp.einsum("bs,bsd->bd", jax.nn.softmax(logits), tokens)


def normalised(x, _):
    mean = x.mean(axis=1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(x.var(axis=1, keepdims=True) + 1e-3)


def flattened_fields(x, y):
    """Fields concatenated, stacked, flattened and merged with the batch."""
    x, y = (z[:, : z.shape[1] // 2 * 2].reshape(B, 2, -1) for z in fit(x, y))
    if x.shape[2] == 0:
        return x.reshape(B, -1)
    fields = jnp.concatenate([x, y], axis=1)
    flat = fields.reshape(4 * B, -1) @ WEIGHTS[x.shape[2]]
    interleaved = jnp.concatenate([jnp.tanh(flat.reshape(B, 4, 4)), fields], axis=2)
    stacked = jnp.stack([x[:, 0], y[:, 1], x[:, 1]], axis=1).reshape(B, -1)
    return interleaved.reshape(B, -1)[:, 1:9] + stacked.sum(axis=1, keepdims=True)


def embedded(x, y):
    """Ids concatenated and flattened before the table."""
    x, y = (jnp.clip(jnp.floor(4 * z), -3, 3).astype(jnp.int32) for z in fit(x, y))
    ids = jnp.stack([x, y], axis=1).reshape(-1)
    rows = jnp.take(WEIGHTS[7], ids, axis=0, mode="clip") + jnp.asarray(WEIGHTS[7])[ids]
    return rows.reshape(B, 2, -1, 4).sum(axis=(1, 2)) if x.shape[1] else x.astype(jnp.float32)


@jax.custom_vjp
def straight_through(x):
    return jnp.round(4 * x) / 4


straight_through.defvjp(
    lambda x: (straight_through(x), x), lambda x, g: (jnp.where(jnp.abs(x) < 2, 0.5 * g, 0.0),)
)


def split_and_merged(x, _):
    half = x.shape[1] // 2
    if half == 0:
        return x
    x = x[:, : 2 * half].reshape(B, 2, half).transpose(0, 2, 1)
    return x[:, :, 0] * 2 + jnp.cumsum(x, axis=1).max(axis=2)


#: Name of a step: what it makes of two values of shape [B, width].
STEPS = {
    "tanh": lambda x, y: jnp.tanh(x),
    "relu": lambda x, y: jax.nn.relu(x),
    "gelu": lambda x, y: jax.nn.gelu(x),
    "scale": lambda x, y: x * 0.5 + 0.25,
    "bias": lambda x, y: x + WEIGHTS[4].reshape(1, -1)[:, : x.shape[1]].sum(),
    "cast": lambda x, y: x.astype(jnp.bfloat16).astype(jnp.float32),
    "add": lambda x, y: jnp.add(*fit(x, y)),
    "mul": lambda x, y: jnp.multiply(*fit(x, y)),
    "where": lambda x, y: jnp.where(fit(x, y)[0] > 0, *fit(x, y)),
    "concat": lambda x, y: jnp.concatenate([x, y], axis=1),
    "dense": lambda x, y: x @ WEIGHTS[x.shape[1]],
    "dense_of_concat": lambda x, y: (
        jnp.concatenate([x, y], axis=1) @ WEIGHTS[x.shape[1] + y.shape[1]]
    ),
    "dot": lambda x, y: jnp.einsum("bd,bd->b", *fit(x, y))[:, None],
    "sum": lambda x, y: x.sum(axis=1, keepdims=True) + 0 * x,
    "softmax": lambda x, y: jax.nn.softmax(x, axis=1),
    "norm": normalised,
    "custom_vjp": lambda x, y: straight_through(x),
    "slice": lambda x, y: x[:, x.shape[1] // 2 :],
    "stride": lambda x, y: x[:, ::2],
    "split_and_merged": split_and_merged,
    "flattened_fields": flattened_fields,
    "embedded": embedded,
    "sort": lambda x, y: jnp.sort(x, axis=1),
    "over_candidates": lambda x, y: x - x.mean(axis=0, keepdims=True),
    "merged_batch": lambda x, y: x.reshape(B // 2, -1).reshape(B, -1),
    "pad": lambda x, y: jnp.pad(x, ((0, 0), (1, 0))),
    "shuffled": lambda x, y: x[OTHER],
    "checkpoint": jax.checkpoint(lambda x, y: jnp.sin(x) @ WEIGHTS[x.shape[1]]),
    "jit": jax.jit(lambda x, y: jnp.cos(x[:, :1]) * x),
    "cond": lambda x, y: jax.lax.cond(x[0, 0] > 0, lambda x: x * 2, jnp.tanh, x),
    "scan": scanned,
    "attention": attended,
}

#: Name of a source: the values that a program starts from besides the candidates'.
SOURCES = {
    "index": lambda user, request: user[INDEX],
    "take": lambda user, request: jnp.take(user, INDEX, axis=0),
    "other": lambda user, request: user[OTHER],
    "repeat": lambda user, request: jnp.repeat(user, B // U, axis=0),
    "tile": lambda user, request: jnp.tile(user, (B // U, 1)),
    "one": lambda user, request: jnp.broadcast_to(user[:1], (B, 6)),
    "levels": lambda user, request: request[PARENT][INDEX],
    "both": lambda user, request: jnp.concatenate([request[PARENT], user], axis=1)[INDEX],
    "items": lambda user, request: jnp.concatenate([user, user * 2, user[:1] - 1])[IDS],
}

programs = st.tuples(
    st.lists(st.sampled_from(sorted(SOURCES)), min_size=1, max_size=3),
    st.lists(
        st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 9), st.integers(0, 9)),
        min_size=1,
        max_size=7,
    ),
)


def make(program):
    sources, steps = program

    def fn(user, request, cand):
        values = [SOURCES[name](user, request) for name in sources] + [cand]
        for name, first, second in steps:
            # Counted from the end: programs grow deep more often than wide.
            x, y = values[-1 - first % len(values)], values[-1 - second % len(values)]
            values.append(STEPS[name](x, y)[:, :40])
        return values[-1], values[len(values) // 2]

    return fn


@settings(max_examples=24)
@given(programs)
def test_results_and_gradients_agree(program) -> None:
    fn = make(program)
    args = (USER, REQUEST, CAND)

    def loss(fn):
        def of(*args):
            first, second = fn(*args)
            return jnp.mean(jnp.sin(first)) + jnp.mean(second), (first, second)

        return jax.grad(of, argnums=(0, 1, 2), has_aux=True)

    ours, theirs = (computed(loss(f), *args) for f in (ikbo.rewrite(fn), fn))
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        scale = np.max(np.abs(y), initial=1.0)
        np.testing.assert_allclose(
            x, y, rtol=0, atol=(2e-2 if "cast" in str(program) else 1e-4) * scale
        )


# Another index is to these steps what the first one is.
@pytest.mark.parametrize("source", [source for source in SOURCES if source != "other"])
def test_every_step_from_every_source(source: str) -> None:
    """Each step rewritten by itself; steps of a few numbers of one user gain nothing."""
    rewritten = 0
    for step in STEPS:
        fn = make(([source], [(step, 1, 0), ("add", 0, 1)]))
        for x, y in zip(*both(fn, USER, REQUEST, CAND), strict=True):
            rtol = 1e-2 if step == "cast" else 1e-4
            np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-4, err_msg=step)
        rewritten += report_of(fn, USER, REQUEST, CAND).changed
    assert rewritten >= {"one": 6, "both": 21}.get(source, 24)
