"""Ops for ranking models that look up each candidate's user in the kernel instead of copying it."""

from ikbo_jax import debug, masks
from ikbo_jax._version import __version__
from ikbo_jax.measure import Timing, TuningReport, benchmark, tune
from ikbo_jax.ops.attention import attention, merge_attention
from ikbo_jax.ops.dot_product_attention import dot_product_attention
from ikbo_jax.ops.explain import Explanation, explain
from ikbo_jax.ops.gated_linear import gated_linear
from ikbo_jax.ops.gdpa import gdpa
from ikbo_jax.ops.linear_compression import (
    PaddedWeight,
    Term,
    linear_compression,
    multilevel_linear_compression,
    pad_weight,
)
from ikbo_jax.ops.look_up import look_up, segment_sum
from ikbo_jax.ops.norm_linear import norm_linear
from ikbo_jax.ops.target import export_target
from ikbo_jax.placement import Placement, place_users
from ikbo_jax.rewrite import rewrite
from ikbo_jax.tuning.user_cache import tuned

__all__ = [
    "Explanation",
    "PaddedWeight",
    "Placement",
    "Term",
    "Timing",
    "TuningReport",
    "__version__",
    "attention",
    "benchmark",
    "debug",
    "dot_product_attention",
    "explain",
    "export_target",
    "gated_linear",
    "gdpa",
    "linear_compression",
    "look_up",
    "masks",
    "merge_attention",
    "multilevel_linear_compression",
    "norm_linear",
    "pad_weight",
    "place_users",
    "rewrite",
    "segment_sum",
    "tune",
    "tuned",
]
