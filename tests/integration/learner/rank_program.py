"""One rank of a learner, without Redis: trains on made-up batches and leaves what it found in files.

The keys of a job: model, folder, learner (its
section), samples, seed, steps, out; and if wanted load, save (versions), begin (a version that is written while
training goes on to the end), start (the first version), skip (versions
never trained on), age and far (see `job_batch`), gradients_only (no step is taken), watch (gradients of every
step), advantage (of all samples), turns (see `job_batch`), repeat (the same batch in every step), full (the
disk has no room in the end), fills_up (the disk takes so many bytes of a file, and no more, in the end, on the last
rank), forged (the
checkpoint of this version names code to be run when it is read), whole (models are loaded whole on every rank, also
under ZeRO 3), inspect (versions whose fp32 weights and Adam's state are left, whole), refused (loading ends with a
`UserError`).
"""

from __future__ import annotations

import copy
import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
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
from learner.checkpoint import Checkpoints
from learner.checkpoint_files import paths_in, read_metadata, sum_up, write_metadata
from learner.engine import optimizer_step
from learner.model import load_policy
from learner.trainer import Trainer
from learner.world import World
from tests.support.learner import job_batch, learner_config, make_batch


def work(job: dict[str, Any], world: World) -> None:
    """Train as specified; rank 0 writes `out`: weights, metrics of every step, gradients of the last one."""
    torch.manual_seed(0)
    config = learner_config(job["model"], job["folder"], **job["learner"])
    found: dict[str, Any] = {"metrics": [], "watched": [], "warnings": []}

    def keep_gradients(engine: Any, settings: Any, factor: float = 1.0) -> float:
        named = engine.module.named_weights()
        # Clones: the buffers behind them are cleared and used again.
        found["gradients"] = {name: safe_get_full_grad(parameter).clone() * factor for name, parameter in named}
        if not job.get("watch"):
            return 0.0
        found["watched"].append(found["gradients"])
        return optimizer_step(engine, settings, factor)

    watches = job.get("gradients_only") or job.get("watch")
    trainers.optimizer_step = keep_gradients if watches else optimizer_step
    with loads_whole() if job.get("whole") else nullcontext():
        trainer = Trainer(config, world)
    checkpoints = Checkpoints(config, trainer)
    if "forged" in job:
        forge(checkpoints.folder / f"step_{job['forged']}", job["out"])
        with refusal(found):
            checkpoints.load()
    if job.get("refused"):
        with refusal(found):
            checkpoints.load()
        if world.is_main:
            torch.save(found, job["out"])
        return
    version = found["loaded"] = checkpoints.load() if job.get("load") else job.get("start", 0)
    inspected = job.get("inspect", [])
    found["states"] = {version: whole_state(trainer)} if version in inspected else {}
    while version < job["steps"]:
        payloads, advantages = job_batch(job, version)
        batch = make_batch(config, payloads, advantages, version=version, rank=world.rank, ranks=world.size)
        if version not in job.get("skip", []):
            with capture_logs() as logs:
                found["metrics"].append(trainer.train(batch))
            found["warnings"] += [entry for entry in logs if entry["log_level"] == "warning"]
        version += 1
        if version in job.get("save", []):
            checkpoints.save(version)
        if version == job.get("begin"):
            checkpoints.begin(version)
        if version in inspected:
            found["states"][version] = whole_state(trainer)
    checkpoints.finish()
    if job.get("full"):
        with patch("shutil.disk_usage", return_value=SimpleNamespace(free=1000)), refusal(found):
            checkpoints.save(version + 1)
    if "fills_up" in job:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if world.rank == world.size - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (job["fills_up"], hard))
        with refusal(found):
            checkpoints.save(version + 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    found["weights"] = {name: tensor.clone() for name, tensor in trainer.weights()}
    if world.is_main:
        torch.save(found, job["out"])
    trainer.engine.destroy()


def whole_state(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """Each trained parameter's fp32 weights and Adam's state, whole."""
    engine, optimizer = trainer.engine, trainer.engine.optimizer
    named = {name: one for name, one in engine.module.named_parameters() if one.requires_grad}
    if engine.zero_optimization_stage() == 0:
        states = {name: {"fp32": one.detach()} | optimizer.state[one] for name, one in named.items()}
    else:
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
            patches.enter_context(patch.object(module, "load_on_ranks", lambda config, _: load_policy(config)))
        yield


@contextmanager
def refusal(found: dict[str, Any]) -> Iterator[None]:
    """Keeps the `UserError` that the block ends with."""
    try:
        yield
    except UserError as error:
        found["refused"] = str(error)


class Code:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.mark,)


def forge(checkpoint: Path, out: str) -> None:
    """Replace the model's state by code, as whoever can write to the folder could: the sums are right."""
    state = checkpoint / "deepspeed" / "mp_rank_00_model_states.pt"
    torch.save({"module": Code(f"{out}.ran")}, state)
    metadata = read_metadata(checkpoint)
    write_metadata(checkpoint, metadata | {"files": sum_up(checkpoint, paths_in(checkpoint))})
