"""A model folder that cannot be one is named before any library tries it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from common.checks.list import check_start
from common.checks.machine import Machine
from common.errors import UserError
from common.model import (
    check_model_folder,
    context_length,
    download_failure,
    end_ids,
    model_digests,
    weights_fingerprint,
)
from common.process import Role
from tests.support.checks import AVX512, config_of, small_model


def test_a_missing_folder_is_named_and_a_hub_name_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("/nowhere/model", "./model", "runs/a/model"):
        with pytest.raises(UserError, match=f"model.path = '{path}': there is no such folder"):
            check_model_folder(path)
    check_model_folder("Qwen/Qwen3-8B")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "tiny-qwen").mkdir(parents=True)
    with pytest.raises(UserError, match="there is no such folder; did you mean models/tiny-qwen?"):
        check_model_folder("models/tiny_qwen")
    with pytest.raises(UserError, match="models has tiny-qwen"):
        check_model_folder("models/other")
    (tmp_path / "models" / "tiny-qwen" / "config.json").touch()
    with pytest.raises(UserError, match="there is no such folder; did you mean models/tiny-qwen?"):
        check_model_folder("model/tiny-qwen")
    check_model_folder("Qwen/tiny-qwen")


def test_missing_and_broken_parts_are_named(tmp_path: Path) -> None:
    folder = small_model(tmp_path / "models" / "one", (2, 2))
    weights, tokenizer, config = (folder / f"{name}" for name in ("model.safetensors", "tokenizer.json", "config.json"))

    def refused(words: str, path: Path = folder, **options: Any) -> None:
        with pytest.raises(UserError, match=words):
            check_model_folder(str(path), **options)

    check_model_folder(str(folder), tokenizer=True)
    tokenizer.unlink()
    refused(r"has no tokenizer \(tokenizer.json\)", tokenizer=True)
    check_model_folder(str(folder))
    weights.write_bytes(weights.read_bytes()[:-4])
    refused("cannot read model.safetensors: .* it is damaged")
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    refused("model.safetensors is a Git LFS pointer, not the weights; run `git lfs pull`")
    weights.unlink()
    refused("has no weights")
    config.write_text("{")
    refused("cannot read config.json: not JSON")
    refused("has no config.json, so it is not a model folder; it has models in one", folder.parent)
    config.unlink()
    (folder / "adapter_config.json").write_text("{}")
    refused("is an adapter .*merge_and_unload")


def written(folder: Path, files: dict[str, list[str]], config: dict[str, Any], index: dict[str, str]) -> Path:
    """A model folder with weights of two rows by the names of their files."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for name, tensors in files.items():
        save_file({tensor: np.zeros((2, 4), np.float32) for tensor in tensors}, folder / name)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


APART = {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": False, "vocab_size": 2}
EMBED, ONE, TWO = "model.embed_tokens.weight", "model-1-of-2.safetensors", "model-2-of-2.safetensors"
HEAD, NORM = "lm_head.weight", "model.norm.weight"
WHOLE = {ONE: [EMBED, NORM], TWO: [HEAD]}
INDEX = {EMBED: ONE, NORM: ONE, HEAD: TWO}


@pytest.mark.parametrize(
    ("files", "config", "index", "line"),
    [
        ({"model.safetensors": [EMBED]}, APART, {}, "the file lacks lm_head.weight, and the configuration does not"),
        ({ONE: [EMBED, NORM]}, APART, INDEX, f"{TWO}, which model.safetensors.index.json names, is not there"),
        ({"model.safetensors": [EMBED, HEAD]}, APART | {"vocab_size": 3}, {}, "has 2 rows, .* says vocab_size = 3"),
        # These are whole.
        (WHOLE, APART, INDEX, None),
        ({"model.safetensors": [EMBED, HEAD]}, APART, INDEX, None),  # the index of an earlier export
        ({"model.safetensors": [EMBED]}, APART | {"tie_word_embeddings": True}, {}, None),
    ],
)  # fmt: skip
def test_files_that_do_not_fit_together_are_named(
    tmp_path: Path, files: dict[str, list[str]], config: dict[str, Any], index: dict[str, str], line: str | None
) -> None:
    folder = written(tmp_path / "model", files, config, index)
    if line is None:
        check_model_folder(str(folder))
    else:
        with pytest.raises(UserError, match=rf"^model.path = '{folder}': .*{line}"):
            check_model_folder(str(folder))


@pytest.mark.parametrize(
    ("vocabulary", "added", "beyond"),
    [
        ({"a": 0, "b": 2}, [], r"'b' \(id 2\)"),
        ({"a": 0}, [("<|im_end|>", 2, True)], r"'<\|im_end\|>' \(id 2\)"),
        # Nothing makes a special token that no setting and no template names.
        ({"a": 0, "b": 1}, [], None),
    ],
)
def test_tokens_without_an_embedding_are_named(
    tmp_path: Path, vocabulary: Any, added: list[tuple[str, int, bool]], beyond: str | None
) -> None:
    folder = written(tmp_path / "model", {"model.safetensors": [EMBED, HEAD]}, APART, {})
    tokens = [{"content": content, "id": number, "special": special} for content, number, special in added]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": tokens}))
    (folder / "chat_template.jinja").write_text("{{ messages }}<|im_end|>")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "a"}')
    check_model_folder(str(folder))
    if beyond is None:
        check_model_folder(str(folder), tokenizer=True)
    else:
        with pytest.raises(
            UserError, match=rf"the tokenizer has {beyond}, but the model has embeddings only for ids below 2"
        ):
            check_model_folder(str(folder), tokenizer=True)


@pytest.mark.parametrize(
    ("keys", "length"),
    [
        ({"max_position_embeddings": 64}, 64),
        ({"n_positions": 64, "max_seq_len": 32}, 32),
        ({"max_position_embeddings": 64, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, None),
        ({"model_type": "mamba"}, None),
    ],
)
def test_the_context_length_is_read_from_the_configuration(keys: dict[str, Any], length: int | None) -> None:
    assert context_length(keys) == length


@pytest.mark.parametrize(
    ("generation", "model", "ids"),
    [
        ({"eos_token_id": 7}, {"eos_token_id": 8}, (7,)),
        ({"eos_token_id": None}, {"text_config": {"eos_token_id": 8}}, (8,)),
        ({"eos_token_id": "</s>"}, {}, ()),
    ],
)
def test_the_ends_of_a_models_texts_are_read_from_its_files(
    tmp_path: Path, generation: Any, model: Any, ids: tuple[int, ...]
) -> None:
    for name, content in (("generation_config.json", generation), ("config.json", model)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert end_ids(str(tmp_path)) == ids


def start(folder: Path, content: str, role: Role = Role.GENERATOR, environ: Any = None, **sections: Any) -> None:
    """Run the checks of a start with this config.json of the model."""
    model = folder / "model"
    if not model.exists():
        small_model(model, (2, 2))
    (model / "config.json").write_text(content)
    (folder / "train.jsonl").write_text("{}\n")
    tree = {
        "model": {"path": str(model), "max_model_len": 128},
        "run": {"output_dir": str(folder)},
        "data": {"train": str(folder / "train.jsonl"), "max_prompt_tokens": 16},
    }
    check_start(role, config_of(**tree, **sections), Machine(cpu_flags=AVX512, environ=environ or {}))


def test_a_length_above_the_models_is_one_line_with_all_limits(tmp_path: Path) -> None:
    content = '{"model_type": "qwen3", "max_position_embeddings": 64}'
    with pytest.raises(
        UserError, match="max_model_len = 128, but .* was made for 64 tokens; set model.max_model_len=64"
    ):
        start(tmp_path, content)
    start(tmp_path, content, Role.LEARNER)
    start(tmp_path, content, generator={"engine": {"max_model_len": 64}})
    start(tmp_path, content, environ={"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"})


@pytest.mark.parametrize(("name", "value"), [("router_replay", "rollout"), ("router_balance", 0.1)])
def test_settings_of_routers_need_experts(name: str, value: object, tmp_path: Path) -> None:
    learner = {name: value}
    with pytest.raises(UserError, match=rf"learner.{name} = '?{value}'? is for .* but {tmp_path}/model has no experts"):
        start(tmp_path, '{"model_type": "qwen3"}', Role.LEARNER, learner=learner)
    start(tmp_path, '{"model_type": "qwen3_moe", "num_experts": 8}', Role.LEARNER, learner=learner)
    start(tmp_path, '{"text_config": {"num_local_experts": 8}}', Role.LEARNER, learner=learner)


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("We couldn't connect to 'https://...' to load the files", "hub cannot be reached"),
        ("You are trying to access a gated repo. 401 Client Error", "accept its licence"),
        ("Qwen9ForCausalLM is not supported", None),
    ],
)
def test_a_failed_download_is_one_line_with_its_cause(message: str, line: str | None) -> None:
    failure = download_failure("owner/name", OSError(message))
    assert failure is None if line is None else line in str(failure)


def test_a_fingerprint_tells_weights_apart_and_not_their_places(tmp_path: Path) -> None:
    one, copy = small_model(tmp_path / "one", (300, 300)), small_model(tmp_path / "copy", (300, 300))
    assert weights_fingerprint(str(one)) == weights_fingerprint(str(copy))
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    assert weights_fingerprint(str(one)) != weights_fingerprint(str(copy))
    assert weights_fingerprint("owner/name") == "owner/name"
    assert model_digests(one) == model_digests(copy)
    assert model_digests(one, weights=True) != model_digests(copy, weights=True)
