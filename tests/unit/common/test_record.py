"""Records of episodes: one line of JSON whatever is in it, and no larger than allowed."""

from __future__ import annotations

import json
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages import MAX_RECORD, InvalidMessage, SampleHeader
from common.payload import open_record, pack_record

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


def opened(story: dict[str, Any]) -> dict[str, Any]:
    record = pack_record(story)
    assert len(record) <= MAX_RECORD
    SampleHeader.unpack(SampleHeader(task_id="t", prompt_id="p", record=record).pack())
    line = open_record(record)
    assert len(line.decode().splitlines()) == 1
    return json.loads(line)


@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_what_json_has_comes_back(story: dict[str, Any]) -> None:
    assert opened(story) == story


def test_what_is_written_in_pieces_comes_back_whole() -> None:
    text = 'é\ud83d\\\n"' * 12_000
    story = {"output": text, "messages": [{"arguments": {"code": text, "more": [[text]]}}, {}, []], "": {}}
    numbers = {"token_ids": np.arange(5000), "model_spans": np.asarray([[0, 1], [3, 4]]), "logprobs": np.zeros(0)}
    lists = {name: array.tolist() for name, array in numbers.items()}
    assert opened(story | numbers) == story | lists
    # An array beside something that JSON does not have.
    assert opened(numbers | {"gts": {7}}) == lists | {"gts": "{7}"}


def test_lone_surrogates_and_control_characters_survive() -> None:
    text = "a\ud800b\x1b[2J\r\n\v\f\x1c\x1d\x1e\x85\u2028\u2029\x00"
    assert opened({"text": text})["text"] == text


def endless() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (float("nan"), None),
        (float("-inf"), None),
        pytest.param(10**5000, hex(10**5000), id="a very large number"),
        ({1, 2}, "{1, 2}"),
        ((1, "a"), [1, "a"]),
        ({(1, 2): "x"}, {"(1, 2)": "x"}),
        (b"\xff", "b'\\xff'"),
    ],
)
def test_what_json_does_not_have_becomes_text(value: Any, kept: Any) -> None:
    assert opened({"metadata": value}) == {"metadata": kept}


def test_a_list_in_itself_has_an_end() -> None:
    assert "..." in json.dumps(opened({"metadata": endless()}))


def test_too_long_an_episode_loses_its_tokens_first() -> None:
    story = {"output": "x" * 1000, "token_ids": list(range(500_000)), "logprobs": [0.5], "model_spans": [[0, 1]]}
    assert opened(story) == {"output": "x" * 1000, "left_out": ["tokens"]}


def test_then_the_ends_of_its_texts() -> None:
    kept = opened({"output": "y" * 10_000_000, "messages": [{"content": "z" * 3_000_000}] * 5, "gts": "7"})
    assert kept["left_out"] == ["tokens", "text"]
    assert kept["output"] == "y" * 20_000
    assert kept["gts"] == "7"


def test_and_what_is_too_long_in_every_way_is_left_out() -> None:
    text = "x" * 1000
    assert opened({"rows": [[text] * 100] * 100}) == {"left_out": ["everything"]}


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


def test_a_header_with_too_large_a_record_is_refused() -> None:
    header = SampleHeader.model_construct(task_id="t", prompt_id="p", record=bytes(MAX_RECORD + 1))
    with pytest.raises(InvalidMessage, match="record"):
        SampleHeader.unpack(header.pack())
