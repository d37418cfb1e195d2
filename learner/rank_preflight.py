"""What ranks on several machines must have in common: configuration, Redis and run folder."""

from __future__ import annotations

import json
import secrets
import time
from pathlib import Path
from typing import Any

from common.config import Config, differences
from common.errors import UserError
from common.streams.broker import Broker
from learner.world import World

KEPT = 3600  # seconds; it is removed at once unless rank 0 dies in between
PATIENCE = 5.0  # seconds that a network file system may take to show a new file


def check_ranks_agree(world: World, config: Config, broker: Broker) -> None:
    """Refuse to start ranks that would train on different things, or save pieces of a checkpoint in different places.

    Raises:
        UserError: on every rank; the message names the first that differs from rank 0, and in what.
    """
    if world.size == 1:
        return
    ours = config.model_dump(mode="json", by_alias=True)
    theirs: dict[str, Any] = json.loads(world.broadcast(json.dumps(ours).encode() if world.is_main else b""))
    world.raise_on_all_ranks(lambda: _same_configuration(config, theirs))
    token = world.broadcast(secrets.token_hex(8).encode() if world.is_main else b"").decode()
    note = config.run.folder / f".ranks-{token}"
    try:
        world.raise_on_all_ranks(lambda: _leave(note, broker, token) if world.is_main else None)
        world.raise_on_all_ranks(lambda: _find(note, broker, token))
    finally:
        if world.is_main:
            note.unlink(missing_ok=True)
            broker.redis.delete(broker.key(f"ranks:{token}"))


def _same_configuration(config: Config, theirs: dict[str, Any]) -> None:
    # What is local to a machine may differ, but for what DeepSpeed is told.
    wrong = differences(config, theirs)
    if config.learner.deepspeed != theirs["learner"]["deepspeed"]:
        wrong.append(f"learner.deepspeed (here {config.learner.deepspeed!r}, {theirs['learner']['deepspeed']!r})")
    if wrong:
        raise UserError(
            f"this rank has another configuration than rank 0: {', '.join(wrong)}; give all ranks the same file and "
            "overrides"
        )


def _leave(note: Path, broker: Broker, token: str) -> None:
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        note.touch()
    except OSError as error:
        raise UserError(f"run folder {note.parent} cannot be written: {error.strerror}") from None
    broker.redis.set(broker.key(f"ranks:{token}"), 1, ex=KEPT)


def _find(note: Path, broker: Broker, token: str) -> None:
    if not broker.redis.exists(broker.key(f"ranks:{token}")):
        raise UserError("broker.url is another Redis than that of rank 0; give all ranks the address of one server")
    deadline = time.monotonic() + PATIENCE
    while not note.exists():
        if time.monotonic() > deadline:
            raise UserError(
                f"run folder {note.parent} is not that of rank 0: each rank writes its piece of a checkpoint, so "
                "run.output_dir must be on a file system that all machines of the learner share"
            )
        time.sleep(0.1)
