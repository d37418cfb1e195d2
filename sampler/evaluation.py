"""Held-out evaluation: tasks of their own kind, and what came of them by weight version."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import msgpack

from common.config import EvalConfig
from common.messages import SampleHeader, Task
from sampler.episode_files import EpisodeFiles, episode_line
from sampler.prompts import PromptSet


@dataclass(slots=True)
class Tally:
    """The answers to one evaluation so far."""

    FORM: ClassVar[struct.Struct] = struct.Struct("<4qd")

    expected: int
    answered: int = 0
    correct: int = 0
    set_aside: int = 0
    reward: float = 0.0

    @property
    def complete(self) -> bool:
        return self.answered + self.set_aside == self.expected

    @property
    def accuracy(self) -> float:
        """Share of the answers with full reward; NaN if there is none."""
        return self.correct / self.answered if self.answered else math.nan

    def pack(self) -> bytes:
        return self.FORM.pack(self.expected, self.answered, self.correct, self.set_aside, self.reward)

    @classmethod
    def unpack(cls, data: bytes) -> Tally:
        return cls(*cls.FORM.unpack(data))


class Evaluations:
    """Which versions are evaluated, and their tallies."""

    def __init__(
        self, prompts: PromptSet | None, config: EvalConfig, steps: int, full_reward: float, folder: Path
    ) -> None:
        self.tallies: dict[int, Tally] = {}
        self._prompts = prompts
        self._config = config
        self._steps = steps
        self._full_reward = full_reward
        self._files = EpisodeFiles(folder, unfinished=True)

    def due(self, version: int) -> bool:
        """Whether a version is to be evaluated and is not yet."""
        if self._prompts is None or version in self.tallies:
            return False
        every = self._config.every
        return not self.tallies or version >= self._steps or (every > 0 and version % every == 0)

    def tasks(self, version: int) -> list[Task]:
        """Start the evaluation of a version."""
        assert self._prompts is not None
        self._files.discard(version, version)  # of another run in this folder
        size = min(len(self._prompts), self._config.limit or len(self._prompts))
        self.tallies[version] = Tally(expected=size * self._config.samples)
        tasks = []
        for i in range(size):
            found = self._prompts[i]
            tasks += [
                Task(
                    task_id=f"e{version}-{i * self._config.samples + n}",
                    prompt_id=self._prompts.ids[i],
                    kind="eval",
                    prompt=found.prompt,
                    answer=found.answer,
                    row=found.row,
                    min_version=version,
                )
                for n in range(self._config.samples)
            ]
        return tasks

    def count(self, version: int, header: SampleHeader) -> Tally:
        """Add an answer to the version's tally."""
        tally = self.tallies[version]
        if header.status == "set_aside":
            tally.set_aside += 1
        else:
            tally.answered += 1
            tally.correct += header.reward >= self._full_reward
            tally.reward += header.reward
        return tally

    def result(self, version: int) -> bytes:
        """What a complete evaluation says, as it is kept for everyone to read."""
        tally = self.tallies[version]
        mean = tally.reward / tally.answered if tally.answered else math.nan
        return msgpack.packb(
            {
                "version": version,
                "accuracy": tally.accuracy,
                "reward": mean,
                "samples": tally.answered,
                "set_aside": tally.set_aside,
            }
        )

    def latest(self) -> tuple[int, float] | None:
        """(version, accuracy) of the newest complete evaluation."""
        done = [version for version, tally in self.tallies.items() if tally.complete]
        return (max(done), self.tallies[max(done)].accuracy) if done else None

    def write_rows(self, version: int, headers: Iterable[SampleHeader]) -> None:
        """Append answers to the version's file; complete ones take their final name.

        Raises:
            UserError: the file cannot be written.
        """
        self._files.write(version, [(header.task_id, self._line(version, header)) for header in headers])
        if self.tallies[version].complete:
            self._files.finish(version)

    def _line(self, version: int, header: SampleHeader) -> bytes:
        assert self._prompts is not None
        asked = self._prompts[int(header.task_id.rpartition("-")[2]) // self._config.samples]
        return episode_line(header, {"version": version}, {"input": asked.prompt, "gts": asked.answer})
