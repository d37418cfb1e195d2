from __future__ import annotations

import socket
from pathlib import Path

import pytest

from launcher.dashboard import command
from tests.support.dashboard import begin_run
from tests.support.spo_command import Spo, spo_here


@pytest.fixture
def spo(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Spo:
    monkeypatch.chdir(tmp_path)
    begin_run(tmp_path / "runs/quickstart-1")
    return spo_here(capsys, monkeypatch)


def one_line_of_error(spo: Spo, *arguments: object) -> str:
    ran = spo("dashboard", *arguments)
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert ran.stderr.count("\n") == 1
    return ran.stderr


def test_a_run_that_does_not_exist_is_answered_with_the_nearest(spo: Spo) -> None:
    assert "did you mean runs/quickstart-1?" in one_line_of_error(spo, "runs/quikstart-1")


def test_a_port_that_is_taken_is_named(spo: Spo) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        error = one_line_of_error(spo, "runs/quickstart-1", "--port", port)

    assert f"--port {port}" in error
    assert "--port, or 0" in error


def test_a_host_that_is_not_of_this_machine_is_refused(spo: Spo) -> None:
    assert "--host 203.0.113.7" in one_line_of_error(spo, "runs/quickstart-1", "--host", "203.0.113.7", "--port", "0")


def test_a_missing_extra_is_named_with_what_to_install(spo: Spo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "uvicorn" else object())

    assert "needs uvicorn: pip install 'spo-trainer[launcher]'" in one_line_of_error(spo, "runs/quickstart-1")


def test_an_empty_token_is_no_token(spo: Spo) -> None:
    assert "--token is empty" in one_line_of_error(spo, "runs/quickstart-1", "--token", "")


def test_beyond_this_machine_the_address_has_a_token(spo: Spo, monkeypatch: pytest.MonkeyPatch) -> None:
    served = []

    async def serve(app: object, watch: object, listener: object) -> None:
        served.append(app)

    monkeypatch.setattr("launcher.dashboard.server.serve", serve)

    everywhere = [spo("dashboard", "runs/quickstart-1", "--host", "0.0.0.0", "--port", "0").stdout for _ in range(2)]
    here = spo("dashboard", "runs/quickstart-1", "--port", "0").stdout

    assert len(served) == 3
    assert "?token=" not in here
    tokens = {address.partition("?token=")[2].split()[0] for address in everywhere}
    assert len(tokens) == 2, "each start has its own"
    assert all(len(token) >= 32 for token in tokens)
