"""A rewritten program never costs more than its original: DCN-V2, and the model of costs itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from jax import lax
from rewrite_basics import assert_same_up_to_rounding, close

import ikbo_jax as ikbo
from examples.ranking_models import MODELS, SIZES, SMALL, Program
from ikbo_jax.rewrite.attention import contraction
from ikbo_jax.rewrite.report import cost, kernels

FIELDS, WIDTH, LAYERS = 26, 16, 3
B, U = 512, 16
X = FIELDS * WIDTH


def cross(x0, weights, biases):
    """DCN-V2: three cross layers."""
    x = x0
    for w, b in zip(weights, biases, strict=True):
        x = x0 * (x @ w + b) + x
    return x


def fields_of(tables, ids, user_ids, index):
    """The first fields by user, the others by candidate; each with its own table."""
    fields = [table[i[index]] for table, i in zip(tables, user_ids, strict=False)]
    fields += [table[i] for table, i in zip(tables[len(user_ids) :], ids, strict=True)]
    return jnp.concatenate(fields, axis=1)


def dcn(tables, ids, user_ids, index, weights, biases):
    return cross(fields_of(tables, ids, user_ids, index), weights, biases)


def dcn_arguments(user_fields: int, rows: int):
    rng = np.random.default_rng(0)
    tables = [problems.random_array(rng, (rows, WIDTH), "float32") for _ in range(FIELDS)]

    def some(count, batch):
        return [jnp.asarray(rng.integers(0, rows, batch), jnp.int32) for _ in range(count)]

    weights = [problems.random_array(rng, (X, X), "float32") * 0.05 for _ in range(LAYERS)]
    biases = [jnp.zeros((1, X)) for _ in range(LAYERS)]
    index = jnp.asarray(rng.integers(0, U, B), jnp.int32)
    return tables, some(FIELDS - user_fields, B), some(user_fields, U), index, weights, biases


def costs(fn, *args) -> tuple[cost.Cost, cost.Cost]:
    return tuple(cost.program_cost(jax.make_jaxpr(f)(*args)) for f in (ikbo.rewrite(fn), fn))


def products(fn, *args) -> int:
    return str(jax.make_jaxpr(fn)(*args)).count("dot_general")


# Tables smaller than the batch of candidates are broadcasts, each by an index of its own.
@pytest.mark.parametrize("rows", [64, 4096])
@pytest.mark.parametrize("user_fields", [0, 4])
def test_dcn_v2_keeps_its_products_and_moves_no_more(user_fields: int, rows: int) -> None:
    args = dcn_arguments(user_fields, rows)
    rewritten = ikbo.rewrite(dcn)
    assert products(rewritten, *args) == LAYERS
    ours, theirs = costs(dcn, *args)
    assert ours.flops <= theirs.flops
    assert ours.nbytes <= theirs.nbytes
    compiled = [jax.jit(fn).lower(*args).compile() for fn in (rewritten, dcn)]
    found = [program.cost_analysis() for program in compiled]
    assert found[0]["bytes accessed"] <= 1.01 * found[1]["bytes accessed"]
    assert found[0]["flops"] <= 1.01 * found[1]["flops"]
    np.testing.assert_allclose(*(run(*args) for run in compiled), rtol=1e-4, atol=1e-4)


def test_a_program_that_costs_more_does_not_run(monkeypatch) -> None:
    monkeypatch.setattr(contraction, "_joined", lambda ctx, eqn, whole: whole)
    args = dcn_arguments(0, 480)

    def products_of_fields(tables, ids, user_ids, index, weights, biases):
        return fields_of(tables, ids, user_ids, index) @ weights[0]

    (report,) = ikbo.explain(ikbo.rewrite(products_of_fields), *args).notes
    assert not report.changed
    ours, theirs = report.reason.split(" bytes instead of ")
    numbers = [int(x.split()[-1].replace(",", "")) for x in (ours, theirs)]
    assert numbers[0] > 1.1 * numbers[1]
    assert report.reason in str(report)
    assert products(ikbo.rewrite(products_of_fields), *args) == 1


def features(user, cand, index, w):
    return jax.nn.relu(jnp.concatenate([user[index], cand], axis=1) @ w)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_on_a_gpu_a_small_program_is_rewritten_for_derivatives_alone(monkeypatch, dtype) -> None:
    """If XLA's scatter of a lookup's gradient is slow, as of 16 bits."""
    monkeypatch.setattr(kernels, "on_gpu", lambda: True)
    rng = np.random.default_rng(0)
    index = jnp.asarray(rng.integers(0, U, B), jnp.int32)
    args = [problems.random_array(rng, x, dtype) for x in ((U, 8), (B, 8), (16, 4))]
    args.insert(2, index)
    is_narrow = dtype == "bfloat16"

    def loss(fn):
        return jax.grad(lambda user, *rest: fn(user, *rest).sum())

    def gradient_of(fn):
        return str(jax.make_jaxpr(loss(ikbo.rewrite(fn)))(*args))

    assert str(jax.make_jaxpr(ikbo.rewrite(features))(*args)).count("gather") == 1
    (report,) = ikbo.explain(ikbo.rewrite(features), *args).notes
    assert not report.changed
    assert ("its derivative is rewritten" in str(report)) == is_narrow
    assert ("its gradient, too, is as written" in str(report)) != is_narrow
    assert ("_user_rows" in gradient_of(features)) == is_narrow
    assert "_user_rows" not in gradient_of(lambda user, cand, *_: jnp.tile(user, (32, 1)) * cand)
    both = (np.float32(jax.jit(loss(fn))(*args)) for fn in (features, ikbo.rewrite(features)))
    assert_same_up_to_rounding(*both, 3e-2 if is_narrow else 1e-5)
    large = [jax.ShapeDtypeStruct(x, jnp.float32) for x in ((U, 2048), (2**15, 64), (2112, 512))]
    large.insert(2, jax.ShapeDtypeStruct((2**15,), jnp.int32))
    assert ikbo.explain(ikbo.rewrite(features), *large).notes[0].changed
    # Values with the same products are rewritten; their gradient in float32 is not.
    monkeypatch.setattr(cost, "refusal", lambda *_: "")
    product = ikbo.rewrite(lambda user, cand, i, w: jnp.tanh(user[i, :4]) * (cand @ w[:8]))
    assert ikbo.explain(product, *args).notes[0].changed
    assert ("_user_rows" in gradient_of(product)) == is_narrow
    assert ("[512,4] = tanh" in gradient_of(product)) != is_narrow
    # A program that would take longer is differentiated as written, but for its lookups.
    monkeypatch.setattr(cost, "refusal", lambda *_: cost.LONGER)
    monkeypatch.setattr(cost, "takes_longer", lambda *_: True)
    assert ("_user_rows" in gradient_of(product)) == is_narrow
    assert "[512,4] = tanh" in gradient_of(product)
    # Gradients of products with one-hot vectors are as written: rewritten, they took 1.05, 1.1.
    costs = cost.Cost(1_316_868_096, 15_571_264, 4), cost.Cost(1_463_144_448, 22_412_864, 6)
    assert cost.saves_lookups_alone(*costs, has_gathers=True)
    costs = cost.Cost(647_217_152, 14_659_072, 7), cost.Cost(2_760_622_080, 42_295_424, 5)
    assert [cost.saves_lookups_alone(*costs, has_gathers=x) for x in (True, False)] == [False, True]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_features_that_constants_select_keep_xlas_gradient_in_float32(monkeypatch, dtype) -> None:
    """As FiBiNET selects pairs of fields: a sum of rows would write them first, transposed."""
    monkeypatch.setattr(cost, "refusal", lambda *_: "")
    program = Program("fibinet", SMALL, dtype)

    def fn(leaves, features, index):
        return program.scores(leaves, features, index).astype("float32")

    gradients = [jax.grad(lambda *x, f=f: f(*x).sum(), (0, 1)) for f in (ikbo.rewrite(fn), fn)]
    args = program.arguments()
    # Four are of users: of their fields, their products, and the two layers of their gates.
    sums = str(jax.make_jaxpr(gradients[0])(*args)).count("ikbo_row_sums")
    assert sums == (6 if dtype == "bfloat16" else 4)
    if dtype == "float32":
        assert_same_up_to_rounding(*(jax.jit(g)(*args) for g in gradients), 1e-4)


def test_on_a_gpu_selected_features_have_a_price() -> None:
    """As pairs of fields, which may take most of the time."""

    def matrices(user, cand, index, w):
        x = jnp.concatenate([user[index], cand], axis=1)
        return jnp.einsum("bid,ijde,bje->bij", x, w, x).sum((1, 2))

    shapes = (48, 16, 32), (2976, 8, 32), (2976,), (24, 24, 32, 32)
    args = [jax.ShapeDtypeStruct(x, "bfloat16" if x[1:] else "int32") for x in shapes]
    with ikbo.export_target("H200"):
        (report,) = ikbo.explain(ikbo.rewrite(matrices), *args).notes
    assert "it would take as long on a GPU" in report.reason  # Took 1.4 of the original's time.
    assert ikbo.explain(ikbo.rewrite(matrices), *args).notes[0].changed

    def nbytes(fn, *args):
        return cost.program_cost(jax.make_jaxpr(fn)(*args)).nbytes

    x, rows = jnp.ones((8, 4, 16)), jnp.zeros(6, jnp.int32)
    read = 4 * (8 * 4 * 16 + 6 + 8 * 6)
    assert nbytes(lambda x, i: x[:, i].sum(-1), x, rows) == read + 2 * 8 * 6 * 16
    # A table of few rows is read once.
    assert nbytes(lambda x, i: x[i].sum((1, 2)), x[:1], rows) == 4 * (4 * 16 + 6 + 6)
    fused = nbytes(lambda x: jnp.concatenate([x, x], 1).sum(-1), x)
    assert fused == 4 * (8 * 4 * 16 + 8 * 8)
    with ikbo.export_target("H200"):
        for axis, each in ((1, 6), (2, 3)):  # Bytes of each element of a concatenation.
            joined = nbytes(lambda x, axis=axis: jnp.concatenate([x, x], axis).sum(-1), x)
            assert joined == x.nbytes + 4 * 8 * 4 * (3 - axis) + each * 2 * x.size
    repeated = nbytes(lambda x: jnp.repeat(x, 4, axis=1).sum(-1), x)
    assert repeated == 4 * (8 * 4 * 16 + 8 * 16) + 3 * 8 * 16 * 16


def test_on_a_gpu_equal_equations_count_once_and_products_hide_their_bytes() -> None:
    def layer(x, n):
        return sum(jnp.square(x / (1 + x.sum(-1, keepdims=True))) @ w for w in [x.T] * n).sum()

    def counted(fn, *args):
        return cost.program_cost(jax.make_jaxpr(fn)(*args))

    with ikbo.export_target("H200"):
        once, thrice = (counted(functools.partial(layer, n=n), jnp.ones((8, 4))) for n in (1, 3))
        assert once == thrice
        for dtype, each in (("bfloat16", 1.5), ("float32", 4)):
            x = jnp.ones((4096, 4096), dtype)
            assert counted(jnp.matmul, x, x[:, :8]).computing == 0
            found = counted(jnp.matmul, x, x)
            assert found.computing == each * found.flops - kernels.BYTE * 3 * x.nbytes


@pytest.mark.parametrize(("axis", "fields", "barriers"), [(-1, 64, 1), (-1, 63, 0), (-2, 64, 0)])
def test_on_a_gpu_many_rows_are_reduced_alone(monkeypatch, axis, fields, barriers) -> None:
    monkeypatch.setattr(cost, "refusal", lambda *_: "")
    fn = ikbo.rewrite(lambda u, c, i: jnp.square(jnp.concatenate([u[i], c], 1)).sum(axis))
    shapes = (jax.ShapeDtypeStruct((n, fields, 64), "bfloat16") for n in (4, 1024))
    with ikbo.export_target("H200"):
        lowered = jax.jit(fn).lower(*shapes, jnp.zeros(1024, int))
    assert lowered.as_text().count("optimization_barrier") == barriers


def test_on_a_gpu_a_short_program_must_also_save_by_the_rates_of_the_cache(monkeypatch) -> None:
    monkeypatch.setattr(kernels, "on_gpu", lambda: True)
    # A masked DLRM took 53 us instead of 50 (H200).
    old, new = cost.Cost(9_076_408_320, 115_680_576, 7), cost.Cost(2_189_824_000, 61_878_552, 16)
    assert cost.refusal(new, old).startswith(cost.LONGER)
    assert not cost.refusal(*(x._replace(nbytes=4 * x.nbytes) for x in (new, old)))


def test_on_a_gpu_a_product_with_vectors_looks_up_for_itself(monkeypatch) -> None:
    monkeypatch.setattr(kernels, "on_gpu", lambda: True)
    monkeypatch.setattr(cost, "refusal", lambda *_: "")
    monkeypatch.setattr(contraction, "_pays", lambda *_: True)
    program = Program("din", SMALL, "float32")
    args, ours = program.arguments(), ikbo.rewrite(program.scores)
    gradients = [jax.grad(lambda *x, fn=fn: fn(*x).sum(), 1) for fn in (ours, program.scores)]
    # The derivative adds the gradients of both readers before it rounds them.
    barriers = [str(jax.make_jaxpr(x)(*args)).count("_barrier") for x in (ours, gradients[0])]
    assert barriers == [1, 0]
    close(jax.jit(ours)(*args), program.scores(*args))
    close(*(jax.jit(x)(*args) for x in gradients))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", sorted(MODELS.keys() - {"dien", "transformer", "xdeepfm"}))
def test_the_report_is_what_xla_counts(model, dtype) -> None:
    """XLA counts one step of a loop, and one version of it does not compile xDeepFM: left out."""
    program = Program(model, SIZES, dtype)
    args, programs = program.shapes, (program.scores, ikbo.rewrite(program.scores))
    (report,) = ikbo.explain(programs[1], *args).notes
    assert report.changed
    for fn, told in zip(programs, (report.costs.original, report.costs.rewritten), strict=True):
        counts = jax.jit(fn).lower(*args).compile().cost_analysis()
        np.testing.assert_allclose(told.flops, counts["flops"], rtol=1e-3)
        np.testing.assert_allclose(told.nbytes, counts["bytes accessed"], rtol=1e-3)


def test_the_report_counts_every_step_of_a_loop() -> None:
    """As if it were unrolled, with what is the same in every step before it."""

    def fn(user, cand, w, index, unroll):
        def step(x, _):
            return jnp.tanh(x @ w[0]) + cand @ w[1], None

        return lax.scan(step, user[index] @ w[0], length=8, unroll=unroll)[0]

    args = jnp.ones((16, 64)), jnp.ones((512, 64)), jnp.ones((2, 64, 64)), jnp.arange(512) % 16
    programs = (jax.make_jaxpr(functools.partial(fn, unroll=x))(*args) for x in (1, 8))
    looped, unrolled = cost.reported_costs(*programs, known={})
    np.testing.assert_allclose(looped, unrolled, rtol=0.1)


def test_costs_of_operations() -> None:
    x, w = jnp.ones((8, 4)), jnp.ones((4, 16))
    index = jnp.zeros(32, jnp.int32)

    def of(fn, *args):
        found = cost.program_cost(jax.make_jaxpr(fn)(*args))
        return found.flops, found.nbytes

    dot = 2 * 8 * 4 * 16, 4 * (8 * 4 + 4 * 16 + 8 * 16)
    # The product computes what is made of its operand and of its result.
    assert of(lambda x, w: jnp.tanh(jnp.sin(x) @ w) * 2, x, w) == dot
    assert of(lambda x, w: jax.jit(jnp.matmul)(x, w), x, w) == dot
    looped = of(lambda xs, w: lax.scan(lambda c, x: (c, x @ w), 0, xs)[1], jnp.ones((5, 8, 4)), w)
    assert looped == (5 * dot[0], 5 * dot[1])
    # XLA computes before the loop what is the same in every step.
    same = of(lambda x, w: lax.scan(lambda c, _: (c, jnp.sin(c @ w)), x, length=5)[1], x, w)
    assert same == (5 * dot[0], dot[1])
    chosen = of(lambda x, w: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: jnp.zeros((8, 16))), x, w)
    assert chosen[0] == dot[0]

    def lookup(x, index):
        return x.at[index].get(mode="promise_in_bounds")

    # The table is smaller than what is looked up.
    moved = 4 * (8 * 4 + 32 + 32 * 4)
    assert of(lambda x, i: jnp.sin(lookup(x, i)) * 2, x, index) == (0, moved)
    assert of(lookup, x, index) == (0, moved)
    assert of(lambda x: x.sum(axis=0), x) == (0, 4 * (8 * 4 + 4))
    assert of(lambda x: x.T, x) == (0, 2 * 4 * 8 * 4)
    image, kernel = jnp.ones((1, 2, 6, 6)), jnp.ones((3, 2, 3, 3))
    flops, _ = of(lambda a, b: lax.conv(a, b, (1, 1), "VALID"), image, kernel)
    assert flops == 2 * (3 * 4 * 4) * (2 * 3 * 3)


def test_a_number_that_is_reshaped_costs_nothing() -> None:
    def fn(user):
        counts = jnp.full(4, 128)
        return jnp.tanh(jnp.repeat(user, counts, axis=0, total_repeat_length=512) @ jnp.eye(8))

    (report,) = ikbo.explain(ikbo.rewrite(fn), jnp.ones((4, 8))).notes
    assert report.changed
    assert report.flops_saved > 0.9 * report.costs.original.flops


def test_costs_of_an_op_are_those_of_its_problem() -> None:
    shape = problems.LinearCompressionShape(U, B, 7, 3, 2, 8, "unsorted")
    args = problems.make_inputs(shape, "float32", 0)
    program = jax.make_jaxpr(ikbo.linear_compression)(*args)
    found = cost.program_cost(program)
    (plan,) = ikbo.explain(ikbo.linear_compression, *args).plans
    assert found.flops == plan.problem.useful_flops
    in_xla, _ = cost.reported_costs(program, program, known={})
    result = 4 * np.prod(jax.eval_shape(ikbo.linear_compression, *args).shape)
    assert found.nbytes == sum(x.nbytes for x in args) + result < in_xla.nbytes
    query, key = jnp.ones((B, 2, 2, 8)), jnp.ones((U, 5, 2, 8))
    attention = jax.make_jaxpr(ikbo.attention)(query, key, key, args[-1])
    # In XLA, attention groups the candidates by user before it multiplies.
    assert (found.launches, cost.program_cost(attention).launches) == (1, 13)
