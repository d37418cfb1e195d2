"""Checks what a model passes to a tool by the tool's JSON schema."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from jsonschema import ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import Draft202012Validator, extend, validator_for


def make_validator(schema: dict[str, Any]) -> Validator:
    """A validator that takes time linear in the arguments, as far as the schema's patterns do."""
    kind = validator_for(schema, default=Draft202012Validator)
    # The library's own compares every object with every other: minutes for what a model writes in one call.
    made: Validator = extend(kind, {"uniqueItems": _unique})(schema)
    return made


def _unique(validator: Validator, unique: bool, items: Any, schema: Any) -> Iterator[ValidationError]:
    if not unique or not validator.is_type(items, "array"):
        return
    seen = set()
    for item in items:
        key = _key(item)
        if key in seen:
            yield ValidationError(f"{items!r} has non-unique elements")
            return
        seen.add(key)


def _key(value: Any) -> Hashable:
    """The same for values that are equal in JSON schema: 1 is 1.0, and true is no number."""
    if isinstance(value, dict):
        return frozenset((name, _key(item)) for name, item in value.items())
    if isinstance(value, list):
        return tuple(_key(item) for item in value)
    return (bool, value) if isinstance(value, bool) else value
