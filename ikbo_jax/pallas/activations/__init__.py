"""Activations on WGMMA fragments: values, raw weights, slopes."""
