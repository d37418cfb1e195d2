"""What happens to the containers of a run's agents, and to the engine that they run on."""

from __future__ import annotations

import asyncio
import math
import random
import socket
import struct

from generator.agents.containers.container import RUN
from generator.agents.containers.engine import ContainerEngine, ContainerFailed

INIT = 1  # it holds an engine's socket where systemd starts the engine


def kill_some(engine: ContainerEngine, run: str, share: float, seed: int) -> int:
    """Kill and remove a share of a run's containers; returns how many, 0 if the engine is away."""

    async def kill() -> int:
        try:
            there = sorted(one["Id"] for one in await engine.labelled(f"{RUN}={run}"))
            chosen = random.Random(seed).sample(there, math.ceil(share * len(there)))
            for container in chosen:
                await engine.remove(container)
            return len(chosen)
        except ContainerFailed:
            return 0
        finally:
            await engine.close()

    return asyncio.run(kill())


def engine_process(engine: ContainerEngine) -> int | None:
    """Process id of the engine, which owns its socket; None if it is away, or if systemd owns the socket."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(engine.address.removeprefix("unix://"))
        except OSError:
            return None
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid = int(struct.unpack("3i", credentials)[0])
    return pid if pid > INIT else None
