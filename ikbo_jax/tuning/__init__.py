"""Kernel configurations, the table that chooses among them, and the autotuner that measures them.

Import the submodules: `configs` and `table` are light, `autotune` pulls in the kernels.
"""
