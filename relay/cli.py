"""`spo-relay`: pulls the weights once for a machine and serves them to all generators there."""

from __future__ import annotations

import os
import re
import signal
import socket
from functools import partial
from typing import Annotated

import typer
from redis.exceptions import RedisError

from common import log as logs
from common.checks.list import check_start
from common.config import load_config
from common.errors import UserError
from common.network import is_tcp
from common.process import Role
from common.scripts import HELP, ConfigOption, OverrideOption, VersionOption, entry_point
from common.streams.agreement import agree
from common.streams.broker import connect
from common.streams.relays import machine_name, nearby
from relay.relay import Announcement, Relay

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(context_settings=HELP)
def relay(
    config: ConfigOption,
    override: OverrideOption = None,
    bind: Annotated[
        str, typer.Option(metavar="tcp://HOST:PORT", help="Address to serve on; beyond this machine it needs keys.")
    ] = "tcp://127.0.0.1:*",
    advertise: Annotated[
        str | None,
        typer.Option(metavar="tcp://HOST:PORT", help="Address for clients, if it is not the bound address."),
    ] = None,
    upstream: Annotated[
        str | None,
        typer.Option(
            metavar="tcp://HOST:PORT", help="Relay to pull from, or the learner while that fails; default: the learner."
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name shown to others; by default host and process id.")] = None,
    version: VersionOption = False,
) -> None:
    """Pull each version of the weights once and serve it to the generators on this machine.

    What the learner sends then grows with the number of machines, not of generators. Generators find the relay of their
    machine by themselves (learner.weights.relay=auto) and pull from the learner if there is none. Relays may chain: one
    names another as its --upstream. A relay pays off if several generators share a machine, or a slow network.

        spo-relay -c run.yaml

        spo-relay -c run.yaml --bind tcp://0.0.0.0:5556 --upstream tcp://node-1:5556
    """
    settings = load_config(config, override or ())
    for option, address in (("--bind", bind), ("--advertise", advertise), ("--upstream", upstream)):
        # A relay pulls from a certain port, and may serve on any.
        known = address if address is None or option == "--upstream" else re.sub(r":\*$", ":1", address)
        if known is not None and not (is_tcp(known) and "/" not in known.removeprefix("tcp://")):
            raise UserError(f"{option} = {address!r} must be of the form tcp://host:port (port 1 to 65535)")
    name = name or f"relay-{socket.gethostname()}-{os.getpid()}"
    log = logs.setup(name)
    for line in check_start(Role.RELAY, settings):
        log.warning(line)
    weights = settings.learner.weights.model_copy(update={"bind": bind, "advertise": advertise})
    machine = machine_name(weights)
    try:
        broker = connect(settings.broker, settings.run.name, log=log)
        agree(broker, settings, log, may_differ=False)
        learner, relays = partial(broker.endpoint, "weights"), partial(nearby, broker, machine)
        pulling = Relay(learner, weights, name=name, upstream=upstream, relays=relays, log=log)

        def stop(*_: object) -> None:
            pulling.stopped.set()
            broker.patience.end()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        try:
            with Announcement(broker, name, settings.broker.heartbeat, pulling, machine, log):
                log.info("serving weights", address=pulling.server.address, upstream=upstream or "learner")
                pulling.run()
        finally:
            pulling.close()
    except RedisError as error:
        raise UserError(f"Redis failed ({error}); start this relay again") from None
    log.info("stopped", sent_bytes=pulling.server.sent.bytes)


main = entry_point(app)

if __name__ == "__main__":
    main()
