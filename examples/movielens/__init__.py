"""A ranking model on MovieLens-100k: with this library's ops, with copies, and rewritten.

Run `python -m examples.movielens` in the source tree; docs/training.md describes it.
"""
