"""Base of the configuration's sections."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

LOCAL: dict[str, Any] = {"local": True}


class Section(BaseModel):
    """Unknown keys are errors, values are fixed once read."""

    model_config = ConfigDict(extra="forbid", frozen=True)
