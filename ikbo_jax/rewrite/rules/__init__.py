"""Rewrites single equations on lazy values."""
