"""The learner's loop: batch after batch, each one becoming a new version of the weights."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

from common.config import Config
from common.errors import UserError
from common.messages import Batch, Step
from common.metrics import MetricsWriter
from common.streams.batches import BatchInbox
from common.streams.broker import Broker
from common.streams.presence import Presence
from common.streams.steps import latest
from common.weights.server import Sent
from learner.batch import RolloutBatch, rollout_batch
from learner.checkpoint import Checkpoints
from learner.metrics import Phases
from learner.packing import plan_micro_batches
from learner.trainer import Trainer
from learner.weight_server import WeightServer
from learner.world import World

BLOCK_MS = 500
STOP = b"stop"
# What a log line tells of a step.
SHOWN = {
    "reward": "reward/mean",
    "loss": "actor/loss",
    "grad_norm": "actor/grad_norm",
    "entropy": "actor/entropy",
    "staleness": "staleness/mean",
    "ess": "rollout_corr/eff_sample_size",
    "masked": "rollout_corr/masked_fraction",
}


class Learner:
    """Trains until `run.steps` versions exist or `stop` is set on any rank; all ranks run the same loop.

    A batch is acknowledged only when a checkpoint holds its gradient: after a crash the learner starts from
    the newest checkpoint and trains on the unacknowledged batches again.
    """

    def __init__(self, config: Config, broker: Broker, world: World, presence: Presence | None, log: Any) -> None:
        """Load the model and the newest checkpoint; `presence` is rank 0's. Raises `UserError`."""
        self.config, self.broker, self.world, self.presence, self.log = config, broker, world, presence, log
        self.stop = threading.Event()
        self.trainer = Trainer(config, world)
        self.checkpoints = Checkpoints(config, self.trainer)
        self.version = self.saved = self.checkpoints.load()
        self.inbox = BatchInbox(broker)
        self.unsaved: list[Batch] = []
        self.told = Step(version=self.version)
        self.server: WeightServer | None = None
        self.sent = Sent()
        self.writer: MetricsWriter | None = None

    def run(self) -> bool:
        """The whole run, from the first weights to the end.

        Returns:
            Whether the run is over, the same on every rank; False where `stop` came first.
        """
        steps = self.config.run.steps
        try:
            self.world.raise_on_all_ranks(self._open)
            self._publish()
            if self.server:
                self.log.info("serving weights", version=self.version, address=self.server.address)
            self._announce(self.told)
            phases = Phases()
            while self.version < steps:
                with phases("wait"):
                    batch = self._next_batch()
                if batch is None:
                    break
                phases = self._learn(batch, phases)
            if self.version > self.saved:
                self._checkpoint()
            return self._serve_until_finished()
        finally:
            if self.server:
                self.server.close()
            if self.writer:
                self.writer.close()

    def _open(self) -> None:
        """What rank 0 alone has; what is wrong with it ends all ranks."""
        if self.world.is_main:
            self._check_resumption()
            self.server = WeightServer(self.config.learner.weights, log=self.log)
            self.writer = self._open_writer()

    def _learn(self, batch: Batch, phases: Phases) -> Phases:
        """Train on one batch, publish and announce the new version, and keep it safe when it is time to.

        Returns:
            The phases of the next step, which begins with this one's checkpoint.
        """
        if batch.batch_id < self.version:
            # Seen already: the last life ended between saving and acknowledging, or Redis has gone back in time.
            # What no checkpoint holds yet is acknowledged with the others of its kind.
            if batch.batch_id < self.saved and self.world.is_main:
                self.inbox.release([batch])
            return phases
        if batch.batch_id > self.version:
            raise UserError(
                f"batch {batch.batch_id} is next, but the newest checkpoint in {self.checkpoints.folder} is of version "
                f"{self.version}: bring back the run's checkpoints, or start a run with another run.name"
            )
        self._status("training")
        with phases("payload"):
            rollouts = self._fetch(batch)
        metrics = self.trainer.train(rollouts, phases)
        if metrics["batch/left_out"]:
            self.log.warning("samples left out", version=self.version, samples=int(metrics["batch/left_out"]))
        self.version += 1
        self.unsaved.append(batch)
        with phases("publish"):
            self._publish()
        metrics |= phases.metrics() | self._sent_since_last_step()
        is_due = self.version % self.config.learner.checkpoint_every == 0 or self.version == self.config.run.steps
        self._announce(
            Step(
                version=self.version,
                drift=metrics.get("actor/drift", 0.0),
                metrics=metrics,
                checkpoint=is_due,
            )
        )
        phases = Phases()
        if is_due:
            with phases("checkpoint"):
                self._checkpoint()
        return phases

    def _next_batch(self) -> Batch | None:
        """The next batch, the same on every rank; None when it is time to stop."""
        self._status("waiting for a batch")
        rounds = 0
        while not self.world.any_rank(self.stop.is_set()):
            message = b""
            if self.world.is_main:
                batch = self.inbox.next(BLOCK_MS)
                if batch is not None:
                    message = batch.pack()
                elif self.broker.finished():
                    message = STOP
                else:
                    self._announce_again_if_lost()
            message = self.world.broadcast(message)
            if message == STOP:
                return None
            if message:
                return Batch.unpack(message)
            rounds += 1
            if rounds == 4:
                self.log.info("waiting for a batch", version=self.version)
        return None

    def _fetch(self, batch: Batch) -> RolloutBatch:
        """This rank's share of the batch."""
        learner = self.config.learner
        plan = plan_micro_batches(batch.tokens, learner.mini_batches, self.world.size, learner.token_budget)
        places = plan.of_rank(self.world.rank)
        mine = [index for micro_batches in places for held in micro_batches for index in held]
        payloads = self.inbox.payloads([batch.sample_ids[index] for index in mine])
        return rollout_batch(
            self.version,
            places,
            dict(zip(mine, payloads, strict=True)),
            batch.advantages,
            batch.rewards,
            self.trainer.policy.vocabulary,
            self.world.device,
        )

    def _publish(self) -> None:
        """Hand the weights to the server; the other ranks only help to gather them."""
        weights = self.trainer.weights()
        if self.server:
            self.server.publish(self.version, weights, self.config.model.dtype)
            self.broker.set_endpoint("weights", self.server.endpoint())
        else:
            for _ in weights:
                pass

    def _sent_since_last_step(self) -> dict[str, float]:
        """What pulling costs this machine's network: grows with those who pull from it, generators or relays."""
        if self.server is None:
            return {}
        before, self.sent = self.sent, replace(self.server.sent)
        return {
            "weights/sent_mb": (self.sent.bytes - before.bytes) / 1e6,
            "weights/sent_chunks": float(self.sent.chunks - before.chunks),
        }

    def _announce(self, step: Step) -> None:
        """Tell all processes and TensorBoard of a version."""
        if not self.world.is_main:
            return
        self.told = step
        self.inbox.announce(step)
        if self.writer and step.metrics:
            self.writer.write(step.version, step.metrics)
            shown = {short: step.metrics[name] for short, name in SHOWN.items() if name in step.metrics}
            self.log.info("step", version=step.version, **shown)

    def _announce_again_if_lost(self) -> None:
        """A Redis that was killed or failed over may have lost its last second; others would wait for it for ever."""
        if self.server and self.broker.endpoint("weights") != self.server.endpoint():
            self.broker.set_endpoint("weights", self.server.endpoint())
        newest = latest(self.broker)
        if newest is None or newest.version < self.told.version:
            self.inbox.announce(self.told)

    def _open_writer(self) -> MetricsWriter:
        folder = self.config.run.folder / "tensorboard" / "learner"
        try:
            return MetricsWriter(folder)
        except OSError as error:
            raise UserError(f"run folder {folder} cannot be written: {error.strerror}") from None

    def _checkpoint(self) -> None:
        """Save this version and acknowledge the batches it was made from."""
        self._status("saving")
        self.checkpoints.save(self.version)
        self.saved = self.version
        if self.world.is_main:
            self.inbox.release(self.unsaved)
            self.log.info("saved checkpoint", version=self.version)
        self.unsaved = []

    def _serve_until_finished(self) -> bool:
        """Keep serving the last weights while others still evaluate with them; whether the run is over."""
        self._status("serving")
        finished = ended = False
        # All ranks ask each other every time: a barrier would break off after torch's timeout of some minutes.
        while not ended:
            stopped = self.stop.wait(BLOCK_MS / 1000)
            if self.world.is_main:
                self._announce_again_if_lost()
            finished = self.world.any_rank(self.world.is_main and self.broker.finished())
            ended = finished or self.world.any_rank(stopped)
        return finished

    def _check_resumption(self) -> None:
        """Refuse to go on from the checkpoints of another run.

        Raises:
            UserError: the run folder holds checkpoints, but Redis knows nothing of this run.
        """
        if self.version > 0 and latest(self.broker) is None:
            raise UserError(
                f"{self.checkpoints.folder} holds a checkpoint of version {self.version}, but run "
                f"{self.config.run.name!r} begins anew in Redis: choose another run.experiment (and "
                f"model.path={self.checkpoints.folder / f'step_{self.version}' / 'hf'} to start from it)"
            )

    def _status(self, state: str) -> None:
        if self.presence:
            sent = self.server.sent.bytes if self.server else 0
            self.presence.status(state=state, version=self.version, sent_bytes=sent)
