"""Engines that only pretend, for episodes whose every turn a test decides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from common.config import EpisodeConfig
from common.messages import Task
from generator.engine.engine import Completion
from generator.episode import Episode
from generator.episode_runner import EpisodeRunner
from generator.text.template import ChatTemplate
from generator.tools import Toolbox
from launcher.quickstart.tiny_model import build_tokenizer

TOKENIZER = build_tokenizer()
TEMPLATE = ChatTemplate(TOKENIZER)
END = "<|im_end|>"


def call(name: str, arguments: str) -> str:
    """A tool call in Hermes format."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


class ScriptedEngine:
    """Says what it was told to, a turn at a time; each turn by a newer version."""

    def __init__(self, *turns: str, tokenizer: Any = TOKENIZER) -> None:
        self.turns = list(turns)
        self.tokenizer = tokenizer
        self.prompts: list[str] = []
        self.limits: list[dict[str, Any]] = []
        self.version = 0

    async def generate(self, prompt_ids: Any, *, max_tokens: int, **limits: Any) -> Completion:
        self.prompts.append(self.tokenizer.decode(prompt_ids))
        self.limits.append(limits)
        ids = np.asarray(self.tokenizer.encode(self.turns.pop(0), add_special_tokens=False), np.int32)
        stopped = len(ids) <= max_tokens
        ids = ids[:max_tokens]
        self.version += 1
        versions = [(self.version, 0, len(ids))]
        return Completion(ids, np.full(len(ids), -self.version, np.float32), versions, "stop" if stopped else "length")


def runner(
    engine: Any, template: ChatTemplate = TEMPLATE, toolbox: Toolbox | None = None, **changes: Any
) -> EpisodeRunner:
    """Rules around an engine: three turns, 900 tokens and the calculator, unless told otherwise."""
    user = changes.pop("user", None)
    config = EpisodeConfig(
        **({"max_assistant_turns": 3, "max_response_tokens": 900, "tools": ["calculator"]} | changes)
    )
    return EpisodeRunner(engine, template, toolbox or Toolbox(config), config, 2000, 100, user=user)


def play(engine: Any, prompt: Any = "What is 12*7+5?", **changes: Any) -> Episode:
    """One episode."""
    return asyncio.run(runner(engine, **changes).play(Task(task_id="t", prompt_id="p", prompt=prompt)))


class Blocking:
    """Something that waits until it is let go; `entered` says that it waits."""

    def __init__(self) -> None:
        self.entered, self.released = asyncio.Event(), asyncio.Event()

    async def wait(self) -> None:
        self.entered.set()
        await self.released.wait()


def completion(ids: Any, reason: str = "stop", version: int = 0) -> Completion:
    """A turn of one version."""
    ids = np.asarray(ids, np.int32)
    return Completion(ids, np.full(len(ids), -1.0, np.float32), [(version, 0, len(ids))], reason)


Answer = Callable[..., Completion]
