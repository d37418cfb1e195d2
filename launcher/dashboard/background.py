"""Serves the page of a run from a thread of this process, for notebooks."""

from __future__ import annotations

import asyncio
import secrets
import threading
from functools import cache
from pathlib import Path

from common.network import bound, listen
from launcher.dashboard.app import Server, Service
from launcher.dashboard.command import BACKLOG, page_address
from launcher.dashboard.watch import Watch
from launcher.folder.run_folder import find_runs

HOST = "127.0.0.1"


@cache
def serve_folder(folder: Path) -> str:
    """Serve the page of a run folder until this process ends; returns its address, the same at each call."""
    token, listener = secrets.token_urlsafe(24), bound(HOST, 0)
    listen(listener, HOST, 0, BACKLOG)
    port = listener.getsockname()[1]
    watch = Watch(find_runs([folder]))
    server = Server(Service(watch).app([HOST], token, f"spo_{port}"), watch)
    threading.Thread(target=lambda: asyncio.run(server.serve([listener])), name="dashboard", daemon=True).start()
    return page_address(HOST, port, token)
