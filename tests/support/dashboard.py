"""A dashboard served within the test's process, and a page that was saved."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.dashboard.app import Server, Service
from launcher.dashboard.watch import Watch
from launcher.folder.run import read_one
from launcher.folder.run_folder import find_runs
from launcher.page.saved import save

if TYPE_CHECKING:
    from playwright.sync_api import Page

Open = Callable[..., "Page"]


class Dashboard:
    """A server of some run folders in a thread; may be stopped and started again on its port."""

    def __init__(self, folders: Sequence[Path], token: str | None = None) -> None:
        self.folders, self.token, self.port = folders, token, 0

    def __enter__(self) -> Dashboard:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def start(self) -> None:
        """Serve; returns once connections are accepted."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(64)
        self.port = listener.getsockname()[1]
        watch = Watch(find_runs(self.folders), lambda: find_runs(self.folders))
        self._server = Server(Service(watch).app(["127.0.0.1"], self.token, f"spo_{self.port}"), watch)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve([listener])), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop serving; the port is free afterwards."""
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()


@contextmanager
def served(folder: Path, title: str) -> Iterator[dict[str, str]]:
    """The page of one run, by a server and as a file."""
    save(folder / "report.html", title, [read_one(folder)])
    with Dashboard([folder]) as server:
        yield {"live": server.url, "saved": (folder / "report.html").as_uri(), "folder": str(folder)}
