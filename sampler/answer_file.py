"""A file of answers, one JSON line each: what it holds is never asked again."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.payload import json_line


class AnswerFile:
    """Appends lines and knows the tasks they answer.

    A last line that a kill cut short is taken off. So after a kill at any time, the file holds whole lines, and with
    `task_ids` each answer once.

    Raises:
        UserError: the file cannot be written, or holds something else; says which line.
    """

    def __init__(self, path: Path, log: Any) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a+b") as file:
                file.seek(0)
                whole, self.task_ids = 0, dict[str, str]()
                for number, line in enumerate(file, 1):
                    if not line.endswith(b"\n"):
                        log.warning("the last line was cut short: removed", file=str(path), line=number)
                        file.truncate(whole)
                        break
                    whole += len(line)
                    self._remember(line, number)
        except OSError as error:
            raise self._cannot("written", error) from None

    def __contains__(self, task_id: str) -> bool:
        return task_id in self.task_ids

    def append(self, rows: Mapping[str, dict[str, Any]]) -> None:
        """Write answers by task id; on return they are on the disk. Raises `UserError` where that fails."""
        if not rows:
            return
        try:
            with self.path.open("ab") as file:
                file.writelines(_line({"task_id": task_id, **row}) for task_id, row in rows.items())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise self._cannot("written", error) from None
        self.task_ids |= {task_id: str(row["prompt_id"]) for task_id, row in rows.items()}

    def check_prompts(self, prompt_ids: Collection[str]) -> None:
        """Raise `UserError` if it holds answers to other prompts than those of the data."""
        for task_id, prompt_id in self.task_ids.items():
            if prompt_id not in prompt_ids:
                raise UserError(
                    f"{self.path} holds answers to prompts that are not in the data (the first: {task_id}); choose "
                    "another --output"
                )

    def _remember(self, line: bytes, number: int) -> None:
        try:
            row = json.loads(line)
            self.task_ids[str(row["task_id"])] = str(row["prompt_id"])
        except (ValueError, LookupError, TypeError, RecursionError):
            raise UserError(
                f"{self.path} line {number} is no answer with a task's id; choose another --output, or remove the line"
            ) from None

    def _cannot(self, verb: str, error: OSError) -> UserError:
        return UserError(f"--output {self.path} cannot be {verb}: {error.strerror}")


def read_answers(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of an answer file, in the order in which they came."""
    with path.open("rb") as file:
        yield from map(json.loads, file)


def _line(row: dict[str, Any]) -> bytes:
    try:
        text = json_line(row)
    except (TypeError, ValueError):  # a column of the data that JSON does not have, NaN for example
        text = json_line({name: value if name != "gts" else str(value) for name, value in row.items()})
    return text.encode("utf-8", "backslashreplace") + b"\n"
