"""A model folder that cannot be one is named before any library tries it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.config import parse_config
from common.errors import UserError
from common.model_folder import check_dense, check_model_folder
from common.preflight.start import check_start
from common.role import Role
from launcher.quickstart.tiny_model import build_model, build_tokenizer, save


@pytest.mark.parametrize("path", ["/nowhere/model", "./model", "runs/a/model"])
def test_a_folder_that_is_not_there_is_named(path: str) -> None:
    with pytest.raises(UserError, match=f"model.path = '{path}': there is no such folder"):
        check_model_folder(path)


def test_a_hugging_face_name_is_left_to_the_library() -> None:
    check_model_folder("Qwen/Qwen3-8B")


def test_a_folder_of_which_only_the_owner_is_here_is_no_name_to_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "tiny-qwen").mkdir(parents=True)
    with pytest.raises(UserError, match="there is no such folder; did you mean models/tiny-qwen?"):
        check_model_folder("models/tiny_qwen")
    with pytest.raises(UserError, match="models has tiny-qwen"):
        check_model_folder("models/other")


def test_missing_and_broken_parts_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="config.json"):
        check_model_folder(str(tmp_path))
    tokenizer = build_tokenizer()
    save(build_model(tokenizer, seed=0), tokenizer, tmp_path)
    check_model_folder(str(tmp_path))
    (tmp_path / "tokenizer.json").rename(tmp_path / "elsewhere.json")
    with pytest.raises(UserError, match=r"has no tokenizer \(tokenizer.json\)"):
        check_model_folder(str(tmp_path), tokenizer=True)
    check_model_folder(str(tmp_path))
    (tmp_path / "elsewhere.json").rename(tmp_path / "tokenizer.json")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match="cannot read model.safetensors"):
        check_model_folder(str(tmp_path))
    weights.unlink()
    with pytest.raises(UserError, match="has no weights"):
        check_model_folder(str(tmp_path))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"num_experts": 128, "num_experts_per_tok": 8}, "num_experts = 128"),
        ({"num_local_experts": 8}, "num_local_experts = 8"),
        ({"n_routed_experts": 256, "n_shared_experts": 1}, "n_routed_experts = 256"),
        ({"moe_num_experts": [64, 64]}, r"moe_num_experts = \[64, 64\]"),
        ({"ffn_config": {"moe_num_experts": 16}}, "moe_num_experts = 16"),
        ({"text_config": {"num_experts": 2}}, "num_experts = 2"),
    ],
)
def test_a_mixture_of_experts_is_refused(config: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=rf"model.path = 'm' is a mixture of experts \({named}\)"):
        check_dense("m", config)


def test_a_dense_model_is_not_taken_for_a_mixture() -> None:
    check_dense("m", {"num_experts": 1, "num_local_experts": 0, "n_routed_experts": None, "num_experts_per_tok": 2})


@pytest.mark.parametrize("role", [Role.LEARNER, Role.GENERATOR])
def test_a_process_does_not_start_with_a_mixture_of_experts(tmp_path: Path, role: Role) -> None:
    tokenizer = build_tokenizer()
    save(build_model(tokenizer, seed=0), tokenizer, tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_experts": 4}))
    config = parse_config(
        {"model": {"path": str(tmp_path)}, "data": {"train": "t"}, "run": {"output_dir": str(tmp_path)}}
    )
    with pytest.raises(UserError, match="mixture of experts"):
        check_start(role, config, None)
