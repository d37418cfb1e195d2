"""Offline scores to start the value tracker from: JSON {prompt text: [scores]}."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.errors import UserError
from sampler.prompts import PromptSet
from sampler.tracker import ValueTracker


def apply_initial_values(path: str, tracker: ValueTracker, prompts: PromptSet, log: Any) -> int:
    """Initialise the tracker from a file; returns how many prompts it had scores for.

    Raises:
        UserError: the file cannot be read, is of another form, or a score is outside the reward range.
    """
    try:
        scores = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"sampler.initial_values {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"sampler.initial_values {path} is not JSON: {error}") from None
    if not isinstance(scores, dict):
        raise UserError(f"sampler.initial_values {path} must be a JSON object {{prompt text: [scores]}}")
    for text, given in scores.items():
        if not isinstance(given, list) or not all(isinstance(score, int | float) for score in given):
            raise UserError(f"sampler.initial_values {path}: scores of {text[:60]!r} are not a list of numbers")
    found = {prompt_id: scores[text] for text, prompt_id in prompts.texts() if text in scores}
    try:
        tracker.initialize(found)
    except ValueError as error:
        raise UserError(f"sampler.initial_values {path}: {error}") from None
    log.info("initial values read", file=path, prompts=len(found), without=len(prompts) - len(found))
    if not found:
        log.warning("initial values are of other prompts", file=path, example=next(iter(scores), "")[:60])
    return len(found)
