"""Reads the episodes of a run folder: a summary of each line, or one whole record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError

FOLDERS = ("rollouts", "validation_data")


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """A summary of an episode.

    Attributes:
        path, offset: the file, and where the episode's line begins in it.
        step: weight version at dispatch; of held-out episodes, the version they evaluate.
        name: task id.
        reward: None where the task was set aside.
        flags: eval, set aside, tool error, user, cut (parts of the record were left out).
    """

    path: Path
    offset: int
    step: int
    name: str
    prompt_id: str
    prompt: str
    reward: float | None
    turns: int
    tokens: int
    seconds: float
    reason: str
    flags: tuple[str, ...]

    @property
    def failed(self) -> bool:
        """Whether the task was set aside, or a tool call in it failed."""
        return "set aside" in self.flags or "tool error" in self.flags


def episode_files(run: Path) -> list[Path]:
    """The files of a run folder that hold episodes, oldest version first.

    Raises:
        UserError: there are none.
    """
    folder = run.parent if run.is_file() else run
    if not folder.is_dir():
        raise UserError(f"{run} is no run folder: it does not exist")
    files = [path for name in FOLDERS for path in (folder / name).glob("*.jsonl*") if _version(path) is not None]
    if not files:
        raise UserError(
            f"{run} holds no episodes: neither rollouts/ (episode.rollouts_every > 0) nor validation_data/ "
            "(data.heldout) has a file; give the folder that `spo run` names, for example runs/quickstart-1"
        )
    return sorted(files, key=lambda path: (_version(path), path.parent.name))


def read_rows(paths: list[Path]) -> Iterator[EpisodeRow | None]:
    """A summary of every episode; None for a line that cannot be read. A line that is still being written is skipped.

    Raises:
        UserError: a file cannot be read.
    """
    for path in paths:
        step = _version(path) or 0
        try:
            with path.open("rb") as file:
                offset = 0
                for line in file:
                    if line.endswith(b"\n"):
                        yield _row(line, path, offset, step)
                    offset += len(line)
        except FileNotFoundError:
            continue  # completed in the meantime, and renamed
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from None


def read_episode(row: EpisodeRow) -> dict[str, Any]:
    """The whole record of an episode."""
    with row.path.open("rb") as file:
        file.seek(row.offset)
        return json.loads(file.readline())


def _version(path: Path) -> int | None:
    version = path.name.partition(".")[0]
    return int(version) if version.isascii() and version.isdigit() and not path.name.endswith(".new") else None


def _row(line: bytes, path: Path, offset: int, step: int) -> EpisodeRow | None:
    try:
        record = json.loads(line)
        messages = [message for message in record.get("messages") or () if isinstance(message, dict)]
        reward = record.get("reward")
        set_aside = record.get("status") == "set_aside"
        flags = {
            "eval": record.get("kind") == "eval",
            "set aside": set_aside,
            "tool error": any(message.get("error") for message in messages if message.get("role") == "tool"),
            "user": any(message.get("role") == "user" for message in messages),
            "cut": bool(record.get("left_out")),
        }
        return EpisodeRow(
            path,
            offset,
            step,
            str(record["task_id"]),
            str(record.get("prompt_id", "")),
            prompt_text(record.get("input", "")),
            None if set_aside or reward is None else float(reward),
            int(record.get("turns") or 0),
            int(record.get("tokens") or 0),
            float(record.get("seconds") or 0.0),
            str(record.get("reason", "")),
            tuple(name for name, is_set in flags.items() if is_set),
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def prompt_text(prompt: Any) -> str:
    """A prompt as one text; of chat messages, the last one's."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict):
        return str(prompt[-1].get("content", ""))
    return str(prompt)
