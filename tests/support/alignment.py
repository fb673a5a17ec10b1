"""What TMA demands of a copy, and Pallas' interpreter does not check.

On an H200, a copy that began 12 bytes past a multiple of 16 ended with an illegal instruction.
"""

import math
from typing import Any

import numpy as np


def _begin_and_size(part: slice | int) -> tuple[int, int]:
    return (part, 1) if isinstance(part, int) else (part.start, part.stop - part.start)


def why_not(device: Any, device_range: Any, shared: Any, shared_range: Any) -> str | None:
    """Why TMA cannot copy between two ranges; None if it can.

    Args:
      device: shape and dtype of the array in device memory.
      device_range: for each of its dimensions a slice or a number.
      shared: shape and dtype of the array in shared memory, whose start is aligned.
      shared_range: likewise.
    """
    size = np.dtype(device.dtype).itemsize
    first, count = _begin_and_size(device_range[-1])
    sizes = [_begin_and_size(part)[1] for part in device_range]
    if first * size % 16:
        return f"the copy begins {first * size % 16} bytes past a multiple of 16 in device memory"
    if count * size % 16:
        return f"rows of the copy have {count * size} bytes, which is no multiple of 16"
    if max(sizes) > 256:
        return f"the copy has {max(sizes)} elements in a dimension, more than 256"
    if device.shape[-1] * size % 16 and math.prod(device.shape[:-1]) > 1:
        return f"rows of the array have {device.shape[-1] * size} bytes, no multiple of 16"
    begins = [_begin_and_size(part)[0] for part in shared_range]
    offset = int(np.ravel_multi_index(begins, shared.shape)) * np.dtype(shared.dtype).itemsize
    if offset % 128:
        return f"the copy is at offset {offset} of shared memory, no multiple of 128"
    return None
