"""The autotuner, which times the configurations of a kernel; `autotune` is the entry."""
