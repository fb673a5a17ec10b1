"""The version, in the one place from which packaging and the library read it."""

__version__ = "0.1.0"
