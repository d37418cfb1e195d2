"""`spo run` with a teacher, which scores every answer although its server is killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from common.config.run import BrokerConfig
from common.streams.broker import connect
from launcher.folder.metrics import read_metrics
from tests.conftest import RedisServer
from tests.support.waiting import PATIENCE
from tests.support.whole_run import pid_of, save_model, settled_counters, spo, started, wait_for_version, write_run

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
STEPS, BATCH = 6, 16


def test_a_run_is_taught_although_a_teacher_is_killed(tmp_path: Path, redis_server: RedisServer) -> None:
    teacher = save_model(tmp_path / "teacher", seed=1)
    sections = {
        "run": {"steps": STEPS, "journal": True},
        "sampler": {"batch_size": BATCH},
        "episode": {"max_response_tokens": 8},
        "learner": {"checkpoint_every": 1},
        "teacher": {"model": str(teacher)},
    }
    path = write_run(tmp_path, "taught", sections)
    tried = spo("run", path, "--dry-run")
    assert tried.returncode == 0, tried.stdout + tried.stderr
    for line in (f"teacher: {teacher} on the CPU", f"{teacher} has the policy's tokens"):
        assert line in tried.stdout
    broker = connect(BrokerConfig(url=redis_server.url, dead_after=3.0), "taught")
    words = ("run", path, "--redis", redis_server.url, "--generators", 1, "--plain")
    with started(tmp_path / "log", *words) as process:
        wait_for_version(broker, 2, process)
        os.kill(pid_of(tmp_path / "log", "teacher"), signal.SIGKILL)
        assert process.wait(5 * PATIENCE) == 0, (tmp_path / "log").read_text()
    folder = tmp_path / "runs" / "taught"
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["restarts"]) == (STEPS, {"teacher": 1})
    counters = settled_counters(broker)
    assert counters["finished"] >= counters["batched"] == STEPS * BATCH
    shares = read_metrics(folder).series("teacher/tokens", "learner").values.tolist()
    assert (len(shares), max(shares)) == (STEPS, 1.0)  # 0 where the correction has rejected all tokens
    audited = spo("audit", "-c", path, "-o", f"broker.url={redis_server.url}")
    assert audited.returncode == 0, audited.stdout
