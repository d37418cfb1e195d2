"""The tracker starts from offline scores, and says which of them it could not use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from common.config import DataConfig, TrackerConfig
from common.errors import UserError
from sampler.prompts import PromptSet, load_prompts
from sampler.scores import apply_initial_values
from sampler.tracker import ValueTracker

LOG = structlog.get_logger()
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "chat"}]


@pytest.fixture
def prompts(tmp_path: Path) -> PromptSet:
    path = tmp_path / "data.jsonl"
    rows = [{"prompt": prompt, "answer": "1"} for prompt in ("text", CHAT, " padded ", "none")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_prompts(DataConfig(train=str(path)).sources("train"), LOG)


@pytest.fixture
def tracker(prompts: PromptSet) -> ValueTracker:
    return ValueTracker(prompts.ids, TrackerConfig())


def test_values_are_found_by_the_key_of_the_prompt(tmp_path: Path, prompts: PromptSet, tracker: ValueTracker) -> None:
    values = tmp_path / "values.json"
    values.write_text(json.dumps({"text": [1] * 8, "chat": [0, 0, 0, 1], "padded": [1]}))
    assert apply_initial_values(str(values), tracker, prompts.score_keys(), LOG) == 3
    assert tracker.value(prompts.ids[0]) == pytest.approx(8.5 / 9)
    assert tracker.value(prompts.ids[1]) == pytest.approx(1.5 / 5)
    assert tracker.value(prompts.ids[2]) == pytest.approx(1.5 / 2)
    assert tracker.counts(prompts.ids[3]) == (0.5, 0.5)


def test_an_exact_key_comes_before_one_without_white_space(
    tmp_path: Path, prompts: PromptSet, tracker: ValueTracker
) -> None:
    values = tmp_path / "values.json"
    values.write_text(json.dumps({"padded": [0] * 8, " padded ": [1] * 8}))
    apply_initial_values(str(values), tracker, prompts.score_keys(), LOG)
    assert tracker.value(prompts.ids[2]) == pytest.approx(8.5 / 9)


def warnings(path: Path, tracker: ValueTracker, prompts: PromptSet) -> list[Any]:
    with capture_logs() as logs:
        apply_initial_values(str(path), tracker, prompts.score_keys(), LOG)
    return [line for line in logs if line["log_level"] == "warning"]


def test_values_of_unknown_prompts_are_counted_and_the_first_is_named(
    tmp_path: Path, prompts: PromptSet, tracker: ValueTracker
) -> None:
    values = tmp_path / "values.json"
    values.write_text(json.dumps({"text": [1], "gone": [1], "also gone": [0]}))
    (line,) = warnings(values, tracker, prompts)
    assert (line["prompts"], line["example"]) == (2, "gone")


def test_rows_that_cannot_be_read_are_counted_and_named_by_file_and_line(
    tmp_path: Path, prompts: PromptSet, tracker: ValueTracker
) -> None:
    rows = [json.dumps({"input": "user\ntext\nassistant\n", "score": score}) for score in (1, 1, 0)]
    values = tmp_path / "scores.jsonl"
    values.write_text("\n".join([*rows, '{"input": "text", "sc']))
    (line,) = warnings(values, tracker, prompts)
    assert line["rows"] == 1
    assert line["first"].startswith(f"{values} line 4: not JSON")
    assert tracker.value(prompts.ids[0]) == pytest.approx(2.5 / 4)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("v.json", None, "cannot be read"),
        ("v.json", "{", "is not JSON"),
        ("v.json", '{"text": [5]}', "prompt 'text': reward 5 is outside .* --binarize"),
        ("v.jsonl", '{"input": "text", "score": 1}\n{"input": "text", "score": -1}', "line 2: reward -1 is outside"),
    ],
)
def test_values_that_cannot_be_used_are_one_clear_line(
    tmp_path: Path, prompts: PromptSet, tracker: ValueTracker, name: str, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=rf"sampler\.initial_values: .*{message}"):
        apply_initial_values(str(tmp_path / name), tracker, prompts.score_keys(), LOG)
