"""A whole run as the launcher sees it, with small scripts in place of the processes, on a real Redis."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import redis
import structlog

from common.config import Config, load_config, parse_config
from common.errors import UserError
from common.files import checkpoint
from launcher.quickstart import inputs
from launcher.run import local_run
from launcher.run.display import PlainView
from launcher.run.local_run import RunOptions, RunStopped, run_here
from launcher.run.progress import PhaseTimer
from launcher.run.summary import Summary
from tests.conftest import RedisServer

# What each process does: `broker` is its connection, `msgpack` and `time` are imported.
FOREVER = "time.sleep(600)"
UNTIL_FINISHED = "while not broker.finished(): time.sleep(0.01)"
EVALUATE = """
for version, accuracy in ((0, 0.2), (3, 0.9)):
    result = msgpack.packb({"version": version, "accuracy": accuracy, "samples": 8})
    broker.redis.hset(broker.key("evaluations"), version, result)
broker.finish()
"""
HEAD = """
import sys, time, msgpack
from common.config import load_config
from common.streams.agreement import agree
from common.streams.broker import connect
config = load_config(sys.argv[1])
broker = connect(config.broker, config.run.name)
"""


BEFORE: set[int] = set()


@pytest.fixture
def config(tmp_path: Path) -> Config:
    BEFORE.update(child.pid for child in psutil.Process().children(recursive=True))
    return inputs.quickstart_config(tmp_path / "quickstart-1", seed=0, steps=3)


def play(monkeypatch: pytest.MonkeyPatch, **bodies: str) -> None:
    """Let each process run a script."""

    def commands(path: Path, generators: int) -> dict[str, list[str]]:
        return {name.replace("_", "-"): [sys.executable, "-c", HEAD + body, str(path)] for name, body in bodies.items()}

    monkeypatch.setattr(local_run, "worker_commands", commands)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))


def start(config: Config, server: str = "embedded") -> Summary:
    log = structlog.get_logger()
    # No check of the machine: the processes are scripts.
    options = RunOptions(1, server, check=lambda _: None)
    return run_here(config, options, lambda: PlainView(log), log, PhaseTimer())


def left_behind() -> list[str]:
    """Processes below this one that a run has started; the tests' own Redis may be another."""
    children = psutil.Process().children(recursive=True)
    return [" ".join(child.cmdline()) for child in children if child.pid not in BEFORE]


def bell(path: Path) -> Path:
    """A pipe by name: whoever opens it waits for the other end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    return path


def in_background(action: Callable[[], object]) -> None:
    threading.Thread(target=action, daemon=True).start()


def test_a_run_ends_with_its_figures_and_no_process_left(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, learner=UNTIL_FINISHED, generator_1=UNTIL_FINISHED, sampler=EVALUATE)
    summary = start(config)
    assert (summary.finished, summary.accuracy_before, summary.accuracy_after) == (True, 0.2, 0.9)
    assert summary.restarts == {}
    assert left_behind() == []
    folder = config.run.folder
    assert {"config.yaml", "logs", "redis", "summary.json"} <= {entry.name for entry in folder.iterdir()}
    assert load_config(folder / "config.yaml").run == config.run


def test_other_accounts_read_no_file_of_a_run(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    write = "import pathlib; pathlib.Path(config.run.folder, 'rollouts.jsonl').write_text('{}')\n"
    play(monkeypatch, learner=UNTIL_FINISHED, generator_1=UNTIL_FINISHED, sampler=write + EVALUATE)
    start(config)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in config.run.folder.rglob("*")}
    assert {"config.yaml", "summary.json", "rollouts.jsonl", "learner.log"} <= set(modes)
    assert {name: oct(mode) for name, mode in modes.items() if mode & 0o027} == {}


def test_an_interrupt_stops_everything(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = bell(config.run.folder / "ready")
    say = f"open({str(ready)!r}, 'w')\n"
    play(monkeypatch, learner=FOREVER, generator_1=FOREVER, sampler=say + FOREVER)
    before = signal.getsignal(signal.SIGINT)

    def interrupt() -> None:
        ready.read_text()
        os.kill(os.getpid(), signal.SIGINT)

    in_background(interrupt)
    with pytest.raises(RunStopped) as stopped:
        start(config)
    assert (stopped.value.code, stopped.value.summary.finished) == (130, False)
    assert left_behind() == []
    assert signal.getsignal(signal.SIGINT) is before


def test_a_killed_redis_is_started_again_with_all_it_knew(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    told, ready = config.run.folder / "told", bell(config.run.folder / "ready")
    sampler = (
        "import os\n"
        "broker.redis.set('kept', 1)\n"
        f"if not os.path.exists({str(told)!r}):\n"
        f"    open({str(told)!r}, 'w').write(str(broker.redis.info('server')['process_id']))\n"
        f"    open({str(ready)!r}, 'w')\n"
        "while str(broker.redis.info('server')['process_id']) == "
        f"open({str(told)!r}).read(): time.sleep(0.01)\n"
        "assert broker.redis.get('kept') == b'1'\n" + EVALUATE
    )
    play(monkeypatch, learner=UNTIL_FINISHED, generator_1=UNTIL_FINISHED, sampler=sampler)

    def kill() -> None:
        ready.read_text()
        os.kill(int(told.read_text()), signal.SIGKILL)

    in_background(kill)
    summary = start(config)
    assert summary.finished
    assert summary.restarts == {"redis": 1}


def test_an_inline_password_and_token_reach_no_file_of_the_run_and_no_key_of_redis(
    config: Config, monkeypatch: pytest.MonkeyPatch, own_redis: RedisServer
) -> None:
    client = redis.Redis.from_url(own_redis.url)
    client.config_set("rdbcompression", "no")  # so that DUMP shows what is stored
    client.config_set("requirepass", "the/password")
    # What the environment says about other runs does not reach this one's processes.
    monkeypatch.setenv("SPO__BROKER__URL", "redis://127.0.0.1:1/0")
    config = config.model_copy(update={"sandbox": config.sandbox.model_copy(update={"token": "12345"})})
    knows = "assert config.sandbox.token == '12345'\nagree(broker, config)\nprint('connected', flush=True)\n"
    play(monkeypatch, learner=knows + UNTIL_FINISHED, generator_1=UNTIL_FINISHED, sampler=knows + EVALUATE)
    assert start(config, own_redis.url.replace("//", "//:the%2Fpassword@")).finished

    written = b"".join(path.read_bytes() for path in config.run.folder.rglob("*") if path.is_file())
    assert b"connected" in written
    client = redis.Redis.from_url(own_redis.url, password="the/password")
    stored = b"".join(client.dump(key) for key in client.scan_iter())
    assert b"sampler" in stored
    for secret in (b"the/password", b"the%2Fpassword", b"12345"):
        assert secret not in written
        assert secret not in stored
    assert "# broker.url held a secret" in (config.run.folder / "config.yaml").read_text()


def test_a_run_without_a_generator_does_not_wait_forever(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, learner=FOREVER, generator_1="", sampler=FOREVER)
    with pytest.raises(RunStopped, match="no generator is left") as stopped:
        start(config)
    assert stopped.value.code == 1
    assert left_behind() == []


def test_what_a_process_refuses_ends_the_run_as_a_user_error(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = "print('error: cannot read model.path x'); sys.exit(2)"
    play(monkeypatch, learner=refusal, generator_1=FOREVER, sampler=FOREVER)
    with pytest.raises(UserError, match=r"learner: cannot read model\.path x"):
        start(config)
    assert left_behind() == []


def test_a_run_folder_of_another_configuration_is_refused(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, learner=UNTIL_FINISHED, generator_1=UNTIL_FINISHED, sampler=EVALUATE)
    start(config)
    other = parse_config(config.model_dump() | {"sampler": config.sampler.model_dump() | {"batch_size": 32}})
    shutil.rmtree(config.run.folder / "redis")
    (checkpoint(config.run.folder, 3) / "checkpoint.json").parent.mkdir(parents=True)
    (checkpoint(config.run.folder, 3) / "checkpoint.json").touch()
    with pytest.raises(UserError, match=r"sampler\.batch_size \(here 32, in the run .*cannot change after step 3"):
        start(other)


def test_a_finished_run_is_not_run_again(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, learner=UNTIL_FINISHED, generator_1=UNTIL_FINISHED, sampler=EVALUATE)
    start(config)
    with pytest.raises(UserError, match="is finished"):
        start(config)
    assert left_behind() == []


def test_an_unreachable_redis_is_a_user_error(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, learner=FOREVER)
    with pytest.raises(UserError, match="no Redis at redis://127.0.0.1:1/0"):
        start(config, "redis://127.0.0.1:1/0")
    assert left_behind() == []


def test_a_second_run_in_the_same_folder_is_told_of_the_first_and_leaves_it_alone(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, go = (bell(config.run.folder / name) for name in ("ready", "go"))
    wait = f"open({str(ready)!r}, 'w')\nopen({str(go)!r}).read()\n"
    play(monkeypatch, learner=UNTIL_FINISHED, generator_1=UNTIL_FINISHED, sampler=wait + EVALUATE)
    refusals: list[str] = []

    def second() -> None:
        ready.read_text()
        with pytest.raises(UserError) as refused:
            start(config)
        refusals.append(str(refused.value))
        go.write_text("")

    in_background(second)
    assert start(config).finished
    (refusal,) = refusals
    assert f"run folder {config.run.folder} is in use by process {os.getpid()}" in refusal
    assert "choose another run.experiment or run.output_dir" in refusal
