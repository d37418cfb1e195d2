"""One batch of SPO, without Redis: recompute, then for every mini-batch forward, correct, backward, step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch

from common.config import AGE_BUCKETS, Config
from common.log import get_logger
from common.masking import what_masks
from learner.batch.mixed import Mixed, Shown
from learner.batch.teacher import weight_at
from learner.batch.tensors import MicroBatch, Packer, RolloutBatch
from learner.correction.statistics import age_buckets
from learner.critic import Critic, with_explained_variance
from learner.losses.aggregation import Denominators
from learner.losses.own import load_loss
from learner.past_versions import PastVersions, exact_statistics
from learner.peak import mfu, total_peak
from learner.policy.disk_names import DiskNames
from learner.policy.engine import (
    backward,
    build_engine,
    full_weights,
    learning_rate,
    load_on_ranks,
    optimizer_step,
    set_learning_rate,
)
from learner.policy.forward_check import check_policy
from learner.policy.model import Policy
from learner.policy.operations import Operations, operations_of
from learner.policy.routers import Routing, routing_statistics
from learner.precompute import compare_all, precompute
from learner.ranks.world import World
from learner.reference import load_reference
from learner.stats import Phases, Stats
from learner.step_loss import PolicyOutput, Precomputed, TrainPosition, step_loss
from learner.token_record import TokenRecord

TAG = "deepspeed"  # the folder of the ranks' files in a checkpoint
CRITIC_TAG = "deepspeed-critic"  # the same for the critic, if there is one
DIVERGED_AFTER = 3  # optimizer steps in a row whose gradient was not finite: training has diverged
# Statistics that decide whether to take an optimizer step; known after the last micro-batch's forward pass.
LEFT = ("learned_tokens", "learned_samples", "not_finite", "rollout_corr/eff_sample_size")


class Trainer:
    """Owns the policy and its optimizer; all ranks call the same methods at the same time.

    Attributes:
        not_finite: optimizer steps in a row that were skipped because loss or gradient was not finite.
        past: earlier versions, if `learner.exact_every` has stale tokens scored by the versions that sampled them.
        critic: the value model, if `algorithm.baseline` has one.
        mixed: demonstrations that every batch also learns from, if `algorithm.demonstrations` has some.
        peak: peak operations per second of all ranks' GPUs together; 0 if unknown.
    """

    not_finite = 0
    peak = 0.0
    past: PastVersions | None = None
    critic: Critic | None = None
    mixed: Mixed | None = None

    def __init__(self, config: Config, world: World) -> None:
        """Load the model and build the engine; raises `UserError`."""
        self.config, self.world = config, world
        # A loss that is missing on one machine must end all ranks, which would otherwise wait for that one.
        self.token_loss = world.raise_on_all_ranks(lambda: load_loss(config.algorithm))
        self.engine = build_engine(load_on_ranks(config, world), config.learner, world)
        check_policy(self.engine, config.model.path)
        self.teacher = config.teacher if config.teachers_in_use() else None
        if config.algorithm.has_critic:
            self.critic = Critic(config, world, self.policy.vocabulary)
        if config.algorithm.demonstrations.data is not None:
            self.mixed = world.raise_on_all_ranks(lambda: Mixed(config, world))
        self.reference = load_reference(config, world, self.engine)
        self.disk_names = DiskNames(self.policy.model)
        self.peak = total_peak(world)
        # Called before each optimizer step: a copy of the weights may still be running.
        self.before_update: Callable[[], None] = lambda: None
        self.log = get_logger()

    @property
    def policy(self) -> Policy:
        return self.engine.module

    @cached_property
    def operations(self) -> Operations:
        """Operations that the policy needs for the forward pass of a sequence."""
        return operations_of(self.policy.model.config, self.config.model.trust_remote_code)

    def engines(self) -> dict[str, Any]:
        """All engines that are trained, by the folder of their state in a checkpoint."""
        return {TAG: self.engine} | ({} if self.critic is None else {CRITIC_TAG: self.critic.engine})

    def packer(self) -> Packer:
        policy, config, world = self.policy, self.config, self.world
        routers = policy.routers if config.learner.router_replay == "rollout" else None
        experts = None if routers is None else routers.shape
        # Flash attention cannot read shared prefixes, slices of sequences hold each row whole, and replayed experts are
        # recorded for each row.
        attention = policy.choices.get("attention")
        reads_trees = attention is None or attention.name != "flash_attention_2"
        is_shared = reads_trees and world.sequence is None and experts is None
        return Packer(
            vocabulary=policy.vocabulary,
            device=world.device,
            experts=experts,
            top_k=None if self.teacher is None else self.teacher.top_k,
            share_prefixes=is_shared,
            together=config.algorithm.together,
            operations=self.operations.of,
        )

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights for generators, whole and named as in the model's files, or those of the adapter alone.

        All ranks must consume this together.
        """
        weights = full_weights(self.engine)
        return self.disk_names.of_adapter(weights) if self.policy.has_adapter else self.disk_names.of(weights)

    def train(
        self, batch: RolloutBatch, phases: Phases | None = None, record: TokenRecord | None = None
    ) -> dict[str, float]:
        """Train on one batch: `learner.mini_batches` optimizer steps; returns metrics, equal on all ranks.

        A critic computes the tokens' advantages first, and learns from the batch after the policy.

        The gradient is that of one loss over all ranks and micro-batches. A mini-batch without any usable
        token, or whose tokens are all rejected, or whose loss or gradient is not finite, is skipped, with a warning.
        """
        phases, started, stats = phases or Phases(), time.perf_counter(), Stats()
        # Statistics need the same names on all ranks, also if every step is skipped; the next line does the same.
        self._report_loss(stats, torch.zeros(4, dtype=torch.float64, device=self.world.device), steps=0)
        self._show(Shown(), 1.0, stats)
        if self.critic is not None:
            with phases("critic"):
                batch = self.critic.judge(batch, stats)
        with phases("old"):
            precomputed = precompute(batch, self._forward, self.reference, self.config.algorithm, self.world)
        exact = self._exact(batch, phases) if self.config.learner.exact_every else {}
        shown, shown_lengths = [Shown()] * len(batch.mini_batches), list[int]()
        if self.mixed is not None:
            shown, shown_lengths = self.mixed.steps(batch.version, self.packer())
        before: torch.Tensor | None = None
        grad_norms = []
        with phases("train"):
            for position, mini_batch, values, demonstrations in zip(
                self._positions(batch), batch.mini_batches, precomputed, shown, strict=True
            ):
                logprobs, grad_norm = self._train_mini_batch(
                    mini_batch, values, position, stats, record, demonstrations
                )
                if position.mini_batch == 0:
                    before = logprobs
                if grad_norm is not None:
                    grad_norms.append(grad_norm)
        if self.past is not None:
            with phases("exact"):
                self.past.advance()
        batch_statistics(batch, stats)
        if self.peak:
            share = mfu(self.operations, [*batch.lengths, *shown_lengths], phases.seconds["train"], self.peak)
            stats.total("gpu/mfu", share)  # of this rank's rows
        metrics = stats.reduce(self.world) | exact
        if self.critic is not None:
            with phases("critic"):
                metrics = with_explained_variance(metrics | self.critic.learn(batch))
        metrics["actor/grad_norm"] = sum(grad_norms) / max(len(grad_norms), 1)
        metrics["actor/lr"] = self.engine.optimizer.param_groups[0]["lr"] if grad_norms else 0.0
        metrics["actor/skipped_steps"] = float(len(batch.mini_batches) - len(grad_norms))
        if self.teacher is not None:
            metrics["teacher/weight"] = weight_at(self.teacher, batch.version)
        if self.mixed is not None:
            metrics["sft/weight"] = self.mixed.weight(batch.version)
            if not metrics["sft/weight"]:
                del metrics["sft/loss"]
        metrics["batch/samples"] = float(batch.samples)
        metrics["reward/mean"] = sum(batch.rewards) / max(len(batch.rewards), 1)
        if self.config.sampler.drift.mode == "ledger":
            with phases("drift"):
                metrics["actor/drift"] = self._drift(batch.mini_batches[0][0], before)
        metrics["tokens/per_second"] = metrics["tokens/total"] / (time.perf_counter() - started)
        if self.world.device.type == "cuda":
            metrics["tokens/per_second_per_gpu"] = metrics["tokens/per_second"] / self.world.size
        return metrics

    @torch.no_grad()
    def loss_sums(self, batch: RolloutBatch) -> tuple[float, float]:
        """Without training: the sum of -A log pi_theta over the batch's model tokens, and that of A, on all ranks."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        for micro in batch.micro_batches:
            losses = -micro.advantages * self._forward(micro).logprobs
            sums += torch.stack([losses.double().sum(), micro.advantages.double().sum()])
        loss, weight = self.world.sum_over_shares(sums.tolist())
        return loss, weight

    def _exact(self, batch: RolloutBatch, phases: Phases) -> dict[str, float]:
        """Metrics of the tokens' scores by the versions that sampled them; none if this version is not due."""
        if self.past is None:
            # Not in __init__: a checkpoint may be loaded after it.
            trained = (parameter for _, parameter in self.policy.named_weights())
            self.past = PastVersions(trained, self.config.sampler.max_staleness)
        if batch.version % self.config.learner.exact_every:
            return {}
        with phases("exact"):
            self.before_update()  # the weights are swapped while this runs
            return exact_statistics(batch, self.past, lambda micro: self._forward(micro).logprobs, self.world)

    def _train_mini_batch(
        self,
        mini_batch: list[MicroBatch],
        precomputed: list[Precomputed],
        position: TrainPosition,
        stats: Stats,
        record: TokenRecord | None,
        demonstrations: Shown,
    ) -> tuple[torch.Tensor | None, float | None]:
        """One optimizer step; skipped, with a warning, if no rank has a token to learn from, or a loss is not finite.

        Losses are divided by the counts before rejection. The counts after it are known, on all ranks, before the last
        backward pass; a factor then corrects the gradient just before the optimizer step.

        Returns:
            The first micro-batch's log-probs before the step [N], and the gradient norm; None if not computed.
        """
        config, denominators = self.config.algorithm, position.denominators
        if denominators.tokens == 0:
            self._warn_skipped("no usable tokens", position)
            return None, None
        precomputed = compare_all(mini_batch, precomputed, position, self._forward, config, self.world, self.teacher)
        step_stats, parts = Stats(), torch.zeros(4, dtype=torch.float64, device=self.world.device)
        before: torch.Tensor | None = None
        for micro, values in zip(mini_batch, precomputed, strict=True):
            policy = self._forward(micro, training=True)
            before = policy.logprobs.detach() if before is None else before
            if record:
                record.add(position.mini_batch, micro, policy)
            loss, micro_parts = step_loss(
                micro, policy, values, position, self.token_loss, config, step_stats, self.teacher
            )
            parts += micro_parts
            if policy.routing is not None:
                loss = loss + self._routing_loss(policy.routing, denominators, step_stats)
            is_last = micro is mini_batch[-1]
            if is_last:
                left = step_stats.reduce(self.world, LEFT)
                if left["not_finite"]:
                    loss = loss * math.nan  # so that no gradient is finite, and the step is skipped on all ranks
                elif left["learned_tokens"] == 0:
                    stats.update(step_stats)
                    self._warn_skipped(f"all tokens masked by {what_masks(config.correction)}", position)
                    if len(mini_batch) > 1 and self.config.learner.router_balance:
                        # Earlier micro-batches have a gradient all the same; a step that is not finite clears it.
                        backward(self.engine, loss * math.nan, self.world, is_last=True)
                        optimizer_step(self.engine, self.config.learner)
                    return before, None
            backward(self.engine, loss, self.world, is_last=is_last and not demonstrations.micros)
        factor = 1.0
        if config.correction.renormalizes and left["learned_tokens"]:
            factor = denominators.rescale(left["learned_tokens"], left["learned_samples"], config.aggregation)
        stats.update(step_stats)
        self._show(demonstrations, factor, stats)
        set_learning_rate(self.engine, self._learning_rate(position, left["rollout_corr/eff_sample_size"]))
        self.before_update()
        grad_norm = optimizer_step(self.engine, self.config.learner, factor)
        if not math.isfinite(grad_norm):
            self.not_finite += 1
            self._warn_skipped("loss or gradient not finite", position)
            return before, None
        self.not_finite = 0
        self._report_loss(stats, parts * factor, steps=1)
        return before, grad_norm

    def _show(self, demonstrations: Shown, factor: float, stats: Stats) -> None:
        """Add the gradient of the demonstrations' loss to a step's gradient, which is multiplied by `factor` later."""
        if self.mixed is None:
            return
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for micro in demonstrations.micros:
            loss = demonstrations.loss(micro, self._forward(micro, temperature=1.0).logprobs)
            loss_sum += loss.detach()
            loss = loss * (demonstrations.weight / factor)
            backward(self.engine, loss, self.world, is_last=micro is demonstrations.micros[-1])
        stats.total("shown", float(self.world.is_main and bool(demonstrations.micros)))
        stats.mean("sft/loss", loss_sum, over="shown")

    def _forward(self, micro: MicroBatch, training: bool = False, temperature: float | None = None) -> PolicyOutput:
        """Log-probs of the model tokens [N]; the routers of a mixture of experts use the replayed choices.

        Args:
            training: with entropies, and log-probs of the teacher's likeliest tokens.
            temperature: by default that of training responses.
        """
        named: dict[str, Any] = {"entropy": training, "temperature": temperature}
        if training and micro.teacher is not None and micro.teacher.ids is not None:
            named["others"] = micro.teacher.ids
        if self.policy.routers is not None:
            balanced = self.config.learner.router_balance > 0
            named["routing"] = Routing(micro.predict[: micro.model_tokens], micro.experts, micro.known, balanced)
        logprobs, entropies, *likeliest = self.engine(
            micro.input_ids, micro.position_ids, micro.sequences, micro.predict, micro.targets, **named
        )
        model_tokens = slice(micro.model_tokens)
        return PolicyOutput(logprobs[model_tokens], entropies[model_tokens], named.get("routing"), *likeliest)

    def _routing_loss(self, routing: Routing, denominators: Denominators, stats: Stats) -> torch.Tensor:
        """Report what the routers did; returns their balance loss, times the share of the mini-batch's model tokens."""
        learner, balance = self.config.learner, routing.balance_loss()
        routing_statistics(routing, balance, learner.router_replay == "rollout", stats)
        return learner.router_balance * balance * len(routing.positions) / denominators.tokens

    def _positions(self, batch: RolloutBatch) -> Iterator[TrainPosition]:
        """The position of each mini-batch, with its counts over all ranks before rejection."""
        counts = []
        for micros in batch.mini_batches:
            counts.append(float(sum(micro.model_tokens for micro in micros)))
            counts.append(float(sum(micro.layout.samples for micro in micros)))
        counts = self.world.sum_over_shares(counts)
        horizon = float(self.config.episode.max_response_tokens)
        for number, (tokens, samples) in enumerate(zip(counts[::2], counts[1::2], strict=True)):
            yield TrainPosition(batch.version, number, len(batch.mini_batches), Denominators(tokens, samples, horizon))

    def _learning_rate(self, position: TrainPosition, effective_sample_size: float) -> float:
        """Learning rate of this optimizer step, scaled by the effective sample size as `ess_lr` says."""
        step = position.version * position.mini_batches + position.mini_batch
        rate = learning_rate(step, self.config.run.steps * position.mini_batches, self.config.learner)
        scaling = {"none": 1.0, "sqrt": effective_sample_size**0.5, "linear": effective_sample_size}
        return rate * scaling[self.config.algorithm.ess_lr]

    def _report_loss(self, stats: Stats, parts: torch.Tensor, steps: int) -> None:
        """Report losses as means over optimizer steps; only one rank counts the steps.

        Args:
            parts: this rank's share of the policy loss, the KL, the entropy and the teacher's loss [4].
        """
        config = self.config.algorithm
        policy, kl, entropy, distance = parts
        stats.total("steps", float(steps * self.world.is_main))
        stats.mean("actor/pg_loss", policy, over="steps")
        loss = policy + config.kl_coef * kl - config.entropy_coef * entropy + distance
        stats.mean("actor/loss", loss, over="steps")
        if config.kl_coef:
            stats.mean("actor/kl_loss", kl, over="steps")

    def _warn_skipped(self, reason: str, position: TrainPosition) -> None:
        self.log.warning(f"{reason}, optimizer step skipped", version=position.version, mini_batch=position.mini_batch)

    @torch.no_grad()
    def _drift(self, micro: MicroBatch, before: torch.Tensor | None) -> float:
        """Mean finite |log pi_{v+1} - log pi_v| per model token of the batch's first micro-batch on each rank."""
        if before is None:
            return 0.0
        moved = (self._forward(micro).logprobs - before).abs()
        moved = moved[moved.isfinite()]  # the step of others was skipped, with a warning
        total, count = self.world.all_reduce_sum([float(moved.sum()), float(len(moved))])
        return total / max(count, 1.0)


def batch_statistics(batch: RolloutBatch, stats: Stats) -> None:
    """Count samples, tokens, and the tokens' ages in weight versions."""
    micros = batch.micro_batches
    ages = torch.cat([micro.ages(batch.version) for micro in micros])
    stats.total("batch/left_out", float(batch.left_out))
    stats.total("tokens/total", float(sum(batch.lengths)))
    stats.total("tokens/shared", float(sum(micro.sequences.tokens_saved for micro in micros)))
    stats.total("tokens/model", float(len(ages)))
    stats.mean("staleness/mean", ages, over="tokens/model")
    stats.extremes({"staleness/max": ages}, {})
    bucket = age_buckets(ages)
    for number, age in enumerate(AGE_BUCKETS):
        stats.mean(f"staleness/{age}", bucket == number, over="tokens/model")
