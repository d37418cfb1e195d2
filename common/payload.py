"""An episode's data as it is sent: tokens for the learner, and a record as text."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, pairwise
from typing import Any

import msgpack
import numpy as np

from common.messages import MAX_RECORD, SCHEMA, InvalidMessage
from common.unpack import unpack

TOKEN = np.dtype("<i4")
LOGPROB = np.dtype("<f4")
EXPERT_IDS = (np.dtype("<u1"), np.dtype("<u2"))  # of mixtures with up to 256 experts, and with more
MAX_PAYLOAD = 256 << 20  # bytes
VALUES = 20  # schema, five arrays, and the names and arrays of the optional parts, in their lists
# A log-prob exceeds 0 only by rounding in low precision; no engine's logits differ by more than 1e5.
MOST, LEAST = 0.01, -1e5
MAX_LINE = MAX_RECORD - 4096  # bytes of a line, so that it fits compressed or not
TOKENS = ("token_ids", "model_spans", "logprobs", "version_spans", "row_lengths", "experts")
NO_EXPERTS = -1  # the sum of a token whose experts are not known
_DEPTH = 20
# Characters and numbers that one call encodes, while all other threads of the process wait.
_CHARS = 1 << 16
_NUMBERS = 1024
_ENCODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
# JSON may hold these unescaped, and Python's splitlines, like many editors, takes them for line ends.
_LINE_ENDS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}


@dataclass(frozen=True, slots=True)
class Payload:
    """One episode's tokens: one row or several, one after another; tokens of different rows do not see each other."""

    token_ids: np.ndarray  # prompt, responses and tool results as the model saw them, int32 [T]
    model_spans: np.ndarray  # half-open ranges of the tokens the model sampled, int32 [S, 2], ascending
    logprobs: np.ndarray  # log pi_rollout of the model tokens, in order, float32 [M]
    # (weight version, start, end) over the model tokens, int32 [V, 3], covering all M; no version is negative.
    version_spans: np.ndarray
    # Tokens of each row, int32 [R], each at least 1; empty if there is one row.
    row_lengths: np.ndarray = field(default_factory=partial(np.empty, 0, TOKEN))
    # Ids of the experts that the engine chose in each layer for the first tokens of each row, uint8 or uint16 [E,
    # layers, k]; those of layers without experts have no meaning.
    experts: np.ndarray = field(default_factory=partial(np.empty, (0, 0, 0), EXPERT_IDS[0]))
    # How many tokens of each row have experts, int32 [R]; empty if no token has.
    expert_lengths: np.ndarray = field(default_factory=partial(np.empty, 0, TOKEN))
    # A teacher's log-probs at each model token, float32 [M, K]: of that token (K = 1), or of the teacher's K likeliest
    # in its place; empty if it was not scored.
    teacher_logprobs: np.ndarray = field(default_factory=partial(np.empty, (0, 0), LOGPROB))
    # Ids of the likeliest tokens, int32 [M, K]; empty if the scores are of the model's own tokens.
    teacher_ids: np.ndarray = field(default_factory=partial(np.empty, (0, 0), TOKEN))

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

    def expert_sums(self) -> list[int]:
        """`expert_sums` of each model token, at the position that predicts it [M]."""
        return [
            number
            for row in self.rows()
            for number in expert_sums(
                row.experts, np.arange(len(row.token_ids)) < len(row.experts), np.flatnonzero(row.mask()) - 1
            )
        ]

    def rows(self) -> list[Payload]:
        """Each row as a payload of its own."""
        if len(self.row_lengths) < 2:
            return [self]
        ends = np.cumsum(self.row_lengths, dtype=np.int64).tolist()
        spans_of_rows = np.split(self.model_spans, np.searchsorted(self.model_spans[:, 0], ends[:-1]))
        experts = np.split(self.experts, np.cumsum(self.expert_lengths)[:-1]) if len(self.expert_lengths) else []
        rows, start, sampled = [], 0, 0
        for number, (end, spans) in enumerate(zip(ends, spans_of_rows, strict=True)):
            before, sampled = sampled, sampled + int((spans[:, 1] - spans[:, 0]).sum())
            first = np.searchsorted(self.version_spans[:, 2], before, "right")
            last = np.searchsorted(self.version_spans[:, 2], sampled)
            versions = self.version_spans[first : last + 1].copy()
            versions[:, 1:] = versions[:, 1:].clip(before, sampled) - before
            row = Payload(self.token_ids[start:end], spans - start, self.logprobs[before:sampled], versions)
            if experts:
                row = replace(row, experts=experts[number], expert_lengths=self.expert_lengths[number : number + 1])
            if len(self.teacher_logprobs):
                scores, ids = self.teacher_logprobs[before:sampled], self.teacher_ids[before:sampled]
                row = replace(row, teacher_logprobs=scores, teacher_ids=ids)
            rows.append(row)
            start = end
        return rows


def expert_sums(experts: np.ndarray, known: np.ndarray, places: np.ndarray) -> list[int]:
    """Checksums of the experts that some tokens were routed to [N], so that two records can be compared.

    Args:
        experts: ids of all tokens' experts [T, layers, k].
        known: tokens whose experts are known, bool [T]; the checksum of others is `NO_EXPERTS`.
        places: positions of the tokens [N].
    """
    return [
        zlib.crc32(experts[place].astype(EXPERT_IDS[1]).tobytes()) if known[place] else NO_EXPERTS for place in places
    ]


def encode_payload(payload: Payload) -> bytes:
    """Pack a payload: about 4 bytes per token and 4 more per model token; experts take one or two bytes per id.

    A teacher's scores take 4 bytes per model token, or 8 for each of its likeliest tokens.
    """
    arrays = [
        np.ascontiguousarray(payload.token_ids, TOKEN).data.cast("B"),
        np.ascontiguousarray(payload.model_spans, TOKEN).tobytes(),
        np.ascontiguousarray(payload.logprobs, LOGPROB).data.cast("B"),
        np.ascontiguousarray(payload.version_spans, TOKEN).tobytes(),
        np.ascontiguousarray(payload.row_lengths, TOKEN).tobytes(),
    ]
    parts: dict[str, Any] = {}
    if len(payload.experts):
        experts = np.ascontiguousarray(payload.experts)
        parts["experts"] = (
            np.ascontiguousarray(payload.expert_lengths, TOKEN).tobytes(),
            np.asarray(experts.shape[1:], TOKEN).tobytes(),
            experts.astype(experts.dtype.newbyteorder("<"), copy=False).data.cast("B"),
        )
    if len(payload.teacher_logprobs):
        parts["teacher"] = (
            payload.teacher_logprobs.shape[1],
            np.ascontiguousarray(payload.teacher_logprobs, LOGPROB).data.cast("B"),
            np.ascontiguousarray(payload.teacher_ids, TOKEN).tobytes(),
        )
    return msgpack.packb((SCHEMA, *arrays, parts) if parts else (SCHEMA, *arrays))


def decode_payload(data: bytes) -> Payload:
    """Unpack and check a payload; the arrays are views of `data`. Raises `InvalidMessage`."""
    try:
        values = unpack(data, MAX_PAYLOAD, VALUES)
        schema, tokens, spans, logprobs, versions, rows = values[:6]
        parts = values[6] if len(values) > 6 else {}
        if schema != SCHEMA:
            raise InvalidMessage(f"Payload: schema {schema!r}, but this process reads {SCHEMA}")
        payload = Payload(
            np.frombuffer(tokens, TOKEN),
            np.frombuffer(spans, TOKEN).reshape(-1, 2),
            np.frombuffer(logprobs, LOGPROB),
            np.frombuffer(versions, TOKEN).reshape(-1, 3),
            np.frombuffer(rows, TOKEN),
            **(_decode_experts(*parts["experts"]) if "experts" in parts else {}),
            **(_decode_teacher(*parts["teacher"]) if "teacher" in parts else {}),
        )
    except InvalidMessage:
        raise
    except Exception as error:
        raise InvalidMessage(f"Payload: not a payload ({error or type(error).__name__})") from None
    check_payload(payload)
    return payload


def _decode_experts(lengths: bytes, shape: bytes, ids: bytes) -> dict[str, np.ndarray]:
    """The fields of the experts' ids; the first tokens of each row have them, and `lengths` says how many."""
    counts = np.frombuffer(lengths, TOKEN)
    tokens, (layers, chosen) = int(counts.sum(dtype=np.int64)), np.frombuffer(shape, TOKEN).tolist()
    for dtype in EXPERT_IDS:
        if min(tokens, layers, chosen) > 0 and len(ids) == tokens * layers * chosen * dtype.itemsize:
            return {"experts": np.frombuffer(ids, dtype).reshape(tokens, layers, chosen), "expert_lengths": counts}
    raise InvalidMessage(
        f"Payload: {len(ids)} bytes of experts, which {tokens} tokens, {layers} layers and {chosen} experts in each "
        "cannot have"
    )


def _decode_teacher(scores: int, logprobs: bytes, ids: bytes) -> dict[str, np.ndarray]:
    """The fields of a teacher's scores, `scores` of them for each token."""
    fields = {"teacher_logprobs": np.frombuffer(logprobs, LOGPROB).reshape(-1, scores)}
    return fields | ({"teacher_ids": np.frombuffer(ids, TOKEN).reshape(-1, scores)} if ids else {})


def decode_if_valid(data: bytes | None) -> Payload | None:
    """The payload, or None if it is missing or invalid, so that one bad sample stops nothing."""
    try:
        return decode_payload(data) if data else None
    except InvalidMessage:
        return None


def check_payload(payload: Payload) -> None:
    """Raise `InvalidMessage` for arrays that do not fit together, and for numbers that no model produces."""
    # Spans are few, and plain numbers are quicker than numpy on few.
    borders = [0, *payload.model_spans.ravel().tolist(), len(payload.token_ids)]
    if any(left > right for left, right in pairwise(borders)):
        raise InvalidMessage("Payload: model spans overlap or leave the tokens")
    if len(payload.row_lengths):
        _check_rows(payload)
    if len(payload.expert_lengths):
        _check_expert_lengths(payload)
    sampled = sum(borders[2:-1:2]) - sum(borders[1:-1:2])
    if sampled != len(payload.logprobs):
        raise InvalidMessage(f"Payload: {sampled} model tokens but {len(payload.logprobs)} log-probs")
    _check_logprobs(payload.logprobs, "log-probs")
    if len(payload.teacher_logprobs):
        _check_teacher(payload)
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


def _check_logprobs(logprobs: np.ndarray, what: str) -> None:
    if logprobs.size == 0:
        return
    least, most = logprobs.min().item(), logprobs.max().item()
    if not (math.isfinite(least) and math.isfinite(most)):
        raise InvalidMessage(f"Payload: {what} are not finite")
    if least < LEAST or most > MOST:
        raise InvalidMessage(f"Payload: {what} from {least:g} to {most:g}; those of a model are {LEAST:g} to 0")


def _check_teacher(payload: Payload) -> None:
    (tokens, scores), ids = payload.teacher_logprobs.shape, payload.teacher_ids
    if tokens != len(payload.logprobs):
        raise InvalidMessage(
            f"Payload: a teacher's scores of {tokens} tokens, but {len(payload.logprobs)} model tokens"
        )
    if ids.size and ids.shape != (tokens, scores):
        raise InvalidMessage(f"Payload: a teacher's scores of {tokens} tokens and ids of {len(ids)}")
    if ids.size == 0 and scores != 1:
        raise InvalidMessage(f"Payload: a teacher's scores of {scores} tokens a place, without their ids")
    if ids.size and ids.min() < 0:
        raise InvalidMessage("Payload: negative token ids of a teacher's")
    _check_logprobs(payload.teacher_logprobs, "a teacher's log-probs")


def _check_rows(payload: Payload) -> None:
    least, ends = payload.row_lengths.min(), np.cumsum(payload.row_lengths, dtype=np.int64)
    tokens = len(payload.token_ids)
    if least < 1 or ends[-1] != tokens:
        raise InvalidMessage(
            f"Payload: {len(ends)} rows, the shortest of {least} tokens, have {ends[-1]} of {tokens} tokens"
        )
    starts, stops = payload.model_spans.T
    if (np.searchsorted(ends, starts, "right") < np.searchsorted(ends, stops, "left")).any():
        raise InvalidMessage("Payload: a model span goes from one row into the next")


def _check_expert_lengths(payload: Payload) -> None:
    rows = payload.row_lengths.tolist() or [len(payload.token_ids)]
    lengths = payload.expert_lengths.tolist()
    if len(lengths) != len(rows) or any(
        not 0 <= length <= tokens for length, tokens in zip(lengths, rows, strict=True)
    ):
        raise InvalidMessage(f"Payload: experts of {lengths} tokens in rows of {rows} tokens")


def pack_record(episode: dict[str, Any]) -> bytes:
    """An episode as a record; if it is too long, it loses first its tokens, then the ends of its texts.

    `left_out` names what was lost. Values that JSON cannot represent become text (NaN and infinity: null); arrays of
    numbers become lists.
    """
    line = _line(episode)
    if line is None:
        episode = {name: value for name, value in episode.items() if name not in TOKENS} | {"left_out": ["tokens"]}
        line = _line(episode)
    for chars, items in ((20_000, 200), (1_000, 100)):
        if line is None:
            line = _line(_plain(episode | {"left_out": ["tokens", "text"]}, chars, items, _DEPTH))
    return zlib.compress(line or b'{"left_out": ["everything"]}', 3)


def open_record(record: bytes) -> bytes:
    """The line of a record: a JSON object in UTF-8 without a line break. Raises `InvalidMessage`."""
    decompressor = zlib.decompressobj()
    try:
        line = decompressor.decompress(record, MAX_RECORD)
    except zlib.error as error:
        raise InvalidMessage(f"record: {error}") from None
    if not decompressor.eof or line[:1] != b"{" or line[-1:] != b"}" or b"\n" in line:
        raise InvalidMessage("record: not one JSON object in one line")
    return line


def json_line(value: Any) -> str:
    """JSON without characters that readers take for line ends. Raises ValueError for NaN and infinity."""
    text = _ENCODE(value)
    for mark, escape in _LINE_ENDS.items():
        if mark in text:
            text = text.replace(mark, escape)
    return text


def _line(episode: dict[str, Any]) -> bytes | None:
    """The episode as JSON; None if it is longer than `MAX_LINE`, without building all of it."""
    try:
        return _joined(episode)
    except (TypeError, ValueError, RecursionError):
        return _joined(_plain(episode, MAX_LINE, MAX_LINE, _DEPTH))


def _joined(episode: dict[str, Any]) -> bytes | None:
    line = bytearray()
    for piece in _pieces(episode, 5):
        # Half a surrogate pair, which UTF-8 does not have, becomes an escape of JSON.
        line += piece.encode("utf-8", "backslashreplace")
        if len(line) > MAX_LINE:
            return None
    return bytes(line)


def _pieces(value: Any, depth: int) -> Iterator[str]:
    """JSON of a value; what is deeper than `depth` is short and comes in one piece."""
    if isinstance(value, str) and len(value) > _CHARS:
        yield '"'
        for start in range(0, len(value), _CHARS):
            yield json_line(value[start : start + _CHARS])[1:-1]
        yield '"'
    elif isinstance(value, np.ndarray):
        yield "["
        for start in range(0, len(value), _NUMBERS):
            yield ", " * (start > 0) + json_line(value[start : start + _NUMBERS].tolist())[1:-1]
        yield "]"
    elif isinstance(value, list) and depth:
        yield "["
        for i, item in enumerate(value):
            yield ", " * (i > 0)
            yield from _pieces(item, depth - 1)
        yield "]"
    elif isinstance(value, dict) and depth and all(isinstance(name, str) for name in value):
        yield "{"
        for i, (name, item) in enumerate(value.items()):
            yield f"{', ' * (i > 0)}{json_line(name)}: "
            yield from _pieces(item, depth - 1)
        yield "}"
    else:
        yield json_line(value)


def _plain(value: Any, chars: int, items: int, depth: int) -> Any:
    """The value as JSON has it, with texts of at most `chars` characters and lists of at most `items`."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int):
        return value if value.bit_length() < 64 else hex(value)[:chars]
    if isinstance(value, dict | list | tuple) and depth == 0:
        return "..."
    if isinstance(value, dict):
        some = islice(value.items(), items)
        return {str(name)[:chars]: _plain(item, chars, items, depth - 1) for name, item in some}
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item, chars, items, depth - 1) for item in value[:items]]
    return str(value)[:chars]
