"""The sampler process of a run without training steps, killed at any time and started again."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from common.config import Config, dump_config
from common.streams.agreement import agree
from common.streams.broker import Broker
from tests.conftest import RedisServer
from tests.support.sampler import NoopGenerator, make_config

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
PROMPTS, RESPONSES = 40, 8


@pytest.fixture
def config(tmp_path: Path, redis_server: RedisServer, real_broker: Broker) -> Config:
    broker = {"url": redis_server.url, "dead_after": 2}
    return make_config(tmp_path, prompts=PROMPTS, run={"name": "test", "steps": 0}, broker=broker)


def spawn(config: Config, *overrides: str) -> subprocess.Popen[str]:
    folder = Path(config.run.output_dir)
    (folder / "run.yaml").write_text(dump_config(config))
    options = [part for override in overrides for part in ("-o", override)]
    arguments = ["--kind", "values", "--responses", str(RESPONSES)]
    return subprocess.Popen(
        [sys.executable, "-m", "sampler.cli", "--config", str(folder / "run.yaml"), *arguments,
         "--answers", str(folder / "answers.jsonl"), *options],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_killed_again_and_again_it_writes_each_answer_once(config: Config, real_broker: Broker) -> None:
    generator, rng = NoopGenerator(real_broker), random.Random(0)
    answered, over = threading.Semaphore(0), threading.Event()

    def work() -> None:
        while not over.is_set():
            for _ in range(generator.work(4, block_ms=5)):
                answered.release()

    working = threading.Thread(target=work, daemon=True)
    working.start()
    process = spawn(config)
    try:
        for _ in range(3):
            for _ in range(rng.randrange(40, 80)):
                answered.acquire(timeout=60)
            process.send_signal(signal.SIGKILL)
            process.wait()
            process = spawn(config)
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    finally:
        process.kill()
        over.set()
        working.join(timeout=30)
    rows = [json.loads(line) for line in (Path(config.run.output_dir) / "answers.jsonl").read_text().splitlines()]
    assert len(rows) == len({row["task_id"] for row in rows}) == PROMPTS * RESPONSES == len(generator.headers)
    counters = real_broker.counters()
    assert counters["dispatched"] == counters["counted"] == counters["finished"] == PROMPTS * RESPONSES
    assert real_broker.redis.get(real_broker.key("lease")) is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.prompt_column=question"], "no prompts in"),
        (["broker.url=redis://127.0.0.1:1/0", "broker.wait=0"], "no Redis at redis://127.0.0.1:1/0"),
    ],
)
def test_what_a_user_can_get_wrong_is_one_line_and_exit_2(config: Config, overrides: list[str], message: str) -> None:
    process = spawn(config, *overrides)
    _, err = process.communicate(timeout=60)
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (process.returncode, len(errors)) == (2, 1), err
    assert message in errors[0]
    assert "Traceback" not in err


def test_a_run_that_trains_is_left_alone(config: Config, real_broker: Broker) -> None:
    agree(real_broker, config.model_copy(update={"run": config.run.model_copy(update={"steps": 6})}))
    process = spawn(config)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "run.steps (here 0, in the run 6); use that, or choose another run.name" in err
