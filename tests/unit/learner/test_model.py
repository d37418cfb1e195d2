"""A model whose files lack weights, or have others than its configuration says, is refused by the names of these."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from safetensors.torch import load_file, save_file

from common.errors import UserError
from learner.critic import load_value_model
from learner.policy import model as module
from learner.policy.model import load_policy
from learner.ranks.world import World
from learner.reference import load_reference
from tests.support.learner import learner_config, save_tiny_model

Weights = dict[str, torch.Tensor]
UP = "model.layers.1.mlp.up_proj.weight"


def changed(folder: Path, tied: bool, edit: Callable[[Weights], Any], **config: Any) -> str:
    """A tiny model after changes to its weights and to its config.json, in which None removes a key."""
    path = save_tiny_model(folder, tied=tied)
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    values = json.loads(file.read_text()) | config
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return path


def halved(weights: Weights) -> None:
    weights[UP] = weights[UP][: len(weights[UP]) // 2].clone()


def no_layer(weights: Weights) -> None:
    for name in [name for name in weights if ".layers.1." in name]:
        del weights[name]


@pytest.mark.parametrize(
    ("tied", "edit", "config", "line"),
    [
        (False, lambda w: w.pop("lm_head.weight"), {}, "lacks lm_head.weight, and the configuration does not tie it"),
        # Qwen3's own default, of which common/model_files.py does not know.
        (False, lambda w: w.pop("lm_head.weight"), {"tie_word_embeddings": None, "architectures": None},
         "lacks lm_head.weight, and the configuration does not tie it"),
        (True, lambda w: w.pop(UP), {}, f"lacks {UP}, and the configuration does not tie it"),
        (True, no_layer, {}, "lacks model.layers.1.input_layernorm.weight, .* and 8 more, and the .* tie them"),
        (True, halved, {}, rf"other shapes than its config.json says: {UP} \(96×64, not 192×64\)"),
        (True, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"] * 2}), {},
         r"has an output layer of its own \(lm_head.weight\), and the configuration ties it"),
    ],
    ids=["head", "head by default", "layer", "layers", "shape", "tied with a head"],
)  # fmt: skip
def test_weights_that_are_not_there_or_do_not_fit_are_refused_by_name(
    tmp_path: Path, tied: bool, edit: Callable[[Weights], Any], config: dict[str, Any], line: str
) -> None:
    path = changed(tmp_path, tied, edit, **config)
    with pytest.raises(UserError, match=rf"^model.path = '{re.escape(path)}': .*{line}"):
        load_policy(learner_config(path, "runs"))


def test_of_a_reference_too_by_its_own_setting(tmp_path: Path, model: str) -> None:
    reference = changed(tmp_path, False, lambda weights: weights.pop(UP))
    config = learner_config(model, "runs", algorithm={"kl_coef": 0.1, "reference": reference})
    with pytest.raises(UserError, match=rf"^algorithm.reference = '{re.escape(reference)}': the file lacks {UP}"):
        load_reference(config, World(0, 1, torch.device("cpu")), None)


def test_of_a_critic_all_but_its_head(tmp_path: Path, model: str) -> None:
    load_value_model(learner_config(model, "runs"))
    for name, edit in (("lacking", lambda weights: weights.pop(UP)), ("halved", halved)):
        path = changed(tmp_path / name, True, edit)
        with pytest.raises(UserError, match=UP):
            load_value_model(learner_config(path, "runs"))


def test_tied_weights_may_be_there_once_or_twice(tmp_path: Path) -> None:
    def twice(weights: Weights) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()

    policy = load_policy(learner_config(changed(tmp_path, True, twice), "runs")).model
    assert policy.get_output_embeddings().weight is policy.get_input_embeddings().weight


def test_weights_without_a_place_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def biased(weights: Weights) -> None:
        weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)

    monkeypatch.setattr(module, "get_logger", structlog.get_logger)
    with structlog.testing.capture_logs() as logs:
        load_policy(learner_config(changed(tmp_path, True, biased), "runs"))
    (line,) = [line for line in logs if "not used" in line["event"]]
    assert (line["log_level"], line["weights"]) == ("warning", "model.layers.0.self_attn.q_proj.bias")
