"""`spo-generator`: one vLLM engine that joins a run, answers prompts, and may leave at any time."""

from __future__ import annotations

import asyncio
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any

import typer

from common import log as logs
from common.checks.list import check_start
from common.config import Config, load_config
from common.config.warnings import episode_warnings
from common.errors import UserError
from common.log import Timeline
from common.nvml import GpuReader
from common.process import Role, keep_files_private
from common.scripts import HELP, ConfigOption, OverrideOption, VersionOption, entry_point
from common.streams.agreement import agree, agree_on_download
from common.streams.broker import Broker, connect
from common.streams.presence import Presence
from common.streams.relays import machine_name, nearby
from common.streams.tasks import TaskInbox
from common.versions import record_versions

if TYPE_CHECKING:
    from generator.episode.parts import RunParts
    from generator.metrics import GeneratorMetrics

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(context_settings=HELP)
def generate(
    config: ConfigOption,
    override: OverrideOption = None,
    name: Annotated[str | None, typer.Option(help="Name shown to others; by default host and process id.")] = None,
    version: VersionOption = False,
) -> None:
    """Answer prompts with vLLM and stream the episodes to the sampler.

    Any number of generators may join a run, at any time. A new one pulls the newest weights and takes tasks; one that
    is stopped (SIGTERM, Ctrl-C) returns its unfinished tasks to the queue; if one is killed, the others take over its
    tasks.

        spo-generator -c my.yaml -o generator.max_concurrency=128
    """
    keep_files_private()
    settings = load_config(config, override or ())
    name = name or f"generator-{socket.gethostname()}-{os.getpid()}"
    asyncio.run(_serve(settings, name))


async def _serve(config: Config, name: str) -> None:
    """Check the configuration, wait for what episodes need, and generate; raises `UserError` if it cannot be used."""
    log = logs.setup(name)
    notes = check_start(Role.GENERATOR, config)
    for line in episode_warnings(config):
        log.warning(line)
    from generator.agents.containers.container import check_containers
    from generator.agents.environment import check_environments
    from generator.agents.sandboxed import check_agents
    from generator.engine.arguments import check_engine_names
    from generator.episode.parts import RunParts

    # Report errors in the configuration before waiting for anything.
    check_engine_names(config)
    check_agents(config)
    parts = RunParts(config)
    parts.check_templates(config.model.path, config.model.trust_remote_code)
    broker = connect(config.broker, config.run.name, log=log)
    agree(broker, config, log, role=Role.GENERATOR)
    record_versions(config.run.folder, name, broker)
    with Presence(broker, name, "generator", config.broker.heartbeat) as presence:
        presence.status(state="waiting for the sandbox")
        await parts.shared.ready(log)
        presence.status(state="waiting for the environment server")
        await check_environments(config, log)
        await check_containers(config, log)
        for line in notes:  # logged only now, so that a refused process reports only the reason
            log.warning(line)
        metrics = await _generate(config, name, broker, presence, parts, log)
    log.info("stopped", episodes=metrics.episodes, tokens=metrics.sampled)


async def _generate(
    config: Config, name: str, broker: Broker, presence: Presence, parts: RunParts, log: Any
) -> GeneratorMetrics:
    """Start the engine and answer prompts until the run is finished or the process is asked to stop."""
    # vLLM takes seconds to import, so this waits until the configuration is known to be good.
    from generator.agents.endpoint import Endpoint, check_parsers
    from generator.concurrency import exit_after
    from generator.engine.engine import Engine
    from generator.loop import Generator, serve
    from generator.metrics import GeneratorMetrics
    from generator.services import Services
    from generator.teacher.server import start_servers
    from generator.weights.weight_client import WeightClient

    has_agents = any(episode.agent for episode in config.episodes_in_use().values())
    if has_agents:
        check_parsers(config)
    presence.status(state="starting engine")
    log.info("starting engine", model=config.model.path)
    engine = await Engine.start(config, log)
    endpoint = weights = None
    if config.run.has_learner:
        settings = config.learner.weights
        machine = machine_name(settings)
        weights = WeightClient(
            lambda: broker.endpoint("weights"), settings, relays=lambda: nearby(broker, machine), log=log
        )
    metrics = GeneratorMetrics(Timeline(config.run.folder, name), engine.counts, engine.gpus)
    presence.measured = GpuReader(engine.gpus).start()
    loop = asyncio.get_running_loop()
    # For tools and simulated users that block; one that hangs keeps its thread for ever.
    loop.set_default_executor(ThreadPoolExecutor(4 * config.generator.most_episodes, "blocking"))
    code = 1
    try:
        if has_agents:
            endpoint = await Endpoint.start(config, engine, log)
        agree_on_download(broker, config)
        teachers = await start_servers(config, presence, log)
        inbox = TaskInbox(broker, name)
        services = Services(broker, inbox, presence, engine, weights, parts, metrics, log, endpoint, teachers)
        await serve(Generator(config, services), broker)
        code = 0
    except UserError:
        code = 2  # `entry_point` prints it
        raise
    finally:
        if weights is not None:
            weights.close()
        if endpoint is not None:
            await endpoint.close()
        await engine.close()
        exit_after(code)
    return metrics


main = entry_point(app)

if __name__ == "__main__":
    main()
