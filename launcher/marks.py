"""The fixed texts of a tiny model's conversations; each is one of its tokens. Imports no torch."""

from __future__ import annotations

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
CALL_START = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "'
CALL_END = '"}}\n</tool_call>'
CODE_START = "<code>\n"
CODE_END = "\n</code>"


def calculator_call(expression: str) -> str:
    """A call of the calculator, as the model writes it."""
    return CALL_START + expression + CALL_END


def code_call(program: str) -> str:
    """A program to be run, as the model writes it."""
    return CODE_START + program + CODE_END
