"""The experiments' engine agrees with transformers on log-probs, and plays episodes to their ends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from benchmarks.staleness.batch_engine import BatchEngine
from generator.engine.engine import Completion
from tests.support.engine import random_prompt, reference_logprobs, save_tiny_model, tiny_model

NEVER = -1  # a token id that is not sampled, so that nothing ends a turn
PROMPTS = [random_prompt(seed, length) for seed, length in enumerate((3, 17, 9, 9, 30))]
LIMITS = (12, 5, 1, 12, 9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batch_engine")


@pytest.fixture(scope="module")
def twin(folder: Path) -> Qwen3ForCausalLM:
    torch.set_num_threads(1)
    return save_tiny_model(folder, seed=1)


def answers(engine: BatchEngine, seed: int = 0, **sampling: Any) -> list[Completion]:
    """Answers to all prompts in one batch, which rows leave at different times."""
    asked = [
        engine.generate(prompt, max_tokens=limit, **sampling) for prompt, limit in zip(PROMPTS, LIMITS, strict=True)
    ]
    return asyncio.run(engine.play(asked, seed))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_plain_forward(folder: Path, twin: Qwen3ForCausalLM, temperature: float) -> None:
    completions = answers(BatchEngine(str(folder), NEVER), temperature=temperature)
    for prompt, limit, answer in zip(PROMPTS, LIMITS, completions, strict=True):
        reference = reference_logprobs(twin, [*prompt, *answer.token_ids.tolist()], temperature)
        np.testing.assert_allclose(answer.logprobs, reference[len(prompt) :], atol=2e-5)
        assert answer.versions == [(0, 0, limit)]
        assert answer.finish_reason == "length"


def test_a_turn_ends_with_its_end_token(folder: Path, twin: Qwen3ForCausalLM) -> None:
    engine = BatchEngine(str(folder), NEVER)
    whole, again, other = (answers(engine, seed) for seed in (0, 0, 1))
    assert whole[0].token_ids.tolist() == again[0].token_ids.tolist() != other[0].token_ids.tolist()
    end = int(whole[0].token_ids[3])
    at = whole[0].token_ids.tolist().index(end) + 1
    cut = answers(BatchEngine(str(folder), end))[0]
    assert cut.token_ids.tolist() == whole[0].token_ids[:at].tolist()
    assert cut.finish_reason == "stop"


def test_new_weights_are_used_and_named(folder: Path, twin: Qwen3ForCausalLM) -> None:
    engine, other = BatchEngine(str(folder), NEVER), tiny_model(seed=2)
    engine.load(7, other.named_parameters())
    answer = answers(engine)[0]
    reference = reference_logprobs(other, [*PROMPTS[0], *answer.token_ids.tolist()])
    np.testing.assert_allclose(answer.logprobs, reference[len(PROMPTS[0]) :], atol=2e-5)
    assert answer.versions == [(7, 0, 12)]


def test_episodes_of_different_lengths_all_end(folder: Path, twin: Qwen3ForCausalLM) -> None:
    engine = BatchEngine(str(folder), NEVER)

    async def episode(turns: int) -> list[int]:
        ids = PROMPTS[0]
        for _ in range(turns):
            answer = await engine.generate(ids, max_tokens=2)
            await asyncio.sleep(0)  # a tool that gives way to others
            reference = reference_logprobs(twin, [*ids, *answer.token_ids.tolist()])
            np.testing.assert_allclose(answer.logprobs, reference[len(ids) :], atol=2e-5)
            ids = [*ids, *answer.token_ids.tolist()]
        return ids

    episodes = asyncio.run(engine.play([episode(turns) for turns in (0, 3, 1, 0, 2)], seed=0))
    assert [len(ids) - len(PROMPTS[0]) for ids in episodes] == [0, 6, 2, 0, 4]
