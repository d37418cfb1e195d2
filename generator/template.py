"""The chat template: the first prompt, and what stands between two assistant turns, as token ids."""

from __future__ import annotations

from typing import Any

import numpy as np

from common.errors import UserError

Message = dict[str, Any]

# A finished exchange to render tool results behind; its words never reach the model.
_EXCHANGE: list[Message] = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]


class ChatTemplate:
    """Renders messages by the tokenizer's own template. The past is never rendered again, only added to."""

    def __init__(self, tokenizer: Any, tool_schemas: list[dict[str, Any]] | None = None) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                f"the tokenizer of {tokenizer.name_or_path} has no chat template; add one to its tokenizer_config.json"
            )
        self._tokenizer = tokenizer
        self._tools = tool_schemas or None
        self.end = tokenizer.eos_token_id
        self._past = self._render(_EXCHANGE, generation=False)
        # Templates put text (a newline, say) behind the end-of-turn token; the model stops at the token itself.
        self._tail = self._past[self._past.rindex(tokenizer.eos_token) + len(tokenizer.eos_token) :]

    def prompt(self, messages: list[Message]) -> np.ndarray:
        """Token ids of a conversation that waits for the assistant, int32 [T]."""
        return self._ids(self._render(messages, generation=True))

    def tool_results(self, results: list[str]) -> np.ndarray:
        """Token ids from the end of an assistant turn, over the tools' results, to the next one's start, int32 [T]."""
        messages = [*_EXCHANGE, *({"role": "tool", "content": text} for text in results)]
        return self._ids(self._tail + self._render(messages, generation=True)[len(self._past) :])

    def text(self, token_ids: Any) -> str:
        """Text of sampled tokens, tags of tool calls included."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def answer(self, token_ids: Any) -> str:
        """Text of the last turn without special tokens."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True)).strip()

    def _render(self, messages: list[Message], generation: bool) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                messages, tools=self._tools, tokenize=False, add_generation_prompt=generation
            )
        )

    def _ids(self, text: str) -> np.ndarray:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)
