"""A short supervised start: the model learns both ways to answer, and mostly takes the worse one.

Some rows call the calculator and copy its result; the others guess at once. How often the
model will do the one or the other is decided by the one token in which they differ, the first of the
answer, so its weight in the loss sets the starting policy: mostly guesses, with the tool within reach.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from launcher import arithmetic
from launcher.arithmetic import Problem
from launcher.tiny_model import CALL_END, CALL_START, TURN_END
from launcher.warm_start_cache import Recipe


@dataclass(frozen=True, slots=True)
class Row:
    """One conversation as tokens, and the weight of each token in the loss (0 where it is given)."""

    token_ids: list[int]
    weights: list[float]


class Demonstrations:
    """Turns problems into conversations, tokenised piece by piece exactly as an episode is."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> None:
        self.tokenizer = tokenizer
        self.recipe = recipe
        self.rng = random.Random(f"warm start {recipe.seed}")
        self.tool_weight = recipe.tool_share / recipe.tool_rows
        self.guess_weight = (1 - recipe.tool_share) / (1 - recipe.tool_rows)

    def batches(self) -> Iterator[list[Row]]:
        """Endless batches of different problems."""
        stream = arithmetic.problems(self.rng)
        while True:
            yield [self.row(problem) for problem in itertools.islice(stream, self.recipe.rows)]

    def row(self, problem: Problem) -> Row:
        """One problem, answered in one of the two ways."""
        if self.rng.random() < self.recipe.tool_rows:
            return self.tool_row(problem)
        return self._join([self._prompt(problem)], [self._guess(problem) + TURN_END], self.guess_weight)

    def tool_row(self, problem: Problem) -> Row:
        """A call of the calculator, its result, and the answer copied from it."""
        call = CALL_START + problem.expression + CALL_END
        given = [self._prompt(problem), self._tool_turn(problem.answer)]
        return self._join(given, [call + TURN_END, problem.answer + TURN_END], self.tool_weight)

    def _prompt(self, problem: Problem) -> str:
        return self._render([{"role": "user", "content": problem.prompt}])

    def _tool_turn(self, result: str) -> str:
        return "\n" + self._render([{"role": "tool", "content": result}])

    def _render(self, messages: list[dict[str, str]]) -> str:
        return str(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))

    def _guess(self, problem: Problem) -> str:
        """About the right size; exact only now and then."""
        answer = int(problem.answer)
        spread = max(1.0, abs(answer) * self.recipe.guess_error)
        return str(round(answer + self.rng.uniform(-spread, spread)))

    def _join(self, given: list[str], said: list[str], first_weight: float) -> Row:
        ids: list[int] = []
        weights: list[float] = []
        for before, turn in zip(given, said, strict=True):
            context = self.tokenizer.encode(before, add_special_tokens=False)
            own = self.tokenizer.encode(turn, add_special_tokens=False)
            ids += context + own
            weights += [0.0] * len(context) + [1.0] * len(own)
        weights[weights.index(1.0)] = first_weight
        return Row(ids, weights)


def train(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    recipe: Recipe,
    progress: Callable[[int, int, float], None] | None = None,
) -> None:
    """Supervised training in place; `progress` gets (step, steps, loss)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _schedule(step, recipe))
    demonstrations = Demonstrations(tokenizer, recipe).batches()
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


def _loss(model: Qwen3ForCausalLM, rows: list[Row], pad: int) -> torch.Tensor:
    """Weighted cross-entropy per weighted token; short and long rows go separately, so that few are padding."""
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


def _by_length(rows: list[Row], spread: int = 8) -> Iterator[list[Row]]:
    """Cut a list sorted by length where lengths differ by more than `spread`."""
    group: list[Row] = []
    for row in rows:
        if group and len(row.token_ids) - len(group[0].token_ids) > spread:
            yield group
            group = []
        group.append(row)
    yield group
