"""A model folder that cannot be one is named before any library tries it."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import UserError
from common.model_folder import check_model_folder
from launcher.quickstart.tiny_model import build_model, build_tokenizer, save


@pytest.mark.parametrize("path", ["/nowhere/model", "./model", "runs/a/model"])
def test_a_folder_that_is_not_there_is_named(path: str) -> None:
    with pytest.raises(UserError, match=f"model.path = '{path}': there is no such folder"):
        check_model_folder(path)


def test_a_hugging_face_name_is_left_to_the_library() -> None:
    check_model_folder("Qwen/Qwen3-8B")


def test_missing_and_broken_parts_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="config.json"):
        check_model_folder(str(tmp_path))
    tokenizer = build_tokenizer()
    save(build_model(tokenizer, seed=0), tokenizer, tmp_path)
    check_model_folder(str(tmp_path))
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match="cannot read model.safetensors"):
        check_model_folder(str(tmp_path))
    weights.unlink()
    with pytest.raises(UserError, match="has no weights"):
        check_model_folder(str(tmp_path))
