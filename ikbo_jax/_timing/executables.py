"""A cache of compiled programs in files; a hit needs no tracing, lowering or compiling.

The key is everything that determines the lowered text: all files of this library, the user's tuning
cache, the versions of JAX and the driver, the device, JAX's settings, and the sizes. A program that
cannot be read or loaded is compiled again.
"""

import contextlib
import hashlib
import importlib
import os
import pathlib
import pickle
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jaxlib
import numpy as np
from jax.experimental import serialize_executable

#: Largest number of files in the folder, and of bytes in all; the least recently used are deleted.
MAX_FILES, MAX_BYTES = 128, 1 << 30
#: Prefixes of environment variables that affect compiled programs.
VARIABLES = ("XLA_", "JAX_", "CUDA_", "NVIDIA_", "MOSAIC_", "IKBO_", "TF_")
_DIGEST_BYTES = hashlib.sha256().digest_size


def environment_digest(tables: Sequence[pathlib.Path] = ()) -> bytes:
    """Hashes everything outside a program that affects how it compiles, also the files `tables`."""
    digest = hashlib.sha256()
    package = pathlib.Path(__file__).resolve().parents[1]
    sources = sorted(p for p in package.rglob("*") if p.suffix in (".py", ".json"))
    for path in (*sources, *tables, pathlib.Path("/proc/driver/nvidia/version")):
        content = path.read_bytes() if path.is_file() else b"none"
        digest.update(f"{path} {len(content)}\n".encode() + content)
    device = jax.devices()[0]
    facts = (
        *(sys.version, platform.platform(), _cpu_features()),
        *(jax.__version__, jaxlib.__version__, np.__version__),
        *(device.device_kind, device.client.platform_version, jax.device_count()),
        getattr(device, "core_count", None),
        sorted((name, str(value)) for name, value in jax.config.values.items()),
        sorted(item for item in os.environ.items() if item[0].startswith(VARIABLES)),
    )
    digest.update(repr(facts).encode())
    return digest.digest()


def _cpu_features() -> str:
    """Reads the CPU's instruction set extensions from /proc/cpuinfo; "" without this file."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return ""


class Store:
    """Keeps pickled entries in a folder, each in a file named after its key and `environment`.

    Reading an entry can run code, so only the user may have write permission for the folder.
    """

    def __init__(self, folder: pathlib.Path, environment: bytes) -> None:
        self._folder, self._environment = folder, environment

    def key(self, identity: str, name: str, args: Any = (), options: Any = ()) -> str:
        """Hashes a program's owner, name, shapes of arguments and compiler options to its key."""
        leaves, tree = jax.tree.flatten(args)
        avals = [(np.shape(x), str(x.dtype), getattr(x, "weak_type", False)) for x in leaves]
        facts = repr((identity, name, avals, str(tree), options)).encode()
        return hashlib.sha256(self._environment + facts).hexdigest()

    def get(self, key: str) -> Any:
        """Reads an entry; None if there is none or it cannot be read."""
        path = self._folder / key
        try:
            content = path.read_bytes()
            body = content[_DIGEST_BYTES:]
            # Only files that were written completely reach pickle and XLA's loader.
            if hashlib.sha256(body).digest() != content[:_DIGEST_BYTES]:
                return None
            entry = pickle.loads(body)
            os.utime(path)
        except Exception:
            return None
        return entry

    def put(self, key: str, entry: Any) -> None:
        """Writes an entry atomically; if that fails, there is no entry and no error."""
        partial = None
        try:
            body = pickle.dumps(entry)
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                partial = file.name
                file.write(hashlib.sha256(body).digest() + body)
            os.replace(partial, self._folder / key)
            self._delete_oldest()
        except Exception:
            if partial is not None:
                with contextlib.suppress(OSError):
                    os.unlink(partial)

    def _delete_oldest(self) -> None:
        files = [(path, path.stat()) for path in self._folder.iterdir()]
        total = 0
        newest_first = sorted(files, key=lambda found: -found[1].st_mtime)
        for position, (path, stat) in enumerate(newest_first):
            total += stat.st_size
            if position >= MAX_FILES or total > MAX_BYTES:
                path.unlink(missing_ok=True)


def to_entry(compiled: jax.stages.Compiled, out: Any) -> tuple[Any, Any]:
    """Makes the entry of a compiled program: the shapes of its result, and the program."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), out)
    return shapes, serialize_executable.serialize(compiled)


def load(serialized: Any) -> jax.stages.Compiled:
    """Loads the second element of an entry of `to_entry`; raises the errors of XLA's loader."""
    # XLA links the host's part of a kernel with a library that this module registers. Without it,
    # the program failed: "Failed to materialize symbols".
    importlib.import_module("jax.experimental.mosaic.gpu")
    payload, in_tree, out_tree = serialized
    return serialize_executable.deserialize_and_load(
        payload,
        in_tree,
        out_tree,
        # By default the loader uses all devices; the programs here use one.
        execution_devices=[jax.config.jax_default_device or jax.devices()[0]],
    )


_current: Store | None = None


def current_store() -> Store | None:
    """Returns the store that `use_store` set, shared by all threads; None outside `use_store`."""
    return _current


@contextlib.contextmanager
def use_store(folder: pathlib.Path, tables: Sequence[pathlib.Path]) -> Iterator[str | None]:
    """Sets `current_store()` to a store in `folder`; `tables` as in `environment_digest`.

    Yields:
      None, or why nothing is stored. If the user has configured or disabled JAX's compilation cache
      (`JAX_COMPILATION_CACHE_DIR`, `jax.config`), JAX alone stores programs, and None is yielded:
      a program that JAX's cache has loaded cannot be stored again, since on a CPU it fails when it
      is loaded for the second time (jaxlib 0.11.2: "Function … not found").
    """
    global _current
    if jax.config.jax_compilation_cache_dir or not jax.config.jax_enable_compilation_cache:
        yield None
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} cannot be written")
    except OSError as error:
        yield f"compiled programs are not kept for the next time: {error}"
        return
    before = _current
    _current = Store(folder, environment_digest(tables))
    try:
        yield None
    finally:
        _current = before
