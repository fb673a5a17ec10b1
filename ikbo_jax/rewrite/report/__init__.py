"""Reports what a rewrite found, and what it costs."""
