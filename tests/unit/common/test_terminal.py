"""Terminal escapes that a model, a user or a server has written: no command and no log passes them on."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from common import log as logs
from common.checks.check import problem
from common.errors import fail
from common.process import Role
from common.streams.broker import Broker
from launcher import status as inspection
from launcher.checks import command
from launcher.run.display import process_rows
from launcher.run.progress import Progress
from launcher.run.summary import Summary, table

# A title, a bell, a cursor movement, an 8-bit CSI, a line that overwrites the one before, rich's markup, reversed text.
EVIL = "\x1b]0;title\x07\x1b[2J\x9b31m\r[bold]\u202e"
ACTIVE = "\x1b\x07\x9b\r\u202e"


@pytest.fixture(params=["text", "json"])
def log(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A logger that writes to `tmp_path / "log"`."""
    hook = sys.excepthook
    monkeypatch.setenv("SPO_LOG", request.param)
    yield logs.setup("role", file=tmp_path / "log")
    sys.excepthook = hook


def shown(renderable: Any) -> str:
    """What a terminal without colours would be sent."""
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=300)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


def check(text: str, *words: str) -> None:
    """No character of a text is active, and these words are in it."""
    assert not any(character in text for character in ACTIVE)
    assert all(word in text for word in words)


def test_a_log_line_has_none_and_forges_no_other(log: Any, tmp_path: Path) -> None:
    log.warning(f"event {EVIL}", reason=EVIL, values=[EVIL, ValueError(EVIL)], number=1.5, none=None)
    log.info("event", reason="one\n12:00:00 [info] forged")
    text = (tmp_path / "log").read_text(encoding="utf-8")
    check(text, "title", "1.5")
    assert len(text.splitlines()) == 2
    try:
        raise ValueError(EVIL)
    except ValueError:
        log.exception("failed")
    check((tmp_path / "log").read_text(encoding="utf-8"), "Traceback")


@pytest.mark.usefixtures("log")
def test_a_process_that_dies_prints_none(capsys: pytest.CaptureFixture[str]) -> None:
    error = ValueError(EVIL)
    sys.excepthook(type(error), error, None)
    check(capsys.readouterr().err, "ValueError")
    with pytest.raises(SystemExit):
        fail(f"cannot read {EVIL}")
    check(capsys.readouterr().err, "cannot read")


def test_the_views_of_a_run_show_none(fake_broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    progress = Progress(fake_broker, 3)
    progress.processes = {EVIL: {"pid": 1, "host": EVIL, "state": EVIL, "source": EVIL, "role": EVIL}}
    text = shown(process_rows(progress, {}))
    check(text)
    assert text.count("[bold]") == 4  # no markup of rich either
    check(shown(table(Summary(True, 0.1, 0.2, 8, 3, {}, {}, {}, "runs/x", None, {f"{EVIL}/accuracy": 0.5}))))
    note = {"stream": EVIL, "at": 0.0, "by": EVIL, "reason": EVIL, "fields": {}}
    monkeypatch.setattr(inspection.letters, "list_dead", lambda broker: [(EVIL, note)])
    monkeypatch.setattr(inspection, "reopened", lambda config: nullcontext(fake_broker))
    check(shown(inspection.dead_letters(SimpleNamespace())), "title")  # type: ignore[arg-type]


def test_the_doctor_shows_none(capsys: pytest.CaptureFixture[str]) -> None:
    command.report({Role.LEARNER: [problem(EVIL, "redis")]})
    check(capsys.readouterr().out, "title")
