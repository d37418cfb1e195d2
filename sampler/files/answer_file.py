"""A run without training steps: the request for answers, and the file that takes them, one JSON line each."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import append
from common.messages import Kind
from common.payload import json_line


@dataclass(frozen=True)
class Request:
    """A request to answer prompts with fixed weights.

    Attributes:
        kind: `values`, sampled like training responses, or `eval`, sampled like evaluations and reported by group.
        responses: number of responses per prompt.
        output: the file of answers; tasks that it already answers are not sent again.
        data: `[NAME=]PATH`, a part of the data source of that name, or of the only one; None means all of the data.
    """

    kind: Kind
    responses: int
    output: Path
    data: str | None = None

    @property
    def folder(self) -> Path:
        """Folder of logs, configuration and an embedded Redis."""
        return self.output.with_suffix(".run")

    def task_ids(self, prompt_ids: Sequence[str]) -> Iterator[str]:
        """Id of each response's task, prompt by prompt."""
        return (f"{self.kind}{n}-{prompt_id}" for prompt_id in prompt_ids for n in range(self.responses))

    def prompt_id(self, task_id: str) -> str | None:
        """The prompt that a task of this request asks; None for any other task."""
        name, _, prompt_id = task_id.partition("-")
        number = name.removeprefix(self.kind)
        is_own = name != number and number.isdecimal() and int(number) < self.responses
        return prompt_id if is_own else None


class AnswerFile:
    """A file of answers, one JSON line each.

    A last line truncated by a kill is removed, so the file always holds whole lines, and each answer once if callers
    check `task_ids`.

    Raises:
        UserError: the file cannot be written, or one of its lines is not an answer, or answers a prompt not in the
            data.
    """

    def __init__(self, path: Path, prompt_ids: Collection[str], log: Any) -> None:
        self.path = path
        self.task_ids: set[str] = set()
        prompt_ids = frozenset(prompt_ids)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a+b") as file:
                file.seek(0)
                whole = 0
                for number, line in enumerate(file, 1):
                    if not line.endswith(b"\n"):
                        log.warning("the last line was cut short: removed", file=str(path), line=number)
                        file.truncate(whole)
                        break
                    whole += len(line)
                    self._remember(line, number, prompt_ids)
        except OSError as error:
            raise self._not_writable(error) from None

    def __contains__(self, task_id: str) -> bool:
        return task_id in self.task_ids

    def append(self, rows: Mapping[str, dict[str, Any]]) -> None:
        """Write answers by task id; on return they are on the disk. Raises `UserError` if that fails."""
        if not rows:
            return
        try:
            append(self.path, b"".join(_line({"task_id": task_id, **row}) for task_id, row in rows.items()))
        except OSError as error:
            raise self._not_writable(error) from None
        self.task_ids.update(rows)

    def _remember(self, line: bytes, number: int, prompt_ids: Collection[str]) -> None:
        try:
            row = json.loads(line)
            task_id, prompt_id = str(row["task_id"]), str(row["prompt_id"])
        except (ValueError, LookupError, TypeError, RecursionError):
            raise UserError(
                f"{self.path} line {number} is not an answer with a task id; choose another --output or remove the line"
            ) from None
        if prompt_id not in prompt_ids:
            raise UserError(
                f"{self.path} line {number} answers a prompt that is not in the data ({task_id}); choose another "
                "--output"
            )
        self.task_ids.add(task_id)

    def _not_writable(self, error: OSError) -> UserError:
        return UserError(f"--output {self.path} cannot be written: {error.strerror}")


def read_answers(path: Path) -> Iterator[dict[str, Any]]:
    """The answers in a file, in the order in which they arrived."""
    with path.open("rb") as file:
        yield from map(json.loads, file)


def _line(row: dict[str, Any]) -> bytes:
    try:
        text = json_line(row)
    except (TypeError, ValueError):  # the data holds a value that JSON lacks, NaN for example
        text = json_line({name: value if name != "gts" else str(value) for name, value in row.items()})
    return text.encode("utf-8", "backslashreplace") + b"\n"
