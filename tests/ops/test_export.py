"""`jax.export` without a GPU: programs have the kernels of the card that they are lowered for."""

import collections
import functools
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import offline
import pytest
import sharded_calls
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from small_kernels import prefer_kernels
from training_runs import network_and_request

import ikbo_jax as ikbo
from ikbo_jax.layers import HstuCache
from ikbo_jax.models import ranking
from ikbo_jax.ops import dispatch, target

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture(autouse=True)
def _small_problems_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost model would leave linear compressions of these sizes to XLA."""
    prefer_kernels(monkeypatch)


BF16, INT = jnp.bfloat16, jnp.int32
B, U, T, S, N, H = 8, 2, 64, 64, 2, 64
BOTH = ("cpu", "cuda")


def of(*shape: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def gradient(op: Callable[..., Any], count: int) -> Callable[..., Any]:
    """The gradients of the op's first `count` arrays, through all results."""

    def run(*arrays: Any) -> Any:
        def loss(*floats: Any) -> Any:
            results = jax.tree.leaves(op(*floats, *arrays[count:]))
            return sum(jnp.sum(x.astype(jnp.float32)) for x in results)

        return jax.grad(loss, tuple(range(count)))(*arrays[:count])

    return run


def attend(*arrays):
    *inputs, lengths, own_key, own_value = arrays
    options = {"key_value_seq_lengths": lengths, "self_key": own_key, "self_value": own_value}
    return ikbo.attention(*inputs, **options, return_residuals=True)


def three_levels(*arrays):
    weights, embeddings, parents = arrays[:3], arrays[3:6], (None, *arrays[6:])
    return ikbo.multilevel_linear_compression(
        [ikbo.Term(*term) for term in zip(weights, embeddings, parents, strict=True)]
    )


def act(query, key, value, offsets):
    return ikbo.gdpa(query, key, value, offsets, offsets)


QUERY, KEY, INDEX = of(B, T, N, H), of(U, S, N, H), of(B, dtype=INT)
ATTENTION = (QUERY, KEY, KEY, INDEX)
COMPRESSION = (of(32, 64), of(32, 72), of(B, 64, 64), of(U, 72, 64), INDEX)
LEVELS = (of(32, 64),) * 3 + (of(U, 64, 64), of(4, 64, 64), of(B, 64, 64), of(4, dtype=INT), INDEX)
GDPA = (of(256, N, H),) * 3 + (of(3, dtype=INT),)
LINEAR, ATTEND, GDPA_FORWARD = "ikbo_linear_compression", "ikbo_attention", "ikbo_gdpa_forward"
BACKWARD = f"{ATTEND}_backward"
TILES = "ikbo_tile_list"
FEW, ORDER = "ikbo_few_queries_attention", "ikbo_user_order"
#: A function, its arrays, and the kernels of its program for Hopper.
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, int]]] = {
    "linear_compression": (ikbo.linear_compression, COMPRESSION, {LINEAR: 1}),
    "linear_compression_gradient": (
        gradient(ikbo.linear_compression, 4),
        COMPRESSION,
        {LINEAR: 2, f"{LINEAR}_d_weight": 2, "ikbo_segment_sum": 1},
    ),
    "multilevel": (three_levels, LEVELS, {LINEAR: 2}),
    "attention": (ikbo.attention, ATTENTION, {ORDER: 1, ATTEND: 1}),
    "attention_gradient": (
        gradient(ikbo.attention, 3),
        ATTENTION,
        {ORDER: 1, ATTEND: 1, BACKWARD: 1, f"{BACKWARD}_statistics": 1, f"{BACKWARD}_parts": 1},
    ),
    "few_queries": (ikbo.attention, (of(B, 2, N, H), KEY, KEY, INDEX), {FEW: 1}),
    "attention_vmap": (
        jax.vmap(ikbo.attention, (0, None, None, 0)),
        (of(3, B, T, N, H), KEY, KEY, of(3, B, dtype=INT)),
        {ORDER: 1, ATTEND: 1},
    ),
    "lengths_and_own_tokens": (
        attend,
        (*ATTENTION, of(U, dtype=INT), of(B, 3, N, H), of(B, 3, N, H)),
        {ORDER: 1, ATTEND: 1},
    ),
    "merged": (sharded_calls.attend_twice, ATTENTION, {ORDER: 1, ATTEND: 1}),
    "gdpa": (act, GDPA, {TILES: 1, GDPA_FORWARD: 1}),
    # A gradient of a weighted sum needs the inputs alone.
    "gdpa_gradient": (
        gradient(act, 3),
        GDPA,
        {"ikbo_gdpa_backward_lists": 1, "ikbo_gdpa_d_query": 1, "ikbo_gdpa_d_key_value": 1},
    ),
}


def exported_for(platforms: Any, fn: Callable[..., Any], *args: Any) -> export.Exported:
    # A new function, so that no program of another test is in the caches.
    return export.export(jax.jit(lambda *arrays: fn(*arrays)), platforms=platforms)(*args)


def kernels_of(exported: export.Exported) -> dict[str, int]:
    modules = offline.exported_modules(exported)
    return dict(collections.Counter(map(offline.kernel_name, modules)))


def texts_of(fn: Callable[..., Any], *args: Any) -> list[str]:
    """The kernels of a program that is lowered for CUDA."""
    return list(map(offline.module_text, offline.mosaic_modules(fn, *args)))


def example(shapes: tuple[Any, ...]) -> list[Any]:
    rng = np.random.default_rng(0)

    def values(x: Any) -> Any:
        if x.dtype != INT:
            return jnp.asarray(rng.normal(size=x.shape), x.dtype)
        sizes = {(B,): U, (3,): 256, (4,): U, (U,): S}
        return jnp.asarray(np.sort(rng.integers(0, sizes[x.shape], x.shape)), INT)

    return [values(x) for x in shapes]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_artefact_for_cuda_has_the_kernels(name: str) -> None:
    fn, shapes, kernels = CASES[name]
    exported = exported_for(["cuda"], fn, *shapes)
    assert kernels_of(exported) == kernels
    assert exported.platforms == ("cuda",)


@pytest.mark.parametrize("name", ["linear_compression_gradient", "attention_gradient", "gdpa"])
def test_kernels_are_those_of_a_machine_with_the_card(name, monkeypatch) -> None:
    fn, shapes, _ = CASES[name]
    found = texts_of(lambda *arrays: fn(*arrays), *shapes)
    monkeypatch.setattr(dispatch, "hopper_unavailable_reason", lambda: None)
    monkeypatch.setattr(dispatch, "num_sms", lambda: 132)
    assert found == texts_of(lambda *arrays: fn(*arrays), *shapes)


@pytest.mark.parametrize("name", ["linear_compression", "attention", "gdpa"])
def test_artefact_for_both_platforms_runs_on_the_cpu(name: str) -> None:
    fn, shapes, kernels = CASES[name]
    exported = exported_for(BOTH, fn, *shapes)
    assert kernels_of(exported) == kernels
    loaded = export.deserialize(exported.serialize(vjp_order=1))
    # The gradient is an artefact of its own, which has kernels on CUDA, too.
    assert kernels_of(loaded.vjp()).keys() >= CASES[f"{name}_gradient"][2].keys()
    arrays = example(shapes)
    floats = [n for n, x in enumerate(shapes) if x.dtype == BF16]

    def both(op: Callable[..., Any]) -> Any:
        def loss(*arrays: Any) -> Any:
            return jnp.sum(op(*arrays).astype(jnp.float32) ** 2)

        return jax.jit(lambda *arrays: (op(*arrays), jax.grad(loss, floats)(*arrays)))(*arrays)

    for x, y in zip(*(jax.tree.leaves(both(op)) for op in (loaded.call, fn)), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_cpu_artefact_has_no_kernel() -> None:
    assert kernels_of(exported_for(["cpu"], ikbo.attention, *ATTENTION)) == {}


def test_a_gpu_that_is_no_hopper_does_not_lower_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mosaic GPU takes the compute capability of the default device, whatever the target."""
    other = types.SimpleNamespace(
        platform="gpu", compute_capability="8.0", device_kind="NVIDIA A100", core_count=108
    )
    monkeypatch.setattr(dispatch, "default_device", lambda: other)
    with ikbo.export_target("H100"):
        (plan,) = ikbo.explain(ikbo.attention, *ATTENTION).plans
    assert plan.cuda.implementation == "xla"
    assert plan.cuda.reason.endswith("has 8.0 instead of 9.0; export with JAX_PLATFORMS=cpu")


def test_rows_of_other_cards_do_not_speak_for_an_h20() -> None:
    measured = (of(433, 866), of(433, 1178), of(1024, 866, 256), of(15, 1178, 256))
    with ikbo.export_target("H20"):
        (plan,) = ikbo.explain(ikbo.linear_compression, *measured, of(1024, dtype=INT)).plans
    assert "  lowered for CUDA, H20 (78 SMs):" in str(plan).split("\n")
    assert "no measured row is near" in plan.cuda.reason


def test_float32_has_no_kernel_on_any_card() -> None:
    shapes = [of(*x.shape, dtype=jnp.float32) if x.dtype == BF16 else x for x in ATTENTION]
    assert kernels_of(exported_for(["cuda"], ikbo.attention, *shapes)) == {}
    (plan,) = ikbo.explain(ikbo.attention, *shapes).plans
    assert "float32" in plan.cuda.reason
    with pytest.raises(NotImplementedError, match="mosaic_gpu': .*float32"):
        jax.eval_shape(TestMosaicGpu.attend, *shapes)


class TestMosaicGpu:
    """`implementation="mosaic_gpu"`, which has no program for other platforms."""

    attend = staticmethod(functools.partial(ikbo.attention, implementation="mosaic_gpu"))

    def test_lowers_for_cuda(self) -> None:
        assert kernels_of(exported_for(["cuda"], self.attend, *ATTENTION)) == CASES["attention"][2]

    @pytest.mark.parametrize("platforms", [["cpu"], BOTH])
    def test_does_not_lower_for_another_platform(self, platforms: Any) -> None:
        words = r"attention with implementation='mosaic_gpu': .* the default device is a cpu"
        with pytest.raises(NotImplementedError, match=words):
            exported_for(platforms, self.attend, *ATTENTION)
        with pytest.raises(NotImplementedError, match=words):
            jax.jit(self.attend)(*example(ATTENTION))
        with pytest.raises(NotImplementedError, match=words):
            self.attend(*example(ATTENTION))
        assert "\n  refused: attention with" in str(ikbo.explain(self.attend, *ATTENTION))


class TestTarget:
    """`export_target`."""

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ({"card": "B200"}, "unknown card 'B200'; known: 'H100', .*set num_sms"),
            ({"num_sms": 0}, "num_sms must be an integer of at least 1, but is 0"),
            ({"num_sms": 1.5}, "but is 1.5"),
            ({"num_sms": True}, "but is True"),
        ],
    )
    def test_wrong_arguments(self, arguments: dict[str, Any], words: str) -> None:
        with pytest.raises(ValueError, match=words), ikbo.export_target(**arguments):
            pass

    def test_number_may_be_numpys(self) -> None:
        with ikbo.export_target("mine", num_sms=np.int64(2)):
            assert target.current() == target.Target("mine", 2)

    def test_a_changed_target_traces_again(self) -> None:
        compress = jax.jit(lambda *arrays: ikbo.linear_compression(*arrays))

        default = texts_of(compress, *COMPRESSION)
        with ikbo.export_target("mine", num_sms=2):
            few = texts_of(compress, *COMPRESSION)
            with ikbo.export_target("H100"):
                assert texts_of(compress, *COMPRESSION) == default
            assert texts_of(compress, *COMPRESSION) == few
        assert few != default
        assert texts_of(compress, *COMPRESSION) == default

    def test_decides_while_tracing_and_not_while_lowering(self) -> None:
        with ikbo.export_target("mine", num_sms=2):
            traced = jax.jit(lambda *arrays: ikbo.linear_compression(*arrays)).trace(*COMPRESSION)
            inside = traced.lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
        outside = traced.lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
        few, same = (
            [offline.module_text(module) for module in offline.modules_in(program)]
            for program in (inside, outside)
        )
        assert few == same

    def test_on_a_machine_with_a_gpu_it_allows_other_platforms(self, monkeypatch) -> None:
        monkeypatch.setattr(dispatch, "hopper_unavailable_reason", lambda: None)
        monkeypatch.setattr(dispatch, "num_sms", lambda: 132)
        assert ikbo.explain(ikbo.attention, *ATTENTION).plans[0].cuda is None
        with ikbo.export_target("H200"):
            exported = exported_for(BOTH, ikbo.attention, *ATTENTION)
            (plan,) = ikbo.explain(ikbo.attention, *ATTENTION).plans
        assert plan.reason.endswith("only in a program that is lowered for CUDA")
        assert kernels_of(exported) == CASES["attention"][2]
        assert exported.call(*example(ATTENTION)).shape == QUERY.shape


def test_constants_of_a_traced_function_are_planned_for_the_target() -> None:
    arrays = example(ATTENTION)
    exported = exported_for(["cuda"], lambda x: x + ikbo.attention(*arrays), QUERY)
    assert kernels_of(exported) == CASES["attention"][2]


@pytest.mark.parametrize(
    "name", ["attention_gradient", "gdpa_gradient", "linear_compression_gradient"]
)
def test_second_derivatives_have_the_kernels_of_first_ones(name: str) -> None:
    fn, shapes, kernels = CASES[name]

    def squares(*arrays: Any) -> Any:
        return sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in fn(*arrays))

    exported = exported_for(["cuda"], jax.grad(squares), *shapes)
    assert kernels_of(exported).keys() == kernels.keys()


@pytest.mark.parametrize(
    ("name", "kind"), [("attention_gradient", "explicit"), ("linear_compression", "shard_map")]
)
def test_programs_of_several_devices(name: str, kind: str) -> None:
    fn, shapes, kernels = CASES[name]
    mesh = sharded_calls.mesh_of("2", "explicit" if kind == "explicit" else "auto")
    layouts = tuple(P("x") if x.shape[0] == B else P() for x in shapes)
    if kind == "shard_map":
        fn = jax.shard_map(fn, mesh=mesh, in_specs=layouts, out_specs=P("x"))
    arrays = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, layout))
        for x, layout in zip(shapes, layouts, strict=True)
    ]
    exported = exported_for(BOTH, fn, *arrays)
    assert exported.nr_devices == 2
    assert kernels_of(exported).keys() == kernels.keys()


def test_axes_that_xla_divides_are_refused_by_jax() -> None:
    mesh = sharded_calls.mesh_of("2", "auto")
    arrays = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P())) for x in ATTENTION
    ]
    with pytest.raises(NotImplementedError, match="serialization of host_callbacks"):
        exported_for(["cuda"], ikbo.attention, *arrays)


SIZES = ranking.Sizes(
    candidates=8, users=2, layers=1, width=128, user_dense=16, dense_tokens=4, user_tokens=60,
    pooled=64, cand_tokens=40, history=128, queries=64, compressed=32, hidden=16,
)  # fmt: skip


ROWS = jnp.ones((2, 3))
COUNTS = jnp.arange(2, dtype=INT)


@pytest.mark.parametrize(
    "tree",
    [
        ikbo.masks.hstu(COUNTS, contextual=COUNTS, window=3, causal=False),
        ikbo.masks.intervals(COUNTS[:, None], COUNTS[:, None]),
        ikbo.pad_weight(ROWS),
        ikbo.Term(ikbo.pad_weight(ROWS), ROWS[None]),
        HstuCache(ROWS[None], ROWS[None], COUNTS),
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_arguments_of_the_library_s_types_are_serialised(tree: Any) -> None:
    exported = export.export(jax.jit(lambda x: x))(tree)
    chex.assert_trees_all_equal(export.deserialize(exported.serialize()).call(tree), tree)


@pytest.mark.slow
@pytest.mark.parametrize(
    "version",
    [ranking.co_designed, ikbo.rewrite(ranking.materialised)],
    ids=["layers", "rewritten"],
)
def test_the_ranking_network(version: Callable[..., Any]) -> None:
    params, request = network_and_request(SIZES)
    exported = exported_for(BOTH, version, params, request)
    assert {LINEAR, ATTEND, GDPA_FORWARD} <= kernels_of(exported).keys()
    found = export.deserialize(exported.serialize()).call(params, request)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(jax.jit(version)(params, request)))


def test_a_program_for_the_cpu_does_not_import_the_kernels() -> None:
    code = (
        "import sys, jax, jax.numpy as jnp, ikbo_jax as ikbo\n"
        "before = set(sys.modules)\n"
        "x, index = jnp.ones((4, 16, 2, 64), jnp.bfloat16), jnp.zeros(4, jnp.int32)\n"
        "print(jax.jit(ikbo.attention)(x, x, x, index).shape)\n"
        "print([m for m in set(sys.modules) - before if 'mosaic_gpu' in m or 'ikbo_jax' in m])\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "(4, 16, 2, 64)\n[]\n"
