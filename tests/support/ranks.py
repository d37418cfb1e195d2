"""Ranks of a learner on this machine: processes that gloo joins."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.forked import Forked
from tests.support.ports import free_port


def on_ranks(count: int, act: Callable[..., object], *arguments: Any, folder: Path, timeout: float = 1500) -> None:
    """Call `act(world, *arguments)` on `count` ranks; fails with their output unless all succeed.

    Args:
        act: a function of a module, or a picklable object.
        folder: for their logs.
        timeout: in seconds.
    """
    group = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    logs = [folder / f"rank_{rank}.log" for rank in range(count)]
    ranks = [
        Forked(
            _rank,
            act,
            arguments,
            environment={**os.environ, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            log=log,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(timeout) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert codes == [0] * count, "\n".join(log.read_text() for log in logs)


def _rank(act: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    # Imported here: the process that starts ranks need not import torch.
    from learner.ranks import world as ranks
    from learner.ranks.rank import exits_at_once

    def entry() -> None:
        world = ranks.start()
        act(world, *arguments)
        world.barrier()
        ranks.stop()

    exits_at_once(entry)()
