"""Ending together with one's parent, however that one ended: a killed front leaves nothing running."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["PARENT", "SAVING_S", "end_with_parent"]

PARENT = "CADENZA_PARENT"  # the environment variable that names the process to end with
SAVING_S = 600  # for workers that save after the front was killed; then they are killed too
_PR_SET_PDEATHSIG = 1  # from Linux's prctl.h


def end_with_parent(how: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send `how` to this process when its parent ends; only if the environment names that parent.

    It does nothing under torchrun, which has its own habits, and on systems without `prctl`.
    """
    parent = os.environ.get(PARENT)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, how, 0, 0, 0)
    if os.getppid() != int(parent):  # it was gone before the kernel was asked
        os.kill(os.getpid(), how)
