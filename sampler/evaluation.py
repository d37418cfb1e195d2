"""Held-out evaluation: tasks of their own kind, and what came of them by weight version."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgpack

from common.config import EvalConfig
from common.errors import UserError
from common.messages import SampleHeader, Task
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
        self._folder = folder

    def due(self, version: int) -> bool:
        """Whether a version is to be evaluated and is not yet."""
        if self._prompts is None or version in self.tallies:
            return False
        every = self._config.every
        return not self.tallies or version >= self._steps or (every > 0 and version % every == 0)

    def tasks(self, version: int) -> list[Task]:
        """Start the evaluation of a version."""
        assert self._prompts is not None
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
                    version=version,
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
        """Append answers to the version's file; complete ones take their final name, each answer once.

        Raises:
            UserError: the file cannot be written.
        """
        final = self._folder / f"{version}.jsonl"
        part = final.with_suffix(".jsonl.part")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with part.open("a", encoding="utf-8") as file:
                # A new line first: the last one may have been cut by a kill.
                file.writelines("\n" + json.dumps(_row(header), ensure_ascii=False) for header in headers)
            if self.tallies[version].complete:
                # After a kill between writing and counting, an answer is written again.
                lines = part.read_text(encoding="utf-8").split("\n")
                once = {row["task_id"]: line for line in lines if (row := _parse(line))}
                ordered = sorted(once.items(), key=lambda item: int(item[0].rpartition("-")[2]))
                part.write_text("".join(line + "\n" for _, line in ordered), encoding="utf-8")
                os.replace(part, final)
        except OSError as error:
            raise UserError(f"held-out answers cannot be written to {part}: {error.strerror}") from None


def _row(header: SampleHeader) -> dict[str, Any]:
    return {
        "task_id": header.task_id,
        "prompt_id": header.prompt_id,
        "status": header.status,
        "reason": header.reason,
        "reward": header.reward,
        "tokens": header.tokens,
        "versions": [header.oldest_version, header.newest_version],
        "tool_calls": header.tool_calls,
        **(header.text or {}),
    }


def _parse(line: str) -> dict[str, Any] | None:
    try:
        return json.loads(line)
    except ValueError:
        return None
