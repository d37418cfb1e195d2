"""Whole runs as the launcher sees them, with small scripts in place of the processes, on a real Redis."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
import structlog

from common.config import Config, load_config, parse_config
from common.errors import UserError
from launcher.evaluate import answer_run
from launcher.evaluate.answer_run import AnswerCount, LineView, answer_here
from launcher.layout.layout import Choice
from launcher.quickstart import inputs
from launcher.run import local_run, teacher_servers
from launcher.run.display import PlainView
from launcher.run.folder_lock import locked
from launcher.run.local_run import RunOptions, RunStopped, run_here
from launcher.run.processes import EndedEarly
from launcher.run.progress import PhaseTimer, Progress
from launcher.run.summary import Summary
from sampler.files.answer_file import Request
from tests.conftest import RedisServer
from tests.support.sampler import make_config

# What each process does: `broker` is its connection, `msgpack` and `time` are imported.
FOREVER = "time.sleep(600)"
UNTIL_FINISHED = "while not broker.finished(): time.sleep(0.01)"
SAVE = """
from common.files import checkpoint
folder = checkpoint(config.run.folder, config.run.steps)
folder.mkdir(parents=True, exist_ok=True)
(folder / "checkpoint.json").touch()
"""
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
LOG = structlog.get_logger()


@pytest.fixture(autouse=True)
def no_process_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    assert [child for child in psutil.Process().children(recursive=True) if child.pid not in before] == []


def scripts(bodies: dict[str, str]) -> Callable[[Path, int], dict[str, list[str]]]:
    """Commands of processes that run these scripts."""
    return lambda path, generators: {
        name: [sys.executable, "-c", HEAD + body, str(path), name] for name, body in bodies.items()
    }


def play(monkeypatch: pytest.MonkeyPatch, sampler: str, others: str = UNTIL_FINISHED, **more: str) -> None:
    """Let each process run a script; the learner also writes its last checkpoint."""
    bodies = {"learner": others + "\n" + SAVE, "generator-1": others, "sampler": sampler, **more}
    monkeypatch.setattr(local_run, "worker_commands", scripts(bodies))


def summary_of(config: Config) -> dict[str, Any]:
    return json.loads((config.run.folder / "summary.json").read_text())


def start(config: Config, server: str = "embedded") -> Summary:
    # No check of the machine: the processes are scripts.
    return run_here(
        config, RunOptions(Choice(1), server, check=lambda _: None), lambda: PlainView(LOG), LOG, PhaseTimer()
    )


def bell(path: Path) -> Path:
    """A pipe by name: opening it waits for the other end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    return path


def when_opened(pipe: Path, action: Callable[[], object]) -> None:
    """Do something in a thread once a process has opened the pipe."""

    def wait_and_act() -> None:
        pipe.read_text()
        action()

    threading.Thread(target=wait_and_act, daemon=True).start()


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return inputs.quickstart_config(tmp_path / "quickstart-1", seed=0, steps=3)


def test_a_run_ends_with_its_figures_and_goes_on_only_as_it_was(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = "import pathlib; pathlib.Path(config.run.folder, 'rollouts.jsonl').write_text('{}')\n"
    play(monkeypatch, write + EVALUATE)
    summary = start(config)
    assert (summary.finished, summary.accuracy_before, summary.accuracy_after) == (True, 0.2, 0.9)
    assert summary.restarts == {}
    folder = config.run.folder
    assert {"config.yaml", "logs", "redis", "summary.json"} <= {entry.name for entry in folder.iterdir()}
    assert load_config(folder / "config.yaml").run == config.run
    # Other accounts read no file of a run.
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}
    assert {"config.yaml", "summary.json", "rollouts.jsonl", "learner.log"} <= set(modes)
    assert {name: oct(mode) for name, mode in modes.items() if mode & 0o027} == {}

    with pytest.raises(UserError, match="is finished"):
        start(config)
    other = parse_config(config.model_dump() | {"sampler": config.sampler.model_dump() | {"batch_size": 32}})
    shutil.rmtree(folder / "redis")
    with pytest.raises(UserError, match=r"sampler\.batch_size \(here 32, in the run .*cannot change after step 3"):
        start(other)
    (folder / "config.yaml").write_text("run: [")
    with pytest.raises(UserError, match=r"config\.yaml line 1 is not valid YAML"):
        start(config)


def test_an_interrupt_stops_everything(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = bell(config.run.folder / "ready")
    play(monkeypatch, f"open({str(ready)!r}, 'w')\n" + FOREVER, FOREVER)
    before = signal.getsignal(signal.SIGINT)
    when_opened(ready, interrupt)
    with pytest.raises(RunStopped) as stopped:
        start(config)
    assert (stopped.value.code, stopped.value.summary.finished, stopped.value.summary.error) == (130, False, None)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_a_run_whose_folder_is_taken_away_ends(config: Config, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    folder, elsewhere = config.run.folder, config.run.folder.with_name("elsewhere")
    ready = bell(folder.with_name("ready"))
    # A process that ended in peace would write into a new folder.
    at_the_end = f"import pathlib, signal; write = lambda *_: pathlib.Path({str(folder)!r}).mkdir()\n"
    at_the_end += "signal.signal(signal.SIGTERM, write)\n"
    play(monkeypatch, at_the_end + f"open({str(ready)!r}, 'w')\n" + FOREVER, FOREVER)

    def take_away() -> None:
        folder.rename(elsewhere)
        if how == "deleted":
            shutil.rmtree(elsewhere)
        elif how == "replaced":
            shutil.copytree(elsewhere, folder, ignore=shutil.ignore_patterns("*.sock"))

    when_opened(ready, take_away)
    with pytest.raises(
        UserError, match=f"^run folder {folder} was moved away or deleted during the run, .*same command$"
    ):
        start(config)
    assert folder.exists() == (how == "replaced")
    assert not (folder / "summary.json").exists()


def test_a_killed_redis_is_started_again_with_all_it_knew(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    pid_file, ready = config.run.folder / "pid", bell(config.run.folder / "ready")
    sampler = (
        "import os\n"
        "broker.redis.set('kept', 1)\n"
        f"if not os.path.exists({str(pid_file)!r}):\n"
        f"    open({str(pid_file)!r}, 'w').write(str(broker.redis.info('server')['process_id']))\n"
        f"    open({str(ready)!r}, 'w')\n"
        "while str(broker.redis.info('server')['process_id']) == "
        f"open({str(pid_file)!r}).read(): time.sleep(0.01)\n"
        "assert broker.redis.get('kept') == b'1'\n" + EVALUATE
    )
    play(monkeypatch, sampler)
    when_opened(ready, lambda: os.kill(int(pid_file.read_text()), signal.SIGKILL))
    summary = start(config)
    assert (summary.finished, summary.restarts) == (True, {"redis": 1})


def test_inline_secrets_reach_no_file_and_no_key_of_redis(
    config: Config, monkeypatch: pytest.MonkeyPatch, own_redis: RedisServer
) -> None:
    client = redis.Redis.from_url(own_redis.url)
    client.config_set("rdbcompression", "no")  # so that DUMP shows what is stored
    client.config_set("requirepass", "the/password")
    # What the environment says about other runs does not reach this one's processes.
    monkeypatch.setenv("SPO__BROKER__URL", "redis://127.0.0.1:1/0")
    config = config.model_copy(update={"sandbox": config.sandbox.model_copy(update={"token": "12345"})})
    knows = "assert config.sandbox.token == '12345'\nagree(broker, config)\nprint('connected', flush=True)\n"
    play(monkeypatch, knows + EVALUATE, knows + UNTIL_FINISHED)
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
    play(monkeypatch, FOREVER, FOREVER, **{"generator-1": ""})
    with pytest.raises(RunStopped, match="no generator is left") as stopped:
        start(config)
    assert stopped.value.code == 1
    assert summary_of(config)["error"] == "no generator is left, but the run is not finished"


def test_nor_does_a_run_without_a_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taught = inputs.quickstart_config(tmp_path / "taught", 0, 3, ["teacher.model=large"])
    play(monkeypatch, FOREVER, FOREVER)
    monkeypatch.setattr(teacher_servers, "serve_command", lambda *_: ["true"])
    with pytest.raises(RunStopped, match="no teacher is left"):
        start(taught)


def test_a_teachers_server_is_stopped_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taught = inputs.quickstart_config(tmp_path / "taught", 0, 3, ["teacher.model=large"])
    play(monkeypatch, EVALUATE, UNTIL_FINISHED)
    monkeypatch.setattr(teacher_servers, "serve_command", lambda *_: ["sleep", "600"])
    assert start(taught).finished


def test_what_a_process_refuses_ends_the_run_as_a_user_error(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, FOREVER, FOREVER, learner="print('error: cannot read model.path x'); sys.exit(2)")
    with pytest.raises(UserError, match=r"learner: cannot read model\.path x"):
        start(config)


DIE_ONCE = "marker = config.run.folder / 'died'\nif not marker.exists():\n    marker.touch()\n    sys.exit(1)\n"


@pytest.mark.parametrize(
    ("learner", "code", "error"),
    [
        (UNTIL_FINISHED, 1, r"the learner has left, but the last checkpoint, .*step_3, is not on the disk"),
        (UNTIL_FINISHED + "\nraise OSError('no disk')", 1, "learner died 3 times.*no disk"),
        (UNTIL_FINISHED + "\nprint('error: no space left')\nsys.exit(2)", 2, "learner: no space left"),
    ],
    ids=["leaves without it", "dies each time", "refuses"],
)
def test_a_run_without_its_last_checkpoint_is_not_finished(
    config: Config, monkeypatch: pytest.MonkeyPatch, learner: str, code: int, error: str
) -> None:
    play(monkeypatch, EVALUATE, learner=learner)
    options = RunOptions(Choice(1), max_restarts=2, check=lambda _: None)
    with pytest.raises((RunStopped, UserError), match=error) as failed:
        run_here(config, options, lambda: PlainView(LOG), LOG, PhaseTimer())
    stopped = failed.value
    assert code == (stopped.code if isinstance(stopped, RunStopped) else 2)
    assert not (isinstance(stopped, RunStopped) and stopped.summary.finished)
    # Started again, its learner writes it.
    play(monkeypatch, EVALUATE)
    assert start(config).finished


def test_a_learner_may_take_long_and_die_once_for_its_last_checkpoint(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_run, "LEAVE_TIMEOUT", 0.0)
    play(monkeypatch, EVALUATE, learner=UNTIL_FINISHED + "\n" + DIE_ONCE + SAVE)
    summary = start(config)
    assert (summary.finished, summary.restarts) == (True, {"learner": 1})


def test_a_user_error_under_way_is_in_the_summary(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = bell(config.run.folder / "seen")
    step = "BatchInbox(broker).acquire(0).announce(Step(version=1, metrics={'reward/mean': 0.5}))\n"
    imports = "from common.messages import Step\nfrom common.streams.batches import BatchInbox\n"
    end = f"open({str(seen)!r}).read()\nprint('error: diverged at step 1')\nsys.exit(2)"
    play(monkeypatch, FOREVER, FOREVER, learner=imports + step + end)

    class Watching(PlainView):
        def update(self, progress: Progress, *others: Any) -> None:
            super().update(progress, *others)
            if progress.step is not None and not steps:
                steps.append(progress.version)
                seen.write_text("")

    steps = list[int]()
    with pytest.raises(UserError, match="diverged at step 1"):
        run_here(config, RunOptions(Choice(1), check=lambda _: None), lambda: Watching(LOG), LOG, PhaseTimer())
    summary = summary_of(config)
    assert (summary["error"], summary["steps"]) == ("learner: diverged at step 1", 1)


def test_a_second_run_in_the_same_folder_is_refused(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    ready, go = (bell(config.run.folder / name) for name in ("ready", "go"))
    play(monkeypatch, f"open({str(ready)!r}, 'w')\nopen({str(go)!r}).read()\n" + EVALUATE)
    refusals: list[str] = []

    def second() -> None:
        with pytest.raises(UserError) as refused:
            start(config)
        refusals.append(str(refused.value))
        go.write_text("")

    when_opened(ready, second)
    assert start(config).finished
    (refusal,) = refusals
    assert f"run folder {config.run.folder} is in use by process {os.getpid()}" in refusal
    assert "choose another run.experiment or run.output_dir" in refusal


# Runs without a learner, with generators that only pretend.

PROMPTS, RESPONSES = 20, 4
WANTED = PROMPTS * RESPONSES
GENERATOR = """
from tests.support.sampler import NoopGenerator
generator = NoopGenerator(broker, sys.argv[2])
while True: generator.work(4, block_ms=100)
"""


@pytest.fixture
def request_(tmp_path: Path) -> Request:
    return Request("values", RESPONSES, tmp_path / "values.jsonl", str(tmp_path / "train.jsonl"))


@pytest.fixture
def asking(tmp_path: Path) -> Config:
    return make_config(tmp_path, prompts=PROMPTS)


def answers(
    config: Config, request: Request, monkeypatch: pytest.MonkeyPatch, *generators: str, redis: str = "embedded"
) -> AnswerCount:
    """Have a request answered by generators that run these scripts."""
    bodies = {f"generator-{number}": body for number, body in enumerate(generators)}
    monkeypatch.setattr(answer_run, "generator_commands", scripts(bodies))
    return answer_here(
        config, request, generators=len(generators), redis=redis, view=lambda wanted: LineView(LOG, wanted), log=LOG
    )


def test_generators_answer_and_a_second_call_starts_nothing(
    asking: Config, request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answers(asking, request_, monkeypatch, GENERATOR, GENERATOR) == AnswerCount(WANTED, WANTED, {})
    assert len({json.loads(line)["task_id"] for line in request_.output.read_text().splitlines()}) == WANTED
    assert answers(asking, request_, monkeypatch, "").answered == WANTED
    with (
        locked(request_.folder, "--output"),
        pytest.raises(UserError, match=rf"is in use by process {os.getpid()} on .*choose another --output"),
    ):
        answers(asking, request_, monkeypatch, "")


def test_an_interrupted_call_goes_on_where_it_stopped(
    asking: Config, request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = bell(request_.folder / "done")
    few = GENERATOR.replace("while True:", "for _ in range(4):").replace("block_ms=100", "block_ms=60000")
    written = (
        f"import pathlib; path = pathlib.Path({str(request_.output)!r})\n"
        "while not path.exists() or path.read_text().count(chr(10)) < 4: time.sleep(0.01)\n"
    )
    when_opened(done, interrupt)
    with pytest.raises(EndedEarly) as stopped:
        answers(asking, request_, monkeypatch, few + written + f"open({str(done)!r}, 'w')\n" + FOREVER)
    assert stopped.value.code == 130
    before = request_.output.read_text().splitlines()
    assert len(before) >= 4
    assert answers(asking, request_, monkeypatch, GENERATOR).answered == WANTED
    after = request_.output.read_text().splitlines()
    assert after[: len(before)] == before
    assert len({json.loads(line)["task_id"] for line in after}) == len(after) == WANTED


def test_what_is_skipped_is_reported_with_its_reasons(
    asking: Config, request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = "generator.work(3, block_ms=60000, status='set_aside', reason='too long')\n"
    count = answers(asking, request_, monkeypatch, GENERATOR.replace("while True", first + "while True"))
    assert count == AnswerCount(WANTED, WANTED - 3, {"too long": 3})


def test_without_a_generator_it_does_not_wait_forever(
    asking: Config, request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EndedEarly, match="no generator is left") as stopped:
        answers(asking, request_, monkeypatch, "")
    assert stopped.value.code == 1
