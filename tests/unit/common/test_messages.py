"""Messages, payloads and records: what goes in comes out, and what is wrong never passes."""

from __future__ import annotations

import json
import zlib
from itertools import pairwise
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages import MAX_RECORD, Batch, InvalidMessage, Message, SampleHeader, Step, Task
from common.payload import Payload, decode_if_valid, decode_payload, encode_payload, open_record, pack_record

COLUMNS: dict[str, Any] = {"sample_ids": ["a"], "advantages": [0.1], "rewards": [1.0], "tokens": [5]}
HEADER: dict[str, Any] = {"task_id": "t1", "prompt_id": "p"}
MESSAGES: list[Message] = [
    Task(**HEADER, prompt=[{"role": "user", "content": "é"}], answer=3, row={"level": 2}),
    SampleHeader(**HEADER, reward=0.5, drift=0.01, record=b"{}", turn_rewards=[0.5]),
    SampleHeader(**HEADER, turn_returns=[0.5, 1.0], turn_tokens=[3, 4]),
    Batch(batch_id=3, **COLUMNS, turn_advantages=[[0.1, -0.5]]),
    Step(version=4, drift=0.001, metrics={"loss": 0.5}, checkpoint=True),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_the_same_and_another_schema_is_refused(message: Message) -> None:
    assert type(message).unpack(message.pack()) == message
    with pytest.raises(InvalidMessage, match="v:"):
        type(message).unpack(msgpack.packb(msgpack.unpackb(message.pack()) | {"v": 2}))


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        (Step, {"version": 1, "surprise": 1}, "surprise"),
        (SampleHeader, HEADER | {"reward": float("nan")}, "reward"),
        (SampleHeader, HEADER | {"record": bytes(MAX_RECORD + 1)}, "record"),
        (Batch, COLUMNS | {"batch_id": 0, "rewards": []}, "columns of different lengths"),
        (Batch, COLUMNS | {"batch_id": 0, "turn_advantages": []}, "columns of different lengths"),
        (SampleHeader, HEADER | {"turn_returns": [1.0, 0.5], "turn_tokens": [3]}, "2 turn_returns but 1 turn_tokens"),
    ],
)
def test_unknown_and_mistyped_fields_are_refused(kind: type[Message], fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidMessage, match=reason):
        kind.unpack(msgpack.packb(fields))


@st.composite
def payloads(draw: st.DrawFn) -> Payload:
    """Episodes of any shape: prompt, then turns of sampled tokens with other text between."""
    length, spans = draw(st.integers(1, 5)), []
    for _ in range(draw(st.integers(0, 4))):
        sampled = draw(st.integers(1, 6))
        spans.append((length, length + sampled))
        length += sampled + draw(st.integers(0, 5))
    total = sum(end - start for start, end in spans)
    cuts = sorted(draw(st.sets(st.integers(1, max(total - 1, 1)), max_size=3)) & set(range(1, total)))
    borders = [0, *cuts, total] if total else [0]
    versions = [(i, a, b) for i, (a, b) in enumerate(pairwise(borders))]
    return Payload(
        np.arange(length, dtype=np.int32),
        np.asarray(spans, np.int32).reshape(-1, 2),
        np.linspace(-3, 0, total, dtype=np.float32),
        np.asarray(versions, np.int32).reshape(-1, 3),
    )


@given(payloads())
def test_a_payload_comes_back_the_same(payload: Payload) -> None:
    decoded = decode_payload(encode_payload(payload))
    for name in ("token_ids", "model_spans", "logprobs", "version_spans"):
        np.testing.assert_array_equal(getattr(decoded, name), getattr(payload, name))
    assert decoded.mask().sum() == len(decoded.logprobs) == len(decoded.versions())


def broken(**changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "token_ids": np.arange(6),
        "model_spans": np.array([[2, 4], [5, 6]]),
        "logprobs": np.zeros(3),
        "version_spans": np.array([[0, 0, 2], [1, 2, 3]]),
    }
    return encode_payload(Payload(**(fields | changes)))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\xc1", "not a payload"),
        (msgpack.packb((2, b"", b"", b"", b"")), "schema 2"),
        (broken(model_spans=np.array([[2, 4], [3, 4]])), "overlap"),
        (broken(model_spans=np.array([[2, 4], [5, 7]])), "leave the tokens"),
        (broken(logprobs=np.zeros(2)), "3 model tokens but 2"),
        (broken(logprobs=np.array([0, np.nan, 0])), "not finite"),
        (broken(version_spans=np.array([[0, 0, 1], [1, 2, 3]])), "cover"),
        (broken(version_spans=np.zeros((0, 3))), "cover"),
    ],
)
def test_a_payload_that_contradicts_itself_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(InvalidMessage, match=reason):
        decode_payload(data)
    assert decode_if_valid(data) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


def opened(episode: dict[str, Any]) -> dict[str, Any]:
    record = pack_record(episode)
    assert len(record) <= MAX_RECORD
    line = open_record(record)
    assert len(line.decode().splitlines()) == 1
    return json.loads(line)


@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_what_json_has_comes_back_from_a_record(episode: dict[str, Any]) -> None:
    assert opened(episode) == episode


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


def test_too_long_an_episode_loses_its_tokens_then_its_texts_then_everything() -> None:
    tokens = {"token_ids": list(range(500_000)), "logprobs": [0.5], "model_spans": [[0, 1]]}
    assert opened({"output": "x" * 1000, **tokens}) == {"output": "x" * 1000, "left_out": ["tokens"]}
    kept = opened({"output": "y" * 10_000_000, "messages": [{"content": "z" * 3_000_000}] * 5, "gts": "7"})
    assert (kept["left_out"], kept["output"], kept["gts"]) == (["tokens", "text"], "y" * 20_000, "7")
    assert opened({"rows": [["x" * 1000] * 100] * 100}) == {"left_out": ["everything"]}


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"nonsense",
        zlib.compress(b"[1]"),
        zlib.compress(b'{"a":\n1}'),
        zlib.compress(b"{" + b" " * (MAX_RECORD * 50) + b"}"),
        pack_record({"a": "b" * 1000})[:-10],
    ],
)
def test_what_is_no_record_is_refused(record: bytes) -> None:
    with pytest.raises(InvalidMessage, match="record"):
        open_record(record)
