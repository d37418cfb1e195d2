"""A policy that is its own teacher: its scores by vLLM are those that transformers gives it behind the same context."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from common.config import parse_config
from common.messages import Task
from generator.chat.template import ChatTemplate
from generator.episode.episode import Episode, Row, Transcript
from generator.rewards import Score
from generator.teacher.self_teacher import SelfTeacher, told
from tests.support.engine import engine_config, reference_logprobs, save_tiny_model, start_engine
from tests.support.episode import completion

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TASK = Task(task_id="t", prompt_id="p", prompt="What is 3+4?", answer="7")


def test_scores_are_the_models_own_behind_the_context(tmp_path: Path) -> None:
    """The response has two turns, with what a user said in between."""
    model = save_tiny_model(tmp_path, seed=0)
    tree = engine_config(tmp_path).model_dump(by_alias=True) | {"teacher": {"context": "It is {answer}."}}

    async def scene() -> tuple[np.ndarray, np.ndarray]:
        engine = await start_engine(tmp_path)
        try:
            template = ChatTemplate(engine.tokenizer)
            row = Row(template.prompt(TASK.prompt))
            row.extend(completion(engine.tokenizer.encode("6<|im_end|>")))
            row.append(template.between([{"role": "user", "content": "No."}]))
            row.extend(completion(engine.tokenizer.encode("7<|im_end|>")))
            episode = Episode([row], Transcript([]))
            teacher = SelfTeacher(parse_config(tree), engine, template)
            payload = await teacher.taught(TASK, episode, Score(1.0, {}, 1.0), episode.payload())
            whole = np.concatenate([template.prompt(told(TASK.prompt, "It is 7.")), row.response_ids()])
            at = payload.mask()[len(row.prompt_ids) :]
            return payload.teacher_logprobs[:, 0], reference_logprobs(model, whole)[-len(at) :][at]
        finally:
            await engine.close()

    scores, expected = asyncio.run(scene())
    np.testing.assert_allclose(scores, expected, atol=1e-4)
