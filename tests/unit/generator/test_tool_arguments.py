"""Arguments are checked as JSON schema says, however many there are."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from generator.tools.toolbox import make_validator

UNIQUE = {"type": "object", "properties": {"items": {"uniqueItems": True}}}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 2) | st.sampled_from([0.0, 1.0, 1.5, "", "1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=6,
)


@given(st.lists(JSON, max_size=6))
def test_equal_items_are_those_of_json_schema(items: list[Any]) -> None:
    checked = make_validator(UNIQUE)
    assert checked.is_valid({"items": items}) == Draft202012Validator(UNIQUE).is_valid({"items": items})


def test_the_finding_is_the_library_s() -> None:
    for schema in (UNIQUE, {"$schema": "http://json-schema.org/draft-04/schema#", "uniqueItems": True}):
        arguments: Any = {"items": [{"a": 1}, {"a": 1}]} if "properties" in schema else [[1], [1.0]]
        (error,) = make_validator(schema).iter_errors(arguments)
        items = arguments["items"] if isinstance(arguments, dict) else arguments
        assert error.message == f"{items!r} has non-unique elements"


@pytest.mark.parametrize("wanted", [{"uniqueItems": False}, {}])
def test_what_the_schema_does_not_ask_for_is_not_checked(wanted: dict[str, Any]) -> None:
    assert make_validator(wanted).is_valid([1, 1])
    assert make_validator({"uniqueItems": True}).is_valid("aa")


def test_many_objects_are_not_compared_with_one_another() -> None:
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    def steps(items: int) -> int:
        nonlocal calls
        calls = 0
        rows = [{"a": i} if i % 2 else [i] for i in range(items)]
        sys.setprofile(count)
        try:
            assert make_validator(UNIQUE).is_valid({"items": rows})
        finally:
            sys.setprofile(None)
        return calls

    few, many, more = steps(0), steps(1000), steps(2000)
    assert more - few <= 2.1 * (many - few)
