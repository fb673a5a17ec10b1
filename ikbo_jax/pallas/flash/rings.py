"""The query slots and the rings of keys and values that the attention kernels have."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.hopper.launch import OperandTile, barrier
from ikbo_jax.problems import AttentionConfig, GdpaConfig
from ikbo_jax.problems.hopper import BLOCK_K, NUM_CONSUMERS, WGMMA_M


def ring_types(
    dtype: Any,
    config: AttentionConfig | GdpaConfig,
    *,
    head_dim: int,
    items: int,
    item_words: int,
    interpret: bool,
) -> dict[str, Any]:
    """Types of the fields that `Shared` has in both kernels, by name.

    Args:
      dtype: of queries, keys and values.
      config: the kernel's configuration.
      head_dim: H.
      items: number of item descriptors.
      item_words: words of a descriptor.
      interpret: whether the kernel is interpreted, which needs `staging`.
    """
    blocks, slots = -(-head_dim // BLOCK_K), config.q_slots
    block = (blocks, config.block_kv, BLOCK_K)
    columns = max(config.block_kv, head_dim)
    return {
        "query": OperandTile((slots, NUM_CONSUMERS, blocks, WGMMA_M, BLOCK_K), dtype),
        "key": OperandTile((config.k_stages, *block), dtype),
        "value": OperandTile((config.v_stages, *block), dtype),
        "items": plgpu.SMEM((items, item_words), jnp.int32),
        "q_ready": barrier(NUM_CONSUMERS * blocks, slots),
        "q_free": barrier(NUM_CONSUMERS, slots),
        "k_ready": barrier(blocks, config.k_stages),
        "k_free": barrier(NUM_CONSUMERS, config.k_stages),
        "v_ready": barrier(blocks, config.v_stages),
        "v_free": barrier(NUM_CONSUMERS, config.v_stages),
        "staging": plgpu.SMEM((NUM_CONSUMERS, WGMMA_M, columns), dtype) if interpret else None,
    }
