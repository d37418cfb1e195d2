"""Ends the process when its event loop is blocked, or when a thread keeps it from exiting."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import threading

STALL_SECONDS = 60.0
LEAVE_SECONDS = 5.0


async def watch(seconds: float = STALL_SECONDS) -> None:
    """Crash when the event loop stands still for `seconds`, until cancelled.

    A tool or a simulated user that blocks the loop stops all episodes. A process that has ended is started again, and
    its tasks are taken over by others. The stack of each thread is written to stderr.
    """
    try:
        while True:
            faulthandler.dump_traceback_later(seconds, exit=True)
            await asyncio.sleep(seconds / 4)
    finally:
        faulthandler.cancel_dump_traceback_later()


def exit_after(code: int, seconds: float = LEAVE_SECONDS) -> None:
    """End the process with this exit code after `seconds`, unless it has ended by then.

    At exit Python waits for every thread, and so for ever where a tool hangs in one.
    """
    ending = threading.Timer(seconds, os._exit, [code])
    ending.daemon = True
    ending.start()
