"""A small HTTP server on loopback that answers as a test asks, faults included."""

from __future__ import annotations

import contextlib
import json
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import AF_UNIX
from typing import Any

Handler = BaseHTTPRequestHandler


@dataclass
class Double:
    """The requests so far, and the answers: one for each request, the last one repeated.

    Attributes:
        connections: of all requests; `connected` counts those that the client has not closed.
        open: requests under way; `most_open`: most of them at a time.
    """

    answers: list[Callable[[Handler, Any], None]]
    url: str = ""
    port: int = 0
    requests: list[Any] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    connections: set[Any] = field(default_factory=set)
    connected: int = 0
    open: int = 0
    most_open: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class UnixServer(ThreadingHTTPServer):
    address_family = AF_UNIX

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "localhost", 0


@contextmanager
def serve(
    *answers: Callable[[Handler, Any], None], host: str = "127.0.0.1", port: int = 0, socket: Path | None = None
) -> Iterator[Double]:
    """Serve until the block ends, at a port of `host` or on a Unix socket."""
    double = Double(list(answers))

    class Answering(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle(self) -> None:
            with double.lock:
                double.connected += 1
            with contextlib.suppress(ConnectionResetError):
                super().handle()
            with double.lock:
                double.connected -= 1

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"] or 0))
            kind = self.headers["Content-Type"] or "application/json"
            if "ndjson" in kind:
                self.answer([json.loads(line) for line in content.splitlines()])
            else:
                self.answer(json.loads(content or b"null") if kind == "application/json" else content)

        def do_PUT(self) -> None:
            self.answer(self.rfile.read(int(self.headers["Content-Length"])))

        def do_GET(self) -> None:
            self.answer(None)

        do_DELETE = do_GET

        def answer(self, body: Any) -> None:
            with double.lock:
                double.requests.append(body)
                double.paths.append(self.path)
                double.headers.append(dict(self.headers))
                double.connections.add(self.client_address)
                double.open += 1
                double.most_open = max(double.most_open, double.open)
                chosen = double.answers[min(len(double.requests), len(double.answers)) - 1]
            try:
                chosen(self, body)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True
            finally:
                with double.lock:
                    double.open -= 1

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer((host, port), Answering) if socket is None else UnixServer(str(socket), Answering)  # type: ignore[arg-type]
    server.daemon_threads = True
    double.port = server.server_port
    double.url = f"http://{host}:{server.server_port}" if socket is None else f"unix:{socket}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield double
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def raw(handler: Handler, data: bytes, status: int = 200, promised: int | None = None, **headers: str) -> None:
    """Answer with bytes; `promised` is the length that the header claims."""
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("Content-Length", str(len(data) if promised is None else promised))
    handler.end_headers()
    handler.wfile.write(data)


def says(text: str) -> Callable[[Handler, Any], None]:
    """A chat completion."""
    reply = {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}
    return lambda handler, body: raw(handler, json.dumps(reply).encode())


def fails(status: int, text: str = "no", **headers: str) -> Callable[[Handler, Any], None]:
    return lambda handler, body: raw(handler, text.encode(), status, **headers)


def hangs(handler: Handler, body: Any) -> None:
    """Does not answer until the client gives up."""
    handler.close_connection = handler.connection.recv(1) == b""


def endless(handler: Handler, body: Any) -> None:
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    for _ in range(1000):
        handler.wfile.write(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
    raise AssertionError("the client read 65 MB")
