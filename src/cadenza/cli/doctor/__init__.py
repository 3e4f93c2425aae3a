"""`cadenza doctor`: what is wrong with a machine or a cluster, and what to set."""

from cadenza.cli.doctor.command import doctor

__all__ = ["doctor"]
