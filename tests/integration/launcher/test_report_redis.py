"""What a report asks a run's Redis: that of its own folder, wherever the folder is by now."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import structlog

from common.config import BrokerConfig, load_config
from common.streams import dead
from common.streams.broker import connect
from launcher.report import redis_facts
from launcher.run.processes import with_redis
from launcher.run.supervisor import Supervisor
from tests.support.run_folder import finished_run


def with_letters(folder: Path, count: int) -> None:
    """Give a run folder an embedded Redis that knows of dead letters; the run was killed."""
    finished_run(folder)
    (folder / "summary.json").unlink()
    supervisor = Supervisor(folder / "logs", structlog.get_logger(), max_restarts=0)
    config = with_redis(load_config(folder / "config.yaml"), "embedded", folder, supervisor)
    broker = connect(BrokerConfig(url=config.broker.url), config.run.name)
    for _ in range(count):
        dead.keep(broker, dead.letter("tasks", "TimeoutError: <b>late</b>", {}, "generator-1"))
    broker.redis.hset(broker.key("counters"), mapping={"dispatched": 9, "counted": 7, "dead": count})
    supervisor.stop()
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("url: redis://localhost:6379/0", f"url: {config.broker.url}"))


@pytest.mark.integration
def test_dead_letters_and_counters_come_from_the_folder_that_is_named(tmp_path: Path) -> None:
    with_letters(tmp_path / "mine", count=2)
    shutil.move(tmp_path / "mine", tmp_path / "moved")
    # Another run has taken its place.
    with_letters(tmp_path / "mine", count=5)
    facts = redis_facts(tmp_path / "moved")
    assert (facts.note, facts.letters) == ("", {"TimeoutError: <b>late</b>": 2})
    assert facts.counters["counted"] == 7
