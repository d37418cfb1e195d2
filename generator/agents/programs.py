"""Runs an agent on one task: a function in this process, or a program in a process and a folder of its own."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import common
from common.config import AgentConfig
from common.errors import UserError
from common.messages import Failure
from common.network import without_proxy_on_loopback
from common.plugins import FOLDERS, load_object
from common.process import ending
from generator.agents.tree import leaves
from generator.tools.toolbox import in_short

ENTRY_POINTS = "spo.agents"  # entry points of installed packages
TASK_FILE, ANSWER_FILE = "task.json", "answer.txt"
MAX_ANSWER = 1 << 20  # bytes
SHOWN_OUTPUT = 400  # characters at the end of what a program prints, for messages
FREE_OUTPUT = 1 << 20  # bytes that are read as fast as they come
PAUSE = 0.01  # seconds before each further read, so that a flood of output does not keep the event loop busy

# The keeper exits when the program does, and kills everything that the program has started.
_KEEPER = """
import os, signal, sys
sys.path.append(sys.argv[1])
from common.keeper import keep
keep(int(sys.argv[2]), (0,), signal.SIGUSR1)
signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and programs would inherit that
try:
    os.execvp(sys.argv[3], sys.argv[3:])
except OSError as error:
    sys.exit(f"cannot start: {error}")
"""


class AgentFailed(Exception):
    """The agent raised an exception, or exited with a code other than 0."""

    failure = Failure.AGENT_FAILED


@dataclass(frozen=True, slots=True)
class AgentTask:
    """What an agent gets.

    Attributes:
        prompt: text, or chat messages.
        row: the data row without its prompt and its reference answer; no other field has the answer. Only an
            environment, which also scores the episode, gets the whole row.
        model: the only model that the endpoint has.
        base_url: of OpenAI's API, for this task only.
        anthropic_base_url: of Anthropic's API.
        api_key: also for this task only.
        reward_url: a secret; the agent may send its own reward there, once: POST `{"reward": NUMBER}`. None unless
            `episode.reward` asks for it.
        folder: an empty folder, removed once the episode is scored.
    """

    prompt: str | list[dict[str, Any]]
    row: dict[str, Any]
    model: str
    base_url: str
    anthropic_base_url: str
    api_key: str
    reward_url: str | None
    folder: Path


class Program(Protocol):
    """An agent that is ready to play tasks."""

    async def run(self, task: AgentTask) -> object:
        """Play a task until the agent ends, and return what it returns; if cancelled, end its processes.

        Raises:
            AgentFailed: the agent failed.
            OSError: the machine cannot start it.
            Exception: the container, sandbox or environment failed, which says nothing about the model.
        """
        ...


def make_program(config: AgentConfig) -> Program:
    """Make the program that a configuration names; raises `UserError` if there is none of this name."""
    if config.command is not None:
        return _Command(config.command)
    assert config.function is not None
    return _Function(config.function)


class _Function:
    """A Python function. A coroutine function runs on the event loop, any other in a thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._function: Callable[[AgentTask], Any] = load_object(name, {}, "episode.agent", ENTRY_POINTS)
        if not callable(self._function) or isinstance(self._function, type):
            raise UserError(f"episode.agent = {name!r} is not a function of (task)")
        with contextlib.suppress(ValueError):  # a function in C may have no signature
            try:
                inspect.signature(self._function).bind("task")
            except TypeError as error:
                raise UserError(f"episode.agent = {name!r} cannot be called with (task): {error}") from None

    async def run(self, task: AgentTask) -> object:
        try:
            if inspect.iscoroutinefunction(self._function):
                return await self._function(task)
            returned = await asyncio.to_thread(self._called, task)
            # Whether a `functools.partial` returns a coroutine shows only when it is called.
            return await returned if inspect.isawaitable(returned) else returned
        except (Exception, SystemExit) as error:
            raise self._failure(error) from None

    def _called(self, task: AgentTask) -> object:
        """Call the function in a thread, out of which a `StopIteration` would never come: its future cannot hold it."""
        try:
            return self._function(task)
        except StopIteration as error:
            raise self._failure(error) from None

    def _failure(self, error: BaseException) -> AgentFailed:
        if isinstance(error, AgentFailed):  # from `_called`
            return error
        return AgentFailed(f"{self._name} raised {in_short(error)} ({_place(error)})")


def _place(error: BaseException) -> str:
    """Where a function failed: the innermost line of its own file."""
    frames = list(traceback.extract_tb(error.__traceback__))
    # Above the function's own frames are those of this file, and of the thread in which it was called.
    above = max((number for number, frame in enumerate(frames) if frame.filename == __file__), default=-1)
    frames = frames[above + 1 :]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f"{Path(own[-1].filename).name}, line {own[-1].lineno}" if own else "before its first line"


class _Command:
    """A program, started for each task."""

    def __init__(self, command: Sequence[str]) -> None:
        path = shutil.which(command[0], path=_search_path()) or named_file(command[0])
        if path is None or not os.access(path, os.X_OK):
            what = "there is no such program" if path is None else f"{path} is not executable"
            raise UserError(
                f"episode.agent.command = {list(command)}: {what}; give one that is in the PATH, or its path"
            )
        self._name = command[0]
        self._command = [os.path.abspath(path), *(named_file(word) or word for word in command[1:])]

    async def run(self, task: AgentTask) -> object:
        folder = str(task.folder)
        (task.folder / TASK_FILE).write_bytes(described(task, folder))
        # asyncio kills a process whose start is cancelled; a killed keeper would leave its program running.
        starting = asyncio.create_task(self._start(task, described(task, folder, secret=True)))
        try:
            process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.shield(_give_up(starting))
            raise
        try:
            assert process.stdout is not None
            output = await _end_of(process.stdout)
            code = await process.wait()
        finally:
            await _end(process)
        if code != 0:
            how = "was killed by" if code < 0 else "ended with"
            raise AgentFailed(f"{self._name} {how} {ending(code)}: {shown(output)}")
        path = task.folder / ANSWER_FILE
        if not path.is_file():
            return None
        with path.open("rb") as file:
            return answer_text(file.read(MAX_ANSWER + 1))

    async def _start(self, task: AgentTask, stdin: bytes) -> asyncio.subprocess.Process:
        """Start the keeper with the program, and begin to write its stdin.

        Stdin is a pipe, not a file: no other process can read again what the agent has read.
        """
        root = str(Path(common.__file__).parents[1])
        reading, writing = os.pipe()
        with os.fdopen(reading, "rb") as end:
            loop = asyncio.get_running_loop()
            writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(writing, "wb"))
            try:
                # -I -S: no file of the task and no variable changes what the keeper imports, and it starts at once.
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", "-c", _KEEPER, root, str(os.getpid()), *self._command),
                    stdin=end,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                    cwd=task.folder,
                    env=_environment(task),
                    start_new_session=True,
                )
            except BaseException:
                writer.abort()
                raise
        writer.write(stdin)
        writer.close()  # closes the pipe once all is written, or no process can read it any more
        return process


async def _give_up(starting: asyncio.Task[asyncio.subprocess.Process]) -> None:
    """End a program as soon as it has started."""
    with contextlib.suppress(OSError):
        await _end(await starting)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Have the keeper kill all that is left, and wait until it has."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGUSR1)
    await process.wait()


def _search_path() -> str:
    """Folders with programs: this Python's first, so that `python` is the one that SPO is installed for."""
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))


def named_file(word: str) -> str | None:
    """The absolute path of a file, relative to this folder or the configuration's; None if there is no such file."""
    paths = (os.path.join(folder, word) for folder in (Path.cwd(), *FOLDERS))
    return next(filter(os.path.isfile, paths), None)


def packed(command: Sequence[str], folder: str, more: Collection[str] = ()) -> tuple[list[str], dict[str, Path]]:
    """The command with each argument that names a file replaced by its path in `folder`; and these files, by name.

    Args:
        more: names of files that SPO writes there, beside those of the task and of the answer.

    Raises:
        UserError: two files have the same name, or one has the name of a file of SPO's.
    """
    name, *words = command
    named = {word: Path(path) for word in words if (path := named_file(word)) is not None}
    files = {path.name: path for path in named.values()}
    if len(files) < len(set(named.values())):
        raise UserError(
            f"episode.agent.command = {list(command)}: two files have the same name, and one would overwrite the other "
            "in the agent's folder"
        )
    if taken := sorted(files.keys() & {TASK_FILE, ANSWER_FILE, *more}):
        raise UserError(
            f"episode.agent.command = {list(command)}: {files[taken[0]]} has the name of a file that SPO writes in the "
            "agent's folder; give it another name"
        )
    return [name, *(f"{folder}/{named[word].name}" if word in named else word for word in words)], files


def asked(prompt: str | list[dict[str, Any]]) -> str:
    """What a prompt asks: its text, or that of its last user message."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    contents = [message.get("content") for message in messages if message["role"] == "user"]
    return "\n".join(leaves(contents[-1:]))


def _environment(task: AgentTask) -> dict[str, str]:
    """The generator's environment, with the agent's variables in place of SPO's, some of which are secret."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPO_")}
    environment |= without_proxy_on_loopback(environment)  # the endpoint is there
    return environment | {"PATH": _search_path()} | variables(task, str(task.folder))


def variables(task: AgentTask, folder: str) -> dict[str, str]:
    """The variables by which an agent's program finds its task; `folder` is its folder as the program sees it."""
    return {
        "OPENAI_BASE_URL": task.base_url,
        "OPENAI_API_KEY": task.api_key,
        "ANTHROPIC_BASE_URL": task.anthropic_base_url,
        "ANTHROPIC_API_KEY": task.api_key,
        "SPO_MODEL": task.model,
        "SPO_TASK_FILE": f"{folder}/{TASK_FILE}",
        "SPO_ANSWER_FILE": f"{folder}/{ANSWER_FILE}",
    }


def described(task: AgentTask, folder: str, secret: bool = False) -> bytes:
    """A task as JSON; `folder` is its folder as the program sees it.

    Only with `secret` does it have `reward_url`: programs that the model wrote may read the task's file.
    """
    fields = asdict(task) | {"folder": folder}
    if not secret:
        del fields["reward_url"]
    return json.dumps(fields).encode()


def answer_text(content: bytes) -> str:
    """The answer in the file that a program has written; raises `AgentFailed` if it is too long."""
    if len(content) > MAX_ANSWER:
        raise AgentFailed(f"{ANSWER_FILE} has more than {MAX_ANSWER:,} bytes")
    return content.decode(errors="replace")


def shown(output: str) -> str:
    """The end of what a failed program printed, in one line."""
    return " ".join(output.split())[-SHOWN_OUTPUT:] or "it printed nothing"


async def _end_of(stream: asyncio.StreamReader) -> str:
    """Read a program's output to its end, and return the last of it."""
    tail, size = b"", 0
    while chunk := await stream.read(1 << 16):
        tail, size = (tail + chunk)[-SHOWN_OUTPUT:], size + len(chunk)
        if size > FREE_OUTPUT:
            await asyncio.sleep(PAUSE)
    return tail.decode(errors="replace")
