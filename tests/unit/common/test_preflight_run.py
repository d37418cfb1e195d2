"""Checks of what a run names: its folder, secrets, keys and port."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from common.curve import make_keys
from common.preflight.files import run_folder, secrets
from common.preflight.finding import Level
from common.preflight.machine import Machine
from common.preflight.published_weights import published_weights
from common.preflight.trackers import trackers
from common.preflight.weight_socket import keys, port
from common.process import Role
from tests.support.preflight import finding_of, small_model


def test_a_run_folder_that_can_be_written_is_fine_and_is_not_made(tmp_path: Path) -> None:
    run = {"output_dir": str(tmp_path / "runs"), "experiment": "x"}
    assert finding_of(run_folder, Role.LEARNER, run=run).level is Level.OK
    assert list(tmp_path.iterdir()) == []


def test_a_run_folder_that_cannot_be_written_names_the_user_and_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    finding = finding_of(run_folder, Role.SAMPLER, run={"output_dir": str(tmp_path / "file")})
    assert finding.level is Level.PROBLEM
    assert f"cannot write in {tmp_path}/file (Not a directory)" in finding.line
    finding = finding_of(run_folder, Role.SAMPLER, run={"output_dir": "/proc/runs"})
    assert finding.level is Level.PROBLEM
    assert "cannot write in /proc" in finding.line


def test_secrets_are_asked_of_the_roles_that_need_them_and_never_shown(tmp_path: Path) -> None:
    password, token = tmp_path / "password", tmp_path / "token"
    password.write_text("hunter2")
    sections = {"broker": {"password_file": str(password)}, "sandbox": {"token_file": str(token)}}
    finding = finding_of(secrets, Role.LEARNER, **sections)
    assert (finding.level, finding.line) == (Level.OK, "broker.password_file can be read")
    finding = finding_of(secrets, Role.GENERATOR, **sections)
    assert finding.level is Level.PROBLEM
    assert f"cannot read sandbox.token_file {token}: No such file or directory" in finding.line
    token.write_text(" \n")
    assert "is empty" in finding_of(secrets, Role.GENERATOR, **sections).line
    token.write_text("hunter3")
    assert "hunter" not in finding_of(secrets, Role.GENERATOR, **sections).line


def test_each_role_needs_its_own_key_pair_and_the_others_public_key(tmp_path: Path) -> None:
    make_keys(tmp_path)
    section = {"weights": {"curve_dir": str(tmp_path)}}
    for role in (Role.LEARNER, Role.GENERATOR, Role.RELAY):
        assert finding_of(keys, role, learner=section).level is Level.OK
    (tmp_path / "server.key_secret").unlink()
    assert finding_of(keys, Role.GENERATOR, learner=section).level is Level.OK
    finding = finding_of(keys, Role.LEARNER, learner=section)
    assert finding.level is Level.PROBLEM
    assert "server.key_secret (there is no such file)" in finding.line


def test_keys_that_are_no_keys_are_named_without_being_shown(tmp_path: Path) -> None:
    make_keys(tmp_path)
    section, secret = {"weights": {"curve_dir": str(tmp_path)}}, tmp_path / "client.key_secret"
    right = secret.read_text()
    for wrong, reason in (
        ("", "it holds none"),
        (right[: right.rindex('"') - 3] + '"', "it holds none"),
        (right.replace('secret-key = "', 'secret-key = "~', 1), "it holds none"),
        (re.sub('public-key = "[^"]*"', f'public-key = "{"1" * 40}"', right), "its two keys are no pair"),
    ):
        secret.write_text(wrong)
        finding = finding_of(keys, Role.GENERATOR, learner=section)
        assert (finding.level, reason in finding.line) == (Level.PROBLEM, True), finding
        assert all(part not in finding.line for part in right.split('"') if len(part) == 40)


def test_shared_memory_too_small_for_two_versions_of_the_weights_is_named_with_what_is_needed(tmp_path: Path) -> None:
    model = {"path": str(small_model(tmp_path / "model", (2048, 4096))), "dtype": "bfloat16"}
    machine = Machine(memory=(32 << 20) - 1, memory_limited=True)
    finding = finding_of(published_weights, Role.LEARNER, machine, model=model)
    assert finding.level is Level.PROBLEM
    assert "2 versions of the weights take 32 MiB of shared memory, and the container's limit is 32 MiB" in finding.line
    assert finding_of(published_weights, Role.LEARNER, Machine(memory=32 << 20), model=model).level is Level.OK
    # An adapter is small, other ranks publish nothing, and a model that is downloaded later has no size yet.
    assert finding_of(published_weights, Role.LEARNER, machine, model=model, learner={"lora": {"rank": 8}}) is None
    other = Machine(memory=1, environ={"RANK": "1"})
    assert finding_of(published_weights, Role.LEARNER, other, model=model) is None
    assert finding_of(published_weights, Role.GENERATOR, machine, model=model) is None
    assert finding_of(published_weights, Role.LEARNER, machine, model={"path": "owner/name"}) is None


def test_a_port_is_looked_at_by_the_rank_that_serves_and_given_back() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        section = {"weights": {"bind": f"tcp://127.0.0.1:{taken.getsockname()[1]}"}}
        taken.listen()
        finding = finding_of(port, Role.LEARNER, learner=section)
        assert finding.level is Level.PROBLEM
        assert "stop the process that uses it" in finding.line
        assert finding_of(port, Role.LEARNER, Machine(environ={"RANK": "1"}), learner=section) is None
    for _ in range(3):
        assert finding_of(port, Role.LEARNER, learner=section).level is Level.OK


def test_a_tracker_that_is_not_installed_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.preflight.trackers.find_spec", lambda name: None if name == "mlflow" else object())
    run = {"log_to": ["tensorboard", "mlflow"]}
    finding = finding_of(trackers, Role.SAMPLER, run=run)
    assert finding.level is Level.PROBLEM
    assert "mlflow" in finding.line
    assert "pip install 'spo-trainer[mlflow]'" in finding.line
    assert finding_of(trackers, Role.SAMPLER).level is Level.OK
    assert finding_of(trackers, Role.GENERATOR, run=run) is None, "the sampler alone writes"


def test_wandb_needs_a_key_or_no_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    keys = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(keys))
    run = {"log_to": ["wandb"]}
    assert "WANDB_MODE=offline" in finding_of(trackers, Role.SAMPLER, run=run).line
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert finding_of(trackers, Role.SAMPLER, run=run).level is Level.OK
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example")
    keys.write_text("machine wandb.example\n  login user\n  password secret\n")
    keys.chmod(0o600)
    assert finding_of(trackers, Role.SAMPLER, run=run).level is Level.OK
