"""What a message may hold at most: bytes, values, depth and numbers within which nothing overflows."""

from __future__ import annotations

import contextlib
import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages import Batch, InvalidMessage, Message, SampleHeader, Step, Task
from common.payload import Payload, decode_payload, encode_payload
from common.unpack import MAX_DEPTH, Unreadable, check, unpack
from common.weights.wire import unpack_reply, unpack_request

TOO_MUCH = {
    "empty maps": b"\xdd\x00\x98\x96\x80" + b"\x80" * 10_000_000,
    "empty maps in a column": b"\x81\xa3row" + b"\xdd\x00\x98\x96\x80" + b"\x80" * 10_000_000,
    "claims of more than there is": b"\xdd\x00\x90\x00\x00" * 1000 + b"\xc0" * (9 << 20),
    "claims of much in little": b"\xdc\xff\x00" * 900 + b"\xc0" * 65_000,
    "lists in lists": b"\x91" * 500_000 + b"\xc0",
    "a text longer than any message": b"\xdb\x02\x00\x00\x00" + b"x" * (32 << 20),
    "unknown fields": msgpack.packb({str(i): None for i in range(20_000)}),
    "numbers in place of texts": msgpack.packb({"batch_id": 0, "sample_ids": [0] * 200_000}),
}  # fmt: skip
READERS = {
    "task": Task.unpack,
    "header": SampleHeader.unpack,
    "batch": Batch.unpack,
    "step": Step.unpack,
    "payload": decode_payload,
    "weight request": unpack_request,
    "weight reply": unpack_reply,
}


@pytest.mark.parametrize("reader", READERS)
def test_too_much_is_refused_before_it_is_built(reader: str) -> None:
    for name, data in TOO_MUCH.items():
        tracemalloc.start()
        try:
            with pytest.raises(InvalidMessage):
                READERS[reader](data)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 96 << 20, f"{name}: {peak >> 20} MiB"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text()
        | st.binary(max_size=300),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner),
        max_leaves=50,
    ),
    st.booleans(),
)  # fmt: skip
def test_what_is_within_the_bounds_comes_back_as_it_was(value: Any, long: bool) -> None:
    # A long text in front has everything walked through.
    value = [value, "x" * 70_000 if long else ""]
    assert unpack(msgpack.packb(value)) == value


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
        SampleHeader,
        {"task_id": "t", "prompt_id": "p"},
        [
            {"tokens": 2**63}, {"tokens": 2**31}, {"model_tokens": 2**64 - 1}, {"newest_version": 2**31},
            {"oldest_version": 2**63, "newest_version": 2**63}, {"oldest_version": -1},
            {"oldest_version": 3, "newest_version": 2}, {"seconds": NAN}, {"seconds": INF}, {"seconds": -1.0},
            {"reward": 1e300}, {"reward_parts": {"exact": -1e300}}, {"drift": 1e300}, {"turns": -1},
            {"reward_parts": dict.fromkeys(map(str, range(1000)), 0.0)}, {"tool_calls": 2**40},
            {"turn_returns": [0.0] * 20_000, "turn_tokens": [0] * 20_000}, {"turn_rewards": [1e300]},
            {"turn_returns": [0.0], "turn_tokens": [-1]},
        ],
    ),
    (Task, {"task_id": "t", "prompt_id": "p", "prompt": "p"}, [{"min_version": -1}, {"min_version": 2**63}]),
    (
        Batch,
        {"batch_id": 0, "sample_ids": ["a"], "advantages": [0.0], "rewards": [0.0], "tokens": [1]},
        [{"batch_id": -1}, {"advantages": [NAN]}, {"advantages": [INF]}, {"tokens": [-5]}, {"tokens": [2**63]}],
    ),
    (Step, {"version": 1}, [{"version": -1}, {"version": 2**63}, {"drift": INF}, {"drift": NAN}]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "plain", "changes"), BEYOND, ids=lambda value: getattr(value, "__name__", ""))
def test_a_number_beyond_any_sense_is_refused(
    kind: type[Message], plain: dict[str, Any], changes: list[dict[str, Any]]
) -> None:
    kind.unpack(msgpack.packb(plain))
    for fields in changes:
        with pytest.raises(InvalidMessage, match="|".join(fields)):
            kind.unpack(msgpack.packb(plain | fields))


def payload(**changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "token_ids": np.arange(4),
        "model_spans": np.array([[1, 3]]),
        "logprobs": np.array([-0.5, -9.0]),
        "version_spans": np.array([[2, 0, 2]]),
    }
    return encode_payload(Payload(**(fields | changes)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"logprobs": np.array([0.5, -1.0])}, "log-probs from -1 to 0.5"),
        ({"logprobs": np.array([-3e38, -1.0])}, "log-probs from -3e\\+38"),
        ({"logprobs": np.array([-np.inf, -1.0])}, "not finite"),
        ({"version_spans": np.array([[-1, 0, 2]])}, "version -1"),
        ({"token_ids": np.array([0, -7, 2, 3])}, "negative token ids"),
        ({"model_spans": np.array([[-1, 1]])}, "spans"),
        ({"version_spans": np.array([[2, 0, 2], [1, 0, 1]])}, "do not follow one another"),
    ],
)
def test_a_payload_beyond_any_sense_is_refused(changes: dict[str, Any], reason: str) -> None:
    assert decode_payload(payload(logprobs=np.array([0.0, 1e-6]))).versions().tolist() == [2, 2]
    with pytest.raises(InvalidMessage, match=reason):
        decode_payload(payload(**changes))
