"""A run without a learner on this machine: Redis, generators, and the process that asks, until all is answered."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from redis.exceptions import RedisError

from common.checks.list import check_start
from common.config import Config, dump_config
from common.messages import Kind
from common.process import Role, keep_files_private
from common.streams.agreement import agree
from common.streams.broker import Broker, connect
from common.unpack import unpack
from launcher.ask.view import View
from launcher.run.folder_lock import locked
from launcher.run.processes import (
    Interrupts,
    command,
    generator_commands,
    secret_environment,
    thread_limits,
    with_redis,
)
from launcher.run.supervisor import RunFailed, Supervisor
from sampler.answer_file import AnswerFile

POLL = 0.1


@dataclass(frozen=True)
class Request:
    """What is to be answered.

    Attributes:
        data: as `sampler.ask_cli.load_questions` takes it.
        responses: to each prompt.
        output: file of the answers.
        folder: for logs, configuration and an embedded Redis.
    """

    kind: Kind
    data: str | None
    responses: int
    output: Path
    folder: Path

    def command(self, config: Path) -> list[str]:
        """Of the process that asks."""
        data = [] if self.data is None else ["--data", self.data]
        options = ["--kind", self.kind, "--responses", str(self.responses), "--output", str(self.output)]
        return command("sampler.ask_cli", config, *options, *data)


@dataclass(frozen=True)
class Answers:
    """What became of a request: answers wanted, those in the file, and why others were set aside in this call."""

    wanted: int
    answered: int
    reasons: dict[str, int]


class AskStopped(Exception):
    """The run stopped before all was answered, with an exit code."""

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.code = code


def ask_here(
    config: Config, request: Request, *, generators: int, redis: str, view: Callable[[int], View], log: Any
) -> Answers:
    """Have all that the file lacks answered; starts no process where it lacks nothing.

    Args:
        config: of a run without a learner (`run.steps = 0`).
        generators: to start here; others may take part where `redis` is a running server.
        redis: `embedded`, or the address of a running server.
        view: opens the display, given how many answers are wanted.

    Raises:
        AskStopped: by Ctrl-C or SIGTERM (code 130), or because a process failed (code 1).
        UserError: what the user gave cannot be used.
    """
    keep_files_private()
    from sampler.ask import questions  # imports pyarrow, which not every role has
    from sampler.ask_cli import load_questions

    prompts = load_questions(config, request.kind, request.data, log)
    with locked(request.folder, "--output") as lock:
        file = AnswerFile(request.output, log)
        file.check_prompts(frozenset(prompts.ids))
        wanted = [task_id for task_id, _ in questions(prompts, request.kind, request.responses)]
        present = sum(task_id in file for task_id in wanted)
        if present == len(wanted):
            return Answers(len(wanted), present, {})
        check_start(Role.GENERATOR, config)
        log.info("asking", prompts=len(prompts), responses=len(wanted), answered=present)
        progress = _run(config, request, generators, redis, lambda: view(len(wanted)), log, lock)
        file = AnswerFile(request.output, log)
        return Answers(len(wanted), sum(task_id in file for task_id in wanted), progress.reasons)


class AskProgress:
    """A view of the run; `refresh` brings it up to date."""

    def __init__(self, broker: Broker) -> None:
        self.answered = 0
        self.reasons: dict[str, int] = {}
        self.processes: list[dict[str, Any]] = []
        self._broker = broker

    def refresh(self) -> None:
        """Read what is new; everything stays as it is while Redis does not answer."""
        try:
            answered, reasons = self._broker.redis.hmget(self._broker.key("state"), "answered", "reasons")
            self.answered = int(answered or 0)
            self.reasons = unpack(reasons) if reasons else {}
            self.processes = list(self._broker.processes().values())
        except RedisError:
            return

    def generators(self) -> list[dict[str, Any]]:
        """The status of each living generator."""
        return [process for process in self.processes if process.get("role") == "generator"]


def _run(
    config: Config, request: Request, generators: int, redis: str, view: Callable[[], View], log: Any, lock: IO[str]
) -> AskProgress:
    supervisor, interrupts = Supervisor(request.folder / "logs", log, lock=lock), Interrupts()
    with interrupts.handled():
        try:
            config = with_redis(config, redis, request.folder, supervisor)
            path = request.folder / "config.yaml"
            path.write_text(dump_config(config, absolute=True), encoding="utf-8")
            # No waiting, few retries: while Redis is dead, the launcher must be free to restart it.
            broker = connect(config.broker.model_copy(update={"wait": 0.0}), config.run.name, log=log)
            agree(broker, config, log)
            environment = secret_environment(config)
            supervisor.start("asker", request.command(path), environment)
            for name, arguments in generator_commands(path, generators).items():
                supervisor.start(name, arguments, environment | thread_limits(name, generators))
            progress = AskProgress(broker)
            with closing(view()) as opened:
                while supervisor.alive("asker"):
                    supervisor.poll()
                    if generators and not supervisor.alive("generator"):
                        raise RunFailed("no generator is left, and not all is answered")
                    progress.refresh()
                    opened.update(progress.answered, sum(progress.reasons.values()), progress.generators())
                    time.sleep(POLL)
                progress.refresh()
            return progress
        except KeyboardInterrupt:
            raise AskStopped("stopped", 130) from None
        except RunFailed as error:
            raise AskStopped(str(error), 1) from None
        finally:
            interrupts.ignored = True
            supervisor.stop(last="redis")
