"""The command `spo agent try`: one task, played by the agent of a configuration on a real engine."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Annotated, Any

import typer

from common import log as logs
from common.config import Config, load_config
from common.config.warnings import episode_warnings
from common.errors import UserError, one_line, visible
from common.messages import Task
from common.payload import open_record
from common.scripts import ConfigArgument, OverrideOption
from launcher.page.episode import request_lines, scored_facts

app = typer.Typer(help="Try the agent of a configuration.", no_args_is_help=True)


@app.callback()
def agent() -> None:
    """Commands for agents."""


@app.command("try")
def try_(
    config: ConfigArgument,
    row: Annotated[int, typer.Option(min=0, help="Number of a training prompt that has an agent, from 0.")] = 0,
    messages: Annotated[bool, typer.Option("--messages", help="Also show the messages.")] = False,
    override: OverrideOption = None,
) -> None:
    """Let episode.agent play one task of data.train, and show its requests, rows, answer and reward.

    An engine on this machine serves model.path as it is; no other process of a run is started. Exit code 1 if the
    attempt failed; a run would try it again.

    - `spo agent try my.yaml`
    - `spo agent try my.yaml --row 7 -o episode.max_seconds=600`
    """
    settings = load_config(config, override or ())
    agents = {one.name for one in settings.data.sources("train") if settings.for_source(one).episode.agent is not None}
    if not agents:
        raise UserError("episode.agent is not set for data.train: there is no agent to try (docs/agents.md)")
    log = logs.setup("agent try")
    for line in episode_warnings(settings):
        log.warning(line)
    # With 0 steps there is no learner, so the engine does not wait for its weights.
    settings = settings.model_copy(update={"run": settings.run.model_copy(update={"steps": 0})})
    record = asyncio.run(play(settings, _task(settings, agents, row, log), log))
    for line in lines_of(record, messages):
        sys.stdout.write(f"{visible(line)}\n")
    raise SystemExit(1 if record.get("failed") else 0)


def _task(config: Config, sources: set[str], row: int, log: Any) -> Task:
    from sampler.prompts.prompt_set import load_data  # needs the sampler's packages

    prompts = load_data(config.data, log).train
    places = [i for i in range(len(prompts)) if prompts.source(i) in sources]
    if row >= len(places):
        raise UserError(f"--row {row}: data.train has {len(places)} prompts with an agent, which are numbered from 0")
    return prompts.task(places[row], f"row-{row}", keep=True)


async def play(config: Config, task: Task, log: Any) -> dict[str, Any]:
    """Play a task once; returns its record, with its reward, or with its error as `failed`."""
    from generator.agents.containers.container import check_containers
    from generator.agents.endpoint import Endpoint, check_parsers
    from generator.agents.environment import check_environments
    from generator.agents.sandboxed import check_agents
    from generator.engine.arguments import check_engine_names
    from generator.engine.engine import Engine
    from generator.episode.parts import RunParts
    from generator.task_runner import TaskRunner

    check_engine_names(config)
    check_agents(config)
    async with AsyncExitStack() as stack:
        parts = RunParts(config)
        stack.push_async_callback(parts.close)
        await parts.shared.ready(log)
        await check_environments(config, log)
        await check_containers(config, log)
        check_parsers(config)
        engine = await Engine.start(config, log)
        stack.push_async_callback(engine.close)
        endpoint = await Endpoint.start(config, engine, log)
        stack.push_async_callback(endpoint.close)
        runner = TaskRunner(config, engine, parts, "agent try", log, endpoint)
        stack.push_async_callback(runner.close)
        return await played(runner, task)


async def played(runner: Any, task: Task) -> dict[str, Any]:
    """Run an attempt at a task; see `play`."""
    attempt = await runner.begin(task)
    about: dict[str, Any] = {"failed": ""}
    try:
        header, _ = await attempt.run()
        about |= {"reason": header.reason, "reward": header.reward, "parts": header.reward_parts}
    except Exception as error:  # whatever an agent or a reward raises
        about["failed"] = f"{type(error).__name__}: {error}"
    about["rows"] = [[row.length, row.sampled] for row in attempt.episode.rows if row.sampled]
    record: dict[str, Any] = json.loads(open_record(await attempt.record(finished=not about["failed"])))
    return record | about


def lines_of(record: dict[str, Any], messages: bool) -> Iterator[str]:
    yield f"prompt: {one_line(str(record['input']))[:200]}"
    for message in record["messages"] if messages else ():
        calls = "".join(f" {json.dumps(call['function'])}" for call in message.get("tool_calls", ()))
        yield f"request {message['request']}, {message['role']}: {message['content']}{calls}"
    yield "requests:"
    yield from (f"  {line}" for line in request_lines(record) or ["none"])
    trained = [one for one in record.get("requests", ()) if one.get("row") is not None]
    if later := trained[1:]:
        kept, ids = sum(one["kept"] for one in later), sum(one["prompt"] for one in later)
        yield f"kept: {kept / ids:.1%} of the later requests' prompt ids"
    yield from (
        f"row {i}: {length} tokens, {sampled} of them sampled" for i, (length, sampled) in enumerate(record["rows"], 1)
    )
    if record["failed"]:
        yield f"failed: {record['failed']}"
        return
    parts = ", ".join(f"{name} {value:g}" for name, value in record["parts"].items())
    yield f"ended by: {record['reason']}"
    yield from (f"{name} {text}" for name, text in scored_facts(record))
    yield f"reward: {record['reward']:g}" + (f" ({parts})" if parts else "")
