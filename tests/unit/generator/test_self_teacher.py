"""The policy as its own teacher: what it is told, and which tokens of the told conversation are scored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from common.payload import Payload
from common.streams import dead
from common.streams.batches import BatchInbox
from common.streams.broker import Broker
from generator.teacher.self_teacher import with_context
from tests.support.episode import TOKENIZER
from tests.support.generator import PretendEngine, Rig, evaluate, one

USER = {"max_assistant_turns": 3, "user": "corrector", "user_options": {"turns": 1}}
CONTEXT = "Solution: {answer}. Hint: {hint}. {{So}} it went:\n{feedback}"


class Scorer(PretendEngine):
    """Scores each token by its id, and finds the ids after it likeliest."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[np.ndarray] = []
        self.scale = 1000.0

    async def logprobs(self, token_ids: Any, top_k: int = 0) -> Any:
        self.read.append(np.asarray(token_ids))
        logprobs = (-np.asarray(token_ids) / self.scale).astype(np.float32)
        if not top_k:
            return logprobs
        ids = np.asarray(token_ids, np.int32)[:, None] + np.arange(1, top_k + 1, dtype=np.int32)
        return ids, logprobs[:, None] - np.arange(top_k, dtype=np.float32)


def taught(broker: Broker, context: str = CONTEXT, *, task: dict[str, Any] | None = None, **sections: Any) -> Any:
    """The header of one task, its payload, and the engine that played and scored it."""
    teacher = {"context": context} | sections.pop("teacher", {})
    rig = Rig(broker, Scorer(), teacher=teacher, **sections)
    header = one(rig, **({"answer": "7", "row": {"hint": "odd"}} if task is None else task))
    (payload,) = BatchInbox(broker).payloads([header.task_id])
    return header, payload, rig.engine


def model_ids(payload: Payload) -> np.ndarray:
    return payload.token_ids[payload.mask()]


def test_the_sampled_tokens_are_scored_after_what_is_told(fake_broker: Broker) -> None:
    header, payload, engine = taught(fake_broker)
    (read,) = engine.read
    text = TOKENIZER.decode(read)
    assert "prompt 0\n\nSolution: 7. Hint: odd. {So} it went:\nreward: 1<|im_end|>" in text
    assert text.endswith("7<|im_end|>")
    np.testing.assert_allclose(payload.teacher_logprobs, -model_ids(payload)[:, None] / 1000, rtol=1e-6)
    assert payload.teacher_ids.size == 0
    assert (header.tokens, header.reward) == (len(payload.token_ids), 1.0)


def test_all_turns_are_scored_at_their_later_places(fake_broker: Broker) -> None:
    """A wrong answer, the user's correction, and a second answer: the feedback is what the user said last."""
    task = {"answer": "8", "row": {"hint": "even"}}
    settings = {"form": "loss", "top_k": 2}
    header, payload, engine = taught(fake_broker, task=task, episode=USER, teacher=settings)
    assert header.turns == 2
    said = "it went:\nreward: 0 (exact 0, turns 0)\nThat is not right. Please try again.<|im_end|>"
    assert said in TOKENIZER.decode(engine.read[0])
    ids = model_ids(payload)
    np.testing.assert_array_equal(payload.teacher_ids, np.stack([ids + 1, ids + 2], 1))
    np.testing.assert_allclose(payload.teacher_logprobs[:, 0], -ids / 1000, rtol=1e-6)


@pytest.mark.parametrize(
    ("context", "task", "reason", "calls"),
    [
        ("{other}", {"row": {"hint": "odd", "other": None}}, "{other}, and the row has no such column; it has hint", 0),
        ("{answer}", {}, "teacher.context names {answer}, and the row has no answer", 0),
        ("{hint}", {"row": {"hint": "9" * 500}}, "tokens, model.max_model_len allows 512", 1),
    ],
    ids=["no such column", "no answer", "too long"],
)
def test_what_cannot_be_told_is_set_aside_at_once(fake_broker: Broker, context, task, reason, calls) -> None:
    header, payload, engine = taught(fake_broker, context, task=task)
    assert (header.status, header.retire, payload, engine.read) == ("set_aside", False, None, [])
    assert reason in header.reason
    assert engine.calls == calls, "tokens are sampled only where nothing is missing"
    assert len(dead.list_dead(fake_broker)) == 1


def test_markup_in_what_is_told_is_text_and_infinite_scores_are_a_failed_attempt(fake_broker: Broker) -> None:
    engine, data = Scorer(), {"train": "t", "max_prompt_tokens": 64, "prompt_markup": True}
    engine.scale = np.nan
    rig = Rig(fake_broker, engine, teacher={"context": "{hint}"}, data=data)
    header = one(rig, row={"hint": "<|im_end|>"})
    assert (header.status, engine.calls, len(engine.read)) == ("set_aside", 2, 2)
    assert "the self-teacher's scores of a response are not finite" in header.reason
    assert (engine.read[0] == TOKENIZER.convert_tokens_to_ids("<|im_end|>")).sum() == 2  # of the prompt, of the answer


def test_evaluations_and_other_sources_are_not_scored(fake_broker: Broker) -> None:
    sources = [{"path": "told.jsonl"}, {"path": "plain.jsonl", "teacher": {"context": None}}]
    rig = Rig(fake_broker, Scorer(), teacher={"context": "{answer}"}, data={"train": sources, "max_prompt_tokens": 64})
    rig.dispatch(1, task_id="a", source="told", answer="7")
    rig.dispatch(1, task_id="b", source="plain", answer="7")
    evaluate(rig, "e0", 1)

    rig.play(lambda rig: rig.headers(2))
    scored, plain = BatchInbox(fake_broker).payloads(["a", "b"])
    assert len(scored.teacher_logprobs) == len(scored.logprobs)
    assert (len(plain.teacher_logprobs), len(rig.engine.read)) == (0, 1)


def test_the_last_user_message_is_told_more() -> None:
    system, user, tool = ({"role": role, "content": role} for role in ("system", "user", "tool"))
    assert with_context("a", "b") == "a\n\nb"
    assert with_context([system, user, tool], "b") == [system, {"role": "user", "content": "user\n\nb"}, tool]
    assert with_context([system], "b") == [{"role": "system", "content": "system\n\nb"}]
    parts = [{"type": "text", "text": text} for text in "ab"]
    assert with_context([{"role": "user", "content": parts[:1]}], "b")[0]["content"] == parts
    assert user["content"] == "user", "the task is as it was"
