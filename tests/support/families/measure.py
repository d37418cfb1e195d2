"""Measures one family: `python -m tests.support.families.measure FAMILY` prints a line of JSON for each part.

Each part is measured whatever became of the others, and printed at once, so that the death of the process loses only
the part that it died of.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from common.errors import first_line
from learner.checkpoint.export import export_model
from learner.policy.forward_check import check_policy
from learner.policy.model import with_engine_window
from learner.ranks.world import start
from learner.trainer import Trainer
from tests.support.agreement import Update, both_sides, difference, move, sample, with_engine, with_lora
from tests.support.families import FAMILIES, save_tiny
from tests.support.packed_rows import alone, packed, some_rows

LENGTHS = [9, 66, 5]  # linear attention computes chunks of 64 tokens


def measure(family: str, folder: Path) -> None:
    """Print differences of log-probs between learner, transformers, engine and export, or why there are none."""
    save_tiny(folder / "model", family)
    config, world = both_sides(folder, FAMILIES[family].dtype), start()

    def trainer(serve: str | None = None) -> Trainer:
        return Trainer(with_lora(config, serve), world)

    async def whole(update: Update) -> None:
        with part("engine") as differences:
            await updates(update, trainer(), 2, differences)
        with part("merged") as differences:
            await updates(update, trainer("merged"), 1, differences)

    async def beside(update: Update) -> None:
        await updates(update, trainer("adapter"), 1, adapter)

    with part("learner") as differences:
        differences.append(packed_or_alone(trainer()))
    with part("export") as differences:
        differences.append(learner_or_export(trainer(), folder / "exported"))
    with part("start"):
        asyncio.run(with_engine(config, whole))
    with part("adapter") as adapter:
        asyncio.run(with_engine(with_lora(config, "adapter"), beside))


@contextmanager
def part(name: str) -> Iterator[list[float]]:
    """Print what the block puts into the list, or the first line of the error that ends it."""
    differences: list[float] = []
    try:
        yield differences
        print(json.dumps({name: differences}), flush=True)
    except Exception as error:
        print(json.dumps({name: first_line(error) or type(error).__name__}), flush=True)


@torch.no_grad()
def packed_or_alone(trainer: Trainer) -> float:
    """Largest |difference| of log-probs between packed rows and transformers' rows one by one."""
    check_policy(trainer.engine, trainer.config.model.path)
    rows = some_rows(trainer.policy, LENGTHS)
    return float((packed(trainer.policy, rows) - alone(trainer.policy, rows)).abs().max())


@torch.no_grad()
def learner_or_export(trainer: Trainer, folder: Path) -> float:
    """Largest |difference| of log-probs between the learner and what transformers reads of its export."""
    move(trainer)
    export_model(trainer, folder)()
    rows = some_rows(trainer.policy, LENGTHS)
    ours = packed(trainer.policy, rows)
    config = AutoConfig.from_pretrained(folder)
    with_engine_window(config)
    exported = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager"
    )
    trainer.policy.model = exported.eval()
    return float((ours - alone(trainer.policy, rows)).abs().max())


async def updates(update: Update, trainer: Trainer, count: int, differences: list[float]) -> None:
    """Note the mean |difference| of log-probs of sampled tokens before and after each of `count` updates."""
    if not trainer.policy.has_adapter:
        differences.append(difference(trainer, await sample(update.engine)))
    for version in range(1, count + 1):
        move(trainer)
        await update(version, trainer)
        differences.append(difference(trainer, await sample(update.engine)))


def main(family: str) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        measure(family, Path(folder))


if __name__ == "__main__":
    main(sys.argv[1])
