"""Attention kernels: broadcast attention, and generalised attention forward."""
