"""The tokens of one response: msgpack around raw little-endian arrays, read by the learner alone."""

from __future__ import annotations

from dataclasses import dataclass

import msgpack
import numpy as np

from common.messages import SCHEMA, InvalidMessage

TOKEN = np.dtype("<i4")
LOGPROB = np.dtype("<f4")


@dataclass(frozen=True, slots=True)
class Payload:
    """One episode's tokens.

    Attributes:
        token_ids: prompt, responses and tool results as the model saw them, int32 [T].
        model_spans: half-open ranges of the tokens the model sampled, int32 [S, 2], ascending.
        logprobs: log pi_rollout of the model tokens, in order, float32 [M].
        version_spans: (weight version, start, end) over the model tokens, int32 [V, 3], covering all M.
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
        schema, tokens, spans, logprobs, versions = msgpack.unpackb(data)
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
    """The payload, or None where it is missing or invalid: one bad sample stops nobody."""
    try:
        return decode_payload(data) if data else None
    except InvalidMessage:
        return None


def _check(payload: Payload) -> None:
    spans, versions = payload.model_spans, payload.version_spans
    borders = spans.ravel()
    if len(spans) and (borders[0] < 0 or borders[-1] > len(payload.token_ids) or np.any(np.diff(borders) < 0)):
        raise InvalidMessage("Payload: model spans overlap or leave the tokens")
    sampled = int((spans[:, 1] - spans[:, 0]).sum())
    if sampled != len(payload.logprobs):
        raise InvalidMessage(f"Payload: {sampled} model tokens but {len(payload.logprobs)} log-probs")
    if not np.isfinite(payload.logprobs).all():
        raise InvalidMessage("Payload: log-probs are not finite")
    starts, ends = versions[:, 1], versions[:, 2]
    covered = (
        len(versions) > 0
        and starts[0] == 0
        and ends[-1] == sampled
        and np.array_equal(starts[1:], ends[:-1])
        and bool(np.all(ends >= starts))
    )
    if sampled and not covered:
        raise InvalidMessage("Payload: version spans do not cover the model tokens")
