"""The Redis of a run that may have ended: an embedded one is started again from its folder, while it is read."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from common.config import BrokerConfig, Config
from common.errors import UserError
from common.process import keep_files_private
from common.streams.broker import Broker, connect
from launcher.run.embedded_redis import EmbeddedRedis
from launcher.run.folder_lock import FolderInUse, locked
from launcher.run.processes import with_url


@contextmanager
def reopened(config: Config) -> Iterator[Broker]:
    """A connection to the run's Redis.

    Raises:
        UserError: nothing answers at its address, and the run folder has no server's data either.
    """
    folder = config.run.folder
    config = with_url(config, _address(config, folder))
    try:
        broker = _connect(config)
    except UserError:
        if not (folder / "redis" / "binary").exists():
            raise
    else:
        yield broker
        return
    with _served(folder) as url:
        yield _connect(with_url(config, url))


def _connect(config: Config) -> Broker:
    return connect(config.broker.model_copy(update={"wait": 0.0}), config.run.name)


def _address(config: Config, folder: Path) -> str:
    """The configured address; where none is, that of the server which the run had started itself."""
    written = folder / "config.yaml"
    if config.broker.url != BrokerConfig().url or not written.is_file():
        return config.broker.url
    try:
        values = yaml.safe_load(written.read_text(encoding="utf-8"))
        return str(values["broker"]["url"])
    except (OSError, ValueError, yaml.YAMLError, TypeError, KeyError):
        return config.broker.url


@contextmanager
def _served(folder: Path) -> Iterator[str]:
    """The address of a server on the data in a run folder; holds its lock, so that the run cannot start meanwhile."""
    keep_files_private()
    try:
        with locked(folder, "run", wait=0.0), tempfile.TemporaryFile() as log:
            server = EmbeddedRedis(folder / "redis")
            process = subprocess.Popen(server.command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            try:
                server.wait(folder / "logs" / "redis.log")
                yield server.url
            finally:
                process.terminate()
                process.wait()
                server.close()
    except FolderInUse as error:
        raise UserError(f"{error}; the Redis of this one does not answer yet") from None
