"""A scripted engine, for episodes whose every turn a test decides."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from common.config import Config, EpisodeConfig, parse_config
from common.messages import Task
from generator.chat.prompts import Prompts
from generator.chat.template import ChatTemplate
from generator.engine.engine import Completion
from generator.episode.episode import Episode
from generator.episode.parts import EpisodeParts
from generator.episode.runner import EpisodeRunner
from generator.formats import make_format
from generator.rewards import Outcome, Score, Scorer
from generator.tools import Toolbox
from generator.users import UserTurn, conversation
from launcher.quickstart.tiny_model import build_tokenizer
from tests.support.event_loop import used

TOKENIZER = build_tokenizer()
TEMPLATE = ChatTemplate(TOKENIZER)
END = "<|im_end|>"
PROMPT = [{"role": "system", "content": "be short"}, {"role": "user", "content": "2+2?"}]


def call(name: str, arguments: str) -> str:
    """A tool call in Hermes format."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def configured(*sections: dict[str, Any], **episode: Any) -> Config:
    """The smallest configuration, with these sections and these settings of the episode."""
    tree = {"model": {"path": "m"}, "data": {"train": "t"}, "episode": {"max_assistant_turns": 3} | episode}
    for section in sections:
        tree |= section
    return parse_config(tree)


def tool_texts(episode: Episode) -> list[str]:
    return [entry.text for entry in episode.transcript.entries if entry.role == "tool"]


def talk(user: Any, *replies: str, row: dict[str, Any] | None = None, **limits: Any) -> list[UserTurn]:
    """The turns of a simulated user to an assistant that gives these replies; the reference answer is 4."""

    async def scene() -> list[UserTurn]:
        messages, turns = list(PROMPT), []
        async with conversation(user, "e", row=row or {}, answer="4", messages=PROMPT, **limits) as talking:
            for reply in replies:
                messages.append({"role": "assistant", "content": reply})
                turns.append(await talking.respond(messages))
                messages.append({"role": "user", "content": turns[-1].text})
        return turns

    return asyncio.run(scene())


def scored(config: Config, *outcomes: Outcome) -> list[Score]:
    async def each(scorer: Scorer) -> list[Score]:
        return [await scorer.score(outcome) for outcome in outcomes]

    return used(lambda: Scorer(config), each)


class ScriptedEngine:
    """Plays the given texts, one a turn, each by a newer version, up to its first stop token; or whole completions."""

    def __init__(self, *turns: str | Completion, tokenizer: Any = TOKENIZER) -> None:
        self.turns = list(turns)
        self.tokenizer = tokenizer
        self.prompts: list[str] = []
        self.limits: list[dict[str, Any]] = []
        self.version = 0

    async def generate(self, prompt_ids: Any, *, max_tokens: int, **limits: Any) -> Completion:
        self.prompts.append(self.tokenizer.decode(prompt_ids))
        self.limits.append(limits)
        turn = self.turns.pop(0)
        if isinstance(turn, Completion):
            return turn
        ids = np.asarray(self.tokenizer.encode(turn, add_special_tokens=False), np.int32)
        stops = np.flatnonzero(np.isin(ids, [self.tokenizer.eos_token_id, *limits.get("stop_token_ids", ())]))
        ids = ids[: stops[0] + 1] if len(stops) else ids
        stopped = len(ids) <= max_tokens
        ids = ids[:max_tokens]
        self.version += 1
        versions = [(self.version, 0, len(ids))]
        logprobs, reason = np.full(len(ids), -self.version, np.float32), "stop" if stopped else "length"
        return Completion(ids, logprobs, versions, reason, prefix_epoch=limits.get("prefix_epoch", self.version))


def runner(
    engine: Any,
    toolbox: Toolbox | None = None,
    user: Any = None,
    max_model_len: int = 2000,
    template: ChatTemplate | None = None,
    keep_prefix: str = "none",
    **changes: Any,
) -> EpisodeRunner:
    """A runner around an engine: three turns, 900 tokens and the calculator, unless told otherwise."""
    episode = EpisodeConfig(
        **({"max_assistant_turns": 3, "max_response_tokens": 900, "tools": ["calculator"]} | changes)
    )
    base = parse_config({"model": {"path": "m"}, "data": {"train": "t", "max_prompt_tokens": 100}})
    model = base.model.model_copy(update={"max_model_len": max_model_len})
    generator = base.generator.model_copy(update={"keep_prefix": keep_prefix})
    config = base.model_copy(update={"model": model, "episode": episode, "generator": generator})
    parts = EpisodeParts(config if toolbox is None else base)
    parts.call_format = make_format(config.episode.call_format)
    parts.toolbox, parts.user = toolbox or parts.toolbox, user
    made = EpisodeRunner(config, engine, parts)
    # By default the tools are not described in the prompt, so that it stays short.
    made.template = template or TEMPLATE
    made.prompts = Prompts(made.template, config.data)
    return made


def play(engine: Any, prompt: Any = "What is 12*7+5?", **changes: Any) -> Episode:
    return asyncio.run(runner(engine, **changes).run(Task(task_id="t", prompt_id="p", prompt=prompt)))


class Blocking:
    """Waits until it is released; `entered` is set once it waits."""

    def __init__(self) -> None:
        self.entered, self.released = asyncio.Event(), asyncio.Event()

    async def wait(self) -> None:
        self.entered.set()
        await self.released.wait()


def completion(ids: Any, reason: str = "stop", version: int = 0) -> Completion:
    ids = np.asarray(ids, np.int32)
    return Completion(ids, np.full(len(ids), -0.5, np.float32), [(version, 0, len(ids))], reason)
