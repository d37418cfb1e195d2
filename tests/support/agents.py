"""Agents for tests, their tasks, and an endpoint without a server that they ask."""

from __future__ import annotations

import asyncio
import shutil
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import structlog

from common.config import AgentConfig, Config
from common.messages import Task
from generator.agents.programs import AgentTask, Program, make_program
from generator.agents.refusals import Refused, SessionsLog
from generator.agents.runner import AgentRunner
from generator.agents.session import AgentRequest, AgentSession, SessionLimits
from generator.episode.episode import Episode
from generator.episode.parts import EpisodeParts, RunParts
from generator.task_runner import TaskRunner
from sampler.files.episode_files import episode_line
from tests.support.episode import END, TEMPLATE, TOKENIZER, ScriptedEngine, completion, configured

HERE = "tests.support.agents"


def agent_task(folder: Path, **changes: Any) -> AgentTask:
    values: dict[str, Any] = {
        "prompt": "What is 1+1?",
        "row": {"level": "easy"},
        "model": "policy",
        "base_url": "http://127.0.0.1:1/s/key/v1",
        "anthropic_base_url": "http://127.0.0.1:1/s/key",
        "api_key": "key",
        "reward_url": "http://127.0.0.1:1/s/second/v1/reward",
        "folder": folder,
    }
    return AgentTask(**values | changes)


def python(code: str) -> Program:
    return make_program(AgentConfig(command=[sys.executable, "-c", textwrap.dedent(code)]))


async def on_the_openai_package(task: AgentTask) -> str:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as model:
        messages: Any = [{"role": "user", "content": task.prompt}]
        reply = await model.chat.completions.create(model=task.model, messages=messages)
    return reply.choices[0].message.content or ""


SESSIONS: dict[str, AgentSession] = {}  # by key, of all pretended endpoints


class PretendEndpoint:
    """Opens sessions that agents of this process ask without HTTP; the model says what they have it say."""

    url, model, strangers = "http://127.0.0.1:1", "policy", 0

    def __init__(self) -> None:
        self.sessions: list[AgentSession] = []

    def open_session(self, limits: SessionLimits) -> AgentSession:
        session = AgentSession(limits, TEMPLATE, 200, self.url, SessionsLog(structlog.get_logger()))
        self.sessions.append(session)
        SESSIONS[session.key] = session
        return session

    async def close_session(self, session: AgentSession, reason: str) -> None:
        await session.close(reason)


async def answered(session: AgentSession, messages: Any, says: str) -> dict[str, Any]:
    """A request in a session, to which the model replies `says`."""
    exchange = await session.begin(AgentRequest(list(messages), {}))
    session.sampled(exchange.node, completion(TOKENIZER.encode(says + END, add_special_tokens=False)))
    reply = {"role": "assistant", "content": says}
    session.answer(exchange.node, reply)
    exchange.seen = True
    return reply


async def scripted(task: AgentTask) -> object:
    """Do what the task's row says: what is said to each request, and then how this ends."""
    row, session = task.row, SESSIONS[task.api_key]
    messages: list[dict[str, Any]] = [{"role": "user", "content": str(task.prompt)}]
    for refused in row.get("refused", ()):
        session.count_refusal(Refused(*refused))
    for says in row.get("asks", ()):
        messages += [await answered(session, messages, says), {"role": "user", "content": "go on"}]
    if "beside" in row:
        await answered(session, row["beside"], "x")
    if row.get("begins"):
        await session.begin(AgentRequest(messages, {}))
    for refused in row.get("refused_at_last", ()):
        session.count_refusal(Refused(*refused))
    if "sends" in row:
        session.send_reward(row["sends"])
    if "files" in row:
        (task.folder / "made").write_text(row["files"])
    if row.get("fails"):
        session.fail(RuntimeError("the engine failed"))
    if row.get("waits"):
        await asyncio.Event().wait()
    if row.get("raises"):
        raise ValueError(row["raises"])
    return object() if row.get("returns") == "an object" else row.get("returns")


def agent_config(*sections: dict[str, Any], **episode: Any) -> Config:
    return configured(*sections, **{"agent": f"{HERE}:scripted", "max_assistant_turns": None} | episode)


@asynccontextmanager
async def agent_tasks(config: Config) -> AsyncIterator[tuple[TaskRunner, PretendEndpoint]]:
    engine: Any = ScriptedEngine()
    endpoint: Any = PretendEndpoint()
    parts = RunParts(config)
    runner = TaskRunner(config, engine, parts, "g", structlog.get_logger(), endpoint)
    try:
        yield runner, endpoint
    finally:
        await runner.close()
        await parts.close()


async def run_agent(config: Config, prompt: Any = "What is 1+1?", answer: Any = "2", **row: Any) -> Episode:
    parts = EpisodeParts(config)
    engine: Any = ScriptedEngine()
    endpoint: Any = PretendEndpoint()
    runner = AgentRunner(config, engine, parts, endpoint)
    task = Task(task_id="t", prompt_id="p", prompt=prompt, answer=answer, row=row)
    episode = await runner.prepare(task)
    try:
        return await runner.run(task, episode, temperature=1.0, top_p=1.0, top_k=0)
    finally:
        remove_folder(episode)
        await runner.close()
        await parts.close()


def kept_line(config: Config, task: Task) -> bytes:
    """The line that is kept of a task which the agent of a configuration plays."""

    async def play() -> bytes:
        async with agent_tasks(config) as (tasks, _):
            header, _ = await (await tasks.begin(task)).run()
        return episode_line(header, {"version": 0, "answer": header.answer} if task.kind == "eval" else {}, {})

    return asyncio.run(play())


def play_agent(config: Config, **row: Any) -> Episode:
    return asyncio.run(run_agent(config, **row))


def remove_folder(episode: Episode) -> None:
    """Do what the `TaskRunner` does once an episode is scored."""
    if episode.folder is not None:
        shutil.rmtree(episode.folder)


async def echo(task: AgentTask) -> str:
    return f"{task.prompt} {task.row['level']}"


def blocking(task: AgentTask) -> int:
    return len(task.api_key)


class Echo:
    async def __call__(self, task: AgentTask) -> str:
        return await echo(task)


echoing = Echo()


async def broken(task: AgentTask) -> None:
    raise ValueError("no idea\nat all")


def at_the_end(task: AgentTask) -> None:
    next(iter(()))


def failing(task: AgentTask) -> None:
    raise OSError("no such device")


async def changing(task: AgentTask) -> object:
    """Use what it was given as its own, which agents do."""
    returned = await scripted(task)
    assert isinstance(task.prompt, list)
    task.prompt[0]["content"] = "changed"
    task.prompt.append({"role": "assistant", "content": "2"})
    task.row.clear()
    return returned


async def leaving(task: AgentTask) -> None:
    raise SystemExit(3)


async def without_arguments() -> None: ...


THING = 7
