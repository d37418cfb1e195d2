"""One rank of a learner, without Redis: trains on made-up batches and leaves its results in files.

The keys of a job: model, folder, learner (its section), samples, seed, steps, out; and where wanted:

- start: the first version; skip: versions never trained on; gradients_only: no step is taken;
- age, far, infinite, turns, advantage, repeat, taught: what the batches are, see `job_batch`;
- load, save: whether to begin with the newest checkpoint, versions to write; begin: one that is written while training
  goes on to the end;
- watch: leaves the gradients of every step; inspect: versions whose fp32 weights and Adam's state are left, whole;
- full: the disk has no room in the end; fills_up: in the end the last rank's disk takes so many bytes of a file;
- forged: the checkpoint of this version names code to be run when it is read; refused: loading is all it does;
- whole: models are loaded whole on every rank, also under ZeRO 3.
"""

from __future__ import annotations

import copy
import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
from structlog.testing import capture_logs

from common.errors import UserError
from learner import reference as references
from learner import trainer as trainers
from learner.batch.demonstrations import Demonstrations, folder_of
from learner.checkpoint.checkpoint import Checkpoints
from learner.checkpoint.files import paths_in, read_metadata, sum_up, write_metadata
from learner.policy.engine import full_weights, optimizer_step
from learner.policy.model import load_policy
from learner.ranks.world import World
from learner.trainer import Trainer
from tests.support.learner import (
    DEMONSTRATIONS,
    Call,
    job_batch,
    job_critic,
    learner_config,
    make_batch,
    make_demonstrations,
)


def work(job: dict[str, Any], world: World) -> None:
    """Train as specified; rank 0 writes `out`: weights, metrics of every step, gradients of the last one."""
    torch.manual_seed(0)
    config = learner_config(job["model"], job["folder"], **job["learner"])
    world = world.in_groups(config.learner.sequence_parallel)
    left: dict[str, Any] = {"metrics": [], "watched": [], "warnings": [], "states": {}}

    def keep_gradients(engine: Any, settings: Any, factor: float = 1.0) -> float:
        named = engine.module.named_weights()
        # Clones: the buffers behind them are cleared and used again.
        left["gradients"] = {name: safe_get_full_grad(parameter).clone() * factor for name, parameter in named}
        left["watched"].append(left["gradients"])
        return optimizer_step(engine, settings, factor) if job.get("watch") else 0.0

    watches = job.get("gradients_only") or job.get("watch")
    trainers.optimizer_step = keep_gradients if watches else optimizer_step
    if config.algorithm.demonstrations.data is not None and world.is_main:
        Demonstrations.of(make_demonstrations(DEMONSTRATIONS)).save(folder_of(config, "mixed"))
    world.barrier()
    with loads_whole() if job.get("whole") else nullcontext():
        trainer = Trainer(config, world)
    checkpoints = Checkpoints(config, trainer)
    if "forged" in job:
        forge(checkpoints.folder / f"step_{job['forged']}", job["out"])
    if "forged" in job or job.get("refused"):
        with refusal(left):
            checkpoints.load()
    else:
        train(job, trainer, checkpoints, left)
    if world.is_main:
        torch.save(left, job["out"])


def train(job: dict[str, Any], trainer: Trainer, checkpoints: Checkpoints, left: dict[str, Any]) -> None:
    config, world = trainer.config, trainer.world
    version = left["loaded"] = checkpoints.load() if job.get("load") else job.get("start", 0)

    def inspect() -> None:
        if version in job.get("inspect", []):
            left["states"][version] = whole_state(trainer)

    inspect()
    while version < job["steps"]:
        payloads, advantages = job_batch(job, version)
        share = {"rank": world.share, "ranks": world.shares}
        reads = {"packer": replace(trainer.packer(), share_prefixes=False)}
        if trainer.critic is not None:
            reads["critic"] = job_critic(job, version)
        batch = make_batch(config, payloads, advantages, version=version, **share, **reads)
        if version not in job.get("skip", []):
            with capture_logs() as logs:
                left["metrics"].append(trainer.train(batch))
            left["warnings"] += [entry for entry in logs if entry["log_level"] == "warning"]
        version += 1
        if version in job.get("save", []):
            checkpoints.save(version)
        if version == job.get("begin"):
            checkpoints.begin(version)
        inspect()
    checkpoints.finish()
    if job.get("full"):
        with patch("shutil.disk_usage", return_value=SimpleNamespace(free=1000)), refusal(left):
            checkpoints.save(version + 1)
    if "fills_up" in job:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if world.rank == world.size - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (job["fills_up"], hard))
        with refusal(left):
            checkpoints.save(version + 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    left["weights"] = {name: tensor.clone() for name, tensor in trainer.weights()}
    if trainer.critic is not None:
        left["critic"] = {"weights": {name: tensor.clone() for name, tensor in full_weights(trainer.critic.engine)}}
    trainer.engine.destroy()


def whole_state(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """Each trained parameter's fp32 weights and Adam's state, whole."""
    engine, optimizer = trainer.engine, trainer.engine.optimizer
    named = {name: one for name, one in engine.module.named_parameters() if one.requires_grad}
    if engine.zero_optimization_stage() == 0:
        return copy.deepcopy({name: {"fp32": one.detach()} | optimizer.state[one] for name, one in named.items()})
    if engine.zero_optimization_stage() < 3:
        optimizer._lazy_init_hp_params_optimizer_state()
    (first, *_) = optimizer.optimizer.state.values()
    states = {
        name: {"fp32": safe_get_full_fp32_param(one), "step": first["step"]}
        | {key: safe_get_full_optimizer_state(one, key) for key in ("exp_avg", "exp_avg_sq")}
        for name, one in named.items()
    }
    return copy.deepcopy(states)


@contextmanager
def loads_whole() -> Iterator[None]:
    """Within the block every rank loads whole models, under ZeRO 3 too."""
    with ExitStack() as patches:
        for module in (trainers, references):
            patches.enter_context(patch.object(module, "load_on_ranks", lambda config, _, *__: load_policy(config)))
        yield


@contextmanager
def refusal(left: dict[str, Any]) -> Iterator[None]:
    """Keeps the `UserError` that the block ends with."""
    try:
        yield
    except UserError as error:
        left["refused"] = str(error)


def forge(checkpoint: Path, out: str) -> None:
    """Replace the model's state by code, as somebody who can write to the folder could: the sums are right."""
    torch.save({"module": Call(os.mkdir, f"{out}.ran")}, checkpoint / "deepspeed" / "mp_rank_00_model_states.pt")
    sums = sum_up(checkpoint, paths_in(checkpoint))
    write_metadata(checkpoint, read_metadata(checkpoint) | {"files": sums})
