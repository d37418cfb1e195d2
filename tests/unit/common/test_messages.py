"""Messages and payloads: what goes in comes out, and what is wrong never passes."""

from __future__ import annotations

import contextlib
from itertools import pairwise

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages import Batch, InvalidMessage, Message, SampleHeader, Step, Task
from common.payload import Payload, decode_if_valid, decode_payload, encode_payload

MESSAGES: list[Message] = [
    Task(task_id="t1", prompt_id="p", prompt=[{"role": "user", "content": "é"}], answer=3, row={"level": 2}),
    SampleHeader(task_id="t1", prompt_id="p", reward=0.5, drift=0.01, record=b"{}", turn_rewards=[0.5]),
    SampleHeader(task_id="t1", prompt_id="p", turn_returns=[0.5, 1.0], turn_tokens=[3, 4]),
    Batch(
        batch_id=3,
        sample_ids=["a"],
        advantages=[0.1],
        rewards=[1.0],
        tokens=[5],
    ),
    Batch(batch_id=3, sample_ids=["a"], advantages=[0.1], rewards=[1.0], tokens=[5], turn_advantages=[[0.1, -0.5]]),
    Step(version=4, drift=0.001, metrics={"loss": 0.5}, checkpoint=True),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_the_same(message: Message) -> None:
    assert type(message).unpack(message.pack()) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_another_schema_version_is_refused(message: Message) -> None:
    fields = msgpack.unpackb(message.pack()) | {"v": 2}
    with pytest.raises(InvalidMessage, match="v:"):
        type(message).unpack(msgpack.packb(fields))


def test_unknown_and_mistyped_fields_are_refused() -> None:
    with pytest.raises(InvalidMessage, match="surprise"):
        Step.unpack(msgpack.packb({"version": 1, "surprise": 1}))
    with pytest.raises(InvalidMessage, match="reward"):
        SampleHeader.unpack(msgpack.packb({"task_id": "t", "prompt_id": "p", "reward": float("nan")}))
    columns = {name: [] for name in ("sample_ids", "rewards", "tokens")}
    uneven = msgpack.packb({"batch_id": 0, "advantages": [1.0], **columns})
    with pytest.raises(InvalidMessage, match="columns of different lengths"):
        Batch.unpack(uneven)
    turns = msgpack.packb({"batch_id": 0, "advantages": [], "turn_advantages": [[1.0]], **columns})
    with pytest.raises(InvalidMessage, match="columns of different lengths"):
        Batch.unpack(turns)
    header = {"task_id": "t", "prompt_id": "p", "turn_returns": [1.0, 0.5], "turn_tokens": [3]}
    with pytest.raises(InvalidMessage, match="2 turn_returns but 1 turn_tokens"):
        SampleHeader.unpack(msgpack.packb(header))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_an_invalid_message(data: bytes) -> None:
    for kind in (Task, SampleHeader, Batch, Step):
        with contextlib.suppress(InvalidMessage):
            assert isinstance(kind.unpack(data), kind)


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


def broken(**changes: object) -> bytes:
    fields: dict[str, object] = {
        "token_ids": np.arange(6, dtype=np.int32),
        "model_spans": np.array([[2, 4], [5, 6]], np.int32),
        "logprobs": np.zeros(3, np.float32),
        "version_spans": np.array([[0, 0, 2], [1, 2, 3]], np.int32),
    }
    return encode_payload(Payload(**(fields | changes)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\xc1", "not a payload"),
        (msgpack.packb((2, b"", b"", b"", b"")), "schema 2"),
        (broken(model_spans=np.array([[2, 4], [3, 4]], np.int32)), "overlap"),
        (broken(model_spans=np.array([[2, 4], [5, 7]], np.int32)), "leave the tokens"),
        (broken(logprobs=np.zeros(2, np.float32)), "3 model tokens but 2"),
        (broken(logprobs=np.array([0, np.nan, 0], np.float32)), "not finite"),
        (broken(version_spans=np.array([[0, 0, 1], [1, 2, 3]], np.int32)), "cover"),
        (broken(version_spans=np.zeros((0, 3), np.int32)), "cover"),
    ],
)
def test_a_payload_that_contradicts_itself_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(InvalidMessage, match=reason):
        decode_payload(data)
    assert decode_if_valid(data) is None


@given(st.binary(max_size=100))
def test_any_bytes_are_a_payload_or_none(data: bytes) -> None:
    decode_if_valid(data)
