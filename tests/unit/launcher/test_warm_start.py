"""The tiny model and its start: tokens exactly as an episode has them, and a checkpoint that is made once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from common.errors import UserError
from launcher import tiny_model, warm_start_cache
from launcher.arithmetic import Problem
from launcher.tiny_model import CALL_END, CALL_START, TURN_END
from launcher.warm_start import Demonstrations, train
from launcher.warm_start_cache import Recipe, cached, warm_start

PROBLEM = Problem("What is 12*7+5?", "89", "mixed")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_model.build_tokenizer()


def test_any_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    for text in ("What is 1+1?", '<tool_call>{"name": "calculator"}</tool_call>', "naïve – 雪\n\t ", "error: 1/0"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_an_episode_is_short(tokenizer: PreTrainedTokenizerFast) -> None:
    row = Demonstrations(tokenizer, Recipe()).tool_row(PROBLEM)
    assert len(row.token_ids) <= 50


def test_the_template_renders_turns_and_tool_results_like_qwen(tokenizer: PreTrainedTokenizerFast) -> None:
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
    row = Demonstrations(tokenizer, Recipe(tool_rows=0.75, tool_share=0.15)).tool_row(PROBLEM)
    assert row.token_ids == prompt + call + result + answer
    assert row.weights == pytest.approx(
        [0.0] * len(prompt) + [0.2] + [1.0] * (len(call) - 1) + [0.0] * len(result) + [1.0] * len(answer)
    )


def test_training_sets_how_often_the_tool_is_used(tokenizer: PreTrainedTokenizerFast) -> None:
    recipe = Recipe(steps=60, rows=32, warmup=5, tool_rows=0.5, tool_share=0.2)
    model = tiny_model.build_model(tokenizer, seed=0)
    losses: list[float] = []
    train(model, tokenizer, recipe, lambda step, steps, loss: losses.append(loss))
    assert losses[-1] < losses[0] / 2
    prompt = Demonstrations(tokenizer, recipe).tool_row(PROBLEM).token_ids
    first = prompt.index(tokenizer.convert_tokens_to_ids(CALL_START))
    with torch.no_grad():
        next_token = model(torch.tensor([prompt[:first]])).logits[0, -1].softmax(-1)
    assert 0.1 < next_token[prompt[first]].item() < 0.35


def test_the_checkpoint_is_made_once_and_loads_like_any_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(steps=2, rows=4, warmup=1)
    assert cached(recipe, tmp_path) is None
    folder = warm_start(recipe, tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == [folder.name]
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == "qwen3"
    assert model.config.eos_token_id == AutoTokenizer.from_pretrained(folder).eos_token_id
    monkeypatch.setattr(warm_start_cache, "_make", None)
    assert warm_start(recipe, tmp_path) == folder


def test_another_recipe_is_another_checkpoint() -> None:
    assert Recipe(seed=1).key() != Recipe(seed=2).key()


def test_a_failed_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("power cut")

    monkeypatch.setattr(warm_start_cache, "_make", fail)
    with pytest.raises(RuntimeError):
        warm_start(Recipe(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="XDG_CACHE_HOME"):
        warm_start(Recipe(), tmp_path / "file" / "cache")
