"""Models as they are read, given an adapter, asked for the states of prompts, and exported again."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)

from common.errors import UserError
from learner.checkpoint import source_files
from learner.checkpoint.export import write_model
from learner.critic import load_value_model
from learner.policy import model as module
from learner.policy.lora import adapter_off, adapter_weights, add_adapter, merged_weights
from learner.policy.model import Policy
from learner.policy.prompt_states import prompt_states
from learner.reference import load_reference
from tests.support.families import tiny
from tests.support.learner import ALONE, PACKER, VOCABULARY, learner_config, make_payload, policy_of, save_tiny_model

Weights = dict[str, torch.Tensor]
Edit = Callable[[Weights], Weights]
UP, NORM = "model.layers.1.mlp.up_proj.weight", "model.layers.1.input_layernorm.weight"


@pytest.fixture(autouse=True)
def logs(monkeypatch):
    for place in (module, source_files):
        monkeypatch.setattr(place, "get_logger", structlog.get_logger)


def edited(file: Path, **values: Any) -> None:
    """Change values of a JSON file, in which None removes a key."""
    merged = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in merged.items() if value is not None}))


def changed(folder: Path, tied: bool, edit: Edit, **config: Any) -> str:
    """A tiny model after changes to its weights and to its config.json."""
    path = save_tiny_model(folder, tied=tied)
    weights = edit(load_file(folder / "model.safetensors"))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    edited(folder / "config.json", **config)
    return path


def without(part: str) -> Edit:
    return lambda weights: {name: weight for name, weight in weights.items() if part not in name}


def halved(weights: Weights) -> Weights:
    return weights | {UP: weights[UP][: len(weights[UP]) // 2].clone()}


def with_head(factor: float) -> Edit:
    """Give the output layer weights of its own, the embeddings times `factor`."""
    return lambda weights: weights | {"lm_head.weight": factor * weights["model.embed_tokens.weight"]}


# Qwen3's own default, of which common/model_files.py does not know.
BY_DEFAULT = {"tie_word_embeddings": None, "architectures": None}
UNTIED, TIED = "and the configuration does not tie it", "and the configuration ties it"


UNFIT: dict[str, tuple[bool, Edit, dict[str, Any], str]] = {
    "head": (False, without("lm_head"), {}, f"lacks lm_head.weight, {UNTIED}"),
    "head by default": (False, without("lm_head"), BY_DEFAULT, f"lacks lm_head.weight, {UNTIED}"),
    "matrix": (True, without(UP), {}, f"lacks {UP}, {UNTIED}"),
    "layer": (True, without(".layers.1."), {}, f"lacks {NORM}, .* and 8 more, and the .* tie them"),
    "shape": (True, halved, {}, rf"other shapes than its config.json says: {UP} \(96×64, not 192×64\)"),
    "another head": (True, with_head(2), {}, rf"has an output layer of its own \(lm_head.weight\), {TIED}"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_weights_that_are_not_there_or_do_not_fit_are_refused_by_name(tmp_path, case):
    tied, edit, config, line = UNFIT[case]
    path = changed(tmp_path, tied, edit, **config)
    with pytest.raises(UserError, match=rf"^model.path = '{re.escape(path)}': .*{line}"):
        policy_of(path)


def test_of_a_reference_too_by_its_own_setting(tmp_path, model):
    reference = changed(tmp_path, False, without(UP))
    config = learner_config(model, "runs", algorithm={"kl_coef": 0.1, "reference": reference})
    with pytest.raises(UserError, match=rf"^algorithm.reference = '{re.escape(reference)}': the file lacks {UP}"):
        load_reference(config, ALONE, None)


def test_of_a_critic_all_but_its_head(tmp_path, model):
    load_value_model(learner_config(model, "runs"))
    for name, edit in (("lacking", without(UP)), ("halved", halved)):
        path = changed(tmp_path / name, True, edit)
        with pytest.raises(UserError, match=UP):
            load_value_model(learner_config(path, "runs"))


def test_tied_weights_may_be_there_once_or_twice(tmp_path):
    policy = policy_of(changed(tmp_path, True, with_head(1))).model
    assert policy.get_output_embeddings().weight is policy.get_input_embeddings().weight


def test_weights_without_a_place_are_named(tmp_path):
    name = "model.layers.0.self_attn.q_proj.bias"
    path = changed(tmp_path, True, lambda weights: weights | {name: torch.zeros(64)})
    with structlog.testing.capture_logs() as logs:
        policy_of(path)
    (line,) = [line for line in logs if "not used" in line["event"]]
    assert (line["log_level"], line["weights"]) == ("warning", name)


PREFIX = "base_model.model.model.layers"


def adapted(model: str, weights: bool = True, **lora: Any) -> Policy:
    return policy_of(model, weights, lora={"rank": 4, "alpha": 12} | lora)


@torch.no_grad()
def moved(policy: Policy) -> Policy:
    """The policy with an adapter that changes something."""
    torch.manual_seed(1)
    for _, parameter in adapter_weights(policy.model):
        parameter.add_(0.1 * torch.randn_like(parameter))
    return policy


@torch.no_grad()
def logprobs(policy: Policy) -> torch.Tensor:
    micro = PACKER.micro_batch([(make_payload(np.random.default_rng(0), 40), 0.0)])
    return policy(micro.input_ids, micro.position_ids, micro.sequences, micro.predict, micro.targets)[0]


def test_a_new_adapter_is_all_that_is_trained_and_sent(model):
    one, other = adapted(model), adapted(model)
    names = {name for name, parameter in one.named_parameters() if parameter.requires_grad}
    assert all(".lora_A." in name or ".lora_B." in name for name in names)
    sent = dict(one.named_weights())
    assert len(sent) == len(names) == 2 * 7 * 2  # matrices, linear layers of a block, blocks
    assert sent[f"{PREFIX}.0.self_attn.q_proj.lora_A.weight"].shape == (4, 64)
    assert sent[f"{PREFIX}.1.mlp.down_proj.lora_B.weight"].shape == (64, 4)
    assert torch.equal(logprobs(one), logprobs(policy_of(model)))
    assert all(torch.equal(weight, sent[name]) for name, weight in other.named_weights()), "the same on every rank"


def test_chosen_layers_alone_get_an_adapter_also_without_weights(model):
    shape = dict(adapted(model, weights=False, targets=["v_proj", "mlp.up_proj"]).named_weights())
    assert {name.split(".")[-3] for name in shape} == {"v_proj", "up_proj"}
    assert {parameter.device.type for parameter in shape.values()} == {"meta"}


def test_switched_off_the_model_is_the_one_on_disk(model):
    trained, plain = moved(adapted(model)), logprobs(policy_of(model))
    before = logprobs(trained)
    with adapter_off(trained):
        assert torch.equal(logprobs(trained), plain)
    assert torch.equal(logprobs(trained), before)
    assert (before - plain).abs().max() > 0.01


def test_merged_weights_are_the_base_plus_the_scaled_product(model):
    original = dict(AutoModelForCausalLM.from_pretrained(model).named_parameters())
    trained = moved(adapted(model, targets=["o_proj"]))
    adapter, merged = dict(trained.named_weights()), dict(merged_weights(trained.model, partitioned=False))
    assert merged.keys() == original.keys()
    for name, weight in original.items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        added = torch.zeros(())
        if f"{layer}.lora_A.weight" in adapter:
            added = 12 / 4 * adapter[f"{layer}.lora_B.weight"] @ adapter[f"{layer}.lora_A.weight"]
        torch.testing.assert_close(merged[name], weight + added, rtol=1e-6, atol=1e-6)


def tiny_gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=11, n_positions=16))


DENSE = "it has down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
ROUTED = "it has k_proj, o_proj, q_proj, v_proj, and experts get no adapter$"


@pytest.mark.parametrize(
    ("build", "targets", "words"),
    [
        (None, ["q_proj", "lm_head"], f"has no linear layers called lm_head; {DENSE}"),
        (None, ["proj"], f"Qwen3ForCausalLM .* has no linear layers called proj; {DENSE}"),
        (lambda: tiny("Qwen3-MoE", 0), ["q_proj", "gate_up_proj"], f"called gate_up_proj; {ROUTED}"),
        (tiny_gpt2, None, "GPT2LMHeadModel .* has no linear layers to adapt"),
    ],
    ids=["output layer", "part of a name", "experts", "none"],
)
def test_unknown_layers_are_refused_with_those_that_exist(model, build, targets, words):
    read = AutoModelForCausalLM.from_pretrained(model) if build is None else build()
    lora = learner_config(model, "runs", lora={"targets": targets} if targets else {}).learner.lora
    with pytest.raises(UserError, match=words) as refused:
        add_adapter(read, lora, "its/path", 0)
    assert "(model.path = 'its/path')" in str(refused.value)


def similarities(vectors: np.ndarray) -> np.ndarray:
    """Of each two prompts, [N, N]: they do not depend on the signs of components."""
    return vectors.astype(float) @ vectors.astype(float).T


def test_packed_prompts_have_the_states_of_each_alone_half_whitened(model):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCABULARY, int(rng.integers(1, 30))).astype(np.int32) for _ in range(30)]
    done: list[int] = []
    vectors = prompt_states(policy_of(model), ALONE.device, prompts, token_budget=64, progress=done.append)
    assert (done[-1], len(done) > 5) == (30, True)

    plain, states = AutoModelForCausalLM.from_pretrained(model), []
    for prompt in prompts:
        with torch.no_grad():
            layers = plain(torch.from_numpy(prompt.astype(np.int64))[None], output_hidden_states=True).hidden_states
        states.append(torch.cat([layers[len(layers) // 2][0, -1], layers[-1][0, -1]]).double().numpy())
    scaled = (np.array(states) - np.mean(states, 0)) / np.std(states, 0)
    left, sizes, _ = np.linalg.svd(scaled, full_matrices=False)
    expected = left[:, :-1] * np.sqrt(sizes[:-1])  # the last component is what centring took
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert vectors.shape == (30, 29)
    assert similarities(vectors) == pytest.approx(similarities(expected), abs=5e-3)


def test_many_prompts_share_the_components_of_some_of_them(model, monkeypatch):
    rng = np.random.default_rng(1)
    some = [rng.integers(0, VOCABULARY, 8).astype(np.int32) for _ in range(30)]
    monkeypatch.setattr("learner.policy.prompt_states.BASIS", 25)
    prompts = [*some, *some]  # each twice, so that most are seen both before and after the components are found
    vectors = prompt_states(policy_of(model), ALONE.device, prompts, token_budget=64)
    assert vectors.shape == (60, 21)  # of the 25, 22 are different
    assert np.abs(vectors[:30].astype(float) - vectors[30:]).max() < 2e-3


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


def source(folder: Path, config: dict[str, Any] = OLDER, files: dict[str, str] = FILES) -> Path:
    save_tiny_model(folder)
    edited(folder / "config.json", **{"dtype": None, "rope_parameters": None} | config)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content.encode())
    return folder


def exported(model: PreTrainedModel, path: Path | str, folder: Path) -> list[dict[str, Any]]:
    """Export a model whose weights are all 1; returns what was logged."""
    weights = {name: torch.ones_like(weight, dtype=torch.float32) for name, weight in model.named_parameters()}
    with structlog.testing.capture_logs() as logs:
        write_model(model, weights, str(path), folder)
    return logs


def json_of(file: Path) -> Any:
    return json.loads(file.read_text())


def test_an_export_is_the_source_but_for_weights_and_their_type(tmp_path):
    model, folder = source(tmp_path / "model"), tmp_path / "export"
    for name in ("README.md", "training.log"):
        (model / name).write_text("{}")
    assert exported(policy_of(model).model, model, folder) == []
    assert {name: (folder / name).read_bytes().decode() for name in FILES} == FILES
    assert json_of(folder / "config.json") == json_of(model / "config.json") | {"torch_dtype": "float32"}
    names = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert names == {"config.json", "model.safetensors", *FILES}
    # A run may start from it again.
    again = tmp_path / "again"
    exported(policy_of(folder).model, folder, again)
    assert (again / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert policy_of(again).model.lm_head.weight[0, 0] == 1


def test_generation_settings_that_transformers_refuses_to_write_are_carried_with_a_warning(tmp_path):
    text = json.dumps({"do_sample": False, "temperature": 0.6})
    model, folder = source(tmp_path / "model", {}, {"generation_config.json": text}), tmp_path / "export"
    (line,) = exported(policy_of(model).model, model, folder)
    assert (line["log_level"], "generation_config.json is the source's" in line["event"]) == ("warning", True)
    assert "temperature" in line["reason"]
    assert (folder / "generation_config.json").read_text() == text
    assert GenerationConfig.from_pretrained(folder) is not None


def test_generation_settings_in_config_json_stay_there(tmp_path):
    model, folder = source(tmp_path / "model", {"temperature": 0.7, "max_length": 50}, {}), tmp_path / "export"
    exported(policy_of(model).model, model, folder)
    written = json_of(folder / "config.json")
    assert (written["temperature"], written["max_length"]) == (0.7, 50)


def test_a_config_that_names_no_architecture_is_exported_as_it_is(tmp_path):
    model, folder = source(tmp_path / "model", {"dtype": "float32"}, {}), tmp_path / "export"
    config = json_of(model / "config.json") | {"architectures": None}
    (model / "config.json").write_text(json.dumps(config))
    exported(policy_of(model).model, model, folder)
    assert json_of(folder / "config.json") == config


def test_a_critic_has_its_class_and_the_sources_other_keys(tmp_path):
    model, folder = source(tmp_path / "model"), tmp_path / "critic"
    exported(load_value_model(learner_config(str(model), "runs")).model, model, folder)
    written = json_of(folder / "config.json")
    assert written["architectures"] == ["Qwen3ForTokenClassification"]
    assert (written["own_key"], written["rope_theta"], len(written["id2label"])) == ([1, 2], 5e5, 1)
    assert AutoModelForTokenClassification.from_pretrained(folder).num_labels == 1
    assert load_value_model(learner_config(str(folder), "runs")).head == "score"


def test_without_the_source_it_is_written_with_a_warning(tmp_path):
    model = source(tmp_path / "model", {})
    policy = policy_of(model).model
    model.rename(tmp_path / "moved")
    lines = [line["event"] for line in exported(policy, model, tmp_path / "export")]
    assert lines == ["exported without a tokenizer: the files of the model are missing"]
    assert (tmp_path / "export" / "config.json").is_file()


def test_the_files_of_a_hub_name_are_those_of_its_cached_revision(tmp_path, monkeypatch):
    cached = source(tmp_path / "hub" / "models--owner--name" / "snapshots" / ("a" * 40))
    monkeypatch.setattr(source_files, "cached_folder", {"owner/name": cached}.get)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: None)
    exported(policy_of(cached).model, "owner/name", tmp_path / "export")
    assert {name: (tmp_path / "export" / name).read_bytes().decode() for name in FILES} == FILES
