"""A scoring process: loads the rewards, then scores one outcome after the other until the generator is gone."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import os
import resource
import signal
import socket
import struct
import sys
import sysconfig
import traceback
from collections.abc import Awaitable, Callable, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

import msgpack

from common.unpack import MAX_VALUES, Unreadable, unpack
from generator.rewards.calls import Function
from generator.rewards.outcome import Outcome, vote
from generator.rewards.registry import BUILTIN, make_reward

MAX_ERROR = 2000  # characters
ALLOWED = "allowed: a finite number (also numpy's or torch's, or a list of one), or a mapping with a `score`"
# Folders of code that is not the user's: SPO's packages, and installed ones.
OWN_FOLDERS = tuple(str(Path(__file__).parents[2] / name) + os.sep for name in ("generator", "common"))
INSTALLED = tuple(path + os.sep for path in {sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib")})
HEAD = struct.Struct("!I")
# A task has at most 16 MiB and MAX_VALUES values, including its row; a job adds the response and rewards of turns.
MAX_JOB = 64 << 20  # bytes
MAX_JOB_VALUES = 2 * MAX_VALUES
MAX_RESULT = 1 << 16  # bytes; a result is a number or one line


def pack(message: Any) -> bytes:
    """Encode a message for the socket between a generator and a scoring process: its length, then msgpack."""
    body = msgpack.packb(message, unicode_errors="surrogatepass")
    return HEAD.pack(len(body)) + body


def unpack_job(body: bytes) -> Any:
    """Decode a scoring process's job, given without its length; raises `Unreadable`."""
    return unpack(body, MAX_JOB, MAX_JOB_VALUES, unicode_errors="surrogatepass", strict_map_key=False)


def unpack_result(body: bytes, job: int) -> dict[str, Any]:
    """Decode a scoring process's answer to the job with this number, given without its length.

    Returns:
        A mapping with `error`, one line, or `value`: a finite number, a text, or None if the reward left it out.

    Raises:
        Unreadable: it is anything else; processes that a reward has started may write to the socket.
    """
    result = unpack(body, MAX_RESULT, max_values=5, unicode_errors="surrogatepass")
    if not isinstance(result, dict) or result.pop("job", None) != job:
        raise Unreadable(f"not to job {job}")
    match result:
        case {"error": str()} | {"value": str() | None} if len(result) == 1:
            return result
        case {"value": float() as value} if len(result) == 1 and math.isfinite(value):
            return {"value": value}
    raise Unreadable("neither an error nor a value")


def main(descriptor: int) -> None:
    """Serve the generator on the socket with this descriptor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the generator, which ends its workers itself
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    with connection, connection.makefile("rb") as stream, asyncio.Runner() as runner:
        rewards: dict[str, Any] = {}

        def load(settings: dict[str, Any]) -> str:
            _limit_memory(settings["memory_mb"])
            rewards.update((name, make_reward(name, options)) for name, options in settings["rewards"].items())
            return "ready"

        def call(method: str, name: str, *outcome: Any) -> float | str | None:
            reward = rewards[name]
            try:
                value = getattr(reward, method)(Outcome(*outcome))
                value = runner.run(_awaited(value)) if inspect.isawaitable(value) else value
                return vote(value) if method == "answer" else _number(value, getattr(reward, "is_batch", False))
            except BaseException as error:
                if name not in BUILTIN and (place := _place(error) or _start(reward)):
                    error.add_note(place)
                raise

        job, settings = _receive(stream)
        started = _result(load, settings)
        connection.sendall(pack({"job": job} | started))
        while "value" in started:
            job, *message = _receive(stream)
            connection.sendall(pack({"job": job} | _result(call, *message)))


def _result(work: Callable[..., float | str | None], *arguments: Any) -> dict[str, Any]:
    """The result or error of `work`. A process that it forked ends here: only the parent answers and reads jobs."""
    process = os.getpid()
    result: dict[str, float | str | None]
    code: Any = None
    try:
        result = {"value": work(*arguments)}
    except BaseException as error:  # also SystemExit, and what signal handlers raise
        result = {"error": _line(error)}
        code = error.code if isinstance(error, SystemExit) else result["error"]
    if os.getpid() != process:
        if isinstance(code, str):
            sys.stderr.write(f"{code}\n")
        sys.stdout.flush()
        # Exit without an exception: that would close the event loop, which shares a descriptor with the parent's.
        os._exit(code if isinstance(code, int) else code is not None)
    return result


async def _awaited(value: Awaitable[object]) -> object:
    return await value


def _number(value: Any, may_skip: bool = False) -> float | None:
    """The finite number that a reward returned; None if it left the episode out, which needs `may_skip`.

    Raises:
        TypeError, ValueError: it is anything else; text that looks like a number is refused too.
    """
    number = value["score"] if isinstance(value, Mapping) and "score" in value else value
    number = number.tolist() if hasattr(number, "tolist") else number  # numpy's and torch's
    if isinstance(number, list) and len(number) == 1:
        (number,) = number
        if number is None and may_skip:
            return None
    try:
        if number is None or isinstance(number, str | bytes):
            raise TypeError
        number = float(number)
    except (TypeError, ValueError, OverflowError):
        shown = f"{str(value)[:100]!r} ({type(value).__name__})"
        raise TypeError(f"returned {shown}, not a number; {ALLOWED}") from None
    if not math.isfinite(number):
        raise ValueError(f"returned {number}, which is not a finite number; {ALLOWED}")
    return number


def _place(error: BaseException) -> str:
    """File and line of the user's code in which an error arose; empty if it did not pass through any."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<", *OWN_FOLDERS))
    ]
    own = [frame for frame in frames if not frame.filename.startswith(INSTALLED)]
    return next((f"{frame.filename}:{frame.lineno}" for frame in reversed(own or frames)), "")


def _start(reward: Any) -> str:
    """File and line at which a user's reward begins; empty if it is not written in Python."""
    function = inspect.unwrap(reward.function if isinstance(reward, Function) else type(reward).score)
    callables = (function, getattr(function, "__func__", None), vars(type(function)).get("__call__"))
    code: Any = next(filter(None, (getattr(one, "__code__", None) for one in callables)), None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""


def _receive(stream: BufferedReader) -> Any:
    """The next message; exits at the end of the stream."""
    (size,) = HEAD.unpack(_exactly(stream, HEAD.size))
    if size > MAX_JOB:
        raise SystemExit(f"a job of {size:,} bytes; at most {MAX_JOB:,} are allowed")
    return unpack_job(_exactly(stream, size))


def _exactly(stream: BufferedReader, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise SystemExit(0)
    return data


def _limit_memory(mib: int) -> None:
    """Limit memory, and let this process be killed first when the machine's memory runs out."""
    resource.setrlimit(resource.RLIMIT_DATA, (mib << 20, mib << 20))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _line(error: BaseException) -> str:
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # an error whose __str__ fails
        text = type(error).__name__
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return (text[:MAX_ERROR] + notes[:MAX_ERROR]).replace("\n", " ")
