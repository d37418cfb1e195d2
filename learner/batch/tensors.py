"""From payloads to the tensors of micro-batches, for model and losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from common.config import LearnerConfig
from common.messages import Batch, InvalidMessage
from common.payload import Payload
from learner.batch.layout import Layout
from learner.batch.outcome import Advantage, CriticTarget, critic_targets, judged_fields, of_rows, token_advantages
from learner.batch.plan import RowId, plan_micro_batches
from learner.batch.prefixes import pack_rows
from learner.batch.teacher import TeacherScores, check_scores, scores_of_rows
from learner.policy.attention import PackedSequences, pack_sequences
from learner.policy.routers import ExpertShape
from learner.ranks.world import World


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows that go through the model together.

    Attributes:
        input_ids: packed tokens, int64 [1, T]; common prefixes of rows may be packed once.
        position_ids: positions inside each row, int64 [1, T].
        sequences: where each row begins and ends.
        predict: packed positions whose row's next token is a model token, int64 [N]; one position even if N is 0.
        targets: these next tokens, int64, one per position in `predict`.
        layout: which row each model token belongs to, and each row's share of its sample's model tokens.
        rollout_logprobs: log pi_rollout of the model tokens, float32 [N].
        advantages: float32 [N].
        versions: weight version that sampled each model token, int64 [N].
        experts: ids that the engine chose, uint8 or int16 [T, layers, k]; None if not recorded.
        known: tokens whose experts are recorded, bool [T]; None if `experts` is.
        teacher: a teacher's scores of the model tokens; None if no row has any.
        rewards: placed on the last token of the row or turn, float64 [N]; None without a critic.
        tracked: the tracker's value of each token's prompt, float64 [N]; None without a critic.
        values: the critic's value of the state before each token, float32 [N]; None before `Critic.judge`.
        returns: the critic's target at each token, float32 [N]; None before `Critic.judge`.
        names: sample id and number of each row, in order; empty if not needed.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    sequences: PackedSequences
    predict: torch.Tensor
    targets: torch.Tensor
    layout: Layout
    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    versions: torch.Tensor
    names: Sequence[tuple[str, int]] = ()
    experts: torch.Tensor | None = None
    known: torch.Tensor | None = None
    teacher: TeacherScores | None = None
    rewards: torch.Tensor | None = None
    tracked: torch.Tensor | None = None
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None

    @property
    def model_tokens(self) -> int:
        return len(self.rollout_logprobs)

    def ages(self, version: int) -> torch.Tensor:
        """Versions between the weights that sampled each token and `version`, int64 [N]."""
        return (version - self.versions).clamp(min=0)


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """One rank's share of a batch.

    Attributes:
        version: weight version that trains on it.
        mini_batches: micro-batches of each optimizer step; all ranks have equally many.
        samples: samples of the whole batch, over all ranks.
        lengths: prompt and response tokens of each of this rank's rows.
        left_out: samples without a usable payload whose first row is this rank's.
        reason: why one of this rank's samples cannot be used; empty if each is usable or has no payload.
        rewards: of the whole batch.
    """

    version: int
    mini_batches: list[list[MicroBatch]]
    samples: int
    lengths: Sequence[int]
    left_out: int = 0
    reason: str = ""
    rewards: Sequence[float] = ()

    @property
    def micro_batches(self) -> list[MicroBatch]:
        return [micro for micros in self.mini_batches for micro in micros]


@dataclass(frozen=True, slots=True)
class Packer:
    """Packs the rows of samples into micro-batches for one model.

    Attributes:
        vocabulary: number of the model's token ids.
        device: where the tensors are.
        experts: shape of the model's experts, if those that the engine chose are replayed.
        top_k: a teacher's likeliest tokens at each model token, 0 if it scores the sampled one; None without a teacher.
        share_prefixes: pack common prefixes once; not with `experts`, which are recorded for each row.
        together: number of consecutive samples that answer one prompt, with `prompt-mean`; otherwise 1.
        operations: of a row with this many tokens, see `plan_micro_batches`.
    """

    vocabulary: int
    device: torch.device | str = "cpu"
    experts: ExpertShape | None = None
    top_k: int | None = None
    share_prefixes: bool = False
    together: int = 1
    operations: Callable[[int], float] = float

    def own_share(
        self, batch: Batch, fetch: Callable[[list[str]], list[Payload | None]], config: LearnerConfig, world: World
    ) -> RolloutBatch:
        """This rank's share of a batch that the sampler has sent.

        Args:
            fetch: payloads of samples by their ids, None for one that is gone.
        """
        of_samples = batch.row_tokens or [[]] * len(batch.tokens)
        row_tokens = [rows or [tokens] for rows, tokens in zip(of_samples, batch.tokens, strict=True)]
        plan = plan_micro_batches(row_tokens, config.mini_batches, world.shares, config.token_budget, self.operations)
        places = plan.of_rank(world.share)
        samples = sorted({sample for micro_batches in places for held in micro_batches for sample, _ in held})
        payloads = fetch([batch.sample_ids[sample] for sample in samples])
        # The plan is made from the headers. A row longer than its header says could exceed the device's memory, and
        # would do so again after every restart.
        as_planned, reason = dict[int, Payload](), ""
        for sample, payload in zip(samples, payloads, strict=True):
            if payload is None:
                continue
            lengths = [len(row.token_ids) for row in payload.rows()]
            if lengths == row_tokens[sample]:
                as_planned[sample] = payload
            else:
                reason = f"rows of {lengths} tokens, but its message says {row_tokens[sample]}"
        if world.sequence is not None:
            # Ranks with slices of the same sequences must agree: all of them drop a sample that one of them is missing.
            missing = set(samples) - as_planned.keys()
            is_missing = world.all_reduce_max([float(sample in missing) for sample in range(len(row_tokens))])
            as_planned = {sample: payload for sample, payload in as_planned.items() if not is_missing[sample]}
        share = self.rollout_batch(
            batch.batch_id,
            places,
            as_planned,
            batch.advantages if batch.turn_advantages is None else batch.turn_advantages,
            batch.rewards,
            sample_ids=batch.sample_ids,
            unit_tokens=self._unit_tokens(as_planned, len(row_tokens), world),
            critic=critic_targets(batch),
        )
        return replace(share, reason=share.reason or reason)

    def rollout_batch(
        self,
        version: int,
        places: Sequence[Sequence[Sequence[RowId]]],
        payloads: Mapping[int, Payload | None],
        advantages: Sequence[Advantage],
        rewards: Sequence[float],
        sample_ids: Sequence[str] | None = None,
        unit_tokens: Sequence[float] | None = None,
        critic: Sequence[CriticTarget] | None = None,
    ) -> RolloutBatch:
        """This rank's share of a batch, from its rows in the plan and the payloads of their samples.

        A sample is left out and counted if its payload is missing or unusable, or has fewer or more turns than
        advantages.

        Args:
            places: `[mini_batch][micro_batch]` lists of rows.
            payloads: by sample index.
            advantages: of the whole batch [B].
            sample_ids: of the whole batch [B], if its micro-batches need them.
            unit_tokens: model tokens of each sample's unit, a sample or a prompt [B]; by default those of the sample.
            critic: of the whole batch [B]; None without a critic.
        """
        rows: dict[RowId, tuple[Payload, Advantage]] = {}
        judged: dict[RowId, CriticTarget] = {}
        shares: dict[RowId, float] = {}
        reason = ""
        for sample, payload in payloads.items():
            if payload is None:
                continue
            try:
                usable = self.usable_rows(payload, advantages[sample])
                if critic is not None:
                    of_each = of_rows(payload, [row for row, _ in usable], critic[sample].returns, "returns")
                    for number, returns in enumerate(of_each):
                        judged[sample, number] = CriticTarget(returns, critic[sample].value)
            except InvalidMessage as error:
                reason = str(error)
                continue
            whole = len(payload.logprobs) if unit_tokens is None else unit_tokens[sample]
            for number, row in enumerate(usable):
                rows[sample, number], shares[sample, number] = row, len(row[0].logprobs) / whole

        def packed(held: Sequence[RowId]) -> MicroBatch:
            held = [place for place in held if place in rows]
            names = [(sample_ids[sample], number) for sample, number in held] if sample_ids else ()
            ends = None if critic is None else [judged[place] for place in held]
            return self.micro_batch([rows[place] for place in held], names, [shares[place] for place in held], ends)

        placed = [place for micro_batches in places for held in micro_batches for place in held]
        return RolloutBatch(
            version=version,
            mini_batches=[[packed(held) for held in micro_batches] for micro_batches in places],
            samples=len(advantages),
            lengths=[len(rows[place][0].token_ids) for place in placed if place in rows],
            left_out=sum(number == 0 and (sample, number) not in rows for sample, number in placed),
            reason=reason,
            rewards=rewards,
        )

    def usable_rows(self, payload: Payload, advantage: Advantage) -> list[tuple[Payload, Advantage]]:
        """A payload's rows and their advantages; raises `InvalidMessage` if the model cannot train on all of them."""
        rows = payload.rows()
        for row in rows:
            _check_row(row, self.vocabulary, self.experts)
            if self.top_k is not None and len(row.teacher_logprobs):
                check_scores(row.teacher_ids, self.top_k, self.vocabulary)
        return list(zip(rows, of_rows(payload, rows, advantage, "advantages"), strict=True))

    def micro_batch(
        self,
        rows: Sequence[tuple[Payload, Advantage]],
        names: Sequence[tuple[str, int]] = (),
        shares: Sequence[float] | None = None,
        critic: Sequence[CriticTarget] | None = None,
    ) -> MicroBatch:
        """Pack usable payloads of one row with their advantages; without any, the micro-batch has no model tokens.

        Args:
            names: sample id and number of each row.
            shares: of each row in its sample's model tokens; by default each row is a sample.
            critic: of the rows; None without a critic.
        """
        if not rows:
            return self._idle(critic is not None)
        payloads, device = [row for row, _ in rows], self.device
        packed = pack_rows([row.token_ids for row in payloads], self.share_prefixes)
        model_tokens = np.flatnonzero(np.concatenate([row.mask() for row in payloads]))
        targets, predict = model_tokens, model_tokens - 1
        if packed.places is not None:
            targets, predict = packed.places[targets], packed.places[predict]

        def joined(values: Sequence[np.ndarray], dtype: type) -> torch.Tensor:
            return torch.from_numpy(np.concatenate(values).astype(dtype)).to(device)

        return MicroBatch(
            input_ids=torch.from_numpy(packed.tokens)[None].to(device),
            position_ids=torch.from_numpy(packed.positions)[None].to(device),
            sequences=pack_sequences([len(row.token_ids) for row in payloads], device, packed.places),
            predict=torch.from_numpy(predict).to(device),
            targets=torch.from_numpy(packed.tokens[targets]).to(device),
            layout=Layout.of_lengths([len(row.logprobs) for row in payloads], device, shares),
            rollout_logprobs=joined([row.logprobs for row in payloads], np.float32),
            advantages=joined([token_advantages(*row) for row in rows], np.float32),
            versions=joined([row.versions() for row in payloads], np.int64),
            names=names,
            **(_replayed(payloads, self.experts, device) if self.experts else {}),
            teacher=None if self.top_k is None else scores_of_rows(payloads, self.top_k, device),
            **(judged_fields(payloads, critic, device) if critic is not None else {}),
        )

    def _idle(self, judged: bool) -> MicroBatch:
        """A micro-batch for a rank without samples, which must take part in collectives: nothing is learned from it."""
        ids = np.zeros(2, np.int32)  # the smallest row that the model can compute: one token predicts the other
        payload = Payload(ids, np.array([[1, 2]], np.int32), np.zeros(1, np.float32), np.array([[0, 0, 1]], np.int32))
        packed = Packer(self.vocabulary, self.device).micro_batch([(payload, 0.0)])
        nothing = torch.zeros(0, dtype=torch.float64, device=self.device) if judged else None
        return replace(
            packed,
            layout=Layout.of_lengths([], self.device),
            rollout_logprobs=packed.rollout_logprobs[:0],
            advantages=packed.advantages[:0],
            versions=packed.versions[:0],
            rewards=nothing,
            tracked=nothing,
        )

    def _unit_tokens(self, payloads: Mapping[int, Payload], samples: int, world: World) -> list[float] | None:
        """For each sample, the model tokens of all samples of its prompt, from all ranks; None if each counts alone."""
        if self.together == 1:
            return None
        own = [float(len(payloads[sample].logprobs)) if sample in payloads else 0.0 for sample in range(samples)]
        # A sample of several rows may be on several ranks, each of which has fetched all of it.
        counts = world.all_reduce_max(own)
        starts = (sample - sample % self.together for sample in range(samples))
        return [sum(counts[start : start + self.together]) for start in starts]


def _check_row(row: Payload, vocabulary: int, experts: ExpertShape | None) -> None:
    if len(row.logprobs) == 0:
        raise InvalidMessage("it has no model token")
    if row.mask()[0]:
        raise InvalidMessage("its first token is a model token, which no token before it predicts")
    least, most = int(row.token_ids.min()), int(row.token_ids.max())
    if least < 0 or most >= vocabulary:
        raise InvalidMessage(f"token ids from {least} to {most}, but the model has {vocabulary} ids")
    if experts is None or not len(row.experts):
        return
    if row.experts.shape[1:] != (experts.layers, experts.chosen):
        layers, chosen = row.experts.shape[1:]
        raise InvalidMessage(
            f"{chosen} experts per token in {layers} layers, but the model uses {experts.chosen} in {experts.layers}"
        )
    if row.experts.max() >= experts.experts:
        raise InvalidMessage(
            f"expert {row.experts.max()}, but the model has experts 0 to {experts.experts - 1} in a layer"
        )


def _replayed(rows: Sequence[Payload], shape: ExpertShape, device: torch.device | str) -> dict[str, torch.Tensor]:
    """The fields `experts` and `known` of a micro-batch; empty if no row has experts."""
    if not any(len(row.experts) for row in rows):
        return {}
    known = np.concatenate([np.arange(len(row.token_ids)) < len(row.experts) for row in rows])
    experts = np.zeros((len(known), shape.layers, shape.chosen), np.uint8 if shape.experts <= 256 else np.int16)
    experts[known] = np.concatenate([row.experts for row in rows if len(row.experts)])
    return {"experts": torch.from_numpy(experts).to(device), "known": torch.from_numpy(known).to(device)}
