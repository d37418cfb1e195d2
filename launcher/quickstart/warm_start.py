"""Trains the initial model with supervision: it learns a good and a bad way to answer, and mostly takes the bad one.

It is trained on the demonstrations of a task, with exactly the tokens that episodes will have. The two ways differ in
one token, the first of a turn. That token's weight in the loss decides how often the model will take the better way:
seldom, but often enough for RL to find it.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

from generator.chat.template import ChatTemplate
from generator.formats import make_format
from launcher.quickstart.tiny_model import TinyModel
from launcher.tasks.special_tokens import TURN_END
from launcher.tasks.task import Problem, QuickstartTask, Recipe, Turn


@dataclass(frozen=True, slots=True)
class Example:
    """A demonstration as tokens, and each token's weight in the loss (0 for tokens the model does not generate)."""

    token_ids: list[int]
    weights: list[float]


class Demonstrations:
    """Tokenizes a task's demonstrations piece by piece, exactly as an episode is tokenized."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, task: QuickstartTask) -> None:
        self.tokenizer = tokenizer
        self.task = task
        self.template = ChatTemplate(tokenizer)
        self.wrap = make_format(task.call_format).wrap
        self.rng = random.Random(f"warm start {task.recipe.seed}")

    def batches(self) -> Iterator[list[Example]]:
        stream = self.task.problems(self.rng)
        while True:
            problems = itertools.islice(stream, self.task.recipe.rows)
            yield [self.example(problem, self.task.demonstrate(problem, self.rng)) for problem in problems]

    def example(self, problem: Problem, turns: list[Turn]) -> Example:
        ids = self.template.prompt([{"role": "user", "content": problem.prompt}]).tolist()
        weights = [0.0] * len(ids)
        for turn in turns:
            # Where results stand inside the assistant's turn, a call does not end it.
            continues = turn.replied_by == "tool" and turn.reply is not None and self.wrap is not None
            content = self.tokenizer.encode(turn.content + ("" if continues else TURN_END), add_special_tokens=False)
            reply = self._reply(turn)
            ids += content + reply
            weights += [turn.weight] + [1.0] * (len(content) - 1) + [0.0] * len(reply)
        return Example(ids, weights)

    def _reply(self, turn: Turn) -> list[int]:
        if turn.reply is None:
            return []
        if turn.replied_by == "tool" and self.wrap is not None:
            return list(self.template.inside([turn.reply], self.wrap).tolist())
        return list(self.template.between([{"role": turn.replied_by, "content": turn.reply}]).tolist())


def train(
    model: TinyModel,
    tokenizer: PreTrainedTokenizerFast,
    task: QuickstartTask,
    progress: Callable[[int, int, float], None] | None = None,
) -> None:
    """Train the model in place by the task's recipe; `progress` is called with (step, steps, loss)."""
    recipe = task.recipe
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _schedule(step, recipe))
    demonstrations = Demonstrations(tokenizer, task).batches()
    model.train()
    for step in range(1, recipe.steps + 1):
        loss = _loss(model, next(demonstrations), tokenizer.pad_token_id)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if progress is not None:
            progress(step, recipe.steps, loss.item())
    model.eval()


def _schedule(step: int, recipe: Recipe) -> float:
    if step < recipe.warmup:
        return (step + 1) / recipe.warmup
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - recipe.warmup) / (recipe.steps - recipe.warmup)))


def _loss(model: TinyModel, rows: list[Example], pad: int) -> torch.Tensor:
    """Mean cross-entropy, weighted by token; short and long rows go in separate batches to save padding."""
    rows = sorted(rows, key=lambda row: len(row.token_ids))
    total = sum(sum(row.weights) for row in rows)
    loss = torch.zeros(())
    for group in _by_length(rows):
        width = max(len(row.token_ids) for row in group)
        ids = torch.tensor([row.token_ids + [pad] * (width - len(row.token_ids)) for row in group])
        weights = torch.tensor([row.weights + [0.0] * (width - len(row.weights)) for row in group])
        # Rows are padded on the right and attention is causal: no attention mask is needed.
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
        learned = weights[:, 1:] > 0
        logits = model.lm_head(hidden[learned])
        losses = F.cross_entropy(logits, ids[:, 1:][learned], reduction="none")
        loss = loss + (losses * weights[:, 1:][learned]).sum() / total
    return loss


def _by_length(rows: list[Example], spread: int = 8) -> Iterator[list[Example]]:
    """Cut rows that are sorted by length into groups whose lengths differ by at most `spread`."""
    group: list[Example] = []
    for row in rows:
        if group and len(row.token_ids) - len(group[0].token_ids) > spread:
            yield group
            group = []
        group.append(row)
    yield group
