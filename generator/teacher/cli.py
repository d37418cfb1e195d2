"""`spo-teacher`: a process that joins a run and has a stronger model score what the policy sampled."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Annotated, Any

import typer

from common import log as logs
from common.checks.list import check_start
from common.config import Config, TeacherConfig, load_config
from common.errors import UserError
from common.log import Timeline
from common.process import Role, keep_files_private
from common.scripts import HELP, ConfigOption, OverrideOption, VersionOption, entry_point
from common.streams import scoring
from common.streams.agreement import agree
from common.streams.broker import connect
from common.streams.presence import Presence
from common.streams.scoring import ScoringInbox
from common.versions import record_versions
from generator.metrics import WorkMetrics
from generator.teacher.scores import Scorer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(context_settings=HELP)
def teach(
    config: ConfigOption,
    override: OverrideOption = None,
    source: Annotated[
        str | None,
        typer.Option(help="The source of the data whose teacher this is; needed where there are several teachers."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name shown to others; by default host and process id.")] = None,
    version: VersionOption = False,
) -> None:
    """Score finished episodes with the teacher that the section `teacher` names, and send them on to the sampler.

    The teacher is a model that this process computes with vLLM (teacher.model), or a server that it asks (teacher.url).
    Any number of processes may join a run, at any time. One that is stopped (SIGTERM, Ctrl-C) returns its unfinished
    episodes to the queue; if one is killed, the others take over its episodes. An episode whose scores fail on each of
    generator.max_attempts attempts is set aside, and shown by `spo dead`.

        spo-teacher -c my.yaml -o teacher.model=Qwen/Qwen3-8B
        spo-teacher -c my.yaml --source maths
    """
    keep_files_private()
    settings = load_config(config, override or ())
    teacher = _chosen(settings, source)
    raise SystemExit(asyncio.run(_serve(settings, teacher, name or f"teacher-{socket.gethostname()}-{os.getpid()}")))


def _chosen(config: Config, source: str | None) -> str:
    """Name of the teacher that is meant; raises `UserError` where that is none."""
    teachers = scoring.teachers(config)
    if not teachers:
        raise UserError("no source of data.train has a teacher with processes; set teacher.model or teacher.url")
    if source is None and len(teachers) > 1:
        raise UserError(f"the run has {len(teachers)} teachers; choose one by --source {' or '.join(teachers)}")
    if source is None:
        return next(iter(teachers))
    sources = {item.name: item for item in config.data.sources("train")}
    chosen = scoring.teacher_of(config.for_source(sources[source]).teacher, config) if source in sources else ""
    if not chosen:
        raise UserError(f"--source {source}: no source with a teacher is called so; use {' or '.join(teachers)}")
    return chosen


async def _serve(config: Config, chosen: str, name: str) -> int:
    log, teacher = logs.setup(name), scoring.teachers(config)[chosen]
    notes = check_start(Role.TEACHER, config.model_copy(update={"teacher": teacher}))
    broker = connect(config.broker, config.run.name, log=log)
    agree(broker, config, log)
    record_versions(config.run.folder, name, broker)
    with Presence(broker, name, "teacher", config.broker.heartbeat) as presence:
        for line in notes:  # logged only now, so that a refused process reports the reason alone
            log.warning(line)
        # vLLM takes seconds to import, so this waits until the configuration is known to be good.
        from generator.concurrency import exit_after
        from generator.teacher.loop import Teacher
        from generator.worker import serve

        presence.status(state="starting", teacher=chosen)
        metrics = WorkMetrics("teacher", "samples", Timeline(config.run.folder, name))
        scorer = await _scorer(config, teacher, log)
        code = 1
        try:
            inbox = ScoringInbox(broker, name, chosen)
            await serve(Teacher(config, teacher, inbox, scorer, presence, metrics, log), broker, log)
            code = 0
        finally:
            await scorer.close()
            exit_after(code)
    log.info("stopped", samples=metrics.episodes, tokens=metrics.sampled)
    return code


async def _scorer(config: Config, teacher: TeacherConfig, log: Any) -> Scorer:
    """Start what scores; raises `UserError` where that cannot be."""
    if teacher.model is None:
        from generator.teacher.server import ServerScorer

        return await ServerScorer.start(config, teacher, log)
    from generator.teacher.model import ModelScorer

    log.info("starting engine", model=teacher.model)
    return await ModelScorer.start(config, teacher, log)


main = entry_point(app)

if __name__ == "__main__":
    main()
