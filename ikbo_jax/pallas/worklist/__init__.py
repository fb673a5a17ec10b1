"""Finds which rows, tiles and ranges belong to which user or sequence."""
