"""A look into a run from outside, on a real Redis: its state, and its dead letters."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
import structlog
from rich.console import Console

from common.config import Config, dump_config, load_config, parse_config
from common.errors import UserError
from common.messages import Step, Task
from common.streams.batches import BatchInbox
from common.streams.broker import Broker, connect
from common.streams.ledger import Commit, SamplerLedger
from common.streams.presence import Presence
from common.streams.tasks import TaskInbox
from launcher import status as inspection
from launcher.cli import main
from launcher.quickstart import inputs
from launcher.run.folder_lock import locked
from launcher.run.processes import with_redis
from launcher.run.supervisor import Supervisor
from launcher.status import dead, status
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


@pytest.mark.integration
def test_status_shows_step_and_processes(config: Config, real_broker: Broker) -> None:
    BatchInbox(real_broker).acquire().announce(Step(version=5, metrics={"reward/mean": 0.5}))
    with Presence(real_broker, "generator-9", "generator"):
        text = shown(inspection.show(config))
    assert "step 5/8, going on" in text
    assert "generator-9" in text
    assert "no process is alive" in shown(inspection.show(config))


@pytest.mark.integration
def test_status_says_how_long_the_learner_is_gone(config: Config, real_broker: Broker) -> None:
    Presence(real_broker, "learner", "learner").beat()
    with Presence(real_broker, "generator-9", "generator"):
        assert "gone" not in shown(inspection.show(config))
        real_broker.redis.zincrby(real_broker.key("alive"), -92_000, "learner")
        assert "the learner has been gone for 92 s" in shown(inspection.show(config))
        assert int(inspection.facts(config)["learner_gone_seconds"]) == 92
        real_broker.finish()
        assert "gone" not in shown(inspection.show(config))


@pytest.mark.integration
def test_status_as_json_has_what_programs_ask_for(
    config: Config, real_broker: Broker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    BatchInbox(real_broker).acquire().announce(Step(version=5, metrics={"reward/mean": 0.5}))
    real_broker.redis.hincrby(real_broker.key("counters"), "dispatched", 7)
    (tmp_path / "run.yaml").write_text(dump_config(config))
    with Presence(real_broker, "generator-9", "generator"):
        status(config=tmp_path / "run.yaml", as_json=True)
    facts = json.loads(capsys.readouterr().out)
    assert (facts["step"], facts["steps"], facts["finished"], facts["evaluations"]) == (5, 8, False, [])
    assert (facts["counters"]["dispatched"], facts["metrics"]["reward/mean"]) == (7, 0.5)
    assert facts["processes"]["generator-9"]["role"] == "generator"


@pytest.mark.integration
def test_a_dead_letter_is_listed_and_put_back(
    config: Config, real_broker: Broker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inbox = BatchInbox(real_broker).acquire()
    real_broker.redis.xadd(real_broker.key("batches"), {"batch": b"not a batch"})
    assert inbox.next(block_ms=0) is None
    [(entry_id, _)] = inspection.letters.list_dead(real_broker)
    text = shown(inspection.dead_letters(config))
    assert entry_id in text
    assert "Batch: not msgpack" in text

    (tmp_path / "run.yaml").write_text(dump_config(config))
    dead(config=tmp_path / "run.yaml", replay=entry_id)
    assert f"{entry_id} is back on stream 'batches'" in capsys.readouterr().out
    assert "no dead letters" in shown(inspection.dead_letters(config))
    with pytest.raises(UserError, match=f"no dead letter {entry_id}"):
        dead(config=tmp_path / "run.yaml", replay=entry_id)


@pytest.mark.integration
def test_a_task_that_was_set_aside_is_listed_with_its_prompt_and_its_reason(
    config: Config, real_broker: Broker
) -> None:
    ledger = SamplerLedger(real_broker, "sampler")
    ledger.acquire()
    asked = Task(task_id="t0", prompt_id="p", prompt=[{"role": "user", "content": "What is\n12*7?" + " please" * 100}])
    ledger.commit(Commit(dispatch=[(asked, b"")]))
    inbox = TaskInbox(real_broker, "generator-9")
    (delivery,) = inbox.take(1, 0)
    inbox.finish([inbox.set_aside(delivery, "[red]SandboxUnavailable[/red]: \x1b[2Jgone")])
    text = " ".join(shown(inspection.dead_letters(config)).split())
    assert "What is 12*7? please" in text
    assert "[red]SandboxUnavailable[/red]: \\x1b[2Jgone" in text
    assert text.count("please") < 10


@pytest.fixture
def ended(tmp_path: Path) -> Path:
    """Folder of a run whose embedded Redis has stopped."""
    config = inputs.quickstart_config(tmp_path / "quickstart-1", seed=0, steps=8)
    supervisor = Supervisor(config.run.folder / "logs", structlog.get_logger(), 0)
    config = with_redis(config, "embedded", config.run.folder, supervisor)
    broker = connect(config.broker, config.run.name)
    BatchInbox(broker).acquire().announce(Step(version=5, metrics={"reward/mean": 0.5}))
    broker.redis.xadd(broker.key("batches"), {"batch": b"not a batch"})
    assert BatchInbox(broker).acquire().next(block_ms=0) is None
    (config.run.folder / "config.yaml").write_text(dump_config(config, absolute=True))
    broker.redis.close()
    supervisor.stop(last="redis")
    return config.run.folder


@pytest.mark.integration
def test_a_run_that_is_over_is_looked_at_by_its_folder(ended: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {child.pid for child in psutil.Process().children()}
    status(ended, as_json=True)
    assert json.loads(capsys.readouterr().out)["step"] == 5
    assert "Batch: not msgpack" in shown(inspection.dead_letters(load_config(ended / "config.yaml")))
    assert {child.pid for child in psutil.Process().children()} == before


@pytest.mark.integration
def test_the_address_of_its_redis_is_found_by_the_original_file_too(ended: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        f"run: {{name: quickstart-1, experiment: quickstart-1, output_dir: {tmp_path}, steps: 8}}\n"
        "model: {path: m}\ndata: {train: t}\n"
    )
    assert inspection.facts(load_config(tmp_path / "mine.yaml"))["step"] == 5


@pytest.mark.integration
def test_while_another_command_starts_the_run_it_is_left_alone(ended: Path) -> None:
    with locked(ended, "run"), pytest.raises(UserError, match="is in use by process .*does not answer yet"):
        inspection.facts(load_config(ended / "config.yaml"))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [([], "name the run"), (["a", "-c", "b"], "name the run"), ([""], "is no run folder: it has no config.yaml")],
)
def test_a_run_that_is_not_named_is_asked_for(
    arguments: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["spo", "status", *(one or str(tmp_path) for one in arguments)])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert (exit_.value.code, line in capsys.readouterr().err) == (2, True)
