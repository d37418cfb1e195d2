"""The command `spo dashboard`."""

from __future__ import annotations

import asyncio
import secrets
import socket
import sys
import webbrowser
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from common.errors import UserError
from common.network import bound, is_loopback, listen
from launcher.folder.run_folder import find_runs

NEEDED = ("starlette", "uvicorn")
EVERYWHERE = ("0.0.0.0", "::")
BACKLOG = 128


def dashboard(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN...]", help="Run folders, or folders of runs; by default runs/."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port.")] = 8265,
    host: Annotated[str, typer.Option(help="Address to listen on; any but loopback needs a token.")] = "127.0.0.1",
    token: Annotated[
        str | None, typer.Option(envvar="SPO_DASHBOARD_TOKEN", help="Token that readers need; by default generated.")
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Show runs on one page in the browser, while they run and afterwards.

    It reads run folders and writes nothing. Only this machine can reach it, unless --host names another address. Then
    the printed address contains a token, and anyone with the token can read prompts, answers and configuration.

    - `spo dashboard runs/quickstart-1 --open`
    - `spo dashboard runs/seed-0 runs/seed-1 runs/seed-2`
    - `spo dashboard --host 0.0.0.0 --port 8080`
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise UserError(f"spo dashboard needs {' and '.join(missing)}: pip install 'spo-trainer[launcher]'")
    if token is not None and not token:
        raise UserError("--token is empty; give a token, or leave the option out")
    folders = find_runs(runs or [])

    from launcher.dashboard.app import Service, serve
    from launcher.dashboard.watch import Watch

    if token is None and not is_loopback(host):
        token = secrets.token_urlsafe(24)
    with bound(host, port) as listener:
        listen(listener, host, port, BACKLOG)
        port = listener.getsockname()[1]
        url = _address(host, port, token)
        watch = Watch(folders)
        app = Service(watch).app([host.lower()], token, f"spo_{port}")
        typer.echo(f"{f'{len(folders)} runs' if len(folders) > 1 else folders[0].name}: {url}  (stop with Ctrl-C)")
        sys.stdout.flush()
        if open_:
            webbrowser.open(url)
        asyncio.run(serve(app, watch, listener))


def _address(host: str, port: int, token: str | None) -> str:
    name = socket.gethostname() if host in EVERYWHERE else host
    query = f"?token={quote(token, safe='')}" if token else ""
    return f"http://{f'[{name}]' if ':' in name else name}:{port}/{query}"
