"""What ranks on several machines must have in common: configuration, Redis and run folder."""

from __future__ import annotations

import json
import secrets
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common.config import Config, differences
from common.errors import UserError
from common.streams.broker import Broker
from learner.world import World

MARKER_TTL = 3600  # seconds; the key is removed at once unless rank 0 dies in between
FILE_SYSTEM_DELAY = 5.0  # seconds that a network file system may take to show a new file


def check_ranks_agree(world: World, config: Config, broker: Broker) -> None:
    """Refuse to start ranks that would train on different things, or save pieces of a checkpoint in different places.

    Raises:
        UserError: on every rank; the message names the first that differs from rank 0, and in what.
    """
    if world.size == 1:
        return
    release = version("spo-trainer")
    own = {"release": release, "config": config.model_dump(mode="json", by_alias=True)}
    main: dict[str, Any] = json.loads(world.broadcast(json.dumps(own).encode() if world.is_main else b""))
    world.raise_on_all_ranks(lambda: _check_release(release, main["release"]))
    world.raise_on_all_ranks(lambda: _check_configuration(config, main["config"]))
    token = world.broadcast(secrets.token_hex(8).encode() if world.is_main else b"").decode()
    marker = config.run.folder / f".ranks-{token}"
    try:
        world.raise_on_all_ranks(lambda: _create_marker(marker, broker, token) if world.is_main else None)
        world.raise_on_all_ranks(lambda: _check_marker(marker, broker, token))
    finally:
        if world.is_main:
            marker.unlink(missing_ok=True)
            broker.redis.delete(broker.key(f"ranks:{token}"))


def _check_release(own: str, main: str) -> None:
    if own != main:
        raise UserError(f"this rank runs SPO {own}, rank 0 {main}; use the same release (image) for all")


def _check_configuration(config: Config, main: dict[str, Any]) -> None:
    # Keys that are local to a machine may differ, except those for DeepSpeed.
    differing = [str(difference) for difference in differences(config, main)]
    if config.learner.deepspeed != main["learner"]["deepspeed"]:
        differing.append(f"learner.deepspeed (here {config.learner.deepspeed!r}, {main['learner']['deepspeed']!r})")
    if differing:
        raise UserError(
            f"this rank has another configuration than rank 0: {', '.join(differing)}; give all ranks the same file "
            "and overrides"
        )


def _create_marker(marker: Path, broker: Broker, token: str) -> None:
    try:
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    except OSError as error:
        raise UserError(f"run folder {marker.parent} cannot be written: {error.strerror}") from None
    broker.set(f"ranks:{token}", 1, MARKER_TTL)


def _check_marker(marker: Path, broker: Broker, token: str) -> None:
    if not broker.redis.exists(broker.key(f"ranks:{token}")):
        raise UserError("broker.url is another Redis than that of rank 0; give all ranks the address of one server")
    deadline = time.monotonic() + FILE_SYSTEM_DELAY
    while not marker.exists():
        if time.monotonic() > deadline:
            raise UserError(
                f"run folder {marker.parent} is not that of rank 0: each rank writes its piece of a checkpoint, so "
                "run.output_dir must be on a file system that all machines of the learner share"
            )
        time.sleep(0.1)
