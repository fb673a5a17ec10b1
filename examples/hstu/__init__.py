"""HSTU as the ranker of MovieLens-100k: with this library's ops, and in plain XLA.

Run `python -m examples.hstu` in the source tree.
"""
