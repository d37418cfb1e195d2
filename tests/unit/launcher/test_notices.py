"""Warnings in the logs of a run's processes: shown once each, from this start on, whatever is written beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import structlog

from launcher.run.notices import AT_ONCE, DIFFERENT, MAX_IN_VIEW, Notices


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "generator-1.log"


def add(log: Path, *lines: str) -> None:
    with log.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def shown(notices: Notices, log: Path) -> list[str]:
    notices.read("generator-1", log)
    return [str(notice) for notice in notices.newest]


def test_warnings_and_errors_are_taken_from_among_all_else(log: Path) -> None:
    notices = Notices()
    notices.follow(log)
    add(log, "12:00:00 [info     ] started pid=1 role=generator-1", "Traceback (most recent call last):", "{not json")
    add(
        log,
        "12:00:01 [warning  ] set aside prompt='a' role=generator-1",
        "12:00:02 [error    ] failed role=generator-1",
    )
    assert shown(notices, log) == ["generator-1: set aside prompt='a'", "generator-1: failed"]


def test_logs_of_json_lines_are_read_too(log: Path) -> None:
    notices = Notices()
    entry = {
        "role": "generator-1",
        "event": "set aside",
        "level": "warning",
        "timestamp": "12:00",
        "prompt": "a\x1b[2J",
    }
    add(log, json.dumps(entry), json.dumps(entry | {"level": "info"}), "[]", "{}")
    assert shown(notices, log) == ["generator-1: set aside prompt='a\\x1b[2J'"]


def test_lines_that_differ_in_numbers_alone_are_counted(log: Path) -> None:
    notices = Notices()
    for second in range(5):
        add(log, f"12:00:0{second} [warning  ] no weights for {second} s role=generator-1")
        notices.read("generator-1", log)
    assert shown(notices, log) == ["generator-1: no weights for 0 s (×5)"]
    assert len(notices.unseen) == 1


def test_an_earlier_start_is_over_and_half_a_line_is_waited_for(log: Path) -> None:
    add(log, "12:00:00 [warning  ] of the day before")
    notices = Notices()
    notices.follow(log)
    with log.open("a") as file:
        file.write("12:00:01 [warning  ] half a ")
    assert shown(notices, log) == []
    add(log, "line")
    assert shown(notices, log) == ["generator-1: half a line"]


def test_however_much_is_warned_of_it_is_bounded(log: Path) -> None:
    notices = Notices()
    notices.follow(log)
    for first in range(0, 3 * DIFFERENT, 20):
        add(log, *(f"12:00:00 [warning  ] {'x' * number} role=g" for number in range(first + 1, first + 21)))
        notices.read("generator-1", log)
    assert (len(notices.newest), len(notices.unseen)) == (MAX_IN_VIEW, DIFFERENT)
    add(log, "12:00:00 [warning  ] " + "y" * 3 * AT_ONCE)
    notices.read("generator-1", log)
    log.unlink()
    assert len(shown(notices, log)) == MAX_IN_VIEW


def test_what_our_own_logger_writes_is_what_is_read(log: Path) -> None:
    from common import log as logs

    logs.setup("generator-1", file=log).warning("set aside", prompt="a", reason="too long")
    notices = Notices()
    assert shown(notices, log) == ["generator-1: set aside prompt=a reason='too long'"]
    structlog.reset_defaults()
