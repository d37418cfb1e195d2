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
    time.sleep({blocks})

async def main():
    watching = asyncio.create_task(watch(1.0))
    for _ in range({turns}):
        await asyncio.sleep(0.1)
    if {ends}:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    await tool_that_blocks()

asyncio.run(main())
"""
HANGING = """
import asyncio, threading
from generator.concurrency import exit_after

async def main():
    asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
    exit_after(3, 0.1)

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
        (WATCHED.format(blocks=1000, turns=1, ends=False), 1, "in tool_that_blocks"),
        (WATCHED.format(blocks=1.2, turns=12, ends=True), 0, ""),  # nothing watches any more when it blocks
        (HANGING, 3, ""),
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
