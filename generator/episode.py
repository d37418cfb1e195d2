"""What has happened in one episode, token by token and turn by turn."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from common.payload import Payload
from generator.engine.engine import Completion
from generator.text.transcript import Transcript


@dataclass
class Episode:
    """Ids, spans, log-probs and versions, which stay aligned whatever the turns bring, and what was said.

    Attributes:
        spans: half-open ranges of what the model sampled, one a turn.
        versions: (weight version, start, end) over the sampled tokens.
        length: tokens in all.
        sampled: tokens the model sampled.
        turns: of the assistant.
        user_turns: of tools (all calls of an assistant turn are answered in one) and of the simulated user.
        tool_calls: calls answered, with a result or an error text.
        tool_errors: those of them that were answered with an error text.
        reason: why it ended; see `generator.episode_runner`.
        answer: text of the model's last turn, if it ended that itself and called nothing; else empty.
        response: text of everything behind the prompt, without special tokens; known at the end.
    """

    prompt_ids: np.ndarray
    transcript: Transcript
    spans: list[tuple[int, int]] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    versions: list[tuple[int, int, int]] = field(default_factory=list)
    length: int = 0
    sampled: int = 0
    turns: int = 0
    user_turns: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    reason: str = ""
    answer: str = ""
    response: str = ""

    def __post_init__(self) -> None:
        self._ids = np.empty(0, np.int32)
        self.append(self.prompt_ids)

    def append(self, token_ids: np.ndarray) -> None:
        """Tokens the model did not sample: the prompt, results of tools, what the user says."""
        start, self.length = self.length, self.length + len(token_ids)
        if self.length > len(self._ids):
            grown = np.empty(2 * self.length, np.int32)
            grown[:start] = self._ids[:start]
            self._ids = grown
        self._ids[start : self.length] = token_ids

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
        """All token ids, int32 [T]; a view that later turns do not change."""
        return self._ids[: self.length]

    def payload(self) -> Payload:
        """The episode as the learner reads it."""
        return Payload(
            self.tokens(),
            np.asarray(self.spans, np.int32).reshape(-1, 2),
            np.concatenate(self.logprobs),
            np.asarray(self.versions, np.int32).reshape(-1, 3),
        )
