"""No engine process outlives its generator, however that ends, nor does memory that they share."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from common.streams.broker import Broker
from generator.engine import engine as engines
from tests.conftest import RedisServer
from tests.support.checks import run_file, start
from tests.support.engine import save_tiny_model, start_engine
from tests.support.processes import ended

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

GENERATOR = """
import asyncio, json, multiprocessing, sys
from pathlib import Path
from tests.support.engine import start_engine

async def main():
    engine = await start_engine(Path(sys.argv[1]), 4, **json.loads(sys.argv[2]))
    print("engines", *(child.pid for child in multiprocessing.active_children()), flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


def test_a_killed_generator_leaves_nothing_behind(tmp_path: Path) -> None:
    environment, engine = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}, {"tensor_parallel_size": 2}
    save_tiny_model(tmp_path, seed=0)
    generator = subprocess.Popen(
        [sys.executable, "-c", GENERATOR, str(tmp_path), json.dumps(engine)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        start_new_session=True,
    )
    try:
        assert generator.stdout is not None
        line = next(line for line in generator.stdout if line.startswith("engines"))
        engines = {int(pid) for pid in line.split()[1:]}
        assert engines
        processes = {child.pid for child in psutil.Process(generator.pid).children(recursive=True)}
        assert processes >= engines
        shared = {inode for pid in {generator.pid, *processes} for inode in shared_memory(pid)}
        assert shared
    finally:
        os.killpg(generator.pid, signal.SIGKILL)  # as the launcher does
        generator.wait()
    assert all(ended(pid) for pid in processes)
    assert shared.isdisjoint(entry.inode() for entry in os.scandir("/dev/shm"))


def shared_memory(pid: int) -> set[int]:
    """Inodes of the files in /dev/shm that a process has mapped; the names of semaphores change after that."""
    files = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if " /dev/shm/" in line]
    return {int(fields[4]) for fields in files}


def test_a_process_that_ends_while_it_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.v1.utils
    from vllm.utils import system_utils

    kill = system_utils.kill_process_tree
    gone: list[int] = []

    def too_late(pid: int) -> None:
        if not gone:
            gone.append(pid)
            raise psutil.NoSuchProcess(pid)
        kill(pid)

    for module in (system_utils, vllm.v1.utils):
        monkeypatch.setattr(module, "kill_process_tree", too_late)
    monkeypatch.setattr(engines, "SHUTDOWN_TIMEOUT", 0.0)
    save_tiny_model(tmp_path, seed=0)

    async def start_and_close() -> list[int]:
        engine = await start_engine(tmp_path, 4)
        started = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
        await engine.close()
        return started

    started = asyncio.run(start_and_close())
    assert gone
    assert set(gone) <= set(started)
    assert all(ended(pid) for pid in started)


def test_a_generator_with_another_revision_says_one_line(
    real_broker: Broker, redis_server: RedisServer, tmp_path: Path
) -> None:
    cached, revision = tmp_path / "hub" / "models--org--tiny", "a" * 40
    save_tiny_model(cached / "snapshots" / revision, seed=0)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(revision)
    real_broker.redis.hset(real_broker.key("model"), "config.json", "of another revision")
    model = {"path": "org/tiny", "dtype": "float32", "max_model_len": 512}
    config = run_file(tmp_path, model=model, broker={"url": redis_server.url}, data={"max_prompt_tokens": 64})
    environment = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "SPO_LOG_LEVEL": "ERROR"}
    refused = start("generator.cli", "-c", config, **environment)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
    assert refused.stderr.startswith("error: run 'test' was started with another model: org/tiny: config.json (here ")
