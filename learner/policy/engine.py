"""Builds the DeepSpeed engine from the configuration, and loads models for it, under ZeRO 3 in pieces."""

from __future__ import annotations

import io
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch
from torch import nn

from common.config import Config, LearnerConfig
from common.errors import UserError
from common.model import check_model_folder
from learner.policy.communication import choices, sets
from learner.policy.model import Policy, load_policy
from learner.ranks.world import World

# Keys that `learner.deepspeed` may not set, because the learner has keys of its own for them.
OWN_KEYS = {
    "zero_optimization.stage": "learner.zero_stage",
    "gradient_clipping": "learner.grad_clip",
    "bf16": "learner.dtype",
    "fp16": "learner.dtype",
    "train_batch_size": "sampler.batch_size",
    "train_micro_batch_size_per_gpu": "learner.token_budget",
    "gradient_accumulation_steps": "learner.token_budget",
    "scheduler": "learner.schedule",
}

GATHERED = 250_000_000  # elements that are gathered at a time while weights are copied: those of a large layer

# Exceptions by which DeepSpeed refuses a configuration.
REFUSALS = (ValueError, TypeError, AssertionError, NotImplementedError, KeyError)


def build_engine(policy: nn.Module, config: LearnerConfig, world: World) -> Any:
    """Wrap a policy, or a critic, in a DeepSpeed engine with its optimizer; raises `UserError` if DeepSpeed refuses."""
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    engine = _initialize(policy, deepspeed_config(config, world.device.type == "cuda", world.size), world, trained)
    engine.gradient_factor = GradientFactor(engine)
    return engine


def build_frozen_engine(policy: Policy, config: LearnerConfig, world: World) -> Any:
    """Wrap a policy that is not trained and that the ranks divide, to run it; raises like `build_engine`."""
    settings = deepspeed_config(config, world.device.type == "cuda", world.size)
    settings.pop("optimizer", None)
    settings["zero_optimization"].pop("offload_optimizer", None)
    return _initialize(policy.requires_grad_(False), settings, world, None)


def _initialize(policy: Any, settings: dict[str, Any], world: World, trained: Iterable[nn.Parameter] | None) -> Any:
    """Wrap the policy in DeepSpeed's engine, and keep its buffers as they are."""
    deepspeed = join_deepspeed(world)
    policy.packing.in_step = settings["zero_optimization"]["stage"] == 3
    buffers = {name: buffer.clone() for name, buffer in policy.named_buffers()}
    with _refusals():
        engine, *_ = deepspeed.initialize(
            model=policy, model_parameters=trained, config=settings, dist_init_required=False
        )
    # DeepSpeed casts buffers too, but rotary frequencies in bfloat16 would move distant positions.
    for name, buffer in policy.named_buffers():
        buffer.data = buffers[name].to(world.device)
    return engine


def check_deepspeed(config: LearnerConfig) -> None:
    """Let DeepSpeed check its configuration, without a model; raises `UserError` like `build_engine`."""
    on_gpu = torch.cuda.is_available()
    _import_deepspeed(on_gpu)
    from deepspeed.runtime.config import DeepSpeedConfig

    settings = deepspeed_config(config, on_gpu)
    with _refusals():
        DeepSpeedConfig(settings)


@contextmanager
def _refusals() -> Iterator[None]:
    """Within the block DeepSpeed prints nothing, and its refusals become a `UserError`."""
    try:
        with redirect_stdout(io.StringIO()):
            yield
    except REFUSALS as error:
        raise UserError(f"DeepSpeed refuses the learner's configuration: {error}") from error


def deepspeed_config(config: LearnerConfig, on_gpu: bool, ranks: int = 1) -> dict[str, Any]:
    """DeepSpeed's configuration for this many ranks; `learner.deepspeed` is merged in last and wins.

    Raises `UserError` if `learner.deepspeed` sets one of `OWN_KEYS`.
    """
    for key, own in OWN_KEYS.items():
        if sets(config.deepspeed, key):
            raise UserError(f"learner.deepspeed: set {own} instead of {key}")
    zero: dict[str, Any] = {"stage": config.deepspeed_stage}
    if config.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": on_gpu}
    if config.offload == "all":
        zero["offload_param"] = {"device": "cpu", "pin_memory": on_gpu}
    # DeepSpeed's own CPU Adam pays off if states are offloaded from a GPU; it is compiled at first use.
    own_adam = config.offload != "none" and on_gpu
    adam = {} if own_adam else {"torch_adam": True, "fused": True}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0 if _clips_itself(config) else config.grad_clip,
        "steps_per_print": 1_000_000_000,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": config.lr, "weight_decay": config.weight_decay, **adam},
        },
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
    }
    if config.dtype == "bfloat16":
        settings |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    for choice in choices(config, on_gpu, ranks):
        section, _, key = choice.key.rpartition(".")
        (settings[section] if section else settings)[key] = choice.value
    if "optimizer" in config.deepspeed:
        del settings["optimizer"]
    return _merged(settings, config.deepspeed)


def set_learning_rate(engine: Any, rate: float) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = rate


def backward(engine: Any, loss: torch.Tensor, world: World, is_last: bool) -> None:
    """Add the gradient of a micro-batch's share of a loss; with `is_last` the optimizer step follows."""
    engine.set_gradient_accumulation_boundary(is_last)
    # DeepSpeed averages over ranks; the denominators are global already. Ranks with slices of the same sequences have
    # parts of one gradient, which add up like those of ranks with sequences of their own.
    engine.backward(loss * world.size)


class GradientFactor:
    """Multiplies the gradient just before the optimizer reads it, in every ZeRO stage.

    The divisor of a loss is known only after the last micro-batch; by then DeepSpeed's buffers hold the gradients of
    the earlier ones.
    """

    def __init__(self, engine: Any) -> None:
        self.value = 1.0
        for name in ("optimizer", "backup_optimizer"):
            optimizer = getattr(engine.optimizer, name, None)
            if isinstance(optimizer, torch.optim.Optimizer):
                optimizer.register_step_pre_hook(self._apply)

    def _apply(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.value != 1.0:
            scale_gradients((p for group in optimizer.param_groups for p in group["params"]), self.value)


def scale_gradients(parameters: Iterable[torch.Tensor], factor: float) -> None:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)


def optimizer_step(engine: Any, config: LearnerConfig, factor: float = 1.0) -> float:
    """Multiply the accumulated gradient by `factor`, clip, step and clear it; returns its norm before clipping.

    If the norm, which is the same on all ranks, is not finite, the gradient is only cleared.
    """
    if _clips_itself(config):
        scale_gradients(engine.module.parameters(), factor)
        limit = config.grad_clip or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(engine.module.parameters(), limit)
        if math.isfinite(norm):
            engine.step()
        else:
            engine.zero_grad()
        return float(norm)
    # DeepSpeed clips before the factor is applied, so its limit is divided by the factor. It takes no step if the norm
    # over all ranks is not finite.
    engine.gradient_factor.value, engine.optimizer.clip_grad = factor, config.grad_clip / factor
    engine.step()
    return float(engine.get_global_grad_norm() or 0.0) * factor


def full_weights(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter that training changes, whole. All ranks must consume this together.

    At stage 3 several parameters are gathered together, because GPUs wait for each other after each gathering.
    """
    import deepspeed

    is_divided = engine.zero_optimization_stage() == 3
    for group in gathering_groups(engine.module.named_weights()):
        with deepspeed.zero.GatheredParameters([parameter for _, parameter in group], enabled=is_divided):
            for name, parameter in group:
                yield name, parameter.detach()


def gathering_groups(
    weights: Iterable[tuple[str, nn.Parameter]], limit: int = GATHERED
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Consecutive parameters that are whole at the same time: at most `limit` elements, or a single larger one."""
    group, held = list[tuple[str, nn.Parameter]](), 0
    for name, parameter in weights:
        size = getattr(parameter, "ds_numel", parameter.numel())  # divided parameters themselves are empty
        if group and held + size > limit:
            yield group
            group, held = [], 0
        group.append((name, parameter))
        held += size
    if group:
        yield group


def _clips_itself(config: LearnerConfig) -> bool:
    """Whether the learner clips gradients: in plain fp32 training DeepSpeed would clip, but not report the norm."""
    return config.zero_stage == 0 and config.dtype == "float32"


def _merged(defaults: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`overrides` over `defaults`, section by section."""
    merged = dict(defaults)
    for key, value in overrides.items():
        section = merged.get(key)
        merged[key] = _merged(section, value) if isinstance(section, dict) and isinstance(value, Mapping) else value
    return merged


def join_deepspeed(world: World) -> Any:
    """Import DeepSpeed, and have it use the existing process group."""
    deepspeed = _import_deepspeed(world.device.type == "cuda")
    deepspeed.init_distributed(dist_backend=torch.distributed.get_backend(), verbose=False)
    return deepspeed


def _import_deepspeed(on_gpu: bool) -> Any:
    """Import DeepSpeed for the device at hand; it chooses its accelerator when imported."""
    if not on_gpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # DeepSpeed calls collectives by names that torch has deprecated.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    # Its autotuner, which nothing here uses, would import MLflow if it is installed, a third of the import time.
    mlflow = sys.modules.setdefault("mlflow", None)  # type: ignore[arg-type]
    import deepspeed

    if mlflow is None:
        del sys.modules["mlflow"]
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if not on_gpu:
        # Without this, a shared-memory all-reduce is compiled at first use, which needs a compiler and half a
        # minute; gloo serves as well.
        deepspeed.ops.__dict__.setdefault("__compatible_ops__", {})
    return deepspeed


def load_on_ranks(config: Config, world: World, load: Callable[..., Any] = load_policy, key: str = "model.path") -> Any:
    """Load the model at `model.path`, by `load_policy` or a function of its signature; all ranks together.

    Raises:
        UserError: on every rank, see `load_policy`; it names the setting `key`.
    """
    if config.learner.zero_stage < 3:
        policy = world.raise_on_all_ranks(lambda: load(config))
    else:
        policy = _load_in_pieces(config, world, load, key)
    policy.group = world.sequence
    return policy


def _load_in_pieces(config: Config, world: World, load: Callable[..., Any], key: str) -> Any:
    def shape_only() -> Any:
        check_model_folder(config.model.path, key=key)
        return load(config, weights=False)

    # Ranks that load in pieces wait for each other at every layer, so all must know of a problem on one of them before.
    shape = world.raise_on_all_ranks(shape_only)
    with _divides_parameters(config.learner, world):
        policy = load(config)
    buffers = dict(policy.model.named_buffers())
    for name, buffer in shape.model.named_non_persistent_buffers():
        # `zero.Init` also casts computed buffers to the parameters' type, such as rotary frequencies to bfloat16.
        buffers[name].data = buffer.to(world.device)
    return policy


@contextmanager
def _divides_parameters(config: LearnerConfig, world: World) -> Iterator[None]:
    """Within the block `from_pretrained` creates each layer under `zero.Init`, which keeps this rank's part of it.

    Rank 0 reads the files, and hands each layer to the others.
    """
    join_deepspeed(world)
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    # transformers uses these settings for as long as the object exists.
    settings = HfDeepSpeedConfig(deepspeed_config(config, world.device.type == "cuda", world.size))
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del settings


def learning_rate(step: int, total: int, config: LearnerConfig) -> float:
    """Learning rate of optimizer step `step` (from 0) of `total`: linear warm-up, then the chosen shape."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.lr
    done = min(1.0, (step - config.warmup_steps) / max(1, total - config.warmup_steps))
    shape = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)
