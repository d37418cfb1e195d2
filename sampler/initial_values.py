"""Offline scores to start the value tracker from: JSON {prompt text: [scores]}, or JSON lines of scored responses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.errors import UserError
from sampler.prompts import PromptSet
from sampler.score_rows import read_score_rows
from sampler.tracker import ValueTracker


def apply_initial_values(path: str, tracker: ValueTracker, prompts: PromptSet, log: Any) -> int:
    """Initialise the tracker from a file; returns how many prompts it had scores for.

    Raises:
        UserError: the file cannot be read, is of another form, or a score is outside the reward range.
    """
    scores_by_text = _read(Path(path), log)
    for text, scores in scores_by_text.items():
        if not isinstance(scores, list) or not all(isinstance(score, int | float) for score in scores):
            raise UserError(f"sampler.initial_values {path}: scores of {text[:60]!r} are not a list of numbers")
    known = {prompt_id: scores_by_text[text] for text, prompt_id in prompts.texts() if text in scores_by_text}
    try:
        tracker.initialize(known)
    except ValueError as error:
        raise UserError(f"sampler.initial_values {path}: {error}") from None
    log.info("initial values read", file=path, prompts=len(known), without=len(prompts) - len(known))
    if not known:
        log.warning("initial values are of other prompts", file=path, example=next(iter(scores_by_text), "")[:60])
    return len(known)


def _read(path: Path, log: Any) -> dict[str, Any]:
    """Scores by prompt text, whichever form the file has."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            scores, problems = read_score_rows(text.split("\n"))
            if problems:
                log.warning("rows of initial values left out", file=str(path), rows=len(problems), first=problems[0])
            return scores
        scores = json.loads(text)
    except OSError as error:
        raise UserError(f"sampler.initial_values {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"sampler.initial_values {path} is not JSON: {error}") from None
    if not isinstance(scores, dict):
        raise UserError(f"sampler.initial_values {path} must be a JSON object {{prompt text: [scores]}}")
    return scores
