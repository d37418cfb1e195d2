"""One batch of SPO, without Redis: recompute, correct, and take the optimizer steps."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from common.config import Config
from common.log import get_logger
from learner import drift
from learner.batch import MicroBatch, RolloutBatch
from learner.correction import Correction, diagnostics, importance_weights
from learner.engine import build_engine, full_weights, optimizer_step, set_learning_rate
from learner.losses import Denominators, aggregate, policy_loss
from learner.metrics import Phases, add, all_rows, batch_counts, oldest_age, per_token, summed
from learner.model import Policy, load_policy
from learner.schedule import learning_rate
from learner.world import World


class Trainer:
    """Owns the policy and its optimizer; all ranks call the same methods at the same time."""

    def __init__(self, config: Config, world: World) -> None:
        """Load the model and build the engine; raises `UserError`."""
        self.config, self.world = config, world
        self.engine = build_engine(load_policy(config), config.learner, world)
        self.log = get_logger()

    @property
    def policy(self) -> Policy:
        """The model that is trained."""
        return self.engine.module

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter whole, by its name on disk; all ranks must go through this together."""
        return full_weights(self.engine)

    def train(self, batch: RolloutBatch, phases: Phases | None = None) -> dict[str, float]:
        """Train on one batch: `learner.mini_batches` optimizer steps; returns metrics, equal on all ranks.

        The gradient is that of one loss over all ranks and micro-batches. A mini-batch without any usable
        token is skipped, with a warning.
        """
        config, phases, started = self.config, phases or Phases(), time.perf_counter()
        with phases("old"):
            old = self._old_logprobs(batch)
        denominators = self._denominators(batch)
        totals = {"actor/loss": 0.0, "actor/entropy": 0.0}
        norms: list[float] = []
        # log pi_theta when each micro-batch was trained on; before any step that is log pi_old.
        current: list[list[torch.Tensor]] = [[] for _ in batch.mini_batches]
        with phases("train"):
            for mini, micro_batches in enumerate(batch.mini_batches):
                if denominators[mini].tokens == 0:
                    self.log.warning("no usable tokens, optimizer step skipped", version=batch.version, mini_batch=mini)
                    continue
                step = batch.version * config.learner.mini_batches + mini
                rate = learning_rate(step, config.run.steps * config.learner.mini_batches, config.learner)
                set_learning_rate(self.engine, rate)
                for number, micro in enumerate(micro_batches):
                    self.engine.set_gradient_accumulation_boundary(number == len(micro_batches) - 1)
                    logprobs = self._backward(micro, old[mini][number], denominators[mini], totals)
                    current[mini].append(logprobs)
                norms.append(optimizer_step(self.engine, config.learner))
        steps = max(len(norms), 1)
        metrics = {name: value / steps for name, value in summed(totals, self.world).items()}
        metrics |= per_token(summed(batch_counts(batch), self.world))
        metrics["staleness/max"] = max(self.world.gather_rows(self._scalar(oldest_age(batch))).flatten().tolist())
        metrics |= self._gap(batch, old, current)
        metrics["actor/grad_norm"] = sum(norms) / steps
        metrics["actor/lr"] = self.engine.optimizer.param_groups[0]["lr"]
        metrics["actor/skipped_steps"] = float(len(batch.mini_batches) - len(norms))
        metrics["batch/samples"] = float(batch.samples)
        metrics["reward/mean"] = sum(batch.rewards) / max(len(batch.rewards), 1)
        if config.sampler.drift.mode == "ledger":
            with phases("drift"):
                metrics["actor/drift"] = self._drift(batch.mini_batches[0][0], current[0])
        metrics["tokens/per_second"] = metrics["tokens/total"] / (time.perf_counter() - started)
        return metrics

    def _backward(
        self,
        micro: MicroBatch,
        old: torch.Tensor | None,
        denominators: Denominators,
        totals: dict[str, float],
    ) -> torch.Tensor:
        """Accumulate the gradient of one micro-batch; returns its log-probs as rows [B, M]."""
        algorithm = self.config.algorithm
        logprobs, entropies = (micro.rows(values) for values in self._forward(micro, entropy=True))
        # Before the first optimizer step the policy is itself the proximal one.
        proximal = logprobs.detach() if old is None else old
        weights = None
        if algorithm.mode == "decoupled":
            weights = importance_weights(proximal, micro.rollout_logprobs, micro.mask, algorithm.correction)
        loss, metrics = policy_loss(
            algorithm.loss,
            logprobs,
            proximal,
            micro.advantages,
            micro.mask,
            algorithm,
            Correction(weights, micro.mask),
            denominators,
        )
        entropy = aggregate(entropies, micro.mask, algorithm.aggregation, denominators)
        if algorithm.entropy_coef:
            loss = loss - algorithm.entropy_coef * entropy
        mean_entropy = aggregate(entropies.detach(), micro.mask, "token-mean", denominators)
        # DeepSpeed averages over ranks; the denominators are global already.
        self.engine.backward(loss * self.world.size)
        loss_value, entropy_value = torch.stack([loss.detach(), mean_entropy]).tolist()
        add(totals, metrics | {"actor/loss": loss_value, "actor/entropy": entropy_value})
        return logprobs.detach()

    def _forward(self, micro: MicroBatch, entropy: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        return self.engine(
            micro.input_ids, micro.position_ids, micro.segments, micro.predict, micro.targets, entropy=entropy
        )

    @torch.no_grad()
    def _old_logprobs(self, batch: RolloutBatch) -> list[list[torch.Tensor | None]]:
        """log pi_old as rows, by mini-batch and micro-batch.

        None in the first mini-batch of decoupled mode: its training pass computes them with the same weights.
        """
        if self.config.algorithm.mode == "bypass":
            return [[micro.rollout_logprobs for micro in micros] for micros in batch.mini_batches]
        return [
            [None if mini == 0 else micro.rows(self._forward(micro)[0]) for micro in micros]
            for mini, micros in enumerate(batch.mini_batches)
        ]

    def _denominators(self, batch: RolloutBatch) -> list[Denominators]:
        """Global counts of each mini-batch."""
        counts = []
        for micros in batch.mini_batches:
            counts.append(float(sum(int(micro.mask.sum()) for micro in micros)))
            counts.append(float(sum(int(micro.mask.any(-1).sum()) for micro in micros)))
        counts = self.world.sums(counts)
        horizon = float(self.config.episode.max_response_tokens)
        return [Denominators(*pair, horizon) for pair in zip(counts[::2], counts[1::2], strict=True)]

    def _gap(
        self, batch: RolloutBatch, old: list[list[torch.Tensor | None]], current: list[list[torch.Tensor]]
    ) -> dict[str, float]:
        """`rollout_corr/...` of the whole batch: the proximal (in bypass mode the current) against the generating."""
        bypass = self.config.algorithm.mode == "bypass"
        rows: list[tuple[torch.Tensor, ...]] = [
            (now if bypass or proximal is None else proximal, micro.rollout_logprobs, micro.mask.float())
            for micros, olds, nows in zip(batch.mini_batches, old, current, strict=True)
            for micro, proximal, now in zip(micros, olds, nows, strict=False)
        ]
        if not rows:
            return {}
        ours, rollout, mask = (all_rows([row[column] for row in rows], self.world) for column in range(3))
        return diagnostics(ours, rollout, mask.bool(), self.config.algorithm.correction)

    def _scalar(self, value: float) -> torch.Tensor:
        return torch.tensor([[value]], device=self.world.device)

    @torch.no_grad()
    def _drift(self, micro: MicroBatch, before: list[torch.Tensor]) -> float:
        """Mean |change of log-prob| per token of the batch's first micro-batch on each rank."""
        if not before:
            return 0.0
        total, count = self.world.sums(list(drift.moved(before[0], micro.rows(self._forward(micro)[0]), micro)))
        return total / max(count, 1.0)
