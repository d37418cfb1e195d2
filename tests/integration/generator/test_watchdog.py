"""Processes in which something hangs are noticed, and end; one that is killed leaves no memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import eventually

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

SHARING = """
from multiprocessing.shared_memory import SharedMemory
from common.config import parse_config
from generator.engine.arguments import prepare_environment

prepare_environment(parse_config({"model": {"path": "m"}, "data": {"train": "t"}}))
print(SharedMemory(create=True, size=4096).name, flush=True)
input()
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
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == code
    assert words in done.stderr if words else done.stderr == ""


def test_memory_of_a_group_killed_while_it_loads_is_removed() -> None:
    pipe = subprocess.PIPE
    loading = subprocess.Popen([sys.executable, "-c", SHARING], stdin=pipe, stdout=pipe, text=True, process_group=0)
    with loading:
        assert loading.stdout is not None
        memory = Path("/dev/shm", loading.stdout.readline().strip())
        assert memory.is_file()
        os.killpg(loading.pid, signal.SIGKILL)
    eventually(lambda: not memory.exists())
