"""One batch of SPO, without Redis: recompute, correct, and take the optimizer steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from common.config import Config
from common.log import get_logger
from learner import drift
from learner.aggregation import Denominators
from learner.batch import MicroBatch, RolloutBatch
from learner.correction import Tally, TokenCorrection, effective_sample_size, mean_weight
from learner.engine import build_engine, full_weights, optimizer_step, set_learning_rate
from learner.metrics import Phases, batch_counts, oldest_age, per_token, step_metrics, summed
from learner.model import Policy, load_policy
from learner.objective import Known, Moment, corrected, objective, proximal_logprobs
from learner.reference import load_reference
from learner.schedule import learning_rate
from learner.world import World

# What decides over an optimizer step, known when its last micro-batch has been seen.
SURVIVORS = ("learned_tokens", "learned_rows", "rows", "row_weight", "row_weight2")


class Trainer:
    """Owns the policy and its optimizer; all ranks call the same methods at the same time."""

    def __init__(self, config: Config, world: World) -> None:
        """Load the model and build the engine; raises `UserError`."""
        self.config, self.world = config, world
        # A model that is missing on one machine ends all ranks, which would wait for that one.
        policy = world.raise_on_all_ranks(lambda: load_policy(config))
        self.engine = build_engine(policy, config.learner, world)
        self.reference = world.raise_on_all_ranks(lambda: load_reference(config, world))
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
        token, or whose tokens are all rejected, is skipped, with a warning.
        """
        phases, started = phases or Phases(), time.perf_counter()
        with phases("old"):
            known = self._known(batch)
        denominators = self._denominators(batch)
        tally, norms, rates = Tally(), [], []
        before: torch.Tensor | None = None
        with phases("train"):
            for mini, micros in enumerate(batch.mini_batches):
                moment = Moment(batch.version, mini / len(batch.mini_batches))
                if denominators[mini].tokens == 0:
                    self._warn_skipped("no usable tokens", batch, mini)
                    continue
                if self.config.algorithm.correction.rollout_is_batch_normalize:
                    known[mini] = self._normalised(micros, known[mini], moment)
                logprobs, norm = self._optimizer_step(micros, known[mini], moment, denominators[mini], tally, batch)
                before = logprobs if mini == 0 else before
                if norm is None:
                    self._warn_skipped("all tokens rejected", batch, mini)
                    continue
                norms.append(norm)
                rates.append(self.engine.optimizer.param_groups[0]["lr"])
        metrics = step_metrics(tally.totals(self.world), len(norms), self.config.algorithm)
        metrics |= per_token(summed(batch_counts(batch), self.world))
        metrics["staleness/max"] = self.world.all_reduce_max([oldest_age(batch)])[0]
        metrics["actor/grad_norm"] = sum(norms) / max(len(norms), 1)
        metrics["actor/lr"] = rates[-1] if rates else 0.0
        metrics["actor/skipped_steps"] = float(len(batch.mini_batches) - len(norms))
        metrics["batch/samples"] = float(batch.samples)
        metrics["reward/mean"] = sum(batch.rewards) / max(len(batch.rewards), 1)
        if self.config.sampler.drift.mode == "ledger":
            with phases("drift"):
                metrics["actor/drift"] = self._drift(batch.mini_batches[0][0], before)
        metrics["tokens/per_second"] = metrics["tokens/total"] / (time.perf_counter() - started)
        return metrics

    def _optimizer_step(
        self,
        micros: list[MicroBatch],
        known: list[Known],
        moment: Moment,
        denominators: Denominators,
        tally: Tally,
        batch: RolloutBatch,
    ) -> tuple[torch.Tensor, float | None]:
        """Train on one mini-batch.

        Losses are divided by the counts before rejection. What is left is known, on all ranks, before the last
        backward pass; the gradient then gets its true denominator on the way into the optimizer.

        Returns:
            The first micro-batch's log-probs before the step [N], and the gradient norm; None: nothing was left.
        """
        config = self.config.algorithm
        mine, parts, first = Tally(), torch.zeros(3, dtype=torch.float64, device=self.world.device), None
        left: dict[str, float] = {}
        for number, micro in enumerate(micros):
            is_last = number == len(micros) - 1
            logprobs, entropies = self._forward(micro, entropy=True)
            first = logprobs.detach() if first is None else first
            step = objective(micro, logprobs, entropies, known[number], moment, denominators, config)
            mine.merge(step.tally)
            parts += step.parts
            if is_last:
                left = self._survivors(mine)
                if left["learned_tokens"] == 0:
                    break
            self.engine.set_gradient_accumulation_boundary(is_last)
            # DeepSpeed averages over ranks; the denominators are global already.
            self.engine.backward(step.loss * self.world.size)
        assert first is not None
        if left["learned_tokens"] == 0:
            tally.merge(mine)
            return first, None
        factor = 1.0
        if config.correction.skyrl is None:
            factor = denominators.rescale(left["learned_tokens"], left["learned_rows"], config.aggregation)
        mine.add_table("parts", (parts * factor)[None])
        tally.merge(mine)
        set_learning_rate(self.engine, self._rate(moment, len(batch.mini_batches), effective_sample_size(left)))
        return first, optimizer_step(self.engine, self.config.learner, factor)

    def _survivors(self, tally: Tally) -> dict[str, float]:
        """Counts and weights of what rejection left, over all ranks."""
        mine = torch.stack([tally.sums[name] for name in SURVIVORS]).tolist()
        return dict(zip(SURVIVORS, self.world.all_reduce_sum(mine), strict=True))

    def _rate(self, moment: Moment, mini_batches: int, ess: float) -> float:
        """Learning rate of this optimizer step; scaled by the effective sample size if that is wanted."""
        learner, scaling = self.config.learner, self.config.algorithm.ess_lr
        step = moment.version * mini_batches + round(moment.done * mini_batches)
        rate = learning_rate(step, self.config.run.steps * mini_batches, learner)
        return rate * {"none": 1.0, "sqrt": ess**0.5, "linear": ess}[scaling]

    def _forward(self, micro: MicroBatch, entropy: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies of the model tokens [N]."""
        logprobs, entropies = self.engine(
            micro.input_ids, micro.position_ids, micro.sequences, micro.predict, micro.targets, entropy=entropy
        )
        return logprobs[: micro.model_tokens], entropies[: micro.model_tokens]

    @torch.no_grad()
    def _known(self, batch: RolloutBatch) -> list[list[Known]]:
        """What must be computed with the weights as they are now, by mini-batch and micro-batch.

        The first mini-batch needs no recomputed policy: its training pass has the same weights.
        """
        recomputes = self.config.algorithm.proximal in ("recompute", "compare")
        return [
            [
                Known(
                    old=self._forward(micro)[0] if recomputes and mini else None,
                    reference=self.reference(micro) if self.reference else None,
                )
                for micro in micros
            ]
            for mini, micros in enumerate(batch.mini_batches)
        ]

    @torch.no_grad()
    def _normalised(self, micros: list[MicroBatch], known: list[Known], moment: Moment) -> list[Known]:
        """Corrections with weights divided by their mean over all ranks, which takes a forward pass of its own."""
        algorithm = self.config.algorithm
        mine, corrections = Tally(), list[TokenCorrection]()
        for micro, held in zip(micros, known, strict=True):
            logprobs = self._forward(micro)[0]
            old = proximal_logprobs(micro, logprobs, held.old, moment, algorithm)
            corrections.append(corrected(micro, logprobs, old, moment, algorithm))
            mine.merge(corrections[-1].tally)
        names = ("weight_sum", "weight_count")
        totals = self.world.all_reduce_sum([float(mine.sums[name]) for name in names])
        mean = mean_weight(dict(zip(names, totals, strict=True)))
        return [
            replace(held, correction=replace(found, weights=found.weights / mean))
            for held, found in zip(known, corrections, strict=True)
            if found.weights is not None
        ]

    def _denominators(self, batch: RolloutBatch) -> list[Denominators]:
        """Global counts of each mini-batch, before rejection."""
        counts = []
        for micros in batch.mini_batches:
            counts.append(float(sum(micro.model_tokens for micro in micros)))
            counts.append(float(sum(micro.layout.count for micro in micros)))
        counts = self.world.all_reduce_sum(counts)
        horizon = float(self.config.episode.max_response_tokens)
        return [Denominators(*pair, horizon) for pair in zip(counts[::2], counts[1::2], strict=True)]

    def _warn_skipped(self, reason: str, batch: RolloutBatch, mini: int) -> None:
        self.log.warning(f"{reason}, optimizer step skipped", version=batch.version, mini_batch=mini)

    @torch.no_grad()
    def _drift(self, micro: MicroBatch, before: torch.Tensor | None) -> float:
        """Mean |change of log-prob| per token of the batch's first micro-batch on each rank."""
        if before is None:
            return 0.0
        total, count = self.world.all_reduce_sum(list(drift.moved(before, self._forward(micro)[0], micro)))
        return total / max(count, 1.0)
