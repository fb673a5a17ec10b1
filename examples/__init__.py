"""Complete programs on this library; see README.md in this folder."""
