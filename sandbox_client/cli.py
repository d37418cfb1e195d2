"""`spo-sandbox`: a server that runs model-written code, isolated, for any number of generators."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
from pathlib import Path
from typing import Annotated, Any

import typer
import uvicorn

from common import log as logs
from common.connections import Connections, ServerWithoutSignals
from common.errors import UserError
from common.files import read_secret
from common.network import bound, is_loopback, listen
from common.process import raise_file_limit
from common.scripts import HELP, VersionOption, entry_point
from sandbox_client import TOKEN_VARIABLE
from sandbox_client.isolation import check_isolation
from sandbox_client.local import LocalSandbox
from sandbox_client.server import SandboxService
from sandbox_client.settings import Settings, read_settings

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
BACKLOG = 2048  # connections the kernel holds
KILL_TIMEOUT = 5  # further seconds to send the answers about killed programs
SETTINGS = "Settings, each given as -o KEY=VALUE:\n\n" + "\n\n".join(
    f"{key}: {field.description}" + (f" \\[default: {default}]" if default else "")
    for key, field in Settings.model_fields.items()
    for default in [field.get_default(call_default_factory=True)]
)


@app.command(context_settings=HELP, epilog=SETTINGS)
def sandbox(
    host: Annotated[str, typer.Option(help="Address to bind; any other than loopback needs a token.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to bind; 0 for any free port, which the log names.")
    ] = 8080,
    token_file: Annotated[
        Path | None, typer.Option(help=f"File with the token that clients must send; by default {TOKEN_VARIABLE}.")
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option("-o", "--override", metavar="KEY=VALUE", help="A setting below; may be given several times."),
    ] = None,
    version: VersionOption = False,
) -> None:
    """Run model-written Python and bash under bubblewrap, behind SandboxFusion's `POST /run_code`.

    Before it listens, it tries to break out of its own sandbox, and it does not start if that succeeds.

        spo-sandbox -o workers=16 -o memory_mb=512

        SPO_SANDBOX_TOKEN=... spo-sandbox --host 0.0.0.0
    """
    token = read_token(token_file)
    if token is None and not is_loopback(host):
        raise UserError(f"--host {host} is open to others; give a token by --token-file or {TOKEN_VARIABLE}")
    settings = read_settings(override or ())
    log = logs.setup("sandbox")
    with bound(host, port) as listener:
        asyncio.run(serve(settings, token, listener, log))


async def serve(settings: Settings, token: str | None, listener: socket.socket, log: Any) -> None:
    """Check the isolation, answer requests until SIGTERM or SIGINT, and end everything that runs.

    Raises:
        UserError: the sandbox leaks, or cannot be started.
    """
    async with LocalSandbox(settings) as sandbox:
        if settings.isolated:
            seconds = await check_isolation(sandbox)
            log.info("isolation checked", seconds=seconds, cgroup=str(sandbox.cgroup or "none"))
        else:
            log.warning("NOT ISOLATED: programs can read, change and send whatever this user can")
        if unbounded := sandbox.unbounded():
            log.warning(unbounded)
        service = SandboxService(sandbox, settings, token, log)
        files = raise_file_limit()
        server = ServerWithoutSignals(
            uvicorn.Config(
                service.app(),
                log_config=None,
                access_log=False,
                lifespan="off",
                http=Connections(most=files // 4).protocol(),
                backlog=min(BACKLOG, files // 8),
                timeout_graceful_shutdown=math.ceil(settings.grace) + KILL_TIMEOUT,
            )
        )
        loop = asyncio.get_running_loop()

        def stop() -> None:
            if server.should_exit:
                return  # this is not the first signal
            log.info("stopping", running=service.running)
            service.stop()
            server.should_exit = True
            loop.call_later(settings.grace, service.kill)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        address, port = listener.getsockname()[:2]
        if token is None:
            log.warning(f"no token: every account of this machine can run programs here; give {TOKEN_VARIABLE}")
        # From here on the kernel queues connections, so a client may connect as soon as it reads the line below.
        listen(listener, address, port, BACKLOG)
        log.info("listening", host=address, port=port, workers=settings.workers, token=token is not None)
        await server.serve([listener])
    log.info("stopped", runs=service.completed)


def read_token(path: Path | None) -> str | None:
    """Read the token from a file, else from the environment; raises `UserError` if it cannot be used."""
    token = os.environ.get(TOKEN_VARIABLE) if path is None else read_secret(path, "--token-file")
    if token is not None and not (token and token.isascii() and token.isprintable()):
        raise UserError(f"{path or TOKEN_VARIABLE} holds no token; it must be printable ASCII")
    return token


main = entry_point(app)

if __name__ == "__main__":
    main()
