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

    def copied(self, folder: Path) -> RunRecords:
        shutil.copytree(self.folder, folder / self.folder.name)
        return RunRecords(folder / self.folder.name, self.redis)

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

    def step(self, at: int, metrics: dict[str, float]) -> None:
        """Change metrics that the learner has announced."""
        steps = [*self.redis.steps]
        steps[at] = steps[at].model_copy(update={"metrics": steps[at].metrics | metrics})
        self.set(steps=steps)

    def counters(self, **values: int) -> None:
        self.set(counters=self.redis.counters | values)

    def remove(self, name: str) -> None:
        (self.folder / name).unlink()

    def append(self, name: str, text: str) -> None:
        with (self.folder / name).open("a") as file:
            file.write(text)

    def lines(self, name: str, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
        """Change the records of a file."""
        path = self.folder / name
        records = change([json.loads(line) for line in path.read_text().splitlines()])
        path.write_text("".join(json.dumps(record) + "\n" for record in records))

    def line(self, name: str, **values: Any) -> None:
        """Change the first record of a file."""
        self.lines(name, lambda records: [records[0] | values, *records[1:]])

    def trained(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Change values in every line of training data."""
        for path in (self.folder / "training_data").iterdir():
            self.lines(f"training_data/{path.name}", lambda lines: [line | change(line) for line in lines])

    def column(self, name: str, change: Callable[[Any], Any]) -> None:
        """Change one value of each token in the training data."""
        self.trained(lambda line: {name: [change(one) for one in line[name]]})

    def metric(self, process: str, name: str, change: Callable[[float], float] | None, **more: float) -> None:
        """Change a metric of version 4, or remove it, and add others beside it."""

        def changed(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
            for record in records:
                values = record["values"]
                if (record["version"], record["process"]) == (4, process) and name in values:
                    values |= {name: change and change(values[name]), **more}
            return records

        self.lines("metrics.jsonl", changed)


def made(folder: Path) -> Config:
    return make_config(
        folder, prompts=12, heldout=3, run={"journal": True}, episode={"rollouts_every": 2, "reward": "exact"},
        sampler={"tracker": {"prior": "population"}}, eval={"every": 2, "samples": 2}, teacher={"model": "large"},
        algorithm={"baseline": "both"},
    )  # fmt: skip
