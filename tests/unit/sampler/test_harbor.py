"""Rows that are Harbor's task folders, and what is refused in them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from common.config import differences, dump_config, parse_config
from common.errors import UserError
from sampler.prompts.prompt_set import check_rows
from sampler.prompts.rows import open_rows
from tests.support.harbor import harbor_task


def config_of(path: str):
    return parse_config({"model": {"path": "m"}, "data": {"train": path}})


def rows_of(folder: Path):
    (source,) = config_of(f"harbor:{folder}").data.sources("train")
    return list(check_rows(open_rows(source.path, source.split), source))


def test_a_task_is_a_row_with_its_image_and_limits(tmp_path: Path) -> None:
    first, second = harbor_task(tmp_path / "a"), harbor_task(tmp_path / "b.1", environment_Dockerfile="FROM other\n")
    one, other = rows_of(tmp_path)
    assert (one.prompt, one.answer, one.prompt_id) == ("Make add.py add.", str(first / "tests"), "a")
    assert one.row["container"] == {
        "cpus": 2, "memory_mb": 1024, "disk_mb": 500, "agent_seconds": 60.0, "grading_seconds": 30.0, "network": "none",
    }  # fmt: skip
    (second / "environment" / "Dockerfile").write_text("FROM scratch\n")
    images = [row.row["docker_image"].partition(":") for row in (one, other, *rows_of(second))]
    assert [name for name, _, _ in images] == ["spo-harbor/a", "spo-harbor/b-1", "spo-harbor/b-1"]
    # The same files give the same image, and another environment another one.
    first_tag, other_tag, same_tag = (tag for _, _, tag in images)
    assert same_tag == first_tag != other_tag


def test_an_image_may_be_named(tmp_path: Path) -> None:
    harbor_task(tmp_path, task_toml='[environment]\ndocker_image = "mine:1"\n', environment_Dockerfile=None)
    (row,) = rows_of(tmp_path)
    assert (row.row["docker_image"], row.row["container"]) == ("mine:1", {})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tests_test_sh": None}, "the task has no tests/test.sh"),
        ({"instruction_md": None}, "the task has no instruction.md"),
        ({"environment_Dockerfile": None}, "neither environment/Dockerfile nor environment.docker_image"),
        ({"task_toml": "[environment"}, "task.toml cannot be read"),
        ({"task_toml": "environment = 3"}, "environment = 3 is not a table"),
        ({"task_toml": '[environment]\nmemory = "much"'}, "size 'much'; write it as 512M or 2G"),
        ({"task_toml": '[environment]\nmemory = "infG"'}, "size 'infG'; write it as 512M or 2G"),
        (
            {"task_toml": "[environment]\ncpus = 'all'"},
            "task.toml has wrong limits (cpus: Input should be a valid number",
        ),
        ({"task_toml": "[environment]\ngpus = 1"}, "asks for GPUs or TPUs"),
        ({"task_toml": '[environment]\nos = "windows"'}, "another system than Linux"),
        ({"task_toml": '[environment]\nnetwork_mode = "allowlist"'}, "a list of allowed hosts"),
        ({"task_toml": '[verifier]\nenvironment_mode = "separate"'}, "a verifier in a container of its own"),
        ({"task_toml": '[[steps]]\nname = "one"'}, "several steps"),
    ],
)
def test_a_task_that_cannot_be_used_says_why(tmp_path: Path, changes, says) -> None:
    harbor_task(tmp_path, **changes)
    (row,) = rows_of(tmp_path)
    assert says in str(row.problem)


def test_an_image_is_named_in_letters_that_docker_has(tmp_path: Path) -> None:
    harbor_task(tmp_path / "tâche_2²")
    (row,) = rows_of(tmp_path)
    assert row.row["docker_image"].startswith("spo-harbor/t-che-2:")


def test_a_task_with_a_file_that_cannot_be_read_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_bytes(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    harbor_task(tmp_path)
    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    (row,) = rows_of(tmp_path)
    assert "a file of the task cannot be read" in str(row.problem)
    assert "Dockerfile" in str(row.problem)


@pytest.mark.parametrize(("folder", "says"), [("none", "there is no folder"), (".", "there is no task.toml in")])
def test_a_folder_without_tasks_is_refused(tmp_path: Path, folder, says) -> None:
    with pytest.raises(UserError, match=says):
        open_rows(f"harbor:{tmp_path / folder}", "train")


def test_the_run_folder_names_the_tasks_by_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here = config_of("harbor:tasks")
    values = yaml.safe_load(dump_config(here, absolute=True))
    assert values["data"]["train"] == f"harbor:{tmp_path}{os.sep}tasks"
    assert differences(here, values) == []
