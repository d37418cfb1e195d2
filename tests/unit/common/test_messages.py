"""Messages, payloads and records: what goes in comes out, and what is wrong or too much never passes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages import MAX_RECORD, Batch, Ending, Failure, InvalidMessage, Message, SampleHeader, Step, Task
from common.payload import Payload, decode_if_valid, decode_payload, encode_payload, open_record, pack_record
from common.unpack import MAX_DEPTH, Unreadable, check, unpack
from common.weights.wire import unpack_reply, unpack_request
from tests.support.documented import section

COLUMNS: dict[str, Any] = {"sample_ids": ["a"], "advantages": [0.1], "rewards": [1.0], "tokens": [5]}
HEADER: dict[str, Any] = {"task_id": "t1", "prompt_id": "p"}
MESSAGES: list[Message] = [
    Task(**HEADER, prompt=[{"role": "user", "content": "é"}], answer=3, row={"level": 2}),
    SampleHeader(**HEADER, reward=0.5, drift=0.01, record=b"{}", turn_rewards=[0.5]),
    SampleHeader.skipped("t1", Failure.ENGINE_FAILED, "out of blocks"),
    Batch(batch_id=2, **COLUMNS, values=[0.5], returns=[[0.25, 1.0]]),
    Step(version=4, drift=0.001, metrics={"loss": 0.5}, checkpoint=True),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_another_schema_is_refused(message: Message) -> None:
    assert type(message).unpack(message.pack()) == message
    with pytest.raises(InvalidMessage, match="v:"):
        type(message).unpack(msgpack.packb(msgpack.unpackb(message.pack()) | {"v": 2}))


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        (Step, {"version": 1, "surprise": 1}, "surprise"),
        (SampleHeader, HEADER | {"failure": "EngineFailed: out of blocks"}, "failure"),
        (SampleHeader, HEADER | {"record": bytes(MAX_RECORD + 1)}, "record"),
        (Batch, COLUMNS | {"batch_id": 0, "rewards": []}, "columns of different lengths"),
        (Batch, COLUMNS | {"batch_id": 0, "values": [0.5]}, "values and returns come together"),
        (SampleHeader, HEADER | {"turn_returns": [1.0, 0.5], "turn_tokens": [3]}, "2 turn_returns but 1 turn_tokens"),
        (SampleHeader, HEADER | {"tokens": 5, "row_tokens": [2, 2]}, "2 rows, the shortest of 2 tokens, have 4 of 5"),
    ],
)
def test_unknown_and_mistyped_fields_are_refused(kind: type[Message], fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidMessage, match=reason):
        kind.unpack(msgpack.packb(fields))


def test_a_skipped_task_without_its_kind_of_failure_is_read() -> None:
    fields = HEADER | {"status": "set_aside", "reason": "ToolUnavailable: x"}
    assert SampleHeader.unpack(msgpack.packb(fields)).failure is None


@pytest.mark.parametrize(
    ("kinds", "document", "title"),
    [(Failure, "operations.md", "When an episode fails"), (Ending, "episodes.md", "Limits and endings")],
)
def test_every_kind_is_documented(kinds: type[Failure | Ending], document: str, title: str) -> None:
    named = re.findall(r"`(\w+)`", section(document, title))
    assert set(kinds) - {Ending.OTHER} <= set(named)


def example(rows: int, dtype: Any = np.uint8, scores: int = 0) -> Payload:
    """An episode of rows with a prompt, two turns and text between them; its experts and scores, if it has any."""
    starts, tokens = 10 * np.arange(rows, dtype=np.int32), 5 * rows
    spans = np.concatenate([[[start + 2, start + 5], [start + 7, start + 9]] for start in starts])
    versions = np.array([[0, 0, 4], [3, 4, tokens]])
    payload = Payload(np.arange(10 * rows), spans, np.linspace(-3, 0, tokens, dtype=np.float32), versions)
    if rows > 1:
        payload = dataclasses.replace(payload, row_lengths=np.full(rows, 10, np.int32))
    if scores:
        logprobs = np.linspace(-9, 0, tokens * scores, dtype=np.float32).reshape(tokens, scores)
        experts = np.arange(rows * 4 * 6).astype(dtype).reshape(-1, 3, 2)
        payload = dataclasses.replace(
            payload,
            experts=experts,
            expert_lengths=np.full(rows, 4, np.int32),
            teacher_logprobs=logprobs,
            teacher_ids=np.arange(logprobs.size, dtype=np.int32).reshape(logprobs.shape),
        )
    return payload


EXAMPLES = [example(1), example(3), example(1, np.uint16, scores=1), example(2, scores=3)]


@pytest.mark.parametrize("payload", EXAMPLES)
def test_a_payload_comes_back_the_same(payload: Payload) -> None:
    decoded = decode_payload(encode_payload(payload))
    for name in (field.name for field in dataclasses.fields(Payload)):
        np.testing.assert_array_equal(getattr(decoded, name), getattr(payload, name))
    assert decoded.experts.dtype == payload.experts.dtype
    assert decoded.mask().sum() == len(decoded.logprobs) == len(decoded.versions())


@pytest.mark.parametrize("payload", EXAMPLES)
def test_rows_of_a_payload_are_payloads_that_join_to_it(payload: Payload) -> None:
    rows = [decode_payload(encode_payload(row)) for row in payload.rows()]
    assert [len(row.token_ids) for row in rows] == (payload.row_lengths.tolist() or [len(payload.token_ids)])
    if len(payload.expert_lengths):
        assert [len(row.experts) for row in rows] == payload.expert_lengths.tolist()
        told = [row.experts for row in rows if len(row.experts)]
        np.testing.assert_array_equal(np.concatenate(told), payload.experts)
    parts = [lambda row: row.token_ids, lambda row: row.logprobs, Payload.mask, Payload.versions]
    if len(payload.teacher_logprobs):
        parts.append(lambda row: row.teacher_logprobs.ravel())
        parts.append(lambda row: row.teacher_ids.ravel())
    for part in parts:
        np.testing.assert_array_equal(np.concatenate([part(row) for row in rows]), part(payload))
    assert [span for row in rows for span in np.diff(row.model_spans)] == np.diff(payload.model_spans).tolist()


def broken(**changes: Any) -> bytes:
    arrays: dict[str, Any] = {
        "token_ids": np.arange(6),
        "model_spans": np.array([[2, 4], [5, 6]]),
        "logprobs": np.zeros(3),
        "version_spans": np.array([[0, 0, 2], [1, 2, 3]]),
    }
    return encode_payload(Payload(**(arrays | changes)))


def replayed(lengths: list[int], shape: tuple[int, ...], dtype: Any = np.uint8, **changes: Any) -> bytes:
    return broken(experts=np.zeros(shape, dtype), expert_lengths=np.array(lengths), **changes)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\xc1", "not a payload"),
        (msgpack.packb((2, b"", b"", b"", b"", b"")), "schema 2"),
        (broken(model_spans=np.array([[2, 4], [3, 4]])), "overlap"),
        (broken(model_spans=np.array([[2, 4], [5, 7]])), "leave the tokens"),
        (broken(logprobs=np.zeros(2)), "3 model tokens but 2"),
        (broken(logprobs=np.array([0, np.nan, 0])), "not finite"),
        (broken(version_spans=np.array([[0, 0, 1], [1, 2, 3]])), "cover"),
        (broken(logprobs=np.array([0.5, -1.0, -1.0])), "log-probs from -1 to 0.5"),
        (broken(logprobs=np.array([-3e38, -1.0, -1.0])), "log-probs from -3e\\+38"),
        (broken(version_spans=np.array([[-1, 0, 2], [1, 2, 3]])), "version -1"),
        (broken(version_spans=np.array([[2, 0, 2], [1, 0, 1]])), "do not follow one another"),
        (broken(token_ids=np.array([0, -7, 2, 3, 4, 5])), "negative token ids"),
        (broken(row_lengths=np.array([3, 3])), "a model span goes from one row into the next"),
        (broken(row_lengths=np.array([4, 0, 2])), "3 rows, the shortest of 0 tokens, have 6 of 6"),
        (encode_payload(Payload(*(np.zeros(0),) * 4))[:-1] + b"\x03abc", "not a payload"),
        (replayed([4], (4, 3, 2), np.uint32), "96 bytes of experts, which 4 tokens, 3 layers and 2 experts in each"),
        (replayed([5, -1], (4, 3, 2), row_lengths=np.array([4, 2])), "experts of \\[5, -1\\] tokens in rows of \\[4,"),
        (replayed([2], (2, 3, 2), row_lengths=np.array([4, 2])), "experts of \\[2\\] tokens in rows of \\[4, 2\\]"),
        (broken(teacher_logprobs=np.zeros((2, 1))), "a teacher's scores of 2 tokens, but 3 model tokens"),
        (broken(teacher_logprobs=np.zeros((3, 2))), "2 tokens a place, without their ids"),
        (broken(teacher_logprobs=np.zeros((3, 1)), teacher_ids=np.full((3, 1), -1)), "negative token ids of a teacher"),
        (broken(teacher_logprobs=np.array([[0.0], [0.5], [0.0]])), "a teacher's log-probs from 0 to 0.5"),
    ],
)
def test_a_payload_that_contradicts_itself_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(InvalidMessage, match=reason):
        decode_payload(data)
    assert decode_if_valid(data) is None
    assert decode_payload(broken(logprobs=np.array([0.0, 1e-6, -1.0]))).versions().tolist() == [0, 0, 1]


TOO_MUCH = {
    "empty maps": b"\xdd\x00\x1e\x84\x80" + b"\x80" * 2_000_000,
    "empty maps in a column": b"\x81\xa3row" + b"\xdd\x00\x1e\x84\x80" + b"\x80" * 2_000_000,
    "claims of more than there is": b"\xdd\x00\x90\x00\x00" * 1000 + b"\xc0" * (9 << 20),
    "claims of much in little": b"\xdc\xff\x00" * 900 + b"\xc0" * 65_000,
    "lists in lists": b"\x91" * 500_000 + b"\xc0",
    "a text longer than any message": b"\xdb\x02\x00\x00\x00" + b"x" * (32 << 20),
    "unknown fields": msgpack.packb({str(i): None for i in range(20_000)}),
    "numbers in place of texts": msgpack.packb({"batch_id": 0, "sample_ids": [0] * 200_000}),
}  # fmt: skip


READERS = [Task.unpack, SampleHeader.unpack, Batch.unpack, Step.unpack, decode_payload, unpack_request, unpack_reply]


@pytest.mark.integration  # computes for seconds
@pytest.mark.parametrize("read", READERS, ids=lambda read: getattr(read, "__self__", read).__name__)
def test_too_much_is_refused_before_it_is_built(read: Callable[[bytes], object]) -> None:
    for name, data in TOO_MUCH.items():
        tracemalloc.start()
        try:
            with pytest.raises(InvalidMessage):
                read(data)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 96 << 20, f"{name}: {peak >> 20} MiB"


@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_are_a_value_or_unreadable(data: bytes, long: bool) -> None:
    with contextlib.suppress(Unreadable):
        unpack((b"\x92\xdb\x00\x01\x11\x70" + b"x" * 70_000 if long else b"") + data)


def test_depth_is_bounded_in_short_messages_too() -> None:
    check(b"\x91" * MAX_DEPTH + b"\xc0")
    with pytest.raises(Unreadable, match="more than 100 deep"):
        check(b"\x91" * (MAX_DEPTH + 1) + b"\xc0")


NAN, INF = float("nan"), float("inf")
BEYOND: list[tuple[type[Message], dict[str, Any], list[dict[str, Any]]]] = [
    (
        SampleHeader, HEADER,
        [
            {"tokens": 2**31}, {"oldest_version": -1}, {"oldest_version": 3, "newest_version": 2}, {"seconds": INF},
            {"seconds": -1.0}, {"reward": 1e300}, {"reward_parts": {"exact": -1e300}}, {"drift": 1e300}, {"turns": -1},
            {"reward_parts": dict.fromkeys(map(str, range(1000)), 0.0)}, {"turn_rewards": [1e300]},
            {"turn_returns": [0.0] * 20_000, "turn_tokens": [0] * 20_000}, {"turn_returns": [0.0], "turn_tokens": [-1]},
        ],
    ),
    (Task, HEADER | {"prompt": "p"}, [{"min_version": -1}]),
    (Batch, COLUMNS | {"batch_id": 0}, [{"batch_id": -1}, {"advantages": [NAN]}, {"tokens": [-5]}]),
    (Step, {"version": 1}, [{"version": 2**63}, {"drift": NAN}]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "plain", "changes"), BEYOND, ids=lambda value: getattr(value, "__name__", ""))
def test_a_number_beyond_any_sense_is_refused(kind: type[Message], plain: dict[str, Any], changes: list[Any]) -> None:
    kind.unpack(msgpack.packb(plain))
    for fields in changes:
        with pytest.raises(InvalidMessage, match="|".join(fields)):
            kind.unpack(msgpack.packb(plain | fields))


def opened(episode: dict[str, Any]) -> dict[str, Any]:
    record = pack_record(episode)
    assert len(record) <= MAX_RECORD
    line = open_record(record)
    assert len(line.decode().splitlines()) == 1
    return json.loads(line)


def test_what_is_written_in_pieces_comes_back_whole() -> None:
    text = 'é\ud83d\\\n"\ud800\x1b[2J\r\v\f\x1c\x1d\x1e\x85\u2028\u2029\x00' * 5_000
    episode = {"output": text, "messages": [{"arguments": {"code": text, "more": [[text]]}}, {}, []], "": {}}
    numbers = {"token_ids": np.arange(5000), "model_spans": np.asarray([[0, 1], [3, 4]]), "logprobs": np.zeros(0)}
    lists = {name: array.tolist() for name, array in numbers.items()}
    assert opened(episode | numbers) == episode | lists
    # An array beside something that JSON does not have.
    assert opened(numbers | {"gts": {7}}) == lists | {"gts": "{7}"}


def test_what_json_does_not_have_becomes_text() -> None:
    loop: list[Any] = []
    loop.append(loop)
    for value, kept in (
        (float("nan"), None),
        (float("-inf"), None),
        (10**5000, hex(10**5000)),
        ({1, 2}, "{1, 2}"),
        ((1, "a"), [1, "a"]),
        ({(1, 2): "x"}, {"(1, 2)": "x"}),
        (b"\xff", "b'\\xff'"),
    ):
        assert opened({"metadata": value}) == {"metadata": kept}
    assert "..." in json.dumps(opened({"metadata": loop}))


@pytest.mark.integration  # computes for seconds
def test_too_long_an_episode_loses_tokens_then_texts() -> None:
    tokens = {"token_ids": list(range(500_000)), "logprobs": [0.5], "model_spans": [[0, 1]]}
    assert opened({"output": "x" * 1000, **tokens}) == {"output": "x" * 1000, "left_out": ["tokens"]}
    kept = opened({"output": "y" * 10_000_000, "messages": [{"content": "z" * 3_000_000}] * 5, "gts": "7"})
    assert (kept["left_out"], kept["output"], kept["gts"]) == (["tokens", "text"], "y" * 20_000, "7")
    assert opened({"rows": [["x" * 1000] * 100] * 100}) == {"left_out": ["everything"]}


ENDLESS = zlib.compress(b"{" + b" " * (MAX_RECORD * 50) + b"}")
NO_RECORDS = [b"", zlib.compress(b'{"a":\n1}'), ENDLESS, pack_record({"a": "b" * 1000})[:-10]]


@pytest.mark.parametrize("record", NO_RECORDS)
def test_what_is_no_record_is_refused(record: bytes) -> None:
    with pytest.raises(InvalidMessage, match="record"):
        open_record(record)
