"""Rewrites programs that a program calls: jit, loops, branches, custom derivatives."""
