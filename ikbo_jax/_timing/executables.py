"""Compiled programs kept as files, found again without tracing, lowering or compiling.

JAX's own cache finds a program by its lowered text, and lowering the demo's kernels takes longer
than everything else when nothing has to compile. Here the key is what that text is made from: every
file of this library, the user's tuning cache, the versions of JAX and of the driver, the device,
JAX's settings, and the sizes. Whatever cannot be read or loaded is compiled again.
"""

from __future__ import annotations

import contextlib
import hashlib
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

#: What the folder may hold: files, and bytes in all. The least recently used go first.
MOST_FILES, MOST_BYTES = 128, 1 << 30
#: Beginnings of the names of environment variables that change what a program compiles to.
VARIABLES = ("XLA_", "JAX_", "CUDA_", "NVIDIA_", "MOSAIC_", "IKBO_", "TF_")
#: JAX's settings that say where compiled programs go, and not what they are.
WHERE_KEPT = ("compilation_cache", "persistent_cache")
_DIGEST_BYTES = hashlib.sha256().digest_size


def surroundings(tables: Sequence[pathlib.Path] = ()) -> bytes:
    """A digest of all but the program itself that decides what a program compiles to.

    Args:
      tables: files beside the library's own that decide, such as the user's tuning cache.
    """
    digest = hashlib.sha256()
    package = pathlib.Path(__file__).resolve().parents[1]
    sources = sorted(p for p in package.rglob("*") if p.suffix in (".py", ".json"))
    for path in (*sources, *tables, pathlib.Path("/proc/driver/nvidia/version")):
        content = path.read_bytes() if path.is_file() else b"none"
        digest.update(f"{path} {len(content)}\n".encode() + content)
    device = jax.devices()[0]
    settings = {
        name: str(value)
        for name, value in jax.config.values.items()
        if not any(part in name for part in WHERE_KEPT)
    }
    facts = (
        *(sys.version, platform.platform(), _cpu_features()),
        *(jax.__version__, jaxlib.__version__, np.__version__),
        *(device.device_kind, device.client.platform_version, jax.device_count()),
        getattr(device, "core_count", None),
        sorted(settings.items()),
        sorted(item for item in os.environ.items() if item[0].startswith(VARIABLES)),
    )
    digest.update(repr(facts).encode())
    return digest.digest()


def _cpu_features() -> str:
    """What code compiled for this machine's CPU may use, as far as the system says."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return ""


class Store:
    """A folder of entries, each an object that `pickle` takes, found by a key.

    Like the tuning cache beside it, the folder is the user's own: who may write there may run code
    as that user.

    Args:
      folder: is made when something is put.
      surroundings: part of every key.
    """

    def __init__(self, folder: pathlib.Path, surroundings: bytes) -> None:
        self._folder, self._surroundings = folder, surroundings

    def key(self, identity: str, name: str, args: Any = (), options: Any = ()) -> str:
        """The key of a program: of whom it is, its name, its arguments and compiler options."""
        leaves, tree = jax.tree.flatten(args)
        avals = [(np.shape(x), str(x.dtype), getattr(x, "weak_type", False)) for x in leaves]
        facts = repr((identity, name, avals, str(tree), options)).encode()
        return hashlib.sha256(self._surroundings + facts).hexdigest()

    def get(self, key: str) -> Any:
        """The entry, or None if there is none that can be read."""
        path = self._folder / key
        try:
            content = path.read_bytes()
            body = content[_DIGEST_BYTES:]
            # Nothing but what was written whole reaches pickle, or XLA's loader behind it.
            if hashlib.sha256(body).digest() != content[:_DIGEST_BYTES]:
                return None
            entry = pickle.loads(body)
            os.utime(path)
        except Exception:
            return None
        return entry

    def put(self, key: str, entry: Any) -> None:
        """Writes an entry in one go; where that fails, there is no entry."""
        partial = None
        try:
            body = pickle.dumps(entry)
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                partial = file.name
                file.write(hashlib.sha256(body).digest() + body)
            os.replace(partial, self._folder / key)
            self._make_room()
        except Exception:
            if partial is not None:
                with contextlib.suppress(OSError):
                    os.unlink(partial)

    def _make_room(self) -> None:
        files = [(path, path.stat()) for path in self._folder.iterdir()]
        total = 0
        newest_first = sorted(files, key=lambda found: -found[1].st_mtime)
        for position, (path, stat) in enumerate(newest_first):
            total += stat.st_size
            if position >= MOST_FILES or total > MOST_BYTES:
                path.unlink(missing_ok=True)


def to_entry(compiled: jax.stages.Compiled, out: Any) -> tuple[Any, Any]:
    """A compiled program and the shapes of its result, as `Store.put` takes them."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), out)
    return shapes, serialize_executable.serialize(compiled)


def load(serialized: Any) -> jax.stages.Compiled:
    """The second half of what `to_entry` made, as a program; raises what XLA's loader raises."""
    payload, in_tree, out_tree = serialized
    compiled: jax.stages.Compiled = serialize_executable.deserialize_and_load(
        payload,
        in_tree,
        out_tree,
        # By default the loader takes all devices, of which a program here uses one.
        execution_devices=[jax.config.jax_default_device or jax.devices()[0]],
    )
    return compiled


_open: Store | None = None


def current() -> Store | None:
    """The store that `kept_in` opened, which all threads share."""
    return _open


@contextlib.contextmanager
def kept_in(folder: pathlib.Path, tables: Sequence[pathlib.Path]) -> Iterator[None]:
    """Has `current` be a store in `folder`; `tables` as for `surroundings`."""
    global _open
    before = _open
    _open = Store(folder, surroundings(tables))
    try:
        yield
    finally:
        _open = before
