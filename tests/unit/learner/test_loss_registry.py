"""A policy loss of the user's own: found by name, tried before the first step, and refused with one line."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import yaml

from common.config import AlgorithmConfig
from common.config.algorithm import LOSS_NAMES
from common.errors import UserError
from learner.losses import LOSSES, PolicyTokens, load_loss
from tests.support.documented import blocks, modules
from tests.support.plugin_package import announce


def reinforce(tokens: PolicyTokens, config: AlgorithmConfig, scale: float = 1.0) -> torch.Tensor:
    return -scale * tokens.advantages * tokens.logprobs


def with_metrics(tokens: PolicyTokens, config: AlgorithmConfig) -> Any:
    return reinforce(tokens, config), {"gap": tokens.log_ratio, "mine/gap": tokens.log_ratio}


def summed(tokens: PolicyTokens, config: AlgorithmConfig) -> torch.Tensor:
    return reinforce(tokens, config).sum()


def number(tokens: PolicyTokens, config: AlgorithmConfig) -> float:
    return 1.0


def not_a_number(tokens: PolicyTokens, config: AlgorithmConfig) -> torch.Tensor:
    return reinforce(tokens, config) * torch.nan


def steep(tokens: PolicyTokens, config: AlgorithmConfig) -> torch.Tensor:
    return (tokens.logprobs - tokens.logprobs.detach()).abs().sqrt()


def constant(tokens: PolicyTokens, config: AlgorithmConfig) -> torch.Tensor:
    return -tokens.advantages * tokens.logprobs.detach()


def broken(tokens: PolicyTokens, config: AlgorithmConfig) -> torch.Tensor:
    raise KeyError("beta")


def bad_metric(tokens: PolicyTokens, config: AlgorithmConfig) -> Any:
    return reinforce(tokens, config), {"gap": tokens.log_ratio.mean()}


text = "no function"


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "own_losses", sys.modules[__name__])


def load(name: str, **options: Any) -> Any:
    return load_loss(AlgorithmConfig(loss=name, loss_options=options))


def test_the_names_of_the_configuration_are_those_of_the_losses() -> None:
    assert tuple(LOSSES) == LOSS_NAMES
    assert [load(name) for name in LOSS_NAMES] == [*LOSSES.values()]


def test_a_function_of_ones_own_is_called_with_its_options() -> None:
    tokens = PolicyTokens.of(*trial(), AlgorithmConfig())
    losses, metrics = load("own_losses:reinforce", scale=2.0)(tokens, AlgorithmConfig())
    assert torch.equal(losses, 2 * LOSSES["reinforce"](tokens, AlgorithmConfig())[0])
    assert metrics == {}


def test_metrics_of_ones_own_loss_get_the_prefix_of_the_others_unless_they_have_one() -> None:
    _, metrics = load("own_losses:with_metrics")(PolicyTokens.of(*trial(), AlgorithmConfig()), AlgorithmConfig())
    assert set(metrics) == {"actor/gap", "mine/gap"}


def test_an_installed_package_announces_a_loss(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    announce(tmp_path, monkeypatch, {"spo.losses": {"ours": "own_losses:reinforce"}})
    losses, _ = load("ours")(PolicyTokens.of(*trial(), AlgorithmConfig()), AlgorithmConfig())
    assert losses.shape == (2,)


def trial() -> tuple[Any, ...]:
    from learner.correction import Layout

    values = torch.tensor([-1.0, -2.0], requires_grad=True)
    keep = torch.tensor([True, True])
    return values, values.detach(), values.detach(), torch.tensor([1.0, -1.0]), keep, Layout.of_lengths([2])


def test_the_documented_example_is_a_loss_that_trains(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cubic.py").write_text(modules("extending.md")["cubic.py"])
    monkeypatch.syspath_prepend(tmp_path)
    (text,) = blocks("extending.md", "A loss", "yaml")
    config = AlgorithmConfig(**yaml.safe_load(text)["algorithm"])
    losses, metrics = load_loss(config)(PolicyTokens.of(*trial(), config), config)
    # On-policy every ratio is 1, and no clip binds.
    assert losses.tolist() == [-1.0, 1.0]
    assert metrics["actor/clipped"].tolist() == [False, False]


@pytest.mark.parametrize(
    ("name", "options", "parts"),
    [
        ("ppo", {}, ["algorithm.loss = 'ppo' is unknown", "ppo_clip, gspo", "module:object of your own"]),
        ("no_such_module:loss", {}, ["cannot import no_such_module"]),
        ("own_losses:absent", {}, ["module own_losses has no absent"]),
        ("own_losses:text", {}, ["'own_losses:text' is no function of (tokens, config)"]),
        ("own_losses:summed", {}, ["'own_losses:summed' must return the loss of each token", "[6]", "returned []"]),
        ("own_losses:number", {}, ["must return the loss of each token", "returned float"]),
        ("own_losses:not_a_number", {}, ["'own_losses:not_a_number' is not finite"]),
        ("own_losses:steep", {}, ["gradient that is not finite"]),
        ("own_losses:constant", {}, ["'own_losses:constant' has no gradient"]),
        ("own_losses:broken", {}, ["failed on a trial batch: KeyError: 'beta'"]),
        ("own_losses:bad_metric", {}, ["the metric 'gap' must be one number for each token"]),
        ("own_losses:reinforce", {"scales": 2}, ["algorithm.loss_options of 'own_losses:reinforce'", "allowed: scale"]),
        ("own_losses:reinforce", {"scale": "big"}, ["scale = 'big'"]),
        ("gspo", {"scale": 2}, ["algorithm.loss_options", "'gspo' takes none"]),
    ],
)
def test_a_loss_that_cannot_be_trained_with_is_refused_with_one_line(
    name: str, options: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(UserError) as refusal:
        load(name, **options)
    message = str(refusal.value)
    assert "\n" not in message
    assert [part for part in parts if part not in message] == []
