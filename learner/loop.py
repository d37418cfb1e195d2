"""The learner's loop: batch after batch, each one becoming a new version of the weights."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from common.config import Config
from common.errors import UserError
from common.files import tracker_is_whole, tracker_path
from common.held_folder import HeldFolder
from common.log import Timeline
from common.masking import METRIC, RECENT, advice, recent_warning
from common.messages import Batch, Step
from common.nvml import GpuReader
from common.streams.batches import BatchInbox
from common.streams.broker import Broker
from common.streams.presence import Presence
from common.streams.steps import STEPS_KEPT, StepReader, latest
from common.weights.server import SentStats
from learner.batch.left_out import LeftOut
from learner.checkpoint.checkpoint import Checkpoints
from learner.policy.communication import choices
from learner.publish.publisher import Publisher, RankCopies, scored_prompt
from learner.publish.weight_copy import WeightCopy
from learner.publish.weight_server import WeightServer
from learner.ranks.heap import Heap
from learner.ranks.world import World
from learner.stats import Phases
from learner.token_record import TokenRecord, discard
from learner.trainer import DIVERGED_AFTER, Trainer

BLOCK_MS = 500
STOP, SAVE = b"stop", b"save"
# The metrics of a step that are logged.
LOGGED = {
    "reward": "reward/mean",
    "loss": "actor/loss",
    "grad_norm": "actor/grad_norm",
    "entropy": "actor/entropy",
    "staleness": "staleness/mean",
    "ess": "rollout_corr/eff_sample_size",
    "masked": "rollout_corr/masked_fraction",
}
# Training has diverged if one of these is exceeded.
MOST_GROWTH = 100.0  # times the largest weight at the start
LEAST_LOGPROB = -1000.0  # mean log-prob of a fixed prompt's tokens; random weights give about -12


class Learner:
    """Trains until `run.steps` versions exist or `stop` is set on any rank; all ranks run the same loop.

    A batch is released only when two checkpoints hold its gradient: after a crash the learner starts from the newest
    checkpoint, or from the one before it if that is damaged, and trains on the later batches again.
    """

    def __init__(
        self,
        config: Config,
        broker: Broker,
        inbox: BatchInbox,
        world: World,
        presence: Presence | None,
        log: Any,
    ) -> None:
        """Load the model and the newest checkpoint.

        Args:
            inbox: rank 0 has acquired its own; the others only read with theirs.
            presence: rank 0's.

        Raises:
            UserError: model or checkpoint cannot be loaded.
        """
        self.config, self.broker, self.inbox, self.world = config, broker, inbox, world
        self.presence, self.log = presence, log
        if presence is not None and world.device.type == "cuda":
            presence.measured = GpuReader(min(world.size, torch.cuda.device_count())).start()
        self.stop, self.sent, self.heap = threading.Event(), SentStats(), Heap()
        self.timeline = Timeline(config.run.folder if world.is_main else None, "learner")
        self.trainer = Trainer(config, world)
        if world.is_main:
            self._log_choices()
        self.folder = HeldFolder(config.run.folder)
        self.checkpoints = Checkpoints(config, self.trainer, self.timeline, self._check, self.rewards)
        self.version = self.saved = self.checkpoints.load(self._usable())
        self.masked: list[float] = []  # shares of the newest steps' tokens
        self.masked_advice = advice(config)
        self.left_out = LeftOut(config, broker)
        self.freed = 0  # batches before this version were released because memory was short
        self.announced = Step(version=self.version)  # the newest
        self.server: WeightServer | None = None
        self.publisher = Publisher()
        self.copies = RankCopies(config, world)
        self.most_weight = torch.finfo(getattr(torch, config.model.dtype)).max

    def _log_choices(self) -> None:
        for name, choice in self.trainer.policy.choices.items():
            self.log.info(name, kind=choice.name, because=choice.reason)
        for setting in choices(self.config.learner, self.world.device.type == "cuda", self.world.size):
            self.log.info("deepspeed", key=setting.key, value=setting.value, because=setting.reason)

    def rewards(self) -> dict[int, float]:
        """The mean held-out reward of each version evaluated so far."""
        return {result["version"]: result["reward"] for result in self.broker.evaluations()}

    def run(self) -> bool:
        """Publish, train and save until the run is over (True) or `stop` is set (False); the same on every rank."""
        try:
            self.world.raise_on_all_ranks(self._open)
            self._publish(self._copy_weights(self.version), Step(version=self.version))
            self.publisher.wait()
            if self.server:
                self.log.info("serving weights", version=self.version, address=self.server.address)
            phases = Phases(self.timeline)
            while self.version < self.config.run.steps:
                with phases("wait"):
                    batch = self._next_batch()
                if batch is None:
                    break
                if self._is_next(batch):
                    phases = self._train(batch, phases)
            if self.version > self.saved:
                if self.world.is_main:
                    # For the sampler, which saves its state with each checkpoint.
                    self._announce_checkpoint()
                self._begin_checkpoint()
            self._finish_checkpoint()
            is_over = self._serve_until_finished()
            if is_over and self.version < max(step.version for step in StepReader(self.broker).read(STEPS_KEPT)):
                raise UserError(
                    f"run {self.config.run.name!r} is finished, and the newest checkpoint in {self.checkpoints.folder} "
                    f"is of version {self.version}: Redis has freed the batches after it, so the final checkpoint "
                    "cannot be made again; restore it, or start a run with another run.name"
                )
            if is_over and self.world.is_main:
                self.inbox.release_before(self.version)
            return is_over
        finally:
            self.publisher.shutdown()
            if self.server:
                self.server.close()

    def _check(self) -> None:
        """Raise if another learner has taken over, or the run folder is gone."""
        self.inbox.check()
        self.folder.check()

    def _usable(self) -> Callable[[int], bool]:
        """Which checkpoints to continue from: if Redis is behind, only those with a saved state of the sampler."""
        newest = latest(self.broker)
        newest_version = -1 if newest is None else newest.version
        folder = self.config.run.folder
        paired = {version for version in self.checkpoints.versions() if tracker_is_whole(tracker_path(folder, version))}
        # If no checkpoint has one, the sampler starts with new values and counts.
        return lambda version: version <= newest_version or version in paired or not paired

    def _open(self) -> None:
        """Remove records of batches that are trained on again, and start rank 0's weight server; raises `UserError`."""
        discard(self.config.run.folder, self.version)
        if self.world.is_main:
            self.server = WeightServer(self.config.learner.weights, log=self.log)

    def _next_batch(self) -> Batch | None:
        """The next batch, the same on every rank; None when it is time to stop."""
        self._set_state("waiting for a batch")
        rounds = 0
        while not self._is_stopped():
            message = b""
            if self.world.is_main:
                self.publisher.check()
                self._check()
                batch = self.inbox.next(BLOCK_MS)
                if batch is not None:
                    message = batch.pack()
                elif self.broker.finished():
                    message = STOP
                elif self.freed < self.version and self.broker.memory_is_short():
                    message = SAVE
            message = self.world.broadcast(message)
            if message == STOP:
                return None
            if message == SAVE:
                self._free_memory()
                continue
            if message:
                return Batch.unpack(message)
            rounds += 1
            if rounds == 4:
                self.log.info("waiting for a batch", version=self.version)
        return None

    def _is_stopped(self) -> bool:
        """Whether some rank was told to stop; also finishes a checkpoint that all ranks have written by now."""
        # A checkpoint counts only once generators can pull its version.
        is_published = self.checkpoints.begun != self.version or not self.publisher.is_busy
        is_written = self.checkpoints.is_written and is_published
        stopped, unwritten = self.world.all_reduce_max([float(self.stop.is_set()), float(not is_written)])
        if not unwritten:
            self._finish_checkpoint()
        return stopped > 0

    def _is_next(self, batch: Batch) -> bool:
        """Whether the batch is this version's, not one trained on before; raises `UserError` if batches are missing."""
        if batch.batch_id > self.version:
            raise UserError(
                f"batch {batch.batch_id} is next, but the newest checkpoint in {self.checkpoints.folder} is of version "
                f"{self.version}: bring back the run's checkpoints, or start a run with another run.name"
            )
        # Redis keeps the batches that the newest checkpoint contains until the next one is saved; the learner skips
        # them.
        return batch.batch_id == self.version

    def _train(self, batch: Batch, phases: Phases) -> Phases:
        """Train on one batch, begin to publish the new version, and begin a checkpoint if one is due.

        Returns:
            The phases of the next step, which begins with this one's checkpoint.
        """
        self._set_state("training")
        with phases("payload"):
            packer = self.trainer.packer()
            rollouts = packer.own_share(batch, self.inbox.payloads, self.config.learner, self.world)
        record = TokenRecord(batch)
        metrics = self.trainer.train(rollouts, phases, record)
        if self.trainer.not_finite >= DIVERGED_AFTER:
            raise self._diverged(f"{self.trainer.not_finite} gradients in a row were not finite")
        if record:  # the same on all ranks
            run, world = self.config.run, self.world
            writes = partial(record.write, run.folder, batch.batch_id, world.share, run.keep_bytes)
            world.raise_on_all_ranks(writes if world.counts_share else lambda: None)
        if metrics["batch/left_out"]:
            why = {"reason": rollouts.reason} if rollouts.reason else {}
            self.log.warning("samples left out", version=self.version, samples=int(metrics["batch/left_out"]), **why)
        try:
            self.left_out.add(len(batch.sample_ids), int(metrics["batch/left_out"]), rollouts.reason, self.saved)
        except UserError:
            self._finish_checkpoint()
            raise
        self._watch_masking(metrics)
        with phases("publish"):
            self.publisher.wait()  # `WeightServer.copy` needs the previous copy to be served
            copy = self._copy_weights(self.version + 1)
        self.version += 1
        metrics |= phases.metrics() | self._sent_since_last_step()
        is_due = self.version % self.config.learner.checkpoint_every == 0 or self.version == self.config.run.steps
        drift = metrics.get("actor/drift", 0.0)
        self._publish(copy, Step(version=self.version, drift=drift, metrics=metrics, checkpoint=is_due))
        self.heap.give_back()
        phases = Phases(self.timeline)
        if is_due:
            with phases("checkpoint"):
                self._begin_checkpoint()
        return phases

    def _watch_masking(self, metrics: dict[str, float]) -> None:
        """Warn when the correction begins to mask too much of the newest steps' tokens."""
        is_known = recent_warning(self.masked, self.masked_advice) is not None
        self.masked = [*self.masked, metrics.get(METRIC, 0.0)][-RECENT:]
        warning = recent_warning(self.masked, self.masked_advice)
        if warning is not None and not is_known:
            self.log.warning(warning)

    def _copy_weights(self, version: int) -> WeightCopy:
        """The weights as they are now, or this rank's share of them.

        Raises:
            UserError: on every rank, if nothing can be sampled from them; they are neither served nor saved.
        """
        prompt = scored_prompt(self.trainer)
        copy = self.copies.copy(self.server, version, self.trainer.weights(), prompt)
        self.trainer.before_update = copy.on_the_way.before_update
        largest, mean = float(copy.largest), sum(prompt.logprobs) / max(len(prompt.logprobs), 1)
        # Negated, so that NaN counts as diverged.
        if self.world.any_rank(not (largest <= self.most_weight and mean >= LEAST_LOGPROB)):
            reason = f"weights up to {largest:.3g}, and a mean log-prob of {mean:.3g} for a fixed prompt"
            if version > self.version:
                raise self._diverged(reason)
            source = self.checkpoints.folder / f"step_{version}" if version else self.config.model.path
            raise UserError(f"{source} cannot be trained: {reason}; take another model, or an earlier checkpoint")
        if version == self.version:  # the first
            self.most_weight = min(self.most_weight, MOST_GROWTH * max(largest, 1.0))
        return copy

    def _diverged(self, reason: str) -> UserError:
        """Finish the newest checkpoint, and return the error that ends the run."""
        self._finish_checkpoint()
        return UserError(
            f"diverged at step {self.version + 1}: {reason}; lower learner.lr ({self.config.learner.lr:g}); "
            f"start the run again to continue from step {self.saved}, or use spo fork --step for an earlier one"
        )

    def _publish(self, copy: WeightCopy, step: Step) -> None:
        """Serve and announce a version in the publisher's thread, while the next batch is trained on."""

        def publish() -> None:
            with self.timeline.span("serve", lane="publishing", version=step.version):
                checksums = self.copies.checksums(copy)
                if self.server is None:
                    return
                self.server.serve(copy, checksums)
            self.inbox.set_address(self.server.endpoint())
            # Only now: a version is announced once it can be pulled.
            self.announced = step
            self.inbox.announce(step)
            if step.metrics:
                metrics = {short: step.metrics[name] for short, name in LOGGED.items() if name in step.metrics}
                self.log.info("step", version=step.version, **metrics)
            self.timeline.instant("version", version=step.version)

        self.publisher.submit(publish)

    def _sent_since_last_step(self) -> dict[str, float]:
        """What was sent to the generators and relays that pull from here: the load on this machine's network."""
        if self.server is None:
            return {}
        before, self.sent = self.sent, replace(self.server.sent)
        return {
            "weights/sent_mb": (self.sent.bytes - before.bytes) / 1e6,
            "weights/sent_chunks": float(self.sent.chunks - before.chunks),
        }

    def _announce_checkpoint(self) -> None:
        """Announce the version again, so that the sampler saves its state together with the checkpoint."""
        self.publisher.wait()
        self.inbox.announce(self.announced.model_copy(update={"checkpoint": True}))

    def _begin_checkpoint(self) -> None:
        """Begin a checkpoint of this version, which counts once `_finish_checkpoint` has completed it."""
        self._finish_checkpoint()  # one at a time
        self._set_state("saving")
        self.checkpoints.begin(self.version)
        self.saved = self.version

    def _finish_checkpoint(self) -> None:
        """Wait for the open checkpoint, and release batches that the one before it does not need."""
        version = self.checkpoints.begun
        if version is None:
            return
        # A checkpoint counts only once generators can pull its version.
        self.publisher.wait()
        self.checkpoints.finish()
        if self.world.is_main:
            self.inbox.release_before(self.checkpoints.previous(version))
            self.log.info("saved checkpoint", version=version)

    def _free_memory(self) -> None:
        """Save early and release all batches, because Redis is nearly full and no task is sent until it has room.

        This includes the batches that the previous checkpoint would need.
        """
        if self.world.is_main:
            self.log.warning("redis is nearly full: saving early, to free the tokens of batches", version=self.version)
            self._announce_checkpoint()
        if self.version > self.saved:
            self._begin_checkpoint()
        self._finish_checkpoint()
        if self.world.is_main:
            self.inbox.release_before(self.version)
        self.freed = self.version
        self._set_state("waiting for a batch")

    def _serve_until_finished(self) -> bool:
        """Serve the last weights while generators still evaluate with them; returns whether the run is over."""
        self._set_state("serving")
        self.publisher.wait()
        finished = stopped = False
        # All ranks exchange their state each time: a barrier would fail after torch's timeout of some minutes.
        while not finished and not stopped:
            is_stopped = self.stop.wait(BLOCK_MS / 1000)
            if self.world.is_main:
                self._check()
            finished = self.world.any_rank(self.world.is_main and self.broker.finished())
            stopped = self.world.any_rank(is_stopped)
        return finished

    def _set_state(self, state: str) -> None:
        if self.presence:
            sent = self.server.sent.bytes if self.server else 0
            self.presence.status(state=state, version=self.version, sent_bytes=sent)
