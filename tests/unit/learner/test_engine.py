"""DeepSpeed's configuration, from the learner's; the learning rate of a step, and deterministic runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from common.config import LearnerConfig, load_config
from common.errors import UserError
from learner.engine import OWN_KEYS, deepspeed_config, learning_rate
from learner.kernels import deterministic


def test_what_the_user_gives_deepspeed_is_merged_in_section_by_section():
    options = {"zero_optimization": {"reduce_bucket_size": 1000}, "wall_clock_breakdown": True}
    settings = deepspeed_config(LearnerConfig(zero_stage=2, deepspeed=options), on_gpu=False)
    assert settings["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 1000}
    assert settings["wall_clock_breakdown"] is True
    assert settings["gradient_clipping"] == 1.0


def test_another_optimizer_replaces_ours_whole():
    optimizer = {"type": "SGD", "params": {"momentum": 0.9}}
    assert deepspeed_config(LearnerConfig(deepspeed={"optimizer": optimizer}), on_gpu=False)["optimizer"] == optimizer


def test_offloading_from_a_gpu_uses_deepspeeds_own_adam():
    config = LearnerConfig(zero_stage=3, offload_optimizer=True, offload_params=True)
    on_gpu, on_cpu = (deepspeed_config(config, on_gpu=on_gpu) for on_gpu in (True, False))
    assert "torch_adam" not in on_gpu["optimizer"]["params"]
    assert on_cpu["optimizer"]["params"]["torch_adam"] is True
    assert on_gpu["zero_optimization"]["offload_param"] == {"device": "cpu", "pin_memory": True}


def test_bfloat16_accumulates_gradients_in_fp32():
    settings = deepspeed_config(LearnerConfig(dtype="bfloat16", zero_stage=0), on_gpu=False)
    assert settings["data_types"] == {"grad_accum_dtype": "fp32"}
    assert settings["zero_optimization"]["stage"] == 1


@pytest.mark.parametrize(
    ("ranks", "dtype", "expected"), [(4, "bfloat16", None), (8, "bfloat16", "fp32"), (8, "float32", None)]
)
def test_many_ranks_sum_their_bfloat16_gradients_in_fp32(ranks: int, dtype: str, expected: str | None) -> None:
    settings = deepspeed_config(LearnerConfig(zero_stage=2, dtype=dtype), on_gpu=True, ranks=ranks)
    assert settings.get("communication_data_type") == expected


def test_a_user_decides_over_the_type_in_which_gradients_are_summed() -> None:
    config = LearnerConfig(deepspeed={"communication_data_type": "bf16"})
    assert deepspeed_config(config, on_gpu=True, ranks=64)["communication_data_type"] == "bf16"


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


def test_environment_and_command_line_say_it_too(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {path: m}\ndata: {train: t}\n")
    keys = {"zero_hpz_partition_size": "8", "zero_quantized_weights": "true"}
    variables = {f"SPO__LEARNER__DEEPSPEED__ZERO_OPTIMIZATION__{key.upper()}": value for key, value in keys.items()}
    overrides = [f"learner.deepspeed.zero_optimization.{key}={value}" for key, value in keys.items()]
    whole = {"SPO__LEARNER__DEEPSPEED": json.dumps(KINDS["ZeRO++"])}
    for environment, words in ((whole, []), (variables, []), ({}, overrides)):
        assert load_config(file, words, environment).learner.deepspeed == KINDS["ZeRO++"]


def rates(**values) -> list[float]:
    config = LearnerConfig(lr=1.0, **values)
    return [learning_rate(step, 10, config) for step in range(11)]


def test_warm_up_rises_evenly_to_the_peak():
    assert rates(warmup_steps=4)[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_constant_stays_at_the_peak():
    assert set(rates()) == {1.0}


@pytest.mark.parametrize(("schedule", "middle"), [("linear", 0.55), ("cosine", 0.55)])
def test_decay_goes_from_the_peak_to_the_chosen_floor(schedule, middle):
    found = rates(schedule=schedule, min_lr_ratio=0.1)
    assert found[0] == 1.0
    assert found[5] == pytest.approx(middle)
    assert found[10] == pytest.approx(0.1)
    assert found == sorted(found, reverse=True)


def test_algorithms_and_random_numbers_are_the_same_each_time() -> None:
    drawn = []
    for _ in range(2):
        with deterministic(seed=3):
            assert torch.are_deterministic_algorithms_enabled()
            drawn.append(torch.rand(4).tolist())
        assert not torch.are_deterministic_algorithms_enabled()
    assert drawn[0] == drawn[1]


def test_what_has_no_deterministic_algorithm_is_a_users_error() -> None:
    refusal = (
        "cumsum does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms(True)'"
    )
    with pytest.raises(UserError, match=r"run\.deterministic: cumsum does not have"), deterministic(seed=3):
        raise RuntimeError(f"{refusal}.\nYou can turn it off")
    with pytest.raises(RuntimeError, match="gloo"), deterministic(seed=3):
        raise RuntimeError("gloo: connection closed")
