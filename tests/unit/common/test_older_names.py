"""Names that verl and SkyRL gave to fields of the correction in earlier versions."""

from __future__ import annotations

from typing import Any

import pytest

from common.config import Config, SkyRLCorrection, parse_config
from common.config.warnings import warnings
from common.errors import UserError


def configured(algorithm: dict[str, Any]) -> Config:
    return parse_config({"model": {"path": "m"}, "data": {"train": "t.jsonl"}, "algorithm": algorithm})


OLDER = [
    # Fields under older names, and the same under today's.
    ({"rollout_is_level": "token"}, {"rollout_is": "token"}),
    ({"rollout_is": True, "rollout_is_level": "sequence"}, {"rollout_is": "sequence"}),
    ({"rollout_is": True}, {"rollout_is": "token"}),
    ({"rollout_is": False, "rollout_is_level": "token"}, {"rollout_is": None}),
    (
        {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.001, "rollout_rs_threshold_lower": 0.999},
        {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"},
    ),
    (
        {"rollout_is": "sequence", "use_pure_rollout_correction": True},
        {"rollout_is": "sequence", "bypass_mode": True, "loss_type": "reinforce"},
    ),
    ({"rollout_is": None, "bypass_old_logprob_for_rollout": True}, {"rollout_is": None, "bypass_mode": True}),
    (
        {"use_tis": True, "tis_imp_ratio_cap": 3.0},
        {"skyrl": {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 3.0}},
    ),
    ({"use_tis": False}, {"skyrl": {}}),
]


@pytest.mark.parametrize(("older", "today"), OLDER, ids=str)
def test_older_names_are_read_with_a_warning_that_names_todays(older, today):
    config, expected = configured({"correction": older}), configured({"correction": today}).algorithm
    assert config.algorithm.correction.model_dump() == expected.correction.model_dump()
    assert (config.algorithm.loss, config.algorithm.proximal) == (expected.loss, expected.proximal)
    lines = [line for line in warnings(config) if "older" in line]
    assert len(lines) == len(config.algorithm.correction.notes) > 0
    assert all("; say " in line for line in lines)
    assert not [line for line in warnings(configured({"correction": today})) if "older" in line]


def test_skyrls_older_names_are_read_where_skyrl_has_them():
    config = configured({"use_tis": True, "tis_imp_ratio_cap": 2.5})
    assert config.algorithm.correction.skyrl == SkyRLCorrection(tis_ratio_type="token", token_tis_ratio_clip_high=2.5)


@pytest.mark.parametrize(
    ("correction", "names"),
    [
        (
            {"rollout_is_level": "token", "rollout_is": "sequence"},
            ["rollout_is_level = 'token'", "rollout_is (given: 'sequence')"],
        ),
        (
            {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2", "rollout_rs_threshold_lower": 0.4},
            ["rollout_rs_threshold_lower = 0.4", "rollout_rs_threshold (given: '0.5_2')"],
        ),
        ({"use_pure_rollout_correction": True, "loss_type": "ppo_clip"}, ["use_pure_rollout_correction", "loss_type"]),
        ({"use_pure_rollout_correction": True, "bypass_mode": False}, ["use_pure_rollout_correction", "bypass_mode"]),
        (
            {"bypass_old_logprob_for_rollout": True, "bypass_mode": True},
            ["bypass_old_logprob_for_rollout", "bypass_mode"],
        ),
        ({"use_tis": True, "skyrl": {"tis_ratio_type": "token"}}, ["use_tis", "skyrl"]),
        ({"rollout_is_level": "geometric"}, ["'geometric'", "token, sequence", "seq_mean_k1"]),
    ],
    ids=str,
)
def test_an_older_name_beside_todays_is_refused_and_both_are_named(correction, names):
    with pytest.raises(UserError) as refusal:
        configured({"correction": correction})
    message = str(refusal.value)
    assert "\n" not in message
    assert [name for name in names if name not in message] == []
