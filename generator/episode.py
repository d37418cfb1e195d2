"""One episode: turns and tool calls from a prompt to a reward. Tokens in, tokens out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.config import EpisodeConfig
from common.messages import Task
from common.payload import Payload
from generator.engine import Completion, Engine
from generator.template import ChatTemplate
from generator.tool_calls import find_calls
from generator.tools import Toolbox


class PromptTooLong(Exception):
    """The prompt leaves no room in the limits it was given."""


@dataclass
class Episode:
    """What has happened so far; ids, spans, log-probs and versions stay aligned whatever the turns bring."""

    prompt_ids: np.ndarray
    pieces: list[np.ndarray] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    versions: list[tuple[int, int, int]] = field(default_factory=list)
    length: int = 0
    sampled: int = 0
    turns: int = 0
    tool_calls: int = 0
    reason: str = ""
    answer: str = ""

    def __post_init__(self) -> None:
        self.append(self.prompt_ids)

    def append(self, token_ids: np.ndarray) -> None:
        """Tokens the model did not sample: prompt and tool results."""
        self.pieces.append(token_ids)
        self.length += len(token_ids)

    def extend(self, turn: Completion) -> None:
        """Tokens the model sampled."""
        self.spans.append((self.length, self.length + len(turn.token_ids)))
        self.logprobs.append(turn.logprobs)
        for version, start, end in turn.versions:
            if self.versions and self.versions[-1][0] == version:
                self.versions[-1] = (version, self.versions[-1][1], self.sampled + end)
            else:
                self.versions.append((version, self.sampled + start, self.sampled + end))
        self.append(turn.token_ids)
        self.sampled += len(turn.token_ids)
        self.turns += 1

    def tokens(self) -> np.ndarray:
        """All token ids, int32 [T]."""
        return np.concatenate(self.pieces)

    def payload(self) -> Payload:
        """The episode as the learner reads it."""
        return Payload(
            self.tokens(),
            np.asarray(self.spans, np.int32).reshape(-1, 2),
            np.concatenate(self.logprobs),
            np.asarray(self.versions, np.int32).reshape(-1, 3),
        )


@dataclass(frozen=True)
class EpisodeRunner:
    """Plays episodes by one set of rules."""

    engine: Engine
    template: ChatTemplate
    toolbox: Toolbox
    config: EpisodeConfig
    max_model_len: int
    max_prompt_tokens: int
    system_prompt: str | None = None

    async def play(self, task: Task, **sampling: Any) -> Episode:
        """Answer one task; `sampling` goes to the engine.

        Raises:
            PromptTooLong: the prompt is longer than `data.max_prompt_tokens`.
        """
        episode = Episode(self.template.prompt(self._messages(task)))
        if episode.length > self.max_prompt_tokens:
            raise PromptTooLong(
                f"prompt has {episode.length} tokens, data.max_prompt_tokens allows {self.max_prompt_tokens}"
            )
        limit = min(self.max_model_len, episode.length + self.config.max_response_tokens)
        while True:
            turn = await self.engine.generate(episode.tokens(), max_tokens=limit - episode.length, **sampling)
            episode.extend(turn)
            calls = find_calls(self.template.text(turn.token_ids)) if turn.finish_reason == "stop" else []
            if turn.finish_reason != "stop":
                episode.reason = "length"
            elif not calls:
                episode.reason = "stop"
            elif episode.turns == self.config.max_assistant_turns:
                episode.reason = "max_assistant_turns"
            if not episode.reason:
                episode.tool_calls += len(calls)
                results = self.template.tool_results(await self.toolbox.run(calls))
                if episode.length + len(results) < limit:
                    episode.append(results)
                    continue
                episode.reason = "length"
            # An answer is a turn the model ended by itself and that asks for nothing more.
            episode.answer = self.template.answer(turn.token_ids) if episode.reason == "stop" else ""
            return episode

    def _messages(self, task: Task) -> list[dict[str, Any]]:
        if not isinstance(task.prompt, str):
            return task.prompt
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [*system, {"role": "user", "content": task.prompt}]
