"""The sampler's state beside the learner's checkpoints: written with each, and read where Redis has lost the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.config import Config
from common.errors import UserError
from common.files import tracker_path
from common.streams.ledger import SamplerLedger
from sampler import checkpoint
from sampler.books import pack_books, restore_books
from sampler.state import SamplerState


class RedisBehind(Exception):
    """Redis was restored from a backup: the learner is at a version whose batches the run in Redis never made."""


class Snapshots:
    """Tracker and books of one run, in a file for each version that has a checkpoint."""

    def __init__(self, config: Config, state: SamplerState, ledger: SamplerLedger, log: Any) -> None:
        self._config, self._state, self._ledger, self._log = config, state, ledger, log

    def save(self, version: int) -> None:
        """Write the state beside the learner's checkpoint of a version."""
        broker = self._ledger.broker
        results = {name.decode(): data for name, data in broker.redis.hgetall(broker.key("evaluations")).items()}
        books = pack_books(self._state, broker.counters(), results)
        # One more than the learner keeps: that of the newest version is written before its checkpoint is.
        checkpoint.save(self._path(version), self._state, self._config.learner.keep_checkpoints + 1, books)

    def has(self, version: int) -> bool:
        """Whether there is a file for a version."""
        return self._path(version).is_file()

    def load(self, version: int) -> bool:
        """The first version seen with an empty Redis: continue from what was saved with the learner's checkpoint of it.

        Returns:
            Whether its books are continued too, those of evaluations among them.
        """
        if version == 0:
            return False
        continued = self._load(version)
        self._state.note_restored(version)
        return continued

    def _load(self, version: int) -> bool:
        path = self._path(version)
        books = checkpoint.load(path, self._state)
        if books is None:
            self._log.warning("no tracker checkpoint for this version, values start anew", file=str(path))
            return False
        self._log.info("tracker restored from a checkpoint", file=str(path))
        self._ledger.clear_payloads()
        for commit in self._state.tracker_commits():
            self._ledger.commit(commit)
        if not books:
            return False
        lost = restore_books(self._state, books, self._config.sampler.batch_size)
        self._log.warning(
            "Redis does not know this run: going on from a checkpoint", version=version, tasks_lost=lost.tasks,
            samples_lost=lost.samples,
        )  # fmt: skip
        return True

    def check_newest(self, version: int) -> None:
        """The learner has trained on batches that this state never made: Redis may be an older one than the run folder.

        Raises:
            RedisBehind: the run folder has a newer state, of this very version.
            UserError: it has a newer state, of an earlier version.
        """
        ours = self._state.version
        newest = max((v for v in range(ours + 1, version + 1) if self.has(v)), default=-1)
        if newest == version:
            raise RedisBehind(f"Redis is at version {ours}, the learner at {version}")
        if newest >= 0:
            raise UserError(
                f"Redis was restored from a backup of version {ours}, and the learner goes on from {version}: start "
                "learner and sampler again, they continue from their newest checkpoint"
            )

    def _path(self, version: int) -> Path:
        return tracker_path(self._config.run.folder, version)
