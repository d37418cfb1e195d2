"""Tools a model may call. A tool is any class with `name`, `schema` and an async `call(**arguments)`."""

from __future__ import annotations

import ast
import asyncio
import operator
from collections.abc import Callable
from typing import Any, Protocol

from common.plugins import load_object
from generator.tool_calls import ToolCall


class Tool(Protocol):
    """What the generator asks of a tool."""

    name: str
    # The JSON schema of its arguments, as chat templates show it to the model.
    schema: dict[str, Any]

    async def call(self, *positional: Any, **arguments: Any) -> str:
        """The result as text. A ValueError's or TypeError's text goes to the model; other errors retry the task."""
        ...


_OPERATORS: dict[type, Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class Calculator:
    """Exact arithmetic on one short expression."""

    name = "calculator"
    schema: dict[str, Any] = {  # noqa: RUF012
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "for example 12 * (3 + 4)"}},
        "required": ["expression"],
    }

    async def call(self, expression: str) -> str:
        """Value of `expression`; whole numbers without a decimal point."""
        value = calculate(expression)
        return str(int(value)) if value == int(value) else f"{value:.10g}"


def calculate(expression: str) -> float:
    """Evaluate + - * / // % and brackets over numbers.

    Raises:
        ValueError: anything else; the text is short enough to show to a model.
    """
    if not isinstance(expression, str) or len(expression) > 200:
        raise ValueError("error: expression must be a string of at most 200 characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError:
        raise ValueError("error: division by zero") from None
    except (SyntaxError, RecursionError, MemoryError, OverflowError):
        raise ValueError("error: not an arithmetic expression") from None
    if isinstance(value, float) and not abs(value) < float("inf"):
        raise ValueError("error: not an arithmetic expression")
    return value


def _value(node: ast.AST) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.operand))
    raise ValueError("error: not an arithmetic expression")


BUILTIN: dict[str, Callable[[], Tool]] = {"calculator": Calculator}


class Toolbox:
    """The tools of a run, by name."""

    def __init__(self, names: list[str], max_text: int) -> None:
        tools = [load_object(name, BUILTIN, "episode.tools")() for name in names]
        self._tools: dict[str, Tool] = {tool.name: tool for tool in tools}
        self._max_text = max_text

    def schemas(self) -> list[dict[str, Any]]:
        """Function schemas for the chat template."""
        return [
            {"type": "function", "function": {"name": tool.name, "parameters": tool.schema}}
            for tool in self._tools.values()
        ]

    async def run(self, calls: list[ToolCall]) -> list[str]:
        """Run the calls of one turn concurrently; results in call order, each cut to the limit."""
        return [text[: self._max_text] for text in await asyncio.gather(*(self._one(call) for call in calls))]

    async def _one(self, call: ToolCall) -> str:
        tool = self._tools.get(call.name)
        if call.error:
            return call.error
        if tool is None:
            return f"error: no tool named {call.name[:40]!r}; there is {', '.join(self._tools) or 'none'}"
        try:
            return str(await tool.call(**call.arguments))
        except (ValueError, TypeError) as error:
            return str(error) or "error: wrong arguments"
