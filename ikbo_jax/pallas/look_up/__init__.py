"""The kernels of lookups and of segment sums."""
