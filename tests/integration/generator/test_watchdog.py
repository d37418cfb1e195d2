"""Processes in which something hangs: they are noticed, and they end."""

from __future__ import annotations

import subprocess
import sys

import pytest


def python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)


BLOCKED = """
import asyncio, time
from generator.concurrency import watch

async def tool_that_blocks():
    time.sleep(1000)

async def main():
    watching = asyncio.create_task(watch(0.5))
    await asyncio.sleep(0)
    await tool_that_blocks()

asyncio.run(main())
"""

GOES_ON = """
import asyncio, time
from generator.concurrency import watch

async def main():
    watching = asyncio.create_task(watch(1.5))
    for _ in range(20):
        await asyncio.sleep(0.1)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    time.sleep(1.7)  # nobody watches any more

asyncio.run(main())
"""

HANGING = """
import asyncio, threading
from generator.concurrency import exit_after

async def main():
    asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
    exit_after({code}, 0.1)

asyncio.run(main())
"""


def test_an_event_loop_that_stands_still_ends_the_process_and_shows_where() -> None:
    done = python(BLOCKED)
    assert done.returncode == 1
    assert "in tool_that_blocks" in done.stderr


def test_an_event_loop_that_goes_on_is_left_alone() -> None:
    done = python(GOES_ON)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("code", [0, 3])
def test_a_thread_that_hangs_keeps_no_process_from_ending(code: int) -> None:
    assert python(HANGING.format(code=code)).returncode == code
