"""Doctor and a dry run play a turn with a tool call through the model's own template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import structlog

from common.checks.check import Context, Level
from common.checks.machine import read_machine
from common.config import parse_config
from common.errors import UserError
from common.process import Role
from generator.chat.token_text import load_tokenizer
from launcher.checks.dry_run import dry_run_checks
from tests.support.templates import shaped


def seen(folder: Path, shape: str, ends: list[str], **episode: Any) -> list[tuple[Level, str]]:
    """What is found about episodes of a model whose template has this shape."""
    tokenizer, _ = shaped(shape)
    tokenizer.save_pretrained(folder)
    ids = tokenizer.convert_tokens_to_ids(ends)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": ids}))
    (folder / "data.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n')
    data = {"train": str(folder / "data.jsonl")}
    config = parse_config({"model": {"path": str(folder)}, "data": data, "episode": episode})
    checks = {check.name: check for check in dry_run_checks(structlog.get_logger())}
    context = Context(Role.GENERATOR, read_machine(), config)
    checks["prompts"].findings(context)
    return [(finding.level, finding.line) for finding in checks["episodes"].findings(context)]


AGENT = {"command": ["true"]}
TOOLS = {"tools": ["calculator"], "max_assistant_turns": 2}


# By words of the finding: the template's shape, the episodes, and the finding's level.
TOLD: dict[str, tuple[str, dict[str, Any], Level]] = {
    "a turn ends with <|endoftext|> or <|observation|> or <|user|>": ("glm", TOOLS, Level.OK),
    "a turn ends with <|call|> or <|return|>": ("harmony", TOOLS, Level.OK),
    "a turn ends with </s>": ("mistral", TOOLS, Level.OK),
    "a turn ends with <|endoftext|> or <|end|>": ("phi", TOOLS, Level.OK),
    "leaves them out; use another template, or episode.call": ("silent", TOOLS, Level.PROBLEM),
    "a turn ends with <|end|>": ("silent", {}, Level.OK),
    "leaves them out; use another template, or an agent without tools": ("silent", {"agent": AGENT}, Level.WARNING),
    "a turn ends with": ("glm", {"agent": AGENT}, Level.OK),
}


@pytest.mark.parametrize("words", TOLD)
def test_a_template_whose_turns_cannot_be_joined_is_told(tmp_path: Path, words: str) -> None:
    shape, episode, level = TOLD[words]
    level_seen, line = seen(tmp_path, shape, [], **episode)[-1]
    assert (level_seen, words in line) == (level, True), line


def test_a_models_own_ends_of_text_are_told(tmp_path: Path) -> None:
    ((_, line),) = seen(tmp_path, "llama", ["<|end_of_text|>", "<|eot_id|>"])
    assert "a turn ends with <|end_of_text|> or <|eom_id|> or <|eot_id|>" in line


def test_without_a_network_only_the_cache_has_tokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def load(path: str, *, trust_remote_code: bool, local_files_only: bool) -> None:
        asked.append(local_files_only)
        raise OSError("no files")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", load)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(UserError, match="tokenizer of owner/name cannot be loaded: .* hub cannot be reached"):
        load_tokenizer("owner/name")
    assert asked == [True]


def test_a_tokenizer_that_fails_without_a_word_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def load(path: str, **_: bool) -> None:
        raise AssertionError

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", load)
    with pytest.raises(UserError, match=f"tokenizer of {tmp_path} cannot be loaded: AssertionError"):
        load_tokenizer(str(tmp_path))
