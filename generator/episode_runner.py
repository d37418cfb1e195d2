"""One episode: turns of the model, of tools and of a simulated user, from a prompt to its end. Tokens in, tokens out.

    PENDING -> GENERATING -> {TOOL, USER} -> GENERATING -> ... -> DONE

How it ended, `Episode.reason`:

- `stop`: the model ended its turn, called no tool, and no user answers;
- `user`: the simulated user ended the conversation;
- `length`: `episode.max_response_tokens` or `model.max_model_len` is reached, or the next turn does not fit;
- `max_assistant_turns`, `max_user_turns`: a turn of tools or of the user would follow, and no more are allowed.
  A call in the last allowed assistant turn is not run; an answer in it is put to the user, for its reward alone;
- `max_seconds`: `episode.max_seconds` have passed. A turn that is being generated is cut at its newest token; tools
  and users under way end first, within limits of their own, since only then is it known that nothing has failed.

An episode that cannot go on for reasons that are not the model's has no ending but an exception.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from enum import Enum, auto
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from common.config import Config, EpisodeConfig
from common.messages import Task
from generator.concurrency import offload
from generator.engine.engine import Completion, Engine, EngineFailed
from generator.episode import Episode
from generator.episode_parts import EpisodeParts
from generator.formats import CallFormat, ToolCall, make_format
from generator.text.template import ChatTemplate, Message
from generator.text.transcript import Transcript
from generator.tools import Toolbox, ToolSession
from generator.tools.text import encodable
from generator.users import Conversation, UserSimulator, conversation


class PromptTooLong(Exception):
    """The prompt leaves no room in the limits it was given."""


class State(Enum):
    """What an episode waits for."""

    PENDING = auto()
    GENERATING = auto()
    TOOL = auto()
    USER = auto()
    DONE = auto()


class EpisodeRunner:
    """Plays episodes by one set of rules."""

    def __init__(
        self,
        engine: Engine,
        template: ChatTemplate,
        toolbox: Toolbox,
        config: EpisodeConfig,
        max_model_len: int,
        max_prompt_tokens: int,
        system_prompt: str | None = None,
        call_format: CallFormat | None = None,
        user: UserSimulator | None = None,
    ) -> None:
        self.engine, self.template, self.toolbox, self.config = engine, template, toolbox, config
        self.max_model_len, self.max_prompt_tokens, self.system_prompt = max_model_len, max_prompt_tokens, system_prompt
        self.format = call_format or make_format(config.call_format)
        self.user = user
        self._names = count()

    async def play(self, task: Task, begun: Callable[[Episode], None] | None = None, **sampling: Any) -> Episode:
        """Answer one task; `begun` gets the episode as soon as there is one, `sampling` goes to the engine.

        Raises:
            PromptTooLong: the prompt is longer than `data.max_prompt_tokens`.
            Exception: the engine, a tool's machinery or the user failed; the episode says nothing about the model.
        """
        if self.toolbox.tools and self.format.stop:
            sampling["stop"] = self.format.stop
        if self.template.end_id != self.template.eos_id:
            sampling["stop_token_ids"] = (self.template.end_id,)
        async with AsyncExitStack() as stack:
            return await _Play(self, task, begun, sampling, stack, f"{task.task_id}:{next(self._names)}").run()

    def messages(self, task: Task) -> list[Message]:
        """The prompt as chat messages."""
        if not isinstance(task.prompt, str):
            return task.prompt
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [*system, {"role": "user", "content": task.prompt}]

    def read(self, token_ids: np.ndarray) -> tuple[str, list[ToolCall]]:
        """Text of an assistant turn without special tokens, and its calls, checked."""
        # Tags may be special tokens.
        written, text = self.template.turn(token_ids)
        return text, self.toolbox.checked(self.format.find(written)) if self.toolbox.tools else []


class _Play:
    """One episode being played."""

    def __init__(
        self,
        rules: EpisodeRunner,
        task: Task,
        begun: Callable[[Episode], None] | None,
        sampling: dict[str, Any],
        stack: AsyncExitStack,
        name: str,
    ) -> None:
        self.rules, self.task, self.sampling, self.stack, self.name = rules, task, sampling, stack, name
        self.begun = begun
        self.started = time.monotonic()
        self.tools: ToolSession = rules.toolbox.session(task)
        stack.push_async_callback(self.tools.close)
        self.user: Conversation | None = None
        self.calls: list[ToolCall] = []
        self.limit = 0  # tokens

    async def run(self) -> Episode:
        state = State.PENDING
        steps = {
            State.PENDING: self._begin,
            State.GENERATING: self._generate,
            State.TOOL: self._run_tools,
            State.USER: self._ask_user,
        }
        while state is not State.DONE:
            state = await steps[state]()
        response = self.episode.tokens()[len(self.episode.prompt_ids) :]
        long = len(response) > offload.LONG_TOKENS
        self.episode.response = await offload.run(long, self.rules.template.plain, response)
        return self.episode

    async def _begin(self) -> State:
        rules, config = self.rules, self.rules.config
        messages = rules.messages(self.task)
        long = sum(len(str(message.get("content"))) for message in messages) > offload.LONG_TEXT
        self.episode = Episode(await offload.run(long, rules.template.prompt, messages), Transcript(messages))
        if self.episode.length > rules.max_prompt_tokens:
            raise PromptTooLong(
                f"prompt has {self.episode.length} tokens, data.max_prompt_tokens allows {rules.max_prompt_tokens}"
            )
        if self.begun is not None:
            self.begun(self.episode)
        self.limit = min(rules.max_model_len, self.episode.length + config.max_response_tokens)
        if rules.user is not None:
            told = {"row": self.task.row, "answer": self.task.answer, "messages": messages}
            self.user = await self.stack.enter_async_context(conversation(rules.user, self.name, **told))
        return State.GENERATING

    async def _generate(self) -> State:
        episode, limits = self.episode, dict(self.sampling)
        if self.rules.config.max_seconds is not None:
            limits["seconds"] = self._seconds_left()
            if limits["seconds"] <= 0 and episode.turns:
                return self._end("max_seconds")
        room = self.limit - episode.length
        turn = await self.rules.engine.generate(episode.tokens(), max_tokens=room, **limits)
        if len(turn.token_ids) == 0:
            if not episode.turns:
                raise EngineFailed("the engine had no token within episode.max_seconds")
            return self._end("max_seconds")
        text, self.calls = await offload.run(len(turn.token_ids) > offload.LONG_TOKENS, self._take, turn)
        episode.transcript.assistant(text)
        return self._after(turn, text)

    def _take(self, turn: Completion) -> tuple[str, list[ToolCall]]:
        self.episode.extend(turn)
        return self.rules.read(turn.token_ids)

    def _after(self, turn: Completion, text: str) -> State:
        """What follows an assistant turn."""
        episode = self.episode
        if turn.finish_reason != "stop":
            return self._end("max_seconds" if turn.finish_reason == "time" else "length")
        if not self.calls:
            episode.answer = text.strip()
            if self.user is None:
                return self._end("stop")
        # An answer that nothing may follow is put to the user all the same: he alone knows what it is worth.
        limit = self._limit_reached()
        if limit is not None and (self.calls or not getattr(self.rules.user, "rewards", True)):
            return self._end(limit)
        return State.TOOL if self.calls else State.USER

    def _limit_reached(self) -> str | None:
        """The limit that forbids another turn of tools or of the user, if there is one."""
        episode, config = self.episode, self.rules.config
        if episode.turns == config.max_assistant_turns:
            return "max_assistant_turns"
        if episode.user_turns == config.max_user_turns:
            return "max_user_turns"
        if config.max_seconds is not None and self._seconds_left() <= 0:
            return "max_seconds"
        return None

    async def _run_tools(self) -> State:
        results = await self.tools.run(self.calls)
        self.episode.tool_calls += len(results)
        for call, result in zip(self.calls, results, strict=True):
            self.episode.transcript.tool(call.name, call.arguments, result.text, error=result.failed)
        texts = [result.text for result in results]
        template, wrap = self.rules.template, self.rules.format.wrap
        if wrap is not None:
            return await self._go_on(texts, partial(template.inside, texts, wrap))
        messages = [
            {"role": "tool", "name": call.name or "unknown", "content": text}
            for call, text in zip(self.calls, texts, strict=True)
        ]
        return await self._go_on(texts, partial(template.between, messages))

    async def _ask_user(self) -> State:
        assert self.user is not None
        said = await self.user.respond(self.episode.transcript.messages())
        ending = "user" if said.stop else self._limit_reached()
        self.episode.transcript.user(said.text if ending is None else "", said.reward, said.metadata)
        if ending is not None:
            return self._end(ending)
        message = {"role": "user", "content": encodable(said.text)}
        return await self._go_on([said.text], partial(self.rules.template.between, [message]))

    async def _go_on(self, texts: list[str], encode: partial[np.ndarray]) -> State:
        """Append what was answered and let the model go on, if there is room for both."""
        token_ids = await offload.run(sum(map(len, texts)) > offload.LONG_TEXT, encode)
        episode = self.episode
        if episode.length + len(token_ids) >= self.limit:
            return self._end("length")
        episode.append(token_ids)
        episode.user_turns += 1
        # Whatever the model has said is no answer any more.
        episode.answer = ""
        return State.GENERATING

    def _seconds_left(self) -> float:
        return self.started + (self.rules.config.max_seconds or 0.0) - time.monotonic()

    def _end(self, reason: str) -> State:
        self.episode.reason = reason
        return State.DONE


def make_runner(config: Config, engine: Engine, tokenizer: Any, parts: EpisodeParts | None = None) -> EpisodeRunner:
    """The rules a configuration sets; raises `UserError` where the chat template does not fit them."""
    parts = parts or EpisodeParts(config)
    toolbox, call_format = parts.toolbox, parts.call_format
    # What a template says about calls holds for those whose results it renders.
    template = ChatTemplate(tokenizer, toolbox.schemas() if call_format.wrap is None else None)
    if toolbox.tools and call_format.wrap is None:
        template.require("tool", "episode.tools", "or episode.call_format=code")
    if parts.user is not None:
        template.require("user", "episode.user", "or no simulated user")
    return EpisodeRunner(
        engine,
        template,
        toolbox,
        config.episode,
        config.model.max_model_len,
        config.data.max_prompt_tokens,
        config.data.system_prompt,
        call_format,
        parts.user,
    )
