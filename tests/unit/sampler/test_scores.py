"""Files of scored responses: read by their exact prompt, our own rows and the recipe's, and given to the tracker."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from common.config import DataConfig, TrackerConfig
from common.errors import UserError
from sampler.prompts.prompt_set import PromptSet, load_prompts
from sampler.values.scores import apply_initial_values, prompt_key, read_scores, recipe_key
from sampler.values.tracker import ValueTracker
from tests.support.golden import GOLDEN

LOG = structlog.get_logger()
TEXT = "user\nis a word\nassistant\n"


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def read(path: Path, *lines: Any) -> tuple[dict[str, list[float]], list[str]]:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    scores: defaultdict[str, list[float]] = defaultdict(list)
    problems = []
    for row in read_scores(path):
        if row.problem:
            problems.append(f"{row.where}: {row.problem}".removeprefix(f"{path} "))
        else:
            scores[row.key] += row.scores
    return dict(scores), problems


def test_golden_m05_prompts_are_read_whole(tmp_path: Path) -> None:
    inputs, expected = GOLDEN["M05"]["inputs"], GOLDEN["M05"]["expected"]
    parsed, problems = read(tmp_path / "a.jsonl", *inputs["rows"])
    merged, whole = expected["recipe_merged"], expected["wanted_second_key"]
    assert parsed == {whole if key == "said x" else key: scores for key, scores in merged.items()}
    assert problems == []


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("What is 1+1?", "What is 1+1?"),
        ("user\nWhat is\n\n1+1?\nassistant\n", "What is\n\n1+1?"),
        ("system\na user\nuser\nhi\nassistant\n<think>\n", "system\na user\nuser\nhi\nassistant\n<think>\n"),
        ("user\nWho is\nassistant\nof the king?\nassistant", "Who is\nassistant\nof the king?"),
        ("ask the user\nor not", "ask the user\nor not"),
        ("", ""),
    ],
)
def test_the_key_of_a_conversation_and_of_anything_else(text: str, key: str) -> None:
    assert recipe_key(text) == key


@pytest.mark.parametrize(
    "turns",
    [
        ["user: 1+1?"],
        ["system: be brief", "user: 1+1?"],
        ["user: hi", "assistant: yes?", "user: 1+1?"],
        ["system: count"],
    ],
)
def test_chat_messages_have_the_key_of_the_recipes_row(turns: list[str]) -> None:
    prompt = [message(*turn.split(": ")) for turn in turns]
    row = "".join(turn.replace(": ", "\n") + "\n" for turn in turns) + "assistant\n"
    assert prompt_key(prompt) == recipe_key(row)
    assert prompt_key([message("user", " 1+1?\n")]) == "1+1?"


def test_our_rows_have_the_exact_prompt(tmp_path: Path) -> None:
    rows = [
        {"task_id": "values0-a", "input": TEXT, "score": 1},
        {"task_id": "values0-b", "input": [message("user", "chat")], "score": 0},
        {"input": TEXT, "score": 0.5},
    ]
    assert read(tmp_path / "a.jsonl", *rows) == ({TEXT: [1], "chat": [0], "is a word": [0.5]}, [])
    assert prompt_key(TEXT) == TEXT


def test_rows_of_one_prompt_join_and_bad_ones_are_named(tmp_path: Path) -> None:
    good = [
        json.dumps({"input": "a", "score": 1, "step": 3, "output": "\u2028"}, ensure_ascii=False),
        {"input": "user\na\nassistant\n", "score": 0.5},
        {"input": "b", "scores": []},
    ]
    bad = [
        "{", "[" * 100_000, '{"score": 1}', '{"input": "a", "score": true}', '{"input": "a", "scores": [1, NaN]}', "7",
        '{"input": "a", "score": 1' + "0" * 400 + "}", '{"input": ["a"], "score": 1}', '{"input": "a", "sco',
    ]  # fmt: skip
    parsed, problems = read(tmp_path / "a.jsonl", *good, "", *bad)
    assert parsed == {"a": [1, 0.5], "b": []}
    assert [problem.partition(":")[0] for problem in problems] == [f"line {number}" for number in range(5, 14)]
    assert "no `input`" in problems[2]
    assert "the score True is not a finite number" in problems[3]
    assert "neither text nor chat messages" in problems[7]
    assert problems[8].endswith("the line is cut short)")


@pytest.fixture
def prompts(tmp_path: Path) -> PromptSet:
    path = tmp_path / "data.jsonl"
    asked = ("text", [message("system", "be brief"), message("user", "chat")], " padded ", "none")
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "1"}) + "\n" for prompt in asked))
    return load_prompts(DataConfig(train=str(path)).sources("train"), LOG)


@pytest.fixture
def tracker(prompts: PromptSet) -> ValueTracker:
    return ValueTracker(prompts.ids, TrackerConfig())


def test_values_are_found_by_the_key_of_the_prompt(tmp_path: Path, prompts: PromptSet, tracker: ValueTracker) -> None:
    path = tmp_path / "values.json"
    path.write_text(json.dumps({"text": [1] * 8, "chat": [0, 0, 0, 1], "padded": [0], "gone": [1], "also gone": [0]}))
    with capture_logs() as logs:
        assert apply_initial_values(str(path), tracker, prompts, LOG) == 3
    expected = [8.5 / 9, 1.5 / 5, 0.5 / 2, 0.5]
    assert [tracker.value(prompt_id) for prompt_id in prompts.ids] == pytest.approx(expected)
    (line,) = [line for line in logs if line["log_level"] == "warning"]
    assert (line["prompts"], line["example"]) == (2, "gone")
    path.write_text(json.dumps({"padded": [0] * 8, " padded ": [1] * 8}))
    apply_initial_values(str(path), tracker, prompts, LOG)
    assert tracker.value(prompts.ids[2]) == pytest.approx(8.5 / 9), "an exact key comes first"


def test_unreadable_rows_are_counted_and_named(tmp_path: Path, prompts: PromptSet, tracker: ValueTracker) -> None:
    path = tmp_path / "scores.jsonl"
    rows = [json.dumps({"input": "user\ntext\nassistant\n", "score": score}) for score in (1, 1, 0)]
    path.write_text("\n".join([*rows, '{"input": "text", "sc']))
    with capture_logs() as logs:
        apply_initial_values(str(path), tracker, prompts, LOG)
    (line,) = [line for line in logs if line["log_level"] == "warning"]
    assert line["rows"] == 1
    assert line["first"].startswith(f"{path} line 4: not JSON")
    assert tracker.value(prompts.ids[0]) == pytest.approx(2.5 / 4)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("v.json", None, "cannot be read: No such file"),
        ("v.json", '{"a": [1', "is not JSON"),
        ("v.json", "[1]", "must be a JSON object"),
        ("v.json", '{"text": 1}', "prompt 'text': its scores are not a list"),
        ("v.json", '{"text": ["1"]}', "prompt 'text': the score 1 is not a finite number"),
        ("v.json", '{"text": [NaN]}', "the score nan is not a finite number"),
        ("v.json", '{"text": [5]}', "prompt 'text': reward 5 is outside .* --binarize"),
        ("v.jsonl", '{"input": "text", "score": 1}\n{"input": "text", "score": -1}', "line 2: reward -1 is outside"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(
    tmp_path: Path, prompts: PromptSet, tracker: ValueTracker, name: str, content: str | None, words: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=rf"sampler\.initial_values: .*{words}"):
        apply_initial_values(str(tmp_path / name), tracker, prompts, LOG)


def test_scores_must_be_utf8_and_may_begin_with_a_bom(tmp_path: Path) -> None:
    mark, row = b"\xef\xbb\xbf", b'{"input": "user\\np", "score": 1.0}'
    lines, whole, latin = (tmp_path / name for name in ("a.jsonl", "b.json", "c.json"))
    lines.write_bytes(mark + row + b'\n{"input": "caf\xe9", "score": 1.0}\n')
    whole.write_bytes(mark + b'{"p": [1.0]}')
    latin.write_bytes(b'{"caf\xe9": [1.0]}')
    assert [row.problem for row in read_scores(lines)] == ["", "not UTF-8 text"]
    assert [row.scores for row in read_scores(whole)] == [[1.0]]
    with pytest.raises(UserError, match="is not UTF-8 text"):
        list(read_scores(latin))
