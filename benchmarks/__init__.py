"""Benchmarks: times of the ops on the local device, compared with baselines and ceilings.

A *provider* is one implementation of an op, a *point* one set of sizes, a *sweep* a list of points.
A *bar* is the target that a figure of a point should reach. Without a GPU all sizes shrink, and the
figures only show that a benchmark runs.
"""
