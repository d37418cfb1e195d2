"""On a real engine, agents in containers: tasks are built and tried, and a generator that is killed leaves nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import yaml

from common.streams.broker import Broker
from tests.conftest import RedisServer
from tests.support.compose import ROOT, sh
from tests.support.whole_run import json_lines, kill, settled_counters, spo, started, wait_for_version, write_run

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]
EXAMPLE = ROOT / "examples" / "harbor"
NAME, STEPS = "repairs", 5


@pytest.fixture
def repairs(tmp_path: Path) -> Iterator[Path]:
    """The configuration of a run on the ten repairs; their images are gone afterwards."""
    subprocess.run([sys.executable, EXAMPLE / "tasks.py", tmp_path / "tasks"], check=True)
    episode = yaml.safe_load((EXAMPLE / "run.yaml").read_text())["episode"]
    episode["agent"]["command"] = ["python3", str(EXAMPLE / "agent.py")]
    sections = {
        "run": {"steps": STEPS},
        "data": {"train": f"harbor:{tmp_path / 'tasks'}"},
        "sampler": {"batch_size": 8},
        "generator": {"max_concurrency": 4, "retry_pause": 0.5},
        "episode": episode,
    }
    try:
        yield write_run(tmp_path, NAME, sections)
    finally:
        images = sh("docker", "images", "--quiet", "spo-harbor/repair-*").split()
        subprocess.run(["docker", "rmi", "--force", *images], capture_output=True, check=False)


def containers() -> set[str]:
    return set(sh("docker", "ps", "--all", "--quiet", "--filter", f"label=spo.run={NAME}").split())


def test_a_killed_generator_leaves_no_container_and_every_task_counts_once(
    repairs: Path, redis_server: RedisServer
) -> None:
    checked = spo("data", "check", repairs)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert checked.stdout.count("its solution gets 1, doing nothing 0") == 3
    folder = repairs.parent
    broker = Broker(redis.Redis.from_url(redis_server.url), NAME)
    with started(folder / "log", "run", repairs, "--plain", "--generators", "1", "--redis", redis_server.url) as run:
        wait_for_version(broker, 1, run)
        left = containers()
        kill(broker, "generator")
        wait_for_version(broker, 3, run)
        assert not left & containers()
        assert run.wait() == 0, (folder / "log").read_text()[-3000:]
    assert containers() == set()
    settled_counters(broker)
    measured = {name for entry in json_lines(folder / "runs" / NAME / "metrics.jsonl") for name in entry["values"]}
    assert {"container/start_seconds", "container/agent_seconds", "container/grading_seconds"} <= measured
