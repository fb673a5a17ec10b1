"""Kernels of exported programs compile for sm_90a.

`jax.export` writes kernels in an older version of Mosaic GPU's format than `jax.jit` does.
"""

import contextlib
import re

import jax
import jax.numpy as jnp
import offline
import pytest
from jax import export

import ikbo_jax as ikbo

BF16, INT = jnp.bfloat16, jnp.int32


def of(*shape: int, dtype=BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def model(w_cand, w_user, e_cand, e_user, query, history, index):
    out = ikbo.linear_compression(w_cand, w_user, e_cand, e_user, index)
    return out, ikbo.attention(query, history, history, index)


def test_kernels_of_an_artefact_compile_as_those_of_jit(on_cpu, compiler: offline.Compiler) -> None:
    # The cost model leaves small linear compressions to XLA.
    floats = (of(224, 864), of(224, 1184), of(256, 864, 128), of(4, 1184, 128))
    arrays = (*floats, of(256, 64, 2, 128), of(4, 64, 2, 128), of(256, dtype=INT))
    exported = export.export(jax.jit(model), platforms=["cuda"])(*arrays)
    modules = offline.exported_modules(exported)
    found = {offline.kernel_name(module): compiler.assemble(module) for module in modules}
    assert found == {kernel.name: kernel.ptxas for kernel in compiler.compile(model, *arrays)}
    assert len(found) == 2
    for report in found.values():
        assert (report.spill_bytes, report.stack_bytes, report.serialized) == (0, 0, ())


#: By the major number of the compute capability: since jax 0.12, LLVM refuses what MLIR did.
REFUSALS = {
    8: "'nvvm.wgmma.fence.aligned' op is not supported on sm_80",
    10: "'nvvm.wgmma.fence.aligned' op is not supported on sm_100a",
}
if jax.__version_info__ >= (0, 12):
    REFUSALS = {
        8: "LLVM ERROR: Cannot select: intrinsic %llvm.nvvm.elect.sync",
        10: "LLVM ERROR: Cannot select: intrinsic %llvm.nvvm.wgmma.commit_group.sync.aligned",
    }


@pytest.mark.parametrize("major", REFUSALS)
def test_another_gpu_refuses_the_kernels(major: int, on_cpu, tmp_path, monkeypatch) -> None:
    driver = offline._STAND_IN_DRIVER.replace("? 9 :", f"? {major} :")
    monkeypatch.setattr(offline, "_STAND_IN_DRIVER", driver)
    shapes = (of(8, 64, 2, 64), of(2, 64, 2, 64), of(2, 64, 2, 64), of(8, dtype=INT))
    exported = export.export(jax.jit(ikbo.attention), platforms=["cuda"])(*shapes)
    (module,) = offline.exported_modules(exported)
    with (
        contextlib.closing(offline.Compiler(tmp_path)) as other,
        pytest.raises(ValueError, match=rf"(?m){re.escape(REFUSALS[major])}$"),
    ):
        other.assemble(module)
