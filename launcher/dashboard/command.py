"""The command `spo dashboard`."""

from __future__ import annotations

import asyncio
import secrets
import socket
import sys
import tempfile
import webbrowser
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from common.errors import UserError
from common.network import bound, is_loopback, listen
from launcher.folder.run_folder import find_runs

NEEDED = ("httptools", "starlette", "uvicorn")
EVERYWHERE = ("0.0.0.0", "::")
BACKLOG = 128


def dashboard(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN...]", help="Run folders, or folders of runs; by default runs/."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port.")] = 8265,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    token: Annotated[
        str | None, typer.Option(envvar="SPO_DASHBOARD_TOKEN", help="Token that readers need; by default generated.")
    ] = None,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Let every account of this machine read it; only on loopback.")
    ] = False,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Show runs on one page in the browser, while they run and afterwards.

    It reads run folders and writes nothing. Only this machine can reach it, unless --host names another address. The
    printed address contains a token: anyone with it, and nobody else, can read prompts, answers and configuration.

    - `spo dashboard runs/quickstart-1 --open`
    - `spo dashboard runs/seed-0 runs/seed-1 runs/seed-2`
    - `spo dashboard --host 0.0.0.0 --port 8080`
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise UserError(f"spo dashboard needs {' and '.join(missing)}: pip install 'spo-trainer[launcher]'")
    if token is not None and not token:
        raise UserError("--token is empty; give a token, or leave the option out")
    if no_token and token is not None:
        raise UserError("--no-token and a token (--token, SPO_DASHBOARD_TOKEN) were given; choose one of them")
    if no_token and not is_loopback(host):
        raise UserError(f"--no-token with --host {host} would let every machine read the runs; it is only for loopback")
    folders = find_runs(runs or [])

    from launcher.dashboard.app import Service, serve
    from launcher.dashboard.watch import Watch

    if token is None and not no_token:
        token = secrets.token_urlsafe(24)
    with bound(host, port) as listener, tempfile.TemporaryDirectory(prefix="spo-dashboard-") as own:
        listen(listener, host, port, BACKLOG)
        port = listener.getsockname()[1]
        url = page_address(host, port, token)
        watch = Watch(folders, lambda: find_runs(runs or []))
        app = Service(watch).app([host.lower()], token, f"spo_{port}")
        typer.echo(f"{f'{len(folders)} runs' if len(folders) > 1 else folders[0].name}: {url}  (stop with Ctrl-C)")
        sys.stdout.flush()
        if open_:
            _open(url, Path(own) / "open.html")
        asyncio.run(serve(app, watch, listener))


def _open(url: str, file: Path) -> None:
    """Open a browser with a file in a private folder: every account can read the token on a command line."""
    file.write_text(f'<meta http-equiv="refresh" content="0; url={escape(url)}">', encoding="utf-8")
    webbrowser.open(file.as_uri())


def page_address(host: str, port: int, token: str | None) -> str:
    """The address of the page, with the token that readers need."""
    name = socket.gethostname() if host in EVERYWHERE else host
    query = f"?token={quote(token, safe='')}" if token else ""
    return f"http://{f'[{name}]' if ':' in name else name}:{port}/{query}"
