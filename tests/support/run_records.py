"""What a journaled run has left, with ways to change it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.config import Config
from launcher.audit.records import RedisRecords
from tests.support.sampler import make_config


@dataclass
class RunRecords:
    """What a run has left; a mutation changes it."""

    folder: Path
    redis: RedisRecords

    def config(self) -> Config:
        return made(self.folder.parent)

    def set(self, **values: Any) -> None:
        self.redis = replace(self.redis, **values)

    def commit(self, at: int, **values: Any) -> None:
        journal = [*self.redis.journal]
        journal[at] = replace(journal[at], **values)
        self.set(journal=journal)

    def entry(self, name: str, change: Callable[[Any], Any], newest: bool = True) -> None:
        """Change a field of the newest or oldest journal entry that has one."""
        places = [i for i, entry in enumerate(self.redis.journal) if getattr(entry, name)]
        at = places[-1 if newest else 0]
        self.commit(at, **{name: change(getattr(self.redis.journal[at], name))})

    def step(self, at: int, **values: Any) -> None:
        steps = [*self.redis.steps]
        steps[at] = steps[at].model_copy(update=values)
        self.set(steps=steps)

    def copy(self, name: str, other: str) -> None:
        shutil.copy(self.folder / name, self.folder / other)

    def append(self, name: str, text: str) -> None:
        with (self.folder / name).open("a") as file:
            file.write(text)

    def lines(self, name: str, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
        """Change the records of a file."""
        path = self.folder / name
        records = change([json.loads(line) for line in path.read_text().splitlines()])
        path.write_text("".join(json.dumps(record) + "\n" for record in records))

    def line(self, name: str, at: int = 0, **values: Any) -> None:
        self.lines(name, lambda records: [*records[:at], records[at] | values, *records[at + 1 :]])


def made(folder: Path) -> Config:
    return make_config(
        folder, prompts=12, heldout=3, run={"journal": True}, episode={"rollouts_every": 2, "reward": "exact"},
        sampler={"tracker": {"prior": "population"}}, eval={"every": 2, "samples": 2}, teacher={"model": "large"},
        algorithm={"baseline": "both"},
    )  # fmt: skip
