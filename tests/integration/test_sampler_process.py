"""`spo-sampler` as a process: kills and signals."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import structlog
import yaml
from structlog.testing import capture_logs

from common.config import Config, dump_config
from common.streams.broker import Broker
from sampler import cli
from tests.conftest import RedisServer
from tests.support.sampler import NoopGenerator, NoopLearner, make_config, replayed
from tests.support.sampler_driving import audited, committed_counts

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(tmp_path: Path, redis_server: RedisServer, real_broker: Broker) -> Config:
    broker = {"url": redis_server.url, "dead_after": 2}
    return make_config(tmp_path, prompts=5, heldout=3, run={"journal": True, "steps": 20}, broker=broker)


def spawn(config: Config, *options: str) -> subprocess.Popen[str]:
    path = Path(config.run.output_dir) / "run.yaml"
    path.write_text(dump_config(config))
    return subprocess.Popen(
        [sys.executable, "-m", "sampler.cli", "--config", str(path), *options],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def ended(process: subprocess.Popen[str], timeout: float = 600) -> tuple[int, str]:
    try:
        _, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, err


class Others(threading.Thread):
    """The generator and the learner of a run, until it is finished or the block ends."""

    def __init__(self, broker: Broker, config: Config) -> None:
        super().__init__(daemon=True)
        self.broker, self.generator = broker, NoopGenerator(broker)
        self.learner = NoopLearner(broker, folder=config.run.folder)
        self.answered = threading.Semaphore(0)
        self.over = threading.Event()

    def __enter__(self) -> Others:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.join(timeout=600)

    def run(self) -> None:
        while not self.over.is_set() and not self.broker.finished():
            for _ in range(self.generator.work(4, block_ms=5)):
                self.answered.release()
            if self.learner.work(block_ms=1):
                self.generator.version = self.learner.version


def test_killed_again_and_again_it_still_counts_each_task_once(config: Config, real_broker: Broker) -> None:
    rng, process = random.Random(0), spawn(config)
    try:
        with Others(real_broker, config) as others:
            for _ in range(2):
                for _ in range(rng.randrange(15, 40)):
                    others.answered.acquire(timeout=600)
                process.kill()
                process.wait()
                process = spawn(config)
            code, err = ended(process)
        assert code == 0, err
    finally:
        process.kill()
    audited(real_broker, config)
    ids = sorted({header.prompt_id for header in others.generator.headers if header.kind == "train"})
    assert committed_counts(real_broker) == replayed(config, ids, others.generator.headers, config.run.steps)
    written = yaml.safe_load((Path(config.run.output_dir) / "default" / "config.yaml").read_text())
    written["run"].pop("modules")
    assert written == config.model_dump(mode="json", exclude={"run": {"modules"}})


def test_sigterm_ends_it_and_a_successor_starts_at_once(config: Config, real_broker: Broker) -> None:
    others, process = Others(real_broker, config), spawn(config)
    line = ""
    while "waiting for the learner" not in line and "the learner is ready" not in line:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line, "the sampler ended"
    process.send_signal(signal.SIGTERM)
    code, err = ended(process)
    assert code == 0, err
    assert not real_broker.redis.exists(real_broker.key("lease"))
    with others:
        code, err = ended(spawn(config))
    assert code == 0, err
    audited(real_broker, config)
    with capture_logs() as logs:
        cli.serve(config, structlog.get_logger())
    assert "finished already" in logs[-1]["event"]


def test_it_ends_if_the_run_folder_is_moved_away(config: Config, real_broker: Broker) -> None:
    folder = config.run.folder
    with Others(real_broker, config) as others:
        process = spawn(config)
        others.answered.acquire(timeout=600)
        folder.rename(folder.with_name("elsewhere"))
        code, err = ended(process)
    assert (code, "Traceback" in err) == (2, False)
    assert f"error: run folder {folder} was moved away or deleted during the run" in err


def test_ctrl_c_ends_a_sampler_whose_redis_is_gone(tmp_path: Path, own_redis: RedisServer) -> None:
    process = spawn(make_config(tmp_path, broker={"url": own_redis.url, "wait": 3600}))
    assert process.stderr is not None
    while "waiting for the learner" not in process.stderr.readline():
        assert process.poll() is None
    own_redis.kill()
    process.send_signal(signal.SIGINT)
    code, err = ended(process)
    assert code == 2
    assert "Traceback" not in err
    assert "told to stop" in err
