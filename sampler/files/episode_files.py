"""Readable episodes: one file of JSON lines per weight version, with each episode once."""

from __future__ import annotations

import contextlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from common.errors import UserError
from common.files import append, remove_oldest, rewrite, sync_folder
from common.messages import InvalidMessage, SampleHeader
from common.payload import json_line, open_record, pack_record
from sampler.records import DispatchedTask
from sampler.state import SamplerState

CACHED_VERSIONS = 16  # versions whose task ids are kept in memory; an older file is read again


class EpisodeFiles:
    """A folder of `<version>.jsonl`.

    Lines are on the disk before the round that counts them is committed, so neither a kill nor a loss of power loses
    one; a line that is already there is not written again.

    Args:
        folder: created when needed.
        keep_bytes: total size above which files of older versions are removed when a new file begins; None keeps all.
        unfinished: call each file `<version>.jsonl.part` until `finish`, and never remove that of the first version.
    """

    def __init__(self, folder: Path, keep_bytes: int | None = None, *, unfinished: bool = False) -> None:
        self._folder, self._keep_bytes, self._keep_first = folder, keep_bytes, unfinished
        self._suffix = ".jsonl.part" if unfinished else ".jsonl"
        self._written: dict[int, set[str]] = {}  # task ids by version

    def write(self, version: int, lines: Iterable[tuple[str, bytes]]) -> None:
        """Append (task id, line) pairs that are not there yet; raises `UserError` if the file cannot be written."""
        with self._changing(version) as path:
            written, is_new = self._ids(version, path), not path.exists()
            new = {task_id: line for task_id, line in lines if task_id not in written}
            append(path, b"".join(line + b"\n" for line in new.values()))
            written.update(new)
            if is_new and self._keep_bytes is not None:
                remove_oldest(self._folder, self._keep_bytes, spare_first=self._keep_first)

    def finish(self, version: int, tasks: str, since: int) -> list[dict[str, Any]]:
        """Give a complete file its final name; it keeps the lines whose task ids begin with `tasks`, sorted by id.

        Other lines, and files of other versions from `since` on, belong to abandoned attempts; they are removed.

        Returns:
            Task id, reward and answer of each line.

        Raises:
            UserError: a file cannot be written.
        """
        with self._changing(version) as path:
            lines = ((_fields_of(line), line) for line in path.read_bytes().splitlines(keepends=True))
            kept = [(fields, line) for fields, line in lines if fields["task_id"].startswith(tasks)]
            kept.sort(key=lambda item: _number(item[0]["task_id"]))
            rewrite(path, (line for _, line in kept))
            os.replace(path, path.with_suffix(""))
            sync_folder(self._folder)
            self._written.pop(version, None)
            self.discard(since, spare=version)
        return [fields for fields, _ in kept]

    def discard(self, first: int, spare: int | None = None) -> None:
        """Remove the files of version `first` and later, except those of version `spare`."""
        for path in self._folder.glob("*.jsonl*"):
            version = path.name.partition(".")[0]
            if version.isdigit() and first <= int(version) != spare:
                self._written.pop(int(version), None)
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    raise UserError(f"episodes of another run cannot be removed, {path}: {error.strerror}") from None

    def withdraw(self, first: int, is_open: Callable[[str], bool]) -> None:
        """Remove the lines of tasks that are answered again, from the files of version `first` and later."""
        versions = {path.name.partition(".")[0] for path in self._folder.glob("*.jsonl*")}
        for version in versions:
            if version.isdigit() and first <= int(version):
                with self._changing(int(version)) as path:
                    _remove_lines(path, is_open)
                self._written.pop(int(version), None)

    @contextlib.contextmanager
    def _changing(self, version: int) -> Iterator[Path]:
        """The file of a version, in a folder that exists; an `OSError` of the block becomes a `UserError`."""
        path = self._folder / f"{version}{self._suffix}"
        try:
            if not self._folder.is_dir():
                self._folder.mkdir(parents=True, exist_ok=True)
                sync_folder(self._folder.parent)
            yield path
        except OSError as error:
            raise UserError(f"episodes cannot be written to {path}: {error.strerror}") from None

    def _ids(self, version: int, path: Path) -> set[str]:
        if version not in self._written:
            final = self._folder / f"{version}.jsonl"
            if not path.exists() and final.exists():
                # A sampler finished the file, and was killed before its commit.
                os.replace(final, path)
            while len(self._written) >= CACHED_VERSIONS:
                del self._written[min(self._written)]
            self._written[version] = _read_ids(path) if path.exists() else set()
        return self._written[version]


def episode_line(header: SampleHeader, about: dict[str, Any], prompt: dict[str, Any]) -> bytes:
    """An episode as one line: its header, `about`, and its record.

    `prompt` stands in for a missing record, for example that of a task that could not be answered.
    """
    ok = header.status == "ok"
    fields = {
        "task_id": header.task_id,
        "prompt_id": header.prompt_id,
        "kind": header.kind,
        "status": header.status,
        "reason": header.reason,
        "reward": header.reward if ok else None,
        "parts": header.reward_parts,
        "turn_rewards": header.turn_rewards,
        "tokens": header.tokens,
        "rows": len(header.row_tokens) or 1,
        "model_tokens": header.model_tokens,
        "versions": [header.oldest_version, header.newest_version] if ok else [],
        "turns": header.turns,
        "tool_calls": header.tool_calls,
        "seconds": round(header.seconds, 3),
        "generator": header.generator,
        **about,
    }
    try:
        line = _checked_record(header.record, fields) if header.record else b""
    except InvalidMessage as error:
        line, prompt = b"", prompt | {"left_out": [str(error)]}
    if not line:
        fields |= prompt
    # The record's bytes are spliced in unchanged.
    try:
        front = json_line(fields).encode("utf-8", "backslashreplace")
    except (TypeError, ValueError, RecursionError):
        # The data holds values that JSON lacks, such as the bytes of a picture.
        front = open_record(pack_record(fields))
    # `{}`, an empty record, adds nothing.
    return front if len(line) <= 2 else front[:-1] + b", " + line[1:]


def _checked_record(record: bytes, fields: dict[str, Any]) -> bytes:
    """A record as a line; raises `InvalidMessage` if it is not JSON, or shares a name with `fields`."""
    line = open_record(record)
    try:
        try:
            content = from_json(line, cache_strings="keys")
        except ValueError:
            content = json.loads(line)  # slower, but also accepts a lone surrogate
    except (ValueError, RecursionError) as error:
        raise InvalidMessage(f"record: not JSON ({type(error).__name__})") from None
    names = content.keys() & fields.keys()
    if names:
        raise InvalidMessage(f"record: fields {', '.join(sorted(names))[:200]} are the header's")
    return line


def _read_ids(path: Path) -> set[str]:
    """Task ids in a file; a last line that a kill cut short is removed."""
    ids, end = set(), 0
    with path.open("rb+") as file:
        for line in file:
            if not line.endswith(b"\n"):
                file.truncate(end)
                break
            end += len(line)
            ids.add(_fields_of(line)["task_id"])
    return ids


def _remove_lines(path: Path, is_open: Callable[[str], bool]) -> None:
    for file in {path, path.with_name(path.name.removesuffix(".part"))}:  # it may have its final name
        lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
        kept = [line for line in lines if not is_open(_fields_of(line)["task_id"])]
        if len(kept) < len(lines):
            rewrite(file, kept)


def _fields_of(line: bytes) -> dict[str, Any]:
    """Task id, reward and answer of a line; only an empty id if the line cannot be read."""
    try:
        fields = json.loads(line)
        return {"task_id": str(fields["task_id"]), "reward": fields.get("reward"), "answer": fields.get("answer", "")}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {"task_id": ""}


def _number(task_id: str) -> tuple[int, str]:
    digits = task_id.rpartition("-")[2]
    return (int(digits) if digits.isdigit() else -1, task_id)


class Rollouts:
    """Collects a round's episodes and writes them at once.

    Args:
        folder: takes `<version>.jsonl`, by the version at dispatch.
        every: keep the episodes of versions that are a multiple of this; 0 keeps none.
        keep_bytes: see `EpisodeFiles`.
    """

    def __init__(self, folder: Path, every: int, keep_bytes: int | None = None) -> None:
        self._files = EpisodeFiles(folder, keep_bytes)
        self._every = every
        self._round: dict[int, list[tuple[str, bytes]]] = defaultdict(list)

    def is_chosen(self, version: int) -> bool:
        """Whether episodes dispatched at a version are kept."""
        return self._every > 0 and version % self._every == 0

    def wants(self, task: DispatchedTask, header: SampleHeader) -> bool:
        return self.is_chosen(task.version) or (self._every > 0 and header.status == "set_aside")

    def add(self, task: DispatchedTask, header: SampleHeader, prompt: dict[str, Any]) -> None:
        """Keep an episode; `prompt` stands in for a missing record."""
        about = {"prompt_id": task.prompt_id, "version": task.version, "value": round(task.value, 6)}
        self._round[task.version].append((header.task_id, episode_line(header, about, prompt)))

    def write(self) -> None:
        """Write what was added; raises `UserError` if a file cannot be written."""
        for version, lines in self._round.items():
            self._files.write(version, lines)
        self._round.clear()

    def withdraw(self, state: SamplerState) -> None:
        """Remove episodes that the restored state does not count: Redis may have lost the end of its log."""
        versions = [task.version for task in state.admission.in_flight.values() if not task.evaluation]
        self._files.withdraw(min([state.version, *versions]), state.awaits)

    def discard(self, version: int) -> None:
        """Remove what another run left in this folder for this version and later ones."""
        if self._every > 0:
            self._files.discard(version)
