"""Recognises attention as models write it, and what changes its logits and weights."""
