"""The routers of a mixture of experts: which experts they choose, and how they replay the engine's choice.

Router replay (`learner.router_replay`): a rollout's tokens go through the experts that the engine chose for them. The
weights of these experts come from the learner's own router, so that the router gets a gradient. The router chooses
itself for tokens whose experts are not recorded, and in the reference policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from common.config import LearnerConfig
from common.errors import UserError
from learner.ranks.ulysses import SequenceGroup
from learner.stats import Stats


class ExpertShape(NamedTuple):
    """A mixture's number of layers (with or without experts), and its chosen and total experts per layer."""

    layers: int
    chosen: int
    experts: int


def weights_of_all(router: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Weights of these experts [T, k]: their probabilities among all experts, normalised if the model says so."""
    weights = logits.softmax(-1, dtype=torch.float32).gather(-1, ids)
    # Mixtral has no such setting, and always normalises.
    return weights / weights.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else weights


def weights_of_chosen(router: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Weights of these experts [T, k]: their probabilities among each other."""
    return logits.gather(-1, ids).softmax(-1)


# transformers' classes, which return logits [T, experts], weights [T, k] and ids [T, k], and how each computes weights.
ROUTERS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "GptOssTopKRouter": weights_of_chosen,
    "MixtralTopKRouter": weights_of_all,
    "Qwen2MoeTopKRouter": weights_of_all,
    "Qwen3MoeTopKRouter": weights_of_all,
}


@dataclass(slots=True)
class RoutedLayer:
    """What one layer's router did at the positions that predict the model tokens [N].

    Attributes:
        counts: tokens that went through each expert, int64 [experts].
        entropies: of the router's probabilities, float32 [N].
        differs: whether the router itself would have chosen experts other than the replayed ones, bool [N].
        probabilities: of each expert, the mean over the tokens, float32 [experts].
    """

    counts: torch.Tensor
    entropies: torch.Tensor
    differs: torch.Tensor
    probabilities: torch.Tensor


@dataclass(slots=True)
class Routing:
    """One forward pass: the experts that the routers replay, and what the routers did, by layer.

    Attributes:
        positions: packed positions that predict the model tokens, int64 [N].
        experts: ids that the engine chose [T, layers, k]; if None, the routers choose.
        known: tokens whose experts are recorded, bool [T]; None if `experts` is.
        balanced: whether `balance_loss` is to have a gradient.
    """

    positions: torch.Tensor
    experts: torch.Tensor | None = None
    known: torch.Tensor | None = None
    balanced: bool = False
    layers: dict[int, RoutedLayer] = field(default_factory=dict)
    _counts: list[int] = field(default_factory=list)  # model tokens of each rank, once it is divided

    def replayed(self) -> torch.Tensor:
        """Model tokens whose prediction uses recorded experts, bool [N]."""
        if self.known is None:
            return torch.zeros_like(self.positions, dtype=torch.bool)
        return self.known[self.positions]

    def divided(self, group: SequenceGroup, tokens: int) -> Routing:
        """This pass for this rank's slice of the packed `tokens`, which are padded as `own_slice` pads them."""
        length = -(-tokens // group.size)
        start, (self._counts, mine) = group.rank * length, group.among_slices(self.positions, length)
        own = Routing(self.positions[mine] - start, balanced=self.balanced)
        if self.experts is not None and self.known is not None:
            padding = length * group.size - tokens
            own.experts = F.pad(self.experts, (0, 0, 0, 0, 0, padding))[start : start + length]
            own.known = F.pad(self.known, (0, padding))[start : start + length]
        return own

    def join(self, group: SequenceGroup, own: Routing) -> None:
        """Record what the routers did for all tokens; each rank of a group has computed its `own`."""
        numbers, layers = own.layers.keys(), own.layers.values()
        share = len(own.positions) / max(len(self.positions), 1)
        counts = group.total(torch.stack([layer.counts for layer in layers]))
        entropies = group.join(torch.stack([layer.entropies for layer in layers]), self._counts)
        differs = group.join(torch.stack([layer.differs for layer in layers]).byte(), self._counts).bool()
        probabilities = group.total(torch.stack([layer.probabilities for layer in layers]) * share)
        joined = map(RoutedLayer, counts, entropies, differs, probabilities)
        self.layers = dict(zip(numbers, joined, strict=True))

    def balance_loss(self) -> torch.Tensor:
        """Load-balancing loss, the mean over the layers: 1 if all experts have the same load; 0 without model tokens.

        A layer with E experts contributes E sum_i f_i P_i: f_i is the share of expert i in all choices, P_i its mean
        probability, which has the gradient (Switch Transformer, arXiv 2101.03961, equations 4 to 6; with k choices
        of a token f_i is divided by k).
        """
        losses = [
            len(layer.counts) * (layer.counts / layer.counts.sum().clamp(min=1)) @ layer.probabilities
            for layer in self.layers.values()
        ]
        return torch.stack(losses).mean()


class Routers:
    """The routers of a model of one of the families in `ROUTERS`; built by `of`.

    A forward pass of the model takes its `Routing` as the keyword argument `routing`. Each layer hands it to its
    router, so that an activation that is computed again in the backward pass goes through the same experts.
    """

    def __init__(self, layers: Iterable[nn.Module], routers: dict[int, Any], shape: ExpertShape) -> None:
        self.shape = shape
        self._routing: Routing | None = None  # of the layer that is computed now
        for layer in layers:
            layer.register_forward_pre_hook(self._enter, with_kwargs=True)
        for number, router in routers.items():
            router.register_forward_hook(partial(self._route, number))

    @classmethod
    def of(cls, model: PreTrainedModel) -> Routers | None:
        """The routers of a model; None if it is dense, or of another family."""
        layers = getattr(model.base_model, "layers", ())
        routers = {
            number: part
            for number, layer in enumerate(layers)
            for part in layer.modules()
            if type(part).__name__ in ROUTERS
        }
        if not routers:
            return None
        first = next(iter(routers.values()))
        return cls(layers, routers, ExpertShape(len(layers), first.top_k, first.num_experts))

    def _enter(self, layer: nn.Module, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self._routing = named.pop("routing", None)
        return arguments, named

    def _route(self, number: int, router: Any, arguments: Any, outputs: tuple[torch.Tensor, ...]) -> Any:
        """Record which experts a router chose, and replace them by those to replay."""
        routing = self._routing
        if routing is None:
            return None
        logits, weights, own = outputs
        taken = own
        if routing.experts is not None and routing.known is not None:
            taken = torch.where(routing.known[:, None], routing.experts[:, number].long(), own)
        # Gradient checkpointing calls the router again in the backward pass: only the first call is noted.
        noted = _routed(logits if routing.balanced else logits.detach(), own, taken, routing.positions)
        routing.layers.setdefault(number, noted)
        if routing.experts is None:
            return None
        return logits, ROUTERS[type(router).__name__](router, logits, taken).to(weights.dtype), taken


def check_routers(routers: Routers | None, config: LearnerConfig, path: str, architecture: str) -> None:
    """Raise `UserError` for settings that need routers the model lacks, and for more chosen experts than exist."""
    if routers is not None:
        _, chosen, experts = routers.shape
        if chosen > experts:
            raise UserError(f"model.path = {path!r}: its config.json sends each token to {chosen} of {experts} experts")
    elif config.router_setting is not None:
        families = ", ".join(name.removesuffix("TopKRouter") for name in ROUTERS)
        raise UserError(
            f"{config.router_setting} needs a mixture of experts with routers of one of these families: {families}; "
            f"model.path = {path!r} is a {architecture}"
        )


def routing_statistics(routing: Routing, balance: torch.Tensor, replays: bool, stats: Stats) -> None:
    """Report load, entropy and balance of routers; if `replays`, also how their choice differs from the engine's."""
    layers = routing.layers.values()
    stats.loads("router", torch.stack([layer.counts for layer in layers]))
    stats.mean("router/entropy", torch.stack([layer.entropies for layer in layers]).mean(0), over="tokens")
    stats.mean("router/balance", balance.detach() * len(routing.positions), over="tokens")
    if replays:
        replayed = routing.replayed()
        differs = torch.stack([layer.differs for layer in layers]).double().mean(0)
        stats.total("replayed_tokens", replayed)
        stats.mean("router/replayed", replayed, over="tokens")
        stats.mean("router/differs", differs, over="replayed_tokens")


def _routed(logits: torch.Tensor, own: torch.Tensor, taken: torch.Tensor, positions: torch.Tensor) -> RoutedLayer:
    logits, own, taken = (values.index_select(0, positions) for values in (logits, own, taken))
    probabilities = logits.softmax(-1, dtype=torch.float32)
    constant = probabilities.detach()
    every = torch.arange(probabilities.shape[-1], device=taken.device)
    return RoutedLayer(
        counts=(taken[..., None] == every).sum((0, 1)),
        entropies=-torch.special.xlogy(constant, constant).sum(-1),
        differs=(own.sort(-1).values != taken.sort(-1).values).any(-1),
        probabilities=probabilities.sum(0) / max(len(positions), 1),
    )
