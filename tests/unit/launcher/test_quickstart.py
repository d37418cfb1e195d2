"""The quickstart: demonstrations are episodes by the task's own rules, and the tiny model starts from them."""

from __future__ import annotations

import itertools
import json
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from common.errors import UserError
from launcher.quickstart import cache, tiny_model
from launcher.quickstart.cache import cached_model, key
from launcher.quickstart.tiny_model import build_tokenizer
from launcher.quickstart.warm_start import TaskDemonstrations, train
from launcher.tasks import DEFAULT, TASKS, arithmetic, code, corrector, dialogue, gym
from launcher.tasks.special_tokens import CALL_END, CALL_START, TURN_END, calculator_call
from launcher.tasks.task import HELDOUT_SIZE, TRAIN_SIZE, Choice, Problem, QuickstartTask, Recipe, Turn, write
from tests.support.process_sandbox import ProcessSandbox
from tests.support.task import config_of, play_all

ROOT = Path(__file__).parents[3]

each_task = pytest.mark.parametrize("task", TASKS.values(), ids=list(TASKS))
# A task with an agent has the demonstrations of another.
demonstrated = {name: task for name, task in TASKS.items() if not task.model_of}
each_demonstrated = pytest.mark.parametrize("task", demonstrated.values(), ids=list(demonstrated))


@pytest.fixture(autouse=True)
def processes_for_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own programs need no isolation here."""
    monkeypatch.setattr("generator.episode.parts.make_sandbox", lambda config: ProcessSandbox())


def some(task: QuickstartTask, count: int, seed: int = 0) -> list[Problem]:
    return list(itertools.islice(task.problems(random.Random(seed)), count))


@each_demonstrated
@pytest.mark.integration
def test_a_demonstration_with_a_right_end_is_worth_1(task: QuickstartTask) -> None:
    rng = random.Random(1)
    conversations = [(problem, task.demonstrate(problem, rng)) for problem in some(task, 40)]
    demonstrations = TaskDemonstrations(build_tokenizer(task.extra_tokens), task)
    rewards = set()
    for (problem, turns), (episode, reward) in zip(conversations, play_all(task, conversations), strict=True):
        row = demonstrations.example(problem, turns)
        (played,) = episode.rows
        assert played.tokens().tolist() == row.token_ids.tolist()
        sampled = [i for start, end in played.spans for i in range(start, end)]
        assert [i for i, weight in enumerate(row.weights) if weight] == sampled
        answer = turns[-1].content.rpartition("<answer>")[2].removesuffix("</answer>")  # without its working
        assert reward == float(answer == problem.answer)
        rewards.add(reward)
    assert rewards == {0.0, 1.0}


@each_task
def test_problems_configuration_and_pieces_of_a_task_fit(task: QuickstartTask) -> None:
    train, heldout = task.split(seed=0)
    assert (len(train), len(heldout)) == (TRAIN_SIZE, HELDOUT_SIZE)
    assert len({problem.prompt for problem in train + heldout}) == TRAIN_SIZE + HELDOUT_SIZE
    # What a demonstration is made of stands in no file.
    assert train[0].solution
    assert set(train[0].row()) == {"prompt", "answer", *train[0].columns}

    assert task.template.samefile(ROOT / "configs" / f"{task.name}.yaml")
    config = config_of(task)
    assert config.episode.call_format == task.call_format
    assert config.data.train == f".cache/{task.name}/train.jsonl"

    tokenizer, base = build_tokenizer(task.extra_tokens), build_tokenizer()
    assert all(len(tokenizer.encode(piece)) == 1 for piece in task.extra_tokens)
    assert base.get_vocab().items() <= tokenizer.get_vocab().items()


def divisors(number: int) -> set[int]:
    return {i for i in range(1, number + 1) if number % i == 0}


ANSWERS: dict[str, Any] = {
    "digit sum": lambda a: sum(int(digit) for digit in str(a)),
    "series": lambda a, b: (a + b) * (b - a + 1) // 2,
    "divisors": lambda a: len(divisors(a)),
    "power": lambda a, b, c: pow(a, b, c),
    "common divisor": lambda a, b: max(divisors(a) & divisors(b)),
    "binary": lambda a: bin(a)[2:],
}


@pytest.mark.parametrize("level", code.KINDS)
def test_the_first_program_answers_and_the_others_mostly_do_not(level: str) -> None:
    problems = [problem for problem in some(code.TASK, 400) if problem.columns["level"] == level]
    assert len(problems) > 30
    for problem in problems:
        numbers = map(int, re.findall(r"\d+", problem.prompt))
        assert problem.answer == code.printed(problem.solution[0]) == str(ANSWERS[level](*numbers))
    wrong = [(problem, program) for problem in problems for program in problem.solution[1:]]
    lucky = sum(code.printed(program) == problem.answer for problem, program in wrong)
    assert lucky < 0.1 * len(wrong)


def test_a_dialogues_last_answer_follows_from_all_lines() -> None:
    for problem in some(dialogue.TASK, 100):
        value = eval(problem.prompt.removeprefix("What is ").removesuffix("?"))
        for line in problem.columns["dialogue"]:
            number = int(line.removesuffix(".").split()[-1])
            value = {"add": value + number, "take": value - number, "multiply": value * number}[line.split()[1]]
        assert problem.answer == str(value)
    assert {len(problem.columns["dialogue"]) for problem in some(dialogue.TASK, 100)} == {1, 2}


def test_all_families_are_met_and_worked_out_or_guessed() -> None:
    problems, rng = some(gym.TASK, 600), random.Random(3)
    assert {problem.columns["family"] for problem in problems} == set(gym.FAMILIES)
    assert max(len(problem.prompt) for problem in problems) < 500
    texts = [gym.TASK.demonstrate(problem, rng)[0].content for problem in problems]
    worked = [text for text in texts if text.startswith("<think>")]
    assert 0.7 < len(worked) / len(texts) < 0.9
    assert all(text.count("<answer>") == 1 for text in texts)


def answers(*fields: str) -> list[Turn]:
    return [Turn(field, replied_by="user") for field in fields]


@pytest.mark.integration
def test_one_field_after_the_other_always_finds_it() -> None:
    problems = some(corrector.TASK, 20)
    tried = [problem.solution[: problem.solution.index(problem.answer) + 1] for problem in problems]
    conversations = [(problem, answers(*fields)) for problem, fields in zip(problems, tried, strict=True)]
    played = play_all(corrector.TASK, conversations)
    assert [(reward, episode.reason) for episode, reward in played] == [(1.0, "user")] * 20
    assert {episode.turns for episode, _ in played} == {1, 2, 3, 4}


@pytest.mark.integration
def test_the_corrector_says_how_right_a_field_is() -> None:
    problem = Problem("Which field do I think of? B4 C7 C4 B7", "C4")
    ((episode, reward),) = play_all(corrector.TASK, [(problem, answers("B4", "B7", "B7", "C7"))])
    texts = [entry.text for entry in episode.transcript.entries if entry.role == "user"]
    assert (reward, episode.reason) == (0.0, "user")
    half, none = "That is not right. It is 50% right. Please try again.", "That is not right. Please try again."
    assert texts == [half, none, none, ""]


@pytest.mark.integration
def test_the_command_line_starts_without_what_a_generator_needs() -> None:
    loads = "import sys, launcher.cli; sys.exit(bool({'torch', 'generator', 'jsonschema', 'httpx'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", loads], cwd=ROOT, timeout=600).returncode == 0


def test_arithmetic_answers_are_right_and_the_seed_decides() -> None:
    train, heldout = arithmetic.TASK.split(seed=3, train=600, heldout=60)
    for row in train + heldout:
        assert str(eval(row.prompt.removeprefix("What is ").removesuffix("?"))) == row.answer
    assert {row.columns["level"] for row in heldout} == set(arithmetic.LEVELS)
    first, again, other = (arithmetic.TASK.split(seed, 50, 5) for seed in (1, 1, 2))
    assert first == again != other


def test_files_hold_the_rows(tmp_path: Path) -> None:
    rows, _ = arithmetic.TASK.split(0, 20, 1)
    lines, table = (tmp_path / "new" / name for name in ("rows.jsonl", "rows.parquet"))
    for path in (lines, table):
        write(rows, path)
    expected = [{"prompt": row.prompt, "answer": row.answer, "level": row.columns["level"]} for row in rows]
    assert [json.loads(line) for line in lines.read_text().splitlines()] == expected
    assert pyarrow.parquet.read_table(table).to_pylist() == expected
    with pytest.raises(UserError, match=r"not as rows.csv"):
        write([], tmp_path / "rows.csv")


# The tiny model and its start: tokens exactly as an episode has them, and a checkpoint that is made once.

PROBLEM = Problem("What is 12*7+5?", "89")
CALLED = [Turn(calculator_call("12*7+5"), "89", weight=0.2), Turn("89")]


def with_recipe(**recipe: int) -> QuickstartTask:
    return replace(DEFAULT, recipe=Recipe(**recipe))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_model.build_tokenizer()


@pytest.mark.slow
def test_the_tokenizer_loses_no_text_and_renders_turns_like_qwen(tokenizer: PreTrainedTokenizerFast) -> None:
    for text in ("What is 1+1?", '<tool_call>{"name": "calculator"}</tool_call>', "naïve – 雪\n\t ", "error: 1/0"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 1+1?"},
        {"role": "assistant", "content": "<tool_call>..</tool_call>"},
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "3"},
    ]
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is 1+1?<|im_end|>\n"
        "<|im_start|>assistant\n<tool_call>..</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.slow
def test_the_first_token_of_a_choice_has_its_weight(tokenizer: PreTrainedTokenizerFast) -> None:
    row = TaskDemonstrations(tokenizer, DEFAULT).example(PROBLEM, CALLED)
    learned = tokenizer.encode(CALL_START + "12*7+5" + CALL_END + TURN_END + "89" + TURN_END)
    assert [weight for weight in row.weights.tolist() if weight] == pytest.approx([0.2] + [1.0] * (len(learned) - 1))
    assert row.token_ids[row.weights > 0].tolist() == learned
    assert len(row.token_ids) <= 50


@pytest.mark.slow
def test_choices_are_demonstrated_more_often_than_taken() -> None:
    choice, rng = Choice(demonstrated=0.8, initial=0.2), random.Random(0)
    drawn = [choice.draw(rng) for _ in range(2000)]
    assert sum(better for better, _ in drawn) == pytest.approx(1600, abs=80)
    taken = sum(weight for better, weight in drawn if better)
    assert taken / sum(weight for _, weight in drawn) == pytest.approx(0.2, abs=0.02)


@pytest.mark.slow
@pytest.mark.integration
def test_training_sets_how_often_the_tool_is_used(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    quick = with_recipe(steps=60, rows=16, warmup=5)
    tiny_model.save(tiny_model.build_model(tokenizer, seed=0), tokenizer, tmp_path / "random")
    losses: list[float] = []
    trained = tmp_path / "trained"
    train(tmp_path / "random", trained, quick, lambda step, steps, loss: losses.append(loss))
    assert len(losses) == 60
    assert losses[-1] < losses[0] / 2
    prompt = TaskDemonstrations(tokenizer, quick).example(PROBLEM, CALLED).token_ids
    first = prompt.tolist().index(tokenizer.convert_tokens_to_ids(CALL_START))
    model = AutoModelForCausalLM.from_pretrained(trained)
    with torch.no_grad():
        next_token = model(torch.from_numpy(prompt[None, :first]).long()).logits[0, -1].softmax(-1)
    assert 0.05 < next_token[prompt[first]].item() < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("experts", [0, 4])
def test_the_checkpoint_is_made_once_and_loads_like_any_model(
    experts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, weight = ("qwen3_moe", "experts.3.gate_proj.weight") if experts else ("qwen3", "gate_proj.weight")
    quick = with_recipe(steps=2, rows=4, warmup=1, experts=experts)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = cached_model(quick)
    assert [*tmp_path.rglob("warm-start-*")] == [folder]
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == kind
    assert f"model.layers.0.mlp.{weight}" in load_file(folder / "model.safetensors")
    assert model.config.eos_token_id == AutoTokenizer.from_pretrained(folder).eos_token_id
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_train_model", None)
        assert cached_model(quick) == folder

    def train_again(_: QuickstartTask, unfinished: Path, __: object) -> None:
        (unfinished / "config.json").touch()

    # A cleaner of old files removed a part of it.
    (folder / "config.json").unlink()
    monkeypatch.setattr(cache, "_train_model", train_again)
    assert cached_model(quick) == folder
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert [*tmp_path.rglob("warm-start-*")] == [folder]


@pytest.mark.slow
def test_another_recipe_or_task_is_another_checkpoint() -> None:
    tasks = [with_recipe(seed=1), with_recipe(seed=2), with_recipe(experts=2), *demonstrated.values()]
    assert len({key(one) for one in tasks}) == len(tasks)


@pytest.mark.slow
def test_tasks_with_the_same_demonstrations_share_a_model() -> None:
    for one in TASKS.values():
        other = TASKS[one.model]
        assert key(one) == key(other)
        assert (one.demonstrate, one.recipe, one.extra_tokens) == (other.demonstrate, other.recipe, other.extra_tokens)


@pytest.mark.slow
def test_a_failed_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_train_model", mock.Mock(side_effect=RuntimeError("power cut")))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(RuntimeError):
        cached_model(DEFAULT)
    assert list((tmp_path / "spo").iterdir()) == []
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match="XDG_CACHE_HOME"):
        cached_model(DEFAULT)
