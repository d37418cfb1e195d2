"""Rows that a family of reasoning-gym generates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from common.errors import UserError
from common.gym_families import make_family, score_answer
from sampler.prompts.row import BadRow, Rows

PREFIX = "reasoning_gym:"
CHECKED = 4  # items of a family whose own answers are verified when it is opened


class GymRows(Rows):
    """Items of one family, generated whenever they are asked for; item i is always the same.

    A row has `prompt`, `answer`, `family`, and `entry`: what the family's verifier needs, as JSON.

    Args:
        source: `reasoning_gym:` and the name of a family.
        split: different splits have different items, even with the same seed.
        options: the family's own (`min_terms`, ...), and two that every family has: `size` (500), the number of items,
            and `seed` (0).

    Raises:
        UserError: there is no such family, it does not take the options, or its verifier does not accept its own
            answers, so that no reward could be trusted.
    """

    def __init__(self, source: str, split: str, options: Mapping[str, Any]) -> None:
        self._family = source.removeprefix(PREFIX)
        field = f"data {source}"
        self._options = {name: value for name, value in options.items() if name not in ("seed", "size")}
        self._items = make_family(self._family, {"size": 500, **options, "seed": _seed(split, options, field)}, field)
        self._name = f"{source} ({split})"
        self._check(field)

    def __len__(self) -> int:
        return int(self._items.size)

    def __getitem__(self, i: int) -> dict[str, Any]:
        try:
            item = self._items[i]
        except Exception as error:  # a family may raise anything on options that it cannot fulfil
            text = f"cannot be generated ({type(error).__name__}: {error})"
            raise BadRow(text, reason="cannot be generated") from None
        entry = {**item, "options": self._options} if self._options else item
        return {
            "prompt": item["question"],
            "answer": item["answer"],
            "family": self._family,
            "entry": json.dumps(entry, ensure_ascii=False, default=str),
        }

    def where(self, i: int) -> str:
        return f"{self._name} item {i + 1}"

    def _check(self, field: str) -> None:
        for i in range(min(CHECKED, len(self))):
            try:
                row = self[i]
            except BadRow as problem:
                raise UserError(f"{field}: item {i + 1} {problem}") from None
            score = score_answer(self._family, str(row["answer"]), json.loads(row["entry"]))
            if score < 1:
                raise UserError(
                    f"{field}: family {self._family!r} of reasoning-gym cannot be used: its verifier gives {score:g} "
                    f"for its own answer {str(row['answer'])[:80]!r}"
                )


def _seed(split: str, options: Mapping[str, Any], field: str) -> int:
    """The family's seed for a split. Item i has seed + i, so the seeds of splits must be far apart."""
    seed = options.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise UserError(f"{field}: seed = {seed!r} is not an integer of 0 or more")
    # Some families take no more than 32 bits.
    return int.from_bytes(blake2b(f"{split} {seed}".encode(), digest_size=4).digest()) >> 1
