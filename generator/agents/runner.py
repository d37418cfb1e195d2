"""Episodes played by an agent, a program that calls a session of the endpoint until it ends or reaches a limit.

At a limit, running requests are cut and the program is ended. An agent that ends after a request that exceeds the
context has reached a limit too. An exception is raised if the episode says nothing about the model: the agent got no
token, the engine failed, or the agent failed and `episode.agent.failure` is not a reward.
"""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

from common.config import Config
from common.files import own_folder
from common.messages import MAX_TURNS, Ending, Task
from common.process import in_thread
from generator.agents.containers.container import URL as IN_CONTAINER
from generator.agents.containers.container import Containers, TaskContainer
from generator.agents.containers.grading import GradingTimedOut, grade
from generator.agents.endpoint import Endpoint
from generator.agents.environment import EnvironmentServer
from generator.agents.lost import first_lost
from generator.agents.programs import AgentFailed, AgentTask, Program, asked, make_program
from generator.agents.sandboxed import URL, SandboxedCommand
from generator.agents.session import AgentSession, EndpointFailed, SessionLimits
from generator.chat.prompts import Prompts
from generator.concurrency import LONG_TOKENS, offload, with_timeout
from generator.engine.engine import Engine
from generator.episode.episode import Episode, EpisodeStep
from generator.episode.parts import EpisodeParts
from generator.episode.runner import prepared
from generator.rewards.registry import IN_CONTAINER as GRADED
from generator.rewards.registry import OWN
from generator.tools.toolbox import encodable


class AgentRunner:
    """Runs the episodes of one configuration that names an agent.

    Args:
        endpoint: None if episodes are only prepared.

    Raises:
        UserError: the agent cannot be run, or the tokenizer has no usable chat template.
    """

    def __init__(self, config: Config, engine: Engine, parts: EpisodeParts, endpoint: Endpoint | None) -> None:
        assert config.episode.agent is not None
        self.config, self.agent, self.parts = config.episode, config.episode.agent, parts
        self.template = parts.chat_template(engine.tokenizer, config)
        self._data, self._endpoint = config.data, endpoint
        self._prompts = Prompts(self.template, config.data)
        self._url = endpoint.url if endpoint is not None else ""
        self._containers: Containers | None = None
        if self.agent.image is not None:
            sockets = endpoint.socket.parent if endpoint is not None and endpoint.socket is not None else None
            self._containers, self._url = Containers(config, sockets), IN_CONTAINER
        elif self.agent.environment is not None:
            self._program: Program = EnvironmentServer(self.agent.environment)
        elif self.agent.sandbox:
            self._program, self._url = SandboxedCommand(config, endpoint.socket if endpoint else None), URL
        else:
            self._program = make_program(self.agent)
        self._gives_reward = OWN in config.episode.reward_weights
        self._is_graded = GRADED in config.episode.reward_weights
        self._reward_range = config.sampler.tracker.reward_range

    async def prepare(self, task: Task) -> Episode:
        """Make an episode that holds only its prompt; raises `UnusablePrompt`."""
        return await prepared(task, self._prompts)

    async def run(self, task: Task, episode: Episode, **sampling: Any) -> Episode:
        """Run an episode from `prepare` to its end; the caller removes its folder.

        Args:
            sampling: temperature, top_p, top_k and seed.

        Raises:
            Exception: the agent or the engine failed; the episode says nothing about the model.
        """
        episode.folder = Path(await in_thread(tempfile.mkdtemp, prefix="agent-", dir=own_folder()))
        async with self._ready(task, episode) as program:
            await self._run(task, episode, program, sampling)
            if self._is_graded and isinstance(program, TaskContainer) and episode.reason != Ending.AGENT_FAILED:
                episode.reward = await self._graded(task, episode, program)
        episode.step = None
        return episode

    @asynccontextmanager
    async def _ready(self, task: Task, episode: Episode) -> AsyncIterator[Program]:
        """The agent, ready to play; in a container of its own if there are containers."""
        if self._containers is None:
            yield self._program
            return
        async with AsyncExitStack() as stack:
            with episode.measured("start"):
                container = await stack.enter_async_context(self._containers.started(task.row))
            yield container

    async def _run(self, task: Task, episode: Episode, program: Program, sampling: Mapping[str, Any]) -> None:
        """Have the agent play, and record what it did; raises like `run`."""
        assert self._endpoint is not None
        assert episode.folder is not None
        seconds = self._seconds(program)
        episode.step = EpisodeStep("agent", math.inf if seconds is None else time.monotonic() + seconds)
        session, strangers = self._endpoint.open_session(self._limits(task, sampling)), self._endpoint.strangers
        try:
            with episode.measured("agent") if self._containers is not None else nullcontext():
                played = await self._play(program, self._task(task, session, episode.folder), session, seconds)
        finally:
            episode.rows = session.rows() or episode.rows
            episode.transcript.entries = session.transcript()
            episode.tool_calls = session.tool_calls()
            episode.requests, episode.retries = session.requests_made(), session.retries
            episode.lost = first_lost(session.tree)
            episode.refusals, episode.refused = session.refusals.records(), session.refusals.counted
        if session.failure is not None:
            raise session.failure
        if not episode.turns and not session.requests and (unknown := self._endpoint.strangers - strangers):
            raise AgentFailed(
                f"the agent never called the model; meanwhile {unknown} requests came with an unknown key"
            )
        if fault := session.fault(seconds if session.reason == Ending.MAX_SECONDS else None):
            raise EndpointFailed(fault)
        self._conclude(episode, session, played)
        episode.response = await offload(episode.length > LONG_TOKENS, self._response, episode)

    async def _graded(self, task: Task, episode: Episode, container: TaskContainer) -> float:
        """The reward of the task's own tests; the lowest one if they do not end in time."""
        episode.step = EpisodeStep("grading", math.inf)  # the tests have a limit of their own
        with episode.measured("grading"):
            try:
                return await grade(container, task.answer)
            except GradingTimedOut:
                return self._reward_range[0]

    def _seconds(self, program: Program) -> float | None:
        """The time limit of an attempt; None if there is none."""
        own = program.settings.agent_seconds if isinstance(program, TaskContainer) else None
        limits = [limit for limit in (self.config.max_seconds, own) if limit is not None]
        return min(limits, default=None)

    async def close(self) -> None:
        """Close the connection to an environment server, the sandbox, or all containers."""
        if self._containers is not None:
            await self._containers.close()
        elif isinstance(self._program, (EnvironmentServer, SandboxedCommand)):
            await self._program.close()

    async def _play(
        self, agent: Program, task: AgentTask, session: AgentSession, seconds: float | None
    ) -> asyncio.Task[object] | None:
        """Run the agent until it ends, and return its finished task; None if a limit came first."""
        assert self._endpoint is not None
        program = asyncio.ensure_future(with_timeout(None, agent.run(task)))
        over = asyncio.ensure_future(session.over.wait())
        reason = "stopped"  # if cancelled during the wait
        try:
            await asyncio.wait((program, over), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            ended = program.done() and not session.over.is_set()
            reason = Ending.STOP if ended else Ending.MAX_SECONDS
            return program if ended else None
        finally:
            over.cancel()
            try:
                # Close the session before ending the program: a reply that nothing reads any more would not count.
                await self._endpoint.close_session(session, reason)
            finally:
                program.cancel()
                await asyncio.wait((program,))
                if not program.cancelled():
                    program.exception()  # else asyncio logs that it was never retrieved

    def _conclude(self, episode: Episode, session: AgentSession, program: asyncio.Task[object] | None) -> None:
        """Record how the episode ended, with the agent's answer and reward; raises `AgentFailed`."""
        episode.reason, returned = Ending(session.reason), None
        try:
            returned = None if program is None else program.result()
            returned = returned.tolist() if hasattr(returned, "tolist") else returned  # numpy's and torch's
        except AgentFailed as error:
            # At LENGTH the limit ended the episode; a failure that followed is ignored.
            if episode.reason != Ending.LENGTH:
                if session.refusals.counted:
                    raise AgentFailed(f"{error}; the endpoint refused {session.refusals.shown()}") from None
                if self.agent.failure == "retry" or not episode.turns:
                    raise
                episode.reason, episode.reward, episode.failure = Ending.AGENT_FAILED, self.agent.failure, str(error)
        if not episode.turns:
            raise AgentFailed(_never_called(session))
        own = self._gives_reward and isinstance(returned, int | float)
        episode.answer = session.answer_text() if returned is None or own else _text(returned)
        if self._gives_reward and episode.reason != Ending.AGENT_FAILED:
            episode.reward = self._own_reward(session, returned if own else None)

    def _own_reward(self, session: AgentSession, returned: Any) -> float | None:
        """The reward that the agent sent or returned; if it gave none, the lowest reward at a limit, else None."""
        if session.reward is not None and returned is not None:
            raise AgentFailed(f"the agent sent the reward {session.reward:g} and returned {returned:g}; one is allowed")
        if session.reward is not None or returned is not None:
            return float(returned if session.reward is None else session.reward)
        return None if session.reason == Ending.STOP else self._reward_range[0]

    def _limits(self, task: Task, sampling: Mapping[str, Any]) -> SessionLimits:
        return SessionLimits(
            max_response_tokens=self.config.max_response_tokens,
            max_turns=self.config.assistant_turns or MAX_TURNS,
            history=self.agent.history,
            train=self.agent.train,
            task=asked(task.prompt),
            ignore=tuple(self.agent.ignore),
            reward_range=self._reward_range if self._gives_reward else None,
            markup=self._data.prompt_markup,
            template_options=self._data.template_variables,
            **sampling,
        )

    def _task(self, task: Task, session: AgentSession, folder: Path) -> AgentTask:
        assert self._endpoint is not None
        outside = f"{self._endpoint.url}/"
        base_url = session.base_url.replace(outside, f"{self._url}/", 1)
        return AgentTask(
            # A function may change what it gets, such as append to the messages; the next attempt needs the data's own.
            prompt=deepcopy(task.prompt),
            row=deepcopy(task.row if self.agent.environment is None else self._whole_row(task)),
            model=self._endpoint.model,
            base_url=base_url,
            anthropic_base_url=base_url.removesuffix("/v1"),
            api_key=session.key,
            reward_url=f"{self._url}/s/{session.reward_key}/v1/reward" if self._gives_reward else None,
            folder=folder,
        )

    def _whole_row(self, task: Task) -> dict[str, Any]:
        """The row with its prompt and answer columns; one named `a.b` is already in it, within `a`."""
        columns = {self._data.prompt_column: task.prompt}
        if self._data.answer_column is not None:
            columns[self._data.answer_column] = task.answer
        return {name: value for name, value in columns.items() if name.partition(".")[0] not in task.row} | task.row

    def _response(self, episode: Episode) -> str:
        return "\n".join(self.template.text(row.response_ids(), plain=True) for row in episode.rows)


def _never_called(session: AgentSession) -> str:
    """Why there is nothing to train on."""
    refused = session.refusals.counts.total()
    if session.requests:
        problem = f"none of the agent's {session.requests} requests got a token"
    elif refused:
        problem = f"the agent never called the model: {refused} requests were refused"
    else:
        return "the agent never called the model: no request came to task.base_url (OPENAI_BASE_URL of a program)"
    return f"{problem}: {session.refusals.shown()}" if refused else problem


def _text(returned: object) -> str:
    """What an agent returned, as text; raises `AgentFailed` if it is neither text nor JSON data."""
    if isinstance(returned, str):
        return encodable(returned)
    try:
        return encodable(json.dumps(returned, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError):
        raise AgentFailed(
            f"the agent returned an object of {type(returned).__name__}; return text, a number, other JSON data or None"
        ) from None
