"""A look into a run from outside, on a real Redis: its state, and its dead letters."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import psutil
import pytest
import structlog
from rich.console import Console

from common.config import Config, dump_config, load_config, parse_config
from common.errors import UserError
from common.messages import Failure, Step, Task
from common.streams import dead as letters
from common.streams.batches import BatchInbox
from common.streams.broker import Broker, connect
from common.streams.ledger import Commit, SamplerLedger
from common.streams.presence import Presence
from common.streams.tasks import TaskInbox
from launcher import status as inspection
from launcher.quickstart import inputs
from launcher.report import redis_facts
from launcher.run.folder_lock import locked
from launcher.run.processes import with_redis
from launcher.run.supervisor import Supervisor
from tests.conftest import RedisServer


@pytest.fixture
def config(redis_server: RedisServer, real_broker: Broker, tmp_path: Path) -> Config:
    made = inputs.quickstart_config(tmp_path / "x", seed=0, steps=8).model_dump()
    made["run"]["name"] = real_broker.run
    made["broker"]["url"] = redis_server.url
    return parse_config(made)


def shown(renderable: object) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_status_shows_step_processes_and_a_learner_that_is_gone(
    config: Config, real_broker: Broker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    BatchInbox(real_broker).acquire().announce(Step(version=5, metrics={"reward/mean": 0.5}))
    Presence(real_broker, "learner", "learner").beat()
    real_broker.redis.hincrby(real_broker.key("counters"), "dispatched", 7)
    (tmp_path / "run.yaml").write_text(dump_config(config))
    with Presence(real_broker, "generator-9", "generator"):
        text = shown(inspection.show(config))
        assert "step 5/8, running" in text
        assert "generator-9" in text
        assert "gone" not in text
        real_broker.redis.zincrby(real_broker.key("alive"), -5_400_000, "learner")
        assert re.search(r"the learner has been gone for 54\d\d s", shown(inspection.show(config)))
        inspection.status(config=tmp_path / "run.yaml", as_json=True)
        facts = json.loads(capsys.readouterr().out)
        real_broker.finish()
        assert "gone" not in shown(inspection.show(config))
    assert (facts["step"], facts["steps"], facts["finished"], facts["evaluations"]) == (5, 8, False, [])
    assert (facts["counters"]["dispatched"], facts["metrics"]["reward/mean"]) == (7, 0.5)
    assert facts["processes"]["generator-9"]["role"] == "generator"
    assert 5400 <= facts["learner_gone_seconds"] < 5500


def test_dead_letters_are_listed_and_put_back(config: Config, real_broker: Broker, tmp_path: Path, capsys) -> None:
    inbox = BatchInbox(real_broker).acquire()
    real_broker.redis.xadd(real_broker.key("batches"), {"batch": b"not a batch"})
    assert inbox.next(block_ms=0) is None
    [(entry_id, _)] = letters.list_dead(real_broker)
    text = shown(inspection.dead_letters(config))
    assert entry_id in text
    assert "Batch: not msgpack" in text

    (tmp_path / "run.yaml").write_text(dump_config(config))
    inspection.dead(config=tmp_path / "run.yaml", replay=entry_id)
    assert f"{entry_id} is back on stream 'batches'" in capsys.readouterr().out
    assert "no dead letters" in shown(inspection.dead_letters(config))
    with pytest.raises(UserError, match=f"no dead letter {entry_id}"):
        inspection.dead(config=tmp_path / "run.yaml", replay=entry_id)

    ledger = SamplerLedger(real_broker, "sampler")
    ledger.acquire()
    asked = Task(task_id="t0", prompt_id="p", prompt=[{"role": "user", "content": "What is\n12*7?" + " please" * 100}])
    ledger.commit(Commit(dispatch=[(asked, b"")]))
    tasks = TaskInbox(real_broker, "generator-9")
    (delivery,) = tasks.take(1, 0)
    tasks.finish([tasks.set_aside(delivery, Failure.SANDBOX_UNAVAILABLE, "[red]SandboxUnavailable[/red]: \x1b[2Jgone")])
    text = " ".join(shown(inspection.dead_letters(config)).split())
    assert "What is 12*7? please" in text
    assert "[red]SandboxUnavailable[/red]: \\x1b[2Jgone" in text
    assert text.count("please") < 10


def ended_run(folder: Path, dead: int = 1) -> Path:
    """Folder of a run whose embedded Redis has stopped, with so many dead letters."""
    config = inputs.quickstart_config(folder, seed=0, steps=8)
    supervisor = Supervisor(folder / "logs", structlog.get_logger(), 0)
    config = with_redis(config, "embedded", folder, supervisor)
    broker = connect(config.broker, config.run.name)
    BatchInbox(broker).acquire().announce(Step(version=5, metrics={"reward/mean": 0.5}))
    for _ in range(dead):
        letters.add(broker, letters.letter("tasks", "TimeoutError: <b>late</b>", {}, "generator-1"))
    broker.redis.hset(broker.key("counters"), mapping={"dispatched": 9, "counted": 7, "dead": dead})
    (folder / "config.yaml").write_text(dump_config(config, absolute=True))
    broker.redis.close()
    supervisor.stop()
    return folder


def test_a_run_that_is_over_is_looked_at_by_its_folder_or_file(tmp_path: Path) -> None:
    ended = ended_run(tmp_path / "quickstart-1")
    before = {child.pid for child in psutil.Process().children()}
    config = load_config(ended / "config.yaml")
    assert inspection.facts(config)["step"] == 5
    assert "TimeoutError: <b>late</b>" in shown(inspection.dead_letters(config))
    assert {child.pid for child in psutil.Process().children()} == before
    # The address of its Redis is found by the original file too.
    (tmp_path / "mine.yaml").write_text(
        f"run: {{name: quickstart-1, experiment: quickstart-1, output_dir: {tmp_path}, steps: 8}}\n"
        "model: {path: m}\ndata: {train: t}\n"
    )
    assert inspection.facts(load_config(tmp_path / "mine.yaml"))["step"] == 5
    # While another command starts the run, it is left alone.
    with locked(ended, "run"), pytest.raises(UserError, match="is in use by process .*does not answer yet"):
        inspection.facts(config)


def test_a_report_asks_the_redis_of_the_folder_that_is_named(tmp_path: Path) -> None:
    shutil.move(ended_run(tmp_path / "mine", dead=2), tmp_path / "moved")
    ended_run(tmp_path / "mine", dead=5)  # another run has taken its place
    facts = redis_facts(tmp_path / "moved")
    assert (facts.note, facts.letters) == ("", {"TimeoutError: <b>late</b>": 2})
    assert facts.counters["counted"] == 7
