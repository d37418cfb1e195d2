"""Scored responses are read by their exact prompt, our own rows and the recipe's."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from sampler.scores import prompt_key, read_scores, recipe_key
from tests.support.golden import GOLDEN

M05 = GOLDEN["M05"]


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


def test_golden_m05_prompts_are_read_whole_where_the_recipe_cuts_them(tmp_path: Path) -> None:
    parsed, problems = read(tmp_path / "a.jsonl", *M05["inputs"]["rows"])
    recipe = M05["expected"]["recipe_merged"]
    whole, cut = M05["expected"]["wanted_second_key"], "said x"
    assert parsed == {whole if key == cut else key: scores for key, scores in recipe.items()}
    assert (problems, cut in parsed) == ([], False)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("What is 1+1?", "What is 1+1?"),
        ("user\nWhat is\n\n1+1?\nassistant\n", "What is\n\n1+1?"),
        (
            "system\nYou are a user\nuser\nhi\nassistant\n<think>\n",
            "system\nYou are a user\nuser\nhi\nassistant\n<think>\n",
        ),
        ("user\nWho is\nassistant\nof the king?\nassistant", "Who is\nassistant\nof the king?"),
        ("ask the user\nor not", "ask the user\nor not"),
        ("", ""),
    ],
)
def test_the_key_of_a_conversation_and_of_anything_else(text: str, key: str) -> None:
    assert recipe_key(text) == key


@pytest.mark.parametrize(
    ("prompt", "recipe_row"),
    [
        ([{"role": "user", "content": "1+1?"}], "user\n1+1?\nassistant\n"),
        (
            [{"role": "system", "content": "be brief"}, {"role": "user", "content": " 1+1?\n"}],
            "system\nbe brief\nuser\n1+1?\nassistant\n",
        ),
        (
            [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "yes?"},
                {"role": "user", "content": "1+1?"},
            ],
            "user\nhi\nassistant\nyes?\nuser\n1+1?\nassistant\n",
        ),
        ([{"role": "system", "content": "count"}], "system\ncount\nassistant\n"),
    ],
)
def test_chat_messages_have_the_key_of_the_recipes_row_of_that_conversation(
    prompt: list[dict[str, Any]], recipe_row: str
) -> None:
    assert prompt_key(prompt) == recipe_key(recipe_row)


def test_a_text_prompt_is_its_own_key_whatever_is_in_it() -> None:
    text = "user\nis a word\nassistant\n"
    assert prompt_key(text) == text


def test_our_own_rows_have_the_exact_prompt_and_the_recipes_a_conversation(tmp_path: Path) -> None:
    text = "user\nis a word\nassistant\n"
    chat = [{"role": "user", "content": "chat"}]
    parsed, problems = read(
        tmp_path / "a.jsonl",
        {"task_id": "values0-a", "input": text, "score": 1},
        {"task_id": "values0-b", "input": chat, "score": 0},
        {"input": text, "score": 0.5},
    )
    assert parsed == {text: [1], "chat": [0], "is a word": [0.5]}
    assert problems == []


def test_rows_of_one_prompt_come_together_and_bad_ones_are_named_by_line(tmp_path: Path) -> None:
    good = [
        {"input": "a", "score": 1, "step": 3},
        {"input": "user\na\nassistant\n", "score": 0.5},
        {"input": "b", "scores": []},
    ]
    bad = [
        "{",
        "[" * 100_000,
        '{"score": 1}',
        '{"input": "a", "score": true}',
        '{"input": "a", "scores": [1, NaN]}',
        "7",
        '{"input": "a", "score": 1' + "0" * 400 + "}",
        '{"input": ["a"], "score": 1}',
        '{"input": "a", "sco',
    ]
    parsed, problems = read(tmp_path / "a.jsonl", *good, "", *bad)
    assert parsed == {"a": [1, 0.5], "b": []}
    assert [problem.partition(":")[0] for problem in problems] == [f"line {number}" for number in range(5, 14)]
    assert "no `input`" in problems[2]
    assert "the score True is not a finite number" in problems[3]
    assert "neither text nor chat messages" in problems[7]
    assert problems[8].endswith("the line is cut short)")


def test_a_line_end_of_unicode_is_no_end_of_a_row(tmp_path: Path) -> None:
    row = json.dumps({"input": "a", "score": 1, "output": "\u2028"}, ensure_ascii=False)
    assert read(tmp_path / "a.jsonl", row) == ({"a": [1]}, [])


def test_a_json_object_has_the_scores_by_key(tmp_path: Path) -> None:
    assert read(tmp_path / "a.json", {"a": [1, 0], "b": []}) == ({"a": [1, 0], "b": []}, [])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        ('{"a": [1', "is not JSON"),
        ("[1]", "must be a JSON object"),
        ('{"text": 1}', "prompt 'text': its scores are not a list"),
        ('{"text": ["1"]}', "prompt 'text': the score 1 is not a finite number"),
        ('{"text": [NaN]}', "the score nan is not a finite number"),
    ],
)
def test_a_file_of_another_form_is_one_clear_line(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "v.json").write_text(content)
    with pytest.raises(UserError, match=message):
        list(read_scores(tmp_path / "v.json"))
