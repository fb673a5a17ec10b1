"""Mosaic GPU kernels for Hopper, and the small parts that they share."""
