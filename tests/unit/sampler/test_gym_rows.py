"""Rows that reasoning-gym generates: always the same ones, and only where their answers can be judged."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import structlog

from common import gym_families
from common.config import DataConfig
from common.errors import UserError
from common.gym_families import installed_families, score_answer
from common.messages import Task
from sampler.prompts import load_prompts
from sampler.rows import GymRows, open_rows

CHAIN_SUM = "reasoning_gym:chain_sum"


def rows(family: str, split: str = "train", **options: Any) -> list[dict[str, Any]]:
    opened = open_rows(f"reasoning_gym:{family}", split, options)
    return [opened[i] for i in range(len(opened))]


def test_a_row_has_a_prompt_an_answer_and_what_its_verifier_needs() -> None:
    for row in rows("chain_sum", size=20, min_terms=3, max_terms=3, max_digits=1):
        expression = row["prompt"].partition(": ")[2].removesuffix(" =")
        assert len(expression.split()) == 5
        assert row["answer"] == str(eval(expression))
        assert row["family"] == "chain_sum"
        assert score_answer("chain_sum", row["answer"], json.loads(row["entry"])) == 1.0
        assert score_answer("chain_sum", "0.5", json.loads(row["entry"])) < 1.0


def test_items_are_the_same_whenever_they_are_asked_for() -> None:
    opened = open_rows(CHAIN_SUM, "train", {"size": 8})
    assert list(opened) == [opened[i] for i in range(8)] == rows("chain_sum", size=8)


def test_seeds_and_splits_have_items_of_their_own() -> None:
    sets = [
        {row["prompt"] for row in rows("chain_sum", split, size=50, min_terms=6, seed=seed)}
        for split in ("train", "test")
        for seed in (0, 1)
    ]
    assert len(set().union(*sets)) == sum(map(len, sets)) == 200


def test_the_prompts_of_a_run_can_come_from_a_family() -> None:
    config = DataConfig(train=CHAIN_SUM, options={"size": 80, "min_terms": 4})
    prompts = load_prompts(config.sources("train"), structlog.get_logger())
    assert len(prompts) == 80
    assert prompts[0].prompt == rows("chain_sum", size=80, min_terms=4)[0]["prompt"]
    prompt = prompts[0]
    task = Task(task_id="t", prompt_id=prompts.ids[0], prompt=prompt.prompt, answer=prompt.answer, row=prompt.row)
    assert Task.unpack(task.pack()) == task
    assert set(prompt.row) == {"family", "entry"}


def test_a_verifier_knows_the_options_that_its_item_was_made_with() -> None:
    (row,) = rows("decimal_arithmetic", size=1, min_num_decimal_places=5, max_num_decimal_places=5, precision=12)
    assert json.loads(row["entry"])["options"]["max_num_decimal_places"] == 5


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("chain_sun", {}, r"no family 'chain_sun'; the nearest of its \d+: chain_sum$"),
        ("", {}, "no family ''; the nearest"),
        ("composite", {}, "'composite' .* cannot be used: it mixes other families"),
        ("simple_integration", {}, "evaluates the model's answer as Python code"),
        ("ransom_note", {}, "its problems are others in each process"),
        ("rush_hour", {}, r"'rush_hour' .* cannot be used: its verifier gives 0\.01 for its own answer"),
        ("chain_sum", {"min_term": 2}, "unexpected keyword argument 'min_term'; allowed: min_terms, max_terms"),
        ("chain_sum", {"min_terms": "many"}, "min_terms = 'many': input should be a valid integer"),
        ("chain_sum", {"min_terms": 5, "max_terms": 2}, "max_terms must be >= min_terms"),
        ("chain_sum", {"size": 0}, "size must be positive"),
        ("chain_sum", {"seed": -1}, "seed = -1 is no integer of 0 or more"),
        ("chain_sum", {"seed": None}, "seed = None is no integer"),
    ],
)
def test_what_cannot_be_used_is_one_line_that_names_the_source(
    family: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as raised:
        open_rows(f"reasoning_gym:{family}", "train", options)
    assert f"reasoning_gym:{family}" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_package_is_one_line_that_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gym_families.installed_families.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"reasoning-gym package is missing; pip install 'spo-trainer\[gym\]'"):
        open_rows(CHAIN_SUM, "train")


def test_a_family_whose_compiled_package_is_missing_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    installed_families()
    if not isinstance(sys.modules["pycosat"], gym_families.Missing):
        pytest.skip("pycosat is installed here")
    with pytest.raises(UserError, match="item 1 cannot be generated .*the package pycosat is missing"):
        GymRows("reasoning_gym:zebra_puzzles", "train", {})
