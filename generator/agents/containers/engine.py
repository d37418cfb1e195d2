"""A client of the API of Docker's or Podman's engine, over its Unix socket: the few calls that agents need.

Each call has a connection of its own, since an engine that was restarted has closed the others. While the engine is
away, calls wait for it; the request of a call that could not connect was never sent, so it may be repeated.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import ssl
import struct
import tarfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import quote

import httpx

from common.errors import UserError
from common.messages import Failure
from common.network import Retries, RetriesExhausted, RetryableError, excerpt, read_at_most

DEFAULT = "unix:///var/run/docker.sock"
ANSWER_SECONDS = 120.0  # of a call; an engine that starts many containers at once is slow
ATTEMPTS = 16  # to connect, over about a minute
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 5.0  # seconds between them
MAX_ANSWER = 8 << 20  # bytes of JSON
FRAME = struct.Struct(">BxxxI")  # header of a piece of a program's output: its stream, and its length
SHOWN_OUTPUT = 4000  # bytes at the end of what a program prints
FREE_OUTPUT = 1 << 20  # bytes that are read as fast as they come
PAUSE = 0.01  # seconds before each further read, so that a flood of output does not keep the event loop busy

Files = Mapping[str, bytes]  # by their paths


class ContainerFailed(Exception):
    """The engine is away or refuses, or a container cannot be used; says nothing about the model."""

    failure = Failure.CONTAINER_FAILED


class NotThere(ContainerFailed):
    """There is no such image, container or file."""


class InTheWay(ContainerFailed):
    """Something else is done with it; of a container that is to be removed: another call is removing it."""


class ContainerEngine:
    """The engine at `DOCKER_HOST`, or at Docker's own socket; for one event loop.

    Args:
        address: `unix://PATH`; by default that of the environment.
        attempts: how often a call tries to connect to an engine that is away.

    Raises:
        UserError: the address is of another kind. The endpoint is a socket on this machine, so the engine must be here.
    """

    def __init__(self, address: str | None = None, attempts: int = ATTEMPTS) -> None:
        self.address = address or os.environ.get("DOCKER_HOST") or DEFAULT
        kind, _, path = self.address.partition("://")
        if kind != "unix" or not path:
            raise UserError(
                f"DOCKER_HOST = {self.address!r} is not of the form unix://PATH: agents reach the model by a socket of "
                "this machine, so the engine must be here too"
            )
        self._retries = Retries(attempts, FIRST_PAUSE, LONGEST_PAUSE)
        self._http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(
                verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),  # without certificates: a Unix socket needs none
                uds=path,
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            ),
            base_url="http://engine",
            headers={"Accept-Encoding": "identity"},  # limits count bytes before decompression
            timeout=None,
        )

    def __str__(self) -> str:
        return f"the container engine at {self.address}"

    async def version(self) -> str:
        """Name and version of the engine; raises `ContainerFailed` if none answers."""
        answer = await self._json("GET", "/version")
        name = (answer.get("Platform") or {}).get("Name") or "engine"
        return f"{name} {answer.get('Version', '')}".strip()

    async def has_image(self, name: str) -> bool:
        try:
            await self._json("GET", f"/images/{quote(name, safe=':/@')}/json")
        except NotThere:
            return False
        return True

    async def build(self, tag: str, context: Files, network: str | None, seconds: float) -> None:
        """Build an image.

        Args:
            context: the files that it is built from, with a Dockerfile.
            network: that the build uses; None means the engine's default.

        Raises:
            ContainerFailed: the build fails; the message ends with the last line of its output.
        """
        options = {"t": tag, "rm": "1", "forcerm": "1"} | ({"networkmode": network} if network else {})
        headers = {"Content-Type": "application/x-tar"}
        request = {"params": options, "content": archive(context), "headers": headers}
        last = ""
        async with self._answer("POST", "/build", seconds, **request) as answer:
            async for line in answer.aiter_lines():
                told = json.loads(line) if line.strip() else {}
                if "error" in told:
                    raise ContainerFailed(f"{tag} does not build: {excerpt(told['error'])} (after: {excerpt(last)})")
                last = str(told.get("stream") or "").strip() or last

    async def start(self, settings: Mapping[str, Any]) -> str:
        """Create and start a container, and return its id."""
        created = await self._json("POST", "/containers/create", json=dict(settings))
        container = str(created["Id"])
        try:
            await self._json("POST", f"/containers/{container}/start")
        except BaseException:
            await asyncio.shield(self.remove(container))
            raise
        return container

    async def restart(self, container: str) -> None:
        """Kill everything in a container and start it again; its files stay."""
        await self._json("POST", f"/containers/{container}/restart", params={"t": "0"})

    async def remove(self, container: str) -> None:
        """Kill and remove a container, if it is there and no other call is removing it."""
        with suppress(NotThere, InTheWay):
            await self._json("DELETE", f"/containers/{container}", params={"force": "1", "v": "1"})

    async def state(self, container: str, size: bool = False) -> dict[str, Any]:
        """The description of a container; with `size`, `SizeRw` is what was written to its disk, in bytes."""
        return await self._json("GET", f"/containers/{container}/json", params={"size": "1" if size else "0"})

    async def labelled(self, label: str) -> list[dict[str, Any]]:
        """All containers with a label, given as `NAME` or `NAME=VALUE`."""
        filters = json.dumps({"label": [label]})
        return await self._json("GET", "/containers/json", params={"all": "1", "filters": filters})

    async def execute(
        self, container: str, command: Sequence[str], environment: Mapping[str, str] | None = None, user: str = ""
    ) -> tuple[int, str]:
        """Run a program in a container; returns its exit code, and the end of what it printed.

        If this is cancelled, the program goes on until the container is restarted or removed.
        """
        variables = [f"{name}={value}" for name, value in (environment or {}).items()]
        settings = {"Cmd": list(command), "Env": variables, "User": user, "AttachStdout": True, "AttachStderr": True}
        created = await self._json("POST", f"/containers/{container}/exec", json=settings)
        path = f"/exec/{created['Id']}"
        async with self._answer("POST", f"{path}/start", None, json={"Detach": False, "Tty": False}) as answer:
            output = await end_of(answer.aiter_raw())
        ended = await self._json("GET", f"{path}/json")
        if ended.get("Running") or not isinstance(ended.get("ExitCode"), int):
            raise ContainerFailed(f"{self} has lost the program {command[0]!r}")
        return ended["ExitCode"], output.decode(errors="replace")

    async def put(self, container: str, files: Files, folders: Sequence[str] = ()) -> None:
        """Write files into a container, which anyone there may read and run, and folders that anyone may write to."""
        params = {"path": "/"}
        await self._json("PUT", f"/containers/{container}/archive", params=params, content=archive(files, folders))

    async def get(self, container: str, path: str, limit: int) -> bytes | None:
        """A file of a container, cut after `limit` bytes; None if there is no such file."""
        blocks = limit + 2 * tarfile.RECORDSIZE  # the archive has headers before the file and padding after it
        try:
            request = {"params": {"path": path}}
            async with self._answer("GET", f"/containers/{container}/archive", ANSWER_SECONDS, **request) as answer:
                data = await read_at_most(answer.aiter_raw(), blocks)
        except NotThere:
            return None
        try:
            with tarfile.open(fileobj=io.BytesIO(data)) as tar:
                member = tar.next()
                if member is None or not member.isreg():
                    return None
                return data[member.offset_data : member.offset_data + min(member.size, limit)]
        except tarfile.TarError as error:
            raise ContainerFailed(f"{self} sent no archive of {path}: {error}") from None

    async def close(self) -> None:
        await self._http.aclose()

    async def _json(self, method: str, path: str, **request: Any) -> Any:
        async with self._answer(method, path, ANSWER_SECONDS, **request) as answer:
            content = await read_at_most(answer.aiter_raw(), MAX_ANSWER)
        try:
            return json.loads(content) if content else {}
        except ValueError:
            raise ContainerFailed(
                f"{self} answers {method} {path} with text other than JSON: {excerpt(content)}"
            ) from None

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, seconds: float | None, **request: Any
    ) -> AsyncIterator[httpx.Response]:
        """The answer to a call, to be read within `seconds`; raises `ContainerFailed` for one that is an error."""
        try:
            async with asyncio.timeout(seconds):
                answer = await self._send(method, path, request)
                try:
                    if answer.is_error:
                        text = await read_at_most(answer.aiter_raw(), MAX_ANSWER)
                        kind = KINDS.get(answer.status_code, ContainerFailed)
                        raise kind(f"{self} refuses {method} {path}: {answer.status_code}: {_message(text)}")
                    yield answer
                finally:
                    await answer.aclose()
        except httpx.HTTPError as error:
            raise ContainerFailed(f"{self}: {method} {path}: {type(error).__name__}: {error}") from None
        except TimeoutError:
            raise ContainerFailed(f"{self} has not answered {method} {path} within {seconds:g} s") from None

    async def _send(self, method: str, path: str, request: dict[str, Any]) -> httpx.Response:
        async def attempt() -> httpx.Response:
            try:
                return await self._http.send(self._http.build_request(method, path, **request), stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                raise RetryableError(str(error)) from None

        try:
            return await self._retries(attempt)
        except RetriesExhausted as error:
            raise ContainerFailed(f"{self} is away ({error}); start it, or set DOCKER_HOST") from None


KINDS = {404: NotThere, 409: InTheWay}


def _message(content: bytes) -> str:
    """The text of an error answer."""
    try:
        return excerpt(str(json.loads(content)["message"]))
    except (ValueError, LookupError, TypeError):
        return excerpt(content)


async def end_of(chunks: AsyncIterator[bytes]) -> bytes:
    """Read a program's output, which comes in frames, to its end, and return the last of it."""
    waiting, left, tail, size = bytearray(), 0, b"", 0
    async for chunk in chunks:
        waiting += chunk
        size += len(chunk)
        at = 0  # to cut off each of thousands of small frames would copy the rest of the chunk as often
        while at < len(waiting):
            if left == 0:
                if len(waiting) - at < FRAME.size:
                    break
                left, at = FRAME.unpack_from(waiting, at)[1], at + FRAME.size
            piece = waiting[at : at + left]
            at, left = at + len(piece), left - len(piece)
            tail = (tail + piece)[-SHOWN_OUTPUT:]
        del waiting[:at]
        if size > FREE_OUTPUT:
            await asyncio.sleep(PAUSE)
    return tail


def archive(files: Files, folders: Sequence[str] = ()) -> bytes:
    """A tar archive of files that anyone may read and run, and of folders that anyone may write to."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as tar:
        for folder in folders:
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o777
            tar.addfile(entry)
        for path, content in files.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(content), 0o755
            tar.addfile(entry, io.BytesIO(content))
    return written.getvalue()
