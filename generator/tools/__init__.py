"""Tools a model may call."""

from __future__ import annotations

from generator.tools.base import Session, Tool, ToolError, ToolUnavailable
from generator.tools.toolbox import EpisodeTools, Toolbox, ToolResult

__all__ = ["EpisodeTools", "Session", "Tool", "ToolError", "ToolResult", "ToolUnavailable", "Toolbox"]
