"""How much memory a process takes while it does something."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")
M_MMAP_THRESHOLD = -3


def peak_bytes(act: Callable[[], Result]) -> tuple[Result, int]:
    """Does something; returns its result, and the most memory that this process had meanwhile beyond that before.

    What is mapped from files does not count: the system takes it back when it needs it.
    """
    # What is freed is given back at once, and does not hide what comes after it.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    gc.collect()
    before = most = _anonymous_bytes()
    is_over = threading.Event()

    def watch() -> None:
        nonlocal most
        while not is_over.wait(0.001):
            most = max(most, _anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = act()
        most = max(most, _anonymous_bytes())
    finally:
        is_over.set()
        watcher.join()
    return result, most - before


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/self/status without RssAnon")
