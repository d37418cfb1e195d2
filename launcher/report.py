"""The command `spo report`: saves the page of one run, with facts from its Redis if the run is unfinished."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from redis.exceptions import RedisError

from common.config import Config, load_config
from common.errors import UserError, one_line
from common.messages import InvalidMessage
from common.process import keep_files_private
from common.streams import dead
from common.unpack import Unreadable
from launcher.folder.run import RedisFacts, read_one
from launcher.page.saved import save
from launcher.run.reopened import reopened


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run: running, finished or broken.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="By default report.html in the run folder.")
    ] = None,
) -> None:
    """Save the dashboard's page of a run as one HTML file: figures, curves, episodes, configuration, time, counts.

    The file can be read on its own, without the run folder, a server or a network.

    - `spo report runs/quickstart-1`
    - `spo report runs/maths -o maths.html`
    """
    keep_files_private()
    read = read_one(run)
    if read.config and (read.state != "finished" or read.counters.get("dead")):
        read.redis = redis_facts(read.folder.path)
    path = output or read.folder.path / "report.html"
    save(path, f"Report of {read.name}", [read])
    typer.echo(one_line(str(path)))


def redis_facts(folder: Path) -> RedisFacts:
    """Counters and dead letters of a run, from its Redis; a note if Redis cannot be read."""
    try:
        with reopened(_at_home(load_config(folder / "config.yaml"), folder.absolute())) as broker:
            letters = Counter(str(note.get("reason", "")) for _, note in dead.list_dead(broker, dead.MAX_LETTERS))
            return RedisFacts(broker.counters(), letters)
    except (UserError, RedisError, OSError, Unreadable, InvalidMessage, LookupError, ValueError) as error:
        return RedisFacts(note=f"its Redis was not read: {error}")


def _at_home(config: Config, folder: Path) -> Config:
    """The configuration with the folder's current path: the folder may be a copy, and its old path another run's."""
    url = config.broker.url.replace(str(config.run.folder.absolute()), str(folder))
    run = config.run.model_copy(update={"output_dir": str(folder.parent), "experiment": folder.name})
    return config.model_copy(update={"run": run, "broker": config.broker.model_copy(update={"url": url})})
