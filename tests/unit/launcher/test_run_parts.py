"""The embedded Redis and the end of a run, where processes and files are not as they should be."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest
import redis

from common.errors import UserError
from common.process import ending
from launcher.run import embedded_redis
from launcher.run.embedded_redis import EmbeddedRedis
from launcher.run.supervisor import Supervisor


@pytest.mark.parametrize(("code", "words"), [(3, "exit code 3"), (-9, "SIGKILL"), (-40, "signal 40")])
def test_how_a_process_ended_has_words_for_every_code(code: int, words: str) -> None:
    assert ending(code) == words


def test_a_killed_reaper_does_not_keep_a_run_from_its_end(tmp_path: Path) -> None:
    supervisor, closed = Supervisor(tmp_path / "logs", mock.Mock()), mock.Mock()
    supervisor.after.callback(closed)
    read, write = os.pipe()
    pipe = os.fdopen(write, "w")
    supervisor._reaper = mock.Mock(stdin=pipe)
    os.close(read)
    supervisor._tell_reaper("-1")
    supervisor.stop()
    closed.assert_called_once_with()
    assert pipe.closed


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EmbeddedRedis:
    monkeypatch.setattr(embedded_redis, "find_redis_server", lambda: "/bin/sh")
    (tmp_path / "redis").mkdir()
    # What a start on a full disk leaves.
    (tmp_path / "redis" / "binary").touch()
    return EmbeddedRedis(tmp_path / "redis")


def test_an_empty_note_of_the_binary_is_written_again(server: EmbeddedRedis) -> None:
    assert server.command[4] == "/bin/sh"
    assert (server.folder / "binary").read_text() == "/bin/sh"


def test_a_server_that_reads_its_files_is_waited_for(server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10_000, 20))
    monkeypatch.setattr(embedded_redis, "time", mock.Mock(monotonic=lambda: next(clock)))
    loading = redis.BusyLoadingError("Redis is loading the dataset in memory")
    monkeypatch.setattr(redis.Redis, "ping", mock.Mock(side_effect=[redis.ConnectionError(), *[loading] * 9, True]))
    server.wait(server.folder / "log")
    monkeypatch.setattr(redis.Redis, "ping", mock.Mock(side_effect=redis.ConnectionError()))
    with pytest.raises(UserError, match="did not start on .*: it wrote nothing"):
        server.wait(server.folder / "log")
