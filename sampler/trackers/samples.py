"""A few episodes of an evaluation, as a table for trackers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.answers import answer_text

EVALUATED = "validation/reward"  # an entry with this metric is that of a complete evaluation
COLUMNS = ("prompt", "response", "reference", "reward")
MOST = 16  # rows
LONGEST = 10_000  # characters of a cell


def samples(folder: Path, version: int) -> list[list[Any]]:
    """The first answers to the evaluation of a version, as rows of `COLUMNS`; empty if their file is gone.

    All evaluations show the same prompts.
    """
    rows: list[list[Any]] = []
    try:
        with (folder / "validation_data" / f"{version}.jsonl").open("rb") as file:
            for line in file:
                if len(rows) == MOST:
                    break
                fields = json.loads(line)
                if fields["status"] == "ok":
                    texts = fields.get("input"), fields.get("output"), fields.get("gts")
                    rows.append([*map(_text, texts), fields["reward"]])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return rows  # removed to save space, or discarded meanwhile
    return rows


def _text(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(one, dict) for one in value):
        text = "\n".join(f"{one.get('role')}: {one.get('content')}" for one in value)
    else:
        text = "" if value is None else answer_text(value)
    return text[:LONGEST]
