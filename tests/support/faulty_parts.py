"""A tool and a reward that hang on request; test configurations name them."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any, ClassVar

from common.messages import Task


class Stuck:
    """A tool that never answers; `calls` holds the tasks of the calls that wait."""

    name = "stuck"
    description = "Never answers."
    schema: ClassVar = {"type": "object"}
    calls: ClassVar[list[str]] = []

    async def open(self, task: Task) -> StuckCall:
        return StuckCall(task.task_id)


class StuckCall:
    def __init__(self, task_id: str) -> None:
        self._task_id = task_id

    async def call(self) -> str:
        Stuck.calls.append(self._task_id)
        try:
            await asyncio.Event().wait()
        finally:
            Stuck.calls.remove(self._task_id)
        return ""


def seven(text: str, answer: Any, row: dict[str, Any]) -> float:
    """1 for a seven. Where the row says so it never returns, and leaves its process id in the name of a file."""
    if row["hangs"]:
        (Path(row["folder"]) / f"{row['number']}.{os.getpid()}").touch()
        time.sleep(100_000)
    return float(text == "7")
