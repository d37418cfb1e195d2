"""Connects to the Redis of a run that may have ended; an embedded Redis is started from its folder for a while."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.config import BrokerConfig, Config
from common.errors import UserError
from common.process import keep_files_private
from common.streams.broker import Broker, connect
from common.versions import FILE as VERSIONS
from launcher.folder.run_folder import RunFolder
from launcher.run.embedded_redis import EmbeddedRedis
from launcher.run.folder_lock import FolderInUse, locked
from launcher.run.processes import with_url


@contextmanager
def reopened(config: Config) -> Iterator[Broker]:
    """Connect to the run's Redis, starting its server for the block if need be.

    Raises:
        UserError: nothing answers at its address and the run folder has no data of a server, or it is a fork that was
            never started.
    """
    folder = config.run.folder
    if (folder / "changes.jsonl").is_file() and not (folder / VERSIONS).is_file():
        raise UserError(f"{folder} is a fork that was not started yet: spo run {folder / 'config.yaml'} --resume")
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
    """The configured address; if it is the default, the one in the run folder, which may be an embedded server's."""
    if config.broker.url != BrokerConfig().url:
        return config.broker.url
    try:
        return str(RunFolder(folder, folder.name).config()["broker"]["url"])
    except (TypeError, KeyError):
        return config.broker.url


@contextmanager
def _served(folder: Path) -> Iterator[str]:
    """Serve the Redis data in a run folder and yield the address; the folder is locked against a start of the run."""
    keep_files_private()
    try:
        with locked(folder, "run", wait=0.0), tempfile.NamedTemporaryFile() as log:
            server = EmbeddedRedis(folder / "redis")
            process = subprocess.Popen(server.command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            try:
                server.wait(Path(log.name))
                yield server.url
            finally:
                process.terminate()
                process.wait()
                server.close()
    except FolderInUse as error:
        raise UserError(f"{error}; its Redis does not answer yet") from None
