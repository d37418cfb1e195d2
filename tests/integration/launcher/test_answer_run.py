"""A run without a learner as the launcher sees it, with generators that only pretend, on a Redis of its own."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import structlog

from common.config import Config
from common.errors import UserError
from launcher.evaluate import answer_run
from launcher.evaluate.answer_run import AnswerCount, AnswersStopped, answer_here
from launcher.evaluate.answer_view import LineView
from launcher.run.folder_lock import locked
from sampler.answer_file import Request
from tests.support.sampler import make_config

LOG = structlog.get_logger()
PROMPTS, RESPONSES = 20, 4
GENERATOR = """
import sys
from common.config import load_config
from common.streams.broker import connect
from tests.support.sampler import NoopGenerator
config = load_config(sys.argv[1])
generator = NoopGenerator(connect(config.broker, config.run.name), sys.argv[2])
while True: generator.work(4, block_ms=100)
"""
BEFORE: set[int] = set()


@pytest.fixture
def request_(tmp_path: Path) -> Request:
    BEFORE.update(child.pid for child in psutil.Process().children(recursive=True))
    return Request("values", RESPONSES, tmp_path / "values.jsonl", str(tmp_path / "train.jsonl"))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make_config(tmp_path, prompts=PROMPTS)


def play(monkeypatch: pytest.MonkeyPatch, generator: str = GENERATOR) -> None:
    """Let each generator run a script."""

    def commands(path: Path, generators: int) -> dict[str, list[str]]:
        names = [f"generator-{number}" for number in range(generators)]
        return {name: [sys.executable, "-c", generator, str(path), name] for name in names}

    monkeypatch.setattr(answer_run, "generator_commands", commands)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))


def start(config: Config, request: Request, generators: int = 1, redis: str = "embedded") -> AnswerCount:
    return answer_here(
        config, request, generators=generators, redis=redis, view=lambda wanted: LineView(LOG, wanted), log=LOG
    )


def left_behind() -> list[str]:
    children = psutil.Process().children(recursive=True)
    return [" ".join(child.cmdline()) for child in children if child.pid not in BEFORE]


def lines(request: Request) -> list[str]:
    return request.output.read_text().splitlines()


def test_several_generators_answer_and_no_process_is_left(
    config: Config, request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch)
    assert start(config, request_, generators=2) == AnswerCount(PROMPTS * RESPONSES, PROMPTS * RESPONSES, {})
    assert len({json.loads(line)["task_id"] for line in lines(request_)}) == PROMPTS * RESPONSES
    assert left_behind() == []

    monkeypatch.setattr(answer_run, "generator_commands", None)  # a second call starts nothing
    assert start(config, request_).answered == PROMPTS * RESPONSES


def test_an_interrupted_call_goes_on_where_it_stopped(
    config: Config, request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = GENERATOR.replace("while True:", "for _ in range(4):").replace("block_ms=100", "block_ms=60000")
    play(monkeypatch, few + "import time; time.sleep(600)")

    def interrupt() -> None:
        deadline = time.monotonic() + 120
        while not (request_.output.exists() and len(lines(request_)) >= 4) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(AnswersStopped) as stopped:
        start(config, request_)
    assert stopped.value.code == 130
    assert left_behind() == []
    before = lines(request_)
    play(monkeypatch)
    assert start(config, request_).answered == PROMPTS * RESPONSES
    after = lines(request_)
    assert after[: len(before)] == before
    assert len({json.loads(line)["task_id"] for line in after}) == len(after) == PROMPTS * RESPONSES


def test_what_is_set_aside_is_reported_with_its_reasons(
    config: Config, request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = "generator.work(3, block_ms=60000, status='set_aside', reason='too long')\n"
    play(monkeypatch, GENERATOR.replace("while True", first + "while True"))
    wanted = PROMPTS * RESPONSES
    assert start(config, request_) == AnswerCount(wanted, wanted - 3, {"too long": 3})


def test_without_a_generator_it_does_not_wait_forever(
    config: Config, request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, "")
    with pytest.raises(AnswersStopped, match="no generator is left") as stopped:
        start(config, request_)
    assert stopped.value.code == 1
    assert left_behind() == []


def test_what_a_generator_refuses_ends_it_as_a_user_error(
    config: Config, request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, "import sys; print('error: cannot read model.path x'); sys.exit(2)")
    with pytest.raises(UserError, match=r"generator-0: cannot read model\.path x"):
        start(config, request_)
    assert left_behind() == []


def test_a_second_command_on_the_same_file_is_refused(config: Config, request_: Request) -> None:
    with (
        locked(request_.folder, "--output"),
        pytest.raises(UserError, match=rf"is in use by process {os.getpid()} on .*choose another --output"),
    ):
        start(config, request_)


def test_an_empty_subset_is_one_clear_line(config: Config, request_: Request) -> None:
    (Path(config.run.output_dir) / "train.jsonl").write_text("")
    with pytest.raises(UserError, match=r"no prompts in .*train\.jsonl: it is empty"):
        start(config, request_)
