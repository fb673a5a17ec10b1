"""The kernels of whole programs compiled by XLA for an H100, on a machine without a GPU.

XLA compiles for a card that a text describes. The programs have all kernels that would run there,
launches of Mosaic GPU among them, but cannot be loaded.
"""

import functools
import os
import re
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies
from offline import OfflineUnavailableError, find_plugin

_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84978565120 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

#: Operations that take no time on the device.
_FREE = {"parameter", "bitcast", "constant", "tuple", "get-tuple-element"}


@functools.cache
def _sharding() -> Any:
    find_plugin()  # raises an error that says what to install
    # JAX asks the plugin for the card, unless it is told to use the CPU.
    if os.environ.get("JAX_PLATFORMS") != "cpu" and jax.default_backend() != "gpu":
        raise OfflineUnavailableError("set JAX_PLATFORMS=cpu, as `make test` does")
    topology = topologies.get_topology_desc("", "cuda", target_config=_H100, topology="1x1x1")
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


def operations(fn: Callable[..., Any], *shapes: Any) -> list[str]:
    """Names of the operations that take time, in order: of launches the kernel's, else XLA's."""
    on_card = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_sharding()), shapes
    )
    text = jax.jit(fn).trace(*on_card).lower().compile().as_text()
    found = []
    for line in text[text.index("\nENTRY") :].splitlines()[1:]:
        # A result is a shape, or a tuple of shapes, whose layouts have parentheses.
        match = re.match(r"\s*(?:ROOT )?%?([\w.-]+) = (?:\(.*?\) |\S+ )([\w-]+)\(", line)
        if match is None or match[2] in _FREE:
            continue
        # The name of an operation does not always say which kernel it launches; its module does.
        launched = re.search(r"\b00(ikbo_\w+)_mosaic_gpu\\", line)
        is_launch = 'custom_call_target="mosaic_gpu_v2"' in line
        found.append(launched[1] if launched and is_launch else match[1])
    return found
