"""Kernel configurations, the dispatch table that chooses one, and the autotuner that times them.

Import the submodules: `configs` and `table` are light, `autotune` imports the kernels.
"""
