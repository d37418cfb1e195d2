"""Renders the first prompt, and the text between two assistant turns, as token ids."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError
from generator.token_text import TokenText

Message = dict[str, Any]

TEMPLATE_FILES = ("chat_template.jinja", "tokenizer_config.json")
# Stands in for the model's text in the conversation after which later turns are rendered.
_PLACEHOLDER = f"answer {secrets.token_hex(8)}"


# A conversation to render after, where what was said before does not matter.
EXCHANGE: Sequence[Message] = ({"role": "user", "content": "u"}, {"role": "assistant", "content": ""})


class TemplateFailed(Exception):
    """The chat template raised, or the conversation that it rendered lacks the assistant's turn."""


def as_messages(prompt: str | list[Message], system: str | None) -> list[Message]:
    """A prompt as chat messages; where it is text, `system` becomes a message in front of it."""
    if not isinstance(prompt, str):
        return prompt
    return [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": prompt}]


class ChatTemplate:
    """Renders messages with the tokenizer's own template. Earlier turns are never rendered again.

    Attributes:
        end, end_id: the special token that ends an assistant turn, which the model samples itself, and its id.
        eos_id: the token at which vLLM stops by default.

    Raises:
        UserError: there is no template, it raises, or it does not end turns with a special token.
    """

    def __init__(self, tokenizer: Any, tool_schemas: list[dict[str, Any]] | None = None) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                f"the tokenizer of {tokenizer.name_or_path} has no chat template; add one to its tokenizer_config.json"
            )
        self._tokenizer = tokenizer
        self._tools = tool_schemas or None
        self._tokens = TokenText(tokenizer)
        try:
            end = self._tokens.first_special(self._after_answer(EXCHANGE, [{"role": "user", "content": "u"}]))
        except TemplateFailed as error:
            raise UserError(str(error)) from None
        if end is None:
            raise UserError(
                f"the chat template of {tokenizer.name_or_path} ends the assistant's turns without a special token"
            )
        self.end, self.end_id, self.eos_id = end, self._tokens.id(end), tokenizer.eos_token_id

    def require(self, role: str, field: str, otherwise: str) -> None:
        """Raise `UserError` unless the template shows messages of this role after an assistant turn."""
        try:
            is_shown = "89" in self._after_answer(EXCHANGE, [{"role": role, "name": "calculator", "content": "89"}])
            reason = "leaves them out"
        except TemplateFailed as error:
            is_shown, reason = False, f"says: {error.__cause__ or error}"
        if not is_shown:
            raise UserError(
                f"{field} needs a chat template that shows {role!r} messages after an assistant turn, and the "
                f"template of {self._tokenizer.name_or_path} {reason}; use another template, {otherwise}"
            )

    def prompt(
        self, prompt: str | list[Message], system: str | None = None, *, markup: bool = False, **variables: Any
    ) -> np.ndarray:
        """Token ids of a conversation that waits for the assistant, int32 [T].

        Args:
            prompt, system: see `as_messages`; markup in the system message counts.
            markup: whether markup in the prompt counts too; else it is encoded as plain text.
            variables: of the template, `tools` among them, in place of those of this object.
        """
        shown = prompt if markup else self._tokens.hide(prompt)
        return self._tokens.encode(self._render(as_messages(shown, system), variables))

    def between(
        self,
        messages: Sequence[Message],
        before: Sequence[Message] = EXCHANGE,
        *,
        markup: bool = False,
        **variables: Any,
    ) -> np.ndarray:
        """Token ids from the end of an assistant turn, over messages, to the start of the next one, int32 [T].

        Args:
            before: the conversation up to that turn, which is its last message.
            markup, variables: see `prompt`.

        Raises:
            TemplateFailed: see the class.
        """
        if not markup:
            messages, before = self._tokens.hide(list(messages)), self._tokens.hide(list(before))
        _, end, following = self._after_answer(before, messages, variables).partition(self.end)
        if not end:
            raise TemplateFailed(f"{self._name()} does not end the assistant's turn with {self.end}")
        # Encoded with the end token in front, as the model will see it; that token is then dropped.
        return self._tokens.encode(end + following)[1:]

    def plain(self, text: str) -> str:
        """The text, for a prompt in which markup counts, with its own markup hidden so that it is encoded as text."""
        return str(self._tokens.hide(text))

    def inside(self, texts: Sequence[str], wrap: tuple[str, str]) -> np.ndarray:
        """Token ids of texts to append within an assistant turn, each between the strings of `wrap`, int32 [T].

        Markup in the texts is encoded as plain text.
        """
        before, after = wrap
        whole = "".join(f"{before}{self._tokens.hide(text)}{after}" for text in texts)
        # Some tokenizers put a space before the first word of a text; after a token it is not the first.
        return self._tokens.encode(self.end + whole)[1:]

    def text(self, token_ids: Any, *, plain: bool = False) -> str:
        """Text of tokens [T]; `plain` leaves special ones out."""
        return self._tokens.decode(np.asarray(token_ids, np.int32), plain=plain)

    def ends(self, token_ids: np.ndarray) -> bool:
        """Whether the last of an assistant turn's tokens is a special one, which has ended it."""
        return bool(self._tokens.special(token_ids[-1:]).any())

    def turn(self, token_ids: np.ndarray) -> tuple[str, str]:
        """Text of an assistant turn without the token that ended it: as it was written, and without special tokens."""
        turn_ids = token_ids[:-1] if len(token_ids) and token_ids[-1] == self.end_id else token_ids
        written = self.text(turn_ids)
        has_special = self._tokens.special(turn_ids).any()
        return written, self.text(turn_ids, plain=True) if has_special else written

    def _after_answer(
        self, before: Sequence[Message], messages: Sequence[Message], variables: dict[str, Any] | None = None
    ) -> str:
        """What the template renders after the text of an assistant's turn, the last one of `before`."""
        *earlier, turn = before
        # Some templates leave out the text of a turn that calls tools, others ask for the call before its result.
        for shown in (turn, {"role": "assistant"}):
            answer = {**shown, "content": _PLACEHOLDER}
            rendered = self._render([*earlier, answer, *messages], variables or {})
            if _PLACEHOLDER in rendered:
                return rendered[rendered.index(_PLACEHOLDER) + len(_PLACEHOLDER) :]
        raise TemplateFailed(f"{self._name()} leaves out what the assistant says")

    def _render(self, messages: list[Message], variables: dict[str, Any]) -> str:
        options: dict[str, Any] = {"tools": self._tools, **variables, "tokenize": False, "add_generation_prompt": True}
        try:
            return str(self._tokenizer.apply_chat_template(messages, **options))
        except Exception as error:  # errors of its own, of Jinja's, or of the expressions in it
            raise TemplateFailed(f"{self._name()} fails: {type(error).__name__}: {error}") from error

    def _name(self) -> str:
        folder = Path(self._tokenizer.name_or_path)
        files = [file for name in TEMPLATE_FILES if (file := folder / name).is_file()]
        return f"the chat template of {folder}" + (f" ({files[0]})" if files else "")
