"""Processes in which something hangs are noticed, and end."""

from __future__ import annotations

import subprocess
import sys

import pytest

WATCHED = """
import asyncio, time
from generator.concurrency import watch

async def tool_that_blocks():
    time.sleep(1000)

async def main():
    watching = asyncio.create_task(watch({seconds}))
    await asyncio.sleep(0)
    {scene}

asyncio.run(main())
"""
BLOCKED = WATCHED.format(seconds=0.5, scene="await tool_that_blocks()")
GOES_ON = WATCHED.format(
    seconds=1.5,
    scene="""
    for _ in range(20):
        await asyncio.sleep(0.1)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    time.sleep(1.7)  # nothing watches any more
""",
)
HANGING = """
import asyncio, threading
from generator.concurrency import exit_after

async def main():
    asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
    exit_after({code}, 0.1)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [
        (BLOCKED, 1, "in tool_that_blocks"),
        (GOES_ON, 0, ""),
        (HANGING.format(code=3), 3, ""),
    ],
    ids=["blocked loop", "loop goes on", "hanging thread"],
)
def test_a_process_that_hangs_ends_and_another_does_not(program: str, code: int, words: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code
    assert words in done.stderr if words else done.stderr == ""
