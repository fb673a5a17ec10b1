"""Whole models on this library's ops: `ranking`."""
