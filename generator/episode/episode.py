"""One episode: its tokens, its transcript, and the record of it that people read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from common.messages import Ending, Task
from common.payload import Payload, pack_record
from generator.chat.template import ChatTemplate, Message
from generator.engine.engine import Completion


@dataclass(slots=True)
class TranscriptEntry:
    """One turn of the assistant or the user, or one tool call with its result."""

    role: str  # assistant, tool or user
    text: str  # what was said; for a tool call, its result as the model saw it
    # For a tool call `name`, `arguments` and, if it failed, `error`; for a user `reward` and `metadata`.
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Transcript:
    """What was said after the prompt, in order; tool calls follow the assistant's turn that made them."""

    prompt: list[Message]
    entries: list[TranscriptEntry] = field(default_factory=list)

    def add(self, role: str, text: str, **details: Any) -> None:
        """Append an entry; assistant text has no special tokens, user text is empty if the user ends the episode."""
        self.entries.append(TranscriptEntry(role, text, details))

    def messages(self) -> list[Message]:
        """The conversation as chat messages, prompt first."""
        return [*self.prompt, *({"role": entry.role, "content": entry.text} for entry in self.entries)]

    def turn_rewards(self) -> list[float]:
        """The user's rewards, one for each user turn."""
        return [entry.details["reward"] for entry in self.entries if "reward" in entry.details]

    def rewards_by_assistant_turn(self) -> list[float]:
        """The user's rewards, one for each assistant turn: 0 if the user was not asked."""
        rewards: list[float] = []
        for entry in self.entries:
            if entry.role == "assistant":
                rewards.append(0.0)
            elif entry.role == "user":
                rewards[-1] += entry.details["reward"]
        return rewards


@dataclass(slots=True)
class EpisodeStep:
    """The current step of an episode."""

    name: str
    ends: float  # time at which its limits end it, by `time.monotonic`
    late: float = 0.0  # seconds by which it has exceeded them


@dataclass
class TokenRow:
    """Tokens in the order in which the model saw them, with the log-probs and versions of those it sampled."""

    prompt_ids: np.ndarray
    spans: list[tuple[int, int]] = field(default_factory=list)  # half-open ranges of sampled tokens, one per turn
    logprobs: list[np.ndarray] = field(default_factory=list)  # of each turn's tokens
    versions: list[tuple[int, int, int]] = field(default_factory=list)  # (version, start, end) over the sampled tokens
    experts: list[np.ndarray] = field(default_factory=list)  # of the first tokens, in pieces; see `Completion.experts`
    length: int = 0  # number of all tokens
    sampled: int = 0  # number of tokens that the model sampled

    def __post_init__(self) -> None:
        self._ids = np.empty(0, np.int32)
        self.append(self.prompt_ids)

    def append(self, token_ids: np.ndarray) -> None:
        """Add tokens that the model did not sample: the prompt, results of tools, the user's messages."""
        start, self.length = self.length, self.length + len(token_ids)
        if self.length > len(self._ids):
            grown = np.empty(2 * self.length, np.int32)
            grown[:start] = self._ids[:start]
            self._ids = grown
        self._ids[start : self.length] = token_ids

    def extend(self, turn: Completion) -> None:
        """Add tokens that the model sampled."""
        self.spans.append((self.length, self.length + len(turn.token_ids)))
        self.logprobs.append(turn.logprobs)
        for version, start, end in turn.versions:
            if self.versions and self.versions[-1][0] == version:
                self.versions[-1] = (version, self.versions[-1][1], self.sampled + end)
            else:
                self.versions.append((version, self.sampled + start, self.sampled + end))
        if turn.experts is not None:
            self.experts.append(turn.experts)
        self.append(turn.token_ids)
        self.sampled += len(turn.token_ids)

    @property
    def routed(self) -> int:
        """Number of leading tokens whose experts are known."""
        return sum(map(len, self.experts))

    def tokens(self) -> np.ndarray:
        """All token ids, int32 [T]; a view that later turns do not change."""
        return self._ids[: self.length]

    def response_ids(self) -> np.ndarray:
        """Token ids of everything after the prompt, int32 [T]."""
        return self.tokens()[len(self.prompt_ids) :]


@dataclass
class Episode:
    """The rows of one episode, which are trained on as one sample, and its transcript."""

    rows: list[TokenRow]  # one for each sequence of turns that continue each other; SPO's own loop makes one
    transcript: Transcript
    user_turns: int = 0  # turns of tools (one answers all calls of an assistant turn) and of the simulated user
    tool_calls: int = 0  # calls answered, with a result or an error text
    tool_errors: int = 0  # calls answered with an error text
    reason: Ending = Ending.OTHER  # how it ended
    # Text of the model's last turn, if the model ended it itself and called no tool, or the answer that an agent gave;
    # else empty.
    answer: str = ""
    response: str = ""  # text of everything after the prompt, without special tokens; set at the end
    opened: str = ""  # tags, such as <think>, with which the template begins the assistant's turns
    reward: float | None = None  # an agent's own, or that of its failure
    failure: str = ""  # an agent's failure that is attributed to the model
    # What became of each request of an agent; see `AgentSession.requests_made`.
    requests: list[dict[str, Any]] = field(default_factory=list)
    retries: int = 0  # an agent's requests that got the reply to an earlier one again
    refusals: list[dict[str, Any]] = field(default_factory=list)  # of an agent's requests; see `Refusals.records`
    refused: int = 0  # number of refused requests, not counting those beyond a limit
    lost: str = ""  # which of an agent's requests does not continue an earlier one, and why; see `agents.lost`
    folder: Path | None = None  # an agent's files, until the episode is scored
    # How long the start of an agent's container, the agent and the grading took, by these names.
    seconds: dict[str, float] = field(default_factory=dict)
    step: EpisodeStep | None = None  # the current step, from the first turn to the last

    @contextmanager
    def measured(self, part: str) -> Iterator[None]:
        """Add the time that the block takes to `seconds`."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[part] = time.monotonic() - began

    @property
    def length(self) -> int:
        """Number of all tokens."""
        return sum(row.length for row in self.rows)

    @property
    def sampled(self) -> int:
        """Number of tokens that the model sampled."""
        return sum(row.sampled for row in self.rows)

    @property
    def turns(self) -> int:
        return sum(len(row.spans) for row in self.rows)

    @property
    def versions(self) -> list[int]:
        """Weight versions that sampled tokens."""
        return [version for row in self.rows for version, _, _ in row.versions]

    @property
    def row_tokens(self) -> list[int]:
        """Number of tokens in each row; empty if there is only one row."""
        return [row.length for row in self.rows] if len(self.rows) > 1 else []

    def payload(self) -> Payload:
        """The episode as the learner reads it: its rows, one after another."""
        rows = self.rows
        tokens = accumulate((row.length for row in rows), initial=0)
        sampled = accumulate((row.sampled for row in rows), initial=0)
        spans = [(at + start, at + end) for row, at in zip(rows, tokens, strict=False) for start, end in row.spans]
        versions = [
            (version, at + start, at + end)
            for row, at in zip(rows, sampled, strict=False)
            for version, start, end in row.versions
        ]
        experts: dict[str, np.ndarray] = {}
        if pieces := [piece for row in rows for piece in row.experts]:
            routed = np.asarray([row.routed for row in rows], np.int32)
            experts = {"experts": np.concatenate(pieces), "expert_lengths": routed}
        return Payload(
            np.concatenate([row.tokens() for row in rows]),
            np.asarray(spans, np.int32).reshape(-1, 2),
            np.concatenate([logprobs for row in rows for logprobs in row.logprobs]),
            np.asarray(versions, np.int32).reshape(-1, 3),
            np.asarray(self.row_tokens, np.int32),
            **experts,
        )


def make_record(task: Task, episode: Episode, template: ChatTemplate, finished: bool = True) -> bytes:
    """Pack an episode for people to read, with its tokens if `task.keep` asks for them and it is `finished`.

    Takes milliseconds for a long episode, so keep it off the event loop.
    """
    entries = episode.transcript.entries
    record: dict[str, Any] = {
        "input": task.prompt,
        "output": "\n".join(template.text(row.response_ids()) for row in episode.rows),
        "gts": task.answer,
        "messages": [{"role": entry.role, "content": entry.text, **entry.details} for entry in entries],
    }
    optional = ("opened", "lost", "refusals", "requests")
    record |= {name: value for name in optional if (value := getattr(episode, name))}
    if episode.requests and finished:  # neither the messages nor the header have what an agent gave
        record["scored"] = {"answer": episode.answer, "reward": episode.reward, "failure": episode.failure}
    if task.keep and finished:
        payload = episode.payload()
        record |= {
            "token_ids": payload.token_ids,
            "model_spans": payload.model_spans,
            "logprobs": payload.logprobs.astype(np.float64).round(5),
            "version_spans": payload.version_spans,
        }
        if len(episode.rows) > 1:
            record["row_lengths"] = payload.row_lengths
        if len(payload.experts):
            record["experts"] = payload.expert_sums()
    return pack_record(record)
