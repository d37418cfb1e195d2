"""A policy loss of the user's own: found by name, tried before the first step, and refused with one line."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

from common.config import AlgorithmConfig
from common.config.losses import LOSS_NAMES
from common.errors import UserError
from learner.batch.layout import Layout
from learner.losses import LOSSES, PolicyTokens, load_loss
from tests.support.documented import EXAMPLES, blocks
from tests.support.plugin_package import announce


def reinforce(tokens: PolicyTokens, config: AlgorithmConfig, scale: float = 1.0) -> torch.Tensor:
    return -scale * tokens.advantages * tokens.logprobs


def broken(tokens: PolicyTokens, config: AlgorithmConfig) -> torch.Tensor:
    raise KeyError("beta")


OWN: dict[str, Any] = {
    "reinforce": reinforce,
    "with_metrics": lambda tokens, config: (
        reinforce(tokens, config),
        {"gap": tokens.log_ratio, "mine/gap": tokens.log_ratio},
    ),
    "summed": lambda tokens, config: reinforce(tokens, config).sum(),
    "not_a_number": lambda tokens, config: reinforce(tokens, config) * torch.nan,
    "steep": lambda tokens, config: (tokens.logprobs - tokens.logprobs.detach()).abs().sqrt(),
    "constant": lambda tokens, config: -tokens.advantages * tokens.logprobs.detach(),
    "broken": broken,
    "bad_metric": lambda tokens, config: (reinforce(tokens, config), {"gap": tokens.log_ratio.mean()}),
    "no_metrics": lambda tokens, config: (reinforce(tokens, config), None),
    "unnamed_metrics": lambda tokens, config: (reinforce(tokens, config), {1: tokens.log_ratio}),
    "text": "no function",
}


@pytest.fixture(autouse=True)
def own(monkeypatch):
    module = ModuleType("own_losses")
    vars(module).update(OWN)
    monkeypatch.setitem(sys.modules, "own_losses", module)


def load(name: str, **options: Any) -> Any:
    return load_loss(AlgorithmConfig(loss=name, loss_options=options))


def trial(config: AlgorithmConfig | None = None) -> tuple[PolicyTokens, AlgorithmConfig]:
    """Two tokens on-policy, for a loss to be called with."""
    config, values = config or AlgorithmConfig(), torch.tensor([-1.0, -2.0], requires_grad=True)
    tokens = PolicyTokens.of(
        logprobs=values,
        old=values.detach(),
        rollout=values.detach(),
        advantages=torch.tensor([1.0, -1.0]),
        keep=torch.tensor([True, True]),
        layout=Layout.of_lengths([2]),
        config=config,
    )
    return tokens, config


def test_names_options_metrics_and_entry_points(tmp_path, monkeypatch):
    assert tuple(LOSSES) == LOSS_NAMES
    given = {"dro": {"beta": 1.0}}
    assert [load(name, **given.get(name, {})) for name in LOSS_NAMES] == [*LOSSES.values()]
    losses, metrics = load("own_losses:reinforce", scale=2.0)(*trial())
    assert torch.equal(losses, 2 * LOSSES["reinforce"](*trial())[0])
    assert metrics == {}
    assert set(load("own_losses:with_metrics")(*trial())[1]) == {"actor/gap", "mine/gap"}
    announce(tmp_path, monkeypatch, {"spo.losses": {"ours": "own_losses:reinforce"}})
    assert load("ours")(*trial())[0].shape == (2,)


def test_the_documented_example_is_a_loss_that_trains(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    (text,) = blocks("extending.md", "A loss", "yaml")
    config = AlgorithmConfig(**yaml.safe_load(text)["algorithm"])
    losses, metrics = load_loss(config)(*trial(config))
    # On-policy every ratio is 1, and no clip binds.
    assert losses.tolist() == [-1.0, 1.0]
    assert metrics["actor/clipped"].tolist() == [False, False]


@pytest.mark.parametrize(
    ("name", "options", "parts"),
    [
        ("ppo", {}, ["algorithm.loss = 'ppo' is unknown", "ppo_clip, gspo", "module:object of your own"]),
        ("no_such_module:loss", {}, ["cannot import no_such_module"]),
        ("own_losses:text", {}, ["'own_losses:text' is not a function of (tokens, config)"]),
        ("own_losses:summed", {}, ["'own_losses:summed' must return the loss of each token", "[6]", "returned []"]),
        ("own_losses:not_a_number", {}, ["'own_losses:not_a_number' is not finite"]),
        ("own_losses:steep", {}, ["gradient that is not finite"]),
        ("own_losses:constant", {}, ["'own_losses:constant' has no gradient"]),
        ("own_losses:broken", {}, ["'own_losses:broken' failed: KeyError: 'beta'"]),
        ("own_losses:bad_metric", {}, ["the metric 'gap' must be one number for each token"]),
        ("own_losses:no_metrics", {}, ["'own_losses:no_metrics' must return the metrics as a dict", "NoneType"]),
        ("own_losses:unnamed_metrics", {}, ["the name of the metric 1 must be text, not int"]),
        ("own_losses:reinforce", {"scales": 2}, ["algorithm.loss_options of 'own_losses:reinforce'", "allowed: scale"]),
        ("own_losses:reinforce", {"scale": "big"}, ["scale = 'big'"]),
        ("gspo", {"scale": 2}, ["algorithm.loss_options.scale is not an option of loss 'gspo'", "allowed: low, high"]),
    ],
)
def test_a_loss_that_cannot_be_trained_with_is_refused(name, options, parts):
    with pytest.raises(UserError) as refusal:
        load(name, **options)
    message = str(refusal.value)
    assert "\n" not in message
    assert [part for part in parts if part not in message] == []
