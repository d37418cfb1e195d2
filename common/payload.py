"""The tokens of one response: msgpack around raw little-endian arrays, read by the learner alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import msgpack
import numpy as np

from common.messages import SCHEMA, InvalidMessage
from common.unpack import unpack

TOKEN = np.dtype("<i4")
LOGPROB = np.dtype("<f4")
MAX_PAYLOAD = 256 << 20  # bytes
VALUES = 6  # schema and four arrays, and what holds them
# A log-prob is at most 0, but for the rounding of a low precision; no engine's logits differ by more than this.
MOST, LEAST = 0.01, -1e5


@dataclass(frozen=True, slots=True)
class Payload:
    """One episode's tokens.

    Attributes:
        token_ids: prompt, responses and tool results as the model saw them, int32 [T].
        model_spans: half-open ranges of the tokens the model sampled, int32 [S, 2], ascending.
        logprobs: log pi_rollout of the model tokens, in order, float32 [M].
        version_spans: (weight version, start, end) over the model tokens, int32 [V, 3], covering all M; no version is
            negative.
    """

    token_ids: np.ndarray
    model_spans: np.ndarray
    logprobs: np.ndarray
    version_spans: np.ndarray

    def mask(self) -> np.ndarray:
        """True where the model sampled the token, bool [T]."""
        mask = np.zeros(len(self.token_ids), dtype=bool)
        for start, end in self.model_spans:
            mask[start:end] = True
        return mask

    def versions(self) -> np.ndarray:
        """Weight version of each model token, int32 [M]."""
        lengths = self.version_spans[:, 2] - self.version_spans[:, 1]
        return np.repeat(self.version_spans[:, 0], lengths)


def encode_payload(payload: Payload) -> bytes:
    """Pack a payload: about 4 bytes a token and 4 more a model token."""
    return msgpack.packb(
        (
            SCHEMA,
            np.ascontiguousarray(payload.token_ids, TOKEN).data.cast("B"),
            np.ascontiguousarray(payload.model_spans, TOKEN).tobytes(),
            np.ascontiguousarray(payload.logprobs, LOGPROB).data.cast("B"),
            np.ascontiguousarray(payload.version_spans, TOKEN).tobytes(),
        )
    )


def decode_payload(data: bytes) -> Payload:
    """Unpack and check a payload; the arrays are views of `data`. Raises `InvalidMessage`."""
    try:
        schema, tokens, spans, logprobs, versions = unpack(data, MAX_PAYLOAD, VALUES)
        if schema != SCHEMA:
            raise InvalidMessage(f"Payload: schema {schema!r}, this process reads {SCHEMA}")
        payload = Payload(
            np.frombuffer(tokens, TOKEN),
            np.frombuffer(spans, TOKEN).reshape(-1, 2),
            np.frombuffer(logprobs, LOGPROB),
            np.frombuffer(versions, TOKEN).reshape(-1, 3),
        )
    except InvalidMessage:
        raise
    except Exception as error:
        raise InvalidMessage(f"Payload: not a payload ({error or type(error).__name__})") from None
    _check(payload)
    return payload


def decode_if_valid(data: bytes | None) -> Payload | None:
    """The payload, or None where it is missing or invalid, so that one bad sample stops nothing."""
    try:
        return decode_payload(data) if data else None
    except InvalidMessage:
        return None


def _check(payload: Payload) -> None:
    # Spans are few, and plain numbers are quicker than numpy on few.
    borders = [0, *payload.model_spans.ravel().tolist(), len(payload.token_ids)]
    if any(left > right for left, right in pairwise(borders)):
        raise InvalidMessage("Payload: model spans overlap or leave the tokens")
    sampled = sum(borders[2:-1:2]) - sum(borders[1:-1:2])
    if sampled != len(payload.logprobs):
        raise InvalidMessage(f"Payload: {sampled} model tokens but {len(payload.logprobs)} log-probs")
    if sampled:
        least, most = payload.logprobs.min().item(), payload.logprobs.max().item()
        if not (math.isfinite(least) and math.isfinite(most)):
            raise InvalidMessage("Payload: log-probs are not finite")
        if least < LEAST or most > MOST:
            raise InvalidMessage(f"Payload: log-probs from {least:g} to {most:g}; those of a model are {LEAST:g} to 0")
    if len(payload.token_ids) and payload.token_ids.min() < 0:
        raise InvalidMessage("Payload: negative token ids")
    covered = 0
    for version, start, end in payload.version_spans.tolist():
        if version < 0:
            raise InvalidMessage(f"Payload: version {version}")
        if start != covered or end < start:
            raise InvalidMessage(
                "Payload: version spans do not follow one another, so they do not cover the model tokens"
            )
        covered = end
    if covered != sampled:
        raise InvalidMessage("Payload: version spans do not cover the model tokens")
