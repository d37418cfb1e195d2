"""Exact arithmetic on one short expression."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from generator.tools.base import ToolError

MAX_EXPRESSION = 200  # characters; keeps every number and every tree small

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
    """Evaluates + - * / // % and brackets over numbers."""

    name = "calculator"
    description = "Calculates the value of an arithmetic expression with + - * / // % and brackets."
    schema: dict[str, Any] = {  # noqa: RUF012
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "for example 12 * (3 + 4)"}},
        "required": ["expression"],
        "additionalProperties": False,
    }

    async def call(self, expression: str) -> str:
        value = calculate(expression)
        return str(int(value)) if value == int(value) else f"{value:.10g}"


def calculate(expression: str) -> float:
    """Evaluate + - * / // % and brackets over numbers; raises `ToolError` for anything else."""
    if len(expression) > MAX_EXPRESSION:
        raise ToolError(f"error: expression must be a string of at most {MAX_EXPRESSION} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError:
        raise ToolError("error: division by zero") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        raise ToolError("error: not an arithmetic expression") from None
    if isinstance(value, float) and not abs(value) < float("inf"):
        raise ToolError("error: not an arithmetic expression")
    return value


def _value(node: ast.AST) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.operand))
    raise ToolError("error: not an arithmetic expression")
