"""Benchmarks: what the ops take on the device at hand, beside their baselines and ceilings."""
