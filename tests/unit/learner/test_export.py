"""An export is the model it came from with other weights: each other file is the source's, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from transformers import AutoModelForTokenClassification, GenerationConfig

from common.config import Config
from learner.checkpoint import source_files
from learner.checkpoint.export import write_model
from learner.critic import load_value_model
from learner.policy.model import load_policy
from tests.support.learner import learner_config, save_tiny_model

# Keys and values that this release of transformers writes otherwise, or not at all.
OLDER = {
    "torch_dtype": "bfloat16",
    "rope_theta": 5e5,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "transformers_version": "4.40.0",
    "attention_dropout": 0.1,
    "own_key": [1, 2],
}
FILES = {
    "tokenizer.json": '{"version":"1.0",   "added_tokens": []}\n\n',
    "tokenizer_config.json": '{"tokenizer_class": "SomeTokenizerFast"}',
    "chat_template.jinja": "{{ messages }}\n ",
    "additional_chat_templates/tool_use.jinja": "{{ tools }}",
    "generation_config.json": '{"do_sample": true,\n\n "top_k": 20}',
    "preprocessor_config.json": '{"size": {"height": 224}}',
    "vocab.txt": "a\r\nb",
    "LICENSE": "ours",
}


def source(folder: Path, config: dict[str, Any], files: dict[str, str]) -> Path:
    save_tiny_model(folder)
    file = folder / "config.json"
    values = {
        key: value for key, value in json.loads(file.read_text()).items() if not key.startswith(("dtype", "rope"))
    }
    file.write_text(json.dumps(values | config))
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content.encode())
    return folder


def exported(config: Config, folder: Path, dtype: torch.dtype = torch.float32) -> list[dict[str, Any]]:
    """Export a policy whose weights are all 1; returns what was logged."""
    policy = load_policy(config)
    weights = {name: torch.ones_like(one, dtype=dtype) for name, one in policy.model.named_parameters()}
    with structlog.testing.capture_logs() as logs:
        write_model(policy.model, weights, config.model.path, folder)
    return logs


@pytest.fixture(autouse=True)
def logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_files, "get_logger", structlog.get_logger)


def test_all_but_weights_and_their_type_are_the_sources_own(tmp_path: Path) -> None:
    model, folder = source(tmp_path / "model", OLDER, FILES), tmp_path / "export"
    for name in ("model.safetensors.index.json", "README.md", "training.log"):
        (model / name).write_text("{}")
    (model / "model.safetensors.index.json").unlink()
    assert exported(learner_config(str(model), "runs"), folder) == []
    assert {name: (folder / name).read_bytes().decode() for name in FILES} == FILES
    written = json.loads((folder / "config.json").read_text())
    assert written == json.loads((model / "config.json").read_text()) | {"torch_dtype": "float32"}
    names = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert names == {"config.json", "model.safetensors", *FILES}
    # A run may start from it again.
    again = tmp_path / "again"
    exported(learner_config(str(folder), "runs"), again)
    assert (again / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert load_policy(learner_config(str(again), "runs")).model.lm_head.weight[0, 0] == 1


def test_generation_settings_that_transformers_refuses_to_write_are_carried_with_a_warning(tmp_path: Path) -> None:
    text = json.dumps({"do_sample": False, "temperature": 0.6})
    model, folder = source(tmp_path / "model", {}, {"generation_config.json": text}), tmp_path / "export"
    (line,) = exported(learner_config(str(model), "runs"), folder)
    assert (line["log_level"], "generation_config.json is the source's" in line["event"]) == ("warning", True)
    assert "temperature" in line["reason"]
    assert (folder / "generation_config.json").read_text() == text
    assert GenerationConfig.from_pretrained(folder) is not None


def test_generation_settings_in_config_json_stay_there(tmp_path: Path) -> None:
    model, folder = source(tmp_path / "model", {"temperature": 0.7, "max_length": 50}, {}), tmp_path / "export"
    exported(learner_config(str(model), "runs"), folder)
    written = json.loads((folder / "config.json").read_text())
    assert (written["temperature"], written["max_length"]) == (0.7, 50)


def test_a_critic_has_its_class_and_the_sources_other_keys(tmp_path: Path) -> None:
    model, folder = source(tmp_path / "model", OLDER, FILES), tmp_path / "critic"
    critic = load_value_model(learner_config(str(model), "runs")).model
    write_model(critic, dict(critic.named_parameters()), str(model), folder)
    written = json.loads((folder / "config.json").read_text())
    assert written["architectures"] == ["Qwen3ForTokenClassification"]
    assert (written["own_key"], written["rope_theta"], len(written["id2label"])) == ([1, 2], 5e5, 1)
    assert AutoModelForTokenClassification.from_pretrained(folder).num_labels == 1
    assert load_value_model(learner_config(str(folder), "runs")).head == "score"


def test_without_the_source_it_is_written_with_a_warning(tmp_path: Path) -> None:
    model = source(tmp_path / "model", {}, FILES)
    config = learner_config(str(model), "runs")
    policy = load_policy(config)
    weights = dict(policy.model.named_parameters())
    model.rename(tmp_path / "moved")
    with structlog.testing.capture_logs() as lines:
        write_model(policy.model, weights, str(model), tmp_path / "export")
    assert [line["event"] for line in lines] == ["exported without a tokenizer: the files of the model are missing"]
    assert (tmp_path / "export" / "config.json").is_file()


def test_the_files_of_a_hub_name_are_those_of_its_cached_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = source(tmp_path / "hub" / "models--owner--name" / "snapshots" / ("a" * 40), OLDER, FILES)
    monkeypatch.setattr(source_files, "cached_folder", {"owner/name": cached}.get)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: None)
    policy = load_policy(learner_config(str(cached), "runs")).model
    write_model(policy, dict(policy.named_parameters()), "owner/name", tmp_path / "export")
    assert {name: (tmp_path / "export" / name).read_bytes().decode() for name in FILES} == FILES
