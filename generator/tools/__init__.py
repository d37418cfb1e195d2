"""Tools a model may call."""

from __future__ import annotations

from generator.tools.base import Session, Tool, ToolError, ToolUnavailable
from generator.tools.toolbox import Toolbox, ToolResult, ToolSession

__all__ = [
    "Session",
    "Tool",
    "ToolError",
    "ToolResult",
    "ToolSession",
    "ToolUnavailable",
    "Toolbox",
]
