"""Programs between <code> tags, answered by <interpreter> in the same turn."""

from __future__ import annotations

from generator.formats.base import MAX_CALLS, ToolCall

OPEN, CLOSE = "<code>", "</code>"
FENCE = "```"


class CodeBlocks:
    """Each block is a call of `code_interpreter`. A turn stops behind its first block and goes on after the output."""

    stop = (CLOSE,)
    wrap = ("<interpreter>\n", "\n</interpreter>\n\n")

    def find(self, text: str) -> list[ToolCall]:
        """The programs of a turn as the model wrote them, without fences; an unterminated block is none."""
        calls: list[ToolCall] = []
        end = 0
        while len(calls) <= MAX_CALLS:
            start = text.find(OPEN, end)
            end = text.find(CLOSE, start) if start >= 0 else -1
            if end < 0:
                break
            calls.append(ToolCall("code_interpreter", {"code": _unfenced(text[start + len(OPEN) : end])}))
            end += len(CLOSE)
        if not calls and text.rstrip().endswith(CLOSE):
            # The closing tag has ended the turn, so this is no answer but an incomplete call.
            calls.append(ToolCall("", error=f"error: {CLOSE} without {OPEN}"))
        return calls


def _unfenced(block: str) -> str:
    block = block.strip()
    if block.startswith(FENCE):
        block = block.removeprefix(FENCE).removeprefix("python")
    return block.removesuffix(FENCE).strip()
