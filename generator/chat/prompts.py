"""Renders prompts of the data as token ids, and checks that the model sees all of their text."""

from __future__ import annotations

import json
import re
import secrets
from typing import Any, ClassVar

import numpy as np

from common.config import DataConfig
from common.messages import Failure
from generator.chat.template import ChatTemplate, Message, TemplateFailed, as_messages

ROLES = ("system", "developer", "user", "assistant", "tool")
# Ends of thinking, which templates may leave out of earlier turns.
THOUGHT_END = re.compile(r"</(?:think|thinking|thought|reasoning|seed:think)>|\[/THINK\]|◁/think▷")


class UnusablePrompt(Exception):
    """A prompt that cannot be given to the model; another attempt would not help."""

    failure: ClassVar[Failure]

    def __init__(self, reason: str, details: str = "") -> None:
        super().__init__(f"{reason} ({details})" if details else reason)
        self.reason = reason  # the problem, in words that other prompts with the same problem share
        self.details = details  # what is particular to this prompt; may be empty


class PromptTooLong(UnusablePrompt):
    """The prompt has more tokens than `data.max_prompt_tokens`."""

    failure = Failure.PROMPT_TOO_LONG


class PromptNotSeen(UnusablePrompt):
    """The chat template cannot render the prompt, or the model would not see all of it."""

    failure = Failure.PROMPT_NOT_SEEN


class Prompts:
    """Renders the prompts of one source of the data; `data` is that source's section of the configuration."""

    def __init__(self, template: ChatTemplate, data: DataConfig) -> None:
        self.template, self.data = template, data
        self.unseen_call = ""  # the first call in a message that the template left out; empty if it left out none
        self._left_out: dict[tuple[Any, ...], int | None] = {}  # by form; see `_check_messages`

    def encode(self, prompt: str | list[Message], **variables: Any) -> np.ndarray:
        """Token ids of a prompt of any length, int32 [T]; raises `PromptNotSeen`.

        Args:
            variables: of the template, such as `tools`.
        """
        system, tokens = self.data.system_prompt, self.template.tokens
        try:
            rendered = self.template.rendered(prompt, system, markup=self.data.prompt_markup, **variables)
        except TemplateFailed as error:
            raise PromptNotSeen(str(error)) from None
        check_is_text(rendered, "the prompt")
        self._check_messages(as_messages(prompt, system), tokens.shown(rendered), is_chat=not isinstance(prompt, str))
        token_ids = tokens.encode(rendered)
        if lost := tokens.lost(rendered, token_ids):
            details = f"the text has {lost[0]!r} where the tokens have {lost[1]!r}"
            raise PromptNotSeen("the tokens of the rendered prompt do not decode to its text", details)
        return token_ids

    def _check_messages(self, messages: list[Message], rendered: str, is_chat: bool) -> None:
        """Raise `PromptNotSeen` if the rendered prompt lacks the text of a message.

        A short text may occur there by chance, so each form of conversation is also tried with random texts.
        """
        # The role of each message, its fields, and which of them are empty.
        form = tuple(
            (message["role"], *((name, bool(value)) for name, value in message.items())) for message in messages
        )
        if form not in self._left_out:
            self._left_out[form] = self._find_left_out(messages)
        for number, message in enumerate(messages):
            if number == self._left_out[form] or not shown_text(message, rendered):
                raise PromptNotSeen(self._why(messages, number, is_chat))
            if hidden := [name for name in called(message) if name not in rendered]:
                self.unseen_call = self.unseen_call or f"the call of {hidden[0]!r} in message {number + 1}"

    def _find_left_out(self, messages: list[Message]) -> int | None:
        """Position of the first message that the template leaves out whatever its text is; None if there is none."""
        marks = {n: f"text{secrets.token_hex(8)}" for n, message in enumerate(messages) if _text(message)}
        marked = [{**message, "content": marks.get(n, message.get("content"))} for n, message in enumerate(messages)]
        try:
            rendered = self.template.rendered(marked)
        except TemplateFailed:  # it accepts only certain texts
            return None
        return next((n for n, mark in marks.items() if mark not in rendered), None)

    def _why(self, messages: list[Message], number: int, is_chat: bool) -> str:
        role, template = messages[number]["role"], self.template.name
        whose = f"the text of message {number + 1} (role {role!r})"
        if not is_chat:
            whose = "the prompt" if number == len(messages) - 1 else "data.system_prompt"
        if not self._shows(role):
            roles = ", ".join(filter(self._shows, ROLES))
            return f"{whose} is not in the rendered prompt; roles that {template} shows are {roles or 'none'}"
        return f"{whose} is not in the rendered prompt: {template} leaves it out, or changes it"

    def _shows(self, role: str) -> bool:
        """Whether the template shows a message of a role at a usual place in a conversation."""
        mark = secrets.token_hex(8)
        user, shown = {"role": "user", "content": "u"}, {"role": role, "content": mark}
        conversations = {
            "user": [shown],
            "assistant": [user, shown, user],
            "tool": [user, {"role": "assistant", "content": "a"}, shown],
        }
        try:
            return mark in self.template.rendered(conversations.get(role, [shown, user]))
        except TemplateFailed:
            return False


def check_is_text(text: str, name: str) -> None:
    """Raise `PromptNotSeen` for a text that no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PromptNotSeen(f"{name} holds half a surrogate pair, which is not text") from None


def _text(message: Message) -> str:
    """The text of a message that every template must show, stripped."""
    text = str(message.get("content") or "")
    return (THOUGHT_END.split(text)[-1] if message["role"] == "assistant" else text).strip()


def shown_text(message: Message, rendered: str) -> bool:
    """Whether the text of a message is in what the template rendered, plain or escaped as in JSON."""
    text = _text(message)
    return text in rendered or any(json.dumps(text, ensure_ascii=ascii)[1:-1] in rendered for ascii in (False, True))


def called(message: Message) -> list[str]:
    """Names of the functions that a message calls."""
    calls = message.get("tool_calls")
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return [str(function["name"]) for function in functions if isinstance(function, dict) and function.get("name")]
