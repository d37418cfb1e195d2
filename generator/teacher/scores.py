"""From a teacher's scores of single rows to a payload that carries them."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np

from common.messages import Failure
from common.payload import LOGPROB, TOKEN, Payload, check_payload


class Scores(NamedTuple):
    """What a teacher gives each token of a row, given those before it.

    Attributes:
        logprobs: of the token (K = 1), or of the teacher's K likeliest in its place, float32 [T, K].
        ids: of the likeliest ones, int32 [T, K]; [T, 0] where the scores are of the tokens themselves.
    """

    logprobs: np.ndarray
    ids: np.ndarray


class Scorer(Protocol):
    """A teacher, wherever it computes."""

    async def score(self, token_ids: np.ndarray, top_k: int) -> Scores:
        """Score a row [T]; the first place counts nothing. Whatever it raises is a failed attempt."""
        ...

    async def watch(self, beat: float) -> None:
        """Until cancelled, look every `beat` seconds whether it still works; raises `EngineDied`."""
        ...

    async def close(self) -> None:
        """End what it has started."""
        ...


class WrongScores(Exception):
    """A teacher gave something else than the scores that were asked for; another attempt may help."""

    failure = Failure.TEACHER_FAILED


async def with_scores(payload: Payload, scorer: Scorer, top_k: int) -> Payload:
    """The payload with a teacher's scores of its model tokens; without any it stays as it is.

    Raises:
        WrongScores: they are of another number of tokens.
        InvalidMessage: they are not finite, or no log-probs.
        Exception: whatever the scorer raises.
    """
    parts = []
    for row in payload.rows():
        if len(row.logprobs) == 0:
            continue
        end = int(row.model_spans[-1, 1])  # nobody asks what comes after
        scores, columns = await scorer.score(row.token_ids[:end], top_k), max(1, top_k)
        if scores.logprobs.shape != (end, columns) or scores.ids.shape != (end, top_k):
            raise WrongScores(
                f"the teacher scored {len(scores.logprobs)} tokens with {scores.logprobs[:1].size} numbers each; "
                f"{end} with {columns} were asked for"
            )
        mask = row.mask()[:end]
        parts.append(Scores(scores.logprobs[mask], scores.ids[mask]))
    if not parts:
        return payload
    logprobs, ids = (np.concatenate(column) for column in zip(*parts, strict=True))
    scored = replace(payload, teacher_logprobs=logprobs.astype(LOGPROB), teacher_ids=ids.astype(TOKEN))
    check_payload(scored)
    return scored
