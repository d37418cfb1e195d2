"""The containers of agents: started ahead, one for each task, removed after it, and never left behind.

A container's first process only sleeps. The agent is run beside it by the engine's `exec`, and so are the task's tests,
after a restart that has killed all that the agent has started. The endpoint comes in as a Unix socket; a forwarder lets
the agent reach it by TCP.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from common.config import Config
from common.config.agent import ContainerConfig
from common.errors import UserError
from common.files import is_abandoned
from common.messages import first_problem
from generator.agents.containers.engine import ContainerEngine, ContainerFailed
from generator.agents.programs import (
    ANSWER_FILE,
    MAX_ANSWER,
    TASK_FILE,
    AgentFailed,
    AgentTask,
    answer_text,
    asked,
    described,
    packed,
    shown,
    variables,
)
from sandbox_client.worker.command import FORWARD

FOLDER = "/spo"  # of the task's files, in the container
SOCKETS = "/run/spo"  # the folder of the endpoint's socket, in the container
PORT = 39111  # where agents find the endpoint; programs of a task rarely listen there
URL = f"http://127.0.0.1:{PORT}"
PROMPT_FILE, LOG_FILE = "prompt.txt", "agent.log"
OWN_FILES = (PROMPT_FILE, "forward.py", "forward.js")  # beside those that every program finds
OWNER, RUN, GENERATOR = "spo.folder", "spo.run", "spo.generator"  # labels
LOOK_SECONDS = 5.0  # between checks of a container's disk usage
CLOSE_SECONDS = 20.0

# The forwarder (`FORWARD`) in JavaScript, for images that have Node.js but no Python.
FORWARD_JS = """
const net = require("net"), [port, path, ...command] = process.argv.slice(2);
net.createServer((one) => {
  const other = net.connect(path);
  one.on("error", () => other.destroy()), other.on("error", () => one.destroy());
  one.pipe(other), other.pipe(one);
}).listen(Number(port), "127.0.0.1", () => {
  const agent = require("child_process").spawn(command[0], command.slice(1), { stdio: "inherit" });
  agent.on("error", (error) => { console.error(String(error)); process.exit(127); });
  agent.on("exit", (code) => process.exit(code === null ? 137 : code));
});
"""
_START = f"""
if command -v python3 >/dev/null; then exec python3 -I -S {FOLDER}/forward.py {PORT} {SOCKETS}/socket "$@"; fi
if command -v node >/dev/null; then exec node {FOLDER}/forward.js {PORT} {SOCKETS}/socket "$@"; fi
echo "the image has neither python3 nor node, one of which lets the agent reach the model" >&2; exit 125
"""
CANNOT_FORWARD = 125  # exit code of `_START` without an interpreter: the image is at fault, not the agent


def settings_for(config: ContainerConfig, row: dict[str, Any]) -> ContainerConfig:
    """The container's settings for a task; raises `ContainerFailed` for those of its row that are wrong."""
    own = row.get("container")
    if own is None:
        return config
    try:
        return ContainerConfig.model_validate({**config.model_dump(), **own})
    except (ValidationError, TypeError) as error:
        problem = first_problem(error) if isinstance(error, ValidationError) else str(error)
        raise ContainerFailed(f"the row's column 'container' = {own!r}: {problem}") from None


@dataclass(frozen=True, eq=False)
class TaskContainer:
    """A started container with one attempt at a task."""

    engine: ContainerEngine
    id: str
    image: str
    settings: ContainerConfig
    command: Sequence[str]  # of the agent
    files: Mapping[str, Path]  # files that the command names, by their names in the container's folder

    async def run(self, task: AgentTask) -> object:
        """Play a task until the program ends; see `Program.run`.

        If this is cancelled, what the program has started runs on until the container is restarted or removed.

        Raises:
            AgentFailed: the program failed, or wrote more than it may.
            ContainerFailed: the engine or the container failed.
        """
        await self.engine.put(self.id, self._given(task), [FOLDER.removeprefix("/")])
        command = ["sh", "-c", _START, "sh", *self.command]
        environment = variables(task, FOLDER) | {"SPO_PROMPT_FILE": f"{FOLDER}/{PROMPT_FILE}"}
        playing = asyncio.ensure_future(self.execute(command, environment))
        filling = asyncio.ensure_future(self._full())
        try:
            await asyncio.wait((playing, filling), return_when=asyncio.FIRST_COMPLETED)
            if not playing.done():
                raise AgentFailed(filling.result())
            code, output = playing.result()
        finally:
            playing.cancel()
            filling.cancel()
            await asyncio.wait((playing, filling))
        (task.folder / LOG_FILE).write_text(output, encoding="utf-8")
        if code == CANNOT_FORWARD:
            raise ContainerFailed(shown(output))
        if code != 0:
            raise AgentFailed(f"{self.command[0]} ended with exit code {code}: {shown(output)}")
        content = await self.engine.get(self.id, f"{FOLDER}/{ANSWER_FILE}", MAX_ANSWER + 1)
        return None if content is None else answer_text(content)

    async def execute(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, user: str = ""
    ) -> tuple[int, str]:
        """See `ContainerEngine.execute`; if the container has ended, the error says so."""
        try:
            return await self.engine.execute(self.id, command, environment, user)
        except ContainerFailed:
            state = (await self.engine.state(self.id))["State"]
            if state["Running"]:
                raise
            raise ContainerFailed(
                f"the container of image {self.image} has ended by itself, with exit code {state['ExitCode']}"
                + (": out of memory" if state.get("OOMKilled") else "")
            ) from None

    def _given(self, task: AgentTask) -> dict[str, bytes]:
        """The files that the agent finds, by their paths."""
        files = {name: path.read_bytes() for name, path in self.files.items()}
        contents = (asked(task.prompt), FORWARD, FORWARD_JS)
        files |= {name: content.encode() for name, content in zip(OWN_FILES, contents, strict=True)}
        files[TASK_FILE] = described(task, FOLDER)
        return {f"{FOLDER.removeprefix('/')}/{name}": content for name, content in files.items()}

    async def _full(self) -> str:
        """Wait until the container has written more than `disk_mb` allows; returns a message about it."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            written = (await self.engine.state(self.id, size=True)).get("SizeRw") or 0
            if written > self.settings.disk_mb << 20:
                return (
                    f"it wrote {written >> 20:,} MiB to the container's disk; "
                    f"episode.agent.container.disk_mb = {self.settings.disk_mb} are allowed"
                )


class Containers:
    """The containers of one configuration with an agent; for one event loop.

    If tasks share one image, as many containers are started ahead as are in use, so that no task waits for a start.

    Args:
        sockets: the folder with the endpoint's socket, below this process's own folder.

    Raises:
        UserError: `DOCKER_HOST` or the command cannot be used.
    """

    def __init__(self, config: Config, sockets: Path | None, engine: ContainerEngine | None = None) -> None:
        agent = config.episode.agent
        assert agent is not None
        assert agent.image is not None
        assert agent.command is not None
        self._image, self._settings, self._run = agent.image, agent.container, config.run.name
        self._command, self._files = packed(agent.command, FOLDER, OWN_FILES)
        self._sockets = sockets
        self.engine = engine or ContainerEngine()
        self._ahead: defaultdict[ContainerConfig, deque[asyncio.Task[str]]] = defaultdict(deque)
        self._in_use: Counter[ContainerConfig] = Counter()
        self._removing: set[asyncio.Task[None]] = set()

    def image_of(self, row: Mapping[str, Any]) -> str:
        """The image of a task: the row's own, or the fixed one."""
        own = row.get(self._image)
        return own if isinstance(own, str) else self._image

    @asynccontextmanager
    async def started(self, row: dict[str, Any]) -> AsyncIterator[TaskContainer]:
        """A container for a task, removed afterwards; raises `ContainerFailed`."""
        settings = settings_for(self._settings, row)
        image = self.image_of(row)
        starting = asyncio.create_task(self._taken(image, settings))
        self._in_use[settings] += 1
        try:
            container = await asyncio.shield(starting)
            yield TaskContainer(self.engine, container, image, settings, self._command, self._files)
        finally:
            self._in_use[settings] -= 1
            self._discard(starting)

    async def close(self) -> None:
        """Remove all containers, also those that are starting, and close the connection."""
        ahead = [starting for queue in self._ahead.values() for starting in queue]
        self._ahead.clear()
        for starting in ahead:
            self._discard(starting)
        if self._removing:
            await asyncio.wait(self._removing, timeout=CLOSE_SECONDS)  # the next generator removes the others
        await self.engine.close()

    async def _taken(self, image: str, settings: ContainerConfig) -> str:
        """A container of a row's own image, or one of those that were started ahead."""
        if image != self._image:
            return await self._start(image, settings)
        ahead = self._ahead[settings]
        taken = ahead.popleft() if ahead else None
        if len(ahead) < self._in_use[settings]:
            ahead.append(asyncio.create_task(self._start(self._image, settings)))
            self._discard_unused(settings)
        if taken is not None:
            with suppress(ContainerFailed):
                container = await taken
                if (await self.engine.state(container))["State"]["Running"]:
                    return container
            self._discard(taken)  # the engine was restarted since
        return await self._start(self._image, settings)

    def _discard_unused(self, settings: ContainerConfig) -> None:
        """Remove containers with other settings than these, if more are started ahead than are in use in all."""
        others = [one for one in self._ahead if one != settings]
        excess = sum(map(len, self._ahead.values())) - self._in_use.total()
        while excess > 0 and others:
            if queue := self._ahead[others[0]]:
                self._discard(queue.popleft())
                excess -= 1
            if not queue:
                del self._ahead[others.pop(0)]

    async def _start(self, image: str, settings: ContainerConfig) -> str:
        try:
            async with asyncio.timeout(settings.start_seconds):
                return await self.engine.start(self._created(image, settings))
        except TimeoutError:
            raise ContainerFailed(f"a container of {image} has not started in {settings.start_seconds:g} s") from None

    def _created(self, image: str, settings: ContainerConfig) -> dict[str, Any]:
        assert self._sockets is not None
        labels = {OWNER: str(self._sockets.parent), RUN: self._run, GENERATOR: f"{socket.gethostname()}-{os.getpid()}"}
        host = {
            "NetworkMode": settings.network,
            "Binds": [f"{self._sockets}:{SOCKETS}:ro"],
            "Init": True,
            "NanoCpus": round(settings.cpus * 1e9),
            "Memory": settings.memory_mb << 20,
            "MemorySwap": settings.memory_mb << 20,  # with memory, so no swap
            "PidsLimit": settings.processes,
            "LogConfig": {"Type": "none"},
        }
        return {"Image": image, "Entrypoint": ["sleep"], "Cmd": ["infinity"], "Labels": labels, "HostConfig": host}

    def _discard(self, starting: asyncio.Task[str]) -> None:
        """Remove a container in the background, once it has started; only `close` waits for it."""
        removing = asyncio.create_task(self._remove(starting))
        self._removing.add(removing)
        removing.add_done_callback(self._removing.discard)

    async def _remove(self, starting: asyncio.Task[str]) -> None:
        """Remove a container once it has started; if the engine refuses, `remove_left` removes it later."""
        with suppress(ContainerFailed):
            await self.engine.remove(await starting)


async def remove_left(engine: ContainerEngine) -> int:
    """Remove the containers whose generators have ended, and return how many; raises `ContainerFailed`."""
    labelled = await engine.labelled(OWNER)
    left = [one["Id"] for one in labelled if is_abandoned(Path(one.get("Labels", {}).get(OWNER, "/")))]
    for container in left:
        await engine.remove(container)
    return len(left)


def remove_all_left(log: Any) -> None:
    """Remove the containers of generators that have ended, at the end of a run; a failure is only logged."""

    async def remove() -> None:
        engine = ContainerEngine()
        try:
            await remove_left(engine)
        except ContainerFailed as error:
            log.warning("containers of agents may be left; the next generator removes them", error=str(error))
        finally:
            await engine.close()

    asyncio.run(remove())


async def check_containers(config: Config, log: Any) -> None:
    """Ask the engine whether it answers, and remove what dead generators have left; raises `UserError`."""
    if not config.uses_containers:
        return
    engine = ContainerEngine()
    try:
        log.info("agents run in containers", engine=await engine.version())
        if left := await remove_left(engine):
            log.warning("removed containers of generators that have ended", containers=left)
    except ContainerFailed as error:
        raise UserError(f"episode.agent.image: {error}") from None
    finally:
        await engine.close()
