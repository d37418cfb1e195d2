"""DeepSpeed's configuration, from the learner's; the learning rate of a step, and deterministic runs."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from common.config import LearnerConfig, load_config
from common.errors import UserError
from learner.policy.engine import OWN_KEYS, deepspeed_config, gathering_groups, learning_rate
from learner.policy.kernels import deterministic

SGD = {"type": "SGD", "params": {"momentum": 0.9}}
OFFLOADED = {"zero_stage": 3, "offload": "all"}
TO_CPU = {"device": "cpu", "pin_memory": True}
BUCKETS = {"zero_optimization": {"reduce_bucket_size": 1000}, "wall_clock_breakdown": True}
MERGED = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}, "gradient_clipping": 1.0}
AFTERWARDS = {"zero_optimization": {"overlap_comm": False}}
PARAMS = "optimizer.params"
REDUCES, OVERLAPS = "zero_optimization.use_multi_rank_bucket_allreduce", "zero_optimization.overlap_comm"


@pytest.mark.parametrize(
    ("learner", "ranks", "expected"),
    [
        # What a user gives DeepSpeed is merged in section by section; another optimizer replaces ours whole.
        ({"zero_stage": 2, "deepspeed": BUCKETS}, 1, MERGED),
        ({"deepspeed": {"optimizer": SGD}}, 1, {"optimizer": SGD}),
        # Offloading from a GPU uses DeepSpeed's own Adam.
        (OFFLOADED, 1, {f"{PARAMS}.torch_adam": None, "zero_optimization.offload_param": TO_CPU}),
        ({"zero_stage": 3}, 1, {f"{PARAMS}.torch_adam": True}),
        # bfloat16 accumulates in fp32; many ranks sum in fp32, unless a user decides otherwise.
        ({"dtype": "bfloat16", "zero_stage": 0}, 1, {"data_types.grad_accum_dtype": "fp32"}),
        ({"dtype": "bfloat16", "zero_stage": 0}, 1, {"zero_optimization.stage": 1}),
        ({"dtype": "bfloat16"}, 7, {"communication_data_type": None}),
        ({"dtype": "bfloat16"}, 8, {"communication_data_type": "fp32"}),
        ({"deepspeed": {"communication_data_type": "bf16"}}, 64, {"communication_data_type": "bf16"}),
        # Each rank receives its own gradients, during the backward pass, where this is of use.
        ({"zero_stage": 2}, 2, {REDUCES: False, OVERLAPS: True}),
        ({"zero_stage": 1, "dtype": "float32"}, 2, {REDUCES: False, OVERLAPS: True}),
        ({"zero_stage": 1, "dtype": "bfloat16"}, 2, {REDUCES: None, OVERLAPS: None}),
        ({"zero_stage": 2, "offload": "optimizer"}, 2, {REDUCES: False, OVERLAPS: None}),
        ({"zero_stage": 2, "lora": {"rank": 8}}, 2, {REDUCES: None, OVERLAPS: None}),
        ({"zero_stage": 2}, 1, {REDUCES: None, OVERLAPS: None}),
        ({"zero_stage": 3}, 2, {REDUCES: None, OVERLAPS: None}),
        ({"zero_stage": 2, "deepspeed": AFTERWARDS}, 2, {REDUCES: False, OVERLAPS: False}),
    ],
    ids=str,
)
def test_settings_of_deepspeed(learner, ranks, expected):
    settings = deepspeed_config(LearnerConfig(**learner), on_gpu=True, ranks=ranks)
    for key, value in expected.items():
        setting: Any = settings
        for part in key.split("."):
            setting = setting.get(part)
        assert setting == value, key


@pytest.mark.parametrize(
    ("limit", "expected"), [(6, [[0, 1], [2], [3, 4]]), (100, [[0, 1, 2, 3, 4]]), (1, [[0], [1], [2], [3], [4]])]
)
def test_parameters_are_gathered_together_up_to_a_limit(limit, expected):
    sizes = [4, 2, 9, 1, 5]
    weights = [(str(number), torch.nn.Parameter(torch.zeros(size))) for number, size in enumerate(sizes)]
    groups = gathering_groups(iter(weights), limit)
    assert [[int(name) for name, _ in group] for group in groups] == expected


def test_on_a_cpu_offloading_keeps_torchs_adam():
    assert deepspeed_config(LearnerConfig(**OFFLOADED), on_gpu=False)["optimizer"]["params"]["torch_adam"] is True


ZERO: dict[str, Any] = {
    "reduce_bucket_size": 1234,
    "overlap_comm": True,
    "stage3_max_live_parameters": 10**8,
    "zero_hpz_partition_size": 8,
    "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"},
}
OTHERS = {
    "communication_data_type": "fp32",
    "prescale_gradients": True,
    "wall_clock_breakdown": True,
    "flops_profiler": {"enabled": True, "profile_step": 3},
    "checkpoint": {"load_universal": True},
}


@pytest.mark.integration  # computes for seconds
def test_deepspeed_reads_every_kind_of_setting_untouched():
    from deepspeed.runtime.config import DeepSpeedConfig

    config = LearnerConfig(zero_stage=3, deepspeed={"zero_optimization": ZERO, **OTHERS})
    settings = DeepSpeedConfig(deepspeed_config(config, on_gpu=True))
    zero = settings.zero_config.model_dump(by_alias=True, mode="json")
    for name, value in {"stage": 3, **ZERO}.items():
        assert zero[name] == value or zero[name].items() >= value.items(), name
    assert settings.communication_data_type is torch.float32
    assert (settings.prescale_gradients, settings.wall_clock_breakdown) == (True, True)
    assert (settings.flops_profiler_config.enabled, settings.flops_profiler_config.profile_step) == (True, 3)
    assert settings.load_universal_checkpoint is True


@pytest.mark.parametrize("key", OWN_KEYS)
def test_each_key_of_our_own_is_refused_with_its_name(key):
    options: Any = 1
    for part in reversed(key.split(".")):
        options = {part: options}
    with pytest.raises(UserError, match=f"learner.deepspeed: set {OWN_KEYS[key]} instead of {key}"):
        deepspeed_config(LearnerConfig(deepspeed=options), on_gpu=False)


def test_environment_and_command_line_set_deepspeeds_keys_too(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: {path: m}\ndata: {train: t}\n")
    section, options = "zero_optimization", {"zero_hpz_partition_size": 8, "zero_quantized_weights": True}
    words = [f"learner.deepspeed.{section}.{key}={json.dumps(value)}" for key, value in options.items()]
    one = {f"SPO__LEARNER__DEEPSPEED__{section}__{key}".upper(): json.dumps(value) for key, value in options.items()}
    whole = {"SPO__LEARNER__DEEPSPEED": json.dumps({section: options})}
    for environment, overrides in ((whole, []), (one, []), ({}, words)):
        assert load_config(file, overrides, environment).learner.deepspeed == {section: options}


@pytest.mark.parametrize(
    ("learner", "expected"),
    [
        ({}, {0: 1.0, 5: 1.0, 10: 1.0}),
        ({"warmup_steps": 4}, {0: 0.2, 1: 0.4, 2: 0.6, 3: 0.8, 4: 1.0, 10: 1.0}),
        ({"schedule": "linear", "min_lr_ratio": 0.1}, {0: 1.0, 2: 0.82, 5: 0.55, 10: 0.1}),
        ({"schedule": "cosine", "min_lr_ratio": 0.1}, {0: 1.0, 2: 0.9140576, 5: 0.55, 10: 0.1}),
        ({"schedule": "linear", "warmup_steps": 2}, {1: 2 / 3, 2: 1.0, 6: 0.5, 10: 0.0}),
    ],
    ids=str,
)
def test_the_learning_rate_warms_up_and_decays(learner, expected):
    config = LearnerConfig(lr=1.0, **learner)
    assert {step: learning_rate(step, 10, config) for step in expected} == pytest.approx(expected)


def test_algorithms_and_random_numbers_are_the_same_each_time():
    drawn = []
    for _ in range(2):
        with deterministic(seed=3):
            assert torch.are_deterministic_algorithms_enabled()
            drawn.append(torch.rand(4).tolist())
        assert not torch.are_deterministic_algorithms_enabled()
    assert drawn[0] == drawn[1]


def test_what_has_no_deterministic_algorithm_is_a_users_error():
    refusal = "cumsum does not have a deterministic implementation, see 'torch.use_deterministic_algorithms(True)'"
    with pytest.raises(UserError, match=r"run\.deterministic: cumsum does not have"), deterministic(seed=3):
        raise RuntimeError(f"{refusal}.\nYou can turn it off")
    with pytest.raises(RuntimeError, match="gloo"), deterministic(seed=3):
        raise RuntimeError("gloo: connection closed")
