"""A stand-in for Docker's engine on a Unix socket: containers in memory, whose programs a test plays."""

from __future__ import annotations

import gzip
import io
import json
import re
import struct
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from generator.agents.containers.engine import ContainerEngine
from tests.support.http_double import Handler, raw, serve

IMAGE = "task:1"


@dataclass
class Box:
    """A container.

    Attributes:
        files: by their paths without the first slash.
        restarts: what files it had at each restart.
    """

    id: str
    settings: dict[str, Any]
    files: dict[str, bytes] = field(default_factory=dict)
    running: bool = True
    written: int = 0
    restarts: list[list[str]] = field(default_factory=list)

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.settings["Labels"])


# A program: gets its container, its command and its variables; returns exit code and output.
Play = Callable[[Box, list[str], dict[str, str]], tuple[int, bytes]]


def nothing(box: Box, command: list[str], variables: dict[str, str]) -> tuple[int, bytes]:
    return 0, b""


@dataclass
class StandIn:
    """Answers the engine's calls.

    Attributes:
        agent, tests: play the agent, and `/tests/test.sh`.
        faults: answers in place of the stand-in's own, by patterns of `METHOD PATH`.
        created: all containers so far; `boxes` are those that are there.
    """

    agent: Play = nothing
    tests: Play = nothing
    images: set[str] = field(default_factory=lambda: {IMAGE})
    faults: dict[str, Callable[[Handler, Any], None]] = field(default_factory=dict)
    boxes: dict[str, Box] = field(default_factory=dict)
    created: list[Box] = field(default_factory=list)
    built: list[dict[str, Any]] = field(default_factory=list)
    execs: list[tuple[Box, dict[str, Any], int | None]] = field(default_factory=list)
    path: Path = Path()

    def engine(self, **options: Any) -> ContainerEngine:
        return ContainerEngine(f"unix://{self.path}", **{"attempts": 1} | options)

    def answer(self, handler: Handler, body: Any) -> None:
        url = urlsplit(handler.path)
        call, query = f"{handler.command} {url.path}", parse_qs(url.query)
        for pattern, fault in self.faults.items():
            if re.fullmatch(pattern, call):
                return fault(handler, body)
        parts = url.path.strip("/").split("/")
        kind = getattr(self, f"_{parts[0]}")
        return kind(handler, handler.command, parts[1:], query, body)

    def _version(self, handler: Handler, *_: Any) -> None:
        _json(handler, {"Platform": {"Name": "Stand-in"}, "Version": "1"})

    def _images(self, handler: Handler, method: str, parts: list[str], *_: Any) -> None:
        self._there(handler, "/".join(parts[:-1]) in self.images, {"Id": parts[0]})

    def _build(self, handler: Handler, method: str, parts: list[str], query: Any, body: bytes) -> None:
        self.built.append({"tag": query["t"][0], "files": _untarred(body)})
        self.images.add(query["t"][0])
        raw(handler, b'{"stream": "Step 1/1"}\n{"stream": "done"}\n')

    def _exec(self, handler: Handler, method: str, parts: list[str], query: Any, body: Any) -> None:
        box, settings, code = self.execs[int(parts[0])]
        if parts[1] == "json":
            return _json(handler, {"Running": code is None, "ExitCode": code})
        command = settings["Cmd"]
        variables = dict(one.split("=", 1) for one in settings["Env"])
        code, output = self._played(box, command, variables)
        self.execs[int(parts[0])] = (box, settings, code)
        frames = [struct.pack(">BxxxI", 1, len(output)) + output] if output else []
        return raw(handler, b"".join(frames))

    def _played(self, box: Box, command: list[str], variables: dict[str, str]) -> tuple[int, bytes]:
        if command == ["/tests/test.sh"]:
            return self.tests(box, command, variables)
        if "rm -rf /tests" in command[-1]:
            for path in [one for one in box.files if one.startswith(("tests/", "logs/verifier/"))]:
                del box.files[path]
            return 0, b""
        return self.agent(box, command, variables)

    def _containers(self, handler: Handler, method: str, parts: list[str], query: Any, body: Any) -> None:
        if parts == ["json"]:
            (label,) = json.loads(query["filters"][0])["label"]
            name, has_value, value = label.partition("=")
            there = [
                one
                for one in self.boxes.values()
                if name in one.labels and (not has_value or one.labels[name] == value)
            ]
            return _json(handler, [{"Id": one.id, "Labels": one.labels} for one in there])
        if parts == ["create"]:
            return self._create(handler, body)
        box = self.boxes.get(parts[0])
        if box is None:
            return self._there(handler, False, {})
        if method == "DELETE":
            del self.boxes[box.id]
            return raw(handler, b"", 204)
        return self._act(handler, method, box, parts[1], query, body)

    def _create(self, handler: Handler, body: Any) -> None:
        if body["Image"] not in self.images:
            return _json(handler, {"message": f"No such image: {body['Image']}"}, 404)
        box = Box(f"c{len(self.created)}", body)
        self.boxes[box.id] = box
        self.created.append(box)
        return _json(handler, {"Id": box.id}, 201)

    def _act(self, handler: Handler, method: str, box: Box, act: str, query: Any, body: Any) -> None:
        if act == "json":
            return _json(handler, {"State": {"Running": box.running, "ExitCode": 1}, "SizeRw": box.written})
        if act == "exec":
            if not box.running:
                return _json(handler, {"message": f"container {box.id} is not running"}, 409)
            self.execs.append((box, body, None))
            return _json(handler, {"Id": str(len(self.execs) - 1)}, 201)
        if act == "archive" and method == "PUT":
            box.files |= _untarred(body)
            return raw(handler, b"")
        if act == "archive":
            path = query["path"][0].strip("/")
            data = _tarred(path, box.files[path]) if path in box.files else b""
            if "gzip" in handler.headers["Accept-Encoding"]:  # as Docker does
                data = gzip.compress(data)
            return raw(handler, data) if data else self._there(handler, False, {})
        if act == "restart":
            box.restarts.append(sorted(box.files))
        return raw(handler, b"", 204)

    def _there(self, handler: Handler, there: bool, description: dict[str, Any]) -> None:
        _json(handler, description if there else {"message": "no such thing"}, 200 if there else 404)


@contextmanager
def stand_in(folder: Path, **behaviour: Any) -> Iterator[StandIn]:
    """A stand-in that listens on a socket in a folder."""
    made = StandIn(**behaviour, path=folder / "engine.sock")
    with serve(made.answer, socket=made.path):
        yield made


def _json(handler: Handler, answer: Any, status: int = 200) -> None:
    raw(handler, json.dumps(answer).encode(), status)


def _untarred(data: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        opened = {member.name: tar.extractfile(member) for member in tar.getmembers()}
        return {name: file.read() for name, file in opened.items() if file is not None}


def _tarred(path: str, content: bytes) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as tar:
        entry = tarfile.TarInfo(path.rpartition("/")[2])
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
    return written.getvalue()
