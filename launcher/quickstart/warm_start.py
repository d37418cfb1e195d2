"""Trains the initial model with supervision: it learns a good and a bad way to answer, and mostly takes the bad one.

`spo sft`'s training gets the demonstrations of a task, with exactly the tokens that episodes will have. The two ways
differ in one token, the first of a turn. That token's weight in the loss decides how often the model will take the
better way: seldom, but often enough for RL to find it.
"""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from common.config import Config, parse_config
from common.files import checkpoint
from common.log import get_logger
from generator.chat.template import ChatTemplate
from generator.formats import make_format
from launcher.sft.rank import train_here
from launcher.sft.settings import supervised, with_steps
from launcher.tasks.special_tokens import TURN_END
from launcher.tasks.task import Problem, QuickstartTask, Turn
from learner.batch.demonstrations import Demonstration, Demonstrations, folder_of


class TaskDemonstrations:
    """Tokenizes a task's demonstrations piece by piece, exactly as an episode is tokenized."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, task: QuickstartTask) -> None:
        self.tokenizer = tokenizer
        self.task = task
        self.template = ChatTemplate(tokenizer)
        self.wrap = make_format(task.call_format).wrap
        self.rng = random.Random(f"warm start {task.recipe.seed}")

    def __iter__(self) -> Iterator[Demonstration]:
        for problem in self.task.problems(self.rng):
            yield self.example(problem, self.task.demonstrate(problem, self.rng))

    def example(self, problem: Problem, turns: list[Turn]) -> Demonstration:
        ids = self.template.prompt([{"role": "user", "content": problem.prompt}]).tolist()
        spans = []
        for turn in turns:
            # Where results stand inside the assistant's turn, a call does not end it.
            continues = turn.replied_by == "tool" and turn.reply is not None and self.wrap is not None
            content = self.tokenizer.encode(turn.content + ("" if continues else TURN_END), add_special_tokens=False)
            start, end = len(ids), len(ids) + len(content)
            spans += [(start, start + 1, turn.weight), (start + 1, end, 1.0)]
            ids += content + self._reply(turn)
        return Demonstration.of_spans(np.array(ids, np.int32), spans)

    def _reply(self, turn: Turn) -> list[int]:
        if turn.reply is None:
            return []
        if turn.replied_by == "tool" and self.wrap is not None:
            return list(self.template.inside([turn.reply], self.wrap).tolist())
        return list(self.template.between([{"role": turn.replied_by, "content": turn.reply}]).tolist())


def train(
    model: Path, output: Path, task: QuickstartTask, progress: Callable[[int, int, float], None] | None = None
) -> None:
    """Train a model folder by the task's recipe, and write the trained one; both have the task's tokenizer.

    Args:
        output: an empty folder.
        progress: called with (step, steps, loss).

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM.
    """
    work = output / "training"
    config, recipe = _config(model, work, task), task.recipe
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    rows = itertools.islice(TaskDemonstrations(tokenizer, task), recipe.steps * recipe.rows)
    Demonstrations.of([*rows]).save(folder_of(config, "train"))
    if not train_here(config, get_logger(), progress or (lambda *_: None)):
        raise KeyboardInterrupt
    for file in (checkpoint(config.run.folder, config.run.steps) / "hf").iterdir():
        shutil.move(file, output / file.name)
    shutil.rmtree(work)


def _config(model: Path, work: Path, task: QuickstartTask) -> Config:
    recipe = task.recipe
    adam: dict[str, Any] = {"lr": recipe.lr, "betas": [0.9, 0.98], "weight_decay": 0.01}
    adam |= {"torch_adam": True, "fused": True}
    config = parse_config(
        {
            "model": {"path": str(model), "dtype": "float32"},
            "data": {"train": "none.jsonl"},
            "run": {"output_dir": str(work), "log_to": []},
            "learner": {
                "dtype": "float32",
                "lr": recipe.lr,
                "schedule": "cosine",
                "warmup_steps": recipe.warmup - 1,
                "min_lr_ratio": 0.02,
                "token_budget": 1 << 14,
                "checkpoint_every": recipe.steps,
                "checkpoint_in_background": False,
                "deepspeed": {"optimizer": {"type": "AdamW", "params": adam}},
            },
            # Every step has demonstrations of its own, in the order in which they were made.
            "sft": {"steps": recipe.steps, "batch_size": recipe.rows, "shuffle": False},
        }
    )
    return with_steps(supervised(config), recipe.steps * recipe.rows)
