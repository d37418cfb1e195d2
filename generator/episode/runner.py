"""One episode: turns of the model, of tools and of a simulated user, from a prompt to its end. Tokens in, tokens out.

    GENERATING -> {TOOL, USER} -> GENERATING -> ... -> DONE

A call in the last allowed assistant turn is not run; an answer in it still goes to the user, but only for its reward.
After `episode.max_seconds` a turn that is being generated is cut at its newest token; running tools and users finish
first, within their own limits, because only then is it known whether they failed.

If an episode cannot continue for a reason that is not the model's, an exception is raised.
"""

from __future__ import annotations

import math
import time
from contextlib import AsyncExitStack
from enum import Enum, auto
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from common.config import Config
from common.messages import Ending, Task
from generator.chat.prompts import Prompts, PromptTooLong
from generator.chat.template import Message, as_messages
from generator.concurrency import LONG_TEXT, LONG_TOKENS, offload
from generator.engine.engine import Completion, Engine, EngineFailed
from generator.episode.episode import Episode, EpisodeStep, TokenRow, Transcript
from generator.episode.parts import EpisodeParts
from generator.formats import THINK, ToolCall, without_thinking
from generator.tools import EpisodeTools
from generator.tools.toolbox import encodable
from generator.users import Conversation, conversation


async def prepared(task: Task, prompts: Prompts) -> Episode:
    """Make an episode that holds only its prompt; raises `UnusablePrompt`."""
    messages, limit = as_messages(task.prompt, prompts.data.system_prompt), prompts.data.max_prompt_tokens
    long = sum(len(str(message.get("content"))) for message in messages) > LONG_TEXT
    row = TokenRow(await offload(long, prompts.encode, task.prompt))
    if row.length > limit:
        raise PromptTooLong(f"prompt has {row.length} tokens, data.max_prompt_tokens allows {limit}")
    return Episode([row], Transcript(messages), opened=prompts.template.opened(row.tokens()))


class State(Enum):
    GENERATING = auto()
    TOOL = auto()
    USER = auto()
    DONE = auto()


class EpisodeRunner:
    """Runs the episodes of one configuration.

    Raises:
        UserError: the chat template cannot show what tools or users say.
    """

    def __init__(self, config: Config, engine: Engine, parts: EpisodeParts) -> None:
        self.config, self.engine, self.parts = config.episode, engine, parts
        self.template = parts.chat_template(engine.tokenizer, config)
        self.prompts = Prompts(self.template, config.data)
        self.max_model_len = config.model.max_model_len
        self.keeps_prefix = config.generator.keep_prefix == "episodes"
        self._numbers = count()

    async def prepare(self, task: Task) -> Episode:
        """Make an episode that holds only its prompt; raises `UnusablePrompt`."""
        return await prepared(task, self.prompts)

    async def run(self, task: Task, episode: Episode | None = None, **sampling: Any) -> Episode:
        """Run a prepared episode to its end.

        Args:
            episode: from `prepare`; by default it is prepared here.
            sampling: passed to the engine.

        Raises:
            UnusablePrompt: see `prepare`.
            Exception: the engine, a tool's infrastructure or the user failed; the episode says nothing about the model.
        """
        episode = episode or await self.prepare(task)
        if self.parts.toolbox.tools and self.parts.call_format.stop:
            sampling["stop"] = self.parts.call_format.stop
        if self.template.stop_ids:
            sampling["stop_token_ids"] = self.template.stop_ids
        async with AsyncExitStack() as stack:
            tools = EpisodeTools(self.parts.toolbox, task)
            stack.push_async_callback(tools.close)
            run = _EpisodeRun(self, episode, tools, sampling)
            if self.parts.user is not None:
                details = {"row": task.row, "answer": task.answer, "messages": episode.transcript.prompt}
                name = f"{task.task_id}:{next(self._numbers)}"
                run.user = await stack.enter_async_context(conversation(self.parts.user, name, **details))
            await run.until_done()
        return episode

    def parse_turn(self, token_ids: np.ndarray, before: np.ndarray) -> tuple[str, list[ToolCall]]:
        """Text of an assistant turn after the ids `before`, without special tokens, and its calls, checked."""
        # Calls are read from the text with special tokens, since their tags may be special tokens.
        written, text = self.template.turn(token_ids)
        toolbox, call_format = self.parts.toolbox, self.parts.call_format
        if not toolbox.tools:
            return text, []
        if not self.config.calls_in_thinking and not call_format.stop:
            written = without_thinking(written, THINK in self.template.opened(before))
        return text, toolbox.checked(call_format.find(written))


class _EpisodeRun:
    def __init__(self, runner: EpisodeRunner, episode: Episode, tools: EpisodeTools, sampling: dict[str, Any]) -> None:
        self.runner, self.episode, self.tools, self.sampling = runner, episode, tools, sampling
        (self.row,) = episode.rows
        self.user: Conversation | None = None
        self.started = time.monotonic()
        self.limit = min(runner.max_model_len, self.row.length + runner.config.max_response_tokens)  # tokens in all
        self.calls: list[ToolCall] = []
        self.prefix_epoch: int | None = None  # that of the first turn, if the episode keeps its cached prefix

    async def until_done(self) -> None:
        steps = {State.GENERATING: self._generate, State.TOOL: self._run_tools, State.USER: self._ask_user}
        state = State.GENERATING
        while state is not State.DONE:
            self.episode.step = EpisodeStep(state.name.lower(), time.monotonic() + self._longest(state))
            state = await steps[state]()
        self.episode.step = None
        response = self.row.response_ids()
        read = partial(self.runner.template.text, response, plain=True)
        self.episode.response = await offload(len(response) > LONG_TOKENS, read)

    def _longest(self, state: State) -> float:
        """Seconds until a step's own time limits end it."""
        config = self.runner.config
        if state is State.TOOL:
            # Each tool may have to be opened before the calls run.
            return config.tool_timeout * (1 + len(self.runner.parts.toolbox.tools))
        if state is State.USER:
            assert self.user is not None
            return self.user.timeout
        return math.inf if config.max_seconds is None else max(self._seconds_left(), 0.0)

    async def _generate(self) -> State:
        episode, limits = self.episode, dict(self.sampling)
        if self.runner.config.max_seconds is not None:
            limits["seconds"] = self._seconds_left()
            # The first turn is tried even so: if it gets no token, that is a failure of the engine.
            if limits["seconds"] <= 0 and episode.turns:
                return self._end(Ending.MAX_SECONDS)
        if limits.get("seed") is not None:
            limits["seed"] += episode.turns
        room = self.limit - self.row.length
        if self.prefix_epoch is not None:
            limits["prefix_epoch"] = self.prefix_epoch
        if self.row.experts:
            limits["experts_from"] = self.row.routed
        turn = await self.runner.engine.generate(self.row.tokens(), max_tokens=room, **limits)
        if self.runner.keeps_prefix:
            self.prefix_epoch = turn.prefix_epoch
        if len(turn.token_ids) == 0:
            if not episode.turns:
                raise EngineFailed("the engine sampled no token within episode.max_seconds")
            return self._end(Ending.MAX_SECONDS)
        text, self.calls = await offload(len(turn.token_ids) > LONG_TOKENS, self._append, turn)
        episode.transcript.add("assistant", text)
        return self._next_state(turn, text)

    def _append(self, turn: Completion) -> tuple[str, list[ToolCall]]:
        before = self.row.tokens()
        self.row.extend(turn)
        return self.runner.parse_turn(turn.token_ids, before)

    def _next_state(self, turn: Completion, text: str) -> State:
        episode = self.episode
        if turn.finish_reason != "stop":
            return self._end(Ending.MAX_SECONDS if turn.finish_reason == "time" else Ending.LENGTH)
        if not self.calls:
            episode.answer = text.strip()
            if self.user is None:
                return self._end(Ending.STOP)
        # The user gets the last answer before a limit too, because only the user can give its reward.
        limit = self._limit_reached()
        if limit is not None and (self.calls or not getattr(self.runner.parts.user, "rewards", True)):
            return self._end(limit)
        return State.TOOL if self.calls else State.USER

    def _limit_reached(self) -> Ending | None:
        """The limit that forbids another turn of tools or of the user, if there is one."""
        episode, config = self.episode, self.runner.config
        if episode.turns == config.assistant_turns:
            return Ending.MAX_ASSISTANT_TURNS
        if episode.user_turns == config.max_user_turns:
            return Ending.MAX_USER_TURNS
        if config.max_seconds is not None and self._seconds_left() <= 0:
            return Ending.MAX_SECONDS
        return None

    async def _run_tools(self) -> State:
        results = await self.tools.run(self.calls)
        self.episode.tool_calls += len(results)
        self.episode.tool_errors += sum(result.failed for result in results)
        for call, result in zip(self.calls, results, strict=True):
            failed = {"error": True} if result.failed else {}
            self.episode.transcript.add("tool", result.text, name=call.name, arguments=call.arguments, **failed)
        texts = [result.text for result in results]
        template, wrap = self.runner.template, self.runner.parts.call_format.wrap
        if wrap is not None:
            return await self._continue(texts, partial(template.inside, texts, wrap))
        messages = [
            {"role": "tool", "name": call.name or "unknown", "content": text}
            for call, text in zip(self.calls, texts, strict=True)
        ]
        return await self._continue(texts, self._between(messages))

    async def _ask_user(self) -> State:
        assert self.user is not None
        turn = await self.user.respond(self.episode.transcript.messages())
        reason = Ending.USER if turn.stop else self._limit_reached()
        text = turn.text if reason is None else ""
        self.episode.transcript.add("user", text, reward=turn.reward, metadata=turn.metadata)
        if reason is not None:
            return self._end(reason)
        message = {"role": "user", "content": encodable(turn.text)}
        return await self._continue([turn.text], self._between([message]))

    def _between(self, messages: list[Message]) -> partial[np.ndarray]:
        start, end = self.row.spans[-1]
        return partial(self.runner.template.between, messages, turn=self.row.tokens()[start:end])

    async def _continue(self, texts: list[str], encode: partial[np.ndarray]) -> State:
        """Append results or the user's message, and let the model continue, if there is room for both."""
        token_ids = await offload(sum(map(len, texts)) > LONG_TEXT, encode)
        episode = self.episode
        if self.row.length + len(token_ids) >= self.limit:
            return self._end(Ending.LENGTH)
        self.row.append(token_ids)
        episode.user_turns += 1
        # The conversation continues, so the model's last turn is not the answer.
        episode.answer = ""
        return State.GENERATING

    def _seconds_left(self) -> float:
        return self.started + (self.runner.config.max_seconds or 0.0) - time.monotonic()

    def _end(self, reason: Ending) -> State:
        self.episode.reason = reason
        return State.DONE
