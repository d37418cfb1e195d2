"""What `learner.deepspeed` says reaches DeepSpeed untouched: its own configuration class, without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from common.config import LearnerConfig, load_config
from common.errors import UserError
from learner.engine import OWN_KEYS, deepspeed_config

KINDS: dict[str, dict[str, Any]] = {
    "buckets": {"zero_optimization": {"reduce_bucket_size": 1234, "allgather_bucket_size": 4321, "overlap_comm": True}},
    "ZeRO 3": {"zero_optimization": {"stage3_max_live_parameters": 10**8, "stage3_prefetch_bucket_size": 10**7}},
    "ZeRO++": {"zero_optimization": {"zero_hpz_partition_size": 8, "zero_quantized_weights": True}},
    "offloading": {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}},
    "communication": {"communication_data_type": "fp32", "prescale_gradients": True},
    "profiling": {"wall_clock_breakdown": True, "flops_profiler": {"enabled": True, "profile_step": 3}},
    "checkpoints": {"checkpoint": {"load_universal": True}},
}


def read_by_deepspeed(options: dict[str, Any], zero_stage: int = 2) -> Any:
    """DeepSpeed's configuration object, which checks what it knows."""
    from deepspeed.runtime.config import DeepSpeedConfig

    settings = deepspeed_config(LearnerConfig(zero_stage=zero_stage, deepspeed=options), on_gpu=True)
    return DeepSpeedConfig(settings)


@pytest.mark.parametrize("kind", ["buckets", "ZeRO 3", "ZeRO++", "offloading"])
def test_each_kind_of_zero_setting_arrives_untouched(kind: str) -> None:
    options = KINDS[kind]["zero_optimization"]
    zero = read_by_deepspeed(KINDS[kind], zero_stage=3).zero_config.model_dump(by_alias=True, mode="json")
    assert zero["stage"] == 3
    for name, value in options.items():
        if isinstance(value, dict):
            assert zero[name].items() >= value.items()
        else:
            assert zero[name] == value, name


def test_other_sections_arrive_too() -> None:
    settings = read_by_deepspeed(
        {name: value for kind in ("communication", "profiling", "checkpoints") for name, value in KINDS[kind].items()}
    )
    assert settings.communication_data_type is torch.float32
    assert (settings.prescale_gradients, settings.wall_clock_breakdown) == (True, True)
    assert (settings.flops_profiler_config.enabled, settings.flops_profiler_config.profile_step) == (True, 3)
    assert settings.load_universal_checkpoint is True


def test_what_ours_and_theirs_say_of_one_section_is_merged() -> None:
    config = LearnerConfig(
        zero_stage=3,
        offload_optimizer=True,
        deepspeed={"zero_optimization": {"offload_optimizer": {"buffer_count": 8}}},
    )
    offload = deepspeed_config(config, on_gpu=True)["zero_optimization"]["offload_optimizer"]
    assert offload == {"device": "cpu", "pin_memory": True, "buffer_count": 8}


@pytest.mark.parametrize("key", OWN_KEYS)
def test_each_key_of_our_own_is_refused_with_its_name(key: str) -> None:
    options: Any = 1
    for part in reversed(key.split(".")):
        options = {part: options}
    with pytest.raises(UserError, match=f"learner.deepspeed: set {OWN_KEYS[key]} instead of {key}"):
        deepspeed_config(LearnerConfig(deepspeed=options), on_gpu=False)


@pytest.mark.parametrize(
    ("environment", "overrides"),
    [
        ({"SPO__LEARNER__DEEPSPEED": json.dumps(KINDS["ZeRO++"])}, []),
        (
            {
                "SPO__LEARNER__DEEPSPEED__ZERO_OPTIMIZATION__ZERO_HPZ_PARTITION_SIZE": "8",
                "SPO__LEARNER__DEEPSPEED__ZERO_OPTIMIZATION__ZERO_QUANTIZED_WEIGHTS": "true",
            },
            [],
        ),
        (
            {},
            [
                "learner.deepspeed.zero_optimization.zero_hpz_partition_size=8",
                "learner.deepspeed.zero_optimization.zero_quantized_weights=true",
            ],
        ),
    ],
    ids=["environment, whole", "environment, key by key", "command line"],
)
def test_environment_and_command_line_say_it_too(
    tmp_path: Path, environment: dict[str, str], overrides: list[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {path: m}\ndata: {train: t}\n")
    assert load_config(file, overrides, environment).learner.deepspeed == KINDS["ZeRO++"]
