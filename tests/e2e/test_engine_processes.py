"""No engine process outlives its generator, however that ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.engine import save_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PATIENCE = 60.0  # seconds until the test gives up

GENERATOR = """
import asyncio, multiprocessing, sys
from pathlib import Path
from tests.support.engine import start_engine

async def main():
    engine = await start_engine(Path(sys.argv[1]), 4)
    print("engines", *(child.pid for child in multiprocessing.active_children()), flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


def descendants(pid: int) -> set[int]:
    """A process's children, theirs, and so on."""
    children = {int(child) for task in _tasks(pid) for child in Path(task, "children").read_text().split()}
    return children.union(*(descendants(child) for child in children)) if children else set()


def _tasks(pid: int) -> list[str]:
    return [f"/proc/{pid}/task/{task}" for task in os.listdir(f"/proc/{pid}/task")]


def wait_until_gone(pid: int) -> None:
    """Wait for a process that is not our child."""
    try:
        file = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ended, _, _ = select.select([file], [], [], PATIENCE)
        assert ended, f"process {pid} is still alive"
    finally:
        os.close(file)


@pytest.mark.parametrize(
    ("method", "environment"),
    [("forked", {"OMP_NUM_THREADS": "1"}), ("spawned", {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"})],
)
def test_a_killed_generator_leaves_no_process_behind(tmp_path: Path, method: str, environment: dict[str, str]) -> None:
    save_tiny_model(tmp_path, seed=0)
    generator = subprocess.Popen(
        [sys.executable, "-c", GENERATOR, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    )
    try:
        assert generator.stdout is not None
        told = next(line for line in generator.stdout if line.startswith("engines"))
        engines = {int(pid) for pid in told.split()[1:]}
        assert engines
        everyone = descendants(generator.pid)
        assert everyone >= engines
    finally:
        generator.send_signal(signal.SIGKILL)
        generator.wait()
    for pid in everyone:
        wait_until_gone(pid)
