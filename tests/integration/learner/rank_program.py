"""One rank of a learner, without Redis: trains on made-up batches and leaves what it found in files.

Specification (JSON): model, folder, learner (its section), samples, seed, steps, load, save, gradients_only, out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from learner import trainer as trainers
from learner import world as ranks
from learner.checkpoint import Checkpoints
from learner.trainer import Trainer
from tests.learner_tools import learner_config, make_batch, make_samples


def main(spec: dict[str, Any]) -> None:
    """Train as specified; rank 0 writes `out` with gradients or weights, and the metrics of every step."""
    torch.manual_seed(0)
    config = learner_config(spec["model"], spec["folder"], **spec["learner"])
    world = ranks.start()
    found: dict[str, Any] = {"metrics": []}
    trainer = Trainer(config, world)
    if spec.get("gradients_only"):
        trainers.optimizer_step = lambda engine, _: found.update(gradients=gradients(engine)) or 0.0
    checkpoints = Checkpoints(config, trainer)
    version = checkpoints.load() if spec.get("load") else 0
    found["loaded"] = version
    while version < spec["steps"]:
        payloads, advantages = make_samples(spec["samples"], seed=spec["seed"] + version, version=version)
        batch = make_batch(config, payloads, advantages, version=version, rank=world.rank, ranks=world.size)
        found["metrics"].append(trainer.train(batch))
        version += 1
        if version in spec.get("save", []):
            checkpoints.save(version)
    found["weights"] = {name: tensor.clone() for name, tensor in trainer.weights()}
    if world.leads:
        torch.save(found, spec["out"])
    world.barrier()
    ranks.stop()


def gradients(engine: Any) -> dict[str, torch.Tensor]:
    """Accumulated gradient of each parameter, whole, before the optimizer step."""
    from deepspeed.utils import safe_get_full_grad

    return {name: safe_get_full_grad(parameter).clone() for name, parameter in engine.module.named_weights()}


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
