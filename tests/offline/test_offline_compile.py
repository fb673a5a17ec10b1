"""The kernels compiled for sm_90a without a GPU: no spills, no serialised WGMMAs, shared memory."""

import contextlib
import dataclasses
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import offline
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.linear_compression import kernel
from ikbo_jax.problems import LinearCompressionConfig, LinearCompressionProblem, memory
from ikbo_jax.problems.linear_compression import MAX_BLOCK_M
from ikbo_jax.problems.packed_compression import smem_bytes
from ikbo_jax.tuning import table_rows

DEFAULT = LinearCompressionProblem((15, 1024), (1178, 866), 433, 256, "bfloat16")
THREE_LEVELS = dataclasses.replace(DEFAULT, batches=(4, 60, 1024), ks=(300, 1178, 866))
NUM_SMS = 132

Case = tuple[LinearCompressionProblem, LinearCompressionConfig]


def default_case(problem: LinearCompressionProblem = DEFAULT, **changes: Any) -> Case:
    config = problem.default_config()
    assert config is not None
    return problem, dataclasses.replace(config, **changes)


def of(**sizes: Any) -> LinearCompressionProblem:
    return dataclasses.replace(DEFAULT, **sizes)


# What no row of the table has; options that do not meet in the code share a case.
CASES = {
    # Weights of whole swizzled rows stay operands of their own; the rows' are packed into one.
    "cluster_of_one_k_multiples_of_64": default_case(
        of(ks=(1024, 1024)), cluster=1, single_launch=True
    ),
    "three_levels": default_case(THREE_LEVELS, single_launch=True),
    "three_levels_three_launches": default_case(THREE_LEVELS, single_launch=False),
    "one_level": default_case(of(batches=(1024,), ks=(866,))),
    "k_below_64_n8": default_case(of(ks=(40, 17), n=8)),
    "many_users": default_case(of(batches=(1024, 1024))),
    "widest_block_one_candidate": (
        of(batches=(1, 1)),
        LinearCompressionConfig(MAX_BLOCK_M, 3, MAX_BLOCK_M // 4),
    ),
    "narrowest_block_m1": (of(m=1), LinearCompressionConfig(16, 4, 8)),
}
# What `sm90.json` says of this op, one case for every row that names a configuration.
CASES |= {
    f"row{i}:{row.problem.describe()}": (row.problem, row.config)
    for i, row in enumerate(table_rows.builtin_rows())
    if row.config is not None and isinstance(row.problem, LinearCompressionProblem)
}


def launch(problem, config, multiple=1) -> tuple:
    """The kernel's host function, and the shapes it takes for `problem`.

    The columns of weights are padded to a multiple of `multiple`.
    """
    dtype = jnp.dtype(problem.dtype)
    levels = list(zip(problem.batches, problem.ks, strict=True))
    columns = [-(-k // multiple) * multiple for k in problem.ks]
    weights = tuple(jax.ShapeDtypeStruct((problem.m, k), dtype) for k in columns)
    embeddings = tuple(jax.ShapeDtypeStruct((b, k, problem.n), dtype) for b, k in levels)
    parents = tuple(jax.ShapeDtypeStruct((b,), jnp.int32) for b in problem.batches[1:])

    def fn(weights, embeddings, parents):
        return kernel.linear_compression_kernel(
            weights, embeddings, (None, *parents), config=config, num_sms=NUM_SMS
        )

    return fn, weights, embeddings, parents


def assert_launches_fit(problem, config, compiler, **sizes) -> None:
    """`sizes`: what `config.shared` asks for."""
    assert config.illegal_reason(problem) is None
    kernels = compiler.compile_fit(*launch(problem, config))
    levels = len(problem.batches)
    is_single = config.single_launch and levels > 1
    assert len(kernels) == levels - is_single
    with_claims = [False] * (len(kernels) - 1) + [is_single]
    for compiled, has_claims in zip(kernels, with_claims, strict=True):
        shared = config.shared(with_claims=has_claims, **sizes)
        assert compiled.smem_bytes == memory.smem_bytes(shared) <= smem_bytes(config)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_offline_kernel_is_fit(name: str, compiler: offline.Compiler) -> None:
    assert_launches_fit(*CASES[name], compiler)


@pytest.mark.slow
@pytest.mark.parametrize("trim", [False, True])
def test_offline_kernel_with_padded_weights_is_fit(trim: bool, compiler: offline.Compiler) -> None:
    """Each level has a weight of its own, whose columns begin at 0 and go past K."""
    problem, config = default_case(trim=trim)
    compiler.compile_fit(*launch(problem, config, 64))


@pytest.mark.parametrize("is_single", [True, False])
def test_offline_only_a_single_launch_waits_for_the_users_results(is_single: bool) -> None:
    """The wait is for a counter of the whole device, which the interpreter has not got."""
    kernel, *arrays = launch(*default_case(single_launch=is_single, trim=False))
    assert str(jax.make_jaxpr(kernel)(*arrays)).count("semaphore_wait") == is_single


# The detector itself must be able to fail.


def test_offline_spills_and_serialised_wgmmas_are_found(compiler, monkeypatch) -> None:
    """A tile too wide; and without waits, accumulators are read while WGMMAs write them.

    This kernel is compiled even if there is a recorded report.
    """
    monkeypatch.setattr(plgpu, "wgmma_wait", lambda n: None)
    too_wide = LinearCompressionConfig(256, 2, 32, single_launch=True)
    (module,) = offline.mosaic_modules(*launch(of(m=500), too_wide))
    compiled = offline.CompiledKernel("wide", 0, compiler.assemble(module))
    assert compiled.ptxas.spill_bytes > 0
    assert any("bytes spilled" in fault for fault in compiled.faults)
    assert compiled.ptxas.serialized
    assert any("C75" in fault for fault in compiled.faults)


@pytest.mark.parametrize(
    ("plugin", "fault"),
    [
        ("int nothing;", r"exit status 1\).*MosaicGpuCompile"),
        ("void abort(void); void MosaicGpuCompile(void) { abort(); }", r"exit status -6\)"),
    ],
)
def test_offline_failing_compiler_is_an_error(plugin, fault, tmp_path, monkeypatch) -> None:
    """Without the function it cannot start; where a kernel crashes it, the next one is compiled."""
    source, library = tmp_path / "plugin.c", tmp_path / "plugin.so"
    source.write_text(plugin)
    subprocess.run(
        [offline.find_c_compiler(), "-shared", "-fPIC", "-o", library, source], check=True
    )
    monkeypatch.setattr(offline, "find_plugin", lambda: library)
    module, *_ = offline.mosaic_modules(*launch(*CASES["narrowest_block_m1"]))
    name, _ = offline.describe_module(module)
    with contextlib.closing(offline.Compiler(tmp_path)) as compiler:
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"(?s)^{name} did not compile \({fault}"):
                compiler.compile_module(module)


GOOD_LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'ikbo_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for ikbo_mosaic_gpu_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 1 bytes smem
"""
SERIALIZED = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized due to non wgmma instructions defining accumulator registers of a wgmma between "
    "start and end of the pipeline stage in the function 'ikbo_mosaic_gpu_kernel'"
)


@pytest.mark.parametrize(
    ("good", "bad", "fault"),
    [
        ("0 bytes spill stores", "8 bytes spill stores", "8 bytes spilled"),
        ("0 bytes spill loads", "12 bytes spill loads", "12 bytes spilled"),
        ("0 bytes stack frame", "16 bytes stack frame", "16 bytes of stack"),
        ("ptxas info    : Used", f"{SERIALIZED}\nptxas info    : Used", "C7510"),
        ("ptxas info    : Used", f"{SERIALIZED.replace('10', '14')}\ninfo : Used", "C7514"),
    ],
)
def test_offline_log_of_a_good_and_of_a_bad_kernel(good: str, bad: str, fault: str) -> None:
    assert good in GOOD_LOG
    report = offline.parse_ptxas_log(GOOD_LOG)
    assert report == offline.PtxasReport(168)
    assert offline.CompiledKernel("k", 0, report).faults == []
    report = offline.parse_ptxas_log(GOOD_LOG.replace(good, bad))
    (found,) = offline.CompiledKernel("k", 0, report).faults
    assert fault in found


# Two descriptors that crashed ptxas 13.0.88, in a kernel of nothing else.
WIDE = """\
//
.version 9.0
.visible .entry ikbo_mosaic_gpu_kernel()
{
	mul.wide.u32 	%rd1, %r1, 512;
	add.s64 	%rd2, %rd1, %rd9;
	mov.b64 	%rd3, %rd2;
	add.s64 	%rd4, %rd3, 4611686293305294848;
	{ .reg .pred p; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r2}, %rd4, %rd8, p, 1; }
	add.s64 	%rd5, %rd2, 4611686293305294976;
	{ .reg .pred p; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r2}, %rd5, %rd8, p, 1; }
}
"""


@pytest.mark.parametrize(
    ("wide", "narrow"),
    [
        ("mul.wide.u32 	%rd1, %r1, 512;", "cvt.u64.u32 	%rd1, %r1;"),
        ("mul.wide.u32 	%rd1", "mul.wide.u32 	%rd7"),  # an address
        ("add.s64 	%rd2, %rd1, %rd9;", "bfe.u64 	%rd2, %rd1, 4, 14;"),  # likewise
    ],
)
def test_offline_log_of_descriptors_that_crash_another_ptxas(wide: str, narrow: str) -> None:
    report = offline.parse_ptxas_log(f"{WIDE}{GOOD_LOG}define void @host() {{\n}}\n")
    assert report == offline.PtxasReport(168, 0, 0, (), ("%rd4", "%rd5"))
    (fault,) = offline.CompiledKernel("k", 0, report).faults
    assert "%rd4, %rd5" in fault
    assert wide in WIDE
    assert offline.find_wide_descriptors(WIDE.replace(wide, narrow)) == ()


@pytest.mark.parametrize(
    "log",
    ["", "ptxas fatal   : Unresolved extern function", GOOD_LOG * 2, "Used 8 registers", WIDE],
)
def test_offline_log_without_one_kernel_is_an_error(log: str) -> None:
    """It leaves the PTX out."""
    with pytest.raises(ValueError, match="log") as error:
        offline.parse_ptxas_log(log)
    assert ".visible" not in str(error.value)
    assert "found 0" in str(error.value) or log != WIDE


@pytest.mark.parametrize(
    ("find", "message"),
    [
        (offline.find_plugin, r"pip install 'ikbo-jax\[offline\]'"),
        (offline.find_ptxas, r"pip install 'ikbo-jax\[offline\]'"),
        (offline.find_c_compiler, "C compiler"),
    ],
)
def test_offline_missing_program_is_named(find, message, monkeypatch) -> None:
    """With what to install."""
    monkeypatch.setattr(offline.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    for name in "IKBO_PTXAS", "CC":
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(offline.OfflineUnavailableError, match=message):
        find()


def test_offline_ptxas_is_the_one_that_is_named(tmp_path, monkeypatch) -> None:
    """Kernels are assembled by it; a name without a file, or of another file, is an error."""
    real, named = offline.find_ptxas(), tmp_path / "bin" / "ptxas"
    monkeypatch.setenv("IKBO_PTXAS", str(named))
    with pytest.raises(offline.OfflineUnavailableError, match=f"IKBO_PTXAS={named}"):
        offline.find_ptxas()
    named.parent.mkdir()
    # Mosaic GPU asks ptxas for its version, and which version of PTX it reads.
    ask = f'case "$1" in --version|--input-as-string) exec {real} "$@";; esac'
    named.write_text(f"#!/bin/sh\n{ask}\necho this one >&2\nexit 1\n")
    named.chmod(0o755)
    assert offline.find_ptxas() == named
    monkeypatch.setenv("IKBO_PTXAS", sys.executable)
    with pytest.raises(offline.OfflineUnavailableError, match="IKBO_PTXAS"):
        offline.find_ptxas()
    monkeypatch.setenv("IKBO_PTXAS", str(named))
    with (
        contextlib.closing(offline.Compiler(tmp_path)) as compiler,
        pytest.raises(ValueError, match="output: this one"),
    ):
        compiler.compile(*launch(*CASES["narrowest_block_m1"]))
