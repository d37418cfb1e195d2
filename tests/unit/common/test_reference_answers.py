"""Reference answers: a number is the same answer whichever type the data has for it."""

from __future__ import annotations

from typing import Any

import numpy as np

from common.answers import answer_kind, answer_text, are_mixed, is_missing, normal_answer


def test_numbers_and_booleans_are_text_whatever_their_type() -> None:
    for answer in (79, "79", 79.0, np.int64(79), np.int8(79), np.float32(79), np.float64(79.0)):
        assert normal_answer(answer) == "79"
    texts: list[tuple[Any, str]] = [
        (-3, "-3"), (-0.0, "0"), (0.5, "0.5"), (-2.25, "-2.25"), (1e-05, "0.00001"),
        (1e22, "10000000000000000000000"), (2**70, "1180591620717411303424"), (float("inf"), "inf"),
        (True, "True"), (np.False_, "False"), ("79.0", "79.0"), (" 79 ", " 79 "),
    ]  # fmt: skip
    for answer, text in texts:
        assert normal_answer(answer) == answer_text(answer) == text


def test_lists_and_mappings_are_compared_as_json() -> None:
    for answer in ([1, "a"], {"inputs": ["1"], "outputs": ["2"]}):
        assert normal_answer(answer) is answer
    assert answer_text([1, "é", None]) == '[1, "é", null]'
    assert answer_text({"a": [2.0]}) == '{"a": [2.0]}'


def test_what_is_blank_is_no_answer_and_zero_and_false_are() -> None:
    assert all(map(is_missing, (None, "", "  ", float("nan"), np.float64("nan"), [], {})))
    assert not any(map(is_missing, (0, 0.0, False, "0", [0], {"a": None})))


def test_types_that_no_reward_compares_alike_are_mixed() -> None:
    kinds = [answer_kind(answer) for answer in (1, 2.5, np.int64(3), "4", True, [5], {"a": 6})]
    assert kinds == ["number", "number", "number", "text", "boolean", "list", "mapping"]
    assert not are_mixed({"number", "text"})
    assert are_mixed({"number", "boolean"})
    assert are_mixed({"text", "list"})
