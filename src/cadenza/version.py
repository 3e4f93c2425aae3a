"""The version of Cadenza."""

__version__ = "0.1.0"
