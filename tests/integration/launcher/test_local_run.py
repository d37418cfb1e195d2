"""Whole runs as the launcher sees them, with small scripts in place of the processes, on a real Redis."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from common.config import load_config, parse_config
from common.errors import UserError
from common.streams.early_stop import EarlyStop
from launcher.evaluate import answer_run
from launcher.evaluate.answer_run import AnswerCount, LineView, answer_here
from launcher.folder.run import read_one
from launcher.run import local_run, teacher_servers
from launcher.run.display import PlainView
from launcher.run.folder_lock import locked
from launcher.run.processes import interruptible
from launcher.run.progress import Progress
from launcher.run.started import RunStopped
from launcher.run.supervisor import EndedEarly
from sampler.files.answer_file import Request
from tests.conftest import RedisServer
from tests.support.sampler import make_config
from tests.support.scripted_run import (
    EVALUATE,
    FOREVER,
    LOG,
    SAVE,
    UNTIL_FINISHED,
    Scripted,
    bell,
    interrupt,
    scripts,
    when_opened,
)


@pytest.fixture(autouse=True)
def no_process_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    assert [child for child in psutil.Process().children(recursive=True) if child.pid not in before] == []


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scripted:
    return Scripted(tmp_path, monkeypatch)


def test_a_run_ends_with_its_figures_and_goes_on_only_as_it_was(run: Scripted) -> None:
    run.plays("open(config.run.folder / 'rollouts.jsonl', 'w').write('{}')\n" + EVALUATE)
    summary = run.start()
    assert (summary.finished, summary.accuracy_before, summary.accuracy_after) == (True, 0.2, 0.9)
    assert summary.restarts == {}
    assert {"config.yaml", "logs", "redis", "summary.json"} <= {entry.name for entry in run.folder.iterdir()}
    assert load_config(run.folder / "config.yaml").run == run.config.run
    # Other accounts read no file of a run.
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in run.folder.rglob("*")}
    assert {"config.yaml", "summary.json", "rollouts.jsonl", "learner.log"} <= set(modes)
    assert {name: oct(mode) for name, mode in modes.items() if mode & 0o027} == {}

    with pytest.raises(UserError, match="is finished"):
        run.start()
    sampler = run.config.sampler.model_dump() | {"batch_size": 32}
    run.config = parse_config(run.config.model_dump() | {"sampler": sampler})
    shutil.rmtree(run.folder / "redis")
    with pytest.raises(UserError, match=r"sampler\.batch_size \(here 32, in the run .*cannot change after step 3"):
        run.start()
    (run.folder / "config.yaml").write_text("run: [")
    with pytest.raises(UserError, match=r"config\.yaml line 1 is not valid YAML"):
        run.start()


def test_a_run_that_ends_early_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Scripted(tmp_path, monkeypatch, "run.steps=9", "run.stop_when=2")
    stop = f"broker.redis.hset(broker.key('state'), 'early_stop', {EarlyStop(0.25, 1, since=2, end=3).pack()!r})\n"
    run.plays(stop + EVALUATE)
    reason = "the held-out reward was no better for 2 evaluations: best 0.25 at step 1"
    summary = run.start()
    assert (summary.finished, summary.ended_early) == (True, reason)
    recorded = read_one(run.folder)
    assert (recorded.state, recorded.ended_with) == ("finished", reason)
    with pytest.raises(UserError, match=f"is finished; {reason}; to continue it, raise run.stop_when = 2, or remove"):
        run.start()


def test_an_interrupt_stops_everything(run: Scripted) -> None:
    ready = bell(run.folder / "ready")
    run.plays(f"open({str(ready)!r}, 'w')\n" + FOREVER, FOREVER)
    before = signal.getsignal(signal.SIGINT)
    when_opened(ready, interrupt)
    with pytest.raises(RunStopped) as stopped, interruptible():
        run.start()
    assert (stopped.value.code, stopped.value.summary.finished, stopped.value.summary.error) == (130, False, None)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_a_run_whose_folder_is_taken_away_ends(run: Scripted, how: str) -> None:
    folder, elsewhere = run.folder, run.folder.with_name("elsewhere")
    ready = bell(folder.with_name("ready"))
    # A process that ended in peace would write into a new folder.
    at_the_end = f"import signal\nsignal.signal(signal.SIGTERM, lambda *_: os.mkdir({str(folder)!r}))\n"
    run.plays(at_the_end + f"open({str(ready)!r}, 'w')\n" + FOREVER, FOREVER)

    def take_away() -> None:
        folder.rename(elsewhere)
        if how == "deleted":
            shutil.rmtree(elsewhere)
        else:
            shutil.copytree(elsewhere, folder, ignore=shutil.ignore_patterns("*.sock"))

    when_opened(ready, take_away)
    gone = f"^run folder {folder} was moved away or deleted during the run, .*same command$"
    with pytest.raises(UserError, match=gone):
        run.start()
    assert folder.exists() == (how == "replaced")
    assert not (folder / "summary.json").exists()


def test_a_killed_redis_is_started_again_with_all_it_knew(run: Scripted) -> None:
    pid_file, ready = run.folder / "pid", bell(run.folder / "ready")
    sampler = f"""
redis, pid_file = broker.redis, {str(pid_file)!r}
redis.set("kept", 1)
if not os.path.exists(pid_file):
    open(pid_file, "w").write(str(redis.info("server")["process_id"]))
    open({str(ready)!r}, "w")
while str(redis.info("server")["process_id"]) == open(pid_file).read(): time.sleep(0.01)
assert redis.get("kept") == b"1"
"""
    run.plays(sampler + EVALUATE)
    when_opened(ready, lambda: os.kill(int(pid_file.read_text()), signal.SIGKILL))
    summary = run.start()
    assert (summary.finished, summary.restarts) == (True, {"redis": 1})


def test_inline_secrets_reach_no_file_and_no_key_of_redis(run: Scripted, own_redis: RedisServer) -> None:
    client = redis.Redis.from_url(own_redis.url)
    client.config_set("rdbcompression", "no")  # so that DUMP shows what is stored
    client.config_set("requirepass", "the/password")
    # What the environment says about other runs does not reach this one's processes.
    run.monkeypatch.setenv("SPO__BROKER__URL", "redis://127.0.0.1:1/0")
    sandbox = run.config.sandbox.model_copy(update={"token": "12345"})
    run.config = run.config.model_copy(update={"sandbox": sandbox})
    knows = "assert config.sandbox.token == '12345'\nagree(broker, config)\nprint('connected', flush=True)\n"
    run.plays(knows + EVALUATE, knows + UNTIL_FINISHED)
    assert run.start(own_redis.url.replace("//", "//:the%2Fpassword@")).finished

    written = b"".join(path.read_bytes() for path in run.folder.rglob("*") if path.is_file())
    assert b"connected" in written
    client = redis.Redis.from_url(own_redis.url, password="the/password")
    stored = b"".join(client.dump(key) for key in client.scan_iter())
    assert b"sampler" in stored
    for secret in (b"the/password", b"the%2Fpassword", b"12345"):
        assert secret not in written
        assert secret not in stored
    assert "# broker.url held a secret" in (run.folder / "config.yaml").read_text()


def test_a_run_without_a_generator_does_not_wait_forever(run: Scripted) -> None:
    run.plays(FOREVER, FOREVER, **{"generator-1": ""})
    with pytest.raises(RunStopped, match="all generator processes have exited") as stopped:
        run.start()
    assert stopped.value.code == 1
    assert run.summary()["error"] == "all generator processes have exited, but the run is not finished"


def test_nor_does_a_run_without_a_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taught = Scripted(tmp_path, monkeypatch, "teacher.model=large")
    taught.plays(FOREVER, FOREVER)
    monkeypatch.setattr(teacher_servers, "serve_command", lambda *_: ["true"])
    with pytest.raises(RunStopped, match="all teacher processes have exited"):
        taught.start()


def test_a_teachers_server_is_stopped_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taught = Scripted(tmp_path, monkeypatch, "teacher.model=large")
    taught.plays(EVALUATE)
    monkeypatch.setattr(teacher_servers, "serve_command", lambda *_: ["sleep", "600"])
    assert taught.start().finished


# The learner's script, and the code and the error with which the run ends.
UNSAVED = {
    "leaves without it": (UNTIL_FINISHED, 1, r"the learner has exited, but the last checkpoint, .*step_3, is not on"),
    "dies each time": (UNTIL_FINISHED + "\nraise OSError('no disk')", 1, "learner died 3 times.*no disk"),
    "refuses": (UNTIL_FINISHED + "\nprint('error: no space left')\nsys.exit(2)", 2, "learner: no space left"),
}


@pytest.mark.parametrize("how", UNSAVED)
def test_a_run_without_its_last_checkpoint_is_not_finished(run: Scripted, how: str) -> None:
    learner, code, error = UNSAVED[how]
    run.plays(EVALUATE, learner=learner)
    with pytest.raises((RunStopped, UserError), match=error) as failed:
        run.start(max_restarts=2)
    assert getattr(failed.value, "code", 2) == code
    assert code == 2 or not failed.value.summary.finished
    # Started again, its learner writes it.
    run.plays(EVALUATE)
    assert run.start().finished


DIE_ONCE = """
if not os.path.exists(sys.argv[1] + ".died"):
    open(sys.argv[1] + ".died", "w")
    sys.exit(1)
"""


def test_a_learner_may_take_long_and_die_once_for_its_last_checkpoint(run: Scripted) -> None:
    run.monkeypatch.setattr(local_run, "LEAVE_TIMEOUT", 0.0)
    run.plays(EVALUATE, learner=UNTIL_FINISHED + DIE_ONCE + SAVE)
    summary = run.start()
    assert (summary.finished, summary.restarts) == (True, {"learner": 1})


def test_a_user_error_under_way_is_in_the_summary(run: Scripted) -> None:
    seen, steps = bell(run.folder / "seen"), list[int]()
    learner = f"""
from common.messages import Step
from common.streams.batches import BatchInbox
BatchInbox(broker).acquire(0).announce(Step(version=1, metrics={{"reward/mean": 0.5}}))
open({str(seen)!r}).read()
print("error: diverged at step 1")
sys.exit(2)
"""
    run.plays(FOREVER, FOREVER, learner=learner)

    class Watching(PlainView):
        def update(self, progress: Progress, *others: Any) -> None:
            super().update(progress, *others)
            if progress.step is not None and not steps:
                steps.append(progress.version)
                seen.write_text("")

    with pytest.raises(UserError, match="diverged at step 1"):
        run.start(view=Watching)
    assert (run.summary()["error"], run.summary()["steps"]) == ("learner: diverged at step 1", 1)


def test_a_second_run_in_the_same_folder_is_refused(run: Scripted) -> None:
    ready, go = (bell(run.folder / name) for name in ("ready", "go"))
    run.plays(f"open({str(ready)!r}, 'w')\nopen({str(go)!r}).read()\n" + EVALUATE)
    refusals: list[str] = []

    def second() -> None:
        with pytest.raises(UserError) as refused:
            run.start()
        refusals.append(str(refused.value))
        go.write_text("")

    when_opened(ready, second)
    assert run.start().finished
    (refusal,) = refusals
    assert f"run folder {run.folder} is in use by process {os.getpid()}" in refusal
    assert "choose another run.experiment or run.output_dir" in refusal


# Runs without a learner, with generators that only pretend.

Answers = Callable[..., AnswerCount]
PROMPTS, RESPONSES, WANTED = 20, 4, 80
GENERATOR = """
from tests.support.sampler import NoopGenerator
generator = NoopGenerator(broker, sys.argv[2])
while True: generator.work(4, block_ms=100)
"""


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Has a request answered by generators that run these scripts."""
    config = make_config(tmp_path, prompts=PROMPTS)
    request = Request("values", RESPONSES, tmp_path / "values.jsonl", str(tmp_path / "train.jsonl"))

    def answered(*generators: str) -> AnswerCount:
        bodies = {f"generator-{number}": body for number, body in enumerate(generators)}
        monkeypatch.setattr(answer_run, "generator_commands", scripts(bodies))
        view = partial(LineView, LOG)
        return answer_here(config, request, generators=len(generators), redis="embedded", view=view, log=LOG)

    return answered


def test_generators_answer_and_a_second_call_starts_nothing(answers: Answers, tmp_path: Path) -> None:
    assert answers(GENERATOR, GENERATOR) == AnswerCount(WANTED, WANTED, {})
    lines = (tmp_path / "values.jsonl").read_text().splitlines()
    assert len({json.loads(line)["task_id"] for line in lines}) == WANTED
    assert answers("").answered == WANTED
    with (
        locked(tmp_path / "values.run", "--output"),
        pytest.raises(UserError, match=rf"is in use by process {os.getpid()} on .*choose another --output"),
    ):
        answers("")


def test_an_interrupted_call_goes_on_where_it_stopped(answers: Answers, tmp_path: Path) -> None:
    output = tmp_path / "values.jsonl"
    done = bell(tmp_path / "done")
    few = GENERATOR.replace("while True:", "for _ in range(4):").replace("block_ms=100", "block_ms=60000")
    written = f"while not os.path.exists({str(output)!r}) or len([*open({str(output)!r})]) < 4: time.sleep(0.01)\n"
    when_opened(done, interrupt)
    with pytest.raises(EndedEarly) as stopped, interruptible():
        answers(few + written + f"open({str(done)!r}, 'w')\n" + FOREVER)
    assert stopped.value.code == 130
    before = output.read_text().splitlines()
    assert len(before) >= 4
    assert answers(GENERATOR).answered == WANTED
    after = output.read_text().splitlines()
    assert after[: len(before)] == before
    assert len({json.loads(line)["task_id"] for line in after}) == len(after) == WANTED


def test_what_is_skipped_is_reported_with_its_reasons(answers: Answers) -> None:
    first = "generator.work(3, block_ms=60000, status='set_aside', reason='too long')\n"
    count = answers(GENERATOR.replace("while True", first + "while True"))
    assert count == AnswerCount(WANTED, WANTED - 3, {"too long": 3})


def test_without_a_generator_it_does_not_wait_forever(answers: Answers) -> None:
    with pytest.raises(EndedEarly, match="all generator processes have exited") as stopped:
        answers("")
    assert stopped.value.code == 1
