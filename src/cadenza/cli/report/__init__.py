"""`cadenza report`: one self-contained HTML page of a run, or of several beside each other."""

from cadenza.cli.report.command import report
from cadenza.cli.report.page import write_report

__all__ = ["report", "write_report"]
