"""``cadenza selftest``: does all of Cadenza work on this machine? One command, a table, and a file for bug reports."""

from cadenza.cli.selftest.command import selftest

__all__ = ["selftest"]
