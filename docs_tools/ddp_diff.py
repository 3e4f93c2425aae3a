"""The changes from a DDP script to one with Cadenza, from the two scripts themselves."""

from __future__ import annotations

import difflib

from docs_tools.rooms import ROOT

__all__ = ["ddp_diff"]

FOLDER = ROOT / "examples" / "from_ddp"


def ddp_diff() -> str:
    """Return the two scripts as one, in diff form, with all lines that stay."""
    before, after = ((FOLDER / name).read_text().splitlines() for name in ("before.py", "after.py"))
    lines = list(difflib.unified_diff(before, after, lineterm="", n=len(before)))[3:]
    return "```diff\n" + "\n".join(lines) + "\n```"
