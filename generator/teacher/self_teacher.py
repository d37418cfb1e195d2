"""The policy as its own teacher: it scores its samples again, with extra context in the prompt (docs/teacher.md)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from common.answers import answer_text, normal_answer
from common.config import Config
from common.config.teacher import context_pieces
from common.messages import Failure, Task
from common.payload import Payload
from generator.chat.template import ChatTemplate, Message
from generator.concurrency import LONG_TEXT, LONG_TOKENS, offload
from generator.engine.engine import EngineFailed
from generator.episode.episode import Episode
from generator.rewards import Score
from generator.tools.toolbox import encodable


class NoTeacherPrompt(Exception):
    """The teacher's prompt of a task cannot be made; another attempt would not help."""

    failure = Failure.TEACHER_FAILED


class SelfTeacher:
    """Scores an episode of one row again, with the filled-in `teacher.context` after its prompt.

    Args:
        engine: computes the log-probs; see `Engine.logprobs`.
        template: renders the episodes' prompts.
    """

    def __init__(self, config: Config, engine: Any, template: ChatTemplate) -> None:
        assert config.teacher.context is not None
        self._pieces = context_pieces(config.teacher.context)
        self._top_k, self._data = config.teacher.top_k, config.data
        self._max_model_len = config.model.max_model_len
        self._engine, self._template = engine, template

    def check(self, task: Task) -> None:
        """Raise `NoTeacherPrompt` if the task's row has no value for a field of the context."""
        for _, name in self._pieces:
            if name == "answer" and task.answer is None:
                raise NoTeacherPrompt("teacher.context names {answer}, and the row has no answer")
            if name not in ("", "answer", "feedback") and task.row.get(name) is None:
                columns = ", ".join(column for column, value in task.row.items() if value is not None)
                raise NoTeacherPrompt(
                    f"teacher.context names {{{name}}}, and the row has no such column; it has {columns or 'no others'}"
                )

    async def taught(self, task: Task, episode: Episode, score: Score, payload: Payload) -> Payload:
        """The payload with log-probs of its tokens, given the context too, under the engine's current weights.

        Raises:
            NoTeacherPrompt: prompt, context and response exceed `model.max_model_len`.
            EngineDied, EngineFailed: see the classes.
        """
        (row,) = episode.rows
        context = self._context(task, episode, score)
        long = row.length > LONG_TOKENS or len(context) > LONG_TEXT
        prompt_ids = await offload(long, self._prompt, task, context)
        end = int(payload.model_spans[-1, 1])  # what comes after the model's last token is not scored
        token_ids = np.concatenate([prompt_ids, payload.token_ids[len(row.prompt_ids) : end]])
        if len(token_ids) > self._max_model_len:
            raise NoTeacherPrompt(
                f"prompt, teacher.context and response have {len(token_ids)} tokens, model.max_model_len allows "
                f"{self._max_model_len}"
            )
        at = np.flatnonzero(payload.mask()) + (len(prompt_ids) - len(row.prompt_ids))
        if self._top_k:
            likeliest, logprobs = await self._engine.logprobs(token_ids, self._top_k)
            scored = replace(payload, teacher_logprobs=logprobs[at], teacher_ids=likeliest[at])
        else:
            scored = replace(payload, teacher_logprobs=(await self._engine.logprobs(token_ids))[at, None])
        if not np.isfinite(scored.teacher_logprobs).all():
            raise EngineFailed("the self-teacher's scores of a response are not finite")
        return scored

    def _prompt(self, task: Task, context: str) -> np.ndarray:
        # Markup in the context is text, even if markup in the prompts counts.
        prompt = with_context(task.prompt, self._template.tokens.hide(encodable(context)))
        return self._template.prompt(prompt, self._data.system_prompt, markup=self._data.prompt_markup)

    def _context(self, task: Task, episode: Episode, score: Score) -> str:
        values = {name: answer_text(value) for name, value in task.row.items()}
        values |= {"answer": answer_text(normal_answer(task.answer)), "feedback": feedback(episode, score), "": ""}
        return "".join(text + values[name] for text, name in self._pieces)


def feedback(episode: Episode, score: Score) -> str:
    """The result of an episode as text: its reward, the parts of it, and what a simulated user said last."""
    parts = ", ".join(f"{name} {value:g}" for name, value in score.parts.items())
    lines = [f"reward: {score.value:g}" + (f" ({parts})" if len(score.parts) > 1 else "")]
    lines += [entry.text for entry in episode.transcript.entries if entry.role == "user" and entry.text][-1:]
    return "\n".join(lines)


def with_context(prompt: str | list[Message], context: str) -> str | list[Message]:
    """The prompt with a context after its last user message, which every chat template shows."""
    if isinstance(prompt, str):
        return f"{prompt}\n\n{context}"
    last = max((i for i, message in enumerate(prompt) if message.get("role") == "user"), default=len(prompt) - 1)
    content: Any = prompt[last].get("content")
    if isinstance(content, list):
        content = [*content, {"type": "text", "text": context}]
    else:
        content = f"{content or ''}\n\n{context}"
    return [*prompt[:last], {**prompt[last], "content": content}, *prompt[last + 1 :]]
