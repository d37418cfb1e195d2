"""The critic: a value model beside the policy, with an engine of its own, for single responses (SAO, arXiv 2607.07508).

With c the tracker's value of the prompt (`algorithm.baseline: both`) or 0.5 (`critic`), the value of a state is
V = c + f, and f is what the model computes. Its head starts at zero, so that V = c at first: with `both` the advantages
begin as the tracker's, offline scores included, and change as f learns from the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForTokenClassification, PreTrainedModel
from transformers.utils import logging

from common.config import Config
from common.errors import UserError
from common.log import get_logger
from learner.batch.gae import gae, normalised, returns
from learner.batch.tensors import MicroBatch, RolloutBatch
from learner.policy.attention import PackedSequences
from learner.policy.engine import backward, build_engine, load_on_ranks, optimizer_step, set_learning_rate
from learner.policy.forward_check import check_critic
from learner.policy.model import load_model, read_packed
from learner.policy.packing import Packing
from learner.ranks.world import World
from learner.stats import Stats

MIDDLE = 0.5  # of the rescaled rewards' range


class ValueHead(nn.Linear):
    """An output layer of one number, computed in float32 whatever the weights' type.

    The computation lives in the layer's own forward, so that ZeRO 3 gathers its weight around it.
    """

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Numbers [N], float32, of hidden states [N, H]."""
        bias = None if self.bias is None else self.bias.float()
        return F.linear(hidden.float(), self.weight.float(), bias).squeeze(-1)


class ValueModel(nn.Module):
    """Wraps a model so that one forward goes from packed tokens to a number for each of some positions."""

    group = None  # sequences are not divided among ranks

    def __init__(self, model: PreTrainedModel, head: str) -> None:
        """Wrap a model whose child named `head` is a `ValueHead`."""
        super().__init__()
        self.model, self.head, self.packing = model, head, Packing(model)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, sequences: PackedSequences, predict: torch.Tensor
    ) -> torch.Tensor:
        """f of the states at the positions `predict` [N], float32 [N]; see `Policy.forward` for the others."""
        hidden_1TH = read_packed(self.model, input_ids, position_ids, sequences).last_hidden_state
        values: torch.Tensor = getattr(self.model, self.head)(hidden_1TH[0].index_select(0, predict))
        return values

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters by the model's names, those of frozen attention included."""
        yield from self.model.named_parameters()


def load_value_model(config: Config, weights: bool = True) -> ValueModel:
    """Load the model at `model.path` as a value model, like `load_policy`; its head is zero if the folder has none.

    Raises:
        UserError: see `load_policy`; or transformers has no such model that computes a number for each token.
    """
    path, key = config.model.path, critic_key(config)
    with _quiet():
        model, _, missing = load_model(config, AutoModelForTokenClassification, path, key, weights)
    heads = [(name, layer) for name, layer in model.named_children() if isinstance(layer, nn.Linear)]
    if not heads:
        raise UserError(f"{key} = {path!r}: {type(model).__name__} has no linear output layer")
    name, head = heads[-1]
    head.__class__ = ValueHead
    absent = [parameter for parameter in missing if not parameter.startswith(f"{name}.")]
    if absent:
        raise UserError(f"{key} = {path!r} has no weights for {', '.join(absent[:3])} of {type(model).__name__}")
    if missing:
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(head.parameters()), modifier_rank=0), torch.no_grad():
            for parameter in head.parameters():
                parameter.zero_()
    if config.critic.freeze_attention:
        _freeze_attention(model, path, key)
    return ValueModel(model.train(), name)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' warnings about the policy's output layer, which is ignored, and about a new head."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def with_critics_path(config: Config) -> Config:
    """The configuration with the critic's model at `model.path`."""
    path = config.critic.model or config.model.path
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path})})


def check_vocabulary(config: Config, critic: ValueModel, vocabulary: int) -> None:
    """Raise `UserError` for a critic with another number of token ids than the policy."""
    own = int(critic.model.config.get_text_config().vocab_size)
    if own != vocabulary:
        raise UserError(
            f"critic.model = {config.critic.model!r} has {own} token ids, and model.path = {config.model.path!r} has "
            f"{vocabulary}: a critic reads the policy's tokens; take a model with the same tokenizer"
        )


def critic_key(config: Config) -> str:
    """The setting that names the critic's model, for messages."""
    return "model.path" if config.critic.model is None else "critic.model"


def attention_parameters(model: PreTrainedModel) -> list[nn.Parameter]:
    """The parameters of a model's attention layers."""
    # transformers calls the class of such a layer `Qwen3Attention`, `LlamaAttention` and so on.
    layers = [layer for layer in model.modules() if "Attention" in type(layer).__name__]
    return list({parameter: None for layer in layers for parameter in layer.parameters()})


def _freeze_attention(model: PreTrainedModel, path: str, key: str) -> None:
    frozen = attention_parameters(model)
    if not frozen:
        raise UserError(
            f"critic.freeze_attention: {type(model).__name__} ({key} = {path!r}) has no attention layers; set it to "
            "false"
        )
    for parameter in frozen:
        parameter.requires_grad_(False)


class Critic:
    """Owns the value model and its optimizer; all ranks call the same methods at the same time."""

    def __init__(self, config: Config, world: World, vocabulary: int) -> None:
        """Load the model and build its engine; raises `UserError` if it does not fit a policy of `vocabulary` ids."""
        self.config, self.world, self.settings = config, world, config.critic
        self.learner = config.learner.model_copy(update={"lr": self.settings.rate(config.learner.lr)})
        model = load_on_ranks(with_critics_path(config), world, load_value_model, critic_key(config))
        check_vocabulary(config, model, vocabulary)
        self.engine = build_engine(model, self.learner, world)
        if self.settings.model is not None:  # otherwise it is the policy's
            check_critic(self.engine, self.settings.model, critic_key(config))

    @torch.no_grad()
    def judge(self, batch: RolloutBatch, stats: Stats) -> RolloutBatch:
        """Add to the batch its tokens' values, returns and advantages, computed by the current critic.

        During the warm-up the advantages remain those of the tracker.
        """
        settings, judged, estimates = self.settings, list[MicroBatch](), list[torch.Tensor]()
        for micro in batch.micro_batches:
            rewards, values, rows = micro.rewards, self._values(micro), micro.layout.segment_ids
            assert rewards is not None
            target = returns(rewards, values, rows, settings.return_lambda).float()
            _report(micro, values, target, stats)
            judged.append(replace(micro, values=values, returns=target))
            estimates.append(gae(rewards, values, rows, settings.gae_lambda))
        if batch.version >= settings.warmup_steps:
            advantages = normalised(estimates, self.world, self.config.sampler.advantage.clip)
            judged = [replace(micro, advantages=own) for micro, own in zip(judged, advantages, strict=True)]
        in_order = iter(judged)
        return replace(batch, mini_batches=[[next(in_order) for _ in micros] for micros in batch.mini_batches])

    def learn(self, batch: RolloutBatch) -> dict[str, float]:
        """Take `critic.updates` optimizer steps on the batch's returns; returns metrics, equal on all ranks.

        The loss is (V - R)^2 / 2, averaged over the model tokens of all ranks, without a clip.
        """
        micros = batch.micro_batches
        (tokens,) = self.world.sum_over_shares([float(sum(micro.model_tokens for micro in micros))])
        if not tokens:
            return {}
        set_learning_rate(self.engine, self.learner.lr)
        losses, norms = [], []
        for _ in range(self.settings.updates):
            total = 0.0
            for number, micro in enumerate(micros):
                assert micro.returns is not None
                loss = (self._values(micro) - micro.returns).square().sum() / (2 * tokens)
                total += float(loss.detach())
                backward(self.engine, loss, self.world, is_last=number == len(micros) - 1)
            norms.append(optimizer_step(self.engine, self.learner))
            losses += self.world.sum_over_shares([total])
        if not all(map(math.isfinite, norms)):
            get_logger().warning("critic's gradient not finite, optimizer step skipped", version=batch.version)
        finite = [norm for norm in norms if math.isfinite(norm)]
        metrics = {
            "critic/loss": sum(losses) / len(losses),
            "critic/grad_norm": sum(finite) / max(len(finite), 1),
            "critic/lr": self.learner.lr,
        }
        # As in `Stats.reduce`, values that are not finite are left out.
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    def _values(self, micro: MicroBatch) -> torch.Tensor:
        """V of the states in which the model tokens were sampled, float32 [N]."""
        numbers = self.engine(micro.input_ids, micro.position_ids, micro.sequences, micro.predict)
        assert micro.tracked is not None
        c = micro.tracked.float() if self.config.algorithm.baseline == "both" else MIDDLE
        return numbers[: micro.model_tokens] + c


def _report(micro: MicroBatch, values: torch.Tensor, target: torch.Tensor, stats: Stats) -> None:
    """Report the values, and the spreads of the returns and of the errors of the critic's and the tracker's values."""
    assert micro.tracked is not None
    stats.total("critic_tokens", float(len(values)))
    stats.mean("critic/value_mean", values, over="critic_tokens")
    spreads = {"return": target, "error": target - values, "tracker_error": target - micro.tracked.float()}
    for name, numbers in spreads.items():
        stats.std(f"critic/{name}_std", numbers, over="critic_tokens")


def with_explained_variance(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics with 1 - Var(R - V) / Var(R), of the critic's values and of the tracker's, in place of the spreads.

    Each is left out if all returns are equal, or if values are not finite.
    """
    metrics = dict(metrics)
    spread, *errors = (metrics.pop(f"critic/{name}_std", None) for name in ("return", "error", "tracker_error"))
    for name, error in zip(("explained_variance", "tracker_explained_variance"), errors, strict=True):
        if spread and error is not None:
            metrics[f"critic/{name}"] = 1 - (error / spread) ** 2
    return metrics
