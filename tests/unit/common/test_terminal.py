"""Terminal escapes that a model, a user or a server has written: no command and no log passes them on."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from rich.console import Console

from common import log as logs
from common.checks.check import problem
from common.errors import fail
from common.process import Role
from common.streams.broker import Broker
from launcher import status as inspection
from launcher.checks import report
from launcher.episodes import view
from launcher.run.display import process_rows
from launcher.run.progress import Progress
from launcher.run.summary import Summary, table
from launcher.run.supervisor import RunProcess

# A title, a bell, a cursor movement, an 8-bit CSI, a line that overwrites the one before, rich's markup, reversed text.
EVIL = "\x1b]0;title\x07\x1b[2J\x9b31m\r[bold]\u202e"
ACTIVE = "\x1b\x07\x9b\r\u202e"


@pytest.fixture(params=["text", "json"])
def log(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Path]]:
    hook = sys.excepthook
    monkeypatch.setenv("SPO_LOG", request.param)
    yield logs.setup("role", file=tmp_path / "log"), tmp_path / "log"
    sys.excepthook = hook


def shown(renderable: Any) -> str:
    """What a terminal without colours would be sent."""
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=300)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


def harmless(text: str) -> bool:
    return not any(character in text for character in ACTIVE)


def test_a_log_line_has_none(log: tuple[Any, Path]) -> None:
    logger, file = log
    logger.warning(f"event {EVIL}", reason=EVIL, values=[EVIL, ValueError(EVIL)], number=1.5, none=None)
    try:
        raise ValueError(EVIL)
    except ValueError:
        logger.exception("failed")
    text = file.read_text(encoding="utf-8")
    assert harmless(text)
    assert all(word in text for word in ("title", "1.5", "Traceback"))


def test_a_value_forges_no_line_of_the_log(tmp_path: Path) -> None:
    logs.setup("role", file=tmp_path / "log").info("event", reason="one\n12:00:00 [info] forged")
    assert len((tmp_path / "log").read_text().splitlines()) == 1


def test_a_process_that_dies_prints_none(log: tuple[Any, Path], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise ValueError(EVIL)
    except ValueError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    text = capsys.readouterr().err
    assert harmless(text)
    assert "ValueError" in text


def test_an_error_of_the_user_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fail(f"cannot read {EVIL}")
    assert harmless(capsys.readouterr().err)


def test_the_last_line_of_a_log_that_the_launcher_quotes_has_none(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(f"error: {EVIL}\n")
    child = RunProcess("generator-1", [], {}, tmp_path / "log", SimpleNamespace(pid=1))  # type: ignore[arg-type]
    assert harmless(child.last_log_line())


def test_the_views_of_a_run_show_none(fake_broker: Broker) -> None:
    progress = Progress(fake_broker, 3)
    progress.processes = {EVIL: {"pid": 1, "host": EVIL, "state": EVIL, "source": EVIL, "role": EVIL}}
    text = shown(process_rows(progress, {}))
    assert harmless(text)
    assert text.count("[bold]") == 4  # no markup of rich either
    assert harmless(shown(table(Summary(True, 0.1, 0.2, 8, 3, {}, {}, {}, "runs/x", None, {f"{EVIL}/accuracy": 0.5}))))


def test_dead_letters_show_none(fake_broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    note = {"stream": EVIL, "at": 0.0, "by": EVIL, "reason": EVIL, "fields": {}}
    fake_broker.redis.xadd(fake_broker.key("dead"), {"note": msgpack.packb(note)})
    monkeypatch.setattr(inspection.letters, "list_dead", lambda broker: [(EVIL, note)])
    monkeypatch.setattr(inspection, "reopened", lambda config: nullcontext(fake_broker))
    text = shown(inspection.dead_letters(SimpleNamespace()))  # type: ignore[arg-type]
    assert "title" in text
    assert harmless(text)


@pytest.mark.parametrize("part", ["input", "reason", "content", "name", "arguments", "kind", "gts", "generator"])
def test_an_episode_shows_none(part: str) -> None:
    message = {"role": "tool", "content": "", "name": "", "arguments": {}}
    episode = {"task_id": "t", "status": "done", "messages": [message]}
    target = message if part in message else episode
    target[part] = {"a": EVIL} if part == "arguments" else EVIL
    text = "\n".join(line.plain for line in view.shown(episode))
    assert "title" in text
    assert harmless(text)


def test_a_token_shows_none() -> None:
    decode: Callable[[int], str] = lambda token_id: EVIL  # noqa: E731
    episode = {"token_ids": [1], "version_spans": [], "logprobs": [], "model_spans": []}
    assert all(harmless(line.plain) for line in view.tokens(episode, decode))


def test_the_doctor_shows_none(capsys: pytest.CaptureFixture[str]) -> None:
    report.report({Role.LEARNER: [problem(EVIL, "redis")]})
    assert harmless(capsys.readouterr().out)
