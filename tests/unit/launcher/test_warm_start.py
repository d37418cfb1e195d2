"""The tiny model and its start: tokens exactly as an episode has them, and a checkpoint that is made once."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from common.errors import UserError
from launcher.quickstart import cache, tiny_model
from launcher.quickstart.cache import cached_model, key
from launcher.quickstart.warm_start import Demonstrations, train
from launcher.tasks import DEFAULT, TASKS
from launcher.tasks.special_tokens import CALL_END, CALL_START, TURN_END, calculator_call
from launcher.tasks.task import Choice, Problem, QuickstartTask, Recipe, Turn

pytestmark = pytest.mark.slow

PROBLEM = Problem("What is 12*7+5?", "89")
CALLED = [Turn(calculator_call("12*7+5"), "89", weight=0.2), Turn("89")]


def task(**recipe: int) -> QuickstartTask:
    return replace(DEFAULT, recipe=Recipe(**recipe))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_model.build_tokenizer()


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


def test_a_demonstration_has_the_tokens_of_an_episode(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROBLEM.prompt}], add_generation_prompt=True, return_dict=False
    )
    call = tokenizer.encode(CALL_START + "12*7+5" + CALL_END + TURN_END)
    result = tokenizer.encode(
        "\n<|im_start|>user\n<tool_response>\n89\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    answer = tokenizer.encode("89" + TURN_END)
    row = Demonstrations(tokenizer, DEFAULT).example(PROBLEM, CALLED)
    assert row.token_ids == prompt + call + result + answer
    assert len(row.token_ids) <= 50
    assert row.weights == pytest.approx(
        [0.0] * len(prompt) + [0.2] + [1.0] * (len(call) - 1) + [0.0] * len(result) + [1.0] * len(answer)
    )


def test_a_program_is_answered_within_the_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    turns = [Turn("<code>\nprint(1)\n</code>", "1"), Turn("1")]
    row = Demonstrations(tokenizer, replace(DEFAULT, call_format="code")).example(Problem("What is 1?", "1"), turns)
    assert tokenizer.decode(row.token_ids) == (
        "<|im_start|>user\nWhat is 1?<|im_end|>\n<|im_start|>assistant\n"
        "<code>\nprint(1)\n</code><interpreter>\n1\n</interpreter>\n\n1<|im_end|>"
    )
    learned = [token for token, weight in zip(row.token_ids, row.weights, strict=True) if weight]
    assert tokenizer.decode(learned) == "<code>\nprint(1)\n</code>1<|im_end|>"


def test_choices_are_demonstrated_more_often_than_taken() -> None:
    choice, rng = Choice(demonstrated=0.8, initial=0.2), random.Random(0)
    drawn = [choice.draw(rng) for _ in range(2000)]
    assert sum(better for better, _ in drawn) == pytest.approx(1600, abs=80)
    taken = sum(weight for better, weight in drawn if better)
    assert taken / sum(weight for _, weight in drawn) == pytest.approx(0.2, abs=0.02)


@pytest.mark.integration
def test_training_sets_how_often_the_tool_is_used(tokenizer: PreTrainedTokenizerFast) -> None:
    quick = task(steps=60, rows=16, warmup=5)
    model = tiny_model.build_model(tokenizer, seed=0)
    losses: list[float] = []
    train(model, tokenizer, quick, lambda step, steps, loss: losses.append(loss))
    assert losses[-1] < losses[0] / 2
    prompt = Demonstrations(tokenizer, quick).example(PROBLEM, CALLED).token_ids
    first = prompt.index(tokenizer.convert_tokens_to_ids(CALL_START))
    with torch.no_grad():
        next_token = model(torch.tensor([prompt[:first]])).logits[0, -1].softmax(-1)
    assert 0.05 < next_token[prompt[first]].item() < 0.3


@pytest.mark.parametrize(
    ("experts", "kind", "weight"),
    [(0, "qwen3", "mlp.gate_proj.weight"), (4, "qwen3_moe", "mlp.experts.3.gate_proj.weight")],
)
def test_the_checkpoint_is_made_once_and_loads_like_any_model(
    experts: int, kind: str, weight: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = task(steps=2, rows=4, warmup=1, experts=experts)
    folder = cached_model(quick, cache=tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == [folder.name]
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == kind
    assert f"model.layers.0.{weight}" in load_file(folder / "model.safetensors")
    assert model.config.eos_token_id == AutoTokenizer.from_pretrained(folder).eos_token_id
    monkeypatch.setattr(cache, "_train_model", None)
    assert cached_model(quick, cache=tmp_path) == folder


def test_another_recipe_or_task_is_another_checkpoint() -> None:
    tasks = [task(seed=1), task(seed=2), task(experts=2), *(one for one in TASKS.values() if not one.model_of)]
    assert len({key(one) for one in tasks}) == len(tasks)


def test_tasks_with_the_same_demonstrations_share_a_model() -> None:
    for one in TASKS.values():
        other = TASKS[one.model]
        assert key(one) == key(other)
        assert (one.demonstrate, one.recipe, one.extra_tokens) == (other.demonstrate, other.recipe, other.extra_tokens)


def test_a_failed_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_train_model", mock.Mock(side_effect=RuntimeError("power cut")))
    with pytest.raises(RuntimeError):
        cached_model(DEFAULT, cache=tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="XDG_CACHE_HOME"):
        cached_model(DEFAULT, cache=tmp_path / "file" / "cache")
