"""Runs the library's kernels on a CPU as Hopper would: their PTX, by `sm90.Machine`.

Inside of `Emulator.emulated()`, `mosaic.kernel` compiles a kernel for sm_90a (`offline`) and runs
its PTX on the arrays that it is called with, in a callback where they are traced. The host's part
of the launch (tensor maps, pointers, grid, shared memory) is read from the LLVM IR that Mosaic GPU
makes of it.
"""

import contextlib
import dataclasses
import math
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import offline
import ptx
import sm90
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from ikbo_jax.pallas.hopper import mosaic
from ikbo_jax.problems import hopper

#: Bytes of an element by Mosaic GPU's number of its dtype.
_ELEMENT = {2: 2, 3: 4, 5: 2, 6: 4, 7: 2}


@dataclasses.dataclass(frozen=True)
class Launch:
    """What the host does: `params` as `sm90.Machine` takes them."""

    params: list[Any]
    grid: int
    threads: int
    shared_bytes: int


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled module. `registers`: of a thread, at the kernel's entry."""

    program: ptx.Program
    launch: Launch
    registers: int


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A call of a compiled module."""

    module: Compiled
    outputs: list[jax.ShapeDtypeStruct]  # of the custom call, in order
    aliases: dict[int, int]  # output: operand
    operands: int


_TOKEN = r"(?<= )(undef|poison|%\d+|-?\d+)(?=,|$)"


def read_host(text: str) -> Launch:
    """Follows the host's function, which has no branches, to the launch."""
    # As jax 0.11 makes it; the arrays are the last argument.
    function = re.search(r"^define \w+ @\w+\(([^)]*)\) {\n(.*?)^}", text, re.M | re.S)
    if function is None:
        raise ValueError("no function of the host")
    parameters, body = function.groups()
    values: dict[str, Any] = {parameters.split()[-1]: ("buffers", 0)}
    memory: dict[tuple[str, int], Any] = {}
    maps: dict[str, dict[int, sm90.Descriptor]] = {}

    def value(token: str) -> Any:
        token = token.strip().split()[-1]
        return values[token] if token.startswith("%") else int(token)

    def words(at: tuple[str, int], count: int) -> tuple[int, ...]:
        return tuple(memory[at[0], at[1] + 8 * i] for i in range(count))

    for line in body.splitlines():
        name, _, rest = re.sub(r"{.*?} (?=undef|poison|%)", "", line.strip()).partition(" = ")
        if line.strip().startswith("store"):
            found = re.match(r"store (.+?) (%\w+|-?\d+), ptr (%\d+)", line.strip())
            assert found is not None, line
            memory[values[found[3]]] = value(found[2])
        elif "@mosaic_gpu_init_tma_desc" in line:
            args = line[line.index("(") + 1 : line.rindex(")")].split(",")
            target, base, dtype, rank, sizes, strides, swizzle, box = map(value, args)
            maps.setdefault(target[0], {})[target[1]] = sm90.Descriptor(
                base[0], base[1], _ELEMENT[dtype], words(sizes, rank), words(strides, rank),
                words(box, rank), swizzle,
            )  # fmt: skip
        elif "@mosaic_gpu_launch_kernel" in line:
            args = line[line.index("(") + 1 : line.rindex(")")].split(",")
            last = [value(x) for x in args[-2:] if x.split()[-1] in values]
            (pointers,) = (x for x in last if isinstance(memory.get(x), tuple))
            x, y, z, *cluster, threads, _, _, shared = map(value, args[1:11])
            cluster = [max(size, 1) for size in cluster]  # zeros: without clusters
            if y * z * math.prod(cluster) != 1:
                raise ValueError(f"a grid {x, y, z} in clusters {cluster}")
            params, i = [], 0
            while (pointers[0], 8 * i) in memory:
                params.append(memory[memory[pointers[0], 8 * i]])
                i += 1
            return Launch(params, x, threads, shared)
        elif rest.startswith("load ptr"):
            at = value(rest.split(",")[1])
            values[name] = (at[1], 0) if at[0] == "buffers" else memory[at]
        elif rest.startswith("load ["):
            values[name] = maps.get(value(rest.split(",")[1])[0], {})
        elif rest.startswith("alloca"):
            values[name] = (name, 0)
        elif rest.startswith("getelementptr"):
            values[name] = _element(rest, values)
        elif rest.startswith("insertvalue"):
            aggregate, item, *path = re.findall(_TOKEN, rest)
            inserted = {} if aggregate in ("undef", "poison") else dict(values[aggregate])
            inserted[tuple(map(int, path))] = value(item)
            values[name] = inserted
        elif rest.startswith("extractvalue"):
            aggregate, *path = re.findall(_TOKEN, rest)
            values[name] = values[aggregate][tuple(map(int, path))]
        elif rest.startswith(("ptrtoint", "inttoptr")):
            values[name] = value(rest.split(" to ")[0])
        else:
            raise ValueError(f"unknown instruction of the host: {line}")
    raise ValueError("the host launches nothing")


def _element(text: str, values: dict[str, Any]) -> Any:
    """The address of `getelementptr`; a structure's fields are numbered, not laid out."""
    found = re.match(r"getelementptr (.+), ptr (%\d+), (.*)", text)
    assert found is not None, text
    kind, base, *_ = found.groups()
    numbers = [int(x.split()[-1]) if "%" not in x else values[x.split()[-1]]
               for x in found[3].split(",")]  # fmt: skip
    name, offset = values[base]
    if name == "buffers":
        return name, offset + numbers[0]
    if kind.startswith("{"):
        return name, f"field {numbers[1]}"
    return name, offset + numbers[0] * {"i8": 1, "i64": 8, "ptr": 8}[kind]


#: Answers Mosaic GPU's questions about versions as ptxas does, and assembles nothing.
_STAND_IN_PTXAS = """\
#!/bin/sh
case "$1" in --version|--input-as-string) exec {} "$@";; esac
while [ "$1" != -o ]; do shift; done
echo > "$2"
"""


def make_compiler(workdir: pathlib.Path) -> offline.Compiler:
    """A compiler for an `Emulator`, which needs PTX alone: ptxas would take a third of the time."""
    ptxas = workdir / "bin" / "ptxas"
    ptxas.parent.mkdir()
    ptxas.write_text(_STAND_IN_PTXAS.format(offline.find_ptxas()))
    ptxas.chmod(0o755)
    return offline.Compiler(workdir, ptxas=ptxas, dumps=("HOST_LLVM",))


class Emulator:
    """Compiles and runs kernels; `compiler` comes from `make_compiler`."""

    def __init__(self, compiler: offline.Compiler) -> None:
        self.compiler = compiler
        self.compiled: dict[str, Compiled] = {}
        self.launches: list[str] = []
        self.seed = 0
        self.blocks: Sequence[int] | None = None

    @contextlib.contextmanager
    def emulated(
        self, seed: int = 0, *, resident: int = 132, blocks: Sequence[int] | None = None
    ) -> Iterator[list[str]]:
        """Launches of kernels run here, or some blocks of them; the list gets their names."""
        self.seed, self.launches, self.blocks = seed, [], blocks

        def kernel(body: Callable[..., None], **options: Any) -> Callable[..., Any]:
            return lambda *operands: self.call(body, options, operands, resident)

        with mock.patch.object(mosaic, "kernel", kernel):
            yield self.launches

    def call(
        self,
        body: Callable[..., None],
        options: dict[str, Any],
        operands: tuple[Any, ...],
        resident: int,
    ) -> Any:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
        refs = [i for i, x in enumerate(operands) if isinstance(x, jax.Ref)]

        def launched(*arrays: Any) -> Any:
            held = [jax.new_ref(x) if i in refs else x for i, x in enumerate(arrays)]
            return plgpu.kernel(body, **options)(*held), [jax.freeze(held[i]) for i in refs]

        kernel = self.compile(launched, *shapes)
        results = jax.tree.leaves(options["out_type"])
        filled = [*results, *(shapes[i] for i in refs)]

        def run(*operands: Any) -> list[np.ndarray]:
            return self.run(kernel, operands, resident)[: len(filled)]

        arrays = [x[...] if i in refs else x for i, x in enumerate(operands)]
        leaves = jax.pure_callback(run, filled, *arrays)
        for i, leaf in zip(refs, leaves[len(results) :], strict=True):
            operands[i][...] = leaf
        return jax.tree.unflatten(jax.tree.structure(options["out_type"]), leaves[: len(results)])

    def run(self, kernel: Kernel, operands: tuple[Any, ...], resident: int) -> list[np.ndarray]:
        """The arrays that the kernel fills."""
        arrays = [np.array(x) for x in operands]
        blanks: list[np.ndarray] = []
        for i, shape in enumerate(kernel.outputs):
            blank = np.zeros(shape.shape, shape.dtype)
            if kernel.aliases.get(i, len(arrays)) < len(operands):
                blank = arrays[kernel.aliases[i]]
            elif i in kernel.aliases:  # counters, zero when the kernel starts
                arrays.append(blank)
            else:
                blank.reshape(-1).view(np.uint8)[:] = 0xFF
            blanks.append(blank)
        assert len(arrays) == kernel.operands, (len(arrays), kernel.operands)
        program, launch = kernel.module.program, kernel.module.launch
        machine = sm90.Machine(
            program,
            [*arrays, *blanks],
            launch.params,
            grid=launch.grid,
            shared_bytes=launch.shared_bytes,
            registers=kernel.module.registers,
            seed=self.seed + len(self.launches),
            resident=resident,
            blocks=self.blocks,
        )
        self.launches.append(program.name)
        machine.run()
        return blanks

    def compile(self, fn: Callable[..., Any], *shapes: Any) -> Kernel:
        lowered = jax.jit(fn).trace(*shapes).lower(lowering_platforms=("cuda",))
        program = lowered.compiler_ir("stablehlo")
        with program.context:
            (call,) = [
                op
                for op in offline._operations(program.operation)
                if op.name == "stablehlo.custom_call"
                and ir.StringAttr(op.attributes["call_target_name"]).value == "mosaic_gpu_v2"
            ]
            module = call.attributes["mhlo.backend_config"]["module"].value_bytes
            outputs = [_shape(r.type) for r in call.results]
            aliases = {}
            for alias in call.attributes.get("output_operand_aliases") or []:
                found = re.search(
                    r"output_tuple_indices = \[(\d*)\], operand_index = (\d+)", str(alias)
                )
                assert found is not None, alias
                aliases[int(found[1] or 0)] = int(found[2])
            digest = offline.module_digest(module)
            if digest not in self.compiled:
                self.compiled[digest] = self._compile(module)
            return Kernel(self.compiled[digest], outputs, aliases, len(call.operands))

    def _compile(self, module: bytes) -> Compiled:
        status, log, errors = self.compiler._run(module)
        begin, host = log.find(".version"), log.find("; ModuleID")
        if begin < 0 or host < 0:
            raise ValueError(f"{offline.kernel_name(module)}, exit status {status}:\n{errors}")
        code = log[begin:host]
        program = ptx.read(code, shared_base=sm90.SHARED, param_base=sm90.PARAMS)
        return Compiled(program, read_host(log[host:]), entry_registers(code, program.threads))


def entry_registers(code: str, threads: int) -> int:
    """Registers that ptxas gives a thread of a kernel that moves them by `setmaxnreg`.

    They are as many as fit a multiprocessor. Of other kernels, nothing depends on the number.
    """
    found = re.search(r"\.minnctapersm (\d+)", code)
    blocks = int(found[1]) if found else 1
    return min(255, hopper.SM_REGISTERS // (threads * blocks) // 8 * 8)


def _shape(kind: Any) -> jax.ShapeDtypeStruct:
    tensor = ir.RankedTensorType(kind)
    dtypes = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32, "i32": jnp.int32}
    return jax.ShapeDtypeStruct(tuple(tensor.shape), dtypes[str(tensor.element_type)])
