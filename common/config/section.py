"""Base of the configuration's sections."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

LOCAL: dict[str, Any] = {"local": True}


def _as_word(value: Any) -> Any:
    if isinstance(value, bool):
        return "on" if value else "off"
    return value


ON_OFF = BeforeValidator(_as_word)  # of text that may be `on` or `off`, which YAML reads as true and false


class Section(BaseModel):
    """Unknown keys are errors, values are fixed once read."""

    model_config = ConfigDict(extra="forbid", frozen=True)
