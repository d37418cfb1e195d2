"""Runs an agent's program in the sandbox of this machine, from which it reaches the endpoint and nothing else."""

from __future__ import annotations

import base64
import json
import os
import shutil
import sys
from pathlib import Path

from common.config import Config
from common.errors import UserError
from generator.agents.containers.container import OWN_FILES
from generator.agents.programs import (
    ANSWER_FILE,
    TASK_FILE,
    AgentFailed,
    AgentTask,
    answer_text,
    described,
    make_program,
    packed,
    shown,
    variables,
)
from sandbox_client import RunCodeRequest, Status
from sandbox_client.isolation import check_isolation_once
from sandbox_client.local import LocalSandbox
from sandbox_client.settings import Settings
from sandbox_client.worker.command import PORT, WORK

URL = f"http://127.0.0.1:{PORT}"  # the address of the endpoint inside the sandbox
# The PATH that programs in the sandbox get (`sandbox_client.worker.command.environment`).
SEARCH_PATH = os.pathsep.join((os.path.dirname(sys.executable), "/usr/local/bin", "/usr/bin", "/bin"))
LONGEST = 86400.0  # seconds; limit of a program if `episode.max_seconds` is not set
MARGIN = 60.0

# The sandbox starts a Python interpreter, with the same environment for all programs; this code replaces both.
_START = """
import json, os, signal
os.environ.update(json.loads({environment!r}))
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
command = json.loads({command!r})
os.execvp(command[0], command)
"""


class SandboxedCommand:
    """A program, started for each task in a sandbox of its own.

    Args:
        config: of the run, or of a source.
        socket: where the endpoint listens; None if nothing will be run.

    Raises:
        UserError: there is no such program, or it cannot be isolated here.
    """

    def __init__(self, config: Config, socket: Path | None) -> None:
        agent, limits = config.episode.agent, config.sandbox
        assert agent is not None
        assert agent.command is not None
        if limits.url is not None:
            raise UserError(
                f"episode.agent.sandbox contradicts sandbox.url = {limits.url!r}: agents run in the sandbox of the "
                "generator's machine, since the model is there; leave sandbox.url out"
            )
        name = agent.command[0]
        if shutil.which(name, path=SEARCH_PATH) is None:
            raise UserError(
                f"episode.agent.command = {agent.command}: there is no program {name!r} in the sandbox, where the "
                f"PATH is {SEARCH_PATH}; to run a file of your own, put its interpreter "
                "before it, such as [python, agent.py]"
            )
        self._name = name
        self._command, self._files = packed(agent.command, WORK)
        # The session's limit, which ends an episode, must come before the sandbox's, which is a failure.
        self._seconds = (config.episode.max_seconds or LONGEST) + MARGIN
        self._memory = limits.memory_mb
        self._sandbox: LocalSandbox | None = None
        if socket is not None:
            settings = Settings(
                workers=min(limits.concurrency, config.generator.most_episodes),
                memory_mb=limits.memory_mb,
                seconds=self._seconds,
                python=sys.executable,
                endpoint=str(socket),
            )
            check_isolation_once(settings)
            self._sandbox = LocalSandbox(settings)

    async def run(self, task: AgentTask) -> object:
        """Play a task until the program ends; see `Program.run`.

        Raises:
            SandboxUnavailable: the program could not be run.
        """
        assert self._sandbox is not None
        files = {name: path.read_bytes() for name, path in self._files.items()}
        files[TASK_FILE] = described(task, WORK)
        environment = json.dumps(variables(task, WORK))
        code = _START.format(environment=environment, command=json.dumps(self._command))
        answer = await self._sandbox.run_code(
            RunCodeRequest(
                code=code,
                stdin=described(task, WORK, secret=True).decode(),
                files={name: base64.b64encode(content).decode() for name, content in files.items()},
                fetch_files=[ANSWER_FILE],
                run_timeout=self._seconds,
                memory_limit_MB=self._memory,
            )
        )
        if answer.status is not Status.SUCCESS:
            result = answer.run_result
            ended = f"ended with exit code {None if result is None else result.return_code}"
            output = "" if result is None else f"{result.stdout or ''} {result.stderr or ''}"
            raise AgentFailed(f"{self._name} {answer.message or ended}: {shown(output)}")
        content = answer.files.get(ANSWER_FILE)
        return None if content is None else answer_text(base64.b64decode(content))

    async def close(self) -> None:
        """End the programs that still run."""
        if self._sandbox is not None:
            await self._sandbox.close()


def check_agents(config: Config) -> None:
    """Raise `UserError` if the agent of the run, or of one of its sources, cannot be run."""
    for key, episode in config.episodes_in_use().items():
        agent = episode.agent
        if agent is None or agent.environment is not None:
            continue
        try:
            if agent.image is not None:
                packed(agent.command or (), "", OWN_FILES)
            elif agent.sandbox:
                SandboxedCommand(config.model_copy(update={"episode": episode}), None)
            else:
                make_program(agent)
        except UserError as error:
            raise UserError(str(error) if key == "episode" else f"{key.removesuffix('.episode')}: {error}") from None
