"""A ranker behind HTTP, on Ray Serve.

Run `python -m examples.serving` in the source tree; docs/serving.md describes it.
"""
