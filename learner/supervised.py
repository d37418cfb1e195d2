"""The loop of supervised training: batch after batch of demonstrations, through the learner's own step."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common.config import Config
from common.errors import UserError
from common.held_folder import HeldFolder
from common.log import Timeline
from learner.batch.demonstrations import Demonstrations, numbers_at
from learner.batch.mixed import own_demonstrations
from learner.batch.tensors import RolloutBatch
from learner.checkpoint.checkpoint import Checkpoints
from learner.ranks.world import World
from learner.stats import Phases
from learner.trainer import DIVERGED_AFTER, Trainer

# The trainer's metrics that mean something without rewards and a generating policy.
REPORTED = ("actor/grad_norm", "actor/lr", "actor/entropy", "actor/skipped_steps", "batch/samples")
GROUPS = ("tokens/", "gpu/", "router/")

Report = Callable[[int, dict[str, float]], None]


class SupervisedLearner:
    """Trains on demonstrations until `run.steps` or until `stop` is set on any rank; all ranks run the same loop.

    Which demonstrations a step trains on depends on its number and `run.seed` alone, so that training continues from a
    checkpoint as if it had not stopped.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        train: Demonstrations,
        heldout: Demonstrations | None,
        report: Report,
        log: Any,
        rewards: Callable[[], Mapping[int, float]] = dict,
    ) -> None:
        """Load the model and the newest checkpoint; raises `UserError` if one of them cannot be loaded.

        Args:
            config: from `launcher.sft.settings.supervised` and `with_steps`.
            report: called on rank 0 with each step's number and metrics.
            rewards: called on rank 0 for the mean held-out reward of each step evaluated so far.
        """
        self.config, self.world, self.log, self.report = config, world, log, report
        self.train, self.heldout = train, heldout
        self.stop = threading.Event()
        self.timeline = Timeline(config.run.folder if world.is_main else None, "learner")
        self.phases = Phases(self.timeline)
        self.trainer = Trainer(config, world)
        self.packer = self.trainer.packer()
        confirm = HeldFolder(config.run.folder).check
        self.checkpoints = Checkpoints(config, self.trainer, self.timeline, confirm, rewards)
        self.version = self.saved = self.checkpoints.load()

    def run(self, until: int | None = None) -> bool:
        """Train up to a step, by default the last, and save it; returns on every rank whether it was reached."""
        config, last = self.config, self.config.run.steps if until is None else until
        if self.version == 0 and self.heldout is not None and config.eval.before_training:
            self._report(self._heldout_loss())
        while self.version < last and not self.world.any_rank(self.stop.is_set()):
            metrics = self._step()
            self.version += 1
            if self.heldout is not None and self._is_due(config.eval.every):
                metrics |= self._heldout_loss()
            self._report(metrics | self.phases.metrics())
            self.phases = Phases(self.timeline)
            # Give a checkpoint its name as soon as all ranks have written it, without waiting for that.
            if not self.world.any_rank(not self.checkpoints.is_written):
                self.checkpoints.finish()
            if self._is_due(config.learner.checkpoint_every):
                self._checkpoint()
        if self.version > self.saved:
            self._checkpoint()
        self.checkpoints.finish()
        return self.version >= last

    def _is_due(self, every: int) -> bool:
        return self.version == self.config.run.steps or (every > 0 and self.version % every == 0)

    def _step(self) -> dict[str, float]:
        sft, count = self.config.sft, len(self.train)
        start = self.version * sft.batch_size
        end = start + sft.batch_size
        if sft.steps is None:
            end = min(end, max(1, round(sft.epochs * count)))
        seed = self.config.run.seed if sft.shuffle else None
        batch = self._batch(self.train, numbers_at(start, end, count, seed))
        metrics = self.trainer.train(batch, self.phases)
        if self.trainer.not_finite >= DIVERGED_AFTER:
            raise UserError(
                f"diverged at step {self.version + 1}: {self.trainer.not_finite} gradients in a row were not finite; "
                f"lower the learning rate ({self.config.learner.lr:g}), or look at the data; the newest checkpoint is "
                f"of step {self.saved}"
            )
        kept = {name: value for name, value in metrics.items() if name in REPORTED or name.startswith(GROUPS)}
        return {"sft/loss": metrics["actor/pg_loss"], "sft/epoch": end / count} | kept

    def _heldout_loss(self) -> dict[str, float]:
        """Weighted mean of the held-out tokens' negative log-probs; none if all of them are left out."""
        heldout, size = self.heldout, self.config.sft.batch_size
        assert heldout is not None
        parts = [range(len(heldout))[start : start + size] for start in range(0, len(heldout), size)]
        with self.phases("heldout"):
            sums = [self.trainer.loss_sums(self._batch(heldout, part, scaled=False)) for part in parts]
        losses, weights = zip(*sums, strict=True)
        total = math.fsum(weights)
        return {"sft/heldout_loss": math.fsum(losses) / total} if total else {}

    def _batch(self, demonstrations: Demonstrations, numbers: Sequence[int], scaled: bool = True) -> RolloutBatch:
        batch, payloads = demonstrations.batch(numbers, self.version, scaled)
        return own_demonstrations(self.packer, batch, payloads, self.config.learner, self.world, self.log)

    def _report(self, metrics: dict[str, float]) -> None:
        if self.world.is_main:
            self.report(self.version, metrics)

    def _checkpoint(self) -> None:
        self.checkpoints.finish()  # one at a time
        self.checkpoints.begin(self.version)
        self.saved = self.version
