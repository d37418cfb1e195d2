"""The language part of a multimodal folder is trained; the rest travels unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from common.errors import UserError
from common.model_files import weight_headers
from launcher.quickstart.tiny_model import build_tokenizer
from learner.checkpoint.export import write_model
from learner.policy.disk_names import DiskNames
from learner.policy.forward_check import as_transformers
from learner.policy.lora import adapter_weights
from learner.policy.model import Policy
from tests.support.families import save_tiny
from tests.support.learner import policy_of
from tests.support.multimodal import MULTIMODAL, save_multimodal

IDS = torch.tensor([[5, 9, 200, 31, 7, 7, 64, 12]])


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    with as_transformers(model):
        result: torch.Tensor = model.eval()(input_ids=IDS).logits.float()
    return result


def moved(policy: Policy) -> dict[str, torch.Tensor]:
    """The policy's weights after an update."""
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return {name: parameter.detach() for name, parameter in policy.model.named_parameters()}


@pytest.mark.parametrize("kind", MULTIMODAL)
def test_the_learner_computes_text_as_the_whole_model_and_exports_the_whole_model(kind: str, tmp_path: Path) -> None:
    source, export = tmp_path / "model", tmp_path / "export"
    whole = save_multimodal(source, kind)
    policy = policy_of(source)
    assert torch.allclose(logits(policy.model), logits(whole), atol=1e-5)

    trained = moved(policy)
    write_model(policy.model, trained, str(source), export)
    before, after = weights_of(source), weights_of(export)
    assert before.keys() == after.keys() == weight_headers(export)[0].keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name, _ in DiskNames(policy.model).of(trained.items())}
    assert {name for name in changed if "lm_head" not in name} == {
        name for name in before if name.startswith(MULTIMODAL[kind].body) and not name.endswith("layer_scalar")
    }
    assert json.loads((export / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    again = AutoModelForImageTextToText.from_pretrained(export, dtype=torch.float32)
    assert torch.allclose(logits(again), logits(policy.model), atol=1e-5)
    # A run may start from it; a checkpoint is exported without its weights in a model.
    assert torch.allclose(logits(policy_of(export).model), logits(policy.model), atol=1e-5)
    shape = policy_of(source, weights=False)
    write_model(shape.model, trained, str(source), tmp_path / "from_checkpoint")
    for name, tensor in weights_of(tmp_path / "from_checkpoint").items():
        assert torch.equal(tensor, after[name]), name


@pytest.mark.parametrize("kind", ["qwen3_5", "gemma3"])
def test_an_adapter_has_the_names_of_the_whole_model_and_for_generators_those_of_its_files(
    kind: str, tmp_path: Path
) -> None:
    save_multimodal(tmp_path, kind)
    policy = policy_of(tmp_path, lora={"rank": 4, "alpha": 8})
    adapter = dict(adapter_weights(policy.model))
    sent = dict(DiskNames(policy.model).of_adapter(adapter.items()))
    assert len(adapter) == len(sent) > 0
    assert all(name.startswith("base_model.model.model.language_model.layers.") for name in adapter)
    layers = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in sent}
    assert {f"{layer}.weight" for layer in layers} <= weights_of(tmp_path).keys()


def test_generators_get_the_adapter_of_a_model_whose_files_name_its_layers_otherwise(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Nemotron-H")
    policy = policy_of(tmp_path, lora={"rank": 4, "alpha": 8})
    sent = dict(DiskNames(policy.model).of_adapter(adapter_weights(policy.model)))
    layers = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in sent}
    assert layers
    assert {f"{layer}.weight" for layer in layers} <= weights_of(tmp_path).keys()


def test_an_export_warns_of_parts_whose_files_are_gone(tmp_path: Path) -> None:
    save_multimodal(tmp_path / "model", "gemma3")
    policy = policy_of(tmp_path / "model")
    (tmp_path / "model/model.safetensors").unlink()
    index = {"weight_map": {"vision_tower.weight": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model/model.safetensors.index.json").write_text(json.dumps(index))
    with structlog.testing.capture_logs() as logs:
        write_model(policy.model, moved(policy), str(tmp_path / "model"), tmp_path / "export")
    (warning,) = [log for log in logs if log["log_level"] == "warning"]
    assert "is not there; download the folder again" in warning["reason"]


def test_tied_output_layers_follow_the_files_where_the_configurations_differ(tmp_path: Path) -> None:
    save_multimodal(tmp_path, "qwen3_5", tie_word_embeddings=True)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    assert config["tie_word_embeddings"]
    config["text_config"]["tie_word_embeddings"] = False
    path.write_text(json.dumps(config))
    model = policy_of(tmp_path).model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_weights_of_the_language_part_that_the_model_does_not_use_are_named(tmp_path: Path) -> None:
    save_multimodal(tmp_path, "gemma3")
    bias = "language_model.model.layers.0.self_attn.q_proj.bias"
    save_file(weights_of(tmp_path) | {bias: torch.ones(64)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with structlog.testing.capture_logs() as logs:
        policy_of(tmp_path)
    assert [log["weights"] for log in logs if log["log_level"] == "warning"] == ["model.layers.0.self_attn.q_proj.bias"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("type", "transformers has no causal language model of type 'qwen3_vl_text', the language part of 'qwen3_vl'"),
        ("names", "have no language part, whose name would end in embed_tokens.weight"),
    ],
)
def test_a_model_without_a_language_part_is_refused(spoil: str, message: str, tmp_path: Path) -> None:
    save_multimodal(tmp_path, "qwen3_5")
    if spoil == "type":
        text = {"vocab_size": len(build_tokenizer())}
        CONFIG_MAPPING["qwen3_vl"](text_config=text).save_pretrained(tmp_path)
    else:
        weights = {name.replace("embed_tokens", "words"): tensor for name, tensor in weights_of(tmp_path).items()}
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=message):
        policy_of(tmp_path)
