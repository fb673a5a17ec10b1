"""Compiles Mosaic GPU kernels for sm_90a on a machine without a GPU.

JAX's CUDA plugin exports the function that compiles a Mosaic GPU module. It asks the driver for the
compute capability alone, so a stand-in for libcuda.so.1 that answers 9.0 is enough. The plugin runs
in another process, which finds the stand-in first, and whose crash does not end the tests.
"""

import contextlib
import dataclasses
import hashlib
import importlib.util
import io
import os
import pathlib
import re
import select
import shutil
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.export
from jax._src.interpreters import mlir
from jax.experimental.mosaic.gpu.core import dialect
from jaxlib.mlir import ir, passmanager

from ikbo_jax.problems.hopper import MAX_SMEM_BYTES

INSTALL = "pip install 'ikbo-jax[offline]'"
TIMEOUT = 120  # seconds in which a kernel must compile

# MLIR's bindings try to import a module of the dialect at each operation: a ninth of a test's time.
_DIALECT = "jaxlib.mlir.dialects.stable_mosaic_gpu"
sys.modules.setdefault(_DIALECT, types.ModuleType(_DIALECT))

# Attributes 75 and 76 of a device are the major and the minor number of its compute capability.
_STAND_IN_DRIVER = """
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? 9 : 0;
  return 0;
}
"""

# Loads the plugin, which takes 1.5 s of CPU time, and compiles each module in a fork: a crash ends
# the fork alone.  A request is the module's length as a line, then the module; the answer is the
# fork's exit status as a line.  ptxas' log goes to the fork's standard output.
_COMPILE = """
import ctypes, os, sys
plugin = ctypes.CDLL(sys.argv[1])
plugin.MosaicGpuCompile.argtypes = (ctypes.c_char_p, ctypes.c_int)
plugin.MosaicGpuCompile.restype = ctypes.c_void_p
while length := sys.stdin.buffer.readline():
    module = sys.stdin.buffer.read(int(length))
    pid = os.fork()
    if pid == 0:
        for fd, path in enumerate(sys.argv[2:], 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
        plugin.MosaicGpuCompile(module, len(module))
        ctypes.CDLL(None).fflush(None)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class OfflineUnavailableError(RuntimeError):
    """Something that offline compilation needs is not installed."""


@dataclasses.dataclass(frozen=True)
class PtxasReport:
    """What ptxas says of one kernel.

    Attributes:
      registers: registers a thread has at the kernel's entry.
      spill_bytes: bytes of spill stores and spill loads.
      stack_bytes: bytes of the stack frame.
      serialized: warnings that WGMMAs are serialised (C7510 and its kin).
      wide_descriptors: registers that `find_wide_descriptors` finds in the kernel's PTX.
    """

    registers: int
    spill_bytes: int = 0
    stack_bytes: int = 0
    serialized: tuple[str, ...] = ()
    wide_descriptors: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class CompiledKernel:
    """A kernel that compiled.

    Attributes:
      name: of the kernel.
      smem_bytes: dynamic shared memory of its launch, barriers included.
      ptxas: what the assembler says.
    """

    name: str
    smem_bytes: int
    ptxas: PtxasReport

    @property
    def faults(self) -> list[str]:
        """What makes the kernel unfit to run; empty for a good one."""
        report, faults = self.ptxas, list(self.ptxas.serialized)
        if report.spill_bytes or report.stack_bytes:
            spilled, stack = report.spill_bytes, report.stack_bytes
            faults.append(f"{spilled} bytes spilled, {stack} bytes of stack")
        if report.wide_descriptors:
            names = ", ".join(report.wide_descriptors)
            faults.append(f"descriptors {names} add a product of 64 bits: CUDA 13.0 may crash")
        return faults


@dataclasses.dataclass(frozen=True)
class Use:
    """A compilation that a test asked for.

    Attributes:
      digest: of the module.
      name: of the kernel.
      report: on the kernel.
      is_new: whether the compiler ran; otherwise the report was known.
    """

    digest: str
    name: str
    report: PtxasReport
    is_new: bool


def find_wide_descriptors(ptx: str) -> tuple[str, ...]:
    """Descriptors of WGMMAs that are sums with a product of 64 bits (`mul.wide`), by register.

    ptxas 12.9.86 and 13.0.88 end with a segmentation fault if two descriptors are such a sum plus a
    constant of more than 32 bits, and LLVM moves a descriptor's constant bits to the end of a sum.
    13.1.115 and 13.5.37 compile them.
    """
    sums = re.findall(r"^\s*(?:add\.s64|mov\.b64)\s+(%rd\d+), (.*);", ptx, re.M)
    found = set(re.findall(r"^\s*mul\.wide\.\w+\s+(%rd\d+),", ptx, re.M))
    while more := {x for x, terms in sums if found & set(terms.split(", "))} - found:
        found |= more
    products = re.findall(r"\bwgmma\.mma_async\.[^;]*;", ptx)
    descriptors = dict.fromkeys(x for line in products for x in re.findall(r"%rd\d+", line))
    return tuple(x for x in descriptors if x in found)


def parse_ptxas_log(log: str) -> PtxasReport:
    """Reads a log of `ptxas -v` for one kernel; raises ValueError if it compiled none, or several.

    The log may begin with the kernel's PTX. Functions called from the kernel count too, since their
    spills are as slow.
    """
    wide_descriptors = find_wide_descriptors(log)
    log = re.sub(r"^\.version .*?^}$|^\s*\.(section|file)\b[^\n]*$", "", log, flags=re.M | re.S)
    registers = [int(n) for n in re.findall(r"\bUsed (\d+) registers\b", log)]
    if len(registers) != 1:
        raise ValueError(f"expected the log of one kernel, found {len(registers)}:\n{log}")

    def total(what: str) -> int:
        found = [int(n) for n in re.findall(rf"\b(\d+) bytes {what}\b", log)]
        if not found:
            raise ValueError(f"the log does not mention {what}:\n{log}")
        return sum(found)

    return PtxasReport(
        registers=registers[0],
        spill_bytes=total("spill stores") + total("spill loads"),
        stack_bytes=total("stack frame"),
        serialized=tuple(
            line.strip()
            for line in log.splitlines()
            if re.search(r"\(C75\d\d\)|wgmma\S* instructions are serialized", line)
        ),
        wide_descriptors=wide_descriptors,
    )


def mosaic_modules(fn: Callable[..., Any], *args: Any) -> list[bytes]:
    """The serialised Mosaic GPU modules that `fn(*args)` launches, lowered for CUDA."""
    lowered = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",))
    return modules_in(lowered.compiler_ir("stablehlo"))


def exported_modules(exported: jax.export.Exported) -> list[bytes]:
    """The serialised Mosaic GPU modules of an exported program, on whichever platform."""
    with mlir.make_ir_context():
        return modules_in(ir.Module.parse(exported.mlir_module()))


def modules_in(module: Any) -> list[bytes]:
    """The serialised Mosaic GPU modules of a StableHLO module."""
    with module.context:
        return [
            op.attributes["mhlo.backend_config"]["module"].value_bytes
            for op in _operations(module.operation)
            if op.name == "stablehlo.custom_call"
            and ir.StringAttr(op.attributes["call_target_name"]).value == "mosaic_gpu_v2"
        ]


def kernel_name(module: bytes) -> str:
    """A serialised module's name. Unlike `describe_module`, takes modules of exported programs.

    MLIR's Python bindings cannot read the older version of the format in which they are written.
    """
    found = re.search(rb"(ikbo_\w+)_mosaic_gpu\b", module)
    if found is None:
        raise ValueError("the module has no kernel of this library")
    return found[1].decode()


@contextlib.contextmanager
def _parsed(module: bytes) -> Iterator[Any]:
    """The operation of a serialised module, inside of its context."""
    context = mlir.make_ir_context()
    dialect.register_dialect(context)
    context.allow_unregistered_dialects = True  # a serialised module's operations have other names
    with context:
        yield ir.Module.parse(module).operation


def module_text(module: bytes) -> str:
    """A serialised module as text, without the places of the source that it came from."""
    with _parsed(module) as parsed:
        text: Any = parsed.get_asm(enable_debug_info=False)
    # Mosaic GPU numbers the modules that it makes.
    return re.sub(r'(dump_basename = "\w+_)\d+"', r'\1"', text)


def module_digest(module: bytes) -> str:
    """Digests a serialised module without the places of the source that it came from.

    MLIR writes bytecode in a tenth of the time that it takes for text (`module_text`).
    """
    with _parsed(module) as parsed:
        # Mosaic GPU numbers the modules that it makes.
        if "mosaic_gpu.dump_basename" in parsed.attributes:
            del parsed.attributes["mosaic_gpu.dump_basename"]
        passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(parsed)
        bytecode = io.BytesIO()
        parsed.write_bytecode(bytecode)
    return hashlib.sha256(bytecode.getvalue()).hexdigest()[:16]


def describe_module(module: bytes) -> tuple[str, int]:
    """A serialised module's name, and the bytes of dynamic shared memory of its launch."""
    with _parsed(module) as parsed:
        launches = list(_launches(parsed))
        if len(launches) != 1:
            raise ValueError(f"expected one launch in the module, found {len(launches)}")
        size = launches[0].operands[len(launches[0].operands) - 1].owner.attributes["value"]
        name = ir.StringAttr(parsed.attributes["sym_name"]).value
        return name, ir.IntegerAttr(size).value


def _children(op: Any) -> Iterator[Any]:
    for region in op.regions:
        for block in region.blocks:
            yield from (inner.operation for inner in block.operations)


def _operations(op: Any) -> Iterator[Any]:
    for inner in _children(op):
        yield inner
        yield from _operations(inner)


def _launches(op: Any) -> Iterator[Any]:
    """Kernel launches. What they hold is not looked through: that takes half of a compilation."""
    for inner in _children(op):
        if inner.name.endswith("gpu.launch"):
            yield inner
        else:
            yield from _launches(inner)


def find_plugin() -> pathlib.Path:
    """The CUDA plugin's library, of whichever CUDA version is installed."""
    for name in ("xla_cuda13", "xla_cuda12"):
        for folder in _package_folders("jax_plugins"):
            if (path := folder / name / "xla_cuda_plugin.so").is_file():
                return path
    raise OfflineUnavailableError(
        f"offline compilation needs JAX's CUDA plugin (no GPU, no CUDA libraries): {INSTALL}"
    )


def find_ptxas() -> pathlib.Path:
    """ptxas that `IKBO_PTXAS` names, else the one of an installed wheel, else the one on PATH."""
    if named := os.environ.get("IKBO_PTXAS"):
        # Mosaic GPU finds ptxas by its name, in the folder that comes first on PATH.
        path = pathlib.Path(named).absolute()
        if not os.access(path, os.X_OK) or path.name != "ptxas":
            raise OfflineUnavailableError(f"IKBO_PTXAS={named}: no program named ptxas")
        return path
    for folder in _package_folders("nvidia"):
        for pattern in ("cu1*/bin/ptxas", "cuda_nvcc/bin/ptxas"):
            if found := sorted(folder.glob(pattern)):
                return found[-1]
    if found_on_path := shutil.which("ptxas"):
        return pathlib.Path(found_on_path)
    raise OfflineUnavailableError(
        f"offline compilation needs ptxas, of the wheel nvidia-cuda-nvcc or on PATH: {INSTALL}"
    )


def find_c_compiler() -> str:
    for name in filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")):
        if found := shutil.which(name):
            return found
    raise OfflineUnavailableError(
        "offline compilation needs a C compiler for its stand-in of the driver: "
        "install gcc or clang, or name one in CC"
    )


def _package_folders(name: str) -> list[pathlib.Path]:
    """Folders of a package that several distributions share; empty if it is not installed."""
    spec = importlib.util.find_spec(name)
    return [pathlib.Path(p) for p in spec.submodule_search_locations or ()] if spec else []


class Compiler:
    """Compiles kernels until it is closed; `workdir` holds the stand-in driver and the logs.

    Attributes:
      reports: on kernels by the digest of their module, which are not compiled again.
      uses: what `compile_module` was asked for, in order.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        *,
        known: Mapping[str, PtxasReport] | None = None,
        ptxas: pathlib.Path | None = None,
        dumps: tuple[str, ...] = (),
    ) -> None:
        """Raises OfflineUnavailableError, saying what to install, if something is missing.

        `known`: the first of the `reports`; `ptxas`: another program than `find_ptxas` finds;
        `dumps`: what the log has beside PTX, such as "HOST_LLVM".
        """
        self._plugin = find_plugin()
        self._ptxas = ptxas or find_ptxas()
        source = workdir / "driver.c"
        source.write_text(_STAND_IN_DRIVER)
        library = workdir / "libcuda.so.1"
        flags = ["-shared", "-fPIC", f"-Wl,-soname,{library.name}"]
        subprocess.run([find_c_compiler(), *flags, "-o", library, source], check=True)
        self._environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("MOSAIC_GPU_")},
            "LD_LIBRARY_PATH": _prepend(workdir, "LD_LIBRARY_PATH"),
            "PATH": _prepend(self._ptxas.parent, "PATH"),
            **{f"MOSAIC_GPU_DUMP_{name}": "1" for name in ("PTX", "PTXAS", *dumps)},
        }
        self.reports = dict(known or {})
        self.uses: list[Use] = []
        self._logs = workdir / "stdout", workdir / "stderr"
        self._plugin_errors = workdir / "plugin_stderr"
        self._started: subprocess.Popen[bytes] | None = None

    @property
    def _server(self) -> subprocess.Popen[bytes]:
        """The process that has the plugin loaded, from the first compilation on."""
        if self._started is None:
            with self._plugin_errors.open("wb") as stderr:
                self._started = subprocess.Popen(
                    [sys.executable, "-c", _COMPILE, self._plugin, *self._logs],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    env=self._environment,
                    process_group=0,
                )
        return self._started

    def close(self) -> None:
        """Ends the process that has the plugin loaded."""
        if self._started is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._started.pid, signal.SIGKILL)
            self._started.communicate()

    def compile(self, fn: Callable[..., Any], *args: Any) -> list[CompiledKernel]:
        """Compiles every kernel that `fn(*args)` launches, in order; `args` may be shapes."""
        return [self.compile_module(module) for module in mosaic_modules(fn, *args)]

    def compile_fit(self, fn: Callable[..., Any], *args: Any) -> list[CompiledKernel]:
        """Compiles as `compile` does, and asserts that every kernel is fit to run."""
        kernels = self.compile(fn, *args)
        for kernel in kernels:
            assert not kernel.faults, kernel.faults
            assert kernel.smem_bytes <= MAX_SMEM_BYTES
        return kernels

    def compile_module(self, module: bytes) -> CompiledKernel:
        """Compiles one serialised module; raises ValueError with the log if that fails.

        A module that differs in nothing but places of the source from one with a report is not
        compiled.
        """
        name, smem_bytes = describe_module(module)
        digest = module_digest(module)
        is_new = digest not in self.reports
        if is_new:
            self.reports[digest] = self.assemble(module)
        report = self.reports[digest]
        self.uses.append(Use(digest, name, report, is_new))
        return CompiledKernel(name, smem_bytes, report)

    def assemble(self, module: bytes) -> PtxasReport:
        """What ptxas says of one serialised module; raises ValueError with the log if it fails."""
        status, stdout, stderr = self._run(module)
        try:
            return parse_ptxas_log(stdout)
        except ValueError as error:
            raise ValueError(
                f"{kernel_name(module)} did not compile (exit status {status}):\n{error}\n{stderr}"
            ) from None

    def _run(self, module: bytes) -> tuple[int, str, str]:
        """Exit status, standard output and standard error of the compilation of a module."""
        requests, answers = self._server.stdin, self._server.stdout
        assert requests is not None
        assert answers is not None
        with contextlib.suppress(BrokenPipeError):
            requests.write(b"%d\n%b" % (len(module), module))
            requests.flush()
        if not select.select([answers], [], [], TIMEOUT)[0]:
            self.close()
            raise subprocess.TimeoutExpired("MosaicGpuCompile", TIMEOUT)
        if answer := answers.readline():
            stdout, stderr = (log.read_text() for log in self._logs)
            return int(answer), stdout, stderr
        return self._server.wait(), "", self._plugin_errors.read_text()


def _prepend(folder: pathlib.Path, variable: str) -> str:
    return os.pathsep.join(filter(None, (str(folder), os.environ.get(variable))))
