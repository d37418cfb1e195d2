"""Ends a child process when its parent dies: a parent that is killed cannot end its children itself."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_is_alive: Callable[[], bool]) -> None:
    """Have the kernel kill this process when the thread that started it ends (Linux only)."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A parent that died before the call sends no signal any more.
    if not parent_is_alive():
        os.kill(os.getpid(), signal.SIGKILL)
