"""Fixed texts in the conversations of the tiny model; each is one token. Does not import torch."""

from __future__ import annotations

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
CALL_START = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "'
CALL_END = '"}}\n</tool_call>'
CODE_START = "<code>\n"
CODE_END = "\n</code>"


def calculator_call(expression: str) -> str:
    return CALL_START + expression + CALL_END


def code_call(program: str) -> str:
    return CODE_START + program + CODE_END
