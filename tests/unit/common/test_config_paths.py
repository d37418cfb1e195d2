"""Paths and modules of a configuration: absolute where a run writes them, found beside the file that names them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import Config, differences, dump_config, load_config, parse_config, shared_values
from common.errors import UserError
from common.plugins import load_object


@pytest.fixture(autouse=True)
def _same_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)


def config(**sections: dict[str, Any]) -> Config:
    return parse_config({"model": {"path": "model"}, "data": {"train": "train.jsonl"}} | sections)


def written(config: Config) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(dump_config(config, absolute=True))
    return values


def test_what_a_run_writes_has_absolute_paths_of_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "a.jsonl").touch()
    sources = [{"path": "a.jsonl"}, {"path": "gsm8k"}, {"path": "reasoning_gym:chain_sum"}]
    values = written(config(data={"train": sources}, sampler={"initial_values": "values.json"}))
    assert values["model"]["path"] == str(tmp_path / "model")
    assert values["run"]["output_dir"] == str(tmp_path / "runs")
    assert values["sampler"]["initial_values"] == str(tmp_path / "values.json")
    assert [source["path"] for source in values["data"]["train"]] == [
        str(tmp_path / "a.jsonl"),
        "gsm8k",
        "reasoning_gym:chain_sum",
    ]
    assert values["data"]["heldout"] is None
    assert parse_config(values).data.sources("train")[0].name == "a"


def test_a_name_on_the_hub_stays_a_name() -> None:
    assert written(config(model={"path": "Qwen/Qwen3-8B"}))["model"]["path"] == "Qwen/Qwen3-8B"


@pytest.mark.parametrize(
    ("here", "there", "agree"),
    [
        ("model", "/home/me/model", True),
        ("/data/model", "model", True),
        ("runs/model", "/home/me/model", False),
        ("model", "/home/me/tiny-model", False),
        ("/data/model", "/home/me/model", False),
        ("model", "other", False),
    ],
)
def test_a_relative_path_agrees_with_an_absolute_one_that_ends_in_it(here: str, there: str, agree: bool) -> None:
    assert bool(differences(config(model={"path": here}), shared_values(config(model={"path": there})))) != agree


def test_so_do_the_paths_of_sources() -> None:
    ours = config(data={"train": [{"path": "a.jsonl", "weight": 2}]})
    assert not differences(ours, shared_values(config(data={"train": [{"path": "/x/a.jsonl", "weight": 2}]})))
    assert differences(ours, shared_values(config(data={"train": [{"path": "/x/a.jsonl", "weight": 3}]})))


def read(folder: Path, reward: str) -> Any:
    (folder / "run.yaml").write_text(f"model: {{path: m}}\ndata: {{train: t}}\nepisode: {{reward: '{reward}'}}")
    loaded = load_config(folder / "run.yaml")
    assert loaded.run.modules == str(folder)
    return load_object(reward, {}, "episode.reward")


def test_a_module_beside_the_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "beside_the_file.py").write_text("def score(text): return 1.0")
    assert read(tmp_path, "beside_the_file:score")("") == 1.0


def test_a_module_called_like_ours_takes_no_place_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "common.py").write_text("def score(text): return 1.0")
    with pytest.raises(UserError, match=r"module common has no score; .*common.py is hidden by .*: give it another"):
        read(tmp_path, "common:score")


def test_another_folder_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "in_a_folder.py").write_text("def score(text): return 0.5")
    (tmp_path / "run.yaml").write_text("model: {path: m}\ndata: {train: t}\nrun: {modules: mine}")
    load_config(tmp_path / "run.yaml")
    assert load_object("in_a_folder:score", {}, "episode.reward")("") == 0.5
