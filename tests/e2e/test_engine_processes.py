"""No engine process outlives its generator, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.engine import save_tiny_model
from tests.support.processes import ended

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

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


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_killed_generator_leaves_no_process_behind(tmp_path: Path, method: str) -> None:
    environment = {"OMP_NUM_THREADS": "1"} if method == "fork" else {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
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
        everyone = {child.pid for child in psutil.Process(generator.pid).children(recursive=True)}
        assert everyone >= engines
    finally:
        generator.send_signal(signal.SIGKILL)
        generator.wait()
    assert all(ended(pid) for pid in everyone)
