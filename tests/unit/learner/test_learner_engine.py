"""DeepSpeed's configuration, from the learner's."""

from __future__ import annotations

import pytest
import torch

from common.config import LearnerConfig
from common.errors import UserError
from learner.engine import deepspeed_config


def test_what_the_user_gives_deepspeed_is_merged_in_section_by_section():
    options = {"zero_optimization": {"reduce_bucket_size": 1000}, "wall_clock_breakdown": True}
    settings = deepspeed_config(LearnerConfig(zero_stage=2, deepspeed=options), on_gpu=False)
    assert settings["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 1000}
    assert settings["wall_clock_breakdown"] is True
    assert settings["gradient_clipping"] == 1.0


def test_another_optimizer_replaces_ours_whole():
    optimizer = {"type": "SGD", "params": {"momentum": 0.9}}
    assert deepspeed_config(LearnerConfig(deepspeed={"optimizer": optimizer}), on_gpu=False)["optimizer"] == optimizer


@pytest.mark.parametrize(
    ("options", "instead"),
    [
        ({"zero_optimization": {"stage": 3}}, "learner.zero_stage"),
        ({"gradient_clipping": 0.5}, "learner.grad_clip"),
        ({"bf16": {"enabled": False}}, "learner.dtype"),
        ({"gradient_accumulation_steps": 4}, "learner.token_budget"),
    ],
)
def test_what_has_a_key_of_its_own_is_refused_with_that_key(options, instead):
    with pytest.raises(UserError, match=f"set {instead} instead"):
        deepspeed_config(LearnerConfig(deepspeed=options), on_gpu=False)


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


def test_the_sum_of_many_ranks_gradients_is_off_in_bfloat16_and_not_in_fp32() -> None:
    gradients = torch.randn(32, 1 << 14, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = gradients.double().sum(0)
    off = {}
    for dtype in (torch.bfloat16, torch.float32):
        total = gradients[0].to(dtype)
        for gradient in gradients[1:]:  # as ranks in a ring add theirs
            total = total + gradient.to(dtype)
        off[dtype] = float((total.double() - exact).norm() / exact.norm())
    assert off[torch.bfloat16] > 3e-3
    assert off[torch.float32] < 1e-6
