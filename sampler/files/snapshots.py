"""Snapshots of the sampler's state: written with each checkpoint of the learner, read if Redis has lost the run."""

from __future__ import annotations

import zipfile
import zlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from common.config import Config
from common.errors import UserError
from common.files import replacing, tracker_path
from common.streams.lease import RedisBehind
from common.streams.ledger import SamplerLedger
from sampler.records import EvaluationCounts
from sampler.state import SamplerState

# Counters that Redis scripts keep; `restore_counts` must correct them together with the sampler's own.
FINISHED, COUNTED, LOST, SUPERSEDED = "finished", "counted", "lost", "superseded"


class Snapshots:
    """Tracker and counts of one run, in a file for each version that has a checkpoint."""

    def __init__(self, config: Config, state: SamplerState, ledger: SamplerLedger, log: Any) -> None:
        self._config, self._state, self._ledger, self._log = config, state, ledger, log

    def save(self, version: int) -> None:
        """Write the state beside the learner's checkpoint of a version."""
        broker = self._ledger.broker
        results = {name.decode(): data for name, data in broker.redis.hgetall(broker.key("evaluations")).items()}
        counts = pack_counts(self._state, broker.counters(), results, self._config.run.name)
        # One more than the learner keeps: a version's snapshot is written before its checkpoint.
        write_snapshot(self._path(version), self._state, self._config.learner.keep_checkpoints + 1, counts)

    def has(self, version: int) -> bool:
        return self._path(version).is_file()

    def load(self, version: int) -> bool:
        """Restore the state that was saved with the version at which the run starts, if there is one.

        Returns:
            Whether the run's counts were restored too, including those of evaluations.
        """
        if version == 0:
            return False
        self._state.note_restored(version)
        path = self._path(version)
        counts = read_snapshot(path, self._state)
        if counts is None:
            self._log.warning(
                "no tracker checkpoint for this version: the prompts' values start from their initial counts",
                file=str(path),
            )
            return False
        self._log.info("tracker restored from a checkpoint", file=str(path))
        self._ledger.clear_payloads()
        for commit in self._state.tracker_commits():
            self._ledger.commit(commit)
        if not counts:
            return False
        tasks, samples = restore_counts(self._state, counts, self._config)
        self._log.warning(
            "Redis does not know this run: continuing from a checkpoint", version=version, tasks_lost=tasks,
            samples_lost=samples,
        )  # fmt: skip
        return True

    def check(self) -> None:
        """Raise `RedisBehind` if the batches in Redis end before the newest state in the run folder."""
        newest, reached = max(map(_version, self._files()), default=0), self._state.open.next_id
        if newest > reached:
            raise RedisBehind(f"Redis has no batch {reached}, the run folder has a state of version {newest}")

    def discard(self, version: int) -> None:
        """Remove the states of later versions: of another run in this folder, or of steps that are trained again.

        Raises:
            UserError: a file cannot be removed.
        """
        for path in self._files():
            if _version(path) > version:
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    raise UserError(f"{path} cannot be removed: {error.strerror}") from None

    def _files(self) -> list[Path]:
        return [*self._path(0).parent.glob("step_*.npz")]

    def _path(self, version: int) -> Path:
        return tracker_path(self._config.run.folder, version)


def write_snapshot(path: Path, state: SamplerState, most: int, counts: bytes = b"") -> None:
    """Write the file whole or not at all, and remove all but the `most` newest files of its folder.

    Raises:
        UserError: the file cannot be written.
    """
    arrays: Any = state.tracker.state_dict() | {"answered": state.drift.answered, "moved": state.drift.by_version()}
    arrays["books"] = np.frombuffer(counts, np.uint8)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            np.savez(file, **arrays)
        for old in sorted(path.parent.glob("step_*.npz"), key=_version)[:-most]:
            old.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"tracker checkpoint {path} cannot be written: {error.strerror}") from None


def read_snapshot(path: Path, state: SamplerState) -> bytes | None:
    """Restore tracker and drift from a file; returns its packed counts, or None if there is no file.

    Raises:
        UserError: the file cannot be read.
    """
    if not path.is_file():
        return None
    try:
        with np.load(path) as arrays:
            state.tracker.load_state_dict(arrays)
            state.drift.restore(arrays["moved"])
            for prompt_id, answered in zip(arrays["prompt_ids"].tolist(), arrays["answered"].tolist(), strict=True):
                i = state.tracker.index.get(prompt_id.decode())
                if i is not None:
                    state.drift.answered[i] = answered
            return arrays["books"].tobytes()
    # RuntimeError: a damaged zip seems to be encrypted, or packed by another method.
    except (OSError, ValueError, KeyError, EOFError, RuntimeError, zlib.error, zipfile.BadZipFile) as error:
        raise UserError(f"tracker checkpoint {path} cannot be read: {error}; remove it to start without") from None


def _version(path: Path) -> int:
    digits = path.stem.rpartition("_")[2]
    return int(digits) if digits.isdigit() else -1


def pack_counts(state: SamplerState, counters: Mapping[str, int], results: Mapping[str, bytes], run: str) -> bytes:
    """Pack the sampler's counts as of the last commit, and the packed `results` of evaluations by version."""
    return msgpack.packb(
        {
            "next_task": state.next_task,
            "arrivals": state.arrivals,
            "refilled": state.refilled,
            "evaluated_to": state.evaluated_to,
            "early_stop": {run: state.early_stop.pack()},
            "evaluations": {str(due): counts.pack() for due, counts in state.evaluations.items()},
            "results": dict(results),
            "counters": dict(counters),
            "in_flight": len(state.admission.in_flight),
            "waiting": len(state.open) + state.admission.arrived,
            "batches_ahead": max(0, state.open.next_id - state.version),
        }
    )


def restore_counts(state: SamplerState, data: bytes, config: Config) -> tuple[int, int]:
    """Restore counts into a new state, and count what was lost with Redis.

    A task that was in flight is counted as `lost`; admission makes room for another one. A counted sample that was in
    no batch before the version, and whose tokens are gone, stays in the tracker and is counted in `lost_samples`.

    Returns:
        How many tasks and samples were lost.
    """
    saved = msgpack.unpackb(data)
    state.next_task, state.arrivals = saved["next_task"], saved["arrivals"]
    state.refilled, state.evaluated_to = saved["refilled"], saved["evaluated_to"]
    # A fork compares only its own evaluations: its data and rewards may differ.
    if own := saved.get("early_stop", {}).get(config.run.name):
        state.restore_early_stop(own)
    results = {int(version): packed for version, packed in saved["results"].items()}
    state.restore_evaluations(
        {int(due): EvaluationCounts.unpack(packed) for due, packed in saved["evaluations"].items()}, results
    )
    counters: Counter[str] = Counter(saved["counters"])
    unmade = min(saved["batches_ahead"] * config.sampler.batch_size, counters["batched"])
    tasks, samples = saved["in_flight"], saved["waiting"] + unmade
    # Results that had arrived but were not counted are lost with Redis: their tasks are in flight, not finished.
    counters[FINISHED] = min(counters[FINISHED], counters[COUNTED] - counters[SUPERSEDED] - counters[LOST])
    counters[COUNTED] += tasks
    counters[LOST] += tasks
    counters["batched"] -= unmade
    counters["lost_samples"] += samples
    for name, total in counters.items():
        state.count(name, total)
    return tasks, samples
