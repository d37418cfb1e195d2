"""How findings are shown, and what `spo doctor` and `python -m common.doctor` return."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.doctor.finding import ok, problem, warning
from common.doctor.report import report
from common.role import Role
from tests.support.doctor import refusal, run_file, small_model, start


def test_each_finding_is_one_line_whatever_it_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    shared = ok("python", "3.11")
    code = report({Role.SAMPLER: [shared, warning("data", "a\nb")], Role.LEARNER: [shared, ok("port", "free")]})
    assert code == 0
    assert capsys.readouterr().out.splitlines() == [
        "ok       python  3.11",
        "warning  data (sampler)  a b",
        "ok       port (learner)  free",
        "2 ok, 1 warning, 0 problems",
    ]


def test_a_problem_is_exit_code_2_in_either_form(capsys: pytest.CaptureFixture[str]) -> None:
    found = {Role.SAMPLER: [problem("data", "gone")]}
    assert report(found) == 2
    capsys.readouterr()
    assert report(found, as_json=True) == 2
    row = {"check": "data", "level": "problem", "line": "gone", "roles": ["sampler"]}
    assert json.loads(capsys.readouterr().out) == {"findings": [row], "problems": 1}


@pytest.mark.parametrize("command", [("launcher.cli", "doctor", "--role", "learner"), ("common.doctor", "learner")])
def test_both_commands_say_the_same_of_a_role(command: tuple[str, ...], tmp_path: Path) -> None:
    small_model(tmp_path / "model", (2, 2))
    config = run_file(tmp_path, model={"path": str(tmp_path / "model")})
    done = start(*command, "--config", config, "--json")
    assert done.returncode == 2, done.stderr
    told = {row["check"]: row["level"] for row in json.loads(done.stdout)["findings"]}
    assert told.pop("redis") == "problem"
    assert {"python", "packages", "shared memory", "model", "output", "disk", "weights port"} <= told.keys()
    assert "problem" not in told.values()


def test_without_a_configuration_only_the_machine_is_looked_at() -> None:
    done = start("launcher.cli", "doctor", "--json")
    told = {row["check"] for row in json.loads(done.stdout)["findings"]}
    assert "python" in told
    assert not {"redis", "model", "data"} & told


def test_a_run_with_a_redis_of_its_own_is_not_asked_for_one(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}")
    config = run_file(tmp_path, data={"train": str(tmp_path / "train.jsonl")})
    done = start("launcher.cli", "doctor", "--role", "sampler", "-c", config, "--redis", "embedded")
    assert done.returncode == 0, done.stdout
    assert "redis-server will be started" in done.stdout


@pytest.mark.parametrize("command", [("launcher.cli", "doctor"), ("common.doctor", "sampler")])
def test_a_configuration_that_cannot_be_read_is_one_line(command: tuple[str, ...], tmp_path: Path) -> None:
    assert "cannot read configuration" in refusal(start(*command, "-c", tmp_path / "none.yaml"))
